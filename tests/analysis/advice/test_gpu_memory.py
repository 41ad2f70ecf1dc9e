"""Memory of engines: by hand, on published numbers, and what must hold of every division."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.analysis.advice.batch_choice import (
    BatchOption,
    BatchOptions,
    Footprint,
    divide,
    freed_share,
    replicas_that_fit,
    replicas_that_split,
    utilization,
)
from pytest_slmserve.schema.kv_cache import kv_blocks, requests_that_fit
from pytest_slmserve.schema.specs import GIB

OPT_1_3B = Footprint(weight_bytes=2_631_516_160, kv_bytes_per_token=196_608, longest=768, allowance_bytes=2 * GIB)
FOOTPRINTS = st.builds(
    Footprint,
    weight_bytes=st.integers(1, 30 * GIB),
    kv_bytes_per_token=st.integers(1, 10**6),
    longest=st.integers(1, 4096),
    block_size=st.sampled_from([1, 16, 128]),
    allowance_bytes=st.integers(1, 4 * GIB),
)
BATCHES = st.integers(1, 2000)
GPUS = st.integers(GIB, 200 * GIB)


@st.composite
def ladders(draw: st.DrawFn) -> BatchOptions:
    batches = sorted(draw(st.sets(BATCHES, min_size=1, max_size=6)))
    rate = st.floats(1, 1e6)
    return BatchOptions(draw(FOOTPRINTS), tuple(BatchOption(batch, draw(rate)) for batch in batches))


def test_a_batch_has_room_for_all_of_its_requests_at_full_length():
    assert OPT_1_3B.kv_blocks(64) == 64 * 48 + 1
    assert OPT_1_3B.kv_bytes(64) == 3073 * 16 * 196_608
    assert OPT_1_3B.total_bytes(64) == OPT_1_3B.kv_bytes(64) + 2_631_516_160 + 2 * GIB


@given(FOOTPRINTS, BATCHES)
def test_the_kv_bytes_hold_the_batch_and_not_one_more(footprint, batch):
    blocks = kv_blocks(footprint.kv_bytes(batch), footprint.block_size, footprint.kv_bytes_per_token)
    assert requests_that_fit(blocks, footprint.block_size, footprint.longest) == batch


def test_memory_freed_as_published():
    """OPT-1.3B on 64 GB, fixed lengths: 54.48 GB of KV cache, of which B_opt used 25.72 % (arXiv:2503.08311)."""
    assert freed_share(54.48, 0.2572 * 54.48, 64) == pytest.approx(0.6323, abs=5e-5)


def test_replicas_by_hand():
    budget = int(0.9 * 141 * GIB)
    assert replicas_that_fit(OPT_1_3B, 64, budget) == budget // OPT_1_3B.total_bytes(64) == 9
    assert replicas_that_split(OPT_1_3B, 64, budget) == 26
    assert replicas_that_split(OPT_1_3B, 1, budget) == 1, "a request is not divided"
    assert replicas_that_fit(OPT_1_3B, 64, GIB) == replicas_that_split(OPT_1_3B, 64, GIB) == 0


@given(FOOTPRINTS, BATCHES, GPUS, GPUS)
def test_more_memory_never_gives_fewer_replicas(footprint, batch, one, other):
    small, large = sorted((one, other))
    assert replicas_that_fit(footprint, batch, small) <= replicas_that_fit(footprint, batch, large)
    assert replicas_that_split(footprint, batch, small) <= replicas_that_split(footprint, batch, large)


@given(FOOTPRINTS, BATCHES, GPUS)
def test_replicas_fit_and_one_more_of_the_batch_does_not(footprint, batch, budget):
    whole, split = replicas_that_fit(footprint, batch, budget), replicas_that_split(footprint, batch, budget)
    assert whole * footprint.total_bytes(batch) <= budget < (whole + 1) * footprint.total_bytes(batch)
    assert split <= batch and split >= min(whole, batch)
    assert split == 0 or split * footprint.total_bytes(-(-batch // split)) <= budget


@given(FOOTPRINTS, BATCHES, GPUS)
def test_each_replica_passes_vllms_check_when_those_before_it_are_there(footprint, batch, gpu):
    """vLLM refuses to start where less than the share it was told is free."""
    total = footprint.total_bytes(batch)
    count, share = replicas_that_fit(footprint, batch, int(0.9 * gpu)), utilization(total, gpu)
    assert count == 0 or (count - 1) * total + share * gpu <= gpu
    assert share == 1 or total <= share * gpu + 1e-3


@given(st.lists(ladders(), min_size=1, max_size=4), GPUS)
def test_a_division_always_fits_or_is_none(models, budget):
    heights = divide(models, budget)
    lowest = sum(model.bytes_at(0) for model in models)
    if heights is None:
        assert lowest > budget
    else:
        assert sum(model.bytes_at(h) for model, h in zip(models, heights, strict=True)) <= budget
    full = sum(model.bytes_at(len(model.rungs) - 1) for model in models)
    assert full > budget or heights == tuple(len(model.rungs) - 1 for model in models)


def test_the_step_down_that_loses_least_is_taken():
    small = Footprint(weight_bytes=1, kv_bytes_per_token=1, longest=1, block_size=1, allowance_bytes=1)
    flat = BatchOptions(small, (BatchOption(1, 10.0), BatchOption(50, 99.0), BatchOption(100, 100.0)))
    steep = BatchOptions(small, (BatchOption(1, 10.0), BatchOption(50, 50.0), BatchOption(100, 100.0)))
    full = flat.bytes_at(2) + steep.bytes_at(2)
    assert divide([flat, steep], full) == (2, 2)
    assert divide([flat, steep], full - 1) == (1, 2)
    assert divide([flat, steep], full - 51) == (1, 1)
    assert divide([flat, steep], flat.bytes_at(0) + steep.bytes_at(0) - 1) is None


def test_what_the_last_step_freed_too_much_lets_others_up_again():
    """The large model is at its second step down, and what that freed holds the small one's."""
    small = Footprint(weight_bytes=1, kv_bytes_per_token=1, longest=1, block_size=1, allowance_bytes=1)
    cheap = BatchOptions(small, (BatchOption(1, 99.9), BatchOption(10, 100.0)))
    dear = BatchOptions(small, (BatchOption(1, 1.0), BatchOption(1000, 100.0)))
    assert divide([cheap, dear], 1000) == (1, 0)
