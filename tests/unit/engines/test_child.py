"""What is made of what a child says: the stage of its start by its log, the settings of an engine, a run by its own
clock. The child itself is a process: tests/integration/engines/test_child.py."""

from pytest_slmserve.engines.child import IMPORTING, MARKS, resolved_from, run_from, stage_of
from pytest_slmserve.schema.records import Failures

LINES = (
    ("W1124 20:15:54 torch/_library/triton.py:53] Triton not available", IMPORTING),
    ("WARNING [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs, and warmup.", IMPORTING),
    ("INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'", "starting the engine"),
    ("INFO [cpu_model_runner.py:68] Starting to load model /m...", "loading weights"),
    ("INFO [backends.py:1105] Using cache directory: /c for vLLM's torch.compile", "compiling"),
    ("Capturing CUDA graphs (decode, FULL):  12%|#         |", "capturing CUDA graphs"),
    ("INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 4.34 s", "starting the engine"),
)


def test_start_stage_follows_log(tmp_path):
    log = tmp_path / "engine.log"
    assert stage_of(log) == IMPORTING, "it is not there before the process is"
    for number, (_, stage) in enumerate(LINES, start=1):
        log.write_text("\n".join(line for line, _ in LINES[:number]))
        assert stage_of(log) == stage
    assert {stage for _, stage in LINES} == {IMPORTING, *MARKS.values()}


MESSAGE = {
    "event": "done",
    "began": 100.0,
    "window": [101.0, 103.5],
    "samples": [  # in the order they ended
        [1, 100.2, 100.3, 100.4, 102.0, 16, 8, True, None],
        [0, 100.1, 100.15, 100.2, 102.5, 16, 8, True, None],
        [2, 103.0, None, None, None, 16, 0, False, None],
    ],
    "steps": [[100.4, 2, 0, 2, 32, 0.1, 0], [102.0, 1, 0, 2, 0, None, 0]],
    "failed": [[3, 100.5, None, 100.75, "ValueError"]],
    "first_failure": "ValueError: no",
}


def test_child_answer_becomes_run():
    run = run_from([MESSAGE])
    assert run.samples.request == (0, 1, 2) and run.samples.finished == (True, True, False)
    assert (run.samples.sent_s, run.samples.admitted_s) == ((0.1, 0.2, 3.0), (0.15, 0.3, None))
    assert run.samples.last_token_s == (2.5, 2.0, None)
    assert (run.began_s, run.window_s) == (100.0, (1.0, 3.5))
    assert (run.steps.time_s, run.steps.new_tokens, run.steps.kv_usage) == ((0.4, 2.0), (2, 2), (0.1, None))
    assert (run.failures, run.first_failure) == (1, "ValueError: no")
    assert run.failed == Failures((3,), (0.5,), (0.75,), ("ValueError",))
    assert run.steps.drafts == run.steps.accepted == ()
    empty = run_from([{**MESSAGE, "samples": [], "steps": []}])
    assert (len(empty.samples), len(empty.steps)) == (0, 0)
    drafted = [[100.4, 2, 0, 2, 32, 0.1, 0, 0, 0], [102.0, 1, 0, 5, 0, None, 0, 2, 3]]
    found = run_from([{**MESSAGE, "steps": drafted}]).steps
    assert (found.drafts, found.accepted, found.preempted) == ((0, 2), (0, 3), (0, 0))
    none = run_from([MESSAGE], steps=[[*row, 0, 0] for row in MESSAGE["steps"]])
    assert none.steps == run_from([MESSAGE]).steps, "a record of it is that of an engine which drafts nothing"
    part = {"weight_bytes": 5, "attention_backend": "FLASH"}
    parts = [{**part, "kv_windows": [None, 512]}, {**part, "weight_bytes": 6}]
    parts[0] |= {"imported_s": 107.5, "stages": {"device": 0.5}}
    seen = resolved_from({"event": "ready", "kv_blocks": 9, "parts": parts}, 9.0, 100.0)
    assert seen.stages == (("import", 7.5), ("device", 0.5)) and seen.ready_s == 9.0
    assert (seen.weight_bytes, seen.attention_backend, seen.kv_blocks, seen.kv_windows) == (11, "FLASH", 9, (None, 512))
    unknown = resolved_from({"parts": [part, {"weight_bytes": None}]}, 1.0, 100.0)
    assert (unknown.weight_bytes, unknown.kv_windows, unknown.stages) == (None, None, ())
    assert resolved_from({"kv_blocks": 9}, 1.0, 100.0).weight_bytes is None
