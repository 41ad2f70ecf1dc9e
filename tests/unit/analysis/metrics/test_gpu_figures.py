"""Each figure of the sensors against an oracle over drawn readings; what belongs to a window; power by a counter and
by readings; several GPUs as one; decoding alone; the speed of the host; memory by engine. For rooflines see
`test_roofline.py`."""

import math
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from statistics import fmean, median

import pytest
import strategies
from committed import archive
from hypothesis import given, strategies as st
from strategies import WELL, changed, drawn_readings, measurement, planted_telemetry, watched_run as run_of

from pytest_slmserve.analysis.metrics import gpu_figures, window
from pytest_slmserve.analysis.metrics.gpu_figures import DeviceFigures, decode_window, device_figures, memory_in_use
from pytest_slmserve.analysis.points import all_groups
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.records import Replica, Steps, Telemetry
from pytest_slmserve.schema.specs import GIB

TICK = 1 / 64
BLOCK = 16 * 2 * 24 * 2048 * 2  # bytes of 16 tokens' keys and values: 24 layers of 2,048 numbers of OPT-1.3B
OWN = 3 * GIB + 1000 * BLOCK
OPENS_S = measurement().run.window_s[0]
WINDOWS = st.tuples(st.integers(0, 64), st.integers(1, 160)).map(lambda t: (t[0] * TICK, (t[0] + t[1]) * TICK))
STEPS = st.lists(st.tuples(st.sampled_from([0, 8, 8, 40]), st.integers(0, 9)), min_size=8, max_size=24)
MEANS = """
    gpu_util engine_active sm_active sm_occupancy tensor_active dram_active own_cores host_cores stolen_cores
""".split()  # noqa: SIM905
LARGEST = {"sm_active_max": of.SM_ACTIVE, "sm_occupancy_max": of.SM_OCCUPANCY, "memory_used_bytes": of.MEMORY_USED}


def figures(columns=(), window_s=(2.0, 12.0), **planted):
    return device_figures(run_of(planted_telemetry({**WELL, **dict(columns)}, **planted), window_s))


def rows_of(telemetry, opens, closes):
    """Readings of which more than half of the span lies in a window, or their moment."""
    window = range(round(opens / TICK), round(closes / TICK))
    for i, (at, span) in enumerate(zip(telemetry.time_s, telemetry.span_s)):
        told = ticks_of(at, span)
        if sum(tick in window for tick in told) > len(told) / 2 if told else opens <= at <= closes:
            yield i


def ticks_of(at, span):
    return [round((at - span) / TICK) + k for k in range(round(span / TICK))] if span else []


def by_hand(telemetry, opens, closes):
    """All figures of the readings that belong to a window, from their definitions."""
    window, rows = range(round(opens / TICK), round(closes / TICK)), [*rows_of(telemetry, opens, closes)]
    if not rows or not window:
        return {}

    def known(number):
        return [(i, telemetry.columns[number][i]) for i in rows if telemetry.columns[number][i] is not None]

    def values(number):
        return [value for _, value in known(number)]

    def mean(number):
        each = [(value, telemetry.span_s[i] or telemetry.interval_s) for i, value in known(number)]
        return sum(v * span for v, span in each) / sum(span for _, span in each) if each else None

    def integrated(power, other, since=-math.inf, until=math.inf):
        watts, held = dict(known(power) or known(other)), []
        for before, now in pairwise(rows):
            began, ended = telemetry.time_s[before], telemetry.time_s[now]
            if now in watts and since <= began and ended <= until:
                held.append((watts[now], ended - began))
        return sum(w * s for w, s in held) / sum(s for _, s in held) if held else None

    joules = [(telemetry.time_s[i], value) for i, value in known(of.ENERGY)]
    counted = deviation = None
    if len(joules) > 1 and joules[-1][1] > joules[0][1]:
        ends = 2 if len(joules) > 7 else 1
        (t0, j0), (t1, j1) = (map(fmean, zip(*part)) for part in (joules[:ends], joules[-ends:]))
        counted = (j1 - j0) / (t1 - t0) if j1 > j0 else None
        seen = integrated(of.POWER, of.POWER_INSTANT, joules[0][0], joules[-1][0])
        deviation = seen / counted - 1 if counted and seen is not None else None
    capped = known(of.CAPPED_POWER)
    since = telemetry.time_s[capped[-1][0]] - telemetry.time_s[capped[0][0]] if capped else 0
    limits = {*values(of.POWER_LIMIT)}
    told = zip(telemetry.time_s, telemetry.span_s, zip(*(telemetry.columns[n] for n in of.PROFILED)))
    covered = {tick for at, span, each in told if {*each} != {None} for tick in ticks_of(at, span) if tick in window}
    return {
        **{name: mean(getattr(of, name.upper())) for name in MEANS},
        **{name: max(values(number), default=None) for name, number in LARGEST.items()},
        "sm_clock_hz": median(values(of.SM_CLOCK)),
        "power_limit_w": limits.pop() if len(limits) == 1 else None,
        "power_w": counted if len(joules) > 1 else integrated(of.POWER_INSTANT, of.POWER),
        "energy_deviation": deviation,
        "power_capped": min(1.0, (capped[-1][1] - capped[0][1]) / since) if since else None,
        "coverage": len(covered) / len(window) if {*telemetry.span_s} != {None} else None,
    }


