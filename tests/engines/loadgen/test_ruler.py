"""The comparison itself: a client whose errors are known gets just these, and one that is right gets none."""

from __future__ import annotations

import json
import os

import pytest
from scripts import benchmark_script, loaded

from pytest_slmserve.engines.loadgen.load_run import gaps

PATH = benchmark_script("ruler")
ITL_S, TTFT_S, TOKENS = 0.1, 0.05, 20


@pytest.fixture(scope="module")
def ruler():
    with loaded(PATH) as module:
        yield module


@pytest.fixture
def trial(ruler):
    return ruler.Trial(10, TOKENS, TTFT_S, ITL_S, "spread")


def rows(streams=10):
    writes = [TTFT_S + i * ITL_S for i in range(TOKENS)]
    return {n: {"arrived": 7.0 + n, "writes": [7.0 + n + at for at in writes]} for n in range(streams)}


def seen(ruler, late_s=0.0, slow=1.0, tail=1.0, streams=10):
    numbers = range(streams)
    return ruler.Seen(
        dict.fromkeys(numbers, TTFT_S + late_s), dict.fromkeys(numbers, ITL_S * slow), ITL_S * slow * tail, cpu_s=0.002
    )


def test_a_client_that_is_right_has_no_error(ruler, trial):
    error = ruler.compare(seen(ruler), rows(), trial)
    assert (error.ttft_p99, error.itl_mean, error.itl_p99) == pytest.approx((0, 0, 0), abs=1e-9)
    assert (error.lost, error.rate, error.cpu_s_per_mtoken) == (0, pytest.approx(100), pytest.approx(10))
    assert error.worst == pytest.approx(0, abs=1e-6)


def test_planted_errors_are_found(ruler, trial):
    error = ruler.compare(seen(ruler, late_s=0.003, slow=1.2, tail=1.5), rows(), trial)
    assert (error.ttft_mean, error.ttft_p50, error.ttft_p99, error.nominal) == pytest.approx([0.003] * 4)
    assert (error.itl_mean, error.itl_p99) == pytest.approx((0.02, 0.08))
    assert error.worst == pytest.approx(0.8)


def test_a_request_that_a_client_lost_is_an_error(ruler, trial):
    error = ruler.compare(seen(ruler, streams=9), rows(), trial)
    assert (error.lost, error.worst) == (1, 1.0)


def test_a_client_that_knows_none_of_the_requests_has_failed(ruler, trial):
    with pytest.raises(ruler.PeerFailed):
        ruler.compare(seen(ruler, streams=0), rows(), trial)


def test_a_percentile_of_our_histogram_is_that_of_the_gaps(ruler):
    times = [0.0]
    for gap in (0.001 * i for i in range(1, 1001)):
        times.append(times[-1] + gap)
    histogram = gaps([times], (0.0, 1e9))
    for share in (0.1, 0.5, 0.99):
        assert ruler.percentile_of(histogram, share) == pytest.approx(share, rel=0.006)


def test_a_peer_that_fails_is_noted_and_the_others_go_on(ruler, trial):
    class Broken:
        name = "broken"

        def serve(self, trial, url, truth):
            raise ruler.PeerFailed("it is not there")

    bench = ruler.Bench([Broken()], core=min(os.sched_getaffinity(0)))
    bench.try_all(trial)
    assert bench.found == [] and "not there" in bench.failed["broken"]


@pytest.mark.parametrize("starts", ["spread", "together"])
def test_our_own_client_is_held_against_the_server(ruler, starts):
    """That it is right is the script's to say: a busy machine is late."""
    core = min(os.sched_getaffinity(0))
    error = ruler.Bench([], core).attempt(ruler.Ours([core]), ruler.Trial(8, 60, 0.01, 0.01, starts))
    assert error.lost == 0 and error.true_itl > 0.005  # a server that stood still sends what is due at once
    assert error.cpu_s_per_mtoken > 0


def test_a_run_that_is_broken_off_keeps_what_it_found(ruler, trial, tmp_path, monkeypatch):
    def try_all(bench, trial):
        if bench.found:
            raise KeyboardInterrupt
        bench.found.append((ruler.Ours.name, trial, ruler.compare(seen(ruler), rows(), trial)))

    monkeypatch.setattr(ruler.Bench, "try_all", try_all)
    out = tmp_path / "ruler.json"
    monkeypatch.setattr("sys.argv", ["ruler.py", "--streams", "10", "--cores", "2", "4", "6", "--out", f"{out}"])
    with pytest.raises(KeyboardInterrupt):
        ruler.main()
    told = json.loads(out.read_text())
    assert told["cores"] == [2, 4, 6]
    assert [(row["client"], row["streams"], row["lost"]) for row in told["found"]] == [(ruler.Ours.name, 10, 0)]


def test_server_and_client_do_not_share_a_core_silently(ruler, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ruler.py", "--cores", "2"])
    with pytest.raises(SystemExit):
        ruler.main()
    assert "the server's, and then the client's" in capsys.readouterr().err
