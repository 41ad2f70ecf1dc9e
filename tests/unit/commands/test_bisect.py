"""`bisect`: the first slow release is found by halving, or is among the suspects; which releases there are; and what
goes to pytest, and from it, for each."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import refusals as errors
from command_line import refused, said

from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.commands import bisect
from pytest_slmserve.commands.bisect import Release
from pytest_slmserve.commands.plan import SHIPPED
from pytest_slmserve.report.findings import Findings

PASSES, FAILS, UNSURE = State.PASSES, State.FAILS, State.INCONCLUSIVE
SIMULATED = ("--", "--slm-simulate", "--slm-models=opt-1.3b")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file of releases 1.0, 1.1 ..., each with these facts; returns the words of a command on all of them."""
    monkeypatch.chdir(tmp_path)

    def words(*facts):
        rows = [{"release": f"1.{i}", **each} for i, each in enumerate(facts)]
        Path("releases.json").write_text(json.dumps(rows), "utf-8")
        return ("bisect", "--good=1.0", f"--bad=1.{len(rows) - 1}", "--releases=releases.json")

    return words


@pytest.fixture
def search(write, monkeypatch, capsys):
    """Searches releases whose gates have these states; returns the exit status, the suspects and the releases gated."""
    monkeypatch.setattr(bisect, "title", lambda each: "opt-1.3b: gate")
    monkeypatch.setattr(bisect, "gate_facts", lambda each, found: {"outcome": each.outcome.value})

    def found(states, *words):
        def gated(given, good, candidate):
            assert good.release == "1.0"
            state = states[int(candidate.release.partition(".")[2]) - 1]
            if state is None:
                return Findings(), "it does not start"
            return Findings(gates=[SimpleNamespace(outcome=state, gated=[])]), ""

        monkeypatch.setattr(bisect, "gated", gated)
        seen = said(capsys, *write(*[{}] * (len(states) + 1)), "--json", *words)
        told = json.loads(seen.out)
        return seen.status, told["suspects"], [gate["release"] for gate in told["gates"]]

    return found


@pytest.mark.parametrize(("states", "status", "suspects", "gates"), [
    ([PASSES, FAILS], 0, ["1.2"], ["1.2", "1.1"]), ([FAILS, FAILS], 0, ["1.1"], ["1.2", "1.1"]),
    ([FAILS] * 9, 0, ["1.1"], ["1.9", "1.4", "1.2", "1.1"]), ([FAILS], 0, ["1.1"], ["1.1"]),
    ([UNSURE, FAILS], 10, ["1.1", "1.2"], ["1.2", "1.1"]), ([None, FAILS], 10, ["1.1", "1.2"], ["1.2", "1.1"]),
    ([FAILS, FAILS, PASSES], 0, [], ["1.3"]), ([FAILS, UNSURE], 10, [], ["1.2"]), ([FAILS, None], 10, [], ["1.2"]),
])  # fmt: skip
def test_halving_finds_first_slow_release(states, status, suspects, gates, search):
    """None: it cannot be gated. What halving finds, whatever lies between, is proved with the gate's decisions."""
    assert search(states) == (status, suspects, gates)


def test_answer_names_suspect_releases(search, write, monkeypatch, capsys):
    told = []
    for states in ([PASSES], [UNSURE], [UNSURE, UNSURE, FAILS]):
        search(states)
        told.append(said(capsys, *write(*[{}] * (len(states) + 1))).words)
    assert told[0] != told[1] and all("1.1" in text and "1.0" in text and "None" not in text for text in told[:2])
    assert "1.1, 1.2, 1.3" in told[2]
    ratios = {"throughput": (FAILS, 0.9), "latency": (PASSES, 1.01), "energy": (FAILS, None)}
    gated = [
        SimpleNamespace(name=name, outcome=state, ratio=ratio and Interval(ratio, ratio - 0.02, ratio + 0.02))
        for name, (state, ratio) in ratios.items()
    ]
    found = Findings(gates=[SimpleNamespace(outcome=FAILS, gated=gated)])
    monkeypatch.setattr(bisect, "gated", lambda *_: (found, ""))
    seen = said(capsys, *write({}, {}))
    assert seen.status == 0 and "1.1: opt-1.3b: gate, throughput 0.9" in seen.words and "0.88" in seen.words
    assert "latency" not in seen.words and "energy" not in seen.words and "gating 1.1 against 1.0" in seen.err


