"""Prometheus' text exposition format, as servers and exporters show their metrics on a page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_NAME, _TEXT = "[a-zA-Z_][a-zA-Z0-9_]*", r'(?:[^"\\]|\\[\\"n])*'
_LABEL = rf'[ \t]*{_NAME}[ \t]*=[ \t]*"{_TEXT}"[ \t]*'
_LABELS = rf"\{{((?:{_LABEL},)*(?:{_LABEL}|[ \t]*))\}}"
_SAMPLE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:[ \t]*{_LABELS}[ \t]*|[ \t]+)(\S+)(?:[ \t]+-?[0-9]+)?")
_NAME_AND_TEXT = re.compile(rf'({_NAME})[ \t]*=[ \t]*"({_TEXT})"')
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One line. An integer stays one: a float cannot tell DCGM's blanks apart."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(page: str) -> list[Sample]:
    """The samples of a page, without comments and times. Raises ValueError for a line that is not of the format."""
    lines = ((number, line.strip(" \t\r")) for number, line in enumerate(page.split("\n"), 1))
    return [_sample(number, line) for number, line in lines if line and not line.startswith("#")]


def _sample(number: int, line: str) -> Sample:
    found = _SAMPLE.fullmatch(line)
    try:
        if found:
            name, labels, value = found.groups(default="")
            return Sample(name, _labels(labels), int(value) if _INTEGER.fullmatch(value) else float(value))
    except ValueError:
        pass
    raise ValueError(f"line {number} of the page is not in Prometheus' format: {line[:60]!r}")


def _labels(text: str) -> dict[str, str]:
    pairs = _NAME_AND_TEXT.findall(text)
    return {name: re.sub(r"\\(.)", lambda e: "\n" if e[1] == "n" else e[1], value) for name, value in pairs}
