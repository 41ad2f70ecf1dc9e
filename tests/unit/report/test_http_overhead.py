"""What the server costs, from sweeps by both interfaces that differ in planted ways."""

from __future__ import annotations

from dataclasses import replace

import pytest
from strategies import H200, measurement

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.compare.deployments import at_both_interfaces
from pytest_slmserve.analysis.metrics.window import window_trace
from pytest_slmserve.analysis.sweep.curve import curve_of, labels
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.report.deployments import interfaces_sections
from pytest_slmserve.report.section import section_text

LOADS = (4, 8, 16)


def sweep(interface="engine", slower=1.0, loads=LOADS, model="opt-1.3b", **more):
    """Two repeats of each load on a launch of their own."""
    made = [
        measurement(n, slower * 100 * n, model=model, repeat=repeat, launch=f"{interface}-{repeat}", **more)
        for n in loads
        for repeat in (1, 2)
    ]
    return [replace(m, spec=replace(m.spec, interface=interface)) for m in made]


def curve(*args, **more):
    made = sweep(*args, **more)
    return curve_of(made[0].spec.model.split("/")[-1], made)


def test_each_load_that_both_have_is_a_row():
    ((_, _, loads),) = at_both_interfaces([curve(), curve("server", 0.9, loads=(8, 16, 32))])
    assert [at.engine.concurrency for at in loads] == [8, 16]
    assert [at.ratio.value for at in loads] == pytest.approx([0.9, 0.9], rel=0.02)
    assert all(at.ratio.low <= at.ratio.value <= at.ratio.high for at in loads)


def test_front_ends_are_no_matter_of_the_engine_and_are_named():
    several = [replace(m, spec=replace(m.spec, extra=(("api_server_count", 4),))) for m in sweep("server", 1.2)]
    curves = [curve(), curve("server"), curve_of("opt-1.3b", several)]
    found = [loads[0].ratio.value for _, _, loads in at_both_interfaces(curves)]
    assert found == pytest.approx([1.0, 1.2], rel=0.02)
    text = "\n".join(map(section_text, interfaces_sections(curves)))
    assert "opt-1.3b through the server beside" in text
    assert "opt-1.3b through the server with 4 front ends beside" in text
    assert labels(curves) == [
        f"opt-1.3b, {interface}"
        for interface in ("engine interface", "server interface", "server interface with 4 front ends")
    ]


def test_where_more_prompts_come_together_fewer_steps_have_one():
    alone, together = (replace(m, launch=f"{m.launch}-prompts") for m in sweep(loads=(8,)))
    prompts = [[64] * 20, [64, 0, 0, 0] * 5]
    made = [replace(m, run=with_prompts(m.run, each)) for m, each in zip((alone, together), prompts)]
    served = [replace(m, spec=replace(m.spec, interface="server")) for m in made[1:]]
    ((_, _, loads),) = at_both_interfaces([curve_of("opt-1.3b", made[:1]), curve_of("opt-1.3b", served)])
    assert loads[0].prompt_steps == pytest.approx((1.0, 0.25), abs=0.02)


def with_prompts(run, prompts):
    """The same steps, of which each in the window processed so many prompt tokens, over and over."""
    inside = window_trace(run).steps
    column = [prompts[(i - inside.start) % len(prompts)] for i in range(len(run.steps))]
    return replace(run, steps=replace(run.steps, prompt_tokens=tuple(column)))


def test_another_environment_another_model_and_one_interface_alone_are_no_comparison():
    assert at_both_interfaces([curve(), curve()]) == []
    assert at_both_interfaces([curve(), curve("server", model="opt-2.7b")]) == []
    assert at_both_interfaces([curve(), curve("server", environment=replace(H200, cores=8))]) == []
    assert at_both_interfaces([curve(loads=(4,)), curve("server", loads=(8,))]) == []
    assert [*interfaces_sections([curve()])] == []


def test_a_report_of_both_archives_has_the_table(tmp_path, capsys):
    for interface, slower in (("engine", 1.0), ("server", 0.8)):
        with Archive.open(tmp_path / f"{interface}.jsonl") as archive:
            for made in sweep(interface, slower):
                archive.add(made)
    assert main(["report", *(str(tmp_path / f"{interface}.jsonl") for interface in ("engine", "server"))]) in (0, 1)
    text = capsys.readouterr().out
    assert "opt-1.3b through the server beside the engine: NVIDIA H200, vLLM 0.26.0, 2 launches and 2 launches" in text
    table = text.split("beside the engine")[1]
    row = next(line.split() for line in table.splitlines() if line.split()[:1] == ["16"])
    assert row[1:3] == ["1,600", "1,280"] and float(row[3]) == pytest.approx(-20, abs=0.5)
    assert "prompt steps: steps that processed a prompt" in " ".join(text.split())
