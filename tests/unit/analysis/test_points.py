"""Points: figures of one measurement, of a job and of several engines at once; which repeats count; means over them;
what is a point of which question; and ratios of points. Figures of a window are proved in `metrics`."""

import math
import random
from dataclasses import fields, replace
from statistics import fmean

import pytest
from facts import numbers
from hypothesis import given, strategies as st
from measured import measure
from refusals import refused
from strategies import H200, WELL, changed, job_point, measurement, planted_telemetry, point, sensed, together

from pytest_slmserve.analysis import points
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.points import Summary, job_points, points_of, ratio, shared_points, summarize, summary_of
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Environment, GateLaunch, Replica, Stream
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop, WorkloadSpec
from pytest_slmserve.workload.arrivals import job
from pytest_slmserve.workload.requests import build_workload

GAPS = {"growth": 1.01, "least_s": 1e-4, "counts": {"300": 99, "500": 1}, "sum_s": 0.5}
PAIRED = GateLaunch("g", 1, "baseline", False)
SPEC = EngineSpec("opt-125m", "simulated", extra=(("noise", 0.0), ("t_inf", 4000.0), ("b_half", 10.0)))
WORKLOAD = build_workload(WorkloadSpec(prompt_tokens=16, output_tokens=20, requests=40), model_of("opt-125m"))


@given(st.integers(1, 64), st.floats(100, 3000), st.integers(2, 40))
def test_planted_measurement_has_its_figures(concurrency, rate, output_tokens):
    seen = summarize(measurement(concurrency, rate, output_tokens=output_tokens))
    assert (seen.batch, seen.output_tokens_per_s) == pytest.approx((concurrency, rate))
    times = (seen.step_s, seen.e2e_s, seen.normalized_latency_s, 1 / seen.requests_per_s)
    wanted = (concurrency, concurrency * output_tokens, concurrency, output_tokens)
    assert [time * rate for time in times] == pytest.approx(wanted)
    assert seen.kv_usage == 0.5 and seen.roofline_fraction > 0 and seen.little == pytest.approx(0, abs=1e-6)


def test_full_measurement_has_every_figure():
    m = measurement(8, 1000.0)
    shorter, longer = (changed(m, "run", "samples", output_tokens=(n,) * len(m.run.samples)) for n in (16, 64))
    free = changed(shorter, "workload", "spec", prompt_tokens=None, output_tokens=None)  # of no one length
    found = [summarize(each).requests_per_s for each in (shorter, longer, free)]
    assert found == pytest.approx([1000 / 16, 1000 / 32, 1000 / 32])
    m = measurement(8, 1000.0, load=ClosedLoop(8, requests=100))
    served, seconds = sum(m.run.samples.finished), m.run.window_s[1] - m.run.window_s[0]
    seen, rate = summarize(m), 32 * served / seconds
    assert (seen.requests_per_s, seen.output_tokens_per_s) == pytest.approx((rate / 32, rate))
    assert seen.roofline_fraction == pytest.approx(summarize(measurement(8, rate)).roofline_fraction)
    nothing = summarize(changed(m, "run", window_s=(1.0, 1.0)))
    assert (nothing.requests_per_s, nothing.output_tokens_per_s) == (None, None)
    seen, blind = summarize(sensed(measurement(8, 1000.0))), summarize(measurement())
    absent = {f.name for f in fields(Summary) if getattr(seen, f.name) is None}
    unseen = {f"itl{part}_s" for part in ("", "_p50", "_p90", "_p95", "_p99")}
    assert absent == {"power_imbalance", "acceptance_length", *unseen}, "of one GPU, without drafts or a client"
    found = seen.dram_active, seen.sm_occupancy, seen.sm_active_max, seen.decode_dram, seen.decode_tensor
    assert found == pytest.approx((0.6, 0.2, 0.8, 0.6, 0.1)) and seen.bound == "memory"
    assert seen.power_w == pytest.approx(400, rel=0.02)
    assert seen.energy_per_token_j == pytest.approx(seen.power_w / 1000)
    assert seen.saturation_gap == pytest.approx(math.log(0.6 / 0.89 / (0.1 / 0.94))) and 0 < seen.unexplained < 1
    assert (blind.dram_active, blind.power_w, blind.energy_per_token_j, blind.decode_dram) == (None,) * 4


