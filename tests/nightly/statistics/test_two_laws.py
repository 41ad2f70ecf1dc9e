"""The laws that the package has are those of the committed archives, and predict what they have not seen as well as
docs/predict.md says."""

import pytest
from scripts import CHECKOUT, checkout_script, loaded

pytestmark = pytest.mark.xdist_group("two laws")  # minutes, once


@pytest.fixture(scope="module")
def found():
    with loaded(checkout_script("studies/two_laws.py")) as study:
        yield study, *study.study()


def test_shipped_laws_match_study(found):
    study, laws, text, _ = found
    assert study.rounded(laws) == study.FILE.read_text("utf-8"), "python studies/two_laws.py --write"
    assert text in (CHECKOUT / "docs" / "predict.md").read_text("utf-8")


@pytest.mark.parametrize(("unseen", "most", "most_small"), [
    ("any one of these", 0.08, 0.12), ("card", 0.085, 0.12), ("model", 0.08, 0.125), ("host", 0.08, 0.12),
    ("card, host and model", 0.095, 0.13),
])  # fmt: skip
def test_law_predicts_unseen_cases(found, unseen, most, most_small):
    error, small, inside = found[-1][unseen]
    assert error <= most and small <= most_small and 0.93 <= inside <= 0.98
