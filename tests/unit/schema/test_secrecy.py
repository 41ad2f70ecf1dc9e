"""Secrets are found by name, by value and in any encoding, are never repeated, and ordinary values are none; and what
processes of ours inherit is all they work with, and no secret."""

import json
from urllib.parse import quote

import hidden_texts as texts
import pytest
from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
from hidden_texts import KEY, ORDINARY_URLS, SECRET_URLS, SECRET_VALUES, WRONG_URLS, repeats
from hypothesis import given, strategies as st
from refusals import refused

from pytest_slmserve.schema.secrecy import is_secret_name, passed_on, secret_in, secret_in_url, seems_drawn, unquoted
from pytest_slmserve.schema.specs import EngineSpec, check_told, check_url, completed

SECRETS = """
    key api_key apiKey X-API-Key token auth_token access_token bearer auth authorization passwd password pw pass pwd
    secret client_secret sig signature code credentials passphrase
""".split()  # noqa: SIM905
OTHERS = """
    max_tokens min_tokens return_token_ids skip_special_tokens stop_token_ids top_k author passthrough design
    TOKENIZERS_PARALLELISM encode keyed trust_remote_code eos_token image_token_id bytes_per_token sort_key cache_keys
    pass_config num_speculative_tokens token_file PASSWORD_PATH secret_name credentials_timeout key_value_heads v 2 _
""".split()  # noqa: SIM905
KEYS = """
    sk-abcdefgh1234 hf_abcdefgh1234 ghp_abcdefgh1234 github_pat_abcdefgh glpat-abcdefgh xoxb-abcdefgh
    eyJhbGciOiJI.eyJzdWIi AKIA0123456789AB
""".split()  # noqa: SIM905
# The others look for assignments in source code, for chance, for addresses, or for words such as AP1234.
BY_LOOKS = """
    AzureStorageKeyDetector BasicAuthDetector DiscordBotTokenDetector GitHubTokenDetector GitLabTokenDetector
    JwtTokenDetector MailchimpDetector NpmDetector OpenAIDetector PrivateKeyDetector PypiTokenDetector SendGridDetector
    SlackDetector SquareOAuthDetector StripeDetector TelegramBotTokenDetector TwilioKeyDetector
""".split()  # noqa: SIM905
DETECTORS = {kind.__name__: kind() for kind in get_mapping_from_secret_type_to_class().values()}
PATTERNS = [pattern for name in BY_LOOKS for pattern in DETECTORS[name].denylist]
PATTERNS.append(DETECTORS["AWSKeyDetector"].denylist[0])
DEEP = st.recursive(st.none(), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("a"), inner))
SEEN = st.characters(min_codepoint=32, max_codepoint=126)
WANTED = """
    PATH HOME USER LANG LC_ALL TMPDIR XDG_CACHE_HOME XDG_RUNTIME_DIR LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH
    PYTHONHASHSEED CUDA_VISIBLE_DEVICES CUDA_HOME NVIDIA_VISIBLE_DEVICES NCCL_DEBUG OMP_NUM_THREADS KMP_AFFINITY
    TORCH_HOME TORCHINDUCTOR_CACHE_DIR PYTORCH_CUDA_ALLOC_CONF TRITON_CACHE_DIR VLLM_ATTENTION_BACKEND VLLM_CACHE_ROOT
    HF_HOME HF_HUB_OFFLINE HF_ENDPOINT TRANSFORMERS_CACHE TOKENIZERS_PARALLELISM http_proxy HTTPS_PROXY no_proxy
    SSL_CERT_FILE REQUESTS_CA_BUNDLE CC MAX_JOBS VIRTUAL_ENV COVERAGE_PROCESS_START RAY_TMPDIR
""".split()  # noqa: SIM905
KEPT_BACK = """
    SLM_ENDPOINT_KEY GITHUB_TOKEN GITHUB_OUTPUT GITHUB_ENV GITHUB_STEP_SUMMARY GH_TOKEN ACTIONS_RUNTIME_TOKEN
    ACTIONS_ID_TOKEN_REQUEST_TOKEN AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AZURE_CLIENT_SECRET
    GOOGLE_APPLICATION_CREDENTIALS OPENAI_API_KEY VLLM_API_KEY WANDB_API_KEY SSH_AUTH_SOCK DATABASE_URL MY_PASSWORD
    RAY_AUTH_TOKEN KUBECONFIG
""".split()  # noqa: SIM905
HUB = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN"]