@given(drawn_readings(0.5), WINDOWS)
def test_sensor_figures_match_hand_calculation(telemetry, window_s):
    found, expected = asdict(device_figures(run_of(telemetry, window_s))), by_hand(telemetry, *window_s)
    told = {name: value for name, value in found.items() if value is not None}
    assert told == pytest.approx({name: value for name, value in expected.items() if value is not None}, abs=1e-12)


def made_until(run, moment):
    """Tokens of a run, of which a step makes its own evenly."""
    steps = zip((math.inf, *run.steps.time_s), run.steps.time_s, run.steps.new_tokens)
    begun = [step for step in steps if step[0] < moment or step[1] <= moment]
    return sum(n if at <= moment else n * (moment - began) / (at - began) for began, at, n in begun)


def joules_per_token(runs, tokens_per_s, whole):
    """From the definition: what the counter grew by between two moments within the steps of the first, over the tokens
    of all in that time. Else power over throughput."""
    run, seen = runs[0], runs[0].telemetry
    inside = [at for at in run.steps.time_s if run.window_s[0] <= at <= run.window_s[1]]
    rows = [i for i in rows_of(seen, *run.window_s) if seen.columns[of.ENERGY][i] is not None]
    rows = [i for i in rows if inside and inside[0] < inside[-1] and inside[0] <= seen.time_s[i] <= inside[-1]]
    joules, ends = [seen.columns[of.ENERGY][i] for i in rows], 2 if len(rows) > 7 else 1
    if not tokens_per_s:
        return None
    if whole or len(rows) < 2 or joules[0] == joules[-1]:
        power = by_hand(seen, *run.window_s).get("power_w")
        return None if power is None else power / tokens_per_s
    tokens = [sum(made_until(each, seen.time_s[i] + run.began_s - each.began_s) for each in runs) for i in rows]
    grown, made = (sum(each[-ends:]) - sum(each[:ends]) for each in (joules, tokens))
    return grown / made if made > 0 else None


def stepped(steps, began_s):
    """A run whose steps are so many ticks apart and made so many tokens; its window opens and closes among them."""
    gaps, tokens = zip(*steps)
    at, n = [1 + TICK * ticks for ticks in accumulate(gaps)], len(gaps)
    trace = Steps(at, (None,) * n, (0,) * n, tokens, (0,) * n, (None,) * n, (0,) * n)
    return replace(run_of(None, (at[1], at[-2] + TICK)), steps=trace, began_s=began_s)


@given(STEPS, STEPS, st.lists(st.integers(0, 3), min_size=24, max_size=24), st.sampled_from([2, 8, 32]), st.booleans())
def test_token_energy_matches_hand_calculation(steps, others, joules, every, whole):
    run, beside = stepped(steps, 100.0), stepped(others, 100.5)
    readings = planted_telemetry({**WELL, of.CAPPED_POWER: None}, until_s=24 * every * TICK, interval_s=every * TICK)
    columns = {**readings.columns, of.ENERGY: [*accumulate(joules)]}
    readings = replace(readings, time_s=[1 + at for at in readings.time_s], columns=columns)
    run, rate = replace(run, telemetry=readings), window.output_tokens_per_s(run)
    for runs in ([run], [run, beside]):
        expected = joules_per_token(runs, rate, whole)
        assert gpu_figures.energy_per_token_j(runs, rate, whole) == (expected and pytest.approx(expected, rel=1e-9))


