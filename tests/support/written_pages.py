"""Pages that are written from the code and the committed results files.

python tests/support/written_pages.py      writes them
"""

import argparse
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from committed import BASELINES
from pages import DOCS
from scripts import CHECKOUT

from pytest_slmserve.__main__ import parser
from pytest_slmserve.analysis.claims.table import stored_gates
from pytest_slmserve.analysis.gate.diagnosis import worse_layers
from pytest_slmserve.analysis.gate.launch_pairs import Gated
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.store import read
from pytest_slmserve.options.table import OPTS, Opt
from pytest_slmserve.plan.cases import DEFAULTS
from pytest_slmserve.report import gate
from pytest_slmserve.report.ledger import ledger_sections
from pytest_slmserve.report.page.writer import GLOSSARY
from pytest_slmserve.report.section import section_markdown
from pytest_slmserve.report.text_table import interval_text
from pytest_slmserve.schema.records import hosts_of, release

TOP = """# Options

Look up the options of `pytest` on this page. You can give each option on the command line, in the environment, or in
the ini file (`pytest.ini`, or `[tool.pytest.ini_options]` in `pyproject.toml`). If you give it twice, the earlier place
in this list wins. The first lines of a run show which options you set, and where.

- A mode (`--slm-gpu`, `--slm-cpu`, `--slm-simulate` or `--slm-endpoint`) starts measuring. Without a mode, tests that
  measure are skipped. You can give only one mode.
- Some options are for the ini file only. To set such an option for a single run, use `-o`, for example `-o slm_seed=7`.
- In the environment and the ini file, a flag is 1 or 0, and several values are separated by spaces. In TOML, a flag can
  be `true` or `false`, and several values can be a list.
"""
TERMS = """# Metrics and terms

Look up a column of a report or a word of a message on this page. It gives the definition, the unit, and the name that
you use in Python and JSON. Names of metrics are not standard across tools, so compare the formulas before you compare
numbers.

Values are means over the repeats that count. `-` means "not measured", and 0 is a measured value. Columns that do not
fit the width of your terminal are named below the table, and `slmserve report --show all` prints them.
"""
RELEASES = """# Releases

See on this page which releases of vLLM became slower or faster, according to [gates](gate-an-upgrade.md) of two
releases on a GPU or on the CPU backend. It is for you if you choose a release, or look for the release that caused a
slowdown. The page is written from the committed results files.

Each row has an endpoint: a quantity that a gate compares, at a concurrency. The code after the GPU is the host. A ratio
is the candidate divided by the baseline, with a 95% confidence interval. For rates, a ratio below 1 is slower. For
times and energy (J), a ratio above 1 is worse.

A gate passes if it shows that the candidate is less than the margin worse. It fails if it shows that the candidate is
worse, with an error rate of 1%, and the estimate exceeds half of the margin. So 2% may fail with a margin of 3%. The
verdict comes from this test, not from the interval. A gate may be inconclusive although the interval excludes 1,
because the test allows for looking at several numbers of launches. It may pass although the interval just crosses the
margin, because 5% of the candidates that are worse by the margin may pass. *Can detect* is the smallest slowdown that
the gate would find nine times in ten, not one that it found.

A gate whose sides share the GPU judges tokens per busy second, which show whether the kernels became slower. It does
not judge the start. If a kernel runs for less than 70% of the time, or the windows of the first launch scatter by more
than 10% (13% for the first 8 pairs), the host decides how fast the engine is. The gate then does not judge output
tokens/s and the time of a request (E2E), but it is inconclusive if one of them seems worse. *Own cores* are the cores
of the host that a run keeps busy. The verdict names them if a release needs clearly more or fewer, because idle cores
can hide such a change.

*Other recorded settings* are all that the engine reported and that differs between the sides, for example the attention
backend, the sizes of CUDA graphs, the limits of the scheduler, the KV blocks, or the version of torch.
[Section 6 of the results](results.md#6-are-newer-releases-slower-and-does-a-gate-find-it) says which causes are known.

The last patch release of each minor release is gated. vLLM 0.27 and later need a newer torch than the GPU hosts of this
project have, so they are gated on the CPU backend alone, and no gate compares 0.26.0 with 0.27.1.

## Compare your own releases

Gate each two neighboring releases on one GPU, then report all results files together:

```sh
pytest --pyargs pytest_slmserve.benchmarks --slm-gpu --slm-gate --slm-models=opt-1.3b,qwen3-0.6b \\
  --slm-concurrency=8,256 --slm-records=a-b.jsonl \\
  --slm-side=baseline:python=/opt/vllm-a/bin/python --slm-side=candidate:python=/opt/vllm-b/bin/python
slmserve report a-b.jsonl b-c.jsonl
```

The report names the slower layer and lists all other differences between the two sides. To find the first slow release
between two that are far apart, use [`slmserve bisect`](compare-releases.md).

## From a clone

This command prints the tables of releases below from the committed results files. Its exit code is 1, because one
gate fails:

```sh
slmserve report --show all benchmarks/baselines/*vllm-0.*-0.*.jsonl.xz
```
"""
MUSEUM = """## Regressions that people reported

Each row is a public thread about a regression of vLLM. On the simulated engine, a gate fails a candidate with the
reported slowdown, names the layer, and passes equal sides. On a GPU, each would take less than 15 minutes. The last
column says whether a real engine shows a regression in that layer, which may be smaller than the reported one, or what
a test needs. *The same build* is a control, whose sides are equal.
"""
COMMANDS = """# The command line

This page lists every command of `slmserve`, its arguments and its exit codes. Read it if you know which command you
need. `python -m pytest_slmserve` is the same program. The options of `pytest` are on [their own page](options.md), and
[Troubleshooting](troubleshooting.md) explains the exit codes of a run.

The page is written from the same descriptions as `slmserve COMMAND --help`.
"""
PER_BACKEND = '\nIf the default is "by mode", it is the following value:\n'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def option_row(opt: Opt) -> tuple[str, ...]:
    flag = f"{opt.flag} {opt.metavar}" if opt.metavar else opt.flag
    if opt.default is None:
        default = "by mode" if "depends on the mode" in opt.help else "-"
    else:
        default = "off" if opt.is_flag or opt.bare else f"`{opt.default_text}`" if opt.default_text else "-"
    names = ("ini file only" if opt.ini_only else f"`{flag}`", f"`SLM_{opt.name.upper()}`", f"`slm_{opt.name}`")
    return (*names, default, opt.help)


