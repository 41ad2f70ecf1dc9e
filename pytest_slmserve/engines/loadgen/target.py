"""The server that requests go to, and the secrets that no message about them may repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

PORTS = {"http": 80, "https": 443}
OPEN_HEADERS = {"accept", "content-type", "user-agent"}  # they hold no secrets
HIDDEN, SHORTEST = "[hidden]", 4  # shorter ones are no secrets, and parts of any sentence


@dataclass(frozen=True, slots=True)
class Target:
    """The server that requests go to. head: a request's bytes up to the length of its body. secrets: values of headers,
    longest first."""

    host: str
    port: int
    tls: bool
    head: bytes
    secrets: tuple[str, ...]

    def request(self, body: str) -> bytes:
        content = body.encode()
        return b"%sContent-Length: %d\r\n\r\n%s" % (self.head, len(content), content)

    def without_secrets(self, text: str) -> str:
        """Servers like to repeat the key that they refuse."""
        for secret in self.secrets:
            text = text.replace(secret, HIDDEN)
        return text


def target_of(url: str, headers: Mapping[str, str]) -> Target:
    """Raises ValueError, without a word of the headers' values or of a password in the URL."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise ValueError("the URL does not begin with http://host or https://host")
    if parts.username is not None:
        raise ValueError("the URL holds a user's name: a key goes into the headers")
    port = parts.port or PORTS[parts.scheme]
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    lines = {
        "Host": host if port == PORTS[parts.scheme] else f"{host}:{port}",
        "User-Agent": "pytest-slmserve",
        "Accept": "text/event-stream",
        "Content-Type": "application/json",
        **headers,
    }
    for name, value in lines.items():
        if not name.isascii() or not (name + value).isprintable():
            raise ValueError(f"header {name!r} holds what no header may hold")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return Target(parts.hostname, port, parts.scheme == "https", head.encode("latin-1"), secrets_in(headers))


def secrets_in(headers: Mapping[str, str]) -> tuple[str, ...]:
    """The values, and their last words: `Bearer KEY` is a secret, and so is KEY alone."""
    values = [value for name, value in headers.items() if name.lower() not in OPEN_HEADERS]
    words = {word for value in values for word in (value, value.split(" ")[-1]) if len(word) >= SHORTEST}
    return tuple(sorted(words, key=len, reverse=True))
