"""Options of endpoints: the same benchmarks on servers that run already."""

from __future__ import annotations

import socket
import time

import pytest
from inside import ALL_OF_IT, SWEEP, usage_error
from interfaces import problems_of, somebodys_server, url_of
from shipped import BENCHMARKS, put

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.points import shared_points
from pytest_slmserve.engines.device_lock import lock_device
from pytest_slmserve.options.table import urls
from pytest_slmserve.plan.cases import url_lock
from pytest_slmserve.schema.specs import is_job

# endpoint


# The stand-in takes 8 requests at a time, so its throughput ends there.
SMALL = (
    "--slm-models=slm",
    "--slm-concurrency=1,4,8,16,32",
    "--slm-input-len=16",
    "--slm-output-len=8",
    "--slm-window=0.6",
    ALL_OF_IT,
)


QUIET = ("-p", "no:cacheprovider")


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


def test_the_shipped_sweep_and_its_claims(pytester, at, there, key, archive):
    """Whether they hold is a busy machine's matter; every point is measured, and named with its URL."""
    put(pytester.path, "test_pareto_plateau", "test_kv_capacity", "test_gpu_underused_at_large_batch")
    result = at("-rs", "--slm-budget=0")
    counts = result.parseoutcomes()
    assert counts.pop("skipped") == 7 and sum(counts.values()) == 9 and "errors" not in counts
    result.stdout.fnmatch_lines_random(
        [
            f"slmserve: at {url_of(there)}; sensors: none; *endpoint (command line)*",
            f"slm at {url_of(there)}, endpoint interface",
            "*SKIPPED*asks an engine for what an endpoint does not tell*",
            "*SKIPPED*reads a GPU's counters*",
            "note: no sensors are read: on which device an endpoint runs is not known",
        ]
    )
    kept = archive().measurements
    assert problems_of(kept) == []
    assert {m.load.concurrency for m in kept} == {1, 4, 8, 16, 32}
    assert {(m.spec.interface, m.spec.url, m.environment.url) for m in kept} == {("endpoint", *[url_of(there)] * 2)}
    text = (pytester.path / ".slm/records.jsonl").read_text("utf-8") + result.stdout.str() + result.stderr.str()
    assert key not in text


def test_what_is_expected_of_a_claim_is_looked_up_by_its_interface(pytester, at, monkeypatch):
    interfaces, row_for = set(), table.row_for
    monkeypatch.setattr(table, "row_for", lambda *by: interfaces.add(by[3]) or row_for(*by))
    put(pytester.path, "test_pareto_plateau")
    at("-k", "throughput_reaches_a_plateau").assert_outcomes()  # inconclusive: nothing is measured
    assert interfaces == {"endpoint"}


def test_an_adaptive_sweep(pytester, at, archive):
    pytester.makepyfile(SWEEP)
    result = at("--slm-sweep=adaptive", "-k", "point")
    result.stdout.fnmatch_lines(["*; adaptive sweep; *", "*(adaptive sweep, *"])
    assert problems_of(archive().measurements) == []


def test_no_load_is_cut_by_a_kv_cache_that_nobody_knows(pytester, at):
    pytester.makepyfile(SWEEP)
    result = at("--slm-concurrency=1,8,16,4096", "-k", "point", "--slm-plan")
    result.stdout.fnmatch_lines(["*test_point?slm-4096?*", "note: points of an endpoint are priced by their windows*"])


def test_what_is_resumed_is_of_the_same_url_on_the_same_host(pytester, at, there, archive):
    pytester.makepyfile(SWEEP)
    few = ("--slm-concurrency=4", "--slm-repeats=1", "-k", "point")
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
        title = f"Replicas at URLs of their own, the first at {url_of(there)}*"
        result.stdout.fnmatch_lines(["collected 17 items / 15 deselected / 2 selected", title, "*2 x slm*urls*"])
    assert problems_of(archive().measurements) == []
    (point,) = shared_points(archive().measurements)
    assert (point.count, point.loads, point.sharing, point.model) == (2, (48, 48), "urls", "slm")
    together = [m for m in archive().measurements if m.replica.count == 2][:2]
    assert [m.environment.url for m in together] == pair.split(",")
    begins = [m.run.began_s for m in together]
    opens = [m.run.began_s + m.run.window_s[0] for m in together]
    assert max(begins) - min(begins) < 0.1 and max(opens) - min(opens) < 0.1


def test_every_shipped_benchmark_can_be_planned_for_an_endpoint(pytester):
    """Of models of the catalogue, which most of them name; nobody is asked for a plan. In a process of its own: tests
    here have names of benchmarks too."""
    put(pytester.path, *(path.stem for path in BENCHMARKS.glob("test_*.py")))
    models = "--slm-models=facebook/opt-125m,opt-1.3b,opt-6.7b,Qwen/Qwen2.5-3B"
    result = pytester.runpytest_subprocess("--slm-endpoint=http://h/v1/completions", models, "--slm-plan", *QUIET)
    assert result.ret == 0 and "test_job[opt-125m-256-100-per-s]" in result.stdout.str()
    assert "kv-for" not in result.stdout.str(), "no limit is set for a server that has its own"


