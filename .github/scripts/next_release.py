"""The release of vLLM to gate next: the newest on the index that is newer than the baseline and has no result yet.

    next_release.py --index index.json --pin .github/vllm-baseline.txt --titles titles.txt

index.json is what the package index says of the project, titles.txt has the titles of the issues that tell the results,
one a line. Prints `baseline=...` and `candidate=...`, the form of $GITHUB_OUTPUT; no candidate: there is nothing to do.
Versions that are asked for by name (--baseline, --candidate) are taken as they are; an empty one is not asked for.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FINAL = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9}){0,9})(?:\.post([0-9]{1,9}))?")
BY_NAME = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?")
TITLE = re.compile(r"vLLM (\S+): gate")

Key = tuple[tuple[int, ...], int]


def key(version: str) -> Key | None:
    """To order final releases by; 0.27 is 0.27.0. None: a pre-release, a development or local build, or no version."""
    found = FINAL.fullmatch(version)
    if found is None:
        return None
    numbers = [int(part) for part in found[1].split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), -1 if found[2] is None else int(found[2])


def installable(files: Iterable[Mapping[str, Any]]) -> bool:
    """A wheel is there that is not yanked: during an upload there may be sources only. Raises ValueError where the
    index has another form."""
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        raise ValueError("the index names a release without a list of its files")
    return any(file.get("packagetype") == "bdist_wheel" and not file.get("yanked", False) for file in files)


def final_releases(index: Mapping[str, Any]) -> dict[Key, str]:
    """By what they are ordered by. Raises ValueError where the index has another form."""
    releases = index.get("releases") if isinstance(index, Mapping) else None
    if not isinstance(releases, dict) or not releases:
        raise ValueError("the index names no releases")
    known = {version: key(version) for version, files in releases.items() if installable(files)}
    return {found: version for version, found in known.items() if found is not None}


def gated(titles: Iterable[str]) -> set[Key]:
    """Releases that have an issue with exactly the title that a result gets."""
    found = (TITLE.fullmatch(title.strip()) for title in titles)
    keys = (key(each[1]) for each in found if each)
    return {each for each in keys if each is not None}


def choose(index: Mapping[str, Any], baseline: str, titles: Iterable[str]) -> str:
    """Empty: nothing newer is left. Raises ValueError for a baseline that is no final release."""
    oldest = key(baseline)
    if oldest is None:
        raise ValueError(f"the baseline {baseline!r} is no final release")
    left = {found: version for found, version in final_releases(index).items() if found > oldest}
    for found in gated(titles) & left.keys():
        del left[found]
    return left[max(left)] if left else ""


def by_name(version: str) -> str:
    """For argparse: a version as pip takes it, and nothing that a shell or a path could take for something else."""
    if version and not BY_NAME.fullmatch(version):
        raise argparse.ArgumentTypeError(f"{version!r} is no version such as 0.26.0")
    return version


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description="The release of vLLM to gate next.")
    top.add_argument("--index", type=Path, required=True, help="JSON of the package index")
    top.add_argument("--pin", type=Path, required=True, help="file with the release that is in use")
    top.add_argument("--titles", type=Path, required=True, help="titles of issues, one a line")
    top.add_argument("--baseline", type=by_name, default="", help="instead of the one in use")
    top.add_argument("--candidate", type=by_name, default="", help="instead of the newest without a result")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    try:
        baseline = given.baseline or given.pin.read_text("utf-8").strip()
        if not BY_NAME.fullmatch(baseline):
            raise ValueError(f"the baseline {baseline!r} is no final release")
        index, titles = json.loads(given.index.read_text("utf-8")), given.titles.read_text("utf-8").splitlines()
        candidate = given.candidate or choose(index, baseline, titles)
        if candidate == baseline:
            raise ValueError(f"{baseline} on both sides")
    except (OSError, ValueError, RecursionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    print(f"baseline={baseline}\ncandidate={candidate}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
