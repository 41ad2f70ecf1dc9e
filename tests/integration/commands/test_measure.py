"""`measure` on a server that somebody else has started: what came over the wire is what the record, the page, the
export and `report` tell; failures are told and kept; and the key is told to nobody."""

import json
import re
from itertools import count

import pytest
from command_line import said
from conversations import write_dataset
from interfaces import url_of

from pytest_slmserve.archive import external
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines.endpoint import EndpointEngine
from pytest_slmserve.schema.specs import OpenLoop
from pytest_slmserve.workload.arrivals import job
from pytest_slmserve.workload.requests import read_conversations, sample_as_vllm
from pytest_slmserve.workload.tokens import hub_tokenizer

SLO = "--goodput=ttft:1s,e2e:2s"
TIMING = ("--settle=0.2", "--window=0.8s")


@pytest.fixture
def command(there, tmp_path, monkeypatch, capsys):
    """Measures a small load; a client that lags, as on a busy machine, makes it invalid and is no fault."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLM_ENDPOINT_KEY", there._key)

    def measured(*words, status=(0, 1)):
        lengths = () if any("--sharegpt" in word for word in words) else ("--input-len=16", "--output-len=8")
        fixed = ("--endpoint", url_of(there), "--model=slm", "--records=r.jsonl")
        seen = said(capsys, "measure", *fixed, *lengths, *words)
        assert seen.status in status and there._key not in seen.out + seen.err, seen.err
        return seen

    return measured


def kept():
    return read("r.jsonl").measurements


def sound(found):
    wrong = [text for text in found["problems"] if "the client lagged" not in text]
    assert wrong == [] and found["valid"] is (found["problems"] == [])
    return found


def test_record_page_export_numbers_agree(there, command, tmp_path):
    words = ("--max-concurrency=4", "--num-prompts=40", "--json", "--html=out.html", "--export=vllm-bench=bench.json")
    found, told = sound(json.loads(command(*words).out)), json.loads((tmp_path / "bench.json").read_text("utf-8"))
    (m,) = kept()
    assert (m.spec.interface, m.spec.model, len(m.run.samples), m.run.failures) == ("endpoint", "slm", 40, 0)
    assert read(tmp_path / "out.html").measurements == (m,)
    assert all(there._key not in (tmp_path / name).read_text("utf-8") for name in ("r.jsonl", "out.html", "bench.json"))
    assert (told["completed"], told["failed"], told["max_concurrency"], told["request_rate"]) == (40, 0, 4, "inf")
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (640, 320)
    assert (found["prompt_tokens"], found["output_tokens"], found["requests"]) == (640, 320, 40)
    assert told["output_throughput"] == pytest.approx(found["output_tokens_per_s"])
    for theirs, ours in (("ttft", "ttft"), ("tpot", "tpot"), ("e2el", "e2e"), ("itl", "itl")):
        for share in (90, 95, 99):
            assert told[f"p{share}_{theirs}_ms"] == pytest.approx(1e3 * found[f"{ours}_p{share}_s"])
    assert told["max_concurrent_requests"] == found["concurrency_max"] == 4
    columns = external.Columns(knob="max_concurrency", throughput="output_throughput", latency="mean_tpot_ms")
    (point,) = external.external_curve(external.read_results(tmp_path / "bench.json"), columns).points
    assert point.concurrency == 4 and point.e2e_repeats == pytest.approx((found["tpot_s"],))


def test_request_rates_share_one_table(command, capsys, tmp_path):
    seen = command("--request-rate=20,60", *TIMING, SLO, "--export=vllm-bench=results/")
    slow, fast = kept()
    assert (slow.load.rate, fast.load.rate) == (20, 60) and slow.workload.hash != fast.workload.hash
    assert {row.split()[0] for row in seen.out.splitlines() if row.strip().startswith(("20 ", "60 "))} == {"20", "60"}
    assert seen.out.strip() in said(capsys, "report", "r.jsonl", SLO).out
    exported = sorted((tmp_path / "results").iterdir())
    names = [re.sub(r"\d{8}-\d{6}-[0-9a-f]{12}", "AT", path.name) for path in exported]
    assert names == [f"endpoint-{rate}qps-slm-AT.json" for rate in (20, 60)], "as vLLM names them"
    told = json.loads(exported[0].read_text("utf-8"))
    assert (told["record_id"], told["request_rate"], told["max_concurrency"]) == (slow.id, 20, None)
    assert told["request_goodput"] == pytest.approx(told["completed"] / 0.8)


@pytest.mark.parametrize(("rate", "burstiness"), [("inf", "1"), ("80", "0.25")])
def test_job_sends_all_its_arrivals(rate, burstiness, command, tmp_path, capsys):
    words = [f"--request-rate={rate}", "--num-prompts=40", SLO, "--export=vllm-bench=bench.json"]
    command(*words, *([f"--burstiness={burstiness}"] if burstiness != "1" else []))
    (m,) = kept()
    wanted = job(40, float(rate), burstiness=float(burstiness))
    assert m.load == OpenLoop(requests=40, rate=float(rate), burstiness=wanted.burstiness)
    assert list(m.run.samples.request) == list(range(40)) and m.run.failures == 0
    if rate != "inf":
        assert list(m.run.stream.scheduled_s) == pytest.approx(list(wanted.times), abs=1e-5)
    told = json.loads((tmp_path / "bench.json").read_text("utf-8"))
    assert (told["completed"], str(told["request_rate"])) == (40, rate if rate == "inf" else f"{rate}.0")
    assert told["request_throughput"] == pytest.approx(40 / told["duration"])
    assert told["output_throughput"] == pytest.approx(320 / told["duration"])
    assert f"{told['request_throughput']:.4g}" in said(capsys, "report", "r.jsonl").out


@pytest.fixture
def other_model(monkeypatch):
    """From the number `first` on every `every`-th request asks for a model that the server does not have."""
    real, numbers = EndpointEngine.body, count(1)

    def planted(first, every):
        def body(engine, request):
            asked, number = json.loads(real(engine, request)), next(numbers)
            return json.dumps(asked | ({"model": "other"} if number >= first and number % every == 0 else {}))

        monkeypatch.setattr(EndpointEngine, "body", body)

    return planted


@pytest.mark.parametrize("load", ["--request-rate=inf", "--max-concurrency=4"])
def test_load_without_answers_is_kept(load, command, other_model, tmp_path, capsys):
    """The first request only asks whether anybody is there."""
    other_model(first=2, every=1)
    seen = command(load, "--num-prompts=40", SLO, "--export=vllm-bench=bench.json", status=(1,))
    assert "HTTP 404" in seen.out and "goodput 0 requests/s" in seen.words
    told = json.loads((tmp_path / "bench.json").read_text("utf-8"))
    assert told["request_throughput"] == 0 < told["failed"] and not told["valid"]
    (m,) = kept()
    assert not any(m.run.samples.finished) and m.run.failures > 0
    assert said(capsys, "report", "r.jsonl", SLO).status in (0, 1)


def test_failed_requests_count_as_dropped(command, other_model):
    other_model(first=1, every=20)
    words = ("--request-rate=80", "--burstiness=inf", "--settle=0.25", "--window=0.75", "--goodput=e2e:5s", "--json")
    found = json.loads(command(*words, status=(1,)).out)
    (m,) = kept()
    assert (found["failures"], found["failed"]) == (5, {"HTTP 404": 5}) and "HTTP 404" in found["problems"][0]
    assert list(m.run.failed.scheduled_s) == pytest.approx([0.225, 0.475, 0.725, 0.975, 1.225], abs=1e-5)
    assert set(m.run.failed.kind) == {"HTTP 404"} and len(m.run.samples) == 95
    opens, closes = m.run.window_s
    answered = [done for at, done in zip(m.run.samples.sent_s, m.run.samples.finished) if opens <= at < closes]
    lost = sum(opens <= at < closes for at in m.run.failed.sent_s)
    assert (found["requests"], found["unfinished"]) == (len(answered) + lost, lost + answered.count(False))
    assert (found["goodput"]["requests"], found["goodput"]["dropped"]) == (found["requests"], found["unfinished"])
    allowed = sound(json.loads(command(*words, "--allow-failed=0.05").out))
    assert allowed["failures"] == 5 and not json.loads(command(*words, "--allow-failed=0.04", status=(1,)).out)["valid"]


def test_sharegpt_requests_match_vllm_benchmark(command, tmp_path, monkeypatch):
    """Made of file, tokenizer and seed, in vLLM's order, as text. tests/unit/workload holds that list against vLLM."""
    pytest.importorskip("transformers", reason="needs transformers")
    path, tokenizer = write_dataset(tmp_path)
    sent, real = [], EndpointEngine.body
    monkeypatch.setattr(EndpointEngine, "body", lambda engine, request: sent.append(real(engine, request)) or sent[-1])
    talk = (f"--sharegpt={path}", "--sharegpt-rule=vllm", f"--tokenizer={tokenizer}", "--seed=7", "--output-len=5")
    command("--max-concurrency=8", "--num-prompts=30", *talk)
    tokenize = hub_tokenizer(str(tokenizer), special_tokens=True)
    theirs = sample_as_vllm(read_conversations(path), tokenize, 30, seed=7, output_tokens=5)
    bodies = map(json.loads, sent[1:])
    assert [(each["prompt"], each["max_tokens"]) for each in bodies] == [(each.text, 5) for each in theirs]
    (m,) = kept()
    assert list(m.run.samples.request) == list(range(30)) and m.workload.spec.tokenizer == str(tokenizer)
