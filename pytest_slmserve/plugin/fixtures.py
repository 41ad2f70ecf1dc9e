"""Fixtures for your tests and for the built-in benchmarks.

Every run of pytest imports this module, so it imports little. `plugin.items` is loaded before `slm_session` has a
session, because the hooks of a run that measures import it. `pytest --fixtures` prints only the first paragraph of a
docstring, so each fixture has one.
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
    """Session of this run: options, host, engines, results file and measurements."""
    if plugin.SESSION not in request.config.stash:  # a test that asks by `getfixturevalue` was not known to measure
        pytest.skip(plugin.NEEDS_A_MODE)
    return request.config.stash[plugin.SESSION]


@pytest.fixture
def slm_spec(request: pytest.FixtureRequest, slm_session: Session) -> EngineSpec:
    """Engine that the `slm` marker of this test describes. Override this fixture to use another engine."""
    return plugin.items.spec_from_marker(slm_session, plugin.items.words_of(request.node))


@pytest.fixture
def slm_engine(slm_session: Session, slm_spec: EngineSpec) -> Engine:
    """Engine for `slm_spec`. It starts at its first use, and later tests share it."""
    return slm_session.devices.start(slm_spec)  # type: ignore[return-value]  # no replicas


@pytest.fixture
def sharegpt(request: pytest.FixtureRequest, slm_session: Session, slm_spec: EngineSpec) -> Workload:
    """Requests from ShareGPT for this test's model, with the lengths of its marker or of the options."""
    return slm_session.planner.workload(slm_spec.model, plugin.items.words_of(request.node))


def own_engine(node: pytest.Item, session: Session, spec: EngineSpec, workload: Workload) -> plugin.items.OwnEngine:
    """Return the engine of a test, which measures points and adds their figures to the JUnit file."""
    return plugin.items.OwnEngine(session, spec, workload, plugin.items.words_of(node), node.user_properties)


@pytest.fixture
def slm_measure(
    request: pytest.FixtureRequest, slm_session: Session, slm_spec: EngineSpec, sharegpt: Workload
) -> Callable[..., Point]:
    """Function that measures and returns one point: `slm_measure(concurrency=64)`.
    It also takes `repeats` and the fields of ClosedLoop.
    """
    return own_engine(request.node, slm_session, slm_spec, sharegpt).measure


@pytest.fixture
def slm_sweep(
    request: pytest.FixtureRequest, slm_session: Session, slm_spec: EngineSpec, sharegpt: Workload
) -> Callable[..., Curve]:
    """Function that measures several points and returns their curve: `slm_sweep(concurrency=[1, 2, 4])`.
    Without `repeats` it measures until it is decided whether the points reach a plateau, or the budget is spent. With
    `repeats` it measures each point that many times.
    """
    return own_engine(request.node, slm_session, slm_spec, sharegpt).sweep


@pytest.fixture
def slm_advice(slm_session: Session, slm_spec: EngineSpec) -> Callable[..., Advice]:
    """Function that recommends a deployment: `slm_advice(slo_itl="2x@32")`.
    It uses what this run has measured of the test's model, or of `model`, and measures nothing. The test is
    inconclusive if fewer than two loads are known.
    """

    def advise(slo_itl: str | None = None, *, efficiency: float = 0.1, model: str | None = None) -> Advice:
        return slm_session.verdicts.advice(model or slm_spec.model, slo_itl, efficiency)

    return plugin.items.checked("slm_advice", advise)


@pytest.fixture(scope="session")
def slm_sweeps(request: pytest.FixtureRequest, slm_session: Session) -> Sweeps | None:
    """Curves that the tests of this run measure, with their loads and claims; None if Ray measures."""
    if slm_session.executor.fetch:
        return None
    return plugin.items.planned_sweeps(slm_session, plugin.items.plans_of(request.session.items))


@pytest.fixture
def slm_point(
    request: pytest.FixtureRequest, slm_session: Session, slm_carrier: Carry, slm_sweeps: Sweeps | None
) -> PlannedCase:
    """Point of the planned sweep, to measure with `slm_point.measure()`.
    The options parametrize it over models and concurrencies, or the marker's `points` do: pairs of a model and a
    concurrency.
    """
    [plan] = plugin.items.plans_of([request.node])
    return plugin.items.PlannedCase(slm_session, request.param, slm_carrier, slm_sweeps if plan.swept else None)


@pytest.fixture
def slm_replicas(slm_session: Session) -> Callable[..., SharedEngines]:
    """Function that returns several engines of one model on one device: `slm_replicas(2, sharing="mps")`.
    They share by time slicing unless `sharing` is given; "gpus" gives each its own GPU. The model is the first of the
    run unless `model` or `models=[...]`, with one for each engine, is given. Replicas of an endpoint have a URL each.
    The test is skipped if the engines cannot share the device.
    """
    return plugin.items.checked("slm_replicas", plugin.items.shared_engines, slm_session)


