"""Where a value is from, what a wrong one is told, and which options go together: one table for each.

Command line before environment before ini before default; what is typed again means the same."""

import pytest
from hidden_texts import ORDINARY_PAIRS, SECRET_PAIRS, SECRET_VALUES, repeats
from hypothesis import given, strategies as st
from refusals import refused

from pytest_slmserve.options.read import BESIDE_THE_RECORDS, OF_A_GATE, as_words, near_option, read_options
from pytest_slmserve.options.table import OPTS, Opt
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import GpuPeaks

NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,8}", fullmatch=True)
BY_NAME = {opt.name: opt for opt in OPTS}
EACH = pytest.mark.parametrize("name", BY_NAME)
URL = "http://127.0.0.1:1/v1/completions"
# Of each option a text that is not its default, and what it means; a wrong text, and what the error offers for it.
ROWS = {
    "models": (" a , b", ("a", "b"), ",", "A,B"),
    "concurrency": ("1,2,4", (1, 2, 4), "4,2", "1,2,4"),
    "sweep": ("adaptive", "adaptive", "fast", "adaptive"),
    "suite": ("papers", "papers", "paper", "papers"),
    "timeout": ("30", 30.0, "0", "120.0"),
    "window": ("2.5", 2.5, "-1", "5"),
    "ramp_up": ("burst", "burst", "stagered", "staggered"),
    "endpoint": ("http://h:1,https://b/x", ("http://h:1/v1/completions", "https://b/x"), ",", "URL,URL"),
    "interface": ("server", "server", "severs", "server"),
    "repeats": ("3", 3, "0", "2"),
    "budget": ("0", 0, "-1", "5"),
    "input_len": ("64", 64, "abc", "8"),
    "output_len": ("natural", "natural", "256,", "8"),
    "prefix_share": ("50%", 0.5, "1", "0.05"),
    "prefix_groups": ("4", 4, "0", "1"),
    "turns": ("4", 4, "0", "1"),
    "think": ("2.5", 2.5, "-1", "0.0"),
    "sharegpt_rule": ("vllm", "vllm", "any", "vllm"),
    "kind": ("embed", "embed", "embeddings", "embed"),
    "goodput": ("ttft:200ms,tpot:50ms", "ttft:200ms,tpot:50ms"),
    "export": ("vllm-bench=results/", "vllm-bench=results/"),
    "seed": ("7", 7, "1.0", "0"),
    "lora": ("16x8", (16, 8), "16x9", "16x8"),
    "lora_traffic": ("zipf", "zipf", "zip", "zipf"),
    "load_format": ("auto", "auto", "heavy", "auto"),
    "kv_cache_dtype": ("fp8", "fp8", "fp4", "fp8"),
    "gpu_memory": ("40GiB", 40 << 30, "much", "40GiB"),
    "gpu_memory_utilization": ("0.5", 0.5, "90%", "0.9"),
    "tensor_parallel_size": ("2,4", (2, 4), "2,1", "1"),
    "replicas": ("2,3", (2, 3), "two", "2"),
    "sharing": ("mig, mps", ("mig", "mps"), "luck", "time-slicing,mps"),
    "env": ("A=1 B=x=y", (("A", "1"), ("B", "x=y")), "NAME", "NAME=VALUE"),
    "engine_arg": ('a="5" b=[1,2] c=word', (("a", "5"), ("b", (1, 2)), ("c", "word")), "eager", "max_num_seqs=256"),
    "side": ("baseline:python=/old", (("baseline", (("python", "/old"),)),), "both:python=p", "candidate:python=PATH"),
    "max_num_seqs": ("64", 64, "many", "8"),
    "gate_margin": ("5%", 0.05, "300%", "0.03"),
    "gate_pairs": ("4", 4, "3", "12"),
    "gate_alpha": ("0.05", 0.05, "0.9", "0.01"),
    "gate_launches": ("apart", "apart", "alone", "apart"),
    "gate_caches": ("cold", "cold", "WARM", "cold"),
    "simulate_slowdown": ("5%", 0.05, "100%", "0.05"),
    "telemetry": ("dcgm=node:5555", "dcgm=node:5555", "tea-leaves", "auto"),
    "telemetry_interval": ("0.5", 0.5, "nan", "5"),
    "gpu_peaks": ("tflops=989,gbps=3350", GpuPeaks(989, 3350), "fast", "tflops=989,gbps=3350"),
    "report": ("tables", "tables", "short", "all"),
    "resume": ("old.jsonl", "old.jsonl", "test_it.py", "[RECORDS]"),
    "ray": ("10.0.0.1:6379", "10.0.0.1:6379", "10.0.0.1", "ADDRESS"),
    "ray_resource": ("accelerator_type:H200", "accelerator_type:H200", "GPU", "NAME"),
}  # fmt: skip
WORDS = ("dataset", "tokenizer", "quantization", "python", "waivers", "baseline", "profile", "records", "html",
         "ray_env", "response_format")  # fmt: skip