def now_and_then(usual, other):
    return lambda at: other if round(at / 0.01) % 5 == 0 else usual


NOISY, DEGRADED = {"SM_CLOCK": now_and_then(1.98e9, 1.5e9)}, {"SM_ACTIVE": now_and_then(None, 0.8)}


@pytest.mark.parametrize(("good", "bad", "used", "told"), [
    ({}, NOISY, 2, "noise"),
    ({}, DEGRADED, 1, "problems"),
    (DEGRADED, DEGRADED, 2, "degraded"),
    ({}, {"FOREIGN_PROCESSES": 1.0}, 1, "problems"),  # invalid
])  # fmt: skip
def test_clean_repeats_count_before_degraded(good, bad, used, told):
    made = sensed(measurement(8, 1000.0), **good), sensed(measurement(8, 500.0, repeat=1), **bad)
    [seen] = points_of(made)
    assert (len(seen.repeats), len(seen.each), seen.left_out, seen.valid) == (used, used, 2 - used, True)
    assert seen.records == tuple(m.id for m in made[:used])
    assert [name for name in ("problems", "degraded", "noise") if getattr(seen, name)] == [told]


def test_point_averages_valid_repeats():
    good = [measurement(8, rate, repeat=i) for i, rate in enumerate((1000.0, 1100.0))]
    [seen] = points_of([*good, sensed(measurement(8, 500.0, repeat=2, preempted=1), **NOISY)])
    assert (seen.left_out, numbers(seen.problems[0]), seen.noise) == (1, [1], ())
    assert (*seen.repeats, seen.output_tokens_per_s) == pytest.approx((1000, 1100, 1050))
    assert (*seen.e2e_repeats, *seen.batch_repeats) == pytest.approx((0.256, 0.256 / 1.1, 8, 8))
    assert seen.records == tuple(m.id for m in good) and seen.used == tuple((m,) for m in good)
    each = [window.latencies([m.run]).figures for m in good]
    for name in (f"{name}_{part}_s" for name in ("ttft", "tpot", "e2e") for part in window.PARTS):
        found = [one[name] for one in each]
        assert getattr(seen, name) == pytest.approx(fmean(found)) and found[1] < found[0]
    made = [measurement(c, 100.0 * c + i, repeat=i) for c in (1, 2, 16) for i in range(3)]
    shuffled = points_of(random.Random(5).sample(made, len(made)))
    assert shuffled == points_of(made) and [p.concurrency for p in shuffled] == [1, 2, 16]
    assert shuffled[2].repeats == pytest.approx((1600, 1601, 1602))
    bad = [], [0.0], [math.inf], [math.nan], [-1.0, 5.0]  # throughput is positive, with a latency for each
    wrong = [*(point(8, each, [1.0] * len(each)) for each in bad), point(8, [5.0, 5.0], [1.0]), point(8, [5.0], [0.0])]
    assert point(8, [5.0], [1.0]).valid and [each for each in wrong if each.valid] == []


def test_some_figures_have_no_mean():
    """The worst deviation from Little's law, the most frequent bound, the power limit if it is one."""
    made = [
        sensed(measurement(8, 10_000.0, first_early=early, repeat=i), 0.001, POWER_LIMIT=limit, DRAM_ACTIVE=dram)
        for i, (early, limit, dram) in enumerate([(0.01, 700.0, 0.6), (-0.03, 700.0, 0.6), (0.02, 600.0, 0.2)])
    ]
    both, all_three = points_of(made[:2])[0], points_of(made)[0]
    assert both.little == all_three.little == min(window.littles_law(m.run) for m in made)
    assert (both.power_limit_w, all_three.power_limit_w) == (700.0, None)
    assert [one.bound for one in all_three.each] == ["memory", "memory", "mixed"] and all_three.bound == "memory"
    [nothing] = points_of([measurement(failures=1, repeat=i) for i in range(2)])
    assert (nothing.valid, nothing.repeats, nothing.records, nothing.left_out) == (False, (), (), 2)
    assert [numbers(text) for text in nothing.problems] == [[1]] and nothing.goodput("e2e:1s") is None
    assert {getattr(nothing, f.name) for f in fields(Summary)} == {None}
    fast, slow = measurement(8, 1000.0), measurement(8, 500.0, repeat=1)
    [seen] = points_of([changed(fast, "run", stream=Stream(0.1, 0.0, (1.0,), GAPS))])
    assert (seen.itl_s, seen.itl_p50_s, seen.itl_p99_s) == pytest.approx((0.005, *[1e-4 * 1.01**300.5] * 2))
    [seen] = points_of([fast, slow, measurement(8, 1000.0, repeat=2, failures=1)])
    slo = window.parse_slo("e2e:300ms")
    assert seen.goodput("e2e:300ms") == seen.goodput(slo) == window.goodput_of(slo, (fast,), (slow,))
    for words in ("", "itl:9ms"):
        with refused():
            seen.goodput(words)


