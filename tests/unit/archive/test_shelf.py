"""A session that measures for days, or a report of very many records, has the columns of few runs in memory; what is
computed from them is the same."""

import tempfile
import tracemalloc
from dataclasses import replace

import pytest
from archives import example
from interfaces import small_workload
from measured import measure
from refusals import refused

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.archive import shelf, store
from pytest_slmserve.archive.codec import measurement_line, run_of_record
from pytest_slmserve.archive.lines import BadArchive, facts_of, line_of
from pytest_slmserve.archive.shelf import Shelf
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.records import COLUMNS, Environment, Run
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec


def in_memory(run: Run) -> bool:
    return any(name in vars(run) for name in COLUMNS)


def put(many: Shelf, *concurrencies: int) -> list[Run]:
    runs = []
    for concurrency in concurrencies:
        line = line_of(measurement_line(example(concurrency)))
        runs.append(run_of_record(facts_of(line)))
        many.put(runs[-1], line)
    return runs


def test_shelved_columns_return_unchanged(monkeypatch):
    few, expected = Shelf(1), put(Shelf(), 1, 2, 4)
    runs = put(few, 1)
    rate, trace = window.output_tokens_per_s(runs[0]), window.window_trace(runs[0])
    runs += put(few, 2, 4)
    assert [in_memory(run) for run in runs] == [False, False, True]
    assert window.output_tokens_per_s(runs[0]) == rate and not in_memory(runs[0]), "a figure needs no columns"
    assert [run.window_s for run in runs] == [run.window_s for run in expected] and not in_memory(runs[0])
    assert window.window_trace(runs[0]) == trace and in_memory(runs[0]) and not in_memory(runs[2])
    assert runs == expected and replace(runs[1], failures=3).samples == expected[1].samples
    with pytest.raises(AttributeError, match="a run has no 'sample'"):
        print(runs[0].sample)
    few._file.close()

    def full(**how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shelf.tempfile, "TemporaryFile", full)
    few = Shelf(1)
    runs = put(few, 1, 2)
    assert runs == put(Shelf(), 1, 2), "packed in memory"
    monkeypatch.setattr(shelf.tempfile, "TemporaryFile", tempfile.TemporaryFile)
    monkeypatch.undo()
    runs += put(few, 4, 8)
    assert not in_memory(runs[2])
    few._file.truncate(0)
    with refused("a temporary file", kind=BadArchive, hint="slmserve report"):
        print(runs[2].samples)
    few._file.close()


def test_session_memory_stays_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(shelf, "SHELF", Shelf(1))
    monkeypatch.setattr(store, "SHELF", shelf.SHELF)
    engine, here = SimulatedEngine(EngineSpec("opt-125m", platform="simulated")), Environment(platform="simulated")
    one = measure(engine, small_workload(), ClosedLoop(8, window_s=0.1), here)
    tracemalloc.start()
    columns = run_of_record(facts_of(line_of(measurement_line(one))))
    large, used = tracemalloc.get_traced_memory()[0], []
    with Archive.open(tmp_path / "a.jsonl") as archive:
        kept = []
        for number in range(8):
            kept.append(archive.add(replace(one, measured_at=f"2026-01-01T00:00:{number:02d}+00:00")))
            used.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sum(in_memory(m.run) for m in kept) == 1 and kept[0].run == columns
    assert used[-1] - used[2] < 5 * 0.1 * large, "of the columns of each"
    shelf.SHELF._file.close()
