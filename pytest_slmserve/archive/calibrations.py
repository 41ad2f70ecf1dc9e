"""The file of a runner's own noise, beside the archive: an entry for each model and place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.gate.calibration import Calibration, PairNoise, Rates
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import Gated
from pytest_slmserve.archive.codec import built, typed
from pytest_slmserve.archive.own_folder import make_folder
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.files import content
from pytest_slmserve.schema.literals import Caches
from pytest_slmserve.schema.loads import load_facts
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import short_hash
from pytest_slmserve.schema.stored_names import to_stored

NAME = "calibration.json"


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """The place where noise was measured, and the terms by which it was judged. Another driver, load or margin is
    another place, and a start that compiles is noisy in another way. asked: hash of the interface, of the requests and
    of all that the loads are; empty in entries of before, which are of no place."""

    model: str
    loads: tuple[int, ...]
    platform: str | None
    gpu_name: str | None
    driver: str | None
    margin: float
    pairs: int
    caches: Caches = "warm"
    asked: str = ""


@dataclass(frozen=True, slots=True)
class StoredNoise:
    """An entry. measured_at: ISO 8601, UTC."""

    place: NoiseKey
    measured_at: str
    noise: PairNoise
    calibration: Calibration


def noise_key(seen: Sequence[Measurement], terms: GateCriteria, caches: Caches = "warm") -> NoiseKey:
    """The place of a gate. seen: what one of its launches measured, at each load."""
    where, spec = seen[0].environment, seen[0].spec
    loads = tuple(m.load.max_concurrency or 0 for m in seen)
    asked = short_hash([spec.interface, *([m.workload.hash, load_facts(m.load)] for m in seen)])
    device = where.platform, where.gpu_name, where.driver
    return NoiseKey(short_name(spec.model), loads, *device, terms.margin, terms.pairs, caches, asked)


def place_of(gated: Gated) -> NoiseKey:
    """The place of a gate that has a pair."""
    return noise_key(gated.pairs[0].baseline.measurements, gated.terms, gated.caches)


def beside(records: Path) -> Path:
    return records.parent / NAME


def find(path: Path, place: NoiseKey) -> StoredNoise | None:
    """The stored noise of a place, None if there is none. Raises BadUsage where the file cannot be read."""
    return next((kept for kept in read(path) if kept.place == place), None)


def keep(path: Path, kept: StoredNoise) -> None:
    """Add an entry; the one of the same place is replaced. Raises BadUsage where the file cannot be written."""
    others = [each for each in read(path) if each.place != kept.place]
    new = path.with_suffix(".new")
    try:
        make_folder(path.parent)
        new.write_text(json.dumps([_facts(each) for each in (*others, kept)], indent=1) + "\n", "utf-8")
        new.replace(path)  # so that a reader sees the old file or the new one
    except OSError as error:
        why = f"the calibration cannot be written to {path}: {error.strerror}"
        raise BadUsage(why, "--slm-resume, which has the pairs, once it can be written") from None


def read(path: Path) -> list[StoredNoise]:
    if not path.exists():
        return []
    try:
        return [_kept(facts) for facts in json.loads(content(path))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BadUsage(
            f"{path} is no calibration ({error})", "remove it, and calibrate again: --slm-calibrate"
        ) from None


def _facts(kept: StoredNoise) -> dict[str, Any]:
    seen = kept.calibration
    return {
        **to_stored(asdict(kept.place)),
        "measured_at": kept.measured_at,
        "noise": asdict(kept.noise),
        "unchanged": asdict(seen.unchanged),
        "worse": {name: asdict(rates) for name, rates in seen.worse.items()},
    }


def _kept(facts: Mapping[str, Any]) -> StoredNoise:
    place: NoiseKey = built(NoiseKey, dict(facts))  # the first entries did not say how caches were
    noise: PairNoise = built(PairNoise, facts["noise"])
    worse = {name: built(Rates, rates) for name, rates in facts["worse"].items()}
    terms = GateCriteria(place.margin, pairs=place.pairs)
    seen = Calibration(terms, len(noise.costs), built(Rates, facts["unchanged"]), worse)
    return StoredNoise(place, typed(str, facts["measured_at"]), noise, seen)
