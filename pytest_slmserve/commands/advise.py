"""`advise` command: recommend a batch size, GPU memory and a number of engines for a model."""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pytest_slmserve.analysis.advice import advisor, subjects
from pytest_slmserve.analysis.claims.table import stored_curves
from pytest_slmserve.analysis.points import job_points
from pytest_slmserve.analysis.sweep.curve import Curve, with_jobs
from pytest_slmserve.archive.store import read
from pytest_slmserve.commands import cli, plan
from pytest_slmserve.commands.external import NEEDED, add_columns, check_wanted, external_results
from pytest_slmserve.commands.report import read_all
from pytest_slmserve.options.table import adapters, memory_size, positive, share, whole_number
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.report.advice import QuickRun, advice_facts, advice_section
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page.writer import write_page
from pytest_slmserve.report.section import Section, in_units, section_text
from pytest_slmserve.report.text_table import laid_out
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.specs import Adapters, EngineSpec

STATUS = (
    f"{cli.PASSES} something is advised; {cli.INCONCLUSIVE} nothing can be; {cli.USAGE} wrong usage or a file that "
    "cannot be read. With --knob, --throughput and --latency the files are external results, as `report` reads them."
)
BUDGET_S = 60  # of `--quick`, for all loads together
FOLDER = Path(".slm/quick")
SWEEP = "pytest_slmserve.benchmarks.test_pareto_plateau"
TESTS = (f"{SWEEP}::test_point", f"{SWEEP}::test_throughput_reaches_a_plateau")


def add_advise(commands: cli.Commands) -> None:
    command = cli.add_command(commands, "advise", STATUS, run_advise)
    files = "a results file that --slm-records wrote, or results of another tool; none with --quick"
    cli.add_archives(command, "PATH", files, number="*")
    minute = (
        "measure this model now: one engine, loads for a minute at most; options for pytest follow --: -- --slm-cpu"
    )
    command.add_argument("--quick", metavar="MODEL", help=minute)
    add_columns(command)
    alone = "advise on this model alone; tells the shape of external results"
    command.add_argument("--model", metavar="NAME", help=alone)
    blocks = "column of the engine's KV blocks, of external results: tells with --model the memory that a batch frees"
    command.add_argument("--kv-blocks", metavar="NAME", help=blocks)
    longest = "tokens of a full request, prompt and output (default: the longest measured)"
    command.add_argument(
        "--max-model-len", metavar="TOKENS", type=cli.typed(partial(whole_number, least=1)), help=longest
    )
    memory = "memory of the GPU, as 80GiB or in bytes (default: that of the GPU measured on)"
    command.add_argument("--gpu-memory", metavar="SIZE", type=cli.typed(memory_size), help=memory)
    part = "share of the GPU's memory for all engines together (default: 0.9)"
    command.add_argument("--gpu-memory-utilization", metavar="SHARE", type=cli.typed(share), default=0.9, help=part)
    price = "price of the GPU in any currency: adds what a million output tokens cost"
    command.add_argument("--price-per-hour", metavar="PRICE", type=cli.typed(positive), help=price)
    asked = "LoRA adapters to hold, as number and rank: their slots take memory, and it is told how many have room"
    command.add_argument("--lora", metavar="64x8", type=cli.typed(adapters), help=asked)
    share_it = "all models share the GPU (default: each has it for itself)"
    command.add_argument("--together", action="store_true", help=share_it)
    cli.add_formats(command)
    cli.add_html(command)


