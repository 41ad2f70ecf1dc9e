"""`measure` on somebody else's server: what it prints, what it keeps, what it refuses."""

import csv
import io
import json
import math
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
from conversations import write_dataset
from html_pages import Page
from interfaces import somebodys_server, url_of
from terminals import Screen

from pytest_slmserve.__main__ import main, parser, run
from pytest_slmserve.analysis.metrics.window import latencies_of, steps_of
from pytest_slmserve.archive import external
from pytest_slmserve.archive.store import read
from pytest_slmserve.commands.measure import asked, least_seconds, seconds
from pytest_slmserve.engines.child import Child
from pytest_slmserve.engines.endpoint import EndpointEngine
from pytest_slmserve.report import text_table
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop
from pytest_slmserve.workload.arrivals import job
from pytest_slmserve.workload.requests import read_conversations, sample_as_vllm
from pytest_slmserve.workload.tokens import hub_tokenizer


class Said(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def there():
    """A server that somebody has started."""
    with somebodys_server() as found:
        yield found


def command(there, tmp_path, *arguments, key=None):
    """What `measure` says to a small load: exit status, and what it prints."""
    words = ["--endpoint", url_of(there), "--model", "slm", "--records", str(tmp_path / "r.jsonl")]
    lengths = (
        [] if {"--sharegpt", "--trace", "--lengths-from"} & {*arguments} else ["--input-len", "16", "--output-len", "8"]
    )
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("SLM_ENDPOINT_KEY", there._key if key is None else key)
        status = main(["measure", *words, *lengths, *arguments])
    return Said(status, out.getvalue(), err.getvalue())


def measured(done):
    """What it found; a client that lags, as on a busy machine, is told and no fault of the command."""
    assert done.status in (0, 1), done.err
    found = json.loads(done.out)
    assert found["valid"] is (done.status == 0)
    return sound(found)


def sound(found):
    wrong = [text for text in found["problems"] if "the client lagged" not in text]
    assert wrong == [] and found["valid"] is (found["problems"] == [])
    return found


def test_measure_prints_a_page_and_keeps_a_record(there, tmp_path):
    pytest.importorskip("jinja2", reason="a page needs Jinja2")
    html = tmp_path / "out.html"
    done = command(there, tmp_path, "--max-concurrency", "4", "--num-prompts", "40", "--html", str(html))
    assert done.status == 0, done.err
    assert "40 requests ended in the window: 0 unfinished, 0 failed" in done.out
    assert "\nconcurrency 4, 40 requests\n" in done.out
    assert {"TTFT", "TPOT", "E2E", "ITL"} <= {line.split()[0] for line in done.out.splitlines() if line}
    (kept,) = read(tmp_path / "r.jsonl").measurements
    assert (kept.spec.interface, kept.spec.model, len(kept.run.samples)) == ("endpoint", "slm", 40)
    assert there._key not in (tmp_path / "r.jsonl").read_text("utf-8") + done.out + done.err + html.read_text("utf-8")
    assert read(html).measurements == (kept,) and "40 requests ended in the window" in html.read_text("utf-8")
    drawn = [spec["description"] for spec in Page(html.read_text("utf-8")).charts.values()]
    assert {"TTFT quantiles", "TPOT quantiles", "E2E quantiles", "ITL quantiles"} <= set(drawn)


def test_a_result_in_the_words_of_vllms_own_client(there, tmp_path):
    """Our own reader of such files reads it, and the numbers are those of the page."""
    saved = tmp_path / "bench.json"
    load = ("--max-concurrency", "4", "--num-prompts", "40")
    found = json.loads(command(there, tmp_path, *load, "--json", "--export", f"vllm-bench={saved}").out)
    told = json.loads(saved.read_text("utf-8"))
    assert (told["completed"], told["failed"], told["max_concurrency"], told["request_rate"]) == (40, 0, 4, "inf")
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (640, 320)
    assert told["output_throughput"] == pytest.approx(found["output_tokens_per_s"])
    assert told["total_token_throughput"] == pytest.approx(3 * 320 / told["duration"], rel=0.1)
    for theirs, ours in (("ttft", "ttft"), ("tpot", "tpot"), ("e2el", "e2e"), ("itl", "itl")):
        for share in (90, 95, 99):
            assert told[f"p{share}_{theirs}_ms"] == pytest.approx(1e3 * found[f"{ours}_p{share}_s"])
    assert told["mean_itl_ms"] == pytest.approx(told["mean_tpot_ms"], rel=0.1)
    assert (found["prompt_tokens"], found["output_tokens"]) == (640, 320)
    assert told["max_concurrent_requests"] == found["concurrency_max"] == peak_of(tmp_path / "r.jsonl") == 4
    columns = external.Columns(knob="max_concurrency", throughput="output_throughput", latency="mean_tpot_ms")
    (point,) = external.external_curve(external.read_results(saved), columns).points
    assert point.concurrency == 4 and point.e2e_repeats == pytest.approx((found["tpot_s"],))


def peak_of(archive):
    """Most requests at once in the only record of an archive, counted at each moment at which one was sent."""
    samples = read(archive).measurements[0].run.samples
    spans = list(zip(samples.sent_s, samples.last_token_s, strict=True))
    return max(sum(sent <= at < last for sent, last in spans) for at in samples.sent_s)


def test_measure_at_a_rate_tells_goodput_and_delay(there, tmp_path):
    timing = ("--request-rate", "40", "--settle", "0.3", "--window", "1")
    found = measured(command(there, tmp_path, *timing, "--goodput", "ttft:1s,e2e:2s", "--json"))
    assert found["requests"] == found["goodput"]["good"] > 20
    assert found["schedule_delay"]["requested_per_s"] == 41  # by the schedule's seed; a busy machine sends some later
    assert (
        found["goodput"]["slo"] == {"ttft_s": 1, "tpot_s": None, "itl_s": None, "e2e_s": 2} and found["ttft_p99_s"] < 1
    )


TIMING = ("--settle", "0.2", "--window", "0.8s")
SLO = ("--goodput", "ttft:1s,e2e:2s")


def test_several_rates_are_measured_one_after_the_other(there, tmp_path):
    results = tmp_path / "results"
    words = ("--request-rate", "20,60", *TIMING, *SLO, "--json", "--export", f"vllm-bench={results}/")
    done = command(there, tmp_path, *words)
    assert done.status in (0, 1), done.err
    found = json.loads(done.out)
    kept = read(tmp_path / "r.jsonl").measurements
    exported = sorted(results.iterdir())
    assert [re.sub(r"\d{8}-\d{6}-[0-9a-f]{12}", "AT", path.name) for path in exported] == [
        "endpoint-20qps-slm-AT.json",
        "endpoint-60qps-slm-AT.json",
    ], "as vLLM names them"
    slow = json.loads(exported[0].read_text("utf-8"))
    assert (slow["record_id"], slow["request_rate"], slow["max_concurrency"]) == (kept[0].id, 20, None)
    assert slow["request_goodput"] == pytest.approx(slow["completed"] / 0.8)
    assert [m.load.rate for m in kept] == [20, 60] == [each["rate"] for each in found["points"]]
    assert [m.id for m in kept] == [each["id"] for each in found["points"]]
    assert kept[0].workload.hash != kept[1].workload.hash, "no request is sent twice"
    said = done.err.splitlines()  # in a log, where no line can be written over
    assert [re.sub(r"\d+:\d\d", "T", line) for line in said] == [
        f"slmserve: load {n} of 2 | T+ left | {m.load.title}" for n, m in enumerate(kept, 1)
    ]
    slow, fast = map(sound, found["points"])
    assert 1.5 < fast["schedule_delay"]["requested_per_s"] / slow["schedule_delay"]["requested_per_s"] < 6
    assert slow["goodput"]["attainment"] == 1
    if done.status == 0:
        assert (found["peak"]["load"], found["highest_load"]["load"]) == (60, 60)
        assert "the largest load measured" in found["peak"]["why"] and not found["peak"]["bracketed"]


def test_a_table_of_several_rates(there, tmp_path):
    out = command(there, tmp_path, "--request-rate", "20,60", *TIMING, *SLO).out
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("20 ", "60 "))]
    assert [(row[0], len(row)) for row in rows] == [("20", 15), ("60", 15), ("20", 6), ("60", 6)]
    assert {row[-1] for row in rows[:2]} <= {"yes", "NO"} and {row[-1] for row in rows[2:]} == {"0"}, "none dropped"
    assert "the server does not report prefix-cache hits" in out
    assert "good: ttft:1s,e2e:2s" in out and "attainment" not in out
    assert "\nPoisson arrivals: one load after the other, each judged for" in out
    assert max(map(len, out.splitlines())) <= text_table.layout().width
    again = io.StringIO()
    with redirect_stdout(again):
        assert main(["report", str(tmp_path / "r.jsonl"), "--goodput", SLO[1]]) == 0
    assert out.strip() in again.getvalue(), "the same page"
    plain = command(there, tmp_path, "--request-rate", "20,60", *TIMING).out
    assert "tokens" in plain and "good" not in plain


