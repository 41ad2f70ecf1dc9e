"""Rows are those of the run's time, as an archive keeps them; one that fails costs no other; readings are at even
times, in one thread, up to the end; several GPUs stay apart; and those sources are opened that the choice names."""

import threading
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from refusals import refused
from stored_records import stored
from strategies import measurement

from pytest_slmserve.analysis.metrics.validity import health
from pytest_slmserve.archive.codec import measurement_line
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import BadUsage, SensorFailed
from pytest_slmserve.schema.sensors import HOST_CORES, POWER, PROBE, PROBE_CPU, SM_ACTIVE
from pytest_slmserve.telemetry import sampler as selection
from pytest_slmserve.telemetry.host import MIN_SPAN_S, Reading, SensorSource
from pytest_slmserve.telemetry.sampler import Recording, Sampler, SeveralGpus, merged_readings, open_sampler

ONE = measurement()


class Planted(SensorSource):
    """Gives its readings one after the other, the last again and again; an exception among them is raised."""

    def __init__(self, *readings: Reading | Exception, name: str = "planted") -> None:
        self.readings, self.name = readings or (Reading({POWER: 300.0}),), name
        self.asked, self.threads, self.closed, self.twice = [], set(), 0, threading.Event()

    def read(self, now_s):
        self.asked.append(now_s)
        self.threads.add(threading.get_ident())
        if len(self.asked) >= 2:
            self.twice.set()
        found = self.readings[min(len(self.asked), len(self.readings)) - 1]
        if isinstance(found, Exception):
            raise found
        return found

    def close(self):
        self.closed += 1


def recorded(sources, times):
    """A recording that was read at these times."""
    clock = iter(times)
    recording = Recording(sources, 0.25, clock=lambda: next(clock))
    for _ in times:
        recording.read()
    return recording


quarters = st.integers(0, 40).map(lambda number: number / 4)  # so that rows are at the very ends


@given(st.integers(-9999, 9999), st.lists(quarters, min_size=1, max_size=30), quarters, quarters)
def test_telemetry_rows_surround_window(began_s, after_s, first_s, length_s):
    times = [began_s + at for at in sorted(after_s)]
    recording = recorded([Planted()], times)
    kept = recording.telemetry(began_s, (first_s, first_s + length_s)).time_s
    assert kept == tuple(at for at in sorted(after_s) if first_s - 1.0 <= at <= first_s + length_s + 0.25)
    everything = recording.telemetry(began_s)
    assert (len(everything), everything.sources, everything.interval_s) == (len(times), ("planted",), 0.25)


def test_unknown_sensor_values_stay_empty(tmp_path):
    readings = [Reading({POWER: 1.0}), Reading({POWER: 2.0, SM_ACTIVE: 0.5}, 1 / 3, ("a",)), Reading({SM_ACTIVE: 0.6})]
    found = recorded([Planted(*readings, Reading({POWER: None}, missing=("a", "b")))], range(4)).telemetry(0.0)
    assert found.columns == {POWER: (1.0, 2.0, None, None), SM_ACTIVE: (None, 0.5, 0.6, None)}
    assert (found.missing, found.notes, found.span_s) == ({"a": 2, "b": 1}, (), (None, 0.333333, None, None))
    probed = {PROBE: 0.003747, PROBE_CPU: 0.003694}
    pieces = [Reading(), Reading(probed, 1 / 3), Reading({PROBE: 0.0087, PROBE_CPU: None})]
    host = Reading({POWER: 1 / 3, SM_ACTIVE: 2 / 3, HOST_CORES: 1.94949})
    gpus = SeveralGpus([[Planted(Reading({POWER: watts}))] for watts in (300.0, 200.0)])
    found = recorded([Planted(*pieces), Planted(host), gpus], [1.0, 2.0, 3.0]).telemetry(0.0)
    assert (found.columns[POWER], found.columns[SM_ACTIVE]) == ((0.333,) * 3, (0.6667,) * 3)
    kept = replace(ONE, run=replace(ONE.run, telemetry=found))
    columns = measurement_line(kept)["run"]["telemetry"]["columns"]
    assert (columns[str(PROBE)], columns[str(PROBE_CPU)]) == ([None, 3747, 4953], [None, 3694, None])
    (again,) = read(stored(tmp_path / "a.jsonl", kept)).measurements
    assert again.run.telemetry == found and again.key == ONE.key, "the question is the same with sensors beside it"


