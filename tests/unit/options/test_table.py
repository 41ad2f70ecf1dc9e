"""Each syntax of the options: what it reads, its bounds on both sides, and that what is written is read back.

The rows themselves: names, flags and defaults agree with each other, and what follows from several of them."""

import json
from functools import partial
from typing import get_args

import pytest
from hypothesis import given, strategies as st
from refusals import refused

from pytest_slmserve.analysis.estimates import FIRST_LOOKS
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.options import table
from pytest_slmserve.options.read import read_options
from pytest_slmserve.options.table import OPTS, Options, joined
from pytest_slmserve.schema.records import GpuPeaks
from pytest_slmserve.schema.specs import GIB

NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,8}", fullmatch=True)
# Values without what would be taken for a secret.
VALUES = st.text("ab=,: 5/", min_size=1, max_size=8)
BY_NAME = {opt.name: opt for opt in OPTS}


def refuses(read, *texts):
    """Whether each text is refused by a ValueError that says what is wanted."""
    for text in texts:
        with pytest.raises(ValueError, match=r"\w") as caught:
            read(text)
        assert str(caught.value) != "None"
    return True


@pytest.mark.parametrize(("name", "least", "most"), [
    ("repeats", 1, 1 << 63), ("budget", 0, 1 << 63), ("seed", 0, 1 << 63), ("max_num_seqs", 1, 1 << 63),
    ("gate_pairs", FIRST_LOOKS[0], 1000),
])  # fmt: skip
def test_option_numbers_have_bounds(name, least, most):
    read = BY_NAME[name].read
    assert (read(str(least)), read(str(most))) == (least, most)
    assert refuses(read, str(least - 1), str(most + 1), "1.5", "two", "²", "")


@pytest.mark.parametrize(("read", "text", "bound"), [
    (partial(table.whole_number, least=4), "3", r"\b4\b"), (partial(table.whole_number, most=9), "10", r"\b9\b"),
    (table.sharings, "mps,luck", "luck"),
], ids=range(3))  # fmt: skip
def test_refused_option_tells_its_bound(read, text, bound):
    with pytest.raises(ValueError, match=bound):
        read(text)


URLS = "http://h:1/v1/completions", "http://h:2/v1/completions"
VERSION = "https://host/openai/v1/completions?api-version=1"
SENSORS = (*table.TELEMETRY, "dcgm=node:5555", "http://h:9400/metrics", "https://h/metrics")
CLUSTERS = ("auto", "local", "local:1", "local:16", "10.0.0.1:6379", "node:1", "10.0.0.1:0")
# What each syntax reads, and what it refuses.
SYNTAX = {
    table.ascending: ({"1, 2,3": (1, 2, 3), "1": (1,)}, ["", "a", "1.5", "1,,2", "0,1", "2,1", "1,1", "1;2"]),
    table.positive: ({"0.5": 0.5, "1e-300": 1e-300, "7": 7.0}, ["0", "-0.0", "nan", "inf", "-inf", "long", ""]),
    partial(table.positive, zero=True): ({"0": 0.0}, ["-1", "-1e-9", "nan", "inf", "x"]),
    table.share: ({"1": 1.0, "0.25": 0.25}, ["0", "1.1", "90%"]),
    table.percentage: ({"99.9%": 99.9 / 100, "0.25": 0.25, "0.5%": 0.005},
                       ["1", "1.5", "100%", "150%", "0%", "%", "-5%", "nan"]),
    table.length: ({"natural": "natural", "1": 1, "512": 512}, ["0", "-1", "1.5", "512/256", "Natural", "", "²"]),
    table.memory_size: ({"40GiB": 40 * GIB, str(40 << 30): 40 * GIB}, ["0", "-1GiB", "40TiB", "all", ""]),
    table.gpu_peaks: ({text: GpuPeaks(989, 3.5) for text in ("tflops=989,gbps=3.5", "gbps=3.5,tflops=989")},
                      ["989", "tflops=989", "gbps=1", "tflops=0,gbps=1", "tflops=1,gbps=1,watts=1",
                       "tflops=1,gbps=fast"]),
    table.truth: ({"1": True, "TRUE": True, "yes": True, "On": True, "0": False, "oFF": False, "no": False},
                  ["maybe", "2", "", "y"]),
    table.word_list: ({" a,, b ,": ("a", "b")}, ["", ",", " , "]),
    table.sharings: ({"mig, mps": ("mig", "mps")}, ["luck", "mps,luck", ",", "urls"]),
    table.urls: ({"http://h:1, http://h:2/v1": URLS, VERSION: (VERSION,)}, [",", "http://h:1,http://h:1/v1"]),
    table.archive: ({"1": True, "yes": True, "0": False, "old.jsonl": "old.jsonl"},
                    ["", "test_it.py", "test_it.py::test_a", "tests/", "a::b"]),
    table.telemetry: (dict(zip(SENSORS, SENSORS)), ["nsight", "dcgm=", "nvml=here", "ftp://h", "dcgmx", ""]),
    table.ray_address: (dict(zip(CLUSTERS, CLUSTERS)), ["local:0", "10.0.0.1", ":6379", "10.0.0.1:port",
                        "ray://10.0.0.1:10001", "", "automatic", "10.0.0.1:"]),
    table.ray_resource: ({"accelerator_type:H200": "accelerator_type:H200"},
                         ["", "CPU", "GPU", "memory", "object_store_memory"]),
}  # fmt: skip


