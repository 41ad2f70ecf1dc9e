"""An endpoint's URL goes into records, tables and errors: so it must hold nothing that is secret."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit, urlunsplit

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.secret_words import holds_secret, names_secret

KEY = "SLM_ENDPOINT_KEY"  # the variable that has an endpoint's key
WANTED = "http://HOST:PORT/v1/completions, or /v1/chat/completions"


def check_url(url: str) -> None:
    """Raises BadUsage where it is no URL of HTTP, and where it holds credentials, which the error does not repeat."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadUsage(f"an endpoint's URL cannot be read ({error})", WANTED) from None
    if not (url.isascii() and url.isprintable()):
        raise BadUsage("an endpoint's URL holds what no URL may hold", f"{WANTED}, with other characters as %XX")
    given = [name for part in (parts.query, parts.fragment) for name, _ in parse_qsl(part, keep_blank_values=True)]
    secret = next(filter(names_secret, given), None)
    if "@" in parts.netloc or secret or holds_secret(url):
        where = f"in its parameter {secret}" if secret else "before its host" if "@" in parts.netloc else "it seems"
        raise BadUsage(f"an endpoint's URL holds credentials, {where}, and it goes into records", f"{KEY}=... instead")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or "@" in url:
        raise BadUsage("an endpoint's URL does not begin with http://HOST or https://HOST", WANTED)


def completed(url: str) -> str:
    """The URL that requests go to, where only that of the server or its /v1 is given. Raises BadUsage as `check_url`
    does."""
    check_url(url)
    parts = urlsplit(url)
    path = parts.path.rstrip("/") or "/v1"
    return urlunsplit(parts._replace(path=f"{path}/completions" if path.endswith("/v1") else path))
