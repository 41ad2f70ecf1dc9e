"""Golden files: the output of `report` and `advise` for each committed archive, their exit statuses, and its keys; of
some archives also all that a page and its pictures draw.

`REWRITE=1 pytest tests/nightly/golden -k NAME` writes those that differ anew, and fails once, with the changed lines.
Floats of JSON are kept with eleven digits. The keys are there because a stored measurement answers a run only as long
as both compute the same ones.
"""

import hashlib
import io
import json
import lzma
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from difflib import unified_diff
from functools import cache
from math import isclose
from pathlib import Path
from typing import Any
from unittest.mock import patch

from html_pages import Page
from scripts import BASELINES, DATA, TESTS

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.metrics.window import parse_slo
from pytest_slmserve.analysis.points import all_groups, by_series, group_key, job_points
from pytest_slmserve.archive import store
from pytest_slmserve.commands.report import gates_of, judged_again
from pytest_slmserve.report.as_json import plain
from pytest_slmserve.report.page.pictures import pictures, whole_picture
from pytest_slmserve.report.page.writer import page_content, rendered
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.records import series_key
from pytest_slmserve.schema.specs import ClosedLoop, load_facts, short_hash

FOLDER = TESTS / "nightly" / "golden"
OF_THE_FORMAT = DATA / f"archive-format-{store.FORMAT}.jsonl"
# Words of a command, and columns of its terminal.
OUTPUTS = {
    "report --json": (("report", "--json"), 80),
    "report, 80 columns": (("report", "--show=all"), 80),
    "report, 160 columns": (("report", "--show=all"), 160),
    "advise": (("advise",), 80),
    "advise --json": (("advise", "--json"), 80),
}
# Archives that together have all kinds of charts: what their pages and pictures draw is kept, too.
DRAWN = (
    "h200-vllm-0.26.0-core-opt-2.7b",
    "h200-vllm-0.26.0-adaptive",
    "h200-vllm-0.20.2-0.26.0-gate",
    "h100-vllm-0.26.0-several-gpus",
    "h100-vllm-0.26.0-today-replicas-granite",
    "cpu-vllm-0.32.0-server",
)
SLO = "ttft:200ms,tpot:50ms"
PAGE = ("title", "tallies", "unexpected", "inconclusive", "facts", "reproduce", "deployments", "disturbed", "notes")
LINES = 60  # of a difference: more is too long to read
CLOSE = 1e-9  # relative difference of two floats that are taken for one
Outputs = dict[str, dict[str, Any]]  # `status` and `out` by the name of the output


def archives() -> dict[str, Path]:
    """The committed archives, and one that has everything that the format can hold."""
    return {path.name.partition(".jsonl")[0]: path for path in [*sorted(BASELINES.glob("*.jsonl.xz")), OF_THE_FORMAT]}


def golden_file(name: str) -> Path:
    return FOLDER / f"{name}.json.xz"


def printed(path: Path, drawn: bool = False) -> Outputs:
    """Outputs and statuses of the commands for an archive, and its keys. drawn: of the page and the pictures, too."""
    found: Outputs = {"keys": {"status": 0, "out": keys_of(store.read(path))}}
    for output, (words, columns) in OUTPUTS.items():
        out = io.StringIO()
        with patch.dict(os.environ, COLUMNS=str(columns)), redirect_stdout(out), redirect_stderr(out):
            status = main([*words, str(path)])
        text = out.getvalue()
        found[output] = {"status": status, "out": json.loads(text) if text.startswith("{") else text}
    return found | (_drawn(path) if drawn else {})


def _drawn(path: Path) -> Outputs:
    contents = store.read(path)
    gates, notes = gates_of([(path, contents)])
    found = replace(judged_again(contents, slo=parse_slo(SLO)), gates=gates, notes=notes)
    content, page = page_content(found, 0, {}), Page(rendered(found, status=0))
    told = {name: content[name] for name in PAGE} | {"goodput": content["goodput"]}
    shown = plain({**told, "charts": page.charts, "tables": page.tables})
    specs = {picture.name: whole_picture(picture) if picture.panels else picture.why_not for picture in pictures(found)}
    return {"page": {"status": 0, "out": shown}, "pictures": {"status": 0, "out": plain(specs)}}


