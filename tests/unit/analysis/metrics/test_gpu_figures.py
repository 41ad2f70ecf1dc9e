"""Each figure of the sensors against an oracle over drawn readings; what belongs to a window; power by a counter and
by readings; several GPUs as one; decoding alone; the speed of the host; memory by engine. For rooflines see
`test_roofline.py`."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from itertools import pairwise
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import BASELINES, DATA, in_checkout
from strategies import (
    H200,
    RESOLVED,
    WELL,
    any_telemetry,
    drawn_readings,
    measurement,
    planted_telemetry,
    sensed,
    watched_run,
)

from pytest_slmserve.analysis.metrics.gpu_figures import (
    DeviceFigures,
    decode_window,
    device_figures,
    host_speeds,
    joined_gpus,
    memory_in_use,
    probe_waiting,
    runs_of_each_gpu,
    watched,
)
from pytest_slmserve.analysis.points import all_groups
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.records import Replica, Steps, Telemetry
from pytest_slmserve.schema.specs import GIB


def figures(columns=(), window_s=(2.0, 12.0), **planted):
    return device_figures(watched_run(planted_telemetry({**WELL, **dict(columns)}, **planted), window_s))


# An oracle for each figure

TICK = 1 / 64
WINDOWS = st.tuples(st.integers(0, 64), st.integers(1, 160)).map(lambda t: (t[0] * TICK, (t[0] + t[1]) * TICK))


def by_hand(telemetry, opens, closes):
    """All figures of the readings that belong to a window, from their definitions."""
    rows = []
    for i, (at, span) in enumerate(zip(telemetry.time_s, telemetry.span_s)):
        ticks = [at - span + k * TICK for k in range(round(span / TICK))] if span else []
        inside = sum(opens <= began < closes for began in ticks)
        if inside > len(ticks) / 2 if ticks else opens <= at <= closes:
            rows.append(i)
    if not rows:
        return {}

    def known(number):
        return [(i, telemetry.columns[number][i]) for i in rows if telemetry.columns[number][i] is not None]

    def mean(number):
        each = [(value, telemetry.span_s[i] or telemetry.interval_s) for i, value in known(number)]
        return sum(v * span for v, span in each) / sum(span for _, span in each) if each else None

    def integrated(since, until):
        instant = known(of.POWER_INSTANT)
        values, held = dict(instant or known(of.POWER)), []
        for before, now in pairwise(rows):
            began, ended = telemetry.time_s[before], telemetry.time_s[now]
            if now in values and since <= began and ended <= until:
                held.append((values[now], ended - began))
        return sum(w * s for w, s in held) / sum(s for _, s in held) if held else None

    joules = [(telemetry.time_s[i], value) for i, value in known(of.ENERGY)]
    ends = 2 if len(joules) > 7 else 1
    counted = deviation = None
    if len(joules) > 1 and joules[-1][1] > joules[0][1]:
        (t0, j0), (t1, j1) = (map(fmean, zip(*part)) for part in (joules[:ends], joules[-ends:]))
        counted = (j1 - j0) / (t1 - t0) if j1 > j0 else None
        seen = integrated(joules[0][0], joules[-1][0])
        deviation = seen / counted - 1 if counted and seen is not None else None
    capped = known(of.CAPPED_POWER)
    grown = capped[-1][1] - capped[0][1] if capped else 0
    since = telemetry.time_s[capped[-1][0]] - telemetry.time_s[capped[0][0]] if capped else 0
    limits = {value for _, value in known(of.POWER_LIMIT)}
    ratios = {
        **{"gpu_util": of.GPU_UTIL, "engine_active": of.ENGINE_ACTIVE, "sm_active": of.SM_ACTIVE},
        **{"sm_occupancy": of.SM_OCCUPANCY, "tensor_active": of.TENSOR_ACTIVE, "dram_active": of.DRAM_ACTIVE},
        **{"own_cores": of.OWN_CORES, "host_cores": of.HOST_CORES, "stolen_cores": of.STOLEN_CORES},
    }
    covered, spanned = set(), False
    for i, (at, span) in enumerate(zip(telemetry.time_s, telemetry.span_s)):
        spanned |= span is not None
        if span and any(telemetry.columns[n][i] is not None for n in of.PROFILED):
            covered |= {round((at - span) / TICK) + k for k in range(round(span / TICK))}
    inside = covered & {*range(round(opens / TICK), round(closes / TICK))}
    return {
        **{name: mean(number) for name, number in ratios.items()},
        "sm_active_max": max((value for _, value in known(of.SM_ACTIVE)), default=None),
        "sm_occupancy_max": max((value for _, value in known(of.SM_OCCUPANCY)), default=None),
        "memory_used_bytes": max((value for _, value in known(of.MEMORY_USED)), default=None),
        "sm_clock_hz": median(value for _, value in known(of.SM_CLOCK)),
        "power_limit_w": limits.pop() if len(limits) == 1 else None,
        "power_w": counted if len(joules) > 1 else integrated(opens, closes),
        "energy_deviation": deviation,
        "power_capped": min(1.0, grown / since) if since else None,
        "coverage": len(inside) / round((closes - opens) / TICK) if spanned else None,
    }


@given(drawn_readings(0.5), WINDOWS)
def test_each_figure_of_any_readings_is_that_by_hand(telemetry, window_s):
    found, expected = asdict(device_figures(watched_run(telemetry, window_s))), by_hand(telemetry, *window_s)
    told = {name: value for name, value in found.items() if value is not None}
    assert told == pytest.approx({name: value for name, value in expected.items() if value is not None}, abs=1e-12)


@given(any_telemetry(), st.tuples(st.floats(0, 10), st.floats(0, 10)))
def test_figures_of_anything_at_all_can_be(telemetry, window_s):
    run = watched_run(telemetry, window_s)
    found, known = device_figures(run), [v for v in telemetry.columns.get(of.SM_ACTIVE, ()) if v is not None]
    assert found.coverage is None or 0 <= found.coverage <= 1 + 1e-9
    assert found.sm_active_max is None or found.sm_active_max in known
    whole, alone = watched(run), decode_window(stepping(run, {3, 50}))
    assert (alone is None) == (whole is None) and (alone is None or {*alone.rows} <= {*whole.rows})


# Windows


def test_without_readings_there_are_no_figures():
    assert device_figures(watched_run(None)) == DeviceFigures()
    assert {*asdict(DeviceFigures()).values()} == {None}
    assert device_figures(watched_run(planted_telemetry(until_s=1.0))) == DeviceFigures(), "all before the window"
    assert device_figures(watched_run(planted_telemetry(), (5.0, 5.0))) == DeviceFigures(), "a window of no length"
    found = device_figures(watched_run(planted_telemetry({of.GPU_UTIL: 0.5})))
    assert {name for name, value in asdict(found).items() if value is not None} == {"gpu_util", "coverage"}


@pytest.mark.parametrize(("at_s", "belongs"), [(2.2, False), (2.25, False), (2.3, True), (12.2, True), (12.3, False)])
def test_a_row_belongs_where_most_of_its_span_lies(at_s, belongs):
    one = Telemetry(("planted",), 0.5, (at_s,), (0.5,), {of.SM_ACTIVE: (0.5,)})
    assert (device_figures(watched_run(one)).sm_active is not None) is belongs
    moment = replace(one, span_s=(None,))
    assert (device_figures(watched_run(moment)).sm_active is not None) is (2 <= at_s <= 12)


def test_a_change_is_told_by_the_value_before_the_window():
    watch = watched(watched_run(planted_telemetry({of.XID: lambda at: at if at in (1, 1.5, 3) else None})))
    assert watch.with_before(of.XID) == [1.5, 3] and watch.with_before(of.ENERGY) == []
    first = watched(watched_run(planted_telemetry({of.XID: lambda at: 7.0 if at == 0.25 else None})))
    assert first.with_before(of.XID) == [7]


def test_readings_that_are_no_number_or_that_a_column_lacks_are_missing():
    rows = Telemetry(("planted",), 1.0, (3.0, 4.0, 5.0), (1.0,) * 3, {of.SM_ACTIVE: (math.inf, 0.5)})
    watch = watched(watched_run(rows))
    assert [watch.value(of.SM_ACTIVE, row) for row in watch.rows] == [None, 0.5, None]
    assert watch.values(of.XID) == [] and watch.readings(of.SM_ACTIVE) == ([4.0], [0.5])


# Power


@pytest.mark.parametrize("phase_s", [0.0, 0.03, 0.05, 0.08])
def test_a_counter_that_moves_every_tenth_of_a_second_is_no_power_too_much_or_little(phase_s):
    """Between two single readings it would be 0.5 % off in this window of 10 s, and 2.5 % in one of 2 s."""
    found = figures({of.ENERGY: lambda at: 40.0 * math.floor(round((at - phase_s) / 0.1, 6))})
    assert found.power_w == pytest.approx(400, rel=1e-3)


def test_the_deviation_is_of_the_time_that_the_counter_tells_of():
    late = {of.ENERGY: lambda at: 400.0 * at if at > 7 else None}
    power = {of.POWER_INSTANT: lambda at: 440.0 if at > 7 else 100.0}
    assert figures({**late, **power}).energy_deviation == pytest.approx(0.1)
    once = figures({of.ENERGY: lambda at: 1e6 if at == 7 else None})
    assert (once.power_w, once.energy_deviation) == (pytest.approx(400), None), "by the readings"


@pytest.mark.parametrize("counter", [lambda at: 5000.0 - at, lambda at: 400.0 * (at % 7), 1e6])
def test_a_counter_that_falls_or_stands_still_is_no_figure(counter):
    found = figures({of.ENERGY: counter})
    assert (found.power_w, found.energy_deviation) == (None, None)


@pytest.mark.parametrize(
    ("columns", "share"),
    [
        ({of.CAPPED_POWER: lambda at: 0.3 * at}, 0.3),
        ({of.CAPPED_POWER: lambda at: 0.3 * at if at % 1 == 0 else None}, 0.3),
        ({of.CAPPED_POWER: lambda at: 1.01 * at}, 1.0),
        ({of.CAPPED_POWER: None, of.CLOCK_REASONS: lambda at: 5.0 if at > 7 else 1.0}, 0.5),
        ({of.CAPPED_POWER: None, of.CLOCK_REASONS: None}, None),
    ],
    ids=["counter", "counter asked seldom", "rounding", "readings", "neither"],
)
def test_how_much_the_power_limit_held_the_clock_down(columns, share):
    assert figures(columns).power_capped == (share if share is None else pytest.approx(share))


def test_coverage_is_of_the_profiled_counters_where_there_are_any():
    gone = {number: (lambda at: 0.5 if at <= 7 else None) for number in of.PROFILED}
    assert figures(gone).coverage == pytest.approx(0.5) and figures(dict.fromkeys(of.PROFILED)).coverage == 0
    plain = planted_telemetry({of.GPU_UTIL: None})
    assert device_figures(watched_run(plain)).coverage == pytest.approx(1), "there are none"
    assert figures(spans=False).coverage is None


# Several GPUs

HOST = {of.OWN_CORES: 2.0, of.HOST_CORES: 3.0}


def several(*gpus, notes=()):
    """GPUs that are well but for these columns, beside the host."""
    well = {number: column for number, column in WELL.items() if number < of.OURS}
    made = [planted_telemetry({**well, **gpu}) for gpu in gpus]
    host = planted_telemetry(HOST, notes=notes)
    return replace(host, gpus=tuple(one.columns for one in made))


def watts(power):
    return {of.POWER: power, of.POWER_INSTANT: power, of.ENERGY: power and (lambda at: power * at)}


def test_power_adds_up_ratios_are_means_and_the_slowest_clock_counts():
    first = {**watts(300.0), of.SM_ACTIVE: 0.4, of.SM_CLOCK: 1980e6, of.TEMPERATURE: 50.0, of.MEMORY_USED: 8e9}
    second = {**watts(200.0), of.SM_ACTIVE: 0.6, of.SM_CLOCK: 1755e6, of.TEMPERATURE: 61.0, of.MEMORY_USED: 9e9}
    run = watched_run(several(first, second, notes=("lost",)))
    seen = device_figures(run)
    assert (seen.power_w, seen.sm_active, seen.sm_clock_hz) == pytest.approx((500.0, 0.5, 1755e6))
    assert max(watched(run).values(of.TEMPERATURE)) == 61.0
    assert seen.memory_used_bytes == pytest.approx(17e9) and seen.own_cores == 2.0
    assert seen.power_imbalance == pytest.approx(0.4), "100 W apart, 250 W in the mean"
    each = runs_of_each_gpu(run)
    assert [device_figures(one).power_w for one in each] == pytest.approx([300.0, 200.0])
    assert [device_figures(one).own_cores for one in each] == [2.0, None], "the host is the first one's"
    assert [one.telemetry.notes for one in each] == [("lost",), ()]


@given(st.lists(st.integers(0, 255), min_size=1, max_size=4))
def test_reasons_of_a_clock_are_joined_bit_by_bit(reasons):
    [joined] = {*joined_gpus(several(*({of.CLOCK_REASONS: float(each)} for each in reasons))).columns[of.CLOCK_REASONS]}
    assert [bool(int(joined) >> bit & 1) for bit in range(8)] == [
        any(r >> bit & 1 for r in reasons) for bit in range(8)
    ]


def test_what_one_of_them_does_not_say_is_not_known_of_all():
    unsaid = {of.POWER: lambda at: None if at > 5 else 300.0}
    column = joined_gpus(several(unsaid, {of.POWER: 200.0})).columns[of.POWER]
    assert {*column} == {500.0, None} and column[-1] is None


def test_one_gpu_stays_what_it_is():
    one = planted_telemetry()
    assert joined_gpus(one) is one and runs_of_each_gpu(watched_run(one)) == ()
    assert device_figures(watched_run(one)).power_imbalance is None and runs_of_each_gpu(watched_run(None)) == ()


@pytest.mark.parametrize("powers", [[300.0, 100.0, 200.0], [250.0] * 4, [1.0, 999.0], [300.0, 200.0, None], [0.0, 0.0]])
def test_imbalance_is_the_distance_over_the_mean(powers):
    found = device_figures(watched_run(several(*map(watts, powers)))).power_imbalance
    if None in powers or not any(powers):
        assert found is None
    else:
        assert found == pytest.approx((max(powers) - min(powers)) / fmean(powers))


# Decoding alone


def stepping(run, prompt_steps, step_s=0.1):
    ends = [round(step_s * (i + 1), 6) for i in range(round(13 / step_s))]
    n, prompts = len(ends), [512 if i in prompt_steps else 0 for i in range(len(ends))]
    return replace(run, steps=Steps(ends, [8] * n, [0] * n, [8] * n, prompts, [None] * n, [0] * n))


def decoding(prompt_steps, **planted):
    return decode_window(stepping(watched_run(planted_telemetry(**planted)), prompt_steps))


@given(st.sets(st.integers(0, 129), max_size=12))
def test_decoding_is_never_seen_beside_a_prompt(prompt_steps):
    """By brute force: a prompt takes its step, the one before and the one after."""
    rows = [i for i in range(48) if 2.125 < 0.25 * (i + 1) <= 12]
    beside = [(0.1 * (i - 1) if i > 1 else -math.inf, 0.1 * min(i + 2, 130)) for i in prompt_steps]
    pure = [
        i for i in rows if not any(a < 0.25 * (i + 1) - 1e-9 and 0.25 * i + 1e-9 < b for a, b in beside)
    ]  # fmt: skip
    assert [*decoding(prompt_steps).rows] == pure


def test_where_a_prompt_is_in_every_reading_decoding_is_not_known():
    assert decoding(range(0, 130, 3)).rows == () and len(decoding([0, 129]).rows) == 40
    assert decoding([], spans=False).rows == (), "without a span nobody knows what a reading tells of"
    assert decode_window(watched_run(None)) is None and decode_window(watched_run(planted_telemetry())) is None


# The speed of the host

NAME = "host-speed probe (Python 3.12)"


def beside(cpu_s, host="a", name=NAME):
    """A measurement with a host-speed probe beside it. cpu_s: of its pieces, or a function of the time."""
    made = sensed(measurement(environment=replace(H200, host=host)), PROBE=0.01, PROBE_CPU=cpu_s)
    return replace(made, run=replace(made.run, telemetry=replace(made.run.telemetry, sources=("host", name))))


def speeds(*measurements):
    numbered = [replace(m, launch=f"{i}") for i, m in enumerate(measurements)]
    found = host_speeds(numbered)
    return [found.get(m.id) for m in numbered]


def test_a_window_is_as_fast_as_its_own_host_at_best_by_the_same_python():
    assert speeds(beside(0.004), measurement(), beside(0.008)) == [pytest.approx(1), None, pytest.approx(0.5)]
    assert speeds(beside(0.004, "a"), beside(0.005, "b"), beside(0.010, "b")) == pytest.approx([1.0, 1.0, 0.5])
    assert speeds(beside(0.004), beside(0.008, name="host-speed probe (Python 3.10)")) == pytest.approx([1.0, 1.0])
    assert host_speeds([]) == {}


def test_a_lucky_piece_and_pieces_outside_the_window_are_not_the_speed_of_a_host():
    opens = beside(0.004).run.window_s[0]
    lucky = beside(lambda at: 0.001 if at == 0.3 else 0.004)
    assert min(lucky.run.telemetry.columns[of.PROBE_CPU]) == 0.001
    assert speeds(lucky)[0] == pytest.approx(1.0, rel=0.05)
    assert speeds(beside(lambda at: 0.001 if at < opens else 0.004)) == [pytest.approx(1.0)]


def test_the_probe_is_told_as_its_mean_and_as_the_share_without_a_core():
    seen = device_figures(beside(lambda at: 0.004 if round(100 * at) % 2 else 0.006).run)
    assert seen.probe_s == pytest.approx(0.01) and seen.probe_cpu_s == pytest.approx(0.005, rel=0.05)
    assert probe_waiting(0.008, 0.004) == 0.5 and probe_waiting(0.008, 0.0) == 1
    assert probe_waiting(0.004, 0.004001) == 0.0, "two clocks, read one after the other"
    assert probe_waiting(None, 0.004) is probe_waiting(0.004, None) is probe_waiting(0.0, 0.0) is None


def test_records_without_a_probe_tell_no_speed():
    found = read(DATA / "archive-format-3.jsonl").measurements
    assert found and host_speeds(found) == {} and all(device_figures(m.run).probe_s is None for m in found)


# Memory by engine

BLOCK = 16 * 2 * 24 * 2048 * 2  # bytes of 16 tokens' keys and values: 24 layers of 2,048 numbers of OPT-1.3B


def engine(used=None, total=140 * GIB, weights=3 * GIB):
    """An engine of OPT-1.3B with 3 GiB of weights and 1,000 KV blocks. used: bytes that sensors saw."""
    told = replace(RESOLVED, weight_bytes=weights, kv_blocks=1000, block_size=16)
    made = measurement(model="opt-1.3b", environment=replace(H200, gpu_memory_bytes=total), resolved=told)
    readings = planted_telemetry({} if used is None else {of.MEMORY_USED: used}, until_s=made.run.window_s[1])
    return replace(made, run=replace(made.run, telemetry=readings))


def together(sharing, *engines):
    return tuple(replace(m, replica=Replica("g", i, len(engines), "s", sharing)) for i, m in enumerate(engines))


def test_parts_add_up_to_the_memory():
    memory = memory_in_use([together("mps", engine(15.0 * GIB), engine())])
    assert [(e.weight_bytes, e.kv_bytes) for e in memory.engines] == [(3 * GIB, 1000 * BLOCK)] * 2
    assert memory.other_bytes == 15 * GIB - 2 * (3 * GIB + 1000 * BLOCK)
    assert memory.engine_bytes + memory.other_bytes + memory.left_bytes == memory.total_bytes == 140 * GIB


@pytest.mark.parametrize("used", [None, 1.0 * GIB])
def test_what_no_sensor_tells_is_not_split(used):
    memory = memory_in_use([(engine(used),)])
    assert memory.used_bytes is memory.other_bytes is None
    assert memory.left_bytes == 137 * GIB - 1000 * BLOCK


def test_engines_with_a_gpu_each_have_the_memory_of_all():
    totals = {how: memory_in_use([together(how, engine(), engine())]).total_bytes for how in ("gpus", "time-slicing")}
    assert totals == {"gpus": 280 * GIB, "time-slicing": 140 * GIB}
    wide = replace(engine(), spec=replace(engine().spec, tensor_parallel_size=2))
    assert memory_in_use([(wide,)]).total_bytes == 280 * GIB


def test_nothing_is_said_where_a_part_is_not_known():
    told, blind = engine(), engine(weights=None)
    assert [memory_in_use([(m,)]) for m in (blind, engine(total=None), engine(total=GIB))] == [None] * 3
    assert memory_in_use([together("mps", told, blind)]) is memory_in_use([together("mig", told, told)]) is None
    exactly = engine(total=3 * GIB + 1000 * BLOCK, used=float(3 * GIB + 1000 * BLOCK))
    assert memory_in_use([(exactly,)]).left_bytes == memory_in_use([(exactly,)]).other_bytes == 0
    assert memory_in_use([(blind,), (engine(12.0 * GIB),), (engine(9.0 * GIB),), (told,)]).used_bytes == 12 * GIB


@in_checkout
def test_committed_replicas_leave_room_and_use_more_than_weights_and_cache():
    found = read(BASELINES / "h200-vllm-0.26.0-replicas.jsonl.xz").measurements
    seen = [memory_in_use([group]) for group in all_groups(found) if len(group) > 1]
    assert {len(memory.engines) for memory in seen} == {2, 3}
    assert all(1.5 < memory.other_bytes / GIB / len(memory.engines) < 3 for memory in seen)
    assert all(15 * GIB < memory.left_bytes < 21 * GIB for memory in seen)
