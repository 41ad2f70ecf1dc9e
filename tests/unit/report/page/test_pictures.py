"""Pictures for files: of planted findings they have the values that are kept, what cannot be drawn says why, and
Vega-Lite knows them."""

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

from gpus import PLANTED, on_gpus, replicas
from launches import pairs
from planted import gated, lawful
from refusals import refused
from sections import difference, in_layers, vega_lite
from strategies import job_point, measurement, noisy_curve, point, shared_point

from pytest_slmserve.analysis.points import Point, Summary
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page.pictures import Picture, draw_pictures, pictures, whole_picture
from pytest_slmserve.schema.specs import EngineSpec

SENSED = {
    "gpu_util": 0.99, "engine_active": 0.75, "sm_active": 0.5, "sm_active_max": 0.6, "sm_occupancy": 0.1,
    "sm_occupancy_max": 0.2, "dram_active": 0.4, "tensor_active": 0.05, "decode_dram": 0.6, "decode_tensor": 0.1,
    "power_w": 300.0, "energy_per_token_j": 0.02,
}  # fmt: skip
LOADS = (1, 4, 16, 64, 256, 512)


def curve(subject: str, *points: Point, shared=()) -> Curve:
    return Curve(subject=subject, points=points, shared=tuple(shared), measurements=(measurement(model=subject),))


def sensed(concurrency: int, rate: float = 1000.0, **figures: object) -> Point:
    return replace(point(concurrency, [rate, rate]), ttft_p50_s=0.01, **figures)


def alone(rates=(1000.0, 1000.0), concurrency: int = 96, **figures: object) -> Point:
    waits = [256 * concurrency / rate for rate in rates]
    each = tuple(Summary(e2e_s=wait, e2e_p99_s=2 * wait) for wait in waits)
    return replace(point(concurrency, rates), each=each, **figures)


def told(picture: Picture) -> str:
    """Its panels without their layers and axes, which charts have alike."""
    shown = "; ".join(picture.origins) if picture.panels else picture.why_not
    panels = [re.sub(r"(?m)^(\+|[xy]:) .*\n?", "", in_layers(panel)) for panel in picture.panels]
    return "\n".join([f"# {picture.name}: {shown}", *panels])


# fmt: off
FIVE = [sensed(1, **SENSED), sensed(2), sensed(8, degraded=("the clock",), **SENSED | {"sm_active": 0.7})]
BUSY = [sensed(c, rate, **SENSED) for c, rate in ((1, 250.0), (2, 500.0), (4, 1000.0))]
ENERGY = [(300.0 + i, 0.1 * i + 0.01, limit) for limit in (700.0, 350.0) for i in range(2)]
LIMITS = tuple(Summary(power_w=p, energy_per_token_j=j, power_limit_w=limit) for p, j, limit in ENERGY)
TURNS, MPS = (shared_point(2, (900.0, 900.0), sharing=way) for way in ("time-slicing", "mps"))
THREE = shared_point(3, (1190.0, 1210.0))
TOLD_APART = [
    MPS, shared_point(2, (700.0, 700.0), pinned=True), shared_point(2, (600.0, 600.0), thread_percentage=50),
    shared_point(2, (400.0, 400.0), concurrency=48, degraded=("the clock",)), shared_point(3, ()),
]
OF_REPLICAS = ("gpu_util", "engine_active", "sm_active", "dram_active", "power_w")
DEVICE = shared_point(2, (9e2, 9e2), **{name: SENSED[name] for name in OF_REPLICAS} | {"energy_per_token_j": 0.01})
GRID = [job_point(output_tokens=n, rate=r) for n in (32, 256) for r in (None, 10.0)]
CACHES = [
    job_point(spec=EngineSpec("opt-1.3b", kv_cache_bytes=n << 20), kv_blocks=n, batch=float(n), preemptions=3.0)
    for n in (64, 1024)
]
BATCHES = [job_point(spec=EngineSpec("opt-1.3b", max_num_seqs=n)) for n in (64, 128)]
H100S = [replace(job, environment=replace(job.environment, gpu_name="NVIDIA H100 80GB HBM3")) for job in BATCHES]
SIZED = [job_point(spec=EngineSpec(model), output_tokens=n) for model in ("opt-6.7b", "gpt-j-6b") for n in (32, 256)]
WAYS = [
    job_point(rate=r, spec=EngineSpec("opt-1.3b", extra=() if way == "continuous" else (("batching", way),)))
    for r in (5.0, None) for way in ("continuous", "none", "static")
]
CURVES = {
    "sensors, a load without its reading": [curve("opt-125m", *FIVE), curve("opt-1.3b", sensed(4))],
    "utilisation over the share of the most throughput": [curve("opt-125m", *BUSY)],
    "energy under two limits": [curve("opt-1.3b", replace(point(256, [1000.0]), each=LIMITS))],
    "replicas without one engine at their load": [curve("opt-1.3b", alone(concurrency=48), shared=[MPS])],
    "two ways of sharing": [curve("opt-1.3b", alone((990.0, 1010.0)), shared=[THREE, MPS, TURNS])],
    "loads and settings": [curve("opt-1.3b", alone((500.0, 500.0), 48), alone(), shared=TOLD_APART)],
    "one engine's kernels": [curve("opt-1.3b", alone(engine_active=0.8), shared=[MPS, THREE])],
    "one engine's utilisation": [curve("opt-1.3b", alone(gpu_util=0.7), shared=[MPS])],
    "the device of replicas": [curve("opt-1.3b", alone(**SENSED), shared=[DEVICE])],
}
JOBS = {
    "lengths": GRID, "limits": BATCHES, "caches": CACHES, "ways of batching": [*WAYS, job_point()],
    "models of one size, which would hide each other": [*GRID, *SIZED], "two cards": [*BATCHES, *H100S],
}
# fmt: on


