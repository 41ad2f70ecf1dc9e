"""Baselines: results files in one folder, named by device and release, that later runs are compared with.

`h200-vllm-0.26.0.jsonl.xz` has measurements of one kind of GPU with one release of vLLM, and is a usual results file.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.gate.decision import Calibration, GateCriteria, PairNoise, weakened
from pytest_slmserve.analysis.gate.diagnosis import Waiver
from pytest_slmserve.analysis.gate.launch_pairs import Gated
from pytest_slmserve.analysis.gate.side_by_side import Allowance
from pytest_slmserve.analysis.gate.windows import judged_with
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.points import all_groups
from pytest_slmserve.archive.codec import converted
from pytest_slmserve.archive.store import Archive, Contents, chosen, make_folder, read
from pytest_slmserve.schema.errors import (
    UNUSABLE,
    BadArchive,
    BadUsage,
    Caches,
    Launches,
    check_place,
    is_file,
    read_json,
    write_file,
)
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Measurement
from pytest_slmserve.schema.specs import is_steady, load_facts, short_hash

FOLDER = Path(".slm/baselines")
SUFFIX = ".jsonl.xz"


LeftOut = tuple[Measurement, str]  # with the reason why it is not in a baseline


def baseline_name(environment: Environment) -> str | None:
    """Return "h200-vllm-0.26.0" for an NVIDIA H200, else a name with the platform; None if it is unknown.

    The simulated engine has no release.
    """

    def slug(text: str | None) -> str:
        plain = re.sub(r"[^a-z0-9.+]+", "-", (text or "").lower()).strip("-.")
        return plain.removeprefix("nvidia-")

    device = slug(environment.gpu_name if environment.platform == "cuda" else environment.platform)
    if environment.platform == "simulated":
        return device
    release = slug(environment.vllm)
    return f"{device}-vllm-{release}" if device and release else None


def accept(
    measurements: Sequence[Measurement],
    folder: Path,
    *,
    overwrite: bool = False,
    claims: Mapping[str, Any] | None = None,
) -> tuple[dict[Path, list[Measurement]], list[LeftOut]]:
    """Write valid measurements to `folder`, one results file for each device and release.

    Returns the measurements of each file, and those left out with the reason. Files are moved to their places when all
    are complete. Measurements of replicas are written together or not at all.

    Args:
        claims: parameters of the claims, written to each file.

    Raises:
        BadUsage: if a file exists and `overwrite` is False, or if no measurement is suitable.
    """
    missing = "it belongs to a run of several engines on one device, of which others are missing"
    reasons = dict.fromkeys(map(id, measurements), missing)
    for members in all_groups(measurements):
        if not all(is_steady(m.load) for m in members):
            why = "it is of a load without a steady window"
        elif baseline_name(members[0].environment) is None:
            why = "its device or its release of vLLM is not known"
        else:
            why = "; ".join(check(*members).problems)
        reasons |= dict.fromkeys(map(id, members), why)
    left_out = [(m, why) for m in measurements if (why := reasons[id(m)])]
    kept = (m for m in measurements if not reasons[id(m)])
    named = grouped(kept, lambda m: f"{baseline_name(m.environment)}{SUFFIX}")
    if not named:
        reason = left_out[0][1] if left_out else "nothing was measured"
        raise BadUsage(f"nothing here can be a baseline: {reason}", "Pass records of a run whose points are valid.")
    there = [folder / name for name in named if (folder / name).exists()]
    if there and not overwrite:
        hint = "Add --replace, or choose another folder with --folder."
        raise BadUsage(f"{', '.join(map(str, there))} is there already, and would be overwritten", hint)
    try:
        make_folder(folder)
        for name in named:
            check_place(folder / name)
        with TemporaryDirectory(dir=folder, prefix=".accept-") as made:
            for name, group in named.items():
                with Archive.open(Path(made, name)) as archive:
                    archive.begin(claims or {}, {})
                    for measurement in group:
                        archive.add(measurement)
            for name in named:
                Path(made, name).replace(folder / name)
    except OSError as error:
        raise BadUsage(f"cannot write to {folder}: {error.strerror}", "Choose another folder with --folder.") from None
    except BadUsage as error:
        raise BadUsage(error.problem, "Choose another folder with --folder.") from None
    return {folder / name: group for name, group in named.items()}, left_out


def kept_archives(folder: Path) -> dict[str, Path]:
    """Return the results files of a folder by the names of their baselines."""
    return {path.name.removesuffix(SUFFIX): path for path in sorted(folder.glob(f"*{SUFFIX}")) if path.is_file()}


def baselines(folder: Path) -> dict[Path, Contents]:
    """Return all baselines of a folder by path; one that cannot be read has only a note."""
    found = {}
    for path in kept_archives(folder).values():
        try:
            found[path] = read(path, skip_damaged=True)
        except BadArchive as error:
            found[path] = Contents(notes=(error.problem,))
    return found


def baseline(folder: Path, name: str) -> tuple[Path, Contents]:
    """Return the baseline of this name, or the results file at this path with the last run of each case."""
    if is_file(path := Path(name)):
        return path, chosen(read(path))
    there = kept_archives(folder)
    if (kept := name.removesuffix(SUFFIX)) not in there:
        hint = f"Use one of {', '.join(there)}." if there else "slmserve compare RECORDS --save"
        raise BadUsage(f"there is no baseline {name} in {folder}", hint)
    return there[kept], read(there[kept])


NAME = "calibration.json"


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Device, load and gate criteria for which noise was measured: a calibration holds only for an equal key.

    Attributes:
        asked: hash of the interface, the requests and all settings of the loads; empty in older entries, which match
            none.
    """

    model: str
    loads: tuple[int, ...]
    platform: str | None
    gpu_name: str | None
    driver: str | None
    margin: float
    pairs: int
    caches: Caches = "warm"
    asked: str = ""
    launches: Launches = "apart"
    alpha: float = 0.01

    def __post_init__(self) -> None:
        GateCriteria(self.margin, self.alpha, pairs=self.pairs)  # raises for impossible values