@pytest.mark.parametrize("read", SYNTAX, ids=lambda read: getattr(read, "__name__", "positive or zero"))
def test_option_syntax_reads_valid_texts(read):
    good, bad = SYNTAX[read]
    assert {text: read(text) for text in good} == good and refuses(read, *bad)


@pytest.mark.parametrize("url", [
    "http://me:hunter2@host/v1", "http://hunter2@host/v1", "me:hunter2@host/v1", "https://host/v1?api_key=hunter2",
    "https://host/v1?api-version=1&sig=hunter2", "ftp://host/hunter2", "http://host:hunter2/v1", "host/v1/hunter2",
], ids=range(8))  # fmt: skip
def test_url_with_credentials_is_refused(url):
    with refused("URL") as caught:
        table.urls(url)
    assert url not in str(caught.value) and "hunter2/v1/" not in str(caught.value)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)


@given(NAMES, VALUES, JSON)
def test_argument_value_is_json(name, value, other):
    assert table.pair(f"{name}={value}") == (name, value) == table.variable(f"{name}={value}")
    assert table.pair(f"{name}=") == (name, "") and refuses(table.pair, name, f"={value}")
    key, read = table.argument(f"{name}={json.dumps(other)}")
    assert key == name and json.loads(json.dumps(read)) == other and isinstance(hash(read), int)
    for text in ("word", '{"a": 1}', "[1", "x=y"):  # no JSON, or an object
        assert table.argument(f"{name}={text}") == (name, text)


@pytest.mark.parametrize("name", [
    "tensor_parallel_size", "pipeline-parallel-size", "data_parallel_size_local", "prefill_context_parallel_size",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
])  # fmt: skip
def test_gpu_assigning_argument_is_refused(name):
    for read, way in ((table.argument, "--slm-tensor-parallel-size"), (table.variable, f"export {name}")):
        with pytest.raises(ValueError, match=way):
            read(f"{name}=2")
    assert table.argument("max_parallel=2") == ("max_parallel", 2)


