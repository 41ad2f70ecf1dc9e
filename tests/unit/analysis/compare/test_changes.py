"""Two runs side by side, a run against a stored baseline, and releases in a row: what is planted is better or worse
by the whole interval, sides may be exchanged, and all that is unknown, of another host or machine, is inconclusive."""

from __future__ import annotations

import math
import random
from dataclasses import astuple, replace
from statistics import stdev

import pytest
from facts import tells
from hypothesis import given
from hypothesis import strategies as st
from stored_records import BASELINE, BUSY, KNOWN, LIMITS, NEW, candidate, engine_alone, repeats

from pytest_slmserve.analysis.compare.changes import (
    COMMON,
    FACTS,
    FEW_LAUNCHES,
    HOSTS,
    LAUNCHES,
    METRICS,
    NO_DIFFERENCE,
    NOISE,
    NOT_COMPARABLE,
    ONE_REPEAT,
    STORED,
    TOLERANCE,
    Judgement,
    ReleaseHistory,
    against_stored,
    compare,
    compared_cases,
    of_model,
    one_boot,
    release_histories,
    release_order,
    warnings,
    why_not,
)
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.schema import records, sensors
from pytest_slmserve.schema.records import GateLaunch, Measurement, Replica
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

BOUNDED = [name for name, metric in METRICS.items() if metric.bounded]
RATES = ("output_tokens_per_s", "requests_per_s")


def launched(rate: float, side: str, launches: int = LAUNCHES, **facts: object) -> list[Measurement]:
    """One repeat of each launch, 0.1 % apart."""
    each = [(f"{side}-{n}", rate * (1 + 0.001 * n)) for n in range(launches)]
    return [engine_alone(r, launch=name, repeat=n, **facts) for n, (name, r) in enumerate(each)]


def by_name(found):
    return {each.metric: each for each in found.changes}


def verdicts(found, *names):
    return {each.verdict for each in found.changes if not names or each.metric in names}


ON_CPU = replace(KNOWN, platform="cpu", gpu_name=None)


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.0, Judgement.SAME),
        (1.02, Judgement.SAME),
        (1.03, Judgement.INCONCLUSIVE),
        (1.05, Judgement.WORSE),
        (0.97, Judgement.NO_WORSE),
        (0.9, Judgement.BETTER),
    ],
)
def test_where_a_sensor_bounds_how_launches_differ_repeats_decide(factor, verdict):
    found = compare(BASELINE, candidate(factor), TOLERANCE)
    assert verdicts(found, *BOUNDED) == {verdict} and sum(found.counts.values()) == len(found.changes)
    rate = by_name(found)["output_tokens_per_s"]
    assert (rate.subject, rate.load, rate.launches) == ("opt-1.3b", "concurrency 8", (1, 1))
    assert rate.ratio.value == pytest.approx(1 / factor) == pytest.approx(rate.candidate / rate.baseline)
    assert rate.ratio.low < rate.ratio.value < rate.ratio.high
    assert rate.why == ("" if verdict is not Judgement.INCONCLUSIVE else NOISE)
    assert by_name(found)["e2e_s"].ratio.value == pytest.approx(factor)


def test_of_latencies_and_energy_nothing_is_claimed_by_one_launch():
    found = compare(BASELINE, candidate(2.0), TOLERANCE)
    others = [each for each in found.changes if each.metric not in BOUNDED]
    assert {"ttft_s", "tpot_p99_s", "energy_per_token_j"} <= {each.metric for each in others}
    told = {(each.verdict, each.why, each.ratio.low, each.ratio.high) for each in others}
    assert told == {(Judgement.INCONCLUSIVE, FEW_LAUNCHES, None, None)}
    assert found.state is State.FAILS, "for the bounded ones are worse"


@pytest.mark.parametrize("facts", [{}, {"environment": ON_CPU, "sensed": False}])
@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, Judgement.SAME), (1.1, Judgement.WORSE), (0.9, Judgement.BETTER)]
)
def test_four_launches_on_each_side_decide_every_metric(facts, factor, verdict):
    found = compare(launched(1000, "a", **facts), launched(1000 / factor, "b", **facts), TOLERANCE)
    assert verdicts(found, *RATES, "ttft_s", "ttft_p99_s", "e2e_p99_s") == {verdict}


def test_the_interval_of_four_launches_is_students():
    """Logarithms of rates 0, 1, 2 and 3 thousandths up on both sides: 2.4469 standard errors with 6 of freedom."""
    found = by_name(compare(launched(1000, "a"), launched(1000, "b"), TOLERANCE))["output_tokens_per_s"]
    half = 2.4469 * stdev(math.log(1 + 0.001 * n) for n in range(4)) * math.sqrt(2 / 4)
    assert (found.ratio.low, found.ratio.high) == pytest.approx((math.exp(-half), math.exp(half)), rel=1e-5)


@pytest.mark.parametrize(
    ("facts", "factor"), [({}, 1.002), ({"columns": {**BUSY, sensors.ENGINE_ACTIVE: 0.64}}, 0.64**-0.5)]
)
def test_one_launch_widens_the_interval_of_the_repeats_by_what_launches_differ(facts, factor):
    """By 0.2 % if the GPU is busy, and by the root of what waiting allows otherwise."""
    there, here = repeats([1000, 1000], **facts), repeats([900, 900], launch="b", **facts)
    found = by_name(compare(there, here, TOLERANCE))["output_tokens_per_s"].ratio
    assert (found.low, found.high) == pytest.approx((0.9 / factor, 0.9 * factor), rel=1e-6)


