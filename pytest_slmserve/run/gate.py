"""Gates of a run, each measured once, and the checks before one begins."""

import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from pytest_slmserve.analysis.gate import decision, diagnosis
from pytest_slmserve.analysis.gate.launch_pairs import (
    BLOCKS,
    EVERY_ENDPOINT,
    EXACT,
    GATED,
    SMALL,
    STARTS,
    TOGETHER,
    Gated,
)
from pytest_slmserve.analysis.gate.windows import series_by_endpoint
from pytest_slmserve.archive import baselines
from pytest_slmserve.engines.base import check_fits
from pytest_slmserve.options.table import FEWEST_PAIRS
from pytest_slmserve.report.gate import calibration_text
from pytest_slmserve.run.one_gate import OneGate, SideBySide, StartGate, halves, is_short, loads_of, sides
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage, EngineFailed, Side, SlmError, naming, printed_hint
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.specs import SLEEP_MODE, Engines, EngineSpec


@dataclass
class Gates:
    """Gates of a run, each measured once.

    Attributes:
        failed: error that ended a gate early, by model. It is not tried again.
    """

    session: Session
    found: dict[str, Gated] = field(default_factory=dict)
    failed: dict[str, SlmError] = field(default_factory=dict)

    @cached_property
    def waivers(self) -> tuple[diagnosis.Waiver, ...]:
        """Waivers in the file of the options. Raises BadUsage if it cannot be read, or names an unknown endpoint."""
        path = self.session.options.waivers
        found = baselines.read_waivers(Path(path)) if path else ()
        if unknown := next((w for w in found if w.endpoint not in EVERY_ENDPOINT), None):
            raise BadUsage(
                f"{path}: no gate compares {unknown.endpoint!r}", "Use one of " + ", ".join(EVERY_ENDPOINT) + "."
            )
        return found

    def waiver(self, model: str, endpoint: str) -> diagnosis.Waiver | None:
        """Return the waiver for an endpoint of a model on this device, valid or expired, or None."""
        device = self.session.host.environment.gpu_name or self.session.platform
        return diagnosis.waiver_for(self.waivers, model, endpoint, device)

    def of(self, model: str) -> Gated:
        """Return the gate of a model, which runs at the first call. Raise the error that ended it."""
        if error := self.failed.get(model):  # the first test has already raised it
            raise type(error)(f"the gate of {short_name(model)} was broken off")
        if model not in self.found:
            try:
                gated = one_gate(self.session, model).run()
                self.found[model] = gated if is_short(self.session) else in_view_of_noise(self.session, gated)
            except Exception as error:  # including a full disk, because launches are expensive and would fail again
                known = isinstance(error, SlmError)
                self.failed[model] = error if known else EngineFailed(f"{type(error).__name__}: {error}")
                first = f"the gate of {short_name(model)} was broken off: {self.failed[model].cause}"
                self.session.notes.insert(
                    0, f"{first}{f' ({printed_hint(hint)})' if (hint := self.failed[model].hint) else ''}"
                )
                if isinstance(error, AssertionError):  # pytest would take it for a failing verdict
                    raise RuntimeError(f"the gate of {short_name(model)} was broken off") from error
                raise
            self.session.gates.append(self.found[model])
        return self.found[model]


def check_gate(session: Session, model: str) -> None:
    """Raise BadUsage, naming the side, if a gate could not be run or judged. Starts nothing."""
    _ = Gates(session).waivers, baselines.read_calibrations(session.options.records)
    if not of_start(session):
        loads_of(session, model)
    both = sides(session.planner.spec(model), session.options)
    if session.options.side:
        check_differ(both)
    live_together(session, model)
    for side, spec in both.items():
        with naming(f"the {side}"):
            if of_start(session):
                check_starts(spec)
            check_fits(spec, session.planner.workload(model))
            if not session.options.plan:  # a plan is made without a GPU too
                session.planner.environment(spec)


def check_starts(spec: EngineSpec) -> None:
    """Raise BadUsage if a gate of the start cannot measure this engine."""
    if spec.interface == "transformers":
        raise BadUsage(
            "an engine of Transformers has no start but its imports",
            "Use --slm-interface engine or --slm-interface server.",
        )
    if not spec.arguments.get(SLEEP_MODE):
        return
    if spec.platform == "cpu":
        raise BadUsage("vLLM's CPU backend has no sleep mode", f"Run with --slm-gpu, or remove {SLEEP_MODE}.")
    if spec.interface != "engine":
        raise BadUsage(
            f"a {spec.interface} is not put to sleep by us", f"Use --slm-interface engine, or remove {SLEEP_MODE}."
        )


def of_start(session: Session) -> bool:
    """Return whether the gate judges only the start."""
    return session.options.gate_launches == "start" and not is_short(session)


