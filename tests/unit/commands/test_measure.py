"""`measure` without a server: what is typed becomes the loads and their requests; wrong usage names the option before
anything is asked; and what an engine measures is kept, printed, exported and judged."""

import csv
import io
import json
import math
import shlex
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from command_line import refused, said
from hypothesis import given, strategies as st
from strategies import measurement

from pytest_slmserve.__main__ import parser
from pytest_slmserve.archive.store import read
from pytest_slmserve.commands import measure
from pytest_slmserve.commands.measure import DISTINCT, SETTLE_S, asked, least_seconds, seconds
from pytest_slmserve.schema.errors import BadDataset, BadUsage, EngineFailed
from pytest_slmserve.schema.records import Environment, Progress
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop
from pytest_slmserve.workload.arrivals import job

SHORT = ("--input-len=8", "--output-len=4")
HERE = ("--endpoint=http://127.0.0.1:9/v1/completions", "--model=slm")


def given_by(words):
    return parser("measure").parse_args(["measure", *HERE, *shlex.split(words)])


def loads_of(words):
    return [load for load, _ in asked(given_by(words))]


def mooncake(folder, prompt=12):
    """A trace: a request each 50 ms for 3 s, of so many prompt tokens and 3 output tokens."""
    rows = ({"timestamp": 50 * i, "input_length": prompt, "output_length": 3} for i in range(60))
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return path


def lengths(workload):
    return {(len(each.prompt), each.output_tokens) for each in workload.requests}


OPEN = OpenLoop(requests=40)


@pytest.mark.parametrize(("words", "load"), [
    ("--max-concurrency 4", ClosedLoop(4, window_s=10.0)),
    ("--max-concurrency 4 --window 3s", ClosedLoop(4, window_s=3)),
    ("--max-concurrency 4 --num-prompts 40", ClosedLoop(4, window_s=10.0, requests=40)),
    ("--max-concurrency 4 --turns 3 --think 2s", ClosedLoop(4, window_s=10.0, think_s=2.0)),
    ("--request-rate inf --num-prompts 40", replace(OPEN, rate=math.inf)),
    ("--request-rate 60 --num-prompts 40 --seed 3", replace(OPEN, rate=60, seed=3)),
    ("--request-rate 9 --num-prompts 40 --max-concurrency 2", replace(OPEN, rate=9, max_concurrency=2)),
    ("--request-rate 9 --num-prompts 40 --burstiness inf", replace(OPEN, rate=9, burstiness=math.inf)),
])  # fmt: skip
def test_typed_words_give_one_load(words, load):
    (found,) = loads_of(words)
    if isinstance(load, OpenLoop):
        assert found.times == job(load.requests, load.rate, load.seed, load.max_concurrency, load.burstiness).times
        found = replace(found, schedule_s=())
    assert found == load


@given(st.lists(st.integers(20, 60), min_size=1, max_size=3), st.floats(0, 3), st.floats(2, 5), st.integers(0, 9))
def test_each_rate_gets_window(rates, settle_s, window_s, seed):
    words = f"--settle {settle_s!r} --window {window_s!r} --seed {seed} {' '.join(SHORT)}"
    found = loads_of(f"--request-rate {','.join(map(str, rates))} {words}")
    assert [load.rate for load in found] == rates
    for load in found:
        assert (load.settle_s, load.window_s, load.requests) == (settle_s, window_s, None)
        assert list(load.schedule_s) == sorted(load.schedule_s)
        assert load.schedule_s[0] >= 0 and load.schedule_s[-1] < 2 * settle_s + window_s


def test_rates_settle_by_default():
    one, again, other, none, even = (
        loads_of(f"--request-rate 8 {words}")[0]
        for words in ("--seed 1", "--seed 1", "--seed 2", "--settle 0", "--burstiness inf --settle 1 --window 2")
    )
    assert (one.settle_s, none.settle_s) == (SETTLE_S, 0.0) == (5.0, 0.0)
    assert one.schedule_s == again.schedule_s != other.schedule_s
    assert {round(b - a, 9) for a, b in pairwise(even.schedule_s)} == {0.125} and len(even.schedule_s) == 8 * 4
    (ramp,) = loads_of("--ramp 20,40,60 --step 2s --settle 0.5 --burstiness inf")
    assert (ramp.steps, ramp.settle_s, ramp.window_s, ramp.rate) == (((20, 2), (40, 2), (60, 2)), 0.5, 5.5, 40)
    counts = [sum(a <= at < b for at in ramp.schedule_s) for a, b in ((0, 2), (2, 4), (4, 6), (6, 6.5))]
    assert counts == [40, 80, 120, 30] and max(ramp.schedule_s) < 6.5


