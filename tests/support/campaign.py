"""What the fault campaign does for each kind of fault: something is run, the fault is planted, and what came of it is
judged. Some cases are in tests/integration/faults, the whole campaign in tests/nightly/faults."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile
import pytest
import wire_server
from hidden_texts import repeats
from interfaces import STAND_IN
from judged import Case, Seen, command, pytest_run, waited_for
from shipped import BENCHMARKS, put

from pytest_slmserve.archive.store import read
from pytest_slmserve.options.table import OPTS

MEMORY = 2 << 30
REAL = BENCHMARKS / "baselines" / "cpu-vllm-0.32.0.jsonl.xz"
MEASURE = ("measure", "--endpoint=http://127.0.0.1:9/v1/completions", "--model=m")


def judge_each(case: Case, category: str, works: Iterable[tuple[str, Callable[[], int]]], statuses: Collection[int],
               said: str = "", memory: int = MEMORY) -> None:  # fmt: skip
    """Each in turn; what went wrong is told of all of them."""
    wrong, count = [], 0
    for name, work in works:
        count += 1
        try:
            case.judge(category, case.fork(work, memory), statuses, said)
        except AssertionError as error:
            wrong.append(f"== {name[:60]!r}: {error}")
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong])


# Disk: the fault comes after the second measurement of four, from the run's own test, always at the same place

MADE = "a repeat is made"  # what the test below prints
FOUR_POINTS = f"""
import os, pathlib, shutil, pytest

@pytest.mark.slm(points=[("opt-125m", load) for load in (1, 2, 4, 8)])
def test_point(slm_point, request, pytestconfig):
    assert slm_point.measure()
    print({MADE!r})
    path = pathlib.Path(pytestconfig.getoption("--slm-records"))
    if "-4" in request.node.name:
        PLANTED
"""
CHANGES = {
    "nothing": "pass", "truncated": "os.truncate(path, path.stat().st_size // 2)",
    "emptied": "os.truncate(path, 0)", "removed": "path.unlink()", "folder_removed": "shutil.rmtree(path.parent)",
    "a_folder": "path.unlink(), path.mkdir()",
    "a_link": "path.rename(path.with_name('elsewhere')), path.symlink_to('nowhere')",
    "a_pipe": "path.unlink(), os.mkfifo(path)", "another_file": "path.unlink(), path.write_text('not ours')",
    "a_copy": "shutil.copy(path, 'copy'), os.replace('copy', path)",
    "folder_is_a_file": "shutil.rmtree(path.parent), path.parent.write_text('')",
}  # fmt: skip
SECOND = "pytest-slmserve-rescued-*.jsonl"
FOUR = ("-s", "--slm-simulate", "--slm-models=opt-125m", "--slm-repeats=1", "--slm-window=1", "test_it.py")


def put_four(case: Case, planted: str = "nothing") -> None:
    (case.folder / "test_it.py").write_text(FOUR_POINTS.replace("PLANTED", CHANGES[planted]), "utf-8")


def run_four(case: Case, records: str, planted: str, *more: str) -> Callable[[], int]:
    put_four(case, planted)
    return pytest_run([*FOUR, f"--slm-records={records}", *more])


def change_disk(case: Case, records: str, statuses: tuple[int, ...], planted: str = "nothing") -> None:
    """A run of four points, whose measurements are in the archive, or in the second file that it names."""
    seen = case.fork(run_four(case, records, planted))
    made = seen.text.count(MADE)
    second = next(case.temporary.glob(SECOND), None)
    case.records = str(second or records)
    said = rf"report\s+{second}[^$]*cannot write to [^;]*;\s+all\s+measurements"
    case.judge("disk", seen, statuses, said if second else "", kept=made, may_stay=[SECOND])
    assert made == (0 if seen.status == 4 else 4), seen.text
    assert bool(second) == (seen.status == 1), seen.text
    if second:
        again = case.fork(run_four(case, "again.jsonl", "nothing", f"--slm-resume={second}"))
        case.records = "again.jsonl"
        case.judge("disk", again, (0,), "4 measurements were reused", may_stay=[SECOND])


# Models: a folder whose configuration has one entry that no model has, planned

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "max_position_embeddings": 8192, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
}  # fmt: skip
OF_A_MODEL = (
    *CONFIG, "head_dim", "ffn_dim", "word_embed_proj_dim", "num_experts", "num_experts_per_tok", "sliding_window",
    "max_window_layers", "layer_types", "text_config", "quantization_config", "torch_dtype", "tie_word_embeddings",
    "model_type",
)  # fmt: skip


def plan_model(case: Case, entry: str, values: Iterable[object]) -> None:
    """0 of an entry that is not read, or may be so."""
    (case.folder / "test_it.py").write_text(ONE_POINT, "utf-8")
    words = ["--slm-simulate", "--slm-models=./mine", "--slm-plan", "test_it.py"]

    def works() -> Iterator[tuple[str, Callable[[], int]]]:
        (case.folder / "mine").mkdir()
        for value in values:
            (case.folder / "mine" / "config.json").write_text(json.dumps({**CONFIG, entry: value}), "utf-8")
            yield f"{value!r}", pytest_run(words)

    judge_each(case, "hostile files", works(), (0, 4))


# Kills

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
POINTS = """
import time, pytest
print("MOMENT imported", flush=True)

