"""Text of others, which a terminal shall show and not obey, and which keeps no secret."""

import html
import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any
from unicodedata import category

LAYOUT = "\n\t"  # of messages with several lines
HARMFUL = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control characters, those that turn the direction of text, lone surrogates


def printable(text: str, layout: str = LAYOUT) -> str:
    """The text with each control character written out, ESC as `\\x1b`. layout: those that stay."""
    if text.isprintable():
        return text
    return "".join(
        each.encode("unicode_escape").decode() if category(each) in HARMFUL and each not in layout else each
        for each in text
    )


def printable_value(value: Any, layout: str = LAYOUT) -> Any:
    """A value of JSON with each of its texts, and each name of a field, as `printable` has it."""
    match value:
        case str():
            return printable(value, layout)
        case list():
            return [printable_value(each, layout) for each in value]
        case dict():
            return {printable(name, layout): printable_value(each, layout) for name, each in value.items()}
    return value


# How names end that hold a secret: of a URL's parameters, a body's fields and variables. `max_tokens` is none.
SECRET_NAME = re.compile(
    r"(key|token|secret|passw(or)?d|passphrase|credentials?|signature|bearer|authorization"
    r"|(^|[^a-z])(pass|pwd|pw|auth|sig|code))$",
    re.IGNORECASE,
)
# How keys begin that somebody has issued: OpenAI's, Hugging Face's, GitHub's, GitLab's, Slack's, AWS's, and JWTs.
SECRET = re.compile(r"\b(sk-|hf_|gh[opsur]_|github_pat_|glpat-|xox[abp]-|AKIA|eyJ)[\w-]{8,}")
HIDDEN = "[hidden]"
SHORTEST = 4  # shorter ones are no secrets, and parts of any sentence


def hidden(text: str, secrets: Iterable[str]) -> str:
    """The text without these secrets, plain or as a server may encode them: in a URL, in HTML, JSON, hex and base64."""
    for secret in (each for each in secrets if len(each) >= SHORTEST):
        raw = secret.encode("utf-8", "replace")
        forms = ["".join(map(_spellings, secret)), "[ :]?".join(f"{byte:02x}" for byte in raw)]
        for encode, before in product((b64encode, urlsafe_b64encode), range(3)):
            # Bytes may stand before it, of which some share its first digit, as others share its last.
            digits = encode(b"\0" * before + raw).decode().rstrip("=")
            last = len(digits) - 1 if (before + len(raw)) % 3 else len(digits)
            if len(own := digits[(0, 2, 3)[before] : last]) >= SHORTEST:
                forms.append(re.escape(own))
        text = re.sub("|".join(forms), HIDDEN, text, flags=re.IGNORECASE)
    return text


def _spellings(character: str) -> str:
    """A pattern of one character: itself, or as HTML, JSON or a URL has it: a server may write only some so."""
    in_url = "".join(f"%{byte:02x}" for byte in character.encode("utf-8", "replace"))
    number = ord(character)
    forms = {character, in_url, html.escape(character), json.dumps(character)[1:-1], f"\\u{number:04x}"}
    forms |= {f"&#{number};", f"&#x{number:x};"} | ({"+"} if character == " " else set())
    return f"(?:{'|'.join(map(re.escape, sorted(forms, key=len, reverse=True)))})"


# Variables of the user and the system; of compilers; of the network; and all of the interpreter, of GPUs and how they
# are spoken to, of thread pools, and of vLLM with what it is made of.
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
OF_THE_HUB = ("HF_", "HUGGINGFACE_", "HUGGING_FACE_")  # a token of it is a secret that real weights may need


def passed_on(inherited: Mapping[str, str], *, hub: bool = False) -> dict[str, str]:
    """The part of our environment that a process of ours inherits, which imports nothing from the folder it works in.
    hub: with a token of the Hugging Face Hub, if there is one."""
    known = ((name, value) for name, value in inherited.items() if PASSED_ON.fullmatch(name))
    found = {name: v for name, v in known if not SECRET_NAME.search(name) or (hub and name.startswith(OF_THE_HUB))}
    return found | {"PYTHONSAFEPATH": "1"}