def test_trace_load_keeps_its_times(tmp_path):
    path = mooncake(tmp_path)
    ((load, workload),) = asked(given_by(f"--trace {path} --speed 2 --settle 0.2 --window 0.79"))
    assert load.schedule_s == pytest.approx([0.025 * i for i in range(48)]), "1.19 s, twice as fast"
    assert load.rate == pytest.approx(48 / 1.19) and (load.settle_s, load.window_s) == (0.2, 0.79)
    assert "trace.jsonl" in load.arrivals and load.arrivals.endswith("speed 2")
    assert lengths(workload) == {(12, 3)} and workload.spec.requests == len(workload.requests) == 48
    for words, ends in (("--settle 3 --window 2", "3 s and 5 s"), ("--settle 2.96 --window 1", "3.96")):
        with pytest.raises(BadUsage, match=rf"trace\.jsonl.*{ends}"):  # its last request comes at 2.95 s
            asked(given_by(f"--trace {path} {words}"))
    assert asked(given_by(f"--trace {path} --settle 2.95 --window 1"))
    path, blocks = tmp_path / "trace.jsonl", [[0, 1], [0, 2], [3, 1], [0, 1]]
    rows = [{"timestamp": 9 * i, "input_length": 600, "output_length": 3, "hash_ids": b} for i, b in enumerate(blocks)]
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    words = f"--trace {path} --settle 0 --window 1 --trace-prefixes"
    ((_, workload),) = asked(given_by(words))
    first, second, third, again = (request.prompt for request in workload.requests)
    assert first == again and first[:512] == second[:512] and first[512] != second[512]
    assert third[0] != first[0] and third[512:] == first[512:] and len(third) == 600
    assert f"{(512 + 600) / 2400:.1%}" in workload.source
    path.write_text(json.dumps(rows[0] | {"hash_ids": [0]}), "utf-8")
    with pytest.raises(BadDataset, match="512"):
        asked(given_by(words))


def test_typed_lengths_shape_requests(tmp_path):
    for words, expected in (("", (512, 256)), ("--input-len 7", (7, 256)), ("--output-len 7", (512, 7))):
        ((_, workload),) = asked(given_by(f"--max-concurrency 1 --num-prompts 2 {words}"))
        assert lengths(workload) == {expected}
    ((_, workload),) = asked(given_by("--max-concurrency 8 --num-prompts 16 --sharegpt"))
    assert workload.spec.source == "lengths" and len({each.output_tokens for each in workload.requests}) > 8
    words = f"--lengths-from {mooncake(tmp_path, 40)} --max-concurrency 4 --max-model-len"
    ((_, workload),) = asked(given_by(f"{words} 43"))
    assert lengths(workload) == {(40, 3)} and len(workload.requests) == measure.CYCLE
    with pytest.raises(Exception, match="--max-model-len"):
        asked(given_by(f"{words} 42"))
    ((_, workload),) = asked(given_by("--max-concurrency 8 --turns 3 --input-len 20 --output-len 4"))
    assert lengths(workload) == {(20, 4), (44, 4), (68, 4)} and len(workload.requests) == 1023 == workload.spec.requests
    found = asked(given_by("--request-rate 5,9 --window 3 --settle 1 --input-len 8 --output-len 4"))
    assert [len(workload.requests) for _, workload in found] == [len(load.schedule_s) for load, _ in found]
    prompts = [tuple(each.prompt) for _, workload in found for each in workload.requests]
    assert len(set(prompts)) == len(prompts) and {len(prompt) for prompt in prompts} == {8}
    ((load, workload),) = asked(given_by(f"--request-rate inf --num-prompts {DISTINCT + 5} --input-len 1"))
    assert load.requests == DISTINCT + 5 and len(workload.requests) == DISTINCT == workload.spec.requests


def test_durations_are_seconds():
    texts = {"30": 30, "30s": 30, " 1.5 s": 1.5, "0": 0, "0s": 0, "0.0": 0}
    assert {text: seconds(text, zero=True) for text in texts} == texts
    loads = ClosedLoop(4, window_s=5.0), ClosedLoop(4, requests=40), OpenLoop(rate=10.0, requests=50), OPEN
    ramp = OpenLoop(rate=10.0, window_s=60.0, settle_s=5.0)
    assert [least_seconds(load) for load in (*loads, ramp)] == [5.0, 0.0, 5.0, 0.0, 70.0]