@pytest.fixture
def slm_replica_point(request: pytest.FixtureRequest, slm_session: Session) -> PlannedCase:
    """Single engine, or replicas of a model. The options parametrize it over models, numbers and ways of sharing."""
    return plugin.items.PlannedCase(slm_session, request.param)


@pytest.fixture
def slm_job_point(request: pytest.FixtureRequest, slm_session: Session, slm_carrier: Carry) -> PlannedCase:
    """Job: a number of requests that arrive at a rate, served to the end. The marker's `jobs` parametrize it."""
    return plugin.items.PlannedCase(slm_session, request.param, slm_carrier)


@pytest.fixture
def slm_job(request: pytest.FixtureRequest, slm_session: Session, slm_spec: EngineSpec) -> Callable[..., JobPoint]:
    """Function that serves a job and returns its results: `slm_job(requests=500, rate=10, lengths=(512, 64))`.
    Without `rate` all requests arrive at once. Without `lengths` they have the lengths of the options. `burstiness` is
    that of OpenLoop.
    """
    words = plugin.items.words_of(request.node)
    return plugin.items.checked("slm_job", plugin.items.own_job, slm_session, slm_spec, words)


@pytest.fixture
def slm_gpus_point(request: pytest.FixtureRequest, slm_session: Session) -> PlannedCase:
    """Engine over several GPUs, or a replica on each. Marker and options parametrize it over models, GPUs and loads."""
    return plugin.items.PlannedCase(slm_session, request.param)


@pytest.fixture
def slm_model(request: pytest.FixtureRequest) -> str:
    """Model of the sweep. The options parametrize it."""
    return str(request.param)


@pytest.fixture
def slm_claim(request: pytest.FixtureRequest, slm_session: Session, slm_model: str) -> Callable[[], Verdict]:
    """Function that evaluates the claim of the `slm` marker for `slm_model`. It measures nothing.
    If the claim is expected to fail, or has no expected verdict, the test is an expected failure, unless `slm_strict`
    is set.
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
    """Function that measures two points of `slm_model` again while no other engine of the run works.
    They are the smallest and the largest load that were measured next to other engines. Skipped without `--slm-ray
    local`.
    """
    engines = request.config.stash[plugin.ELSEWHERE]
    return lambda: engines.measure_alone(slm_session, slm_model)


@pytest.fixture(scope="session")
def slm_baseline(request: pytest.FixtureRequest) -> StoredBaseline:
    """Stored baseline of `--slm-baseline`. Without that option, tests that request it are skipped."""
    if plugin.BASELINE not in request.config.stash:
        pytest.skip("no baseline to compare with: needs --slm-baseline")
    return request.config.stash[plugin.BASELINE]


@pytest.fixture
def slm_against_baseline(slm_baseline: StoredBaseline, slm_model: str) -> Callable[[], Verdict]:
    """Function that compares the measurements of `slm_model` with the stored baseline. It measures nothing."""
    return lambda: slm_baseline.judge(slm_model)


@pytest.fixture(scope="session")
def slm_gates(slm_session: Session) -> Gates:
    """Gates of this run: `slm_gates.of("opt-1.3b")` launches pairs until the outcome is known."""
    from pytest_slmserve.run.gate import Gates

    return Gates(slm_session)


@pytest.fixture
def slm_gate(request: pytest.FixtureRequest, slm_gates: Gates) -> Callable[[], Verdict]:
    """Function that returns a gate's verdict on one endpoint of a model. The options parametrize it.
    The gate of a model runs once for all its endpoints. The test is skipped if the endpoint was not measured, and an
    expected failure if it is waived.
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
    """Context manager that reads the sensors during a block: `with slm_gpu_sampler() as watched:`.
    After the block, `watched` has `telemetry`, `figures` and `health`. `--slm-telemetry` chooses the sensors. The
    fixture raises BadUsage if the run reads no sensors.
    """
    sampler, environment = slm_session.devices.own_sampler(), slm_session.host.environment
    if sampler is None:
        raise BadUsage("no sensors are read in this run", "Remove --slm-telemetry off.")
    return lambda: plugin.items.watching(sampler, environment)


@pytest.fixture
def dcgm(slm_gpu_sampler: Watching) -> Watching:
    """Alias of `slm_gpu_sampler`. Fields have the numbers of DCGM, whichever source is read."""
    return slm_gpu_sampler


@pytest.fixture
def slm_carrier() -> Carry:
    """Function that shows measurements to pytest-benchmark, or does nothing if it is not active."""
    return lambda measurements: None


class BenchmarkReporter:
    """Plugin that shows points in pytest-benchmark, in seconds per request, with a round for each repeat."""

    @pytest.fixture
    def slm_carrier(self, benchmark: Any) -> Iterator[Carry]:
        """Function that shows measurements through pytest-benchmark."""
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
        """Remove our points from pytest-benchmark's table, unless all is shown, or runs are compared or drawn.

        Groups of our points say that a time is per request, not per test.
        """
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
