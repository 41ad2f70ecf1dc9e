"""Write an archive of format 1 or 2 anew in the format that the package reads.

    python studies/migrate.py IN OUT

OUT gets the words of today, the model of each engine, keys made of both, and a checksum for each line. Sizes of a model
that is not in the catalogue come from its folder, or from the Hub's cache, if they are here; otherwise the records say
nothing of them. An OUT that ends in .xz is packed as one piece, as those in benchmarks/baselines are.
"""

from __future__ import annotations

import gzip
import json
import lzma
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common import parser_of
from pack import FILTERS

from pytest_slmserve.archive.codec import (
    clock_gaps,
    deltas,
    engine_from_record,
    engine_line,
    measurement_line,
    measurement_of,
    running_sums,
)
from pytest_slmserve.archive.lines import line_of
from pytest_slmserve.archive.store import FORMAT
from pytest_slmserve.plan.models import known_model
from pytest_slmserve.schema.records import Environment, Measurement, Resolved, replica_set, series_key
from pytest_slmserve.schema.sensors import SPEED_PROBE
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, ReplicaSpec, short_hash

Facts = dict[str, Any]
Engine = tuple[EngineSpec, Resolved, Environment]
SPEC = {
    "backend": "platform",
    "weights": "load_format",
    "memory_share": "gpu_memory_utilization",
    "door": "interface",
    "tensor_parallel": "tensor_parallel_size",
}
ENVIRONMENT = {"backend": "platform", "platform": "operating_system"}
LOAD = {"starts": "ramp_up"}
ROW = {"door": "interface", "starts": "ramp_up"}
PLATFORMS = {"fake": "simulated"}
RAMP_UPS = {"spread": "staggered", "together": "burst"}
VALUES = {
    "platform": PLATFORMS,
    "device": PLATFORMS,
    "expected": {"holds": "passes"},
    "interface": {"offline": "engine"},
    "load_format": {"real": "auto"},
    "ramp_up": RAMP_UPS,
}
SWEEP = {"cut": "skipped"}
PARAMETERS = {"bound": "threshold"}
PLAN = {"beside": "compared", "looks": "interim_analyses"}
STREAM = {"without": "refused", "stamp_doubt_s": "stamp_uncertainty_s"}
# Fields that old hashes left out while they said what was so before there were any.
LATER = {"url": "", "tensor_parallel": 1, "allow_prefix_cache": False}
MUST_MATCH = ("backend", "gpu_name", "gpu_memory_bytes", "driver", "vllm", "torch", "cpu", "cores")
STAMPS = {"samples": ("sent", "admitted", "first_token", "last_token"), "steps": ("time",)}


def renamed(facts: Facts, names: Mapping[str, str]) -> Facts:
    """Entries with the names and the words of today."""
    found = {names.get(name, name): value for name, value in facts.items()}
    return {
        name: VALUES[name].get(value, value) if name in VALUES and isinstance(value, str) else value
        for name, value in found.items()
    }


def run_of(run: Facts) -> Facts:
    """The run of a record. In format 1 stamps were columns of their own: they get one clock of all of them."""
    if "stream" in run:
        run = {**run, "stream": renamed(run["stream"], STREAM)}
    if "telemetry" in run:
        sources = [source.replace("canary", SPEED_PROBE) for source in run["telemetry"]["sources"]]
        run = {**run, "telemetry": {**run["telemetry"], "sources": sources}}
    if "clock_us" in run:
        return run
    stamps = {
        (table, name): running_sums(run[table][f"{name}_us"]) for table, names in STAMPS.items() for name in names
    }
    clock = sorted({stamp for column in stamps.values() for stamp in column if stamp is not None})
    ticks = {stamp: tick for tick, stamp in enumerate(clock)}
    tables = {table: dict(run[table]) for table in STAMPS}
    for (table, name), column in stamps.items():
        del tables[table][f"{name}_us"]
        coded = deltas(None if stamp is None else ticks[stamp] for stamp in column)
        tables[table][f"{name}_tick"] = coded
    return {**run, "clock_us": clock_gaps(clock), **tables}