def test_without_a_sensor_one_launch_decides_nothing_however_large_the_difference():
    facts = {"sensed": False, "environment": ON_CPU}
    found = compare(repeats([1000, 1001], **facts), repeats([100, 101], launch="b", **facts), TOLERANCE)
    assert {(each.verdict, each.why) for each in found.changes} == {(Judgement.INCONCLUSIVE, FEW_LAUNCHES)}
    fewer = compare(launched(1000, "a", **facts), launched(100, "b", LAUNCHES - 1, **facts), TOLERANCE)
    assert verdicts(fewer) == {Judgement.INCONCLUSIVE} == {fewer.state and Judgement.INCONCLUSIVE}


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("launches", [1, LAUNCHES])
@pytest.mark.parametrize("host", ["two", None])
def test_on_another_host_nothing_is_better_or_worse(factor, launches, host):
    there = launched(1000, "a", launches)
    here = launched(1000 / factor, "b", launches, environment=replace(KNOWN, host=host))
    found = compare(there, here, TOLERANCE)
    assert verdicts(found) <= {Judgement.INCONCLUSIVE, Judgement.NO_WORSE}
    assert {each.why for each in found.changes if each.verdict is Judgement.INCONCLUSIVE} <= {HOSTS}
    assert "host" in {each.field for each in found.differences}
    assert any("host" in note for note in found.notes)
    if factor == 1.0 and launches == LAUNCHES:
        assert verdicts(compare(there, here, 0.15), *BOUNDED) == {Judgement.SAME}, "a large tolerance"


def test_one_repeat_on_each_side_has_a_ratio_and_no_interval():
    found = compare(BASELINE[:1], candidate(2.0)[:1], TOLERANCE)
    rate = by_name(found)["output_tokens_per_s"]
    assert (rate.verdict, rate.why, rate.ratio.low) == (Judgement.INCONCLUSIVE, ONE_REPEAT, None)
    assert rate.ratio.value == pytest.approx(0.5)


def test_another_machine_is_an_obstacle_and_other_arguments_are_what_is_compared():
    other = compare(BASELINE, candidate(1.5, environment=replace(NEW, cores=8)), TOLERANCE)
    assert verdicts(other) == {Judgement.INCONCLUSIVE} and all(
        tells(each.why, "cores", 16, 8) for each in other.changes
    )
    fewer = replace(LIMITS, max_num_batched_tokens=2048)
    asked = [
        replace(m, spec=replace(m.spec, max_num_batched_tokens=2048, extra=(("block_size", 32),)))
        for m in candidate(1.5, resolved=fewer, environment=KNOWN)
    ]
    found = compare(BASELINE, asked, TOLERANCE)
    assert verdicts(found, *BOUNDED) == {Judgement.WORSE}
    told = {each.field: (each.baseline, each.candidate) for each in found.differences}
    assert told == {"max_num_batched_tokens": (("8192",), ("2048",)), "extra.block_size": ((None,), ("32",))}


def test_an_invalid_side_decides_nothing():
    broken = [replace(m, run=replace(m.run, failures=1)) for m in candidate(1.0)]
    found = compare(BASELINE, broken, TOLERANCE)
    assert found.changes == () and found.baseline_only == () == found.candidate_only
    assert found.state is State.INCONCLUSIVE


def test_what_one_side_has_alone_is_named():
    found = compare([*BASELINE, engine_alone(500, 4)], [*candidate(1.0), engine_alone(900, 64)], TOLERANCE)
    assert {each.load for each in found.changes} == {"concurrency 8"}
    [there], [here] = found.baseline_only, found.candidate_only
    assert tells(there, "opt-1.3b", 4) and tells(here, "opt-1.3b", 64)


def test_engines_are_held_against_those_of_their_own_arguments():
    """Each side has two engines: one is asked for by both, the others are held against each other."""
    eager = [replace(m, spec=replace(m.spec, enforce_eager=True)) for m in repeats([500, 501], launch="e")]
    seeded = [replace(m, spec=replace(m.spec, seed=7)) for m in repeats([800, 801], launch="s")]
    found = compare([*BASELINE, *eager], [*seeded, *candidate(1.0)], TOLERANCE, ["output_tokens_per_s"])
    assert [each.ratio.value for each in found.changes] == pytest.approx([1.0, 800.5 / 500.5])
    third = [replace(m, spec=replace(m.spec, seed=8)) for m in repeats([800, 801], launch="t")]
    found = compare([*BASELINE, *eager], [*seeded, *third, *candidate(1.0)], TOLERANCE, ["output_tokens_per_s"])
    assert len(found.changes) == 1 and len(found.baseline_only) == 1 and len(found.candidate_only) == 2


def test_launches_of_a_gate_are_left_out():
    gated = [replace(m, paired=GateLaunch("g", 1, "baseline", False)) for m in BASELINE]
    found = compare([*gated, *BASELINE], candidate(1.0), TOLERANCE)
    assert by_name(found)["output_tokens_per_s"].launches == (1, 1)
    assert any(tells(note, "gates", 3) for note in found.notes)
    assert compare(gated, gated, TOLERANCE).changes == ()


