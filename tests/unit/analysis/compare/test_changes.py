"""Two runs side by side, a run against a stored baseline, and releases in a row: what is planted is better or worse
by the whole interval, sides may be exchanged, and all that is unknown, of another host or machine, is inconclusive. No
verdict tells a run from its twin (all archives and launches of gates: `tests/nightly/statistics`)."""

import math
import random
import shlex
from dataclasses import astuple, replace
from functools import partial
from itertools import pairwise, permutations
from statistics import median, stdev

import pytest
from committed import archive, names_of
from facts import tells
from hypothesis import given, strategies as st
from scipy.stats import ttest_ind
from stored_records import BASELINE, BUSY, KNOWN, LIMITS, NEW, candidate, engine_alone, having, repeats

from pytest_slmserve.analysis.compare import changes
from pytest_slmserve.analysis.compare.changes import (
    LAUNCHES,
    METRICS,
    STORED,
    TOLERANCE,
    ComparedPair,
    Judgement,
    MetricChange,
    why_not,
)
from pytest_slmserve.analysis.estimates import Interval, Repeat, grouped
from pytest_slmserve.analysis.points import point_of
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema import records, sensors
from pytest_slmserve.schema.records import GateLaunch, Measurement, Replica
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

BETTER, WORSE, SAME, NO_WORSE, UNKNOWN = Judgement
BOUNDED = [name for name, metric in METRICS.items() if metric.bounded]
RATE, E2E = STORED
ON_CPU = replace(KNOWN, platform="cpu", **dict.fromkeys(("gpu_name", "gpu_memory_bytes", "driver", "cuda")))
CPU = {"environment": ON_CPU, "sensed": False}
PART, GATED = Replica("g", 0, 2, "s", "mps"), GateLaunch("g", 1, "baseline", False)
RELEASES = ("0.24.0", "0.25.0", "0.26.0", "0.27.0")
ONE, BLIND, ON_A_CPU = engine_alone(), engine_alone(sensed=False), engine_alone(**CPU)
WAITS, DISTURBED = (
    {"columns": {**BUSY, **seen}} for seen in ({sensors.ENGINE_ACTIVE: 0.64}, {sensors.STOLEN_CORES: 0.5})
)
HALF_USED = {n: column for n, column in BUSY.items() if n not in sensors.PROFILED} | {sensors.GPU_UTIL: 0.5}
SOME = st.lists(st.floats(900, 1100), min_size=2, max_size=3, unique=True)
FASTER = candidate(0.5)
STAMPS = [replace(m.run.samples, first_token_s=(None,) * len(m.run.samples)) for m in FASTER]
UNSTAMPED = [replace(m, run=replace(m.run, samples=each)) for m, each in zip(FASTER, STAMPS)]


def launched(rate: float, side: str, launches: int = LAUNCHES, **facts: object) -> list[Measurement]:
    """One repeat of each launch, 0.1% apart."""
    return [engine_alone(rate * (1 + 0.001 * n), launch=f"{side}-{n}", repeat=n, **facts) for n in range(launches)]


def shared(rates, factor=1.0, models=("opt-1.3b", "opt-1.3b"), launch="launch-1", **facts):
    """Runs of engines that share the device; of each a rate. What takes `factor` times as long."""
    return [
        replace(m, replica=Replica(f"{launch}-{run}", index, len(models), f"{models}", "mps"))
        for run, rate in enumerate(rates)
        for index, model in enumerate(models)
        for m in [engine_alone(rate / factor, model=model, launch=f"{launch}-{index}", repeat=run, **facts)]
    ]


def compare(there, here, tolerance=TOLERANCE, metrics=METRICS):
    return changes.compare(there, here, tolerance, metrics)


def judged(there, here, tolerance=TOLERANCE):
    return changes.against_stored(there, here, tolerance)[0]


def states(there, here, tolerance=TOLERANCE) -> dict[str, str]:
    return {verdict.claim: verdict.state.value for verdict in judged(there, here, tolerance)}


def both(state: str) -> dict[str, str]:
    return {claim: state for claim, _ in STORED.values()}


def verdicts(found, *names):
    return {each.verdict for each in found.changes if not names or each.metric in names}


def by_name(found):
    return {each.metric: each for each in found.changes}


