"""Fixtures for a user's own tests and for the shipped benchmarks.

Every run of pytest imports this module, and few need more. `plugin.items` is there by the time that `slm_session` has a
session, because the hooks of such a run import it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_slmserve import plugin
from pytest_slmserve.schema.errors import BadUsage

if TYPE_CHECKING:
    from pytest_slmserve.analysis.advice.advisor import Advice
    from pytest_slmserve.analysis.points import JobPoint, Point
    from pytest_slmserve.analysis.sweep.curve import Curve
    from pytest_slmserve.analysis.verdict import Verdict
    from pytest_slmserve.engines.base import Engine
    from pytest_slmserve.plugin.items import Carry, PlannedCase, SharedEngines, Watching
    from pytest_slmserve.run.gate import Gates
    from pytest_slmserve.run.judge import StoredBaseline
    from pytest_slmserve.run.session import Session, Sweeps
    from pytest_slmserve.schema.records import Measurement
    from pytest_slmserve.schema.specs import EngineSpec, Workload


@pytest.fixture(scope="session")
def slm_session(request: pytest.FixtureRequest) -> Session:
    """The session of this run: options, host, engines, archive, measurements."""
    if plugin.SESSION not in request.config.stash:  # a test that asks by `getfixturevalue` was not known to measure
        pytest.skip(plugin.NEEDS_A_MODE)
    return request.config.stash[plugin.SESSION]


@pytest.fixture
def slm_spec(request: pytest.FixtureRequest, slm_session: Session) -> EngineSpec:
    """The engine this test asks for by its `slm` marker. Override it to ask in another way."""
    return plugin.items.spec_from_marker(slm_session, plugin.items.words_of(request.node))


@pytest.fixture
def slm_engine(slm_session: Session, slm_spec: EngineSpec) -> Engine:
    """The interface to the session's engine for `slm_spec`: started at its first use, shared with later tests."""
    return slm_session.devices.start(slm_spec)  # type: ignore[return-value]  # no replicas


@pytest.fixture
def sharegpt(request: pytest.FixtureRequest, slm_session: Session, slm_spec: EngineSpec) -> Workload:
    """Requests from ShareGPT conversations for this test's model, as long as its marker or the options want them."""
    return slm_session.planner.workload(slm_spec.model, plugin.items.words_of(request.node))


def own_engine(node: pytest.Item, session: Session, spec: EngineSpec, workload: Workload) -> plugin.items.OwnEngine:
    """Return what measures points of the engine that a test asks for, and tells JUnit of them."""
    return plugin.items.OwnEngine(session, spec, workload, plugin.items.words_of(node), node.user_properties)


@pytest.fixture
def slm_measure(
    request: pytest.FixtureRequest, slm_session: Session, slm_spec: EngineSpec, sharegpt: Workload
) -> Callable[..., Point]:
    """`slm_measure(concurrency=64)` measures one point and returns it; more words are fields of ClosedLoop."""
    return own_engine(request.node, slm_session, slm_spec, sharegpt).measure


@pytest.fixture
def slm_sweep(
    request: pytest.FixtureRequest, slm_session: Session, slm_spec: EngineSpec, sharegpt: Workload
) -> Callable[..., Curve]:
    """`slm_sweep(concurrency=[1, 2, 4])` measures these points in rounds, and on until it is decided whether they
    reach a plateau; it returns their curve, ready to be judged. With `repeats` it measures each so many times."""
    return own_engine(request.node, slm_session, slm_spec, sharegpt).sweep


@pytest.fixture
def slm_advice(slm_session: Session, slm_spec: EngineSpec) -> Callable[..., Advice]:
    """`slm_advice(slo_itl="2x@32")` tells what to deploy, by all that this run has measured of this test's model, or of
    `model`. It measures nothing: if fewer than two loads are known, the test is inconclusive."""

    def advise(slo_itl: str | None = None, *, efficiency: float = 0.1, model: str | None = None) -> Advice:
        return slm_session.verdicts.advice(model or slm_spec.model, slo_itl, efficiency)

    return plugin.items.checked("slm_advice", advise)


@pytest.fixture(scope="session")
def slm_sweeps(request: pytest.FixtureRequest, slm_session: Session) -> Sweeps | None:
    """The curves of the points of this run, with the loads and the claims that its items ask for; None if Ray
    measures."""
    if slm_session.executor.fetch:
        return None
    return plugin.items.planned_sweeps(slm_session, plugin.items.plans_of(request.session.items))