@pytest.mark.parametrize("words", [
    "--max-concurrency 0", "--max-concurrency 1000000000", "--input-len 1000000000", "--num-prompts 0", "--processes 0",
    "--timeout 0", "--request-rate nan", "--request-rate 4,x", "--request-rate 0", "--window -1", "--window 0",
    "--settle -1", "--attainment 90", "--speed 0",
])  # fmt: skip
def test_impossible_value_names_option(words, capsys):
    option, value = words.split()
    refused(said(capsys, "measure", *HERE, option, value), option, repr(value))


@pytest.mark.parametrize(("words", "facts"), [
    ("", ["--max-concurrency", "--request-rate"]), ("--ramp 4,8 --trace t.csv", ["--ramp and --trace"]),
    ("--max-concurrency 4 --trace t.csv", ["--max-concurrency and --trace"]),
    ("--max-concurrency 4 --request-rate 9", ["--num-prompts"]), ("--request-rate 1e9", ["10,000,000", "20 s"]),
    ("--ramp 1,1e9 --step 9", ["10,000,000", "18 s"]), ("--request-rate 0.001 --window 1 --settle 0", ["1 s"]),
    ("--max-concurrency 4 --num-prompts 3", ["--num-prompts 3", "4"]),
    ("--max-concurrency 4 --num-prompts 9 --window 3", ["--num-prompts and --window"]),
    ("--request-rate 4 --num-prompts 9 --window 3", ["--num-prompts and --window"]),
    ("--request-rate 4,8 --num-prompts 9", ["--window"]),
    ("--request-rate inf --num-prompts 9 --burstiness 2", ["burstiness"]),
    ("--request-rate 4 --burstiness -1", ["-1"]), ("--max-concurrency 4 --settle 1", ["--settle"]),
    ("--request-rate 4 --num-prompts 9 --settle 1", ["--settle"]),
    ("--request-rate 4 --trace-prefixes", ["--trace-prefixes", "--trace"]),
    ("--request-rate 4 --turns 2", ["turn", "schedule"]), ("--max-concurrency 4 --think 2", ["--think", "turns"]),
    ("--max-concurrency 4 --attainment 0.5", ["--attainment", "--request-rate"]),
    ("--max-concurrency 4 --max-model-len 64", ["--max-model-len", "--lengths-from"]),
    ("--max-concurrency 4 --lengths-from t.csv --max-model-len 1", ["1 tokens"]),
    ("--max-concurrency 4 --lengths-from t.csv --sharegpt", ["trace"]),
    ("--trace t.csv --lengths-from t.csv", ["--lengths-from"]), ("--request-rate inf", ["--num-prompts"]),
    ("--ramp 4,inf --step 9", ["--request-rate inf"]), ("--ramp 4,8 --step 9 --num-prompts 9", ["--ramp", "--step"]),
    ("--ramp 4,8", ["--step 30"]), ("--ramp 4,8 --step 9 --window 3", ["--step", "--window"]),
    ("--ramp 4,8 --step 3", ["5 s"]), ("--request-rate 4 --step 3", ["--step", "--ramp"]),
    ("--request-rate 4 --goodput itl:10ms", ["tpot:50ms"]),
    ("--max-concurrency 4 --allow-failed 0.2", ["--allow-failed 0.2", "0.05"]),
    ("--max-concurrency 4 --allow-failed -0.1", ["--allow-failed -0.1"]),
    ("--max-concurrency 4 --export bench.json", ["'bench.json'"]), ("--max-concurrency 4 --goodput fast", ["'fast'"]),
    ("--max-concurrency 4 --tokenizer x", ["--tokenizer", "--sharegpt"]),
    ("--max-concurrency 4 --sharegpt f.json", ["--tokenizer"]),
    ("--max-concurrency 4 --sharegpt --input-len 9", ["--input-len"]),
    ("--max-concurrency 4 --sharegpt --output-len 9", ["--output-len"]),
    ("--trace t.csv --sharegpt", ["trace"]), ("--trace t.csv --input-len 9", ["trace"]),
    ("--trace t.csv --num-prompts 9", ["--trace", "--window"]),
    ("--trace t.csv --burstiness 2", ["--burstiness", "--request-rate", "--ramp"]),
    ("--max-concurrency 4 --burstiness 2", ["--burstiness", "--request-rate", "--ramp"]),
    ("--request-rate 4 --speed 2", ["--speed", "--trace"]),
    ("--max-concurrency 4 --extra-body '[1]'", ["--extra-body [1]"]),
    ("--max-concurrency 4 --extra-body '" + "[" * 100_000 + "'", ["--extra-body"]),
    ("--max-concurrency 4 --num-prompts 9 --json --csv", ["--json", "--csv"]),
    ("--max-concurrency 4 --model '\x1b[2Jm'", ["control characters"]),
])  # fmt: skip
def test_wrong_usage_asks_no_server(words, facts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused(said(capsys, "measure", *HERE, *shlex.split(words)), *facts)
    assert not (tmp_path / ".slm/records.jsonl").exists() or "model" in words


@pytest.mark.parametrize(("body", "fact"), [
    ('{"a": {"api_key": "x1y2"}}', "'api_key'"), ('{"bearer": "x1y2"}', "'bearer'"), ('{"u": "sk-x1y2x1y2"}', "secret"),
])  # fmt: skip
def test_secret_is_not_repeated(body, fact, capsys):
    assert "x1y2" not in refused(said(capsys, "measure", *HERE, "--max-concurrency=4", "--extra-body", body), fact)


def test_wrong_url_is_told(tmp_path, monkeypatch, capsys):
    answer = 404, "application/json", '{"detail":"Not Found"}'
    monkeypatch.setattr("pytest_slmserve.engines.endpoint.ask_once", lambda *_: answer)
    words = ("--max-concurrency=2", "--endpoint=http://host:8000/api/v1/", "--records", tmp_path / "r.jsonl")
    seen = said(capsys, "measure", *HERE, *words)
    refused(seen, "http://host:8000/api/v1/completions", "404", "/v1/chat/completions")


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """In place of the engine at an endpoint and of its loads: each load is a closed loop of eight users, with its own
    number of failures, or an error in their place."""
    found = SimpleNamespace(engines=[], cases=[], failures={}, close=Mock(), sampler=Mock(), rates=[1000.0])

    def opened(spec, **options):
        found.engines.append((spec, options))
        return SimpleNamespace(spec=spec, close=found.close)

    def measured(engine, case, show, sampler):
        assert sampler is found.sampler
        number = len(found.cases)
        found.cases.append(case)
        failures = found.failures.get(number, 0)
        if isinstance(failures, BaseException):
            raise failures
        show(Progress("window", 3.0, 7, 2, 640.0))
        facts = {"load": case.loads[0], "launch": str(number), "failures": failures}
        return [replace(measurement(8, found.rates[number % len(found.rates)], **facts), spec=engine.spec)]

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLM_ENDPOINT_KEY", raising=False)
    monkeypatch.setattr(measure, "EndpointEngine", opened)
    monkeypatch.setattr(measure, "measure_case", measured)
    monkeypatch.setattr(measure, "open_sampler", lambda *_: (found.sampler, []))
    monkeypatch.setattr(measure, "this_host", lambda platform: Environment(platform=platform))
    return found


def measured(capsys, words, *more):
    return said(capsys, "measure", *HERE, *SHORT, *shlex.split(words), *more)


USERS = "--max-concurrency 8"
RATES = "--request-rate 20,60 --settle 0.2 --window 0.8"
KEPT = ".slm/records.jsonl"


def test_repeats_come_in_rounds(planted, capsys):
    planted.rates = [1000.0, 500.0, 900.0, 510.0, 1100.0, 490.0]
    seen = measured(capsys, f"{RATES} --repeats 3 --json")
    found = json.loads(seen.out)
    assert [case.loads[0].rate for case in planted.cases] == [20, 60] * 3 and len(read(KEPT).measurements) == 6
    fast, slow = (each["output_tokens_per_s"] for each in found["repeats"])
    assert fast["value"] == pytest.approx(1000, rel=0.01) and fast["low"] < 900 and fast["high"] > 1100
    assert slow["value"] == pytest.approx(500, rel=0.01) and 450 < slow["low"] < 490 and slow["high"] > 510
    assert [row["output_tokens_per_s"] for row in found["points"]] == pytest.approx([1000, 500], rel=0.01), "the middle"
    assert "--repeats" not in seen.err and planted.sampler.close.called
    once = measured(capsys, f"{USERS} --json")
    assert "--repeats 4 tells" in once.err and "repeats" not in json.loads(once.out)
    refused(measured(capsys, f"{USERS} --repeats 0"), "--repeats")


def test_typed_words_reach_engine(planted, capsys, monkeypatch):
    body = '{"top_k": 1, "n": null, "stop": ["a"]}'
    words = f"{USERS} --timeout 90s --processes 2 --allow-prefix-cache --extra-body '{body}'"
    monkeypatch.setattr(measure, "only_model", only := Mock(return_value="theirs"))
    seen = measured(capsys, words), measured(capsys, f"{USERS} --seed 5")
    unnamed = said(capsys, "measure", "--endpoint=http://h:1", USERS.replace(" ", "="))
    assert [each.status for each in (*seen, unnamed)] == [0, 0, 0]
    (spec, options), (plain, seeded), (theirs, _) = planted.engines
    assert spec.extra == (("n", "null"), ("stop", '["a"]'), ("top_k", "1")) and plain.extra == ()
    assert (spec.interface, spec.platform, spec.url) == ("endpoint", "remote", HERE[0].removeprefix("--endpoint="))
    assert (spec.allow_prefix_cache, plain.allow_prefix_cache) == (True, False)
    assert options == {"own_prompts": True, "timeout_s": 90.0, "processes": 2}
    assert not seeded["own_prompts"], "who gives a seed wants the very requests again"
    assert theirs.model == "theirs" and only.call_count == 1 and only.call_args.args[0].startswith("http://h:1/v1/")


@pytest.mark.parametrize(("failures", "words", "status"), [
    (0, "", 0), (1, "", 1), (1, "--allow-failed 0.05", 0), (20, "--allow-failed 0.05", 1),
])  # fmt: skip
def test_allowed_failures_stay_valid(failures, words, status, planted, capsys):
    planted.failures[0] = failures
    seen = measured(capsys, f"{USERS} {words} --json")
    assert (seen.status, json.loads(seen.out)["valid"]) == (status, not status)
    assert len(read(KEPT).measurements) == 1, "it is kept all the same"


def test_loads_are_exported_separately(planted, capsys, tmp_path):
    words = f"{RATES.replace('60', '60,90')} --goodput e2e:9s --json --export vllm-bench=results/"
    seen = measured(capsys, words)
    kept, told = read(KEPT).measurements, json.loads(seen.out)["points"]
    assert [m.load.rate for m in kept] == [20, 60, 90] == [each["rate"] for each in told]
    exported = {json.loads(path.read_text("utf-8"))["record_id"] for path in (tmp_path / "results").iterdir()}
    assert [m.id for m in kept] == [each["id"] for each in told] and exported == {m.id for m in kept}
    *lines, once = seen.err.splitlines()  # in a log, where no line can be written over
    assert "--repeats" in once
    assert [line.split(" | ")[0] for line in lines] == [f"slmserve: load {n} of 3" for n in (1, 2, 3)]
    planted.cases.clear()
    planted.failures[1] = 1
    assert measured(capsys, words).status == 1


@pytest.mark.parametrize("error", [EngineFailed("the client is gone"), KeyboardInterrupt()])
def test_broken_run_keeps_measurements(error, planted, capsys):
    planted.failures[1] = error
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            measured(capsys, RATES)
    else:
        seen = measured(capsys, RATES)
        assert seen.status == 1 and "the client is gone" in seen.err
    assert [m.load.rate for m in read(KEPT).measurements] == [20] and planted.close.call_count == 1


@pytest.mark.parametrize("failures", [0, 1])
def test_page_shows_load(failures, planted, capsys, monkeypatch):
    monkeypatch.setattr(measure, "write_page", page := Mock())
    planted.failures[0] = failures
    assert measured(capsys, USERS, "--html", "out.html").status == failures
    (path, found, paths), more = page.call_args
    [section] = more["sections"]["Load"]
    assert (str(path), [str(each) for each in paths], more["status"]) == ("out.html", [KEPT], failures)
    assert (section.look, len(found.measurements)) == ("bad" if failures else "good", 1)


def test_unwritable_output_is_told_first(planted, capsys, tmp_path):
    (tmp_path / "there.json").write_text("{}")
    export = "--export vllm-bench=r.json"
    for words, fact in (("--html there.json", "there.json"), (export, export), ("--records .", "--records")):
        told = refused(measured(capsys, f"{USERS} --records r.json {words}"), fact)
        assert "--slm-" not in told and planted.cases == [] and not (tmp_path / "r.json").exists()
    text, as_json, as_csv = (measured(capsys, USERS, *words) for words in ((), ("--json",), ("--csv",)))
    assert text.status == as_json.status == as_csv.status == 0
    found, (row,) = json.loads(as_json.out), csv.DictReader(io.StringIO(as_csv.out))
    assert found["valid"] and found["output_tokens_per_s"] == pytest.approx(1000) and row["valid"] == "true"
    assert float(row["output_tokens_per_s"]) == found["output_tokens_per_s"] and "1,000" in text.out
    kept = read(KEPT)
    assert [m.id for m in kept.measurements][1] == found["id"] and len(kept.measurements) == 3
    assert {session.plan.get("claims") == [] for session in kept.sessions} == {True}
    assert planted.close.call_count == 3 and all(m.load == ClosedLoop(8, window_s=10.0) for m in kept.measurements)
