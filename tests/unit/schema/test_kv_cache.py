from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.analysis.advice import subjects as kv_blocks
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema import kv_cache
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import parse_memory
from pytest_slmserve.schema.records import Resolved
from pytest_slmserve.schema.specs import GIB, EngineSpec


def test_blocks_that_a_published_engine_logged():
    """arXiv:2503.08311's OPT-1.3B: 54.41 GiB of KV cache, 18,573 blocks of 16 tokens (the log rounds the GiB)."""
    spec = EngineSpec("opt-1.3b", kv_cache_bytes=int(54.41 * GIB))
    assert abs(kv_cache.predicted_blocks(spec) - 18_573) <= 2


@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        (
            EngineSpec("opt-tiny", platform="cpu", dtype="bfloat16", kv_cache_bytes=GIB),
            8192,
        ),  # seen on vLLM's CPU backend
        (EngineSpec("opt-1.3b", kv_cache_bytes=4 * GIB), 1365),
        (EngineSpec("facebook/opt-1.3b", platform="simulated", kv_cache_bytes=4 * GIB), 1365),
        (EngineSpec("opt-1.3b", dtype="float32", kv_cache_bytes=4 * GIB), 682),
        (EngineSpec("opt-1.3b", kv_cache_bytes=4 * GIB, extra=(("kv_cache_dtype", "fp8"),)), 2730),
        (EngineSpec("opt-1.3b", extra=(("kv_cache_dtype", "fp8_per_token_head"),)), None),  # with scales, in vLLM 0.32
        (EngineSpec("opt-1.3b", kv_cache_bytes=4 * GIB, extra=(("block_size", 32),)), 682),
        (EngineSpec("opt-1.3b", kv_cache_bytes=4 * GIB, extra=(("kv_cache_memory_bytes", GIB),)), 341),
        (EngineSpec("opt-1.3b", dtype="auto"), None),
        (EngineSpec("/somewhere/else"), None),
    ],
)
def test_blocks_predicted_from_shapes(spec, blocks):
    assert kv_cache.predicted_blocks(spec) == blocks


def test_what_the_engine_reports_goes_before_defaults():
    spec = EngineSpec("opt-1.3b", dtype="auto", kv_cache_bytes=4 * GIB)
    assert kv_cache.predicted_blocks(spec, Resolved(dtype="float16", block_size=32)) == 682


