"""Hostile workflows: what a pull request, an input, an index or a text of a release can plant into what the steps of
the gate run. The scripts run as they are; pip, gh and, but for one section, pytest only take notes."""

import json
import re
import sys
import time
from collections.abc import Collection
from dataclasses import replace

import pytest
from judged import KEY, MARK, Case, Seen
from scripts import CHECKOUT
from shipped import put
from workflow_steps import FOLDER, INSTALL, REHEARSED, RELEASES, Ran, Step, script_of

CATEGORY = "hostile workflows"
GATED, NOT_GATED = (0, 1, 10), (2, 3, 4, 5)
OURS = re.compile(r"::notice::passes|::error::(fails|inconclusive|no verdict|no text|.{1,250} is no release)")
COMMAND = re.compile(r"^(?:::|##\[).*", re.M)  # what a runner obeys in a log
VERDICTS = {0: "passes", 1: "fails", 10: "inconclusive"}
OUTPUTS = ("", *(f"status={number}\nverdict={word}\n" for number, word in VERDICTS.items()))
PAYLOADS = (
    "$(touch harm)", "`touch harm`", "; touch harm", '" ; touch harm ; "', "' && touch harm #", "| touch harm",
    "> harm", "../../harm", "--help", "-rharm", "1\n::warning::owned", "1\r::warning::owned", "\x1b]0;owned\x07",
    "*", "~/${IFS}", "é\u202e", "x" * 5000, "9" * 5000, "0.26.0 --index-url=http://harm", "1\nstatus=0", "https://harm/a.whl",
)  # fmt: skip
INPUTS = ("baseline", "candidate", "models", "concurrency", "margin", "pairs", "plugin", "tests")
MEMORY_KB = 4 << 20


class Planted:
    """A case, with the steps' folder in its own, and what its variables tell."""

    def __init__(self, case: Case) -> None:
        self.case, self.step, self.began = case, Step(case.folder), time.monotonic()
        self.case.records = "work/gate/records.jsonl.gz"
        own = (MARK, "TMPDIR", "XDG_RUNTIME_DIR", "SLM_ENDPOINT_KEY")
        self.variables = {name: case.environment[name] for name in own}

    def judge(self, ran: Ran, statuses: Collection[int], said: str = "") -> None:
        """The questions of every case; and nothing that was planted is run, obeyed, or told to later steps."""
        wrong = [f"made: {path.name}" for path in self.case.folder.rglob("*harm*")]
        wrong += [f"obeyed: {line}" for line in COMMAND.findall(ran.printed) if not OURS.match(line)]
        wrong += [f"for later steps: {text}" for text in (self.step.files["GITHUB_ENV"].read_text("utf-8"),) if text]
        wrong += [f"told: {ran.outputs}"] if ran.outputs not in OUTPUTS else []
        assert not wrong, "\n".join([*wrong, ran.printed[-3000:]])
        self.case.judge(CATEGORY, Seen(ran.status, ran.printed, time.monotonic() - self.began), statuses, said)

    def judge_gate(self, ran: Ran, statuses: Collection[int], said: str = "") -> None:
        """A status without a verdict is told to nobody, and is no verdict's."""
        assert bool(ran.outputs) is (ran.status in GATED), (ran.status, ran.printed[-3000:])
        self.judge(ran, statuses, said)


@pytest.fixture
def planted(case: Case) -> Planted:
    return Planted(case)


# Inputs of the action, and of the workflow, which hands them on


def give(planted: Planted, name: str, payload: str) -> None:
    step = planted.step
    step.environments()
    ran = step.act(INSTALL, {name: payload}, **planted.variables)
    if name in RELEASES:
        assert not ran.called, "nothing is installed"
        planted.judge(ran, (4,), "is no release such as 0.26.0")
        return
    assert ran.status == 0, ran.printed
    step.command(step.temp / "plugin/bin/pytest", "echo {} > gate/gate.json")
    planted.judge_gate(step.act("Gate", {name: payload}, **planted.variables), (0,), "passes, 0.27.0 against 0.26.0")