def test_only_secrets_are_detected():
    assert [name for name in [*SECRETS, *OTHERS] if is_secret_name(name)] == SECRETS
    assert [name for name in texts.SECRET_NAMES if not is_secret_name(name)] == []
    assert [key for key in KEYS if secret_in(f'{{"a": "{key}"}}', named=False)] == KEYS
    assert not secret_in("task-abcdefgh hf_short sk- AKIAnot")
    visits = ["session", "sessionid", "SID"]
    assert [name for name in visits if is_secret_name(name, of_url=True)] == visits, "of a URL"
    assert [name for name in visits if is_secret_name(name)] == []
    told = {text: secret_in(text) for text in texts.SECRET_PAIRS}
    assert [text for text, what in told.items() if not what or repeats(what)] == []
    assert [value for value in SECRET_VALUES if not secret_in(value, named=False)] == []
    assert [value for value in SECRET_VALUES if repeats(secret_in(f"{value}=1"))] == [], "where it is the name"
    assert secret_in("API_KEYS=hunter2") == "a secret, 'API_KEYS',"
    assert secret_in(f"MINE=gsk_{KEY}") == "what looks like a secret, in 'MINE',"
    by_name = "test_it.py::test_a[token=3]"
    assert secret_in(by_name) and not secret_in(by_name, named=False), "not looked for in names of tests"
    ordinary = [*texts.ORDINARY_PAIRS, *texts.ORDINARY_TEXTS, *texts.ORDINARY_WORDS]
    ordinary += [f"hf_token={value}" for value in ("1", "0", "true", "False", "null", "None", "", " ", ",")]
    assert [(text, found) for text in ordinary if (found := secret_in(text))] == [] and len(ordinary) > 109


@given(
    st.sampled_from(SECRET_VALUES), st.sampled_from(["", "a=", "x y ", '["', "--opt ", "(", "/"]),
    st.sampled_from(["", " ", '"]', ")", "\n"]), st.integers(0, 3), st.booleans(),
)  # fmt: skip
def test_encoded_key_is_detected(value, before, after, times, as_json):
    text = before + value + after
    for _ in range(times):
        text = quote(text, "")
    text = "".join(f"\\u{ord(c):04x}" for c in text).join('""') if as_json else text
    assert (told := secret_in(text)) and not repeats(told)


@given(DEEP, st.text())
def test_nested_json_secret_is_detected(around, text):
    secret_in(text), secret_in_url(text), seems_drawn(text), unquoted(text)
    for hidden in ({"aws_secret_access_key": "hunter2"}, [f"hf_{KEY}"], {"x": json.dumps({"api_key": "hunter2"})}):
        told = secret_in(f"a={json.dumps([around, hidden])}")
        assert told and not repeats(told)


def test_long_text_is_scanned_quickly():
    for part in ("a", "-a", "[", '{"', "%25", "--a ", "://"):
        text = part * (120_000 // len(part))
        secret_in(f"x={text}"), seems_drawn(text)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda each: each.pattern[:30])
@given(data=st.data())
def test_detect_secrets_patterns_are_found(pattern, data):
    assert secret_in(data.draw(st.from_regex(pattern, fullmatch=True, alphabet=SEEN)))


@pytest.mark.parametrize("url", [*SECRET_URLS, *WRONG_URLS])
def test_url_with_secret_is_refused(url):
    with refused("URL") as caught:
        completed(url)
    assert not repeats(str(caught.value))


def test_ordinary_url_is_accepted():
    """Who measured there before must not lose it."""
    assert all(map(completed, ORDINARY_URLS))
    for url in ("http://h/v1/accounts/0123456789abcdef0123456789abcdef", f"http://h/{KEY}/v1"):
        check_url(url)
        EngineSpec("m", platform="remote", interface="endpoint", url=url)
        with refused("credentials", hint="SLM_ENDPOINT_KEY"):
            completed(url)


@pytest.mark.parametrize(("field", "value"), [
    ("env", (("A", "1"), ("HF_TOKEN", "hunter2"))), ("extra", (("hf_token", "hunter2"),)), ("model", f"gsk_{KEY}"),
    ("extra", (("a", ("b", f"hf_{KEY}")),)), ("env", (("A", f"Bearer {KEY}"),)), ("python", "https://me:hunter2@host/python"),
])  # fmt: skip
def test_engine_field_secret_is_refused(field, value):
    spec = EngineSpec("opt-125m", **({} if field == "model" else {field: value}))
    with refused(f"{field} of an engine", hint="HF_TOKEN") as caught:
        check_told(EngineSpec(value) if field == "model" else spec)
    assert not repeats(str(caught.value))
    check_told(EngineSpec("opt-125m", env=(("A", "1"),), extra=(("hf_token", True), ("stop_token_ids", (1, 2)))))


def test_engine_environment_excludes_secrets():
    """A token of the Hub is for real weights alone."""
    inherited = dict.fromkeys([*WANTED, *KEPT_BACK, *HUB], "x")
    assert passed_on(inherited) == dict.fromkeys(WANTED, "x") | {"PYTHONSAFEPATH": "1"}
    assert passed_on(inherited, hub=True) == dict.fromkeys([*WANTED, *HUB], "x") | {"PYTHONSAFEPATH": "1"}
