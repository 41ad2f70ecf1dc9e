"""The script that leaves out each cause of noise in turn, on steps that are planted and on processes that sleep."""

from __future__ import annotations

import json
import lzma
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import BASELINES, benchmark_script, loaded

SCRIPT = benchmark_script("noise_sources")


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        with loaded(SCRIPT) as module:
            yield module


def planted(script, rounds, speed):
    """A run of even steps of 10 ms, whose tokens a variant changes by a factor."""
    marks = [(2.0 * i, script.in_turn(i)) for i in range(rounds * len(script.VARIANTS) + 1)]
    times = [0.01 * i for i in range(int(200 * marks[-1][0] / 2.0))]
    tokens = [round(1e6 * speed.get(marks[int(at / 2.0 + 1e-9)][1], 1.0)) for at in times]
    steps = SimpleNamespace(time_s=times, new_tokens=tokens)
    return SimpleNamespace(began_s=0.0, window_s=(0.0, marks[-1][0]), steps=steps), marks


def test_each_round_has_every_variant_and_begins_with_another(script):
    count = len(script.VARIANTS)
    rounds = [[script.in_turn(first + i) for i in range(count)] for first in range(0, count * count, count)]
    assert all(sorted(one) == sorted(script.VARIANTS) for one in rounds)
    assert len({one[0] for one in rounds}) == count


def test_a_variant_that_helps_is_found(script):
    run, marks = planted(script, rounds=3, speed={"both pinned": 1.1})
    heading, *rows = script.table(list(script.stretches_of(run, marks)))
    ratios = {row[0]: row[heading.index("over plain")] for row in rows}
    assert set(ratios) == set(script.VARIANTS)
    assert float(ratios.pop("both pinned")) == pytest.approx(1.1, abs=0.001)
    assert ratios.pop(script.PLAIN) == ""
    assert {float(ratio) for ratio in ratios.values()} == {1.0}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 16, 64])
@pytest.mark.parametrize("wide", [False, True])
def test_cores_of_their_own(script, count, wide):
    core, client = script.own_cores(range(count), wide)
    assert core and client
    assert set(core).isdisjoint(client) or count < 4
    assert len(core) == len(client) == max(1, count // 8) * (1 + wide) or count < 16


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin processes")
def test_threads_are_pinned_and_let_go(script):
    thread = "threading.Thread(target=time.sleep, args=(60,)).start()"
    code = f"import threading, time; {thread}; print(flush=True); time.sleep(60)"
    ours = sorted(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            threads = [int(task.name) for task in Path(f"/proc/{child.pid}/task").iterdir()]
            assert len(threads) == 2
            script.pin([child.pid], ours[-1:])
            assert [os.sched_getaffinity(thread) for thread in threads] == [{ours[-1]}] * 2
            script.pin([child.pid], ours)
            assert [os.sched_getaffinity(thread) for thread in threads] == [set(ours)] * 2
        finally:
            child.kill()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_only_a_process_with_a_handler_is_signalled(script):
    assert script.catches(os.getpid(), signal.SIGINT)
    assert not script.catches(os.getpid(), signal.SIGUSR1)
    assert not script.catches(2**22 + 1, signal.SIGUSR1)


def test_the_committed_runs_give_the_published_table(script):
    """Pinning both is the one row whose interval leaves out 1, and there it is slower."""
    found = {}
    for name, run in json.loads(lzma.decompress((BASELINES / "noise-sources-h200.json.xz").read_bytes())).items():
        if isinstance(run, dict):
            heading, *rows = script.table([script.Stretch(n, v, tuple(rates)) for n, v, rates in run["stretches"]])
            found |= {(name, row[0]): dict(zip(heading, row)) for row in rows if row[0] != script.PLAIN}
    ends = {key: [float(end) for end in row["95 %"].split(" to ")] for key, row in found.items()}
    assert len(ends) == 2 * (len(script.VARIANTS) - 1)
    assert [key for key, (low, high) in ends.items() if not low <= 1 <= high] == [("opt-1.3b at 128", "both pinned")]
    assert found["opt-1.3b at 128", "both pinned"]["over plain"] == "0.9372"
