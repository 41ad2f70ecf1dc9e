"""Replicas, engines on several GPUs and both interfaces: planted ones have the sections that are kept, each gain is
over the right engine, and the best deployment is the best of all."""

from dataclasses import replace

import pytest
from gpus import PLANTED, on_gpus, replicas
from html_pages import values_of
from sections import difference, in_layers, in_words, rows_of, tables_of
from strategies import H200, measurement, point, shared_point as set_of

from pytest_slmserve.analysis.compare.deployments import at_both_interfaces, deployments as on_several, with_wider
from pytest_slmserve.analysis.metrics.gpu_figures import EngineMemory, GpuMemory
from pytest_slmserve.analysis.metrics.window import window_trace
from pytest_slmserve.analysis.points import ratio
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.report import deployments, findings, text_table
from pytest_slmserve.report.section import Section
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB

OTHER = replace(H200, gpu_name="NVIDIA A100-SXM4-80GB")
REMOTE = Environment(platform="remote", url="http://one")
SENSED = {
    "gpu_util": 1.0, "engine_active": 0.95, "sm_active": 0.5, "dram_active": 0.4, "tensor_active": 0.05,
    "power_w": 300.0, "power_capped": 0.25, "energy_per_token_j": 0.02, "own_cores": 2.5,
}  # fmt: skip


def curve(*shared, model="opt-1.3b", environment=H200, points=()) -> Curve:
    alone = points or (replace(point(96, [1000.0, 1000.0]), e2e_s=24.6, e2e_p99_s=25.1),)
    made = (measurement(model=model, environment=environment),)
    return Curve(subject=model, points=tuple(alone), shared=shared, measurements=made)


def sections(*curves, others=()) -> list:
    return [*deployments.replica_sections(curves, [*dict.fromkeys(s for c in curves for s in c.shared), *others])]


PROBLEMS = ("replica 1: 1 requests failed", "replica 2: 3 preemptions in the window")
PAIR = set_of(2, (2200.0,), models=("opt-125m", "opt-1.3b"), loads=(64, 32), each_tokens_per_s=(1800.0, 400.0))
SMALL = curve(model="opt-125m", points=(point(32, [2000.0]), point(64, [3000.0])))
LARGE = curve(points=(point(32, [800.0]), point(64, [1000.0])))
EACH_GPU = set_of(2, (900.0,), sharing="gpus")
UNLIKE = {"loads": (64, 16), "environment": OTHER, "workload": "x", "ramp_up": "burst", "each_tokens_per_s": (1.0,)}
HERE = [set_of(n, (900.0,)) for n in (2, 3)]
THERE = [replace(shared, environment=OTHER) for shared in HERE]
SETTINGS = ({"thread_percentage": 50}, {"pinned": True}, {"pinned": True, "thread_percentage": 50}, {})
SCENES = {  # curves, and replicas beside none of them
    "engines with other arguments are held against one of the same": (
        curve(set_of(2, [1200.0])),
        curve(set_of(2, [1200.0], families=frozenset({"without chunked prefill"})), points=[point(96, [800.0])]),
    ),
    "ways of sharing": (
        curve(*(set_of(n, [9.0], sharing=way) for way, n in (("mig", 2), ("mps", 3), ("time-slicing", 2), ("mps", 2)))),
    ),
    "settings beside the way of sharing": (curve(*(set_of(2, (9e2 + i,), **each) for i, each in enumerate(SETTINGS))),),
    "models and loads have their own engine alone, and sets of models come last": (
        curve(set_of(2, (8e2,), concurrency=48), set_of(2, (9e2,)), points=[point(48, [700.0]), point(96, [1000.0])]),
        curve(set_of(2, (4000.0,), model="opt-125m"), model="opt-125m", points=[point(96, [5000.0])]),
        set_of(2, (900.0,), models=("opt-125m", "opt-1.3b"), loads=(48, 48)),
    ),
    "of other requests": (curve(set_of(2, (900.0,))), set_of(3, (900.0,), workload="of other requests")),
    "equal models of a set are counted": (set_of(3, (9.0,), models=("a", "b", "b"), loads=(9,) * 3),),
    "two kinds of hosts, however their runs follow each other": (
        curve(HERE[0]), curve(THERE[0], environment=OTHER, points=[point(96, [500.0])]), HERE[1], THERE[1],
    ),
    "a GPU each": (EACH_GPU,),
    "at addresses": (replace(EACH_GPU, sharing="urls", environment=REMOTE),),
    "two ways of counting": (curve(set_of(2, (9e2,), sum_tokens_per_s=1234.5, largest_e2e_s=2.5, e2e_p99_s=31.4)),),
    "a sum that is the same": (curve(set_of(2, (1200.0,), sum_tokens_per_s=1200.1)),),
    "sensors of those of which anything is known": (
        curve(set_of(2, (900.0,), **SENSED), set_of(3, (9e2,)), points=[replace(point(96, [1000.0]), power_w=250.0)]),
    ),
    "one sensor": (curve(set_of(2, (9.0,), power_w=300.0)),),
    "left out": (
        curve(set_of(2, (9e2, 910.0), left_out=1, problems=PROBLEMS), set_of(3, (), left_out=2, problems=PROBLEMS)),
    ),
    "degraded": (curve(set_of(2, (900.0,), pinned=True, degraded=("a", "b"))),),
    "noisy": (curve(set_of(2, (900.0,), noise=("not steady: slow",))),),
    "different models beside taking turns": (SMALL, LARGE, PAIR),
    **{f"turns need {name}": (SMALL, LARGE, replace(PAIR, **{name: other})) for name, other in UNLIKE.items()},
    "without a valid run, so that two of them look alike": (
        curve(set_of(2, (), model="opt-125m"), model="opt-125m", points=[point(96, [5000.0])]), curve(set_of(2, ())),
    ),
    "no replicas": (curve(),),
}  # fmt: skip


