"""The JSON Schema of records, docs/records.schema.json, against archives that were written and damaged lines."""

from __future__ import annotations

import itertools
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonschema")
from jsonschema import Draft202012Validator
from scripts import BASELINES, CHECKOUT, needs_checkout

SCHEMA = CHECKOUT / "docs" / "records.schema.json"
WRITTEN = CHECKOUT / "tests" / "data" / "archive-format-3.jsonl"

needs_checkout()


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    facts = json.loads(SCHEMA.read_text("utf-8"))
    Draft202012Validator.check_schema(facts)
    return Draft202012Validator(facts)


def first_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Two lines of each kind."""
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for _, group in itertools.groupby(map(json.loads, lines), lambda line: line["kind"]):
            yield from itertools.islice(group, 2)


@pytest.mark.parametrize(
    "name",
    [
        "cpu-vllm-0.32.0-server",  # an endpoint
        "h100-vllm-0.26.0-fp8",  # closed loops with sensors
        "h200-vllm-0.26.0-batching",  # jobs, Transformers
        "h200-vllm-0.26.0-gate-same",  # pairs of launches
        "h100-vllm-0.26.0-replicas-burst",
    ],
)
def test_committed_archives_are_as_the_schema_says(schema: Draft202012Validator, name: str) -> None:
    lines = list(itertools.islice(first_lines(BASELINES / f"{name}.jsonl.xz"), 12))
    assert {line["kind"] for line in lines} == {"session", "engine", "measurement"}
    assert not [error.message for line in lines for error in schema.iter_errors(line)]


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("session", ("format",), 2),
        ("session", ("started",), "yesterday"),
        ("engine", ("resolved", "kv_blocks"), "many"),
        ("engine", ("spec", "platform"), "tpu"),
        ("engine", ("model", "layers"), None),
        ("measurement", ("crc32",), "none"),
        ("measurement", ("workload", "kind"), "embed"),
        ("measurement", ("load", "kind"), "sweep"),
        ("measurement", ("load", "concurrency"), 0),
        ("measurement", ("run", "failures"), -1),
        ("measurement", ("run", "samples", "finished"), "yes"),
        ("measurement", ("run", "steps", "running"), [1.5]),
        ("measurement", ("run", "clock_us"), ["AA"]),
    ],
)
def test_a_damaged_line_is_not(schema: Draft202012Validator, kind: str, path: tuple[str, ...], value: object) -> None:
    line = next(line for line in first_lines(WRITTEN) if line["kind"] == kind)
    assert schema.is_valid(line)
    *parents, last = path
    part = line
    for name in parents:
        part = part[name]
    part[last] = value
    assert not schema.is_valid(line)