def mode_rows() -> Iterator[tuple[str, ...]]:
    for platform, defaults in DEFAULTS.items():
        prompt, output = defaults.lengths
        loads = f"1, 2, 4 … to {defaults.largest}{'' if platform == 'remote' else ' or the KV capacity'}"
        mode = {"cuda": "gpu", "simulated": "simulate", "remote": "endpoint"}.get(platform, platform)
        models = ", ".join(defaults.models) or "to be named"
        yield (
            f"`--slm-{mode}`",
            models,
            loads,
            f"{prompt}",
            f"{output}",
            f"{defaults.window_s:g} s",
            f"{defaults.budget_s:g} s",
        )


def options_page() -> str:
    """What docs/options.md should be."""
    columns = ("option", "environment", "ini", "default", "meaning")
    given = ("models", "concurrency", "input-len", "output-len", "window", "budget")
    modes = ("mode", *(f"`--slm-{name}`" for name in given))
    return f"{TOP}\n{table(columns, map(option_row, OPTS))}{PER_BACKEND}\n{table(modes, mode_rows())}"


def terms_page() -> str:
    """What docs/metrics-and-terms.md should be: columns of reports, then the other terms in alphabetical order."""
    parts, heads = [TERMS], set[str]()
    for title, each in tomllib.loads((Path(__file__).parent / "columns.toml").read_text("utf-8")).items():
        heads |= {head for head, *_ in each["rows"]}
        rows = [
            (head, ", ".join(f"`{one}`" for one in name.split(", ") if one), *rest)
            for head, name, *rest in each["rows"]
        ]
        parts.append(
            f"## {title}\n\n{each['intro']}\n\n{table(('column', 'name in code', 'unit', 'definition'), rows)}"
        )
    columns = heads | {re.sub(r" (%|ms|s)\b.*| %.*", "", head) for head in heads}
    terms = [(", ".join(forms), meaning) for forms, meaning in GLOSSARY.items() if not columns & {*forms}]
    listed = table(("term", "meaning"), sorted(terms, key=lambda term: term[0].lower()))
    parts.append(f"## Terms\n\nA word that is also a column is defined above.\n\n{listed}")
    return "\n".join(parts)


def argument_row(action: argparse.Action) -> tuple[str, str]:
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
    value = " ".join(value) if isinstance(value, tuple) else value
    if action.nargs == "?" and action.option_strings:
        value = f"[{value}]"
    takes_value = action.nargs != 0 and value
    names = ", ".join(f"`{name}{f' {value}' if takes_value else ''}`" for name in action.option_strings) or f"`{value}`"
    return names, (action.help or "").replace("%%", "%").replace("|", "\\|")