def listed(monkeypatch, stdout, stderr=""):
    monkeypatch.setattr(bisect.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=stdout, stderr=stderr))


def test_index_lists_final_releases(monkeypatch, tmp_path):
    listed(monkeypatch, "vllm (0.26.0)\nAvailable versions: 0.26.0, 0.25.1, 0.25.0rc1, 0.9.2, 0.10.0, 0.26.0.post1\n")
    asked = {"releases": None, "pytest": ["--slm-gpu"], "good": "0.9.2", "bad": "0.26.0"}
    found = bisect.releases_of(SimpleNamespace(**asked, python="/v/{release}/python"))
    assert found == [Release(name, f"/v/{name}/python") for name in ("0.9.2", "0.10.0", "0.25.1", "0.26.0")]
    commands = []
    done = SimpleNamespace(returncode=0, stderr="")
    monkeypatch.setattr(bisect.subprocess, "run", lambda words, **_: commands.append(words) or done)
    given, place = SimpleNamespace(folder=tmp_path, releases=None), tmp_path / "0.26.0/venv"
    place.mkdir(parents=True)
    wanted = [f"--slm-side=baseline:python={place / 'bin/python'}"]
    for _ in range(2):
        assert bisect.side_options(given, Release("0.26.0"), "baseline") == wanted
    pip = [str(place / "bin/python"), "-m", "pip", "install", "vllm==0.26.0"]
    assert commands == [[sys.executable, "-m", "venv", str(place)], pip]
    given.releases = Path("releases.json")
    assert bisect.side_options(given, Release("0.26.0"), "baseline") == []
    given.releases, done.returncode, done.stderr = None, 1, "ERROR: no matching distribution"
    with errors.refused("0.27.0", "no matching distribution", hint="--python"):
        bisect.side_options(given, Release("0.27.0"), "candidate")


@pytest.mark.parametrize(("words", "facts"), [
    ("--good=0.8 --bad=0.26.0 -- --slm-gpu", ["0.8", "0.25.1, 0.26.0"]),
    ("--good=0.26.0 --bad=0.25.1 -- --slm-gpu", ["--good 0.25.1 --bad 0.26.0"]),
    ("--good=0.25.1 --bad=0.25.1 -- --slm-gpu", ["0.25.1"]), ("--good=0.25.1 --bad=0.26.0", ["-- --slm-gpu"]),
    ("--good=0.25.1 --bad=0.26.0 -- --slm-simulate", ["--slm-gpu", "--releases"]), ("--bad=0.26.0", ["--good"]),
])  # fmt: skip
def test_unsearchable_releases_are_refused(words, facts, monkeypatch, capsys):
    listed(monkeypatch, "Available versions: 0.26.0, 0.25.1\n")
    for mode in ("SLM_GPU", "SLM_CPU", "SLM_SIMULATE"):
        monkeypatch.delenv(mode, raising=False)
    refused(said(capsys, "bisect", *words.split()), *facts)
    listed(monkeypatch, "", "ERROR: no network")
    monkeypatch.setenv("SLM_GPU", "1")  # a mode of the environment counts
    refused(said(capsys, "bisect", "--good=0.25.1", "--bad=0.26.0"), "no network", "--releases")


TWO = '[{"release": "1.0"}, {"release": "1.1"}]'


@pytest.mark.parametrize(("text", "words", "facts"), [
    *((text, (), ["releases.json"]) for text in (
        '[{"name": "1.0"}]', "{", "[1]", '[{"release": "1", "a": "b"}]', '[{"release": 1}]',
        '[{"release": "1", "env": ["a"]}]', '[{"release": "1", "engine_arg": "a"}]',
        '[{"release": "1", "env": {"a": 1}}]', '[{"release": "1", "env": "A=b"}]',
    )),
    (TWO, ("--python=/{rel}/python",), ["/{rel}/python", "{release}"]), (TWO, ("--python={",), ["{release}"]),
    ('[{"release": "1.0"}, {"release": "1.0"}, {"release": "1.1"}]', (), ["1.1"]),
    (TWO, ("--bad=9",), ["9", "1.0, 1.1"]), (TWO, ("--good=1.1", "--bad=1.0"), ["--good 1.0 --bad 1.1"]),
    (TWO, ("--python=/nowhere/{release}/python",), ["/nowhere/1.0/python"]),
])  # fmt: skip
def test_unusable_release_file_is_refused(text, words, facts, write, capsys):
    usual = write({}, {})
    Path("releases.json").write_text(text, "utf-8")
    refused(said(capsys, *usual, *words, *SIMULATED), *facts)


