"""Ten cases of the campaign in tests/nightly/faults: one fault of each kind ends in time and with the right status, one
sentence says why, nothing is lost, and nothing is left."""

import signal

import pytest
from campaign import (
    change_disk,
    good_archive,
    hostile_files,
    kill,
    measure,
    read_files,
    set_option,
    set_option_of_measure,
)
from judged import Case


def test_an_archive_that_is_removed_in_the_middle(case: Case) -> None:
    change_disk(case, "kept/r.jsonl", (1,), "removed")


@pytest.mark.parametrize(
    ("engine", "number", "moment"),
    [("simulated", signal.SIGINT, "measuring"), ("stand-in", signal.SIGKILL, "between two points")],
)
def test_a_signal_at_a_moment(case: Case, engine: str, number: int, moment: str) -> None:
    kill(case, engine, number, moment)


@pytest.mark.parametrize(
    ("fault", "load"), [("usage-float", "count"), ("hang-in-the-middle", "window"), ("first-http-429", "count")]
)
def test_a_fault_on_the_wire(case: Case, url: str, fault: str, load: str) -> None:
    measure(case, url, fault, load)


@pytest.mark.parametrize("reader", ["report", "resume"])
def test_a_reader_with_some_hostile_files(case: Case, tmp_path_factory, reader: str) -> None:
    files = hostile_files(tmp_path_factory.mktemp("files"), good_archive(tmp_path_factory.mktemp("good")))
    names = ("deep.", "cut.gz", "nowhere.")
    read_files(case, reader, [path for path in files if path.name.startswith(names)], memory=1 << 29)


def test_an_option_with_hostile_values(case: Case) -> None:
    set_option(case, "window", ["nan", "\x1b[2J"])


def test_an_option_of_measure_with_hostile_values(case: Case) -> None:
    set_option_of_measure(case, "--request-rate", ["1e999", "\udc80"])
