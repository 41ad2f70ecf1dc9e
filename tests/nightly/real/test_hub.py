"""The probe of sizes with the real library of the Hub, against a small server."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from threading import Thread
from typing import ClassVar

import pytest

from pytest_slmserve.plan import models


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as its library needs to find one file of a repository, or to hear why it may not."""

    config = b'{"model_type": "unheard-of"}'
    codes: ClassVar = {"gone": (404, "RepoNotFound"), "gated": (403, "GatedRepo"), "bare": (404, "EntryNotFound")}

    def do_GET(self) -> None:
        status, code = next((found for name, found in self.codes.items() if f"/{name}/" in self.path), (200, ""))
        self.send_response(status)
        headers = {"X-Error-Code": code} if code else {"ETag": '"1"', "X-Repo-Commit": "a" * 40}
        for name, value in {**headers, "Content-Length": str(0 if code else len(self.config))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET" and not code:
            self.wfile.write(self.config)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def log_message(self, *_: object) -> None: ...


@pytest.mark.skipif(find_spec("huggingface_hub") is None, reason="needs huggingface_hub")
def test_hub_library_finds_configuration(monkeypatch, tmp_path):
    """Only the configuration is fetched, into the Hub's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1"}
        names = ("me/gone", "me/gated", "me/bare", "me/there")
        monkeypatch.setattr(models, "PROBE_S", 60)
        told = models._told(names, "", env)
        server.shutdown()
    for name, error in (("gone", "RepositoryNotFound"), ("gated", "GatedRepo"), ("bare", "EntryNotFound")):
        assert f"{error}Error" in told[f"me/{name}"]["missing"]
    snapshot = tmp_path / "cache" / "huggingface" / "hub" / "models--me--there" / "snapshots" / ("a" * 40)
    assert told["me/there"]["folder"] == str(snapshot) and (snapshot / "config.json").read_bytes() == Hub.config