@pytest.fixture(scope="session", autouse=True)
def opened():
    print("MOMENT opened", flush=True)

@pytest.mark.slm(points=[(MODEL, 1), (MODEL, 2), (MODEL, 4)])
def test_point(slm_point, record):
    print("MOMENT item", flush=True)
    assert slm_point.measure()
    record()

@pytest.fixture
def record():
    yield lambda: print("MOMENT measured", flush=True)
    print("MOMENT torn down", flush=True)

def test_last(slm_model):
    print("MOMENT last", flush=True)
    time.sleep(30)
"""
# A text of the run's output, and seconds after it.
MOMENTS = {
    "collecting": ("MOMENT imported", 0.0), "opening": ("MOMENT opened", 0.0), "starting": ("MOMENT item", 0.0),
    "on its way up": ("MOMENT item", 0.3), "ready": ("MOMENT item", 1.0), "measuring": ("MOMENT item", 2.0),
    "between two points": ("MOMENT measured", 0.0), "after some": ("MOMENT torn down", 0.5),
}  # fmt: skip
WORDS = ("-s", "-p", "no:cacheprovider", "--slm-repeats=1", "--slm-window=1.5", "--slm-records=r.jsonl")
ENGINES = {
    "simulated": (*WORDS, "--slm-simulate", "--slm-models=opt-125m"),
    "stand-in": (*WORDS, "--slm-cpu", f"--slm-env=PYTHONPATH={STAND_IN}", "--slm-models=opt-tiny"),
    "vllm": (*WORDS, "--slm-cpu", "--slm-models=opt-tiny"),
    "ray": (*WORDS, "--slm-simulate", "--slm-models=opt-125m", "--slm-ray=local:2"),
}
# How much slower than the stand-in an engine is: its moments are later.
PACE = {"simulated": 0.2, "stand-in": 1.0, "ray": 3.0, "vllm": 8.0}


def killed(case: Case, words: Sequence[str], end: Callable[[int], object], text: str = "", after_s: float = 0) -> Seen:
    """What came of a command whose process, by its id, was ended so long after that text, unless it had ended."""
    log, began = case.folder / "seen.log", time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=case.folder, env=case.environment, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    until = began + case.within_s
    while text not in log.read_text("utf-8", errors="replace") and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(after_s)
    status = process.poll()
    if status is None:
        end(process.pid)
        status = waited_for(process.pid, case.within_s)
        process.returncode = 0  # it is waited for
    return Seen(status, log.read_text("utf-8", errors="surrogateescape"), time.monotonic() - began)


def kill(case: Case, engine: str, number: int, moment: str) -> None:
    # Interrupted; or ended before the signal came; or all had ended but the interpreter.
    ended = [-number] if number == signal.SIGKILL else []
    judge_killed(case, engine, lambda pid: os.kill(pid, number), *MOMENTS[moment], [-number], ended)


def judge_killed(
    case: Case, engine: str, end: Callable[[int], object], text: str, after_s: float, last: Sequence[int],
    ended: Sequence[int] = (),
) -> None:  # fmt: skip
    """Judge a run that `end` has ended so long after that text. last, ended: other statuses that are right, once all
    but the interpreter has ended and always."""
    model = "opt-125m" if engine in ("simulated", "ray") else "opt-tiny"
    (case.folder / "test_it.py").write_text(POINTS.replace("MODEL", f'"{model}"'))
    words = ["-m", "pytest", "test_it.py", *ENGINES[engine]]
    seen = killed(case, words, end, text, after_s * PACE[engine])
    over = " in " in seen.text.rstrip().rpartition("\n")[2]
    case.records = "r.jsonl"
    statuses = (*(ended or (2,)), 0, 1, 10, *(last if over else ()))
    case.judge("kills", seen, statuses, kept=seen.text.count("MOMENT measured"))
    assert text in seen.text, seen.text


def kill_in_a_burst(case: Case, engine: str, seed: int) -> None:
    """A key that is pressed several times, a runner that repeats itself, in a run whose last test takes a while."""
    drawn = random.Random(seed)
    numbers = drawn.choice([(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM), (signal.SIGHUP,)])
    times, gap_s = drawn.choice([2, 3, 8]), drawn.choice([0.0, 0.02, 0.2, 0.7])
    text, after_s = drawn.choice(list(MOMENTS.values()))
    if engine == "ray" and text == MOMENTS["collecting"][0]:
        numbers = (signal.SIGINT,)  # for a moment of its start Ray's library ends the process at SIGTERM
    print(f"seed {seed}: {times} times {numbers}, each {gap_s:g} s, after {text!r}")

    def burst(pid: int) -> None:
        for _ in range(times):
            for number in numbers:
                os.kill(pid, number)
            time.sleep(gap_s)

    judge_killed(case, engine, burst, text, after_s + drawn.uniform(0.0, 0.5), [-number for number in numbers])


# Wire

LOADS = {
    "window": ("--max-concurrency=2", "--window=0.5"), "count": ("--max-concurrency=2", "--num-prompts=12"),
    "rate": ("--request-rate=20", "--settle=0.2", "--window=0.6"),
}  # fmt: skip
TESTS = {
    "window": "def test(slm_measure): assert slm_measure(2, repeats=1).valid",
    "count": "def test(slm_job): assert slm_job(12, repeats=1).valid",
    "rate": "def test(slm_job): assert slm_job(12, rate=20, repeats=1).valid",
}
# What is said of requests that fail, by the beginning of the fault's name, and what is told of a good answer.
SAID = {
    "usage": "malformed|the server counts|tokens came of a request",
    "hang": "timeout|no end within|no request finished", "first": "error: |ERROR: |INVALID|invalid: ",
}  # fmt: skip
TOLD = {"good-buffered": "answers came in one piece", "good-without-counts": "does not say how many tokens it sent"}
# A busy machine may make a good load invalid; what the first request does not show, the load does.
ENDS = {"good": (0, 1), "first": (1, 4)}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of the server, but for the fault."""
    server = [sys.executable, str(Path(wire_server.__file__))]
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()


