from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import judge

from pytest_slmserve.analysis.claims import evidence as table1
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.specs import GIB

MODELS = list(table1.PUBLISHED)
LONGEST = 2048  # positions of OPT


@pytest.mark.parametrize(
    ("model", "published", "longest", "known"),
    [
        ("opt-125m", 512, 508, 1356),
        ("opt-1.3b", 256, 89, 238),
        ("opt-2.7b", 128, 49, 132),
        ("opt-6.7b", 64, 23, 62),
        ("opt-13b", 16, 7, 20),
    ],
)
def test_the_table(model, published, longest, known):
    assert table1.PUBLISHED[model] == published
    assert (table1.largest_batch(model, LONGEST), table1.largest_batch(model)) == (longest, known)
    assert table1.largest_batch(model, table1.KNOWN, block=table1.BLOCK_SIZE) == known, "768 tokens are 48 whole blocks"


@pytest.mark.parametrize("model", MODELS)
def test_the_paper_overcommits_two_models_which_fit_only_on_the_average(model):
    verdict = judge("table-1-batch-fits", Curve(subject=model))
    overcommitted = model in ("opt-1.3b", "opt-6.7b")
    assert verdict.state is (State.FAILS if overcommitted else State.PASSES)
    assert ("mean length" in verdict.why) is overcommitted
    assert table1.largest_batch(model, table1.MEAN, block=table1.BLOCK_SIZE) >= table1.PUBLISHED[model]


def test_fifty_megabytes_is_off_by_three():
    assert table1.request_bytes("opt-1.3b") == 150_994_944
    verdict = judge("table-1-request-size", Curve(subject="opt-1.3b"))
    assert verdict.state is State.FAILS
    assert "151 MB, 3.0 times the paper's 50 MB; 256 tokens take 50.3 MB" in verdict.why
    assert judge("table-1-request-size", Curve(subject="opt-2.7b")).state is State.INCONCLUSIVE


def test_a_model_that_the_table_has_not_is_inconclusive():
    assert judge("table-1-batch-fits", Curve(subject="opt-tiny")).state is State.INCONCLUSIVE


@given(st.sampled_from(MODELS), st.integers(30, 200))
def test_known_lengths_and_pages_never_hold_less_than_the_longest(model, gib):
    longest, known = (table1.largest_batch(model, tokens, gib * GIB) for tokens in (LONGEST, table1.KNOWN))
    lengths = (table1.KNOWN, table1.MEAN)
    paged, mean = (table1.largest_batch(model, tokens, gib * GIB, table1.BLOCK_SIZE) for tokens in lengths)
    assert longest <= paged <= known and paged <= mean