def test_missing_readings_give_no_figures():
    nothing = run_of(None), run_of(planted_telemetry(until_s=1.0)), run_of(planted_telemetry(), (5.0, 5.0))
    assert [device_figures(run) for run in nothing] == [DeviceFigures()] * 3
    found = device_figures(run_of(planted_telemetry({of.GPU_UTIL: 0.5})))
    assert asdict(found) == pytest.approx(asdict(DeviceFigures(gpu_util=0.5, coverage=1.0)))
    assert figures(spans=False).coverage is None
    for known, told in (((1, 1.5, 3), [1.5, 3]), ((0.25,), [0.25])):
        telemetry = planted_telemetry({of.XID: lambda at, known=known: at if at in known else None})
        watch = gpu_figures.watched(run_of(telemetry))
        assert (watch.with_before(of.XID), watch.with_before(of.ENERGY)) == (told, [])
    rows = Telemetry(("planted",), 1.0, (3.0, 4.0, 5.0), (1.0,) * 3, {of.SM_ACTIVE: (math.inf, 0.5)})
    watch = gpu_figures.watched(run_of(rows))
    assert [watch.value(of.SM_ACTIVE, row) for row in watch.rows] == [None, 0.5, None]
    assert (watch.values(of.XID), watch.readings(of.SM_ACTIVE)) == ([], ([4.0], [0.5]))
    first = {**watts(300.0), of.SM_ACTIVE: 0.4, of.SM_CLOCK: 1980e6, of.TEMPERATURE: 50.0, of.MEMORY_USED: 8e9}
    second = {**watts(200.0), of.SM_ACTIVE: 0.6, of.SM_CLOCK: 1755e6, of.TEMPERATURE: 61.0, of.MEMORY_USED: 9e9}
    run = run_of(several(first, second, notes=("lost",)))
    seen, each = device_figures(run), gpu_figures.runs_of_each_gpu(run)
    found = seen.power_w, seen.sm_active, seen.sm_clock_hz, seen.memory_used_bytes, seen.own_cores
    assert found == pytest.approx((500.0, 0.5, 1755e6, 17e9, 2.0))
    assert max(gpu_figures.watched(run).values(of.TEMPERATURE)) == 61.0
    told = [(device_figures(one).power_w, device_figures(one).own_cores, one.telemetry.notes) for one in each]
    assert told == [(pytest.approx(300), 2, ("lost",)), (pytest.approx(200), None, ())], "the host is the first one's"
    powers = [300.0, 200.0], [300.0, 100.0, 200.0], [250.0] * 4, [300.0, 200.0, None], [0.0, 0.0]
    found = [device_figures(run_of(several(*map(watts, each)))).power_imbalance for each in powers]
    assert found == pytest.approx([0.4, 1.0, 0.0, None, None]), "the distance over the mean"


def later(value, otherwise):
    """A column that is one thing in the second half of the window and another before."""
    return lambda at: value if at > 7 else otherwise


@pytest.mark.parametrize(("columns", "expected"), [
    # A counter that begins again tells nothing.
    *(({of.ENERGY: counter}, {"power_w": None, "energy_deviation": None})
      for counter in (lambda at: 5000.0 - at, lambda at: 400.0 * (at % 7))),
    ({of.CAPPED_POWER: None, of.CLOCK_REASONS: later(5.0, 1.0)}, {"power_capped": 0.5}),
    ({of.CAPPED_POWER: None, of.CLOCK_REASONS: None}, {"power_capped": None}),
    (dict.fromkeys(of.PROFILED), {"coverage": 0.0}),
])  # fmt: skip
def test_incomplete_counters_leave_figures_unknown(columns, expected):
    found = asdict(figures(columns))
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def several(*gpus, notes=()):
    """GPUs that are well but for these columns, beside the host."""
    well = {number: column for number, column in WELL.items() if number < of.OURS}
    host = planted_telemetry({of.OWN_CORES: 2.0, of.HOST_CORES: 3.0}, notes=notes)
    return replace(host, gpus=tuple(planted_telemetry({**well, **gpu}).columns for gpu in gpus))