@pytest.mark.parametrize(("hosts", "others", "kept"), [
    ("aba", "a", (1000, 1002)), ("aba", "c", None), (["a", None], "b", (1000, 1001)),
    *(("aba", others, (1000, 1001, 1002)) for others in ("ba", "bac", "", [None], ["a", None])),  # None: who knows
])  # fmt: skip
def test_point_keeps_repeats_by_host(hosts, others, kept):
    def on(names):
        environments = [replace(H200, host=name) for name in names]
        made = [measurement(8, 1000.0 + i, repeat=i, environment=each) for i, each in enumerate(environments)]
        return points.point_of([(m,) for m in made]) if made else point(8, [1.0])

    both = on(hosts)
    found = both.on_hosts_of(on(others))
    assert (found and found.repeats) == (kept and pytest.approx(kept))
    assert (found is both) is (kept is not None and len(kept) == len(hosts))


def test_sweep_points_are_closed_loops():
    assert points_of([measurement(load=OpenLoop(requests=8)), measurement(load=ClosedLoop(8, requests=64))]) == ()
    open_loop = measurement(load=OpenLoop(arrivals="gamma", rate=9.0, window_s=2.0))
    assert points.point_of([(open_loop,)]).concurrency == 0
    one = replace(measurement(16), replica=Replica("g", 0, 1, "one", "time-slicing"))
    assert [points.concurrency_of(m) for m in (measurement(16), one)] == [16, None]
    paired = replace(measurement(8), paired=PAIRED)
    series = points.by_series([measurement(8), measurement(16), measurement(8, model="opt-125m"), paired, one])
    assert [[m.load.concurrency for m in each] for each in series.values()] == [[8, 16, 16], [8]]
    assert points.all_groups([one]) == [(one,)] and one.key != replace(one, replica=None).key
    made = [served(job(40)), served(job(40, rate=5.0)), served(ClosedLoop(4, window_s=0.5)), served(job(40))]
    made += [replace(made[0], paired=PAIRED), replace(made[0], replica=Replica("g", 0, 2, "set", "mps"))]
    found = [(p.load.rate, len(p.repeats), p.concurrency) for p in job_points(made)]
    assert found == [(math.inf, 2, 0), (5.0, 1, 0)]
    jobs = [job_point(spec=EngineSpec("opt-6.7b", max_num_seqs=n)) for n in (64, 8, 256)]
    eager = EngineSpec("opt-6.7b", enforce_eager=True)
    groups = points.limit_groups([*jobs, job_point(rate=5.0), job_point(output_tokens=64), job_point(spec=eager)])
    assert [p.spec.max_num_seqs for p in groups[0]] == [8, 64, 256]
    assert sorted(map(len, groups)) == [1, 1, 3], "that differ in the limit alone, and a rate is none"


def served(load, spec=SPEC, **more):
    engine = SimulatedEngine(replace(spec, extra=(*spec.extra, *more.items())))
    return measure(engine, WORKLOAD, load, Environment(platform="simulated", gpu_name="simulated"))


