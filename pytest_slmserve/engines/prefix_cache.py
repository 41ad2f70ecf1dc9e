"""A server's cache of prefixes: prompts that it cannot know, and what its own counters say of it."""

from __future__ import annotations

import http.client
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from pytest_slmserve.schema.workloads import Workload
from pytest_slmserve.telemetry.http_once import ask_once
from pytest_slmserve.telemetry.prometheus import samples

COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body information"
)
WORDS = COMMON.split()
MARK = "slm-round"
ROUNDS = 4096  # through all requests, before the first comes again
FRESH = 3  # ids that differ: two from hand-over to hand-over, one from round to round
LEAST_ID = 4  # below it are special tokens
PAGE_S = 5.0
# vLLM's names (`vllm/v1/metrics/loggers.py`); before 0.11 they began with gpu_.
COUNTER = re.compile(r"vllm:(?:gpu_)?prefix_cache_(queries|hits)(?:_total)?")


@dataclass(frozen=True, slots=True)
class Fresh:
    """The ids that make each prompt new: after its first come `salt`, drawn for these requests, and the number of the
    round. A cache keeps what begins alike, so all that follows is new to it.

    words: prompts are common words, two for each id. largest: id of the requests."""

    salt: tuple[int, int]
    words: bool
    largest: int

    @property
    def mark(self) -> str:
        """The placeholder of these ids in a body; in quotes where prompts are lists of ids."""
        return MARK if self.words else f'"{MARK}"'

    @property
    def rounds(self) -> list[str]:
        span = max(1, self.largest - LEAST_ID)
        return [self._text((*self.salt, LEAST_ID + number % span)) for number in range(ROUNDS)]

    def prompt(self, ids: tuple[int, ...]) -> list[int | str] | str | None:
        """The prompt with the mark in it, as words or as a list of ids; None for one that is too short."""
        place = FRESH * (2 if self.words else 1)
        if len(ids) <= place + 1:
            return None
        if self.words:
            return " ".join((words_of(ids[:1]), MARK, words_of(ids[1 + place :])))
        return [ids[0], MARK, *ids[1 + place :]]

    def _text(self, ids: tuple[int, ...]) -> str:
        return " ".join(f"{_word(i // len(WORDS))} {_word(i)}" for i in ids) if self.words else ", ".join(map(str, ids))


def fresh(workload: Workload, words: bool) -> Fresh:
    """The fresh ids for one hand-over of these requests, with a salt that is drawn for it."""
    largest = max(max(request.prompt, default=0) for request in workload.requests)
    span = max(1, largest - LEAST_ID)
    return Fresh((LEAST_ID + secrets.randbelow(span), LEAST_ID + secrets.randbelow(span)), words, largest)


def words_of(ids: tuple[int, ...]) -> str:
    """Text of about as many tokens as there are ids: common words, one token each for most tokenizers."""
    return " ".join(map(_word, ids))


def _word(number: int) -> str:
    return WORDS[number % len(WORDS)]


def lookups(url: str, headers: Mapping[str, str]) -> tuple[int, int] | None:
    """Prompt tokens looked up in an endpoint's prefix cache, and found, since it began; None without such counters."""
    parts = urlsplit(url)
    page = urlunsplit((parts.scheme, parts.netloc, f"{parts.path.partition('/v1/')[0]}/metrics", "", ""))
    try:
        status, _, text = ask_once("GET", page, headers, None, PAGE_S)
    except (OSError, http.client.HTTPException):
        return None
    return counted(text) if status == 200 else None


def counted(page: str) -> tuple[int, int] | None:
    """Tokens looked up and found, by the text of such a page, of all its engines; None where it has no counters."""
    totals: dict[str, float] = {}
    try:
        for row in samples(page):
            if counter := COUNTER.fullmatch(row.name):
                totals[counter[1]] = totals.get(counter[1], 0.0) + row.value
        return (round(totals.get("queries", 0.0)), round(totals.get("hits", 0.0))) if totals else None
    except (ValueError, OverflowError):  # another format, or a counter that is no number
        return None
