"""--slm-skip-damaged leaves out damaged lines of the archive that is resumed."""

import pytest
from inside import usage_error


@pytest.fixture
def damaged(sweep, pytester, kept):
    sweep()
    path = pytester.path / ".slm/records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[4] = lines[4][:200] + "\n"
    path.write_text("".join(lines))


def test_a_damaged_line_is_named(sweep, damaged):
    text = usage_error(sweep("--slm-resume"))
    assert "line 5" in text
    assert "skip-damaged" in text


def test_the_others_are_used(sweep, damaged):
    result = sweep("--slm-resume", "--slm-skip-damaged")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["*note: *line 5*", "*9 measurements were reused*"])
