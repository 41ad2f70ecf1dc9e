"""Fixtures for a user's own tests and for the shipped benchmarks, and what the hooks need to know of an item."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_slmserve.analysis.curve import Curve
    from pytest_slmserve.analysis.points import Point
    from pytest_slmserve.analysis.verdict import Verdict
    from pytest_slmserve.engines.base import Engine
    from pytest_slmserve.records import Measurement, Progress, Workload
    from pytest_slmserve.session import Session
    from pytest_slmserve.spec import ClosedLoop, EngineSpec

    Carry = Callable[[Sequence[Measurement]], None]


SESSION = pytest.StashKey["Session"]()


def is_measured(item: pytest.Item) -> bool:
    """Does this item need an engine, or what one measured?"""
    names = getattr(item, "fixturenames", ())
    return item.get_closest_marker("slm") is not None or any(name.startswith("slm_") for name in names)


class Clock:
    """A timer for pytest-benchmark that is advanced by what an engine took, not by what the test took."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def __repr__(self) -> str:
        return "<the engine's clock>"


CLOCK = Clock()


@pytest.fixture(scope="session")
def slm_session(request: pytest.FixtureRequest) -> Session:
    """What this run holds: options, host, engines, archive, measurements."""
    return request.config.stash[SESSION]


@pytest.fixture
def slm_spec(request: pytest.FixtureRequest, slm_session: Session) -> EngineSpec:
    """The engine this test asks for by its `slm` marker. Override it to ask in another way."""
    marker = request.node.get_closest_marker("slm")
    return spec_from_marker(slm_session, dict(marker.kwargs) if marker else {})


@pytest.fixture
def slm_engine(slm_session: Session, slm_spec: EngineSpec) -> Engine:
    """A door to the session's engine for `slm_spec`: started at its first use, shared with later tests."""
    return slm_session.engine(slm_spec)


@pytest.fixture
def sharegpt(slm_session: Session, slm_spec: EngineSpec) -> Workload:
    """Requests from ShareGPT conversations for this test's model, as the options want them."""
    return slm_session.workload(slm_spec.model)


@pytest.fixture
def slm_measure(slm_session: Session, slm_spec: EngineSpec, sharegpt: Workload) -> Callable[..., Point]:
    """`slm_measure(concurrency=64)` measures one point and returns it; more words are fields of ClosedLoop."""
    from pytest_slmserve.analysis.points import points_of
    from pytest_slmserve.errors import BadUsage

    def measure(concurrency: int, *, repeats: int | None = None, **load: Any) -> Point:
        wanted = replace(load_for(slm_session, slm_spec, concurrency), **load)
        if wanted.requests is not None:
            raise BadUsage("a load of a fixed number of requests has no window to measure", "slm_engine.run(...)")
        found = slm_session.measure(slm_spec, sharegpt, wanted, repeats or slm_session.options.repeats)
        return points_of(found)[0]

    return measure


@pytest.fixture
def slm_sweep(
    slm_session: Session, slm_spec: EngineSpec, sharegpt: Workload, slm_measure: Callable[..., Point]
) -> Callable[..., Curve]:
    """`slm_sweep(concurrency=[1, 2, 4])` measures these points and returns their curve, ready to be judged."""

    def sweep(concurrency: Sequence[int], *, repeats: int | None = None, **load: Any) -> Curve:
        for number in concurrency:
            slm_measure(number, repeats=repeats, **load)
        loads = tuple(replace(load_for(slm_session, slm_spec, n), **load) for n in concurrency)
        return slm_session.curve_of(slm_spec, sharegpt, loads)

    return sweep


@dataclass(frozen=True, repr=False)
class PlannedPoint:
    """One point of a planned sweep."""

    session: Session
    model: str
    load: ClosedLoop
    carry: Carry

    def measure(self) -> Verdict:
        """Measure it (unless it is known already). The verdict tells whether the measurements can be trusted."""
        from pytest_slmserve.analysis.validity import trustworthy

        spec, workload = self.session.sweep(self.model).spec, self.session.workload(self.model)
        repeats = self.session.options.repeats
        found = self.session.measure(spec, workload, self.load, repeats)
        self.carry(found)
        return trustworthy(repr(self), found, repeats)

    def __repr__(self) -> str:
        return point_id(self.model, self.load)


@pytest.fixture
def slm_point(request: pytest.FixtureRequest, slm_session: Session, slm_carrier: Carry) -> PlannedPoint:
    """One point of the planned sweep; parametrised over models and batches by the options."""
    model, load = request.param
    return PlannedPoint(slm_session, model, load, slm_carrier)


@pytest.fixture
def slm_model(request: pytest.FixtureRequest) -> str:
    """A model of the sweep; parametrised by the options."""
    return str(request.param)


