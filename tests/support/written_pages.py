"""Pages that are written from the code and the committed records: docs/glossary.md, docs/options.md with its tables,
and docs/releases.md.

python tests/support/written_pages.py      writes them anew
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from committed import BASELINES
from pages import DOCS
from scripts import CHECKOUT

from pytest_slmserve.analysis.claims.table import stored_gates
from pytest_slmserve.analysis.gate.diagnosis import layers
from pytest_slmserve.analysis.gate.launch_pairs import Gated
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.store import read
from pytest_slmserve.options.table import OPTS, Opt
from pytest_slmserve.plan.cases import DEFAULTS
from pytest_slmserve.report import gate
from pytest_slmserve.report.ledger import ledger_sections
from pytest_slmserve.report.page.writer import GLOSSARY
from pytest_slmserve.report.section import section_markdown

TOP = """# Options

Each option may be given on the command line, in the environment, or in the ini file (`pytest.ini`, or
`[tool.pytest.ini_options]` in `pyproject.toml`), in this order of precedence; the header of a run says which it took
from where. Options that few people need have no place of their own on the command line: `-o slm_seed=7` sets one there.
In the environment and the ini file a flag is 1 or 0, and several values are separated by spaces. In TOML
(`[tool.pytest]` of pytest 9 too) a flag may be `true` or `false`, and several values a list.

A mode (`--slm-gpu`, `--slm-cpu`, `--slm-simulate` or `--slm-endpoint`) is what makes anything run: without one, what
measures is skipped. Modes exclude each other.
"""
WORDS = """# Glossary

The terms of tables, pages and messages. On [the page](page.md) of a run each term shows its meaning where it stands.
"""
RELEASES = """# Releases

What changed between releases of vLLM, by [gates](gate-an-upgrade.md) of each two neighbours. This page is written from the
committed records. To judge them yourself, type:

```sh
slmserve report benchmarks/baselines/h200-vllm-0.2*-0.2*-gate*.jsonl.xz
```

A ratio is the candidate over the baseline, with its 95 % interval for further launches on that host. A small model at
a small load is served as fast as its host allows: then the gate does not judge what users see, but judges tokens per
busy second, which tell whether the kernels are slower.

For a ledger of your own models, gate each two releases on one GPU, and report all archives together:

```sh
pytest --slm-gpu --slm-gate --slm-models=opt-1.3b,qwen3-0.6b --slm-concurrency=8,256 --slm-records=a-b.jsonl \\
  --slm-side=baseline:python=/opt/vllm-a/bin/python --slm-side=candidate:python=/opt/vllm-b/bin/python
slmserve report a-b.jsonl b-c.jsonl
```

If one step is slower, [`slmserve bisect`](compare-releases.md) names the release, and the report says what else differs between
the two sides.
"""
MUSEUM = """## Regressions that people reported

Would a gate have found them? Each row is a public thread. On the simulated engine, a gate fails a side that is slower
by the reported effect, names the layer, and passes the same side against itself, in less than 15 minutes each. The
last column says what a real engine did here, or what it would take to meet the regression.
"""
PER_BACKEND = '\nWhere the default is "by mode":\n'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def option_row(opt: Opt) -> tuple[str, ...]:
    flag = f"{opt.flag} {opt.metavar}" if opt.metavar else opt.flag
    if opt.default is None:
        default = "by mode" if "by mode" in opt.help else "-"
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
        yield f"`--slm-{mode}`", models, loads, f"{prompt}", f"{output}", f"{defaults.window_s:g} s"


def options_page() -> str:
    """What docs/options.md should be."""
    columns = ("option", "environment", "ini", "default", "meaning")
    given = ("models", "concurrency", "input-len", "output-len", "window")
    modes = ("mode", *(f"`--slm-{name}`" for name in given))
    return f"{TOP}\n{table(columns, map(option_row, OPTS))}{PER_BACKEND}\n{table(modes, mode_rows())}"


def glossary_page() -> str:
    """What docs/glossary.md should be: the terms in the order of the alphabet."""
    terms = [(", ".join(forms), meaning) for forms, meaning in GLOSSARY.items()]
    return f"{WORDS}\n{table(('term', 'meaning'), sorted(terms, key=lambda term: term[0].lower()))}"


@cache
def gates_of(archive: str) -> list[Gated]:
    contents = read(BASELINES / f"{archive}.jsonl.xz")
    return [gated for gated, _ in stored_gates(contents.measurements, contents.plans)]


def museum_rows() -> Iterator[tuple[str, ...]]:
    for row in json.loads((CHECKOUT / "studies" / "museum.json").read_text("utf-8")):
        told = f"needs {row.get('needs')}"
        if "run" in row:
            (slow,) = gates_of(row["run"])
            less = [each.claim for each in slow.exact if each.state is State.FAILS]
            found = ", ".join([*(layer for layer, _ in layers(slow.compared)), *less])
            told = f"{row['as']}: {gate.WORDS[slow.outcome]}, worse in: {found}"
            same = [gate.WORDS[each.outcome] for each in gates_of(row["control"])] if "control" in row else []
            told += f"; the same build: {same[0]}" if same else "; the same build is not gated yet"
        effect = f"{row['effect']:.3g} times the {row['of']}"
        number = row["thread"].rpartition("#")[2]
        yield (
            f"[#{number}]({row['url']})",
            row["symptom"],
            f"{row['model']}, {row['load']}",
            row["versions"],
            effect,
            row["layer"],
            told,
        )


def releases_page() -> str:
    """What docs/releases.md should be: gates of two releases each, and the museum of regressions."""
    of_two = re.compile(r"\d+\.\d+\.\d+-\d+\.\d+\.\d+")
    names = sorted(path.name.partition(".jsonl")[0] for path in BASELINES.iterdir() if of_two.search(path.name))
    sections = ledger_sections([gated for name in names for gated in gates_of(name)])
    ledger = "\n".join(
        re.sub("^###", "##", section_markdown(each)).replace("\n- what else", "\nWhat else") for each in sections
    )
    heads = ("thread", "what was seen", "model and load", "versions", "effect", "layer", "here")
    return f"{RELEASES}\n{ledger}\n{MUSEUM}\n{table(heads, museum_rows())}"


WRITTEN = {DOCS / "releases.md": releases_page, DOCS / "glossary.md": glossary_page, DOCS / "options.md": options_page}

if __name__ == "__main__":
    for path, text in WRITTEN.items():
        path.write_text(text(), "utf-8")