def stopped_at_the_second(monkeypatch, error):
    """`measure` ends with this error when the second load begins."""
    from pytest_slmserve.commands import measure

    real, calls = measure.measure_case, []

    def stops(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise error
        return real(*arguments)

    monkeypatch.setattr(measure, "measure_case", stops)


def test_rates_measured_before_an_error_are_kept(there, tmp_path, monkeypatch):
    stopped_at_the_second(monkeypatch, EngineFailed("the client is gone, as planted"))
    done = command(there, tmp_path, "--request-rate", "20,60", *TIMING)
    assert done.status == 1 and "as planted" in done.err
    assert [m.load.rate for m in read(tmp_path / "r.jsonl").measurements] == [20]


def test_an_archive_that_cannot_be_written_is_said_in_the_words_of_the_command(there, tmp_path):
    done = command(there, tmp_path, "--max-concurrency", "1", "--num-prompts", "2", "--records", str(tmp_path))
    assert (done.status, done.out) == (4, "") and done.err.endswith("  try: --records with another path\n")


def test_an_interrupt_is_one_line_and_what_was_measured_is_kept(there, tmp_path, monkeypatch, capsys):
    stopped_at_the_second(monkeypatch, KeyboardInterrupt())
    monkeypatch.setattr(
        "pytest_slmserve.__main__.main", lambda: command(there, tmp_path, "--request-rate", "20,60", *TIMING)
    )
    assert run() == 130
    assert capsys.readouterr().err.strip() == "interrupted: what had been measured to its end is kept"
    assert [m.load.rate for m in read(tmp_path / "r.jsonl").measurements] == [20]


@pytest.mark.parametrize(("rate", "words"), [("inf", "40 requests, all at once"), ("60", "40 requests, 60/s, seed 0")])
def test_a_number_of_requests_at_a_rate_or_at_once_is_served_to_the_end(there, tmp_path, rate, words):
    """The numbers are those of vLLM's own client: all requests, over the time until the last answer."""
    saved = tmp_path / "bench.json"
    load = ("--request-rate", rate, "--num-prompts", "40", *SLO)
    done = command(there, tmp_path, *load, "--export", f"vllm-bench={saved}")
    assert done.status in (0, 1), done.err
    assert f"\n{words}; sent " in done.out and "goodput" in done.out
    assert "40 requests ended in the window: 0 unfinished, 0 failed" in done.out
    (kept,) = read(tmp_path / "r.jsonl").measurements
    assert kept.load == OpenLoop(requests=40, rate=float(rate)) and list(kept.run.samples.request) == list(range(40))
    told = json.loads(saved.read_text("utf-8"))
    assert (told["completed"], str(told["request_rate"])) == (40, rate if rate == "inf" else "60.0")
    assert told["request_throughput"] == pytest.approx(40 / told["duration"])
    assert told["output_throughput"] == pytest.approx(320 / told["duration"])
    assert told["total_token_throughput"] == pytest.approx(320 * 3 / told["duration"])
    again = io.StringIO()
    assert command(there, tmp_path, "--max-concurrency", "4", "--num-prompts", "30").status in (0, 1)
    with redirect_stdout(again):
        main(["report", str(tmp_path / "r.jsonl")])
    assert f"{told['request_throughput']:.4g}" in again.getvalue(), "its row among the jobs"
    assert "table-1-batch-fits" not in again.getvalue(), "no claim on models that nobody measured"
    assert "\nconcurrency 4, 30 requests\n" in again.getvalue(), "and what was no job"


@pytest.mark.parametrize(
    ("option", "problem"),
    [(("--html", "there.json"), "is there, and is no page"), (("--export", "vllm-bench=r.json"), "into the records")],
)
def test_what_would_replace_other_results_is_refused_before_anything_is_measured(there, tmp_path, option, problem):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        (tmp_path / "there.json").write_text("{}")
        done = command(there, tmp_path, "--max-concurrency", "4", "--num-prompts", "8", "--records", "r.json", *option)
    assert done.status == 4 and problem in done.err and not (tmp_path / "r.json").exists()


def test_a_rate_with_a_limit_on_what_is_in_flight(there, tmp_path):
    """As behind a gateway: who is held back waits, of which the page tells; the server is asked by as many as may."""
    saved = tmp_path / "bench.json"
    load = ("--max-concurrency", "2", "--num-prompts", "40", "--export", f"vllm-bench={saved}")
    done = command(there, tmp_path, *load, "--request-rate", "200")
    assert done.status in (0, 1), done.err
    assert "\n40 requests, 200/s, seed 0, at most 2 concurrent requests; sent " in done.out
    (held,) = read(tmp_path / "r.jsonl").measurements
    assert held.load == OpenLoop(requests=40, rate=200, max_concurrency=2) and held.run.failures == 0
    assert most_in_flight(held.run.samples) == 2
    waited = held.run.stream.waited_s
    assert len(waited) == 40 and sum(s > 0 for s in waited) > 20, "5 ms apart, 2 at a time"
    assert f"\n{sum(s > 0 for s in waited)} of them were held back; all waited for" in done.out
    arrivals = job(40, 200).schedule_s
    assert sum(held.run.stream.scheduled_s) - sum(arrivals) == pytest.approx(sum(waited), abs=1e-3)
    assert json.loads(saved.read_text("utf-8"))["max_concurrency"] == 2
    found = json.loads(command(there, tmp_path, *load, "--request-rate", "5", "--json").out)
    assert found["load"]["max_concurrency"] == 2 and found["held_back"]["max_s"] < waited[-1]
    again = io.StringIO()
    with redirect_stdout(again):
        main(["report", str(tmp_path / "r.jsonl")])
    assert "max concur-" in again.getvalue()


def most_in_flight(samples):
    """By their own times."""
    events = [(at, 1) for at in samples.sent_s] + [(at, -1) for at in samples.last_token_s]
    return max(accumulate(change for _, change in sorted(events)))


def test_a_ramp_is_told_step_by_step(there, tmp_path):
    ramp = ("--ramp", "20,60", "--step", "1s", "--settle", "0.2", "--burstiness", "inf")
    done = command(there, tmp_path, *ramp, *SLO, "--json")
    assert done.status in (0, 1), done.err
    found = json.loads(done.out)
    slow, fast = map(sound, found["steps"])
    assert (slow["requests"], fast["requests"]) == (16, 48), "0.8 s each"
    assert (slow["from_s"], slow["until_s"], fast["from_s"], fast["until_s"]) == (0.2, 1, 1.2, 2)
    assert slow["goodput"]["attainment"] == 1 == fast["goodput"]["attainment"]
    (kept,) = read(tmp_path / "r.jsonl").measurements
    whole, *gaps = (latencies_of(m).itl_s.known for m in (kept, *steps_of(kept)))
    for step, seen in zip((slow, fast), gaps, strict=True):
        assert seen == pytest.approx(7 * step["requests"], rel=0.2), "but for those at the window's ends"
        assert step["itl_s"] == pytest.approx(step["tpot_s"], rel=0.2)
        assert 0 < step["itl_p50_s"] <= step["itl_p90_s"] <= step["itl_p95_s"] <= step["itl_p99_s"]
    assert sum(gaps) < whole
    assert kept.load.steps == ((20, 1), (60, 1)) and len(kept.run.samples) == 20 + 60 + 12
    assert found["id"] == kept.id and found["load"]["steps"] == [[20, 1], [60, 1]]
    again = io.StringIO()
    with redirect_stdout(again):
        main(["report", str(tmp_path / "r.jsonl"), *SLO])
    out = " ".join(again.getvalue().split())
    assert (
        "ramp 20,60/s, 1 s each, arrivals with constant gaps, seed 0; the first 0.2 s of a step are not judged" in out
    )
    lines = [line for line in again.getvalue().splitlines() if line.strip().startswith(("20 ", "60 "))]
    assert len(lines) == 4, "a row of each step in both tables"


def test_csv_has_a_line_for_each_load_or_step_and_the_keys_of_the_json(there, tmp_path):
    def rows(*words):
        done = command(there, tmp_path, *words, *SLO, "--csv")
        assert done.status in (0, 1), done.err
        return list(csv.DictReader(io.StringIO(done.out)))

    steps = rows("--ramp", "20,60", "--step", "1s", "--settle", "0.2")
    assert [(row["rate"], row["from_s"], row["load.kind"]) for row in steps] == [
        ("20.0", "0.2", "open_loop"),
        ("60.0", "1.2", "open_loop"),
    ]
    slow, fast = rows("--request-rate", "20,60", *TIMING)
    (kept, *_) = read(tmp_path / "r.jsonl").measurements[1:]
    assert slow["id"] == kept.id and (slow["load.rate"], fast["load.rate"]) == ("20.0", "60.0")
    assert float(slow["ttft_p95_s"]) > 0 and slow["goodput.attainment"] == "1.0" == slow["goodput.by_slo.ttft"]
    assert slow["step_s"] == "" and slow["degraded"] == "" and "noise" in slow, "empty is not known, or nothing"


def test_json_and_csv_are_two_answers(there, tmp_path):
    done = command(there, tmp_path, "--max-concurrency", "1", "--num-prompts", "2", "--json", "--csv")
    assert done.status == 4 and "not allowed with argument" in done.err and done.out == ""


def test_measure_replays_a_trace(there, tmp_path):
    lines = [f'{{"timestamp": {50 * i}, "input_length": 12, "output_length": {3 + i % 4}}}' for i in range(60)]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines), "utf-8")
    timing = ("--trace", str(tmp_path / "trace.jsonl"), "--speed", "2", "--settle", "0.2", "--window", "0.79")
    found = measured(command(there, tmp_path, *timing, "--json"))
    (kept,) = read(tmp_path / "r.jsonl").measurements
    assert len(kept.run.samples) == 48, "1.19 s, twice as fast"
    assert list(kept.run.samples.output_tokens[:5]) == [3, 4, 5, 6, 3]
    assert found["load"]["arrivals"].endswith("speed 2")
    over = command(there, tmp_path, "--trace", str(tmp_path / "trace.jsonl"), "--settle", "3", "--window", "2")
    assert over.status == 4 and "trace.jsonl has no request between 3 s and 5 s" in over.err
    page = command(there, tmp_path, *timing).out
    assert "4.5 output tokens requested in the mean: trace.jsonl, 0 requests left out as too long" in page


