"""The line that shows how far a run is."""

from __future__ import annotations

from pytest_slmserve.schema.records import Progress


def progress_line(number: int, items: int, name: str, progress: Progress, left_s: float) -> str:
    """Item, time left, point, phase, requests done, rate: what matters most first, for narrow terminals."""
    rate = "-" if progress.tokens_per_s is None else f"{progress.tokens_per_s:,.0f}"
    parts = [
        f"item {number} of {items}",
        f"{int(left_s) // 60}:{int(left_s) % 60:02d} left",
        name,
        f"{progress.phase} {progress.elapsed_s:.1f} s",
        f"{progress.done:,} done",
        f"{rate} tokens/s",
    ]
    return " | ".join(parts)