ALL = [(name, payload) for name in INPUTS for payload in PAYLOADS]


@pytest.mark.parametrize(("name", "payload"), ALL)
def test_each_input(planted: Planted, name: str, payload: str) -> None:
    give(planted, name, payload)


# What the repository brings beside the tests: results that are not this run's


BROUGHT = {
    "gate.json": """mkdir gate; echo '{"verdict": "passes"}' > gate/gate.json""",
    "a link to results": "mkdir results; echo {} > results/gate.json; ln -s results gate",
    "a link to nowhere": "ln -s missing gate",
    "a folder in place of a file": "mkdir -p gate/gate.json/deep",
    "a folder in place of the records": "mkdir -p gate/records.jsonl.gz",
}


@pytest.mark.parametrize("name", BROUGHT)
def test_results_of_another_run_are_no_verdict(planted: Planted, name: str) -> None:
    step = planted.step
    assert step.run(BROUGHT[name]).status == 0
    step.environments()
    ran = step.act(INSTALL, {}, **planted.variables)
    assert ran.status == 0, ran.printed
    step.command(step.temp / "plugin/bin/pytest", "exit 0")
    planted.judge_gate(step.act("Gate", {}, **planted.variables), (4,), "nothing was gated")


# pyproject.toml of the caller; pytest is the real one, and the engine is simulated
PROJECTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "collects only": ('addopts = "--collect-only"', NOT_GATED),
    "helps": ('addopts = "--help"', NOT_GATED),
    "is a version": ('addopts = "--version --version"', NOT_GATED),
    "lists fixtures": ('addopts = "--fixtures"', NOT_GATED),
    "plans": ('addopts = "--slm-plan"', NOT_GATED),
    "sets up only": ('addopts = "--setup-plan"', NOT_GATED),
    "selects nothing": ('addopts = "-k nothing"', NOT_GATED),
    "deselects": ('addopts = "--deselect=tests --ignore-glob=*"', (*GATED, *NOT_GATED)),
    "has no plugin": ('addopts = "-p no:slmserve"', (*GATED, *NOT_GATED)),
    "is no option": ('addopts = "--slm-harmless=1"', NOT_GATED),
    "keeps records elsewhere": ('addopts = "--slm-records=other/r.jsonl"', NOT_GATED),
    "a margin of everything": ('addopts = "--slm-gate-margin=0.99"', (*GATED, *NOT_GATED)),
    "no number": ('slm_gate_margin = "nan"', NOT_GATED),
    "a large number": ('slm_gate_pairs = "999999999999"', NOT_GATED),
    "a small number": ('slm_gate_pairs = "-1"', NOT_GATED),
    "a long one": (f'slm_input_len = "{"9" * 400}"', NOT_GATED),
    "a model that runs": ('slm_models = ["$(touch harm)"]', NOT_GATED),
    "a model that obeys": ('slm_models = ["a\\n::warning::owned"]', NOT_GATED),
    "a model that returns": ('slm_models = ["a\\r::warning::owned"]', NOT_GATED),
    "a model with a terminal": ('slm_models = ["\\u001b]0;owned\\u0007"]', NOT_GATED),
    "a model that is a path": ('slm_models = ["../../../../etc/passwd"]', NOT_GATED),
    "a model that is an option": ('slm_models = ["--help"]', NOT_GATED),
    "a table in place of a model": ("slm_models = {a = 1}", (*GATED, *NOT_GATED)),
    "waivers of a process": ('slm_waivers = "/proc/self/environ"', NOT_GATED),
    "waivers without an end": ('slm_waivers = "/dev/zero"', NOT_GATED),
    "a page without a place": ('addopts = "--slm-html=/proc/self/harmless"', (*GATED, *NOT_GATED)),
    "a missing plugin": ('required_plugins = ["nope"]', NOT_GATED),
    "another pytest": ('minversion = "99"', NOT_GATED),
    "no TOML": ("= [", NOT_GATED),
    "junit with a terminal": ('junit_suite_name = "\\u001b]0;owned\\u0007"', (*GATED, *NOT_GATED)),
    "a cache without a place": ('cache_dir = "/dev/null/x"', GATED),
    "rounds": ('addopts = "--count=1000000"', NOT_GATED),
    "another mode": ('addopts = "--slm-endpoint=http://127.0.0.1:9/v1"', NOT_GATED),
}