def test_what_further_was_asked_of_each_request_is_told_and_kept(there, tmp_path):
    load = ("--request-rate", "20", *TIMING)
    for further in (["--extra-body", '{"top_k": 1, "n": null, "stop": ["a"]}'], []):
        done = command(there, tmp_path, *load, *further)
        assert done.status in (0, 1), done.err
        assert ('each request with n: null, stop: ["a"], top_k: 1' in done.out) is bool(further)
    other, plain = read(tmp_path / "r.jsonl").measurements
    assert other.spec.extra == (("n", "null"), ("stop", '["a"]'), ("top_k", "1")) and plain.spec.extra == ()
    again = io.StringIO()
    with redirect_stdout(again):
        assert main(["report", str(tmp_path / "r.jsonl")]) == 0
    assert again.getvalue().count("one load after the other") == 2, "two questions, two tables"
    closed = ("--max-concurrency", "2", "--num-prompts", "30", "--extra-body", '{"top_k": 1}')
    assert json.loads(command(there, tmp_path, *closed, "--json").out)["extra_body"] == {"top_k": 1}
    with redirect_stdout(again):
        main(["report", str(tmp_path / "r.jsonl")])
    assert "\neach request with top_k: 1\n" in again.getvalue() and "\nconcurrency 2, 30 requests\n" in again.getvalue()
    steady = ("--max-concurrency", "2", "--window", "0.5", "--extra-body", '{"top_k": 1}')
    assert command(there, tmp_path, *steady).status in (0, 1)
    with redirect_stdout(again):
        main(["report", str(tmp_path / "r.jsonl")])
    assert "\n  each request with top_k: 1\n" in again.getvalue(), "above the table of a sweep too"


