"""A few published numbers: OPT-1.3B on an H100 with 64 GB, ShareGPT, 2000 requests at once.

The raw results that belong to arXiv:2503.08311, FerranAgulloLopez/vLLMBatchingMemoryGap, Apache-2.0, folder background.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from pytest_slmserve.analysis.points import Point, Summary

ROWS = (
    (1, 276.592895, 381.405788, 3.623329, 0.981203),
    (8, 1740.773658, 2400.426218, 4.566284, 7.465909),
    (32, 4159.890649, 5734.137894, 7.509587, 27.414013),
    (64, 5907.807679, 8143.688087, 10.395783, 51.534483),
    (96, 6552.550563, 9032.789447, 13.893806, 74.980952),
    (128, 6897.160856, 9506.92927, 17.346095, 98.45),
    (256, 7841.941174, 10809.817514, 29.272694, 183.797753),
    (384, 8084.765065, 11144.551474, 40.876, 263.885057),
    (768, 8016.707228, 11050.098144, 72.889002, 459.482759),
)
HEADER = "model,max_num_seqs,output_tok_per_s,total_tok_per_s,mean_itl_ms,mean_running,preemptions"
NAMES = ("--knob=max_num_seqs", "--throughput=total_tok_per_s", "--latency=mean_itl_ms")  # columns of it
CSV = "\n".join([HEADER, *(f"opt-1.3b,{','.join(map(str, row))},0" for row in ROWS), ""])

# Several engines under MPS, folder replication. max_num_seqs of each, engines, chunked prefill, tokens/s of all, mean
# time between tokens in ms, preemptions
REPLICAS = (
    (96, 1, False, 9120.895163, 13.775315, 0),
    (96, 2, False, 12313.941564, 18.983373, 0),
    (96, 4, False, 13172.428067, 31.520148, 0),
    (256, 1, False, 10870.91079, 29.263707, 0),
    (256, 2, False, 14669.488148, 37.072945, 0),
    (256, 4, False, 14720.241009, 45.770089, 178),
    (768, 1, False, 10967.555704, 73.77277, 0),
    (768, 1, True, 11864.81399, 65.299146, 0),
)
REPLICA_HEADER = "model,max_num_seqs,replicas,chunked_prefill,total_tok_per_s,mean_itl_ms,preemptions"
REPLICA_CSV = "\n".join([REPLICA_HEADER, *(f"opt-1.3b,{','.join(map(str, row))}" for row in REPLICAS), ""])


def external(folder: Path, text: str = CSV) -> Path:
    """These results, or others, as a file of another tool."""
    path = folder / "results.csv"
    path.write_text(text, "utf-8")
    return path


def served(
    load: int, rates: Sequence[float], latencies_s: Sequence[float], lost: float = 0.0, **means: object
) -> Point:
    """A point as the reader of external results makes it. means: other figures of the point."""
    each = tuple(Summary(output_tokens_per_s=rate, e2e_s=wait) for rate, wait in zip(rates, latencies_s, strict=True))
    point = Point(concurrency=load, each=each, output_tokens_per_s=fmean(rates), e2e_s=fmean(latencies_s), **means)
    if lost:
        return replace(point, left_out=len(rates), problems=(f"{lost:g} preemptions",))
    batches = (float(load),) * len(rates)
    return replace(point, repeats=tuple(rates), e2e_repeats=tuple(latencies_s), batch_repeats=batches)
