"""What a sentence tells, whatever its words are."""

import re


def numbers(text: str) -> list[float]:
    """Numbers in the order of the text; those within a name ("opt-1.3b", "H200") are none."""
    return [float(found.replace(",", "")) for found in re.findall(r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?", text)]


def tells(text: str, *facts: object) -> bool:
    """Whether each fact (a number, a name, an option) stands in the text, and not as a part of a longer one."""
    return all(re.search(rf"(?<![\w.,]){re.escape(str(fact))}(?![\w]|[.,]\d)", text) for fact in facts)
