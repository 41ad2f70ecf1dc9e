"""Compare what two checkouts print of the archives in benchmarks/baselines: numbers, verdicts and exit statuses.

    python studies/same_reports.py OLD_CHECKOUT NEW_CHECKOUT [--only NAME] [--cache DIR] [--renamed=OLD=NEW]

This interpreter runs each checkout on its own archives, because formats differ, in an empty folder. The commands are
`report`, `advise`, `baseline accept` and `baseline show`. Of an archive with gates, `gate` judges the seconds to start.

The words and the line breaks of a text may differ, and the names and the order of JSON. A number counts where it is a
word by itself, so those in names, paths, dates, versions and hashes do not count.

With --cache the script keeps what OLD_CHECKOUT prints, by its commit, and does not run it again. Each --renamed gives
words of a command line and what NEW_CHECKOUT calls them: --renamed="baseline accept=compare --save". Exit status 1
where anything differs.
"""

from __future__ import annotations

import csv
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path

from common import parser_of

PACKAGE = "pytest_slmserve"
SUFFIX = ".jsonl.xz"
REPORTS = ("report", "report --strict --goodput ttft:200ms,tpot:50ms,e2e:5s")  # as commit 11516fa spells them
SINGLE = ("advise", "advise --json", "baseline accept")  # of one archive: several may be of different devices
GATES = ("gate --direction lower --margin 0.15", "gate --direction lower --margin 0.15 --json")
VALUE = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?(/\d[\d,]*|/s)?|true|false|\*")  # a star: Pareto-optimal
VERDICT = re.compile(
    r"^  (holds|passes|fails, as expected|FAILS|(?:HOLDS|PASSES), UNEXPECTED|undecided|inconclusive)  "  # of a claim
    r'|(?:^|  |: )"?(pass|fail|inconclusive|PASS|FAIL|INCONCLUSIVE)"?(?=$|[:,]| after)'  # of a gate
    r"|  (yes|noisy|partly|degraded|NO)$"  # of a measurement
)
# Verdicts of commit 11516fa that have other words now.
TODAY = {"holds": "passes", "HOLDS, UNEXPECTED": "PASSES, UNEXPECTED", "undecided": "inconclusive"}
Outputs = dict[str, tuple[int, str]]  # exit status and text, by command


def outputs(checkout: Path, archives: Sequence[Path], renamed: Mapping[str, str]) -> Outputs:
    found: Outputs = {}
    environment = os.environ | {"PYTHONPATH": str(checkout), "COLUMNS": "400"}
    with tempfile.TemporaryDirectory() as folder:
        for command, files in commands(archives, Path(folder)):
            spelled = command
            for old, new in renamed.items():
                spelled = spelled.replace(old, new)
            line = [sys.executable, "-m", PACKAGE, *spelled.split(), *map(str, files)]
            done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
            found[command] = done.returncode, done.stdout + done.stderr
    return found


def commands(archives: Sequence[Path], folder: Path) -> Iterator[tuple[str, Sequence[Path]]]:
    """Each with its files, one at a time: `baseline show` names what `baseline accept` has kept in the folder."""
    yield from ((command, archives) for command in REPORTS)
    for archive in archives if len(archives) == 1 else ():
        yield from ((command, archives) for command in SINGLE)
        stored = sorted(folder.rglob(f"*{SUFFIX}"))
        yield from ((f"baseline show --json {path.name.removesuffix(SUFFIX)}", ()) for path in stored)
        if pairs := list(pairs_of(archive)):
            with (folder / "pairs.csv").open("w", newline="") as file:
                csv.writer(file).writerows([("baseline", "candidate"), *pairs])
            yield from ((command, [folder / "pairs.csv"]) for command in GATES)


def pairs_of(archive: Path) -> Iterator[tuple[float, float]]:
    """Seconds to start of baseline and candidate, for each pair of launches in the archive's gates."""
    starts: dict[str, float] = {}
    pairs: dict[tuple[str, int], dict[str, float]] = {}
    with lzma.open(archive, "rt") as lines:
        for facts in map(json.loads, lines):
            if facts["kind"] == "engine":
                starts[facts["id"]] = facts["resolved"].get("ready_s")
            elif part := facts.get("paired"):
                pairs.setdefault((part["gate"], part["pair"]), {})[part["side"]] = starts[facts["engine"]]
    return ((pair["baseline"], pair["candidate"]) for pair in pairs.values() if len(pair) == 2 and all(pair.values()))


