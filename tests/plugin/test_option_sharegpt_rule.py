"""--slm-sharegpt-rule names which conversations count."""

from inside import usage_error


def test_the_rule_changes_the_workload_and_is_recorded(sweep, archive):
    sweep("--slm-input-len=natural", "--slm-concurrency=16", "--slm-records=human.jsonl")
    sweep("--slm-input-len=natural", "--slm-concurrency=16", "--slm-records=vllm.jsonl", "--slm-sharegpt-rule=vllm")
    human, vllm = (archive(f"{name}.jsonl").measurements[0].workload for name in ("human", "vllm"))
    assert (human.spec.rule, vllm.spec.rule) == ("human-first", "vllm")
    assert human.hash != vllm.hash


def test_other_rules_are_refused(sweep):
    assert "human-first or vllm" in usage_error(sweep("--slm-sharegpt-rule=all"))
