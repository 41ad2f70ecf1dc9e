"""The archive is removed, replaced or shortened in the middle of a run, or the disk is full: nothing is lost."""

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign import CHANGES, change_disk, run_four
from judged import Case

from pytest_slmserve.run import executor

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz")
FEW_BYTES = 60_000  # more than what stands before the first measurement, and than one or two of them


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("planted", [name for name in CHANGES if name != "nothing"])
def test_each_change_in_the_middle(case: Case, planted: str, suffix: str) -> None:
    change_disk(case, f"kept/r{suffix}", (1,), planted)


@pytest.fixture
def small(case: Case) -> Iterator[Path]:
    """A folder on a disk of its own."""
    folder = case.folder / "small"
    folder.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={2 << 20}", "none", str(folder)]
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a disk of its own cannot be mounted: needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("left", [0, 4096, 8192, 12288, 16384, 24576, 49152, 1 << 20])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_each_room_that_is_left(case: Case, small: Path, suffix: str, left: int) -> None:
    """left: bytes, in pages."""
    told = os.statvfs(small)
    (small / "other").write_bytes(bytes(told.f_bavail * told.f_bsize - left - 4096))  # 4096: the archive's folder entry
    change_disk(case, str(small / f"r{suffix}"), (0, 1, 4))


def test_no_room_anywhere(case: Case) -> None:
    """What no file holds ends the measuring, and no attempt is left."""
    run = run_four(case, "kept/r.jsonl", "nothing")

    def work() -> int:
        os.environ["HOME"] = str(case.temporary)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FEW_BYTES, FEW_BYTES))
        measure = executor.measure_case
        executor.measure_case = lambda *of: print("MEASURES") or measure(*of)
        return run()

    seen = case.fork(work)
    case.records = "kept/r.jsonl"
    made = seen.text.count("MEASURED")
    case.judge("disk", seen, (1,), "and no second file can be written", kept=made)
    assert 0 < made < 3 and seen.text.count("MEASURES") == made + 1, seen.text
    assert [path.name for path in (case.folder / "kept").iterdir()] == ["r.jsonl"]


def test_a_full_disk_is_said_before_the_first_measurement(case: Case) -> None:
    case.records = "none"
    case.judge("disk", case.fork(run_four(case, "/dev/full", "nothing")), (4,), "/dev/full")
