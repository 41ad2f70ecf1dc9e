"""`advise`: batch, memory and number of engines from archives of ours and from external results; what reaches the
advisor; and its exit status. That any value in a file has an answer, the tests of `report` look at."""

import json
import shlex
import shutil
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from command_line import refused, said, told_in_json
from published import CSV, NAMES, external
from scripts import BASELINES, needs_checkout
from swept import archive, measured

from pytest_slmserve.commands import advise
from pytest_slmserve.schema.specs import GIB, Adapters

OUTPUT = ("--output-throughput", "output_tok_per_s", "--preemptions", "preemptions")
MODEL = ("--model", "opt-1.3b", "--gpu-memory", "63.43GiB", "--max-model-len", "632")
SWEEP = cache(measured)
advised = partial(told_in_json, "advise", status=0)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Concurrencies 1 to 256, with repeats of 0.1% noise."""
    return archive(tmp_path_factory.mktemp("swept") / "a.jsonl", SWEEP((1, 16, 32, 64, 128, 256)))


@pytest.mark.parametrize(("slo", "chosen", "cap"), [("2x@32", 96, 105), ("4x@32", 256, 250)])
def test_advice_matches_published_results(tmp_path, capsys, slo, chosen, cap):
    """OPT-1.3B of arXiv:2503.08311, epsilon 0.1, b_half from shapes."""
    words = (external(tmp_path), *NAMES, *OUTPUT, *MODEL, "--slo-itl", slo, "--b-half", 40.6, "--price-per-hour", 2)
    [model] = advised(capsys, *words)["models"]
    assert model["b_opt"]["value"] == chosen and not model["predicted"]
    assert round(model["caps"]["slo"]) == cap and round(model["caps"]["efficiency"]) == 375
    assert model["memory"]["kv_blocks"] == chosen * 40 + 1
    assert model["single"]["cost"]["value"] == pytest.approx(2 / 3600 / 276.593 * 1e6, rel=1e-3)
    text = said(capsys, "advise", *words)
    assert (text.status, text.err) == (0, "") and f"--max-num-seqs {chosen} " in text.out
    assert all(len(row) <= 150 for row in text.out.splitlines())


@pytest.mark.parametrize("counts", [[18_573] * 9, [18_573, *[9_000] * 8], [0, *[9_000] * 8], None])
def test_largest_block_count_frees_memory(counts, tmp_path, capsys):
    words = (*NAMES, *OUTPUT, *MODEL, "--slo-itl", "2x@32", "--kv-blocks", "blocks")
    rows = [f"{row},{count}\n" for row, count in zip(CSV.splitlines(), ["blocks", *(counts or [])])]
    path = external(tmp_path, "".join(rows) if counts else CSV)
    if counts and min(counts):
        [model] = advised(capsys, path, *words)["models"]
        assert model["memory"]["freed_bytes"] == (18_573 - model["memory"]["kv_blocks"]) * 16 * 196_608 > 0
    else:
        refused(said(capsys, "advise", path, *words), "blocks")


def test_archive_gives_start_command(swept, tmp_path, capsys):
    words = ("--slo-itl", "2x@32", "--model", "facebook/opt-1.3b")
    other = archive(tmp_path / "b.jsonl", SWEEP((1, 16, 64), model="opt-125m"))
    seen, longer = (advised(capsys, swept, other, *words, *more) for more in ((), ("--max-model-len", 97)))
    [model], [needs_more] = seen["models"], longer["models"]
    assert seen["device"] == "NVIDIA H200" and model["batch"] == 64 and model["memory"]["longest"] == 96
    assert needs_more["memory"]["kv_blocks"] > model["memory"]["kv_blocks"]
    assert model["b_opt"] == {"value": 64, "low": 64, "high": 64} and model["gains"]["mps"]["unit"] == "roofline"
    start = shlex.split(seen["starts"][0]["commands"][0])
    assert start[start.index("--kv-cache-memory-bytes") + 1] == str(model["memory"]["kv_bytes"])
    assert "vllm serve facebook/opt-1.3b" in said(capsys, "advise", swept, "--slo-itl", "2x@32").out
    assert {each["model"] for each in advised(capsys, swept, other)["models"]} == {"opt-1.3b", "opt-125m"}
    (tmp_path / "a.jsonl").write_bytes(swept.read_bytes()[:-10])
    torn = advised(capsys, tmp_path / "a.jsonl")["notes"]
    assert any("a.jsonl" in note for note in set(torn) - set(seen["notes"]))


def test_adapters_take_memory(swept, capsys):
    """A slot of rank 8 of OPT-1.3B: (2,048 + 2,048) * 8 values of 2 bytes for each of four matrices of attention, and
    (2,048 + 8,192) * 8 for both of the feed-forward, in 24 layers."""
    [plain] = advised(capsys, swept)["models"]
    found = advised(capsys, swept, "--lora", "64x8")
    [model], each = found["models"], 24 * 16 * (4 * 4096 + 2 * 10_240)
    held, memory = model["adapters"], model["memory"]
    assert (held["slots"], held["rank"], held["slot_bytes"]) == (64, 8, 64 * each) and "adapters" not in plain
    assert memory["total_bytes"] == plain["memory"]["total_bytes"] + 64 * each
    budget = int(found["gpu_bytes"] * found["gpu_memory_utilization"])
    assert held["room"] == 64 + (budget - memory["total_bytes"]) // each
    assert "--enable-lora --max-loras 64 --max-lora-rank 8 --max-cpu-loras 64" in found["starts"][0]["commands"][0]
    text = said(capsys, "advise", swept, "--lora", "64x8").out
    assert "64 slots of rank 8" in text and f"{held['room']:,}" in text


def test_measured_adapters_count_once(capsys, tmp_path):
    needs_checkout()
    of_an_h200 = [BASELINES / f"h200-vllm-0.26.0-{name}.jsonl.xz" for name in ("adapters", "today")]
    seen = said(capsys, "advise", *of_an_h200, "--model", "llama-3.2-1b", "--lora", "64x8")
    told = [line.split()[1:] for line in seen.out.splitlines() if line.startswith("  measured ")]
    assert [each[:2] for each in told] == [["64x8", "adapters"], ["8", "slots"]]
    with_adapters = [replace(m, spec=m.spec.with_adapters(Adapters(16, 8))) for m in SWEEP((1, 16, 32))]
    path = archive(tmp_path / "b.jsonl", with_adapters)
    [had], [more] = (advised(capsys, path, *words)["models"] for words in ((), ("--lora", "16x8")))
    assert had["memory"] == more["memory"] and more["adapters"]["slots"] == 16
    refused(said(capsys, "advise", external(tmp_path), *NAMES, "--lora", "16x8"), "memory of adapters")


def test_typed_options_reach_advisor(swept, capsys, monkeypatch):
    monkeypatch.setattr(advise.advisor, "plan", plan := Mock(wraps=advise.advisor.plan))
    advised(capsys, swept)
    advised(capsys, swept, "--slo-itl=30ms", "--efficiency=0.2", "--gpu-memory=80GiB", "--gpu-memory-utilization=0.8",
            "--price-per-hour=2")  # fmt: skip
    usual, wish = (call.args[1] for call in plan.call_args_list)
    assert (usual.slo, usual.threshold, usual.gpu_memory_utilization, usual.price_per_hour) == (None, 0.1, 0.9, None)
    assert usual.gpu_bytes == 150_754_820_096, "of the GPU measured on"
    assert (wish.slo.seconds, wish.threshold, wish.gpu_bytes) == (0.03, 0.2, 80 * GIB)
    assert (wish.gpu_memory_utilization, wish.price_per_hour) == (0.8, 2)


@pytest.mark.parametrize(("loads", "words", "shown"), [
    ((64,), (), "concurrency 64"), ((), (), "sweep"), ((1, 16, 64), ("--gpu-memory=2GiB",), "nothing fits"),
])  # fmt: skip
def test_missing_advice_exits_10(loads, words, shown, tmp_path, capsys):
    seen = said(capsys, "advise", archive(tmp_path / "a.jsonl", SWEEP(loads)), *words)
    assert (seen.status, seen.err) == (10, "") and shown in seen.words and "vllm serve" not in seen.out


@pytest.mark.parametrize("of_ours", [True, False])
def test_page_shows_advice(of_ours, swept, tmp_path, capsys, monkeypatch):
    written = []
    monkeypatch.setattr(advise, "write_page", lambda *given, sections: written.append((*given, list(sections))))
    words = (swept,) if of_ours else (external(tmp_path), *NAMES)
    assert said(capsys, "advise", *words, "--html", tmp_path / "a.html").status == 0
    [(path, rests_on, paths, sections)] = written
    assert (path, sections) == (tmp_path / "a.html", ["Advice"])
    assert (paths, len(rests_on.measurements)) == (([swept], 12) if of_ours else ([], 0))


@pytest.mark.parametrize(("words", "facts"), [
    ("--slo-itl 2x", ["'2x'"]), ("--efficiency 1", ["--efficiency", "'1'"]),
    ("--gpu-memory-utilization 0", ["--gpu-memory-utilization", "'0'"]),
    ("--price-per-hour -1", ["--price-per-hour", "'-1'"]), ("--price-per-hour nan", ["--price-per-hour", "'nan'"]),
    ("--gpu-memory 80", ["--gpu-memory", "'80'", "40GiB"]), ("--max-model-len 0", ["--max-model-len", "'0'"]),
    ("--lora 64x9", ["--lora", "'64x9'"]), ("--model opt-2.7b", ["opt-2.7b"]),
    ("--knob max_num_seqs", ["is a results file", "--knob"]),
])  # fmt: skip
def test_wrong_usage_names_option(swept, tmp_path, capsys, words, facts):
    refused(said(capsys, "advise", swept, *words.split()), *facts)
    refused(said(capsys, "advise", external(tmp_path), *NAMES, "--model", "no-such-model"), "'no-such-model'")


def test_quick_advice_starts_one_engine(swept, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = []

    def run(command, **_):
        commands.append(command)
        [records] = [word.partition("=")[2] for word in command if word.startswith("--slm-records=")]
        shutil.copy(swept, records)
        return SimpleNamespace(returncode=10)

    monkeypatch.setattr(advise.plan.subprocess, "run", run)
    seen = said(capsys, "advise", "--quick", "opt-1.3b", "--slo-itl", "2x@32", "--", "--slm-cpu", "--slm-window=1")
    words = ["--slm-models=opt-1.3b", "--slm-sweep=adaptive", "--slm-budget=60", "--slm-cpu", "--slm-window=1"]
    assert [word for word in commands[0] if word.startswith("--slm-") and "records" not in word] == words
    assert commands[0][-3] == "--pyargs" and all("test_pareto_plateau::" in word for word in commands[0][-2:])
    assert seen.status == 0 and seen.words.startswith("opt-1.3b: max_num_seqs 64 (95%: 64 to below 128), memory share")
    assert "vllm serve facebook/opt-1.3b" in seen.out and "measured: no" in seen.words and "started" not in seen.words
    assert all(
        fact in seen.words for fact in ("one launch on one host", "of at most 60", "2 at 64", "test_replication_gain")
    )
    told = said(
        capsys, "advise", "--quick", "opt-1.3b", "--json", "--", "--slm-records=mine.jsonl", "--slm-budget", "20"
    )
    found = json.loads(told.out)
    [model], quick = found["models"], found["quick"]
    assert "--slm-gpu" in commands[1] and "--slm-gpu" in quick["trial"] and quick["budget_s"] == 20
    assert model["answer"].startswith("opt-1.3b: max_num_seqs") and model["second_engine"]["value"] > 0
    assert model["b_opt_least"] <= model["batch"]


@pytest.mark.parametrize(("words", "facts"), [
    ([], ["--quick MODEL"]), (["--quick", "opt-1.3b", "a.jsonl"], ["--quick", "reads no files"]),
    (["--quick", "opt-1.3b", "a.jsonl", "--", "--slm-cpu"], ["reads no files"]),
    (["--quick", "opt-1.3b", "--model", "opt-1.3b"], ["reads no files"]),
    (["--quick", "opt-1.3b"], ["no GPU here", "slmserve advise --quick opt-1.3b -- --slm-cpu"]),
    (["--quick", "opt-1.3b", "--", "--slm-simulate"], ["no GPU here", "a host"]),
])  # fmt: skip
def test_impossible_quick_advice_is_refused(words, facts, tmp_path, capsys, monkeypatch):
    for mode in ("SLM_GPU", "SLM_CPU", "SLM_SIMULATE"):
        monkeypatch.delenv(mode, raising=False)
    monkeypatch.chdir(tmp_path)

    def run(command, stdout, **_):
        stdout.write("ERROR: slmserve: no GPU here\n  try: a host with one\n")
        return SimpleNamespace(returncode=4)

    monkeypatch.setattr(advise.plan.subprocess, "run", run)
    refused(said(capsys, "advise", *words), *facts)
