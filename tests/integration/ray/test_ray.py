"""Two runs on Ray, one on the GPUs of this host and one on a cluster of two nodes: cells are spread and come back, into
one archive and one report. Nodes that die, tasks that are killed and what is resumed are in tests/nightly/ray."""

from collections import Counter
from tempfile import TemporaryDirectory

import listeners
import pytest
from ray_runs import LOCAL, MODELS, POINTS, SWEEPS, WORDS, cluster_of_two, records

from pytest_slmserve.archive.store import read, runs_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture
def own_tmp(monkeypatch):
    """A folder for temporary files; sockets in it want a short path."""
    with TemporaryDirectory(prefix="slm-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield


@pytest.mark.usefixtures("own_tmp")
def test_two_gpus_fill_one_archive(pytester):
    """The run is open to nobody else: where Ray no longer heeds the variable that keeps it on the loopback address,
    this fails."""

    def tables(result):
        return [line for line in result.outlines if line.lstrip()[:1].isdigit() and "*" in line]

    pytester.makepyfile(SWEEPS)
    listeners.write_conftest(pytester.path, listeners.OF_RAY)
    result = pytester.runpytest_subprocess(*MODELS, LOCAL, "-v", "--slm-window=4")
    result.assert_outcomes(passed=13)
    listeners.check(pytester.path, servers=6, processes=7)
    assert "this release of Ray listens on" not in result.stdout.str()
    (pytester.path / "conftest.py").unlink()
    found = records(pytester)
    assert Counter(m.key for m in found) == dict.fromkeys({m.key for m in found}, 2) and len(found) == 20
    assert len({m.launch for m in found}) == 2, "an engine starts once"
    [run] = runs_of(read(pytester.path / ".slm/records.jsonl"))
    assert len(run.measurements) == 20, "all of it is one run"
    text = result.stdout.str()
    assert "slmserve: simulated, no vLLM, on 2 GPUs of this host at once; " in text
    assert text.count("throughput-plateau: ") == 1 and text.count("measured: 5 points, 2 repeats each, 1 launch") == 2
    assert "whether engines on several GPUs disturbed each other was not looked at" in text
    without = (*MODELS, "--slm-window=4", "--slm-records=alone.jsonl", "--slm-budget=0")
    assert tables(result) == tables(pytester.runpytest_subprocess(*without)) and len(tables(result)) == 10


@pytest.fixture(scope="module")
def ray_cluster():
    with cluster_of_two() as found:
        yield found


def test_engine_cells_stay_on_node(pytester, ray_cluster):
    pytester.makepyfile(POINTS)
    words = (*WORDS, "--slm-window=2", "--slm-concurrency=1,16", f"--slm-ray={ray_cluster.address}")
    result = pytester.runpytest_inprocess(*words)
    result.assert_outcomes(passed=4)
    assert "2 nodes of a Ray cluster" in result.stdout.str()
    result.stdout.fnmatch_lines(["note: measured on * (1 engine), * (1 engine) of the Ray cluster at *"])
    found = records(pytester)
    assert len({m.launch for m in found}) == 2, "each engine started once"
    assert set(Counter(m.key for m in found).values()) == {2} and len(found) == 8
