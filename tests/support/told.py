"""What a sentence tells, whatever its words are."""

from __future__ import annotations

import re


def tells(text: str, *facts: object) -> bool:
    """Whether each fact (a number, a name, an option) stands in the text, and not as a part of a longer one."""
    return all(re.search(rf"(?<![\w.,]){re.escape(str(fact))}(?![\w]|[.,]\d)", text) for fact in facts)
