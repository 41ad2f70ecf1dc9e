"""CPU time, memory and pressure: the accounting as arithmetic, a host of planted files, and a real child."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.schema.sensors import (
    CPU_PRESSURE,
    CPU_THROTTLED,
    HOST_CORES,
    MEMORY_PRESSURE,
    OWN_CORES,
    OWN_MEMORY,
    STOLEN_CORES,
)
from pytest_slmserve.telemetry import host
from pytest_slmserve.telemetry.host import HostSource, Used, limiting_cgroup, newly_used, own_pids

HZ = os.sysconf("SC_CLK_TCK")
BURN = "import time\nwhile time.process_time() < {}: pass"


class Planted:
    """A /proc and a /sys/fs/cgroup that say what a test wants."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.put(self.proc / "self/cgroup", "0::/ours\n")
        self.put(self.cgroup / "ours/cpu.max", "150000 100000\n")
        self.at()

    def put(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")

    def at(self, user=0.0, system=0.0, idle=1.0, steal=0.0, cpu=0.0, memory=0.0, throttled=0.0) -> None:
        """Seconds since boot."""
        ticks = [user, 0, system, idle, 5, 0, 0, steal, 0, 0]
        self.put(self.proc / "stat", f"cpu  {' '.join(str(round(t * HZ)) for t in ticks)}\ncpu0 1 2 3\nintr 9\n")
        for name, waited in (("cpu", cpu), ("memory", memory)):
            line = f"avg10=1.00 avg60=2.00 avg300=3.00 total={round(waited * 1e6)}"
            self.put(self.proc / "pressure" / name, f"some {line}\nfull avg10=0 avg60=0 avg300=0 total=777\n")
        self.put(self.cgroup / "ours/cpu.stat", f"usage_usec 5\nnr_throttled 3\nthrottled_usec {throttled * 1e6:.0f}\n")

    def open(self):
        return HostSource(proc=self.proc, cgroup=self.cgroup)


@pytest.fixture
def planted(tmp_path):
    return Planted(tmp_path)


def test_rates_are_means_over_the_time_since_the_last_reading(planted):
    source = planted.open()
    source.read(100.0)
    planted.at(user=3.0, system=1.0, idle=50.0, steal=0.5, cpu=0.25, memory=0.125, throttled=0.75)
    found = source.read(102.0)
    wanted = {HOST_CORES: 2.0, STOLEN_CORES: 0.25, CPU_PRESSURE: 0.125, MEMORY_PRESSURE: 0.0625, CPU_THROTTLED: 0.375}
    assert {number: found.values[number] for number in wanted} == pytest.approx(wanted)
    assert (found.span_s, found.missing) == (2.0, ())


def test_the_first_reading_has_no_rates_but_memory(planted):
    found = planted.open().read(100.0)
    rates = {OWN_CORES, HOST_CORES, STOLEN_CORES, CPU_PRESSURE, MEMORY_PRESSURE, CPU_THROTTLED}
    assert {number for number, value in found.values.items() if value is None} == rates
    assert sorted(found.missing) == sorted(f"{number}: a rate needs two readings" for number in rates)
    assert found.values[OWN_MEMORY] > 1e6 and found.span_s is None


def test_time_that_stands_still_or_a_counter_that_goes_back_gives_none(planted):
    source = planted.open()
    planted.at(user=2.0)
    source.read(100.0)
    assert f"{HOST_CORES}: no time has passed since the last reading" in source.read(100.0).missing
    planted.at(user=1.0)
    found = source.read(101.0)
    assert found.values[HOST_CORES] is None and found.missing == (f"{HOST_CORES}: its counter went back",)


def test_throttled_on_several_cpus_at_once_is_at_most_all_of_the_time(planted):
    source = planted.open()
    source.read(100.0)
    planted.at(throttled=7.0)
    assert source.read(101.0).values[CPU_THROTTLED] == 1.0


@pytest.mark.parametrize(
    ("without", "number"),
    [
        ("proc/pressure/cpu", CPU_PRESSURE),
        ("proc/pressure/memory", MEMORY_PRESSURE),
        ("proc/stat", HOST_CORES),
        ("proc/stat", STOLEN_CORES),
        ("proc/self/cgroup", CPU_THROTTLED),
        ("cgroup/ours/cpu.max", CPU_THROTTLED),
        ("cgroup/ours/cpu.stat", CPU_THROTTLED),
    ],
)
def test_what_a_host_does_not_offer_is_absent_and_said_once(planted, tmp_path, without, number):
    (tmp_path / without).unlink()
    source = planted.open()
    assert source.unsupported[number]
    found = source.read(1.0)
    assert number not in found.values and not any(str(number) in why for why in found.missing)


@pytest.mark.parametrize(
    ("file", "text"), [("proc/stat", "cpu  0 0 0 0 0 0 0 0 0 0\n"), ("proc/stat", ""), ("proc/stat", "cpu 1 2 3 4\n")]
)
def test_a_file_that_counts_nothing_is_as_good_as_none(planted, tmp_path, file, text):
    planted.put(tmp_path / file, text)
    assert {HOST_CORES, STOLEN_CORES} <= planted.open().unsupported.keys()


@pytest.mark.parametrize("text", ["full avg10=0 total=5\n", "some avg10=0\n", "some total=much\n", ""])
def test_a_pressure_in_other_words_is_not_taken(planted, text):
    planted.put(planted.proc / "pressure/cpu", text)
    assert CPU_PRESSURE in planted.open().unsupported


def test_a_file_that_vanishes_gives_none_with_the_reason_and_may_come_back(planted):
    source = planted.open()
    source.read(100.0)
    (planted.proc / "stat").unlink()
    found = source.read(101.0)
    assert (found.values[HOST_CORES], found.values[CPU_PRESSURE]) == (None, 0.0)
    assert all(any(f"{number}: " in why for why in found.missing) for number in (HOST_CORES, STOLEN_CORES))
    planted.at(user=4.0)
    assert source.read(102.0).values[HOST_CORES] is None
    planted.at(user=5.0)
    assert source.read(103.0).values[HOST_CORES] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("own", "limits", "wanted"),
    [
        ("0::/a/b", {"a/b": "50000 100000"}, ("a/b", 0.5)),
        ("0::/a/b", {"a/b": "max 100000", "a": "400000 100000"}, ("a", 4.0)),
        ("0::/", {".": "100000 100000"}, (".", 1.0)),
        ("0::/a/b", {"a/b": "max 100000", "a": "max 100000"}, None),
        ("4:memory:/x\n0::/a", {"a": "200000 100000"}, ("a", 2.0)),
        ("4:cpu:/a", {"a": "200000 100000"}, None),
        ("0::/../elsewhere", {}, None),
    ],
)
def test_the_quota_is_that_of_our_cgroup_or_the_nearest_above(tmp_path, own, limits, wanted):
    planted = Planted(tmp_path)
    planted.put(planted.proc / "self/cgroup", f"{own}\n")
    for name, text in limits.items():
        planted.put(planted.cgroup / name / "cpu.max", text)
    found = limiting_cgroup(planted.proc, planted.cgroup)
    assert found == (wanted and (planted.cgroup / wanted[0], wanted[1]))


