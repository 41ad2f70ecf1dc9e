"""Busy seconds of a GPU whose counters change every 0.1 s: each lap has those of its own time, whatever the phase of
the counters and however late they are looked at; what cannot be told is None, comes back, and no sample is left."""

import pytest
from fake_gpm import FakeGpm, Lost
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.telemetry import gpu as sources
from pytest_slmserve.telemetry.gpu import IDLE_WITHIN_S, TICK_S, BusyClock, busy_until_idle


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
def test_each_lap_has_the_busy_seconds_of_its_own_window_and_late_polls_make_none_wrong(clock_of, phase, windows, late):
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
def test_a_late_poll_is_made_good_at_the_mark_at_the_first_tick_and_anywhere(clock_of, late_s, seconds):
    in_time = FakeGpm()
    clock_of(in_time)
    mark = in_time.polls
    for number in (None, *range(mark, mark + 30)):
        gpu = FakeGpm(late={number: late_s})
        clock, wanted, ended_s = clock_of(gpu), gpu.serve(seconds, 0.6), gpu.now
        assert clock.lap() == pytest.approx(wanted, abs=1e-6) and gpu.now < ended_s + 10 * TICK_S, number


@pytest.mark.parametrize("rest_s", [0.0, 0.5])  # 0.5: no kernel is seen after the lap's begin
def test_a_gpu_that_does_not_idle_tells_nothing_for_two_laps_and_then_again(clock_of, rest_s):
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


def test_a_gpu_that_has_done_nothing_yet_is_waited_for_once(clock_of):
    gpu = FakeGpm()
    sources.time = gpu
    clock = BusyClock(gpu, Lost)
    assert clock.lap() is None and gpu.now == pytest.approx(1000 + IDLE_WITHIN_S, abs=0.02)
    for known in (False, True, True):
        wanted, ended_s = gpu.serve(2.0, 0.9, rest_s=0.3), gpu.now
        assert clock.lap() == (pytest.approx(wanted, abs=1e-6) if known else None) and gpu.now < ended_s + 0.5


@pytest.mark.parametrize("function", ["sample", "between"])
@pytest.mark.parametrize("later", [1, 2, 20])
def test_an_error_tells_nothing_for_two_laps_and_leaves_no_sample(clock_of, function, later):
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
def test_a_tick_is_idle_if_the_share_falls_as_the_time_grows(since_s, ticks, exact, wanted):
    assert busy_until_idle(since_s, ticks, exact) == (wanted and pytest.approx(wanted, abs=1e-9))
