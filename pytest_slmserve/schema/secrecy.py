"""Scanner for secrets, and the environment variables that our processes inherit.

Every text passes the scanner before it enters a record. The lists are our own: of the 43 secrets that once entered
records, the named detectors of detect-secrets 1.5 (the newest, of May 2024) find 10, and it needs requests, PyYAML and
four more packages. Only the tests use it: this scanner finds every key that it knows by form.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from urllib.parse import unquote

from pytest_slmserve.schema.errors import json_value

# Names, divided into words: `X-API-Key`, `apiKey` and `OPENAI_KEY_1` end with key.

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# Last words of names of secrets; in a URL also those of a session.
LAST = re.compile(
    r"\w*(key|token|secret|password|passwd|passphrase|credential|signature|bearer|authorization)"
    r"|\w*(api|access|auth|private|secret)(keys|tokens)|auth|oauth|basicauth|pass|pwd|pw|sig|pat|cookies?|webhooks?|jwt"
)
OF_A_VISIT = re.compile(r"session|sessionid|sid")
ANYWHERE = re.compile(r"\w*(secret|password|passwd|passphrase|credential)s?")
PLURAL = re.compile(r"keys|tokens")  # but `max_tokens` is not a secret
PLURAL_OF = {"access", "api", "auth", "bearer", "csrf", "oauth", "private", "refresh", "secret", "session", "signing"}
# Words after the last word that are ignored: TOKEN_V2, SECRET_KEY_BASE, PASSWORD_HASH, auth_header, SLACK_WEBHOOK_URL.
ADDED = re.compile(
    r"\w|\d+|base|hash|headers?|string|str|text|hex|raw|old|new|current|prod|production|dev|staging|primary|secondary"
    r"|url|uri"
)
PLACES = {"file", "path", "dir", "folder", "name", "enabled", "required", "timeout", "length", "len"}
# Words before it that change the meaning: `eos_token` is text, `bytes_per_token` a number, `sort_key` a column.
NO_TOKEN_OF = re.compile(
    "bos|eos|pad|unk|sep|cls|mask|stop|start|end|begin|image|video|audio|special|per|first|last|next|each|draft|target"
    "|prompt|output|input|max|min|num|prefix|suffix|think|thinking|tool|implicit|to|by|of|single|query|decoder|encoder"
)
NO_KEY_OF = re.compile("sort|partition|cache|lookup|dict|foreign|row|column|hash")


def is_secret_name(name: str, of_url: bool = False) -> bool:
    """Return whether a variable, argument, field or (`of_url`) parameter of this name holds a secret."""
    words = [word.lower() for word in WORD.findall(name)]
    if len(words) > 1 and words[-1] in PLACES:
        return False
    if any(map(ANYWHERE.fullmatch, words)) or words[-3:] == ["access", "key", "id"]:
        return True
    while len(words) > 1 and ADDED.fullmatch(words[-1]):
        words.pop()
    last, before = words[-1] if words else "", words[-2] if len(words) > 1 else ""
    if last == "code":  # of OAuth, unlike `trust_remote_code`
        return before in ("", "auth", "authorization", "oauth")
    if PLURAL.fullmatch(last):
        return before in PLURAL_OF
    if (last == "token" and NO_TOKEN_OF.fullmatch(before)) or (last == "key" and NO_KEY_OF.fullmatch(before)):
        return False
    return bool(LAST.fullmatch(last) or (of_url and OF_A_VISIT.fullmatch(last)))


# Values, by the prefixes of issued keys.

ODD = r"(?=[\w-]*(?:[A-Za-z]\d|\d[A-Za-z]))"  # a digit next to a letter, which is rare in words and their versions
ALONE = "(?<![A-Za-z0-9])"
VALUE = re.compile(
    rf"""
    {ALONE}(?:sk-|gh[opsur]_|github_pat_|xapp-|AKIA|eyJ)[\w-]{{8,}}  # OpenAI and others, GitHub, Slack, AWS, JWTs
    | {ALONE}(?i:xox[a-z]-)[\w-]{{3,}} | {ALONE}eyJ[\w=-]+\.[\w=-]
    | {ALONE}gl(?:pat|ptt|dt|rt|rtr|cbt|ft|soat|agent|imt|oas|ffct)-[\w-]{{8,}}  # GitLab
    | {ALONE}hf_(?=[A-Za-z]*\d|\w{{30}})[A-Za-z0-9]{{12,}}\b  # Hugging Face; but `hf_overrides` is an argument
    | {ALONE}A(?:SIA|BIA|CCA|3T[A-Z0-9])(?:[A-Z0-9]{{16}}|(?=[A-Z]*\d)[A-Z0-9]{{8,}})  # AWS
    | {ALONE}(?:nvapi-|gsk_|[srp]k_(?:live|test)_|whsec_|AIza|GOCSPX-|ya29\.|dckr_[po]at_|tgp_|AGE-SECRET-KEY-|dop_v1_
        |shp(?:at|ca|pa|ss)_|hv[sb]\.|lin_api_|pypi-Ag|GR1348941|AKC|sq0(?:atp|csp|idp)-)[\w\\-]{{8,}}
    | {ALONE}(?:pypi-|SG\.|npm_|xai-){ODD}[\w.-]{{8,}}
    | {ALONE}(?:SG\.[\w-]{{22}}\.|pplx-[A-Za-z0-9]{{16,}}|r8_[A-Za-z0-9]{{12,}}\b)
    | {ALONE}(?:AC|SK)[a-z0-9]{{32}}\b | {ALONE}[MNO][\w-]{{23,25}}\.[\w-]{{6}}\.[\w-]{{27}}
    | {ALONE}\d{{8,10}}:[\w-]{{35}} | {ALONE}[0-9a-z]{{32}}-us\d{{1,2}}\b | (?i:hooks\.slack\.com/services/)\w
    | {ALONE}BEGIN[ ](?!PUBLIC)[A-Z0-9 ]*\bKEY\b | PuTTY-User-Key-File
    | {ALONE}(?:(?i:bearer)|Basic|BASIC)(?:\s|\+)+(?!(?:and|or|not|if|else)\b)[\w+/=~.-]
    | ://[^/\s?\#@:]*:[^/\s@]*@ | \bhttps?://[^/\s?\#@]+@  # before a host
    """,
    re.VERBOSE,
)
# A name with a value: NAME=VALUE, "name": value, ["name"] = value, --name value.
PAIR = re.compile(
    r"""(?<![\w./-])-*([A-Za-z_][\w.-]*+)(?:\\*["']\s*:|(?:["']\])?\s*:?=>?|:(?=[\s"']))\s*\\*["']?"""
    r"""(?!(?:true|false|null|none|[01])(?:[\s"'\\,;&\])}]|$))(?=[^\s"'\\,;&\])}])""",  # on and off are none
    re.IGNORECASE,
)
FLAG = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*+)\s+(?=[^\s-])")
EXPORTED = "Export it before you start pytest: engines with real weights inherit HF_TOKEN."
WITH_A_KEY = "Set SLM_ENDPOINT_KEY=... in the environment."
NAME = re.compile(r"\b([A-Za-z]\w{,40})=")
UNREAD = 4  # how many times a text may have been encoded for a URL


