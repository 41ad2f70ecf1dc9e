"""pytest-xdist's hooks: a worker for each GPU, and one archive and one report in the end. Imported where `-n` is given
with a mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from xdist.workermanage import parse_tx_spec_config

from pytest_slmserve.archive.merge import folder_of_parts
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.costs import PlannedItem
from pytest_slmserve.plan.schedule import divided, groups_of, in_order
from pytest_slmserve.plan.titles import Engines
from pytest_slmserve.plugin.estimates import plan_rows
from pytest_slmserve.plugin.items import PART, PROBLEM, engine_of, is_late, is_measured, is_skipped, part_of
from pytest_slmserve.plugin.xdist_scheduler import LAST, EngineScheduling
from pytest_slmserve.run.gather import gather_all, gather_others, open_for, save_outcome
from pytest_slmserve.run.gpu_slots import GpuLease, GpuSlot, agreed, cores_here
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage, SlmError
from pytest_slmserve.schema.literals import Platform
from pytest_slmserve.schema.loads import Load
from pytest_slmserve.telemetry.host_probe import IMAGINED_GPUS, numa_nodes, visible_gpus

SEAT = "slm_seat"  # of a worker, in what xdist gives it
SCOPES = "scopes"  # what workers agree on: which items go to one of them
# What one process does alone, and why.
ALONE = {
    "gate": "a gate compares two sides, and what others do would be taken for their difference",
    "calibrate": "a calibration measures the noise of a runner, not of its neighbours",
    "endpoint": "the workers would be load for each other at one server",
}


def workers_for(platform: Platform) -> int:
    """The number of workers that `-n auto` means: visible GPUs, simulated GPUs (no more than cores), or NUMA nodes.
    Raises BadUsage."""
    match platform:
        case "cuda":
            return len(visible_gpus())
        case "simulated":
            return min(len(IMAGINED_GPUS), len(cores_here()) or 1)
        case _:
            return numa_nodes()


def session_of(config: pytest.Config, options: Options) -> Session:
    """The session of a worker, or of the controller of several. Raises BadUsage where several workers could not carry
    out the options."""
    if given := getattr(config, "workerinput", None):
        session = Session.from_options(options, config.rootpath, GpuLease(GpuSlot(**given[SEAT]), given["workerid"]))
        config.pluginmanager.register(Worker(session), "slmserve-worker")
        return session
    for name, why in ALONE.items():
        if getattr(options, name):
            raise BadUsage(f"--slm-{name} with -n: {why}", "leave out -n")
    places = parse_tx_spec_config(config)
    if not all(place.startswith("popen") for place in places):
        raise BadUsage("--tx: workers on other hosts see other GPUs", "-n, with a worker for each GPU of this host")
    session = Session.from_options(options, config.rootpath)
    _ = session.planner.models  # unknown ones are refused here; which sweeps to plan, the items will say
    config.pluginmanager.register(Controller(session, len(places)), "slmserve-controller")
    return session


class Controller:
    """The process that starts the workers. It measures nothing."""

    def __init__(self, session: Session, workers: int) -> None:
        self.session, self.workers = session, workers
        self.free: list[GpuSlot] = []
        self.taken: dict[str, GpuSlot] = {}
        self.problem = ""

    def pytest_sessionstart(self) -> None:
        """Takes the GPUs and the archive before xdist starts its workers. Raises UsageError where it cannot."""
        try:
            self.free = open_for(self.session, self.workers)
        except SlmError as error:
            raise pytest.UsageError(f"slmserve: {error}") from None

    def pytest_configure_node(self, node: Any) -> None:
        slot = self.taken[node.gateway.id] = self.free.pop(0)
        node.workerinput[SEAT] = asdict(slot)

    def pytest_testnodedown(self, node: Any) -> None:
        """A worker that replaces one that crashed gets its place."""
        if slot := self.taken.pop(node.gateway.id, None):
            self.free.append(slot)

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> EngineScheduling:
        folder = folder_of_parts(Path(self.session.options.records))
        return EngineScheduling(config, log, lambda: agreed(folder, SCOPES))

    def gather(self, session: pytest.Session) -> None:
        """Merges the workers' results when all are through, or have been stopped."""
        self.problem = gather_all(self.session)
        if self.problem:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.problem:
            terminalreporter.write_line(f"ERROR: {self.problem}", red=True)


class Worker:
    """The hooks of one worker. Its archive and its outcome are in the shared folder."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.gathered = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Gathers what is measured already, for a worker that replaces one that crashed; agrees with the others on the
        scopes."""
        lease = self.session.lease
        assert lease
        gather_others(self.session)
        lease.agreed(SCOPES, lambda: scopes_of(self.session, session.items))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Gathers what the others measured before the first late item: it reads several engines, and runs when all have
        been measured."""
        if not self.gathered and is_late(item):
            gather_others(self.session)
            self.gathered = True

    def pytest_runtest_logfinish(self) -> None:
        save_outcome(self.session)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        save_outcome(self.session, session.config.stash.get(PROBLEM, ""))


def scopes_of(session: Session, items: Sequence[pytest.Item]) -> Mapping[str, str]:
    """Items that go to one worker have one scope: those of an engine, or of a part of its cells, and those that come
    last."""
    engines: dict[Any, str] = {}
    found = {}
    for item in filter(is_measured, items):
        if is_late(item):
            found[item.nodeid] = LAST
        elif engine := engine_of(session, item):
            found[item.nodeid] = engines.setdefault((engine, part_of(item)), f"engine {len(engines)}")
    return found


def parts_in_order(session: Session, lease: GpuLease, items: Sequence[pytest.Item]) -> dict[tuple[Any, int], int]:
    """The rank of each engine, as they are to begin, and of each part of one whose cells are divided; the items of such
    a part are told. One worker decides for all, by what it reads here of a run that is resumed: xdist wants all to have
    the same items in the same order, and whoever replaces one that crashed may read more."""
    if session.resumes:
        session.resume()
    there = [item for item in items if not is_skipped(item)]
    told = lease.agreed("parts", lambda: _parts_and_ranks(lease, there, plan_rows(session, there)))
    ranks = {}
    for item in there:
        item.stash[PART], rank = told.get(item.nodeid, (0, None))
        if rank is not None:
            ranks[engine_of(session, item), item.stash[PART]] = rank
    return ranks


def _parts_and_ranks(
    lease: GpuLease, items: Sequence[pytest.Item], cells: Sequence[PlannedItem]
) -> dict[str, tuple[int, int]]:
    """The part and the rank of each item with a cell that an engine is to serve, by the item's id."""
    groups, places = groups_of(cells), len(lease.slot.devices)
    if all(group.gpus <= places for group in groups):  # else one is refused when it is to start, or has a place's cores
        groups = divided(groups, places)
    begun, found = Counter[Engines](), dict[tuple[Engines, Load | None], tuple[int, int]]()
    for rank, group in enumerate(in_order(groups)):
        found |= {(group.engine, load): (begun[group.engine], rank) for load in group.by_load}
        begun[group.engine] += 1
    return {item.nodeid: found[cell.engine, cell.load] for item, cell in zip(items, cells) if cell.engine}
