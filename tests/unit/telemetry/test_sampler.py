"""The sampler on sources that do as they are told."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import measurement

from pytest_slmserve.archive.codec import measurement_line
from pytest_slmserve.archive.store import Archive, read
from pytest_slmserve.schema.errors import BadUsage, SensorFailed
from pytest_slmserve.schema.sensors import HOST_CORES, POWER, PROBE, PROBE_CPU, SM_ACTIVE
from pytest_slmserve.telemetry import sampler as selection
from pytest_slmserve.telemetry.host import Reading
from pytest_slmserve.telemetry.sampler import MIN_SPAN_S, Recording, Sampler, SeveralGpus, merged_readings, open_sampler


@dataclass
class Planted:
    """Gives its readings one after the other, the last again and again; an exception among them is raised."""

    readings: list = field(default_factory=lambda: [Reading({POWER: 300.0})])
    name: str = "planted"
    asked: list[float] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    closed: int = 0

    def read(self, now_s):
        self.asked.append(now_s)
        self.threads.add(threading.get_ident())
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


def test_rows_have_the_time_since_the_run_began():
    found = recorded([Planted()], [100.0, 100.25, 100.5]).telemetry(began_s=99.0)
    assert found.time_s == (1.0, 1.25, 1.5)
    assert found.columns == {POWER: (300.0, 300.0, 300.0)}
    assert (found.sources, found.interval_s, found.notes) == (("planted",), 0.25, ())


def test_values_are_those_that_an_archive_keeps(tmp_path):
    source = Planted([Reading({POWER: 1 / 3, SM_ACTIVE: 2 / 3, HOST_CORES: 1.94949}, span_s=1 / 3)])
    found = recorded([source], [1.0, 2.0]).telemetry(0.0)
    assert (found.columns[POWER], found.columns[SM_ACTIVE]) == ((0.333,) * 2, (0.6667,) * 2)
    made = measurement()
    kept = replace(made, run=replace(made.run, telemetry=found))
    with Archive.open(tmp_path / "a.jsonl") as archive:
        archive.add(kept)
    assert read(tmp_path / "a.jsonl").measurements[0].run.telemetry == found


def test_an_archive_keeps_the_probe_in_whole_microseconds(tmp_path):
    pieces = [Reading(), Reading({PROBE: 0.003747, PROBE_CPU: 0.003694}), Reading({PROBE: 0.0087, PROBE_CPU: None})]
    found = recorded([Planted(pieces)], [1.0, 2.0, 3.0]).telemetry(0.0)
    made = measurement()
    kept = replace(made, run=replace(made.run, telemetry=found))
    columns = measurement_line(kept)["run"]["telemetry"]["columns"]
    assert columns == {str(PROBE): [None, 3747, 4953], str(PROBE_CPU): [None, 3694, None]}
    with Archive.open(tmp_path / "a.jsonl") as archive:
        archive.add(kept)
    [again] = read(tmp_path / "a.jsonl").measurements
    assert again.run.telemetry == found
    assert again.key == made.key, "what is measured is the same question with a host-speed probe beside it"


def test_rows_far_from_the_window_are_not_kept():
    found = recorded([Planted()], [i / 4 for i in range(100)]).telemetry(0.0, window_s=(10.0, 15.0))
    assert (found.time_s[0], found.time_s[-1]) == (9.0, 15.25)


def test_a_number_that_comes_late_or_vanishes_is_none_where_it_is_not():
    source = Planted([Reading({POWER: 1.0}), Reading({POWER: 2.0, SM_ACTIVE: 0.5}), Reading({SM_ACTIVE: 0.6})])
    found = recorded([source], [1.0, 2.0, 3.0]).telemetry(0.0)
    assert found.columns == {POWER: (1.0, 2.0, None), SM_ACTIVE: (None, 0.5, 0.6)}


def test_missing_values_are_counted_by_their_reason():
    source = Planted([Reading({POWER: None}, missing=("155: nan",)), Reading({POWER: None}, missing=("155: nan",))])
    assert recorded([source], [1.0, 2.0]).telemetry(0.0).missing == {"155: nan": 2}


@pytest.mark.parametrize("fault", [SensorFailed("the GPU is lost"), ZeroDivisionError("ours")])
def test_a_source_that_fails_is_noted_and_the_others_go_on(fault):
    lost, host = Planted([Reading({POWER: 1.0}), fault], "lost"), Planted([Reading({HOST_CORES: 2.0})], "host")
    found = recorded([lost, host], [1.0, 2.0, 3.0]).telemetry(0.0)
    assert found.columns == {POWER: (1.0, None, None), HOST_CORES: (2.0, 2.0, 2.0)}
    assert len(found.notes) == 1 and "lost failed after 1 readings" in found.notes[0]
    assert str(getattr(fault, "problem", fault)) in found.notes[0]
    assert len(lost.asked) == 2, "not asked again"


def test_without_any_answer_there_are_no_rows():
    found = recorded([Planted([SensorFailed("gone")])], [1.0, 2.0]).telemetry(0.0)
    assert (len(found), found.columns, len(found.notes)) == (0, {}, 1)


numbers = st.dictionaries(st.sampled_from([POWER, SM_ACTIVE, HOST_CORES]), st.none() | st.floats(0, 1))
readings = st.builds(Reading, numbers, st.none() | st.floats(0.1, 1))


@given(st.lists(readings, min_size=1, max_size=4))
def test_of_several_sources_the_first_that_has_a_number_counts(several):
    both = merged_readings(several)
    assert both.values.keys() == set().union(*(r.values.keys() for r in several))
    for number, value in both.values.items():
        assert value == next(r.values[number] for r in several if number in r.values)
    assert both.span_s == next((r.span_s for r in several if r.span_s is not None), None)


@pytest.mark.parametrize("interval", [0.0, 0.05, 0.0999])
def test_intervals_too_short_for_the_counters_are_refused(interval):
    with pytest.raises(BadUsage, match="below 0.1 s"):
        Sampler([], interval)


class OwnTime:
    """A clock of the test, and the event that ends a recording: a wait takes as long as is asked, and what is planted
    in `late` in addition."""

    def __init__(self, ends_s, late=()):
        self.now, self.ends_s, self.late = 100.0, 100.0 + ends_s, iter(late)

    def wait(self, left_s):
        self.now += max(0.0, left_s) + next(self.late, 0.0)
        return self.now >= self.ends_s


def times_read(time, interval_s, reading_takes_s=0.0):
    class Slow(Planted):
        def read(self, now_s):
            time.now += reading_takes_s
            return super().read(now_s)

    recording = Recording([Slow()], interval_s, clock=lambda: time.now)
    recording.read_until(time)
    return [round(at - 100.0, 6) for at, _ in recording.rows]


def test_it_reads_at_even_times():
    assert times_read(OwnTime(0.99), 0.25) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_slow_source_is_not_asked_twice_in_a_row():
    assert times_read(OwnTime(0.75), 0.1, reading_takes_s=0.15) == [0.0, 0.2, 0.4, 0.6, 0.8]


@given(st.lists(st.floats(0.0, 0.4), max_size=20), st.floats(MIN_SPAN_S, 1.0))
def test_readings_keep_half_an_interval_after_a_late_one(late, interval_s):
    times = times_read(OwnTime(20 * interval_s, late), interval_s)
    gaps = [b - a for a, b in pairwise(times[:-1])]
    assert gaps and min(gaps) >= interval_s / 2 - 1e-6, "the last reading is that of the end"


def test_it_reads_in_one_other_thread_until_the_block_ends():
    source = Planted()
    with Sampler([source], 0.1).recording() as recording:
        time.sleep(0.25)
    asked = len(source.asked)
    assert asked >= 2 and source.threads.isdisjoint({threading.get_ident()}) and len(source.threads) == 1
    time.sleep(0.25)
    assert len(source.asked) == asked, "it went on after its end"
    assert len(recording.telemetry(source.asked[0])) == asked


def test_the_end_is_read_too():
    source = Planted()
    with Sampler([source], 10.0).recording():
        time.sleep(0.3)
    assert len(source.asked) == 2 and source.asked[1] - source.asked[0] >= 0.3


def test_an_end_just_after_a_reading_is_not_read_again():
    source = Planted()
    with Sampler([source], 10.0).recording():
        time.sleep(0.02)
    assert len(source.asked) == 1


def test_a_recording_ends_with_an_exception_too():
    source = Planted()
    with pytest.raises(KeyboardInterrupt), Sampler([source], 0.1).recording():
        raise KeyboardInterrupt
    assert "slm-telemetry" not in {thread.name for thread in threading.enumerate()}


def test_closing_closes_every_source():
    sources = [Planted(), Planted()]
    Sampler(sources).close()
    assert [source.closed for source in sources] == [1, 1]


def test_a_recording_within_another_is_the_same():
    source = Planted()
    sampler = Sampler([source], 0.2)
    with sampler.recording() as outer:
        with sampler.recording() as inner:
            time.sleep(0.3)
        assert inner is outer
        time.sleep(0.25)
    assert len(source.threads) == 1 and len(source.asked) == len(outer.rows) <= 5
    assert all(b - a >= 0.05 for a, b in zip(source.asked, source.asked[1:]))
    with sampler.recording() as another:
        pass
    assert another is not outer


# Several GPUs


def gpu(watts, name="nvml", **reading):
    return Planted([Reading({POWER: watts}, **reading)], name=name)


def test_each_gpu_has_columns_of_its_own_and_the_host_beside_them():
    both = SeveralGpus([[gpu(300.0)], [gpu(200.0)]])
    host = Planted([Reading({HOST_CORES: 1.5})], name="host")
    found = recorded([both, host], [100.0, 100.25]).telemetry(began_s=100.0)
    assert found.gpus == ({POWER: (300.0, 300.0)}, {POWER: (200.0, 200.0)})
    assert found.columns == {HOST_CORES: (1.5, 1.5)}
    assert found.sources == ("2 x nvml", "host")


def test_an_archive_keeps_them_apart(tmp_path):
    both = SeveralGpus([[gpu(300.0)], [gpu(200.0)]])
    telemetry = recorded([both], [100.0, 100.25]).telemetry(began_s=100.0)
    made = measurement()
    with Archive.open(tmp_path / "a.jsonl") as archive:
        archive.add(replace(made, run=replace(made.run, telemetry=telemetry)))
    (again,) = read(tmp_path / "a.jsonl").measurements
    assert again.run.telemetry == telemetry


def test_several_sources_of_a_gpu_are_merged_and_gaps_name_it():
    counters = Planted([Reading({SM_ACTIVE: None}, 0.25, ("1002: too early",))], name="dcgm")
    reading = SeveralGpus([[gpu(300.0)], [counters, gpu(200.0)]]).read(0.0)
    assert reading.gpus == ({POWER: 300.0}, {SM_ACTIVE: None, POWER: 200.0})
    assert reading.missing == ("GPU 1: 1002: too early",)


def test_one_that_fails_ends_them_all():
    lost = Planted([SensorFailed("the GPU does not answer any more")])
    found = recorded([SeveralGpus([[gpu(300.0)], [lost]])], [100.0, 100.25]).telemetry(began_s=100.0)
    assert found.gpus == () and len(found.notes) == 1 and "does not answer" in found.notes[0]


@pytest.fixture
def sources(monkeypatch):
    """By GPU: what its source says, None for one without."""
    there, opened = {"GPU-a": 300.0, "GPU-b": 200.0, "GPU-c": None}, []

    def open_one(device, profile):
        if there[device] is None:
            raise SensorFailed("it is not there")
        opened.append(gpu(there[device], name="nvml-gpm"))
        return opened[-1]

    monkeypatch.setattr(selection, "open_nvml", open_one)
    monkeypatch.setattr(selection, "open_dcgm", lambda *_, **__: (_ for _ in ()).throw(SensorFailed("no DCGM")))
    monkeypatch.setattr(selection, "HostSource", lambda: Planted(name="host"))
    monkeypatch.setattr(selection, "open_speed_probe", lambda device: Planted(name="host-speed probe"))
    return opened


def test_the_gpus_of_an_engine_are_opened_together(sources):
    sampler, notes = open_sampler("auto", "GPU-a", 0.25, ["GPU-b"])
    assert (sampler.name, notes) == ("2 x nvml-gpm + host + host-speed probe", [])
    sampler.close()
    assert [source.closed for source in sources] == [1, 1]


def test_a_part_of_the_gpus_is_not_taken_for_the_whole(sources):
    sampler, notes = open_sampler("auto", "GPU-a", 0.25, ["GPU-c"])
    assert sampler.name == "host + host-speed probe" and sources[0].closed == 1
    assert any("not every GPU of the engine" in note for note in notes)
