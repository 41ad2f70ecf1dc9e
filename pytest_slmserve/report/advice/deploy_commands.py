"""Commands that deploy the advice: `vllm serve` with the settings that the advisor found."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_slmserve.analysis.advice.advisor import Advice, Plan
from pytest_slmserve.analysis.advice.batch_choice import ServedEngine
from pytest_slmserve.analysis.advice.gpu_memory import utilization

FIRST_PORT = 8000  # of vLLM's server, if nothing else is said
INDENT = "    "
CONTINUED = " \\"


@dataclass(frozen=True, slots=True)
class Start:
    """Engines to be started one after the other. what: for people. mps: whether they should share the GPU by MPS."""

    what: str
    commands: tuple[tuple[str, ...], ...]
    mps: bool = False


def starts(plan: Plan) -> Iterator[Start]:
    """Ways to serve: one engine for each model that fits beside the others, one alone for each whose memory is not
    known, and where more of a single model are worth a trial, these."""
    serving = [(advice, advice.batch) for advice in plan.advices if advice.batch is not None and advice.subject.engine]
    placed = [row for row in serving if len(serving) == 1 or (plan.together and row[0].needs)]
    if placed:
        what = "one engine" if len(placed) == 1 else f"{len(placed)} engines that fit on the GPU together"
        yield Start(what, _commands(placed, plan.wish.gpu_bytes))
    for row in (row for row in serving if row not in placed):
        what = f"one engine of {row[0].subject.name}, alone: it is not known to fit beside others"
        yield Start(what, _commands([row], plan.wish.gpu_bytes))
    for advice, _ in serving:
        if advice.replicas and advice.replicas.advised > 1:
            count, each = advice.replicas.advised, advice.replicas.each
            several = _commands([(advice, each)] * count, plan.wish.gpu_bytes)
            yield Start(f"{count} engines of {each} requests each, for a trial", several, mps=True)


def _commands(serving: Sequence[tuple[Advice, int]], gpu_bytes: int | None) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (*serve(advice.subject.engine, batch, gpu_bytes), "--port", str(port))
        for port, (advice, batch) in enumerate(serving, FIRST_PORT)
        if advice.subject.engine
    )


def serve(engine: ServedEngine, batch: int, gpu_bytes: int | None) -> tuple[str, ...]:
    """The words of one command. What is not known of the engine is left to vLLM."""
    words = ["env", *engine.env] if engine.env else []
    words += ["vllm", "serve", engine.model, "--dtype", engine.dtype, "--max-num-seqs", str(batch)]
    if engine.max_num_batched_tokens is not None:
        words += ["--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    if footprint := engine.footprint:
        words += ["--max-model-len", str(footprint.longest), "--kv-cache-memory-bytes", str(footprint.kv_bytes(batch))]
        if gpu_bytes is not None:
            words += ["--gpu-memory-utilization", f"{utilization(footprint.total_bytes(batch), gpu_bytes):.3f}"]
    return (*words, *engine.arguments)


def lines(words: Sequence[str], width: int) -> str:
    """One command on several lines of a terminal, continued for a shell and broken only before an option."""
    groups: list[list[str]] = [[]]  # the command, and each option with what follows it
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    rows: list[str] = []
    for option in map(shlex.join, groups):
        if rows and len(rows[-1]) + len(option) + len(CONTINUED) < width:
            rows[-1] += f" {option}"
        else:
            rows.append(f"{INDENT if rows else ''}{option}")
    return f"{CONTINUED}\n".join(rows)