ROWS |= dict.fromkeys(WORDS, ("some/word", "some/word"))
ROWS |= {opt.name: ("yes", True, "maybe", "") for opt in OPTS if opt.is_flag}
GOOD = {name: row[:2] for name, row in ROWS.items()}
BAD = {name: row[2:] for name, row in ROWS.items() if row[2:]}


def beside(opt: Opt) -> dict[str, object]:
    """What has to be typed with it."""
    if opt.name in ("gate", "calibrate", "ray"):
        return {"simulate": True}
    return {"gate": True, "simulate": True} if opt.name.startswith(OF_A_GATE) else {}


def typed(opt: Opt, text: str) -> object:
    """As pytest's parser hands it over."""
    return True if opt.is_flag else text.split() if opt.many else text


def test_malformed_option_text_is_refused():
    assert GOOD.keys() == BY_NAME.keys() == BAD.keys() | {*WORDS, "goodput", "export"}
    assert all(value != BY_NAME[name].default for name, (_, value) in GOOD.items())
    for name, wanted in (("sweep", "adaptive"), ("gpu_memory", "40GiB")):
        with refused(BY_NAME[name].flag, hint=wanted):
            read_options({name: ""}, {}, {})
    options = read_options({"resume": True}, {}, {})
    assert (options.resume, options.texts["resume"], BY_NAME["resume"].bare) == (True, (), "1")
    assert read_options({}, {"slm_env": ["A=x y", "B=1"]}, {}).env == (("A", "x y"), ("B", "1"))
    for name, of_toml in (("strict", ["a"]), ("window", {"s": 1}), ("env", {"A": "x"})):
        with refused(f"slm_{name}:"):
            read_options({}, {f"slm_{name}": of_toml}, {})
    for name in ("sweep", "ramp_up", "interface", "suite", "kv_cache_dtype"):
        with refused(*BY_NAME[name].choices, "'WRONG'"):
            read_options({name: "WRONG"}, {}, {})
    for name, texts, shown in (
        ("env", ["A=1", "wrong"], ["'A=...'", "'wrong'"]), ("engine_arg", ["a=1", "wrong"], ["'a=1'", "'wrong'"]),
        ("side", ["baseline:env=A=hunter2", "both:python=p"], ["'baseline:env=A=...'", "'both:python=p'"]),
    ):  # fmt: skip
        with refused(*shown):
            read_options({name: texts}, {}, {})


@EACH
def test_command_line_overrides_other_sources(name):
    opt, (text, value) = BY_NAME[name], GOOD[name]
    usual = "off" if opt.is_flag else opt.default_text
    ini, env = {opt.key: text}, {opt.variable: text}
    found = [read_options({}, {}, {}), read_options({}, ini, {}), read_options(beside(opt), {}, env)]
    assert [(getattr(o, name), o.source[name]) for o in found] == [
        (opt.default, "default"), (value, "ini"), (value, "environment")
    ]  # fmt: skip
    if usual:
        over = read_options(beside(opt), ini, {opt.variable: usual})
        assert (getattr(over, name), over.source[name]) == (opt.default, "environment")
    if not opt.ini_only:
        given = {**beside(opt), name: typed(opt, text)}
        over = read_options(given, {opt.key: usual}, {opt.variable: usual})
        assert (getattr(over, name), over.source[name]) == (value, "command line")
    for nothing in ("", None, []):
        options = read_options({name: None}, {opt.key: nothing}, {opt.variable: ""})
        assert options.source[name] == "default" and options.texts[name] == ()