def judge_wire(case: Case, fault: str, work: Callable[[], int], told: str = "") -> None:
    kind = fault.partition("-")[0]
    case.judge("wire", case.fork(work), ENDS.get(kind, (1,)), told or SAID.get(kind, ""), kept=kind != "first")


def measure(case: Case, url: str, fault: str, load: str) -> None:
    words = ["measure", f"--endpoint={url}/{fault}/v1/completions", "--model=m", "--input-len=8", "--output-len=4"]
    words += [f"--timeout={1 if 'hang' in fault else 30}", *LOADS[load]]
    judge_wire(case, fault, command(words), TOLD.get(fault, ""))


def measure_odd(case: Case, url: str, seed: int) -> None:
    """Of answers in any form each token is counted, and no other."""
    print(f"seed {seed}")
    fault = f"odd-{seed}"
    words = ["measure", f"--endpoint={url}/{fault}/v1/completions", "--model=m", "--input-len=8", "--output-len=9"]
    seen = case.fork(command([*words, *LOADS["count"]]))
    case.judge("odd streams", seen, (0, 1), kept=1)  # 1: of a machine that is too busy
    with urllib.request.urlopen(f"{url}/{fault}/truth") as told:
        truth = json.load(told)
    samples = read(case.folder / case.records).measurements[-1].run.samples
    assert all(samples.finished) and sorted(samples.output_tokens) == sorted(truth), (seed, truth, seen.text)