def test_job_figures_follow_engine_law():
    (seen,) = job_points([served(job(40)), served(job(40))])
    found = seen.output_tokens_per_s, seen.requests_per_s, seen.seconds, seen.batch
    assert found == pytest.approx((4000 * 40 / 50, 160, 0.25, 40))
    assert (seen.e2e_s, seen.e2e_p50_s, seen.e2e_p95_s) == pytest.approx((0.25,) * 3) and seen.ttft_p90_s > 0
    known = seen.rate, seen.preemptions, seen.waste, len(seen.repeats), seen.batching, seen.valid, seen.fits
    assert known == (None, 0, None, 2, "continuous", True, True)
    assert (seen.model, seen.output_tokens, seen.requests) == ("opt-125m", 20, 40)
    assert [seen.goodput(slo).attainment for slo in ("e2e:1s", "e2e:100ms")] == [1, 0]
    m = served(job(40, rate=5.0, seed=1))
    (seen,), last = job_points([m]), m.load.schedule_s[-1]
    assert seen.rate == pytest.approx(40 / last) and seen.batch == window.requests_in_flight(m.run) < 1
    assert seen.requests_per_s == pytest.approx(40 / (last + seen.e2e_s), rel=0.01)
    power = planted_telemetry({sensors.POWER_INSTANT: 300.0}, until_s=m.run.window_s[1], interval_s=0.1)
    (watched,) = job_points([changed(m, "run", telemetry=power)])
    assert watched.energy_per_token_j == pytest.approx(300 * watched.seconds / (40 * 20)), "of all of its time"
    m = served(job(40))
    late = [changed(m, "run", "samples", sent_s=(*m.run.samples.sent_s[:-1], last)) for last in (0.05, 0.06)]
    assert [summarize(each).rate for each in late] == [None, pytest.approx(40 / 0.06)]


def test_job_waste_counts_unneeded_tokens():
    m = served(job(40))
    batched = changed(m, "spec", extra=(*m.spec.extra, ("batching", "static")))
    n = len(m.run.steps)
    prompts, nothing = (16 * 40, *(0,) * (n - 1)), (0,) * n
    traces = [((100,) * n, prompts), ((None, *(1,) * (n - 1)), prompts), ((None,) * n, nothing)]
    steps = [replace(m.run.steps, running=running, prompt_tokens=tokens) for running, tokens in traces]
    computed, wanted = 16 * 40 + 100 * n, (16 + 20) * 40
    found = [summarize(changed(batched, "run", steps=each)).waste for each in steps]
    assert found == pytest.approx([1 - wanted / computed, 0, None]) and summarize(m).waste is None
    assert [p.batching for p in job_points([batched, m])] == ["static", "continuous"]
    small = replace(SPEC, kv_cache_bytes=10 * 3 * 16 * model_of("opt-125m").kv_bytes_per_token())
    (tight,), (roomy,) = job_points([served(job(40), small)]), job_points([served(job(40))])
    assert (tight.kv_blocks, tight.capacity, tight.fits, roomy.fits) == (30, 9, False, True), "the engine keeps a block"
    assert tight.output_tokens_per_s == pytest.approx(4000 * 10 / 20)
    others = [changed(tight, "load", requests=9), *(changed(tight, "spec", max_num_seqs=n) for n in (9, 10))]
    assert [each.fits for each in others] == [True, True, False]
    assert ratio(roomy, tight, [roomy, tight]).value == pytest.approx(1.6)
    (preempted,) = job_points([served(job(40), preempt_from=30.0)])
    assert (preempted.valid, preempted.preemptions) == (True, 20)


@given(st.lists(st.floats(100, 1000), min_size=2, max_size=4))
def test_shared_engines_sum_throughput(rates):
    members = together(*rates)
    seen = summary_of(*members)
    assert seen.output_tokens_per_s == pytest.approx(sum(rates)) == pytest.approx(seen.sum_tokens_per_s)
    assert seen.each_tokens_per_s == pytest.approx(rates)
    assert seen.step_s == pytest.approx(fmean(8 / rate for rate in rates))
    assert seen.largest_e2e_s == pytest.approx(8 * 32 / min(rates)), "of the slowest in the mean"
    pooled = window.latencies([m.run for m in members]).figures
    assert {name: getattr(seen, name) for name in pooled} == pooled