def project(planted: Planted, name: str) -> None:
    step, (text, statuses) = planted.step, PROJECTS[name]
    (step.folder / "gate").mkdir()
    head = '[tool.pytest.ini_options]\nslm_concurrency = ["64"]\nslm_output_len = "64"\n'
    models = "" if "slm_models" in text else 'slm_models = ["opt-125m"]\n'
    (step.folder / "pyproject.toml").write_text(f"{head}{models}{text}\n", "utf-8")
    step.command(step.temp / "plugin/bin/pytest", f"ulimit -v {MEMORY_KB}\n{REHEARSED}")
    variables = {"PYTHON": sys.executable, "PYTHONPATH": str(CHECKOUT), "SLOWER": "", **planted.variables}
    put(step.folder, "test_gate")
    planted.judge_gate(step.act("Gate", {"tests": ""}, **variables), statuses, "::(notice|error)::")


@pytest.mark.parametrize("name", PROJECTS)
def test_each_project(planted: Planted, name: str) -> None:
    project(planted, name)


# The text that becomes an issue or a comment, written by what ran the release

TEXTS: dict[str, bytes] = {
    "runs": b"$(touch harm) `touch harm` \"; touch harm; '\n",
    "calls": b"@everyone @org/team\n",
    "asks for the token": b"$GH_TOKEN ${GH_TOKEN} $(env) %s%n\n",
    "terminal": b"\x1b]0;owned\x07\x1b[2J\x9b31m\x08\x00\n",
    "turns": "a\u202eb\u2066c\u200bd\ufeff\n".encode(),
    "commands": b"::warning::owned\n::set-output name=status::0\n##[group]owned\n",
    "html": b"<script>alert(1)</script><img src=x onerror=alert(1)><!--\n",
    "markdown": b"```\n</details>\n[a](javascript:alert(1)) ![b](https://example.org/b.png)\n",
    "closes": b"Closes #1, fixes o/r#2\n",
    "no text": b"\xff\xfe\x00\xc3\x28\n",
    "surrogates": b"\xed\xa0\x80\n",
    "long": b"@" * 20_000_000,
    "lines": b"\r\n" * 100_000,
    "empty": b"",
    "a heredoc": b"EOF\n}\nEOF\n' + __import__('os').system('touch harm') + '\n",
}
LINKS = ("/proc/self/environ", "/etc/passwd", "missing", ".", "/dev/zero")


def report(planted: Planted, known: str = "", pull: str = "") -> Ran:
    step = planted.step
    (step.folder / "listing").write_text(known, "utf-8")
    step.command(step.bin / "gh", 'case "$1 $2" in "issue create") echo u/7 ;; "api --paginate") cat listing ;; esac')
    names = {"GH_REPO": "o/r", "GH_TOKEN": KEY, "STATUS": "1", "PULL": pull, "RUN": "https://example.org/1"}
    return step.run(
        script_of("report", "Write the issue"),
        **{name.upper(): value for name, value in RELEASES.items()},
        **names,
        **planted.variables,
    )


def judge_body(planted: Planted, ran: Ran) -> None:
    """What is written is seen, fits into an issue, and calls nobody."""
    text = (planted.step.folder / "body.md").read_text("utf-8")
    assert len(text) < 65_536 and not re.search("@(?!\u200b)", text)
    assert all(each.isprintable() or each in "\n\t\u200b" for each in text)
    planted.judge(ran, (0,))


