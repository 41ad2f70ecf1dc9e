"""What is asked for: what changes a key, what cannot be asked for, what a record keeps of a load, what follows from a
specification, and the URL of an endpoint, which holds no secret."""

import json
import math
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate
from statistics import fmean

import msgspec
import pytest
from hypothesis import example, given, strategies as st
from refusals import refused
from strategies import NAMES, loads

from pytest_slmserve.schema import models, specs
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.specs import GIB, Adapters, ClosedLoop, EngineSpec, OpenLoop, ReplicaSpec, WorkloadSpec

PLAIN = EngineSpec("opt-1.3b")
PLACES = {"python", "gpu"}  # where it runs, which the environment tells better
DIVIDED = {"tensor_parallel_size", "kv_cache_bytes", "gpu_memory_utilization", "max_num_seqs"}
PAIRS = st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=2).map(tuple)
OTHER = {
    "model": NAMES.filter(lambda name: printable(name, layout="") == name),
    "platform": st.just("simulated"), "load_format": st.just("auto"), "dtype": NAMES, "interface": st.just("server"),
    "gpu_memory_utilization": st.floats(0.01, 1), "env": PAIRS, "extra": PAIRS, "python": NAMES,
    "tensor_parallel_size": st.integers(2, 8),
}  # fmt: skip
CLOSED = {"concurrency": 8, "window_s": 5.0, "settle_lifetimes": 1.0, "requests": None, "ramp_up": "staggered"}
JOB = {"requests": 9, "rate": None, "seed": 0, "kind": "job"}
WINDOW = {"arrivals": "", "rate": 2, "settle_s": 0.0, "window_s": 3.0, "kind": "open_loop"}
PROMPTS = st.lists(st.integers(0, 99), min_size=1, max_size=9).map(tuple)
NAMED = (  # a field of another type, or out of range, with its value
    (PLAIN, {"platform": ["tpu"], "interface": ["grpc"], "load_format": ["safetensors"], "extra": [[("a", 1)]],
             "gpu_memory_utilization": [0.0, 1.1, "0.9", True], "max_num_seqs": [64.0], "seed": [True],
             "enforce_eager": [1], "model": [5, "a\x1b[2J\nb"]}),
    (ReplicaSpec((PLAIN,)), {"sharing": ["magic"]}),
    (WorkloadSpec(), {"source": ["web"], "rule": ["any"], "requests": ["8"], "prefix_groups": [0, "2"],
                      "prefix_share": [1, -0.1, math.nan, "0.5", True, (0, 0.5)], "turns": ["4"],
                      "response_format": ["{", "[1]", "true", "yaml", '{"minItems": NaN}', 5, ("", "json")]}),
    (ClosedLoop(1), {"concurrency": [0, 1.0, True], "window_s": [math.inf, True, "5"], "ramp_up": ["slow"],
                     "settle_lifetimes": [math.nan, "1"], "think_s": [-1, math.inf, "2", True]}),
)  # fmt: skip
SHARED = {"prefix_share": 0.5, "prefix_groups": 3}
PAIR, SECOND, SIMULATED = ReplicaSpec((PLAIN, PLAIN)), replace(PLAIN, gpu=1), replace(PLAIN, platform="simulated")
OF_A_FILE, ADAPTED = WorkloadSpec("sharegpt"), WorkloadSpec(adapters=Adapters(4, 8, "zipf"))
A_JOB, A_WINDOW = OpenLoop(rate=1, requests=1), OpenLoop(rate=1, window_s=1.0)


def remote(url: str = "http://h/v1") -> EngineSpec:
    return EngineSpec("m", platform="remote", interface="endpoint", url=url)


def with_extra(**extra: object) -> EngineSpec:
    return replace(PLAIN, extra=tuple(extra.items()))


