"""Does measuring slow down what is measured? Prints the ratio of throughputs, measured run over bare loop.

    python benchmarks/harness_cost.py --platform cuda --model opt-125m --concurrency 512 --pairs 30

Both serve the same requests with the same admission and output kind on the same engine, in alternating order, and
both clocks are the engine process's own. OPT-125M at 512 is the hardest case: there the front end is the limit.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from pytest_slmserve.analysis.stats.estimates import student_interval
from pytest_slmserve.engines.offline import OfflineEngine
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.engine_specs import engine_spec
from pytest_slmserve.plan.sweeps import workload_spec
from pytest_slmserve.run.measure import measure
from pytest_slmserve.schema.catalog import shape_of
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.loads import ClosedLoop
from pytest_slmserve.schema.workloads import Workload
from pytest_slmserve.telemetry.host_probe import probe
from pytest_slmserve.workload.requests import build_workload

BOUND = 0.99


def measured_s(engine: OfflineEngine, workload: Workload, load: ClosedLoop, environment: Environment) -> float:
    began, ended = measure(engine, workload, load, environment).run.window_s
    return ended - began


def bare_s(engine: OfflineEngine, load: ClosedLoop) -> float:
    answer = engine.ask(op="bare", concurrency=load.concurrency, requests=load.requests)
    return float(answer["seconds"])


def pairs_of(engine: OfflineEngine, workload: Workload, load: ClosedLoop, environment: Environment, count: int):
    """Seconds of the measured run and of the bare loop, the order turned round from pair to pair."""
    for number in range(count):
        if number % 2:
            bare = bare_s(engine, load)
            yield measured_s(engine, workload, load, environment), bare
        else:
            measured = measured_s(engine, workload, load, environment)
            yield measured, bare_s(engine, load)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--model", default="opt-tiny")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, help="of each run; default: twice the concurrency")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3, help="pairs that are not counted")
    parser.add_argument("--out", type=Path, help="file for the pairs, as JSON")
    args = parser.parse_args()
    options = read_options({}, {}, {})
    environment = probe(args.platform).environment
    workload = build_workload(workload_spec(options, args.platform), shape_of(args.model))
    load = ClosedLoop(args.concurrency, requests=args.requests or 2 * args.concurrency)
    spec = engine_spec(options, args.platform, args.model, environment)
    engine = OfflineEngine(spec, worker=Path(__file__).with_name("bare_worker.py"))
    try:
        engine.run(workload, load)
        pairs = []
        for number, (measured, bare) in enumerate(
            pairs_of(engine, workload, load, environment, args.warm_up + args.pairs), start=-args.warm_up
        ):
            rates = f"{load.requests / measured:8.1f} measured {load.requests / bare:8.1f} bare (requests/s)"
            print(f"{'warm-up' if number < 0 else number + 1:>8} {rates} {bare / measured:.4f}", flush=True)
            if number >= 0:
                pairs.append((measured, bare))
                if args.out:
                    args.out.write_text(json.dumps({"spec": spec.key, "load": load.requests, "pairs": pairs}))
    finally:
        engine.close()
    seen = student_interval([math.log(bare / measured) for measured, bare in pairs])
    low, high = (math.exp(end) for end in (seen.low, seen.high))
    print(f"{args.model} at {args.concurrency} on {environment.gpu_name or environment.cpu}, vLLM {environment.vllm}")
    ratio = math.exp(seen.value)
    print(f"throughput measured/bare {ratio:.4f} (95 %: {low:.4f} to {high:.4f}), {len(pairs)} pairs")
    print(f"lower bound {low:.4f}: {'at least' if low >= BOUND else 'BELOW'} {BOUND}")


if __name__ == "__main__":
    main()
