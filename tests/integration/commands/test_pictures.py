"""`report --figures` with the renderer itself: which pictures there are, and what is told where one cannot be drawn."""

import sys

from command_line import refused, said
from swept import archive, measured, watched

SENSED = ("sm-per-batch", "energy-per-token", "utilisation", "memory-bound", "decoding")


def test_pictures_of_several_archives_are_written_and_named(tmp_path, capsys):
    small, large = measured((1, 512), model="opt-125m"), measured((1, 256))
    paths = [archive(tmp_path / f"{i}.jsonl", watched(m)) for i, m in enumerate((small, large))]
    out = tmp_path / "new" / "pictures"
    seen = said(capsys, "report", *paths, "--figures", out, "--format", "svg")
    names = [f"{name}.svg" for name in ("sweeps", "latency", *SENSED)]
    assert seen.status == said(capsys, "report", *paths).status and seen.err == ""
    assert [line for line in seen.out.splitlines() if "drawn: " in line] == [f"drawn: {out / name}" for name in names]
    assert {path.name for path in out.iterdir()} == set(names)
    picture = (out / "sm-per-batch.svg").read_text("utf-8")
    assert "opt-125m" in picture and "opt-1.3b" in picture


def test_without_sensors_the_sweeps_are_drawn_and_the_rest_is_excused(tmp_path, capsys):
    path, out = archive(tmp_path / "a.jsonl", measured((1, 64))), tmp_path / "out"
    told = said(capsys, "report", path, "--figures", out).out
    assert all((out / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("sweeps", "latency"))
    assert all(f"not drawn: {name}" in told for name in SENSED)


def test_nothing_to_draw_a_folder_that_cannot_be_made_and_a_missing_renderer_are_refused(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    seen = said(capsys, "report", archive(tmp_path / "empty.jsonl", []), "--figures", out)
    assert seen.status == 4 and seen.err.startswith("error: ") and not out.exists()
    path = archive(tmp_path / "a.jsonl", measured((1, 64)))
    refused(said(capsys, "report", path, "--figures", path), str(path), "--figures")
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    refused(said(capsys, "report", path, "--figures", out), "pip install vl-convert-python")
