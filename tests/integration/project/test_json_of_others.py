"""Every reader of JSON that others wrote, with everything that such JSON can be: it ends at once, in one sentence that
names the file or the option and what to type, or without the value where a reader can do without."""

import json
import os
import signal
import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_slmserve.archive.baselines import read_calibrations, read_waivers
from pytest_slmserve.archive.external import read_results
from pytest_slmserve.commands import asv, bisect
from pytest_slmserve.commands.measure import json_object
from pytest_slmserve.engines import device_lock, endpoint
from pytest_slmserve.engines.endpoint import only_model
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan import models
from pytest_slmserve.run.cluster import join_cluster
from pytest_slmserve.schema.errors import DEEPEST_JSON, LARGEST_JSON, BadDataset, BadUsage, json_value
from pytest_slmserve.schema.specs import handed_over
from pytest_slmserve.telemetry import host
from pytest_slmserve.workload.arrivals import read_trace

Q = "hf_quant_config.json"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
    "vocab_size": 100,
}  # fmt: skip
DEEP = 100_000
TEXTS = {
    "deep": b"[" * DEEP, "deep-closed": b"[" * DEEP + b"]" * DEEP, "deep-object": b'{"a":' * DEEP,
    "deeper-than-we-walk": b'{"a":' * 101 + b"1" + b"}" * 101, "digits": b"9" * 6000,
    "digits-within": b'{"a": [%s]}' % (b"9" * 6000), "no-utf-8": b"\xff\xfe\x00", "no-utf-8-within": b'{"a": "\xff"}',
    "empty": b"", "cut": b'{"a": [1, ', "two": b"{} []", "number": b"5", "null": b"null", "nan": b"NaN", "text": b'"a"',
}  # fmt: skip
NO_FILES = ("zero", "pipe", "folder", "nowhere", "sparse")


@dataclass(frozen=True, slots=True)
class Reader:
    """read: what a file at a path gives, or a text. name: what an error names. without: what it gives where it does
    without, and no error."""

    read: Callable[[Any], Any]
    name: str
    kind: type[Exception] = BadUsage
    without: Any = BadUsage


def model_beside(name: str) -> Callable[[Path], Any]:
    """Reads the model of a folder whose file of this name is the planted one."""

    def read(path: Path) -> Any:
        if name != "config.json":
            (path.parent / "config.json").write_text(json.dumps(LLAMA), "utf-8")
        path.rename(path.with_name(name)) if not path.is_symlink() else path.with_name(name).symlink_to(path)
        return models.model_of(str(path.parent)).parameters

    return read