@given(data=st.data())
def test_engine_key_covers_every_setting(data):
    for name in (field.name for field in fields(EngineSpec) if field.name not in ("url", "model_facts")):
        default = getattr(PLAIN, name)
        usual = st.just(not default) if isinstance(default, bool) else st.integers(0, 2**40)
        other = OTHER.get(name, usual).filter(lambda value: value != default)  # noqa: B023
        changed = replace(PLAIN, **{name: data.draw(other)})
        assert (changed.key == PLAIN.key) is (name in PLACES), name
        assert (changed.family == PLAIN.family) is (name in PLACES | DIVIDED), name
    env = ("PYTHONPATH", data.draw(NAMES)), ("A", "1"), ("PYTHONPATH", data.draw(NAMES))
    assert replace(PLAIN, env=env).key == replace(PLAIN, env=(("A", "1"),)).key
    # Of a catalogue model the name says it all, and what an endpoint serves is its own affair.
    mine = replace(PLAIN.known_model, source="folder", name="mine")
    spec = EngineSpec("./mine", model_facts=mine)
    assert spec.key != EngineSpec("./mine", model_facts=replace(mine, layers=2)).key
    assert spec.key == EngineSpec("./mine", model_facts=replace(mine, parameters=None, active=None, windows=None)).key
    assert EngineSpec("opt-1.3b", model_facts=replace(PLAIN.known_model, layers=2)).key == PLAIN.key
    assert replace(remote(), model_facts=mine).key == remote().key
    assert len({remote("http://h:1/v1").key, remote("http://h:2/v1").key, PLAIN.key}) == 3
    for facts in ({"b": [1, 2.5, None], "a": "é"}, {"a": "é", "b": [1, 2.5, None]}):
        assert specs.short_hash(facts) == "84afbf1d4853"


@pytest.mark.parametrize(("usual", "changes", "facts"), [
    *((usual, {name: value}, (name, repr(value))) for usual, wrong in NAMED for name in wrong for value in wrong[name]),
    (PLAIN, {"platform": "cpu", "kv_cache_bytes": GIB + 1}, (GIB + 1,)),
    *((WorkloadSpec(requests=8), {"turns": n}, (f"{n} turns", "8 requests")) for n in (0, 9)),
    (WorkloadSpec(), {"turns": 2, **SHARED}, ("share",)), (WorkloadSpec(), {"turns": 2, "kind": "embed"}, ("embed",)),
    (OF_A_FILE, SHARED, ("text", "share")), (WorkloadSpec(), {"kind": "embed", **SHARED}, ("share", "embed")),
    (ADAPTED, {"kind": "embed"}, ("embed",)),
    (WorkloadSpec(), {"kind": "embed", "response_format": "json"}, ("structured", "embed")),
    (SIMULATED, {"interface": "server"}, ("simulated", "server")),
    (PLAIN, {"tensor_parallel_size": 0}, ("0 GPUs",)), (remote(), {"url": "http://h/v1?key=x"}, ("credentials",)),
    (PAIR, {"engines": ()}, ()),
    *((PAIR, {"engines": (PLAIN, other)}, ("one device",)) for other in (SECOND, SIMULATED)),
    *((PAIR, {"sharing": sharing}, (fact,)) for sharing, fact in (("gpus", "GPU each"), ("urls", "urls"))),
    (PAIR, {"engines": (PLAIN, replace(SIMULATED, gpu=1)), "sharing": "gpus"}, ("GPU each",)),
    (PAIR, {"engines": (PLAIN, SECOND), "sharing": "gpus", "thread_percentage": 5}, ("percentage of 5", "gpus")),
    *((PAIR, {"engines": (engine, engine), "sharing": "mps"}, ("mps",)) for engine in
      (remote(), replace(PLAIN, platform="cpu"))),
    *((PAIR, {"sharing": how, "thread_percentage": share}, (f"percentage of {share}", how)) for how, share in
      (("mps", 0), ("mps", 101), ("mig", 50))),
    *((WorkloadSpec(rule=rule), {name: None}, ("only one",)) for rule, name in
      (("human-first", "prompt_tokens"), ("human-first", "output_tokens"), ("vllm", "prompt_tokens"))),
    *((OF_A_FILE, {"rule": rule, name: None}, ("only one",)) for rule, name in
      (("vllm", "output_tokens"), ("human-first", "prompt_tokens"))),
    *((WorkloadSpec(), {name: 0}, ("one request", "one token")) for name in
      ("requests", "prompt_tokens", "output_tokens")),
    (ClosedLoop(1), {"window_s": 0.0}, ("0.0 s",)),
    *((A_JOB, {name: value}, (fact,)) for name, value, fact in (
        ("window_s", 1.0, ""), ("requests", None, ""), ("requests", 0, "0 requests"), ("rate", 0.0, "0.0 requests"),
        ("rate", "fast", "fast"), ("max_concurrency", 0, "max_concurrency=0"), ("burstiness", 0.0, "burstiness 0.0"),
    )),
    (OpenLoop(requests=1), {"burstiness": 2.0}, ("burstiness",)),
    *((A_WINDOW, {name: value}, (fact,)) for name, value, fact in
      (("window_s", 0.0, "0.0 s"), ("settle_s", -1.0, "-1.0 s"), ("rate", math.inf, "at once"))),
    (A_WINDOW, {"settle_s": 2.0, "steps": ((1, 9), (1, 2.0))}, ("2 s",)),
])  # fmt: skip
def test_invalid_specification_is_refused(usual, changes, facts):
    with refused(*facts):
        replace(usual, **changes)


