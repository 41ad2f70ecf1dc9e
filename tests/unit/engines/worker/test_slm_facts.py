"""What the model's process tells of its KV cache, on stand-ins for vLLM's groups of layers."""

import sys
from importlib import util
from types import SimpleNamespace

import pytest

from pytest_slmserve.engines.server import WORKER

SPEC = util.spec_from_file_location("slm_facts", WORKER.parent / "slm_facts.py")
assert SPEC and SPEC.loader
slm_facts = sys.modules.setdefault("slm_facts", util.module_from_spec(SPEC))
SPEC.loader.exec_module(slm_facts)


def group(kind: str, size: int = 16, **more: object) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=type(kind, (), {"block_size": size, **more})())


FULL, SLIDING = group("FullAttentionSpec", sliding_window=None), group("SlidingWindowSpec", sliding_window=512)
STATE = group("MambaSpec", size=2048)
UNIFORM = group("UniformTypeKVCacheSpecs", kv_cache_specs={"0": FULL.kv_cache_spec})


@pytest.mark.parametrize(("groups", "windows"), [
    ([FULL], [None]),
    ([UNIFORM], [None]),
    ([group("MLAAttentionSpec")], [None]),
    ([FULL, SLIDING, SLIDING], [None, 512, 512]),
    ([STATE, FULL], [0, None]),
    ([FULL, group("SlidingWindowSpec", size=32, sliding_window=512)], None),
    ([FULL, group("ChunkedLocalAttentionSpec")], None),
    ([], None),
])  # fmt: skip
def test_windows_of_the_groups_of_layers_and_none_of_a_release_without_groups(groups, windows):
    assert slm_facts.group_windows(SimpleNamespace(kv_cache_groups=groups)) == windows
    assert slm_facts.group_windows(None) is slm_facts.group_windows(SimpleNamespace()) is None
