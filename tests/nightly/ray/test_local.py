"""--slm-ray local: all GPUs of this host, here simulated ones; one archive and one report as from a run without."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from processes import alive, until
from ray_runs import LOCAL, MODELS, POINTS, SWEEPS, records
from shipped import put

# Each run starts a Ray of its own, whose processes would take the time of other tests.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

SUPPORT = str(Path(__file__).parents[2] / "support")


@pytest.fixture
def spread(pytester):
    """Runs a file of sweeps on two GPUs, in a process of its own: `spread("--slm-repeats=3")`."""
    pytester.makepyfile(SWEEPS)
    return lambda *args: pytester.runpytest_subprocess(*MODELS, LOCAL, *args)


def ray_processes(of):
    """Tasks of a run, and its servers of Ray."""
    own = {child.pid for child in psutil.Process(of).children(recursive=True)}
    named = ((pid, words[0]) for pid, _, words in alive() if pid in own and words)
    return {pid for pid, name in named if name.startswith("ray::") or Path(name).name in ("raylet", "gcs_server")}


def test_run_without_records_reports_once(pytester):
    unnamed = [word for word in MODELS if not word.startswith("--slm-records")]
    pytester.makepyfile(SWEEPS)
    result = pytester.runpytest_subprocess(*unnamed, LOCAL)
    result.assert_outcomes(passed=13)
    assert result.stdout.str().count("measured: 5 points, 2 repeats each, 1 launch") == 2
    assert result.stdout.str().count("records of a simulated run are not kept") == 1
    assert not (pytester.path / ".slm").exists()


KILLED = """
    import os, signal
    from pytest_slmserve.run.cluster import RayEngines

    take, killed = RayEngines._take, []

    def taken(self, engine, key, answer):
        take(self, engine, key, answer)
        if answer.packed and not killed:
            killed.append(answer.place[1])
            os.kill(killed[0], signal.SIGKILL)

    RayEngines._take = taken
"""


def test_killed_task_is_retried_once(spread, pytester, monkeypatch):
    """Killed at its first repeat."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])]))
    pytester.makeconftest(KILLED)
    result = spread("--slm-engine-arg=lasts_s=0.3")
    result.assert_outcomes(passed=13)
    result.stdout.fnmatch_lines(["note: its task was lost on this host; * cells of * were sent once more"])
    found = records(pytester)
    assert set(Counter(m.key for m in found).values()) == {2} and len(found) == 20
    assert len({m.launch for m in found}) == 3, "the engine of the one that was killed starts anew"


JUDGED = f"""{POINTS}
    @pytest.mark.slm(claim="throughput-plateau")
    def test_plateau(slm_claim, request):
        verdict = slm_claim()
        with (request.config.rootpath / "judged").open("a") as file:
            print(*verdict.records, file=file)
        assert verdict
"""
IN_TURNS = """
    from collections import Counter
    from math import inf
    from pytest_slmserve.run.cluster import RayEngines

    hear, take, taken = RayEngines._hear, RayEngines._take, Counter()

    def heard(self, *within_s):
        least = min((taken[engine] for engine in self._running if engine.open), default=inf)
        ahead = {call: of for call, of in self._calls.items() if taken[of[0]] > least}
        self._calls = {call: of for call, of in self._calls.items() if call not in ahead}
        try:
            return hear(self, *within_s)
        finally:
            self._calls |= ahead

    def counted(self, engine, key, answer):
        taken[engine] += 1
        take(self, engine, key, answer)

    RayEngines._hear, RayEngines._take = heard, counted
"""


def test_alone_cells_join_curves(spread, pytester):
    """What is measured alone joins the curves, so whatever judges these waits for it.

    The answers of the two engines are taken in turns, so that neither ends before the last repeat of the other.
    """
    pytester.makeconftest(IN_TURNS)
    pytester.makepyfile(JUDGED)
    put(pytester.path, "test_neighbours")
    result = spread()
    result.assert_outcomes(passed=14)
    assert "was not looked at" not in result.stdout.str()
    assert result.stdout.str().count("output tokens/s alone against beside others") == 2
    found = records(pytester)
    alone = [m for m in found if not m.neighbours]
    assert sorted(m.load.concurrency for m in alone) == [1, 1, 256, 256]
    cells = Counter((m.spec.model, m.load.concurrency) for m in found)
    assert len(cells) == 10 and all(n == (3 if load in (1, 256) else 2) for (_, load), n in cells.items())
    assert {m.id for m in found} == {*(pytester.path / "judged").read_text("utf-8").split()}, "all that report judges"


