"""The same benchmarks on servers that run already: their claims, replicas, keys, and what they cannot be asked."""

from __future__ import annotations

import socket
import time

import pytest
from inner_runs import QUIET
from inside import ALL_OF_IT, SWEEP, usage_error
from interfaces import problems_of, somebodys_server, url_of
from shipped import put

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.points import shared_points
from pytest_slmserve.engines.device_lock import lock_device
from pytest_slmserve.plan.cases import url_lock
from pytest_slmserve.schema.specs import is_job

# The stand-in takes 8 requests at a time, so its throughput ends there.
SMALL = (
    "--slm-models=slm",
    "--slm-concurrency=1,4,8,16,32",
    "--slm-input-len=16",
    "--slm-output-len=8",
    "--slm-window=0.4",
    ALL_OF_IT,
)


@pytest.fixture(scope="module")
def there():
    with somebodys_server() as server:
        yield server


@pytest.fixture
def key(there, monkeypatch):
    monkeypatch.setenv("SLM_ENDPOINT_KEY", there._key)
    return there._key


@pytest.fixture
def at(pytester, there, key):
    """Runs pytest at the server's URL."""

    def run(*args, url="", **more):
        return pytester.runpytest_inprocess(f"--slm-endpoint={url or url_of(there)}", *SMALL, *args, *QUIET, **more)

    return run


def test_the_shipped_sweep_and_its_claims(pytester, at, there, key, archive, monkeypatch):
    """Whether they hold is a busy machine's matter; every point is measured, and named with its URL. What is expected
    of a claim is looked up by its interface."""
    interfaces, row_for = set(), table.row_for
    monkeypatch.setattr(table, "row_for", lambda *by: interfaces.add(by[3]) or row_for(*by))
    put(pytester.path, "test_pareto_plateau", "test_kv_capacity", "test_gpu_underused_at_large_batch")
    result = at("-rs", "--slm-budget=0")
    counts = result.parseoutcomes()
    assert counts.pop("skipped") == 7 and sum(counts.values()) == 9 and "errors" not in counts
    told = [f"slmserve: at {url_of(there)}; *", f"slm at {url_of(there)}, endpoint *", "note: no sensors *"]
    result.stdout.fnmatch_lines_random([*told, "*SKIPPED*endpoint does not tell*", "*SKIPPED*GPU's counters*"])
    kept = archive().measurements
    assert problems_of(kept) == [] and interfaces == {"endpoint"}
    assert {m.load.concurrency for m in kept} == {1, 4, 8, 16, 32}
    assert {(m.spec.interface, m.spec.url, m.environment.url) for m in kept} == {("endpoint", *[url_of(there)] * 2)}
    text = (pytester.path / ".slm/records.jsonl").read_text("utf-8") + result.stdout.str() + result.stderr.str()
    assert key not in text


def test_an_adaptive_sweep(pytester, at, archive):
    pytester.makepyfile(test_it=SWEEP)
    result = at("--slm-sweep=adaptive", "-k", "test_point")
    result.stdout.fnmatch_lines(["*; adaptive sweep; *", "*(adaptive sweep, *"])
    assert archive().measurements and problems_of(archive().measurements) == []


def test_no_load_is_cut_by_a_kv_cache_that_nobody_knows_and_prices_are_those_of_windows(pytester, at):
    pytester.makepyfile(SWEEP)
    result = at("--slm-concurrency=1,8,16,4096", "-k", "test_point", "--slm-plan")
    result.stdout.fnmatch_lines(["*test_point?slm-4096?*", "note: *endpoint*windows*"])


def test_what_is_resumed_is_of_the_same_url_on_the_same_host(pytester, at, there, archive):
    pytester.makepyfile(SWEEP)
    few = ("--slm-concurrency=4", "--slm-repeats=1", "-k", "test_point")
    at(*few)
    known = len(archive().measurements)
    at(*few, "--slm-resume").stdout.fnmatch_lines(["1 measurements were reused*"])
    assert len(archive().measurements) == known
    other = f"http://localhost:{there.port}/v1/completions"
    at(*few, "--slm-resume", url=other)
    first, *_, second = archive().measurements
    assert (first.environment.url, second.environment.url) == (url_of(there), other)
    assert first.key != second.key and first.environment.key != second.environment.key


