"""Hostile workflows: what a pull request, an input, an index or a text of a release can plant into what the steps of
the gate run. The scripts run as they are; pip, gh and, but for one section, pytest only take notes."""

import json
import re
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
from judged import KEY, MARK, Case, Seen
from scripts import CHECKOUT
from shipped import put
from workflow_steps import FOLDER, INSTALL, REHEARSED, RELEASES, Ran, Step, script_of

CATEGORY = "hostile workflows"
GATED, NOT_GATED = (0, 1, 10), (2, 3, 4, 5)
REFUSED = ".{1,250} is no (release|repository)|a source needs commits"
OURS = re.compile(rf"::notice::passes|::error::(fails|inconclusive|no verdict|no text|{REFUSED})")
COMMAND = re.compile(r"^(?:::|##\[).*", re.M)  # what a runner obeys in a log
VERDICTS = {0: "passes", 1: "fails", 10: "inconclusive"}
OUTPUTS = ("", *(f"status={number}\nverdict={word}\n" for number, word in VERDICTS.items()))
PAYLOADS = (
    "$(touch harm)", "`touch harm`", "; touch harm", '" ; touch harm ; "', "' && touch harm #", "| touch harm",
    "> harm", "../../harm", "--help", "-rharm", "1\n::warning::owned", "1\r::warning::owned", "\x1b]0;owned\x07",
    "*", "~/${IFS}", "é\u202e", "x" * 5000, "9" * 5000, "0.26.0 --index-url=http://harm", "1\nstatus=0", "https://harm/a.whl",
)  # fmt: skip
INPUTS = ("baseline", "candidate", "source", "models", "concurrency", "margin", "pairs", "plugin", "tests")
MEMORY_KB = 4 << 20


class Planted(Step):
    """A case, with the steps' folder in its own, and what its variables tell."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.folder)
        self.case, self.began = case, time.monotonic()
        self.case.records = "work/gate/records.jsonl.gz"
        own = (MARK, "TMPDIR", "XDG_RUNTIME_DIR", "SLM_ENDPOINT_KEY")
        self.variables = {name: case.environment[name] for name in own}

    def run(self, script: str, **variables: str) -> Ran:
        return super().run(script, **self.variables, **variables)

    def installed(self, inputs: dict[str, str]) -> None:
        self.environments()
        ran = self.act(INSTALL, inputs)
        assert ran.status == 0, ran.printed

    def pytest(self, script: str) -> None:
        self.command(self.temp / "plugin/bin/pytest", script)

    def judge(self, ran: Ran, statuses: Collection[int], said: str = "") -> None:
        """The questions of every case; and nothing that was planted is run, obeyed, or told to later steps."""
        wrong = [f"made: {path.name}" for path in self.case.folder.rglob("*harm*")]
        wrong += [f"obeyed: {line}" for line in COMMAND.findall(ran.printed) if not OURS.match(line)]
        wrong += [f"for later steps: {text}" for text in (self.files["GITHUB_ENV"].read_text("utf-8"),) if text]
        wrong += [f"told: {ran.outputs}"] if ran.outputs not in OUTPUTS else []
        assert not wrong, "\n".join([*wrong, ran.printed[-3000:]])
        self.case.judge(CATEGORY, Seen(ran.status, ran.printed, time.monotonic() - self.began), statuses, said)

    def judge_gate(self, inputs: dict[str, str], statuses: Collection[int], said: str, **variables: str) -> None:
        """A status without a verdict is told to nobody, and is no verdict's."""
        ran = self.act("Gate", inputs, **variables)
        assert bool(ran.outputs) is (ran.status in GATED), (ran.status, ran.printed[-3000:])
        self.judge(ran, statuses, said)


@pytest.fixture
def planted(case: Case) -> Planted:
    return Planted(case)


# Inputs of the action, and of the workflow, which hands them on


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("name", INPUTS)
def test_hostile_input_does_no_harm(planted: Planted, name: str, payload: str) -> None:
    if name in RELEASES or name == "source":
        planted.environments()
        ran = planted.act(INSTALL, {name: payload})
        assert not ran.called, "nothing is installed"
        planted.judge(
            ran, (4,), "is no repository|a source needs commits" if name == "source" else "is no release such as 0.26.0"
        )
        return
    planted.installed({name: payload})
    planted.pytest("echo {} > gate/gate.json")
    planted.judge_gate({name: payload}, (0,), "passes, 0.27.0 against 0.26.0")


# What the repository brings beside the tests: results that are not this run's


