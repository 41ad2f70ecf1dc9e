"""Words on disk: those of the first records, whatever the code calls things by now."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.analysis.claims.claim import ClaimRow
from pytest_slmserve.analysis.claims.table import row_from_record, row_to_record
from pytest_slmserve.archive.codec import built
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.loads import ClosedLoop, load_facts
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.schema.stored_names import NAMES, VALUES, from_stored, stored_value, to_stored

NAMED = {
    name for cls in (EngineSpec, Environment, ClosedLoop, ClaimRow) for name in (each.name for each in fields(cls))
}
WORDS = st.sampled_from(sorted({word for values in VALUES.values() for word in values} | {"server", "dummy", "cuda"}))


def test_an_engine_is_stored_in_the_words_of_the_first_records():
    spec = EngineSpec("m", "simulated", "auto", tensor_parallel_size=2)
    stored = {name: spec.facts[name] for name in ("backend", "weights", "memory_share", "door", "tensor_parallel")}
    assert list(stored.values()) == ["fake", "real", 0.9, "offline", 2] and not spec.facts.keys() & NAMES.keys()


@pytest.mark.parametrize(("ramp_up", "stored"), [("staggered", "spread"), ("burst", "together")])
def test_a_load_is_stored_in_the_words_of_the_first_records(ramp_up, stored):
    assert load_facts(ClosedLoop(4, ramp_up=ramp_up))["starts"] == stored


def test_an_environment_is_read_from_the_words_of_the_first_records():
    found = built(Environment, {"backend": "fake", "platform": "Linux"})
    assert found == Environment(platform="simulated", operating_system="Linux")
    assert to_stored(asdict(found)).items() >= {"backend": "fake", "platform": "Linux"}.items()


def test_a_row_of_the_claims_table_is_the_same_after_it_was_stored():
    row = ClaimRow(
        "throughput-plateau", device="simulated", interface="engine", ramp_up="burst", parameters={"bound": 1.0}
    )
    assert row_from_record(row_to_record(row)) == row
    assert [row_to_record(row)[name] for name in ("device", "door", "starts")] == ["fake", "offline", "together"]


def test_every_name_is_that_of_a_field_and_no_two_are_stored_alike():
    assert NAMES.keys() | VALUES.keys() <= NAMED
    assert len({*NAMES.values()}) == len(NAMES)
    assert all(len({*values.values()}) == len(values) for values in VALUES.values())


@given(st.dictionaries(st.sampled_from(sorted(NAMED)), st.none() | st.integers() | WORDS))
def test_what_was_stored_is_read_as_it_was(facts):
    assert from_stored(to_stored(facts)) == facts


def test_what_is_no_word_is_stored_as_it_is():
    assert stored_value("interface", ["engine"]) == ["engine"] and stored_value("model", "auto") == "auto"