# Whose CPU time it is

PARENT, CHILD = 1, 2


def test_a_child_that_ends_counts_once():
    before = {PARENT: Used(5.0, 0.0), CHILD: Used(2.0, 1.0)}
    assert newly_used(before, {PARENT: Used(5.5, 3.25)}) == pytest.approx(0.75)


def test_a_child_that_nobody_waited_for_makes_it_no_less():
    before = {PARENT: Used(5.0, 0.0), CHILD: Used(2.0, 1.0)}
    assert newly_used(before, {PARENT: Used(5.5, 0.0)}) == pytest.approx(0.5)


def test_a_child_seen_for_the_first_time_counts_whole():
    assert newly_used({PARENT: Used(5.0, 0.0)}, {PARENT: Used(5.0, 0.0), CHILD: Used(0.25, 0.5)}) == pytest.approx(0.75)


SCRIPT = st.lists(st.tuples(st.sampled_from(["use", "start", "end", "look"]), st.integers(0, 9)), max_size=60)


@given(script=SCRIPT)
def test_whoever_starts_and_ends_what_was_used_is_counted_once(script):
    """Children end before their parents, which wait for them: then the sum over looks is what was truly used."""
    parents, own, reaped = {0: 0}, {0: 0.0}, {0: 0.0}
    truth = counted = 0.0
    before = {0: Used(0.0, 0.0)}
    for step, (what, pick) in enumerate([*script, ("look", 0)], 1):
        pid = sorted(parents)[pick % len(parents)]
        match what:
            case "use":
                own[pid] += pick
                truth += pick
            case "start":
                parents[step], own[step], reaped[step] = pid, 0.0, 0.0
            case "end" if pid and pid not in parents.values():
                reaped[parents.pop(pid)] += own.pop(pid) + reaped.pop(pid)
            case "look":
                now = {pid: Used(own[pid], reaped[pid]) for pid in parents}
                counted += newly_used(before, now)
                before = now
    assert counted == pytest.approx(truth)


