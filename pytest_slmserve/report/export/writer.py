"""Measurements written for other tools as they are made, in the words of those tools.

vllm-bench=PATH: the JSON that `vllm bench serve` saves. Where PATH ends in .json, all results go into that file, an
object a line, as vLLM's --append-result writes them; else it is a folder that gets a file for each, under the name that
vLLM gives it (`--save-result --result-dir`), with the record's id at its end: two of one second are two files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pytest_slmserve.analysis.metrics.goodput import Slo, goodput_of
from pytest_slmserve.report.export.vllm_bench import as_vllm_bench
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import OpenLoop
from pytest_slmserve.schema.records import Measurement

FORMAT = "vllm-bench"
EXAMPLE = f"{FORMAT}=results/, for a file of each, or {FORMAT}=results.json"


@dataclass(frozen=True, slots=True)
class Export:
    """The destination of exported results. slo: None means no goodput."""

    path: Path
    slo: Slo | None = None

    def add(self, measurement: Measurement) -> None:
        """Raises BadUsage where it cannot be written; the record is in the archive by then."""
        result = json.dumps(as_vllm_bench(measurement, goodput_of(measurement, self.slo) if self.slo else None))
        try:
            if self.path.suffix == ".json":
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(f"{result}\n")
            else:
                self.path.mkdir(parents=True, exist_ok=True)
                (self.path / file_name(measurement)).write_text(f"{result}\n", "utf-8")
        except OSError as error:
            raise BadUsage(f"cannot write {self.path}: {error.strerror}", EXAMPLE) from None


def export_to(text: str, slo: Slo | None = None) -> Export:
    """The export that an option's text names: `vllm-bench=PATH`. Raises BadUsage for any other text."""
    name, _, path = text.partition("=")
    if name != FORMAT or not path:
        raise BadUsage(f"{text!r} is no export", EXAMPLE)
    return Export(Path(path), slo)


def file_name(m: Measurement) -> str:
    """vLLM's: label, rate, users, model and time."""
    rate = f"{m.load.rate:g}" if isinstance(m.load, OpenLoop) else "inf"
    users = "" if isinstance(m.load, OpenLoop) else f"-concurrency{m.load.concurrency}"
    model = m.spec.model.rstrip("/").rpartition("/")[2]
    at = m.measured_at[:19].replace("-", "").replace(":", "").replace("T", "-")
    return f"{m.spec.interface}-{rate}qps{users}-{model}-{at}-{m.id}.json"