@pytest.fixture
def slm_claim(request: pytest.FixtureRequest, slm_session: Session, slm_model: str) -> Callable[[], Verdict]:
    """Judges the claim named by the `slm` marker for `slm_model`, from what was measured; measures nothing.

    Where the claims table expects it to fail, the item is an expected failure, unless `--slm-strict` is given.
    """
    marker = request.node.get_closest_marker("slm")
    name = marker.kwargs["claim"]
    row = slm_session.row(name, slm_model)
    if row.expected == "fails" and not slm_session.options.strict:
        request.node.add_marker(pytest.mark.xfail(raises=AssertionError, strict=True, reason=row.evidence))
    return lambda: slm_session.judge(name, slm_model)


class BenchmarkCarrier:
    """Shows a point through pytest-benchmark: seconds per request, one round per repeat, metrics in `extra_info`."""

    @pytest.fixture
    def slm_carrier(self, benchmark: Any) -> Carry:
        from pytest_slmserve.report.carrier import extra_info, seconds_per_request

        def carry(measurements: Sequence[Measurement]) -> None:
            rounds = iter(seconds := seconds_per_request(measurements))
            if seconds:
                benchmark.extra_info.update(extra_info(measurements))
                benchmark.pedantic(lambda: CLOCK.advance(next(rounds)), rounds=len(seconds), iterations=1)

        return carry


class NoCarrier:
    """Without pytest-benchmark there is nobody to show it to."""

    @pytest.fixture
    def slm_carrier(self) -> Carry:
        return lambda measurements: None


def point_id(model: str, load: ClosedLoop) -> str:
    from pytest_slmserve.models import short_name

    return f"{short_name(model)}-{load.concurrency}"


def point_parameters(session: Session) -> list[Any]:
    """A parameter per point, marked so that pytest-benchmark reads the engine's clock."""
    unused = pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # a point may have nothing to show
    return [
        pytest.param((model, load), id=point_id(model, load), marks=[benchmark(model), unused])
        for model in session.models
        for load in session.sweep(model).loads
    ]


def benchmark(model: str) -> pytest.MarkDecorator:
    return pytest.mark.benchmark(timer=CLOCK, group=model)


def model_parameters(session: Session, marker: pytest.Mark | None) -> list[Any]:
    """A parameter per model: those of the sweep, or those that the claim's own marker names."""
    from pytest_slmserve.models import short_name

    models = (marker.kwargs.get("models") if marker else None) or session.models
    return [pytest.param(model, id=short_name(model)) for model in models]


def load_for(session: Session, spec: EngineSpec, concurrency: int) -> ClosedLoop:
    from pytest_slmserve.plan import load_of

    return load_of(session.options, spec.backend, concurrency)


def engine_of(session: Session, item: Any) -> EngineSpec | None:
    """The engine that an item needs, or whose measurements it reads; None where it is about a model that is not swept
    here. Raises BadUsage for an impossible marker."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if parameters.get("slm_point"):
        return session.sweep(parameters["slm_point"][0]).spec
    if model := parameters.get("slm_model"):
        return session.spec(model) if session.swept(model) else None
    marker = item.get_closest_marker("slm")
    return spec_from_marker(session, dict(marker.kwargs) if marker else {})


def spec_from_marker(session: Session, words: dict[str, Any]) -> EngineSpec:
    from pytest_slmserve.errors import BadUsage
    from pytest_slmserve.spec import EngineSpec

    words.pop("claim", None)
    model = words.pop("model", None) or session.models[0]
    known = {field.name for field in fields(EngineSpec)} - {"model", "backend"}
    if unknown := set(words) - known:
        raise BadUsage(f"@pytest.mark.slm has no {', '.join(sorted(unknown))}", f"model, {', '.join(sorted(known))}")
    return replace(session.spec(model), **words)


def plan_rows(session: Session, items: Sequence[pytest.Item]) -> list[tuple[str, EngineSpec | None, float]]:
    """For each item its name, the engine it starts or uses (None: it only reads) and the seconds it will take."""
    return list(_priced(session, items))


def _priced(session: Session, items: Sequence[Any]) -> Iterator[tuple[str, EngineSpec | None, float]]:
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if point := parameters.get("slm_point"):
            yield item.name, engine_of(session, item), session.price_s(*point)
        elif is_measured(item) and not parameters.get("slm_model"):
            yield item.name, engine_of(session, item), 0.0
        else:
            yield item.name, None, 0.0


def seconds_left(session: Session, items: Sequence[pytest.Item]) -> Callable[[Progress], float]:
    """From the progress of a measurement to the end of `items`, the first of which it belongs to.

    The items are priced once: that hashes each of their keys, too much to do twice a second beside what is measured.
    """
    from pytest_slmserve.plan import start_price_s

    rows = plan_rows(session, items)
    starts = sum(map(start_price_s, {spec for _, spec, _ in rows if spec} - {session.pool.current}))
    points = sum(seconds for _, _, seconds in rows)
    return lambda progress: max(0.0, points - progress.elapsed_s) + starts
