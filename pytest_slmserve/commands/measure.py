"""`measure`: loads on a server that already runs, without pytest; the same client, checks and records."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.metrics.goodput import slo_of_requests
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.metrics.window import steps_of
from pytest_slmserve.analysis.sweep.peak_goodput import ATTAINMENT
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.commands import measure_loads
from pytest_slmserve.commands.cli import FAILS, HOLDS, USAGE, Commands, add_command, add_formats, add_goodput, add_html
from pytest_slmserve.commands.measure_loads import Asked, asked, some_seconds
from pytest_slmserve.engines.endpoint import EndpointEngine, only_model
from pytest_slmserve.engines.load_client import TIMEOUT_S
from pytest_slmserve.engines.loadgen.schedules import FAILED_SHARE as MOST_FAILED
from pytest_slmserve.report import loads
from pytest_slmserve.report.as_json import as_csv, as_json
from pytest_slmserve.report.export.vllm_bench import Export, export_to
from pytest_slmserve.report.live_line import LiveLine, Status, left_text
from pytest_slmserve.report.loads import ValidityCriteria, rows_of_load
from pytest_slmserve.report.page.content import Part
from pytest_slmserve.report.page.writer import check_replaceable, template, write_section
from pytest_slmserve.report.text_table import folded
from pytest_slmserve.run.measure import measure
from pytest_slmserve.schema.errors import BadArchive, BadUsage, of_a_command
from pytest_slmserve.schema.loads import Load
from pytest_slmserve.schema.records import Measurement, Progress
from pytest_slmserve.schema.secret_words import holds_secret, names_secret
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.schema.urls import KEY, completed
from pytest_slmserve.telemetry.host_probe import this_host

SHOWN = 100  # characters of what cannot be read
STATUS = (
    f"{HOLDS} measured, and all of it valid; {FAILS} measured, but not all valid or not all in the archive, or broken "
    f"off; {USAGE} wrong usage, or no server that streams."
)


def add(commands: Commands) -> None:
    command = add_command(commands, "measure", "measure loads on a server that runs", STATUS, measure_all)
    url = "URL of the server, or of its /v1/chat/completions; its key is read from SLM_ENDPOINT_KEY"
    command.add_argument("--endpoint", metavar="URL", required=True, help=url)
    command.add_argument("--model", metavar="NAME", help="model, as the server calls it (default: its only one)")
    measure_loads.add_arguments(command)
    add_goodput(command)
    enough = f"share of good requests that is enough, of several rates or steps (default: {ATTAINMENT:g})"
    command.add_argument("--attainment", metavar="SHARE", type=float, help=enough)
    failed = (
        f"share of requests that may fail without making a measurement invalid, {MOST_FAILED:g} at most (default: 0)"
    )
    command.add_argument("--allow-failed", metavar="SHARE", type=float, default=0.0, help=failed)
    lasts = f"seconds that a request may last before it counts as failed (default: {TIMEOUT_S:g})"
    command.add_argument("--timeout", metavar="S", type=some_seconds, default=TIMEOUT_S, help=lasts)
    shared = "client processes that share a load; one receives some 100,000 tokens/s (default: 1)"
    command.add_argument("--processes", metavar="N", type=int, default=1, help=shared)
    body = 'further fields of each request, as JSON; null takes one away: {"ignore_eos": null}'
    command.add_argument("--extra-body", metavar="JSON", type=json_object, default={}, help=body)
    may = "measure prompts that come from a cache of prefixes too; without it that is not valid"
    command.add_argument("--allow-prefix-cache", action="store_true", help=may)
    records = "archive to append the records to (default: .slm/records.jsonl)"
    command.add_argument("--records", metavar="PATH", type=Path, default=Path(".slm/records.jsonl"), help=records)
    saved = "also write each result as `vllm bench serve` does: vllm-bench=FOLDER/ or vllm-bench=FILE.json"
    command.add_argument("--export", metavar="WHAT=PATH", help=saved)
    add_formats(command, "each load, or step of a ramp")
    add_html(command)


def json_object(text: str) -> dict[str, Any]:
    """Raises BadUsage where it is none, and, without repeating it, where a name in it says that it holds a secret."""
    names: list[str] = []

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names.extend(name for name, _ in pairs)
        return dict(pairs)

    try:
        found = json.loads(text, object_pairs_hook=noted)
    except (ValueError, RecursionError):
        found = None
    secret = next(filter(names_secret, names), None)
    if secret or holds_secret(text):
        named = f"a secret, {secret!r}," if secret else "what looks like a secret,"
        raise BadUsage(f"--extra-body holds {named} and it goes into records", f"{KEY}=... instead")
    if not isinstance(found, dict):
        raise BadUsage(f"--extra-body {text[:SHOWN]} is no JSON object", """--extra-body '{"top_k": 1}'""")
    return found


def measure_all(given: argparse.Namespace) -> int:
    """Serve, store, print."""
    terms = terms_of(given)
    export = export_to(given.export, terms.slo) if given.export else None
    if export and export.path == given.records:
        raise BadUsage(f"--export {given.export} would write into the records", "--export with another path")
    if given.html:  # what cannot be written is said before anything is measured
        template()
        check_replaceable(given.html)
    given.model = given.model or only_model(completed(given.endpoint), given.timeout)
    own_prompts = given.seed is None  # who gives one wants the very requests again
    wanted = asked(given)
    if given.attainment is not None and len(wanted) == 1 and not given.ramp:
        raise BadUsage("--attainment is of several rates or steps", "--request-rate 10,20,40")
    if given.processes < 1:
        raise BadUsage(f"--processes {given.processes} send nothing", "--processes 2")
    found, moved = measured(given, wanted, export, own_prompts)
    if given.csv:
        print(as_csv(row for m in found for row in rows_of_load(m, terms)), end="")
    else:
        print(page(found, terms, given.json))
    if moved:
        print(f"error: {moved.replace('--slm-', '--')}", file=sys.stderr)
    status = HOLDS if not moved and all(valid(each, terms) for each in found) else FAILS
    if given.html:
        part = Part(given.model, "good" if status == HOLDS else "bad", [], [], page(found, terms, as_object=False))
        write_section(given.html, "Load", [part], found, [given.records], status=status)
    return status


def terms_of(given: argparse.Namespace) -> ValidityCriteria:
    attainment = ATTAINMENT if given.attainment is None else given.attainment
    if not 0 < attainment <= 1:
        raise BadUsage(f"--attainment {attainment:g} is no share of requests", f"--attainment {ATTAINMENT:g}")
    if not 0 <= given.allow_failed <= MOST_FAILED:
        problem = (
            f"--allow-failed {given.allow_failed:g}: the client gives a load up where more than {MOST_FAILED:g} fail"
        )
        raise BadUsage(problem, "--allow-failed 0.01")
    return ValidityCriteria(slo_of_requests(given.goodput), attainment, given.allow_failed)


def measured(
    given: argparse.Namespace, wanted: Asked, export: Export | None, own_prompts: bool
) -> tuple[list[Measurement], str]:
    """One after the other, each in the archive when the next begins; and why they are in another file, if they are.
    own_prompts: no prompt comes again."""
    may = given.allow_prefix_cache
    further = tuple((name, json.dumps(value)) for name, value in sorted(given.extra_body.items()))
    remotely = EngineSpec(given.model, platform="remote", interface="endpoint", url=completed(given.endpoint))
    spec = replace(remotely, extra=further, allow_prefix_cache=may)
    found: list[Measurement] = []
    line = LiveLine(sys.stderr)
    with ExitStack() as undo:
        undo.callback(line.clear)
        with of_a_command(BadUsage, BadArchive):
            archive = undo.enter_context(Archive.open(given.records, moves=True))
            archive.begin({}, {"claims": []})  # else `report` would judge all claims of the papers
        client = {"timeout_s": given.timeout, "processes": given.processes}
        engine = undo.enter_context(closing(EndpointEngine(spec, own_prompts=own_prompts, **client)))
        every = [load for load, _ in wanted]
        for number, (load, workload) in enumerate(wanted):
            line.begin(_status(number, every))
            shown = partial(_show, line, number, every)
            found.append(measure(engine, workload, load, this_host("remote"), shown))
            archive.add(found[-1])
            if export:
                export.add(found[-1])
    return found, archive.moved


def valid(measurement: Measurement, terms: ValidityCriteria) -> bool:
    """Validity of a measurement together with every step of a ramp."""
    return not any(problems(each, terms.failed_share) for each in (measurement, *steps_of(measurement)))


def page(found: list[Measurement], terms: ValidityCriteria, as_object: bool) -> str:
    """The printed result: of one load, of a ramp, or of several rates."""
    several = len(found) > 1
    if as_object:
        return as_json(loads.rates_facts(found, terms) if several else loads.facts_of_load(found[0], terms))
    of_rates = several or steps_of(found[0])
    return folded(loads.rates_text(found, terms) if of_rates else loads.as_text(found[0], terms))


def _status(number: int, every: Sequence[Load], elapsed_s: float = 0.0) -> Status:
    """The load of this number, from 0; the time left is what all loads take at least."""
    now, *later = map(measure_loads.least_s, every[number:])
    place = f"load {number + 1} of {len(every)}" if len(every) > 1 else ""
    left = left_text(max(0.0, now - elapsed_s) + sum(later), more=True)
    return Status(place, left, every[number].title)


def _show(line: LiveLine, number: int, every: Sequence[Load], progress: Progress) -> None:
    line.show(_status(number, every, progress.elapsed_s).measuring(progress))
