"""The laws that the package has are those of the committed archives, and predict what they have not seen as well as
docs/predict.md says."""

import json

import pytest
from committed import archive
from scripts import CHECKOUT, checkout_script, loaded

from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.points import point_of

pytestmark = pytest.mark.xdist_group("two laws")  # minutes, once


@pytest.fixture(scope="module")
def found():
    with loaded(checkout_script("studies/two_laws.py")) as study:
        yield study, *study.study()


def test_shipped_laws_match_study(found):
    study, laws, text, bars = found
    assert study.rounded(laws) == study.FILE.read_text("utf-8"), "python studies/two_laws.py --write"
    page = (CHECKOUT / "docs" / "predict.md").read_text("utf-8")
    error, small, inside = (100 * each for each in bars["any one of these"])
    words = (
        f"q    = {laws.sharpness:.1f},",
        f"throughput is {error:.1f}%",
        f"it is {small:.1f}%",
        f"{inside:.0f}% of the",
    )
    assert [each for each in (text, *words) if each not in page] == []


@pytest.mark.parametrize(("unseen", "most", "most_small"), [
    ("any one of these", 0.08, 0.12), ("card", 0.085, 0.12), ("model", 0.08, 0.125), ("host", 0.08, 0.12),
    ("card, host and model", 0.095, 0.13),
])  # fmt: skip
def test_law_predicts_unseen_cases(found, unseen, most, most_small):
    error, small, inside = found[-1][unseen]
    assert error <= most and small <= most_small and 0.93 <= inside <= 0.98


def test_predicted_host_stays_inside_intervals():
    """Three models on a host whose cost alone was known, as printed before anything was measured there."""
    told = json.loads((CHECKOUT / "studies/results/predicted-host.json").read_text("utf-8"))["predicted"]
    measured = grouped(archive("h200-vllm-0.26.0-predicted-host"), lambda m: (m.spec.model, m.load.concurrency))
    points = {at: point_of([(m,) for m in each]) for at, each in measured.items()}
    assert len(points) == sum(map(len, told.values())) == 12
    for (model, load), point in points.items():
        seen = {"tokens_per_s": point.output_tokens_per_s, "ttft_s": point.ttft_s, "tpot_s": point.tpot_s}
        outside = [name for name, (low, _, high) in told[model][f"{load}"].items() if not low <= seen[name] <= high]
        assert not outside, (model, load, outside)
