"""A git repository whose commits are the releases of vLLM, so that the x axis of asv's page is the release.

python benchmarks/asv/make_ledger.py       makes or continues ledger/ beside this file, from releases.json

A commit and a lightweight tag for each row; author and dates are fixed, so the hashes are the same on every machine.
Each hash depends on all rows before it, and results are filed under hashes: rows are only ever added at the end.
Needs git 2.29 or newer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
BRANCH = "refs/heads/main"
Row = tuple[str, str]  # a release of vLLM, and the day it came out


def git(ledger: Path, *arguments: str, given: str = "") -> str:
    """Free of the user's settings and of a hook's variables: both would change hashes, or the repository meant."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "--git-dir", str(ledger), *arguments]
    return subprocess.run(command, input=given, env=env, check=True, capture_output=True, text=True).stdout


def rows_of(ledger: Path) -> list[Row]:
    """What the ledger holds, in its order."""
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
    if not have:
        git(ledger, "init", "--quiet", "--bare", "--object-format=sha1", "--initial-branch=main")
    git(ledger, "fast-import", "--quiet", given=commits(rows[len(have) :], bool(have)))
    return len(rows) - len(have)


def main(folder: Path = HERE) -> int:
    releases = folder / "releases.json"
    try:
        rows = [(str(release), str(day)) for release, day in json.loads(releases.read_text("utf-8"))]
        added = make(folder / "ledger", rows)
    except (OSError, ValueError, TypeError) as error:
        print(f"error: {releases}: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: git cannot make {folder / 'ledger'}: {error.stderr.strip()}", file=sys.stderr)
        return 1
    print(f"{folder / 'ledger'}: {len(rows)} releases, {added} added")
    return 0


if __name__ == "__main__":
    sys.exit(main())
