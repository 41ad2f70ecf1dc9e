"""The same benchmarks on servers that run already: their claims, replicas, keys, prefix cache, and what they cannot be
asked."""

import socket
import time

import pytest
from inner_runs import SWEEP
from interfaces import problems_of, somebodys_server, url_of
from shipped import shipped

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.metrics.validity import cache_hit_share
from pytest_slmserve.analysis.points import shared_points
from pytest_slmserve.engines.device_lock import lock_device
from pytest_slmserve.plan.cases import url_lock
from pytest_slmserve.schema.specs import is_job

# The stand-in takes 8 requests at a time, so its throughput ends there.
SMALL = """--slm-models=slm --slm-concurrency=1,4,8,16,32 --slm-input-len=16 --slm-output-len=8 --slm-window=0.4
    -o slm_report=tables -rsf"""


@pytest.fixture
def at(runs, there, monkeypatch):
    """Runs pytest at the server's URL: `at(SWEEP, "--slm-plan")`."""
    monkeypatch.setenv("SLM_ENDPOINT_KEY", there._key)
    return lambda source, *words, url="", **how: runs.anew(
        source, f"--slm-endpoint={url or url_of(there)}", SMALL, *words, **how
    )


def test_shipped_sweep_runs_on_endpoint(at, there, monkeypatch):
    """Whether its claims hold is a busy machine's matter; every point is measured, and named with its URL. What is
    expected of a claim is looked up by its interface."""
    interfaces, row_for = set(), table.row_for
    monkeypatch.setattr(table, "row_for", lambda *by: interfaces.add(by[3]) or row_for(*by))
    names = "test_pareto_plateau", "test_kv_capacity", "test_gpu_underused_at_large_batch"
    ran = at(shipped(*names), "--slm-budget=0")
    assert ran.counts.pop("skipped") == 10 and sum(ran.counts.values()) == 9 and "errors" not in ran.counts
    ran.says(f"slmserve: at {url_of(there)}; *", f"slm at {url_of(there)}, endpoint *", "note: no sensors *")
    ran.says("*SKIPPED*endpoint does not tell*", "*SKIPPED*GPU's counters*")
    kept = ran.measured()
    assert problems_of(kept) == [] and interfaces == {"endpoint"} and {*ran.loads()} == {1, 4, 8, 16, 32}
    assert {(m.spec.interface, m.spec.url, m.environment.url) for m in kept} == {("endpoint", *[url_of(there)] * 2)}
    assert there._key not in (ran.folder / ".slm/records.jsonl").read_text("utf-8") + ran.out + ran.err


def test_adaptive_sweep_runs_on_endpoint(at):
    ran = at(SWEEP, "--slm-sweep=adaptive -k test_point")
    ran.says("*; adaptive sweep; *", "*(adaptive sweep, *")
    assert ran.measured() and problems_of(ran.measured()) == []
    plan = at({**shipped("test_replication_gain"), "test_it.py": SWEEP}, "--slm-concurrency=4,4096 --slm-plan")
    plan.says("*test_point?slm-4096?*", "note: *endpoint*windows*", "*slm-4-x1?*")
    assert "x2" not in plan.out, "one URL is no replica"


def test_several_urls_are_replicas(at, there, monkeypatch):
    """One alone, then both at once with half of the requests each, in one window."""
    monkeypatch.setattr("secrets.token_hex", lambda n: there._key)  # one key for both, as one variable holds it
    with somebodys_server() as second:
        pair = f"{url_of(there)},{url_of(second)}"
        words = "-k point_of_replicas --slm-repeats=1 --slm-concurrency=96"
        ran = at(shipped("test_replication_gain"), words, url=pair)
    ran.says("collected 17 items / 15 deselected / 2 selected", "*2 x slm*urls*")
    (point,) = shared_points(ran.measured())
    assert (point.count, point.loads, point.sharing, point.model) == (2, (48, 48), "urls", "slm")
    together = [m for m in ran.measured() if m.replica.count == 2][:2]
    assert [m.environment.url for m in together] == pair.split(",") and problems_of(ran.measured()) == []
    begins = [m.run.began_s for m in together]
    opens = [m.run.began_s + m.run.window_s[0] for m in together]
    assert max(begins) - min(begins) < 0.1 and max(opens) - min(opens) < 0.1


