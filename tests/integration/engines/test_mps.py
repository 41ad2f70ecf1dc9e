"""A private MPS daemon: what clients are told, who is one, how it ends, and that nothing of it is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from fake_mps import CONTROL, SERVER, install
from fake_nvml import UUID
from processes import alive, gone, until

from pytest_slmserve.engines import pool as mps
from pytest_slmserve.engines.pool import MpsDaemon, mps_unable
from pytest_slmserve.schema.errors import BadUsage, EngineFailed

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="MPS runs on Linux only")


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The folder of the programs, first on the PATH; whatever of them lives is killed at the end."""
    folder = install(tmp_path / "bin", monkeypatch)
    yield folder
    for pid in of(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def daemon(told):
    with closing(MpsDaemon(UUID)) as daemon:
        yield daemon


def of(folder: Path, name: str = "") -> list[int]:
    """Living processes of the programs in `folder`; without a name also their guardians, who have it on their PATH."""
    named = {pid for pid, _, words in alive() if any(str(folder / name) in word for word in words)}
    found = {pid for pid, *_ in alive() if not name and str(folder) in environment_of(pid).get("PATH", "")}
    return [*named | found]


def clients(told: Path, *pids: int) -> None:
    (told / "clients").write_text("".join(f"{pid}\n" for pid in pids), "utf-8")


@pytest.fixture
def serving(daemon, told):
    """A daemon with a client, and so with a server."""
    clients(told, 11)
    assert daemon.clients() == {11}
    return daemon


def environment_of(pid: int) -> dict[str, str]:
    with suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return {}


def nothing_left(told: Path, folder: Path) -> bool:
    return until(lambda: not of(told) and not folder.exists(), 10, "all processes have ended, and its folder is gone")


def test_mps_clients_get_gpu_share(told, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with closing(MpsDaemon(UUID, thread_percentage=60)) as daemon:
        own = environment_of(daemon.process.pid)
        places = {"CUDA_MPS_PIPE_DIRECTORY": str(daemon.pipe), "CUDA_MPS_LOG_DIRECTORY": str(daemon.logs)}
        share = {"CUDA_VISIBLE_DEVICES": UUID, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "60"}
        assert daemon.environment == places | share
    assert own["CUDA_VISIBLE_DEVICES"] == UUID
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in own, "the share of the SMs is the clients' matter"


@pytest.mark.parametrize("more", [0, 1])
def test_mps_folder_fits_socket_path(told, monkeypatch, more):
    with mps.tempfile.TemporaryDirectory(dir="/tmp") as folder:
        long = Path(folder, "x" * (107 - mps.LONGEST - len(folder) - 1 + more))
        long.mkdir()
        monkeypatch.setattr(mps.tempfile, "tempdir", str(long))
        with closing(MpsDaemon(UUID)) as daemon:
            assert daemon.pipe.parents[1] == (Path("/tmp") if more else long)
            assert daemon.pipe.parent.stat().st_mode & 0o777 == 0o700
            assert len(str(daemon.pipe / "control_privileged")) < 108


def test_replica_must_be_mps_client(daemon, told, monkeypatch):
    assert daemon.clients() == set() and of(told, SERVER) == [], "none before the first one"
    looks = [((7,), ("(7)", "(none)")), ((8, 7), ("(7, 8)", "(11, 12)")), ((), ("(none)", "(11, 12)"))]
    for pids, facts in looks:
        with pytest.raises(EngineFailed) as caught:
            daemon.verify("replica 2 of 2", pids)
        facts += "replica 2 of 2", str(daemon.logs), *(["heard get_client_list"] if "(11, 12)" in facts else [])
        assert all(fact in caught.value.problem for fact in facts) and "CUDA_MPS_PIPE_DIRECTORY" in caught.value.hint
        clients(told, 11, 12)
        daemon.verify("replica 1", {7, 11})
        daemon.verify("replica 2", [12])
    assert daemon.clients() == {11, 12} and len(of(told, SERVER)) == 1
    for limit in ("ASK_S", "END_S"):
        monkeypatch.setattr(mps, limit, 0.5)
    (told / "deaf").touch()
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="get_server_list.* 0.5 s"):
        daemon.clients()
    daemon.close()
    assert time.monotonic() - began < 15 and nothing_left(told, daemon.pipe.parent)


def test_killed_mps_daemon_is_noticed(serving, told):
    serving.check()
    os.kill(serving.process.pid, signal.SIGKILL)
    until(lambda: serving.process.poll() is not None, 10, "it has ended")
    for look in (serving.check, lambda: serving.verify("replica 1", {11})):
        with pytest.raises(EngineFailed, match="SIGKILL(.|\n)*control.log(.|\n)*Starting new server"):
            look()
    assert of(told, SERVER)
    serving.close()
    assert nothing_left(told, serving.pipe.parent)


def interrupted(self, command):
    if command != "quit":
        raise KeyboardInterrupt


@pytest.mark.parametrize(("fault", "text", "error", "told_of"), [
    ("fail", "no driver for this", EngineFailed, r"\b1\b(.|\n)*daemon.log(.|\n)*no driver for this"),
    ("mute", "", EngineFailed, "1 s (.|\n)*using socket"),  # it never answers
    ("interrupted", "", KeyboardInterrupt, None),
])  # fmt: skip
def test_failed_mps_start_shows_log(told, monkeypatch, fault, text, error, told_of):
    (told / fault).write_text(text, "utf-8")
    monkeypatch.setattr(mps, "START_S", 1.0)
    if fault == "interrupted":
        monkeypatch.setattr(MpsDaemon, "_ask", interrupted)
        monkeypatch.setattr(mps, "END_S", 0.5)
    began = time.monotonic()
    with mps.tempfile.TemporaryDirectory(prefix="slm-test-", dir="/tmp") as folder:
        monkeypatch.setattr(mps.tempfile, "tempdir", folder)
        with pytest.raises(error, match=told_of):
            MpsDaemon(UUID)
        until(lambda: not of(told), 10, "all processes have ended")
        assert [*Path(folder).iterdir()] == [] and time.monotonic() - began < 15


def test_closing_mps_leaves_nothing(serving, told):
    assert len(of(told)) == 3  # itself, its server and its guardian
    serving.close()
    assert serving.process.returncode == 0  # it was asked to, not killed
    assert nothing_left(told, serving.pipe.parent)
    serving.close()
    with pytest.raises(EngineFailed, match="closed"):
        serving.check()


@pytest.mark.parametrize("how", ["stubborn", "killed"])
def test_stray_mps_servers_are_ended(told, monkeypatch, how):
    for name in ("stray", how):  # the latter means nothing to it
        (told / name).touch()
    clients(told, 11)
    daemon = MpsDaemon(UUID)
    daemon.clients()
    [server] = of(told, SERVER)
    assert os.getpgid(server) != daemon.process.pid
    monkeypatch.setattr(mps, "END_S", 0.5)
    if how == "killed":
        os.kill(daemon.process.pid, signal.SIGKILL)
    daemon.close()
    assert daemon.process.returncode == -signal.SIGKILL and nothing_left(told, daemon.pipe.parent)


def test_foreign_mps_daemon_stays_untouched(told, tmp_path, monkeypatch):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    monkeypatch.chdir(theirs)  # so that the path of their socket is short
    for name in ("PIPE", "LOG"):
        monkeypatch.setenv(f"CUDA_MPS_{name}_DIRECTORY", ".")
    other = subprocess.Popen([told / CONTROL, "-f"])
    try:
        until((theirs / f"{CONTROL}.pid").exists, 10, "their daemon is there")
        with closing(MpsDaemon(UUID)) as daemon:
            assert daemon.clients() == set()
        assert not daemon.pipe.exists() and other.poll() is None
        assert "heard" not in (theirs / "control.log").read_text("utf-8")
    finally:
        other.kill()
        other.wait()


def test_mps_daemon_ends_with_owner(told):
    clients(told, 11)
    code = f"""
        import time
        from pytest_slmserve.engines.pool import MpsDaemon
        daemon = MpsDaemon({UUID!r})
        daemon.clients()
        print(daemon.process.pid, daemon.pipe.parent, flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as owner:
        pid, folder = owner.stdout.readline().split()
        assert of(told, SERVER)
        owner.kill()
    assert gone(int(pid)) and nothing_left(told, Path(folder))


def test_missing_mps_program_is_refused(told, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(BadUsage, match=f"{CONTROL}.*PATH"):
        MpsDaemon(UUID)
    assert {CONTROL, "PATH"} <= {*mps_unable(UUID).replace(",", "").split()}, "a reason to skip"
    monkeypatch.setattr(mps, "DRIVER_FOLDER", str(told))
    assert mps.mps_program() == str(told / CONTROL)
    with closing(MpsDaemon(UUID)) as daemon:
        assert environment_of(daemon.process.pid)["PATH"] == f"{told}:/usr/bin:/bin"