@pytest.mark.parametrize(("factor", "verdict"), [
    (1.0, SAME), (1.02, SAME), (1.03, UNKNOWN), (1.05, WORSE), (1.1, WORSE), (0.97, NO_WORSE), (0.9, BETTER),
])  # fmt: skip
def test_bounding_sensor_lets_repeats_decide(factor, verdict):
    """A sensor bounds how launches differ; also against a stored baseline."""
    found = compare(BASELINE, candidate(factor))
    assert verdicts(found, *BOUNDED) == {verdict} and sum(found.counts.values()) == len(found.changes)
    assert found.state is (State.FAILS if verdict is WORSE else State.INCONCLUSIVE)
    others = {each.metric: each for each in found.changes if each.metric not in BOUNDED}
    assert {"ttft_s", "tpot_p99_s", "energy_per_token_j"} <= others.keys(), "one launch tells nothing of these"
    told = {(each.verdict, each.why, each.ratio.low, each.ratio.high) for each in others.values()}
    assert told == {(UNKNOWN, changes.FEW_LAUNCHES, None, None)}
    for name, times, stored in zip((RATE, E2E), (1 / factor, factor), judged(BASELINE, candidate(factor)), strict=True):
        one, why = by_name(found)[name], changes.NOISE if verdict is UNKNOWN else ""
        assert (one.subject, one.load, one.launches, one.why) == ("opt-1.3b", "concurrency 8", (1, 1), why)
        assert one.ratio.value == pytest.approx(times) == pytest.approx(one.candidate / one.baseline)
        assert one.ratio.low < one.ratio.value < one.ratio.high
        assert (stored.state, stored.subject) == (one.verdict.state, "opt-1.3b at concurrency 8")
        assert (stored.value, stored.low, stored.high) == astuple(one.ratio)
        assert stored.threshold == pytest.approx(1 / 1.03 if name == RATE else 1.03)
        assert stored.n == len(stored.records) == 6
        assert tells(stored.why, "3%", f"{stored.value:.4g} times", f"{stored.low:.4g} to {stored.high:.4g}")
        assert factor != 1.1 or tells(stored.why, *(("9.1%", "lower") if name == RATE else ("10%", "higher")))


@pytest.mark.parametrize("facts", [{}, CPU])
@pytest.mark.parametrize(("factor", "verdict"), [(1.0, SAME), (1.1, WORSE), (0.9, BETTER)])
def test_four_launches_decide_every_metric(facts, factor, verdict):
    found = compare(launched(1000, "a", **facts), launched(1000 / factor, "b", **facts))
    assert verdicts(found, RATE, "requests_per_s", "ttft_s", "ttft_p99_s", "e2e_p99_s") == {verdict}
    # Student's, of logarithms of rates 0, 1, 2 and 3 thousandths up on both sides, with 6 degrees of freedom.
    half = math.exp(2.4469 * stdev(math.log(1 + 0.001 * n) for n in range(4)) * math.sqrt(2 / 4))
    seen = by_name(found)[RATE].ratio
    assert (seen.low, seen.high) == pytest.approx((1 / factor / half, half / factor), rel=1e-5)


@pytest.mark.parametrize(("active", "factor"), [
    (1.0, 1.002), (0.64, math.exp(math.hypot(math.log(1.002), math.log(0.64) / 2)))
])  # fmt: skip
def test_single_launch_widens_interval(active, factor):
    columns = {**BUSY, sensors.ENGINE_ACTIVE: active}
    there, here = repeats([1000, 1000], columns=columns), repeats([900, 900], launch="b", columns=columns)
    seen = by_name(compare(there, here))[RATE].ratio
    assert (seen.low, seen.high) == pytest.approx((0.9 / factor, 0.9 * factor), rel=1e-6)
    # The candidate a day later, with noise: what launches differ by has the minutes between them.
    first, second = [1000, 1010, 1030], [900, 920, 925]
    there, later = repeats(first, columns=columns), repeats(second, launch="b", columns=columns)
    seen = by_name(compare(there, [replace(m, measured_at=f"2026-01-02{m.measured_at[10:]}") for m in later]))[RATE]
    noise = ttest_ind([math.log(r) for r in second], [math.log(r) for r in first]).confidence_interval(0.95)
    half = math.exp((noise.high - noise.low) / 2) * factor
    assert seen.ratio.high / seen.ratio.value == pytest.approx(half, rel=1e-5)


@pytest.mark.parametrize(("there", "here", "facts"), [
    (repeats([1000, 1001], **CPU), repeats([100, 101], launch="b", **CPU), (changes.FEW_LAUNCHES,)),
    (launched(1000, "a", **CPU), launched(100, "b", LAUNCHES - 1, **CPU), (changes.FEW_LAUNCHES,)),
    (BASELINE[:1], candidate(2.0)[:1], (changes.ONE_REPEAT,)),
    (BASELINE, candidate(1.5, environment=replace(NEW, cores=8)), ("cores", 16, 8)),
])  # fmt: skip
def test_insufficient_launches_decide_nothing(there, here, facts):
    found = compare(there, here)
    assert verdicts(found) == {UNKNOWN} and found.state is State.INCONCLUSIVE
    rate = by_name(found)[RATE]
    assert tells(rate.why, *facts) and rate.ratio.low is None and rate.ratio.value < 0.7


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("launches", [1, LAUNCHES])
@pytest.mark.parametrize("host", ["two", None])
def test_other_host_decides_no_change(factor, launches, host):
    there = launched(1000, "a", launches)
    here = launched(1000 / factor, "b", launches, environment=replace(KNOWN, host=host))
    found = compare(there, here)
    assert verdicts(found) <= {UNKNOWN, NO_WORSE}
    assert {each.why for each in found.changes if each.verdict is UNKNOWN} <= {changes.HOSTS}
    assert "host" in {each.field for each in found.differences} and any("host" in note for note in found.notes)
    if factor == 1.0 and launches == LAUNCHES:
        assert verdicts(compare(there, here, 0.15), *BOUNDED) == {SAME}, "a large tolerance"


