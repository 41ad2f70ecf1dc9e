"""Secrets: each that is typed, in any option or URL, or that a marker has, is refused, and is in nothing that is
written or shown; one that is inherited is in nothing either."""

import pytest
from campaign import (
    BY_VARIABLE,
    ONE_POINT,
    SIMULATED,
    TYPED,
    TYPED_FOR_MEASURE,
    ask_secret_urls,
    inherit_secrets,
    keep_secret,
    type_secrets,
)
from hidden_texts import SECRET_PAIRS, SECRET_URLS, SECRET_VALUES, WRONG_URLS
from judged import Case, pytest_run

WAYS = [*TYPED, *BY_VARIABLE, *(f"measure {way}" for way in TYPED_FOR_MEASURE)]


@pytest.mark.parametrize("way", WAYS)
def test_typed_secrets_are_refused(case: Case, way: str) -> None:
    """All secrets come, in one way or another."""
    type_secrets(case, way, SECRET_PAIRS[WAYS.index(way) % 4 :: 4])


@pytest.mark.parametrize("part", range(4))
def test_secret_urls_are_refused(case: Case, part: int) -> None:
    ask_secret_urls(case, [*SECRET_URLS, *WRONG_URLS][part::4])


@pytest.mark.parametrize("words", [["-k"], ["-m"], [], ["--slm-gate", "-k"]])
def test_secret_test_names_stay_hidden(case: Case, words: list[str]) -> None:
    (case.folder / "test_it.py").write_text(ONE_POINT, "utf-8")
    for value in SECRET_VALUES[::8]:
        typed = [*words, f"not {value}"] if words else [f"test_it.py::test_point[{value}]"]
        keep_secret(case, pytest_run([*typed, *SIMULATED, *(["test_it.py"] if words else [])]))


@pytest.mark.parametrize("field", [
    "env=(('HF_TOKEN', 'hunter2'),)", "extra=(('a', 'hf_FAULT9f8e7d6c5b4a'),)", "env=(('A', 'Bearer hunter2'),)",
])  # fmt: skip
def test_marker_secrets_are_refused(case: Case, field: str) -> None:
    marked = f"import pytest\n@pytest.mark.slm({field})\ndef test(slm_measure): assert slm_measure(4).valid\n"
    (case.folder / "test_it.py").write_text(marked, "utf-8")
    keep_secret(case, pytest_run([*SIMULATED, "test_it.py"]))


@pytest.mark.parametrize("words", [["-k", "point"], ["--slm-gate", "-k", "gate"], ["-o slm_report=all"]], ids=range(3))
def test_inherited_secrets_stay_hidden(case: Case, words: list[str]) -> None:
    inherit_secrets(case, *words)