def test_lengths_are_drawn_from_a_trace(there, tmp_path):
    lines = [f'{{"timestamp": {50 * i}, "input_length": {2 + 40 * (i % 2)}, "output_length": 3}}' for i in range(60)]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines), "utf-8")
    drawn = (
        "--lengths-from",
        str(tmp_path / "trace.jsonl"),
        "--max-concurrency",
        "4",
        "--num-prompts",
        "200",
        "--json",
    )
    measured(command(there, tmp_path, *drawn))
    measured(command(there, tmp_path, *drawn, "--max-model-len", "40"))
    every, short = read(tmp_path / "r.jsonl").measurements
    assert {*every.run.samples.prompt_tokens} == {2, 42} and {*short.run.samples.prompt_tokens} == {2}
    assert every.workload.source.endswith("lengths drawn from trace.jsonl, 0 left out as too long")
    none = command(there, tmp_path, *drawn, "--max-model-len", "4")
    assert none.status == 4 and "no request of up to 4 tokens" in none.err and "--max-model-len" in none.err


@pytest.mark.parametrize(("shape", "burstiness"), [("0.25", 0.25), ("inf", math.inf)])
def test_a_number_of_requests_may_come_in_bursts_or_evenly(there, tmp_path, shape, burstiness):
    load = ("--request-rate", "80", "--num-prompts", "40", "--burstiness", shape)
    done = command(there, tmp_path, *load)
    assert done.status in (0, 1), done.err
    words = "at constant gaps" if burstiness == math.inf else "burstiness 0.25"
    assert f"\n40 requests, 80/s, seed 0, {words}; sent " in done.out
    (kept,) = read(tmp_path / "r.jsonl").measurements
    assert kept.load == OpenLoop(requests=40, rate=80, burstiness=burstiness)
    due = job(40, 80, burstiness=burstiness).times
    assert list(kept.run.stream.scheduled_s) == pytest.approx(list(due), abs=1e-5)
    gaps = {round(b - a, 6) for a, b in pairwise(due)}
    assert (gaps == {0.0125}) is (burstiness == math.inf)


