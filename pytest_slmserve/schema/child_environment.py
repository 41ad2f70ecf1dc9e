"""The variables that processes of ours inherit: what they work with, and no secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pytest_slmserve.schema.secret_words import names_secret

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
    found = {name: v for name, v in known if not names_secret(name) or (hub and name.startswith(OF_THE_HUB))}
    return found | {"PYTHONSAFEPATH": "1"}