def test_specification_bounds_are_accepted():
    assert ClosedLoop(1, window_s=0.0, requests=8).requests == 8 and ClosedLoop(1, settle_lifetimes=0)
    assert EngineSpec("x", gpu_memory_utilization=1) and EngineSpec("x", platform="cpu", kv_cache_bytes=2 * GIB)
    assert WorkloadSpec(prompt_tokens=1, output_tokens=1, requests=1)
    assert OpenLoop(rate=1e-9, requests=1, max_concurrency=1, burstiness=1e-9)
    assert OpenLoop(rate=1, window_s=0.1, steps=((1, 0.1),))
    assert EngineSpec("x", platform="simulated", interface="transformers")
    for percentage in (1, 100, None):
        assert ReplicaSpec((PLAIN, PLAIN), "mps", thread_percentage=percentage).thread_percentage == percentage


@pytest.mark.parametrize(("make", "hint"), [
    (lambda: EngineSpec("x", seed="a"), "seed=0"), (lambda: EngineSpec(5), "model='opt-125m'"),
    (lambda: PLAIN.with_arguments([("max_num_seqs", "8")]), "max_num_seqs=1024"),
    (lambda: PLAIN.with_arguments([("enforce_eager", 0)]), "enforce_eager=false"),
    (lambda: EngineSpec("./opt-1.3b").known_model, "model_facts"),
    *((partial(replace, PLAIN, **half), "url") for half in (
        {"url": "http://h/v1"}, {"interface": "endpoint"}, {"platform": "remote"})),  # an endpoint has all of them
    *((partial(Adapters, *asked), hint) for asked, hint in (
        *(((count, 8, "uniform"), "10,000") for count in (0, 10_001, True)),
        *(((4, rank, "uniform"), "8, 16, 32") for rank in (9, "8")), ((4, 8, "normal"), "uniform or zipf"))),
    (lambda: replace(ADAPTED, kind="embed"), "generate"),  # adapters are for text
    *((lambda load=load: load.times, "job(") for load in (
        OpenLoop(rate=1, requests=2, schedule_s=(1.0,)), OpenLoop(rate=1, window_s=1.0))),
])  # fmt: skip
def test_specification_error_suggests_valid_value(make, hint):
    with refused(hint=hint):
        make()


