"""A bit of an archive that is not as it was written: what is read has no other number, and what is missing is told."""

import random
from pathlib import Path

import pytest
from campaign import good_archive
from judged import ANSWERED, PLANTED

from pytest_slmserve.archive.store import Archive, read
from pytest_slmserve.schema.errors import BadArchive

FLIPPED = 600


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("skip_damaged", [False, True])
def test_no_flipped_bit_changes_a_number(tmp_path: Path, suffix: str, skip_damaged: bool) -> None:
    (tmp_path / "r.jsonl").write_bytes(good_archive(tmp_path))
    whole, path = read(tmp_path / "r.jsonl"), tmp_path / f"a.jsonl{suffix}"
    with Archive.open(path) as archive:
        archive.begin(whole.claims, {})
        for m in whole.measurements:
            archive.add(m)
    good, seed = path.read_bytes(), random.randrange(1 << 32)
    print(f"seed {seed}")
    for place in random.Random(seed).sample(range(8 * len(good)), FLIPPED):
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