@pytest.mark.parametrize("fault", [SensorFailed("the GPU is lost"), ZeroDivisionError("ours")])
def test_failing_source_spares_others(fault):
    lost, host = Planted(Reading({POWER: 1.0}), fault, name="lost"), Planted(Reading({HOST_CORES: 2.0}))
    found = recorded([lost, host], [1.0, 2.0, 3.0]).telemetry(0.0)
    assert found.columns == {POWER: (1.0, None, None), HOST_CORES: (2.0, 2.0, 2.0)} and len(lost.asked) == 2
    assert health(replace(ONE.run, telemetry=found), ONE.environment).state == "degraded"
    (note,) = found.notes
    assert note.startswith("lost ") and " 1 " in note and getattr(fault, "problem", "ZeroDivisionError: ours") in note
    alone = recorded([Planted(fault)], [1.0, 2.0]).telemetry(0.0)
    assert (len(alone), alone.columns, len(alone.notes)) == (0, {}, 1)


numbers = st.dictionaries(st.sampled_from([POWER, SM_ACTIVE, HOST_CORES]), st.none() | st.floats(0, 1))
reasons = st.lists(st.sampled_from("abc"), max_size=2).map(tuple)
readings = st.builds(Reading, numbers, st.none() | st.floats(0.1, 1), reasons, st.lists(numbers, max_size=2).map(tuple))


@given(st.lists(readings, min_size=1, max_size=4))
def test_first_source_with_number_counts(several):
    both = merged_readings(several)
    assert both.values.keys() == set().union(*(r.values.keys() for r in several))
    for number, value in both.values.items():
        assert value == next(r.values[number] for r in several if number in r.values)
    assert both.span_s == next((r.span_s for r in several if r.span_s is not None), None)
    assert both.gpus == next((r.gpus for r in several if r.gpus), ())
    assert both.missing == sum((r.missing for r in several), ())


class OwnTime:
    """A clock of the test, and the event that ends a recording: a wait takes as long as is asked and what is planted in
    `late` in addition, unless the end comes before."""

    def __init__(self, ends_s, late=()):
        self.now, self.ends_s, self.late = 100.0, 100.0 + ends_s, iter(late)

    def wait(self, left_s):
        self.now = min(self.now + max(0.0, left_s) + next(self.late, 0.0), max(self.now, self.ends_s))
        return self.now >= self.ends_s


def times_read(time, interval_s, reading_takes_s=0.0):
    class Slow(Planted):
        def read(self, now_s):
            time.now += reading_takes_s
            return super().read(now_s)

    recording = Recording([Slow()], interval_s, clock=lambda: time.now)
    recording.read_until(time)
    return [round(at - 100.0, 6) for at, _ in recording.rows]


@pytest.mark.parametrize(("ends_s", "interval_s", "takes_s", "times"), [
    (1.0, 0.25, 0.0, [0.0, 0.25, 0.5, 0.75, 1.0]), (0.86, 0.25, 0.0, [0.0, 0.25, 0.5, 0.75, 0.86]),
    (0.84, 0.25, 0.0, [0.0, 0.25, 0.5, 0.75]), (0.3, 10.0, 0.0, [0.0, 0.3]), (0.02, 10.0, 0.0, [0.0]),
    (0.8, 0.1, 0.15, [0.0, 0.2, 0.4, 0.6, 0.8]),
], ids=["even", "its end", "just after a reading", "long", "too short", "a slow source"])  # fmt: skip
def test_readings_come_at_even_times(ends_s, interval_s, takes_s, times):
    assert times_read(OwnTime(ends_s), interval_s, takes_s) == times


@given(st.lists(st.floats(0.0, 0.4), max_size=20), st.floats(MIN_SPAN_S, 1.0), st.floats(15.0, 20.0))
def test_late_reading_keeps_spacing(late, interval_s, intervals):
    ends_s = intervals * interval_s
    times = times_read(OwnTime(ends_s, late), interval_s)
    gaps = [b - a for a, b in pairwise(times)]
    assert min(gaps[:-1]) >= interval_s / 2 - 1e-6, "the last reading is that of the end"
    assert gaps[-1] >= min(MIN_SPAN_S, interval_s / 2) - 1e-6 and 0 <= ends_s - times[-1] + 1e-6 <= MIN_SPAN_S + 2e-6


