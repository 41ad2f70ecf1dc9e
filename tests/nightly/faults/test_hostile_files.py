"""Every reader of files, with a hundred hostile ones, under a limit of memory."""

import json
import os
from pathlib import Path

import hostile
import pytest
from campaign import COMMANDS, MEMORY, OF_A_MODEL, good_archive, hostile_files, plan_model, read_files
from judged import Case, pytest_run
from shipped import put

RESULTS = [{"load": load, "rate": 100.0 + load, "wait_ms": 5.0, "engines": 1 + load % 2} for load in range(1, 9)]
ROWS = [{"timestamp": at, "input_length": 8, "output_length": 4} for at in range(0, 20_000, 500)]
# Lines of what a reader takes that reads no archives; asv takes archives of real engines.
OWN = {"external": RESULTS, "trace": ROWS, "lengths": ROWS, "asv": []}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return good_archive(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, good: bytes) -> list[Path]:
    return hostile_files(tmp_path_factory.mktemp("files"), good)


def read_by(reader: str, folder: Path, archive: bytes) -> list[Path]:
    """A good file of what the reader takes, and some with something odd; none of one that takes any archive."""
    if reader not in OWN:
        return []
    lines = b"".join(json.dumps(line).encode() + b"\n" for line in OWN[reader])
    good = lines or archive.replace(b'"vllm":null', b'"vllm":"0.26.0"')
    made = [("good", good), *([] if lines else hostile.everywhere(good)), *hostile.odd_values(good)]
    for name, data in made:
        (folder / f"{name}.own").write_bytes(data)
    return [folder / f"{name}.own" for name, _ in made]


@pytest.mark.parametrize("reader", COMMANDS)
def test_command_survives_hostile_file(case: Case, good: bytes, files: list[Path], reader: str) -> None:
    read_files(case, reader, [*files, *read_by(reader, case.folder, good)])


@pytest.mark.parametrize(("reader", "step"), [("resume", 2), ("append", 6), ("against", 6), ("dataset", 6)])
def test_run_survives_hostile_file(case: Case, files: list[Path], reader: str, step: int) -> None:
    read_files(case, reader, [path for at, path in enumerate(files) if at % step == 0 or "deep" in path.name])


@pytest.mark.parametrize("entry", OF_A_MODEL)
def test_plan_survives_hostile_model_entry(case: Case, entry: str) -> None:
    """A few of the values: tests/unit/plan has all of them, without a run."""
    plan_model(case, entry, hostile.ODD[1 + len(entry) % 6 :: 6])


# What a gate reads, before its first engine

GATE = ("--slm-simulate", "--slm-gate", "--slm-models=opt-125m", "--slm-window=1", "--slm-records=g/r.jsonl")
WAIVER = {"endpoint": "throughput", "model": "*", "device": "*", "owner": "A", "reason": "b", "until": "2999-12-31"}
NO_WAIVERS = {
    "empty": b"", "number": b"5", "object": b"{}", "null": b"null", "nan": b"[NaN]", "deep": b"[" * 200_000,
    "bytes": b"\xff\xfe\x00", "rows-null": b"[null]", "large-number": json.dumps([10**400]).encode(),
    **{
        name: json.dumps([{k: v for k, v in (WAIVER | odd).items() if v is not None}]).encode()
        for name, odd in {
            "unknown-field": {"x": 1}, "no-owner": {"owner": None}, "blank-owner": {"owner": " "},
            "no-day": {"until": "soon"}, "day-number": {"until": 20991231}, "day-far": {"until": "99999-12-31"},
            "unknown-endpoint": {"endpoint": "speed"}, "surrogate": {"endpoint": "\ud800"},
        }.items()
    },
}  # fmt: skip
# What is written there is no calibration.
ENTRY = {"model": "m", "loads": [1], "platform": "cpu", "gpu_name": None, "driver": None, "margin": 0.03, "pairs": 12}
RATES = {"fail": 0.0, "passed": 0.9, "pairs": 4.0}
WHOLE = ENTRY | {"measured_at": "2026", "noise": {"names": ["a"], "costs": [[0.1]]}, "unchanged": RATES, "worse": {}}
NO_CALIBRATIONS = {
    "empty": b"", "number": b"5", "object": b'{"a": 1}', "nan": b"[NaN]", "deep": b"[" * 200_000,
    "bytes": b"\xff\xfe\x00", "rows-null": b"[null]", "no-noise": json.dumps([ENTRY]).encode(),
    **{
        f"{name}-{number}": json.dumps([WHOLE | {name: value}]).encode()
        for name in ("loads", "margin", "pairs", "noise", "unchanged", "worse", "measured_at")
        for number, value in enumerate((None, {"a": 1}, float("nan"), 10**400))
        if (name, value) != ("worse", {"a": 1})
    }, "worse-number": json.dumps([WHOLE | {"worse": {"a": 1}}]).encode(),
}  # fmt: skip
PLACES = {"waivers": NO_WAIVERS, "calibrations": NO_CALIBRATIONS}
GATE_FILES = [(kind, name) for kind, texts in PLACES.items() for name in texts]


@pytest.mark.parametrize(("kind", "name"), [*GATE_FILES, ("waivers", "pipe"), ("calibrations", "pipe")])
def test_hostile_gate_file_is_refused(case: Case, kind: str, name: str) -> None:
    """The status is 4 before an engine starts: a workflow takes 1 for a candidate that fails."""
    put(case.folder, "test_gate")
    (case.folder / "g").mkdir()
    path = case.folder / ("w.json" if kind == "waivers" else "g/calibration.json")
    if name == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(PLACES[kind][name])
    more = ["--override-ini=slm_waivers=w.json"] if kind == "waivers" else []
    seen = case.fork(pytest_run([*GATE, *more, "test_gate_shipped.py"]), memory=MEMORY)
    case.judge(kind, seen, (4,), said="ERROR: slmserve: ")