def test_engine_on_two_gpus_waits(spread, pytester):
    on_gpus = """
    @pytest.mark.slm(models=("opt-350m",))
    def test_on_gpus(slm_gpus_point):
        assert slm_gpus_point.measure()
    """
    pytester.makepyfile(SWEEPS + on_gpus)
    result = spread("--slm-tensor-parallel-size=1,2", "--slm-models=opt-125m,opt-350m,opt-1.3b")
    assert result.parseoutcomes().get("errors", 0) == 0
    wide = [m for m in records(pytester) if m.spec.tensor_parallel_size == 2]
    assert wide and {m.neighbours for m in wide} == {0}


def test_two_gpu_engine_doubles_cores(pytester):
    wide = (
        "--slm-models=opt-1.3b",
        "--slm-tensor-parallel-size=1,2",
        "--slm-concurrency=64,128,256",
        "--slm-repeats=1",
    )
    put(pytester.path, "test_tensor_parallel")
    result = pytester.runpytest_subprocess(*MODELS, LOCAL, *wide, "-k", "point or less_per or on_each")
    assert result.parseoutcomes() == {"passed": 9, "inconclusive": 2, "deselected": 2}
    found = {m.spec.tensor_parallel_size: m for m in records(pytester) if not m.replica}
    assert found[2].environment.cores == 2 * found[1].environment.cores
    result.stdout.fnmatch_lines(["*64*2 replicas, a GPU each*", "*on 2 GPUs it serves 0.9[67]* times as much per GPU*"])


def test_unasked_sweeps_are_not_planned(pytester):
    """No sweep could have a load that does not fit. In the comparison some of its requests wait."""
    wide = ("--slm-models=opt-13b", "--slm-tensor-parallel-size=1,2", "--slm-concurrency=16,256", "--slm-repeats=1")
    put(pytester.path, "test_tensor_parallel")
    result = pytester.runpytest_subprocess(*MODELS, LOCAL, *wide, "-k", "point")
    result.assert_outcomes(passed=5)
    assert "throughput-plateau" not in result.stdout.str()
    pytester.makepyfile(test_parallel=SWEEPS)
    result = pytester.runpytest_subprocess(*MODELS, LOCAL, *wide)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.str().count("256 concurrent requests do not fit opt-13b: the KV cache holds 167") == 1


@pytest.fixture
def tmp(monkeypatch):
    """For a lock of its own on the device; sockets in it want a short path."""
    with TemporaryDirectory(prefix="slm-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.usefixtures("vllm_here", "tmp")
def test_two_engines_split_cpu(pytester):
    pytester.makepyfile("def test_point(slm_point): slm_point.measure()  # it may be unsteady")
    words = "--slm-cpu --slm-models=opt-tiny,llama-tiny --slm-concurrency=4 --slm-window=2 --slm-repeats=1"
    result = pytester.runpytest_subprocess(*words.split(), LOCAL, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)
    found = records(pytester)
    assert {m.spec.model for m in found} == {"opt-tiny", "llama-tiny"} and len({m.launch for m in found}) == 2
    assert {m.environment.cores for m in found} == {1}


def test_killed_run_can_be_resumed(pytester, tmp):
    pytester.makepyfile(SWEEPS)
    slow = (*MODELS, LOCAL, "--slm-engine-arg=lasts_s=0.5")
    archive = pytester.path / ".slm" / "records.jsonl"
    with subprocess.Popen([sys.executable, "-m", "pytest", *slow], cwd=pytester.path, stdout=subprocess.DEVNULL) as run:
        until(lambda: archive.exists() and b'"kind":"measurement"' in archive.read_bytes(), 120, "a measurement")
        started, folders = ray_processes(run.pid), [*tmp.glob("slm-*")]
        run.kill()
    assert started and folders
    until(lambda: started.isdisjoint(pid for pid, _, _ in alive()), 30, "an end of all that Ray has started")
    until(lambda: not [*tmp.glob("slm-*")], 30, "no folder")
    there = records(pytester)
    assert 0 < len(there) < 20
    pytester.runpytest_subprocess(*slow, "--slm-resume").assert_outcomes(passed=13)
    assert set(Counter(m.key for m in records(pytester)).values()) == {2} and len(records(pytester)) == 20
    assert {m.id for m in there} <= {m.id for m in records(pytester)}
