"""What is said of several engines in external results."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import pytest
from published import REPLICAS, served

from pytest_slmserve.analysis.compare.deployments import EngineSet, compare
from pytest_slmserve.archive.external import Columns
from pytest_slmserve.report.external.sweep import as_json_replicas as as_json
from pytest_slmserve.report.external.sweep import replica_findings as findings
from pytest_slmserve.report.external.sweep import text_replicas as text

NAMES = Columns(
    knob="max_num_seqs",
    throughput="tok_per_s",
    latency="itl_ms",
    preemptions="lost",
    replicas="replicas",
    power="watts",
)
PUBLISHED = [
    EngineSet(
        replicas=replicas,
        limit=limit,
        settings=(("chunked", str(chunked)),),
        point=served(replicas * limit, [rate], [ms / 1e3], lost),
        eligible=not chunked,
    )
    for limit, replicas, chunked, rate, ms, lost in REPLICAS
]


def planted(replicas: int, limit: int, *rates: float, lost: float = 0.0, power_w: float | None = None, **facts: object):
    energy = None if power_w is None else power_w / fmean(rates)
    point = served(replicas * limit, rates, [0.01] * len(rates), lost, power_w=power_w, energy_per_token_j=energy)
    return replace(EngineSet(replicas=replicas, limit=limit, point=point), **facts)


def unbroken(out: str) -> str:
    return " ".join(out.split())


def said(*sets: EngineSet) -> dict[str, str]:
    return dict(findings(compare(sets), NAMES))


def test_the_published_results_as_text():
    out = text(compare(PUBLISHED), NAMES, ["planted note"])
    lines = out.splitlines()
    [chosen] = [line.split() for line in lines if "<-- best" in line]
    assert chosen == ["2", "256", "512", "False", "14,669", "+33.8", "37.1", "0.503", "<--", "best"]
    [lost] = [line for line in lines if line.endswith("178 preemptions") and "by" not in line]
    assert lost.split()[:6] == ["4", "256", "1024", "False", "14,720", "+34.2"]
    assert [line.split()[1] for line in lines if line.endswith("baseline")] == ["768"]
    assert (
        "best            2 engines of 256 (chunked=False) with 14,669 tok_per_s, +33.8 % over one engine of 768" in out
    )
    assert "0.503 times its itl_ms" in unbroken(out)
    assert "not chosen 14,720 by 4 engines of 256 (chunked=False), which had 178 preemptions" in unbroken(out)
    assert "over one engine of 768 (chunked=True) with 11,865 the gain would be +23.6 %" in unbroken(out)
    assert "no larger max_num_seqs of one engine was tried" in out and "nothing was repeated" in out
    assert lines[-1].split() == ["note", "planted", "note"]
    assert all(line == line.rstrip() and len(line) <= 150 for line in lines)


def test_columns_with_nothing_in_them_are_left_out():
    bare = text(compare([planted(1, 8, 100.0), planted(2, 8, 130.0)]), NAMES)
    assert not any(words in bare for words in ("95 %", "at equal", "mJ/", "power", "chunked"))
    full = text(compare([planted(1, 16, 99.0, 101.0, power_w=50.0), planted(2, 8, 130.0, power_w=60.0)]), NAMES)
    assert all(words in full for words in ("95 %", "at equal total: over one engine", "mJ/", "power"))
    assert "462 instead of 500 mJ per token" in unbroken(full) and "nothing was repeated" not in full


def test_energy_that_is_not_known_everywhere_is_said():
    out = text(compare([planted(1, 8, 100.0, power_w=50.0), planted(2, 8, 130.0)]), NAMES)
    assert "watts is not known everywhere" in out and "mJ per token" not in out


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ((130.0,), "+30.0 % over"),
        ((90.0,), "-10.0 %, which is a loss over"),
        ((100.0,), "0.0 %, which may be nothing over"),
        ((100.5, 101.5), "which may be nothing over"),
        ((129.0, 131.0), "+30.0 % (95 %: +"),
        ((89.0, 91.0), "%), which is a loss over"),
    ],
)
def test_how_sure_a_gain_is(rates, words):
    one = planted(1, 8, 100.0) if len(rates) == 1 else planted(1, 8, 99.0, 101.0)
    assert words in said(one, planted(2, 8, *rates))["best"]


def test_what_is_alike_and_what_comes_next():
    why = said(planted(1, 8, 99.0, 101.0), planted(2, 8, 129.0, 131.0), planted(4, 4, 128.0, 130.0))["not chosen"]
    assert why.startswith("next come 4 engines of 4, 0.8 % below the best")
    assert why.endswith("the noise does not tell the best from 4 engines of 4")
    assert "not chosen" not in said(planted(1, 8, 100.0), planted(2, 8, 130.0))


def test_one_engine_that_preempted_is_told_where_it_has_more():
    lost = planted(1, 16, 120.0, lost=2.0)
    why = said(planted(1, 8, 100.0), lost, planted(2, 8, 130.0))["not chosen"]
    assert why == "120.0 by one engine of 16, which had 2 preemptions"
    assert "not chosen" not in said(planted(1, 8, 100.0), planted(1, 16, 90.0, lost=2.0), planted(2, 8, 130.0))


def test_there_may_be_no_best():
    found = compare([planted(1, 8, 100.0), planted(2, 8, 130.0, lost=1.0)])
    assert "none: every row of several engines preempted" in text(found, NAMES)
    seen = json.loads(as_json(found, NAMES))
    assert seen["best"] is None and seen["gain"] is None
    assert seen["rows"][1]["gain"]["value"] == pytest.approx(0.3)


def test_json_has_every_answer():
    found = json.loads(as_json(compare(PUBLISHED), NAMES, ["planted note"]))
    assert (found["baseline"]["concurrency"], found["baseline"]["tokens_per_s"]) == (768, 10967.555704)
    assert tuple(found["best"][name] for name in ("replicas", "concurrency_per_replica", "concurrency")) == (
        2,
        256,
        512,
    )
    assert found["gain"] == {"value": pytest.approx(0.33754, abs=1e-5), "low": None, "high": None}
    assert found["best"]["gain"] == found["gain"] and found["best"]["latency_factor"]["value"] == pytest.approx(
        0.5025, 1e-3
    )
    assert [row["chosen"] for row in found["rows"]].count(True) == 1 and len(found["rows"]) == len(REPLICAS)
    assert [row["valid"] for row in found["rows"]].count(False) == 1
    [other] = found["other_baselines"]
    assert other["settings"] == {"chunked": "True"} and other["gain"]["value"] == pytest.approx(0.23639, abs=1e-5)
    assert found["notes"][-1] == "planted note"


def test_of_many_other_baselines_a_few_are_told():
    alone = [planted(1, 8, 100.0 + i, settings=(("mode", mode),)) for i, mode in enumerate("abcdef")]
    found = compare([*alone, planted(2, 8, 130.0, settings=(("mode", "a"),))])
    told = [words for name, words in findings(found, NAMES) if name == "other baseline"]
    assert len(told) == 4 and told[-1] == "and 2 more; --json has all"
    assert len(json.loads(as_json(found, NAMES))["other_baselines"]) == 5