def watts(power):
    return {of.POWER: power, of.POWER_INSTANT: power, of.ENERGY: power and (lambda at: power * at)}


@given(st.lists(st.integers(0, 255), min_size=1, max_size=4))
def test_gpus_join_clock_reasons_bitwise(reasons):
    made = several(*({of.CLOCK_REASONS: float(each)} for each in reasons))
    [joined] = {*gpu_figures.joined_gpus(made).columns[of.CLOCK_REASONS]}
    assert all(bool(int(joined) & 1 << bit) is any(r & 1 << bit for r in reasons) for bit in range(8))
    column = gpu_figures.joined_gpus(several({of.POWER: later(None, 300.0)}, {of.POWER: 200.0})).columns[of.POWER]
    assert {*column} == {500.0, None} and column[-1] is None
    one = planted_telemetry()
    assert gpu_figures.joined_gpus(one) is one and device_figures(run_of(one)).power_imbalance is None
    assert gpu_figures.runs_of_each_gpu(run_of(one)) == gpu_figures.runs_of_each_gpu(run_of(None)) == ()


@given(drawn_readings(0.5, gpus=3), WINDOWS, st.permutations(range(3)))
def test_gpu_order_changes_no_figure(made, window_s, order):
    def seen(gpus):
        found = asdict(device_figures(run_of(replace(made, gpus=tuple(gpus)), window_s)))
        return {name: value for name, value in found.items() if value is not None}

    assert seen(made.gpus[i] for i in order) == pytest.approx(seen(made.gpus), rel=1e-9)
    one, two = seen(made.gpus[:1]), seen(made.gpus[:1] * 2)
    doubled = {name: 2 * one[name] for name in ("power_w", "power_limit_w", "memory_used_bytes") if name in one}
    balance = {"power_imbalance": 0.0} if one.get("power_w") else {}
    assert two == pytest.approx({**one, **doubled, **balance}, rel=1e-9)


def decoding(prompt_steps, **planted):
    """Of a run with steps of a tenth of a second."""
    n, prompts = 130, [512 if i in prompt_steps else 0 for i in range(130)]
    steps = Steps([round(0.1 * (i + 1), 6) for i in range(n)], [8] * n, [0] * n, [8] * n, prompts, [None] * n, [0] * n)
    return decode_window(replace(run_of(planted_telemetry(**planted)), steps=steps))


@given(st.sets(st.integers(0, 129), max_size=12))
def test_decode_window_excludes_prompt_steps(prompt_steps):
    """By brute force: a prompt takes its step, the one before and the one after."""
    ends = {i: 0.25 * (i + 1) for i in range(48) if 2.125 < 0.25 * (i + 1) <= 12}
    beside = [(0.1 * (i - 1) if i > 1 else -math.inf, 0.1 * min(i + 2, 130)) for i in prompt_steps]
    pure = [i for i, at in ends.items() if not any(a < at - 1e-9 and at - 0.25 + 1e-9 < b for a, b in beside)]
    assert [*decoding(prompt_steps).rows] == pure
    # where a prompt is in every reading, decoding is not known
    assert decoding(range(0, 130, 3)).rows == () and len(decoding([0, 129]).rows) == 40
    assert decoding([], spans=False).rows == (), "without a span nobody knows what a reading tells of"
    assert decode_window(run_of(None)) is None and decode_window(run_of(planted_telemetry())) is None


def beside(cpu_s, host="a", python="3.12"):
    """A measurement with a host-speed probe beside it. cpu_s: of its pieces, or a function of the time."""
    made = strategies.sensed(measurement(environment=replace(strategies.H200, host=host)), PROBE=0.01, PROBE_CPU=cpu_s)
    return changed(made, "run", "telemetry", sources=("host", f"host-speed probe (Python {python})"))


