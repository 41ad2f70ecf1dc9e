"""Every reader of files, with a hundred hostile ones, under a limit of memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import hostile
import pytest
from judged import Case, command, pytest_run
from shipped import put

MEMORY = 2 << 30
LESS = 1 << 29  # what is to fill it is there sooner
WORDS = Callable[[Path], Sequence[str]]
GOOD = ("--slm-simulate", "--slm-models=opt-125m", "--slm-concurrency=1,4,16,64,256", "--slm-window=1")
POINTS = "def test_point(slm_point):\n    assert slm_point.measure()\n"
COMMANDS: dict[str, WORDS] = {
    "report": lambda path: ["report", str(path)],
    "report-json": lambda path: ["report", "--json", str(path)],
    "report-skip": lambda path: ["report", "--skip-damaged", str(path)],
    "report-list": lambda path: ["report", "--list", str(path)],
    "compare": lambda path: ["compare", str(path), str(path)],
    "merge": lambda path: ["report", str(path), "--merge", "out.jsonl"],
    "baseline": lambda path: ["compare", str(path), "--save", "--folder", "kept"],
    "advise": lambda path: ["advise", str(path)],
    "asv": lambda path: ["asv", "convert", str(path), "--into", "asv"],
    "external": lambda path: ["report", str(path), *COLUMNS],
    "pairs": lambda path: ["pairs", str(path), "--direction=higher"],
    "figures": lambda path: ["report", str(path), "--figures", "pictures"],
    "trace": lambda path: [*MEASURE, "--trace", str(path)],
    "lengths": lambda path: [*MEASURE, "--max-concurrency=1", "--lengths-from", str(path)],
}
MEASURE = ("measure", "--endpoint=http://127.0.0.1:9/v1/completions", "--model=m")
COLUMNS = ("--knob=load", "--throughput=rate", "--latency=wait_ms")
RESULTS = [{"load": load, "rate": 100.0 + load, "wait_ms": 5.0, "engines": 1 + load % 2} for load in range(1, 9)]
ROWS = [{"timestamp": at, "input_length": 8, "output_length": 4} for at in range(0, 20_000, 500)]
# Lines of what a reader takes that reads no archives; asv takes archives of real engines.
OWN = {"external": RESULTS, "trace": ROWS, "lengths": ROWS, "asv": []}
RUNS: dict[str, WORDS] = {
    "resume": lambda path: [*GOOD, f"--slm-resume={path}", "test_it.py"],
    "append": lambda path: [*GOOD, f"--slm-records={path}", "test_it.py"],
    "against": lambda path: [*GOOD, f"--slm-baseline={path}", "test_it.py"],
    "dataset": lambda path: [*GOOD, f"--slm-dataset={path}", "test_it.py"],
}
STATUSES = (0, 1, 4, 10)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An archive of a simulated sweep."""
    case = Case(tmp_path_factory.mktemp("good"))
    (case.folder / "test_it.py").write_text(POINTS, "utf-8")
    seen = case.fork(pytest_run([*GOOD, "--slm-repeats=1", "--slm-records=good.jsonl", "test_it.py"]))
    assert seen.status == 0, seen.text
    return (case.folder / "good.jsonl").read_bytes()


@pytest.fixture(scope="module")
def hostile_files(tmp_path_factory: pytest.TempPathFactory, good: bytes) -> list[Path]:
    """A hundred and more, some of them with a suffix of their own."""
    folder = tmp_path_factory.mktemp("files")
    changed = (*hostile.odd_values(good), *hostile.everywhere(good), *hostile.damaged(good))
    made = [(f"{name}.jsonl", data) for name, data in changed]
    for each, data in (*made, *hostile.packed(good)):
        (folder / each).write_bytes(data)
    return [*sorted(folder.iterdir()), *hostile.no_files(folder)]


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


def undrawn(work: Callable[[], int]) -> Callable[[], int]:
    """The same work with pictures that are specified and not drawn: V8, which draws them, does not survive a fork."""

    def worked() -> int:
        said = lambda spec, **_: json.dumps(json.loads(spec)).encode()  # noqa: E731
        sys.modules["vl_convert"] = SimpleNamespace(vegalite_to_png=said)  # type: ignore[assignment]
        return work()

    return worked


def plant(
    case: Case,
    words: WORDS,
    paths: Sequence[Path],
    run: Callable[[Sequence[str]], Callable[[], int]],
    memory: int = MEMORY,
) -> None:
    """Each file in turn; what went wrong is told of all of them."""
    (case.folder / "test_it.py").write_text(POINTS, "utf-8")
    if words is COMMANDS["asv"]:
        case.fork(command(["asv", "init", "--into", "asv"]))
    wrong = []
    for path in paths:
        there = len(path.name) < 256 and path.is_file() and path.stat().st_size < 1 << 30
        before = path.read_bytes() if there else None
        work = run(words(path))
        seen = case.fork(undrawn(work) if words is COMMANDS["figures"] else work, memory)
        try:
            assert " --help" not in seen.text, f"it is no use of the command: {seen.text}"
            case.judge("hostile files", seen, STATUSES)
        except AssertionError as error:
            wrong.append(f"== {path.name}: {error}")
        if before is not None:
            path.write_bytes(before)
    assert not wrong, "\n".join([f"{len(wrong)} of {len(paths)}", *wrong])