def test_engine_arguments_override_fields():
    """They are fields where there is one, and replace each other."""
    spec = PLAIN.with_arguments([("max_num_seqs", 8), ("a", 1), ("a", 2)]).with_arguments([("b", None), ("a", 3)])
    assert spec == replace(with_extra(a=3, b=None), max_num_seqs=8) and spec.arguments == {"a": 3, "b": None}
    asked, cached = with_extra(enable_prefix_caching=True), replace(PLAIN, prefix_caching=True)
    refusing = replace(with_extra(enable_prefix_caching=False), prefix_caching=True)
    assert [each.caches_prefixes for each in (PLAIN, cached, asked, refusing)] == [False, True, True, False]
    ends = PLAIN, with_extra(api_server_count=4), with_extra(api_server_count="4")
    assert [each.front_ends for each in ends] == [1, 4, 1]
    server = replace(with_extra(api_server_count=4, x=1), interface="server")
    assert server.without_http == with_extra(x=1)
    drafts = with_extra(x=1, speculative_config='{"method": "ngram"}')
    assert drafts.plain == with_extra(x=1).plain == replace(drafts.without("speculative_config"), kv_cache_bytes=GIB)
    by_a_model = with_extra(speculative_config='{"method": "draft_model", "model": "/a/qwen3-0.6b/"}')
    assert (drafts.drafts, by_a_model.drafts, PLAIN.drafts) == ("by ngram", "by qwen3-0.6b", "")
    assert EngineSpec("facebook/opt-1.3b").known_model is models.CATALOGUE["opt-1.3b"]
    assert [*replace(PLAIN, gpu=2, tensor_parallel_size=2).gpus] == [2, 3]
    most = {None: (4, 4), ("max_loras", 2): (2, 4), ("max_loras", 6): (6, 6), ("max_cpu_loras", 9): (4, 9)}
    for given_one, (slots, held) in (most | {("max_loras", "many"): ("many", 4)}).items():
        found = Adapters(4, 8).arguments(dict([given_one] if given_one else []) | {"seed": 1})
        assert found == {"enable_lora": True, "max_loras": slots, "max_lora_rank": 8, "max_cpu_loras": held}
    each = tuple(replace(PLAIN, gpu=i) for i in (3, 1, 2, 0))
    assert ReplicaSpec(each, "gpus").gpus == (0, 1, 2, 3) and ReplicaSpec(each, "gpus").platform == "cuda"
    assert len(ReplicaSpec(tuple(replace(PLAIN, gpu=i, tensor_parallel_size=2) for i in (0, 2)), "gpus")) == 2
    assert len(ReplicaSpec((remote("http://h:1/"), remote("http://h:2/")), "urls")) == 2
    assert ReplicaSpec((replace(PLAIN, platform="cpu"),)).sharing == "time-slicing"
    usual = ReplicaSpec((PLAIN, PLAIN), "mps")
    changes = {"engines": (PLAIN,)}, {"sharing": "mig"}, {"pinned": True}, {"thread_percentage": 50}
    others = [replace(usual, **change) for change in (*changes, {"engines": (PLAIN, replace(PLAIN, seed=1))})]
    assert len({spec.key for spec in (usual, *others)}) == 6


@pytest.mark.parametrize(("value", "words"), [
    (None, []), (True, ["--a-b"]), (False, ["--no-a-b"]), (0, ["--a-b", "0"]), (1, ["--a-b", "1"]),
    (1.5, ["--a-b", "1.5"]), ("x y", ["--a-b", "x y"]), ([1, "c"], ["--a-b", "1", "c"]), ((), ["--a-b"]),
    ({"k": [1]}, ["--a-b", '{"k": [1]}']),
])  # fmt: skip
def test_argument_becomes_vllm_serve_words(value, words):
    assert specs.command_words({"first": 7, "a_b": value, "last": "z"}) == ["--first", "7", *words, "--last", "z"]


