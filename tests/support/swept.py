"""Archives of a sweep whose rates follow the saturation model, as a run writes them, and damaged ones."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from sealed_lines import reseal
from strategies import law, measurement, planted_telemetry

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.points import by_series
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.schema.records import Measurement, Run

BATCHES = (16, 32, 64, 128, 256, 512)
CUT = [[1024, "the KV cache holds 884 requests of 768 tokens"]]
STARTED = "2025-12-31T00:00:00+00:00"  # before what `measurement` makes
PLAIN = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=3)


def measured(batches: Sequence[int] = BATCHES, repeats: int = 2, **facts: Any) -> list[Measurement]:
    facts = {"steps": 50, **facts}
    made = [measurement(c, law(c) * (1 + 0.001 * i), repeat=i, **facts) for c in batches for i in range(repeats)]
    return [replace(m, environment=replace(m.environment, host="one"), run=whole_microseconds(m.run)) for m in made]


def whole_microseconds(run: Run) -> Run:
    """As an archive keeps times."""

    def columns(rows: Any) -> Any:
        names = [f.name for f in fields(rows) if f.name.endswith("_s")]
        return replace(rows, **{name: tuple(round(stamp, 6) for stamp in getattr(rows, name)) for name in names})

    start, stop = (round(stamp, 6) for stamp in run.window_s)
    return Run(columns(run.samples), columns(run.steps), (start, stop), run.failures, run.first_failure)


def watched(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The same with the readings of a GPU that is well: 400 W at a limit of 700 W."""
    ends = [m.run.window_s[1] for m in measurements]
    readings = [planted_telemetry(until_s=1.1 * end, interval_s=end / 32) for end in ends]
    return [replace(m, run=replace(m.run, telemetry=each)) for m, each in zip(measurements, readings)]


def archive(path: Path, measurements: Sequence[Measurement], planned=BATCHES, rows=table.ROWS) -> Path:
    """An archive of one run whose tests judged all claims. planned: concurrencies of its sweep."""
    series = by_series(measurements) or {"nothing": []}
    sweep = {"model": "opt-1.3b", "concurrencies": list(planned), "skipped": CUT}
    with Archive.open(path) as opened:
        opened.begin({"rows": [asdict(row) for row in rows]}, {"sweeps": dict.fromkeys(series, sweep)})
        for one in measurements:
            opened.add(one)
    began = json.loads(path.read_text("utf-8").partition("\n")[0])["started"]
    path.write_text(path.read_text("utf-8").replace(began, STARTED), "utf-8")
    reseal(path)
    return path


def spoilt(data: st.DataObject, whole: Path) -> str:
    """The text of an archive in which one plain value is any other."""
    changed = [json.loads(line) for line in whole.read_text("utf-8").splitlines()]
    number = data.draw(st.integers(0, len(changed) - 1))
    place = data.draw(st.sampled_from(leaves(changed[number], (number,))))
    put_into(changed, place, data.draw(PLAIN | st.sampled_from([0, -1, 1e308, 2**62])))
    return "".join(f"{json.dumps(line)}\n" for line in changed)


def put_into(inner: Any, place: Sequence[Any], value: object) -> None:
    for entry in place[:-1]:
        inner = inner[entry]
    inner[place[-1]] = value


def leaves(value: object, where: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Where plain values stand; of a list, the first alone."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else None
    return [where] if inner is None else [leaf for key, each in inner for leaf in leaves(each, (*where, key))]


def spoilt_csv(data: st.DataObject, text: str, most: int = 3) -> str:
    """The rows of a CSV as a JSON list, in which up to three values are any other."""
    header, *rows = [row.split(",") for row in text.splitlines()]
    results = [dict(zip(header, row)) for row in rows[: data.draw(st.integers(most, len(rows)))]]
    odd = PLAIN | st.sampled_from([0, 1, 1e-12, 1e12, 10**9, "1e3"])
    for _ in range(data.draw(st.integers(1, most))):
        data.draw(st.sampled_from(results))[data.draw(st.sampled_from(header))] = data.draw(odd)
    return json.dumps(results)