@pytest.mark.parametrize("reader", COMMANDS)
def test_a_command_with_some_hostile_files(case: Case, hostile_files: list[Path], reader: str) -> None:
    """Those that each reader meets differ from one to the next."""
    plant(case, COMMANDS[reader], hostile_files[list(COMMANDS).index(reader) :: 24], command, LESS)


@pytest.mark.parametrize("reader", OWN)
def test_a_command_with_some_files_of_what_it_takes(case: Case, good: bytes, reader: str) -> None:
    plant(case, COMMANDS[reader], read_by(reader, case.folder, good)[::14], command, LESS)


@pytest.mark.faults
@pytest.mark.parametrize("reader", COMMANDS)
def test_a_command_with_each_hostile_file(case: Case, good: bytes, hostile_files: list[Path], reader: str) -> None:
    plant(case, COMMANDS[reader], [*hostile_files, *read_by(reader, case.folder, good)], command)


def test_a_run_with_a_deep_dataset(case: Case, hostile_files: list[Path]) -> None:
    plant(case, RUNS["dataset"], [path for path in hostile_files if "deep" in path.name], pytest_run, LESS)


@pytest.mark.faults
@pytest.mark.parametrize(("reader", "step"), [("resume", 2), ("append", 6), ("against", 6), ("dataset", 6)])
def test_a_run_with_each_hostile_file(case: Case, hostile_files: list[Path], reader: str, step: int) -> None:
    plant(case, RUNS[reader], hostile_files[::step], pytest_run)


# What a gate reads, before its first engine

GATE = ("--slm-simulate", "--slm-gate", "--slm-models=opt-125m", "--slm-window=1", "--slm-records=g/r.jsonl")
WAIVER = {"endpoint": "throughput", "model": "*", "device": "*", "owner": "A", "reason": "b", "until": "2999-12-31"}
NO_WAIVERS = {
    "empty": b"",
    "number": b"5",
    "object": b"{}",
    "null": b"null",
    "nan": b"[NaN]",
    "deep": b"[" * 200_000,
    "bytes": b"\xff\xfe\x00",
    "rows-null": b"[null]",
    "unknown-field": json.dumps([WAIVER | {"x": 1}]).encode(),
    "no-owner": json.dumps([{k: v for k, v in WAIVER.items() if k != "owner"}]).encode(),
    "blank-owner": json.dumps([WAIVER | {"owner": " "}]).encode(),
    "no-day": json.dumps([WAIVER | {"until": "soon"}]).encode(),
    "day-number": json.dumps([WAIVER | {"until": 20991231}]).encode(),
    "unknown-endpoint": json.dumps([WAIVER | {"endpoint": "speed"}]).encode(),
    "surrogate": json.dumps([WAIVER | {"endpoint": "\ud800"}]).encode(),
    "large-number": json.dumps([10**400]).encode(),
    "day-far": json.dumps([WAIVER | {"until": "99999-12-31"}]).encode(),
}
# What is written there is no calibration.
ENTRY = {"model": "m", "loads": [1], "platform": "cpu", "gpu_name": None, "driver": None, "margin": 0.03, "pairs": 12}
RATES = {"fail": 0.0, "passed": 0.9, "pairs": 4.0}
WHOLE = ENTRY | {"measured_at": "2026", "noise": {"names": ["a"], "costs": [[0.1]]}, "unchanged": RATES, "worse": {}}
NO_CALIBRATIONS = {
    "empty": b"",
    "number": b"5",
    "object": b'{"a": 1}',
    "nan": b"[NaN]",
    "deep": b"[" * 200_000,
    "bytes": b"\xff\xfe\x00",
    "rows-null": b"[null]",
    "no-noise": json.dumps([ENTRY]).encode(),
    **{
        f"{name}-{number}": json.dumps([WHOLE | {name: value}]).encode()
        for name in ("loads", "margin", "pairs", "noise", "unchanged", "worse", "measured_at")
        for number, value in enumerate((None, {"a": 1}, float("nan"), 10**400))
        if (name, value) != ("worse", {"a": 1})
    },
    "worse-number": json.dumps([WHOLE | {"worse": {"a": 1}}]).encode(),
}
PLACES = {"waivers": NO_WAIVERS, "calibrations": NO_CALIBRATIONS}
GATE_FILES = [(kind, name) for kind, texts in PLACES.items() for name in texts]


def gate(case: Case, kind: str, name: str) -> None:
    """4 before an engine starts: a workflow takes 1 for a candidate that fails."""
    put(case.folder, "test_gate")
    (case.folder / "g").mkdir()
    path = case.folder / ("w.json" if kind == "waivers" else "g/calibration.json")
    if name == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(PLACES[kind][name])
    more = ["--override-ini=slm_waivers=w.json"] if kind == "waivers" else []
    case.judge(
        kind,
        case.fork(pytest_run([*GATE, *more, "test_gate_shipped.py"]), memory=MEMORY),
        (4,),
        said="ERROR: slmserve: ",
    )


@pytest.mark.parametrize(("kind", "name"), [*GATE_FILES[::8], ("waivers", "pipe"), ("calibrations", "pipe")])
def test_some_files_of_a_gate(case: Case, kind: str, name: str) -> None:
    gate(case, kind, name)


@pytest.mark.faults
@pytest.mark.parametrize(("kind", "name"), GATE_FILES)
def test_each_file_of_a_gate(case: Case, kind: str, name: str) -> None:
    gate(case, kind, name)
