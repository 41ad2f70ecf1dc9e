"""Sweeps and gates of planted rates, as a report shows them."""

from collections.abc import Iterable, Mapping, Sequence

from strategies import H200, law, measurement

from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import Gated, judge_gate
from pytest_slmserve.analysis.gate.windows import judge_windows
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.schema.records import Environment, Measurement

WOBBLES = (1.0, 1.002)  # of the repeats


def sweep(
    rates: Mapping[int, float], wobbles=WOBBLES, model="opt-1.3b", environment: Environment = H200, **more: object
) -> Curve:
    """The curve of these rates by their load. more: of `curve_of`."""
    each = [(n, rate * wobble, i) for n, rate in rates.items() for i, wobble in enumerate(wobbles)]
    made = [measurement(n, rate, model=model, environment=environment, repeat=i) for n, rate, i in each]
    return curve_of(model, made, **more)  # type: ignore[arg-type]


def lawful(loads: Iterable[int], wobbles=WOBBLES, *, t_inf=1e4, b_half=45.0, **more: object) -> Curve:
    """A sweep by the saturation model."""
    return sweep({n: law(n, t_inf, b_half) for n in loads}, wobbles, **more)  # type: ignore[arg-type]


def gated(measured: Sequence[Measurement]) -> Gated:
    """The gate of launches one after the other, or of both sides at once if they have windows."""
    if any(m.paired and m.paired.window for m in measured):
        return judge_windows(measured, GateCriteria().with_both_at_once)
    return judge_gate(measured, GateCriteria())
