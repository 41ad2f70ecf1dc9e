"""The table of a history over releases: what stands in it on a narrow and on a wide terminal, and below it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stored_records import KNOWN, repeats

from pytest_slmserve.analysis.compare.changes import release_histories
from pytest_slmserve.report.compare import BY_CHANCE, history_sections
from pytest_slmserve.report.section import section_text
from pytest_slmserve.report.text_table import laid_out

SPEEDS = {"0.9.0": (1000.0, "one"), "0.10.0": (1001.0, "one"), "0.11.0": (900.0, "one"), "0.12.0": (900.0, "two")}


def history(speeds=SPEEDS, wobble=(0.999, 1.0, 1.001)):
    made = []
    for version, (rate, host) in speeds.items():
        where = replace(KNOWN, vllm=version, host=host)
        made += repeats([rate * part for part in wobble], environment=where, launch=version)
    return release_histories(made)


def text(found, width):
    with laid_out(width):
        return "\n".join(map(section_text, history_sections(found)))


def rows(printed):
    return [" ".join(line.split()) for line in printed.splitlines()]


@pytest.mark.parametrize("width", [80, 160])
def test_each_release_is_beside_the_one_before(width):
    printed = text(history(), width)
    assert max(map(len, printed.splitlines())) <= width
    assert "History: opt-1.3b at concurrency 8, NVIDIA H200" in printed
    of = (lambda interval: f" {interval}") if width == 160 else lambda _: ""
    assert rows(printed)[5:9] == [
        f"tokens/s 0.9.0 1,000{of('998.7 to 1,001')}",
        f"tokens/s 0.10.0 1,001{of('999.7 to 1,002')} 1.001 0.9967 to 1.005 same",
        f"tokens/s 0.11.0 900.0{of('898.8 to 901.2')} 0.8991 0.8953 to 0.9029 regressed",
        f"tokens/s 0.12.0 900.0{of('898.8 to 901.2')} 1.000 0.9594 to 1.042 not comparable",
    ]
    assert ("not shown: 95 % of value" in printed) is (width == 80)
    told = " ".join(printed.split())
    assert "not comparable: other host or boot" in told and "in turns on one host (0.12.0)" in told
    assert "by a tolerance of 3 %" in told and BY_CHANCE in told


def test_noise_and_single_repeats_show_no_difference_and_say_why():
    noisy = text(history({"0.9.0": (1000, "one"), "0.10.0": (1010, "one")}, wobble=(0.9, 1.1)), 160)
    assert noisy.count("no difference shown\n") == 2
    assert "no difference shown: the noise is wider than the tolerance (0.10.0)" in noisy and BY_CHANCE not in noisy
    single = text(history({"0.9.0": (1000, "one"), "0.10.0": (1010, "one")}, wobble=(1.0,)), 160)
    assert "tokens/s 0.10.0 1,010 - 1.010 - no difference shown" in rows(single)
    assert "one repeat on each side: the noise is not known (0.10.0)" in single


def test_a_faster_release_improved():
    assert text(history({"0.9.0": (1000, "one"), "0.10.0": (1200, "one")}), 160).count(" improved\n") == 2


def test_nothing_is_said_of_one_release():
    assert text(history({"0.9.0": (1000, "one")}), 80) == ""
