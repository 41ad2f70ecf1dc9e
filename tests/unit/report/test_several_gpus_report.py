"""The picture and the table of several GPUs, from engines whose waits were planted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from gpus import on_gpus, replicas
from strategies import H200

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.compare.deployments import deployments, with_wider
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.report.deployments import deployment_name, gpus_sections
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page.pictures import pictures
from pytest_slmserve.report.section import section_text
from pytest_slmserve.report.sweeps import heading


@pytest.fixture(scope="module")
def curve() -> Curve:
    planted = {"all_reduce_s": 1e-3, "imbalance": 0.2}
    return on_gpus((1, 2), shared=replicas(2, **planted), room={1: 4}, **planted)


def gpus_report(curves):
    return list(map(section_text, gpus_sections(curves)))


def test_the_picture_has_what_each_number_of_gpus_serves_most_in_all_and_per_gpu(curve):
    [picture] = [p for p in pictures(Findings(curves=[curve, *curve.wider])) if p.name == "gpus"]
    total, each, blocks = (panel["data"]["values"] for panel in picture.panels)
    found = deployments(curve)
    one, two = (max(d.tokens_per_s for d in found if d.gpus == n and not d.sharing) for n in (1, 2))
    [most] = [max(d.tokens_per_s for d in found if d.sharing == "gpus")]
    names = ("opt-tiny, one engine over all", "opt-tiny, a replica on each")
    expected = [(names[0], 1, one), (names[0], 2, two), (names[1], 1, one), (names[1], 2, most)]
    assert [(row["series"], row["x"], row["y"]) for row in total] == expected
    assert [(row["series"], row["x"], row["y"]) for row in each] == [(name, n, rate / n) for name, n, rate in expected]
    assert [row["x"] for row in blocks] == sorted({d.kv_blocks for d in found if d.kv_blocks})


def test_a_gpu_each_has_no_bound_of_engines_that_take_turns(curve):
    [picture] = [p for p in pictures(Findings(curves=[curve, *curve.wider])) if p.name == "replica-busy"]
    assert picture.panels == () and picture.why_not == "no replicas shared a GPU"


def test_without_several_gpus_there_is_neither(curve):
    one = replace(curve, wider=(), shared=())
    assert [*gpus_report([one])] == []
    assert "gpus" not in [picture.name for picture in pictures(Findings(curves=[one]))]


def test_the_table_tells_what_waits_what_each_gpu_takes_and_what_to_deploy(curve):
    text, legend = gpus_report([curve, *curve.wider])
    rows = [line.split() for line in text.splitlines()]
    waiting = next(row for row in rows if row[:4] == ["16", "1", "one", "engine"])
    assert waiting[4] == "4.00" and waiting[-1] == "yes"
    assert "16 concurrent requests do not fit into the KV memory of 1 GPU: 4.00 ran at once, the others waited." in text
    assert "TP 2, concurrency 16: GPU 0 350 W, SM 70.0 %, DRAM 85.0 %; GPU 1 280 W" in text
    assert "2 GPUs, concurrency 16: most requests/s: one engine, TP 2 (25.0)" in " ".join(text.split())
    assert "imbalance: between the one that takes most" in " ".join(legend.split())


def test_a_heading_tells_an_engine_over_several_gpus_from_one_on_a_single_one(curve):
    titles = [next(heading(each)) for each in (curve, *curve.wider)]
    assert [title.partition(" on ")[0] for title in titles] == ["opt-tiny", "opt-tiny, TP 2,"]
    real = replace(curve.wider[0].measurements[0].spec, platform="cuda")
    measured = [replace(m, spec=real, environment=H200) for m in curve.wider[0].measurements]
    assert next(heading(curve_of("opt-tiny", measured))) == "opt-tiny on 2 x NVIDIA H200"


def test_tables_of_one_model_say_in_what_they_differ(curve):
    """As where points of a sweep and those of this comparison settle for other times."""
    settled = [
        replace(m, load=replace(m.load, settle_lifetimes=2.0))
        for each in (curve, *curve.wider)
        for m in each.measurements
    ]
    both = with_wider([curve_of("opt-tiny", [m for m in settled if m.spec.tensor_parallel_size == n]) for n in (1, 2)])
    one, other, _ = gpus_report([curve, both[0]])
    assert one.splitlines()[0].startswith("opt-tiny, warm-up 1 on several GPUs: ")
    assert other.splitlines()[0].startswith("opt-tiny, warm-up 2 on several GPUs: ")
    assert gpus_report([curve])[0].startswith("opt-tiny on several GPUs: ")


def test_names_of_deployments(curve):
    one, *_, both = deployments(curve)
    assert [deployment_name(one), deployment_name(both)] == ["one engine", "2 replicas, a GPU each"]
    assert deployment_name(replace(both, sharing="mps")) == "2 replicas, mps"
    assert deployment_name(replace(both, tensor_parallel_size=2)) == "2 replicas, a GPU each, TP 2"


def test_advice_ends_with_what_to_deploy_on_several_gpus(curve, tmp_path, capsys):
    measured = [m for each in (curve, *curve.wider) for m in each.measurements]
    with Archive.open(tmp_path / "a.jsonl") as archive:
        for m in (*measured, *replicas(2, all_reduce_s=1e-3, imbalance=0.2)):
            archive.add(m)
    assert main(["advise", str(tmp_path / "a.jsonl")]) in (0, 10)
    told = " ".join(capsys.readouterr().out.split())
    assert "opt-tiny on 2 GPUs, concurrency 16: most requests/s: one engine, TP 2" in told
    assert main(["advise", str(tmp_path / "a.jsonl"), "--json"]) in (0, 10)
    [seen] = json.loads(capsys.readouterr().out)["several_gpus"]
    assert (seen["model"], seen["gpus"], seen["concurrency"]) == ("opt-tiny", 2, 16)
    best = seen["best_requests_per_s"]
    assert (best["deployment"], best["engines"], best["tensor_parallel_size"]) == ("one engine, TP 2", 1, 2)
    assert best["requests_per_s"] == pytest.approx(25, rel=0.01)
    assert seen["best_e2e_s"]["e2e_s"] > 0 and seen["best_joules_per_request"]["joules_per_request"] > 0