@pytest.mark.parametrize("sharing", ["time-slicing", "mps", "gpus", "mig"])
def test_busy_rate_requires_time_slicing(sharing):
    def busy(m, share):
        until_s = m.run.window_s[1]
        return changed(m, "run", telemetry=planted_telemetry({sensors.ENGINE_ACTIVE: share}, until_s=until_s))

    members = together(400.0, 200.0, sharing=sharing)
    alone, seen = summarize(busy(members[0], 0.5)), summary_of(*(busy(m, 0.5) for m in members))
    assert alone.tokens_per_busy_s == pytest.approx(800.0)
    assert seen.tokens_per_busy_s == (pytest.approx(1200.0) if sharing == "time-slicing" else None)
    assert summarize(members[0]).tokens_per_busy_s is None is summarize(busy(members[0], 0.0)).tokens_per_busy_s


def test_shared_rates_use_common_span():
    assert summary_of(*together(400.0, 600.0, began_s=(100.0, 100.1))).output_tokens_per_s == pytest.approx(1000)
    apart = summary_of(*together(400.0, 400.0, began_s=(100.0, 900.0)))
    assert (apart.output_tokens_per_s, apart.sum_tokens_per_s) == (None, pytest.approx(800.0))
    assert (apart.each_tokens_per_s, apart.largest_e2e_s) == ((), None)
    for watched in (0, 1):
        members = together(400.0, 600.0)
        columns = {**WELL, sensors.ENERGY: None, sensors.POWER_INSTANT: 500.0}
        telemetry = planted_telemetry(columns, until_s=members[0].run.window_s[1], interval_s=0.05)
        members[watched] = changed(members[watched], "run", telemetry=telemetry)
        seen = summary_of(*members)
        assert (seen.power_w, seen.dram_active, seen.energy_per_token_j) == pytest.approx((500.0, 0.6, 0.5))
    runs = [together(400.0, 600.0), together(410.0, 610.0, repeat=1), together(500.0, 500.0, repeat=2, failures=1)]
    (seen,) = shared_points([m for run in runs for m in run])
    assert (*seen.repeats, *seen.each_tokens_per_s) == pytest.approx((1000.0, 1020.0, 405, 605))
    assert (seen.valid, seen.models, seen.count, seen.model) == (True, ("opt-1.3b",) * 2, 2, "opt-1.3b")
    assert (seen.concurrency, seen.loads, seen.sharing, seen.ramp_up) == (16, (8, 8), "mps", "staggered")
    assert (seen.workload, seen.families) == (runs[0][0].workload.hash, {runs[0][0].spec.family})
    assert (seen.left_out, len(seen.records)) == (1, 4) and 1 in numbers(seen.problems[0])
    assert seen.goodput("e2e:600ms") == window.goodput_of(window.parse_slo("e2e:600ms"), *runs[:2])
    assert not any(replace(seen, repeats=wrong).valid for wrong in ((), (0.0, 1.0), (math.inf,), (1.0, math.inf)))
    runs = [
        *together(300.0, 300.0, 300.0, group="three", repeat=1), *together(400.0, 400.0),
        *together(390.0, 390.0, group="turns", sharing="time-slicing", repeat=2),
        *together(400.0, 100.0, group="pair", models=["opt-125m", "opt-1.3b"], repeat=3),
    ]  # fmt: skip
    assert [(p.count, p.sharing, p.model) for p in shared_points(runs)] == [
        (2, "mps", "opt-1.3b"), (3, "mps", "opt-1.3b"), (2, "time-slicing", "opt-1.3b"), (2, "mps", None),
    ]  # fmt: skip
    assert points.engines(["opt-125m", "opt-1.3b", "opt-1.3b"]) == "opt-125m + 2 x opt-1.3b"


@given(st.permutations(range(3)))
def test_lost_replica_makes_no_run(order):
    members, alone = together(100.0, 200.0, 300.0), measurement()
    assert points.all_groups([*(members[i] for i in order), alone]) == [(alone,), tuple(members)]
    assert points.all_groups(members[:2]) == []