def test_several_client_processes_share_a_load_in_the_time_that_it_is_given(there, tmp_path, monkeypatch):
    spoken, send, client = [], Child.send, ("--processes", "2", "--timeout", "90s")
    monkeypatch.setattr(Child, "send", lambda child, **said: spoken.append(said) or send(child, **said))
    found = measured(command(there, tmp_path, "--max-concurrency", "4", "--num-prompts", "160", *client, "--json"))
    assert found["requests"] == 160
    assert [said["timeout_s"] for said in spoken if "url" in said] == [90.0] * 2


# Failures


@pytest.fixture
def all_fail(monkeypatch):
    """All but the one that asks whether anybody is there."""
    real, asked = EndpointEngine.body, []

    def body(engine, request):
        asked.append(json.loads(real(engine, request)))
        return json.dumps(asked[-1] | ({"model": "other"} if len(asked) > 1 else {}))

    monkeypatch.setattr(EndpointEngine, "body", body)


@pytest.mark.parametrize("load", [("--request-rate", "inf"), ("--request-rate", "500"), ("--max-concurrency", "4")])
def test_a_load_of_which_nothing_was_served_is_told_and_kept(there, tmp_path, all_fail, load):
    saved = tmp_path / "bench.json"
    asked_for = (*load, "--num-prompts", "40", *SLO, "--export", f"vllm-bench={saved}")
    done = command(there, tmp_path, *asked_for)
    assert done.status == 1 and "requests failed, the first with HTTP 404" in done.out
    assert "goodput 0 requests/s" in done.out and " 0 requests ended in the window" in f" {done.out}".replace("\n", " ")
    told = json.loads(saved.read_text("utf-8"))
    assert told["request_throughput"] == 0 < told["failed"] and not told["valid"]
    (kept,) = read(tmp_path / "r.jsonl").measurements
    assert not any(kept.run.samples.finished) and kept.run.failures > 0
    again = io.StringIO()
    with redirect_stdout(again):
        assert main(["report", str(tmp_path / "r.jsonl"), *SLO]) in (0, 1)


