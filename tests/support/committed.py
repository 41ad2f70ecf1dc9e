"""The committed archives, each read once a process."""

from functools import cache

from scripts import BASELINES, needs_checkout

from pytest_slmserve.archive.store import read
from pytest_slmserve.schema.records import Measurement


@cache
def archive(name: str) -> tuple[Measurement, ...]:
    """Measurements of `benchmarks/baselines/NAME.jsonl.xz`; skips the test that asks, if it stands in no checkout."""
    needs_checkout()
    return tuple(read(BASELINES / f"{name}.jsonl.xz").measurements)


def names_of(pattern: str = "*") -> list[str]:
    """Names of the archives that match, sorted; skips likewise."""
    needs_checkout()
    return sorted(path.name.removesuffix(".jsonl.xz") for path in BASELINES.glob(f"{pattern}.jsonl.xz"))