def commands_of(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the commands below a parser, and the actions of each."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from commands_of(command)


def command_line_page() -> str:
    """What docs/command-line.md should be: a table of arguments for each command."""
    parts = [COMMANDS]
    for command in commands_of(parser()):
        parts.append(f"## {command.prog}\n\n{command.description}\n")
        for group in command._action_groups:
            actions = (one for one in group._group_actions if not isinstance(one, argparse._SubParsersAction))
            rows = [argument_row(one) for one in actions if one.dest != "help" and one.help != argparse.SUPPRESS]
            if rows:
                usual = group.title in ("positional arguments", "options")
                parts.append(table(("argument" if usual else group.title or "", "meaning"), rows))
        parts.append(f"{command.epilog}\n" if command.epilog else "")
    return "\n".join(filter(None, parts))


@cache
def gates_of(archive: str) -> list[Gated]:
    contents = read(BASELINES / f"{archive}.jsonl.xz")
    return [gated for gated, _ in stored_gates(contents.measurements, contents.plans)]


def gate_results(gates: Sequence[Gated]) -> str:
    """Return verdicts of gates on different hosts, in what a candidate is worse, by how much, and its own cores."""
    told = []
    for gated in gates:
        worse = worse_layers(gated)
        found = [gate.WORDS[gated.outcome], f"worse in: {', '.join(worse)}" if worse else ""]
        if worse != ["memory"]:
            first = ((each.name, each.ratio) for each in gated.gated[:1] if each.ratio)
            found += (f"{name} {seen.value:.2f} times ({interval_text(seen, '{:.2f}'.format)})" for name, seen in first)
        less = (each for each in gated.exact if each.state is State.FAILS and each.value)
        found += (f"{each.claim} {each.value:.2f} times" for each in less)
        found += (f"{each.claim} {gate.WORDS[each.state]}" for each in gated.exact if not worse)
        told.append(", ".join(filter(None, (*found, gate.times_the_cores(gated)))))
    hosts = [frozenset(hosts_of(gated.measurements("baseline"))) for gated in gates]
    assert len({*hosts}) == len(hosts)
    return "; on another host: ".join(told)


def at_load(gated: Gated) -> str:
    return f"{gated.model} at {gated.pairs[0].baseline.measurements[0].load.concurrency}"


def museum_rows() -> Iterator[tuple[str, ...]]:
    for row in json.loads((CHECKOUT / "studies" / "museum.json").read_text("utf-8")):
        told = f"not tried: needs {row.get('needs')}"
        if "runs" in row:
            slow = [gated for name in row["runs"] for gated in gates_of(name)]
            met = sum(row["layer"] in worse_layers(gated) for gated in slow)
            on = f" on {met} of {len(slow)} hosts" if 0 < met < len(slow) else ""
            told = f"{'reproduced' if met else 'not reproduced'}{on} by {row['as']}: {gate_results(slow)}"
            if "control" in row:
                same = gates_of(row["control"])
                other = f" ({at_load(same[0])})" if at_load(same[0]) != at_load(slow[0]) else ""
                told += f"; the same build{other}: {gate_results(same)}"
            else:
                told += "; the same build is not gated yet"
        effect = f"{row['effect']:.3g} times the {row['of']}"
        yield (
            f"[{row['thread'].removeprefix('vllm-project/vllm')}]({row['url']})",
            row["symptom"],
            f"{row['model']}, {row['load']}",
            row["versions"],
            effect,
            row["layer"],
            told,
        )


def ungated(gates: Iterable[Gated]) -> Iterator[tuple[str, str]]:
    """Yield each two neighboring releases on a GPU that no gate has compared."""
    pairs = {tuple(gate.compared_releases(each)) for each in gates if each.firsts["baseline"].environment.gpu_name}
    known = sorted({name for pair in pairs for name in pair}, key=release)
    yield from (pair for pair in pairwise(known) if pair not in pairs)


def releases_page() -> str:
    """What docs/releases.md should be: gates of two releases each, and the museum of regressions."""
    of_two = re.compile(r"\d+\.\d+\.\d+-\d+\.\d+\.\d+")
    names = sorted(path.name.partition(".jsonl")[0] for path in BASELINES.iterdir() if of_two.search(path.name))
    gates = [gated for name in names for gated in gates_of(name)]
    sections = ledger_sections(gates)
    ledger = "\n".join(re.sub("^###", "##", section_markdown(each)) for each in sections)
    ledger = ledger.replace("\n- other recorded", "\nOther recorded")
    heads = ("thread", "what was seen", "model and load", "versions", "effect", "layer", "here")
    missing = "".join(f"\nNo gate has compared vLLM {a} with {b} yet.\n" for a, b in ungated(gates))
    return f"{RELEASES}{missing}\n{ledger}\n{MUSEUM}\n{table(heads, museum_rows())}"


WRITTEN = {
    DOCS / "command-line.md": command_line_page,
    DOCS / "options.md": options_page,
    DOCS / "metrics-and-terms.md": terms_page,
    DOCS / "releases.md": releases_page,
}

if __name__ == "__main__":
    for path, text in WRITTEN.items():
        path.write_text(text(), "utf-8")
