"""Every option with hostile values: each is taken, or one sentence says why not, before anything starts."""

import pytest
from campaign import set_option, set_option_of_measure
from hostile import OPTIONS
from judged import Case

from pytest_slmserve.options.table import OPTS

NUMBERS = ("0", "-1", "nan", "inf", "1e999", "9" * 400, "1000000000", "x", "", "1,,2", "\x1b[2J", "1e9", "1e-300")
OF_MEASURE = (
    "--max-concurrency", "--request-rate", "--ramp", "--burstiness", "--step", "--speed", "--num-prompts", "--settle",
    "--window", "--goodput", "--attainment", "--allow-failed", "--timeout", "--processes", "--extra-body",
    "--input-len", "--output-len", "--seed", "--endpoint", "--model", "--records", "--export", "--trace", "--sharegpt",
    "--tokenizer",
)  # fmt: skip


@pytest.mark.parametrize("flag", OF_MEASURE)
def test_measure_survives_hostile_option(case: Case, flag: str) -> None:
    set_option_of_measure(case, flag, dict.fromkeys((*OPTIONS[OF_MEASURE.index(flag) % 2 :: 2], *NUMBERS)))


@pytest.mark.parametrize("name", [opt.name for opt in OPTS])
def test_run_survives_hostile_option(case: Case, name: str) -> None:
    set_option(case, name, OPTIONS[len(name) % 2 :: 2])