def test_ratio_noise_includes_every_point():
    slow, fast = job_point((10.0, 10.2)), job_point((20.0, 20.2), e2e_s=(1.0, 1.0))
    seen, several = ratio(fast, slow, [slow, fast]), ratio(fast, slow, several=4)
    assert seen == ratio(fast, slow) and seen.value == pytest.approx(20.1 / 10.1)
    assert several.low < seen.low < seen.value < seen.high < several.high
    assert ratio(fast, slow, what=points.e2e_s).value == pytest.approx(1.0 / 2.01)
    quiet, once = job_point((10.0, 10.001, 10.002)), job_point((10.0,))
    assert ratio(fast, slow, [quiet, slow, fast]).high < seen.high, "a third tells of less noise"
    assert ratio(fast, once).low is not None and ratio(job_point((20.0,)), once).low is None

    # Two engines, each with its repeats; nobody knows when the other two were measured.
    def side(launch, day, known=True):
        ms = [measurement(8, 1000.0 + i, repeat=i, launch=launch) for i in range(2)]
        ms = [replace(m, measured_at=f"2026-01-0{day}T0{i}:00:00+00:00" if known else "") for i, m in enumerate(ms)]
        found = points.point_of([(m,) for m in ms])
        each = tuple(replace(s, tokens_per_busy_s=1000.0 + i) for i, s in enumerate(found.each))
        return replace(found, each=each)

    one, other, *unknown = side("a", 1), side("b", 2), side("a", 1, False), side("b", 2, False)
    for what, wider in ((points.output_rate, True), (points.e2e_s, True), (points.busy_rate, False)):
        seen, told = ratio(other, one, what=what), ratio(unknown[1], unknown[0], what=what)
        assert (seen.high > told.high) is wider and seen.value == told.value
        assert wider or seen == told


def test_window_course_tells_point_noise():
    made = [measurement(8, 1000.0, repeat=i, steps=400) for i in range(2)]
    [steady] = points_of(made)
    convoys = replace(steady, used=tuple((replace(m, load=ClosedLoop(8, ramp_up="burst")),) for m in made))
    [shared] = shared_points([*together(400.0, 400.0), *together(410.0, 410.0, repeat=1)])
    course = [window.relative_variance(m.run) for m in made]
    for each, told in ((steady, course), (convoys, [None, None]), (shared, [None, None])):
        [sample] = points.point_differences([each]).samples
        rows = zip(each.repeats, (group[0] for group in each.used), told, strict=True)
        assert [*sample] == [(value, m.measured_at, m.launch, within) for value, m, within in rows]
    [planted] = points.point_differences([point(8, [1.0, 2.0])]).samples
    assert [*planted] == [(1.0, "", "", None), (2.0, "", "", None)], "without its measurements"


def test_unknown_figure_has_no_ratio():
    p = replace(point(8, [1.0]), each=tuple(Summary(batch=b) for b in (None, math.inf, 0.0, 2.0)))
    assert (points.figure_named("batch")(p), points.figure_named("batch", 0.0)(p)) == ([0.0, 2.0], [2.0])
    (shared,) = shared_points(together(600.0, 600.0))
    busy, blind = (replace(shared, each=tuple(replace(s, gpu_util=util) for s in shared.each)) for util in (0.9, 0.0))
    one, unknown = replace(p, each=(Summary(gpu_util=0.6, e2e_s=0.5),)), point(16, [1000.0])
    values = [points.figure_ratio(one, *each).value for each in ((busy, "gpu_util"), (shared, "largest_e2e_s"))]
    assert values == pytest.approx([1.5, shared.largest_e2e_s / 0.5])
    assert points.figure_ratio(one, blind, "gpu_util") is points.figure_ratio(unknown, shared, "e2e_p99_s") is None
    first, second = [point(c, [1.0]) for c in (1, 2, 8)], [point(c, [2.0]) for c in (8, 4, 2)]
    pairs, all_of_them = points.at_common_loads(first, second)
    assert [(p.concurrency, q.concurrency, q.repeats) for p, q in pairs] == [(2, 2, (2.0,)), (8, 8, (2.0,))]
    assert [p.concurrency for p in all_of_them] == [2, 2, 8, 8, 1, 4]