def test_jobs_are_compared_too():
    def job(m: Measurement) -> Measurement:
        return replace(m, load=OpenLoop(requests=sum(m.run.samples.finished)))

    there, here = ([job(m) for m in launched(rate, side)] for rate, side in ((1000, "a"), (500, "b")))
    found = compare(there, here, TOLERANCE)
    assert verdicts(found) == {Judgement.WORSE} and {each.load for each in found.changes} == {there[0].load.title}


def test_several_engines_on_one_device_are_one_case():
    def pair(rate: float, launch: str) -> list[Measurement]:
        part = Replica(launch, 0, 2, "asked", "mps")
        each = [engine_alone(rate, launch=f"{launch}-{i}") for i in range(2)]
        return [replace(m, replica=replace(part, index=i)) for i, m in enumerate(each)]

    there, here = ([m for n in range(LAUNCHES) for m in pair(r + n, f"{r}{n}")] for r in (1000, 800))
    found = compare(there, here, TOLERANCE)
    assert {(each.subject, each.load) for each in found.changes} == {("2 x opt-1.3b by mps", "concurrency 16")}
    assert by_name(found)["output_tokens_per_s"].ratio.value == pytest.approx(0.8, rel=0.01)
    assert verdicts(found, "output_tokens_per_s") == {Judgement.WORSE}


def test_only_wanted_metrics_are_compared():
    found = compare(BASELINE, candidate(1.5), TOLERANCE, ["e2e_s", "ttft_s"])
    assert [each.metric for each in found.changes] == ["ttft_s", "e2e_s"]
    assert {verdict: n for verdict, n in found.counts.items() if n} == {Judgement.WORSE: 1, Judgement.INCONCLUSIVE: 1}


# What must match, and what may differ


def of(**changes: object) -> Measurement:
    """The baseline with other facts of its environment."""
    return replace(ONE, environment=replace(KNOWN, **changes))


def resolved(**changes: object) -> Measurement:
    return replace(ONE, resolved=replace(LIMITS, **changes))


def sensed(**changes: object) -> Measurement:
    return engine_alone(columns={**BUSY, **{getattr(sensors, name): value for name, value in changes.items()}})


def asked(**changes: object) -> Measurement:
    return replace(ONE, spec=replace(ONE.spec, **changes))


TWO = Replica("g", 0, 2, "s", "mps")


def beside(**changes: object) -> Measurement:
    return replace(ONE, replica=replace(TWO, **changes))


