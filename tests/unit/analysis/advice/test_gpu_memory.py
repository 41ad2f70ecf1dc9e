"""Memory of engines: by hand, on published numbers, and what must hold of every division."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.analysis.advice.advisor import (
    BatchOption,
    Footprint,
    divide,
    replicas_that_split,
    utilization,
)
from pytest_slmserve.schema.kv_cache import kv_capacity
from pytest_slmserve.schema.records import Resolved
from pytest_slmserve.schema.specs import GIB, EngineSpec

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
def options(draw: st.DrawFn) -> list[BatchOption]:
    batches = sorted(draw(st.sets(BATCHES, min_size=1, max_size=6)))
    rate, footprint = st.floats(1, 1e6), draw(FOOTPRINTS)
    return [BatchOption(batch, draw(rate), footprint.total_bytes(batch)) for batch in batches]


def test_a_batch_has_room_for_all_of_its_requests_at_full_length():
    assert OPT_1_3B.kv_bytes(64) == 3073 * 16 * 196_608
    assert OPT_1_3B.total_bytes(64) == OPT_1_3B.kv_bytes(64) + 2_631_516_160 + 2 * GIB


@given(FOOTPRINTS, BATCHES)
def test_the_kv_bytes_hold_the_batch_and_not_one_more(footprint, batch):
    blocks = footprint.kv_bytes(batch) // footprint.block_bytes
    told = Resolved(kv_blocks=blocks, block_size=footprint.block_size)
    assert kv_capacity(EngineSpec("opt-1.3b"), footprint.longest, told) == batch


def test_replicas_by_hand():
    budget = int(0.9 * 141 * GIB)
    assert replicas_that_split(OPT_1_3B, 64, budget) == 26
    assert replicas_that_split(OPT_1_3B, 1, budget) == 1, "a request is not divided"
    assert replicas_that_split(OPT_1_3B, 64, GIB) == 0


@given(FOOTPRINTS, BATCHES, GPUS, GPUS)
def test_more_memory_never_gives_fewer_replicas(footprint, batch, one, other):
    small, large = sorted((one, other))
    assert replicas_that_split(footprint, batch, small) <= replicas_that_split(footprint, batch, large)


@given(FOOTPRINTS, BATCHES, GPUS)
def test_split_replicas_fit_and_are_no_fewer_than_whole_ones(footprint, batch, budget):
    whole, split = budget // footprint.total_bytes(batch), replicas_that_split(footprint, batch, budget)
    assert split <= batch and split >= min(whole, batch)
    assert split == 0 or split * footprint.total_bytes(-(-batch // split)) <= budget


@given(FOOTPRINTS, BATCHES, GPUS)
def test_each_replica_passes_vllms_check_when_those_before_it_are_there(footprint, batch, gpu):
    """vLLM refuses to start where less than the share it was told is free."""
    total = footprint.total_bytes(batch)
    count, share = int(0.9 * gpu) // total, utilization(total, gpu)
    assert count == 0 or (count - 1) * total + share * gpu <= gpu
    assert share == 1 or total <= share * gpu + 1e-3


@given(st.lists(options(), min_size=1, max_size=4), GPUS)
def test_a_division_always_fits_or_is_none(models, budget):
    places = divide(models, budget)
    if places is None:
        assert sum(model[0].total_bytes for model in models) > budget
    else:
        assert sum(model[at].total_bytes for model, at in zip(models, places, strict=True)) <= budget
    full = sum(model[-1].total_bytes for model in models)
    assert full > budget or places == tuple(len(model) - 1 for model in models)


def rates(**by_batch: float) -> list[BatchOption]:
    """Options of an engine that takes a byte for each request, and three more."""
    return [BatchOption(int(b[1:]), rate, 3 + int(b[1:])) for b, rate in by_batch.items()]


def test_the_step_down_that_loses_least_is_taken():
    flat, steep = rates(_1=10.0, _50=99.0, _100=100.0), rates(_1=10.0, _50=50.0, _100=100.0)
    full = flat[2].total_bytes + steep[2].total_bytes
    assert divide([flat, steep], full) == (2, 2)
    assert divide([flat, steep], full - 1) == (1, 2)
    assert divide([flat, steep], full - 51) == (1, 1)
    assert divide([flat, steep], flat[0].total_bytes + steep[0].total_bytes - 1) is None


def test_what_the_last_step_freed_too_much_lets_others_up_again():
    """The large model is at its second step down, and what that freed holds the small one's."""
    assert divide([rates(_1=99.9, _10=100.0), rates(_1=1.0, _1000=100.0)], 1000) == (1, 0)
