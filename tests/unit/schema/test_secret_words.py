"""What looks like a secret, and texts from which secrets are gone however a server writes them."""

import html
import json
from base64 import b64encode, urlsafe_b64encode
from urllib.parse import quote, quote_plus

import pytest

from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.printable import HIDDEN, SECRET, SECRET_NAME, hidden
from pytest_slmserve.schema.specs import check_url

KEY = 'sk/FAULT+9f8e "7d6c"&5b4a'
SECRETS = """
    key api_key apiKey X-API-Key token auth_token access_token bearer auth authorization passwd password pw pass pwd
    secret client_secret sig signature code credentials passphrase
""".split()  # noqa: SIM905
OTHERS = """
    max_tokens min_tokens return_token_ids skip_special_tokens stop_token_ids top_k author passthrough design
    TOKENIZERS_PARALLELISM encode keyed
""".split()  # noqa: SIM905
ENCODED = {
    "plain": KEY,
    "url": quote(KEY, ""),
    "form": quote_plus(KEY),
    "each byte": "".join(f"%{byte:02X}" for byte in KEY.encode()),
    "html": html.escape(KEY),
    "json": json.dumps(KEY),
    "hex": KEY.encode().hex(),
    "HEX": KEY.encode().hex().upper(),
    "hex dump": KEY.encode().hex(" "),
    "upper": KEY.upper(),
}


@pytest.mark.parametrize("form", ENCODED)
def test_a_key_is_hidden_in_every_form(form):
    told = hidden(f"bad key: {ENCODED[form]}; go away", [KEY])
    assert HIDDEN in told and told.endswith("go away")
    assert ENCODED[form].strip('"')[:12].lower() not in told.lower()


@pytest.mark.parametrize("encode", [b64encode, urlsafe_b64encode])
@pytest.mark.parametrize("before", ["", "x", "Bearer ", "user:", "ab", "abcd"])
@pytest.mark.parametrize("after", ["", "x", "yz"])
def test_a_key_is_hidden_in_base64_wherever_it_stands(encode, before, after):
    sent = encode(f"{before}{KEY}{after}".encode()).decode()
    assert HIDDEN in hidden(f"you said {sent}", [KEY])


def test_texts_without_the_key_stay():
    assert hidden("nothing of that kind", [KEY, "abc", ""]) == "nothing of that kind"
    assert hidden("abc", ["abc"]) == "abc", "it is too short to be one"


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets(name):
    assert SECRET_NAME.search(name)
    for url in (f"http://h/v1?{name}=x1y2", f"http://h/v1?a=b&{name}=", f"http://h/v1#{name}=x1y2"):
        with pytest.raises(BadUsage, match=f"holds credentials, in its parameter {name}, and") as caught:
            check_url(url)
        assert "x1y2" not in str(caught.value)


@pytest.mark.parametrize("name", OTHERS)
def test_names_of_what_is_none(name):
    assert not SECRET_NAME.search(name)
    check_url(f"http://h/v1/completions?{name}=1")


@pytest.mark.parametrize(
    "value", ["sk-abcdefgh1234", "hf_abcdefgh1234", "ghp_abcdefgh1234", "eyJhbGciOiJI.eyJzdWIi", "AKIA0123456789AB"]
)
def test_values_that_are_keys(value):
    assert SECRET.search(f'{{"a": "{value}"}}')
    for url in (f"http://h/{value}/v1", f"http://h/v1?a={value}"):
        with pytest.raises(BadUsage) as caught:
            check_url(url)
        assert value not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1/\u00e9", "http://h/\x1b[2J", "http://h/a b\u202e"])
def test_a_url_of_other_characters_is_one_sentence(url):
    with pytest.raises(BadUsage, match="what no URL may hold") as caught:
        check_url(url)
    assert "\x1b" not in str(caught.value)
