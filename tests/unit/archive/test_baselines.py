"""What becomes a baseline, under which name, all or none of it; and the two files beside an archive, of a runner's
noise by the place where it was measured, and of waivers."""

import json
import tempfile
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from refusals import refused
from stored_records import BASELINE, BUSY, KNOWN, engine_alone, repeats
from strategies import measurement

from pytest_slmserve.analysis.gate.decision import Calibration, Comparison, GateCriteria, PairNoise, Rates
from pytest_slmserve.analysis.gate.diagnosis import Waiver
from pytest_slmserve.analysis.gate.launch_pairs import Gated, Launch, PairOfLaunches
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive import baselines
from pytest_slmserve.archive.baselines import SUFFIX, accept, baseline, keep, noise_key, read_calibrations
from pytest_slmserve.archive.store import Archive, read
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.errors import BadArchive
from pytest_slmserve.schema.records import Environment, Measurement, Replica
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

ON_CPU = Environment(platform="cpu", vllm="0.32.0", cpu="Xeon", cores=2)
NAME = "h200-vllm-0.26.0"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("environment", "name"), [
    (KNOWN, NAME),
    (replace(KNOWN, gpu_name="NVIDIA A100-SXM4-80GB", vllm="0.27.0rc1+cu1"), "a100-sxm4-80gb-vllm-0.27.0rc1+cu1"),
    (replace(KNOWN, gpu_name="NVIDIA GeForce RTX 4090"), "geforce-rtx-4090-vllm-0.26.0"),
    (replace(KNOWN, gpu_name="NVIDIA H200 MIG 1g.18gb"), "h200-mig-1g.18gb-vllm-0.26.0"),
    (ON_CPU, "cpu-vllm-0.32.0"),
    (Environment(platform="simulated", gpu_name="simulated"), "simulated"),
    (replace(KNOWN, vllm=None), None), (replace(KNOWN, vllm="../.."), None), (replace(KNOWN, gpu_name=None), None),
    (Environment(), None),
])  # fmt: skip
def test_baseline_name_shows_device_release(environment, name):
    assert baselines.baseline_name(environment) == name


@given(st.text(max_size=12), st.text(min_size=1, max_size=12))
def test_baseline_name_stays_in_folder(gpu_name, vllm):
    name = baselines.baseline_name(replace(KNOWN, gpu_name=gpu_name, vllm=vllm))
    if name is not None:
        assert Path("folder", name).parent == Path("folder") and not name.startswith((".", "-"))
        assert name.isascii() and name == name.lower()


def test_accepted_baseline_is_results_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    path = tmp_path / "new" / "folder" / f"{NAME}.jsonl.xz"
    assert accept(BASELINE, path.parent, claims={"rows": []}) == ({path: BASELINE}, [])
    contents = read(path)
    assert [m.id for m in contents.measurements] == [m.id for m in BASELINE] and contents.claims == {"rows": []}
    assert names(path.parent) == [path.name] and contents.plans[0][1] == {}
    newer, on_cpu = replace(KNOWN, vllm="0.27.0"), repeats([9, 9], environment=ON_CPU, sensed=False)
    kept, _ = accept([*BASELINE, *repeats([5, 5], environment=newer), *on_cpu], tmp_path)
    assert [path.name for path in kept] == [f"{name}{SUFFIX}" for name in (NAME, "h200-vllm-0.27.0", "cpu-vllm-0.32.0")]
    assert [len(each.measurements) for each in baselines.baselines(tmp_path).values()] == [2, 3, 2]
    assert baselines.kept_archives(tmp_path) == {path.name.removesuffix(SUFFIX): path for path in sorted(kept)}


