"""Simulated engines on several GPUs, whose waits are planted: what they serve, as a curve on the fewest of them."""

from dataclasses import replace
from itertools import count

from measured import measure

from pytest_slmserve.analysis.compare.deployments import with_wider
from pytest_slmserve.analysis.points import shared_points
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of, with_shared
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.schema.records import Environment, Measurement
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, ReplicaSpec, Request, Workload, WorkloadSpec

WORKLOAD = Workload(WorkloadSpec(prompt_tokens=64, output_tokens=32, requests=16), (Request((5,) * 64, 32),) * 16, "")
HERE = Environment(platform="simulated")
# A simulated repeat may take less than the millisecond that stamps have.
SECONDS = (f"2026-01-01T{n // 3600:02d}:{n // 60 % 60:02d}:{n % 60:02d}.000+00:00" for n in count())
PLANTED = {"all_reduce_s": 1e-3, "imbalance": 0.2}
T_INF, B_HALF = 1000.0, 16.0  # a step of 16 takes 32 ms on one GPU, and has four all-reduces on more


def engine(gpus: int = 1, room: int = 1024, **planted: float) -> EngineSpec:
    facts = {"t_inf": T_INF, "b_half": B_HALF, "noise": 0.001, **planted}
    extra = tuple(sorted(facts.items()))
    return EngineSpec("opt-tiny", platform="simulated", tensor_parallel_size=gpus, max_num_seqs=room, extra=extra)


def alone(spec: EngineSpec, loads=(4, 16), repeats: int = 2) -> list[Measurement]:
    running = SimulatedEngine(spec)
    made = [measure(running, WORKLOAD, ClosedLoop(n, window_s=3.0), HERE) for n in loads for _ in range(repeats)]
    return [replace(m, measured_at=next(SECONDS)) for m in made]


def replicas(gpus: int, load: int = 16, repeats: int = 2, **planted: float) -> list[Measurement]:
    each = tuple(replace(engine(**planted), gpu=i) for i in range(gpus))
    spec, loads = ReplicaSpec(each, "gpus"), (ClosedLoop(load // gpus, window_s=3.0),) * gpus
    running, case = Pool().engine(spec), Case(spec, (WORKLOAD,) * gpus, loads, HERE)
    made = [(next(SECONDS), measure_case(running, case)) for _ in range(repeats)]
    return [replace(m, measured_at=at) for at, group in made for m in group]


def on_gpus(degrees=(1, 2, 4), *, shared=(), room=None, loads=(4, 16), repeats=2, **planted) -> Curve:
    """The curve on the fewest GPUs, with those on more. room: requests that run at once, by the number of GPUs."""
    specs = [engine(n, (room or {}).get(n, 1024), **planted) for n in degrees]
    curves = [curve_of("opt-tiny", alone(spec, loads, repeats)) for spec in specs]
    first, *_ = with_wider(with_shared(curves, shared_points(shared)))
    return first
