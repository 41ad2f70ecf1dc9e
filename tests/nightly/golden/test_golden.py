"""What is printed of each committed archive, and its keys, are what its golden file has, and its lines are as the
schema says; no line is longer than the terminal, and no number is lost."""

import itertools
import json
import lzma
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from golden import DRAWN, FOLDER, archives, changes, difference, elsewhere, golden_file, kept
from jsonschema import Draft202012Validator
from scripts import BASELINES, CHECKOUT, in_checkout
from sealed_lines import reseal
from sections import vega_lite

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.points import all_groups, group_key
from pytest_slmserve.archive.store import read
from pytest_slmserve.commands import report
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.report.screen import MOST_LINES
from pytest_slmserve.report.text_table import laid_out
from pytest_slmserve.schema.kv_cache import predicted_blocks, weight_bytes
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.specs import ReplicaSpec

pytestmark = in_checkout


@pytest.fixture(scope="module", params=archives().items(), ids=lambda item: item[0])
def archive(request):
    """The name of an archive and its path, from where it is read with nothing of ours around."""
    name, path = request.param
    with elsewhere(path) as there:
        yield name, there


def test_archive_prints_its_golden_file(archive):
    assert difference(*archive) == ""


def numbers(pieces: Iterable[str]) -> set[str]:
    return set(re.findall(r"(?<![\w.,])\d[\d,]*\.\d+(?![\w.,])", "\n".join(pieces)))


def test_report_lines_fit_terminal(archive, monkeypatch):
    """But for words that cannot be broken, as paths. No number is lost."""
    _, path = archive
    contents = read(path)
    gates = report.gates_of([(path, contents)])[0]
    found = replace(report.judged_again(contents), gates=gates, notes=contents.notes, archives=[path.name])
    with laid_out(400):
        whole = numbers(report.report_lines(found, "tables"))
    for width in (80, 100, 160):
        for detail in ("summary", "tables", "all"):
            monkeypatch.setenv("COLUMNS", str(width))
            pieces = list(report.report_lines(found, detail))
            lines = [line for piece in pieces for line in piece.splitlines()]
            long = [line for line in lines if len(line) > width and path.name not in line]
            assert [line for line in long if len(line.split()) > 1] == [], (width, detail)
            if detail == "summary":
                assert len(lines) <= MOST_LINES or found.loads, "a load that is no point has a page"
            elif detail == "all":
                assert whole <= numbers(pieces)


def test_stored_group_gives_case_key(archive):
    """Of the workloads the hashes are enough for a key."""
    groups = all_groups(read(archive[1]).measurements)
    assert groups
    for group in groups:
        part, specs = group[0].replica, tuple(m.spec for m in group)
        engines = ReplicaSpec(specs, part.sharing, part.pinned, part.thread_percentage) if part else specs[0]
        workloads = tuple(SimpleNamespace(hash=m.workload.hash) for m in group)
        case = Case(engines, workloads, tuple(m.load for m in group), group[0].environment)
        assert case.key == group_key(group)


def test_predicted_sizes_match_engine():
    """Within 0.5 and 1% of what the engine told, for every model of the catalogue, quantized or not."""
    told = {m.spec.key: m for path in archives().values() for m in read(path).measurements if m.resolved.weight_bytes}
    on_a_gpu = [m for m in told.values() if m.spec.platform == "cuda" and m.spec.tensor_parallel_size == 1]
    known = [m for m in on_a_gpu if m.spec.model in CATALOGUE and "hf_overrides" not in dict(m.spec.extra)]
    assert len({m.spec.model for m in known}) > 10
    for m in known:
        # vLLM 0.26 pads the table of token types to 64 rows, and holds the head of a BERT that classifies twice.
        apart = 0.006 if m.spec.known_model.is_encoder else 0.005
        assert weight_bytes(m.spec, 2) == pytest.approx(m.resolved.weight_bytes, rel=apart)
        blocks = predicted_blocks(m.spec, m.resolved)
        assert blocks is None or blocks == pytest.approx(m.resolved.kv_blocks, rel=0.01)