def run_tests(case: Case, url: str, fault: str, load: str) -> None:
    (case.folder / "test_it.py").write_text(TESTS[load], "utf-8")
    words = ["--slm-models=m", "--slm-input-len=8", "--slm-output-len=4", "--slm-window=0.5", "test_it.py"]
    words += [f"--slm-endpoint={url}/{fault}/v1/completions", f"-oslm_timeout={1 if 'hang' in fault else 30}"]
    judge_wire(case, fault, pytest_run(words))


# Files

COLUMNS = ("--knob=load", "--throughput=rate", "--latency=wait_ms")
GOOD = ("--slm-simulate", "--slm-models=opt-125m", "--slm-concurrency=1,4,16,64,256", "--slm-window=1")
COMMANDS: dict[str, Sequence[str]] = {
    "report": ["report", "FILE"], "report-json": ["report", "--json", "FILE"],
    "report-skip": ["report", "--skip-damaged", "FILE"], "report-list": ["report", "--list", "FILE"],
    "compare": ["compare", "FILE", "FILE"], "merge": ["report", "FILE", "--merge", "out.jsonl"],
    "baseline": ["compare", "FILE", "--save", "--folder", "kept"], "advise": ["advise", "FILE"],
    "asv": ["asv", "convert", "FILE", "--into", "asv"], "external": ["report", "FILE", *COLUMNS],
    "pairs": ["pairs", "FILE", "--direction=higher"], "figures": ["report", "FILE", "--figures", "pictures"],
    "trace": [*MEASURE, "--trace", "FILE"], "lengths": [*MEASURE, "--max-concurrency=1", "--lengths-from", "FILE"],
}  # fmt: skip
BY_OPTION = {"resume": "resume", "append": "records", "against": "baseline", "dataset": "dataset"}
RUNS = {name: [*GOOD, f"--slm-{option}=FILE", "test_it.py"] for name, option in BY_OPTION.items()}
ONE_POINT = "def test_point(slm_point):\n    assert slm_point.measure()\n"


def good_archive(folder: Path) -> bytes:
    """An archive of a simulated sweep."""
    case = Case(folder)
    (case.folder / "test_it.py").write_text(ONE_POINT, "utf-8")
    seen = case.fork(pytest_run([*GOOD, "--slm-repeats=1", "--slm-records=good.jsonl", "test_it.py"]))
    assert seen.status == 0, seen.text
    return (case.folder / "good.jsonl").read_bytes()


def hostile_files(folder: Path, good: bytes) -> list[Path]:
    """A hundred and more, some of them with a suffix of their own."""
    changed = (*hostile.odd_values(good), *hostile.everywhere(good), *hostile.damaged(good))
    for name, data in (*((f"{name}.jsonl", data) for name, data in changed), *hostile.packed(good)):
        (folder / name).write_bytes(data)
    return [*sorted(folder.iterdir()), *hostile.no_files(folder)]


