"""What a run opens to others while it measures: sockets that its processes listen on, and folders for temporary files.
The run tells it itself, by a `conftest.py` that calls `tell`."""

import json
import os
import stat
import tempfile
import textwrap
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil

SUPPORT = str(Path(__file__).parent)
TOLD = "listeners.json"
# Two conftests: one for engines of the run itself, and one for engines that are tasks of Ray.
AFTER_EACH = f"""
    import sys
    import pytest
    sys.path.insert(0, {SUPPORT!r})

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(pyfuncitem):
        import listeners
        result = yield
        listeners.tell()
        return result
"""
OF_RAY = f"""
    import sys
    from pytest_slmserve.run.cluster import RayEngines
    sys.path.insert(0, {SUPPORT!r})

    take = RayEngines._take

    def taken(self, engine, key, answer):
        import listeners
        take(self, engine, key, answer)
        listeners.tell()

    RayEngines._take = taken
"""


def write_conftest(folder: Path, text: str) -> None:
    (folder / "conftest.py").write_text(textwrap.dedent(text))


def tell() -> None:
    """Write into the working folder what this process and all that it has started listen on, and whose folders are
    open to others."""
    this = psutil.Process()
    names, listening, open_to_all = [], [], []
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):
            names.append(process.name())
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    listening.append((process.name(), each.laddr.ip))
    for path in Path(tempfile.gettempdir()).iterdir():
        with suppress(OSError):
            if path.is_dir() and path.stat().st_uid == os.getuid() and stat.S_IMODE(path.stat().st_mode) & 0o077:
                open_to_all.append(path.name)
    Path(TOLD).write_text(json.dumps({"processes": names, "listening": listening, "open": open_to_all}))


def check(folder: Path, servers: int, processes: int) -> None:
    """Assert that at least so many processes ran and so many sockets were listened on, all of them on the loopback
    address, and that nobody else could look into a folder of theirs."""
    told = json.loads((folder / TOLD).read_text())
    assert len(told["processes"]) >= processes and len(told["listening"]) >= servers, told
    addresses = [ip_address(ip) for _, ip in told["listening"]]
    assert all((getattr(ip, "ipv4_mapped", None) or ip).is_loopback for ip in addresses), told["listening"]
    assert not told["open"], told["open"]