def test_side_sets_candidate_engine():
    text = "candidate:python=p,q,env=A=x,y,arg=a=[1,2],arg=b=true"
    entries = (("python", "p,q"), ("env", ("A", "x,y")), ("arg", ("a", (1, 2))), ("arg", ("b", True)))
    assert table.side(text) == ("candidate", entries)
    assert table.side("baseline:env=PYTHONPATH=/a:/b") == ("baseline", (("env", ("PYTHONPATH", "/a:/b")),))
    bad = "baseline", "candidate:", "both:env=A=1", "baseline:A=1", "baseline:env=A", "candidate:arg=a"
    assert refuses(table.side, *bad, "baseline:python=", "baseline:env", "candidate:arg=data_parallel_size=2")
    words = ["candidate:python=a,env=A=1", "baseline:arg=x=1", "candidate:python=b,env=B=2,arg=y=[1,2]"]
    own = {"simulate": True, "python": "p", "env": ["A=0", "C=3"]}
    options = read_options({**own, "gate": True, "side": words}, {}, {})
    assert options.side_of("candidate") == ("b", (("A", "1"), ("B", "2")), (("y", (1, 2)),))
    assert options.side_of("baseline") == ("", (), (("x", 1),))
    assert options.engine == ("b", (("A", "1"), ("C", "3"), ("B", "2")))
    plain = "p", (("A", "0"), ("C", "3"))
    assert read_options({**own, "gate": True}, {}, {}).engine == plain, "of a candidate without an interpreter"
    assert read_options(own, {"slm_side": ["candidate:python=q"]}, {}).engine == plain, "a side of another run"


@given(st.lists(st.tuples(NAMES, st.integers()), max_size=5), st.lists(st.tuples(NAMES, st.integers()), max_size=5))
def test_later_pair_replaces_earlier(common, own):
    found = joined(common, own)
    names = [name for name, _ in [*common, *own]]
    assert [name for name, _ in found] == sorted(set(names), key=names.index)
    assert all([value for key, value in [*common, *own] if key == name][-1] == value for name, value in found)


def test_option_rows_are_consistent():
    for opt in OPTS:
        key, text = f"slm_{opt.name}", opt.default_text
        assert (opt.key, opt.variable) == (key, key.upper()) and opt.help and opt.group
        assert opt.flag == (f"-o {key}" if opt.ini_only else f"--{key.replace('_', '-')}")
        assert (opt.metavar is None) == opt.is_flag == (opt.read is table.truth), "a flag has no placeholder"
        if opt.many or opt.is_flag or not text:
            assert opt.default in (None, False, "", ()) and not text
        else:
            assert opt.read(text) == opt.default and text in (opt.choices or (text,))
    assert [opt.name for opt in OPTS] == [*Options._fields[2:]]
    assert sum(not opt.ini_only for opt in OPTS) <= 45, "on the command line"
    of_a_gate = BY_NAME["gate_margin"].default, BY_NAME["gate_pairs"].default, table.FEWEST_PAIRS
    assert of_a_gate == (GateCriteria().margin, GateCriteria().pairs, FIRST_LOOKS[0])
    groups = [opt.group for opt in OPTS]
    begun = [Options._field_defaults[opt.name].group for opt in OPTS]
    assert list(dict.fromkeys(groups)) == [group for group in begun if group]
    assert all(group == own for group, own in zip(groups, begun) if own)
    assert table._rows() == OPTS, "made once"
    more = {"many": True, "bare": "1", "ini_only": True, "group": "load", "own": True}
    length = table.Opt(table.length, 3, "N", "words", **more)
    assert table.flag("words", **more) == table.Opt(table.truth, False, help="words", **more)
    assert table.opt(table.length, 3, "N", **more).described("words") == length and not length.choices
    assert table.opt(("a", "b"), "b", "N", **more) == table.Opt(str, "b", "N", choices=("a", "b"), **more)
    assert table.opt(table.errors.Suite, "core").choices == get_args(table.errors.Suite)
    assert BY_NAME["sweep"].choices == ("full", "adaptive") and BY_NAME["kv_cache_dtype"].choices == table.KV_DTYPES


@pytest.mark.parametrize(("given", "platform", "on_all_gpus"), [
    ({"gpu": True}, "cuda", False), ({"cpu": True}, "cpu", False), ({"strict": True}, None, False),
    ({"endpoint": "http://h"}, "remote", False), *(({"simulate": True, "ray": ray}, "simulated", here)
    for ray, here in (("local", True), ("local:2", True), ("auto", False), ("h:1", False))),
], ids=range(8))  # fmt: skip
def test_mode_determines_platform(given, platform, on_all_gpus):
    options = read_options(given, {}, {})
    assert (options.platform, options.on_all_gpus) == (platform, on_all_gpus)
