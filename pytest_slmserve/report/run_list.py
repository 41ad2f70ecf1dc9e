"""Runs of archives, as a table and as facts for JSON and CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pytest_slmserve.report.numbers import ABSENT
from pytest_slmserve.report.text_table import Column, table
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.records import Measurement


def measured_facts(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Counts of measurements and launches; models, vllm, devices and hosts: every one that they have."""
    where = [m.environment for m in measurements]
    return {
        "measurements": len(measurements),
        "launches": len({m.launch for m in measurements}),
        "models": _each(short_name(m.spec.model) for m in measurements),
        "vllm": _each(each.vllm for each in where),
        "devices": _each(map(device_of, where)),
        "hosts": _each(each.host for each in where),
    }


def days_of(measurements: Iterable[Measurement]) -> str:
    """ "2026-01-01 to 2026-01-03", or one day; empty of nothing."""
    days = sorted({m.measured_at[:10] for m in measurements})
    return " to ".join(dict.fromkeys((*days[:1], *days[-1:])))


def run_table(rows: Sequence[dict[str, Any]], *, several: bool) -> str:
    """A line for each run. several: of more than one archive, whose names are shown."""

    def told(name: str, head: str, rank: int = 0) -> Column[dict[str, Any]]:
        return Column(head, lambda row: ", ".join(row[name]) or ABSENT, "left", rank=rank)

    archive: Column[dict[str, Any]] = Column("archive", lambda row: row["path"].name, "left")
    columns: list[Column[dict[str, Any]]] = [
        *([archive] if several else []),
        Column("run", lambda row: row["id"], "left"),
        Column("started", lambda row: row["started"][:16].replace("T", " ") or ABSENT, "left"),
        Column("measure-\nments", lambda row: str(row["measurements"])),
        Column("launches", lambda row: str(row["launches"]), rank=3),
        told("models", "models"),
        told("vllm", "vLLM", rank=1),
        told("devices", "device", rank=2),
        told("hosts", "host", rank=4),
        Column("", lambda row: "resumes what is above it" if row["resumes"] else "", "left"),
    ]
    return table(rows, columns)


def device_of(environment: Environment) -> str | None:
    """A short name of the device, or the URL."""
    return environment.gpu_name or environment.url or environment.cpu or environment.platform


def _each(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))
