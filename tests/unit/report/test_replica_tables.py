"""The tables of replicas: which rows and columns there are, what stands in them, and what is said below."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from scripts import BASELINES, in_checkout
from strategies import H200, measurement, point, shared_point

from pytest_slmserve.analysis.claims.table import stored_curves
from pytest_slmserve.analysis.metrics.gpu_figures import EngineMemory, GpuMemory
from pytest_slmserve.analysis.points import Point, ReplicaPoint, shared_points
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.archive.store import read
from pytest_slmserve.report.deployments import (
    MEMORY_LEGEND,
    REPLICAS_LEGEND,
    MemoryRow,
    alone_at,
    memory_chart,
    replica_sections,
)
from pytest_slmserve.report.section import section_text
from pytest_slmserve.report.text_table import hanging
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


def text_of(curves: Sequence[Curve], shared: Sequence[ReplicaPoint]) -> str:
    """Pieces stand apart, as in the report."""
    return "\n\n".join(map(section_text, replica_sections(curves, shared)))


def report(*curves: Curve, others: tuple[ReplicaPoint, ...] = ()) -> str:
    return text_of(curves, [*dict.fromkeys(s for c in curves for s in c.shared), *others])


def tables(text: str) -> list[list[dict[str, str]]]:
    """Rows of each table by the names of their columns, the two lines of a heading read as one."""
    found = []
    for above, below, rule, *lines in (part.splitlines() for part in text.split("\n\n") if "\n---" in part):
        cells = [slice(*dashes.span()) for dashes in re.finditer("-+", rule)]
        columns = [" ".join(f"{above[cell]} {below[cell]}".split()).replace("- ", "") for cell in cells]
        rows = [dict(zip(columns, (line[cell].strip() for cell in cells))) for line in lines]
        found.append([row for row in rows if row["concurrency"].isdigit()])  # remarks are none
    return found


def served(text: str) -> list[dict[str, str]]:
    return tables(text)[0]


def remarks(text: str) -> list[str]:
    """Below the first table, however their lines are broken."""
    _, table, *_ = text.split("\n\n")
    below = table.splitlines()[3 + len(served(text)) :]
    return "\n".join(below).replace("\n  ", " ").splitlines()


def names(rows: list[dict[str, str]]) -> list[str]:
    return [f"{row['engines']}, {row['sharing']}, {row['concurrency']}" for row in rows]


# Rows


def test_sets_of_engines_with_other_arguments_are_held_against_one_of_the_same():
    ours = shared_point(2, [1200.0, 1200.0])
    others = shared_point(2, [1200.0, 1200.0], families=frozenset({"without chunked prefill"}))
    slower = curve(others, points=(replace(point(96, [800.0, 800.0]), e2e_s=30.7, e2e_p99_s=31.0),))
    rows = served(report(curve(ours), slower))
    assert [row["gain %"] for row in rows] == ["-", "+20.0", "-", "+50.0"]


def test_one_alone_comes_first_then_the_ways_of_sharing_each_by_number():
    shared = [
        shared_point(n, (900.0,), sharing=way) for way, n in (("mig", 2), ("mps", 3), ("time-slicing", 2), ("mps", 2))
    ]
    assert names(served(report(curve(*shared)))) == [
        "opt-1.3b, alone, 96",
        "2 x opt-1.3b, time-slicing, 96",
        "2 x opt-1.3b, mps, 96",
        "3 x opt-1.3b, mps, 96",
        "2 x opt-1.3b, mig, 96",
    ]


def test_what_is_set_beside_the_way_of_sharing_is_told_and_stands_behind_it():
    shared = [
        shared_point(2, (900.0,), thread_percentage=50),
        shared_point(2, (900.0,), pinned=True),
        shared_point(3, (900.0,)),
    ]
    assert [row["sharing"] for row in served(report(curve(*shared)))] == ["alone", "mps", "mps, 50 %", "mps, pinned"]


def test_models_and_loads_each_have_their_own_engine_alone_and_sets_of_models_come_last():
    pair = shared_point(2, (900.0,), models=("opt-125m", "opt-1.3b"), loads=(48, 48))
    large = curve(
        shared_point(2, (800.0,), concurrency=48),
        shared_point(2, (900.0,)),
        points=(point(48, [700.0]), point(96, [1000.0])),
    )
    small = curve(shared_point(2, (4000.0,), model="opt-125m"), model="opt-125m", points=(point(96, [5000.0]),))
    text = text_of([large, small], [pair, *large.shared, *small.shared])
    assert names(served(text)) == [
        "opt-1.3b, alone, 48",
        "2 x opt-1.3b, mps, 48",
        "opt-1.3b, alone, 96",
        "2 x opt-1.3b, mps, 96",
        "opt-125m, alone, 96",
        "2 x opt-125m, mps, 96",
        "opt-125m + opt-1.3b, mps, 96",
    ]
    assert [row["gain %"] for row in served(text)] == ["-", "+14.3", "-", "-10.0", "-", "-20.0", "-"]


def test_replicas_of_other_requests_are_not_beside_this_engine():
    mine, other = shared_point(2, (900.0,)), shared_point(3, (900.0,), workload="of other requests")
    rows = served(report(curve(mine), others=(other,)))
    assert names(rows) == ["opt-1.3b, alone, 96", "2 x opt-1.3b, mps, 96", "3 x opt-1.3b, mps, 96"]
    assert [row["gain %"] for row in rows] == ["-", "-10.0", "-"]


def test_equal_models_of_a_set_are_counted():
    three = shared_point(3, (900.0,), models=("opt-125m", "opt-1.3b", "opt-1.3b"), loads=(32, 32, 32))
    assert served(report(others=(three,)))[0]["engines"] == "opt-125m + 2 x opt-1.3b"


def test_replicas_without_a_valid_run_are_not_beside_the_engine_of_another_model():
    """Two of them look alike: neither rests on any record."""
    small, large = (shared_point(2, (), model=model) for model in ("opt-125m", "opt-1.3b"))
    curves = [curve(small, model="opt-125m", points=(point(96, [5000.0]),)), curve(large)]
    assert [alone_at(shared, curves).repeats for shared in (small, large)] == [(5000.0,), (1000.0, 1000.0)]


# Figures


def test_the_gain_and_its_interval_by_hand():
    shared = shared_point(2, (1150.0, 1170.0))
    rows = served(report(curve(shared, points=(point(96, [990.0, 1010.0]),))))
    squares = [(math.log(b) - math.log(a)) ** 2 / 2 for a, b in ((990, 1010), (1150, 1170))]
    half = T_975_OF_2 * math.sqrt(sum(squares) / 2) * math.sqrt(1 / 2 + 1 / 2)
    low, high = (100 * (1.16 * math.exp(sign * half) - 1) for sign in (-1, 1))
    assert (rows[1]["gain %"], rows[1]["95 %"]) == ("+16.0", f"{low:+.1f} to {high:+.1f}")
    assert rows[0]["gain %"] == "-" == rows[0]["95 %"]


def test_rates_and_latencies_in_both_ways_of_counting():
    shared = shared_point(2, (1200.0, 1200.0), sum_tokens_per_s=1234.5, largest_e2e_s=20.5, e2e_p99_s=31.4)
    alone, two = served(report(curve(shared)))
    assert alone == {
        "engines": "opt-1.3b", "sharing": "alone", "concurrency": "96", "tokens /s": "1,000", "sum": "-",
        "gain %": "-", "95 %": "-", "E2E s largest": "24.6", "E2E s p99": "25.1", "valid": "yes",
    }  # fmt: skip
    assert (two["tokens /s"], two["sum"], two["E2E s largest"], two["E2E s p99"]) == ("1,200", "1,234", "20.5", "31.4")


def test_what_the_sensors_saw_is_a_table_of_its_own():
    shared = shared_point(2, (900.0,), **SENSED), shared_point(3, (900.0,))
    _, sensed = tables(report(curve(*shared, points=(replace(point(96, [1000.0]), power_w=250.0),))))
    assert names(sensed) == ["opt-1.3b, alone, 96", "2 x opt-1.3b, mps, 96"], "of those of which anything is known"
    assert sensed[1] == {
        "engines": "2 x opt-1.3b", "sharing": "mps", "concurrency": "96", "GPU util %": "100.0", "busy %": "95.0",
        "SM %": "50.0", "DRAM %": "40.0", "tensor %": "5.0", "power W": "300", "mJ/ token": "20.0", "cap %": "25.0",
        "own cores": "2.50",
    }  # fmt: skip
    assert (sensed[0]["power W"], sensed[0]["busy %"]) == ("250", "-")
    assert list(tables(report(curve(shared_point(2, (9.0,), power_w=300.0))))[1][0]) == [
        "engines", "sharing", "concurrency", "power W",
    ]  # fmt: skip


# Remarks


def test_what_was_left_out_is_told_with_its_reason():
    problems = ("replica 1: 1 requests failed", "replica 2: 3 preemptions in the window")
    partly = shared_point(2, (900.0, 910.0), left_out=1, problems=problems)
    never = shared_point(3, (), left_out=2, problems=problems[:1])
    text = report(curve(partly, never))
    assert [row["valid"] for row in served(text)] == ["yes", "partly", "NO"]
    assert remarks(text) == [
        f"left out: 2 x opt-1.3b, mps, concurrency 96: 2 of 3 runs are used: {'; '.join(problems)}",
        f"INVALID: 3 x opt-1.3b, mps, concurrency 96: 0 of 2 runs are used: {problems[0]}",
    ]


@pytest.mark.parametrize(
    ("figures", "cell", "line"),
    [
        (
            {"pinned": True, "degraded": ("the SM clock moved", "so did it")},
            "degraded",
            "degraded: 2 x opt-1.3b, mps, pinned, concurrency 96: the SM clock moved; so did it",
        ),
        (
            {"noise": ("opt-1.3b: not steady: slow",)},
            "noisy",
            "noisy, kept: 2 x opt-1.3b, mps, concurrency 96: opt-1.3b: not steady: slow",
        ),
    ],
)
def test_what_disturbed_those_used_is_told(figures, cell, line):
    text = report(curve(shared_point(2, (900.0,), **figures)))
    assert served(text)[1]["valid"] == cell and remarks(text) == [line]


def pair(**figures: object) -> ReplicaPoint:
    made = shared_point(
        2, (2200.0,), models=("opt-125m", "opt-1.3b"), loads=(64, 32), each_tokens_per_s=(1800.0, 400.0)
    )
    return replace(made, **figures)


def test_different_models_are_compared_with_taking_turns():
    small = curve(model="opt-125m", points=(point(32, [2000.0]), point(64, [3000.0])))
    large = curve(points=(point(32, [800.0]), point(64, [1000.0])))
    assert remarks(report(small, large, others=(pair(),))) == [
        "opt-125m + opt-1.3b, mps: opt-125m 1,800 tokens/s, opt-1.3b 400.0 tokens/s; "
        "1.10 times what serving one after the other would give"
    ]


@pytest.mark.parametrize(
    "shared",
    [
        pair(loads=(64, 16)),
        pair(environment=OTHER),
        pair(workload="of other requests"),
        pair(ramp_up="burst"),
        pair(each_tokens_per_s=(1800.0,)),
    ],
    ids=["another load", "another host", "other requests", "another way to start", "an unknown rate"],
)
def test_taking_turns_needs_both_models_alone_under_the_same_conditions(shared):
    curves = [curve(model=model, points=(point(32, [800.0]), point(64, [3000.0]))) for model in pair().models]
    assert remarks(report(*curves, others=(shared,))) == []
    assert len(remarks(report(*curves, others=(pair(),)))) == 1


# All of it


def test_two_kinds_of_hosts_are_two_tables_however_their_runs_follow_each_other():
    here = [shared_point(n, (900.0,)) for n in (2, 3)]
    there = [replace(shared, environment=OTHER) for shared in here]
    curves = [curve(*here), curve(*there, environment=OTHER, points=(point(96, [500.0]),))]
    text = text_of(curves, [here[0], there[0], here[1], there[1]])
    headings = [line for line in text.splitlines() if line.startswith("Replicas on one device: ")]
    assert [line.partition(": ")[2] for line in headings] == [
        "NVIDIA H200, vLLM 0.26.0",
        "NVIDIA A100-SXM4-80GB, vLLM 0.26.0",
    ]
    assert [[row["gain %"] for row in rows] for rows in tables(text)] == [
        ["-", "-10.0", "-10.0"],
        ["-", "+80.0", "+80.0"],
    ]
    assert text.count(REPLICAS_LEGEND[:40]) == 1, "how to read them is told once"


def test_nothing_is_said_where_there_are_no_replicas():
    assert list(replica_sections([curve()], [])) == [] == list(replica_sections([], []))


@in_checkout
def test_memory_is_told_by_engine_and_adds_up():
    found = [read(BASELINES / f"h200-vllm-0.26.0-replicas{of}.jsonl.xz") for of in ("", "-pair")]
    measurements = [m for contents in found for m in contents.measurements]
    shared = shared_points(measurements)
    text = text_of(stored_curves(measurements, ()), shared)
    assert text.endswith(hanging(MEMORY_LEGEND, 0))
    _, below = text.split("GiB each", 1)
    rows = {tuple(line[:33].split("  ", 1)): line[33:].split() for line in below.splitlines()[2:] if "opt-" in line}
    told = {" ".join(" ".join(name).split()): cells for name, cells in rows.items()}
    assert told["opt-1.3b alone"] == ["2.45", "120", "2.14", "15.9", "140"]
    assert told["3 x opt-1.3b mps"] == ["2.45", "35.7", "6.35", "19.7", "140"]
    assert told["opt-125m + opt-1.3b mps"] == ["0.233", "+", "2.45", "58.9", "+", "56.7", "3.83", "18.2", "140"]


def test_sets_of_other_caches_have_other_names():
    rows = [MemoryRow("2 x a", "mps", GpuMemory((EngineMemory("a", GIB, size * GIB),), 9 * GIB)) for size in (2, 3)]
    named = [{row["subject"] for row in memory_chart(some)["data"]["values"]} for some in (rows, rows[:1])]
    assert named == [{"2 x a, mps, KV 2.00 GiB", "2 x a, mps, KV 3.00 GiB"}, {"2 x a, mps"}]
