"""The page in a real browser, opened from disk: nothing is fetched, nothing goes wrong, its script tells the truth."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from scripts import BASELINES, CHECKOUT, in_checkout

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read
from pytest_slmserve.commands.report import judged_again
from pytest_slmserve.report.text_table import figure, hundredths
from pytest_slmserve.report.verdicts import by_outcome, tally

pytest.importorskip("jinja2", reason="a page needs Jinja2")
playwright = pytest.importorskip("playwright.sync_api", reason="a browser is driven by playwright")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="accessibility is checked by axe-core")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
ARCHIVE = BASELINES / "h200-vllm-0.26.0-core-opt-2.7b.jsonl.xz"
PATIENCE_MS = 60_000  # on a busy machine; what is waited for comes in a second on an idle one
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PHONE = {"width": 390, "height": 844}
ALL_DRAWN = "document.querySelectorAll('.chart:not(:has(svg))').length == 0"
UNFOLD = "dispatchEvent(new Event('beforeprint'))"  # paper has every part and every chart
SLOS = (("200", "20", ""), ("60", "", "1800"), ("", "12.5", ""), ("13.061", "", ""))  # ms: TTFT, TPOT, E2E

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason=f"no browser is here: {', '.join(NAMES)}"),
    in_checkout,
]


@dataclass
class Opened:
    """A page in the browser. trouble: messages of its console, errors and requests."""

    page: Any
    trouble: list[str] = field(default_factory=list)

    def fill(self, **values: str) -> None:
        for name, value in values.items():
            self.page.fill(f"#{name}", value)

    def goodput(self) -> list[list[str]]:
        rows = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
        found: list[list[str]] = self.page.eval_on_selector_all("#goodput-table tbody tr", rows)
        return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "out.html"
    main(["report", str(ARCHIVE), "--show", "summary", "--html", str(path)])
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=BROWSER, args=list(FLAGS), timeout=PATIENCE_MS)
        yield launched
        launched.close()


@contextmanager
def opened_in(browser: Any, written: Path, **words: Any) -> Iterator[Opened]:
    """The page, drawn, in a context of its own. words: of the context."""
    words = {"viewport": {"width": 1400, "height": 900}, "permissions": ["clipboard-read", "clipboard-write"], **words}
    with browser.new_context(**words) as context:
        seen = Opened(context.new_page())
        seen.page.set_default_timeout(PATIENCE_MS)
        seen.page.on("console", lambda message: seen.trouble.append(f"{message.type}: {message.text}"))
        seen.page.on("pageerror", lambda error: seen.trouble.append(f"error: {error}"))
        context.on("request", lambda asked: seen.trouble.append(asked.url))
        seen.page.goto(written.as_uri())
        seen.page.wait_for_selector("html[data-ready=yes]")
        yield seen
        own = (written.as_uri(), "data:", "blob:", "about:blank")
        assert [what for what in seen.trouble if not what.startswith(own)] == [], "it is quiet, and asks nobody"


def stored(name: str) -> str:
    """The path of a committed archive."""
    return str(BASELINES / f"{name}.jsonl.xz")


@contextmanager
def unfolded(browser: Any, folder: Path, *arguments: str, **words: Any) -> Iterator[Opened]:
    """The page of a report, with every part and every chart. words: of the browser's context."""
    path = folder / "out.html"
    main(["report", *arguments, "--html", str(path)])
    with opened_in(browser, path, **words) as seen:
        seen.page.evaluate(UNFOLD)
        yield seen


@pytest.fixture(scope="module")
def opened(browser: Any, written: Path) -> Iterator[Opened]:
    """The page on a desk."""
    with opened_in(browser, written) as seen:
        yield seen


def test_charts_far_below_wait_for_the_reader(browser, written):
    with opened_in(browser, written) as seen:
        drawn, charts = (seen.page.locator(each).count() for each in (".chart svg", ".chart"))
        assert 0 < drawn < charts
        seen.page.locator("#slo .chart").first.scroll_into_view_if_needed()
        seen.page.wait_for_selector("#slo .chart svg")


def test_every_chart_is_drawn_and_described(opened):
    opened.page.evaluate(UNFOLD)
    charts = opened.page.locator(".chart")
    assert charts.count() >= 10
    playwright.expect(opened.page.locator(".chart svg")).to_have_count(charts.count(), timeout=PATIENCE_MS)
    assert opened.page.locator("#trouble").text_content() == ""
    assert opened.page.locator("figure [role=graphics-document][aria-label]").count() == charts.count()