def undrawn(work: Callable[[], int]) -> int:
    """The same work with pictures that are specified and not drawn: V8, which draws them, does not survive a fork."""
    said = lambda spec, **_: json.dumps(json.loads(spec)).encode()  # noqa: E731
    sys.modules["vl_convert"] = SimpleNamespace(vegalite_to_png=said)  # type: ignore[assignment]
    return work()


def read_files(case: Case, reader: str, paths: Iterable[Path], memory: int = MEMORY) -> None:
    """Each file as it is, whatever the one who read it before did to it."""
    (case.folder / "test_it.py").write_text(ONE_POINT, "utf-8")
    if reader == "asv":
        case.fork(command(["asv", "init", "--into", "asv"]))

    def works() -> Iterator[tuple[str, Callable[[], int]]]:
        for path in paths:
            there = len(path.name) < 256 and path.is_file() and path.stat().st_size < 1 << 30
            before = path.read_bytes() if there else None
            words = [word.replace("FILE", str(path)) for word in {**COMMANDS, **RUNS}[reader]]
            work = command(words) if reader in COMMANDS else pytest_run(words)
            yield path.name, partial(undrawn, work) if reader == "figures" else work
            if before is not None:
                path.write_bytes(before)

    judge_each(case, "hostile files", works(), (0, 1, 4, 10), r"(?s)\A(?!.* --help)", memory)  # a use of the command


# Options


def set_option(case: Case, name: str, texts: Iterable[str]) -> None:
    """By a plan, which does all but start: a run would take as long as it was asked to."""
    tests = ("def test_point(slm_point): assert slm_point.measure()", "def test_job(slm_job): assert slm_job(10).valid")
    (case.folder / "test_it.py").write_text("\n".join(tests), "utf-8")
    flag = next(opt.flag for opt in OPTS if opt.name == name).replace("-o ", "--override-ini=")
    words = ("--slm-simulate", "--slm-models=opt-125m", "--slm-plan", "test_it.py")
    judge_each(case, "hostile options", ((text, pytest_run([f"{flag}={text}", *words])) for text in texts), (0, 4, 5))


def set_option_of_measure(case: Case, flag: str, texts: Iterable[str]) -> None:
    """Nobody listens at the URL, so that what is taken is status 4 all the same."""
    load = [] if flag in ("--max-concurrency", "--request-rate", "--ramp") else ["--max-concurrency=1"]
    works = ((text, command([*MEASURE, *load, f"{flag}={text}"])) for text in texts)
    judge_each(case, "hostile options", works, (4,))


# Secrets

INHERITED = "hunter2-of-the-environment"
GATED = "\ndef test_gate(slm_gate):\n    assert slm_gate()\n"
OUTPUTS = ("-v", "--slm-records=r.jsonl", "--slm-html=p.html", "--junitxml=j.xml")
SIMULATED = ("--slm-simulate", "--slm-models=opt-125m", "--slm-repeats=1", "--slm-window=1", *OUTPUTS)
# How a secret is typed: words of pytest or of `slmserve measure`, or variables; TEXT is the secret.
TYPED: dict[str, Sequence[str]] = {
    "env": ["--slm-env=TEXT"], "engine-arg": ["--slm-engine-arg=TEXT"], "side-env": ["--slm-side=candidate:env=TEXT"],
    "side-arg": ["--slm-gate", "--slm-side=baseline:python=p,arg=TEXT"], "ini": ["-oslm_profile=TEXT"],
    "two words": ["--slm-env", "TEXT"], "a number": ["--slm-window=TEXT"], "a model": ["--slm-models=a,TEXT"],
}  # fmt: skip
BY_VARIABLE = ("SLM_ENV", "SLM_ENGINE_ARG", "SLM_SIDE", "SLM_WAIVERS", "SLM_TOKENIZER")
TYPED_FOR_MEASURE: dict[str, Sequence[str]] = {
    "body": ["--extra-body=TEXT"], "model": ["--model=TEXT"], "two words": ["--tokenizer", "TEXT"],
    "a number": ["--window=TEXT"], "nothing": ["--no-such-option=TEXT"],
}  # fmt: skip