def test_several_urls_are_replicas(pytester, at, there, key, archive, monkeypatch):
    """One alone, then both at once with half of the requests each, in one window."""
    monkeypatch.setattr("secrets.token_hex", lambda n: key)  # one key for both, as one variable holds it
    put(pytester.path, "test_replication_gain")
    with somebodys_server() as second:
        pair = f"{url_of(there)},{url_of(second)}"
        result = at("-k", "point_of_replicas", "--slm-repeats=1", "--slm-concurrency=96", url=pair)
        result.stdout.fnmatch_lines(["collected 17 items / 15 deselected / 2 selected", "*2 x slm*urls*"])
    assert problems_of(archive().measurements) == []
    (point,) = shared_points(archive().measurements)
    assert (point.count, point.loads, point.sharing, point.model) == (2, (48, 48), "urls", "slm")
    together = [m for m in archive().measurements if m.replica.count == 2][:2]
    assert [m.environment.url for m in together] == pair.split(",")
    begins = [m.run.began_s for m in together]
    opens = [m.run.began_s + m.run.window_s[0] for m in together]
    assert max(begins) - min(begins) < 0.1 and max(opens) - min(opens) < 0.1


def test_a_job_at_its_url(pytester, at, there, archive):
    pytester.makepyfile("def test_job(slm_job): assert slm_job(40, rate=100, lengths=(16, 4), repeats=1)")
    at().stdout.fnmatch_lines([f"Jobs on {url_of(there)}"])
    kept = archive().measurements[0]
    assert is_job(kept.load) and len(kept.run.samples) == 40 and kept.spec.interface == "endpoint"


def test_one_url_is_no_replica(pytester, at):
    put(pytester.path, "test_replication_gain")
    result = at("-k", "point_of_replicas", "--slm-concurrency=4", "--slm-plan")
    assert "slm-4-x1" in result.stdout.str() and "x2" not in result.stdout.str()


OWN = """
    import pytest

    @pytest.mark.slm(model="somebody/slm")
    def test_the_model_by_its_short_name(slm_measure): assert slm_measure(4, repeats=1).concurrency == 4

    @pytest.mark.slm(model="opt-1.3b")
    def test_another_model(slm_measure): assert slm_measure(4).valid

    @pytest.mark.slm(max_num_seqs=8)
    def test_a_limit(slm_measure): assert slm_measure(4).valid

    def test_replicas(slm_replicas): slm_replicas(2, sharing="mps")
"""


def test_what_an_endpoint_cannot_be_asked_is_skipped_with_the_reason(pytester, at, there, archive):
    pytester.makepyfile(OWN)
    result = at("-rsf", url=f"{url_of(there)},http://localhost:{there.port}/v1/completions")
    result.assert_outcomes(passed=1, skipped=2, failed=1)
    reasons = ["*SKIPPED*opt-1.3b*--slm-models*", "*SKIPPED*max_num_seqs*endpoint*", "*mps *these engines*"]
    result.stdout.fnmatch_lines_random(reasons)
    kept = archive().measurements
    assert {m.spec.model for m in kept} == {"slm"} and problems_of(kept) == []


# What is refused before an item begins


class Hooked:
    def pytest_runtest_setup(self):
        raise AssertionError("an item has begun")


@pytest.fixture
def refused(pytester, at):
    """The error of a run that ends before an item begins."""
    pytester.makepyfile(SWEEP)
    return lambda *words, **more: usage_error(at(*words, **more, plugins=[Hooked()]))


def test_two_runs_at_once_would_measure_each_other(refused, there):
    with lock_device(url_lock(url_of(there))):
        assert "another run" in refused()


def test_a_model_that_is_not_served_and_text_without_a_tokenizer(refused, pytester):
    (pytester.path / "a.json").write_text("[]")
    text = refused("--slm-models=other")
    assert "404" in text and "`other`" in text
    assert "--slm-dataset" in refused("--slm-dataset=a.json")


def test_a_wrong_key_is_told_and_never_repeated(refused, monkeypatch):
    for wrong, fact in (("hunter2hunter2", "401"), ("hunter2\nhunter3", "SLM_ENDPOINT_KEY")):
        monkeypatch.setenv("SLM_ENDPOINT_KEY", wrong)
        text = refused()
        assert fact in text and "hunter" not in text


def test_a_url_with_a_key_is_not_repeated(refused):
    text = refused(url="https://host/v1/completions?api_key=hunter2")
    assert "api_key" in text and "hunter2" not in text


def test_where_nobody_answers_the_url_is_told_and_no_longer_waited_for_than_asked(refused, pytester, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/v1/completions"
    assert nobody in refused(url=nobody)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/completions"
        began = time.monotonic()
        text = refused("--override-ini=slm_timeout=0.5", url=url)
        assert url in text and "timed out" in text and time.monotonic() - began < 30


def test_a_model_has_to_be_named(pytester, there, key):
    pytester.makepyfile(SWEEP)
    result = pytester.runpytest_inprocess(f"--slm-endpoint={url_of(there)}", *QUIET)
    assert "--slm-models NAME" in usage_error(result)