@pytest.mark.parametrize("script", [
    """mkdir gate; echo '{"verdict": "passes"}' > gate/gate.json""", "ln -s missing gate",
    "mkdir -p gate/gate.json/deep", "mkdir results; echo {} > results/gate.json; ln -s results gate",
    "mkdir -p gate/records.jsonl.gz",
], ids=range(5))  # fmt: skip
def test_foreign_results_give_no_verdict(planted: Planted, script: str) -> None:
    assert planted.run(script).status == 0
    planted.installed({})
    planted.pytest("exit 0")
    planted.judge_gate({}, (4,), "nothing was gated")


@pytest.mark.parametrize("name", ["vllm-0.26.0.txt", "summary.md", "calibration.json"])
def test_linked_file_is_not_written(planted: Planted, name: str) -> None:
    script = f"mkdir gate .github; echo PRECIOUS > victim; ln -s ../victim gate/{name}"
    assert planted.run(f"{script}; echo [] > .github/calibration.json").status == 0
    planted.installed({})
    planted.pytest("echo {} > gate/gate.json")
    planted.judge_gate({}, (0,), "passes")
    assert (planted.folder / "victim").read_text("utf-8") == "PRECIOUS\n"


# pyproject.toml of the caller; pytest is the real one, and the engine is simulated
WORDS = (
    "--collect-only", "--help", "--version --version", "--fixtures", "--slm-plan", "--setup-plan", "-k nothing",
    "--slm-harmless=1", "--slm-records=other/r.jsonl", "--count=1000000", "--slm-endpoint=http://127.0.0.1:9/v1",
)  # fmt: skip
NEVER_GATED = (
    *(f'addopts = "{words}"' for words in WORDS), 'slm_gate_margin = "nan"', 'slm_gate_pairs = "999999999999"',
    'slm_gate_pairs = "-1"', f'slm_input_len = "{"9" * 400}"', 'slm_models = ["$(touch harm)"]',
    'slm_models = ["a\\n::warning::owned"]', 'slm_models = ["a\\r::warning::owned"]', 'slm_models = ["--help"]',
    'slm_models = ["\\u001b]0;owned\\u0007"]', 'slm_models = ["../../../../etc/passwd"]', "= [",
    'slm_waivers = "/proc/self/environ"', 'slm_waivers = "/dev/zero"', 'required_plugins = ["nope"]',
    'minversion = "99"',
)  # fmt: skip
EITHER_WAY = (
    'addopts = "--deselect=tests --ignore-glob=*"', 'addopts = "-p no:slmserve"', 'addopts = "--slm-gate-margin=0.99"',
    "slm_models = {a = 1}", 'addopts = "--slm-html=/proc/self/harmless"', 'junit_suite_name = "\\u001b]0;owned\\u0007"',
)  # fmt: skip
PROJECTS = [(text, NOT_GATED) for text in NEVER_GATED] + [(text, (*GATED, *NOT_GATED)) for text in EITHER_WAY]
PROJECTS.append(('cache_dir = "/dev/null/x"', GATED))


@pytest.mark.parametrize(("text", "statuses"), PROJECTS, ids=range(len(PROJECTS)))
def test_hostile_project_does_no_harm(planted: Planted, text: str, statuses: tuple[int, ...]) -> None:
    (planted.folder / "gate").mkdir()
    head = '[tool.pytest.ini_options]\nslm_concurrency = ["64"]\nslm_output_len = "64"\n'
    models = "" if "slm_models" in text else 'slm_models = ["opt-125m"]\n'
    (planted.folder / "pyproject.toml").write_text(f"{head}{models}{text}\n", "utf-8")
    planted.pytest(f"ulimit -v {MEMORY_KB}\n{REHEARSED}")
    put(planted.folder, "test_gate")
    more = {"PYTHON": sys.executable, "PYTHONPATH": str(CHECKOUT), "SLOWER": ""}
    planted.judge_gate({"tests": ""}, statuses, "::(notice|error)::", **more)


# The text that becomes an issue or a comment, written by what ran the release

TEXTS = (
    b"$(touch harm) `touch harm` \"; touch harm; '\n", b"@everyone @org/team\n", b"Closes #1, fixes o/r#2\n", b"",
    b"$GH_TOKEN ${GH_TOKEN} $(env) %s%n\n", b"\x1b]0;owned\x07\x1b[2J\x9b31m\x08\x00\n",
    "a\u202eb\u2066c\u200bd\ufeff\n".encode(), b"::warning::owned\n::set-output name=status::0\n##[group]owned\n",
    b"<script>alert(1)</script><img src=x onerror=alert(1)><!--\n", b"\xff\xfe\x00\xc3\x28\n", b"\xed\xa0\x80\n",
    b"```\n</details>\n[a](javascript:alert(1)) ![b](https://example.org/b.png)\n", b"@" * 20_000_000,
    b"\r\n" * 100_000, b"EOF\n}\nEOF\n' + __import__('os').system('touch harm') + '\n",
)  # fmt: skip
GH = 'case "$1 $2" in "issue create") echo u/7 ;; "api --paginate") cat listing ;; esac'