@contextmanager
def elsewhere(archive: Path) -> Iterator[Path]:
    """Work without a home, a cache of models or settings of ours, in a folder where each model of the archive is
    another one: a record holds its model, so nothing of the reader's machine tells of it.

    Yields the archive's path, which is the same in every checkout: a link to its folder, because a calibration that
    lies beside an archive belongs to it. The archive is read once.
    """
    with tempfile.TemporaryDirectory() as folder, chdir(folder), patch.dict(os.environ):
        for variable in [each for each in os.environ if each.startswith(("HF_", "SLM_", "VLLM_", "XDG_", "GITHUB_"))]:
            del os.environ[variable]
        os.environ["HOME"] = str(Path(folder, "home"))
        path = Path(archive.parent.name, archive.name)
        path.parent.symlink_to(archive.parent)
        with patch.object(store, "read_each", cache(store.read_each)):
            for model in {m.spec.model for m in store.read(path).measurements}:
                if not Path(model).is_absolute():
                    Path(model).mkdir(parents=True, exist_ok=True)
                    Path(model, "config.json").write_text(json.dumps(dict(CATALOGUE["mpt-7b"].config)), "utf-8")
            yield path


def keys_of(contents: store.Contents) -> dict[str, list[Any]]:
    """Return the number of distinct keys of each kind, and 16 digits of a hash over them, if there are any."""
    ms = contents.measurements
    plans = [session.plan.get(name, ()) for session in contents.sessions for name in ("sweeps", "compared")]
    points, closed = job_points(ms), [m for m in ms if isinstance(m.load, ClosedLoop)]
    kinds: dict[str, Iterable[str]] = {
        "measurement": (m.key for m in ms),
        "id": (m.id for m in ms),
        "engine": (m.spec.key for m in ms),
        "environment": (m.environment.key for m in ms),
        "environment per GPU": (m.environment.per_gpu_key for m in ms),
        "workload": (m.workload.hash for m in ms),
        "load": (short_hash(load_facts(m.load)) for m in ms),
        "series": (series_key(m.spec, m.workload.hash, m.load, m.environment) for m in closed),
        "curves": by_series(ms),
        "job points": (short_hash([p.spec.key, p.workload.hash, p.environment.key]) for p in points),
        "sets": (m.replica.set for m in ms if m.replica),
        "replicas": map(group_key, (group for group in all_groups(ms) if len(group) > 1)),
        "plans": (key for plan in plans for key in plan),
    }
    sets = {kind: sorted(set(keys)) for kind, keys in kinds.items()}
    hashed = {kind: hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16] for kind, keys in sets.items()}
    return {kind: [len(keys), hashed[kind]] for kind, keys in sets.items() if keys}


def kept(name: str) -> Outputs:
    """The outputs as the golden file has them; empty if there is none."""
    path = golden_file(name)
    return json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {}


def difference(name: str, path: Path) -> str:
    """Return what an archive prints otherwise than its golden file has it; empty if nothing."""
    before, after = kept(name), printed(path, name in DRAWN)
    lines = list(changes(before, after))
    if lines and os.environ.get("REWRITE"):
        rounded = json.loads(json.dumps(after), parse_float=lambda digits: float(f"{float(digits):.11g}"))
        text = json.dumps(rounded, ensure_ascii=False).encode()
        golden_file(name).write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    rewrite = f"({len(lines)} lines) if that is wanted: REWRITE=1 pytest tests/nightly/golden -k {name}"
    return "\n".join([name, *lines[:LINES], rewrite]) if lines else ""


def changes(before: Outputs, after: Outputs) -> Iterator[str]:
    """Yield the lines of a unified diff, with a heading for each output that differs. Keys may be in any order."""
    for output in {**before, **after}:
        old, new = before.get(output, {}), after.get(output, {})
        sides = _lines(old), _lines(_settled(old, new))
        yield from unified_diff(*sides, f"golden: {output}", f"now: {output}", lineterm="", n=1)


def _lines(output: Mapping[str, Any]) -> list[str]:
    out = output.get("out", "")
    text = out if isinstance(out, str) else json.dumps(out, indent=1, sort_keys=True, ensure_ascii=False)
    return [f"exit status {output.get('status')}", *text.split("\n")]


def _settled(old: Any, new: Any) -> Any:
    """The new value, with the old float in place of each that is close to it."""
    match old, new:
        case dict(), dict():
            return {key: _settled(old.get(key), value) for key, value in new.items()}
        case list(), list():
            return [*map(_settled, old, new), *new[len(old) :]]
        case (float(), float() | int()) | (int(), float()) if not {type(old), type(new)} & {bool}:
            return old if isclose(old, new, rel_tol=CLOSE) else new
    return new
