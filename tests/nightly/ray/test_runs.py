"""Runs on a real Ray cluster of one host, with the simulated engine: cells spread, come back, are resumed."""

import json
import os
import time
from collections import Counter

import pytest
from ray_runs import POINTS, SWEEP, WITH_A_GPU, WORDS, cluster_of_two, records

from pytest_slmserve.run import cluster

# Ray takes a node of a machine that engines keep busy for lost, and then ends the process that is connected to it.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

OTHERS = f"""{POINTS}
    def test_replicas(slm_replica_point):
        assert slm_replica_point.measure()

    @pytest.mark.slm(jobs={{"gpu": [{{"model": "opt-125m", "requests": 64, "lengths": (64, 32)}}]}})
    def test_job(slm_job_point):
        assert slm_job_point.measure()

    def test_as_it_goes(slm_measure):
        assert slm_measure(4).valid

    def test_of_nobody(slm_session):
        planner = slm_session.planner
        case = planner.case(planner.spec("opt-125m"), [planner.workload("opt-125m")], [planner.load(7)])
        slm_session.executor.measure(case, 1)
"""
LONGER = ("--slm-concurrency=1,2,4,8", "--slm-engine-arg=lasts_s=0.7")  # some seconds on each node


@pytest.fixture(scope="module")
def ray_cluster():
    with cluster_of_two() as found:
        yield found


@pytest.fixture
def run(pytester, ray_cluster):
    """Runs a small sweep of two models on the cluster: `run("--slm-resume")`."""

    def on_the_cluster(*args, test=SWEEP):
        pytester.makepyfile(test)
        return pytester.runpytest_inprocess(*WORDS, "--slm-window=2", f"--slm-ray={ray_cluster.address}", *args)

    return on_the_cluster


@pytest.fixture
def died(ray_cluster, monkeypatch):
    """The node whose engine tells of a measurement first is killed there and then; its id is in the list."""
    killed, take = list[str](), cluster.RayEngines._take

    def taken(self, engine, key, answer):
        take(self, engine, key, answer)
        if answer.packed and not killed:
            (node,) = (worker for worker in ray_cluster.workers if worker.node_id == answer.place[0])
            killed.append(node.node_id)
            ray_cluster.workers.remove(node)
            ray_cluster.remove_node(node, allow_graceful=False)

    monkeypatch.setattr(cluster.RayEngines, "_take", taken)
    return killed


def by_key(pytester):
    return Counter(m.key for m in records(pytester))


def test_finished_cells_are_resumed(run, pytester):
    run("--slm-concurrency=1,16", test=POINTS).assert_outcomes(passed=4)
    result = run("--slm-resume")
    result.assert_outcomes(passed=12)
    told = "slmserve: simulated, no vLLM, on 2 nodes of a Ray cluster; sensors: those of the tasks; *"
    result.stdout.fnmatch_lines([told, "8 measurements were reused from *"])
    assert len({m.launch for m in records(pytester)}) == 4, "each engine started once in each run"
    assert set(by_key(pytester).values()) == {2} and len(records(pytester)) == 20


def test_unplanned_case_is_not_sent(run):
    few = ("--slm-models=opt-125m", "--slm-concurrency=1,16", "--slm-engine-arg=die_at=16")
    result = run("-rs", *few, test=OTHERS)
    result.assert_outcomes(passed=4, failed=4, skipped=3)
    text = result.stdout.str()
    assert "EngineFailed: the simulated engine died at concurrency 16, as it was told to" in text
    assert "BadUsage: opt-125m at 7 was not planned before the run, so it was not sent to Ray" in text
    assert "slm_measure asks as the test goes, and Ray is told beforehand: leave out --slm-ray" in text


def test_ray_resource_chooses_nodes(run, pytester):
    refused = run("--override-ini=slm_ray_resource=quiet").stderr.str()
    assert "no node of this cluster offers a CPU (looked at 0)" in refused
    planted = pytester.mkdir("planted")
    (planted / "sitecustomize.py").write_text(f"open({str(planted / 'seen')!r}, 'a').write('one process')")
    path = os.pathsep.join([str(planted), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = pytester.path / "env.json"
    env.write_text(json.dumps({"env_vars": {"PYTHONPATH": path}}))
    few = ("--slm-models=opt-125m", "--slm-concurrency=1", "--override-ini=slm_ray_resource=imagined")
    run(*few, f"--override-ini=slm_ray_env={env}", test=POINTS).assert_outcomes(passed=1)
    assert (planted / "seen").read_text().count("one process") >= 3, "two nodes that were looked at, and an engine"


def test_taken_cluster_is_not_awaited(run, monkeypatch):
    monkeypatch.setattr(cluster, "LEAST_QUIET_S", 2.0)
    monkeypatch.setattr(cluster, "PATIENCE", 0.0)
    begin = cluster.RayEngines._begin

    def taken_before(self):
        """Both GPUs, by somebody else."""
        if any(engine.actor is None for engine in self._engines):
            other = self.ray.remote(num_gpus=1, num_cpus=0, max_calls=1)(lambda: time.sleep(30))
            self.ray.wait([other.remote() for _ in range(2)], timeout=2.0)
        begin(self)

    monkeypatch.setattr(cluster.RayEngines, "_begin", taken_before)
    result = run("--slm-models=opt-125m", "--slm-concurrency=1,16", test=POINTS)
    result.assert_outcomes(failed=2)
    assert "EngineFailed: opt-125m: nothing came for 0:02 (on no node, 1 GPU being taken)" in result.stdout.str()


def test_dead_node_loses_nothing(run, pytester, died):
    result = run(*LONGER, test=POINTS)
    result.assert_outcomes(passed=8)
    result.stdout.fnmatch_lines([f"note: * ({died[0][:8]}) died; * cells of * were sent once more"])
    assert set(by_key(pytester).values()) == {2} and len(by_key(pytester)) == 8
    assert len({m.launch for m in records(pytester)}) == 3, "one engine was started again"


def test_second_node_death_is_named(run, pytester, ray_cluster, died):
    one = ("--slm-models=opt-125m", *LONGER)
    result = run(*one, test=POINTS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*EngineFailed: * died, and no other node has 1 GPU for * of opt-125m*"])
    assert died[0][:8] in result.stdout.str()
    there = by_key(pytester)
    assert 0 < sum(there.values()) < 8
    ray_cluster.workers.append(ray_cluster.add_node(**WITH_A_GPU))
    run(*one, "--slm-resume", test=POINTS).assert_outcomes(passed=4)
    assert set(by_key(pytester).values()) == {2} and len(by_key(pytester)) == 4