ONE = engine_alone()
MISMATCHES = [
    *(
        (of(**{name: value}), words)
        for name, value, words in (
            ("gpu_name", "NVIDIA H100", ("GPU", "NVIDIA H100")),
            ("gpu_name", "NVIDIA H200 MIG 1g.18gb", ("GPU", "NVIDIA H200 MIG 1g.18gb")),
            ("gpu_memory_bytes", 18 << 30, ("GPU memory", "143,771 MiB", "18,432 MiB")),
            ("driver", "570.1", ("driver", "580.159.04", "570.1")),
            ("driver", None, ("driver", "580.159.04", "not known")),
            ("platform", "tpu", ("platform", "cuda", "tpu")),
            ("cpu", "EPYC", ("CPU", "Xeon", "EPYC")),
            ("cores", 8, ("cores", 16, 8)),
        )
    ),
    *(
        (sensed(**{name: value}), words)
        for name, value, words in (
            ("POWER_LIMIT", 600.0, ("power limit", "700 W", "600 W")),
            ("POWER_LIMIT", None, ("power limit", "700 W", "not known")),
            ("POWER_LIMIT", lambda at: 700.0 if at < 0.5 else 600.0, ("power limit", "700 W", "not known")),
            ("SM_CLOCK", 1500e6, ("SM clock", "1980 MHz", "1500 MHz")),
            ("SM_CLOCK", 1959e6, ("SM clock", "1980 MHz", "1959 MHz")),
            ("SM_CLOCK", None, ("SM clock", "1980 MHz", "not known")),
            ("MEMORY_CLOCK", 2619e6, ("memory clock", "3201 MHz", "2619 MHz")),
        )
    ),
    *(
        (resolved(**{name: value}), words)
        for name, value, words in (
            ("max_num_seqs", 512, ("max_num_seqs", 1024, 512)),
            ("max_num_batched_tokens", 2048, ("max_num_batched_tokens", 8192, 2048)),
            ("max_model_len", 4096, ("max_model_len", 2048, 4096)),
            ("dtype", "bfloat16", ("dtype", "float16", "bfloat16")),
            ("chunked_prefill", False, ("chunked_prefill", True, False)),
            ("prefix_caching", None, ("prefix_caching", False, "not known")),
            ("kv_blocks", 1300, ("KV cache", "21,840 tokens", "20,800 tokens")),
        )
    ),
    (asked(allow_prefix_cache=True), ("cache", "refused", "allowed")),
    (asked(interface="server"), ("interface", "engine", "server")),
    (asked(load_format="auto"), ("load format", "dummy", "auto")),
]
ALLOWED = [
    of(vllm="0.27.0", torch="2.12.0", cuda="13.1", python="3.14"),
    of(host="two", operating_system="another kernel", git_commit="abc", pytest_slmserve="9"),
    resolved(attention_backend="FlashInfer", capture_sizes=(1, 2), async_scheduling=True, event_loop="asyncio"),
    resolved(kv_blocks=1370, weight_bytes=1, ready_s=99.0),
    resolved(block_size=32, kv_blocks=1365 // 2),
    asked(
        enforce_eager=True, model="facebook/opt-1.3b", extra=(("x", 1),), env=(("VLLM_X", "1"),), python="/v26/python"
    ),
    sensed(SM_CLOCK=1962e6, POWER=650.0, TEMPERATURE=70.0),
    beside(count=1),
]


@pytest.mark.parametrize(("other", "facts"), MISMATCHES, ids=[str(facts[::2]) for _, facts in MISMATCHES])
def test_what_must_match_is_one_clause_either_way(other, facts):
    (there,), (here,) = why_not(ONE, other), why_not(other, ONE)
    assert tells(there, *facts) and tells(here, *facts)
    if len(facts) == 3:
        assert there.index(str(facts[1])) < there.index(str(facts[2])) and here.rindex(str(facts[1])) > here.index(
            str(facts[2])
        )


def test_every_fact_has_a_mismatch_above():
    told = [clause for other, _ in MISMATCHES for clause in why_not(ONE, other)]
    assert [fact.words for fact in FACTS if not any(clause.startswith(fact.words) for clause in told)] == []


@pytest.mark.parametrize("other", ALLOWED)
def test_what_is_tested_may_differ(other):
    assert why_not(ONE, other) == why_not(other, ONE) == ()


@pytest.mark.parametrize(
    "other",
    [
        asked(model="opt-2.7b"),
        replace(ONE, load=ClosedLoop(8, window_s=9)),
        replace(ONE, load=OpenLoop(requests=8)),
        replace(ONE, workload=replace(ONE.workload, hash="other")),
    ],
    ids=["model", "window", "job", "workload"],
)
def test_another_model_load_or_workload_is_another_case(other):
    found = compare([ONE], [other], TOLERANCE)
    assert found.pairs == () and len(found.baseline_only) == len(found.candidate_only) == 1


def test_what_two_records_must_have_in_common_is_among_it_but_for_what_is_tested():
    """`records.MUST_MATCH` is of one release; here the release is what is tested."""
    tested = {"vllm", "torch"}
    for name in records.MUST_MATCH:
        assert bool(why_not(ONE, of(**{name: 5}))) is (name not in tested)


def test_another_way_of_sharing_is_another_case():
    ways = (beside(), beside(thread_percentage=50, pinned=True))
    both = [[replace(m, replica=replace(m.replica, index=i)) for i in range(2)] for m in ways]
    found = compare(*both, TOLERANCE)
    assert found.pairs == () and tells(found.baseline_only[0], "2 x opt-1.3b by mps")
    assert tells(found.candidate_only[0], "2 x opt-1.3b by mps", "50 %", "pinned")


@pytest.mark.parametrize(("name", "words"), [("gpu_name", "GPU"), ("driver", "driver"), ("cores", "cores")])
def test_known_on_neither_side_is_not_equal(name, words):
    (told,) = why_not(of(**{name: None}), of(**{name: None}))
    assert told.startswith(words) and tells(told, "neither")


def test_without_sensors_a_gpu_has_no_power_limit_to_compare():
    blind, unclear = engine_alone(sensed=False), sensed(MEMORY_CLOCK=None)
    (told,) = why_not(blind, blind)
    assert tells(told, "power limit", "neither")
    assert why_not(unclear, unclear) == () and any(
        tells(each, "memory clock", "neither") for each in warnings(unclear, unclear)
    )


def test_without_a_gpu_its_facts_are_not_asked_for():
    nothing = dict.fromkeys(("gpu_name", "gpu_memory_bytes", "driver", "cuda"))
    on_cpu = engine_alone(sensed=False, environment=replace(KNOWN, platform="cpu", **nothing))
    assert why_not(on_cpu, on_cpu) == () and warnings(on_cpu, on_cpu) == ()
    assert len(why_not(on_cpu, ONE)) == 7


def test_a_clock_that_the_power_limit_holds_is_an_effect():
    held = sensed(SM_CLOCK=1830e6, CAPPED_POWER=lambda at: at)
    assert why_not(ONE, held) == why_not(held, ONE) == why_not(held, held) == ()
    (told,) = why_not(held, sensed(SM_CLOCK=None))
    assert tells(told, "SM clock", "not known")


def test_another_host_or_system_is_a_warning():
    assert warnings(ONE, ONE) == () == why_not(ONE, of(host="two"))
    told = [*warnings(ONE, of(host="two")), *warnings(ONE, of(host=None)), *warnings(of(host=None), ONE)]
    assert len(told) == 3 and all("host" in each for each in told) and told[0] != told[1] == told[2]
    (system,) = warnings(ONE, of(operating_system="Linux 7"))
    assert tells(system, "operating system", "Linux", "Linux 7")


@pytest.mark.parametrize(
    ("measured_at", "facts"),
    [
        ("2026-01-01T23:59:59+00:00", None),
        ("2026-01-02T00:00:00Z", ("1 day", "older")),
        ("2026-01-13T00:00:00", ("12 days", "older")),
        ("2025-12-12T00:00:00+00:00", ("20 days", "younger")),
        ("some day", ("not known",)),
    ],
)
def test_the_time_between_is_told_from_a_day_on(measured_at, facts):
    told = warnings(ONE, replace(ONE, measured_at=measured_at))
    assert len(told) == bool(facts) and all(tells(each, *facts) for each in told)


def test_one_boot_is_known_to_be_one():
    assert one_boot(ONE, of(vllm="0.27.0"))
    assert not one_boot(ONE, of(host="two")) and not one_boot(of(host=None), of(host=None)) and not one_boot()


# Against a stored baseline


THROUGHPUT, LATENCY = (claim for claim, _ in STORED.values())
CROWDED = {**BUSY, sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}


def judged(there, here, tolerance=TOLERANCE) -> list[Verdict]:
    return against_stored(there, here, tolerance)[0]


def states(verdicts: list[Verdict]) -> dict[str, str]:
    return {verdict.claim: verdict.state.value for verdict in verdicts}


def both(state: str) -> dict[str, str]:
    return {THROUGHPUT: state, LATENCY: state}


@pytest.mark.parametrize("factor", [1.0, 1.02, 0.97, 1.03, 1.05, 1.1])
def test_on_one_host_it_is_the_comparison_of_two_runs(factor):
    rate, e2e = found = judged(BASELINE, candidate(factor))
    changes = by_name(compare(BASELINE, candidate(factor), TOLERANCE))
    assert [v.state for v in found] == [changes[metric].verdict.state for metric in STORED]
    assert [(v.value, v.low, v.high) for v in found] == [astuple(changes[metric].ratio) for metric in STORED]
    assert rate.threshold == pytest.approx(1 / 1.03) and e2e.threshold == 1.03
    assert rate.n == len(rate.records) == 6 and rate.subject == e2e.subject == "opt-1.3b at concurrency 8"
    assert tells(rate.why, "3 %", f"{rate.value:.4g} times", f"{rate.low:.4g} to {rate.high:.4g}")
    assert factor != 1.1 or (tells(rate.why, "9.1 %", "lower") and tells(e2e.why, "10 %", "higher"))


@pytest.mark.parametrize(
    ("factor", "state"), [*((f, "inconclusive") for f in (1.0, 1.04, 0.995, 1.06)), (1.1, "fails"), (0.98, "passes")]
)
@pytest.mark.parametrize("host", ["two", None])
def test_on_another_host_a_difference_within_four_per_cent_is_inconclusive(factor, state, host):
    verdicts = judged(BASELINE, candidate(factor, environment=replace(NEW, host=host)))
    assert states(verdicts) == both(state) and all(tells(verdict.why, 1.04) for verdict in verdicts)


def test_one_repeat_of_another_host_is_another_host_and_a_large_tolerance_holds():
    elsewhere = engine_alone(1000.5, environment=replace(KNOWN, host="two"), repeat=3)
    assert states(judged([*BASELINE, elsewhere], candidate(1.0))) == both("inconclusive")
    other = candidate(1.0, environment=replace(NEW, host="two"))
    assert states(judged(BASELINE, other, 0.10)) == both("passes")


@pytest.mark.parametrize(
    ("active", "factor", "tolerance", "host", "state", "facts"),
    [
        (0.64, 1.0, 0.10, "two", "inconclusive", ("36 %",)),
        (0.64, 1.1, 0.03, "one", "inconclusive", ("36 %", 1.25)),
        (0.64, 1.3, 0.03, "one", "fails", ("36 %", 1.25)),
        (None, 1.1, 0.03, "one", "inconclusive", ("50 %", 1.414)),
    ],
)
def test_where_the_gpu_waits_for_its_host_hosts_and_launches_may_differ_by_more(
    active, factor, tolerance, host, state, facts
):
    """Utilisation tells of waiting where there are no profiling counters."""
    columns = {**BUSY, sensors.ENGINE_ACTIVE: active}
    if active is None:
        columns = {n: column for n, column in BUSY.items() if n not in sensors.PROFILED} | {sensors.GPU_UTIL: 0.5}
    here = candidate(factor, columns=columns, environment=replace(NEW, host=host))
    found = judged(repeats([1000, 1001], columns=columns), here, tolerance)
    assert states(found) == both(state) and tells(found[0].why, *facts)


def test_without_a_sensor_of_waiting_another_host_is_not_comparable():
    on_cpu = replace(KNOWN, platform="cpu", **dict.fromkeys(("gpu_name", "gpu_memory_bytes", "driver", "cuda")))
    there = repeats([1000, 1001], sensed=False, environment=on_cpu)
    for factor, host, state in ((1.1, "one", "fails"), (1.0, "one", "inconclusive"), (2.0, "two", "inconclusive")):
        verdicts = judged(there, candidate(factor, sensed=False, environment=replace(on_cpu, host=host)))
        assert states(verdicts) == both(state)
    assert verdicts[0].value is None and tells(verdicts[0].why, "sensor")


def test_noise_is_of_one_load_on_both_sides():
    """A noisy load does not hide what another shows; one repeat against several has their noise."""
    there = [*BASELINE, *repeats([500, 700], 4), *repeats([300], 2)]
    here = [*candidate(1.0)[:1], *repeats([500, 700], 4, environment=NEW), *repeats([300], 2, environment=NEW)]
    found = {v.subject: v for v in judged(there, here) if v.claim == THROUGHPUT}
    assert [v.state.value for v in found.values()] == ["inconclusive", "inconclusive", "passes"]
    alone = found["opt-1.3b at concurrency 2"]
    assert (alone.value, alone.low) == (1.0, None) and tells(alone.why, "--slm-repeats 2")


@pytest.mark.parametrize(
    ("there", "here", "facts"),
    [
        (BASELINE, candidate(1.0, resolved=replace(LIMITS, max_num_batched_tokens=2048)), (8192, 2048)),
        (BASELINE, candidate(1.0, environment=replace(NEW, driver="570.1")), ("driver", "580.159.04", "570.1")),
        (BASELINE, candidate(1.0, sensed=False), ("power limit", "700 W", "not known")),
        (BASELINE, candidate(1.0, failures=1), ("this run", "invalid", 1)),
        (repeats([1000, 1001], preempted=1), candidate(1.0), ("baseline", "invalid", 1)),
        (BASELINE, candidate(1.0, columns=CROWDED), ("this run", "degraded", 3)),
        ([*BASELINE, *candidate(1.0)], candidate(1.0, launch="launch-3"), ("baseline", 2)),
        (BASELINE, [*candidate(1.0), *BASELINE], ("this run", 2)),
    ],
)
def test_what_cannot_be_compared_is_inconclusive_and_tells_why(there, here, facts):
    found = judged(there, here)
    assert states(found) == both("inconclusive") and all(v.value is None and tells(v.why, *facts) for v in found)
    assert [v.threshold for v in found] == pytest.approx([1 / 1.03, 1.03]) and len({v.records for v in found}) == 1


@pytest.mark.parametrize(("factor", "state"), [(1.0, "passes"), (1.1, "fails")])
def test_a_run_on_a_disturbed_host_is_compared_as_others_are(factor, state):
    disturbed = candidate(factor, columns={**BUSY, sensors.STOLEN_CORES: 0.5})
    assert all(check(m).noise for m in disturbed)
    assert states(judged(BASELINE, disturbed)) == both(state)


def test_an_argument_is_what_is_tested_and_the_engine_requested_again_counts():
    eager = [replace(m, spec=replace(m.spec, enforce_eager=True)) for m in repeats([500, 501], launch="eager")]
    assert states(judged([*eager, *BASELINE], candidate(1.0))) == both("passes")
    eager = [replace(m, spec=replace(m.spec, enforce_eager=True)) for m in candidate(1.2)]
    assert states(judged(BASELINE, eager)) == both("fails")


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ([], []),
        (BASELINE, []),
        ([], BASELINE),
        (BASELINE, repeats([1000, 1001], 16)),
        (BASELINE, repeats([1000, 1001], model="opt-2.7b")),
        (BASELINE, [replace(m, load=ClosedLoop(8, window_s=9)) for m in BASELINE]),
        (BASELINE, [replace(m, load=OpenLoop(requests=8)) for m in BASELINE]),
        (BASELINE, [replace(m, replica=Replica("g", 0, 2, "s", "mps")) for m in BASELINE]),
    ],
)
def test_nothing_in_common_is_inconclusive(there, here):
    (verdict,) = judged(there, here)
    assert verdict.state is State.INCONCLUSIVE and verdict.claim == COMMON
    assert tells(verdict.why, *(("opt-1.3b", 8, "5 s") if there else ("none",)))


