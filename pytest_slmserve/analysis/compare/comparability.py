"""May two measurements be held against each other, one of them stored? One list of what has to match.

It is the machine, the limits the engine works under, and what was asked of it. What may differ is what is tested: vLLM
with its torch, CUDA and attention backend, capture sizes, scheduling, further engine arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
    """One thing that has to match. of: its value, None where it is not known. apart: by how much numbers may differ.

    untold: may both sides leave it unknown? of_gpu: only of a GPU has it to be known; of another device both may.
    """

    words: str
    of: Callable[[Measurement], Any]
    shown: Callable[[Any], str] = str
    apart: float = 0.0
    untold: bool = False
    of_gpu: bool = False


def why_not(baseline: Measurement, candidate: Measurement, facts: Sequence[Fact] | None = None) -> tuple[str, ...]:
    """Reasons why the speeds of two measurements cannot be compared, a short clause per mismatch; empty if they can be.
    facts: those that have to match, all by default.

    "There" is the baseline, "here" the candidate. A fact that is known on one side alone is a mismatch.
    """
    seen = ((fact, fact.of(baseline), fact.of(candidate)) for fact in facts or FACTS)
    on_gpu = "cuda" in (baseline.environment.platform, candidate.environment.platform)
    return tuple(_clause(fact, there, here) for fact, there, here in seen if not _match(fact, there, here, on_gpu))


def warnings(baseline: Measurement, candidate: Measurement) -> tuple[str, ...]:
    """Warnings about two comparable measurements, one sentence each: other hosts, time between, unknown facts."""
    return (*_host(baseline, candidate), *_distance(baseline, candidate), *_untold(baseline, candidate))


def one_boot(*measurements: Measurement) -> bool:
    """Were all measured on one host, without a boot between?"""
    hosts = hosts_of(measurements)
    return len(hosts) == 1 and None not in hosts


def _match(fact: Fact, there: Any, here: Any, on_gpu: bool) -> bool:
    if there is None and here is None:
        return fact.untold or (fact.of_gpu and not on_gpu)
    if EFFECT in (there, here):
        return there is not None and here is not None
    if there is None or here is None or not fact.apart:
        return bool(there == here)
    return math.isclose(there, here, rel_tol=fact.apart)


def _clause(fact: Fact, there: Any, here: Any) -> str:
    """ "driver 570.1 there, 580.2 here" """
    if there is None and here is None:
        return f"{fact.words} known on neither side"
    return f"{fact.words} {_shown(fact, there)} there, {_shown(fact, here)} here"


def _shown(fact: Fact, value: Any) -> str:
    if value is EFFECT:
        return "as the power limit allows"
    return "not known" if value is None else fact.shown(value)


def _host(baseline: Measurement, candidate: Measurement) -> Iterator[str]:
    hosts = baseline.environment.host, candidate.environment.host
    if not all(hosts):
        yield "it is not known whether the baseline is of this host: hosts of one kind differ"
    elif not one_boot(baseline, candidate):
        yield "the baseline is of another host, or from before a boot: hosts of one kind differ"
    systems = baseline.environment.operating_system, candidate.environment.operating_system
    if systems[0] != systems[1]:
        yield f"operating system {systems[0] or 'not known'} there, {systems[1] or 'not known'} here"


def _distance(baseline: Measurement, candidate: Measurement) -> Iterator[str]:
    """Yields a warning if much time, or an unknown time, lies between the measurements, in which a machine drifts."""
    try:
        there, here = moment(baseline.measured_at), moment(candidate.measured_at)
    except ValueError:
        yield "it is not known how much time lies between the two"
        return
    if (days := abs((here - there).total_seconds()) / 86_400) >= FAR_DAYS:
        order = "older" if there < here else "younger"
        yield f"the baseline is {days:.0f} day{'' if days < 1.5 else 's'} {order}"


def _untold(baseline: Measurement, candidate: Measurement) -> Iterator[str]:
    on_gpu = "cuda" in (baseline.environment.platform, candidate.environment.platform)
    for fact in FACTS:
        if (on_gpu or not fact.of_gpu) and fact.untold and fact.of(baseline) is None and fact.of(candidate) is None:
            yield f"the {fact.words} is known on neither side"


def _load(load: Load) -> str:
    match load:
        case ClosedLoop():
            window = "no window" if load.requests else f"window {load.window_s:g} s"
            return f"{load.title} (ramp-up {load.ramp_up}, {window}, warm-up {load.settle_lifetimes:g})"
        case OpenLoop(requests=None):
            return f"arrivals {load.arrivals} (window {load.window_s:g} s after {load.settle_s:g} s)"
    return f"job of {load.title}"


def sharing_of(measurement: Measurement) -> str:
    """ "alone", or "2 engines by mps"; MIG shows in the GPU's name and memory as well."""
    beside = measurement.replica
    if beside is None or beside.count == 1:
        return "alone"
    share = "" if beside.thread_percentage is None else f", {beside.thread_percentage} % of the threads"
    return f"{beside.count} engines by {beside.sharing}{share}{', pinned' if beside.pinned else ''}"


def _sm_clock_hz(measurement: Measurement) -> Any:
    """The largest of the window. Under the power limit it is what the load leaves of it: an effect, not a setting."""
    clock, held = _largest(measurement, SM_CLOCK), device_figures(measurement.run).power_capped
    return EFFECT if clock is not None and held is not None and held > POWER_HELD else clock


def _largest(measurement: Measurement, number: int) -> float | None:
    watch = watched(measurement.run)
    return max(watch.values(number), default=None) if watch else None


def _kv_tokens(measurement: Measurement) -> int | None:
    """Tokens that the KV cache holds, or None: a release that changes the size of a block alone changes no limit."""
    blocks, size = measurement.resolved.kv_blocks, measurement.resolved.block_size
    return None if blocks is None or size is None else blocks * size


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _mhz(clock: float) -> str:
    return f"{clock / 1e6:.0f} MHz"


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
    Fact("GPU memory", attrgetter("environment.gpu_memory_bytes"), _mib, of_gpu=True),
    Fact("driver", attrgetter("environment.driver"), of_gpu=True),
    Fact("power limit", lambda m: device_figures(m.run).power_limit_w, "{:g} W".format, of_gpu=True),
    Fact("SM clock", _sm_clock_hz, _mhz, APART, untold=True, of_gpu=True),
    Fact("memory clock", lambda m: _largest(m, MEMORY_CLOCK), _mhz, APART, untold=True, of_gpu=True),
    Fact("sharing", sharing_of),
    Fact("CPU", attrgetter("environment.cpu"), untold=True),
    Fact("cores", attrgetter("environment.cores")),
)
FACTS = (
    *MACHINE_FACTS,
    *(Fact(name, attrgetter(f"resolved.{name}")) for name in LIMITS),
    Fact("KV cache", _kv_tokens, "{:,} tokens".format, APART),
)