def test_fixed_lengths_drop_trace():
    for source, lengths, left in (
        ("trace-lengths", (5, 6), ("lengths", "")), ("trace-lengths", (None, None), ("trace-lengths", "p")),
        ("sharegpt", (5, 6), ("sharegpt", "p")),
    ):  # fmt: skip
        spec = WorkloadSpec(source, "p", prompt_tokens=7, output_tokens=7).with_lengths(*lengths)
        assert (spec.source, spec.path, spec.prompt_tokens, spec.output_tokens) == (*left, *lengths)
    told = {
        ("sharegpt", "", "vllm", None, 128): True, ("sharegpt", "", "vllm", None, None): True,
        ("sharegpt", "", "vllm", 1, 128): False, ("lengths", "", "vllm", None, None): False,
        ("sharegpt", "", "human-first", None, None): False,
    }  # fmt: skip
    assert {words: WorkloadSpec(*words).as_vllm for words in told} == told


@given(st.lists(st.builds(specs.Request, PROMPTS, st.integers(1, 9), NAMES), min_size=1), NAMES)
def test_workload_hash_identifies_requests(requests, source):
    made = specs.Workload(WorkloadSpec(), tuple(requests), source)
    prompts, outputs = [len(r.prompt) for r in requests], [r.output_tokens for r in requests]
    means, longest = map(pytest.approx, map(fmean, (prompts, outputs))), max(map(sum, zip(prompts, outputs)))
    facts = made.hash, made.spec, len(requests), *means, longest, source
    assert made.reference() == specs.WorkloadReference(*facts)
    untold = tuple(replace(r, text="") for r in requests)
    assert specs.Workload(WorkloadSpec(seed=5), untold, "else").hash == made.hash
    longer = (*untold[:-1], replace(untold[-1], output_tokens=10))
    assert specs.Workload(WorkloadSpec(), longer, source).hash != made.hash


def convert(kind, value):
    return msgspec.convert(value, kind)


@given(loads())
def test_load_facts_restore_load(load):
    facts = json.loads(json.dumps(specs.load_facts(load), allow_nan=False))
    assert specs.load_of(facts, convert) == load
    assert facts["kind"] == ("closed_loop" if isinstance(load, ClosedLoop) else "job" if load.requests else "open_loop")
    assert specs.is_steady(load) is (facts["kind"] == "closed_loop" and load.requests is None)
    assert specs.is_job(load) is (facts["kind"] == "job")
    with pytest.raises(ValueError, match="'storm'"):
        specs.load_of({**facts, "kind": "storm"}, convert)


@given(st.floats(0, 0.999), st.integers(1, 3000))
def test_shared_prefix_matches_asked_share(share, tokens):
    """An even number, so that with the next id it is no whole block of any even size."""
    shared, asked = WorkloadSpec(prefix_share=share).shared_of(tokens), share * tokens
    assert shared % 2 == 0 <= shared <= max(0, tokens - specs.OWN) and WorkloadSpec().shared_of(tokens) == 0
    assert abs(shared - asked) <= 1 or tokens - specs.OWN - 2 < shared or shared == 0


def test_old_workload_hashes_stay_valid():
    """The same requests with a share of 0 are others: they are new in each round."""
    requests = tuple(specs.Request((5, 6, 7), 2) for _ in range(2))
    asked = [WorkloadSpec(**given) for given in ({}, {"prefix_share": 0.0}, SHARED)]
    plain, nothing, some = (specs.Workload(each, requests, "here") for each in asked)
    facts = [specs.workload_facts(each.spec) for each in (plain, nothing, some)]
    assert [each.keys() & SHARED.keys() for each in facts] == [set(), {"prefix_share"}, SHARED.keys()]
    assert [convert(WorkloadSpec, each) for each in facts] == [plain.spec, nothing.spec, some.spec]
    assert plain.hash == specs.short_hash([[[5, 6, 7], 2]] * 2) != nothing.hash
    plain = specs.Workload(WorkloadSpec(), (specs.Request((1, 2), 3), specs.Request((4,), 5)), "")
    assert plain.hash == specs.short_hash([[[1, 2], 3], [[4], 5]])
    asked = specs.Workload(ADAPTED, tuple(replace(r, adapter=n) for n, r in enumerate(plain.requests, 1)), "")
    ranks = replace(asked, spec=replace(ADAPTED, adapters=Adapters(4, 16, "zipf")))
    others = replace(asked, requests=tuple(replace(r, adapter=1) for r in plain.requests))
    assert len({plain.hash, asked.hash, ranks.hash, others.hash}) == 4


