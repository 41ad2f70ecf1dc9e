"""Busy seconds of a GPU whose counters change every 0.1 s: each lap has those of its own time, whatever the phase of
the counters and however late they are looked at; what cannot be told is None, comes back, and no sample is left."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.telemetry import gpu as sources
from pytest_slmserve.telemetry.gpu import IDLE_WITHIN_S, TICK_S, BusyClock, busy_until_idle

OLD_S, COSTS_S = 0.03, 0.002  # how old a state is when it shows, and what it costs to take it


class Lost(Exception):
    """What a GPU that cannot be read raises."""


@dataclass
class FakeGpm:
    """Counters of a GPU with planted kernels, and the clock by which they change: at `phase`, and every tick after it.
    late: seconds by which polls are late, by their number. fails_at: the sample, or the answer, that there is not."""

    phase: float = 0.03
    late: dict[int, float] = field(default_factory=dict)
    fails_at: tuple[str, int] = ("", 0)
    kernels: list[tuple[float, float]] = field(default_factory=list)
    now: float = 1000.0
    polls: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)  # not freed
    ticks: list[int] = field(default_factory=list)  # of each sample
    metrics: dict[int, int] = field(default_factory=lambda: {2: of.SM_ACTIVE, 1: of.ENGINE_ACTIVE})

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.polls += 1
        self.now += seconds + self.late.get(self.polls, 0.0)

    def count(self, function):
        self.calls[function] = self.calls.get(function, 0) + 1
        if self.fails_at == (function, self.calls[function]):
            raise Lost

    def sample(self):
        self.count("sample")
        self.ticks.append(math.floor((self.now - self.phase) / TICK_S))
        self.now += COSTS_S
        self.live.add(len(self.ticks) - 1)
        return len(self.ticks) - 1

    def free(self, sample):
        self.live.remove(sample)

    def busy_before(self, tick):
        at_s = self.phase + tick * TICK_S - OLD_S
        return sum(max(0.0, min(ends, at_s) - begins) for begins, ends in self.kernels)

    def between(self, first, last):
        """Of two samples in one tick 0, as an H200 has it; and NVML refuses another number."""
        self.count("between")
        assert {first, last} <= self.live
        since, now = self.ticks[first], self.ticks[last]
        share = (self.busy_before(now) - self.busy_before(since)) / (TICK_S * max(1, now - since))
        return [SimpleNamespace(nvmlReturn=code, value=100 * each) for code, each in ((3, math.nan), (0, share))]

    def serve(self, seconds, share=1.0, steps=7, rest_s=0.0):
        """Kernels of equal steps, each with a gap behind it, and a rest; returns their seconds."""
        begins = [self.now + i * seconds / steps for i in range(steps)]
        self.kernels += [(at_s, at_s + share * seconds / steps) for at_s in begins]
        self.now += seconds + rest_s
        return share * seconds


@pytest.fixture(scope="module")
def clock_of():
    """Returns the clock of a fake GPU, which has served, and whose first lap has told nothing."""

    def begun(gpu):
        sources.time = gpu
        gpu.serve(1.0)
        clock = BusyClock(gpu, Lost)
        assert clock.lap() is None and len(gpu.live) == 1
        return clock

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "time", None)
        yield begun


STEPS = st.one_of(
    st.tuples(st.floats(0.3, 3), st.floats(0.3, 1), st.integers(1, 20)),
    st.tuples(st.floats(3, 20), st.floats(0.3, 1), st.integers(50, 100)),  # of which a tick is a small part
)
WINDOWS = st.lists(st.tuples(STEPS, st.floats(0, 0.4), st.floats(0, 0.4)), min_size=1, max_size=4)
LATE = st.dictionaries(st.integers(1, 200), st.floats(0, 0.07), max_size=40)


@given(st.floats(0, TICK_S), WINDOWS, st.just({}) | LATE)
def test_lap_tells_its_busy_seconds(clock_of, phase, windows, late):
    gpu = FakeGpm(phase, late)
    clock = clock_of(gpu)
    for steps, rest_s, pause_s in windows:
        wanted, ended_s, seen = gpu.serve(*steps, rest_s), gpu.now, clock.lap()
        assert seen == pytest.approx(wanted, abs=1e-6) or (late and seen is None)
        assert late or gpu.now - ended_s < 5 * TICK_S
        gpu.now += pause_s
    clock.close(), clock.close()
    assert not gpu.live


@pytest.mark.parametrize("late_s", [0.03, 0.06, 0.07])
@pytest.mark.parametrize("seconds", [1.3, 8.0])
def test_late_poll_is_corrected(clock_of, late_s, seconds):
    in_time = FakeGpm()
    clock_of(in_time)
    mark = in_time.polls
    for number in (None, *range(mark, mark + 30)):
        gpu = FakeGpm(late={number: late_s})
        clock, wanted, ended_s = clock_of(gpu), gpu.serve(seconds, 0.6), gpu.now
        assert clock.lap() == pytest.approx(wanted, abs=1e-6) and gpu.now < ended_s + 10 * TICK_S, number


@pytest.mark.parametrize("rest_s", [0.0, 0.5])  # 0.5: no kernel is seen after the lap's begin
def test_busy_gpu_leaves_lap_unknown(clock_of, rest_s):
    gpu = FakeGpm()
    clock, began_s = clock_of(gpu), gpu.now
    gpu.kernels.append((gpu.now, gpu.now + IDLE_WITHIN_S + 0.5))
    assert clock.lap() is None and IDLE_WITHIN_S <= gpu.now - began_s < IDLE_WITHIN_S + 0.02
    gpu.now += 0.5
    gpu.serve(1.5, 0.7, rest_s=rest_s)
    assert clock.lap() is None
    for seconds in (1.0, 2.0):
        assert gpu.serve(seconds, 0.5, rest_s=rest_s) == pytest.approx(clock.lap(), abs=1e-6)
    clock.close()
    assert not gpu.live
    gpu = FakeGpm()
    sources.time = gpu
    clock = BusyClock(gpu, Lost)
    assert clock.lap() is None and gpu.now == pytest.approx(1000 + IDLE_WITHIN_S, abs=0.02)
    for known in (False, True, True):
        wanted, ended_s = gpu.serve(2.0, 0.9, rest_s=0.3), gpu.now
        assert clock.lap() == (pytest.approx(wanted, abs=1e-6) if known else None) and gpu.now < ended_s + 0.5


@pytest.mark.parametrize("function", ["sample", "between"])
@pytest.mark.parametrize("later", [1, 2, 20])
def test_sampling_error_leaves_lap_unknown(clock_of, function, later):
    gpu = FakeGpm()
    clock = clock_of(gpu)
    gpu.fails_at = function, gpu.calls[function] + later
    for left in (0, 1):
        assert gpu.serve(1.0) and clock.lap() is None and len(gpu.live) == left
    assert gpu.serve(1.0, 0.4) == pytest.approx(clock.lap(), abs=1e-6)
    clock.close()
    assert gpu.calls[function] > gpu.fails_at[1] and not gpu.live


@pytest.mark.parametrize(("since_s", "ticks", "exact", "wanted"), [
    (0.0, [(1.0, 0.5)], True, None),  # a tick alone
    (0.0, [(1.0, 0.5), (1.1, 0.5 / 1.1)], True, 0.5),
    (0.0, [(1.0, 0.5), (1.1, 0.55 / 1.1)], True, None),  # busy for half of it
    (0.06, [(1.0, 0.5), (1.1, 0.5 / 1.1)], True, None),  # a mark that was seen late
    (0.06, [(1.0, 0.5), (1.1, 0.5 / 1.1), (1.2, 0.5 / 1.2)], True, 0.5),
    (0.0, [(9.0, 0.5), (9.1, 4.5 / 9.1)], True, None),  # 4.45 s of 8.9 would fall like this within the tolerance
    (0.0, [(9.0, 0.5), (9.1, 4.5 / 9.1), (9.2, 4.5 / 9.2)], True, 4.5),
    (0.37, [(1.0, 0.5), (1.1, 0.5 / 1.1)], False, None),
    (0.37, [(1.0, 0.5), (1.1, 0.5 / 1.1), (1.2, 0.5 / 1.2)], False, 0.5),  # of a time that the shares tell
    (0.37, [(1.0, 0.5), (1.1, 0.55 / 1.1), (1.2, 0.55 / 1.2)], False, None),
    (0.37, [(1.0, 0.5), (1.1, 0.5), (1.2, 0.5)], False, None),
])  # fmt: skip
def test_falling_share_reveals_idle_tick(since_s, ticks, exact, wanted):
    assert busy_until_idle(since_s, ticks, exact) == (wanted and pytest.approx(wanted, abs=1e-9))