@pytest.mark.parametrize("name", TEXTS)
def test_each_text(planted: Planted, name: str) -> None:
    (planted.step.folder / "gate").mkdir()
    (planted.step.folder / "gate/summary.md").write_bytes(TEXTS[name])
    ran = report(planted, pull="12")
    assert ran.called == "gh issue comment 12 --body-file body.md\n", ran.printed
    judge_body(planted, ran)


@pytest.mark.parametrize("target", LINKS)
def test_each_link_in_place_of_the_text(planted: Planted, target: str) -> None:
    (planted.step.folder / "gate").mkdir()
    (planted.step.folder / "gate/summary.md").symlink_to(target)
    ran = report(planted)
    assert not ran.called and not (planted.step.folder / "body.md").exists()
    planted.judge(ran, (1,), "::error::no text")


TITLES = {
    "longer": "3\tvLLM 0.27.0: gate of mine\n",
    "in two columns": "3\tvLLM\t0.27.0: gate\n",
    "a command": "$(touch harm)\tvLLM 0.27.0: gated\n",
    "a pattern": "3\tvLLM .*: gate\n",
    "no number": "\n\n\t\n",
}


@pytest.mark.parametrize("name", TITLES)
def test_each_title_that_is_not_the_result_s(planted: Planted, name: str) -> None:
    (planted.step.folder / "gate").mkdir()
    (planted.step.folder / "gate/summary.md").write_text("# Gate\n", "utf-8")
    ran = report(planted, known=TITLES[name])
    assert "gh issue create --title vLLM 0.27.0: gate " in ran.called, ran.printed
    judge_body(planted, ran)


# The release to gate, by what an index says


def choose(planted: Planted, index: str, titles: str = "", candidate: str = "") -> Ran:
    step = planted.step
    (step.folder / ".github").symlink_to(FOLDER.parent)
    (step.temp / "index.json").write_text(index, "utf-8")
    (step.temp / "titles.txt").write_text(titles, "utf-8", errors="surrogateescape")
    step.command(step.bin / "python3", f'exec {sys.executable} "$@"')
    script = script_of("release", "Choose", "upgrade-gate.yml")
    return step.run(script, BASELINE="", CANDIDATE=candidate, **planted.variables)


WHEEL = [{"packagetype": "bdist_wheel"}]
INDICES = {
    "a command": json.dumps({"releases": {"99.0.0\nstatus=0": WHEEL, "$(touch harm)": WHEEL, "99;touch harm": WHEEL}}),
    "a terminal": json.dumps({"releases": {"\x1b]0;owned\x07": WHEEL}}),
    "a path": json.dumps({"releases": {"../../harm": WHEEL, "9" * 5000: WHEEL}}),
    "no releases": '{"releases": {}}',
    "null": "null",
    "a list": '{"releases": [1, 2]}',
    "files that are none": '{"releases": {"99.0.0": 5}}',
    "a file that is none": '{"releases": {"99.0.0": [5]}}',
    "deep": "[" * 200_000,
    "no JSON": "<html>",
}


@pytest.mark.parametrize("name", INDICES)
def test_each_index(planted: Planted, name: str) -> None:
    ran = choose(planted, INDICES[name])
    chosen = re.fullmatch(r"(baseline=[\d.]+\ncandidate=\n)?", ran.outputs)
    assert chosen, ran.outputs
    planted.judge(replace(ran, outputs=""), (0, 4))


@pytest.mark.parametrize("candidate", PAYLOADS[::5])
def test_some_candidates_by_name(planted: Planted, candidate: str) -> None:
    ran = choose(planted, json.dumps({"releases": {"99.0.0": WHEEL}}), candidate=candidate)
    assert "99" not in ran.outputs
    planted.judge(ran, (2,), "is no version such as 0.26.0")