@lru_cache(maxsize=1024)
def secret_in(text: str, named: bool = True) -> str:
    """Return words on a likely secret in this text, or "", for an error that must not repeat it.

    Args:
        named: include values that only their name identifies.
    """
    for form in _forms(text):
        if value := VALUE.search(form):
            place = (NAME.findall(form[: value.start()]) or [""])[-1]
            told = place and not VALUE.search(place) and not seems_drawn(place)
            return f"what looks like a secret, in {place!r}," if told else "what looks like a secret,"
        names = (found[1] for each in (PAIR, FLAG) for found in each.finditer(form))
        if named and (name := _first(names, of_url="://" in form)):
            return f"a secret, {name!r},"
    return ""


def _forms(text: str) -> list[str]:
    """Return the text as it is and decoded, as often as JSON or a URL has encoded it."""
    forms = [text]
    while len(forms) <= UNREAD:
        form = forms[-1]
        start = 0 if form[:1] in ("{", "[", '"') else form.find("=") + 1
        if "\\" in form and form[start : start + 1] in ("{", "[", '"'):
            with suppress(ValueError):
                form = form[:start] + json.dumps(json_value(form[start:]), ensure_ascii=False)
        if form == forms[-1] and (form := unquote(form)) == forms[-1]:
            break
        forms.append(form)
    return forms


