"""What is asked for: what changes a key, and what cannot be asked for."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import NAMES

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.specs import GIB, ClosedLoop, EngineSpec, ReplicaSpec, WorkloadSpec, short_hash

PLAIN = EngineSpec("opt-1.3b")
PLACES = {"python", "gpu"}  # where it runs, which the environment tells better
OTHER = {
    "model": NAMES.filter(lambda name: printable(name, layout="") == name),
    "platform": st.just("simulated"),
    "load_format": st.just("auto"),
    "dtype": NAMES,
    "interface": st.just("server"),
    "gpu_memory_utilization": st.floats(0.01, 1),
    "env": st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=2).map(tuple),
    "extra": st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=2).map(tuple),
    "python": NAMES,
    "tensor_parallel_size": st.integers(2, 8),
}


def other(name: str) -> st.SearchStrategy[object]:
    """Values of a field that are not its default."""
    default = getattr(PLAIN, name)
    usual = st.just(not default) if isinstance(default, bool) else st.integers(0, 2**40)
    return OTHER.get(name, usual).filter(lambda value: value != default)


@pytest.mark.parametrize(
    "name", [field.name for field in fields(EngineSpec) if field.name not in ("url", "model_facts")]
)
@given(data=st.data())
def test_the_key_changes_with_every_field_but_places(name, data):
    changed = replace(PLAIN, **{name: data.draw(other(name))})
    assert (changed.key == PLAIN.key) is (name in PLACES)


def test_the_key_changes_with_the_configuration_of_a_folder():
    """Of a catalogue model the name says it all, and what an endpoint serves is its own affair."""
    mine = replace(PLAIN.known_model, source="folder", name="mine")
    spec = EngineSpec("./mine", model_facts=mine)
    assert spec.key != EngineSpec("./mine", model_facts=replace(mine, layers=2)).key
    assert spec.key == EngineSpec("./mine", model_facts=replace(mine, parameters=None, active=None, windows=None)).key
    assert EngineSpec("opt-1.3b", model_facts=replace(PLAIN.known_model, layers=2)).key == PLAIN.key


def test_a_catalogue_model_brings_its_sizes_and_no_other_does():
    assert EngineSpec("facebook/opt-1.3b").known_model is CATALOGUE["opt-1.3b"]
    with pytest.raises(BadUsage, match="nothing is known of the model './opt-1.3b'"):
        EngineSpec("./opt-1.3b").known_model  # noqa: B018


def test_an_endpoint_is_known_by_its_url_and_nothing_else_has_one():
    first, second = (
        EngineSpec("m", platform="remote", interface="endpoint", url=f"http://h:{port}/v1") for port in (1, 2)
    )
    assert len({first.key, second.key, PLAIN.key}) == 3
    for half in ({"url": "http://h/v1"}, {"interface": "endpoint"}, {"platform": "remote"}):
        with pytest.raises(BadUsage, match="an endpoint has a URL, and nothing else has one"):
            replace(PLAIN, **half)


@given(NAMES, NAMES)
def test_a_path_to_packages_changes_no_key(first, second):
    env = (("PYTHONPATH", first), ("A", "1"), ("PYTHONPATH", second))
    assert replace(PLAIN, env=env).key == replace(PLAIN, env=(("A", "1"),)).key


def test_the_key_is_the_same_on_every_machine():
    assert short_hash({"b": [1, 2.5, None], "a": "é"}) == short_hash({"a": "é", "b": [1, 2.5, None]}) == "84afbf1d4853"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: EngineSpec("x", platform="tpu"), "unknown platform 'tpu'"),
        (lambda: EngineSpec("x", gpu_memory_utilization=0.0), "gpu_memory_utilization 0.0 is not between 0 and 1"),
        (lambda: EngineSpec("x", gpu_memory_utilization=1.1), "gpu_memory_utilization 1.1"),
        (lambda: EngineSpec("x", load_format="safetensors"), "unknown load_format 'safetensors'"),
        (lambda: EngineSpec("x", max_num_seqs=64.0), "max_num_seqs is a whole number, not 64.0"),
        (lambda: EngineSpec("x", seed=True), "seed is a whole number, not True"),
        (lambda: EngineSpec("x", gpu_memory_utilization="0.9"), "gpu_memory_utilization is a number, not '0.9'"),
        (lambda: EngineSpec("x", extra=[("a", 1)]), "extra is a tuple of pairs"),
        (lambda: EngineSpec("x", platform="cpu", kv_cache_bytes=GIB + 1), "takes whole GiB"),
        (lambda: EngineSpec("x", tensor_parallel_size=0), "an engine on 0 GPUs"),
        (lambda: ReplicaSpec((PLAIN, PLAIN), "gpus"), "replicas with a GPU each, and two have the same"),
        (lambda: ReplicaSpec((PLAIN, replace(PLAIN, gpu=1))), "replicas share one device, and these are on several"),
        (lambda: WorkloadSpec(source="web"), "unknown source or rule 'web'"),
        (lambda: WorkloadSpec(rule="any"), "unknown source or rule 'any'"),
        (lambda: WorkloadSpec(prompt_tokens=None), "only one of prompt and output length is fixed"),
        (lambda: WorkloadSpec(requests=0), "at least one request"),
        (lambda: WorkloadSpec(output_tokens=0), "at least one request"),
        (lambda: ClosedLoop(0), "concurrency 0 is not positive"),
        (lambda: ClosedLoop(1, window_s=0.0), "a window of 0.0 s measures nothing"),
    ],
)
def test_what_cannot_be_asked_for(make, problem):
    with pytest.raises(BadUsage, match=problem) as raised:
        make()
    assert raised.value.hint


def test_a_fixed_number_of_requests_needs_no_window():
    assert ClosedLoop(1, window_s=0.0, requests=8).requests == 8


def test_an_engine_takes_neighbouring_gpus():
    assert [*replace(PLAIN, gpu=2, tensor_parallel_size=2).gpus] == [2, 3]


def test_replicas_may_have_a_gpu_each():
    each = tuple(replace(PLAIN, gpu=i) for i in range(4))
    assert ReplicaSpec(each, "gpus").key != ReplicaSpec(each[:2], "gpus").key != ReplicaSpec((PLAIN,) * 2).key
    pairs = tuple(replace(PLAIN, gpu=i, tensor_parallel_size=2) for i in (0, 2))
    assert len(ReplicaSpec(pairs, "gpus")) == 2
