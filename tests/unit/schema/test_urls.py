"""The URL of an endpoint: what is added to it, and what it must not hold."""

import pytest

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.specs import completed

SERVER = "http://host:8000"


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("", "/v1/completions"),
        ("/", "/v1/completions"),
        ("/v1", "/v1/completions"),
        ("/v1/", "/v1/completions"),
        ("/v1/completions/", "/v1/completions"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/gateway/v1?version=2", "/gateway/v1/completions?version=2"),
        ("/generate", "/generate"),
    ],
)
def test_the_url_of_a_server_or_its_v1_is_completed(given, asked):
    assert completed(SERVER + given) == SERVER + asked


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://user:word@host/v1", "http://host/v1?key=word"])
def test_what_is_no_url_or_holds_credentials_is_refused_without_being_repeated(url):
    with pytest.raises(BadUsage) as caught:
        completed(url)
    assert "word" not in str(caught.value)
