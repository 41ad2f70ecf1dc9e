"""What must match for a stored measurement to be compared with, and what need not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_records import BUSY, KNOWN, LIMITS, engine_alone

from pytest_slmserve.analysis.compare.changes import FACTS, TOLERANCE, compare, one_boot, warnings, why_not
from pytest_slmserve.schema import records, sensors
from pytest_slmserve.schema.records import Measurement, Replica
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

BASELINE = engine_alone()


def of(**changes: object) -> Measurement:
    """The baseline with other facts of its environment."""
    return replace(BASELINE, environment=replace(KNOWN, **changes))


def resolved(**changes: object) -> Measurement:
    return replace(BASELINE, resolved=replace(LIMITS, **changes))


def sensed(**changes: object) -> Measurement:
    return engine_alone(columns={**BUSY, **{getattr(sensors, name): value for name, value in changes.items()}})


def asked(**changes: object) -> Measurement:
    return replace(BASELINE, spec=replace(BASELINE.spec, **changes))


TWO = Replica("g", 0, 2, "s", "mps")


def beside(**changes: object) -> Measurement:
    return replace(BASELINE, replica=replace(TWO, **changes))


MISMATCHES = [
    (of(gpu_name="NVIDIA H100"), "GPU NVIDIA H200 there, NVIDIA H100 here"),
    (of(gpu_name="NVIDIA H200 MIG 1g.18gb"), "GPU NVIDIA H200 there, NVIDIA H200 MIG 1g.18gb here"),
    (of(gpu_memory_bytes=18 << 30), "GPU memory 143,771 MiB there, 18,432 MiB here"),
    (of(driver="570.1"), "driver 580.159.04 there, 570.1 here"),
    (of(driver=None), "driver 580.159.04 there, not known here"),
    (of(cpu="EPYC"), "CPU Xeon there, EPYC here"),
    (of(cores=8), "cores 16 there, 8 here"),
    (sensed(POWER_LIMIT=600.0), "power limit 700 W there, 600 W here"),
    (sensed(POWER_LIMIT=None), "power limit 700 W there, not known here"),
    (sensed(SM_CLOCK=1500e6), "SM clock 1980 MHz there, 1500 MHz here"),
    (sensed(SM_CLOCK=None), "SM clock 1980 MHz there, not known here"),
    (sensed(MEMORY_CLOCK=2619e6), "memory clock 3201 MHz there, 2619 MHz here"),
    (resolved(max_num_seqs=512), "max_num_seqs 1024 there, 512 here"),
    (resolved(max_num_batched_tokens=2048), "max_num_batched_tokens 8192 there, 2048 here"),
    (resolved(max_model_len=4096), "max_model_len 2048 there, 4096 here"),
    (resolved(dtype="bfloat16"), "dtype float16 there, bfloat16 here"),
    (resolved(chunked_prefill=False), "chunked_prefill True there, False here"),
    (resolved(prefix_caching=None), "prefix_caching False there, not known here"),
    (resolved(kv_blocks=1300), "KV cache 21,840 tokens there, 20,800 tokens here"),
    (asked(allow_prefix_cache=True), "prompts from a cache refused there, allowed here"),
    (asked(interface="server"), "interface engine there, server here"),
    (asked(load_format="auto"), "load format dummy there, auto here"),
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
    sensed(SM_CLOCK=1965e6, POWER=650.0, TEMPERATURE=70.0),
    beside(count=1),
]


@pytest.mark.parametrize(("candidate", "clause"), MISMATCHES, ids=[clause for _, clause in MISMATCHES])
def test_what_must_match_is_one_clause(candidate, clause):
    (told,) = why_not(BASELINE, candidate)
    assert clause in told


@pytest.mark.parametrize(
    "other",
    [
        asked(model="opt-2.7b"),
        replace(BASELINE, load=ClosedLoop(8, window_s=9)),
        replace(BASELINE, load=OpenLoop(requests=8)),
        replace(BASELINE, workload=replace(BASELINE.workload, hash="other")),
    ],
    ids=["model", "window", "job", "workload"],
)
def test_another_model_load_or_workload_is_another_case(other):
    found = compare([BASELINE], [other], TOLERANCE)
    assert found.pairs == () and len(found.baseline_only) == len(found.candidate_only) == 1


def test_another_way_of_sharing_is_another_case():
    ways = (beside(), beside(thread_percentage=50, pinned=True))
    both = [[replace(m, replica=replace(m.replica, index=i)) for i in range(2)] for m in ways]
    found = compare(*both, TOLERANCE)
    assert found.pairs == () and "2 x opt-1.3b by mps" in found.baseline_only[0]
    assert "2 x opt-1.3b by mps, 50 % of the threads, pinned" in found.candidate_only[0]


def test_every_fact_has_a_mismatch_above():
    told = [clause.partition(" ")[0] for candidate, _ in MISMATCHES for clause in why_not(BASELINE, candidate)]
    assert {fact.words.partition(" ")[0] for fact in FACTS} - {*told} == {"platform"}
    assert any("platform cuda there, cpu here" in clause for clause in why_not(BASELINE, of(platform="cpu")))


def test_what_two_records_must_have_in_common_is_among_it_but_for_what_is_tested():
    """`records.MUST_MATCH` is of one release; here the release is what is tested."""
    tested = {"vllm", "torch"}
    for name in records.MUST_MATCH:
        assert bool(why_not(BASELINE, of(**{name: 5}))) is (name not in tested)


@pytest.mark.parametrize("candidate", ALLOWED)
def test_what_is_tested_may_differ(candidate):
    assert why_not(BASELINE, candidate) == why_not(candidate, BASELINE) == ()


@given(st.lists(st.sampled_from([*[candidate for candidate, _ in MISMATCHES], *ALLOWED]), min_size=2, max_size=2))
def test_who_is_the_baseline_does_not_matter(pair):
    first, second = pair
    there = [clause.partition(" ")[0] for clause in why_not(first, second)]
    assert there == [clause.partition(" ")[0] for clause in why_not(second, first)]
    assert why_not(first, first) == () or None in {fact.of(first) for fact in FACTS}


@pytest.mark.parametrize(("name", "words"), [("gpu_name", "GPU"), ("driver", "driver"), ("cores", "cores")])
def test_known_on_neither_side_is_not_equal(name, words):
    assert why_not(of(**{name: None}), of(**{name: None})) == (f"{words} known on neither side",)


def test_without_sensors_a_gpu_has_no_power_limit_to_compare():
    blind = engine_alone(sensed=False)
    assert why_not(blind, blind) == ("power limit known on neither side",)


def test_what_many_hosts_do_not_tell_may_be_unknown_on_both_sides_and_is_told():
    unclear = sensed(MEMORY_CLOCK=None)
    assert why_not(unclear, unclear) == ()
    assert "the memory clock is known on neither side" in warnings(unclear, unclear)


def test_without_a_gpu_its_facts_are_not_asked_for():
    nothing = dict.fromkeys(("gpu_name", "gpu_memory_bytes", "driver", "cuda"))
    on_cpu = engine_alone(sensed=False, environment=replace(KNOWN, platform="cpu", **nothing))
    assert why_not(on_cpu, on_cpu) == () and warnings(on_cpu, on_cpu) == ()
    assert len(why_not(on_cpu, BASELINE)) == 7


def test_a_clock_that_the_power_limit_holds_is_an_effect():
    held = sensed(SM_CLOCK=1830e6, CAPPED_POWER=lambda at: at)
    assert why_not(BASELINE, held) == why_not(held, BASELINE) == why_not(held, held) == ()
    assert why_not(held, sensed(SM_CLOCK=None)) == ("SM clock as the power limit allows there, not known here",)


def test_a_power_limit_that_moved_is_not_known():
    moved = sensed(POWER_LIMIT=lambda at: 700.0 if at < 0.5 else 600.0)
    assert why_not(BASELINE, moved) == ("power limit 700 W there, not known here",)


def test_another_host_is_a_warning():
    (told,) = warnings(BASELINE, of(host="two"))
    assert "of another host, or from before a boot" in told and not why_not(BASELINE, of(host="two"))
    assert "it is not known whether" in warnings(BASELINE, of(host=None))[0]
    assert warnings(BASELINE, of(operating_system="Linux 7")) == ("operating system Linux there, Linux 7 here",)
    assert warnings(BASELINE, BASELINE) == ()


@pytest.mark.parametrize(
    ("measured_at", "words"),
    [
        ("2026-01-01T23:00:00+00:00", None),
        ("2026-01-02T01:00:00Z", "the baseline is 1 day older"),
        ("2026-01-13T00:00:00", "the baseline is 12 days older"),
        ("2025-12-12T00:00:00+00:00", "the baseline is 20 days younger"),
        ("some day", "it is not known how much time"),
    ],
)
def test_the_time_between_is_told_from_a_day_on(measured_at, words):
    told = warnings(BASELINE, replace(BASELINE, measured_at=measured_at))
    assert told == () if words is None else len(told) == 1 and told[0].startswith(words)


def test_one_boot_is_known_to_be_one():
    assert one_boot(BASELINE, of(vllm="0.27.0"))
    assert not one_boot(BASELINE, of(host="two")) and not one_boot(of(host=None), of(host=None)) and not one_boot()