@pytest.mark.parametrize("interval", [0.0, 0.05, 0.0999])
def test_too_short_interval_is_refused(interval):
    for ask in (lambda: Sampler([], interval), lambda: open_sampler("auto", "cpu", interval)):
        with refused(f"{interval:g}", "0.1", hint="slm_telemetry_interval"):
            ask()


def test_outermost_recording_ends_thread():
    source = Planted()
    sampler = Sampler([source], MIN_SPAN_S)
    assert (sampler.name, Sampler([]).name, Sampler([]).interval_s) == ("planted", "none", 0.25)
    with sampler.recording() as outer:
        with sampler.recording() as inner:
            assert inner is outer
        assert source.twice.wait(30.0)
        assert "slm-telemetry" in {thread.name for thread in threading.enumerate()}
    assert len(source.threads) == 1 and threading.get_ident() not in source.threads
    assert "slm-telemetry" not in {thread.name for thread in threading.enumerate()}
    assert [at for at, _ in outer.rows] == source.asked and min(b - a for a, b in pairwise(source.asked)) >= 0.05
    with pytest.raises(KeyboardInterrupt), sampler.recording() as another:
        raise KeyboardInterrupt
    assert another is not outer and "slm-telemetry" not in {thread.name for thread in threading.enumerate()}


def gpu(value, name="nvml", number=POWER, span_s=None, missing=()):
    return Planted(Reading({number: value}, span_s, missing), name=name)


def test_gpus_have_separate_columns():
    counters = gpu(None, "dcgm", SM_ACTIVE, 0.5, ("1002: too early",))
    span = gpu(300.0, span_s=0.25)
    both, host = SeveralGpus([[span], [counters, gpu(200.0)]]), gpu(1.5, "host", HOST_CORES)
    found = recorded([both, host], [100.0, 100.25]).telemetry(began_s=100.0)
    assert found.gpus == ({POWER: (300.0, 300.0)}, {SM_ACTIVE: (None, None), POWER: (200.0, 200.0)})
    assert found.columns == {HOST_CORES: (1.5, 1.5)} and found.sources == ("2 x nvml or dcgm + nvml", "host")
    assert found.missing == {"GPU 1: 1002: too early": 2} and found.span_s == (0.25, 0.25)
    both.close()
    assert (span.closed, counters.closed) == (1, 1)
    lost = Planted(SensorFailed("the GPU is lost"))
    found = recorded([SeveralGpus([[gpu(300.0)], [lost]])], [100.0, 100.25]).telemetry(began_s=100.0)
    assert found.gpus == () and len(found.notes) == 1 and "the GPU is lost" in found.notes[0]
    late = Planted(Reading(), Reading({HOST_CORES: 1.0}, gpus=({POWER: 1.0}, {POWER: 2.0})))
    assert recorded([late], [1.0, 2.0]).telemetry(0.0).gpus == ({POWER: (None, 1.0)}, {POWER: (None, 2.0)})


A, B, LACKS = "GPU-a", "GPU-b", "GPU-without"
HOST = ["host", "host-speed probe"]


@pytest.fixture
def there(monkeypatch):
    """The sources of a host: "gpm" and "dcgm" if they answer; NVML answers for each GPU but one. Keeps what is
    opened."""

    def open_nvml(device, profile, each_time):
        found["each time"] = each_time
        if device == LACKS:
            raise SensorFailed("no NVML")
        return opened("nvml-gpm" if profile and "gpm" in found else "nvml", device)

    def open_dcgm(device, *, interval_s, address="localhost:5555"):
        if "dcgm" not in found or device == LACKS:
            raise SensorFailed("no DCGM")
        return opened(f"dcgm {address} {interval_s:g}", device)

    def opened(name, device):
        asked.append(Planted(Reading({POWER: 1.0}), name=name))
        asked[-1].device = device
        return asked[-1]

    found, asked = {}, []
    found["opened"] = asked
    monkeypatch.setattr(selection, "open_nvml", open_nvml)
    monkeypatch.setattr(selection, "open_dcgm", open_dcgm)
    monkeypatch.setattr(selection, "ExporterSource", opened)
    monkeypatch.setattr(selection, "HostSource", lambda: Planted(name="host"))
    monkeypatch.setattr(selection, "open_speed_probe", lambda device: Planted(name="host-speed probe"))
    return found


DCGM = "dcgm localhost:5555 0.5"