OWN = """
    import pytest

    @pytest.mark.slm(model="somebody/slm")
    def test_the_model_by_its_short_name(slm_measure): assert slm_measure(4, repeats=1).concurrency == 4

    @pytest.mark.slm(model="opt-1.3b")
    def test_another_model(slm_measure): assert slm_measure(4).valid

    @pytest.mark.slm(max_num_seqs=8)
    def test_a_limit(slm_measure): assert slm_measure(4).valid

    def test_replicas(slm_replicas): slm_replicas(2, sharing="mps")

    def test_job(slm_job): assert slm_job(40, rate=100, lengths=(16, 4), repeats=1)
"""


def test_impossible_endpoint_tests_are_skipped(at, there):
    ran = at(OWN, url=f"{url_of(there)},http://localhost:{there.port}/v1/completions")
    assert ran.counts == {"passed": 2, "skipped": 2, "failed": 1}
    ran.says("*SKIPPED*opt-1.3b*--slm-models*", "*SKIPPED*max_num_seqs*endpoint*", "*mps *these engines*")
    ran.says(f"Jobs on {url_of(there)}")
    kept = ran.measured()
    assert {(m.spec.model, m.spec.interface) for m in kept} == {("slm", "endpoint")} and problems_of(kept) == []
    assert {len(m.run.samples) for m in kept if is_job(m.load)} == {40}, "also if a busy machine has it made again"


# Prompts from a prefix cache
POINT = "--slm-concurrency=4 --slm-input-len=16 --slm-output-len=8 --slm-window=0.6 -k test_point"


def test_caching_endpoint_gets_own_prompts(runs, monkeypatch, stand_in_here):
    with somebodys_server(enable_prefix_caching=True, enable_prompt_tokens_details=True) as server:
        monkeypatch.setenv("SLM_ENDPOINT_KEY", server._key)
        where = f"--slm-endpoint={url_of(server)} --slm-models=slm"
        own, allowed = (runs.anew(SWEEP, where, POINT, more) for more in ("", "-o slm_allow_prefix_cache=1"))
    assert own.counts == allowed.counts == {"passed": 1, "deselected": 1}
    found = own.measured()[-1], allowed.measured()[-1]  # before which another one has filled the cache
    assert problems_of(found) == [] and found[0].key != found[1].key
    assert cache_hit_share(found[0].run).share == 0 and cache_hit_share(found[1].run).share > 0.3
    # On the command line nothing warms the cache but what was measured before.
    ran = runs.anew(SWEEP, stand_in_here, "--slm-models=opt-tiny --slm-engine-arg=enable_prefix_caching=true", POINT)
    assert [text for text in problems_of(ran.measured()) if "from a prefix cache" in text]
    assert ran.counts == {"failed": 1, "deselected": 1}


# What is refused before an item begins


class Hooked:
    def pytest_runtest_setup(self):
        raise AssertionError("an item has begun")


@pytest.fixture
def refused(at):
    """The error of a run that ends before an item begins, which names these facts."""

    def run(*facts, words="", url=""):
        ran = at({"test_it.py": SWEEP, "a.json": "[]"}, words, url=url, plugins=[Hooked()])
        ran.refuses(*facts)
        return ran.err

    return run


def test_unusable_endpoint_is_refused_early(refused, runs, there, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/v1/completions"
    assert refused(nobody, url=nobody)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and says nothing
        url, began = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/completions", time.monotonic()
        assert refused(url, "timed out", words="-o slm_timeout=0.5", url=url)
        assert time.monotonic() - began < 30
    with lock_device(url_lock(url_of(there))):
        assert refused("another run"), "they would measure each other"
    assert refused("404", "`other`", words="--slm-models=other")
    assert refused("--slm-dataset", words="--slm-models=other --slm-dataset=a.json"), "whose text needs a tokenizer"
    assert "hunter2" not in refused("api_key", url="https://host/v1/completions?api_key=hunter2")
    for wrong, fact in (("hunter2hunter2", "401"), ("hunter2\nhunter3", "SLM_ENDPOINT_KEY")):
        monkeypatch.setenv("SLM_ENDPOINT_KEY", wrong)
        assert "hunter" not in refused(fact)
    runs(SWEEP, f"--slm-endpoint={url_of(there)}").refuses("--slm-models NAME")
