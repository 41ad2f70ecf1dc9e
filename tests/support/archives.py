"""Small archives."""

import functools
import gzip
import lzma
import tempfile
from pathlib import Path

import pytest

from pytest_slmserve.archive.store import Archive
from pytest_slmserve.schema.records import Environment, Measurement, Resolved, Run, Samples, Steps
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, WorkloadReference, WorkloadSpec

PACK = {".jsonl": bytes, ".gz": gzip.compress, ".xz": lzma.compress}  # by the suffix of an archive
CLAIMS = {"plateau": {"tolerance": 0.1}}
EACH = pytest.mark.parametrize("name", ["records.jsonl", "records.jsonl.gz", "records.jsonl.xz"])

# Two requests over three steps; the second is cut off before its first token.
RUN = Run(
    Samples((0, 1), (0.000012, 0.5), (0.0001, 0.500001), (0.01, None), (0.9, None), (512, 512), (3, 0), (True, False)),
    Steps((0.01, 0.011, 0.9), (1, 1, 0), (0, 0, None), (1, 1, 1), (512, 0, 0), (0.0044, 0.004537, None), (0, 0, 0)),
    (0.1, 0.8),
    1,
    "RuntimeError: no answer",
)


def example(concurrency: int = 1, launch: str = "4f1d") -> Measurement:
    return Measurement(
        spec=EngineSpec("opt-125m", env=(("A", "1"),), extra=(("block_size", 16),)),
        resolved=Resolved(kv_blocks=7281, block_size=16, capture_sizes=(1, 2, 4), ready_s=33.25),
        environment=Environment(platform="cuda", gpu_name="NVIDIA H200", vllm="0.26.0", cores=16),
        workload=WorkloadReference("c0ffee", WorkloadSpec(), 1024, 512.0, 256.0, 768, "lengths"),
        load=ClosedLoop(concurrency),
        run=RUN,
        launch=launch,
        measured_at="2025-11-21T12:00:00.000+00:00",
    )


def write(path: Path, *kept: Measurement) -> Path:
    """A session with claims, and these measurements, at the end of the archive."""
    with Archive.open(path) as archive:
        archive.begin(CLAIMS, {"batches": [1, 2]})
        for measurement in kept:
            archive.add(measurement)
    return path


@functools.cache
def written(name: str, *concurrencies: int) -> bytes:
    """Bytes of an archive of that name with one example for each."""
    with tempfile.TemporaryDirectory() as folder:
        return write(Path(folder, name), *map(example, concurrencies)).read_bytes()
