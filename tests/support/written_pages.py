"""Pages that are written from the code: docs/glossary.md, and docs/options.md with its tables.

python tests/support/written_pages.py      writes both anew
"""

from collections.abc import Iterable, Iterator, Sequence

from pages import DOCS

from pytest_slmserve.options.table import OPTS, Opt
from pytest_slmserve.plan.cases import DEFAULTS
from pytest_slmserve.report.page.writer import GLOSSARY

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


WRITTEN = {DOCS / "glossary.md": glossary_page, DOCS / "options.md": options_page}

if __name__ == "__main__":
    for path, text in WRITTEN.items():
        path.write_text(text(), "utf-8")