@dataclass(frozen=True, slots=True)
class StoredNoise:
    place: NoiseKey
    measured_at: str
    calibration: Calibration


def noise_key(seen: Sequence[Measurement], terms: GateCriteria, caches: Caches = "warm") -> NoiseKey:
    """Return the key of a gate, from the measurements of one launch at each load."""
    where, spec = seen[0].environment, seen[0].spec
    loads = tuple(m.load.max_concurrency or 0 for m in seen)
    asked = short_hash([spec.interface, *([m.workload.hash, load_facts(m.load)] for m in seen)])
    device = where.platform, where.gpu_name, where.driver
    where_and_what = NoiseKey(short_name(spec.model), loads, *device, terms.margin, terms.pairs, caches, asked)
    return replace(where_and_what, launches=terms.launches, alpha=terms.alpha)


def judged_by_noise(gated: Gated, records: str | Path) -> tuple[Gated, StoredNoise | None]:
    """Return a gate evaluated with the calibration next to its results file, and that calibration or None."""
    if not gated.pairs:
        return gated, None
    place = noise_key(gated.pairs[0].baseline.at_each_load, gated.terms, gated.caches)
    if (known := read_calibrations(records).get(place)) is None:
        return gated, None
    if gated.terms.together:
        gated = judged_with(gated, allowances_of(known.calibration.noise, known.measured_at))
    return replace(gated, gated=weakened(gated.gated, known.calibration), calibrated=True), known


def allowances_of(noise: PairNoise, measured_at: str) -> dict[str, Allowance]:
    """Return by endpoint how much launches of both sides at the same time may differ, from a calibration."""
    source = f"{len(noise.costs)} launches of equal sides on {measured_at[:10]}"
    return {name: Allowance.known(sd.value, len(noise.costs), source) for name, sd in noise.spread.items()}


def keep(records: str | Path, kept: StoredNoise) -> None:
    """Add an entry to the calibrations next to a results file, or replace the one with its key."""
    entries = {**read_calibrations(records), kept.place: kept}.values()
    # "spread" follows from the costs, and is only for people who read the file.
    facts = [
        {**asdict(e.place), "measured_at": e.measured_at, **asdict(e.calibration), "spread": _spread_facts(e)}
        for e in entries
    ]
    path = Path(records).with_name(NAME)
    try:
        make_folder(path.parent)
        write_file(path, json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        why = f"the calibration cannot be written to {path}: {error.strerror}"
        raise BadUsage(
            why, "Make the folder writable, then run again with --slm-resume, which has the pairs."
        ) from None


def _spread_facts(kept: StoredNoise) -> dict[str, dict[str, float | None]]:
    return {name: asdict(seen) for name, seen in kept.calibration.noise.spread.items()}


def read_calibrations(records: str | Path) -> dict[NoiseKey, StoredNoise]:
    """Return the calibrations next to a results file by their keys; empty if there is no file."""
    path = Path(records).with_name(NAME)
    if not path.exists():
        return {}
    hint = "Remove it, and calibrate again with --slm-calibrate."
    try:
        rows = read_json(path, hint)
        found = [converted(StoredNoise, {"place": row, "calibration": row, **row}) for row in rows]
    except UNUSABLE as error:
        raise BadUsage(f"{path} is not a calibration ({error})", hint) from None
    return {kept.place: kept for kept in found}


WAIVER = tuple(field.name for field in fields(Waiver))
EXAMPLE = (
    '[{"endpoint": "throughput", "model": "opt-1.3b", "device": "H200", "owner": "a name", '
    '"reason": "a sentence", "until": "2027-01-31"}]'
)


def read_waivers(path: Path) -> tuple[Waiver, ...]:
    """Return the waivers of a JSON file: a list of objects that have every field of a waiver as text, and no other."""
    rows = read_json(path, f"Write a file of this form: {EXAMPLE}.")
    if not isinstance(rows, list):
        raise BadUsage(f"{path} holds no list of waivers", f"Write a file of this form: {EXAMPLE}.")
    found = []
    for number, row in enumerate(rows, 1):
        place = f"{path}, row {number}"
        if not isinstance(row, dict):
            raise BadUsage(
                f"{place} is the {type(row).__name__} {row!r}, not a waiver", f"Write a file of this form: {EXAMPLE}."
            )
        if unknown := sorted(row.keys() - set(WAIVER)):
            raise BadUsage(f"{place} has the unknown field {unknown[0]!r}", f"Use one of {', '.join(WAIVER)}.")
        if missing := [name for name in WAIVER if name not in row]:
            raise BadUsage(f"{place} has no {missing[0]}", f"Write a file of this form: {EXAMPLE}.")
        for name, value in row.items():
            if not isinstance(value, str) or not value.strip():
                kind = "empty" if isinstance(value, str) else f"the {type(value).__name__} {value!r}"
                raise BadUsage(f"{place}: {name} is {kind}, not a text", f"Write a file of this form: {EXAMPLE}.")
        texts = {name: value.strip() for name, value in row.items()}
        until, day = texts.pop("until"), None
        with suppress(ValueError):
            day = date.fromisoformat(until)
        if day is None or day.isoformat() != until:  # the one form that every Python release reads
            raise BadUsage(f"{place}: until is {until!r}, not a day", 'Write the date as "until": "2027-01-31".')
        found.append(Waiver(**texts | {"model": short_name(texts["model"])}, until=day))
    return tuple(found)
