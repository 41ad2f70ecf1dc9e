"""However an archive is packed and wherever it is damaged, its whole lines come one after another, in little memory."""

import io
import random
import tracemalloc
from itertools import accumulate, chain
from pathlib import Path

import pytest
from archives import PACK, example, write
from hypothesis import example as case, given, strategies as st
from refusals import refused

from pytest_slmserve.archive import lines
from pytest_slmserve.archive.lines import ArchiveLines, BadArchive
from pytest_slmserve.archive.store import read

PACKED = pytest.mark.parametrize("suffix", [".gz", ".xz"])
SESSION = lines.FIRST + b',"x":1}'
LINE = st.binary(max_size=9).map(lambda raw: raw.replace(b"\n", b""))


def found(suffix: str, data: bytes) -> tuple[list[bytes | None], int]:
    """The lines of a file with these bytes, and how many bytes are before a torn end."""
    there = ArchiveLines(Path(f"a{suffix}"), io.BytesIO(data))
    each = list(there)
    assert (there.count, there.size) == (len(each), len(data))
    return each, there.whole


@case(".gz", [[b""], [b"x", b""]], 0, 9)
@given(st.sampled_from([*PACK]), st.lists(st.lists(LINE, min_size=1, max_size=3), max_size=4), st.integers(0, 200),
       st.integers(1, 40))  # fmt: skip
def test_whole_lines_survive_any_cut(suffix, writes, cut, held):
    """A piece that has more than it may wait with tells its lines as they come; any other only when it is whole."""
    pieces = [PACK[suffix](b"".join(line + b"\n" for line in each)) for each in [[SESSION], *writes]]
    data = b"".join(pieces)
    torn = data[: max(len(data) - cut, len(pieces[0]))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "HELD", held)
        each, whole = found(suffix, torn)
    if suffix == ".jsonl":
        assert each == torn[: torn.rfind(b"\n")].split(b"\n") and whole == torn.rfind(b"\n") + 1
        return
    ends = [end for end in accumulate(map(len, pieces)) if end <= len(torn)]
    assert each == [SESSION, *chain.from_iterable(writes)][: len(each)] and whole == ends[-1]
    assert len(each) >= 1 + sum(map(len, writes[: len(ends) - 1]))


@PACKED
def test_damage_costs_only_its_piece(suffix, monkeypatch):
    pieces = [PACK[suffix](b"%d\n" % n + random.Random(n).randbytes(300).hex().encode() + b"\n") for n in range(4)]
    pieces[1] = pieces[1][:60] + b"\0\0\0\0" + pieces[1][64:]
    monkeypatch.setattr(lines, "_SEARCHED", 7)
    each, whole = found(suffix, PACK[suffix](SESSION + b"\n") + b"".join(pieces))
    assert [line if line is None else line[:1] for line in each[:2]] == [SESSION[:1], b"0"] and each[3] is None
    assert (each[4], each[6], len(each)) == (b"2", b"3", 8)
    assert whole == len(PACK[suffix](SESSION + b"\n") + b"".join(pieces))


@PACKED
def test_packed_file_takes_little_memory(tmp_path, monkeypatch, suffix):
    """It is packed by hand, as one piece; one line without an end is refused."""
    monkeypatch.setattr(lines, "HELD", 1 << 16)
    monkeypatch.setattr(lines, "LONGEST_LINE", 1 << 20)
    text = write(tmp_path / "a.jsonl", example(1), example(2)).read_bytes()
    path = tmp_path / f"b.jsonl{suffix}"
    path.write_bytes(PACK[suffix](text.replace(b"\n", b"\n" * 100, 1) + (b" " * 10_000 + b"\n") * 3000))
    tracemalloc.start()
    assert [m.load.concurrency for m in read(path).measurements] == [1, 2]
    assert tracemalloc.get_traced_memory()[1] < 12 << 20, "of 30 MB"
    tracemalloc.stop()
    path.write_bytes(PACK[suffix](SESSION + b" " * (1 << 20)))
    with refused(path, "memory", kind=BadArchive):
        read(path)
    path.write_bytes(PACK[suffix](b" \n" * 9))
    with refused(path, "not a results file", kind=BadArchive):
        read(path)
