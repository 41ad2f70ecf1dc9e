"""Parsers of option values: text to value, ValueError for what is none."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

from pytest_slmserve.schema.literals import OwnSharing

if TYPE_CHECKING:
    from pytest_slmserve.schema.environment import GpuPeaks


def truth(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return words[text.lower()]
    except KeyError:
        raise ValueError("1 or 0") from None


def archive(text: str) -> bool | str:
    """One that is resumed; true: that of --slm-records. What follows may have been meant as a path of tests."""
    try:
        return truth(text)
    except ValueError:
        if not text or text.endswith((".py", os.sep)) or "::" in text:
            raise ValueError("an archive; a path of tests has to stand before a --slm-resume without one") from None
        return text


def words(text: str) -> tuple[str, ...]:
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise ValueError("names with commas between them")
    return found


def ascending(text: str) -> tuple[int, ...]:
    wanted = "positive whole numbers in ascending order, such as 1,2,4,8"
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(wanted) from None
    if numbers[0] < 1 or any(a >= b for a, b in pairwise(numbers)):
        raise ValueError(wanted)
    return numbers


def sharings(text: str) -> tuple[str, ...]:
    found, known = words(text), get_args(OwnSharing)
    if unknown := set(found) - set(known):
        raise ValueError(f"of {', '.join(known)}, with commas between them: {', '.join(sorted(unknown))} is unknown")
    return found


def urls(text: str) -> tuple[str, ...]:
    """URLs that requests go to. Raises BadUsage for one that holds credentials: an error must not repeat it."""
    from pytest_slmserve.schema.urls import completed

    found = tuple(map(completed, words(text)))
    if len(set(found)) < len(found):
        raise ValueError("URLs that differ, with commas between them")
    return found


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError("a positive number")
    return number


def share(text: str) -> float:
    number = positive(text)
    if number > 1:
        raise ValueError("a share between 0 and 1")
    return number


def gpu_memory(text: str) -> int:
    """Bytes of a size such as 40GiB."""
    from pytest_slmserve.schema.errors import BadUsage
    from pytest_slmserve.schema.kv_cache import parse_memory

    try:
        return parse_memory(text)
    except BadUsage:
        raise ValueError("a memory of a GPU, such as 40GiB") from None


def percentage(text: str) -> float:
    """The share that is written as 5% or 0.05."""
    number = positive(text.removesuffix("%"))
    number = number / 100 if text.endswith("%") else number
    if number >= 1:
        raise ValueError("a share between 0 and 1, such as 5% or 0.05")
    return number


def gpu_peaks(text: str) -> GpuPeaks:
    from pytest_slmserve.schema.environment import GpuPeaks

    try:
        rates = {name: positive(value) for name, value in map(pair, text.split(","))}
    except ValueError:
        rates = {}
    if rates.keys() != {"tflops", "gbps"}:
        raise ValueError("dense TFLOP/s and the memory's GB/s, such as tflops=989,gbps=3350")
    return GpuPeaks(**rates)


def length(text: str) -> int | Literal["natural"]:
    """Tokens of every request, or "natural": those of each conversation."""
    if text == "natural":
        return "natural"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a positive number of tokens, or natural")
    return int(text)


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError("NAME=VALUE")
    return name, value


def variable(text: str) -> tuple[str, str]:
    """A variable for the engine. It goes into the records, so a secret is refused."""
    from pytest_slmserve.schema.secret_words import holds_secret, names_secret

    name, value = pair(text)
    if takes_gpus(name):
        raise ValueError(f"for one engine: export {name} before pytest, whose locks and sensors go by it")
    if names_secret(name) or holds_secret(value):
        token = "export HF_TOKEN before pytest, engines with real weights inherit it"
        raise ValueError(f"for the records: {name} holds a secret; {token}")
    return name, value


def argument(text: str) -> tuple[str, Any]:
    """A value as JSON gives it, or the text itself; an object stays text, for a specification must be hashable."""
    name, value = pair(text)
    if takes_gpus(name):
        raise ValueError(
            "for the engine alone: --slm-tensor-parallel-size 2 gives it more GPUs, with their locks and sensors"
        )
    try:
        read = json.loads(value)
    except json.JSONDecodeError:
        return name, value
    return name, value if isinstance(read, dict) else frozen(read)


def takes_gpus(name: str) -> bool:
    """Does an engine's argument, or variable, of this name give it GPUs of which locks and sensors would not hear?"""
    return name == "CUDA_VISIBLE_DEVICES" or name.replace("-", "_").startswith(OF_SEVERAL_GPUS)


def frozen(value: Any) -> Any:
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def telemetry(text: str) -> str:
    """Parse a source of telemetry: a name, the address of a dcgm-exporter or the URL of its page. Raises ValueError."""
    name, equals, address = text.partition("=")
    if text in TELEMETRY or (name == "dcgm" and equals and address) or text.startswith(("http://", "https://")):
        return text
    raise ValueError(f"{', '.join(TELEMETRY)}, dcgm=HOST:PORT or the URL of a dcgm-exporter")


def ray_address(text: str) -> str:
    """Parse `local`, `local:N`, or the address of a cluster that has this host as a node. Results stream to a driver,
    which a client from outside is not. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    named = host and colon and port.isdecimal() and "/" not in host and (host, int(port)) != ("local", 0)
    if named or text in ("auto", "local"):
        return text
    here = "local for all GPUs of this host, local:N for the first N"
    raise ValueError(f"{here}; HOST:PORT of a cluster that this host is a node of, or auto for the one that runs here")


def ray_resource(text: str) -> str:
    if text in ("", "CPU", "GPU", "memory", "object_store_memory"):
        raise ValueError("a resource that only some nodes have, such as accelerator_type:H200")
    return text


@dataclass(frozen=True, slots=True)
class OneOf:
    """Parser of a word that is one of `choices`."""

    choices: tuple[str, ...]

    def __call__(self, text: str) -> str:
        if text not in self.choices:
            raise ValueError(" or ".join(self.choices))
        return text


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Parser of a whole number that is `least` or more, and `most` at most."""

    least: int
    most: int = 1 << 63

    def __call__(self, text: str) -> int:
        if not text.isdecimal() or int(text) < self.least:
            raise ValueError(f"a whole number, {self.least} or more")
        if int(text) > self.most:
            raise ValueError(f"a whole number up to {self.most}")
        return int(text)


FEWEST_PAIRS = 4  # of a gate: with fewer there is nothing to look at
MOST_PAIRS = 1000  # with more the first analyses decide nothing: the error rate is spent over all

OF_SEVERAL_GPUS = (
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "prefill_context_parallel",
)  # how such arguments begin

TELEMETRY = ("auto", "gpm", "nvml", "dcgm", "host", "off")