@pytest.mark.parametrize(("bad", "facts"), [
    (engine_alone(failures=2), ["2 requests"]), (engine_alone(preempted=3), ["3 preemptions"]),
    (engine_alone(environment=replace(KNOWN, vllm=None)), ["vLLM", "known"]),
    (replace(BASELINE[0], replica=Replica("g", 0, 2, "s", "mps")), ["several engines"]),
    (replace(BASELINE[0], load=OpenLoop(requests=8)), ["steady"]),
    (replace(BASELINE[0], load=ClosedLoop(8, requests=8)), ["steady"]),
])  # fmt: skip
def test_invalid_measurements_leave_baseline(bad, facts, tmp_path):
    by_path, [(left_out, reason)] = accept([*BASELINE, bad], tmp_path)
    assert [*by_path.values()] == [BASELINE] and left_out is bad and all(fact in reason for fact in facts)
    for nothing, why in (([bad], reason), ([], "")):
        with refused(why):
            accept(nothing, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_replicas_enter_baseline_together(tmp_path):
    def run(group, **facts):
        part = Replica(group, 0, 2, "s", "mps")
        first, second = engine_alone(launch="a", repeat=4), engine_alone(launch="b", repeat=4, **facts)
        return [replace(first, replica=part), replace(second, replica=replace(part, index=1))]

    sound, broken, torn = run("one"), run("two", failures=2), run("three")[:1]
    degraded = {**BUSY, sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}
    noisy = {**BUSY, sensors.STOLEN_CORES: 0.5}
    sound += [engine_alone(columns=seen, repeat=5 + i) for i, seen in enumerate((degraded, noisy))]
    kept, left_out = accept([*sound, *broken, *torn], tmp_path)
    assert [*kept.values()] == [sound] and [m for m, _ in left_out] == [*broken, *torn]
    assert all("replica 2" in why for _, why in left_out[:2]) and "several engines" in left_out[2][1]


def test_refused_overwrite_keeps_baseline(tmp_path, monkeypatch):
    accept(BASELINE, tmp_path)
    path = tmp_path / f"{NAME}.jsonl.xz"
    before = path.read_bytes()
    other = [*repeats([2000], 16), engine_alone(environment=replace(KNOWN, gpu_name="NVIDIA H100"))]
    with refused(path, hint="--replace") as caught:
        accept(other, tmp_path)
    assert "h100" not in caught.value.problem and names(tmp_path) == [path.name] and path.read_bytes() == before
    accept(other, tmp_path, overwrite=True)
    assert [m.load.concurrency for m in baseline(tmp_path, NAME)[1].measurements] == [16]
    assert len(names(tmp_path)) == 2
    (tmp_path / "file").touch()
    endless = replace(BASELINE[0], run=replace(BASELINE[0].run, began_s=float("inf")))
    with refused("finite", kind=BadArchive):
        accept([*BASELINE, endless], tmp_path / "new")
    with refused(tmp_path / "file", hint="--folder") as error:
        accept(BASELINE, tmp_path / "file")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pytest_slmserve.archive.store._append", full)
    with refused("No space left", hint="--folder") as other:
        accept(BASELINE, tmp_path / "new")
    assert "--slm-records" not in f"{error.value}{other.value}" and names(tmp_path / "new") == []


def test_baseline_is_found_by_name(tmp_path):
    ((path, _),) = accept(BASELINE, tmp_path)[0].items()
    assert baseline(tmp_path, NAME) == baseline(tmp_path, f"{NAME}.jsonl.xz") == (path, read(path))
    with refused(f"../{NAME}", tmp_path, hint=NAME):
        baseline(tmp_path, f"../{NAME}")
    with refused(NAME, tmp_path / "none", hint="--save"):
        baseline(tmp_path / "none", NAME)
    assert baselines.baselines(tmp_path / "none") == {}
    later = replace(BASELINE[0], measured_at="2027-01-01T00:00:00.000+00:00")
    with Archive.open(path) as archive:
        archive.begin({}, {})
        archive.add(later)
    last_of_each_case = baseline(tmp_path / "none", str(path))[1].measurements
    assert [m.id for m in last_of_each_case] == [later.id] and len(baseline(tmp_path, NAME)[1].measurements) == 4
    accept(BASELINE, tmp_path := tmp_path / "others")
    (tmp_path / f"broken{SUFFIX}").write_text("not xz")
    (tmp_path / f"folder{SUFFIX}").mkdir()
    (tmp_path / "notes.txt").write_text("of no concern")
    (bad, broken), (path, good) = baselines.baselines(tmp_path).items()
    assert (bad.name, broken.measurements) == (f"broken{SUFFIX}", ()) and "xz" in broken.notes[0]
    assert (path.name, len(good.measurements), good.notes) == (f"{NAME}{SUFFIX}", 3, ())
    with pytest.raises(BadArchive):
        baseline(tmp_path, "broken")


# The noise of a runner

HERE = Environment(platform="cuda", gpu_name="NVIDIA H200", driver="580.1", vllm="0.26.0")


def seen(*loads: int, **facts: object) -> list[Measurement]:
    """What one launch measured; facts: of its loads."""
    return [replace(measurement(), environment=HERE, load=ClosedLoop(n, **facts)) for n in loads]  # type: ignore[arg-type]


BOTH = seen(8, 256)
USUAL = GateCriteria()
PLACE = noise_key(BOTH, USUAL)
RATES = Rates(0.0, 0.99, 4.2)
NOISE = Calibration(PairNoise(("tokens/s",), ((0.01,), (-0.01,))), RATES, {"tokens/s": Rates(0.5, 0.0, 5.0)})
KEPT = baselines.StoredNoise(PLACE, "2026-11-21T12:00:00+00:00", NOISE)


def of_each(**changes: object) -> list[Measurement]:
    return [replace(m, **changes) for m in BOTH]


@pytest.mark.parametrize(("launch", "terms", "is_here"), [
    (of_each(environment=replace(HERE, vllm="0.27.0")), [USUAL], True),
    (of_each(environment=replace(HERE, driver="590.2")), [USUAL], False),
    (seen(8, 128), [USUAL], False), (seen(8, 256, ramp_up="burst"), [USUAL], False),
    (seen(8, 256, window_s=1.0), [USUAL], False),
    (of_each(spec=replace(BOTH[0].spec, model="facebook/opt-2.7b")), [USUAL], False),
    (of_each(spec=replace(BOTH[0].spec, interface="server")), [USUAL], False),
    ([BOTH[0], replace(BOTH[1], workload=replace(BOTH[0].workload, hash="other"))], [USUAL], False),
    *((BOTH, terms, False) for terms in ([GateCriteria(0.05)], [GateCriteria(pairs=8)], [USUAL, "cold"])),
])  # fmt: skip
def test_calibration_key_covers_noise_sources(launch, terms, is_here):
    facts = "opt-1.3b", (8, 256), "cuda", "NVIDIA H200", "580.1", 0.03, 12, "warm", PLACE.asked
    assert baselines.NoiseKey(*facts) == PLACE and (noise_key(launch, *terms) == PLACE) is is_here
    assert noise_key([replace(BOTH[0], load=OpenLoop(requests=5))], USUAL).loads == (0,)
    for name, value, fact in (("margin", 2.0, "2"), ("pairs", 1, "1 pairs")):
        with refused(fact):
            replace(PLACE, **{name: value})


def test_kept_calibration_is_found_again(tmp_path):
    records, path = tmp_path / "new" / "records.jsonl", tmp_path / "new" / "calibration.json"
    assert read_calibrations(records) == {}
    keep(records, KEPT)
    assert names(tmp_path / "new") == [path.name] and read_calibrations(records) == {PLACE: KEPT}
    (entry,) = json.loads(path.read_text("utf-8"))
    keep(path, other := replace(KEPT, place=replace(PLACE, model="opt-125m")))
    keep(path, later := replace(KEPT, measured_at="2026-12-01T12:00:00+00:00"))
    assert read_calibrations(path) == {PLACE: later, other.place: other}
    assert entry.pop("spread") == {"tokens/s": asdict(NOISE.noise.spread["tokens/s"])}
    assert (entry.pop("caches"), entry.pop("asked")) == ("warm", PLACE.asked)
    path.write_text(json.dumps([entry]), "utf-8")  # as an older release wrote it
    assert [*read_calibrations(path)] == [replace(PLACE, asked="")]
    path = tmp_path / "calibration.json"
    (tmp_path / "file").touch()
    with refused(tmp_path / "file" / path.name, hint="--slm-resume"):
        keep(tmp_path / "file" / "r.jsonl", KEPT)
    for text in ("", "{", "[1]", '[{"model": "x"}]', "5", "\udcff"):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with refused(path, hint="--slm-calibrate"):
            read_calibrations(path)
    path.unlink()
    path.mkdir()
    with refused(path, hint="--slm-calibrate"):
        read_calibrations(path)


def gated(*launches: list[Measurement]) -> Gated:
    """A gate that passes: of pairs of such launches."""
    facts = {"gated": True, "why": "", "n": 4, "ratio": None, "worse": 0.0, "sd": 0.01, "detectable": 0.02}
    passed = Comparison("tokens/s", "higher", (), outcome=State.PASSES, decided_at=4, interim=(), **facts)
    both = (Launch(tuple(each), (), (), (), ()) for each in launches)
    pairs = tuple(PairOfLaunches(1, launch, launch) for launch in both)
    return Gated("opt-1.3b", "g", USUAL, pairs, (), (passed,), (), ())


def test_noisy_runner_weakens_gate(tmp_path):
    records, judged = tmp_path / "records.jsonl", gated(BOTH)
    assert baselines.judged_by_noise(judged, records) == (judged, None)
    keep(records, KEPT)
    weaker, known = baselines.judged_by_noise(judged, records)
    assert known == KEPT and [each.outcome for each in weaker.gated] == [State.INCONCLUSIVE]
    assert replace(weaker, gated=judged.gated) == replace(judged, calibrated=True)
    for elsewhere in (gated(seen(8, 256, window_s=1.0)), gated(), replace(judged, caches="cold")):
        assert baselines.judged_by_noise(elsewhere, records) == (elsewhere, None)
    (records.with_name("calibration.json")).write_text("{")
    assert baselines.judged_by_noise(gated(), records)[1] is None, "of no pair nothing is asked"


# Waivers

WAIVER = Waiver("requests_per_s", "opt-1.3b", "H200", "Ada", "slower attention kernel", date(2027, 1, 31))
ROW = {**asdict(WAIVER), "until": "2027-01-31"}
WORDS = st.text("abc xyz-.*0", min_size=1, max_size=8).filter(str.strip).map(str.strip)


def waivers_of(folder: Path, text: str | bytes | None) -> tuple[Waiver, ...]:
    path = folder / "waivers.json"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return baselines.read_waivers(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(waivers=st.lists(st.builds(Waiver, *[WORDS] * 5, st.dates()), max_size=4))
def test_waivers_are_read_back(tmp_path, waivers):
    told = [{**asdict(w), "owner": f" {w.owner}\n", "until": f" {w.until.isoformat()}"} for w in waivers]
    told.append({**ROW, "model": "facebook/OPT-1.3B"})
    assert waivers_of(tmp_path, json.dumps(told)) == (*waivers, WAIVER)


@pytest.mark.parametrize(("rows", "facts"), [
    *(([ROW, {k: v for k, v in ROW.items() if k != name}], ("row 2", name)) for name in ROW),
    *(([{**ROW, name: " "}], ("row 1", name, "empty")) for name in ROW),
    *(([ROW, {**ROW, "owner": value}], ("row 2", "owner", value)) for value in (3, None, [])),
    *(([row], ("row 1", kind, repr(row))) for row, kind in (("a", "str"), (7, "int"), ([], "list"))),
    *(([{**ROW, "until": day}], ("row 1", "until", repr(day)))
      for day in ("2027-02-30", "20270131", "2027-W04-7", "31.1.2027", "never", "2027-1-3")),
    *((rows, ("list",)) for rows in ({}, {"waivers": []}, None, "[]")),
    ([{**ROW, "untill": "2030-01-01"}], ("row 1", "'untill'")), ([{**ROW, "z": "", "b": ""}], ("row 1", "'b'")),
])  # fmt: skip
def test_wrong_waiver_row_is_named(tmp_path, rows, facts):
    is_unknown = facts[-1] in ("'untill'", "'b'")
    hint = "one of endpoint, model, device, owner, reason, until" if is_unknown else '"until": "2027-01-31"'
    with refused(tmp_path / "waivers.json", *facts, hint=hint):
        waivers_of(tmp_path, json.dumps(rows))


@pytest.mark.parametrize(("text", "fact"), [
    (b"[\n{]", "line 2"), (b"", "line 1"), (b"\xff\xfe", "JSON text"), (b"[" * 10**6, "JSON"), (None, "No such file"),
], ids=["damaged", "empty", "no text", "deep", "missing"])  # fmt: skip
def test_malformed_waiver_file_is_named(tmp_path, text, fact):
    with refused(tmp_path / "waivers.json", fact, hint='"owner"'):
        waivers_of(tmp_path, text)
