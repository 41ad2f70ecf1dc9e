"""Names of files with control characters: no command shows them as they are, and neither does a run."""

from pathlib import Path
from unicodedata import category

import pytest
from campaign import GOOD, ONE_POINT, REAL, good_archive
from judged import Case, case, pytest_run  # noqa: F401

from pytest_slmserve.__main__ import main
from pytest_slmserve.schema.printable import HARMFUL

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
def test_no_command_shows_a_control_character_of_a_name(folder, monkeypatch, capsys, words) -> None:
    monkeypatch.chdir(folder)
    main([word.replace("A", NAME, 1) if word.startswith("A") else word for word in words.split()])
    out, err = capsys.readouterr()
    assert harmful(out + err) == set() and out + err


def test_no_run_shows_a_control_character_of_a_name(case: Case) -> None:  # noqa: F811
    (case.folder / "test_it.py").write_text(ONE_POINT, "utf-8")
    (case.folder / f"{NAME}.jsonl").write_bytes(good_archive(case.folder) + b'{"kind":')
    (case.folder / NAME).mkdir()
    export = ("-o", f"slm_export=vllm-bench={NAME}")
    words = [f"--slm-records={NAME}.jsonl", f"--slm-html={NAME}.html", *export, "test_it.py"]
    seen = case.fork(pytest_run([*GOOD, "--color=no", *words]))
    assert seen.status == 0 and "moved to" in seen.text and harmful(seen.text) == set(), seen.text