@pytest.mark.parametrize(("load", "facts"), [
    (ClosedLoop(8), {**CLOSED, "kind": "closed_loop"}), (OpenLoop(requests=9), JOB),
    (OpenLoop(rate=2, requests=9, burstiness=math.inf, max_concurrency=4, schedule_s=(1.0,)),
     {**JOB, "rate": 2, "burstiness": None, "max_concurrency": 4}),
    (OpenLoop(rate=2, window_s=3.0), WINDOW),
    (OpenLoop(rate=2, window_s=3.0, seed=4), {**WINDOW, "seed": 4}),
])  # fmt: skip
def test_load_facts_omit_defaults(load, facts):
    """Keys of records that are years old are hashes of them."""
    assert specs.load_facts(load) == facts and specs.load_of(facts, convert) == load


@given(st.floats(0.1, 100), st.floats(0.1, 9), st.floats(0, 5))
@example(4.0, 1.0, 1.0)
@example(8.0, 1.0, 1.0)
def test_closed_loop_duration_is_predicted(lifetime_s, window_s, settle):
    load = ClosedLoop(8, window_s, settle)
    window = max(window_s, lifetime_s if lifetime_s < 5 else 5.0 if lifetime_s < 10 else lifetime_s / 2)
    assert load.duration_s(lifetime_s) == pytest.approx(lifetime_s / 2 + settle * lifetime_s + window)
    burst = replace(load, ramp_up="burst").duration_s(lifetime_s)
    assert burst == pytest.approx(max(1, settle) * lifetime_s + max(window_s, 2 * lifetime_s))
    assert load.max_concurrency == 8 and load.judged_by == "ended"


@pytest.mark.parametrize(("load", "title"), [
    (ClosedLoop(64), "concurrency 64"),
    (ClosedLoop(64, requests=5000), "concurrency 64, 5,000 requests"),
    (OpenLoop(rate=10.0, window_s=1.0), "10 requests/s"), (OpenLoop(requests=5000), "5,000 requests, all at once"),
    (OpenLoop(rate=10.5, requests=5, seed=3), "5 requests, 10.5/s, seed 3"),
    (OpenLoop(rate=1, requests=5, burstiness=0.5, max_concurrency=6400),
     "5 requests, 1/s, seed 0, burstiness 0.5, at most 6,400 concurrent requests"),
    (OpenLoop(rate=1, requests=5, burstiness=math.inf), "5 requests, 1/s, seed 0, at constant gaps"),
])  # fmt: skip
def test_load_title_shows_unusual_settings(load, title):
    assert load.title == title


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(3, 9)), min_size=1, max_size=5), st.integers(0, 2))
def test_step_windows_follow_each_other(steps, settle_s):
    load = OpenLoop(rate=1, window_s=1.0, settle_s=settle_s, steps=tuple(steps))
    ends = [*accumulate(seconds for _, seconds in steps)]
    begins = [end + settle_s for end in (0, *ends[:-1])]
    assert load.step_windows_s == [*zip(begins, ends)]
    at_once, job = OpenLoop(requests=3), OpenLoop(rate=1, requests=2, schedule_s=(0.0, 2.0))
    found = [(each.times, each.judged_by) for each in (at_once, job, replace(load, schedule_s=(0.5,)))]
    assert found == [((0.0, 0.0, 0.0), "ended"), ((0.0, 2.0), "ended"), ((0.5,), "sent")]


