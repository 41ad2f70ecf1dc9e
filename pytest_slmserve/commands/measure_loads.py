"""Loads that `measure` puts on a server, by its arguments: when requests are sent, and until when."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

from pytest_slmserve.commands.cli import Parser
from pytest_slmserve.commands.measure_requests import check_lengths, requests_for, requests_in_order, trace_of
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import ClosedLoop, Load, OpenLoop
from pytest_slmserve.schema.specs import short_hash
from pytest_slmserve.schema.workloads import Workload
from pytest_slmserve.workload.arrivals import Arrivals, job, schedule

WINDOW_S = 10.0
SETTLE_S = 5.0
MOST = 10_000_000  # requests of a load, or tokens of one: a run holds each of them

Asked = list[tuple[Load, "Workload"]]


def add_arguments(command: Parser) -> None:
    users = "requests kept in flight; with --request-rate and --num-prompts: in flight at most"
    command.add_argument("--max-concurrency", metavar="N", type=int, help=users)
    sent = (
        "requests sent per second, whatever comes back; several are measured one after the other: 1,2,4; inf: at once"
    )
    command.add_argument("--request-rate", metavar="RATE,...", type=rates, help=sent)
    command.add_argument("--ramp", metavar="RATE,...", type=rates, help="one load whose rate goes up in steps: 5,10,20")
    trace = "an Azure or Mooncake trace: its times, its lengths"
    command.add_argument("--trace", metavar="PATH", type=Path, help=trace)
    uneven = (
        "shape of the gaps of rates: 1 is Poisson (default), less comes in bursts, more is more even, inf is constant"
    )
    command.add_argument("--burstiness", metavar="SHAPE", type=float, default=1.0, help=uneven)
    command.add_argument("--step", metavar="S", type=some_seconds, help="seconds of each step of --ramp, 30 or 30s")
    command.add_argument("--speed", metavar="X", type=float, default=1.0, help="speed of --trace: 2 is twice as fast")
    number = (
        "end after so many requests, all of which count; of --max-concurrency or one rate (default: a steady window)"
    )
    command.add_argument("--num-prompts", metavar="N", type=int, help=number)
    settle = f"seconds before what is judged: before the window, and at the start of each step (default: {SETTLE_S:g})"
    command.add_argument("--settle", metavar="S", type=seconds, help=settle)
    window = f"seconds of the steady window (default: {WINDOW_S:g})"
    command.add_argument("--window", metavar="S", type=some_seconds, help=window)


def rates(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(rate > 0 for rate in found):
        raise BadUsage(f"{text!r} are no rates", "requests per second above 0, with commas between them: 1,2,4")
    return found


def seconds(text: str) -> float:
    try:
        found = float(text.strip().removesuffix("s"))
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise BadUsage(f"{text!r} are no seconds", "30, or 30s")
    return found


def some_seconds(text: str) -> float:
    if not (found := seconds(text)):
        raise BadUsage("in 0 s nothing is measured", "30, or 30s")
    return found


def asked(given: argparse.Namespace) -> Asked:
    """Each load with its requests. Raises BadUsage, and BadDataset for a trace that is none."""
    given.seed = given.seed or 0
    check_belonging(given)
    given.settle = SETTLE_S if given.settle is None else given.settle
    if given.trace:
        return [traced(given)]
    loads = loads_of(given)
    return list(zip(loads, requests_for(loads, given), strict=True))


def check_belonging(given: argparse.Namespace) -> None:
    """Raises BadUsage where something was typed that has no part in this load: it would be ignored."""
    check_one_load(given)
    check_lengths(given)
    for name in ("max_concurrency", "num_prompts", "input_len", "output_len"):
        if (getattr(given, name) or 0) > MOST:
            raise BadUsage(f"--{name.replace('_', '-')} is more than {MOST:,}", "a smaller number")
    if given.step is not None and not given.ramp:
        raise BadUsage("--step is of a ramp", "--ramp 5,10,20 --step 30")
    if given.speed != 1 and not given.trace:
        raise BadUsage("--speed is of a trace", "--trace PATH --speed 2")
    if given.burstiness != 1 and not (given.request_rate or given.ramp):
        raise BadUsage("--burstiness is of rates", "--request-rate 10 --burstiness 0.5")
    if not given.burstiness > 0:
        raise BadUsage(f"--burstiness {given.burstiness:g} is no shape of gaps", "--burstiness 0.5, which is uneven")
    if given.settle is not None and (given.max_concurrency or given.num_prompts is not None):
        raise BadUsage("--settle is of rates, ramps and traces in a window", "--request-rate 10 --window 60 --settle 5")
    if given.trace and given.num_prompts is not None:
        raise BadUsage("--trace has a window, not a number of requests", "--window 60")


LOADS = ("max_concurrency", "request_rate", "ramp", "trace")
HELD_BACK = ["max_concurrency", "request_rate"]


def check_one_load(given: argparse.Namespace) -> None:
    """Raises BadUsage where nothing says what the load is, or two things do that are no load together."""
    typed = [name for name in LOADS if getattr(given, name) is not None]
    words = [f"--{name.replace('_', '-')}" for name in typed]
    if not typed:
        raise BadUsage("no load is given", "--max-concurrency 64, or --request-rate 10")
    if len(typed) > 1 and typed != HELD_BACK:
        raise BadUsage(f"{' and '.join(words)} are {len(typed)} loads", "one of them")
    if typed == HELD_BACK and given.num_prompts is None:
        raise BadUsage("a rate with a limit on what is in flight is of a number of requests", "--num-prompts 512")
    if given.num_prompts is not None and given.num_prompts < 1:
        raise BadUsage(f"--num-prompts {given.num_prompts} is no number of requests", "--num-prompts 512")
    if given.max_concurrency is not None and given.max_concurrency < 1:
        raise BadUsage(
            f"--max-concurrency {given.max_concurrency} is no number of requests in flight", "--max-concurrency 1"
        )


def loads_of(given: argparse.Namespace) -> list[Load]:
    if given.max_concurrency is not None and not given.request_rate:
        return [closed_loop(given)]
    if given.ramp:
        return [ramp(given)]
    return [at_rate(given, rate) for rate in given.request_rate] if given.num_prompts is None else [job_of(given)]


def closed_loop(given: argparse.Namespace) -> ClosedLoop:
    if given.num_prompts is not None and given.window is not None:
        raise BadUsage("--num-prompts and --window are two ways to end", "one of them")
    if given.num_prompts is not None and given.num_prompts < given.max_concurrency:
        raise BadUsage(
            f"--num-prompts {given.num_prompts} cannot keep {given.max_concurrency} in flight",
            f"--num-prompts {given.max_concurrency}",
        )
    return ClosedLoop(given.max_concurrency, window_s=given.window or WINDOW_S, requests=given.num_prompts)


def job_of(given: argparse.Namespace) -> OpenLoop:
    """A number of requests, served to the end."""
    if given.window is not None:
        raise BadUsage("--num-prompts and --window are two ways to end", "one of them")
    if len(given.request_rate) > 1:
        raise BadUsage("several rates are judged in windows, not by a number of requests", "--window 60")
    (rate,) = given.request_rate
    if rate == math.inf and given.burstiness != 1:
        raise BadUsage("what comes all at once has no burstiness", "--request-rate 10")
    return job(given.num_prompts, rate, given.seed, given.max_concurrency, given.burstiness)


def least_s(load: Load) -> float:
    """Seconds that a load takes at least: how long the requests of an endpoint last is not known beforehand."""
    if isinstance(load, OpenLoop):
        arrivals_s = (load.requests or 0) / load.rate
        return arrivals_s if load.window_s is None else 2 * load.settle_s + load.window_s
    return 0.0 if load.requests else load.window_s


def at_rate(given: argparse.Namespace, rate: float) -> OpenLoop:
    if rate == math.inf:
        raise BadUsage("at --request-rate inf all requests come at once: how many?", "--num-prompts 512")
    arrivals = Arrivals("gamma", rate, given.burstiness, given.seed, duration_s=length_s(given))
    words = f"gamma {given.burstiness:g}, {rate:g}/s, seed {given.seed}"
    return windowed(given, words, rate, times_of(arrivals, length_s(given)))


def ramp(given: argparse.Namespace) -> OpenLoop:
    """The ramp that the arguments describe. Its last step continues for the settling time of a step, so that it ends
    under load as the others do. Raises BadUsage for arguments that no ramp has."""
    if given.num_prompts is not None:
        raise BadUsage("--ramp has steps, not a number of requests", "--step 60")
    if math.inf in given.ramp:
        raise BadUsage("a ramp has no step at which all requests come at once", "--request-rate inf --num-prompts 512")
    if given.step is None or given.window is not None:
        raise BadUsage(
            "a ramp is judged in steps", f"--step 30 {'instead of --window' if given.window else ''}".strip()
        )
    steps = tuple((rate, given.step) for rate in given.ramp)
    until_s = given.step * len(steps)
    sent = (*steps[:-1], (steps[-1][0], given.step + given.settle))
    times = times_of(Arrivals("ramp", steps=sent, burstiness=given.burstiness, seed=given.seed), until_s)
    listed = ",".join(f"{rate:g}" for rate in given.ramp)
    words = f"ramp {listed}/s, {given.step:g} s each, gamma {given.burstiness:g}, seed {given.seed}"
    mean = math.fsum(given.ramp) / len(steps)
    return replace(windowed(given, words, mean, times), window_s=until_s - given.settle, steps=steps)


def windowed(given: argparse.Namespace, words: str, rate: float, times: tuple[float, ...]) -> OpenLoop:
    window_s = given.window or WINDOW_S
    return OpenLoop(rate=rate, window_s=window_s, settle_s=given.settle, arrivals=words, schedule_s=times)


def length_s(given: argparse.Namespace) -> float:
    """The load goes on after the window, so that what was sent in it ends under it."""
    length: float = 2 * given.settle + (given.window or WINDOW_S)
    return length


def times_of(arrivals: Arrivals, within_s: float) -> tuple[float, ...]:
    steps = arrivals.steps or ((arrivals.rate or 0.0, within_s),)
    if sum(rate * seconds for rate, seconds in steps) > MOST:
        raise BadUsage(f"more than {MOST:,} requests come within {within_s:g} s", "fewer seconds, or a lower rate")
    times = schedule(arrivals)
    if not times:
        raise BadUsage(f"no request comes within {within_s:g} s", "more seconds, or a higher rate")
    return times


def traced(given: argparse.Namespace) -> tuple[Load, Workload]:
    """A trace's own times and lengths, from its beginning."""
    if not 0 < given.speed < math.inf:
        raise BadUsage(f"--speed {given.speed:g} is no speed", "--speed 2, which is twice as fast")
    length, window = length_s(given), given.window or WINDOW_S
    trace = trace_of(given, length * given.speed)
    arrivals = trace.arrivals(given.speed)
    words = f"trace {trace.source} {short_hash(arrivals.offsets_s)}, speed {given.speed:g}"
    times = times_of(arrivals, length)
    if not any(given.settle <= at < given.settle + window for at in times):
        judged = f"{given.settle:g} s and {given.settle + window:g} s"
        raise BadUsage(f"{given.trace} has no request between {judged}", "another --settle, --window or --speed")
    return windowed(given, words, len(times) / length, times), requests_in_order(given, trace)