@pytest.mark.parametrize(("name", "of_toml", "text"), [
    ("models", ["opt-125m", "opt-350m"], "opt-125m,opt-350m"), ("concurrency", [1, 2, 4], "1,2,4"),
    ("concurrency", 8, "8"), ("window", 2.5, "2.5"), ("gpu_memory_utilization", 1, "1"), ("resume", True, "1"),
    ("strict", True, "1"), ("strict", False, "0"), ("seed", 0, "0"), ("env", ["A=x"], "A=x"),
    ("engine_arg", ["a=1", "b=true"], "a=1 b=true"),
], ids=range(11))  # fmt: skip
def test_toml_value_reads_as_text(name, of_toml, text):
    one, other = (read_options({}, {f"slm_{name}": value}, {}) for value in (of_toml, text))
    assert one._replace(texts=other.texts) == other and one.source[name] == "ini"


@pytest.mark.parametrize("name", BAD)
def test_wrong_option_text_is_located(name):
    opt, (text, offered) = BY_NAME[name], BAD[name]
    sources = [({}, {opt.key: text}, {}, opt.key), ({}, {}, {opt.variable: text}, opt.variable)]
    if not (opt.is_flag or opt.ini_only):
        sources.append(({name: typed(opt, text)}, {}, {}, opt.flag))
    for command_line, ini, env, where in sources:
        with refused(f"{where}:", text) as caught:
            read_options(command_line, ini, env)
        assert caught.value.hint == (f"{opt.flag}={offered}" if offered else opt.flag)
    if offered:
        offered = {"URL,URL": URL, "ADDRESS": "auto", "[RECORDS]": "RECORDS"}.get(offered, offered)
        assert read_options({**beside(opt), name: typed(opt, offered)}, {}, {}).source[name] == "command line"


SECRETS = ["HF_TOKEN", "hf_token", "AWS_SECRET_ACCESS_KEY", "PASSWORD", "db_password", "X_API_KEY", "CREDENTIALS"]


@pytest.mark.parametrize(("name", "before"), [
    ("env", ""), ("engine_arg", ""), ("side", "candidate:env="), ("side", "baseline:python=p,arg="),
])  # fmt: skip
@pytest.mark.parametrize("text", [*(f"{name}=hunter2" for name in SECRETS), "NAME=sk-hunter2abcdefgh1234",
                                  "HF_TOKEN=hunter2\nhunter2"])  # fmt: skip
def test_secret_is_shown_by_name(name, before, text):
    opt, said = BY_NAME[name], before + text
    from_ini, from_env = ({}, {opt.key: [said]}, {}, opt.key), ({}, {}, {opt.variable: said}, opt.variable)
    for *sources, where in (({name: [said]}, {}, {}, opt.flag), from_ini, from_env):
        with refused(where, f"'{text.partition('=')[0]}'", hint="HF_TOKEN") as caught:
            read_options(*sources)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("text", SECRET_PAIRS)
def test_every_option_refuses_secrets(text):
    """What is wrong for another reason too."""
    for opt in OPTS:
        if not opt.is_flag:
            with pytest.raises(BadUsage) as caught:
                read_options({}, {opt.key: text}, {})
            assert opt.key in str(caught.value) and not repeats(str(caught.value))


@pytest.mark.parametrize("text", ORDINARY_PAIRS)
def test_ordinary_option_value_is_accepted(text):
    name, _, value = text.partition("=")
    assert read_options({"env": [text]}, {}, {}).env == ((name, value),)
    assert read_options({"engine_arg": [text]}, {}, {}).texts["engine_arg"] == [text]
    sides = {"side": [f"candidate:env={text}", f"candidate:arg={text}"], "gate": True, "simulate": True}
    assert read_options(sides, {}, {}).side_of("candidate")[1] == ((name, value),)


@given(st.sampled_from(SECRET_VALUES), st.sampled_from(["env", "engine_arg"]), NAMES, NAMES)
def test_secret_inside_value_is_refused(value, option, name, other):
    """So that no command that is kept has it."""
    with pytest.raises(BadUsage) as caught:
        read_options({option: [f"{other}=1", f"{name}={other} {value}"]}, {}, {})
    assert value not in str(caught.value)


