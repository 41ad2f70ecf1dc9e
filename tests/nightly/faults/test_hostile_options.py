"""Every option with hostile values: each is taken, or one sentence says why not, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from judged import Case, command, pytest_run
from test_hostile_files import MEASURE

from pytest_slmserve.options.table import OPTS

MEMORY = 2 << 30
HOSTILE = (
    "", " ", "0", "-1", "1e999", "nan", "9" * 400, "1000000000", "999999999999", "a" * 5000, "\x1b]0;owned\x07\x1b[2J",
    "é\u202e", "\udc80", "[" * 5000, '{"a": {"b": [1]}}', "../../../etc/passwd", "/dev/zero", "/proc/self/mem", "a=b=c",
    "-x", "--slm-gpu", "%s%n", "1,2,4", "http://u:p@h/v1", "true", ",",
)  # fmt: skip
PLAN = ("--slm-simulate", "--slm-models=opt-125m", "--slm-plan", "test_it.py")
TESTS = """
def test_point(slm_point): assert slm_point.measure()
def test_job(slm_job): assert slm_job(10).valid
"""
NUMBERS = ("0", "-1", "nan", "inf", "1e999", "9" * 400, "1000000000", "x", "", "1,,2", "\x1b[2J", "1e9", "1e-300")
OF_MEASURE = (
    "--max-concurrency", "--request-rate", "--ramp", "--burstiness", "--step", "--speed", "--num-prompts", "--settle",
    "--window", "--goodput", "--attainment", "--allow-failed", "--timeout", "--processes", "--extra-body",
    "--input-len", "--output-len", "--seed", "--endpoint", "--model", "--records", "--export", "--trace", "--sharegpt",
    "--tokenizer",
)  # fmt: skip


def options(case: Case, name: str, texts: Iterator[str]) -> None:
    """By a plan, which does all but start: a run would take as long as it was asked to."""
    (case.folder / "test_it.py").write_text(TESTS, "utf-8")
    flag = next(opt.flag for opt in OPTS if opt.name == name).replace("-o ", "--override-ini=")
    plant(case, [(text, pytest_run([f"{flag}={text}", *PLAN])) for text in texts], (0, 4, 5))


def measures(case: Case, flag: str, texts: Iterator[str]) -> None:
    """Nobody listens at the URL, so that what is taken is status 4 all the same."""
    load = ["--max-concurrency=1"] if flag not in OF_MEASURE[:3] else []
    plant(case, [(text, command([*MEASURE, *load, f"{flag}={text}"])) for text in texts], (4,))


def plant(case: Case, works: list, statuses: tuple[int, ...]) -> None:
    wrong = []
    for text, work in works:
        try:
            case.judge("hostile options", case.fork(work, memory=MEMORY), statuses)
        except AssertionError as error:
            wrong.append(f"== {text[:60]!r}: {error}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(works)}", *wrong])


@pytest.mark.parametrize("flag", OF_MEASURE)
def test_an_option_of_measure_with_some_values(case: Case, flag: str) -> None:
    measures(case, flag, iter(HOSTILE[OF_MEASURE.index(flag) :: 13]))


@pytest.mark.faults
@pytest.mark.parametrize("flag", OF_MEASURE)
def test_an_option_of_measure_with_many_values(case: Case, flag: str) -> None:
    measures(case, flag, iter(dict.fromkeys((*HOSTILE[::2], *NUMBERS))))


@pytest.mark.parametrize("name", [opt.name for opt in OPTS][::6])
def test_some_options_with_some_values(case: Case, name: str) -> None:
    options(case, name, iter(HOSTILE[len(name) :: 13]))


@pytest.mark.faults
@pytest.mark.parametrize("name", [opt.name for opt in OPTS])
def test_each_option_with_many_values(case: Case, name: str) -> None:
    options(case, name, iter(HOSTILE[len(name) % 2 :: 2]))
