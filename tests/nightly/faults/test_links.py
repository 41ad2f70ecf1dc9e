"""Whatever lies where a file is to be written, nothing is waited for, and what others own is not written."""

import pytest
from campaign import LINKS, WRITERS, link_at, places_of_writes
from judged import Case

FEWEST = {"gate": 6, "calibration": 4, "torn": 4, "figures": 1, "asv": 3, "asv-init": 2}


@pytest.mark.parametrize("writer", WRITERS)
def test_each_kind_of_link_in_the_place_of_each_file_that_is_written(case: Case, writer: str) -> None:
    names, wrong = places_of_writes(case, writer), []
    assert len(names) >= FEWEST.get(writer, 1), names
    for name in names:
        for kind in LINKS:
            try:
                link_at(case, writer, name, kind)
            except AssertionError as error:
                wrong.append(f"== {kind} at {name}: {error}")
    assert not wrong, "\n".join(wrong)
