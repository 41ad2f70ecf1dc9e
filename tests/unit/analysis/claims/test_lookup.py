from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from typing import get_args

import pytest
from hypothesis import given
from strategies import H200, curves, law, measurement, noisy_curve

from pytest_slmserve.analysis.claims import table as lookup
from pytest_slmserve.analysis.claims.table import CLAIMS, ROWS, ClaimRow, judge_row, row_for
from pytest_slmserve.analysis.metrics.gpu_figures import GPUS
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.errors import BadUsage, Sharing
from pytest_slmserve.schema.records import Environment, release

NAMES = list(CLAIMS)
PLATEAU = "throughput-plateau"
TABLE = (
    ClaimRow(PLATEAU),
    ClaimRow(PLATEAU, device="cuda", evidence="platform"),
    ClaimRow(PLATEAU, device="H200", evidence="family"),
    ClaimRow(PLATEAU, device="H200", ramp_up="burst", evidence="ramp_up"),
    ClaimRow(PLATEAU, device="H200", interface="server", evidence="interface"),
    ClaimRow(PLATEAU, device="H200", vllm=("0.26", "0.27"), evidence="release"),
    ClaimRow(PLATEAU, model="opt-13b", expected="fails", evidence="model"),
)


def test_each_claim_states_a_sentence_of_a_paper_or_says_that_it_is_ours():
    assert all(claim.statement.endswith(".") for claim in CLAIMS.values())
    of_ours = {"neighbours-do-not-disturb", *(f"replicas-keep-the-tail-{how}" for how in get_args(Sharing))}
    assert {claim.name for claim in CLAIMS.values() if "arXiv" not in claim.source} == of_ours - {
        "replicas-keep-the-tail-urls"
    }


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.name)
def test_a_claim_that_compares_has_a_threshold_and_tells_its_estimate(claim):
    if claim.compares:
        assert claim.threshold in claim.parameters and re.search(r"{(|told|does)}", claim.words)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.claim}-{row.model}")
def test_rows_make_sense(row):
    assert row.claim in NAMES and row.evidence
    assert row.device in {"*", "cuda", "cpu", "simulated", *(gpu.family for gpu in GPUS)}


def test_no_two_rows_say_the_same_place():
    places = [(row.claim, row.model, row.device, row.ramp_up, row.vllm) for row in ROWS]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("environment", [None, Environment(), H200, Environment(platform="cpu", vllm="0.32.0")])
def test_every_claim_has_a_row_everywhere(name, environment):
    assert row_for(name, "some-model", environment).expected == CLAIMS[name].expected


@pytest.mark.parametrize(
    ("where", "evidence"),
    [
        (("opt-1.3b", None), ""),
        (("opt-1.3b", Environment(platform="cpu")), ""),
        (("opt-1.3b", Environment(platform="cuda", gpu_name="NVIDIA L4")), "platform"),
        (("opt-1.3b", replace(H200, vllm="0.25.1")), "family"),
        (("opt-1.3b", replace(H200, vllm=None)), "family"),
        (("opt-1.3b", replace(H200, vllm="0.27.0")), "family"),
        (("opt-1.3b", replace(H200, vllm="0.26.0rc1+cu130")), "release"),
        (("facebook/opt-13b", H200), "model"),
        # A row of an interface or a ramp-up goes before one of a release, after one that names the device better.
        (("opt-1.3b", H200, "engine", "burst"), "ramp_up"),
        (("opt-1.3b", H200, "engine", "staggered"), "release"),
        (("opt-1.3b", H200, None, None), "release"),
        (("opt-1.3b", H200, "server", "burst"), "interface"),
        (("opt-1.3b", H200, "server", None), "interface"),
        (("opt-1.3b", Environment(platform="cuda"), "engine", "burst"), "platform"),
        (("opt-1.3b", Environment(platform="cuda"), "server", "burst"), "platform"),
    ],
)
def test_the_most_specific_row_rules(where, evidence):
    assert row_for(PLATEAU, *where, rows=TABLE).evidence == evidence
    assert row_for(PLATEAU, *where, rows=TABLE[::-1]).evidence == evidence


def test_a_range_without_an_end():
    rows = (ClaimRow(PLATEAU), ClaimRow(PLATEAU, vllm=("0.26", ""), evidence="new"))
    assert row_for(PLATEAU, "x", Environment(vllm="1.0"), rows=rows).evidence == "new"
    assert row_for(PLATEAU, "x", Environment(vllm="0.9.2"), rows=rows).evidence == ""


