"""One HTTP request, answered by servers that close and by those that do not."""

from __future__ import annotations

import http.client
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pytest_slmserve.telemetry.dcgm_exporter import ask_once


@contextmanager
def serving(version):
    class Answers(BaseHTTPRequestHandler):
        protocol_version = version

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_): ...

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_an_answer_that_python_closes_at_its_end(version, monkeypatch):
    """As 3.13 does; releases before do so with the next read."""
    read1 = http.client.HTTPResponse.read1

    def closing(self, n=-1):
        piece = read1(self, n)
        if piece and not self.length:
            self._close_conn()
        return piece

    monkeypatch.setattr(http.client.HTTPResponse, "read1", closing)
    with serving(version) as url:
        assert ask_once("GET", url, {}, None, 5.0) == (200, "", "hello")
