"""Whichever call on a file fails, the first or any later one: what was measured is kept, and one sentence says why."""

import shutil

import pytest
from campaign import WRITERS
from judged import ANSWERED, PLANTED
from nth_call import ERRORS, failures

FEWEST = {"four": 40, "torn": 40, "gate": 60, "calibration": 60, "asv-init": 4}


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler is here")
@pytest.mark.parametrize(("writer", "error"), [
    *(("four", error) for error in ERRORS), *((writer, "EIO") for writer in WRITERS if writer != "four"),
])  # fmt: skip
def test_each_call_of_each_writer(tmp_path, writer: str, error: str) -> None:
    planted, wrong = failures(tmp_path, writer, error)
    PLANTED["n-th call"] += planted
    ANSWERED["n-th call"] += planted - len(wrong)
    assert planted >= FEWEST.get(writer, 5) and not wrong, "\n".join([f"{len(wrong)} of {planted}", *wrong])
