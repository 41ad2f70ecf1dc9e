"""What a case is and costs: prices by hand from the constants that were seen, the sum of their parts; keys that tell
cases apart; and an order in which nobody is in two places at once."""

import math
import re
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, strategies as st
from refusals import refused

from pytest_slmserve.plan import cases
from pytest_slmserve.plan.cases import Case, Group, PlannedItem, clock, engines_of_set, plan_lines, spread
from pytest_slmserve.schema import specs
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.records import Environment, Replica
from pytest_slmserve.schema.specs import GIB, ClosedLoop, EngineSpec, OpenLoop, ReplicaSpec, Request, Workload

GPU = EngineSpec("opt-125m", kv_cache_bytes=64 * GIB)
CPU, SIMULATED = (replace(GPU, platform=platform) for platform in ("cpu", "simulated"))
URL = replace(GPU, platform="remote", interface="endpoint", url="http://h:1/v1/completions")
FOUR = ClosedLoop(4)
STATIC = replace(GPU, interface="transformers", extra=(("batching", "static"),))
BOTH = pytest.mark.parametrize("spec", [GPU, CPU], ids=["gpu", "cpu"])
KV_BYTES = 12 * 2 * 768 * 2  # of a token of opt-125m: layers, keys and values, width, bytes


def seconds_of(text: str) -> int:
    minutes, seconds = text.split(":")
    return 60 * int(minutes) + int(seconds)


def figures(line: str) -> list[str]:
    """Numbers of a line that stand by themselves."""
    return re.findall(r"(?<![\w.:-])(?:\d+:\d\d|\d[\d,]*)(?![\w.:-])", line)


def workload(requests: int, prompt: int, output: int) -> Workload:
    return Workload(specs.WorkloadSpec(), (Request((7,) * prompt, output),) * requests, "planted")


def job_s(spec: EngineSpec, requests: int, prompt: int, output: int, rate: float = math.inf) -> float:
    return cases.repeat_estimate_s(spec, workload(requests, prompt, output), OpenLoop(requests=requests, rate=rate))


def loop_s(spec: EngineSpec, concurrency: int, prompt: int, output: int, **load: object) -> float:
    return cases.repeat_estimate_s(spec, workload(3, prompt, output), ClosedLoop(concurrency, **load))


def step_s(spec: EngineSpec, running: int, context: float) -> float:
    """Of so many sequences that run, from the constants of the docstring."""
    if spec.platform == "cpu":
        return 0.0025 + 0.00015 * running
    read = 2 * CATALOGUE["opt-125m"].parameters + running * KV_BYTES * context
    return 0.0015 + 2 * read / 4.8e12 / spec.tensor_parallel_size


def prompt_s(spec: EngineSpec) -> float:
    return 1e-5 if spec.platform == "cpu" else CATALOGUE["opt-125m"].parameters / 2e14


def replicas(count: int, spec: EngineSpec = GPU, sharing: str = "time-slicing", **fields: object) -> ReplicaSpec:
    return ReplicaSpec(tuple(replace(spec, gpu=i if sharing == "gpus" else 0) for i in range(count)), sharing, **fields)


def case(engines: EngineSpec | ReplicaSpec = GPU, load: ClosedLoop | OpenLoop = FOUR, **fields: object) -> Case:
    count = len(engines_of_set(engines))
    return Case(engines, (workload(2, 8, 4),) * count, (load,) * count, **fields)


@BOTH
@given(st.integers(1, 300), st.integers(1, 500), st.integers(1, 300), st.integers(1, 4), st.integers(1, 64))
def test_load_estimate_matches_cost_model(spec, concurrency, prompt, output, gpus, limit):
    spec = replace(spec, tensor_parallel_size=gpus)
    lifetime_s = output * step_s(spec, concurrency, prompt + output / 2)
    window_s = max(7, lifetime_s / 2)
    assert loop_s(spec, concurrency, prompt, output, window_s=7) == pytest.approx(1.5 * lifetime_s + window_s)
    spec, requests = replace(spec, max_num_seqs=limit, tensor_parallel_size=1), concurrency
    batch = min(requests, limit)
    steps_s = requests / batch * output * step_s(spec, batch, prompt + output / 2)
    assert job_s(spec, requests, prompt, output) == pytest.approx(requests * prompt * prompt_s(spec) + steps_s)


