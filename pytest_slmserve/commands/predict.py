"""`predict`: any small model on a GPU and a host that are not here, by the law of the card and the law of its host."""

import argparse
import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from pytest_slmserve.analysis.advice import two_laws
from pytest_slmserve.analysis.advice.advisor import GPU_MEMORY_UTILIZATION
from pytest_slmserve.analysis.advice.two_laws import HostCost, gpu_named, predict_load, seen_in, steady_settings
from pytest_slmserve.analysis.metrics.gpu_figures import Peaks
from pytest_slmserve.analysis.verdict import all_of
from pytest_slmserve.archive.store import chosen, read
from pytest_slmserve.commands import cli
from pytest_slmserve.options.table import memory_size, whole_number
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.report.advice import prediction_report
from pytest_slmserve.report.section import section_text
from pytest_slmserve.schema.errors import UNUSABLE, BadUsage, json_value, read_json, write_file
from pytest_slmserve.schema.kv_cache import kv_budget_bytes, value_bytes, weight_bytes
from pytest_slmserve.schema.models import Model, catalogue_name, short_name
from pytest_slmserve.schema.specs import EngineSpec

STATUS = (
    f"{cli.PASSES} predicted, and all measurements on that GPU are inside the intervals; {cli.FAILS} a measurement is "
    f"outside; {cli.USAGE} wrong usage or a file that cannot be read."
)
ASKED_S = 600  # of AIConfigurator: it reads tables for some seconds
SYSTEMS = {"H100": "h100_sxm", "H200": "h200_sxm", "A100-80": "a100_sxm", "L40S": "l40s", "B200": "b200_sxm"}
# For the interpreter that has AIConfigurator: tokens/s of each load, None of one that it cannot predict.
ASK = """
import json, sys
from aiconfigurator.cli.api import cli_estimate
model, system, prompt, output, loads = json.loads(sys.argv[1])
found = {}
for load in loads:
    try:
        words = {"mode": "agg", "backend_name": "vllm", "isl": prompt, "osl": output, "tp_size": 1}
        found[load] = float(cli_estimate(model, system, batch_size=load, **words).raw["tokens/s"])
    except Exception as error:
        found["why"] = f"{type(error).__name__}: {error}"[:200]
print(json.dumps(found))
"""


def add_predict(commands: cli.Commands) -> None:
    command = cli.add_command(commands, "predict", STATUS, run_predict)
    model = "model to predict: a name of the catalogue, a folder, or a name on the Hugging Face Hub"
    command.add_argument("model", metavar="MODEL", help=model)
    gpu = "GPU to predict, for example H200, A100-80 or 'NVIDIA L4'"
    command.add_argument("--gpu", metavar="NAME", required=True, help=gpu)
    cost = (
        "file that `slmserve doctor --host-cost FILE` wrote on the host (default: a usual host, with wider intervals)"
    )
    command.add_argument("--host-cost", metavar="FILE", type=Path, help=cost)
    records = "correct the prediction with a results file that has sweeps of this model on any GPU; can be repeated"
    command.add_argument(
        "--from", metavar="RECORDS", type=Path, action="append", default=[], dest="records", help=records
    )
    number = cli.typed(partial(whole_number, least=1))
    for name, default, each in (("--input-len", 512, "a prompt"), ("--output-len", 256, "an answer")):
        length = f"length of {each} (default: {default})"
        command.add_argument(name, metavar="TOKENS", type=number, default=default, help=length)
    graphs = "largest step, in tokens, that vLLM captures as a CUDA graph (default: 512, as in vLLM)"
    command.add_argument("--max-cudagraph-capture-size", metavar="TOKENS", type=number, help=graphs)
    weights = "predict weights quantized by this method, for example fp8"
    command.add_argument("--quantization", metavar="METHOD", help=weights)
    memory = "memory of the GPU, for example 80GiB, or a number of bytes (default: as in its data sheet)"
    command.add_argument("--gpu-memory", metavar="SIZE", type=cli.typed(memory_size), help=memory)
    other = "also show the prediction of AIConfigurator, which is installed in the environment of this interpreter"
    command.add_argument("--aiconfigurator", metavar="PYTHON", help=other)
    cli.add_formats(command, "each load")


