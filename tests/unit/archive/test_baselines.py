"""The keeper of baselines: what is kept, under which name, and how it is found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_records import BUSY, KNOWN, engine_alone, repeats

from pytest_slmserve.analysis.compare.changes import against_stored
from pytest_slmserve.archive.baselines import SUFFIX, accept, baseline, baseline_name, baselines
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.errors import BadArchive, BadUsage
from pytest_slmserve.schema.records import Environment, Replica
from pytest_slmserve.schema.specs import OpenLoop

GOOD = repeats([1000, 1001, 1002])
CROWDED = {**BUSY, sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}
ON_CPU = Environment(platform="cpu", vllm="0.32.0", cpu="Xeon", cores=2)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        (KNOWN, "h200-vllm-0.26.0"),
        (
            replace(KNOWN, gpu_name="NVIDIA A100-SXM4-80GB", vllm="0.27.0rc1+cu130"),
            "a100-sxm4-80gb-vllm-0.27.0rc1+cu130",
        ),
        (replace(KNOWN, gpu_name="NVIDIA GeForce RTX 4090"), "geforce-rtx-4090-vllm-0.26.0"),
        (replace(KNOWN, gpu_name="NVIDIA H200 MIG 1g.18gb"), "h200-mig-1g.18gb-vllm-0.26.0"),
        (ON_CPU, "cpu-vllm-0.32.0"),
        (Environment(platform="simulated", gpu_name="simulated"), "simulated"),
        (replace(KNOWN, vllm=None), None),
        (replace(KNOWN, vllm="../.."), None),
        (replace(KNOWN, gpu_name=None), None),
        (Environment(), None),
    ],
)
def test_a_name_is_of_device_and_release(environment, name):
    assert baseline_name(environment) == name


@given(st.text(max_size=12), st.text(min_size=1, max_size=12))
def test_whatever_a_device_is_called_its_name_stays_in_the_folder(gpu_name, vllm):
    name = baseline_name(replace(KNOWN, gpu_name=gpu_name, vllm=vllm))
    if name is not None:
        assert Path("folder", name).parent == Path("folder") and not name.startswith((".", "-"))
        assert name.isascii() and name == name.lower()


def test_what_is_kept_is_an_ordinary_archive_that_can_be_compared_with(tmp_path):
    kept, left_out = accept(GOOD, tmp_path / "new" / "folder", claims={"rows": []})
    (path,) = kept
    assert path == tmp_path / "new" / "folder" / "h200-vllm-0.26.0.jsonl.xz" and left_out == []
    contents = read(path)
    assert [m.id for m in contents.measurements] == [m.id for m in GOOD] and contents.claims == {"rows": []}
    assert names(path.parent) == [path.name]
    slower = repeats([900, 901, 902], environment=replace(KNOWN, vllm="0.27.0"))
    assert [v.state.value for v in against_stored(contents.measurements, slower, 0.03)[0]] == ["fails", "fails"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (engine_alone(failures=2), "2 requests failed"),
        (engine_alone(preempted=3), "3 preemptions"),
        (engine_alone(environment=replace(KNOWN, vllm=None)), "release of vLLM is not known"),
        (replace(GOOD[0], replica=Replica("g", 0, 2, "s", "mps")), "it belongs to a run of several engines"),
        (replace(GOOD[0], load=OpenLoop(requests=8)), "a load without a steady window"),
    ],
)
def test_what_is_invalid_or_no_part_of_a_baseline_is_left_out_and_told(bad, why, tmp_path):
    by_path, [(left_out, reason)] = accept([*GOOD, bad], tmp_path)
    (kept,) = by_path.values()
    assert kept == GOOD and left_out is bad and why in reason
    with pytest.raises(BadUsage, match="nothing here can be a baseline: .*" + why):
        accept([bad], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_engines_that_shared_a_device_are_kept_all_or_none(tmp_path):
    def run(group, **facts):
        part = Replica(group, 0, 2, "s", "mps")
        first, second = engine_alone(launch="a", repeat=4), engine_alone(launch="b", repeat=4, **facts)
        return [replace(first, replica=part), replace(second, replica=replace(part, index=1))]

    sound, broken, torn = run("one"), run("two", failures=2), run("three")[:1]
    kept, left_out = accept([*sound, *broken, *torn], tmp_path)
    assert [*kept.values()] == [sound] and len(left_out) == 3
    assert [why.partition(":")[0] for _, why in left_out[:2]] == ["replica 2"] * 2
    assert left_out[2][1].endswith("of which others are missing")


@pytest.mark.parametrize("seen", [CROWDED, {**BUSY, sensors.STOLEN_CORES: 0.5}], ids=["degraded", "noisy"])
def test_what_is_degraded_or_noisy_is_kept(seen, tmp_path):
    doubtful = engine_alone(columns=seen, repeat=5)
    kept, left_out = accept([*GOOD, doubtful], tmp_path)
    assert left_out == [] and [*kept.values()] == [[*GOOD, doubtful]]


def test_a_refused_overwrite_leaves_everything_as_it_was(tmp_path):
    accept(GOOD, tmp_path)
    before = (tmp_path / "h200-vllm-0.26.0.jsonl.xz").read_bytes()
    other = [*repeats([2000], 16), engine_alone(environment=replace(KNOWN, gpu_name="NVIDIA H100"))]
    with pytest.raises(BadUsage, match="h200-vllm-0.26.0.jsonl.xz is there already"):
        accept(other, tmp_path)
    assert names(tmp_path) == ["h200-vllm-0.26.0.jsonl.xz"] and (tmp_path / names(tmp_path)[0]).read_bytes() == before
    accept(other, tmp_path, overwrite=True)
    assert [m.load.concurrency for m in baseline(tmp_path, "h200-vllm-0.26.0")[1].measurements] == [16]
    assert len(names(tmp_path)) == 2


def test_each_device_and_release_has_its_own(tmp_path):
    newer, on_cpu = replace(KNOWN, vllm="0.27.0"), repeats([9, 9], environment=ON_CPU, sensed=False)
    kept, _ = accept([*GOOD, *repeats([5, 5], environment=newer), *on_cpu], tmp_path)
    assert [path.name for path in kept] == [
        f"{name}{SUFFIX}" for name in ("h200-vllm-0.26.0", "h200-vllm-0.27.0", "cpu-vllm-0.32.0")
    ]
    assert [len(each.measurements) for each in baselines(tmp_path).values()] == [2, 3, 2]


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadUsage, match="cannot write to .*file: .*\n.*--folder with") as error:
        accept(GOOD, tmp_path / "file")
    assert "--slm-records" not in str(error.value)


def test_a_write_that_fails_leaves_nothing(tmp_path):
    endless = replace(GOOD[0], run=replace(GOOD[0].run, began_s=float("inf")))
    with pytest.raises(BadArchive, match="finite"):
        accept([*GOOD, endless], tmp_path)
    assert names(tmp_path) == []


def test_one_that_cannot_be_read_does_not_hide_the_others(tmp_path):
    accept(GOOD, tmp_path)
    (tmp_path / f"broken{SUFFIX}").write_text("not xz")
    (tmp_path / "notes.txt").write_text("of no concern")
    (bad, broken), (path, good) = baselines(tmp_path).items()
    assert (bad.name, broken.measurements) == (f"broken{SUFFIX}", ()) and "is not xz" in broken.notes[0]
    assert (path.name, len(good.measurements), good.notes) == (f"h200-vllm-0.26.0{SUFFIX}", 3, ())
    with pytest.raises(BadArchive):
        baseline(tmp_path, "broken")


def test_one_is_found_by_its_name(tmp_path):
    accept(GOOD, tmp_path)
    assert baseline(tmp_path, "h200-vllm-0.26.0") == baseline(tmp_path, "h200-vllm-0.26.0.jsonl.xz")
    with pytest.raises(BadUsage, match="no baseline ../h200-vllm-0.26.0 in .*\n.*one of h200-vllm-0.26.0"):
        baseline(tmp_path, "../h200-vllm-0.26.0")
    with pytest.raises(BadUsage, match="slmserve compare RECORDS --save"):
        baseline(tmp_path / "none", "h200-vllm-0.26.0")
    assert baselines(tmp_path / "none") == {}
