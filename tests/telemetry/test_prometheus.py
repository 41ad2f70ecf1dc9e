"""Prometheus' text format: every line of it is read, and what is not of it is a failure."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.telemetry.dcgm_exporter import Sample, samples


def test_the_line_of_the_readme():
    text = 'DCGM_FI_DEV_SM_CLOCK{gpu="0", UUID="GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"} 139'
    uuid = "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"
    assert samples(text) == [Sample("DCGM_FI_DEV_SM_CLOCK", {"gpu": "0", "UUID": uuid}, 139)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("up 1", Sample("up", {}, 1)),
        ("up 1 1700000000000", Sample("up", {}, 1)),
        ("up{} 1", Sample("up", {}, 1)),
        ("up{ } 1", Sample("up", {}, 1)),
        ('a:b{x="1",}2.5', Sample("a:b", {"x": "1"}, 2.5)),
        ('a {x = "}" , y="{,="}\t+Inf\r', Sample("a", {"x": "}", "y": "{,="}, math.inf)),
        (r'a{x="\"\\\n"} 1e3', Sample("a", {"x": '"\\\n'}, 1000.0)),
    ],
)
def test_a_line_of_the_format(text, expected):
    assert samples(text) == [expected]


@pytest.mark.parametrize(
    "text",
    ["up", "up1", 'a{x="1} 1', 'a{x=1} 1', 'a{x="1" y="2"} 1', 'a{,} 1', r'a{x="\q"} 1', "a{} one", "1a 1", "a 1 2 3"],
)  # fmt: skip
def test_a_line_that_is_not_of_the_format_is_a_failure(text):
    with pytest.raises(ValueError, match="line 2 of the page"):
        samples(f"up 1\n{text}\n")


def escaped(text):
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]*", fullmatch=True)


@given(st.dictionaries(NAMES, st.text(), max_size=4), st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False))
def test_any_label_and_value_survive(labels, value):
    text = ",".join(f'{name}="{escaped(label)}"' for name, label in labels.items())
    assert samples(f"metric{{{text}}} {value}") == [Sample("metric", labels, value)]


@given(st.text() | st.text('a1{}="\\,#. \n\t', max_size=40))
def test_garbage_is_a_failure_or_a_page(text):
    try:
        found = samples(text)
    except ValueError:
        return
    assert all(sample.name and isinstance(sample.value, int | float) for sample in found)
