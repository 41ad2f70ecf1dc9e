"""How long `slmserve report` takes on 100 measurements of about 2,500 engine steps each.

    python benchmarks/report_speed.py [ARCHIVE]

Without an archive it makes one from the simulated engine, whose times and counts it roughens, since real ones do not
compress as well. Interpreter start and imports are part of the time, compiling the package is not: an installation has
its bytecode, and a first run that is not counted writes that of a checkout. Exit status 1 where the median is over a
second.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.claims import table as lookup
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.run.executor import measure
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.loads import ClosedLoop, Workload
from pytest_slmserve.schema.records import Measurement, Run
from pytest_slmserve.schema.specs import EngineSpec, WorkloadSpec
from pytest_slmserve.workload.requests import build_workload

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS = 10
STEPS = 2500
T_INF, B_HALF = 20_000.0, 50.0
LIMIT_S = 1.0
RUNS = 7
ENVIRONMENT = Environment(platform="simulated", gpu_name="simulated")


def simulate(concurrency: int, workload: Workload) -> Measurement:
    window_s = (STEPS - 2 * workload.mean_output_tokens) * (B_HALF + concurrency) / T_INF
    engine = SimulatedEngine(EngineSpec("opt-125m", platform="simulated", extra=(("t_inf", T_INF), ("b_half", B_HALF))))
    return measure(engine, workload, ClosedLoop(concurrency, window_s), ENVIRONMENT)


def roughened(measurement: Measurement, repeat: int) -> Measurement:
    """Another repeat: each step a little longer or shorter, and a KV usage that changes with each."""
    run = measurement.run
    speed = 1 + 0.002 * math.sin(repeat)

    def later(stamps):
        return tuple(None if t is None else round(speed * t + 2e-4 * math.sin(997 * t + repeat), 6) for t in stamps)

    samples = replace(
        run.samples,
        **{n: later(getattr(run.samples, n)) for n in ("sent_s", "admitted_s", "first_token_s", "last_token_s")},
    )
    usage = tuple(round(0.5 + 0.1 * math.sin(step + repeat), 6) for step in range(len(run.steps)))
    steps = replace(run.steps, time_s=later(run.steps.time_s), kv_usage=usage)
    start, stop = later(run.window_s)
    seconds = f"{repeat // 60:02d}:{repeat % 60:02d}"
    return replace(
        measurement, run=Run(samples, steps, (start, stop)), measured_at=f"2026-01-01T00:{seconds}.000+00:00"
    )


def make(path: Path) -> None:
    workload = build_workload(WorkloadSpec(), model_of("opt-125m"))
    with Archive.open(path) as archive:
        archive.begin({"rows": [lookup.row_to_record(row) for row in table.ROWS]}, {})
        for concurrency in BATCHES:
            simulated = simulate(concurrency, workload)
            for repeat in range(REPEATS):
                archive.add(roughened(simulated, repeat))
    print(f"{len(BATCHES) * REPEATS} measurements, about {STEPS} steps each, {path.stat().st_size / 1e6:.2f} MB")


def seconds(path: Path) -> float:
    """Of one report, as a person waits for it."""
    command = [sys.executable, "-m", "pytest_slmserve", "report", os.fspath(path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    took = time.perf_counter() - began
    if done.returncode not in (0, 1, 10):
        sys.exit(done.stderr)
    return took


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(arguments[0]) if arguments else Path(folder) / "records.jsonl.gz"
        if not arguments:
            make(path)
        times = [seconds(path) for _ in range(1 + RUNS)][1:]
    median = statistics.median(times)
    print(f"report: median {median:.2f} s of {RUNS} runs ({min(times):.2f} to {max(times):.2f}), limit {LIMIT_S:g} s")
    return int(median > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
