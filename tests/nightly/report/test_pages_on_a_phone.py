"""Pages of large archives in a real browser: names and ticks are whole and apart, on a desk and on a phone."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chromium import ALL_DRAWN, PATIENCE_MS, PHONE, UNFOLD, Opened, launched, needs_browser, opened_in, stored
from playwright.sync_api import expect
from scripts import in_checkout

from pytest_slmserve.__main__ import main

pytestmark = [needs_browser, in_checkout]
browser = pytest.fixture(launched, scope="module")


@contextmanager
def unfolded(browser: Any, folder: Path, *names: str, **words: Any) -> Iterator[Opened]:
    """The page of a report on archives, with every part and every chart. words: of the browser's context."""
    path = folder / "out.html"
    main(["report", *map(stored, names), "--strict", "--show", "summary", "--html", str(path)])
    with opened_in(browser, path, **words) as seen:
        seen.page.evaluate(UNFOLD)
        yield seen


def test_bar_names_break_on_phone(browser, tmp_path):
    with unfolded(browser, tmp_path, "h200-vllm-0.26.0-replicas", viewport=PHONE) as seen:
        bars = seen.page.locator("figure:has-text('Memory of the GPU') .mark-rect.role-mark path")
        expect(bars).to_have_count(32, timeout=PATIENCE_MS)
        assert "opt-1.3b, time-slicing" in bars.nth(4).get_attribute("aria-label")
        for names in ("#part-1 .role-axis-label text", "figure:has-text('Where a step goes') .role-axis-label text"):
            boxes = [box.bounding_box() for box in seen.page.locator(names).all()]
            assert boxes and max(box["width"] for box in boxes) < 140
        assert seen.width == 390 and seen.violations() == []


def test_ticks_are_short_numbers(browser, tmp_path):
    with unfolded(browser, tmp_path, "h200-vllm-0.26.0-several-gpus") as seen:
        seen.page.wait_for_function(ALL_DRAWN)
        ticks = {text for text in seen.page.locator(".role-axis-label text").all_text_contents() if text[:1].isdigit()}
        assert "500" in ticks and [text for text in ticks if "e+" in text or len(text.split()[0]) > 9] == []


def test_long_series_names_fit_phone(browser, tmp_path):
    with unfolded(browser, tmp_path, "h100-vllm-0.26.0-today-next-host", viewport=PHONE) as seen:
        figure = seen.page.locator("figure:has-text('Throughput against latency')")
        names = figure.locator(".role-legend-label text")
        expect(names).to_have_count(2, timeout=PATIENCE_MS)
        ends = [box["x"] + box["width"] for each in names.all() if (box := each.bounding_box())]
        chart = figure.locator("svg").bounding_box()
        assert max(ends) <= chart["x"] + chart["width"]


def test_long_names_do_not_overlap(browser, tmp_path):
    with unfolded(browser, tmp_path, "h100-vllm-0.26.0-today", "h100-vllm-0.26.0-fp8") as seen:
        seen.page.wait_for_function(ALL_DRAWN)
        key = seen.page.locator("figure:has-text('Throughput against latency') .role-legend-label text")
        labels = key.all_text_contents()
        assert len(set(labels)) == len(labels) > 6 and not any("\u2026" in label for label in labels)
        rows = seen.page.locator("#claims figure").first.locator(".role-axis-label text")
        boxes = [each.bounding_box() for each in rows.all() if "b, ramp-up" in each.text_content()]
        boxes.sort(key=lambda box: box["y"])
        assert boxes and all(above["y"] + above["height"] <= below["y"] + 3 for above, below in pairwise(boxes))


def test_history_fits_phone(browser, tmp_path):
    releases = [f"h200-vllm-{release}-history" for release in ("0.20.2", "0.22.1", "0.24.0", "0.26.0")]
    with unfolded(browser, tmp_path, *releases, viewport=PHONE) as seen:
        history = seen.page.locator("section:has(h2:text-is('History'))")
        expect(history.locator(".chart svg")).to_have_count(6, timeout=PATIENCE_MS)
        assert seen.width == 390
        drawn = [" ".join(each.all_text_contents()) for each in history.locator(".chart").all()]
        assert all("0.20.2" in text and "too few launches" in text for text in drawn)
        assert seen.violations() == []