@pytest.mark.parametrize("bounds", SLOS)
def test_bounds_give_the_goodput_that_the_package_computes(opened, bounds):
    opened.fill(**dict(zip(("ttft", "tpot", "e2e"), bounds)))
    slo = ",".join(f"{name}:{ms}ms" for name, ms in zip(("ttft", "tpot", "e2e"), bounds) if ms)
    (curve,) = judged_again(read(ARCHIVE)).curves
    found = [(point.concurrency, point.goodput(slo)) for point in curve.valid]
    wanted = [[f"{load}", figure(g.per_s, 4), hundredths(g.attainment), f"{g.dropped}"] for load, g in found]
    assert [row[1:] for row in opened.goodput()] == wanted


def test_a_slider_moves_its_bound_and_the_charts_within_100_ms(opened):
    opened.fill(ttft="", tpot="", e2e="")
    before = opened.goodput()
    took = opened.page.evaluate("""() => {
        const slider = document.querySelector("#tpot-slider");
        const took = [0, 100, 200, 300, 400, 500, 600, 700, 800, 900].map((place) => {
            const begun = performance.now();
            slider.value = place;
            slider.dispatchEvent(new Event("input"));
            return performance.now() - begun;
        });
        return Math.min(...took);
    }""")
    assert float(opened.page.input_value("#tpot")) > 0
    assert opened.goodput() != before
    assert took < 100
    opened.page.evaluate("""() => {
        const slider = document.querySelector("#tpot-slider");
        slider.value = 1000;
        slider.dispatchEvent(new Event("input"));
    }""")
    assert opened.page.input_value("#tpot") == ""


def test_the_address_keeps_the_bounds(opened):
    opened.fill(ttft="60", tpot="", e2e="1800", attainment="50")
    rows, address = opened.goodput(), opened.page.url
    opened.page.goto("about:blank")
    opened.page.goto(address)
    opened.page.wait_for_selector("html[data-ready=yes]")
    assert opened.page.input_value("#e2e") == "1800" and opened.page.input_value("#attainment") == "50"
    assert opened.goodput() == rows


