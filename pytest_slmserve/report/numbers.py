"""Numbers as people read them; "-" is "not measured"."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from pytest_slmserve.analysis.stats.estimates import Interval
from pytest_slmserve.schema.specs import GIB

ABSENT = "-"
SMALLEST_DECIMAL = 6


def figure(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits, but all whole ones, and separators: 16,772 and 4.03 and 0.0512."""
    if value is None or not math.isfinite(value):
        return ABSENT
    rounded = float(f"{value:.{digits}g}")
    if rounded == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{value:,.{min(max(decimals, 0), SMALLEST_DECIMAL)}f}"


def milliseconds(seconds: float | None) -> str:
    return figure(None if seconds is None else 1e3 * seconds)


def gib(number: float | None) -> str:
    """Bytes in GiB, the unit standing elsewhere."""
    return figure(None if number is None else number / GIB)


def hundredths(share: float | None, *, signed: bool = False) -> str:
    """A share in per cent with one decimal, the unit standing elsewhere."""
    if share is None or not math.isfinite(share):
        return ABSENT
    text = f"{100 * share:{'+' if signed else ''}.1f}"
    return text.replace("-", "") if float(text) == 0 else text


def between(seen: Interval, scale: float = 1.0, unit: str = "") -> str:
    """The 95 % interval in brackets, nothing where the noise is unknown."""
    if seen.low is None or seen.high is None:
        return ""
    return f" (95 %: {figure(scale * seen.low)} to {figure(scale * seen.high)}{unit})"


def change(ratio: Interval | None) -> str:
    """A ratio as its change in per cent, "+2.3"."""
    return hundredths(None if ratio is None else ratio.value - 1, signed=True)


def ends(seen: Interval | None, show: Callable[[float], str]) -> str:
    """The 95 % interval, "1.2 to 3.4"; "-" where the noise is unknown."""
    if seen is None or seen.low is None or seen.high is None:
        return ABSENT
    return f"{show(seen.low)} to {show(seen.high)}"


def changes(ratio: Interval | None) -> str:
    """The 95 % interval of a ratio as changes in per cent, "+1.2 to +3.4"; "-" where the noise is unknown."""
    return ends(ratio, lambda end: hundredths(end - 1, signed=True))


def whole(number: int | None) -> str:
    """ "16,772" """
    return ABSENT if number is None else f"{number:,}"


def listed(numbers: Iterable[int]) -> str:
    """ "1, 2, 4" """
    return ", ".join(str(number) for number in numbers)


def counted(number: int, what: str) -> str:
    """ "1 launch", "2 launches" """
    plural = "es" if what.endswith(("ch", "s")) else "s"
    return f"{number} {what}{'' if number == 1 else plural}"
