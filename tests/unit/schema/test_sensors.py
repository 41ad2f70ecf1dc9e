"""A stored value is a whole multiple of its sensor's resolution, and a rounded one stays what it is."""

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.sensors import SENSORS, per_unit, rounded

NUMBERS = (*SENSORS, 7777)


def step_of(number: int) -> Fraction:
    """The resolution in decimal digits: 1e-4 is a ten-thousandth."""
    return Fraction(str(SENSORS[number].resolution)) if number in SENSORS else Fraction(1, 10**6)


@given(st.sampled_from(NUMBERS), st.floats(-1e6, 1e6))
def test_sensor_values_round_to_resolution(number, value):
    inexact = [number for number in NUMBERS if Fraction(per_unit(number)) != 1 / step_of(number)]
    assert inexact == [number for number in SENSORS if SENSORS[number].resolution == 1e6]
    assert per_unit(sensors.SM_CLOCK) == 1e-6
    names = [(name, number) for number, sensor in SENSORS.items() for name in sensor.names]
    assert len(dict(names)) == len(names)
    assert all((number > sensors.OURS) is not name.startswith("DCGM_") for name, number in names)
    found = rounded(number, value)
    assert abs(Fraction(found) - Fraction(value)) <= step_of(number) / 2 * Fraction(1_000_001, 1_000_000)
    assert rounded(number, found) == found
    assert float(round(Fraction(found) / step_of(number)) * step_of(number)) == pytest.approx(found, abs=1e-12)
    values = {sensors.POWER: 0.15, sensors.DRAM_ACTIVE: 0.00016, sensors.SM_CLOCK: 1.9804e9, sensors.ENERGY: None}
    assert [rounded(number, value) for number, value in values.items()] == [0.15, 0.0002, 1.98e9, None]
