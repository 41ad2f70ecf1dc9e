"""Blocks of the pages: every page is carried out from top to bottom, in a folder with the files that it names: tests
(`python runs`), other Python, `slmserve` on records, and `pytest --slm-simulate`. The exit status is that behind
`console`, or behind `# ` at the end of the line, else one of a verdict. What a page shows below a command has to be in
what that printed, line by line; columns and lines may be left out. Only parsed is what needs a GPU, a network, a
server or minutes; of `text recorded`, which it printed once, the words are still those of the code. A block of another
kind fails."""

import gzip
import json
import lzma
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, dropwhile, groupby
from pathlib import Path
from textwrap import dedent
from typing import Any

import jinja2  # noqa: F401 - before pytester, which takes back what is imported by it
import published
import pytest
import vl_convert  # noqa: F401
from pages import ALL_PAGES, DOCS, fences, unfenced
from scripts import BASELINES, CHECKOUT
from shipped import PACKAGE
from workflow_steps import read as read_yaml, yaml

from pytest_slmserve.__main__ import main, parser
from pytest_slmserve.archive.baselines import read_waivers
from pytest_slmserve.options.read import read_options
from pytest_slmserve.options.table import OPTS
from pytest_slmserve.plugin.items import path_of

OFFLINE = {"advise", "compare", "pairs", "plan", "predict", "report"}
OTHERS = ("asv", "docker", "git", "./config.sh", "./run.sh", "test")  # integration/commands/test_asv.py runs asv's
DECODE = BASELINES / "h200-vllm-0.26.0-decode.jsonl.xz"
RESULTS = {
    "sweep": published.CSV,
    "replication": published.REPLICA_CSV,
    "PAIRS": "baseline,candidate\n" + "100,100.1\n99,99.2\n101,100.8\n100,100.2\n" * 3,
    "AzureLLMInferenceTrace_conv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:31:04.0319600,396,109\n",
}
NOT_KEPT = ("-p", "no:cacheprovider", "--import-mode=importlib")


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that pages name: archives, results of other tools, examples and benchmarks."""
    for variable in [opt.variable for opt in OPTS]:
        monkeypatch.delenv(variable, raising=False)
    for name in [name for name in sys.modules if name.startswith("test_")]:  # pytest would take it for a page's file
        monkeypatch.delitem(sys.modules, name)
    path = pytester.path
    (path / "benchmarks/baselines").mkdir(parents=True)
    for file in [*BASELINES.glob("*.xz"), *BASELINES.parent.glob("*.py")]:
        (path / file.relative_to(CHECKOUT)).symlink_to(file)
    shutil.copytree(CHECKOUT / "examples", path, dirs_exist_ok=True)
    (path / ".slm").mkdir()
    records = lzma.decompress(DECODE.read_bytes())  # of two runs
    for name in (".slm/records", "before", "after", "engine", "server"):
        (path / f"{name}.jsonl").write_bytes(records)
    for name in ("records", "host-a", "host-b", "old", "h200-0.24.0", "h200-0.25.0", "h200-0.26.0"):
        (path / f"{name}.jsonl.gz").write_bytes(gzip.compress(records, 1))
    for name in ("a-b", "b-c"):
        (path / f"{name}.jsonl").write_bytes(records)
    for name, text in RESULTS.items():
        (path / f"{name}.csv").write_text(text)
    (path / "host.json").write_text(json.dumps({"python": "3.12", "fast_s": 3.5e-3, "middle_s": 4.4e-3}))
    (path / "results").mkdir()
    for load, rate, itl in ((1, 270.0, 3.6), (8, 1740.0, 4.5), (32, 4160.0, 7.5)):
        row = {"max_concurrency": load, "output_throughput": rate, "mean_tpot_ms": itl}
        (path / f"results/{load}.json").write_text(json.dumps(row))
    return path


@dataclass
class Desk:
    """What carries a page out. printed: by the last command; None if that was only parsed."""

    pytester: pytest.Pytester
    capfd: pytest.CaptureFixture[str]
    printed: str | None = None
    names: dict[str, Any] = field(default_factory=dict)

    def block(self, words: Sequence[str], text: str) -> None:
        match words:
            case ["python", "runs"]:
                self.example(text)
            case ["python"]:
                (self.pytester.path / "block.py").write_text(text)
                self.names |= runpy.run_path("block.py", self.names)
            case ["python", file]:
                (self.pytester.path / file).write_text(text)
            case ["sh"]:
                self.commands(text)
            case ["console", *ends]:
                for command, below in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
                    self.commands(command, [int(end) for end in ends])
                    assert not below or self.printed is not None, f"{command}: cannot be run here, so: text recorded"
                    assert missing(below, self.printed or "") == []
            case ["text"]:
                assert self.printed is not None, "nothing above it was run: text recorded, formula or diagram"
                assert missing(text, self.printed) == []
            case ["text", "recorded"]:
                source = " ".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
                known = set(re.findall(r"[a-z_]+", source))
                assert set(re.findall(r"(?<![\w/.-])[a-z_]{4,}(?![\w/-])", text)) <= known
            case ["text", "formula" | "diagram"]:
                assert not re.search(r"^ *(\$|slmserve|pytest|pip|tox|python) .*--", text, re.MULTILINE)
            case ["yaml"]:
                check_workflow(yaml.load(text, yaml.BaseLoader))
            case ["toml"]:
                settings = tomllib.loads(text)["tool"]["pytest"]["ini_options"]
                assert set(settings) <= {opt.key for opt in OPTS}
                read_options({}, settings, {})
            case ["json", file] | ["text", "file", file] if "." in file:
                path = self.pytester.path / file
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
            case ["json", kind]:
                path = self.pytester.path / "block.json"
                path.write_text(text)
                assert read_waivers(path) if kind == "waivers" else isinstance(json.loads(text), dict)
            case ["{toctree}"]:
                pages = re.findall(r"^(?:.*<)?([\w-]+)>?$", text, re.MULTILINE)
                assert pages and [page for page in pages if not (DOCS / f"{page}.md").is_file()] == []
            case ["{eval-rst}"]:
                for name in re.findall(r"^\.\. auto\w+:: (?:pytest_slmserve\.)?(\S+)$", text, re.MULTILINE):
                    pkgutil.resolve_name(f"pytest_slmserve.{name}")
            case _:
                pytest.fail(f"a block of no kind that is known: {' '.join(words)}")

    def example(self, text: str) -> None:
        self.pytester.makepyfile(example=text)
        wanted = len(re.findall(r"^def test_", text, re.MULTILINE))
        assert wanted
        result = self.pytester.runpytest_inprocess("--slm-simulate", *NOT_KEPT, "example.py")
        result.assert_outcomes(passed=wanted)
        self.printed = result.stdout.str()
        self.pytester.runpytest_inprocess(*NOT_KEPT, "example.py").assert_outcomes(skipped=wanted)

    def commands(self, text: str, ends: Sequence[int] = ()) -> None:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        for line in text.replace("\\\n", " ").splitlines():
            status = re.search(r"# (\d+)$", line)
            for command in commands_of(line):
                self.command(command, [int(status[1])] if status else ends or [0, 1, 10])

    def command(self, command: Sequence[str], status: Sequence[int]) -> None:
        """Runs it, or parses it, or fails where no rule knows it."""
        self.printed = None
        match [command[0].rpartition("/bin/")[2], *command[1:]]:
            case ["slmserve", name, *arguments] if name in OFFLINE and (
                "--quick" not in arguments or "--slm-simulate" in arguments
            ):
                self.capfd.readouterr()
                paths = [sorted(map(str, Path().glob(word))) if "*" in word else [word] for word in arguments]
                assert main([name, *chain(*paths)]) in status
                self.printed, errors = self.capfd.readouterr()
                assert "error:" not in errors
            case ["slmserve", name, *arguments]:
                assert parser(name).parse_args([name, *arguments]).carry_out
            case ["pytest", *arguments] if "--slm-simulate" in arguments:
                result = self.pytester.runpytest_inprocess(*NOT_KEPT, *arguments)
                assert result.ret in status
                self.printed = result.stdout.str()
            case ["pytest", *arguments]:
                config = self.pytester.parseconfig(*arguments)
                given = {opt.name: config.getoption(opt.key) for opt in OPTS if not opt.ini_only}
                read_options(given, {opt.key: config.getini(opt.key) for opt in OPTS if opt.ini_only}, {})
                assert [word for word in config.args if not Path(path_of(word)).exists()] == []
            case ["tox", "-e", name, *_]:
                assert re.search(rf"^ +{name}: |^\[testenv:{name}\]", (CHECKOUT / "tox.ini").read_text(), re.MULTILINE)
            case ["pip", "install", *packages]:
                extras = re.findall(r"\[(\w+)\]", " ".join(packages))
                known = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                assert packages and set(extras) <= set(known)
            case ["python" | "python3", "-m", "venv", _] | ["pre-commit", "install"]:
                pass
            case ["python", script, *arguments]:
                source = (CHECKOUT / script).read_text() + (CHECKOUT / "studies" / "common.py").read_text()
                assert [word for word in arguments if word.startswith("--") and f'"{word}"' not in source] == []
            case ["cd", path]:
                assert path == "pytest-slmserve" or (CHECKOUT / path).is_dir()
            case [program, *_] if program in OTHERS:
                pass
            case _:
                pytest.fail(f"a command that no rule knows: {command}")


def commands_of(line: str) -> Iterator[list[str]]:
    """Words of each command in a line of the shell; a substitution is one file, and a loop is what it repeats."""
    words = shlex.shlex(re.sub(r"\$\([^)]*\)", "records.jsonl.gz", line), posix=True, punctuation_chars=";&|")
    words.commenters, words.whitespace_split = "#", True
    for ends, each in groupby(words, lambda word: set(word) <= set(";&|")):
        command = [*dropwhile(lambda word: word == "do" or re.match(r"\w+=", word), each)]
        if not ends and command and command[0] not in ("for", "done"):
            yield command


def missing(shown: str, printed: str) -> list[str]:
    """Lines shown that were not printed in this order: the words of each are among those of a printed line (or of that
    and the next two, if the terminal was too narrow for it), in their order."""
    lines, at, lost = [words(line) for line in printed.splitlines()], 0, []
    for line in shown.splitlines():
        wanted = words(line)
        for i in range(at, len(lines)):
            near = iter([word for three in lines[i : i + 3] for word in three])
            if set(wanted[:1]) <= set(lines[i]) and all(word in near for word in wanted):
                at = i
                break
        else:
            lost.append(line)
    return lost


def words(line: str) -> list[str]:
    """Words of a line, but for rules of tables and what says that something is left out."""
    return [word for word in line.replace("...", " ").split() if not re.fullmatch(r"-{3,}", word)]


def check_workflow(workflow: Any) -> None:
    """Each use of our own workflow or action: there, with inputs that it has, all that it requires, and its outputs."""
    steps = [step for job in workflow["jobs"].values() for step in (job, *job.get("steps", ()))]
    ours = [step for step in steps if "/pytest-slmserve/" in step.get("uses", "")]
    assert ours
    for step in ours:
        path = CHECKOUT / step["uses"].partition("/pytest-slmserve/")[2].partition("@")[0]
        called = read_yaml(path / "action.yml" if path.is_dir() else path)
        inputs = called.get("inputs") or called["on"]["workflow_call"]["inputs"]
        required = {name for name, each in inputs.items() if str(each.get("required")).lower() == "true"}
        assert required <= set(step["with"]) <= set(inputs)
        for output in re.findall(rf"steps\.{step.get('id')}\.outputs\.(\w+)", str(workflow)):
            assert output in called["outputs"]


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Pairs of the words that begin a block and its text. Indented are those before the first fence of the README."""
    indented = re.findall(r"\n\n((?: {4,}\S.*\n)+)", unfenced(page))
    return [*(("sh", dedent(text)) for text in indented), *fences(page)]


