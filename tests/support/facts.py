"""What a sentence says, whatever its words: the numbers in it."""

from __future__ import annotations

import re


def numbers(text: str) -> list[float]:
    """Numbers in the order of the text; those within a name ("opt-1.3b", "H200") are none."""
    return [float(found.replace(",", "")) for found in re.findall(r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?", text)]