def test_engines_pair_despite_changed_arguments():
    asked = {"max_num_batched_tokens": 2048, "extra": (("block_size", 32),)}
    here = having(candidate(1.5, environment=KNOWN), spec=asked, resolved={"max_num_batched_tokens": 2048})
    found = compare(BASELINE, here)
    assert verdicts(found, *BOUNDED) == {WORSE}
    told = {each.field: (each.baseline, each.candidate) for each in found.differences}
    assert told == {"max_num_batched_tokens": (("8192",), ("2048",)), "extra.block_size": ((None,), ("32",))}

    sides = launched(1000, "a"), launched(500, "b")
    jobs = [[replace(m, load=OpenLoop(requests=sum(m.run.samples.finished))) for m in side] for side in sides]
    found = compare(*jobs)
    assert verdicts(found) == {WORSE} and {each.load for each in found.changes} == {jobs[0][0].load.title}

    found = compare(BASELINE, candidate(1.5), metrics=[E2E, "ttft_s"])
    assert [(each.metric, each.verdict) for each in found.changes] == [("ttft_s", UNKNOWN), (E2E, WORSE)]
    gated = having(BASELINE, paired=GATED)
    found = compare([*gated, *BASELINE], candidate(1.0))
    assert by_name(found)[RATE].launches == (1, 1) and any(tells(note, "gates", 3) for note in found.notes)
    for found in (compare(gated, gated), compare(BASELINE, candidate(1.0, failures=1))):
        assert found.changes == found.baseline_only == found.candidate_only == ()
        assert found.state is State.INCONCLUSIVE
    # Each side has two engines: one is asked for by both, the others are held against each other.
    eager = having(repeats([500, 501], launch="e"), spec={"enforce_eager": True})
    seeded, third = (having(repeats([800, 801], launch=f"s{n}"), spec={"seed": n}) for n in (7, 8))
    found = compare([*BASELINE, *eager], [*seeded, *candidate(1.0)], metrics=[RATE])
    assert [each.ratio.value for each in found.changes] == pytest.approx([1.0, 800.5 / 500.5])
    found = compare([*BASELINE, *eager], [*seeded, *third, *candidate(1.0)], metrics=[RATE])
    assert [*map(len, (found.changes, found.baseline_only, found.candidate_only))] == [1, 1, 2]
    assert states([*eager, *BASELINE], candidate(1.0)) == both("passes")
    assert states(BASELINE, having(candidate(1.2), spec={"enforce_eager": True})) == both("fails")
    assert changes.compared_cases(shared([500])[1:], steady=True) == {}
    assert [*map(len, changes.compared_cases(shared([500, 501])[1:], steady=True).values())] == [2]
    assert states(BASELINE, having(candidate(1.1), replica=replace(PART, count=1))) == both("fails")
    mixed = [*BASELINE, *shared([500, 501], models=("opt-125m", "opt-1.3b"))]
    assert [len(changes.of_model(mixed, model)) for model in ("opt-1.3b", "opt-125m", "opt-2.7b")] == [3, 4, 0]


@pytest.mark.parametrize(("models", "name"), [
    (("opt-1.3b",) * 2, "2 x opt-1.3b by mps"), (("opt-125m", "opt-1.3b"), "opt-125m + opt-1.3b by mps"),
])  # fmt: skip
@pytest.mark.parametrize(("factor", "state"), [(1.0, "passes"), (1.1, "fails"), (1.03, "inconclusive")])
def test_sharing_engines_form_one_case(models, name, factor, state):
    there = shared([500, 501, 500], models=models)
    here = shared([500, 501, 500], factor, models=models, environment=NEW, launch="launch-2")
    assert states(there, here) == both(state)
    verdict, _ = judged(there, here)
    assert verdict.subject == f"{name} at concurrency 16" and verdict.n == len(set(verdict.records)) == 12
    change = by_name(compare(there, here))[RATE]
    assert (change.subject, change.load, change.verdict.state.value) == (name, "concurrency 16", state)
    assert change.ratio.value == pytest.approx(1 / factor)


def one(part: str, **facts: object) -> Measurement:
    """The baseline with other facts of a part of its record."""
    return having([ONE], **{part: facts})[0]


where, limits, asked = (partial(one, part) for part in ("environment", "resolved", "spec"))


def read(**readings: object) -> Measurement:
    """The baseline with other readings of its sensors."""
    return engine_alone(columns={**BUSY, **{getattr(sensors, name): value for name, value in readings.items()}})