@pytest.mark.parametrize(("choice", "device", "answers", "names", "notes"), [
    ("host", "cpu", "gpm dcgm", [], []), ("host", A, "gpm dcgm", [], []), ("auto", "cpu", "gpm dcgm", [], []),
    ("auto", "none", "gpm dcgm", [], []), ("auto", A, "gpm dcgm", ["nvml-gpm"], []),
    ("auto", A, "dcgm", [DCGM, "nvml"], []), ("auto", A, "", ["nvml"], ["no profiling counters"]),
    ("auto", LACKS, "gpm dcgm", [], ["no NVML", "no DCGM"]),
    ("gpm", A, "gpm dcgm", ["nvml-gpm"], []), ("nvml", A, "gpm dcgm", ["nvml"], []),
    ("dcgm", A, "gpm dcgm", [DCGM], []), ("dcgm=gpu7:5556", A, "gpm dcgm", ["dcgm gpu7:5556 0.5"], []),
    ("http://node:9400/metrics", A, "", ["http://node:9400/metrics"], []),
])  # fmt: skip
def test_telemetry_choice_opens_named_sources(there, choice, device, answers, names, notes):
    there |= dict.fromkeys(answers.split())
    sampler, told = open_sampler(choice, device, 0.5)
    assert [source.name for source in sampler.sources] == [*names, *HOST]
    assert (len(told), sampler.interval_s) == (len(notes), 0.5)
    assert all(any(note in each for each in told) for note in notes), told
    assert {source.device for source in there["opened"]} <= {device}
    sampler.close()
    assert [source.closed for source in sampler.sources] == [1] * len(sampler.sources)


@pytest.mark.parametrize(("choice", "device", "error", "said"), [
    *((each, device, BadUsage, each) for each in ("nvml", "gpm", "dcgm", "http://x") for device in ("cpu", "none")),
    ("gpm", A, SensorFailed, "GPM"), ("gpm", LACKS, SensorFailed, "no NVML"), ("dcgm", A, SensorFailed, "no DCGM"),
    ("nvml", LACKS, SensorFailed, "no NVML"),
])  # fmt: skip
def test_impossible_telemetry_choice_is_refused(there, choice, device, error, said):
    with pytest.raises(error, match=said) as caught:
        open_sampler(choice, device, 0.5)
    assert (error is BadUsage) == (choice in caught.value.problem)
    assert caught.value.hint or error is SensorFailed
    assert all(s.closed for s in there["opened"])


@pytest.mark.parametrize(("window_s", "numbers"), [(1.9, {of.ENERGY}), (4.99, {of.ENERGY}), (5.0, set())])
def test_short_window_reads_energy_often(there, window_s, numbers):
    assert open_sampler("off", A, 0.0) == (None, []) and not there["opened"]
    open_sampler("nvml", A, 0.25, window_s=window_s)
    assert there["each time"] == numbers


@pytest.mark.parametrize("others", [[B], [LACKS], [B, LACKS]])
def test_engine_gpus_open_together(there, others):
    there["gpm"] = None
    sampler, notes = open_sampler("auto", A, 0.5, others)
    whole = LACKS not in others
    assert [source.name for source in sampler.sources] == [*["2 x nvml-gpm"] * whole, *HOST]
    assert bool(notes) != whole and len(set(notes)) == len(notes)
    assert [source.closed for source in there["opened"]] == [int(not whole)] * len([A, B][: 1 + (B in others)])
    sampler.close()
    assert {source.closed for source in there["opened"]} == {1}


def test_simulated_gpu_only_gains_energy():
    source = selection.SimulatedSource()
    first, second = source.read(100.0), source.read(102.5)
    assert (source.name, first.span_s, second.span_s) == ("simulated", None, 2.5)
    changed = {number for number, value in second.values.items() if first.values[number] != value}
    assert changed == {of.ENERGY} and second.values[of.ENERGY] - first.values[of.ENERGY] == 2.5 * second.values[POWER]
    idle = selection.simulated_values(2.0, 100.0)
    assert (idle[of.ENERGY], idle[POWER], idle[of.POWER_INSTANT]) == (200.0, 100.0, 100.0)
    ratios = {number: value for number, value in first.values.items() if of.SENSORS[number].unit == "ratio"}
    assert ratios.keys() >= set(of.PROFILED) and all(0 < value <= 1 for value in ratios.values())
