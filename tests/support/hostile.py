"""Hostile files: a good one changed in a hundred ways, and paths that are no file at all."""

import gzip
import json
import lzma
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sealed_lines import resealed

ODD: list[Any] = [
    None, True, -1, 0, 10**9, 10**18, 10**400, -1e308, 1e-320, float("nan"), float("inf"), "", "x" * 5000,
    "\x1b]0;owned\x07\x1b[2J", "\ud800", "../../etc/passwd", "2026-13-45", [], {}, [[]], [None] * 3, {"a": {"b": []}},
    "=cmd()", "<script>", "%s%n", "a/" * 200,
]  # fmt: skip
OPTIONS = (  # what an option is given
    "", " ", "0", "-1", "1e999", "nan", "9" * 400, "1000000000", "999999999999", "a" * 5000, "\x1b]0;owned\x07\x1b[2J",
    "é\u202e", "\udc80", "[" * 5000, '{"a": {"b": [1]}}', "../../../etc/passwd", "/dev/zero", "/proc/self/mem", "a=b=c",
    "-x", "--slm-gpu", "%s%n", "1,2,4", "http://u:p@h/v1", "true", ",",
)  # fmt: skip
MADE = 76  # changes of one value each; with what is no archive at all, a hundred


def odd_values(good: bytes, count: int = MADE) -> Iterator[tuple[str, bytes]]:
    """One value of one line of JSON at a time becomes something odd, or is not there."""
    rng = random.Random(len(good))
    lines = [json.loads(line) for line in good.splitlines()]
    sealed = b'"crc32"' in good
    for number in range(count):
        changed = json.loads(json.dumps(lines))
        place, name = rng.choice([*places(changed[number % len(changed)])])
        odd = ODD[number % len(ODD)]
        if number % 7 == 6:
            del place[name]
        else:
            place[name] = odd
        texts = (json.dumps(line) for line in changed)
        yield f"value-{number}", b"".join((resealed(text) if sealed else text).encode() + b"\n" for text in texts)


def everywhere(good: bytes) -> Iterator[tuple[str, bytes]]:
    """What reaches names of files and the screen, or is divided by, becomes odd in all lines."""
    text, names = (
        good.decode(),
        {"terminal": "\x1b]0;owned\x07\x1b[2Jopt-125m", "long": "x" * 5000, "surrogate": "\ud800"},
    )
    changed = {f"model-{name}": text.replace('"opt-125m"', json.dumps(odd)) for name, odd in names.items()}
    for count in ("0", "-1"):
        changed[f"tokens{count}"] = re.sub(r'"(mean_(prompt|output)_tokens)":[\d.]+', rf'"\1":{count}', text)
    for name, lines in changed.items():
        yield name, "".join(f"{resealed(line)}\n" for line in lines.splitlines()).encode()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each place of a value within others, as its container and its key; of a list the first and the last."""
    if isinstance(value, (dict, list)) and value:
        for key in list(value) if isinstance(value, dict) else sorted({0, len(value) - 1}):
            yield value, key
            yield from places(value[key])


def damaged(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Bytes that are no text of ours, or only nearly."""
    half = len(good) // 2
    lines = good.splitlines(keepends=True)
    yield from {
        "empty": b"", "blank": b"\n" * 1000, "random": random.Random(1).randbytes(10_000), "cut": good[:half],
        "flipped": good[:half] + bytes([good[half] ^ 0xFF]) + good[half + 1 :],
        "zeros-within": good[:half] + b"\0" * 100 + good[half:], "zeros": b"\0" * 100_000,
        "bom": b"\xef\xbb\xbf" + good, "utf-16": good.decode().encode("utf-16"),
        "latin-1": good.replace(b"opt", b"\xe9\xe8"), "returns": good.replace(b"\n", b"\r\n"),
        "backwards": b"".join(reversed(lines)), "twice": good * 2, "without-its-first": b"".join(lines[1:]),
        "deep": b"[" * 200_000 + b"\n", "deep-object": b'{"kind":' * 100_000 + b"\n",
        "long": b'{"kind":"session","x":"' + b"x" * 20_000_000 + b'"}\n', "numbers": b"1\n2\n3\n", "text": b'"a"\n',
        "list": b"[1, 2, 3]\n", "csv": b'a,b,c\n1,2\n,,,,\n"\n',
        "xml": b"<?xml version='1.0'?><!DOCTYPE a [<!ENTITY b 'b'>]><a>&b;</a>",
    }.items()  # fmt: skip


def packed(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Files with a suffix of their own. A bomb of 3 GB is 96 times the same piece."""
    piece = b'{"kind":"session"' + b" " * (1 << 25) + b"}\n"
    bomb = gzip.compress(b'{"kind":"session"' + b" " * (1 << 21)) + gzip.compress(piece) * 96
    yield from {
        "good.gz": gzip.compress(good), "named.gz": good, "named.xz": good, "cut.gz": gzip.compress(good)[:-20],
        "cut.xz": lzma.compress(good)[:-20], "bomb.gz": bomb, "bomb.xz": lzma.compress(piece) * 96,
        "trailing.gz": gzip.compress(good) + b"PK\x03\x04" * 100,
    }.items()  # fmt: skip


def no_files(folder: Path) -> Iterator[Path]:
    """Paths at which nothing can be read to its end."""
    made = [folder / f"{name}.jsonl" for name in ("pipe", "folder", "nowhere", "round", "sparse")]
    pipe, directory, nowhere, circle, sparse = made
    os.mkfifo(pipe)
    directory.mkdir()
    nowhere.symlink_to(folder / "missing")
    circle.symlink_to(circle)
    sparse.touch()
    os.truncate(sparse, 1 << 40)
    yield from (*made, *(Path("/dev") / name for name in ("zero", "full", "urandom", "null")), folder / ("n" * 300))