def _first(names: Iterable[str], of_url: bool = False) -> str:
    """Return the first name of a secret, or "..." if the name itself may be a secret."""
    name = next((name for name in names if is_secret_name(name, of_url)), "")
    return name if len(name) <= 40 and not seems_drawn(name) else "..."[: len(name)]


# URLs, of which any part may be a secret.

PARAMETER = re.compile(r"[?&;#]([^=&;#?/]+)|/([^=&;#?/]+)=")
PLAIN_PARAMETER = re.compile(r"(?i)[?&;][\w.-]*(?:revision|commit|sha|hash|version|model|deployment)=[^&;#?/]*")
RUN = re.compile(r"[A-Za-z0-9]{16,}")
DRAWN = re.compile(r"[\w-]{20,}")
KIND = re.compile(r"[A-Z]+|[a-z]+|\d+")


def unquoted(url: str) -> str:
    """Return a URL without percent-encoding, also if it was encoded several times."""
    for _ in range(UNREAD):
        if (plain := unquote(url)) == url:
            break
        url = plain
    return url


def secret_in_url(url: str) -> str:
    """Return the place of a secret in a URL, or ""."""
    plain = unquoted(url)
    names = (query or path for query, path in PARAMETER.findall(plain))
    if VALUE.search(url) or VALUE.search(plain):
        return "it seems"
    name = _first(names, of_url=True)
    return f"in its parameter {name}" if name else ""


def seems_drawn(path: str) -> bool:
    """Return whether a path with its query has a part that seems random, except versions, commits and UUIDs."""
    plain = PLAIN_PARAMETER.sub("", unquoted(path))
    runs = (run for run in RUN.findall(plain) if sum(map(str.isdigit, run)) >= 4)
    return any(runs) or any(_is_mixed(part) for part in DRAWN.findall(plain))


def _is_mixed(part: str) -> bool:
    kinds = ["A" if kind.isupper() else "a" if kind.islower() else "0" for kind in KIND.findall(part)]
    return len(set(kinds)) == 3 and sum(a != b for a, b in pairwise(kinds)) >= 10


# Our processes

# Variables of the user and the system, of compilers and of the network; and all variables of the interpreter, of GPUs
# and their communication, of thread pools, and of vLLM with its dependencies.
PASSED_ON = re.compile(
    r"""
    PATH | HOME | USER | LOGNAME | SHELL | TERM | TZ | LANG | LANGUAGE | LC_\w+ | TMPDIR | TEMP | TMP | XDG_\w+
    | VIRTUAL_ENV | CONDA_PREFIX | LD_LIBRARY_PATH | LD_PRELOAD
    | LIBRARY_PATH | CPATH | C_INCLUDE_PATH | CPLUS_INCLUDE_PATH | CC | CXX | CFLAGS | CXXFLAGS | MAX_JOBS
    | (?i:(http|https|all|no)_proxy) | SSL_CERT_FILE | SSL_CERT_DIR | REQUESTS_CA_BUNDLE | CURL_CA_BUNDLE
    | (PYTHON | COVERAGE_ | CUDA | CUBLAS | CUDNN | NVIDIA_ | NCCL_ | NVSHMEM_ | GLOO_ | UCX_ | RAY_)\w*
    | (OMP_ | KMP_ | GOMP_ | MKL_ | DNNL_ | ONEDNN_ | OPENBLAS_ | NUMEXPR_ | NUMBA_ | MALLOC_ | TORCH | PYTORCH_)\w*
    | (TRITON_ | VLLM_ | HF_ | HUGGINGFACE_ | HUGGING_FACE_ | TRANSFORMERS_ | TOKENIZERS_ | SAFETENSORS_)\w*
    | (FLASHINFER_ | FLASH_ATTN)\w*
    """,
    re.VERBOSE,
)
OF_THE_HUB = ("HF_", "HUGGINGFACE_", "HUGGING_FACE_")  # real weights may need a token of the Hub


def passed_on(inherited: Mapping[str, str], *, hub: bool = False) -> dict[str, str]:
    """Return the environment of our processes: known variables without secrets, and no imports from the working folder.

    Args:
        hub: include a token of the Hugging Face Hub.
    """
    known = ((name, value) for name, value in inherited.items() if PASSED_ON.fullmatch(name))
    found = {name: v for name, v in known if not is_secret_name(name) or (hub and name.startswith(OF_THE_HUB))}
    return found | {"PYTHONSAFEPATH": "1"}
