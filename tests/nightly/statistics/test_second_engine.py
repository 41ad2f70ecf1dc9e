"""What several engines on one GPU served, of the bound on their gain, in all archives that have such sets."""

from dataclasses import replace
from statistics import median, quantiles

import pytest
from committed import names_of
from scripts import BASELINES

from pytest_slmserve.analysis.advice import advisor, subjects
from pytest_slmserve.analysis.claims.table import stored_curves
from pytest_slmserve.analysis.points import ratio
from pytest_slmserve.archive.store import read


def test_second_engine_gain_matches_archives():
    found, models, under_mps = [], set(), []
    for name in names_of("h[12]00-vllm-0.26.0-*"):
        contents = read(BASELINES / f"{name}.jsonl.xz")
        for curve in stored_curves(contents.measurements, contents.plans):
            for pair in curve.shared:
                one = curve.one_engine(pair.concurrency, pair)
                alike = pair.sharing != "gpus" and pair.model
                if alike and pair.valid and one and one.valid:
                    alone = replace(subjects.of_curve(curve, None), points=(one,))
                    bound = advisor.gains_at(alone, one.concurrency).time_slicing
                    gain = ratio(pair, one, [pair, one]).value
                    under_mps += [gain / bound.factor] * (pair.sharing == "mps")
                    if len(pair.models) == 2:
                        found.append(gain / min(bound.factor, advisor.REPLICAS))
                        models.add(pair.model)
    ends = quantiles(found, n=20)
    assert (len(found), len(models), len(under_mps)) == (38, 10, 32) and max(under_mps) < 1.07
    expected = advisor.OF_BOUND
    assert (median(found), ends[0], ends[-1]) == pytest.approx((expected.value, expected.low, expected.high), abs=0.005)