@pytest.fixture
def some_fail(monkeypatch):
    """Every twentieth request asks for a model that the server does not have."""
    real, asked = EndpointEngine.body, []

    def body(engine, request):
        told = json.loads(real(engine, request))
        asked.append(told)
        return json.dumps(told | ({"model": "other"} if len(asked) % 20 == 0 else {}))

    monkeypatch.setattr(EndpointEngine, "body", body)


RATE = ("--request-rate", "40", "--burstiness", "inf", "--settle", "0.5", "--window", "1.5", "--goodput", "e2e:5s")


def sent_in_window(measurement):
    """Numbers of requests that were sent in the window, and of those without an answer. On an idle machine these are 60
    of 100 and 3 of 5; a busy one sends some of them later, or does not answer in time."""
    opens, closes = measurement.run.window_s
    samples, failed = measurement.run.samples, measurement.run.failed
    answered = [done for at, done in zip(samples.sent_s, samples.finished, strict=True) if opens <= at < closes]
    lost = sum(opens <= at < closes for at in failed.sent_s)
    assert 0 < lost < 5 and 0 < len(answered) < 95
    return len(answered) + lost, lost + answered.count(False)


@pytest.mark.parametrize("text", ["0", "0s", "0.0"])
def test_nothing_may_be_left_out_before_the_window(text):
    assert seconds(text, zero=True) == 0.0


def test_failures_have_rows_and_count_as_dropped(there, tmp_path, some_fail):
    done = command(there, tmp_path, *RATE, "--json")
    found = json.loads(done.out)
    assert done.status == 1 and found["problems"][0].startswith("5 requests failed, the first with HTTP 404")
    assert found["failures"] == 5 and found["failed"] == {"HTTP 404": 5}
    (kept,) = read(tmp_path / "r.jsonl").measurements
    assert list(kept.run.failed.scheduled_s) == pytest.approx([0.45, 0.95, 1.45, 1.95, 2.45], abs=1e-5)
    assert set(kept.run.failed.kind) == {"HTTP 404"} and len(kept.run.samples) == 95
    goodput, sent = found["goodput"], sent_in_window(kept)
    assert (goodput["requests"], goodput["dropped"]) == sent, "those of the window alone"
    assert found["schedule_delay"]["requested_per_s"] == 40
    assert (found["requests"], found["unfinished"]) == sent


def test_a_share_of_failures_may_be_allowed(there, tmp_path, some_fail):
    found = measured(command(there, tmp_path, *RATE, "--allow-failed", "0.05", "--json"))
    assert found["failures"] == 5
    out = command(there, tmp_path, *RATE, "--allow-failed", "0.05").out
    *_, kept = read(tmp_path / "r.jsonl").measurements
    requests, unfinished = sent_in_window(kept)
    assert f"{requests} requests sent in the window: {unfinished} unfinished, 5 failed (HTTP 404: 5)" in out
    assert "requests failed" not in out
    strict = command(there, tmp_path, *RATE, "--allow-failed", "0.04")
    assert strict.status == 1 and "(5 % of the requests, 4 % may)" in strict.out


# Conversations


def test_measure_sends_the_very_requests_of_vllms_benchmark(there, tmp_path, monkeypatch):
    """Of file, tokenizer and seed, in their order, as text; that list is held against vLLM in tests/workload."""
    pytest.importorskip("ijson", reason="needs ijson")
    pytest.importorskip("transformers", reason="needs transformers")
    path, tokenizer = write_dataset(tmp_path)
    sent, real = [], EndpointEngine.body

    def body(engine, request):
        sent.append(json.loads(real(engine, request)))
        return json.dumps(sent[-1])

    monkeypatch.setattr(EndpointEngine, "body", body)
    talk = ("--sharegpt", str(path), "--sharegpt-rule", "vllm", "--tokenizer", str(tokenizer), "--seed", "7")
    done = command(there, tmp_path, "--max-concurrency", "8", "--num-prompts", "30", "--output-len", "5", *talk)
    assert "30 requests ended in the window" in done.out, done.err
    tokenize = hub_tokenizer(str(tokenizer), special_tokens=True)
    theirs = sample_as_vllm(read_conversations(path), tokenize, 30, seed=7, output_tokens=5)
    assert [(each["prompt"], each["max_tokens"]) for each in sent[1:]] == [(each.text, 5) for each in theirs]
    (kept,) = read(tmp_path / "r.jsonl").measurements
    assert list(kept.run.samples.request) == list(range(30)), "in this order"
    assert kept.workload.spec.tokenizer == str(tokenizer) and "as vLLM samples it by" in kept.workload.source