TIMES = st.floats(0, 1e6)
FAMILY = st.dictionaries(st.integers(0, 5), st.builds(Used, TIMES, TIMES))


@given(FAMILY, FAMILY)
def test_it_is_never_negative(before, now):
    assert newly_used(before, now) >= 0


def burning(seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", BURN.format(seconds)])


def test_a_child_that_burns_half_a_second_is_found_with_all_of_it():
    source = HostSource()
    source.read(began := time.monotonic())
    with burning(0.5) as child:
        child.wait()
    found = source.read(ended := time.monotonic())
    # Linux counts user and system time in hundredths of a second, each rounded down.
    assert 0.479 < found.values[OWN_CORES] * (ended - began) < 1.5
    assert found.values[OWN_CORES] < 1.5


@pytest.mark.parametrize(("cost_s", "next_s"), [(0.0, 2.0), (0.03, 6.0), (4.0, 10.0)])
def test_a_look_at_the_family_is_paid_by_rarer_looks_but_never_for_long(monkeypatch, cost_s, next_s):
    """A busy host once made a look so slow that the next engine was taken for somebody else's processes."""
    spent = iter([0.0, cost_s, 100.0, 100.0 + cost_s])
    monkeypatch.setattr(host.time, "thread_time", lambda: next(spent))
    family, looks = host.Family(os.getpid()), []
    monkeypatch.setattr(host.psutil.Process, "children", lambda self, recursive: looks.append(recursive) or [])
    for at in (50.0, 50.0 + next_s - 0.01, 50.0 + next_s):
        family.members(at)
    assert looks == [True, True], "at the first and the last of these moments"


def test_a_child_that_ends_between_two_readings_is_not_lost_or_counted_twice(monkeypatch):
    monkeypatch.setattr(host, "LIST_S", 0.0)
    source = HostSource()
    source.read(began := time.monotonic())
    with burning(0.5) as child:
        while child.poll() is None:
            time.sleep(0.05)
            at = time.monotonic()
            source.read(at)
    source.read(time.monotonic())
    used_s = round(source._family._used_s, 6)  # a sum of hundredths
    ticks_s = 2 / os.sysconf("SC_CLK_TCK")  # user and system time are whole ticks each
    assert 0.5 - ticks_s <= used_s < 0.5 + (at - began)  # with a second count of the child it is above 1


def test_descendants_are_ours_and_looked_up_only_now_and_then(monkeypatch):
    family = host.Family(os.getpid())
    assert [p.pid for p in family.members(0.0)][:1] == [os.getpid()]
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid not in {p.pid for p in family.members(0.001)}
        later = family.members(3600.0)
        assert child.pid in {p.pid for p in later}
        assert later[0] is family.members(7200.0)[0] and later[1] is family.members(7200.0)[1]
        monkeypatch.setattr(host, "family_of", lambda pid: host.Family(pid))
        assert own_pids() >= {os.getpid(), child.pid}
        child.communicate(b"\n")


def test_closing_twice_is_allowed(planted):
    source = planted.open()
    source.close()
    source.close()
    assert source.name == "host"
