"""The server that requests go to, with the secrets that no message about them may repeat; and the requests as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.secret_words import SHORTEST, hidden

PORTS = {"http": 80, "https": 443}
OPEN_HEADERS = {"accept", "content-type", "user-agent"}  # they hold no secrets


@dataclass(frozen=True, slots=True)
class Target:
    """The server of a load. head: a request's bytes up to the length of its body. secrets: values, longest first."""

    host: str
    port: int
    tls: bool
    head: bytes
    secrets: tuple[str, ...]

    def request(self, body: str) -> bytes:
        content = body.encode()
        return b"%sContent-Length: %d\r\n\r\n%s" % (self.head, len(content), content)

    def without_secrets(self, text: str) -> str:
        """The text without the key, which servers like to repeat, and without what a terminal would obey."""
        return printable(hidden(text, self.secrets), layout="")


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


class Bodies:
    """The requests of a load as bytes, by their number; each time round with something of its own, if that is wanted.

    mark: what stands in each body in the place of what differs from round to round; a body without it is always the
    same. rounds: what stands there in the first round through all bodies, in the second, and so on; none: as it is.

    Rounds go on from load to load, so that no two requests are alike while there are rounds enough.
    """

    def __init__(self, target: Target, bodies: Sequence[str], mark: str = "", rounds: Sequence[str] = ()) -> None:
        self._target, self._rounds, self._mark = target, rounds, mark
        self._bodies = [] if rounds else [target.request(body) for body in bodies]
        self._parts = [body.partition(mark) for body in bodies] if rounds else []
        self._first = self._last = 0

    def __len__(self) -> int:
        return len(self._bodies) or len(self._parts)

    def of(self, number: int) -> bytes:
        """The request of that number in a load."""
        if not self._rounds:
            return self._bodies[number % len(self._bodies)]
        at, index = divmod(number, len(self._parts))
        self._last = max(self._last, at)
        before, mark, after = self._parts[index]
        text = self._rounds[(self._first + at) % len(self._rounds)] if mark else ""
        return self._target.request(before + text + after)

    def begin_anew(self) -> None:
        """Another load begins: its rounds are others."""
        self._first, self._last = self._first + self._last + 1, 0