def _with_variable(name: str, text: str, work: Callable[[], int]) -> Callable[[], int]:
    def run() -> int:
        os.environ[name] = text
        return work()

    return run


def keep_secret(case: Case, work: Callable[[], int], statuses: Collection[int] = (4,), said: str = "records") -> None:
    """It is refused by a sentence with the option, before anything is written, and is nowhere; its test may have it."""
    seen = case.fork(_with_variable("GITHUB_STEP_SUMMARY", str(case.folder / "summary.md"), work))
    case.judge("secrets", seen, statuses, said)
    assert not repeats(seen.text), seen.text
    written = [path for path in case.folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert [path for path in written if repeats(path.read_text("utf-8", errors="replace"))] == []


def type_secrets(case: Case, way: str, texts: Iterable[str]) -> None:
    """Each of them on the command line of pytest, in a variable, or on that of `measure`."""
    (case.folder / "test_it.py").write_text(ONE_POINT, "utf-8")
    for text in texts:
        if way in BY_VARIABLE:
            work = _with_variable(way, text, pytest_run([*SIMULATED, "test_it.py"]))
        elif way in TYPED:
            work = pytest_run([*SIMULATED, *(word.replace("TEXT", text) for word in TYPED[way]), "test_it.py"])
        else:
            words = [word.replace("TEXT", text) for word in TYPED_FOR_MEASURE[way.removeprefix("measure ")]]
            work = command(["measure", "--endpoint=http://127.0.0.1:9/v1", "--max-concurrency=1", *words])
        keep_secret(case, work)


def ask_secret_urls(case: Case, urls: Iterable[str]) -> None:
    (case.folder / "test_it.py").write_text(ONE_POINT, "utf-8")
    for url in urls:
        keep_secret(case, pytest_run([f"--slm-endpoint={url}", *OUTPUTS, "test_it.py"]), said="holds|read")
        keep_secret(case, command(["measure", f"--endpoint={url}", "--max-concurrency=1"]), said="holds|read")


def inherit_secrets(case: Case, *words: str) -> None:
    """A run whose environment has secrets, as it may: they are in none of what it writes."""
    (case.folder / "test_it.py").write_text(ONE_POINT + GATED, "utf-8")
    work = pytest_run([*SIMULATED, "--slm-concurrency=4", *words, "test_it.py"])
    work = _with_variable("HTTPS_PROXY", f"http://me:{INHERITED}@h", work)
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        work = _with_variable(name, INHERITED, work)
    keep_secret(case, work, (0, 10), "")
    assert (case.folder / "p.html").is_file() and (case.folder / "j.xml").is_file()


# Links: in the place of each file that is written, each of what may lie there instead of it

GATES = (
    "--slm-simulate", "--slm-models=opt-125m", "--slm-concurrency=4", "--slm-window=0.4", "--slm-output-len=8",
    "--slm-gate-launches=apart", "--slm-records=out/r.jsonl", "--slm-html=out/p.html",
)  # fmt: skip
WRITERS: dict[str, Sequence[str]] = {
    "four": [*FOUR, "--slm-records=out/r.jsonl", "--slm-html=out/p.html"],
    "gate": ["--slm-gate", "--override-ini=slm_export=vllm-bench=out/e.json", *GATES, "test_gate_shipped.py"],
    "calibration": ["--slm-calibrate", "--override-ini=slm_gate_pairs=4", *GATES, "test_gate_shipped.py"],
    "torn": [*FOUR, "--slm-records=out/t.jsonl", "--slm-html=out/p.html"],
    "page": ["report", "good.jsonl", "--html=out/p.html"],
    "merge": ["report", "good.jsonl", "--merge=out/m.jsonl.gz"],
    "figures": ["report", "good.jsonl", "--figures=out/figures"],
    "baseline": ["compare", "real.jsonl.xz", "--save", "--replace", "--folder=out/kept"],
    "asv": ["asv", "convert", "real.jsonl.xz", "--into=out"],
    "asv-init": ["asv", "init", "--into=out"],
}
# Files that grow: who named one may have named a link. Of all others nobody has named what a link there names.
GROW = ("r.jsonl", "t.jsonl", "m.jsonl.gz", "e.json", "summary.md")
PRECIOUS = b"PRECIOUS"
LINKS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda place, victim: place.symlink_to(victim),
    "hard-link": lambda place, victim: place.hardlink_to(victim),
    "dangling": lambda place, victim: place.symlink_to(victim.with_name("made")),
    "pipe": lambda place, _: os.mkfifo(place), "folder": lambda place, _: place.mkdir(),
}  # fmt: skip
RANDOM_NAME = re.compile(r"/(\.[0-9a-f]{16}\.new|\.accept-[^/]*/.*|releases(/.*)?)$")  # releases: a repository, by git


