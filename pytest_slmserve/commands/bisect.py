"""`bisect` command: find the first slow release between a good and a slow one, by gates against the good one."""

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.compare.changes import side_words
from pytest_slmserve.analysis.gate.decision import suspects
from pytest_slmserve.analysis.verdict import State, all_of
from pytest_slmserve.archive.codec import converted
from pytest_slmserve.archive.store import read
from pytest_slmserve.commands import cli, plan, report
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.gate import FINAL, gate_facts, title
from pytest_slmserve.report.text_table import between, figure, hanging
from pytest_slmserve.schema.errors import UNUSABLE, BadUsage, read_json
from pytest_slmserve.schema.specs import short_hash

STATUS = (
    f"{cli.PASSES} the first slow release is named, or the last one is not slow; {cli.INCONCLUSIVE} several may be the "
    f"first; {cli.USAGE} wrong usage; {cli.INTERRUPTED} interrupted: run the same command again to continue."
)
NOTHING_SAID = (2, 3, 4, 5)  # exit statuses of pytest without an outcome for the release


@dataclass(frozen=True, slots=True)
class Release:
    """Release of vLLM.

    Attributes:
        python: its interpreter; "" means that of the options of pytest.
        env: environment variables of its side of the gate.
        engine_arg: engine arguments of its side of the gate.
    """

    release: str
    python: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    engine_arg: Mapping[str, Any] = field(default_factory=dict)


def add_bisect(commands: cli.Commands) -> None:
    command = cli.add_command(commands, "bisect", STATUS, run_bisect)
    command.add_argument("--good", metavar="RELEASE", required=True, help="a release that is fast enough")
    command.add_argument("--bad", metavar="RELEASE", required=True, help="a later release that is slow")
    rows = "JSON list of releases, in order: release, and optionally python, env, engine_arg (default: those of PyPI)"
    command.add_argument("--releases", metavar="FILE", type=Path, help=rows)
    where = (
        "path of the Python interpreter of each release, with {release} in it (default: install that vLLM in "
        "the folder)"
    )
    command.add_argument("--python", metavar="PATTERN", default="", help=where)
    folder = "folder of the results files, from which an interrupted bisection continues (default: .slm/bisect)"
    command.add_argument("--folder", metavar="PATH", type=Path, default=Path(".slm/bisect"), help=folder)
    cli.add_formats(command)
    options = (
        "required, after --: options for pytest, for example -- --slm-gpu --slm-models opt-1.3b, and paths "
        "of your tests"
    )
    command.add_argument("pytest", metavar="OPTION", nargs="*", help=options)


def run_bisect(given: argparse.Namespace) -> int:
    """Gate the slow release, then the middle of the suspects, until the first slow release is known."""
    releases = {each.release: each for each in releases_of(given)}
    told, outcomes, gates_found, wanted = dict[str, str](), dict[str, State](), list[dict[str, Any]](), given.bad
    while wanted is not None:
        cli.say(f"gating {wanted} against {given.good} ...", sys.stderr)
        found, note = gated(given, releases[given.good], releases[wanted])
        outcomes[wanted] = State.INCONCLUSIVE if note else all_of(each.outcome for each in found.gates)
        said = []  # the outcome of each model, and each endpoint that fails with its ratio and interval
        for each in found.gates:
            failing = [(one.name, one.ratio) for one in each.gated if one.outcome is State.FAILS and one.ratio]
            ratios = (f"{name} {figure(ratio.value, 4)} of the good one{between(ratio)}" for name, ratio in failing)
            said.append(", ".join([title(each), *ratios]))
        told[wanted] = f"{wanted}: {note or '; '.join(said)}"
        cli.say(hanging(told[wanted], 2), sys.stderr)
        gates_found.append({"release": wanted, "note": note, "gates": [gate_facts(e, found) for e in found.gates]})
        last = outcomes[given.bad]
        left, wanted = suspects([*releases], outcomes) if last is State.FAILS else ([], None)
    if left:
        answer = f"one of {', '.join(left)} is the first slow release: the gates between were inconclusive"
        answer = f"first slow release: {told[left[0]]}" if len(left) == 1 else answer
    else:
        known = "is not slower than" if last is State.PASSES else "cannot be told from"
        answer = f"nothing to find: {given.bad} {known} {given.good}: {told[given.bad]}"
    if given.json:
        cli.say(as_json({"good": given.good, "bad": given.bad, "suspects": left, "gates": gates_found}))
    else:
        cli.say(hanging(answer, 2))
    return cli.PASSES if len(left) == 1 or last is State.PASSES else cli.INCONCLUSIVE


