"""Replicas, engines on several GPUs and both interfaces: which rows there are and in which order, that each gain is by
hand the one over the right engine alone, that memory adds up, and that what is told of each deployment is its own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from gpus import on_gpus, replicas
from html_pages import values_of
from scripts import BASELINES, in_checkout
from sections import column_of, legends_of, rows_of, sentences_of, tables_of
from strategies import H200, measurement, point, shared_point

from pytest_slmserve.analysis.claims.table import stored_curves
from pytest_slmserve.analysis.compare.deployments import at_both_interfaces, deployments, with_wider
from pytest_slmserve.analysis.metrics.gpu_figures import EngineMemory, GpuMemory
from pytest_slmserve.analysis.metrics.window import window_trace
from pytest_slmserve.analysis.points import Point, ReplicaPoint, shared_points
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of, labels
from pytest_slmserve.archive.store import read
from pytest_slmserve.report.deployments import (
    MEMORY_LEGEND,
    MEMORY_TITLE,
    REPLICAS_LEGEND,
    MemoryRow,
    alone_at,
    answers,
    best_deployments,
    best_on_several,
    deployed,
    deployment_name,
    gpus_sections,
    interfaces_sections,
    memory_chart,
    replica_sections,
)
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.section import Section
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB

OTHER = replace(H200, gpu_name="NVIDIA A100-SXM4-80GB")
SENSED = {
    "gpu_util": 1.0,
    "engine_active": 0.95,
    "sm_active": 0.5,
    "dram_active": 0.4,
    "tensor_active": 0.05,
    "power_w": 300.0,
    "power_capped": 0.25,
    "energy_per_token_j": 0.02,
    "own_cores": 2.5,
}
T_975_OF_2 = 4.3027  # Student's t, two degrees of freedom


def curve(
    *shared: ReplicaPoint, model: str = "opt-1.3b", environment: Environment = H200, points: tuple[Point, ...] = ()
) -> Curve:
    alone = points or (replace(point(96, [1000.0, 1000.0]), e2e_s=24.6, e2e_p99_s=25.1),)
    made = (measurement(model=model, environment=environment),)
    return Curve(subject=model, points=alone, shared=shared, measurements=made)


def sections(*curves: Curve, others: tuple[ReplicaPoint, ...] = ()) -> list[Section]:
    shared = [*dict.fromkeys(s for c in curves for s in c.shared), *others]
    return [each for each in replica_sections(curves, shared) if isinstance(each, Section)]


def served(*curves: Curve, others: tuple[ReplicaPoint, ...] = ()) -> list[dict[str, str]]:
    (section,) = sections(*curves, others=others)
    return rows_of(tables_of(section)[0])


def names(rows: list[dict[str, str]]) -> list[str]:
    return [f"{row['engines']}, {row['sharing']}, {row['concurrency']}" for row in rows]


def gains(rows: list[dict[str, str]]) -> list[str]:
    return [row["gain %"] for row in rows]


# Rows of replicas


def test_sets_of_engines_with_other_arguments_are_held_against_one_of_the_same():
    ours = shared_point(2, [1200.0, 1200.0])
    others = shared_point(2, [1200.0, 1200.0], families=frozenset({"without chunked prefill"}))
    slower = curve(others, points=(replace(point(96, [800.0, 800.0]), e2e_s=30.7, e2e_p99_s=31.0),))
    assert gains(served(curve(ours), slower)) == ["-", "+20.0", "-", "+50.0"]


def test_one_alone_comes_first_then_the_ways_of_sharing_each_by_number():
    ways = (("mig", 2), ("mps", 3), ("time-slicing", 2), ("mps", 2))
    assert names(served(curve(*(shared_point(n, (900.0,), sharing=way) for way, n in ways)))) == [
        "opt-1.3b, alone, 96",
        "2 x opt-1.3b, time-slicing, 96",
        "2 x opt-1.3b, mps, 96",
        "3 x opt-1.3b, mps, 96",
        "2 x opt-1.3b, mig, 96",
    ]


def test_what_is_set_beside_the_way_of_sharing_is_told_and_stands_behind_it():
    settings = ({"thread_percentage": 50}, {"pinned": True}, {"pinned": True, "thread_percentage": 50}, {})
    shared = [shared_point(2, (900.0 + i,), **each) for i, each in enumerate(settings)]
    wanted = ["mps", "mps, 50 %", "mps, pinned", "mps, pinned, 50 %"]
    assert [row["sharing"] for row in served(curve(*shared))] == ["alone", *wanted]
    assert sorted(map(deployed, shared)) == wanted


def test_models_and_loads_each_have_their_own_engine_alone_and_sets_of_models_come_last():
    pair_ = shared_point(2, (900.0,), models=("opt-125m", "opt-1.3b"), loads=(48, 48))
    large = curve(
        shared_point(2, (800.0,), concurrency=48),
        shared_point(2, (900.0,)),
        points=(point(48, [700.0]), point(96, [1000.0])),
    )
    small = curve(shared_point(2, (4000.0,), model="opt-125m"), model="opt-125m", points=(point(96, [5000.0]),))
    section, _ = replica_sections([large, small], [pair_, *large.shared, *small.shared])
    rows = rows_of(tables_of(section)[0])
    assert names(rows) == [
        "opt-1.3b, alone, 48",
        "2 x opt-1.3b, mps, 48",
        "opt-1.3b, alone, 96",
        "2 x opt-1.3b, mps, 96",
        "opt-125m, alone, 96",
        "2 x opt-125m, mps, 96",
        "opt-125m + opt-1.3b, mps, 96",
    ]
    assert gains(rows) == ["-", "+14.3", "-", "-10.0", "-", "-20.0", "-"]


def test_replicas_of_other_requests_are_not_beside_this_engine():
    mine, other = shared_point(2, (900.0,)), shared_point(3, (900.0,), workload="of other requests")
    rows = served(curve(mine), others=(other,))
    assert names(rows) == ["opt-1.3b, alone, 96", "2 x opt-1.3b, mps, 96", "3 x opt-1.3b, mps, 96"]
    assert gains(rows) == ["-", "-10.0", "-"]


def test_equal_models_of_a_set_are_counted():
    three = shared_point(3, (900.0,), models=("opt-125m", "opt-1.3b", "opt-1.3b"), loads=(32, 32, 32))
    assert served(others=(three,))[0]["engines"] == "opt-125m + 2 x opt-1.3b"


def test_replicas_without_a_valid_run_are_not_beside_the_engine_of_another_model():
    """Two of them look alike: neither rests on any record."""
    small, large = (shared_point(2, (), model=model) for model in ("opt-125m", "opt-1.3b"))
    curves = [curve(small, model="opt-125m", points=(point(96, [5000.0]),)), curve(large)]
    assert [alone_at(shared, curves).repeats for shared in (small, large)] == [(5000.0,), (1000.0, 1000.0)]


def test_two_kinds_of_hosts_are_two_tables_however_their_runs_follow_each_other():
    here = [shared_point(n, (900.0,)) for n in (2, 3)]
    there = [replace(shared, environment=OTHER) for shared in here]
    curves = [curve(*here), curve(*there, environment=OTHER, points=(point(96, [500.0]),))]
    *found, legend = replica_sections(curves, [here[0], there[0], here[1], there[1]])
    assert [each.title.partition(": ")[2] for each in found] == [
        "NVIDIA H200, vLLM 0.26.0",
        "NVIDIA A100-SXM4-80GB, vLLM 0.26.0",
    ]
    assert [gains(rows_of(tables_of(each)[0])) for each in found] == [["-", "-10.0", "-10.0"], ["-", "+80.0", "+80.0"]]
    assert legend.text == REPLICAS_LEGEND, "how to read them is told once"


def test_a_title_says_where_replicas_are():
    each_gpu = shared_point(2, (900.0,), sharing="gpus")
    remote = replace(each_gpu, sharing="urls", environment=Environment(platform="remote", url="http://one"))
    titles = [sections(others=(shared,))[0].title for shared in (shared_point(2, (9.0,)), each_gpu, remote)]
    assert ["device" in title for title in titles] == [True, False, False] and "http://one" in titles[2]
    assert list(replica_sections([curve()], [])) == [] == list(replica_sections([], []))


# Figures of replicas


def test_the_gain_and_its_interval_by_hand():
    alone, two = served(curve(shared_point(2, (1150.0, 1170.0)), points=(point(96, [990.0, 1010.0]),)))
    squares = [(math.log(b) - math.log(a)) ** 2 / 2 for a, b in ((990, 1010), (1150, 1170))]
    half = T_975_OF_2 * math.sqrt(sum(squares) / 2) * math.sqrt(1 / 2 + 1 / 2)
    low, high = (100 * (1.16 * math.exp(sign * half) - 1) for sign in (-1, 1))
    assert (two["gain %"], two["95 %"]) == ("+16.0", f"{low:+.1f} to {high:+.1f}")
    assert alone["gain %"] == "-" == alone["95 %"]


def test_rates_and_latencies_in_both_ways_of_counting():
    shared = shared_point(2, (1200.0, 1200.0), sum_tokens_per_s=1234.5, largest_e2e_s=20.5, e2e_p99_s=31.4)
    alone, two = served(curve(shared))
    assert alone == {
        "engines": "opt-1.3b", "sharing": "alone", "concurrency": "96", "tokens /s": "1,000", "sum": "-",
        "gain %": "-", "95 %": "-", "E2E s largest": "24.6", "E2E s p99": "25.1", "valid": "yes",
    }  # fmt: skip
    assert (two["tokens /s"], two["sum"], two["E2E s largest"], two["E2E s p99"]) == ("1,200", "1,234", "20.5", "31.4")
    assert "sum" not in served(curve(replace(shared, sum_tokens_per_s=1200.1)))[1], "it is the same"


def test_what_the_sensors_saw_is_a_table_of_its_own():
    shared = shared_point(2, (900.0,), **SENSED), shared_point(3, (900.0,))
    (section,) = sections(curve(*shared, points=(replace(point(96, [1000.0]), power_w=250.0),)))
    _, sensed = map(rows_of, tables_of(section))
    assert names(sensed) == ["opt-1.3b, alone, 96", "2 x opt-1.3b, mps, 96"], "of those of which anything is known"
    assert sensed[1] == {
        "engines": "2 x opt-1.3b", "sharing": "mps", "concurrency": "96", "GPU util %": "100.0", "busy %": "95.0",
        "SM %": "50.0", "DRAM %": "40.0", "tensor %": "5.0", "power W": "300", "mJ/token": "20.0", "cap %": "25.0",
        "own cores": "2.50",
    }  # fmt: skip
    assert (sensed[0]["power W"], sensed[0]["busy %"]) == ("250", "-")
    (only,) = sections(curve(shared_point(2, (9.0,), power_w=300.0)))
    assert tables_of(only)[1].cells.heads == ["engines", "sharing", "concurrency", "power W"]


def test_the_best_deployment_is_that_of_most_throughput_over_one_engine():
    shared = shared_point(2, (1200.0, 1210.0)), shared_point(2, (900.0,), sharing="mig"), shared_point(3, ())
    alone = curve(*shared, points=(point(96, [1000.0, 1010.0]),))
    small = shared_point(2, (100.0,), model="opt-125m")
    first, second = best_deployments(Findings(curves=[alone], shared=[*shared, small]))
    assert "2 x opt-1.3b, mps: 1,205 " in first and "at concurrency 96, +19.9 % (95 %: " in first and " 3 dep" in first
    assert "2 x opt-125m, mps: 100.0 " in second and "%" not in second and second.endswith("concurrency 96")
    assert list(best_deployments(Findings(shared=[shared_point(3, ())]))) == []


def test_gains_are_drawn_with_what_became_of_them():
    shared = shared_point(2, (1200.0, 1210.0)), shared_point(3, (900.0, 905.0))
    (section,) = sections(curve(*shared, points=(point(96, [1000.0, 1010.0]),)))
    gain, _ = section.charts()
    states = {row["subject"]: (row["state"], row["bound"]) for row in values_of(gain.spec)}
    assert states == {
        "2 x opt-1.3b, mps, concurrency 96": ("passes", 1.0),
        "3 x opt-1.3b, mps, concurrency 96": ("fails", 1.0),
    }


# Remarks


def test_what_was_left_out_is_told_with_its_reason():
    problems = ("replica 1: 1 requests failed", "replica 2: 3 preemptions in the window")
    partly = shared_point(2, (900.0, 910.0), left_out=1, problems=problems)
    never = shared_point(3, (), left_out=2, problems=problems[:1])
    (section,) = sections(curve(partly, never))
    assert column_of(tables_of(section)[0], "valid") == ["yes", "partly", "NO"]
    said = sentences_of(section)
    assert said[0].startswith("left out: 2 x opt-1.3b, mps, concurrency 96: 2 of 3 runs") and said[0].endswith(
        "; ".join(problems)
    )
    assert said[1].startswith("INVALID: 3 x opt-1.3b, mps, concurrency 96: 0 of 2 runs") and len(said) == 2


@pytest.mark.parametrize(
    ("figures", "cell"),
    [({"pinned": True, "degraded": ("a", "b")}, "degraded"), ({"noise": ("not steady: slow",)}, "noisy")],
)
def test_what_disturbed_those_used_is_told(figures, cell):
    (section,) = sections(curve(shared_point(2, (900.0,), **figures)))
    assert column_of(tables_of(section)[0], "valid")[1] == cell
    (said,) = sentences_of(section)
    assert said.startswith(cell) and said.endswith("; ".join(figures.get("degraded", figures.get("noise"))))


def pair(**figures: object) -> ReplicaPoint:
    made = shared_point(
        2, (2200.0,), models=("opt-125m", "opt-1.3b"), loads=(64, 32), each_tokens_per_s=(1800.0, 400.0)
    )
    return replace(made, **figures)


def test_different_models_are_compared_with_taking_turns():
    small = curve(model="opt-125m", points=(point(32, [2000.0]), point(64, [3000.0])))
    large = curve(points=(point(32, [800.0]), point(64, [1000.0])))
    (section,) = sections(small, large, others=(pair(),))
    (said,) = sentences_of(section)
    assert "opt-125m 1,800 tokens/s, opt-1.3b 400.0 tokens/s" in said
    assert f" {1800 / 3000 + 400 / 800:.2f} times" in said


@pytest.mark.parametrize(
    "figures",
    [
        {"loads": (64, 16)},
        {"environment": OTHER},
        {"workload": "of other requests"},
        {"ramp_up": "burst"},
        {"each_tokens_per_s": (1800.0,)},
    ],
    ids=lambda figures: next(iter(figures)),
)
def test_taking_turns_needs_both_models_alone_under_the_same_conditions(figures):
    curves = [curve(model=model, points=(point(32, [800.0]), point(64, [3000.0]))) for model in pair().models]
    assert [len(sentences_of(sections(*curves, others=(pair(**each),))[0])) for each in (figures, {})] == [0, 1]


# Memory


@in_checkout
def test_memory_is_told_by_engine_and_adds_up():
    found = [read(BASELINES / f"h200-vllm-0.26.0-replicas{of}.jsonl.xz") for of in ("-burst", "-pair")]
    measurements = [m for contents in found for m in contents.measurements]
    *each, _, memory = replica_sections(stored_curves(measurements, ()), shared_points(measurements))
    assert memory.text == MEMORY_LEGEND
    seen = [row for section in each for part in tables_of(section) if part.caption == MEMORY_TITLE for row in part.rows]
    assert seen and any(len({engine.model for engine in row.memory.engines}) > 1 for row in seen)
    for row in seen:
        used = sum(engine.weight_bytes + engine.kv_bytes for engine in row.memory.engines)
        rest = (row.memory.other_bytes or 0) + row.memory.left_bytes
        assert used + rest == pytest.approx(row.memory.total_bytes, rel=1e-9)


MIXED = GpuMemory((EngineMemory("a", GIB, 2 * GIB), EngineMemory("b", 2 * GIB, 2 * GIB)), 9 * GIB)


@pytest.mark.parametrize(
    ("used", "heads", "cells"),
    [
        (None, ["other and unused GiB", "of GiB"], ["2.00", "9.00"]),
        (8 * GIB, ["other GiB", "free GiB", "of GiB"], ["1.00", "1.00", "9.00"]),
    ],
)
def test_what_no_sensor_tells_apart_is_one_part(used, heads, cells):
    row = MemoryRow("a + b", "mps", replace(MIXED, used_bytes=used))
    assert (row.each_gib("weight_bytes"), row.each_gib("kv_bytes")) == ("1.00 + 2.00", "2.00")
    values = memory_chart([row])["data"]["values"]
    assert [part["end"] - part["x"] for part in values] == [1, 2, 2, 2, *([2] if used is None else [1, 1])]
    assert [part["engine"] for part in values][:4] == ["engine 1, a"] * 2 + ["engine 2, b"] * 2
    assert values[-1]["shown"] == f"{cells[-2]} GiB" and values[-1]["end"] == 9 and len(heads) == len(cells)


def test_sets_of_other_caches_have_other_names():
    rows = [MemoryRow("2 x a", "mps", GpuMemory((EngineMemory("a", GIB, size * GIB),), 9 * GIB)) for size in (2, 3)]
    named = [{row["subject"] for row in memory_chart(some)["data"]["values"]} for some in (rows, rows[:1])]
    assert named == [{"2 x a, mps, KV 2.00 GiB", "2 x a, mps, KV 3.00 GiB"}, {"2 x a, mps"}]


# Several GPUs

PLANTED = {"all_reduce_s": 1e-3, "imbalance": 0.2}


@pytest.fixture(scope="module")
def gpus() -> Curve:
    return on_gpus((1, 2), shared=replicas(2, **PLANTED), room={1: 4}, **PLANTED)


def test_the_table_tells_what_waits_what_each_gpu_takes_and_what_to_deploy(gpus):
    section, legend = gpus_sections([gpus, *gpus.wider])
    (table,) = tables_of(section)
    rows = {(row["concurrency"], row["GPUs"], row["deployment"]): row for row in rows_of(table)}
    one, two = rows["16", "1", "one engine"], rows["16", "2", "one engine, TP 2"]
    assert (one["batch"], one["valid"]) == ("4.00", "yes") and "gain %" in one
    first, wide = (d for d in deployments(gpus) if d.concurrency == 16 and d.sharing is None)
    assert two["gain %"] == f"{100 * (wide.tokens_per_s / first.tokens_per_s - 1):+.1f}" and one["gain %"] == "-"
    assert float(two["tokens/s per GPU"]) == pytest.approx(wide.tokens_per_s / 2, rel=1e-3)
    assert float(two["requests /s"]) == pytest.approx(wide.tokens_per_s / 32, rel=1e-2)
    said = sentences_of(section)
    assert [text for text in said if text.startswith("16 concurrent requests") and " 4.00 ran " in text]
    assert [text for text in said if "GPU 0 350 W, SM 70.0 %, DRAM 85.0 %; GPU 1 280 W" in text and "TP 2" in text]
    assert said[-1] in answers(gpus, deployments(gpus)) and legend.text


def test_the_best_of_several_deployments_is_by_each_wish(gpus):
    found = deployments(gpus)
    each = list(best_on_several(gpus, found))
    assert [(number, load) for number, load, _ in each] == [(2, 16)]
    for number, load, best in each:
        choices = [one for one in found if (one.gpus, one.concurrency) == (number, load)]
        assert len(choices) == 2 and best.keys() == {"requests_per_s", "e2e_s", "joules_per_request"}
        one, rate = best["requests_per_s"]
        assert rate == pytest.approx(max(d.tokens_per_s for d in choices) / 32) and one.tokens_per_s == 32 * rate
        assert best["e2e_s"][1] == min(d.served.e2e_s for d in choices)
        assert best["joules_per_request"][1] == 32 * min(d.served.energy_per_token_j for d in choices)
    (said,) = answers(gpus, found)
    assert said.startswith("2 GPUs, concurrency 16: ") and "one engine, TP 2 (25.0)" in said
    unknown = [replace(one, served=replace(one.served, e2e_s=None)) if one.sharing else one for one in found]
    assert all("e2e_s" not in best for _, _, best in best_on_several(gpus, unknown))
    assert list(best_on_several(gpus, found[:1])) == []


def test_names_of_deployments(gpus):
    one, *_, both = deployments(gpus)
    assert [deployment_name(one), deployment_name(both)] == ["one engine", "2 replicas, a GPU each"]
    assert deployment_name(replace(both, sharing="mps")) == "2 replicas, mps"
    assert deployment_name(replace(both, tensor_parallel_size=2)) == "2 replicas, a GPU each, TP 2"


def test_tables_of_one_model_say_in_what_they_differ(gpus):
    """As where points of a sweep and those of this comparison settle for other times."""
    settled = [
        replace(m, load=replace(m.load, settle_lifetimes=2.0))
        for each in (gpus, *gpus.wider)
        for m in each.measurements
    ]
    both = with_wider([curve_of("opt-tiny", [m for m in settled if m.spec.tensor_parallel_size == n]) for n in (1, 2)])
    titles = [each.title for each in gpus_sections([gpus, both[0]]) if isinstance(each, Section)]
    assert [title.partition(" on ")[0] for title in titles] == ["opt-tiny, warm-up 1", "opt-tiny, warm-up 2"]
    assert next(gpus_sections([gpus])).title.startswith("opt-tiny on ")
    assert list(gpus_sections([replace(gpus, wider=(), shared=())])) == []


# Both interfaces

LOADS = (4, 8, 16)


def swept(interface="engine", slower=1.0, loads=LOADS, model="opt-1.3b", **more):
    """Two repeats of each load on a launch of their own."""
    made = [
        measurement(n, slower * 100 * n, model=model, repeat=repeat, launch=f"{interface}-{repeat}", **more)
        for n in loads
        for repeat in (1, 2)
    ]
    return [replace(m, spec=replace(m.spec, interface=interface)) for m in made]


def of(*args, **more) -> Curve:
    made = swept(*args, **more)
    return curve_of(made[0].spec.model.split("/")[-1], made)


def test_each_load_that_both_interfaces_have_is_a_row():
    curves = [of(), of("server", 0.9, loads=(8, 16, 32))]
    ((_, _, loads),) = at_both_interfaces(curves)
    assert all(at.ratio.low <= at.ratio.value <= at.ratio.high for at in loads)
    section, legend = interfaces_sections(curves)
    rows = rows_of(tables_of(section)[0])
    assert [(row["concurrency"], row["tokens/s engine"], row["tokens/s server"]) for row in rows] == [
        ("8", "800.0", "720.0"),
        ("16", "1,600", "1,440"),
    ]
    assert [float(row["change %"]) for row in rows] == pytest.approx([-10, -10], abs=0.5)
    assert section.title.endswith("NVIDIA H200, vLLM 0.26.0, 2 launches and 2 launches") and legends_of([legend])


def test_front_ends_are_no_matter_of_the_engine_and_are_named():
    several = [replace(m, spec=replace(m.spec, extra=(("api_server_count", 4),))) for m in swept("server", 1.2)]
    curves = [of(), of("server"), curve_of("opt-1.3b", several)]
    found = [loads[0].ratio.value for _, _, loads in at_both_interfaces(curves)]
    assert found == pytest.approx([1.0, 1.2], rel=0.02)
    titles = [each.title for each in interfaces_sections(curves) if isinstance(each, Section)]
    assert ["4 front ends" in title for title in titles] == [False, True]
    assert ["4 front ends" in label for label in labels(curves)] == [False, False, True]


def test_where_more_prompts_come_together_fewer_steps_have_one():
    alone, together = (replace(m, launch=f"{m.launch}-prompts") for m in swept(loads=(8,)))
    prompts = [[64] * 20, [64, 0, 0, 0] * 5]
    made = [replace(m, run=with_prompts(m.run, each)) for m, each in zip((alone, together), prompts)]
    behind = [replace(m, spec=replace(m.spec, interface="server")) for m in made[1:]]
    ((_, _, loads),) = at_both_interfaces([curve_of("opt-1.3b", made[:1]), curve_of("opt-1.3b", behind)])
    assert loads[0].prompt_steps == pytest.approx((1.0, 0.25), abs=0.02)


def with_prompts(run, prompts):
    """The same steps, of which each in the window processed so many prompt tokens, over and over."""
    inside = window_trace(run).steps
    column = [prompts[(i - inside.start) % len(prompts)] for i in range(len(run.steps))]
    return replace(run, steps=replace(run.steps, prompt_tokens=tuple(column)))


def test_another_environment_another_model_and_one_interface_alone_are_no_comparison():
    assert at_both_interfaces([of(), of()]) == []
    assert at_both_interfaces([of(), of("server", model="opt-2.7b")]) == []
    assert at_both_interfaces([of(), of("server", environment=replace(H200, cores=8))]) == []
    assert at_both_interfaces([of(loads=(4,)), of("server", loads=(8,))]) == []
    assert [*interfaces_sections([of()])] == []