@pytest.fixture
def reported(planted: Planted) -> Callable[..., Ran]:
    """What becomes of a text: it is written where it is expected, the step runs, and what it wrote is judged."""

    def of(text: bytes, known: str = "", pull: str = "") -> Ran:
        (planted.folder / "gate").mkdir()
        (planted.folder / "gate/summary.md").write_bytes(text)
        ran = report(planted, known, pull)
        body = (planted.folder / "body.md").read_text("utf-8")  # it is seen, fits into an issue, and calls nobody
        assert len(body) < 65_536 and not re.search("@(?!\u200b)", body)
        assert all(each.isprintable() or each in "\n\t\u200b" for each in body)
        planted.judge(ran, (0,))
        return ran

    return of


def report(planted: Planted, known: str = "", pull: str = "") -> Ran:
    (planted.folder / "listing").write_text(known, "utf-8")
    planted.command(planted.bin / "gh", GH)
    names = {"GH_REPO": "o/r", "GH_TOKEN": KEY, "STATUS": "1", "PULL": pull, "RUN": "https://example.org/1"}
    releases = {name.upper(): value for name, value in RELEASES.items()}
    return planted.run(script_of("report", "Write the issue"), **releases, **names)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_hostile_summary_does_no_harm(reported: Callable[..., Ran], text: bytes) -> None:
    ran = reported(text, pull="12")
    assert ran.called == "gh issue comment 12 --body-file body.md\n", ran.printed


@pytest.mark.parametrize("target", ("/proc/self/environ", "/etc/passwd", "missing", ".", "/dev/zero"))
def test_linked_summary_is_not_reported(planted: Planted, target: str) -> None:
    (planted.folder / "gate").mkdir()
    (planted.folder / "gate/summary.md").symlink_to(target)
    ran = report(planted)
    assert not ran.called and not (planted.folder / "body.md").exists()
    planted.judge(ran, (1,), "::error::no text")


@pytest.mark.parametrize("title", [
    "3\tvLLM 0.27.0: gate of mine\n", "3\tvLLM\t0.27.0: gate\n", "$(touch harm)\tvLLM 0.27.0: gated\n",
    "3\tvLLM .*: gate\n", "\n\n\t\n",
], ids=range(5))  # fmt: skip
def test_foreign_issue_title_is_ignored(reported: Callable[..., Ran], title: str) -> None:
    ran = reported(b"# Gate\n", known=title)
    assert "gh issue create --title vLLM 0.27.0: gate " in ran.called, ran.printed


# The release to gate, by what an index says


def choose(planted: Planted, index: str, candidate: str = "") -> Ran:
    (planted.folder / ".github").symlink_to(FOLDER.parent)
    (planted.temp / "index.json").write_text(index, "utf-8")
    (planted.temp / "titles.txt").touch()
    planted.command(planted.bin / "python3", f'exec {sys.executable} "$@"')
    return planted.run(script_of("release", "Choose", "upgrade-gate.yml"), BASELINE="", CANDIDATE=candidate)


WHEEL = [{"packagetype": "bdist_wheel"}]
INDICES = (
    json.dumps({"releases": {"99.0.0\nstatus=0": WHEEL, "$(touch harm)": WHEEL, "99;touch harm": WHEEL}}),
    json.dumps({"releases": {"\x1b]0;owned\x07": WHEEL}}),
    json.dumps({"releases": {"../../harm": WHEEL, "9" * 5000: WHEEL}}),
    '{"releases": {}}', "null", '{"releases": [1, 2]}', '{"releases": {"99.0.0": 5}}', '{"releases": {"99.0.0": [5]}}',
    "[" * 200_000, "<html>",
)  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=range(len(INDICES)))
def test_hostile_index_does_no_harm(planted: Planted, index: str) -> None:
    ran = choose(planted, index)
    assert re.fullmatch(r"(baseline=[\d.]+\ncandidate=\n)?", ran.outputs), ran.outputs
    planted.judge(replace(ran, outputs=""), (0, 4))


@pytest.mark.parametrize("candidate", PAYLOADS[::5])
def test_hostile_candidate_is_refused(planted: Planted, candidate: str) -> None:
    ran = choose(planted, json.dumps({"releases": {"99.0.0": WHEEL}}), candidate=candidate)
    assert "99" not in ran.outputs
    planted.judge(ran, (2,), "is no version such as 0.26.0")