def gated(given: argparse.Namespace, good: Release, candidate: Release) -> tuple[Findings, str]:
    """Run the gates of a release with pytest, and return one for each model, and the reason if there is no outcome.

    Raises:
        KeyboardInterrupt: if pytest was interrupted.
    """
    words = [*side_options(given, good, "baseline"), *side_options(given, candidate, "candidate")]
    words += plan.with_tests(given.pytest)
    place = given.folder / candidate.release / short_hash(words)  # another gate does not continue this one
    records, log = place / "records.jsonl", place / "pytest.txt"
    words = ["--slm-gate", f"--slm-records={records}", *(["--slm-resume"] if records.exists() else []), *words]
    status, told, _ = plan.run_pytest(words, log, "Choose another folder with --folder.")
    found = Findings()
    if records.exists():
        contents = read(records)
        last = {each.model: each for each in report.gates_of([(records, contents)])[0]}
        commands = report.gate_commands(contents)
        found = Findings(gates=[*last.values()], archives=[str(records)], gate_commands=commands, bisects=True)
    if found.gates and status not in NOTHING_SAID:
        return found, ""
    note = f"pytest ended with {status}: {told}"
    if candidate.release == given.bad:
        raise BadUsage(f"{candidate.release} cannot be gated: {note}", f"Read {log}.")
    return found, note


def releases_of(given: argparse.Namespace) -> list[Release]:
    """Return the releases from the good to the slow one, from the file or else the final releases that pip lists."""
    if given.releases is None:
        if "--slm-simulate" in given.pytest:  # before 9 GB are installed for each release
            raise BadUsage(
                "the simulated engine is of no release of vLLM",
                "Run with --slm-gpu, or name simulated releases with --releases FILE.",
            )
        if not plan.has_mode(given.pytest):
            why = "no option says on which engine to gate, and every release would be installed first"
            raise BadUsage(why, f"slmserve bisect --good {given.good} --bad {given.bad} -- --slm-gpu")
        pip = [sys.executable, "-m", "pip", "index", "versions", "vllm"]
        told = subprocess.run(pip, capture_output=True, text=True, check=False)
        listed = re.search(r"Available versions: (.*)", told.stdout)
        if listed is None:
            raise BadUsage(f"pip lists no releases of vLLM ({told.stderr.strip()[:200]})", "--releases FILE")
        final = [name for name in listed[1].split(", ") if FINAL.fullmatch(name)]
        final.sort(key=lambda name: tuple(map(int, name.split("."))))
        releases = [Release(name, python_of(given, name)) for name in final]
    else:
        hint = 'Write a list such as [{"release": "0.24.0", "python": "/opt/vllm-0.24.0/bin/python"}, ...].'
        rows = read_json(given.releases, hint)
        try:
            made = [Release(**({"python": python_of(given, row["release"])} | row)) for row in rows]
            releases = [converted(Release, asdict(each)) for each in made]  # checks the types
        except UNUSABLE as error:
            why = f"{given.releases} is not a list of releases ({type(error).__name__}: {error})"
            raise BadUsage(why, hint) from None
    names = [each.release for each in releases]
    if missing := [name for name in (given.good, given.bad) if name not in names]:
        raise BadUsage(f"{missing[0]} is none of the releases", f"Use one of {', '.join(names[-12:])}.")
    first, last = names.index(given.good), names.index(given.bad)
    if first >= last or len(set(names)) < len(names):
        raise BadUsage(f"{given.bad} does not come after {given.good}", f"--good {given.bad} --bad {given.good}")
    return releases[first : last + 1]


def python_of(given: argparse.Namespace, release: str) -> str:
    """Return the interpreter of a release by the pattern of `--python`."""
    try:
        return str(given.python.format(release=release))
    except (LookupError, ValueError):
        why = f"--python {given.python} has more than {{release}} in braces"
        raise BadUsage(why, "Pass for example --python '/opt/vllm-{release}/bin/python'.") from None


def side_options(given: argparse.Namespace, release: Release, side: str) -> list[str]:
    """Return the options of pytest for one side of a gate, after installing the release if no interpreter is named."""
    python = release.python
    if python and not Path(python).exists():
        raise BadUsage(f"there is no interpreter {python}", "Pass --python with {release} in its path.")
    if not python and given.releases is None:
        place = given.folder / release.release / "venv"
        python = str(place.absolute() / "bin" / "python")
        if not (place / "installed").exists():
            cli.say(f"installing vLLM {release.release} into {place} ...", sys.stderr)
            pip = [python, "-m", "pip", "install", f"vllm=={release.release}"]
            for words in ([sys.executable, "-m", "venv", str(place)], pip):
                done = subprocess.run(words, capture_output=True, text=True, check=False)
                if done.returncode:
                    why = f"vLLM {release.release} cannot be installed: {done.stderr.strip()[-200:]}"
                    raise BadUsage(why, "Install it yourself, and name its interpreter with --python.")
            (place / "installed").touch()
    return side_words(side, python, release.env.items(), release.engine_arg.items())