@given(st.integers(1, 10_000), st.sampled_from([16, 32, 128]), st.integers(1, 4096))
def test_the_requests_that_fit_leave_one_block_and_one_more_does_not_fit(blocks, size, longest):
    each = -(-longest // size)
    fit = kv_cache.kv_capacity(EngineSpec("opt-1.3b"), longest, Resolved(kv_blocks=blocks, block_size=size))
    assert fit * each <= blocks - 1 < (fit + 1) * each


def test_capacity_takes_the_engines_own_count():
    spec = EngineSpec("opt-1.3b", kv_cache_bytes=4 * GIB)
    assert kv_cache.kv_capacity(spec, 768) == (1365 - 1) // 48
    assert kv_cache.kv_capacity(spec, 768, Resolved(kv_blocks=481, block_size=16)) == 10
    assert kv_cache.kv_capacity(EngineSpec("/somewhere/else"), 768) is None


@pytest.mark.parametrize("said", [0, -1, -1000])
def test_a_record_whose_blocks_have_no_size_is_taken_as_one_that_does_not_say(said):
    spec = EngineSpec("opt-1.3b", kv_cache_bytes=4 * GIB)
    assert kv_cache.kv_layout(spec, Resolved(block_size=said)).block_size == kv_cache.kv_layout(spec).block_size == 16
    assert kv_cache.kv_capacity(spec, 768, Resolved(kv_blocks=481, block_size=said)) == 10


def test_budget():
    assert kv_cache.kv_budget_bytes(40 * GIB, 0.5, 5 * GIB) == 11 * GIB
    with pytest.raises(BadUsage, match=r"25\.0 GiB of the 20\.0 GiB .*\n.*--slm-gpu-memory-utilization"):
        kv_cache.kv_budget_bytes(40 * GIB, 0.5, 21 * GIB)


@pytest.mark.parametrize(
    ("seen", "state"),
    [(1365, "passes"), (1363, "passes"), (1367, "passes"), (1362, "fails"), (1368, "fails"), (0, "fails")],
)
def test_blocks_as_predicted(seen, state):
    verdict = kv_blocks.kv_blocks_as_predicted(
        EngineSpec("opt-1.3b", kv_cache_bytes=4 * GIB), [Resolved(kv_blocks=seen)]
    )
    assert verdict.state is State(state) and f"{seen:,} blocks of 16 tokens, 1,365 predicted" in verdict.why
    assert verdict.value == seen - 1365 and verdict.threshold == 2


@pytest.mark.parametrize(
    ("model", "resolved", "why"),
    [("opt-1.3b", Resolved(), "did not report"), ("/somewhere/else", Resolved(kv_blocks=5), "unknown")],
)
def test_blocks_of_the_unknown_are_inconclusive(model, resolved, why):
    verdict = kv_blocks.kv_blocks_as_predicted(EngineSpec(model), [resolved])
    assert verdict.state is State.INCONCLUSIVE and why in verdict.why


def test_requests_that_have_no_room_get_the_reason():
    spec = EngineSpec("opt-1.3b", kv_cache_bytes=4 * GIB)
    assert kv_cache.no_room(spec, 160, 137) == "the KV cache holds 136 requests of 160 tokens"
    assert kv_cache.no_room(spec, 160, 136) is None
    assert kv_cache.no_room(EngineSpec("a-folder/elsewhere"), 160, 10_000) is None, "its capacity is not known"


@pytest.mark.parametrize(
    ("windows", "step_tokens", "blocks"),
    [
        ((None,), 4096, 48),
        ((None, 512), 4096, 96),  # of so few tokens a layer that slides keeps all while they are scheduled
        ((None, 512), 32, 48 + 37),
        ((None, 0), 32, 48 + 2),
        ((), 32, 0),
    ],
)
def test_blocks_of_a_request_over_groups_of_layers(windows, step_tokens, blocks):
    spec = EngineSpec("opt-125m", max_num_batched_tokens=step_tokens)
    assert kv_cache.request_blocks(spec, windows, 16, 768) == blocks


def test_a_model_whose_layers_slide_shares_its_blocks_among_groups():
    """As vLLM groups the 26 layers of Gemma 3 1B: 7 groups of 4."""
    spec = EngineSpec("gemma-3-1b", dtype="bfloat16", kv_cache_bytes=GIB, max_num_batched_tokens=2048)
    assert kv_cache.predicted_blocks(spec) == GIB // (16 * 4 * 1024) == 16_384
    assert kv_cache.kv_capacity(spec, 768) == 16_383 // (7 * 48)
    assert kv_cache.kv_capacity(spec, 30_720) == 16_383 // (1920 + 6 * (-(-(511 + 4096) // 16) + 1))
    larger = replace(spec, extra=(("max_num_batched_tokens", 8192),))
    assert kv_cache.kv_capacity(larger, 30_720) == 16_383 // (1920 + 6 * (-(-(511 + 16_384) // 16) + 1))
    one = EngineSpec("gemma-3-1b", extra=(("disable_hybrid_kv_cache_manager", True),))
    assert kv_cache.predicted_blocks(one) is kv_cache.kv_capacity(one, 768) is None


def test_what_only_the_engine_knows_it_tells():
    spec = EngineSpec("granite-4.0-h-350m")
    assert kv_cache.kv_capacity(spec, 768) is None
    assert kv_cache.kv_capacity(spec, 768, Resolved(kv_blocks=1000, block_size=16)) is None, "nor what a request takes"
    told = Resolved(kv_blocks=1000, block_size=16, kv_windows=(None, 0, 0))
    assert kv_cache.kv_capacity(spec, 768, told) == 999 // (48 + 2 * 2)


@pytest.mark.parametrize(
    ("asked", "each"), [("auto", 2), ("fp8", 1), ("fp8_e4m3", 1), ("bfloat16", 2), ("float32", 4), ("turbo", None)]
)
def test_bytes_of_a_number_in_the_cache(asked, each):
    spec = EngineSpec("opt-125m", extra=(("kv_cache_dtype", asked),))
    layout = kv_cache.kv_layout(spec)
    assert (layout.value_bytes, layout.bytes_per_token) == (each, None if each is None else 18_432 * each)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("80 gib", 80 * GIB), ("63.5GiB", int(63.5 * GIB)), ("150754820096", 150754820096)],
)
def test_sizes(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "80", "80GB", "-1GiB", "0", "1e12", "nan", "9" * 40, "9" * 20])
def test_what_is_no_size(text):
    with pytest.raises(BadUsage, match="no memory of a GPU"):
        parse_memory(text)
