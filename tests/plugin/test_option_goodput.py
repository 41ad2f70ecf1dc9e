"""--slm-goodput adds to the report of sweeps how many requests were served well enough."""

import pytest
from inside import usage_error

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.metrics.latency import goodput_of, parse_slo, together

SLO = "ttft:1s,tpot:4ms"


def table(text):
    """Rows below "good: SLO", as words, and what follows them."""
    lines = text[text.index(f"good: {SLO}") :].splitlines()
    end = next(i for i, line in enumerate(lines) if "most goodput" in line)
    return [line.split() for line in lines[4:end]], lines[end:]


def test_attainment_and_goodput_of_each_point(sweep, archive):
    text = sweep(f"--slm-goodput={SLO}").stdout.str()
    rows, further = table(text)
    assert [row[0] for row in rows] == ["1", "16", "64", "128", "256"]
    measurements = archive().measurements
    for row in rows:
        found = together([goodput_of(m, parse_slo(SLO)) for m in measurements if m.load.concurrency == int(row[0])])
        assert row[1] == f"{found.requests:,}" and row[3] == f"{100 * found.attainment:.1f}" and row[-1] == "0"
    assert rows[0][3] == "100.0" and float(rows[-1][3]) < 50, "steps of 256 take some 6 ms"
    assert "in flight" in further[0] and "90 % of the requests are good up to" in further[1]


def test_report_says_the_same_of_the_archive(sweep, pytester, capsys, kept):
    live = sweep(f"--slm-goodput={SLO}").stdout.str()
    capsys.readouterr()
    main(["report", str(pytester.path / ".slm/records.jsonl"), "--goodput", SLO])
    assert table(capsys.readouterr().out)[0] == table(live)[0]


def test_without_it_nothing_is_said_of_goodput(sweep):
    text = sweep().stdout.str()
    assert "most tokens/s" in text and "most goodput" not in text


@pytest.mark.parametrize(
    ("words", "said"), [("fast", "'fast' is no SLO"), ("ttft:5", "has no unit"), ("itl:9ms", "not request by request")]
)
def test_other_words_are_refused(sweep, words, said):
    assert said in usage_error(sweep(f"--slm-goodput={words}"))
