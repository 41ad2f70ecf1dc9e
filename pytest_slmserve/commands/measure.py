"""`measure`: one load on a server that already runs, without pytest; the same client, checks and record."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_slmserve.commands.words import FAILS, HOLDS, USAGE, Commands, add_command
from pytest_slmserve.errors import BadUsage
from pytest_slmserve.spec import ClosedLoop, EngineSpec, Load, OpenLoop, WorkloadSpec, short_hash

if TYPE_CHECKING:
    from pytest_slmserve.records import Progress, Workload
    from pytest_slmserve.workload.arrivals import Arrivals

STATUS = (
    f"{HOLDS} measured, and valid, {FAILS} measured, but not valid, {USAGE} wrong usage, or no server that streams."
)
VOCABULARY = 32_000  # ids below it are tokens of most models
WINDOW_S = 10.0
SETTLE_S = 5.0
LONGEST = 2048  # tokens of a request of a trace


def add(commands: Commands) -> None:
    command = add_command(commands, "measure", "measure one load on a server that runs", STATUS, measure_one)
    url = "of /v1/completions or /v1/chat/completions; its key is read from SLM_ENDPOINT_KEY"
    command.add_argument("--endpoint", metavar="URL", required=True, help=url)
    command.add_argument("--model", metavar="NAME", required=True, help="as the server calls it")
    how = command.add_mutually_exclusive_group(required=True)
    how.add_argument("--concurrency", metavar="N", type=int, help="requests kept in flight")
    how.add_argument("--request-rate", metavar="RATE", type=float, help="requests sent per second, whatever comes back")
    how.add_argument("--trace", metavar="PATH", type=Path, help="an Azure or Mooncake trace: its times, its lengths")
    uneven = "of --request-rate: 1 Poisson (default), less comes in bursts, more is more even, inf is constant"
    command.add_argument("--burstiness", metavar="SHAPE", type=float, default=1.0, help=uneven)
    command.add_argument("--speed", metavar="X", type=float, default=1.0, help="of --trace: 2 is twice as fast")
    number = "of --concurrency: end after so many requests, all of which count (default: a steady window)"
    command.add_argument("--requests", metavar="N", type=int, help=number)
    settle = f"seconds before the window, of --request-rate and --trace (default: {SETTLE_S:g})"
    command.add_argument("--settle", metavar="S", type=float, default=SETTLE_S, help=settle)
    bounds = "bounds that make a request good: ttft:200ms,tpot:50ms,e2e:5s; adds goodput"
    command.add_argument("--slo", metavar="BOUNDS", help=bounds)
    window = f"seconds of the steady window (default: {WINDOW_S:g})"
    command.add_argument("--window", metavar="S", type=float, help=window)
    command.add_argument("--input-len", metavar="TOKENS", type=int, default=512, help="of each prompt (default: 512)")
    command.add_argument("--output-len", metavar="TOKENS", type=int, default=256, help="asked for (default: 256)")
    command.add_argument("--seed", metavar="N", type=int, default=0, help="of the prompts (default: 0)")
    body = 'further fields of each request, as JSON; null takes one away: {"ignore_eos": null}'
    command.add_argument("--extra-body", metavar="JSON", type=json_object, default={}, help=body)
    records = "archive to append the record to (default: .slm/records.jsonl)"
    command.add_argument("--records", metavar="PATH", type=Path, default=Path(".slm/records.jsonl"), help=records)
    saved = "also write one JSON with the keys of `vllm bench serve`"
    command.add_argument("--vllm-bench", metavar="FILE", type=Path, help=saved)
    command.add_argument("--json", action="store_true", help="one object instead of text")


def json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadUsage(f"--extra-body {text} is no JSON object", """--extra-body '{"top_k": 1}'""")
    return found


def measure_one(given: argparse.Namespace) -> int:
    """Serve, store, print."""
    from pytest_slmserve.analysis.goodput import parse_slo
    from pytest_slmserve.analysis.validity import problems
    from pytest_slmserve.engines.endpoint import KEY, EndpointEngine
    from pytest_slmserve.environment import remote
    from pytest_slmserve.measure import measure
    from pytest_slmserve.report.served import as_json, as_text, good
    from pytest_slmserve.report.vllm_bench import as_vllm_bench
    from pytest_slmserve.store import Archive

    slo = parse_slo(given.slo) if given.slo else None
    load, workload = traced(given) if given.trace else (load_of(given), requests_of(given))
    spec = EngineSpec(given.model, backend="remote", door="endpoint", url=given.endpoint)
    with closing(Archive.open(given.records)) as archive:
        with closing(EndpointEngine(spec, os.environ.get(KEY, ""), given.extra_body)) as engine:
            found = measure(engine, workload, load, remote(), told)
        archive.add(found)
    if given.vllm_bench:
        write(given.vllm_bench, json.dumps(as_vllm_bench(found, good(found, slo)), indent=2))
    print(json.dumps(as_json(found, slo), indent=2) if given.json else as_text(found, slo))
    return FAILS if problems(found) else HOLDS


def write(path: Path, text: str) -> None:
    """Raises BadUsage; the record is in the archive by then."""
    try:
        path.write_text(text + "\n", "utf-8")
    except OSError as error:
        raise BadUsage(f"cannot write {path}: {error.strerror}", "--vllm-bench with another path") from None


def load_of(given: argparse.Namespace) -> Load:
    from pytest_slmserve.workload.arrivals import Arrivals

    if given.request_rate is not None:
        if given.requests is not None:
            raise BadUsage("--request-rate has a window, not a number of requests", "--window 60")
        even = given.burstiness == math.inf
        return scheduled(given, f"gamma {given.burstiness:g}, {given.request_rate:g}/s, seed {given.seed}", Arrivals(
            "constant" if even else "gamma",
            rate=given.request_rate,
            burstiness=1.0 if even else given.burstiness,
            seed=given.seed,
            duration_s=length_s(given),
        ))  # fmt: skip
    if given.requests is not None and given.window is not None:
        raise BadUsage("--requests and --window are two ways to end", "one of them")
    if given.requests is not None and given.requests < given.concurrency:
        raise BadUsage(
            f"--requests {given.requests} cannot keep {given.concurrency} in flight", f"--requests {given.concurrency}"
        )
    return ClosedLoop(given.concurrency, window_s=given.window or WINDOW_S, requests=given.requests)


def length_s(given: argparse.Namespace) -> float:
    """The load goes on after the window, so that what was sent in it ends under it."""
    seconds: float = 2 * given.settle + (given.window or WINDOW_S)
    return seconds


def scheduled(given: argparse.Namespace, words: str, arrivals: Arrivals) -> OpenLoop:
    from pytest_slmserve.workload.arrivals import schedule

    times = schedule(arrivals)
    if not times:
        raise BadUsage(f"no request comes within {length_s(given):g} s", "a longer --window")
    return OpenLoop(words, len(times) / length_s(given), given.settle, given.window or WINDOW_S, times)


def traced(given: argparse.Namespace) -> tuple[Load, Workload]:
    """A trace's own times and lengths, from its beginning."""
    from pytest_slmserve.records import Workload
    from pytest_slmserve.workload.build import synthetic_requests
    from pytest_slmserve.workload.traces import load_trace

    trace = load_trace(given.trace, max_model_len=LONGEST, until_s=length_s(given) * given.speed)
    lengths = [(row.prompt_tokens, row.output_tokens) for row in trace.rows]
    spec = WorkloadSpec("trace", str(given.trace), prompt_tokens=None, output_tokens=None, requests=len(lengths))
    requests = synthetic_requests(lengths, vocabulary_of(given.model), given.seed)
    workload = Workload(spec, tuple(requests), f"{trace.source}, {trace.left_out} requests left out as too long")
    arrivals = trace.arrivals(given.speed)
    digest = short_hash(arrivals.offsets_s)
    return scheduled(given, f"trace {trace.source} {digest}, speed {given.speed:g}", arrivals), workload


def requests_of(given: argparse.Namespace) -> Workload:
    from pytest_slmserve.records import Workload
    from pytest_slmserve.workload.build import requests_of_lengths

    spec = WorkloadSpec(prompt_tokens=given.input_len, output_tokens=given.output_len, seed=given.seed)
    requests, source = requests_of_lengths(spec, vocabulary_of(given.model))
    return Workload(spec, tuple(requests), source)


def vocabulary_of(model: str) -> int:
    from pytest_slmserve.analysis.kv_cache import known_shape

    shape = known_shape(model)
    return shape.vocabulary if shape else VOCABULARY


def told(progress: Progress) -> None:
    """How it is going, on a line that is written over."""
    if sys.stderr.isatty():
        rate = "" if progress.tokens_per_s is None else f", {progress.tokens_per_s:,.0f} tokens/s"
        print(
            f"\r{progress.phase} {progress.elapsed_s:.0f} s, {progress.done} done{rate}\033[K", end="", file=sys.stderr
        )
