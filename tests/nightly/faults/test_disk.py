"""The archive is removed, replaced or shortened in the middle of a run, or the disk is full; something lies where a
file is to be written; any call on a file fails; a bit is flipped: nothing is lost or waited for, nothing that others
own is written, and no number is another."""

import os
import random
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign import CHANGES, LINKS, MADE, WRITERS, change_disk, good_archive, link_at, places_of_writes, run_four
from judged import ANSWERED, PLANTED, Case
from nth_call import ERRORS, failures

from pytest_slmserve.archive.store import Archive, read
from pytest_slmserve.run import executor
from pytest_slmserve.schema.errors import BadArchive

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz")
FEW_BYTES = 60_000  # more than what stands before the first measurement, and than one or two of them


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("planted", [name for name in CHANGES if name != "nothing"])
def test_disk_change_loses_no_measurement(case: Case, planted: str, suffix: str) -> None:
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
def test_little_disk_space_loses_nothing(case: Case, small: Path, suffix: str, left: int) -> None:
    """left: bytes, in pages."""
    told = os.statvfs(small)
    (small / "other").write_bytes(bytes(told.f_bavail * told.f_bsize - left - 4096))  # 4096: the archive's folder entry
    change_disk(case, str(small / f"r{suffix}"), (0, 1, 4))


def test_full_disk_ends_measuring(case: Case) -> None:
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
    made = seen.text.count(MADE)
    case.judge("disk", seen, (1,), "and no second file can be written", kept=made)
    assert 0 < made < 3 and seen.text.count("MEASURES") == made + 1, seen.text
    assert [path.name for path in (case.folder / "kept").iterdir()] == ["r.jsonl"]


def test_full_disk_is_told_early(case: Case) -> None:
    case.records = "none"
    case.judge("disk", case.fork(run_four(case, "/dev/full", "nothing")), (4,), "/dev/full")


@pytest.mark.parametrize("writer", WRITERS)
def test_linked_files_keep_their_content(case: Case, writer: str) -> None:
    fewest = {"gate": 6, "calibration": 4, "torn": 4, "figures": 1, "asv": 3, "asv-init": 2}
    names, wrong = places_of_writes(case, writer), []
    assert len(names) >= fewest.get(writer, 1), names
    for name in names:
        for kind in LINKS:
            try:
                link_at(case, writer, name, kind)
            except AssertionError as error:
                wrong.append(f"== {kind} at {name}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler is here")
@pytest.mark.parametrize(("writer", "error"), [
    *(("four", error) for error in ERRORS), *((writer, "EIO") for writer in WRITERS if writer != "four"),
])  # fmt: skip
def test_failing_write_call_loses_nothing(tmp_path, writer: str, error: str) -> None:
    fewest = {"four": 40, "torn": 40, "gate": 60, "calibration": 60, "asv-init": 4}
    planted, wrong = failures(tmp_path, writer, error)
    PLANTED["n-th call"] += planted
    ANSWERED["n-th call"] += planted - len(wrong)
    assert planted >= fewest.get(writer, 5) and not wrong, "\n".join([f"{len(wrong)} of {planted}", *wrong])


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("skip_damaged", [False, True])
def test_flipped_bit_changes_no_number(tmp_path: Path, suffix: str, skip_damaged: bool) -> None:
    flipped = 600
    (tmp_path / "r.jsonl").write_bytes(good_archive(tmp_path))
    whole, path = read(tmp_path / "r.jsonl"), tmp_path / f"a.jsonl{suffix}"
    with Archive.open(path) as archive:
        archive.begin(whole.claims, {})
        for m in whole.measurements:
            archive.add(m)
    good, seed = path.read_bytes(), random.randrange(1 << 32)
    print(f"seed {seed}")
    for place in random.Random(seed).sample(range(8 * len(good)), flipped):
        PLANTED["bit flips"] += 1
        path.write_bytes(good[: place // 8] + bytes([good[place // 8] ^ 1 << place % 8]) + good[place // 8 + 1 :])
        try:
            found = read(path, skip_damaged=skip_damaged)
        except BadArchive as error:
            assert str(path) in error.problem or "newer release" in error.problem
        else:
            there = [m for m in whole.measurements if m in found.measurements]
            assert [*found.measurements] == there and (found.notes or there == [*whole.measurements])
        ANSWERED["bit flips"] += 1
