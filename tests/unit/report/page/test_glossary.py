"""Terms of a heading, and where a page explains them."""

from __future__ import annotations

import pytest

from pytest_slmserve.report.page.writer import GLOSSARY, parts

NUMBERS = {forms[0]: number for number, forms in enumerate(GLOSSARY, 1)}


@pytest.mark.parametrize(
    ("heading", "terms"),
    [
        ("TTFT ms", {"TTFT": "TTFT"}),
        ("concurrent requests", {"concurrent requests": "concurrent requests"}),
        ("mean concurrency", {"concurrency": "concurrent requests"}),
        ("Interim analyses: mean E2E", {"Interim analyses": "interim analysis", "E2E": "E2E"}),
        ("opt-1.3b: INCONCLUSIVE after 4 pairs of launches", {"INCONCLUSIVE": "inconclusive", "launches": "launch"}),
        ("batching", {}),
        ("throughput-plateau", {}),
        ("", {}),
    ],
)
def test_terms_are_whole_words_in_any_of_their_forms(heading, terms):
    found = parts(heading)
    assert "".join(part for part, _ in found) == heading
    assert {part: number for part, number in found if number} == {part: NUMBERS[name] for part, name in terms.items()}


def test_meanings_are_short_sentences():
    assert {forms[0]: meaning for forms, meaning in GLOSSARY.items() if len(meaning.split()) > 25} == {}
    assert all(meaning.endswith(".") for meaning in GLOSSARY.values())