HELD = read(SM_CLOCK=1830e6, CAPPED_POWER=float)
NO_CLOCK, NO_MEMORY_CLOCK = read(SM_CLOCK=None), read(MEMORY_CLOCK=None)
ELSEWHERE, UNKNOWN_HOST = where(host="two"), where(host=None)
MISMATCHES = [
    (where(gpu_name="NVIDIA H100"), "GPU", "NVIDIA H200", "NVIDIA H100"),
    (where(gpu_name="NVIDIA H200 MIG 1g.18gb"), "GPU", "NVIDIA H200", "NVIDIA H200 MIG 1g.18gb"),
    (where(gpu_memory_bytes=18 << 30), "GPU memory", "143,771 MiB", "18,432 MiB"),
    (where(driver="570.1"), "driver", "580.159.04", "570.1"),
    (where(driver=None), "driver", "580.159.04", "not known"),
    (where(platform="tpu"), "platform", "cuda", "tpu"),
    (where(cpu="EPYC"), "CPU", "Xeon", "EPYC"),
    (where(cores=8), "cores", 16, 8),
    (read(POWER_LIMIT=600.0), "power limit", "700 W", "600 W"),
    (read(POWER_LIMIT=None), "power limit", "700 W", "not known"),
    (read(POWER_LIMIT=lambda at: 700.0 if at < 0.5 else 600.0), "power limit", "700 W", "not known"),
    (read(SM_CLOCK=1500e6), "SM clock", "1980 MHz", "1500 MHz"),
    (read(SM_CLOCK=1959e6), "SM clock", "1980 MHz", "1959 MHz"),
    (read(SM_CLOCK=None), "SM clock", "1980 MHz", "not known"),
    (read(MEMORY_CLOCK=2619e6), "memory clock", "3201 MHz", "2619 MHz"),
    (limits(max_num_seqs=512), "max_num_seqs", 1024, 512),
    (limits(max_num_batched_tokens=2048), "max_num_batched_tokens", 8192, 2048),
    (limits(max_model_len=4096), "max_model_len", 2048, 4096),
    (limits(dtype="bfloat16"), "dtype", "float16", "bfloat16"),
    (limits(chunked_prefill=False), "chunked_prefill", True, False),
    (limits(prefix_caching=None), "prefix_caching", False, "not known"),
    (limits(kv_blocks=1300), "KV cache", "21,840 tokens", "20,800 tokens"),
    (asked(allow_prefix_cache=True), "prompts from a cache", "refused", "allowed"),
    (asked(interface="server"), "interface", "engine", "server"),
    (asked(load_format="auto"), "load format", "dummy", "auto"),
]


@pytest.mark.parametrize(("other", "words", "was", "now"), MISMATCHES)
def test_mismatch_gives_one_clause(other, words, was, now):
    (there,), (here,) = why_not(ONE, other), why_not(other, ONE)
    assert tells(there, words, was, now) and there.index(str(was)) < there.index(str(now))
    assert tells(here, words, was, now) and here.index(str(now)) < here.rindex(str(was))


def test_every_fact_has_mismatch_case():
    """`records.MUST_MATCH` is of one release; here the release is what is tested."""
    assert {fact.words for fact in changes.FACTS} == {words for _, words, _, _ in MISMATCHES}
    differ = {name for name in records.MUST_MATCH if why_not(ONE, where(**{name: 5}))}
    assert differ == {*records.MUST_MATCH} - {"vllm", "torch"}
    assert len(why_not(ON_A_CPU, ONE)) == 7
    pairs = (ONE, where(vllm="0.27.0")), (ONE, ELSEWHERE), (UNKNOWN_HOST, UNKNOWN_HOST), ()
    assert [changes.one_boot(*pair) for pair in pairs] == [True, False, False, False]


