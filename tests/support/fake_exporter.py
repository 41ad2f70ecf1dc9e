"""Pages of a dcgm-exporter, and what shows them: a pair of sockets in place of the network.

Made by hand after NVIDIA/dcgm-exporter (README.md, etc/default-counters.csv, the template in
internal/pkg/rendermetrics/render_metrics.go), not recorded from a running one.
"""

import http.client
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

GPU = "GPU-11111111-2222-3333-4444-555555555555"
OTHER_GPU = "GPU-99999999-8888-7777-6666-555555555555"
HEAD = """# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
"""
LABELS = (
    'gpu="{index}",UUID="{uuid}",pci_bus_id="00000000:01:00.0",device="nvidia{index}",modelName="NVIDIA H200"{more},'
    'Hostname="node-1",DCGM_FI_DRIVER_VERSION="580.95.05"'
)


def line(name: str, value: object, uuid: str = GPU, *, index: int = 0, more: str = "") -> str:
    return f"{name}{{{LABELS.format(index=index, uuid=uuid, more=more)}}} {value}\n"


def page(values: Mapping[str, object], uuid: str = GPU, *, index: int = 0, more: str = "") -> str:
    """One GPU's rows, with the comments that a page has."""
    return HEAD + "".join(line(name, value, uuid, index=index, more=more) for name, value in values.items())


@dataclass
class Exporter:
    """What is shown next. asked: the kind of each connection, where it leads, how long it may last, and its far end."""

    text: str = ""
    status: int = 200
    version: str = "HTTP/1.0"
    gone: bool = False
    asked: list[tuple[str, str, int | None, float, socket.socket]] = field(default_factory=list)

    def answer(self, connection: http.client.HTTPConnection) -> socket.socket:
        if self.gone:
            raise ConnectionRefusedError("nobody is there")
        near, far = socket.socketpair()
        body = self.text.encode()
        head = f"{self.version} {self.status} x\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
        far.sendall(head.encode() + body)
        self.asked.append((type(connection).__name__, connection.host, connection.port, connection.timeout, far))
        return near


@contextmanager
def serving(text: str, version: str = "HTTP/1.0") -> Iterator[Exporter]:
    """Whatever is connected to inside the block shows the text, or what is put in its place."""
    shown = Exporter(text, version=version)

    def connect(self: http.client.HTTPConnection) -> None:
        self.sock = shown.answer(self)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as undo:
        for kind in (http.client.HTTPConnection, http.client.HTTPSConnection):
            patch.setattr(kind, "connect", connect)
        undo.callback(lambda: [far.close() for *_, far in shown.asked])
        yield shown
