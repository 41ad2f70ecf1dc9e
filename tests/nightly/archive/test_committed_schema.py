"""Every committed archive is as the schema of records says: the first two lines of each kind."""

import itertools
import json
import lzma

import pytest
from jsonschema import Draft202012Validator
from scripts import BASELINES, CHECKOUT, needs_checkout

needs_checkout()
SCHEMA = Draft202012Validator(json.loads((CHECKOUT / "docs" / "records.schema.json").read_text("utf-8")))


@pytest.mark.parametrize("name", sorted(path.name for path in BASELINES.glob("*.jsonl.xz")))
def test_committed_archives_are_as_the_schema_says(name):
    with lzma.open(BASELINES / name, "rt", encoding="utf-8") as lines:
        grouped = itertools.groupby(map(json.loads, lines), lambda line: line["kind"])
        first = [line for _, group in itertools.islice(grouped, 8) for line in itertools.islice(group, 2)]
    assert {line["kind"] for line in first} == {"session", "engine", "measurement"}
    assert not [error.message for line in first for error in SCHEMA.iter_errors(line)]