def test_natural_lengths_without_a_file(there, tmp_path):
    done = command(there, tmp_path, "--max-concurrency", "8", "--num-prompts", "16", "--sharegpt", "--json")
    assert done.status in (0, 1), done.err
    (kept,) = read(tmp_path / "r.jsonl").measurements
    assert kept.workload.source == "synthetic token ids, lengths of ShareGPT (human-first)"
    assert len(set(kept.run.samples.output_tokens)) > 8


def test_a_load_of_more_than_there_are_conversations_goes_through_them_again(there, tmp_path):
    pytest.importorskip("ijson", reason="needs ijson")
    pytest.importorskip("transformers", reason="needs transformers")
    path, tokenizer = write_dataset(tmp_path)
    given = parser().parse_args(["measure", "--endpoint=x", "--model=m", "--request-rate=10,20", "--window=9"])
    given.sharegpt, given.tokenizer = str(path), str(tokenizer)
    (slow, workload), (fast, more) = asked(given)
    assert len(workload.requests) == len(slow.schedule_s) and len(more.requests) == len(fast.schedule_s)
    different = {request.text for request in workload.requests + more.requests}
    assert len(different) == workload.spec.requests < len(slow.schedule_s)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("", "no load is given"),
        ("--ramp 4,8 --trace t.csv", "--ramp and --trace cannot be combined"),
        ("--max-concurrency 4 --trace t.csv", "--max-concurrency and --trace cannot be combined"),
        ("--max-concurrency 4 --request-rate 9", "also needs --num-prompts"),
        ("--max-concurrency 0", "'0' is not a whole number"),
        ("--max-concurrency 1000000000", "'1000000000' is not a whole number"),
        ("--max-concurrency 1 --input-len 1000000000", "'1000000000' is not a whole number"),
        ("--request-rate 1e9", "more than 10,000,000 requests come within 20 s"),
        ("--ramp 1,1e9 --step 9", "more than 10,000,000 requests come within 18 s"),
        ("--max-concurrency 4 --num-prompts 3", "--num-prompts 3 cannot keep 4 concurrent requests"),
        ("--max-concurrency 4 --num-prompts 9 --window 3", "--num-prompts and --window cannot be combined"),
        ("--request-rate 4 --num-prompts 9 --window 3", "--num-prompts and --window cannot be combined"),
        ("--request-rate 4,8 --num-prompts 9", "several rates are judged in windows"),
        ("--request-rate inf --num-prompts 9 --burstiness 2", "all at once has no burstiness"),
        ("--request-rate 4 --num-prompts 0", "'0' is not a whole number"),
        ("--request-rate 4 --burstiness -1", "a burstiness of -1"),
        ("--max-concurrency 4 --settle 1", "--settle applies only to rates, ramps and traces in a window"),
        ("--max-concurrency 4 --attainment 0.5", "--attainment needs several rates or steps"),
        ("--max-concurrency 4 --processes 0", "'0' is not a whole number"),
        ("--max-concurrency 4 --timeout 0", "'0' is not a positive number"),
        ("--max-concurrency 4 --max-model-len 64", "--max-model-len requires --trace or --lengths-from"),
        ("--max-concurrency 4 --lengths-from t.csv --max-model-len 1", "no request has up to 1 tokens"),
        ("--max-concurrency 4 --lengths-from t.csv --sharegpt", "a trace has lengths of its own"),
        ("--trace t.csv --lengths-from t.csv", "--trace has lengths of its own"),
        ("--request-rate inf", "all requests come at once: how many?"),
        ("--ramp 4,inf --step 9", "no step at which all requests come at once"),
        ("--ramp 4,8 --step 9 --num-prompts 9", "--ramp has steps, not a number of requests"),
        ("--request-rate nan", "'nan' is not a positive number"),
        ("--ramp 4,8", "a ramp is judged in steps"),
        ("--ramp 4,8 --step 9 --window 3", "a ramp is judged in steps"),
        ("--ramp 4,8 --step 3", "over before it has settled for 5 s"),
        ("--request-rate 4 --step 3", "--step requires --ramp"),
        ("--request-rate 4,x", "'4,x' is not a positive number"),
        ("--request-rate 0", "'0' is not a positive number"),
        ("--request-rate 4 --window -1", "'-1' is not a positive number"),
        ("--request-rate 4 --window 0", "'0' is not a positive number"),
        ("--request-rate 4 --settle -1", "'-1' is not a positive number, or 0"),
        ("--request-rate 4,8 --attainment 90", "'90' is not a share"),
        ("--request-rate 4 --goodput itl:10ms", "not request by request"),
        ("--max-concurrency 4 --allow-failed 0.2", "gives a load up where more than 0.05 fail"),
        ("--max-concurrency 4 --export bench.json", "'bench.json' is no export"),
        ("--max-concurrency 4 --tokenizer x", "--tokenizer cuts the text of conversations, and there is none"),
        ("--max-concurrency 4 --sharegpt f.json", "need the tokenizer of the server's model"),
        ("--max-concurrency 4 --sharegpt --input-len 9", "prompts of ShareGPT have lengths of their own"),
        ("--max-concurrency 4 --sharegpt --output-len 9", "replies of ShareGPT have lengths of their own"),
        ("--trace t.csv --sharegpt", "a trace has lengths of its own"),
        ("--trace t.csv --input-len 9", "a trace has lengths of its own"),
        ("--trace t.csv --num-prompts 9", "--trace has a window, not a number of requests"),
        ("--trace t.csv --speed 0", "'0' is not a positive number"),
        ("--trace t.csv --burstiness 2", "--burstiness requires --request-rate or --ramp"),
        ("--max-concurrency 4 --burstiness 2", "--burstiness requires --request-rate or --ramp"),
        ("--request-rate 4 --speed 2", "--speed requires --trace"),
        ("--max-concurrency 4 --extra-body '[1]'", "is no JSON object"),
        ('--max-concurrency 4 --extra-body \'{"a": {"api_key": "x1y2"}}\'', "--extra-body holds a secret, 'api_key'"),
        ('--max-concurrency 4 --extra-body \'{"bearer": "x1y2"}\'', "--extra-body holds a secret, 'bearer'"),
        ('--max-concurrency 4 --extra-body \'{"user": "sk-x1y2x1y2"}\'', "what looks like a secret"),
        (("--max-concurrency", "4", "--extra-body", "[" * 100000), "is no JSON object"),
        (("--max-concurrency", "4", "--model", "\x1b[2Jm"), "holds control characters"),
        ("--max-concurrency 4 --goodput fast", "'fast' is no SLO"),
    ],
)
def test_wrong_usage_of_measure(there, tmp_path, arguments, problem):
    words = shlex.split(arguments) if isinstance(arguments, str) else arguments
    done = command(there, tmp_path, *words)
    assert done.status == 4 and problem in done.err and "x1y2" not in done.err