def shared(rates, factor=1.0, sharing="mps", models=("opt-1.3b", "opt-1.3b"), **facts):
    """Runs of two engines that share the device; of each a rate. What takes `factor` times as long."""
    return [
        replace(m, replica=Replica(f"{launch}-{run}", index, len(models), f"{sharing} {models}", sharing))
        for launch in [facts.pop("launch", "launch-1")]
        for run, rate in enumerate(rates)
        for index, model in enumerate(models)
        for m in [engine_alone(rate / factor, model=model, launch=f"{launch}-{index}", repeat=run, **facts)]
    ]


@pytest.mark.parametrize(("factor", "state"), [(1.0, "passes"), (1.1, "fails"), (1.03, "inconclusive")])
@pytest.mark.parametrize(
    ("models", "name"), [(("opt-1.3b",) * 2, "2 x opt-1.3b"), (("opt-125m", "opt-1.3b"), "opt-125m + opt-1.3b")]
)
def test_engines_that_share_a_device_are_held_against_such(factor, state, models, name):
    there = shared([500, 501, 500], models=models)
    here = shared([500, 501, 500], factor, models=models, environment=NEW, launch="launch-2")
    verdicts = judged(there, here)
    assert states(verdicts) == both(state)
    assert {verdict.subject for verdict in verdicts} == {f"{name} by mps at concurrency 16"}
    assert verdicts[0].n == len(set(verdicts[0].records)) == 12