@pytest.fixture
def pytest_run(monkeypatch):
    """pytest ends and prints so; the words of each run are kept."""

    def run(command, stdout, stderr, check):
        assert stderr == bisect.subprocess.STDOUT and not check
        does.commands.append(command)
        stdout.write(does.printed)
        return SimpleNamespace(returncode=does.status)

    does = SimpleNamespace(commands=[], status=2, printed="")
    monkeypatch.setattr(bisect.subprocess, "run", run)
    return does


def records_of(command, release="1.1"):
    """The results file that pytest was told, in the folder of the release."""
    [records] = [Path(word.partition("=")[2]) for word in command if word.startswith("--slm-records=")]
    assert records.parts[:3] == (".slm", "bisect", release)
    return records


@pytest.mark.parametrize(("words", "given", "tests"), [
    ([], [], SHIPPED), (["--pyargs", "my.tests"], ["--pyargs", "my.tests"], ()),
    (["--slm-python", "releases.json"], ["--slm-python=releases.json"], SHIPPED),
])  # fmt: skip
def test_gate_gets_both_sides(words, given, tests, write, pytest_run, capsys):
    python = {"python": sys.executable, "env": {"A": "b c"}, "engine_arg": {"slowdown": 0.1, "name": "x"}}
    asked = write({}, python)
    with pytest.raises(KeyboardInterrupt):
        said(capsys, *asked, *SIMULATED, *words)
    facts = (f"python={sys.executable}", "env=A=b c", "arg=slowdown=0.1", 'arg=name="x"')
    records = records_of(pytest_run.commands[0])
    sides = [f"--slm-records={records}", *(f"--slm-side=candidate:{fact}" for fact in facts)]
    expected = [sys.executable, "-m", "pytest", "--slm-gate", *sides, *SIMULATED[1:], *given, *tests]
    assert pytest_run.commands == [expected]
    records.touch()
    for env in (python["env"], {"A": "c"}):
        with pytest.raises(KeyboardInterrupt):
            said(capsys, *write({}, {**python, "env": env}), *SIMULATED, *words)
    assert ["--slm-resume" in command for command in pytest_run.commands] == [False, True, False]
    assert records_of(pytest_run.commands[2]) != records, "of other sides"


@pytest.mark.parametrize(("printed", "told"), [
    ("a\nERROR: no GPU here\nlast\n", "ERROR: no GPU here"), ("a\n\nlast\n\n", "last"), ("", "nothing"),
])  # fmt: skip
def test_ungateable_release_quotes_pytest(printed, told, write, pytest_run, capsys):
    vars(pytest_run).update(status=4, printed=printed)
    seen = said(capsys, *write({}, {}), *SIMULATED)
    assert seen.status == 4 and told in seen.err
    assert str(records_of(pytest_run.commands[0]).with_name("pytest.txt")) in seen.err


@pytest.mark.parametrize("status", [0, 1, 3, 4, 5, 10])
def test_release_counts_by_its_gates(status, write, pytest_run, monkeypatch):
    assert write({}, {}, {})
    pytest_run.status = status
    abandoned, last = SimpleNamespace(model="m", number=1), SimpleNamespace(model="m", number=2)
    monkeypatch.setattr(bisect.report, "gates_of", lambda archives: ([abandoned, last], []))
    given = SimpleNamespace(folder=Path(".slm/bisect"), releases=Path("releases.json"), pytest=[], bad="1.2")
    assert not bisect.gated(given, Release("1.0"), Release("1.1"))[0].gates, "pytest wrote no results file"
    records_of(pytest_run.commands[0]).touch()
    found, note = bisect.gated(given, Release("1.0"), Release("1.1"))
    assert (found.gates, bool(note)) == ([last], status in (3, 4, 5))