def test_model_by_folder_is_recognized(tmp_path, capsys):
    """The sizes are in the record, so the folder may be there, gone, or another model's by now."""
    text = lzma.decompress((BASELINES / "h100-vllm-0.26.0-core-opt-125m.jsonl.xz").read_bytes()).decode()
    mine = tmp_path / "mine.jsonl"
    mine.write_text(re.sub(r'("spec":\{"model":)"opt-125m"', r'\1"./mine125"', text), "utf-8")
    reseal(mine)
    with elsewhere(mine) as path:
        assert Path("mine125", "config.json").is_file() and main(["report", str(path), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert {point["model"] for point in points} == {"./mine125"}
    assert None not in [point["roofline_fraction"] for point in points]


def test_each_archive_has_golden_file():
    names = archives()
    assert len(names) > 60 and {*DRAWN} < {*names}
    assert sorted(FOLDER.glob("*.json.xz")) == sorted(map(golden_file, names))


def test_golden_difference_sees_changes() -> None:
    a, b = {"n": 3, "rates": [100.0, 0.1], "why": None}, "x\ny"

    def seen(now: object, before: object = a, status: int = 0) -> list[str]:
        found = changes({"a": {"status": 0, "out": before}}, {"a": {"status": status, "out": now}})
        return [line for line in found if line[0] in "+-" and line[:3] not in ("+++", "---")]

    assert seen(a | {"rates": [100 * (1 + 1e-11), 0.1]}) == [] == seen(a | {"n": 3.0})
    assert seen(a | {"n": 4}) == ['- "n": 3,', '+ "n": 4,'] and seen(a | {"rates": [100.0, False]})
    assert seen(a | {"rates": [100 * (1 + 1e-8), 0.1]}) == ["-  100.0,", "+  100.000001,"]
    assert seen(a | {"rates": [100.0]}) == ["-  100.0,", "-  0.1", "+  100.0"]
    assert seen(a | {"why": False}) == ['- "why": null', '+ "why": false']
    assert seen(a | {"new": None}) == ['+ "new": null,']
    assert seen("x\nz", b) == ["-y", "+z"] and seen(b, b, status=1) == ["-exit status 0", "+exit status 1"]


def test_largest_page_stays_below_2mb(tmp_path, capsys):
    largest = max(BASELINES.glob("*.jsonl.xz"), key=lambda each: each.stat().st_size)
    main(["report", str(largest), "--html", str(tmp_path / "out.html")])
    assert capsys.readouterr().out and (tmp_path / "out.html").stat().st_size < 2_000_000


@pytest.mark.parametrize("name", DRAWN)
def test_charts_are_valid_vega_lite(name):
    drawn, pictures = kept(name)["page"]["out"]["charts"], kept(name)["pictures"]["out"]
    specs = {**drawn, **{name: spec for name, spec in pictures.items() if isinstance(spec, dict)}}
    assert specs and [name for name, spec in specs.items() if not vega_lite().is_valid(spec)] == []
    misspelt = next(iter(specs.values()))
    misspelt["layer" if "layer" in misspelt else "concat"][-1]["marks"] = "red"
    assert not vega_lite().is_valid(misspelt), "a misspelt word is found"


@pytest.mark.parametrize("name", sorted(path.name for path in BASELINES.glob("*.jsonl.xz")))
def test_archive_lines_match_schema(name):
    schema = Draft202012Validator(json.loads((CHECKOUT / "docs" / "records.schema.json").read_text("utf-8")))
    with lzma.open(BASELINES / name, "rt", encoding="utf-8") as lines:
        grouped = itertools.groupby(map(json.loads, lines), lambda line: line["kind"])
        first = [line for _, group in itertools.islice(grouped, 8) for line in itertools.islice(group, 2)]
    assert {line["kind"] for line in first} == {"session", "engine", "measurement"}
    assert not [error.message for line in first for error in schema.iter_errors(line)]