@pytest.mark.parametrize(
    ("version", "expected"), [("0.26.0", (0, 26, 0)), ("v0.20.2.dev1+gabc", (0, 20, 2)), ("1", (1,)), ("nightly", ())]
)
def test_release(version, expected):
    assert release(version) == expected


def test_unknown_claims_and_empty_tables():
    with pytest.raises(BadUsage, match="unknown claim 'flying'.*\n.*throughput-plateau"):
        row_for("flying", "opt-1.3b")
    with pytest.raises(BadUsage, match="unknown claim 'throughput-platau'\n  try: throughput-plateau or "):
        row_for("throughput-platau", "opt-1.3b")
    with pytest.raises(BadUsage, match="no row"):
        row_for(PLATEAU, "opt-1.3b", rows=())


def test_the_expected_failures_fail_and_the_others_hold():
    for model in ("opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b"):
        row = row_for("table-1-batch-fits", model)
        verdict = judge_row(row, Curve(subject=model))
        assert verdict.state is State(row.expected)
        assert row.expected == "passes" or verdict.why.split()[0] == row.evidence.split()[0], "the arithmetic agrees"


def test_a_server_that_does_not_feed_its_engine_is_no_reason_to_expect_no_plateau():
    """On an H200 OPT-125M has none offline; through one front end it has."""
    assert row_for(PLATEAU, "opt-125m", H200, "engine", "staggered").expected == "fails"
    assert row_for(PLATEAU, "opt-125m", H200, "server", "staggered").expected == "passes"


@pytest.mark.parametrize("name", NAMES)
def test_all_verdicts_name_their_subject_alike(name):
    curve = curve_of("opt-1.3b", [measurement(c, law(c), model="facebook/opt-1.3b") for c in (1, 2, 4)])
    assert judge_row(row_for(name, "facebook/opt-1.3b"), curve).subject == "opt-1.3b"


@pytest.mark.parametrize("name", NAMES[:3])
def test_claims_of_a_curve(name):
    curve = noisy_curve({2**i: law(2**i) for i in range(10)}, noise=0.003)
    verdict = judge_row(row_for(name, "opt-1.3b"), curve)
    assert verdict.claim == name and verdict.state is State.PASSES


def test_parameters_of_the_row_rule():
    curve = noisy_curve({2**i: law(2**i) for i in range(10)}, noise=0.003)
    strict = replace(row_for(PLATEAU, "opt-1.3b"), parameters={"tolerance": 0.01})
    assert judge_row(strict, curve).state is State.FAILS


def test_kv_blocks_of_the_worst_launch_count():
    made = [measurement(c, law(c), launch=f"launch-{c}") for c in (1, 2, 4)]
    row = row_for("kv-blocks-as-predicted", "opt-1.3b")
    assert judge_row(row, curve_of("opt-1.3b", made)).n == 3
    off = replace(made[1], resolved=replace(made[1].resolved, kv_blocks=1000))
    assert judge_row(row, curve_of("opt-1.3b", [made[0], off, made[2]])).state is State.FAILS
    dumb = replace(off, resolved=replace(off.resolved, kv_blocks=None))
    assert judge_row(row, curve_of("opt-1.3b", [made[0], dumb, made[2]])).state is State.INCONCLUSIVE


@pytest.mark.parametrize("name", NAMES[:4])
def test_nothing_measured_is_never_green(name):
    assert judge_row(row_for(name, "opt-1.3b"), Curve(subject="opt-1.3b")).state is State.INCONCLUSIVE


@given(curves())
def test_judging_is_total(curve):
    for name in NAMES:
        assert judge_row(row_for(name, curve.subject), curve).claim == name


@pytest.mark.parametrize("row", [*ROWS, *TABLE], ids=repr)
def test_a_row_survives_a_record(row):
    stored = json.loads(json.dumps(asdict(row)))
    assert lookup.rows_from({"rows": [{**stored, "added_later": 1}]})[0] == row


def test_models_that_a_claim_reads():
    def reads(name, model):
        return lookup.models_read(lookup.claim_of(name), model)

    assert reads(PLATEAU, "opt-1.3b") == ("opt-1.3b",)
    assert reads("table-1-batch-fits", "opt-1.3b") == reads("table-1-request-size", "opt-1.3b") == ()
    assert reads("energy-per-token-grows-with-model", "facebook/opt-1.3b") == ("facebook/opt-1.3b", "opt-125m")
    assert reads("energy-per-token-grows-with-model", "opt-125m") == ("opt-125m",)
