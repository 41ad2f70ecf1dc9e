"""How far apart are two equal engines on one GPU, from launch to launch? Windows alternate between the two.

    python studies/two_sides.py --launches 8 --out two-sides.json            # baseline and candidate are the same
    python studies/two_sides.py --launches 4 --layers 25 --out layer.json    # the candidate has one layer more
    python studies/two_sides.py --again two-sides.json                       # print what a results file holds

Each launch starts both engines, throws one ABBA of windows away, and measures pairs of windows in the order ABBA. A
window is a job of a fixed number of requests that all arrive at once, with an idle gap after it. Two results come from
each window: its seconds, and its busy seconds, in which a kernel ran. The busy seconds are read from the GPU's
profiling counters, which change every 0.1 s: a thread notes each change, and a window begins and ends at a change that
lies in an idle gap. A launch's result is the mean over its pairs of log(candidate / baseline). The last lines print how
far apart launches are, beside how far apart they would be by the noise of the windows alone.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from common import keep, parser_of, results_in, results_options

from pytest_slmserve.engines.server import OfflineEngine
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.plan.planner import engine_spec, workload_spec
from pytest_slmserve.schema.specs import GIB, ClosedLoop, EngineSpec, Workload
from pytest_slmserve.telemetry.host import probe
from pytest_slmserve.workload.requests import build_workload

PERIOD_S = 0.1  # between two changes of the counters (seen on an H100: 0.1000 s, whatever asks for them)
POLL_S = 0.01
GAP_S = 0.25  # idle time after each window: a whole period lies in it, which may be seen 0.2 s late
IDLE = 0.01  # share of a period
SIDES = "baseline", "candidate"
GRAPHICS = 1  # GPM's number of the share of time in which a kernel runs


@contextmanager
def noted_changes(found: list[tuple[float, float]]) -> Iterator[None]:
    """While the block runs, append each change of the counters: the time at which it was seen, by the monotonic clock,
    and the share of the time since the beginning, in percent, in which a kernel ran."""
    import pynvml as nv

    nv.nvmlInit()
    device = nv.nvmlDeviceGetHandleByIndex(0)
    first, stop = nv.nvmlGpmSampleAlloc(), threading.Event()
    nv.nvmlGpmSampleGet(device, first)

    def poll() -> None:
        last = nv.nvmlGpmSampleAlloc()
        while not stop.wait(POLL_S):
            nv.nvmlGpmSampleGet(device, last)
            asked = nv.c_nvmlGpmMetricsGet_t(version=1, numMetrics=1, sample1=first, sample2=last)
            asked.metrics[0].metricId, now = GRAPHICS, time.monotonic()
            nv.nvmlGpmMetricsGet(asked)
            active = round(asked.metrics[0].value, 6)
            if not math.isnan(active) and (not found or found[-1][1] != active):
                found.append((now, active))

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        nv.nvmlShutdown()


def job(engine: OfflineEngine, workload: Workload, load: ClosedLoop) -> tuple[float, float]:
    """Serve one job and rest; return the times of its beginning and end by the monotonic clock."""
    run = engine.run(workload, load)
    time.sleep(GAP_S)
    assert run.began_s is not None and not run.failures
    return run.began_s + run.window_s[0], run.began_s + run.window_s[1]


def launched(
    specs: Sequence[EngineSpec], first: int, workload: Workload, load: ClosedLoop, pairs: int
) -> dict[str, Any]:
    """Launch both sides and measure; return the windows and the changes of the counters. first: the side that starts
    first."""
    began, engines = time.monotonic(), [OfflineEngine(spec) for spec in specs]
    try:
        for engine in engines:
            engine.await_turn()
        for side in (first, 1 - first):
            engines[side].start()
        ready_s = time.monotonic() - began
        for side in (0, 1, 1, 0):
            job(engines[side], workload, load)
        changes: list[tuple[float, float]] = []
        windows = []
        with noted_changes(changes):
            time.sleep(GAP_S)
            for pair in range(pairs):
                for side in (1, 0) if pair % 2 else (0, 1):
                    windows.append((pair, side, *job(engines[side], workload, load)))
            time.sleep(GAP_S)
        blocks = [engine.resolved.kv_blocks for engine in engines]
        return {"ready_s": ready_s, "first": SIDES[first], "kv_blocks": blocks, "windows": windows, "changes": changes}
    finally:
        for engine in engines:
            engine.close()


def busy_seconds(launch: Mapping[str, Any]) -> dict[tuple[int, int], float]:
    """Seconds in which a kernel ran, of each pair and side: from the first idle change of the counters after the window
    before to the first one after this window. A change is idle if no kernel ran since the one before it. The times at
    which changes were seen are those of a poll, so changes are counted instead."""
    busy, idle, number, changes = [0.0], [True], 0, launch["changes"]
    for last, this in pairwise(changes):
        number += max(1, round((this[0] - last[0]) / PERIOD_S))
        busy.append(this[1] / 100 * number * PERIOD_S)
        idle.append(busy[-1] - busy[-2] < IDLE * PERIOD_S)
    found, before = {}, 0.0
    for pair, side, _, ended in launch["windows"]:
        after = next(total for (t, _), total, quiet in zip(changes, busy, idle) if quiet and t > ended)
        found[pair, side], before = after - before, after
    return found


def tell(launches: Sequence[Mapping[str, Any]]) -> None:
    """Print each launch's ratios and, for both results, the spread of launches beside the noise of their windows."""
    means: dict[str, list[float]] = {"seconds": [], "busy seconds": []}
    noise: dict[str, list[float]] = {"seconds": [], "busy seconds": []}
    for number, launch in enumerate(launches, 1):
        told = []
        seen = {(pair, side): ended - began for pair, side, began, ended in launch["windows"]}
        for name, seconds in (("seconds", seen), ("busy seconds", busy_seconds(launch))):
            logs = {window: math.log(each) for window, each in seconds.items()}
            ratios = [logs[pair, 1] - logs[pair, 0] for pair in range(len(logs) // 2)]
            means[name].append(fmean(ratios))
            noise[name].append(stdev(ratios) / math.sqrt(len(ratios)))
            typical = fmean(math.exp(logs[pair, 0]) for pair in range(len(ratios)))
            told.append(f"{name} {typical:.3f} s, {fmean(ratios):+7.2%} (a pair {stdev(ratios):.2%})")
        first = launch["first"]
        print(f"launch {number}, {first} first, ready in {launch['ready_s']:.0f} s: candidate {'; '.join(told)}")
    for name, found in means.items():
        if len(found) > 1:
            windows = math.sqrt(fmean(each**2 for each in noise[name]))
            print(f"{name}: mean {fmean(found):+.2%}, launches apart by {stdev(found):.2%}, by windows {windows:.2%}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="opt-1.3b")
    parser.add_argument("--layers", type=int, help="of the candidate; default: as the baseline")
    parser.add_argument("--launches", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="of each prompt and of each answer")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no launch begins after so many")
    results_options(parser)
    args = parser.parse_args()
    if args.again:
        tell(results_in(args.again)["launches"])
        return
    until = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as name:
        models = [args.model, args.model]
        if args.layers:
            config = dict(model_of(args.model).config) | {"num_hidden_layers": args.layers}
            Path(name, "config.json").write_text(json.dumps(config))
            models[1] = name
        options, environment = read_options({}, {}, {}), probe("cuda").environment
        own_memory = {"kv_cache_bytes": 16 * GIB, "gpu_memory_utilization": 0.1}
        specs = [replace(engine_spec(options, "cuda", model, environment), **own_memory) for model in models]
        requests = workload_spec(options, "cuda").with_lengths(args.tokens, args.tokens)
        workload = build_workload(requests, model_of(args.model))
        load = ClosedLoop(args.concurrency, requests=args.concurrency, ramp_up="burst")
        facts: dict[str, Any] = {"model": args.model, "layers": args.layers, "gpu": environment.gpu_name}
        facts |= {"vllm": environment.vllm, "concurrency": args.concurrency, "tokens": args.tokens}
        launches: list[dict[str, Any]] = []
        for number in range(args.launches):
            if time.monotonic() < until:
                launches.append(launched(specs, number % 2, workload, load, args.pairs))
                tell(launches[-1:])
                sys.stdout.flush()
                keep(args.out, facts | {"launches": launches})
    tell(launches)


if __name__ == "__main__":
    main()
