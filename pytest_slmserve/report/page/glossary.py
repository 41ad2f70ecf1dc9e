"""The words of a page with their meanings, and the terms of a heading."""

from __future__ import annotations

import re

GLOSSARY: dict[tuple[str, ...], str] = {  # a term and its other forms
    (
        "requests in flight",
        "in flight",
        "concurrency",
    ): "Requests that the client keeps in the engine at once: the load.",
    ("batch",): "Sequences that one step of the engine computes together.",
    ("max_num_seqs",): "The engine's limit of sequences in a batch.",
    ("point", "points"): "One load, measured once or several times (repeats).",
    ("curve", "curves"): "The points of one engine, workload, way of loading and machine.",
    ("step",): "One pass of the model over the batch.",
    ("TTFT",): "Time to first token: from sending a request to its first output token.",
    ("TPOT",): "Time per output token: from the first to the last, over the tokens after the first.",
    ("ITL",): "Inter-token latency: each gap between two output tokens, where a client saw them arrive.",
    ("E2E",): "End-to-end latency: from sending a request to its last output token.",
    ("p99", "p50"): "Percentile: 99, or 50, of 100 requests were at most so slow.",
    ("SLO", "service-level objective"): "Bounds that a request has to keep to be good.",
    ("goodput",): "Requests per second that kept every bound of the service-level objective (SLO).",
    ("plateau",): "Loads past which a doubling gains less throughput than the bound of the claim. With ?: undecided.",
    ("Pareto-optimal", "Pareto"): "A load that no other one beats in both throughput and latency.",
    ("saturation law",): "Throughput T_inf B/(B + b_half) at a batch B: half of T_inf is reached at b_half.",
    ("Little's law",): "Requests in flight are requests per second times the time that each takes.",
    ("roofline",): "The throughput that the data sheet of the device allows at a batch.",
    ("KV cache", "KV blocks"): "Keys and values of the tokens so far, which the engine keeps in blocks on the device.",
    ("preempted",): "Requests that the engine put back to compute them again, mostly for want of KV blocks.",
    ("GPU util",): "Share of the time in which any kernel ran, as NVML samples it.",
    ("SM",): "Streaming multiprocessors of the GPU. Active: the share that has work.",
    ("DRAM",): "The memory of the device. Active: share of the time in which it moved data.",
    ("tensor",): "Tensor cores of the GPU. Active: share of the time in which they computed.",
    ("canary",): "A fixed piece of pure Python that runs beside each window: it tells how fast the host is.",
    ("own cores",): "CPU time of this run's processes, as a number of cores.",
    ("replicas",): "Several engines that are measured at once, mostly on one GPU.",
    ("launch", "launches"): "One start of an engine.",
    ("claim", "claims"): "A published statement with a bound, which measurements are held against.",
    ("verdict", "verdicts"): "The answer: a claim holds, fails, or is undecided.",
    ("95 % interval", "95 %"): "Where the true value lies in 19 of 20 such measurements.",
    ("undecided", "inconclusive"): "The measurements do not suffice to tell whether it holds or fails.",
    ("valid",): "yes; noisy: disturbed, but counted; partly: some repeats left out; degraded; NO: invalid.",
    ("gate",): "The test whether a candidate is slower than a baseline, by pairs of launches.",
    (
        "margin",
    ): "The change that matters. Worse by less for certain passes a gate, worse for certain by more than half "
    "of it fails.",
    ("interim analysis", "interim analyses"): "One of several tests of a gate, after more pairs each time.",
    ("minimum detectable change", "detectable"): "The smallest worsening that so much data find in nine of ten cases.",
    ("spread",): "How far repeats lie apart, over their mean; in a gate, the standard deviation of a pair.",
}

_NUMBERS = {form.lower(): number for number, forms in enumerate(GLOSSARY, 1) for form in forms}
_FORMS = "|".join(re.escape(form) for form in sorted(_NUMBERS, key=len, reverse=True))
_TERM = re.compile(rf"(?<![\w-])({_FORMS})(?![\w-])", re.IGNORECASE)


def parts(text: str) -> list[tuple[str, int]]:
    """The parts of a heading: each term with its number in the glossary, from 1, and what is between them with 0."""
    return [(part, _NUMBERS[part.lower()] if i % 2 else 0) for i, part in enumerate(_TERM.split(text))]