def test_the_url_of_the_server_is_enough(there, tmp_path):
    done = command(there, tmp_path, "--max-concurrency", "2", "--num-prompts", "4", "--endpoint", url_of(there, "/"))
    [kept] = read(tmp_path / "r.jsonl").measurements
    assert done.status in (0, 1) and kept.spec.url == url_of(there)


def test_a_wrong_url_is_told_as_it_was_asked(there, tmp_path, monkeypatch):
    answer = 404, "application/json", '{"detail":"Not Found"}'
    monkeypatch.setattr("pytest_slmserve.engines.endpoint.ask_once", lambda *_: answer)
    done = command(there, tmp_path, "--max-concurrency", "2", "--endpoint", "http://host:8000/api/v1/")
    assert done.status == 4 and 'http://host:8000/api/v1/completions answered 404: {"detail":"Not Found"}' in done.err
    assert "ends in /v1/completions or /v1/chat/completions" in done.err


def test_a_terminal_sees_which_load_how_far_and_what_is_left_and_then_only_the_result(there, tmp_path, monkeypatch):
    screen = Screen()
    monkeypatch.setenv("SLM_ENDPOINT_KEY", there._key)
    words = ["--endpoint", url_of(there), "--model", "slm", "--records", str(tmp_path / "r.jsonl")]
    words += ["--input-len", "16", "--output-len", "8", "--request-rate", "20,60", "--settle", "0.2", "--window", "0.8"]
    with redirect_stdout(io.StringIO()), redirect_stderr(screen):
        assert main(["measure", *words]) in (0, 1)
    first, *others, last = screen.getvalue().split("\r")[1:]
    assert re.match(r"load 1 of 2 \| 0:0[12]\+ left \| 20 requests/s \| \w+ \d\.\d s", first), first
    assert any(line.startswith("load 2 of 2 | 0:01+ left | ") for line in others)
    assert last == "\x1b[K" and all(len(line.removesuffix("\x1b[K")) < 80 for line in others)


@pytest.mark.parametrize(
    ("load", "seconds"),
    [
        (ClosedLoop(4, window_s=5.0), 5.0),
        (ClosedLoop(4, requests=40), 0.0),
        (OpenLoop(rate=10.0, requests=50), 5.0),
        (OpenLoop(requests=50), 0.0),
        (OpenLoop(rate=10.0, window_s=60.0, settle_s=5.0), 70.0),
    ],
)
def test_a_load_takes_at_least_its_window_or_its_arrivals(load, seconds):
    assert least_seconds(load) == seconds