@pytest.fixture
def slm_point(
    request: pytest.FixtureRequest, slm_session: Session, slm_carrier: Carry, slm_sweeps: Sweeps | None
) -> PlannedCase:
    """One point of the planned sweep; parametrised over models and batches by the options, or by the marker's
    `points`: pairs of a model and the concurrent requests."""
    [plan] = plugin.items.plans_of([request.node])
    return plugin.items.PlannedCase(slm_session, request.param, slm_carrier, slm_sweeps if plan.swept else None)


@pytest.fixture
def slm_replicas(slm_session: Session) -> Callable[..., SharedEngines]:
    """`slm_replicas(2, sharing="mps")` gives two engines of the run's first model on one device, by time slicing unless
    it is said otherwise, with sharing="gpus" on one each; `models=[...]` gives one engine of each. Of endpoints, each
    has its URL. The test is skipped, with the reason, if that cannot be."""
    return plugin.items.checked("slm_replicas", plugin.items.shared_engines, slm_session)


@pytest.fixture
def slm_replica_point(request: pytest.FixtureRequest, slm_session: Session) -> PlannedCase:
    """A single engine, or so many replicas of a model; parametrised over models, numbers and ways of sharing by the
    options."""
    return plugin.items.PlannedCase(slm_session, request.param)


@pytest.fixture
def slm_job_point(request: pytest.FixtureRequest, slm_session: Session, slm_carrier: Carry) -> PlannedCase:
    """One job: so many requests, arriving at a rate, served to the end; parametrised by the marker's `jobs`."""
    return plugin.items.PlannedCase(slm_session, request.param, slm_carrier)


@pytest.fixture
def slm_job(request: pytest.FixtureRequest, slm_session: Session, slm_spec: EngineSpec) -> Callable[..., JobPoint]:
    """`slm_job(requests=500, rate=10, lengths=(512, 64))` serves one job and returns what was found; without a
    rate all at once, without lengths those of the options. burstiness: as of an `OpenLoop`."""
    words = plugin.items.words_of(request.node)
    return plugin.items.checked("slm_job", plugin.items.own_job, slm_session, slm_spec, words)


@pytest.fixture
def slm_gpus_point(request: pytest.FixtureRequest, slm_session: Session) -> PlannedCase:
    """One engine over several GPUs, or a replica on each; parametrised over models, GPUs and loads by the marker and
    the options."""
    return plugin.items.PlannedCase(slm_session, request.param)


@pytest.fixture
def slm_model(request: pytest.FixtureRequest) -> str:
    """A model of the sweep; parametrised by the options."""
    return str(request.param)


@pytest.fixture
def slm_claim(request: pytest.FixtureRequest, slm_session: Session, slm_model: str) -> Callable[[], Verdict]:
    """Judges the claim named by the `slm` marker for `slm_model`, from what was measured; measures nothing.

    If the claims table expects it to fail, or does not know, the item is an expected failure, unless `slm_strict` is
    given.
    """
    [plan] = plugin.items.plans_of([request.node])
    assert plan.claim, "slm_model is parametrised"
    row = plan.claim.row
    if row.expected != "passes" and not slm_session.options.strict:
        surely = row.expected == "fails"
        request.node.add_marker(pytest.mark.xfail(raises=AssertionError, strict=surely, reason=row.evidence))
    return partial(slm_session.verdicts.judge, plan.claim)


@pytest.fixture
def slm_alone(request: pytest.FixtureRequest, slm_session: Session, slm_model: str) -> Callable[[], None]:
    """Measures two cells of `slm_model` once more, when no other engine of the run works: the smallest and the largest
    load of those that were measured next to others. Skipped without `--slm-ray local`."""
    engines = request.config.stash[plugin.ELSEWHERE]
    return lambda: engines.measure_alone(slm_session, slm_model)


@pytest.fixture(scope="session")
def slm_baseline(request: pytest.FixtureRequest) -> StoredBaseline:
    """The stored baseline that `--slm-baseline` names; without that option, tests that request it are skipped."""
    if plugin.BASELINE not in request.config.stash:
        pytest.skip("no baseline to compare with: needs --slm-baseline")
    return request.config.stash[plugin.BASELINE]


@pytest.fixture
def slm_against_baseline(slm_baseline: StoredBaseline, slm_model: str) -> Callable[[], Verdict]:
    """Holds what was measured of `slm_model` against the stored baseline; measures nothing."""
    return lambda: slm_baseline.judge(slm_model)


