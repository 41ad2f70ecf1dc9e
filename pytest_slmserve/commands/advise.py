"""`advise`: the batch, the memory and the number of engines to serve a model with; and whether that holds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pytest_slmserve.analysis.advice import subjects
from pytest_slmserve.analysis.advice.advisor import Plan, plan
from pytest_slmserve.analysis.advice.batch_choice import Objectives
from pytest_slmserve.analysis.advice.subjects import ResultSource
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.commands import cli
from pytest_slmserve.commands.external import add_columns, check_wanted, external_results
from pytest_slmserve.commands.report import curves_of, read_all
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.report.advice import text
from pytest_slmserve.report.advice.text import advice_facts
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.report.deployments import gpus_advice
from pytest_slmserve.report.live_line import LiveLine, Status
from pytest_slmserve.report.page.writer import write_section
from pytest_slmserve.report.section import Section
from pytest_slmserve.run import advice as run_advice
from pytest_slmserve.run.advice import VerifyOptions
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import parse_memory
from pytest_slmserve.schema.records import Progress
from pytest_slmserve.schema.specs import EngineSpec

STATUS = (
    f"{cli.PASSES} something is advised; {cli.INCONCLUSIVE} nothing can be; {cli.USAGE} wrong usage or a file that "
    "cannot be read. With --knob, --throughput and --latency the files are external results, as `report` reads them. "
    f"With --verify: {cli.PASSES} all is as predicted; {cli.FAILS} something is not; {cli.INCONCLUSIVE} inconclusive "
    "or nothing to verify."
)


def add_advise(commands: cli.Commands) -> None:
    command = cli.add_command(commands, "advise", STATUS, run_advise)
    cli.add_archives(command, "PATH", "an archive that --slm-records wrote, or results of another tool")
    add_columns(command)
    command.add_argument(
        "--model", metavar="NAME", help="advise on this model alone; tells the shape of external results"
    )
    blocks = "column of the engine's KV blocks, of external results: tells with --model the memory that a batch frees"
    command.add_argument("--kv-blocks", metavar="NAME", help=blocks)
    longest = "tokens of a full request, prompt and output (default: the longest measured)"
    command.add_argument("--max-model-len", metavar="TOKENS", type=int, help=longest)
    memory = "memory of the GPU, as 80GiB or in bytes (default: that of the GPU measured on)"
    command.add_argument("--gpu-memory", metavar="SIZE", help=memory)
    part = "share of the GPU's memory for all engines together (default: 0.9)"
    command.add_argument("--gpu-memory-utilization", metavar="SHARE", type=float, default=0.9, help=part)
    price = "price of the GPU in any currency: adds what a million output tokens cost"
    command.add_argument("--price-per-hour", metavar="PRICE", type=float, help=price)
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")
    cli.add_html(command)
    add_verify(command)


def add_verify(command: cli.Parser) -> None:
    """Adds the options that verify an advice by measurement; None where not given, as none applies to records alone."""
    group = command.add_argument_group("to verify it, on the kind of host that was measured on")
    what = "start the engines as advised, measure, and compare with what was predicted"
    group.add_argument("--verify", action="store_true", help=what)
    group.add_argument("--repeats", metavar="N", type=int, help="measurements of each (default: 2)")
    margin = "how far from what was predicted is still as predicted (default: 0.15)"
    group.add_argument("--verify-margin", metavar="SHARE", type=float, help=margin)
    sharing = "how several engines share the GPU (default: time-slicing)"
    group.add_argument("--sharing", choices=("time-slicing", "mps"), help=sharing)
    where = "archive that the measurements are appended to (default: .slm/verify.jsonl)"
    group.add_argument("--records", metavar="PATH", help=where)
    group.add_argument("--python", metavar="PATH", help="interpreter that has vLLM (default: that of the records)")


def run_advise(given: argparse.Namespace) -> int:
    """Print batch, memory and number of engines, from archives or from external results, and return the exit status."""
    wish, model, longest, terms = wish_of(given), given.model, given.max_model_len, _verify_options(given)
    curves: Sequence[Curve] = ()
    if given.html and terms:
        raise BadUsage("--html shows an advice, and --verify measures it", "one of them")
    if results := external_results(given):
        if terms:
            raise BadUsage("external results do not tell enough to be verified", "records of --slm-records")
        known = model_of(model) if model else None
        spec = EngineSpec(model, dtype=known.dtype, model_facts=known) if model and known else None
        asked = subjects.of_external(results.curve, spec, longest, given.b_half, results.notes, results.kv_blocks)
    else:
        contents = read_all(given)
        curves = curves_of(contents)
        asked = subjects.of_curves(curves, model, longest, contents.notes)
    found = plan(asked.subjects, replace(wish, gpu_bytes=wish.gpu_bytes or asked.source.gpu_bytes))
    if terms and found.possible:
        return _verify(found, asked.source, curves, terms, given.json)
    mine = [curve for curve in curves if model is None or curve.subject == short_name(model)]
    advice = "\n".join([text.advice_text(found, asked.source), *gpus_advice(mine)])
    print(as_json(advice_facts(found, asked.source, mine)) if given.json else advice)
    status = cli.PASSES if found.possible else cli.INCONCLUSIVE
    if given.html:
        section = Section("What to deploy", [advice], "good" if found.possible else "open")
        measurements = [m for curve in mine for m in curve.measurements]
        archives = [] if results else given.paths
        write_section(given.html, "Advice", [section], measurements, archives, curves=mine)
    return status


def _verify(found: Plan, source: ResultSource, curves: Sequence[Curve], terms: VerifyOptions, as_object: bool) -> int:
    """Print the advice, verify it on engines that are started so, and return the exit status."""
    alone = run_advice.trials(found, curves, terms.python)
    joint = run_advice.joint_of(found, alone, terms.sharing)
    try:
        with run_advice.opened(alone, joint, terms) as session:
            line = LiveLine(sys.stderr)
            session.executor.on_progress, session.devices.pool.on_wait = partial(_show, line), line.on_wait
            if not as_object:
                print(f"{text.advice_text(found, source)}\n", flush=True)
            seen = run_advice.verify(session, alone, joint, terms)
            line.clear()
    except KeyboardInterrupt:
        print(f"interrupted: nothing runs any more; what was measured is in {terms.records}", file=sys.stderr)
        return cli.INTERRUPTED
    if as_object:
        measured = text.verification_facts(seen, session.notes)
        print(as_json({**advice_facts(found, source), "verification": measured}))
    else:
        print(text.verification_text(seen, session.notes))
    return cli.exit_status(seen.state)


def _show(line: LiveLine, case: Case, title: str, progress: Progress) -> None:
    line.show(Status(subject=title).measuring(progress))


def _verify_options(given: argparse.Namespace) -> VerifyOptions | None:
    """The options of verifying the advice; None without --verify. Raises BadUsage where a number is out of range."""
    words = {"repeats": given.repeats, "margin": given.verify_margin, "sharing": given.sharing}
    words |= {"records": given.records, "python": given.python}
    chosen = {name: value for name, value in words.items() if value is not None}
    if not given.verify:
        if chosen:
            option = "--verify-margin" if "margin" in chosen else f"--{next(iter(chosen))}"
            raise BadUsage(f"{option} says how to verify an advice, and nothing is verified", f"--verify {option} ...")
        return None
    terms = VerifyOptions(**chosen)
    cli.check_share("verify-margin", terms.margin)
    if not 0 < terms.repeats < 1000:
        raise BadUsage(f"--repeats {terms.repeats} is no number of measurements", "--repeats 2")
    return terms


def wish_of(given: argparse.Namespace) -> Objectives:
    """Raises BadUsage where a number is out of range."""
    slo = check_wanted(given)
    if not 0 < given.gpu_memory_utilization <= 1:
        why = f"--gpu-memory-utilization {given.gpu_memory_utilization:g} is no share between 0 and 1"
        raise BadUsage(why, "--gpu-memory-utilization 0.9")
    if given.price_per_hour is not None and not 0 < given.price_per_hour < 1e9:
        raise BadUsage(f"--price-per-hour {given.price_per_hour:g} is no price", "--price-per-hour 3.5")
    if given.max_model_len is not None and not 0 < given.max_model_len < 1e9:
        raise BadUsage(f"--max-model-len {given.max_model_len} is no number of tokens", "--max-model-len 2048")
    return Objectives(
        slo=slo,
        threshold=given.efficiency,
        gpu_bytes=None if given.gpu_memory is None else parse_memory(given.gpu_memory),
        gpu_memory_utilization=given.gpu_memory_utilization,
        price_per_hour=given.price_per_hour,
    )