BLOCKS = {name: found for name, page in ALL_PAGES.items() if (found := blocks_of(page.read_text("utf-8")))}


@pytest.fixture
def desk(folder, pytester, capfd) -> Desk:
    return Desk(pytester, capfd)


@pytest.mark.parametrize("name", BLOCKS)
def test_page_blocks_are_true(name: str, desk: Desk) -> None:
    text = ALL_PAGES[name].read_text("utf-8")
    assert len(re.findall(r"^ *(?:```|~~~|:::)", text, re.MULTILINE)) == 2 * len(fences(text)) and len(BLOCKS) > 10
    for kind, block in BLOCKS[name]:
        desk.block(kind.split(), block)


def test_unprinted_page_text_is_found() -> None:
    printed = "rency  tokens/s  95%\n-----  -------\n    1    501.6\n   16    5,581\ninconclusive: a\n  long line\n"
    assert missing("rency  95%\n---\n16  5,581\n...\ninconclusive: a long line", printed) == []
    assert missing("16  5,580", printed) == ["16  5,580"]
    assert missing("16  5,581\n 1  501.6", printed) == [" 1  501.6"]


@pytest.mark.parametrize(("kind", "text", "said"), [
    ("rust", "fn main() {}", "no kind that is known: rust"),
    ("sh", "slmserve report --no-such-option", "assert 4 in"),
    ("sh", "slmserve no-such-command", "invalid choice"),
    ("sh", "pytest --slm-gpu --slm-window=soon", "'soon' is not a positive number"),
    ("sh", "pytest --slm-gpu benchmarks/test_nothing.py", "test_nothing.py"),
    ("sh", "tox -e nothing", "nothing: "),
    ("sh", "pip install 'pytest-slmserve[nothing]'", "'nothing'"),
    ("sh", "python studies/pack.py --nothing", "'--nothing'"),
    ("sh", "rm -r folder", "no rule knows"),
    ("sh", "pytest --slm-gpu &&", "'bash', '-n'"),
    ("console", "$ slmserve measure --endpoint http://x --model y\nnothing was run\n", "cannot be run here"),
    ("text recorded", "a sentence of flibbertigibbets", "flibbertigibbets"),
    ("python", "import pytest_slmserve\npytest_slmserve.Nothing", "no attribute 'Nothing'"),
    ("yaml", "jobs: {a: {uses: A/pytest-slmserve/.github/actions/gate@B, with: {baseline: 1}}}", "'candidate'"),
    ("toml", "[tool.pytest.ini_options]\nslm_nothing = 1", "slm_nothing"),
    ("json waivers", "[{}]", "has no endpoint"),
    ("{toctree}", "nothing", "'nothing'"),
    ("{eval-rst}", ".. autoclass:: Nothing", "Nothing"),
])  # fmt: skip
def test_wrong_block_is_found(kind: str, text: str, said: str, desk: Desk) -> None:
    with pytest.raises(BaseException, match=said):  # pytest's own failures are no Exception
        desk.block(kind.split(), text)


def test_every_example_has_its_command(folder: Path, desk: Desk) -> None:
    page = (folder / "README.md").read_text("utf-8")
    commands = " ".join(re.findall(r"^((?:pytest|slmserve) .+?) +# \d+$", page, re.MULTILINE)).split()
    files = {path.name for path in folder.glob("test_*.py")}
    assert len(files) >= 4 and files == files & set(commands) == set(re.findall(r"\]\((test_\w+\.py)\)", page))
    desk.pytester.runpytest_inprocess(*NOT_KEPT, *files).assert_outcomes(skipped=6)