def old_series(engine: Facts, measurement: Facts) -> str:
    """The hash by which an old plan names the curve of a measurement in a closed loop."""
    spec = {
        name: value
        for name, value in engine["spec"].items()
        if name not in ("python", "gpu") and (name, value) not in LATER.items()
    }
    spec["env"] = [pair for pair in spec["env"] if pair[0] != "PYTHONPATH"]
    where = engine["environment"]
    names = (*MUST_MATCH, "host", "url") if where["backend"] == "remote" else MUST_MATCH
    load = {**measurement["load"], "concurrency": 1}
    environment = short_hash([where.get(name) for name in names])
    return short_hash([short_hash(spec), measurement["workload"]["hash"], load, environment])


def migrated(lines: Iterable[str]) -> Iterator[Facts]:
    """The lines of an archive in the format of today, as plain values.

    Keys are hashes of words, so those in plans, and those of several engines on one device, are made again. A plan may
    name a curve of which nothing was measured; it keeps its name.
    """
    old = [json.loads(line) for line in lines if line.strip()]
    engines: dict[int, Engine] = {}
    measurements: dict[int, Measurement] = {}
    series: dict[str, str] = {}
    latest: dict[str, int] = {}  # line of the last description of each launch
    for number, facts in enumerate(old):
        if facts["kind"] == "engine":
            latest[facts["id"]] = number
            spec = renamed(facts["spec"], SPEC)
            model = known_model(spec["model"])
            described = {name: value for name, value in asdict(model).items() if name != "config"} if model else None
            environment = renamed(facts["environment"], ENVIRONMENT)
            engines[number] = engine_from_record(
                {**facts, "spec": spec, "model": described, "environment": environment}
            )
        elif facts["kind"] == "measurement":
            load = renamed(facts["load"], LOAD)
            load["kind"] = {"burst": "job"}.get(load["kind"], load["kind"])
            made = measurement_of(
                {**facts, "load": load, "run": run_of(facts["run"])}, *engines[latest[facts["engine"]]]
            )
            measurements[number] = made
            if isinstance(made.load, ClosedLoop):
                key = series_key(made.spec, made.workload.hash, made.load, made.environment)
                series[old_series(old[latest[facts["engine"]]], facts)] = key
    sets = new_sets(measurements.values())
    for number, facts in enumerate(old):
        match facts["kind"]:
            case "session":
                yield session(facts, series)
            case "engine":
                yield engine_line(facts["id"], *engines[number])
            case "measurement":
                made = measurements[number]
                if made.replica:
                    made = replace(
                        made, replica=replace(made.replica, set=sets.get(made.replica.set, made.replica.set))
                    )
                yield measurement_line(made)


def new_sets(measurements: Iterable[Measurement]) -> dict[str, str]:
    """The new hash of each set of engines on one device, by its old one, as far as a whole group is there."""
    groups: dict[str, dict[int, Measurement]] = {}
    for each in measurements:
        if each.replica:
            groups.setdefault(each.replica.group, {})[each.replica.index] = each
    found = {}
    for group in groups.values():
        members = [group[index] for index in sorted(group)]
        part = members[0].replica
        if part and len(members) == part.count:
            engines = tuple(each.spec for each in members)
            spec = ReplicaSpec(engines, part.sharing, part.pinned, part.thread_percentage)
            hashes = [each.workload.hash for each in members]
            found[part.set] = replica_set(spec, hashes, [each.load for each in members])
    return found


def session(facts: Facts, series: Mapping[str, str]) -> Facts:
    claims = dict(facts.get("claims") or {})
    if "rows" in claims:
        rows = [renamed(row, ROW) for row in claims["rows"]]
        claims["rows"] = [{**row, "parameters": renamed(row.get("parameters") or {}, PARAMETERS)} for row in rows]
    plan = renamed(facts.get("plan") or {}, PLAN)
    if "sweeps" in plan:
        plan["sweeps"] = {series.get(key, key): renamed(sweep, SWEEP) for key, sweep in plan["sweeps"].items()}
    if "compared" in plan:
        plan["compared"] = sorted(series.get(key, key) for key in plan["compared"])
    return {**facts, "format": FORMAT, "claims": claims, "plan": plan}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("old", type=Path, metavar="IN")
    parser.add_argument("new", type=Path, metavar="OUT")
    given = parser.parse_args()
    opened = {".xz": lzma.open, ".gz": gzip.open}.get(given.old.suffix, open)
    with opened(given.old, "rt", encoding="utf-8") as lines:
        data = b"".join(line_of(facts) for facts in migrated(lines))
    if given.new.suffix == ".xz":
        data = lzma.compress(data, filters=FILTERS)
    elif given.new.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    given.new.write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
