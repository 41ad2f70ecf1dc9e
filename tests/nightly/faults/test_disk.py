"""The archive is removed, replaced or shortened in the middle of a run, or the disk is full: nothing is lost."""

from __future__ import annotations

import os
import resource
import subprocess
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from judged import Case, pytest_run

from pytest_slmserve.run import executor

# The fault comes after the second measurement of four, from the run's own test: always at the same place.
POINTS = """
    import os, pathlib, shutil, pytest

    def truncated(path):
        os.truncate(path, path.stat().st_size // 2)

    def emptied(path):
        os.truncate(path, 0)

    def removed(path):
        path.unlink()

    def folder_removed(path):
        shutil.rmtree(path.parent)

    def a_folder(path):
        path.unlink()
        path.mkdir()

    def a_link(path):
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("nowhere")

    def a_pipe(path):
        path.unlink()
        os.mkfifo(path)

    def another_file(path):
        path.unlink()
        path.write_text("not ours")

    def a_copy(path):
        shutil.copy(path, "copy")
        os.replace("copy", path)

    def folder_is_a_file(path):
        shutil.rmtree(path.parent)
        path.parent.write_text("")

    @pytest.mark.slm(points=[("opt-125m", load) for load in (1, 2, 4, 8)])
    def test_point(slm_point, request, pytestconfig):
        assert slm_point.measure()
        print("MEASURED")
        if "-4" in request.node.name and (name := os.environ.get("PLANTED")):
            globals()[name](pathlib.Path(pytestconfig.getoption("--slm-records")))
"""
PLACES = (
    "truncated", "emptied", "removed", "folder_removed", "a_folder", "a_link", "a_pipe", "another_file", "a_copy",
    "folder_is_a_file",
)  # fmt: skip
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz")
SECOND = "pytest-slmserve-rescued-*.jsonl"
WORDS = ("-s", "--slm-simulate", "--slm-models=opt-125m", "--slm-repeats=1", "--slm-window=1", "test_it.py")


def judge(case: Case, records: str, statuses: tuple[int, ...], planted: str = "") -> None:
    """A run of four points, whose measurements are in the archive, or in the second file that it names."""
    (case.folder / "test_it.py").write_text(textwrap.dedent(POINTS), "utf-8")
    seen = case.fork(partial(run, records, planted))
    made = seen.text.count("MEASURED")
    second = next(case.temporary.glob(SECOND), None)
    case.records = str(second or records)
    said = rf"cannot write to [^;]*;\s+all\s+measurements[^$]*archive: {second}"
    case.judge("disk", seen, statuses, said if second else "", kept=made, may_stay=[SECOND])
    assert made == (0 if seen.status == 4 else 4), seen.text
    assert bool(second) == (seen.status == 1), seen.text
    if second:
        again = case.fork(partial(run, "again.jsonl", "", f"--slm-resume={second}"))
        case.records = "again.jsonl"
        case.judge("disk", again, (0,), "4 measurements were reused", may_stay=[SECOND])


def run(records: str, planted: str, *more: str) -> int:
    os.environ["PLANTED"] = planted
    return pytest_run([*WORDS, f"--slm-records={records}", *more])()


FEW_BYTES = 50_000  # more than what stands before the first measurement, and than one or two of them
FAST = [("removed", ".jsonl"), ("truncated", ".jsonl.xz"), ("a_pipe", ".jsonl.gz")]


@pytest.mark.parametrize(("planted", "suffix"), FAST)
def test_an_archive_that_changes_in_the_middle(case: Case, planted: str, suffix: str) -> None:
    judge(case, f"kept/r{suffix}", (1,), planted)


@pytest.mark.faults
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("planted", PLACES)
def test_each_change_in_the_middle(case: Case, planted: str, suffix: str) -> None:
    judge(case, f"kept/r{suffix}", (1,), planted)


@pytest.fixture
def small(case: Case, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder on a disk of its own with so many bytes."""
    folder = case.folder / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "none", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a disk of its own cannot be mounted: needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("small", [8192], indirect=True)
def test_a_small_disk(case: Case, small: Path) -> None:
    judge(case, str(small / "r.jsonl"), (1, 4))


@pytest.mark.faults
@pytest.mark.parametrize("left", [0, 4096, 8192, 12288, 16384, 24576, 49152, 1 << 20])
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("small", [2 << 20], indirect=True)
def test_each_room_that_is_left(case: Case, small: Path, suffix: str, left: int) -> None:
    """left: bytes, in pages."""
    told = os.statvfs(small)
    (small / "other").write_bytes(bytes(told.f_bavail * told.f_bsize - left - 4096))  # 4096: the archive's folder entry
    judge(case, str(small / f"r{suffix}"), (0, 1, 4))


def test_no_room_anywhere(case: Case) -> None:
    """What no file holds ends the measuring, and no attempt is left."""
    (case.folder / "test_it.py").write_text(textwrap.dedent(POINTS), "utf-8")

    def work() -> int:
        os.environ["HOME"] = str(case.temporary)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FEW_BYTES, FEW_BYTES))
        measure = executor.measure_case
        executor.measure_case = lambda *of: print("MEASURES") or measure(*of)
        return run("kept/r.jsonl", "")

    seen = case.fork(work)
    case.records = "kept/r.jsonl"
    made = seen.text.count("MEASURED")
    case.judge("disk", seen, (1,), "and no second file can be written", kept=made)
    assert 0 < made < 3 and seen.text.count("MEASURES") == made + 1, seen.text
    assert [path.name for path in (case.folder / "kept").iterdir()] == ["r.jsonl"]


def test_a_full_disk_is_said_before_the_first_measurement(case: Case) -> None:
    (case.folder / "test_it.py").write_text("def test_point(slm_point): assert slm_point.measure()\n", "utf-8")
    case.records = "none"
    case.judge("disk", case.fork(partial(run, "/dev/full", "")), (4,), "/dev/full")
