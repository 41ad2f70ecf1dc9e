"""What the model's process tells of its KV cache and of the stages of its start, on stand-ins for vLLM's classes."""

import sys
from importlib import util
from types import SimpleNamespace

import pytest

from pytest_slmserve.engines.server import WORKER

clock = [100.0]


class Worker:
    """Takes so many seconds for each, of which compiling is some."""

    def __init__(self):
        self.compilation_config = SimpleNamespace(compilation_time=0.0, encoder_compilation_time=0.0)

    def init_device(self):
        clock[0] += 1

    def determine_available_memory(self, compiling=3.0):
        self.compilation_config.compilation_time += compiling
        clock[0] += 1 + compiling
        return 7


class CPUWorker(Worker):
    """Begins as its base class does; it has no method for its weights, and fails to capture."""

    def init_device(self):
        super().init_device()
        clock[0] += 2

    def compile_or_warm_up_model(self):
        clock[0] += 4
        raise ValueError("planted")


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
def test_layer_groups_tell_their_windows(groups, windows):
    assert slm_facts.group_windows(SimpleNamespace(kv_cache_groups=groups)) == windows
    assert slm_facts.group_windows(None) is slm_facts.group_windows(SimpleNamespace()) is None


def test_start_stages_exclude_compiling(monkeypatch):
    for module, kind in zip(slm_facts.WORKERS, (Worker, CPUWorker)):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{kind.__name__: kind}))
    monkeypatch.setattr(slm_facts.time, "monotonic", lambda: clock[0])
    timed = util.module_from_spec(SPEC)
    SPEC.loader.exec_module(timed)
    worker = CPUWorker()
    worker.init_device()
    assert timed.took_s == {"device": 3, "compile": 0}, "a base class's part is in it, and is not counted twice"
    assert worker.determine_available_memory(compiling=5.0) == 7
    with pytest.raises(ValueError, match="planted"):
        worker.compile_or_warm_up_model()
    assert timed.took_s == {"device": 3, "profile": 1, "compile": 5, "capture": 4} and timed.imported_s == 100
    assert timed.compiled_s(SimpleNamespace()) == 0, "of a release that keeps it elsewhere"