def heard(work: Callable[[], int], folder: Path, into: Path) -> int:
    """The same work, whose files below the folder, as they are opened for writing or take the place of others, become
    lines of `into`."""
    lines = os.open(into, os.O_WRONLY | os.O_CREAT)

    def hear(event: str, details: tuple[Any, ...]) -> None:
        opens = event == "open" and details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        path = details[0] if opens else details[1] if event == "os.rename" else None
        if isinstance(path, str | Path) and f"{(found := Path.cwd() / path)}".startswith(f"{folder}/"):
            os.write(lines, f"{found}\n".encode())

    sys.addaudithook(hear)
    return work()


def put_ready(case: Case, writer: str) -> None:
    """What a writer needs, and in the folder `ready` what is there before it writes into a copy of that."""
    good, ready = good_archive(case.folder), case.folder / "ready"
    shutil.copy(REAL, case.folder / "real.jsonl.xz")
    put(case.folder, "test_gate")
    ready.mkdir()
    if writer == "torn":
        (ready / "t.jsonl").write_bytes(good + b'{"kind":')
    if writer == "four":
        put_four(case)
    if writer == "asv":
        case.fork(command(["asv", "init", "--into=ready"]))


def writing(case: Case, writer: str) -> Callable[[], int]:
    """A run or a command that writes into a new folder."""
    folder, words = case.folder / "out", WRITERS[writer]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(case.folder / "ready", folder)
    work = partial(undrawn, command(words)) if words[0] in ("report", "compare", "asv") else pytest_run(words)
    return _with_variable("GITHUB_STEP_SUMMARY", str(folder / "summary.md"), work)


def write_once(case: Case, writer: str, name: str = "", kind: str = "") -> Seen:
    """What came of a writer where that kind of thing lies at that name."""
    work, folder = writing(case, writer), case.folder / "out"
    if name:
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        LINKS[kind](folder / name, case.folder / "victim")
    return case.fork(partial(heard, work, folder, case.folder / "heard"))


def places_of_writes(case: Case, writer: str) -> list[str]:
    """The names of the files that it writes, but for those that nobody can know before."""
    put_ready(case, writer)
    case.judge("links", write_once(case, writer), (0, 10))
    found = (case.folder / "heard").read_text("utf-8").splitlines()
    return sorted({path.removeprefix(f"{case.folder}/out/") for path in found if not RANDOM_NAME.search(path)})


def link_at(case: Case, writer: str, name: str, kind: str) -> None:
    """Nothing is waited for, and what others own is not written; of a file that grows it stays as far as it went."""
    victim = case.folder / "victim"
    victim.unlink(missing_ok=True)
    victim.write_bytes(PRECIOUS)
    case.judge("links", write_once(case, writer, name, kind), (0, 1, 3, 4, 10))
    kept, made = victim.read_bytes(), victim.with_name("made")
    is_made = made.exists()
    made.unlink(missing_ok=True)
    assert kept == PRECIOUS or (name in GROW and kept.startswith(PRECIOUS)), kept[:200]
    assert not is_made or name in GROW
    assert kind != "pipe" or (case.folder / "out" / name).is_fifo()