@pytest.fixture(scope="session")
def slm_gates(slm_session: Session) -> Gates:
    """The gates of this run: `slm_gates.of("opt-1.3b")` measures pairs of launches until the outcome is known."""
    from pytest_slmserve.run.gate import Gates

    return Gates(slm_session)


@pytest.fixture
def slm_gate(request: pytest.FixtureRequest, slm_gates: Gates) -> Callable[[], Verdict]:
    """Runs the gate of a model, once for all its endpoints, and gives the verdict on one; parametrised by the options.

    The test is skipped if nothing was measured of that endpoint, and an expected failure if it is waived.
    """
    from pytest_slmserve.analysis.gate.diagnosis import explained

    model, endpoint = request.param
    waiver, today = slm_gates.waiver(model, endpoint), date.today()
    if waiver and today <= waiver.until:
        request.node.add_marker(pytest.mark.xfail(raises=AssertionError, reason=explained(waiver, today)))

    def judge() -> Verdict:
        gated = slm_gates.of(model)
        verdict = gated.verdict(endpoint)
        if verdict is None:
            pytest.skip(gated.left_out(endpoint))
        if waiver and today > waiver.until:
            verdict = replace(verdict, why=f"{verdict.why}; {explained(waiver, today)}")
        told = {"gate": verdict.state.value, "ratio": verdict.value, "low": verdict.low, "high": verdict.high}
        told |= {"threshold": verdict.threshold, "pairs": verdict.n}
        # For JUnit; record_property would warn of its family.
        request.node.user_properties += [(f"slm_{name}", value) for name, value in told.items()]
        return verdict

    return judge


@pytest.fixture
def slm_gpu_sampler(slm_session: Session) -> Watching:
    """Reads the sensors during a block, `with slm_gpu_sampler() as watched:`. Then `watched` has the rows, the figures
    and the verdict over them. `--slm-telemetry` chooses what it reads. Raises BadUsage if the run reads no
    sensors."""
    sampler, environment = slm_session.devices.own_sampler(), slm_session.host.environment
    if sampler is None:
        raise BadUsage("no sensors are read in this run", "Remove --slm-telemetry off.")
    return lambda: plugin.items.watching(sampler, environment)


@pytest.fixture
def dcgm(slm_gpu_sampler: Watching) -> Watching:
    """Alias of `slm_gpu_sampler` under a familiar name: fields are keyed by DCGM's numbers, whichever source is
    read."""
    return slm_gpu_sampler


@pytest.fixture
def slm_carrier() -> Carry:
    """Shows points to nobody else; `BenchmarkReporter` has the carrier of runs with pytest-benchmark."""
    return lambda measurements: None


class BenchmarkReporter:
    """Shows a point through pytest-benchmark: seconds per request, one round per repeat, metrics in `extra_info`."""

    @pytest.fixture
    def slm_carrier(self, benchmark: Any) -> Iterator[Carry]:
        from pytest_slmserve.report.as_json import benchmark_facts

        def carry(measurements: Sequence[Measurement]) -> None:
            seconds, info = benchmark_facts(measurements)
            rounds = iter(seconds)
            if seconds:
                # A case has every token of its workload, which JSON of pytest-benchmark would repeat for each point.
                benchmark.params = {name: getattr(value, "id", value) for name, value in benchmark.params.items()}
                benchmark.extra_info.update(info)
                benchmark.pedantic(lambda: plugin.items.CLOCK.advance(next(rounds)), rounds=len(seconds), iterations=1)

        yield carry
        benchmark.skipped |= benchmark.stats is None  # or it warns: after Ctrl-C, `-W error` would cost the last screen

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_benchmark_group_stats(self, config: pytest.Config) -> Generator[None, Any, Any]:
        """Leave points of ours in pytest-benchmark's own table if all is shown, or if it compares or draws. Their
        groups say that a time there is that of a request, not of the test."""
        from pytest_slmserve.plugin.session_hooks import detail_of

        wanted = config.getoption("benchmark_compare") or config.getoption("benchmark_histogram")
        shown = wanted or (plugin.SESSION in config.stash and detail_of(config) == "all")
        found: list[tuple[str | None, list[Any]]] = []
        for name, benchmarks in (yield):
            ours = [each for each in benchmarks if plugin.OUR_KEY in each["extra_info"]]
            others = [each for each in benchmarks if plugin.OUR_KEY not in each["extra_info"]]
            found += [(name, others)] if others else []
            found += [(f"s per request: {name}" if name else "s per request", ours)] if ours and shown else []
        return found