def test_a_run_that_lost_a_replica_is_not_used_and_a_single_one_is_alone():
    assert compared_cases(shared([500])[1:], steady=True) == {}
    ((_, left),) = compared_cases(shared([500, 501])[1:], steady=True).items()
    assert len(left) == 2
    one = [replace(m, replica=Replica("g", 0, 1, "s", "mps")) for m in candidate(1.1)]
    assert states(judged(BASELINE, one)) == both("fails")


def test_of_several_models_a_run_belongs_to_the_first():
    mixed = [*BASELINE, *shared([500, 501], models=("opt-125m", "opt-1.3b"))]
    assert [len(of_model(mixed, model)) for model in ("opt-1.3b", "opt-125m", "opt-2.7b")] == [3, 4, 0]


def test_what_one_side_alone_has_is_told():
    here = [*candidate(1.0), *repeats([9, 9], 16), *repeats([9, 9], 4)]
    (mine,), (its) = against_stored(BASELINE, here, TOLERANCE)[1], against_stored(here, BASELINE, TOLERANCE)[1]
    assert tells(mine, "this run", "opt-1.3b", "4, 16", "5 s", "012345")
    assert tells(its[0], "the baseline", "opt-1.3b", "4, 16", "5 s", "012345")
    other_host = [replace(m, environment=replace(m.environment, host="two")) for m in BASELINE]
    assert len(against_stored(BASELINE, other_host, TOLERANCE)[1]) == 1


