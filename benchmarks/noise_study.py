"""Coverage of the intervals, wrong verdicts and cost of sweeps on hosts whose noise is known, by simulation.

    python benchmarks/noise_study.py --runs 1000

Each run is a sweep of the simulated engine whose speed follows the noise of a host, carried out by the code that
measures real engines: rounds, judgement, more rounds. Three truths: the last doubling gains 5 %, 10 % (the bound) and
16 %. A 95 % interval should cover in 95 % of the runs, the whole of a sweep's looks together; a verdict should be wrong
in 2.5 % at most. Prints the table of docs/method.md.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.points.sweep_points import by_series
from pytest_slmserve.analysis.sweep.curve import PLATEAU
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines.host_noise import TICK_S
from pytest_slmserve.options.read import read_options
from pytest_slmserve.run.session import Session
from pytest_slmserve.run.sweeps import Sweeps
from pytest_slmserve.telemetry.host_probe import probe

MODEL, GRID = "opt-125m", (1, 2, 4, 8, 16, 32, 64, 128, 256)
STEP_S = 0.02  # of the largest load, as on a GPU
OUTPUT = 128  # tokens of a request: its lifetime is then a second and a half to three, as on a GPU
NOISES: dict[str, str] = {
    "none": "white:0.0001",
    "white 10 %": "white:0.1",
    "1/f 12 %": "pink:0.12",
    "1/f 20 %": "pink:0.2",
    "OU 10 %, 1 s": "ou:0.1:1",
    "OU 10 %, 10 s": "ou:0.1:10",
    "slow 20 % of the time": "slow:0.2:0.3:2",
    "launches 4 % apart": "states:0.04",
}
RECORDED = (Path(__file__).parent / "baselines" / "h200-vllm-0.26.0-spread.jsonl.xz", "opt-125m", 512)
HOST = probe("simulated")


@dataclass(frozen=True)
class Outcome:
    """One sweep: whether each gain's interval covers the truth, the verdict on the plateau, and seconds of the GPU."""

    covered: tuple[bool, ...]
    state: State
    seconds: float
    repeats: int


def b_half_of(gain: float) -> float:
    """b_half of the law whose last doubling gains so much: T(2B)/T(B) = 2(B + b)/(2B + b)."""
    largest = GRID[-1]
    return largest * gain / (1 - gain)


def recorded(archive: Path, model: str, concurrency: int) -> tuple[float, ...]:
    """Factors of the speed in ticks, by the step traces of an archive."""
    factors: list[float] = []
    for m in read(archive).measurements:
        if m.spec.model.endswith(model) and m.load.max_concurrency == concurrency and by_series([m]):
            times, tokens = window.spans(m.run)
            steps = window.window_steps(m.run)
            ticks = Counter[int]()
            for at, made in zip(times[steps.start + 1 : steps.stop], tokens[steps.start + 1 : steps.stop]):
                ticks[int((at - times[steps.start]) / TICK_S)] += made
            whole = [ticks[i] for i in range(len(ticks) - 1)]
            factors += [each * len(whole) / sum(whole) for each in whole]
    return tuple(factors)


def one(noise: str, gain: float, seed: int) -> Outcome:
    """One sweep on a host of its own."""
    b_half = b_half_of(gain)
    arguments = {"t_inf": (GRID[-1] + b_half) / STEP_S, "b_half": b_half, "noise": 0, "sensors": False}
    given = {
        "simulate": True,
        "models": MODEL,
        "concurrency": ",".join(map(str, GRID)),
        "input_len": "8",
        "output_len": str(OUTPUT),
        "window": "2",
        "seed": str(seed),
        "budget": "240",
        "engine_arg": [f"{name}={json.dumps(value)}" for name, value in arguments.items()] + [f"host_noise={noise}"],
    }
    session = Session.from_options(read_options(given, {}, {}), Path.cwd(), HOST)
    sweeps = Sweeps(session, {MODEL: GRID}, {MODEL: [PLATEAU]})
    rounds = sweeps.carry_out(MODEL)
    curve = session.verdicts.curve(MODEL)
    session.close()
    truth = [2 * (a + b_half) / (2 * a + b_half) - 1 for a in GRID[:-1]]
    covered = tuple((g.low or 0) <= t <= (g.high or 0) for g, t in zip(curve.gains(), truth, strict=True))
    most = max(len(p.repeats) for p in curve.points)
    return Outcome(covered, curve.pareto_plateau(0.1).state, rounds.spent_s, most)


def study(noise: str, gain: float, seeds: Sequence[int], pool: ProcessPoolExecutor) -> str:
    found = list(pool.map(one, *zip(*((noise, gain, seed) for seed in seeds)), chunksize=8))
    n, states = len(found), Counter(each.state for each in found)
    each_load = [sum(f.covered[i] for f in found) / n for i in range(len(GRID) - 1)]
    wrong = {0.05: [State.FAILS], 0.10: [State.HOLDS, State.FAILS], 0.16: [State.HOLDS]}[gain]
    return (
        f"{gain:5.0%} | {each_load[-1]:6.1%} | {min(each_load):6.1%} to {max(each_load):6.1%} | "
        f"{sum(states[s] for s in wrong) / n:6.1%} | {1 - states[State.UNDECIDED] / n:6.1%} | "
        f"{sum(f.seconds for f in found) / n:6.0f} s | {sum(f.repeats for f in found) / n:4.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="of each noise and truth")
    parser.add_argument("--noise", help="only those whose name has this in it", default="")
    given = parser.parse_args()
    print("noise | gain | last covered | each covered | wrong | decided | GPU | repeats")
    noises = {**NOISES, "recorded: " + " ".join(map(str, RECORDED[1:])): json.dumps(recorded(*RECORDED))}
    with ProcessPoolExecutor() as pool:
        for name, noise in noises.items():
            for gain in (0.05, 0.10, 0.16) if given.noise in name else ():
                print(f"{name} | {study(noise, gain, range(given.runs), pool)}", flush=True)


if __name__ == "__main__":
    main()