def moved(name: str, read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def of_name(path: Path) -> Any:
        path.rename(path.with_name(name))
        return read(path.parent / name)

    return of_name


def head(path: Path) -> Any:
    """Weights of safetensors whose header is the planted text; of no file as it is."""
    if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
        path.write_bytes(path.stat().st_size.to_bytes(8, "little") + path.read_bytes())
    return model_beside("model.safetensors")(path)


def sizes(path: Path) -> Any:
    kept = models.sizes_file(LLAMA)
    kept.parent.mkdir(parents=True)
    path.rename(kept)
    return models.kept_sizes(LLAMA)


def releases(path: Path) -> Any:
    return bisect.releases_of(Namespace(releases=path, good="1", bad="2", python="", pytest=[]))


FILES = {
    "config": Reader(model_beside("config.json"), "config.json"),
    "quantization": Reader(model_beside(Q), Q),
    "weights": Reader(head, "", without=None),
    "index": Reader(model_beside("model.safetensors.index.json"), "", without=None),
    "sizes": Reader(sizes, "", without={}),
    "waivers": Reader(read_waivers, "planted"),
    "calibrations": Reader(moved("calibration.json", read_calibrations), "calibration.json"),
    "ray": Reader(lambda path: join_cluster(SimpleNamespace(ray="auto", ray_env=str(path))), "slm_ray_env: "),
    "asv": Reader(moved(asv.RELEASES, lambda path: asv.init_asv(Namespace(into=path.parent))), ""),
    "bisect": Reader(releases, "planted"),
    "results": Reader(lambda path: read_results(path), "planted"),
    "trace": Reader(lambda path: [*read_trace(path)], "planted", BadDataset),
}
# No file is looked for where there is none, and what is no JSON at all is a table.
WITHOUT = {"config": {"zero", "pipe", "folder"}, "calibrations": {"nowhere"}, "asv": {"nowhere"}}
WITHOUT |= {name: {*NO_FILES} for name in ("quantization", "index")}
NO_FILE = [(reader, name) for reader in FILES for name in NO_FILES if name not in WITHOUT.get(reader, ())]
ROWS = {"two": 1, **{name: 0 for name, text in TEXTS.items() if text[:1] not in (b"[", b"{", b"\xff")}}


PATIENCE_S = 60  # of a machine that is busy; what waits would wait for ever


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def judge(reader: Reader, given: Any) -> None:
    if reader.without is not BadUsage:
        assert reader.read(given) == reader.without
        return
    with pytest.raises(reader.kind) as caught:
        reader.read(given)
    problem, hint = caught.value.problem, caught.value.hint
    assert type(caught.value) is reader.kind and reader.name in problem and hint
    assert "\n" not in problem and len(problem) < 500 and len(hint) < 500


@pytest.mark.parametrize("plant", TEXTS)
@pytest.mark.parametrize("reader", FILES)
def test_foreign_json_never_crashes_reader(tmp_path, reader, plant):
    (tmp_path / "own").mkdir()
    path = tmp_path / "own" / "planted"
    path.write_bytes(TEXTS[plant])
    if reader == "results" and plant in ROWS:
        assert len(read_results(path)) == ROWS[plant]
    else:
        judge(FILES[reader], path)


@pytest.mark.parametrize(("reader", "plant"), NO_FILE)
def test_special_files_are_never_awaited(tmp_path, reader, plant):
    (tmp_path / "own").mkdir()
    path = tmp_path / "own" / "planted"
    match plant:
        case "zero":
            path.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "nowhere":
            path.symlink_to(tmp_path / "missing")
        case "sparse":
            path.touch()
            os.truncate(path, 1 << 34)
    judge(FILES[reader], path)


# Texts: of options, of endpoints, of other processes

ODD_TEXTS = {name: text.decode("latin-1") for name, text in TEXTS.items()}
OF_OPTIONS = {name: text for name, text in ODD_TEXTS.items() if name.startswith(("deep", "digits"))}
NOT_KEPT = {
    "nan-within": '{"a": [NaN]}', "infinity": '{"a": Infinity}', "overflow": '{"a": 1e999}',
    "surrogate": '{"a": "\\ud800"}',
}  # fmt: skip


def models_told(monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    monkeypatch.setattr(endpoint, "ask_once", lambda *_: (200, "application/json", text))
    with pytest.raises(BadUsage) as caught:
        only_model("http://host/v1/completions", 10)
    return str(caught.value.problem)


@pytest.mark.parametrize("plant", [*OF_OPTIONS, *NOT_KEPT])
def test_unusable_extra_body_is_refused(plant):
    judge(Reader(json_object, "--extra-body"), {**OF_OPTIONS, **NOT_KEPT}[plant])


@pytest.mark.parametrize("plant", [*OF_OPTIONS, *NOT_KEPT, "bytes"])
@pytest.mark.parametrize(("name", "before"), [("engine_arg", "a="), ("side", "candidate:arg=a=")])
def test_unusable_argument_is_refused(name, before, plant):
    text = {**OF_OPTIONS, **NOT_KEPT, "bytes": "\udc80"}[plant]
    judge(Reader(lambda text: read_options({name: [before + text]}, {}, {}), name.replace("_", "-")), text)
    given = ["a=NaN text", "b={bad", 'c= {"d": 1} ']
    kept = [value for _, value in read_options({"engine_arg": given}, {}, {}).engine_arg]
    assert kept == ["NaN text", "{bad", '{"d": 1}']


@pytest.mark.parametrize("plant", ODD_TEXTS)
def test_odd_model_list_is_told(monkeypatch, plant):
    assert models_told(monkeypatch, ODD_TEXTS[plant]).endswith("does not list its models")


def test_million_models_fit_one_sentence(monkeypatch):
    text = json.dumps({"data": [{"id": f"m{number}"} for number in range(1_000_000)]})
    said = models_told(monkeypatch, text)
    assert "lists 1000000 models: m0, m1, " in said and len(said) < 300


@pytest.mark.parametrize("plant", ODD_TEXTS)
def test_odd_interpreter_answers_are_refused(monkeypatch, plant):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=TEXTS[plant]))
    with pytest.raises(BadUsage, match="is not a Python interpreter"):
        host.interpreter("/v/python", {})
    assert "problem" in models._told(["me/mine"], "/v/python", {})["me/mine"]
    assert device_lock.holder_of(ODD_TEXTS[plant]) == "it has not said which"


# What is read


@pytest.mark.parametrize(("text", "value"), [
    (b"\xef\xbb\xbf [1]\n", [1]), ('{"a": 1, "a": 2}', {"a": 2}), ("[NaN, -Infinity, 1e999]", "[nan, -inf, inf]"),
    ("[" * DEEPEST_JSON + "]" * DEEPEST_JSON, None), (json.dumps(["[" * 5000, {"a": "{" * 5000}]), None),
    (json.dumps([[]] * 5000), [[]] * 5000),
], ids=range(6))  # fmt: skip
def test_valid_json_is_read_unchanged(text, value):
    found = json_value(text)
    assert (repr(found) if isinstance(value, str) else found) == (json.loads(text) if value is None else value)


def test_oversized_json_is_refused():
    values = ('{"a": 1}', "null", "5", "{bad", "x" * 50, "[" * 1000, 7, None, True)
    assert [*map(handed_over, values)] == [{"a": 1}, None, 5, "{bad", "x" * 50, "[" * 1000, 7, None, True]
    with pytest.raises(ValueError, match="at most 100 MB"):
        json_value(b" " * (LARGEST_JSON + 1))