JOB = """
    def test_job(slm_job):
        assert slm_job(40, rate=100, lengths=(16, 4), repeats=1)
"""


def test_a_job_at_its_url(pytester, at, there, archive):
    pytester.makepyfile(JOB)
    at().stdout.fnmatch_lines([f"Jobs on {url_of(there)}"])
    kept = archive().measurements[0]
    assert is_job(kept.load) and len(kept.run.samples) == 40 and kept.spec.interface == "endpoint"


def test_one_url_is_no_replica(pytester, at):
    put(pytester.path, "test_replication_gain")
    result = at("-k", "point_of_replicas", "--slm-concurrency=4", "--slm-plan")
    assert "slm-4-x1" in result.stdout.str() and "x2" not in result.stdout.str()
    result = at("-k", "point_of_replicas and x2", "-rs")
    result.stdout.fnmatch_lines(["*SKIPPED*2 replicas need a URL each*"])


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
    result.stdout.fnmatch_lines_random(
        [
            "*SKIPPED*measures opt-1.3b, which this endpoint was not said to serve: --slm-models",
            "*SKIPPED*sets max_num_seqs of its engine, and an endpoint has limits of its own",
            "*mps is no way in which these engines can share*",
        ]
    )
    kept = archive().measurements
    assert {m.spec.model for m in kept} == {"slm"} and problems_of(kept) == []


def test_a_lock_is_held_on_each_url(pytester, at, there):
    """Two runs at once would measure each other."""
    pytester.makepyfile(SWEEP)
    with lock_device(url_lock(url_of(there))):
        assert "is being measured by another run" in usage_error(at())


class Hooked:
    def pytest_runtest_setup(self):
        raise AssertionError("an item has begun")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (("--slm-models=other",), "answered 404: .*`other` does not exist"),
        (("--slm-baseline=old.jsonl",), "does not tell the limits it works under"),
        (("--slm-dataset=a.json",), "the text needs a tokenizer"),
    ],
)
def test_what_cannot_be_is_told_before_an_item_begins(pytester, at, more, problem):
    pytester.makepyfile(SWEEP)
    (pytester.path / "a.json").write_text("[]")
    text = usage_error(at(*more, plugins=[Hooked()]))
    pytest.LineMatcher(text.splitlines()).re_match_lines([f".*{problem}"])


def test_a_wrong_key_and_nobody_there(pytester, at, key, monkeypatch):
    pytester.makepyfile(SWEEP)
    monkeypatch.setenv("SLM_ENDPOINT_KEY", "hunter2hunter2")
    text = usage_error(at())
    assert "answered 401" in text and "hunter2" not in text
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/v1/completions"
    assert f"{nobody} does not answer" in usage_error(at(url=nobody))


def test_a_key_that_no_header_can_hold_is_not_repeated(pytester, at, monkeypatch):
    pytester.makepyfile(SWEEP)
    monkeypatch.setenv("SLM_ENDPOINT_KEY", "hunter2\nhunter3")
    text = usage_error(at())
    assert "SLM_ENDPOINT_KEY holds what no header may hold" in text and "hunter" not in text


def test_no_model_was_named(pytester, there, key):
    pytester.makepyfile(SWEEP)
    text = usage_error(pytester.runpytest_inprocess(f"--slm-endpoint={url_of(there)}", *QUIET))
    assert "no model was named" in text and "--slm-models NAME, as the server calls it" in text


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hunter2@host/v1/completions",
        "http://hunter2@host/v1/completions",
        "me:hunter2@host/v1/completions",
        "https://host/v1/completions?api_key=hunter2",
        "https://host/v1/completions?api-version=1&sig=hunter2",
        "ftp://host/hunter2",
        "http://host:hunter2/v1",
        "host/v1/hunter2",
    ],
)
def test_a_url_with_credentials_is_refused_and_not_repeated(pytester, url):
    text = usage_error(pytester.runpytest_inprocess(f"--slm-endpoint={url}", "--slm-models=m", *QUIET))
    assert "an endpoint's URL" in text and "hunter2/v1/" not in text
    assert url not in text


def test_a_url_with_a_version_is_taken():
    assert urls("https://host/openai/v1/completions?api-version=1") == (
        "https://host/openai/v1/completions?api-version=1",
    )


# timeout


def test_a_server_that_does_not_answer_is_not_waited_for_longer(pytester):
    pytester.makepyfile("def test(slm_measure): assert slm_measure(1).valid")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/completions"
        began = time.monotonic()
        text = usage_error(
            pytester.runpytest_inprocess(f"--slm-endpoint={url}", "--slm-models=m", "--override-ini=slm_timeout=0.5")
        )
        assert f"{url} does not answer: timed out" in text and time.monotonic() - began < 30
