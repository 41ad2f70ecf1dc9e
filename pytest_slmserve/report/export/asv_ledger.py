"""The ledger: a git repository whose commits are the releases of vLLM, so that the x axis of asv's page is the release.

A commit and a lightweight tag for each row of a list of releases; author and dates are fixed, so the hashes are the
same on every machine. Each hash depends on all rows before it, and results are filed under hashes: rows are only ever
added at the end. Needs git 2.29 or newer.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from pytest_slmserve.report.export.asv import Commit
from pytest_slmserve.schema.errors import BadUsage

BRANCH = "refs/heads/main"
CONFIGURATION, RELEASES, LEDGER = "asv.conf.json", "releases.json", "ledger"
Row = tuple[str, str]  # a release of vLLM, and the day it came out


def initial_files() -> dict[str, str]:
    """The files that a folder for asv begins with: what git ignores, asv's configuration, the releases of vLLM."""
    here = resources.files("pytest_slmserve.report.export")
    return {
        ".gitignore": f"/{LEDGER}/\n/.asv/\n",
        CONFIGURATION: here.joinpath("asv.conf.json").read_text("utf-8"),
        RELEASES: here.joinpath("asv_releases.json").read_text("utf-8"),
    }


def rows_in(text: str) -> list[Row]:
    """Rows of a list of releases. Raises ValueError or TypeError where the text holds none."""
    return [(str(release), str(day)) for release, day in json.loads(text)]


def as_text(rows: Sequence[Row]) -> str:
    """A list of releases with a line for each, so that a new row is a new line."""
    return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n]\n"


def continued(own: Sequence[Row], shipped: Sequence[Row]) -> list[Row]:
    """The longer list where it begins with the shorter one; otherwise the folder's own."""
    longer, shorter = (shipped, own) if len(shipped) > len(own) else (own, shipped)
    return list(longer if list(longer[: len(shorter)]) == list(shorter) else own)


def git(ledger: Path, *arguments: str, given: str = "") -> str:
    """Output of git. The user's settings and a hook's variables are left out: both would change hashes, or the
    repository meant."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "--git-dir", str(ledger), *arguments]
    return subprocess.run(command, input=given, env=env, check=True, capture_output=True, text=True).stdout


def rows_of(ledger: Path) -> list[Row]:
    """Rows that the ledger holds, in its order."""
    lines = git(ledger, "log", "--reverse", "--format=%s %as", BRANCH).splitlines()
    return [(line.split()[-2], line.split()[-1]) for line in lines]


def commits(rows: Sequence[Row], continued: bool) -> str:
    """The commits of rows, as `git fast-import` reads them."""
    text = []
    for number, (release, day) in enumerate(rows):
        at = int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp())
        subject, pin = f"vllm {release}\n", f"vllm=={release}\n"
        text.append(f"commit {BRANCH}\ncommitter ledger <ledger@localhost> {at} +0000\ndata {len(subject)}\n{subject}")
        text.append(f"from {BRANCH}^0\n" if continued and number == 0 else "")
        text.append(f"M 100644 inline requirements.txt\ndata {len(pin)}\n{pin}")
        text.append(f"reset refs/tags/v{release}\nfrom {BRANCH}\n\n")
    return "".join(text)


def make(ledger: Path, rows: Sequence[Row]) -> int:
    """Make or continue it; the number of commits added. Raises ValueError where rows are no continuation."""
    if len({release for release, _ in rows}) < len(rows):
        raise ValueError("a release stands there twice: nothing was changed")
    have = rows_of(ledger) if ledger.exists() else []
    for number, old in enumerate(have):
        if list(rows[number : number + 1]) != [old]:
            raise ValueError(
                f"row {number + 1} should be {' of '.join(old)}, as it is in the ledger: rows are only added at the "
                "end, or every result after it would lose its release; nothing was changed"
            )
    text = commits(rows[len(have) :], bool(have))
    if not have:
        git(ledger, "init", "--quiet", "--bare", "--object-format=sha1", "--initial-branch=main")
    git(ledger, "fast-import", "--quiet", given=text)
    return len(rows) - len(have)


def read(folder: Path) -> dict[str, Commit]:
    """The commit of each release. Raises BadUsage where the folder has no ledger."""
    form = "--format=%(refname:strip=2) %(objectname) %(authordate:unix)"
    try:
        told = git(folder / LEDGER, "for-each-ref", form, "refs/tags/v*")
    except (OSError, subprocess.CalledProcessError):
        hint = f"slmserve asv init --into {folder}, or --into with another folder"
        raise BadUsage(f"there is no ledger of releases in {folder}", hint) from None
    rows = [line.split() for line in told.splitlines()]
    return {tag.removeprefix("v"): Commit(commit, int(at)) for tag, commit, at in rows}