def test_pictures_match_expected_file():
    one = gated(pairs(4, speed=0.9))
    found = {name: Findings(curves=curves) for name, curves in CURVES.items()}
    found |= {f"jobs: {name}": Findings(jobs=jobs) for name, jobs in JOBS.items()}
    several = on_gpus((1, 2), shared=replicas(2, **PLANTED), room={1: 4}, **PLANTED)
    found["several GPUs"] = Findings(curves=[several, *several.wider])
    fast, slow = (lawful(LOADS, (1, 1.01), model=name, t_inf=t) for name, t in (("fast", 1e4), ("slow", 10.0)))
    short = noisy_curve({1: 1.0, 2: 2.0})
    found |= {"any speed is on one scale": Findings(curves=[fast, slow, short]), "one": Findings(curves=[fast, short])}
    others = replace(one, gate="other"), replace(one, model="x"), gated(pairs(4, failures=1))
    found["gates"] = Findings(gates=[one, *others])
    drawn = {name: list(pictures(each)) for name, each in found.items()}
    specs = [whole_picture(picture) for each in drawn.values() for picture in each if picture.panels]
    assert all(map(vega_lite().is_valid, specs))
    drawn = {name: [each for each in some if each.name not in ("sweeps", "latency")] for name, some in drawn.items()}
    shown = {name: "\n".join(map(told, each)) for name, each in drawn.items()}
    assert difference("pictures", shown) == ""


def test_each_picture_becomes_file(tmp_path, monkeypatch):
    nothing = {"no sweep": Findings(), "no valid point": Findings(curves=[Curve(subject="x")])}
    nothing["gate-opt-1.3b: no pair"] = Findings(gates=[gated(pairs(4, failures=1))])
    for fact, found in nothing.items():
        with refused(fact):
            draw_pictures(found, tmp_path / "out", "png")
    assert not [*tmp_path.iterdir()], "no file is made"
    forms = {"vegalite_to_png": lambda spec, scale: b"png" * scale, "vegalite_to_svg": lambda spec: f"svg {spec}"}
    monkeypatch.setitem(sys.modules, "vl_convert", SimpleNamespace(**forms))
    found = Findings(curves=[lawful(LOADS, (1, 1.01))])
    for form in ("png", "svg"):
        lines = draw_pictures(found, tmp_path / form, form)
        for line, picture in zip(lines, pictures(found), strict=True):
            path = tmp_path / form / f"{picture.name}.{form}"
            assert path.exists() is bool(picture.panels) and (str(path) in line or picture.why_not in line)
    assert json.loads((tmp_path / "svg" / "sweeps.svg").read_text("utf-8")[4:])["title"]["text"] == "sweeps"
    assert (tmp_path / "png" / "sweeps.png").read_bytes() == b"pngpng", "twice as many pixels"
    (tmp_path / "svg" / "sweeps.png").mkdir()
    with refused("sweeps.png"):
        draw_pictures(found, tmp_path / "svg", "png")