def test_prices_give_the_cost_that_the_advisor_computes(opened):
    opened.page.fill("#price-hour", "2.5")
    opened.page.fill("#price-kwh", "0.3")
    rows = opened.page.eval_on_selector_all(
        "#cost-table tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    (curve,) = judged_again(read(ARCHIVE)).curves
    for row, point in zip(rows, curve.valid, strict=True):
        gpu = 1e6 * 2.5 / (3600 * point.output_tokens_per_s)
        energy = 1e6 * point.energy_per_token_j / 3.6e6 * 0.3
        assert row[1:] == [
            str(point.concurrency),
            figure(point.output_tokens_per_s, 4),
            *(figure(value) for value in (1e3 * point.energy_per_token_j, gpu, energy, gpu + energy)),
        ]
    opened.page.fill("#price-hour", "")
    told = opened.page.locator("#cost-table tbody tr").first.locator("td").all_text_contents()
    assert told[3] == told[5] == "-" and float(told[4]) > 0


def test_the_address_keeps_prices_what_is_shown_and_the_theme(opened):
    opened.page.fill("#price-hour", "2")
    opened.page.click("[data-filter=fails]")
    opened.page.click("#theme")
    theme, address = opened.page.get_attribute("html", "data-theme"), opened.page.url
    opened.page.goto("about:blank")
    opened.page.goto(address)
    opened.page.wait_for_selector("html[data-ready=yes]")
    assert opened.page.input_value("#price-hour") == "2"
    assert opened.page.get_attribute("[data-filter=fails]", "aria-pressed") == "true"
    assert opened.page.get_attribute("html", "data-theme") == theme
    opened.page.click("[data-filter='']")
    opened.page.click("#theme")


def test_claims_are_filtered(opened):
    all_of_them = opened.page.locator(".claim:visible").count()
    opened.page.click("[data-filter=fails]")
    some = opened.page.locator(".claim:visible").count()
    assert 0 < some < all_of_them
    shown = opened.page.eval_on_selector_all(
        "[data-state]", "each => each.filter(one => !one.hidden).map(one => one.dataset.state)"
    )
    assert set(shown) == {"fails"}
    opened.page.click("[data-filter='']")
    assert opened.page.locator(".claim:visible").count() == all_of_them


def test_the_command_is_copied(opened):
    opened.page.click("[data-copy]")
    opened.page.wait_for_selector("[data-copy]:text('Copied')")
    assert opened.page.evaluate("navigator.clipboard.readText()") == opened.page.text_content(".command code")


@pytest.mark.parametrize(("kind", "begins"), [("svg", b"<svg"), ("png", b"\x89PNG"), ("csv", b'"x","y"')])
def test_a_chart_is_saved(opened, kind, begins):
    with opened.page.expect_download() as download:
        opened.page.locator(f"#throughput [data-save={kind}]").click()
    assert download.value.suggested_filename == f"throughput-against-latency.{kind}"
    assert Path(download.value.path()).read_bytes().startswith(begins)


def test_the_page_is_dark_where_the_reader_s_system_is_and_light_at_a_click(browser, written):
    ground = "getComputedStyle(document.body).backgroundColor"
    with opened_in(browser, written, color_scheme="dark") as seen:
        assert seen.page.evaluate("document.documentElement.dataset.theme") == "dark"
        dark = seen.page.evaluate(ground)
        assert violations(seen) == []
        seen.page.click("#theme")
        assert seen.page.evaluate(ground) != dark
        seen.page.click("#theme")
        seen.page.emulate_media(media="print")
        assert seen.page.evaluate(ground) == "rgb(255, 255, 255)"
        ink = "getComputedStyle(document.querySelector('h1')).color"
        assert seen.page.evaluate(ink) == "rgb(27, 31, 36)", "paper is white"
        seen.page.emulate_media(media="screen")
        seen.page.click("#theme")
        assert seen.page.get_attribute("#theme", "aria-pressed") == "false"


def test_paper_has_whole_tables_of_text(browser, written):
    with opened_in(browser, written, viewport={"width": 718, "height": 1000}) as seen:  # A4
        seen.page.emulate_media(media="print")
        seen.page.evaluate(UNFOLD)
        pre = seen.page.locator("pre").last
        assert pre.evaluate("pre => getComputedStyle(pre).overflowX") == "visible"
        assert pre.evaluate("pre => pre.scrollWidth / pre.clientWidth") < 1.2, "what the browser makes smaller"


def test_without_javascript_nothing_waits_for_a_click_in_vain(browser, written):
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(written.as_uri())
        assert page.locator("table").first.is_visible()
        dead = page.locator("button:not(.term), [type=file]")  # fields tell the bounds of the table
        assert dead.count() > 20 and not any(each.is_visible() for each in dead.all())


def test_another_page_is_laid_beside_this_one(browser, written, tmp_path):
    other, stranger = tmp_path / "other.html", tmp_path / "stranger.html"
    other.write_bytes(written.read_bytes())
    stranger.write_text("<!doctype html><p>")
    with opened_in(browser, written) as seen:
        legend = seen.page.locator("#throughput .role-legend-label")
        assert legend.count() == 0, "one model needs no legend"
        seen.page.set_input_files("#other", stranger)
        seen.page.wait_for_selector("#trouble:text('stranger.html is no page')")
        seen.page.set_input_files("#other", other)
        playwright.expect(legend.last).to_contain_text("other.html: opt-2.7b", timeout=PATIENCE_MS)


def test_names_of_bars_are_broken_on_a_phone(browser, tmp_path):
    with unfolded(browser, tmp_path, stored("h200-vllm-0.26.0-replicas"), viewport=PHONE) as seen:
        bars = seen.page.locator("figure:has-text('Memory of the GPU') .mark-rect.role-mark path")
        playwright.expect(bars).to_have_count(32, timeout=PATIENCE_MS)
        assert "opt-1.3b, time-slicing" in bars.nth(4).get_attribute("aria-label")
        for names in ("#part-1 .role-axis-label text", "figure:has-text('Where a step goes') .role-axis-label text"):
            boxes = [box.bounding_box() for box in seen.page.locator(names).all()]
            assert boxes and max(box["width"] for box in boxes) < 140
        assert seen.page.evaluate("document.documentElement.scrollWidth") == 390
        assert violations(seen) == []


def test_ticks_are_plain_and_short_numbers(browser, tmp_path):
    with unfolded(browser, tmp_path, stored("h200-vllm-0.26.0-several-gpus"), "--strict") as seen:
        seen.page.wait_for_function(ALL_DRAWN)
        ticks = {text for text in seen.page.locator(".role-axis-label text").all_text_contents() if text[:1].isdigit()}
        assert "500" in ticks and [text for text in ticks if "e+" in text or len(text.split()[0]) > 9] == []


def test_a_phone_has_room_for_long_names_of_series(browser, tmp_path):
    with unfolded(browser, tmp_path, stored("h100-vllm-0.26.0-today-next-host"), viewport=PHONE) as seen:
        figure = seen.page.locator("figure:has-text('Throughput against latency')")
        names = figure.locator(".role-legend-label text")
        playwright.expect(names).to_have_count(2, timeout=PATIENCE_MS)
        ends = [box["x"] + box["width"] for each in names.all() if (box := each.bounding_box())]
        chart = figure.locator("svg").bounding_box()
        assert max(ends) <= chart["x"] + chart["width"]


def test_names_that_several_archives_make_long_are_whole_and_apart(browser, tmp_path):
    archives = map(stored, ("h100-vllm-0.26.0-today", "h100-vllm-0.26.0-fp8"))
    with unfolded(browser, tmp_path, *archives) as seen:
        seen.page.wait_for_function(ALL_DRAWN)
        key = seen.page.locator("figure:has-text('Throughput against latency') .role-legend-label text")
        labels = key.all_text_contents()
        assert len(set(labels)) == len(labels) > 6 and not any("\u2026" in label for label in labels)
        rows = seen.page.locator("#claims figure").first.locator(".role-axis-label text")
        boxes = [each.bounding_box() for each in rows.all() if "b, ramp-up" in each.text_content()]
        boxes.sort(key=lambda box: box["y"])
        assert boxes and all(above["y"] + above["height"] <= below["y"] + 3 for above, below in pairwise(boxes))


def test_a_phone_has_no_line_that_is_too_long(browser, written):
    with opened_in(browser, written, viewport=PHONE) as seen:
        assert seen.page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_history_is_drawn_and_fits_a_phone(browser, tmp_path):
    releases = [str(path) for path in sorted(BASELINES.glob("h200-vllm-*-history.jsonl.xz"))]
    with unfolded(browser, tmp_path, *releases, "--show", "summary", viewport=PHONE) as seen:
        history = seen.page.locator("section:has(h2:text-is('History'))")
        playwright.expect(history.locator(".chart svg")).to_have_count(4, timeout=PATIENCE_MS)
        assert seen.page.evaluate("document.documentElement.scrollWidth") == 390
        drawn = [" ".join(each.all_text_contents()) for each in history.locator(".chart").all()]
        assert all("0.20.2" in text and "no difference shown" in text for text in drawn)
        assert violations(seen) == []


def test_a_term_tells_its_meaning_by_keyboard_on_a_phone(browser, written):
    with opened_in(browser, written, viewport=PHONE) as seen:
        term, meaning = seen.page.locator("th .term:text('TTFT')").first, seen.page.locator(".meaning:popover-open")
        term.focus()
        seen.page.keyboard.press("Enter")
        playwright.expect(meaning).to_contain_text("Time to first token")
        box = meaning.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
        seen.page.keyboard.press("Escape")
        playwright.expect(meaning).to_have_count(0)
        described = term.evaluate("term => document.getElementById(term.getAttribute('aria-describedby')).textContent")
        assert described.startswith("Time to first token")


def test_axe_finds_no_violation(opened):
    opened.page.locator("#claims-title .term").click()
    playwright.expect(opened.page.locator(".meaning:popover-open")).to_be_visible()
    assert violations(opened) == []


def violations(opened: Opened) -> list[tuple[str, list[str]]]:
    """Rules of axe-core that are broken, and where, with all parts of the page unfolded."""
    opened.page.evaluate(UNFOLD)
    found = axe.Axe().run(opened.page).response["violations"]
    return [(rule["id"], [node["html"][:200] for node in rule["nodes"]][:3]) for rule in found]


# The picture in README

PICTURE = CHECKOUT / "docs" / "images" / "page.png"
PICTURED = BASELINES / "h200-vllm-0.26.0-staggered.jsonl.xz"


def pictured() -> str:
    found = judged_again(read(PICTURED))
    return tally(by_outcome(found.outcomes))


def draw_picture() -> None:
    """The top of the page in few colours, with what it says of the claims as a comment."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    page = PICTURE.with_suffix(".html")
    main(["report", str(PICTURED), "--goodput", "ttft:200ms,tpot:20ms", "--show", "summary", "--html", str(page)])
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=list(FLAGS))
        shown = browser.new_page(viewport={"width": 1280, "height": 884})
        shown.goto(page.as_uri())
        shown.wait_for_selector("html[data-ready=yes]")
        drawn = shown.screenshot()
        browser.close()
    page.unlink()
    comment = PngInfo()
    comment.add_text("Comment", pictured())
    Image.open(BytesIO(drawn)).convert("RGB").quantize(256).save(PICTURE, pnginfo=comment, optimize=True)


def test_the_picture_says_what_the_page_says_today():
    """`PYTHONPATH=.:tests/support python tests/integration/report/test_page_in_browser.py` draws it anew."""
    image = pytest.importorskip("PIL.Image")
    assert image.open(PICTURE).text["Comment"] == pictured()


if __name__ == "__main__":
    draw_picture()