def run_predict(given: argparse.Namespace) -> int:
    """Print what both laws say of a steady load of this model, and check it where the archives have that GPU. Raises
    BadUsage for a model whose shape, or a GPU whose data sheet is not known."""
    gpu, model, notes = gpu_named(given.gpu), model_of(given.model), list[str]()
    cost = cost_in(given.host_cost) if given.host_cost else None
    asked = ("max_cudagraph_capture_size", "quantization")
    extra = tuple((name, value) for name in asked if (value := getattr(given, name)) is not None)
    spec = EngineSpec(catalogue_name(given.model) or given.model, dtype=model.dtype, extra=extra, model_facts=model)
    memory = given.gpu_memory or (gpu.gigabytes and gpu.gigabytes * 10**9)
    weights = weight_bytes(spec, value_bytes(spec) or 2)
    kv_bytes = kv_budget_bytes(memory, GPU_MEMORY_UTILIZATION, weights) if memory and weights else 0
    spec = replace(spec, kv_cache_bytes=kv_bytes)
    lengths = given.input_len, given.output_len
    settings = steady_settings(spec, *lengths, gpu)
    if settings[-1].load < two_laws.LOADS[-1]:
        notes.append(f"the KV cache holds no more than {settings[-1].load} such requests")
    if gpu.family not in two_laws.LAWS.cards:
        known = " and ".join(two_laws.LAWS.cards)
        notes.append(f"the laws are of {known}: nothing was measured on {gpu.family} that would tell how far they hold")
    measured = [m for path in given.records for m in chosen(read(path)).measurements]
    rows = [row for row in seen_in(measured) if row.model == short_name(spec.model)]
    if given.records and not rows:
        notes.append("the results files have no sweep of this model with counters of GPM or DCGM: by its shape alone")
    loads = [predict_load(setting, rows, cost) for setting in settings]
    there, elsewhere = ([r for r in rows if (r.gpu == gpu.family) is here] for here in (True, False))
    checks = two_laws.interval_verdicts(there, elsewhere)
    beside, own = dict[int, float](), "a host that nobody measured"
    if given.aiconfigurator:
        beside, why = beside_it(given.aiconfigurator, model, gpu, lengths, [s.load for s in settings])
        notes += [f"AIConfigurator: {why}"] if why else []
    if cost:
        own = f"a host that takes {two_laws.LAWS.slower(cost):.2f} times as long as the usual one"
    by = f"{len(rows)} records of it" if rows else "its shape alone"
    each = f"{lengths[0]} prompt and {lengths[1]} output tokens"
    title = f"{short_name(spec.model)} on {gpu.family}, {each}, by {by}, with {own}"
    facts, section = prediction_report(title, loads, two_laws.batch_to_choose(settings, rows, cost), checks, beside)
    cli.print_result(given, {**facts, "notes": notes}, facts["loads"], [section_text(section)], notes)
    return cli.EXIT_STATUS[all_of(verdict.state for verdict in checks)] if checks else cli.PASSES


def cost_in(path: Path) -> HostCost:
    """Return the cost of the host that a file of `doctor --host-cost` tells. Raises BadUsage for any other file."""
    hint = f"slmserve doctor --host-cost {path} --python python{two_laws.PYTHON}"
    told = read_json(path, hint)
    try:
        if (python := str(told["python"])) != two_laws.PYTHON:
            raise BadUsage(f"{path} was made by Python {python}, and the model knows that of {two_laws.PYTHON}", hint)
        cost = HostCost(float(told["fast_s"]), float(told["middle_s"]))
    except UNUSABLE:
        cost = HostCost(0.0, 0.0)
    if not 0 < cost.fast_s <= cost.middle_s < 1:
        raise BadUsage(f"{path} has no host cost", hint)
    return cost


def beside_it(
    python: str, model: Model, gpu: Peaks, lengths: tuple[int, int], loads: Sequence[int]
) -> tuple[dict[int, float], str]:
    """Return the tokens/s that AIConfigurator predicts, by load, and why it predicts none of some. Raises BadUsage if
    this interpreter has none."""
    if (system := SYSTEMS.get(gpu.family)) is None:
        return {}, f"it is not asked about {gpu.family}"
    with TemporaryDirectory() as folder:  # it reads the shape of a model from the Hub, or from a folder
        write_file(Path(folder) / "config.json", json.dumps(dict(model.config)))
        asked = json.dumps([folder, system, *lengths, [*loads]])
        try:
            done = subprocess.run([python, "-c", ASK, asked], capture_output=True, text=True, timeout=ASKED_S)
            told = json_value(done.stdout.splitlines()[-1].encode())
        except (OSError, IndexError, subprocess.TimeoutExpired, *UNUSABLE) as error:
            raise BadUsage(
                f"{python} predicts nothing: {error}", "Name a Python that has it, by `pip install aiconfigurator`."
            ) from None
    why = str(told.pop("why", ""))
    return {int(load): float(rate) for load, rate in told.items()}, why