def test_server_url_is_completed():
    paths = dict.fromkeys(("", "/", "/v1", "/v1/", "/v1/completions/"), "/v1/completions")
    paths |= {"/v1/chat/completions": "/v1/chat/completions", "/generate": "/generate"}
    paths |= {"/gateway/v1?version=2": "/gateway/v1/completions?version=2"}
    found = {path: specs.completed(f"http://host:8000{path}") for path in paths}
    assert found == {path: f"http://host:8000{asked}" for path, asked in paths.items()}


@pytest.mark.parametrize(("url", "fact"), [
    *((url, "http://HOST") for url in ("host:8000", "ftp://host", "http://", "http://host:0/", "http://host/v1/@")),
    ("http://host:x/", "read"), ("http://user:word@host/v1", "before its host"),
    ("http://127.0.0.1:9/v1/\u00e9", "may hold"), ("http://h/\x1b[2J", "may hold"), ("http://h/a b\u202e", "may hold"),
    ("http://h/sk-abcdefgh1234/v1", "it seems"), ("http://h/v1?a=sk-abcdefgh1234", "it seems"),
])  # fmt: skip
def test_url_with_credentials_is_refused(url, fact):
    with refused(fact) as caught:
        specs.completed(url)
    assert not [part for part in ("word", "\x1b", "sk-") if part in str(caught.value)]


@given(st.sampled_from(["key", "token", "X-API-Key", "password", "sig"]), st.sampled_from(["x1y2", ""]))
def test_secret_url_parameter_is_named(name, value):
    for url in (f"http://h/v1?{name}={value}", f"http://h/v1?a=b&{name}={value}", f"http://h/v1#{name}={value}"):
        with refused(f"parameter {name}", hint="SLM_ENDPOINT_KEY") as caught:
            specs.check_url(url)
        assert "x1y2" not in str(caught.value)
    specs.check_url("https://h:8000/v1/completions?max_tokens=1#author")


def test_response_format_changes_workload_hash():
    """A schema is known by what it says, however it is written."""
    given = ("", "json", '{"type": "object"}', '{"type":  "object"}', '{"type": "array"}')
    made = [specs.Workload(WorkloadSpec(response_format=each), (specs.Request((5, 6), 2),), "here") for each in given]
    assert len({each.hash for each in made}) == 4 and made[2].hash == made[3].hash
    assert ["response_format" in specs.workload_facts(each.spec) for each in made[:2]] == [False, True]
    assert [each.spec.output for each in made[:2]] == ["free text", "JSON"]
    assert made[3].spec.schema == '{"type":"object"}' and made[2].spec.output == made[3].spec.output
    assert [each.reference().each.partition("tokens")[2] for each in made[:2]] == ["", " of JSON"]


def test_json_schema_demands_long_output():
    schema = json.loads(WorkloadSpec(response_format="json").schema)
    shortest = {"name": "", "kind": "small", "count": 0, "done": True}
    assert schema["minItems"] == 1000 and [*shortest] == schema["items"]["required"] == [*schema["items"]["properties"]]
    assert len(json.dumps([shortest] * 1000, separators=(",", ":"))) > 48_000, "characters, of 3 to 4 in a token"


def test_turns_change_workload_facts():
    talks, plain = WorkloadSpec(turns=4, requests=10), WorkloadSpec(requests=10)
    assert specs.workload_facts(talks) == {**specs.workload_facts(plain), "turns": 4}
    assert (talks.longest, talks.whole, talks.finds_prefixes) == (4 * (512 + 256), 8, True)
    assert (plain.longest, plain.whole, plain.finds_prefixes) == (512 + 256, 10, False)
    slow, fast = ClosedLoop(8, think_s=2.5), ClosedLoop(8)
    assert specs.load_facts(slow) == {**specs.load_facts(fast), "think_s": 2.5} and "2.5 s" in slow.title
    assert slow.duration_s(1.0) == fast.duration_s(1.0) + 5.0
    assert "4 turns" in specs.Workload(talks, (specs.Request((5,), 2),), "here").reference().each
