"""Measurements in the words of `vllm bench serve`, written as they are made, so that what reads its JSON reads ours.

Key names are those that vllm/benchmarks/serve.py of release 0.32 saves. Times end in _ms where vLLM's do. What it calls
`duration` is the window; requests and tokens are those of the window, so the rates are the same as in our own reports.

vllm-bench=PATH: where PATH ends in .json, all results go into that file, an object a line, as vLLM's --append-result
writes them; else it is a folder that gets a file for each, under the name that vLLM gives it (`--save-result
--result-dir`), with the record's id at its end: two of one second are two files.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from pytest_slmserve.analysis.estimates import per_second, percentile
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.metrics.window import Goodput, Slo, goodput_of
from pytest_slmserve.analysis.points import summary_of
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import ClosedLoop, is_job, load_facts

PERCENTILES = (50, 90, 95, 99)


def as_vllm_bench(measurement: Measurement, served: Goodput | None = None) -> dict[str, Any]:
    """One result, with what vLLM's has no word for beside it: the record's id, whether it is valid, versions."""
    run, load, facts = measurement.run, measurement.load, load_facts(measurement.load)
    judged = window.judged_requests(measurement)
    seconds = run.window_s[1] - run.window_s[0]
    tokens_per_s = summary_of(measurement).output_tokens_per_s
    prompts_per_s = window.prompt_tokens_per_s(run) or 0.0
    backend = "engine" if measurement.spec.interface == "engine" else "openai"
    return {
        "date": measurement.measured_at,
        "endpoint_type": backend,
        "backend": backend,
        "label": measurement.spec.interface,
        "model_id": measurement.spec.model,
        "tokenizer_id": measurement.spec.model,
        "num_prompts": len(judged.rows) + judged.failures,
        "request_rate": facts.get("rate") or "inf",
        "burstiness": facts.get("burstiness", 1.0) if is_job(load) else None,
        "max_concurrency": load.max_concurrency,
        "duration": seconds,
        "completed": sum(run.samples.finished[row] for row in judged.rows),
        "failed": judged.failures,
        "total_input_tokens": judged.prompt_tokens,
        "total_output_tokens": judged.output_tokens,
        "request_throughput": per_second(len(window.finished_in_window(run)), run.window_s),
        "request_goodput": served and served.per_s,
        "output_throughput": tokens_per_s,
        "total_token_throughput": None if tokens_per_s is None else tokens_per_s + prompts_per_s,
        "max_concurrent_requests": window.most_in_flight(run),
        **_latencies(measurement, judged.rows),
        "record_id": measurement.id,
        "valid": not problems(measurement),
        "vllm_version": measurement.environment.vllm,
        "pytest_slmserve_version": measurement.environment.pytest_slmserve,
    }


def _latencies(measurement: Measurement, rows: Sequence[int]) -> dict[str, float]:
    """Return latency statistics in ms by vLLM's names; a request that did not finish is left out, as vLLM does. Those
    of the ITL are from the gap histogram. Its deviation uses the middles of the bins, which are 1 % wide."""
    seen = [
        each
        for each in (window.request_latency(measurement.run.samples, row) for row in rows)
        if each.e2e_s is not None
    ]
    found: dict[str, dict[str, float]] = {}
    for name, attribute in {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "e2e_s"}.items():
        values = [value for each in seen if (value := getattr(each, attribute)) is not None]
        if values:
            found[name] = {"mean": fmean(values), "median": median(values), "std": pstdev(values)}
            found[name] |= {f"p{share}": percentile(values, share / 100) or 0.0 for share in PERCENTILES}
    if (stream := measurement.run.stream) and (gaps := window.gap_histogram(stream.gaps)).gaps:
        average, middle = gaps.mean_s or 0.0, gaps.percentile(0.5) or 0.0
        square = sum((gaps.middle_s(i) - average) ** 2 * count for i, count in gaps.counts.items()) / gaps.gaps
        found["itl"] = {"mean": average, "median": middle, "std": math.sqrt(square)}
        found["itl"] |= {f"p{share}": gaps.percentile(share / 100) or 0.0 for share in PERCENTILES}
    return {f"{what}_{name}_ms": 1e3 * value for name, each in found.items() for what, value in each.items()}


FORMAT = "vllm-bench"
EXAMPLE = f"{FORMAT}=results/, for a file of each, or {FORMAT}=results.json"


@dataclass(frozen=True, slots=True)
class Export:
    """The destination of exported results. slo: None means no goodput."""

    path: Path
    slo: Slo | None = None

    def add(self, measurement: Measurement) -> None:
        """Raises BadUsage where it cannot be written; the record is in the archive by then."""
        result = json.dumps(as_vllm_bench(measurement, goodput_of(self.slo, (measurement,)) if self.slo else None))
        try:
            if self.path.suffix == ".json":
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(f"{result}\n")
            else:
                self.path.mkdir(parents=True, exist_ok=True)
                load, model = measurement.load, measurement.spec.model.rstrip("/").rpartition("/")[2]
                users = f"infqps-concurrency{load.concurrency}" if isinstance(load, ClosedLoop) else f"{load.rate:g}qps"
                at = re.sub("[-:]", "", measurement.measured_at[:19]).replace("T", "-")
                name = f"{measurement.spec.interface}-{users}-{model}-{at}-{measurement.id}.json"
                (self.path / name).write_text(f"{result}\n", "utf-8")
        except OSError as error:
            raise BadUsage(f"cannot write {self.path}: {error.strerror}", EXAMPLE) from None


def export_to(text: str, slo: Slo | None = None) -> Export:
    """The export that an option's text names: `vllm-bench=PATH`. Raises BadUsage for any other text."""
    name, _, path = text.partition("=")
    if name != FORMAT or not path:
        raise BadUsage(f"{text!r} is no export", EXAMPLE)
    return Export(Path(path), slo)
