"""The line that shows how far a run is."""

from __future__ import annotations

from pytest_slmserve.records import Progress


def progress_line(number: int, items: int, name: str, progress: Progress, left_s: float) -> str:
    """ "item 7 of 33 | opt-1.3b at 64, repeat 1 | window 3.2 s | 412 done | 9,830 tokens/s | 3:40 left" """
    rate = "-" if progress.tokens_per_s is None else f"{progress.tokens_per_s:,.0f}"
    left = f"{int(left_s) // 60}:{int(left_s) % 60:02d} left"
    parts = [
        f"item {number} of {items}",
        name,
        f"{progress.phase} {progress.elapsed_s:.1f} s",
        f"{progress.done:,} done",
        f"{rate} tokens/s",
        left,
    ]
    return " | ".join(parts)
