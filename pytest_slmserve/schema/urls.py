"""An endpoint's URL goes into records, tables and errors: so it must hold nothing that is secret."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit, urlunsplit

from pytest_slmserve.schema.errors import BadUsage

KEY = "SLM_ENDPOINT_KEY"  # the variable that has an endpoint's key
SECRETS = ("key", "token", "secret", "password", "signature", "sig", "code")  # how parameters that hold one end
WANTED = "http://HOST:PORT/v1/completions, or /v1/chat/completions"


def check_url(url: str) -> None:
    """Raises BadUsage where it is no URL of HTTP, and where it holds credentials, which the error does not repeat."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadUsage(f"an endpoint's URL cannot be read ({error})", WANTED) from None
    secret = [name for name, _ in parse_qsl(parts.query) if name.lower().endswith(SECRETS)]
    if "@" in parts.netloc or secret:
        where = f"in its parameter {secret[0]}" if secret else "before its host"
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