@pytest.mark.parametrize(("there", "here", "facts"), [
    # What is tested may differ.
    *((ONE, other, None) for other in (
        where(vllm="0.27.0", torch="2.12.0", cuda="13.1", python="3.14"),
        where(host="two", operating_system="another kernel", git_commit="abc", pytest_slmserve="9"),
        limits(attention_backend="FlashInfer", capture_sizes=(1, 2), async_scheduling=True, event_loop="asyncio"),
        limits(kv_blocks=1370, weight_bytes=1, ready_s=99.0),
        limits(block_size=32, kv_blocks=1365 // 2),
        asked(enforce_eager=True, model="facebook/opt-1.3b", extra=(("x", 1),), env=(("X", "1"),), python="/v/py"),
        read(SM_CLOCK=1962e6, POWER=650.0, TEMPERATURE=70.0),
        replace(ONE, replica=replace(PART, count=1)),
    )),
    # What is known on neither side is not equal; without sensors a GPU has no power limit to compare.
    *((where(**{name: None}),) * 2 + ((words, "neither"),)
      for name, words in (("gpu_name", "GPU"), ("driver", "driver"), ("cores", "cores"))),
    (BLIND, BLIND, ("power limit", "neither")),
    (NO_MEMORY_CLOCK, NO_MEMORY_CLOCK, None),
    (ON_A_CPU, ON_A_CPU, None),  # of a CPU the facts of a GPU are not asked for
    # A clock that the power limit holds is an effect.
    (ONE, HELD, None), (HELD, HELD, None), (HELD, NO_CLOCK, ("SM clock", "not known")),
])  # fmt: skip
def test_tested_facts_may_differ(there, here, facts):
    for told in (why_not(there, here), why_not(here, there)):
        assert len(told) == bool(facts) and all(tells(each, *facts) for each in told)


@pytest.mark.parametrize(("there", "here", "facts"), [
    (ONE, ONE, None), (ON_A_CPU, ON_A_CPU, None), (NO_MEMORY_CLOCK, NO_MEMORY_CLOCK, ("memory clock", "neither")),
    (ONE, ELSEWHERE, ("another host", "boot")), (ONE, UNKNOWN_HOST, ("not known", "host")),
    (UNKNOWN_HOST, ONE, ("not known", "host")),
    (ONE, where(operating_system="Linux 7"), ("operating system", "Linux", "Linux 7")),
    *((ONE, replace(ONE, measured_at=at), facts) for at, facts in (
        ("2026-01-01T23:59:59+00:00", None), ("2026-01-02T00:00:00Z", ("1 day", "older")),
        ("2026-01-13T00:00:00", ("12 days", "older")), ("2025-12-12T00:00:00+00:00", ("20 days", "younger")),
        ("some day", ("not known",)),
    )),
])  # fmt: skip
def test_other_host_gives_warning(there, here, facts):
    told = changes.warnings(there, here)
    assert len(told) == bool(facts) and all(tells(each, *facts) for each in told)


@pytest.mark.parametrize(("facts", "host", "factor", "tolerance", "state", "told"), [
    # Another host may differ by five per cent,
    *(({}, host, factor, 0.03, state, (1.05,)) for host in ("two", None) for factor, state in (
        *((factor, "inconclusive") for factor in (0.995, 1.0, 1.04, 1.06)), (1.1, "fails"), (0.96, "passes"))),
    ({}, "two", 1.0, 0.10, "passes", (1.05,)),
    # and by more where the GPU waits for its host; utilisation tells of it where there are no profiling counters.
    (WAITS, "two", 1.0, 0.10, "inconclusive", ("36%",)),
    (WAITS, "one", 1.1, 0.03, "inconclusive", ("36%", 1.25)),
    (WAITS, "one", 1.3, 0.03, "fails", ("36%", 1.25)),
    ({"columns": HALF_USED}, "one", 1.1, 0.03, "inconclusive", ("50%", 1.414)),
    # Without a sensor of waiting it is not comparable.
    (CPU, "one", 1.1, 0.03, "fails", ()), (CPU, "one", 1.0, 0.03, "inconclusive", ()),
    (CPU, "two", 2.0, 0.03, "inconclusive", ("sensor",)),
    *((DISTURBED, "one", factor, 0.03, state, ()) for factor, state in ((1.0, "passes"), (1.1, "fails"))),
])  # fmt: skip
def test_host_differences_have_tolerance(facts, host, factor, tolerance, state, told):
    there = repeats([1000, 1001, 1002], **facts)
    here = candidate(factor, **{**facts, "environment": replace(facts.get("environment", NEW), host=host)})
    assert states(there, here, tolerance) == both(state)
    for verdict in judged(there, here, tolerance):
        assert tells(verdict.why, *told) and (verdict.value is None) is (told == ("sensor",))


def test_noise_comes_from_same_load():
    """A noisy load does not hide what another shows; one repeat against several has their noise."""
    there = [*BASELINE, *repeats([500, 700], 4), *repeats([300], 2)]
    here = [*candidate(1.0)[:1], *repeats([500, 700], 4, environment=NEW), *repeats([300], 2, environment=NEW)]
    found = judged(there, here)[::2]
    assert [v.state.value for v in found] == ["inconclusive", "inconclusive", "passes"]
    assert (found[0].subject, found[0].value, found[0].low) == ("opt-1.3b at concurrency 2", 1.0, None)
    assert tells(found[0].why, "--slm-repeats 2")
    elsewhere = having(BASELINE[:1], environment={"host": "two"})
    assert states([*BASELINE, *elsewhere], candidate(1.0)) == both("inconclusive")
    once, twice = [repeats([1000.0], load) for load in (64, 128)], repeats([500.0, 501.0], 8)
    other = repeats([500.0, 501.0], 8, model="opt-2.7b")
    lone, told, unlike = (
        {c.metric: c for c in compare(side, side).changes if c.load == "concurrency 64" and c.subject == "opt-1.3b"}
        for side in ([*once[0], *once[1]], [*once[0], *once[1], *twice], [*once[0], *other])
    )
    assert lone["tokens_per_busy_s"].ratio.low is unlike["tokens_per_busy_s"].ratio.low is None
    assert told["tokens_per_busy_s"].ratio.low < 1 < told["tokens_per_busy_s"].ratio.high
    assert told[RATE].ratio.low is None, "what was seen is the host's at each load"
    here = [*candidate(1.0), *repeats([9, 9], 16), *repeats([9, 9], 4)]
    compared = compare(BASELINE, here)
    assert {each.load for each in compared.changes} == {"concurrency 8"} and compared.baseline_only == ()
    assert [tells(each, "opt-1.3b", "4, 16", "5 s", "012345") for each in compared.candidate_only] == [True]
    for side, sides in (("this run", (BASELINE, here)), ("the baseline", (here, BASELINE))):
        told = changes.against_stored(*sides, TOLERANCE)[1][0]
        assert tells(told, side, "opt-1.3b", "4, 16", "5 s", "012345")
    others = (having(side, workload={"hash": "fedcba987654"}) for side in (BASELINE, candidate(1.1)))
    found = judged(*([*one, *other] for one, other in zip((BASELINE, candidate(1.0)), others)))
    assert [(v.subject[-7:-1], v.state.value) for v in found[::2]] == [("012345", "passes"), ("fedcba", "fails")]
    ways = PART, replace(PART, thread_percentage=50, pinned=True)
    found = compare(*([replace(ONE, replica=replace(way, index=i)) for i in range(2)] for way in ways))
    assert found.pairs == () and tells(found.baseline_only[0], "2 x opt-1.3b by mps")
    assert tells(found.candidate_only[0], "2 x opt-1.3b by mps", "50%", "pinned")


@pytest.mark.parametrize(("there", "here", "facts"), [
    (BASELINE, candidate(1.0, resolved=replace(LIMITS, max_num_batched_tokens=2048)), (8192, 2048)),
    (BASELINE, candidate(1.0, environment=replace(NEW, driver="570.1")), ("driver", "580.159.04", "570.1")),
    (BASELINE, candidate(1.0, sensed=False), ("power limit", "700 W", "not known")),
    (BASELINE, candidate(1.0, failures=1), ("this run", "invalid", 1)),
    (repeats([1000, 1001], preempted=1), candidate(1.0), ("baseline", "invalid", 1)),
    (BASELINE, candidate(1.0, columns={**BUSY, sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}),
     ("this run", "questionable", 3)),
    # Missing data never passes, however fast.
    *((BASELINE, having(FASTER, **{part: {name: None}}), ("not known",)) for part, name in (
        *(("environment", name) for name in ("platform", "gpu_name", "gpu_memory_bytes", "driver", "cpu", "cores")),
        *(("resolved", name) for name in ("max_num_seqs", "dtype", "chunked_prefill", "kv_blocks", "block_size")))),
    (BASELINE, UNSTAMPED, ("this run", "invalid")),
    ([*BASELINE, *candidate(1.0)], candidate(1.0, launch="launch-3"), ("baseline", 2)),
    (BASELINE, [*candidate(1.0), *BASELINE], ("this run", 2)),
])  # fmt: skip
def test_incomparable_sides_are_inconclusive(there, here, facts):
    assert states(there, here) == states(here, there) == both("inconclusive")
    found = judged(there, here)
    assert all(v.value is None and tells(v.why, *facts) for v in found)
    assert len({v.records for v in found}) == 1 and found[0].records, "those of the valid side at least"
    assert [v.threshold for v in found] == pytest.approx([1 / 1.03, 1.03])


@pytest.mark.parametrize(("there", "here"), [
    ([], []), (BASELINE, []), ([], BASELINE), (BASELINE, repeats([1000, 1001], 16)),
    (BASELINE, repeats([1000, 1001], model="opt-2.7b")), (BASELINE, having(BASELINE, load=ClosedLoop(8, window_s=9))),
    (BASELINE, having(BASELINE, load=OpenLoop(requests=8))), (BASELINE, having(BASELINE, workload={"hash": "other"})),
    (BASELINE, having(BASELINE, replica=PART)),
])  # fmt: skip
def test_other_workload_is_another_case(there, here):
    """Nothing in common is inconclusive."""
    found, (verdict,) = compare(there, here), judged(there, here)
    assert found.pairs == () and verdict.state is State.INCONCLUSIVE and verdict.claim == changes.COMMON
    assert tells(verdict.why, *(("opt-1.3b", 8, "5 s") if there else ("none",)))
    if there and here and not here[0].replica:
        assert len(found.baseline_only) == len(found.candidate_only) == 1


@given(there=SOME, here=SOME, tolerance=st.floats(0.01, 0.3))
def test_slower_candidate_is_never_better(there, here, tolerance):
    """Direction: what holds for a candidate holds for a faster one, what fails fails for a slower one."""
    rank = ("passes", "inconclusive", "fails").index
    sides = [repeats([rate / factor for rate in here], environment=NEW) for factor in (0.8, 1, 1.25)]
    found = [states(repeats(there), side, tolerance) for side in sides]
    for claim in both(""):
        badness = [rank(each[claim]) for each in found]
        assert badness == sorted(badness)
    ahead = judged(repeats(there), repeats(here, environment=NEW))
    back = judged(repeats(here, environment=NEW), repeats(there))
    for one, other in zip(ahead, back, strict=True):
        assert (one.value, one.low, one.high) == pytest.approx((1 / other.value, 1 / other.high, 1 / other.low))
        assert not (one.state is other.state is State.FAILS)


def release(version: str, rates=(1000, 1001), concurrency: int = 8, **facts: object) -> list[Measurement]:
    """Repeats of one launch. facts: of the environment."""
    there = replace(KNOWN, vllm=version, **facts)  # type: ignore[arg-type]
    return repeats(rates, concurrency, environment=there, launch=f"{version} on {there.host}")


def history(*releases: list[Measurement]):
    """Of the rate, of that while a kernel ran and of the TPOT."""
    return changes.release_histories([m for each in releases for m in each])


def test_history_marks_slower_release():
    for seed in range(3):
        chance, slow = random.Random(seed), 1 / 1.1
        speeds = zip(RELEASES, (1, 1, slow, slow))
        drawn = [(v, [1000 * speed * chance.gauss(1.0, 0.002) for _ in range(5)]) for v, speed in speeds]
        found = history(*(release(*each) for each in drawn))
        assert [each.metric for each in found] == [RATE, "tokens_per_busy_s", "tpot_s"]
        for each, ratio in zip(found, (slow, slow, 1.1)):
            steps = [(one.release, one.step and one.step.verdict) for one in each.releases]
            assert steps == [*zip(RELEASES, (None, SAME, WORSE, SAME))]
            assert all(one.mean.low < one.mean.value < one.mean.high for one in each.releases)
            assert each.releases[2].step.ratio.value == pytest.approx(ratio, rel=0.005)
    wanted = ["0.9.2", "0.10.0.dev3+gabcdef", "0.10.0rc1.dev7", "0.10.0rc1", "0.10.0rc2", "0.10.0rc10", "0.10.0+cu130"]
    wanted += ["0.10.0.post1", "0.10.1", "0.20.0"]
    shuffled = random.Random(1).sample(wanted, len(wanted))
    assert sorted(shuffled, key=changes.release_order) == wanted
    assert [each.release for each in history(*map(release, shuffled))[0].releases] == wanted
    loads = {"0.24.0": (8, 64), "0.25.0": (8, 64, 128), "0.26.0": (8, 64), "0.27.0": (8, 128)}
    made = [release(version, concurrency=load) for version, each in loads.items() for load in each]
    found = [{(each.subject, len(each.releases)) for each in history(*some)} for some in (made, made[:-2])]
    assert found == [{("opt-1.3b at concurrency 8", 4)}, {("opt-1.3b at concurrency 64", 3)}]
    for other in (
        {"paired": GATED}, {"replica": PART}, {"load": OpenLoop(requests=64)}, {"environment": {"vllm": None}},
    ):  # fmt: skip
        assert history(having([*FIRST, *SECOND], **other)) == []
    assert history(FIRST, release("0.25.0", gpu_name="NVIDIA A100")) == [] == history()
    unseen = having([*FIRST, *SECOND], run={"telemetry": None})
    assert [each.metric for each in history(unseen)] == [RATE, "tpot_s"], "no kernel is seen without counters"
    found = history(FIRST, SECOND, *(having(each, spec={"enforce_eager": True}) for each in (FIRST, SECOND)))
    assert len({each.subject for each in found}) == 2 and {len(each.releases) for each in found} == {2}


FIRST, SECOND = map(release, RELEASES[:2])
ELSEWHERE_TOO = [m for host in ("two", "three") for m in release("0.25.0", [500, 501, 502, 503], host=host)]


@pytest.mark.parametrize(("releases", "words"), [
    ([FIRST, SECOND], "same"),
    ([FIRST, release("0.25.0", [500, 501])], "regressed"),
    ([FIRST, release("0.25.0", [2000, 2002])], "improved"),
    ([FIRST, release("0.25.0", [500, 1500])], changes.TOO_FEW),
    ([release("0.24.0", [1000]), release("0.25.0", [1000])], changes.TOO_FEW),
    # An interval that would show a change of a tenth tells something.
    ([FIRST, release("0.25.0", [1000, 1030])], changes.NO_DIFFERENCE),
    ([FIRST, release("0.25.0", [500, 501], host="two")], changes.NOT_COMPARABLE),
    ([FIRST, release("0.25.0", [500, 501], driver="600.1")], changes.NOT_COMPARABLE),
    # Of several hosts the one counts that most releases share.
    ([FIRST, ELSEWHERE_TOO, SECOND], "same"), ([SECOND, ELSEWHERE_TOO, FIRST], "same"),
    # An invalid release is left out, and its neighbours are compared.
    ([FIRST, having(release("0.25.0", [500, 501]), run={"failures": 1}), release("0.26.0")], "same"),
    # Four launches of each release are the repeats.
    ([launched(rate, v, environment=replace(KNOWN, vllm=v)) for v, rate in (("0.24.0", 1000), ("0.25.0", 900))],
     "regressed"),
    # A new argument goes on with the old.
    ([FIRST, having(SECOND, spec={"seed": 7})], "same"),
])  # fmt: skip
def test_history_names_release_change(releases, words):
    rate, of_gpu, _ = history(*releases)
    assert [each.step_words for each in rate.releases] == ["", words] == [each.step_words for each in of_gpu.releases]
    if ELSEWHERE_TOO in releases:
        assert rate.releases[1].mean.value == pytest.approx(1000.5)
    if len(releases[0]) == LAUNCHES:
        assert [each.launches for each in rate.releases] == [LAUNCHES] * 2


@pytest.mark.parametrize(("waits", "noise", "shows"), [
    (0.0, 0.0, 0.03), (0.0, 0.02, 0.03), (0.2, 0.0, 0.1), (0.6, 0.02, 0.1),
])  # fmt: skip
def test_launches_needed_show_named_change(waits, noise, shows):
    """The 95% interval of launches that scatter as the rules say, by the median of 400 histories."""
    point = replace(point_of([(each,) for each in FIRST]), engine_active=1 - waits)
    pair = ComparedPair(None, "", point, point, "", same_boot=True)  # type: ignore[arg-type]
    step = MetricChange("", "", RATE, 1.0, 1.0, Interval(1.0), Judgement.INCONCLUSIVE, changes.NOISE, (1, 1))
    launches, shown = changes.launches_needed(pair, step, noise)
    assert shown == shows and launches >= LAUNCHES
    assert changes.launches_needed(pair, replace(step, launches=(LAUNCHES, 9)), noise) is None
    assert changes.launches_needed(pair, replace(step, why=changes.HOSTS), noise) is None
    chance, sd = random.Random(1), math.hypot(pair.unseen / 1.96 / math.sqrt(2), noise)
    for n, enough in ((launches, True), (launches // 2, False)):
        reach = []
        for _ in range(400):
            drawn = [[Repeat(chance.lognormvariate(0, sd), launch=f"{i} {j}") for j in range(n)] for i in (0, 1)]
            seen = changes.repeat_noise([[[each] for each in side] for side in drawn]).between(0, 1)
            reach.append((seen.high - seen.low) / 2)
        close = median(reach) < 1.03 * math.log1p(shows)
        assert close if enough else launches == LAUNCHES or not close


def test_history_command_launches_both_releases():
    apart = having(release("0.25.0", [500, 1500]), spec={"env": (("PYTHONPATH", "/x y"),), "extra": (("seed", 1),)})
    (rate, *_) = history(having(FIRST, spec={"python": "/a/python"}), apart)
    words = shlex.split(rate.releases[1].gate)
    sides = ["baseline:python=/a/python", "candidate:env=PYTHONPATH=/x y", "candidate:arg=seed=1"]
    assert [word for word in words if word.startswith("--slm-side=")] == [f"--slm-side={side}" for side in sides]
    assert f"slm_gate_pairs={rate.releases[1].launches_more + 1}" in words
    assert "python=/path/to/vllm-0.24.0/bin/python" in changes.gate_command(FIRST[0], SECOND[0], 4, 0.1)
    (served,) = having(SECOND[:1], spec={"interface": "endpoint", "platform": "remote", "url": "http://a/v1"})
    assert changes.gate_command(FIRST[0], served, 4, 0.1) == history(FIRST, SECOND)[0].releases[1].gate == ""


def test_unchanged_launches_show_no_regression():
    """Runs of one release, minutes apart: one launch differs from the next, and nothing has changed."""
    launches = grouped(archive("h200-vllm-0.26.0-staggered"), lambda m: m.launch).values()
    found = [each for pair in permutations(launches, 2) for each in compare(*pair).changes]
    assert len(found) > 100 and not [each for each in found if each.verdict in (BETTER, WORSE)]
    # Every other repeat against the rest; some of them are of two launches, 14% apart.
    measured = archive("h200-vllm-0.26.0-sensors")
    for first in (0, 1):
        verdicts, _ = changes.against_stored(measured[first::2], measured[1 - first :: 2], TOLERANCE)
        assert len(verdicts) > 50 and not [v for v in verdicts if v.state is State.FAILS]
        held = {v.subject for v in verdicts if v.state is State.PASSES}
        assert {"opt-1.3b at concurrency 512", "opt-2.7b at concurrency 256"} <= held, "where the GPU is busy"
    # At the load that it follows: others may tell `compare` the noise of a load that was measured once.
    all_loads = [archive(name) for name in names_of("h200-vllm-*-history")]
    ledgers = [[m for m in each if m.load.max_concurrency == 512] for each in all_loads]
    found = changes.release_histories([m for each in ledgers for m in each])
    assert {each.subject for each in found} == {"opt-1.3b at concurrency 512", "opt-125m at concurrency 512"}
    for number, (there, here) in enumerate(pairwise(ledgers), start=1):
        compared = {(c.subject, c.load, c.metric): c for c in compare(there, here).changes}
        for release in (each.releases[number] for each in found):
            other = compared[release.step.subject, release.step.load, release.step.metric]
            assert replace(release.step, subject="") == replace(other, subject="")
            assert release.mean.value == other.candidate