@pytest.mark.parametrize(("measured", "speeds", "rel"), [
    ([beside(0.004), measurement(), beside(0.008)], [1, None, 0.5], None),
    ([beside(0.004, "a"), beside(0.005, "b"), beside(0.010, "b")], [1.0, 1.0, 0.5], None),
    ([beside(0.004), beside(0.008, python="3.10")], [1.0, 1.0], None),
    # A lucky piece, and pieces outside the window, are not the speed of a host.
    ([beside(lambda at: 0.001 if at == 0.3 else 0.004)], [1.0], 0.05),
    ([beside(lambda at: 0.001 if at < OPENS_S else 0.004)], [1.0], None),
    ([], [], None),
])  # fmt: skip
def test_host_speed_compares_own_best(measured, speeds, rel):
    numbered = [replace(m, launch=f"{i}") for i, m in enumerate(measured)]
    found = gpu_figures.host_speeds(numbered)
    assert [found.get(m.id) for m in numbered] == pytest.approx(speeds, rel=rel)


def test_host_probe_reports_core_waiting():
    seen = device_figures(beside(lambda at: 0.004 if round(100 * at) % 2 else 0.006).run)
    assert seen.probe_s == pytest.approx(0.01) and seen.probe_cpu_s == pytest.approx(0.005, rel=0.05)
    pairs = [(0.008, 0.004), (0.008, 0.0), (0.004, 0.004001), (None, 0.004), (0.004, None), (0.0, 0.0)]
    waited = [gpu_figures.probe_waiting(*pair) for pair in pairs]
    assert waited == [0.5, 1, 0.0, None, None, None], "two clocks, read one after the other"


def engine(used=None, total=140 * GIB, weights=3 * GIB, gpus=1):
    """An engine of OPT-1.3B with 3 GiB of weights and 1,000 KV blocks. used: bytes that sensors saw."""
    told = replace(strategies.RESOLVED, weight_bytes=weights, kv_blocks=1000, block_size=16)
    made = measurement(environment=replace(strategies.H200, gpu_memory_bytes=total), resolved=told)
    readings = planted_telemetry({} if used is None else {of.MEMORY_USED: used}, until_s=made.run.window_s[1])
    return changed(changed(made, "run", telemetry=readings), "spec", tensor_parallel_size=gpus)


def together(sharing, *engines):
    return tuple(replace(m, replica=Replica("g", i, len(engines), "s", sharing)) for i, m in enumerate(engines))


@pytest.mark.parametrize(("group", "total", "other", "left"), [
    (together("mps", engine(15.0 * GIB), engine()), 140 * GIB, 15 * GIB - 2 * OWN, 125 * GIB),
    ((engine(total=OWN, used=float(OWN)),), OWN, 0, 0),
    # What no sensor tells is not split, nor what is less than the engine's own.
    *(((engine(used),), 140 * GIB, None, 140 * GIB - OWN) for used in (None, 1.0 * GIB)),
    # Engines with a GPU each have the memory of all.
    (together("gpus", engine(), engine()), 280 * GIB, None, 280 * GIB - 2 * OWN),
    (together("time-slicing", engine(), engine()), 140 * GIB, None, 140 * GIB - 2 * OWN),
    ((engine(gpus=2),), 280 * GIB, None, 280 * GIB - OWN),
])  # fmt: skip
def test_memory_parts_sum_to_total(group, total, other, left):
    memory = memory_in_use([group])
    assert [(e.weight_bytes, e.kv_bytes) for e in memory.engines] == [(3 * GIB, 1000 * BLOCK)] * len(group)
    assert (memory.total_bytes, memory.other_bytes, memory.left_bytes) == (total, other, left)
    assert other is None or memory.engine_bytes + other + left == total


def test_fullest_run_gives_memory_usage():
    told, blind = engine(), engine(weights=None)
    groups = [(blind,), (engine(total=None),), (engine(total=GIB),), together("mps", told, blind)]
    groups.append(together("mig", told, told))
    assert [memory_in_use([group]) for group in groups] == [None] * 5
    assert memory_in_use([(blind,), (engine(12.0 * GIB),), (engine(9.0 * GIB),), (told,)]).used_bytes == 12 * GIB
    groups = [group for group in all_groups(archive("h200-vllm-0.26.0-replicas")) if len(group) > 1]
    seen = [memory_in_use([group]) for group in groups]
    assert {len(memory.engines) for memory in seen} == {2, 3}
    assert all(1.5 < memory.other_bytes / GIB / len(memory.engines) < 3 for memory in seen)
    assert all(15 * GIB < memory.left_bytes < 21 * GIB for memory in seen)
