"""A folder for asv with three releases of vLLM, and records of launches to convert."""

import json
from dataclasses import replace
from pathlib import Path

from strategies import H200, RESOLVED, law, measurement

from pytest_slmserve.commands import asv
from pytest_slmserve.schema.records import Measurement

ROWS = [("0.24.0", "2026-06-30"), ("0.25.1", "2026-07-14"), ("0.26.0", "2026-07-25")]
LOADS = (8, 64)


def launches(release="0.26.0", slower=1.0, loads=LOADS, name="launch", environment=None, **facts) -> list[Measurement]:
    """A repeat of each load in each of two launches, between which there is 1%."""
    known = {"vllm": release, "torch": "2.11.0", "driver": "580", "host": "one"}
    facts["environment"] = replace(H200, **known | (environment or {}))
    rates = [(i, c, law(c) / slower * (1 + 0.01 * i)) for c in loads for i in range(2)]
    made = [measurement(c, rate, launch=f"{release}-{name}-{i}", repeat=i, **facts) for i, c, rate in rates]
    return [replace(m, resolved=replace(RESOLVED, ready_s=40.0 * slower)) for m in made]


def folder_of_releases(made: Path) -> Path:
    """The folder as `init` makes it of `ROWS`, but for the repository."""
    made.mkdir()
    for name, text in asv.initial_files().items():
        (made / name).write_text(text, "utf-8")
    (made / asv.RELEASES).write_text(json.dumps(ROWS), "utf-8")
    return made


def results(folder: Path) -> dict[str, str]:
    """Text of every file below results/."""
    found = folder / "results"
    return {str(path.relative_to(found)): path.read_text("utf-8") for path in sorted(found.rglob("*.json"))}
