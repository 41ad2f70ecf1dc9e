"""Facts that have to match if two measurements are compared.

They are of the machine, of the limits the engine works under, and of what was requested of it. What may differ is what
is tested: vLLM with its torch, CUDA and attention backend, capture sizes, scheduling, further engine arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pytest_slmserve.analysis.device.gpu_figures import device_figures, watched
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.loads import ClosedLoop, Load, OpenLoop
from pytest_slmserve.schema.records import Measurement, hosts_of, moment
from pytest_slmserve.schema.sensors import MEMORY_CLOCK, SM_CLOCK

APART = 0.01  # of clocks and KV blocks: a step of the SM clock is 15 MHz, below 1 %; blocks are what memory is left
POWER_HELD = 0.01  # share of a window from which on the power limit, not a setting, decides the clock
FAR_DAYS = 1.0
EFFECT = object()  # in place of a value that the load made, and no setting of the machine: no reason not to compare


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that has to match. of: its value, None if it is not known. apart: by how much numbers may differ.

    optional: whether both sides may leave it unknown. of_gpu: whether it has to be known of a GPU only.
    """

    words: str
    of: Callable[[Measurement], Any]
    shown: Callable[[Any], str] = str
    apart: float = 0.0
    optional: bool = False
    of_gpu: bool = False


def why_not(baseline: Measurement, candidate: Measurement, facts: Sequence[Fact] | None = None) -> tuple[str, ...]:
    """Return the reasons why the speeds of two measurements cannot be compared, a short clause per mismatch, for
    example "driver 570.1 there, 580.2 here". "There" is the baseline, "here" the candidate. A fact that only one side
    knows is a mismatch.

    Args:
        facts: Facts that have to match, all by default.
    """
    on_gpu = "cuda" in (baseline.environment.platform, candidate.environment.platform)
    clauses = []
    for fact in facts or FACTS:
        there, here = sides = fact.of(baseline), fact.of(candidate)
        if sides == (None, None):
            if not (fact.optional or (fact.of_gpu and not on_gpu)):
                clauses.append(f"{fact.words} known on neither side")
            continue
        if None in sides:
            match = False
        elif EFFECT in sides:
            match = True
        else:
            match = math.isclose(*sides, rel_tol=fact.apart) if fact.apart else there == here
        if not match:
            shown = [
                "not known" if side is None else "as the power limit allows" if side is EFFECT else fact.shown(side)
                for side in sides
            ]
            clauses.append(f"{fact.words} {shown[0]} there, {shown[1]} here")
    return tuple(clauses)


def warnings(baseline: Measurement, candidate: Measurement) -> tuple[str, ...]:
    """Return warnings about two comparable measurements, one sentence each: other hosts, a time between them in which a
    machine drifts, unknown facts."""
    there, here = baseline.environment, candidate.environment
    found = []
    if not (there.host and here.host):
        found.append("it is not known whether the baseline is of this host: hosts of one kind differ")
    elif not one_boot(baseline, candidate):
        found.append("the baseline is of another host, or from before a boot: hosts of one kind differ")
    found += why_not(baseline, candidate, [OPERATING_SYSTEM])
    try:
        days = (moment(candidate.measured_at) - moment(baseline.measured_at)).total_seconds() / 86_400
    except ValueError:
        found.append("it is not known how much time lies between the two")
    else:
        if abs(days) >= FAR_DAYS:
            order = "older" if days > 0 else "younger"
            found.append(f"the baseline is {abs(days):.0f} day{'' if abs(days) < 1.5 else 's'} {order}")
    on_gpu = "cuda" in (there.platform, here.platform)
    for fact in FACTS:
        if fact.optional and (on_gpu or not fact.of_gpu) and fact.of(baseline) is None is fact.of(candidate):
            found.append(f"the {fact.words} is known on neither side")
    return tuple(found)


def one_boot(*measurements: Measurement) -> bool:
    """Return whether all were measured on one host, without a boot between."""
    hosts = hosts_of(measurements)
    return len(hosts) == 1 and None not in hosts


def sharing_of(measurement: Measurement) -> str:
    """Return "alone", or "2 engines by mps"; MIG shows in the GPU's name and memory as well."""
    replica = measurement.replica
    if replica is None or replica.count == 1:
        return "alone"
    share = "" if replica.thread_percentage is None else f", {replica.thread_percentage} % of the threads"
    return f"{replica.count} engines by {replica.sharing}{share}{', pinned' if replica.pinned else ''}"


def _load(load: Load) -> str:
    match load:
        case ClosedLoop():
            window = "no window" if load.requests else f"window {load.window_s:g} s"
            return f"{load.title} (ramp-up {load.ramp_up}, {window}, warm-up {load.settle_lifetimes:g})"
        case OpenLoop(requests=None):
            return f"arrivals {load.arrivals} (window {load.window_s:g} s after {load.settle_s:g} s)"
    return f"job of {load.title}"


def _clock_mhz(measurement: Measurement, number: int) -> Any:
    """Return the largest reading of a clock in the window, None if there is none. An SM clock under the power limit is
    what the load leaves of it: an effect, not a setting."""
    watch, capped = watched(measurement.run), device_figures(measurement.run).power_capped
    largest = max(watch.values(number), default=None) if watch else None
    if largest is not None and number == SM_CLOCK and capped is not None and capped > POWER_HELD:
        return EFFECT
    return None if largest is None else largest / 1e6


def _kv_tokens(measurement: Measurement) -> int | None:
    """Return the tokens that the KV cache holds, or None. A release that changes only the size of a block changes no
    limit."""
    blocks, size = measurement.resolved.kv_blocks, measurement.resolved.block_size
    return None if blocks is None or size is None else blocks * size


LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "dtype", "chunked_prefill", "prefix_caching")

MACHINE_FACTS: tuple[Fact, ...] = (
    Fact("model", lambda m: short_name(m.spec.model)),
    Fact("load format", attrgetter("spec.load_format")),
    Fact("workload", attrgetter("workload.hash")),
    Fact("load", attrgetter("load"), _load),
    Fact("interface", attrgetter("spec.interface")),
    Fact("prompts from a cache", attrgetter("spec.allow_prefix_cache"), lambda may: "allowed" if may else "refused"),
    Fact("platform", attrgetter("environment.platform")),
    Fact("GPU", attrgetter("environment.gpu_name"), of_gpu=True),
    Fact(
        "GPU memory", attrgetter("environment.gpu_memory_bytes"), lambda size: f"{size / 2**20:,.0f} MiB", of_gpu=True
    ),
    Fact("driver", attrgetter("environment.driver"), of_gpu=True),
    Fact("power limit", lambda m: device_figures(m.run).power_limit_w, "{:g} W".format, of_gpu=True),
    Fact("SM clock", lambda m: _clock_mhz(m, SM_CLOCK), "{:.0f} MHz".format, APART, optional=True, of_gpu=True),
    Fact("memory clock", lambda m: _clock_mhz(m, MEMORY_CLOCK), "{:.0f} MHz".format, APART, optional=True, of_gpu=True),
    Fact("sharing", sharing_of),
    Fact("CPU", attrgetter("environment.cpu"), optional=True),
    Fact("cores", attrgetter("environment.cores")),
)
OPERATING_SYSTEM = Fact("operating system", attrgetter("environment.operating_system"), optional=True)
FACTS = (
    *MACHINE_FACTS,
    *(Fact(name, attrgetter(f"resolved.{name}")) for name in LIMITS),
    Fact("KV cache", _kv_tokens, "{:,} tokens".format, APART),
)
