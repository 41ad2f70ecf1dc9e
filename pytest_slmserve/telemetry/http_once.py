"""One HTTP request with a limit on the size of its answer."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

MOST_BYTES = 1 << 22  # of an answer to one question: the page of a server's metrics has some ten thousand


def ask_once(
    method: str, url: str, headers: Mapping[str, str], body: str | None, within_s: float
) -> tuple[int, str, str]:
    """Status, content type and text of an answer, if long its beginning. Raises OSError or HTTPException."""
    until = time.monotonic() + within_s
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=within_s)
    try:
        connection.request(method, parts.path + (f"?{parts.query}" if parts.query else ""), body, dict(headers))
        wire, answer, text = connection.sock, connection.getresponse(), bytearray()
        while len(text) < MOST_BYTES and (piece := answer.read1(MOST_BYTES)):
            text += piece
            if (left_s := until - time.monotonic()) <= 0:  # a socket's own limit begins anew with every byte
                raise TimeoutError(f"no end within {within_s:g} s")
            if not answer.isclosed():  # at its end, by Python 3.13, and its socket with it
                wire.settimeout(left_s)
        return answer.status, answer.headers.get("content-type", ""), text.decode(errors="replace")
    finally:
        connection.close()