def test_two_workloads_under_one_load_are_told_apart():
    def other(measurements):
        return [replace(m, workload=replace(m.workload, hash="fedcba987654")) for m in measurements]

    found = judged([*BASELINE, *other(BASELINE)], [*candidate(1.0), *other(candidate(1.1))])
    assert [(v.subject[-7:-1], v.state.value) for v in found[::2]] == [("012345", "passes"), ("fedcba", "fails")]


SOME = st.lists(st.floats(900, 1100), min_size=2, max_size=3, unique=True)


@given(there=SOME, here=SOME, tolerance=st.floats(0.01, 0.3))
def test_a_candidate_that_is_slower_is_never_judged_better(there, here, tolerance):
    """Direction: what holds for a candidate holds for a faster one, what fails fails for a slower one."""
    order = {"passes": 0, "inconclusive": 1, "fails": 2}
    found = [
        states(judged(repeats(there), repeats([r / f for r in here], environment=NEW), tolerance))
        for f in (0.8, 1.0, 1.25)
    ]
    for claim in (THROUGHPUT, LATENCY):
        badness = [order[each[claim]] for each in found]
        assert badness == sorted(badness)


@given(there=SOME, here=SOME)
def test_the_two_sides_changed_over_turn_the_ratio_round(there, here):
    ahead = judged(repeats(there), repeats(here, environment=NEW))
    back = judged(repeats(here, environment=NEW), repeats(there))
    for one, other in zip(ahead, back, strict=True):
        assert (one.value, one.low, one.high) == pytest.approx((1 / other.value, 1 / other.high, 1 / other.low))
        assert not (one.state is other.state is State.FAILS)


def lost(here: list[Measurement], part: str, name: str) -> list[Measurement]:
    """The same without a fact of the environment, a limit of the engine, or the stamps of first tokens."""
    if part == "samples":
        nothing = {name: (None,) * len(here[0].run.samples)}
        return [replace(m, run=replace(m.run, samples=replace(m.run.samples, **nothing))) for m in here]
    return [replace(m, **{part: replace(getattr(m, part), **{name: None})}) for m in here]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        *(("environment", name) for name in ("platform", "gpu_name", "gpu_memory_bytes", "driver", "cpu", "cores")),
        *(("resolved", name) for name in ("max_num_seqs", "dtype", "chunked_prefill", "kv_blocks", "block_size")),
        ("samples", "first_token_s"),
    ],
)
def test_missing_data_never_passes(part, name):
    here = lost(candidate(0.5), part, name)
    both_ways = [*judged(BASELINE, here), *judged(here, BASELINE)]
    assert len(both_ways) == 4 and all(verdict.state is State.INCONCLUSIVE for verdict in both_ways)


# History over releases


RELEASES = ("0.24.0", "0.25.0", "0.26.0", "0.27.0")


def release(version: str, rates: list[float], concurrency: int = 8, **facts: object) -> list[Measurement]:
    """Repeats of one launch. facts: of the environment."""
    where = replace(KNOWN, vllm=version, **facts)  # type: ignore[arg-type]
    return repeats(rates, concurrency, environment=where, launch=f"{version} on {where.host}")


def noisy(rate: float, generator: random.Random, repeat: int = 5) -> list[float]:
    return [rate * generator.gauss(1.0, 0.002) for _ in range(repeat)]


def steps_of(found: ReleaseHistory) -> list[Judgement | None]:
    return [each.step and each.step.verdict for each in found.releases]


@pytest.mark.parametrize("seed", range(3))
def test_a_release_that_is_slower_by_a_tenth_is_marked_and_noise_is_not(seed):
    generator = random.Random(seed)
    speeds = dict.fromkeys(RELEASES, 1000.0) | {RELEASES[2]: 1000 / 1.1, RELEASES[3]: 1000 / 1.1}
    rate, tpot = release_histories([m for v, r in speeds.items() for m in release(v, noisy(r, generator))])
    assert (rate.metric, tpot.metric) == ("output_tokens_per_s", "tpot_s")
    for found in (rate, tpot):
        assert [each.release for each in found.releases] == list(RELEASES)
        assert steps_of(found) == [None, Judgement.SAME, Judgement.WORSE, Judgement.SAME]
        assert all(each.mean.low < each.mean.value < each.mean.high for each in found.releases)
    assert rate.releases[2].step.ratio.value == pytest.approx(1 / 1.1, rel=0.005)
    assert tpot.releases[2].step.ratio.value == pytest.approx(1.1, rel=0.005)


