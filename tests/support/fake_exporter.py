"""Pages of a dcgm-exporter, and a server that shows them.

Made by hand after NVIDIA/dcgm-exporter (README.md, etc/default-counters.csv, the template in
internal/pkg/rendermetrics/render_metrics.go), not recorded from a running one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
    """What the server says next; `url` is where."""

    url: str = ""
    text: str = ""
    status: int = 200
    asked: list[str] = field(default_factory=list)


@contextmanager
def serving(text: str, version: str = "HTTP/1.0") -> Iterator[Exporter]:
    """A server on the loopback that shows the text, or what is put in its place; stopped at the end."""
    shown = Exporter(text=text)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = version

        def do_GET(self) -> None:
            shown.asked.append(self.path)
            body = shown.text.encode()
            self.send_response(shown.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            shown.url = f"http://127.0.0.1:{server.server_address[1]}/metrics"
            yield shown
        finally:
            server.shutdown()
            thread.join()