def kept(cache: Path, old: Path, name: str, archives: Sequence[Path]) -> Outputs:
    """What the old checkout prints, from the cache where that has it."""
    commit = subprocess.check_output(["git", "-C", str(old), "rev-parse", "--short", "HEAD"], text=True).strip()
    file = cache / commit / f"{name}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(outputs(old, archives, {}), indent=1))
    return {command: (status, text) for command, (status, text) in json.loads(file.read_text()).items()}


def tokens(text: str) -> list[tuple[str, str]]:
    """Numbers and verdicts with the line that each stands in, in the order printed; of JSON sorted."""
    try:
        return sorted(tokens_in(json.dumps(json.loads(text), indent=1)))
    except json.JSONDecodeError:
        return list(tokens_in(text))


def tokens_in(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        verdicts = (next(filter(None, found.groups())) for found in VERDICT.finditer(line))
        yield from ((TODAY.get(verdict, verdict), line) for verdict in verdicts)
        words = (word.strip("()[]{},;:.%'\"") for word in line.split())
        yield from ((word, line) for word in words if VALUE.fullmatch(word))


def compared(old: Outputs, new: Outputs) -> Iterator[str]:
    for command in dict.fromkeys((*old, *new)):
        (before, said), (after, says) = old.get(command, (None, "")), new.get(command, (None, ""))
        lines = dict.fromkeys(differences(tokens(said), tokens(says)))
        if lines or before != after:
            yield from (f"  {command}: exit status {before}, now {after}", *lines)


def differences(*sides: list[tuple[str, str]]) -> Iterator[str]:
    """Lines of both sides whose numbers or verdicts differ, and the next line where a side has none there."""
    old, new = ([token for token, _ in side] for side in sides)
    for tag, *spans in SequenceMatcher(None, old, new).get_opcodes() if old != new else ():
        for mark, side, begin, end in zip("-+", sides, spans[::2], spans[1::2]) if tag != "equal" else ():
            yield from (f"  {mark} {line}" for _, line in side[begin : max(end, begin + 1)])


def archives_of(checkout: Path, only: str) -> dict[str, list[Path]]:
    """Each archive of a checkout whose name contains `only`, by name; and all of them together, if none is left out."""
    stored = sorted((checkout / "benchmarks" / "baselines").glob(f"*{SUFFIX}"))
    found = {path.name.removesuffix(SUFFIX): [path] for path in stored if only in path.name}
    return found if only else found | {"all in one": stored}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT", help="the old one, then the new one")
    parser.add_argument("--only", metavar="NAME", default="", help="archives whose name contains this")
    parser.add_argument("--cache", metavar="DIR", type=Path, help="folder for what the old checkout prints")
    parser.add_argument("--renamed", metavar="OLD=NEW", action="append", default=[], help="words of a command line")
    given = parser.parse_args()
    old, new = (folder.resolve() for folder in given.checkouts)
    if missing := [str(folder) for folder in (old, new) if not (folder / PACKAGE / "__main__.py").exists()]:
        parser.error(f"no checkout: {', '.join(missing)}")
    sides = [archives_of(checkout, given.only) for checkout in (old, new)]
    if sides[0].keys() != sides[1].keys():
        parser.error(f"archives of one checkout alone: {', '.join(sides[0].keys() ^ sides[1].keys())}")
    cases = {name: (archives, sides[1][name]) for name, archives in sides[0].items()}
    differing = 0
    for name, (archives, anew) in cases.items():
        before = kept(given.cache, old, name, archives) if given.cache else outputs(old, archives, {})
        lines = list(compared(before, outputs(new, anew, dict(pair.split("=", 1) for pair in given.renamed))))
        differing += bool(lines)
        print("\n".join([f"{name}: {'differs' if lines else 'same'}", *lines]), flush=True)
    print(f"{differing} of {len(cases)} differ")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