def test_releases_are_in_the_order_of_versions():
    wanted = [
        "0.9.2",
        "0.10.0.dev3+gabcdef",
        "0.10.0rc1.dev7",
        "0.10.0rc1",
        "0.10.0rc2",
        "0.10.0rc10",
        "0.10.0+cu130",
        "0.10.0.post1",
        "0.10.1",
        "0.20.0",
    ]
    shuffled = random.Random(1).sample(wanted, len(wanted))
    assert sorted(shuffled, key=release_order) == wanted
    rate, _ = release_histories([m for version in shuffled for m in release(version, [1000, 1001])])
    assert [each.release for each in rate.releases] == wanted


@pytest.mark.parametrize(
    ("facts", "told"), [({"host": "two"}, ("host",)), ({"driver": "600.1"}, ("580.159.04", "600.1"))]
)
def test_another_host_or_driver_is_no_step(facts, told):
    found = release_histories([*release("0.24.0", [1000, 1001]), *release("0.25.0", [500, 501], **facts)])
    steps = [each.releases[1] for each in found]
    assert [each.step.verdict for each in steps] == [Judgement.INCONCLUSIVE] * 2
    assert all(tells(each.step.why, *told) and each.step_words == NOT_COMPARABLE for each in steps)


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ((1000, 1001), "same"),
        ((500, 501), "regressed"),
        ((2000, 2002), "improved"),
        ((500, 1500), NO_DIFFERENCE),
        ((1000,), ""),
    ],
)
def test_what_became_of_a_metric_in_a_word(rates, words):
    made = [*release("0.24.0", [1000, 1001] if words else [1000]), *release("0.25.0", [*rates])]
    first, second = release_histories(made)[0].releases
    assert first.step_words == "" and second.step_words == (words or NO_DIFFERENCE)


def test_another_kind_of_device_has_no_common_history():
    assert release_histories([*release("0.24.0", [1000]), *release("0.25.0", [500], gpu_name="NVIDIA A100")]) == []


def test_of_several_hosts_the_one_that_most_releases_share_is_shown():
    elsewhere = [m for host in ("two", "three") for m in release("0.25.0", [500, 501, 502, 503], host=host)]
    made = [*release("0.24.0", [1000, 1001]), *elsewhere, *release("0.25.0", [1000, 1001])]
    for measurements in (made, made[::-1]):
        rate, _ = release_histories(measurements)
        assert steps_of(rate) == [None, Judgement.SAME]
        assert rate.releases[1].mean.value == pytest.approx(1000.5)


def test_the_load_is_the_largest_that_most_releases_have():
    loads = {"0.24.0": (8, 64), "0.25.0": (8, 64, 128), "0.26.0": (8, 64), "0.27.0": (8, 128)}
    made = [m for version, each in loads.items() for load in each for m in release(version, [1000, 1001], load)]
    found = release_histories(made)
    assert {(each.subject, len(each.releases)) for each in found} == {("opt-1.3b at concurrency 8", 4)}
    found = release_histories([m for m in made if m.environment.vllm != "0.27.0"])
    assert {(each.subject, len(each.releases)) for each in found} == {("opt-1.3b at concurrency 64", 3)}


def test_an_invalid_release_is_left_out_and_its_neighbours_are_compared():
    broken = [replace(m, run=replace(m.run, failures=1)) for m in release("0.25.0", [500, 501])]
    rate, _ = release_histories([*release("0.24.0", [1000, 1001]), *broken, *release("0.26.0", [1000, 1001])])
    assert [each.release for each in rate.releases] == ["0.24.0", "0.26.0"]
    assert steps_of(rate) == [None, Judgement.SAME]


def test_four_launches_of_each_release_are_the_repeats():
    def launches(version: str, rate: float) -> list[Measurement]:
        where = replace(KNOWN, vllm=version)
        return [
            engine_alone(rate * (1 + 0.001 * n), environment=where, launch=f"{version}-{n}") for n in range(LAUNCHES)
        ]

    rate, _ = release_histories([*launches("0.24.0", 1000), *launches("0.25.0", 900)])
    assert [each.launches for each in rate.releases] == [LAUNCHES, LAUNCHES]
    assert steps_of(rate) == [None, Judgement.WORSE]


def test_what_is_no_engine_alone_under_a_steady_load_is_left_out():
    each = [release(version, [1000, 1001]) for version in RELEASES[:2]]
    flat = [m for group in each for m in group]
    part = Replica("one", 0, 2, "asked", "mps")
    for changed in (
        {"paired": GateLaunch("g", 1, "baseline", False)},
        {"replica": part},
        {"load": OpenLoop(requests=sum(flat[0].run.samples.finished))},
        {"environment": replace(KNOWN, vllm=None)},
    ):
        assert release_histories([replace(m, **changed) for m in flat]) == []
    assert release_histories(each[0]) == [] == release_histories([])


def test_two_engines_have_a_history_each_and_a_new_argument_goes_on_with_the_old():
    def eager(version: str, rate: float, **words: object) -> list[Measurement]:
        return [replace(m, spec=replace(m.spec, **words)) for m in release(version, [rate, rate + 1])]

    both = [m for v in RELEASES[:2] for m in (*release(v, [1000, 1001]), *eager(v, 500, enforce_eager=True))]
    found = [each for each in release_histories(both) if each.metric == "tpot_s"]
    assert len({each.subject for each in found}) == 2 and {len(each.releases) for each in found} == {2}
    rate, _ = release_histories([*release("0.24.0", [1000, 1001]), *eager("0.25.0", 1000, seed=7)])
    assert steps_of(rate) == [None, Judgement.SAME]