@BOTH
@pytest.mark.parametrize("blocks", [31, 1])
def test_kv_cache_limits_job_batch(spec, blocks):
    """Of 48 tokens, three blocks of 16 on a GPU; on a CPU one block of 128. One block is the engine's own."""
    spec = replace(spec, kv_cache_bytes=GIB, extra=(("num_gpu_blocks_override", blocks),))
    batch = max(1, (blocks - 1) // math.ceil(48 / (128 if spec.platform == "cpu" else 16)))
    steps_s = 100 / batch * 8 * step_s(spec, batch, 44)
    assert job_s(spec, 100, 40, 8) == pytest.approx(100 * 40 * prompt_s(spec) + steps_s)


@BOTH
@given(st.integers(1, 2000), st.integers(1, 64))
def test_load_above_limit_takes_turns(spec, concurrency, limit):
    """However the limit is given; one of 0 is refused by vLLM, when it starts."""
    running = min(concurrency, limit)
    lifetime_s = 8 * step_s(spec, running, 12) * concurrency / running
    for few in (replace(spec, max_num_seqs=limit), replace(spec, extra=(("max_num_seqs", limit),))):
        assert loop_s(few, concurrency, 8, 8, window_s=5) == pytest.approx(1.5 * lifetime_s + max(5, lifetime_s / 2))
    refused_later = replace(spec, extra=(("max_num_seqs", 0),))
    assert loop_s(refused_later, concurrency, 8, 8) == loop_s(spec, concurrency, 8, 8)


def test_slow_arrivals_extend_job_estimate():
    assert job_s(CPU, 10, 8, 8, rate=0.1) == pytest.approx(10 / 0.1 + 8 * step_s(CPU, 10, 12)), "and the last request"
    assert job_s(CPU, 10, 8, 8, rate=1e9) == job_s(CPU, 10, 8, 8)
    assert loop_s(SIMULATED, 1000, 512, 256) == job_s(SIMULATED, 1000, 512, 256) == 0.1
    assert loop_s(URL, 1000, 512, 256, window_s=9) == 9 and job_s(URL, 50, 8, 8, rate=5) == pytest.approx(10)
    for platform, first, further in (("cuda", 60, 27), ("cpu", 15, 5), ("simulated", 0, 0)):
        spec = replace(GPU, platform=platform)
        assert cases.start_estimate_s(spec) == cases.start_estimate_s(replicas(1, spec)) == first
        assert cases.start_estimate_s(replicas(4, spec)) == first + 3 * further
        if platform != "cpu":
            assert cases.start_estimate_s(replicas(4, spec, "gpus")) == first + further
            assert cases.start_estimate_s(replicas(1, spec, "gpus")) == first
        assert cases.start_estimate_s(URL) == 0, "it runs already"
    shared, apart = case(replicas(3)), case(replicas(3, sharing="gpus"))
    assert shared.concurrency == apart.concurrency == 12 and case().concurrency == 4
    assert shared.estimate_s == case(load=ClosedLoop(12)).estimate_s > apart.estimate_s == case().estimate_s
    assert case(load=OpenLoop(requests=3)).concurrency == 0
    pair, one = replicas(2), replicas(1)
    assert case(pair).engine == pair and case(one).engine == GPU == case().engine
    assert case(pair).each == (GPU, GPU) == engines_of_set(pair) and case().each == (GPU,)
    with pytest.raises(ValueError, match="its-name.*too large"):
        _ = Case(id="its-name", skip_reason="too large").each
    spec = replicas(3, sharing="mps", pinned=True, thread_percentage=40)
    first, again = case(spec).replicas(), case(spec).replicas()
    [name], [other] = ({replica.group for replica in of} for of in (first, again))
    assert first == tuple(Replica(name, i, 3, first[0].set, "mps", True, 40) for i in range(3)) and len(name) == 12
    assert name != other and {r.set for r in first} == {r.set for r in again}
    assert case().replicas() == (None,) and len(case(replicas(1)).replicas()) == 1


@pytest.mark.parametrize("batching, tokens", [("none", 1 + 9 + 4 + 2 + 3), ("static", 9 + 4 + 3), ("dynamic", 16)])
@pytest.mark.parametrize("spec, each_s", [(GPU, 0.020), (CPU, 0.012)], ids=["gpu", "cpu"])
def test_transformers_batch_lasts_longest_output(spec, each_s, batching, tokens):
    spec = replace(spec, interface="transformers", max_num_seqs=2, extra=(("batching", batching),))
    uneven = Workload(specs.WorkloadSpec(), tuple(Request((7,), n) for n in (1, 9, 4, 2, 3)), "planted")
    price = cases.repeat_estimate_s(spec, uneven, OpenLoop(requests=5))
    assert price == pytest.approx(tokens * each_s)
    assert cases.repeat_estimate_s(spec, uneven, OpenLoop(requests=5, rate=0.5)) == max(price, 10)


@pytest.mark.parametrize("title, facts", [
    (cases.point_title(replace(GPU, model="org/Opt-X"), ClosedLoop(64)), ["opt-x at 64"]),
    (cases.point_title(GPU, OpenLoop(requests=500)), [OpenLoop(requests=500).title]),
    (case().title, ["opt-125m at 4"]), (case(replicas(2)).title, ["2 x opt-125m", "8"]),
    (cases.engine_title(GPU), ["opt-125m"]),
    (cases.engine_title(replace(GPU, tensor_parallel_size=2)), ["opt-125m", "2 GPUs"]),
    (cases.engine_title(STATIC), ["opt-125m", "Transformers", "static"]),
    (cases.engine_title(replicas(2, sharing="mps")), ["2 x opt-125m", "mps"]),
    (cases.engine_title(replicas(2, sharing="gpus")), ["2 x opt-125m", "GPU each"]),
], ids=range(9))  # fmt: skip
def test_titles_name_model_with_load(title, facts):
    assert all(fact in title for fact in facts) and "by gpus" not in title and ("GPU" in title) is ("GPU" in str(facts))


def test_equal_cases_share_one_key():
    here = Environment(platform="cuda", gpu_name="NVIDIA H200")
    specs = GPU, replace(GPU, seed=1), replicas(1), replicas(2), replicas(3), replicas(2, pinned=True)
    made = [
        *map(case, specs),
        case(load=ClosedLoop(5)), case(environment=here), case(replicas(2), environment=here),
        case(replicas(2), ClosedLoop(5)), Case(GPU, (workload(2, 8, 5),), (ClosedLoop(4),)),
    ]  # fmt: skip
    assert all(a.key != b.key for a, b in combinations(made, 2))
    assert [c.key for c in made[:6]] == [case(spec).key for spec in specs]
    assert case(id="x", model="y").key == case().key == case(replace(GPU, python="/other")).key
    assert cases.url_lock("http://a") == cases.url_lock("http://a") != cases.url_lock("http://b")
    assert case().series == case(load=ClosedLoop(64)).series != case().key
    others = case(load=ClosedLoop(4, window_s=9)), case(replace(GPU, seed=1)), case(environment=Environment("cuda"))
    assert case().series not in {other.series for other in others}


def group(seconds: float, gpus: int = 1) -> Group:
    return Group(replace(GPU, tensor_parallel_size=gpus), 0, seconds)


GROUPS = st.lists(st.builds(group, st.floats(1, 1000), st.integers(1, 4)), min_size=1, max_size=40)
SINGLES = st.lists(st.builds(group, st.floats(1, 1000)), min_size=1, max_size=60)  # on one GPU each


@given(GROUPS, st.integers(4, 64), SINGLES, st.integers(1, 64))
def test_groups_never_share_gpus(groups, gpus, singles, count):
    placed = spread(groups, gpus)
    assert sorted(each.seconds for each in placed) == sorted(each.seconds for each in groups)
    assert min(each.begins_s for each in placed) == 0
    for each in placed:
        assert len(each.gpus) == len(each.engine.gpus) and [*each.gpus] == sorted({*each.gpus} & {*range(gpus)})
    for gpu in range(gpus):
        its = sorted((p for p in placed if gpu in p.gpus), key=lambda p: p.begins_s)
        assert all(first.begins_s + first.seconds <= second.begins_s for first, second in pairwise(its))
    # Graham 1969: longest first. The bound of the best is that of the GPU seconds, the longest, and the two that must
    # share a GPU where there are more groups than GPUs.
    longest = sorted((g.seconds for g in singles), reverse=True)
    pair = longest[count - 1] + longest[count] if len(longest) > count else 0.0
    best = max(sum(longest) / count, longest[0], pair)
    reached = cases.makespan_s(spread(singles, count))
    assert best * (1 - 1e-9) <= reached <= best * (4 / 3) * (1 + 1e-9) + longest[-1]


def test_compared_groups_begin_first():
    """Replicas on one GPU are compared too, and so is nothing that runs on one number of GPUs alone."""
    two, each = Group(replicas(2), 0, 70), Group(replicas(2, sharing="gpus"), 0, 15)
    other, server = (Group(replace(GPU, **field), 0, 60) for field in ({"model": "opt-1.3b"}, {"interface": "server"}))
    expected = [group(30), group(20, 4), each, group(10, 2), two, other, server]
    assert cases.in_order(sorted(expected, key=lambda group: group.seconds)) == expected
    with refused(4, 2, hint="4"):
        spread([group(1, 4)], 2)
    assert spread([group(1, 4)], 4)[0].gpus == (0, 1, 2, 3) and cases.makespan_s([]) == 0.0
    wide, both = replace(GPU, tensor_parallel_size=2), replicas(2, sharing="gpus")
    cells = [PlannedItem(*cell) for cell in (("a", GPU, 5.0), ("b", wide, 7.0), ("c", GPU, 6.0), ("d", both, 1.0))]
    found = cases.groups_of([*cells, PlannedItem("e", None, 3.0)])
    assert [(g.engine, g.items, g.seconds) for g in found] == [
        (GPU, 2, 60 + 11.0), (both, 1, 60 + 27 + 1.0), (wide, 1, 60 + 7.0)
    ]  # fmt: skip


ENGINES = st.sampled_from([GPU, replace(GPU, model="opt-1.3b"), replicas(2), None])
CELLS = st.lists(st.builds(PlannedItem, st.just("item"), ENGINES, st.integers(0, 500)), max_size=9)


@given(CELLS, st.integers(1, 3))
def test_plan_sums_starts_with_items(cells, gpus):
    starts = [cell.engine for cell in cells if cell.engine]
    starts = [engine for before, engine in pairwise([None, *starts]) if engine != before]
    lines = plan_lines(cells)
    first_s = cases.DEFAULTS["cuda"].first_s if starts else 0
    whole = sum(cell.seconds for cell in cells) + sum(map(cases.start_estimate_s, starts)) + first_s
    end, items, *gpu_seconds = figures(lines[-1])
    assert len(lines) == 2 + len(cells) + len(starts) and seconds_of(end) == whole and int(items) == len(cells)
    assert [int(n.replace(",", "")) for n in gpu_seconds] == ([whole] if starts else [])
    *lines, end = cases.spread_lines(cells, gpus)
    placed = spread(cases.groups_of(cells), gpus)
    assert [line.split(":")[0] for line in lines] == [f"GPU {i}" for i in range(gpus)]
    assert sum(int(n) for line in lines for n in re.findall(r"(\d+) item", line)) == sum(g.items for g in placed)
    assert figures(end) == [clock(cases.makespan_s(placed)), str(gpus), clock(sum(g.seconds for g in placed))]


def test_plan_tells_item_start_times():
    first, second = replace(GPU, model="opt-tiny"), replace(GPU, tensor_parallel_size=2)
    cells = [("a", first, 10.0), ("b", first, 20.0), ("claim", None, 0.0), ("reads", None, 2.0), ("c", second, 30.4)]
    lines = plan_lines([PlannedItem(*cell) for cell in cells])[1:]
    assert [figures(line) for line in lines] == [
        ["0:00", "90"], ["1:30", "10"], ["1:40", "20"], ["2:00"], ["2:00", "2"], ["2:02", "2", "60"], ["3:02", "30"],
        ["3:32", "5", "303"],
    ]  # fmt: skip
    names = ["opt-tiny", " a ", " b ", " claim ", " reads ", "opt-125m", " c "]
    assert all(name in line for name, line in zip(names, lines))
    assert [len(figures(plan_lines([PlannedItem("a", spec, 5.0)])[-1])) for spec in (CPU, SIMULATED, URL)] == [2] * 3
    wide = replace(GPU, tensor_parallel_size=2)
    lines = cases.spread_lines([PlannedItem("a", GPU, 5.0), PlannedItem("b", wide, 7.0)], 2)
    assert [figures(line) for line in lines] == [
        ["0:00", "1", "1:05", "2", "1:05", "1", "1:07"], ["2", "1:05", "1", "1:07"], ["2:12", "2", "2:12"]
    ]  # fmt: skip
    assert all("opt-125m" in line for line in lines[:2]) and "opt" not in cases.spread_lines([], 1)[0]


@given(st.integers(0, 10**5), st.floats(-0.49, 0.49))
def test_clock_rounds_to_seconds(seconds, more):
    assert seconds_of(clock(max(0.0, seconds + more))) == seconds and re.fullmatch(r"\d+:[0-5]\d", clock(seconds))
