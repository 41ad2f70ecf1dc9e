"""Does measuring slow down what is measured? Prints the ratio of throughputs, measured run over another loop.

    python studies/harness_cost.py --platform cuda --model opt-125m --concurrency 512 --pairs 30
    python studies/harness_cost.py --platform cuda --model opt-1.3b --concurrency 128 --requests 128 --latency
    python studies/harness_cost.py --again studies/results/latency-h200-vllm-0.26.0.json

Both serve the same requests with the same admission and output kind on the same engine, in alternating order, and
both clocks are the engine process's own. OPT-125M at 512 is the hardest case: there the front end is the limit.

With --latency the other is the loop of `vllm bench latency`, in vLLM's synchronous engine on the same device, each idle
while the other works: with our requests, then with its sampling, then with its prompts, too. A step there takes as many
tokens as vLLM lets its synchronous engine, 16,384 on a GPU of 70 GiB or more where ours takes 8,192.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from common import engine_parser, keep, results_in

from pytest_slmserve.analysis.estimates import student_interval
from pytest_slmserve.engines.server import OfflineEngine
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.plan.planner import engine_spec, workload_spec
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB, ClosedLoop, EngineSpec, Workload
from pytest_slmserve.telemetry.host import probe
from pytest_slmserve.workload.requests import build_workload

BOUND = 0.99
MEASURED = "measured"
Arms = Mapping[str, Callable[[], float]]  # seconds of one job, by name


class BareEngine(OfflineEngine):
    worker = Path(__file__).with_name("bare_worker.py")


class LatencyEngine(OfflineEngine):
    worker = Path(__file__).with_name("latency_worker.py")


def measured_s(engine: OfflineEngine, workload: Workload, load: ClosedLoop, environment: Environment) -> float:
    [measured] = measure_case(engine, Case(engine.spec, (workload,), (load,), environment))
    began, ended = measured.run.window_s
    return ended - began


def bare_s(engine: OfflineEngine, load: ClosedLoop) -> float:
    answer = engine.ask(op="bare", concurrency=load.concurrency, requests=load.requests)
    return float(answer["seconds"])


def latency_s(engine: OfflineEngine, workload: Workload, requests: int, **kind: object) -> float:
    engine.load_requests(workload)
    outputs = workload.requests[0].output_tokens
    return float(engine.ask(op="batch", requests=requests, output_tokens=outputs, **kind)["seconds"])


def latency_arms(engine: OfflineEngine, workload: Workload, requests: int) -> Arms:
    """The loop of `vllm bench latency` with our requests, with its sampling, and with its prompts, too."""
    arm = partial(latency_s, engine, workload, requests)
    return {
        "latency, our requests": partial(arm, temperature=0.0, own=False),
        "latency, its sampling": partial(arm, temperature=1.0, own=False),
        "latency, its prompts too": partial(arm, temperature=1.0, own=True),
    }


def rounds_of(arms: Arms, count: int) -> Iterator[dict[str, float]]:
    """Seconds of each arm, the order turned round from round to round."""
    names = list(arms)
    for number in range(count):
        seconds = {name: arms[name]() for name in (reversed(names) if number % 2 else names)}
        yield {name: seconds[name] for name in names}


def half_of_device(spec: EngineSpec, requests: int, workload: Workload) -> EngineSpec:
    """The engine with memory for so many requests and no more, so that another fits beside it."""
    if spec.platform != "cuda":
        return spec
    per_token = model_of(spec.model).kv_bytes_per_token()
    tokens = max(len(request.prompt) + request.output_tokens for request in workload.requests)
    return replace(spec, kv_cache_bytes=round(1.02 * requests * tokens * per_token) + GIB, gpu_memory_utilization=0.1)


def tell(rounds: Sequence[Mapping[str, float]]) -> None:
    for name in list(rounds[0])[1:]:
        seen = student_interval([math.log(one[name] / one[MEASURED]) for one in rounds])
        ratio, low, high = (math.exp(end) for end in (seen.value, seen.low, seen.high))
        print(f"throughput measured/{name} {ratio:.4f} (95%: {low:.4f} to {high:.4f}), {len(rounds)} pairs")
        print(f"  lower bound {low:.4f}: {'at least' if low >= BOUND else 'BELOW'} {BOUND}")


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--requests", type=int, help="of each run; default: twice the concurrency")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3, help="pairs that are not counted")
    parser.add_argument("--latency", action="store_true", help="against vllm bench latency, not the bare loop")
    args = parser.parse_args()
    if args.again:
        for load, rounds in results_in(args.again)["pairs"].items():
            print(f"at {load}")
            tell(rounds)
        return
    options = read_options({}, {}, {})
    environment = probe(args.platform).environment
    workload = build_workload(workload_spec(options, args.platform), model_of(args.model))
    load = ClosedLoop(args.concurrency, requests=args.requests or 2 * args.concurrency)
    assert load.requests
    spec = engine_spec(options, args.platform, args.model, environment)
    if args.latency:
        spec = half_of_device(spec, load.requests, workload)
    engine, other = (OfflineEngine if args.latency else BareEngine)(spec).start(), None
    try:
        arms = {MEASURED: partial(measured_s, engine, workload, load, environment)}
        if args.latency:
            other = LatencyEngine(spec).start()
            arms |= latency_arms(other, workload, load.requests)
        else:
            arms["bare"] = partial(bare_s, engine, load)
        engine.run(workload, load)
        rounds = []
        for number, found in enumerate(rounds_of(arms, args.warm_up + args.pairs), start=-args.warm_up):
            rates = ", ".join(f"{load.requests / seconds:.1f} {name}" for name, seconds in found.items())
            print(f"{'warm-up' if number < 0 else number + 1:>8} {rates} (requests/s)", flush=True)
            if number >= 0:
                rounds.append(found)
                keep(args.out, {"spec": spec.key, "load": load.requests, "pairs": {args.concurrency: rounds}})
    finally:
        engine.close()
        if other:
            other.close()
    print(f"{args.model} at {args.concurrency} on {environment.gpu_name or environment.cpu}, vLLM {environment.vllm}")
    tell(rounds)


if __name__ == "__main__":
    main()
