"""The file in which a runner's noise is kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from strategies import measurement

from pytest_slmserve.analysis.gate.decision import Calibration, GateCriteria, PairNoise, Rates
from pytest_slmserve.archive.baselines import StoredNoise, keep, noise_key, read_calibrations
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Environment, Measurement
from pytest_slmserve.schema.specs import ClosedLoop

HERE = Environment(platform="cuda", gpu_name="NVIDIA H200", driver="580.1", vllm="0.26.0")


def seen(*loads: int, where: Environment = HERE, **facts: object) -> list[Measurement]:
    """What one launch measured; facts: of its loads."""
    return [
        replace(measurement(), environment=where, load=ClosedLoop(n, **facts))  # type: ignore[arg-type]
        for n in loads
    ]


BOTH = seen(8, 256)
PLACE = noise_key(BOTH, GateCriteria())
RATES = Rates(0.0, 0.99, 4.2)
KEPT = StoredNoise(
    PLACE,
    "2026-11-21T12:00:00+00:00",
    Calibration(PairNoise(("tokens/s",), ((0.01,), (-0.01,))), RATES, {"tokens/s": Rates(0.97, 0.0, 5.0)}),
)


def test_what_was_kept_is_found_again(tmp_path):
    records = tmp_path / "new" / "records.jsonl"
    keep(records, KEPT)
    assert (tmp_path / "new" / "calibration.json").exists() and read_calibrations(records) == {PLACE: KEPT}


def test_another_driver_margin_load_model_interface_start_or_other_requests_are_another_place(tmp_path):
    path = tmp_path / "calibration.json"
    keep(path, KEPT)
    (small, large), spec, requests = BOTH, BOTH[0].spec, BOTH[0].workload
    others = [
        noise_key(seen(8, 256, where=replace(HERE, driver="590.2")), GateCriteria()),
        noise_key(seen(8, 128), GateCriteria()),
        noise_key(seen(8, 256, ramp_up="burst"), GateCriteria()),
        noise_key(seen(8, 256, window_s=1.0), GateCriteria()),
        noise_key([replace(m, spec=replace(spec, model="facebook/opt-2.7b")) for m in BOTH], GateCriteria()),
        noise_key([replace(m, spec=replace(spec, interface="server")) for m in BOTH], GateCriteria()),
        noise_key([small, replace(large, workload=replace(requests, hash="other"))], GateCriteria()),
        noise_key(BOTH, GateCriteria(0.05)),
        noise_key(BOTH, GateCriteria(pairs=8)),
        noise_key(BOTH, GateCriteria(), "cold"),
    ]
    assert not read_calibrations(path).keys() & set(others)
    assert noise_key(seen(8, 256, where=replace(HERE, vllm="0.27.0")), GateCriteria()) == PLACE


def test_a_later_calibration_of_a_place_replaces_the_earlier_one(tmp_path):
    path = tmp_path / "calibration.json"
    keep(path, KEPT)
    keep(path, replace(KEPT, place=replace(PLACE, model="opt-125m")))
    keep(path, later := replace(KEPT, measured_at="2026-12-01T12:00:00+00:00"))
    assert len(read_calibrations(path)) == 2 and read_calibrations(path)[PLACE] == later


def test_an_entry_that_did_not_say_was_of_warm_caches(tmp_path):
    path = tmp_path / "calibration.json"
    keep(path, KEPT)
    (entry,) = json.loads(path.read_text("utf-8"))
    assert entry.pop("caches") == "warm"
    path.write_text(json.dumps([entry]), "utf-8")
    assert read_calibrations(path) == {PLACE: KEPT}


def test_one_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "calibration.new").mkdir()
    with pytest.raises(BadUsage, match=r"the calibration cannot be written to .*calibration\.json: Is a directory"):
        keep(tmp_path / "calibration.json", KEPT)


def test_without_a_file_nothing_is_known(tmp_path):
    assert read_calibrations(tmp_path / "records.jsonl") == {}


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"model": "x"}]'])
def test_a_spoilt_file_is_one_sentence(tmp_path, text):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(BadUsage, match=r"is no calibration"):
        read_calibrations(path)