def test_replica_sections_match_expected_file():
    shown = {}
    for name, some in SCENES.items():
        curves = [each for each in some if isinstance(each, Curve)]
        shown[name] = in_words(sections(*curves, others=some[len(curves) :]))
    shared = set_of(2, (1200.0, 1210.0)), set_of(2, (900.0,), sharing="mig"), set_of(3, ())
    alone = curve(*shared, points=[point(96, [1000.0, 1010.0])])
    found = findings.Findings(curves=[alone], shared=[*shared, set_of(2, (100.0,), model="opt-125m")])
    shown["the best of two models"] = "\n".join(deployments.best_deployments(found))
    shown["the best of none"] = "\n".join(deployments.best_deployments(findings.Findings(shared=[set_of(3, ())])))
    assert difference("replicas", shown) == ""
    assert sections() == []
    shared, alone = (set_of(2, (1150.0, 1170.0)), set_of(3, (900.0, 905.0))), point(96, [990.0, 1010.0])
    section, _ = sections(curve(*shared, points=[alone]))
    seen = [(row["gain %"], row["95%"]) for row in rows_of(tables_of(section)[0])]
    assert seen[:2] == [("-", "-"), ("+16.0", text_table.changed(ratio(shared[0], alone))[1])]
    gain, _ = section.charts()
    drawn = {row["subject"]: (row["state"], row["bound"], row["x"]) for row in values_of(gain.spec)}
    name = "{} x opt-1.3b, mps, concurrency 96".format
    assert drawn == {name(2): ("passes", 1.0, pytest.approx(1.16)), name(3): ("fails", 1.0, pytest.approx(0.9025))}
    engines = EngineMemory("a", GIB, 2 * GIB), EngineMemory("b", 2 * GIB, 2 * GIB)
    caches = [EngineMemory("a", GIB, size * GIB) for size in (2, 3)]
    rows = {
        "no sensor tells what is free": [("a + b", GpuMemory(engines, 9 * GIB))],
        "a sensor tells it": [("a + b", GpuMemory(engines, 9 * GIB, used_bytes=8 * GIB))],
        "sets of two caches": [("2 x a", GpuMemory((cache,), 9 * GIB)) for cache in caches],
    }
    made = {name: [deployments.MemoryRow(what, "mps", seen) for what, seen in each] for name, each in rows.items()}
    shown = {name: in_layers(deployments.memory_chart(each)) for name, each in made.items()}
    assert difference("memory", shown) == ""
    (row,) = made["a sensor tells it"]
    assert (row.each_gib("weight_bytes"), row.each_gib("kv_bytes")) == ("1.00 + 2.00", "2.00")