def measured_now(given: argparse.Namespace) -> QuickRun:
    """Measure the model of `--quick` in an adaptive sweep, and choose its results file for the advice."""
    words = given.typed[given.typed.index("--") + 1 :] if "--" in given.typed else []
    if len(given.paths) > len(words) or given.model or any(getattr(given, name) for name in NEEDED):
        raise BadUsage("--quick measures a model, and reads no files", f"slmserve advise --quick {given.quick}")
    begun, mode = time.monotonic(), [] if plan.has_mode(words) else [plan.MODES[0]]
    name = f"{short_name(given.quick)}-{time.strftime('%Y-%m-%dT%H-%M-%S')}"
    own = argparse.ArgumentParser("slmserve advise --quick", add_help=False, allow_abbrev=False)
    own.add_argument("--slm-records", type=Path, default=FOLDER / f"{name}.jsonl")
    own.add_argument("--slm-budget", type=cli.typed(whole_number), default=BUDGET_S)
    chosen, words = own.parse_known_args(words)
    records, budget_s, log = chosen.slm_records, chosen.slm_budget, FOLDER / f"{name}.txt"
    serving = [*mode, f"--slm-models={given.quick}"]
    budget = ["--slm-sweep=adaptive", f"--slm-budget={budget_s}", f"--slm-records={records}"]
    cli.say(f"starting one engine of {given.quick}, then measuring for {budget_s} s at most ...", sys.stderr)
    command = [*plan.QUIET, *serving, *budget, *words, "--pyargs", *TESTS]
    _, told, hint = plan.run_pytest(command, log, "Run it in a folder that you can write to.")
    found = read(records).measurements if records.exists() else []
    if not found:
        other = f"slmserve advise --quick {given.quick} -- --slm-cpu" if mode else hint or f"see {log}"
        raise BadUsage(f"{given.quick} was not measured: {told.removeprefix('ERROR: slmserve: ')}", other)
    given.paths, given.model = [records], given.quick
    trial = ["--slm-suite=papers", "--slm-replicas=2", "--pyargs", "pytest_slmserve.benchmarks.test_replication_gain"]
    return QuickRun(
        start_s=found[0].resolved.ready_s,
        measured_s=sum(m.run.window_s[1] for m in found),
        budget_s=budget_s,
        all_s=time.monotonic() - begun,
        records=str(records),
        trial=shlex.join(["pytest", *serving, *words, *trial]),
    )


def run_advise(given: argparse.Namespace) -> int:
    slo, quick = check_wanted(given), None
    if given.quick:
        quick = measured_now(given)
    elif not given.paths:
        raise BadUsage(
            "no results file was named", "slmserve advise .slm/records.jsonl, or slmserve advise --quick MODEL"
        )
    model, longest = given.model, given.max_model_len
    curves: Sequence[Curve] = ()
    contents = None
    if results := external_results(given):
        known = model_of(model) if model else None
        spec = EngineSpec(model, dtype=known.dtype, model_facts=known) if model and known else None
        measured = subjects.of_external(results.curve, spec, longest, given.b_half, results.notes, results.kv_blocks)
    else:
        contents = read_all(given)
        curves = stored_curves(contents.measurements, contents.plans)
        measured = subjects.of_curves(curves, model, longest, contents.notes)
    held = Adapters(*given.lora) if given.lora else None
    if held:
        measured = replace(measured, subjects=tuple(subjects.holding(each, held) for each in measured.subjects))
    wish = advisor.Objectives(
        slo=slo,
        threshold=given.efficiency,
        gpu_bytes=given.gpu_memory or measured.gpu_bytes,
        gpu_memory_utilization=given.gpu_memory_utilization,
        price_per_hour=given.price_per_hour,
        together=given.together,
        adapters=held,
    )
    found = advisor.plan(measured.subjects, wish)
    mine = [curve for curve in curves if model is None or curve.subject == short_name(model)]
    if contents and held:
        names = {curve.subject for curve in mine}
        mine = with_jobs(mine, [job for job in job_points(contents.measurements) if job.model in names])
    section = in_units(advice_section(found, measured, mine, quick), Findings(curves=mine).unit)
    with laid_out(every_column=True):  # requested columns are shown on a narrow terminal, too
        text = section_text(section)
    cli.say(as_json(advice_facts(found, measured, mine, quick)) if given.json else text)
    if given.html:
        shown = Section("What to deploy", [text], section.look)
        measurements = [m for curve in mine for m in curve.measurements]
        rests_on = Findings(curves=mine, measurements=measurements)
        write_page(given.html, rests_on, [] if results else given.paths, sections={"Advice": [shown]})
    return cli.PASSES if found.possible else cli.INCONCLUSIVE
