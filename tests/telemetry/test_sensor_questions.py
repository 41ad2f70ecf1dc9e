"""The script that asks a GPU host about its sensors, on a GPU whose answers are planted."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_nvml import BUSY, FakeNvml, State, installed

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sensor_questions.py"
if not SCRIPT.exists():  # scripts stay in the checkout, tests may not
    pytest.skip("no checkout", allow_module_level=True)


@pytest.fixture(scope="module")
def questions():
    spec = importlib.util.spec_from_file_location("sensor_questions", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["sensor_questions"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sensor_questions"]


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
    assert questions.call_costs(host)["nvmlDeviceGetClockInfo 1"]["median"] > 0
    json.dumps(cost)


@pytest.fixture
def quick(questions, monkeypatch):
    """Only one question of each kind, and no long waits."""
    monkeypatch.setattr(questions, "IDLE", {"events": questions.events})
    monkeypatch.setattr(questions, "UNDER_LOAD", {"processes": questions.processes})
    return questions


def test_the_load_is_ended(quick, host, monkeypatch):
    monkeypatch.setattr(quick, "LOAD", "import time\nprint('ready 2.0', flush=True)\ntime.sleep(60)")
    with quick.loaded(host) as version:
        child = host.load
        assert (version, child.poll()) == ("2.0", None)
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
    with pytest.raises(OSError, match="did not begin within 0.2 s: it was silent"), quick.loaded(host):
        pass
    assert time.monotonic() - began < 5


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