def check_differ(both: Mapping[Side, EngineSpec]) -> None:
    """Raise BadUsage if both sides are the same engine, perhaps by different names."""
    first, second = (replace(spec, python=folder_of(spec.python)) for spec in both.values())
    if first == second:
        same = f"the candidate is the baseline: both have the Python in {first.python}, and the same arguments"
        raise BadUsage(same, "Say with --slm-side what differs, or gate two equal sides with --slm-calibrate.")


def folder_of(python: str) -> str:
    """Return the folder of an interpreter, however it was named."""
    # Only the folder is resolved, because an environment may link to the interpreter of another one.
    return str(Path(shutil.which(python or sys.executable) or python).parent.resolve())


def live_together(session: Session, model: str) -> bool:
    """Return whether the sides of a gate share the device at once, which is the default if they can.

    Raises:
        BadUsage: if they cannot although the option was given.
    """
    options, why = session.options, ""
    if options.gate_launches != "together" or is_short(session):
        return False
    spec = session.planner.spec(model)
    if session.platform == "cpu":
        why = "two engines on one CPU take each other's cores"
    elif spec.interface == "transformers":
        why = "an engine of Transformers takes what memory it needs"
    elif spec.tensor_parallel_size > 1:
        why = f"each engine has {spec.tensor_parallel_size} GPUs, and busy seconds are counted on one"
    else:
        try:
            halves(session, model)
        except BadUsage as error:
            why = error.problem
    if why and options.source["gate_launches"] != "default":
        raise BadUsage(f"both sides cannot live on the device at once: {why}", "--slm-gate-launches=apart")
    if why:
        session.note(f"the gate of {short_name(model)} launches its sides one after the other: {why}")
    return not why


def not_told(session: Session, model: str) -> dict[str, str]:
    """Return the endpoints that a gate does not judge with this way of launching, each with the reason."""
    if of_start(session):
        gate = StartGate(session, model)
        judged = {name for name, each in STARTS.items() if (each.caches in gate.states if each.caches else gate.sleeps)}
        nothing_else = "a gate of the start judges nothing else: --slm-gate-launches=apart"
        return {name: nothing_else for name in EVERY_ENDPOINT if name not in {*judged, BLOCKS}}
    of_starts = dict.fromkeys(STARTS.keys() - GATED.keys(), "a gate of the start judges it: --slm-gate-launches=start")
    if not live_together(session, model):
        return of_starts | dict.fromkeys(TOGETHER.keys() - GATED.keys(), "seen of both sides at once")
    alone = "two engines on one GPU at once cannot tell it: --slm-gate-launches=apart"
    reasons = of_starts | dict.fromkeys((*(GATED.keys() - TOGETHER.keys()), *EXACT), alone)
    if len(loads_of(session, model)) == 1:
        small = "it is judged at a small load, and there is one load: --slm-concurrency=8,256"
        reasons |= {name: small for name, endpoint in TOGETHER.items() if endpoint.load == SMALL}
    return reasons


def one_gate(session: Session, model: str) -> OneGate:
    """Return the gate of a model, new or continued."""
    if of_start(session):
        return StartGate(session, model)
    return SideBySide(session, model) if live_together(session, model) else OneGate(session, model)


def launches_left(session: Session, model: str, launched: Collection[Engines] = ()) -> tuple[int, int]:
    """Return the remaining launches of a gate, see `OneGate.launches_left`."""
    return one_gate(session, model).launches_left(launched)


def in_view_of_noise(session: Session, gated: Gated) -> Gated:
    """Return the gate judged with the noise of this host, if it is known.

    A calibration stores the noise of its pairs.
    """
    records = session.options.records
    if gated.terms.launches == "start":  # there is no calibration for it
        return gated
    if session.options.calibrate:
        noise = decision.noise_of(gated.gated)
        if len(noise.costs) < FEWEST_PAIRS:
            few = f"{len(noise.costs)} pairs of {gated.model} are valid and have every figure, too few"
            raise BadUsage(few, "Use a quieter host, which `slmserve doctor` can check.")
        now, series = datetime.now(UTC).isoformat(timespec="seconds"), list[decision.PairSeries](gated.gated)
        if gated.terms.together:
            allowances = baselines.allowances_of(noise, now)
            by_endpoint = series_by_endpoint(gated.pairs, gated.terms, allowances)
            series = [each for each in by_endpoint.values() if each.name in noise.names]
        rates = decision.calibrate(noise, series, gated.terms)
        place = baselines.noise_key(gated.pairs[0].baseline.at_each_load, gated.terms, gated.caches)
        baselines.keep(records, baselines.StoredNoise(place, now, rates))
    gated, known = baselines.judged_by_noise(gated, records)
    if known:
        session.notes.append(calibration_text(known))
    elif gated.pairs and session.platform != "simulated":  # simulated noise is a formula
        unknown = f"no calibration of {gated.model} on this host"
        session.notes.append(f"{unknown}: --slm-calibrate measures what a gate can detect")
    return gated
