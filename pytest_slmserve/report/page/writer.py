"""The writer of a page: the template with its content, the libraries, and the records, in one file.

Nothing is fetched, and nothing runs but three libraries and our script, by their hashes. What comes from an archive is
text: the template escapes it, and in JSON no tag can end.
"""

from __future__ import annotations

import gzip
import json
import time
from base64 import b64encode
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.archive.store import BEGINS, Embedded, embedded, make_folder
from pytest_slmserve.report.as_json import plain
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page.content import TEXT_WIDTH, PageSection, page_content, page_section, parts
from pytest_slmserve.report.screen import tables
from pytest_slmserve.report.section import Section
from pytest_slmserve.report.text_table import laid_out
from pytest_slmserve.schema.errors import BadUsage, SlmError
from pytest_slmserve.schema.files import regular
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.records import Measurement

FOLDER = files("pytest_slmserve.report.page")
LIBRARIES = ("vega.min.js", "vega-lite.min.js", "vega-interpreter.js")
_MODULE = (  # the interpreter is published as a module, which a page in a file cannot import
    ("import {", "const {"),
    ("} from 'vega-util';", "} = vega;"),
    ("export { expression as expressionInterpreter };", "vega.expressionInterpreter = expression;"),
)


@dataclass(frozen=True, slots=True)
class Script:
    """A library as a page holds it: packed, and with the hash of its text."""

    name: str
    base64: str
    hash: str


def write_page(path: Path, page: str) -> None:
    """Writes the text of a page. A page that is there is replaced at once, so that nobody who reloads it sees a part.
    Raises BadUsage where it cannot be written."""
    check_replaceable(path)
    beside = path.with_name(f"{path.name}.part")
    try:
        make_folder(path.parent)
        beside.write_text(page, "utf-8")
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise BadUsage(f"cannot write {path}: {error.strerror}", "--html with another path") from None


def check_replaceable(path: Path) -> None:
    """Raises BadUsage where a page would replace what is none: an archive, say, or a device."""
    try:
        with open(path, "rb", opener=regular) as file:
            begins = file.read(len(BEGINS))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise BadUsage(f"cannot write {path}: {error.strerror}", "--html with another path") from None
    if begins and begins.lower() != BEGINS:
        raise BadUsage(f"{path} is there, and is no page", "--html with another path")


def write_section(
    path: Path,
    heading: str,
    parts: Sequence[Section],
    measurements: Sequence[Measurement] = (),
    archives: Iterable[Path] = (),
    *,
    status: int | None = None,
    curves: Sequence[Curve] = (),
) -> None:
    """Writes a page of one section, with the records of these archives inside. Raises BadUsage as `rendered` does."""
    records = [one for archive in archives for one in embedded(archive)]
    sections = [page_section(heading, parts)]
    write_page(path, rendered(Findings(curves=curves), measurements, records, status=status, sections=sections))


def rendered(
    found: Findings,
    measurements: Sequence[Measurement],
    records: Iterable[Embedded],
    *,
    status: int | None = None,
    progress: str = "",
    text: str = "",
    sections: Sequence[PageSection] = (),
) -> str:
    """The text of the page. measurements: those that the findings rest on. records: archives that hold them. status: of
    the command or run. progress: of a run that goes on. text: all that a terminal shows. sections: further ones. Raises
    BadUsage without Jinja2."""
    style, script = ((FOLDER / name).read_text("utf-8") for name in ("page.css", "page.js"))
    libraries = [library(name) for name in LIBRARIES]
    page: str = template().render(
        page_content(found, measurements, status, sections),
        style=style,
        script=script,
        libraries=libraries,
        policy=policy(style, [hash_of(script), *(each.hash for each in libraries)]),
        records=list(records),
        progress=progress,
        text=text,
    )
    return page


def template() -> Any:
    """The template of the page. Raises BadUsage without Jinja2."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise BadUsage("a page needs Jinja2", "pip install 'pytest-slmserve[report]'") from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=visible, trim_blocks=True)
    environment.filters |= {
        "parts": parts,
        "json": as_script_json,
        "packed": lambda value: packed(as_script_json(value).encode()),
    }
    return environment.from_string((FOLDER / "page.html").read_text("utf-8"))


def policy(style: str, hashes: Sequence[str]) -> str:
    """The content security policy: nothing but this style and these scripts."""
    scripts = " ".join(f"'{each}'" for each in hashes)
    rest = "img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; style-src '{hash_of(style)}'; script-src {scripts}; {rest}"


def library(name: str) -> Script:
    """A vendored library; the interpreter as a script that adds itself to Vega."""
    text = (FOLDER / "vendor" / name).read_text("utf-8")
    if name == "vega-interpreter.js":
        for published, ours in _MODULE:
            assert published in text, f"{name} is of another release"
            text = text.replace(published, ours)
        text = f"(() => {{{text}\n}})();"
    return Script(name, packed(text.encode()), hash_of(text))


def hash_of(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def packed(data: bytes) -> str:
    """gzip in base64, the same for the same data."""
    return b64encode(gzip.compress(data, 9, mtime=0)).decode()


def as_script_json(value: Any) -> str:
    """JSON that may stand in a script element: no tag can begin or end in it."""
    text = json.dumps(plain(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def visible(value: object) -> object:
    """A value for the template: of a text only what can be seen."""
    return printable(value) if type(value) is str else value


PAUSE = 20  # times what the last page took: a run spends a twentieth of its time on it at most


@dataclass(slots=True)
class RunPage:
    """The page at a path. next_at: when it may be written again, by the monotonic clock."""

    path: Path
    next_at: float = 0.0

    def __post_init__(self) -> None:
        """Raises BadUsage, before anything is measured, without Jinja2 and where the page would replace a file that is
        none."""
        template()
        check_replaceable(self.path)

    @property
    def due(self) -> bool:
        """Whether enough time has passed since the last page for another one while the run goes on."""
        return time.monotonic() >= self.next_at

    def write(self, found: Findings, status: int | None = None, progress: str = "") -> str:
        """Write the findings of a run. The run goes on after a failure, because the results file has everything.

        Args:
            status: Exit status of the run, None while it goes on.
            progress: A sentence on how far the run is.

        Returns:
            A note on why no page was written; empty if one was.
        """
        begun = time.monotonic()
        with laid_out(TEXT_WIDTH, every_column=True):
            text = "\n".join(text for text, _ in tables(found))
        records = embedded(found.records) if found.records else []
        try:
            page = rendered(found, found.measurements, records, status=status, progress=progress, text=text)
            write_page(self.path, page)
        except SlmError as error:
            self.next_at = float("inf")
            return f"no page was written: {error}"
        self.next_at = time.monotonic() + PAUSE * (time.monotonic() - begun)
        return ""