@pytest.fixture(scope="module")
def gpus() -> Curve:
    return on_gpus((1, 2), shared=replicas(2, **PLANTED), room={1: 4}, **PLANTED)


def test_table_tells_best_deployment(gpus):
    sections = list(deployments.gpus_sections([gpus, *gpus.wider]))
    *_, both = on_several(gpus)
    named = [both, replace(both, sharing="mps"), replace(both, tensor_parallel_size=2)]
    shown = {"two GPUs": in_words(sections), "names": "\n".join(map(deployments.deployment_name, named))}
    assert difference("gpus", shown) == ""
    found = on_several(gpus)
    ((number, load, best),) = deployments.best_on_several(gpus, found)
    choices = [one for one in found if (one.gpus, one.concurrency) == (number, load) == (2, 16)]
    assert len(choices) == 2 and {name: value for name, (_, value) in best.items()} == {
        "requests_per_s": pytest.approx(max(d.tokens_per_s for d in choices) / 32),
        "e2e_s": min(d.served.e2e_s for d in choices),
        "joules_per_request": 32 * min(d.served.energy_per_token_j for d in choices),
    }
    one, rate = best["requests_per_s"]
    (said,) = deployments.answers(gpus, found)
    assert one.tokens_per_s == 32 * rate and said.startswith("2 GPUs, concurrency 16: ") and "TP 2 (25.0)" in said
    unknown = [replace(one, served=replace(one.served, e2e_s=None)) if one.sharing else one for one in found]
    assert all("e2e_s" not in best for _, _, best in deployments.best_on_several(gpus, unknown))
    assert list(deployments.best_on_several(gpus, found[:1])) == []
    # As where points of a sweep and those of this comparison settle for other times.
    made = [m for each in (gpus, *gpus.wider) for m in each.measurements]
    settled = [replace(m, load=replace(m.load, settle_lifetimes=2.0)) for m in made]
    both = with_wider([curve_of("opt-tiny", [m for m in settled if m.spec.tensor_parallel_size == n]) for n in (1, 2)])
    shown = deployments.gpus_sections([gpus, both[0]])
    titles = [each.title.partition(" on ")[0] for each in shown if isinstance(each, Section)]
    assert titles == ["opt-tiny, warm-up 1", "opt-tiny, warm-up 2"]
    assert list(deployments.gpus_sections([replace(gpus, wider=(), shared=())])) == []


def swept(interface="engine", slower=1.0, loads=(4, 8, 16), **more):
    """Two repeats of each load on a launch of their own."""
    each = [(n, i) for n in loads for i in (1, 2)]
    made = [measurement(n, slower * 100 * n, repeat=i, launch=f"{interface}-{i}", **more) for n, i in each]
    return [replace(m, spec=replace(m.spec, interface=interface)) for m in made]


def of(*args, **more) -> Curve:
    made = swept(*args, **more)
    return curve_of(made[0].spec.model, made)


def test_interfaces_compare_common_loads():
    several = [replace(m, spec=replace(m.spec, extra=(("api_server_count", 4),))) for m in swept("server", 1.2)]
    curves = [of(), of("server", 0.9, loads=(8, 16, 32)), curve_of("opt-1.3b", several)]
    shown = {"two servers": in_words(deployments.interfaces_sections(curves))}
    assert difference("interfaces", shown) == ""
    another_host, other_loads = of("server", environment=replace(H200, cores=8)), of("server", loads=(2,))
    for other in (of(), of("server", model="opt-2.7b"), another_host, other_loads):
        assert at_both_interfaces([of(), other]) == [] == [*deployments.interfaces_sections([of(), other])]

    def with_prompts(m, prompts):
        """The same steps, of which each in the window processed so many prompt tokens, over and over."""
        inside, steps = window_trace(m.run).steps, m.run.steps
        column = [prompts[(i - inside.start) % len(prompts)] for i in range(len(steps))]
        return replace(m, run=replace(m.run, steps=replace(steps, prompt_tokens=tuple(column))))

    (alone, _), (together, _) = swept(loads=(8,)), swept("server", loads=(8,))
    alone, together = with_prompts(alone, [64]), with_prompts(together, [64, 0, 0, 0])
    ((_, _, loads),) = at_both_interfaces([curve_of("opt-1.3b", [each]) for each in (alone, together)])
    assert loads[0].prompt_steps == pytest.approx((1.0, 0.25), abs=0.02)
