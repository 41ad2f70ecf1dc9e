"""The script that asks a GPU host about its sensors, on a GPU whose answers are planted."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from fake_nvml import BUSY, FakeNvml, State, installed
from scripts import benchmark_script, loaded

SCRIPT = benchmark_script("sensor_questions")


@pytest.fixture(scope="module")
def questions():
    with loaded(SCRIPT) as module:
        yield module


@pytest.fixture
def host(questions):
    """A host that moves on whenever somebody sleeps, a little late."""
    gpu = FakeNvml(State(**{name: getattr(BUSY, name) for name in ("busy", "sm", "dram", "power_w")}))
    with installed(gpu):

        def sleep(seconds):
            gpu.now_s += seconds + 1e-4

        found = questions.this_host(gpu.uuid)
        found.now, found.sleep, found.gpu = lambda: gpu.now_s, sleep, gpu
        yield found
        assert (gpu.live_samples, gpu.live_event_sets, gpu.faults) == (0, 0, [])


def test_windows_show_where_ratios_begin_to_be_valid(questions, host):
    found = questions.window_lengths(host)
    garbage = {length: answer["metric 2"]["above 105"] for length, answer in found.items()}
    assert garbage == {"5 ms": 80, "20 ms": 60, "50 ms": 50, "100 ms": 0, "200 ms": 0, "500 ms": 0, "1000 ms": 0}
    assert found["100 ms"]["metric 2"]["median"] == pytest.approx(60)
    assert found["500 ms"]["true span"]["median"] == pytest.approx(0.5, abs=1e-3)


def test_oddities_are_counted(questions):
    answers = [(0, 0.0), (0, 5.0), (0, 5.0), (0, float("nan")), (3, 0.0), (0, 130.0)]
    found = questions.oddities(answers)
    assert {name: found[name] for name in ("n", "errors", "nan", "zeros", "above 105", "repeats")} == {
        "n": 4, "errors": 1, "nan": 1, "zeros": 1, "above 105": 1, "repeats": 1,
    }  # fmt: skip
    assert questions.oddities([(3, 0.0)])["n"] == 0


def test_update_periods_and_energy_are_found(questions, host):
    for step in range(1, 120):
        host.gpu.change(step / 10, power_w=400.0 + 10 * (step % 7))
    found = questions.power_and_energy(host)
    for name in ("energy", "instant power", "average power"):
        assert found[f"ms between changes of {name}"]["median"] == pytest.approx(100, abs=3)
    assert found["energy"]["instant / counter"] == pytest.approx(1, abs=0.01)
    assert found["energy"]["mean W"] == pytest.approx(430, abs=2)


def test_a_counter_that_stands_still_is_said(questions, host):
    host.gpu.change(0.0, power_w=0.0)
    assert "updated 0 times" in questions.power_and_energy(host)["energy"]["not asked"]


def test_what_cannot_be_asked_is_said_and_the_next_is_asked(questions, host, capsys):
    host.gpu.missing = frozenset({"nvmlEventSetCreate"})
    host.ask("events", questions.events)
    host.ask("processes", questions.processes)
    assert "Function Not Found" in host.answers["events"]["not asked"]
    assert host.answers["processes"]["this process"] > 0
    assert "not asked: NVMLError" in capsys.readouterr().out


def test_the_other_questions_have_answers(questions, host):
    host.gpu.change(0.0, processes=(99,), reasons=0x4)
    assert questions.events(host)["supported"] == "double-bit ECC, P-state, Xid, clock"
    assert questions.events(host)["waiting"] == "Timeout"
    assert questions.processes(host)[questions.LISTS[0]][0]["pid"] == 99
    assert questions.cycle_counter(host)["answer"] == "Not Supported"
    assert questions.throttling(host)["fields"]["74"]["per s"] == pytest.approx(1e9, rel=0.11)
    cost = questions.reading_costs(host)
    assert (cost["source"], cost["wall ms"]["n"]) == ("nvml-gpm", questions.READINGS)
    json.dumps(cost)


def test_each_call_and_each_field_has_its_cost(questions, host, monkeypatch):
    spent = {"field": 0.0}
    monkeypatch.setattr(questions.time, "thread_time", lambda: spent["field"])
    asked = host.nv.nvmlDeviceGetFieldValues

    def dear(device, ids):
        spent["field"] += 0.0035 * (83 in ids)
        return asked(device, ids)

    monkeypatch.setattr(host.nv, "nvmlDeviceGetFieldValues", dear)
    host.gpu.missing = frozenset({"nvmlDeviceGetTemperatureV"})
    found = questions.call_costs(host)
    assert found["nvmlDeviceGetClockInfo 1"]["median"] > 0
    assert "Function Not Found" in found["nvmlDeviceGetTemperatureV 0"]["not asked"]
    fields = found["CPU ms of fields"]
    assert [fields[str(number)] for number in (83, 186)] == [pytest.approx(3.5), 0]
    assert list(fields) == [str(field.id) for field in questions.FIELDS]


# Tells of operations at even times of the host's clock, which begins at 0: phase by phase 2000, 4000, 600 a second.
ENDS = """
print('ready 2.0 0.0')
for phase, rate in enumerate((2000, 4000, 600)):
    for tick in range(1, 250):
        print(phase, rate * tick // 100, 2.5 * phase + tick / 100)
"""


def test_ends_of_the_counters_are_told_with_the_rate(questions, host, monkeypatch):
    monkeypatch.setattr(questions, "ENDS", ENDS)
    host.gpu.change(0.0, dram=0.887, tensor=0.0, sm_clock_mhz=1980, power_w=488.0)
    host.gpu.change(2.5, dram=0.3, tensor=0.907, sm_clock_mhz=1485, power_w=690.0)
    host.gpu.change(4.0, sm_clock_mhz=1440)
    host.gpu.change(5.0, tensor=0.938, sm_clock_mhz=1410)
    host.ask("ends", questions.ends_of_counters)
    copy, small, large = host.answers["ends"].values()
    assert (copy["bytes/s"], copy["DRAM %"], copy["W"], copy["MHz"]) == (
        pytest.approx(2000 * 2**31), pytest.approx(88.7), pytest.approx(488), "1980 to 1980",
    )  # fmt: skip
    assert (small["FLOP/s"], small["tensor %"], small["MHz"]) == (
        pytest.approx(4000 * 2 * 4096**3), pytest.approx(90.7), "1440 to 1485",
    )  # fmt: skip
    assert (large["FLOP/s"], large["tensor %"]) == (pytest.approx(600 * 2 * 8192**3), pytest.approx(93.8))
    assert (large["SM %"], large["occupancy %"]) == (pytest.approx(60), 0)
    assert host.load is None


def test_a_phase_that_did_nothing_is_no_answer(questions, host, monkeypatch):
    monkeypatch.setattr(questions, "ENDS", "print('ready 2.0 0.0')\nprint(0, 20, 0.8)\nprint(0, 40, 0.9)")
    host.ask("ends", questions.ends_of_counters)
    assert "nothing of phase 1, float16 product of 4096" in host.answers["ends"]["not asked"]


TORCH = """
import time
from types import SimpleNamespace
__version__, uint8, float16 = "2.0", "uint8", "float16"

class Tensor:
    def __init__(self, *size, **_): self.size = size
    def copy_(self, source): time.sleep(1e-4)

randn = empty_like = Tensor
def randint(high, size, **_): return Tensor(size)
def matmul(a, b, out): time.sleep(1e-4 * a.size[0] / 4096)

class Event:
    def record(self): pass
    def synchronize(self): pass

cuda = SimpleNamespace(synchronize=lambda: None, Event=Event)
"""


def test_the_load_of_the_ends_tells_how_far_it_is(questions, tmp_path):
    """The script itself, with a torch that only takes its time."""
    (tmp_path / "torch.py").write_text(TORCH)
    command = [sys.executable, "-c", questions.ENDS, "0.1"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    (ready, version, began), *rows = map(str.split, ran.stdout.splitlines())
    assert (ready, version) == ("ready", "2.0")
    for phase in range(len(questions.PHASES)):
        told = [(int(done), float(at) - float(began)) for number, done, at in rows if int(number) == phase]
        assert [done for done, _ in told] == [20 * (i + 1) for i in range(len(told))]
        assert told and all(phase * 0.1 <= at for _, at in told)
    assert {row[0] for row in rows} == {"0", "1", "2"}


@pytest.fixture
def quick(questions, monkeypatch):
    """Only one question of each kind, and no long waits."""
    monkeypatch.setattr(questions, "BEFORE_LOAD", {"events": questions.events})
    monkeypatch.setattr(questions, "UNDER_LOAD", {"processes": questions.processes})
    return questions


def test_the_load_is_ended(quick, host, monkeypatch):
    monkeypatch.setattr(quick, "LOAD", "import time\nprint('ready 2.0', flush=True)\ntime.sleep(60)")
    with quick.loaded(host, quick.LOAD, 60.0) as said:
        child = host.load
        assert (said, child.poll()) == (["2.0"], None)
    assert child.returncode is not None
    answers = quick.ask_all(host)
    assert answers["processes"]["the load"] != "none"
    assert answers["load ended too early"] is False


def test_without_a_load_the_questions_that_need_one_say_so(quick, host, monkeypatch, capsys):
    monkeypatch.setattr(quick, "LOAD", "raise SystemExit('no torch here')")
    answers = quick.ask_all(host)
    assert "no torch here" in answers["processes"]["not asked"]
    assert "NOT ASKED, for there is no load: processes" in capsys.readouterr().out


def test_a_load_that_never_begins_is_not_waited_for(quick, host, monkeypatch):
    monkeypatch.setattr(quick, "LOAD", "import time\ntime.sleep(60)")
    monkeypatch.setattr(quick, "LOAD_READY_S", 0.2)
    began = time.monotonic()
    silent = pytest.raises(OSError, match="did not begin within 0.2 s: it was silent")
    with silent, quick.loaded(host, quick.LOAD, 60.0):
        pass
    assert time.monotonic() - began < 5


def test_only_some_questions_are_asked_and_a_load_that_none_needs_is_not_started(quick, host, monkeypatch):
    monkeypatch.setattr(quick, "LOAD", "raise SystemExit('started')")
    assert list(quick.ask_all(host, "vent")) == ["events", "CPU time of the host, shares"]
    assert "started" in quick.ask_all(host, "proc")["processes"]["not asked"]


def test_asking_for_no_question_says_what_there_is(quick, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sensor_questions.py", "--only", "noise"])
    with pytest.raises(SystemExit):
        quick.main()
    assert "no question has 'noise' in its name; there are: events; processes" in capsys.readouterr().err


def test_shares_of_cpu_time(questions):
    before, after = [0] * 8, [50, 0, 20, 20, 0, 0, 0, 10]
    assert questions.cpu_shares(before, after)["steal"] == 0.1
    assert "not asked" in questions.cpu_shares(None, after)


def test_a_second_reader_is_heard_and_ended(questions, host, monkeypatch):
    monkeypatch.setattr(questions, "READER", "print('{\"SM\": 1}')")
    found = questions.second_reader(host)
    assert found["the other"] == {"SM": 1}
    assert found["this process"]["SM"]["median"] == pytest.approx(60)


def test_the_parent_needs_no_torch():
    look = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import sensor_questions; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout.split()
    assert "sensor_questions" in loaded
    assert not {"torch", "numpy", "pynvml"} & set(loaded)