SIMULATED_GATE, SIDE = {"simulate": True, "gate": True}, ["baseline:python=p"]
SLOWER = {"simulate_slowdown": "5%"}
OWN = {"interface": "server", "telemetry": "nvml", "max_num_seqs": "8", "gpu_memory": "40GiB", "replicas": "2"}
OWN |= {"tensor_parallel_size": "2", "python": "p", "env": ["A=1"], "engine_arg": ["a=1"], "sharing": "mps"}
# What is given, what the error names, and what its hint names.
REFUSED = {
    "two modes": ({"gpu": True, "SLM_CPU": "1"}, "--slm-gpu --slm-cpu --slm-simulate --slm-endpoint", "one"),
    "a mode and an endpoint": ({"endpoint": URL, "simulate": True}, "--slm-simulate --slm-endpoint", "one"),
    **{name: ({"records": f"out/{name}"}, f"--slm-records=out/{name} {name}", ".jsonl") for name in BESIDE_THE_RECORDS},
    "an export into the records": (
        {"simulate": True, "records": "all.json", "export": "vllm-bench=./all.json"}, "slm_export", "-o slm_export"
    ),
    "a side": ({"simulate": True, "side": SIDE}, "--slm-side", "--slm-gate --slm-side"),
    "a margin": ({"simulate": True, "gate_margin": "0.05"}, "--slm-gate-margin", "--slm-gate --slm-gate-margin"),
    "a slowdown": ({"simulate": True, **SLOWER}, "--slm-simulate-slowdown", "--slm-gate"),
    "a side and a baseline": ({"baseline": "a", "side": SIDE, "gate_margin": "0.1"}, "--slm-side", "--slm-gate"),
    "a slowdown of what is real": ({"cpu": True, "gate": True, **SLOWER}, "--slm-simulate-slowdown", "--slm-simulate"),
    "a calibration of sides": ({"simulate": True, "calibrate": True, "side": SIDE}, "--slm-side", "--slm-calibrate"),
    "a calibration of a slowdown": (
        {"simulate": True, "calibrate": True, **SLOWER}, "--slm-simulate-slowdown", "--slm-calibrate"
    ),
    "a gate of nothing": ({"gate": True}, "--slm-gate", "--slm-gpu --slm-cpu --slm-simulate"),
    "a gate of nothing from outside": ({"SLM_GATE": "1"}, "--slm-gate", "--slm-gpu --slm-cpu --slm-simulate"),
    "a calibration of nothing": ({"calibrate": True}, "--slm-calibrate", "--slm-calibrate --slm-simulate"),
    "a gate of another archive": (
        {**SIMULATED_GATE, "resume": "old.jsonl"}, "--slm-gate", "--slm-records=old.jsonl --slm-resume"
    ),
    "a gate of an endpoint": ({"endpoint": URL, "gate": True}, "--slm-gate", "--slm-gpu --slm-endpoint"),
    "a calibration of one": ({"endpoint": URL, "calibrate": True}, "--slm-calibrate", "--slm-endpoint"),
    "a baseline of one": ({"endpoint": URL, "baseline": "old.jsonl"}, "--slm-baseline", "--slm-endpoint"),
    **{f"{name} of one": ({"endpoint": URL, name: text}, BY_NAME[name].flag, BY_NAME[name].flag)
       for name, text in OWN.items()},
    "one on Ray": ({"endpoint": URL, "ray": "auto"}, "--slm-ray", "one"),
    "Ray of nothing": ({"ray": "auto"}, "--slm-ray", "--slm-gpu --slm-simulate"),
    "a gate on Ray": ({**SIMULATED_GATE, "ray": "auto"}, "--slm-gate", "--slm-ray"),
    "a calibration on Ray": ({"simulate": True, "ray": "auto", "calibrate": True}, "--slm-gate", "--slm-ray"),
    "an adaptive sweep on Ray": ({"simulate": True, "ray": "auto", "sweep": "adaptive"}, "--slm-sweep", "full"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_meaningless_option_combination_is_refused(case):
    given, told, hinted = REFUSED[case]
    env = {name: text for name, text in given.items() if name.isupper()}
    with refused(*told.split()) as caught:
        read_options({name: value for name, value in given.items() if name not in env}, {}, env)
    assert all(word in caught.value.hint for word in hinted.split())


@pytest.mark.parametrize("given", [
    {**SIMULATED_GATE, "resume": True}, {"simulate": True, "resume": "old.jsonl"}, {**SIMULATED_GATE, **SLOWER},
    {**SIMULATED_GATE, "side": SIDE}, {"simulate": True, "baseline": "a", "gate_margin": "0.1"},
    {"endpoint": URL, "telemetry": "off"}, {"endpoint": URL, "concurrency": "4", "models": "m"},
    {"export": "vllm-bench=./a.json", "records": "b.json"}, {"records": "gate.json/r.jsonl"},
    {"simulate": True, "ray": "auto", "sweep": "full"}, {"simulate": True, "calibrate": True},
], ids=range(11))  # fmt: skip
def test_sensible_option_combination_is_accepted(given):
    options = read_options(given, {}, {})
    assert {options.source[name] for name in given} == {"command line"}
    assert options.gate is bool(given.keys() & {"gate", "calibrate"}), "a calibration is one of two equal sides"


def test_unused_ini_options_are_accepted():
    """An ini file may hold options for other runs, and for engines of ours."""
    others = {"side": SIDE, "gate_margin": "0.1", "gate": "1", "calibrate": "1", "ray": "auto", **SLOWER}
    for name, text in others.items():
        assert read_options({}, {f"slm_{name}": text}, {}).source[name] == "ini"
    for name, text in OWN.items():
        assert read_options({"endpoint": URL}, {f"slm_{name}": text}, {}).platform == "remote"
    assert read_options({"cpu": True, "gate": True}, {"slm_simulate_slowdown": "5%"}, {}).gate, "of a simulation"


@pytest.mark.parametrize(("flag", "near"), [
    ("--slm-gat", "--slm-gate?"), ("--slm-model", "--slm-models?"), ("--slm-seed", "-o slm_seed=0 SLM_SEED"),
    ("--slm-gpu-memory-utilisation", "--slm-gpu-memory-utilization?"),
    ("--slm-gate-pair", "-o slm_gate_pairs=12 SLM_GATE_PAIRS"),
])  # fmt: skip
def test_mistyped_option_suggests_nearest_name(flag, near):
    found = near_option(flag)
    assert all(word in found for word in near.split()) and "slm-slm" not in found
    assert near_option("--slm-zzz") == "", "that is near to none"


def retyped(words):
    """What a command line of these words gives."""
    flags = {opt.key if opt.ini_only else opt.flag: opt for opt in OPTS}
    pairs = [(flags[flag], text) for flag, _, text in (word.partition("=") for word in words if word != "-o")]
    many = {opt.name: [text for each, text in pairs if each is opt] for opt, _ in pairs if opt.many}
    return {opt.name: True if opt.is_flag else text or opt.bare for opt, text in pairs} | many


def read_typed(given):
    """The options that these values give, each from where it can be typed."""
    ini = {f"slm_{name}": value for name, value in given.items() if BY_NAME[name].ini_only}
    return read_options({name: value for name, value in given.items() if not BY_NAME[name].ini_only}, ini, {})


@EACH
def test_retyped_words_restore_options(name):
    opt, (text, value) = BY_NAME[name], GOOD[name]
    given = {**({} if opt.group == "what to run" else {"simulate": True}), **beside(opt), name: typed(opt, text)}
    options = read_typed(given)
    words = as_words(options, given.keys() - {name})
    assert all(word == "-o" or word.startswith(("--slm-", "slm_")) for word in words)
    assert retyped(words).keys() == {name} and getattr(options, name) == value
    assert read_typed({**given, **retyped(words)}) == options == read_typed(retyped(as_words(options)))
    elsewhere = read_options({}, {"slm_simulate": "1", "slm_resume": "1"}, {"SLM_MODELS": "a,b", "SLM_STRICT": "0"})
    assert as_words(elsewhere) == ["--slm-simulate", "--slm-models=a,b", "-o", "slm_strict=0", "--slm-resume"]
