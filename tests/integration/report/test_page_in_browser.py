"""The page in a real browser, opened from disk: nothing is fetched, nothing goes wrong, its script tells the truth. One
page and one start of the browser; `tests/nightly/report` has pages of larger archives."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from chromium import PATIENCE_MS, PHONE, UNFOLD, Opened, launched, needs_browser, opened_in, stored
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import expect
from scripts import CHECKOUT, in_checkout

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read
from pytest_slmserve.commands.report import judged_again
from pytest_slmserve.report.text_table import figure, hundredths
from pytest_slmserve.report.verdicts import by_outcome, tally

ARCHIVE = Path(stored("h200-vllm-0.26.0-core-opt-2.7b"))
SLOS = (("200", "20", ""), ("60", "", "1800"), ("", "12.5", ""), ("13.061", "", ""))  # ms: TTFT, TPOT, E2E

pytestmark = [needs_browser, in_checkout]
browser = pytest.fixture(launched, scope="module")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "out.html"
    main(["report", str(ARCHIVE), "--show", "summary", "--html", str(path)])
    return path


@pytest.fixture(scope="module")
def opened(browser: Any, written: Path) -> Iterator[Opened]:
    with opened_in(browser, written) as seen:
        yield seen


@pytest.fixture(scope="module")
def phone(browser: Any, written: Path) -> Iterator[Opened]:
    with opened_in(browser, written, viewport=PHONE) as seen:
        yield seen


@pytest.fixture(scope="module")
def valid():
    (curve,) = judged_again(read(ARCHIVE)).curves
    return curve.valid


def test_charts_are_drawn_when_seen(opened):
    charts, drawn = opened.page.locator(".chart").count(), opened.page.locator(".chart svg")
    assert 0 < drawn.count() < charts and charts >= 10
    opened.page.locator("#slo .chart").first.scroll_into_view_if_needed()
    opened.page.wait_for_selector("#slo .chart svg")
    opened.page.evaluate(UNFOLD)
    expect(drawn).to_have_count(charts, timeout=PATIENCE_MS)
    assert opened.page.locator("#trouble").text_content() == ""
    assert opened.page.locator("figure [role=graphics-document][aria-label]").count() == charts


@pytest.mark.parametrize("bounds", SLOS)
def test_slo_bounds_give_package_goodput(opened, valid, bounds):
    opened.fill(**dict(zip(("ttft", "tpot", "e2e"), bounds)))
    slo = ",".join(f"{name}:{ms}ms" for name, ms in zip(("ttft", "tpot", "e2e"), bounds) if ms)
    found = [(point.concurrency, point.goodput(slo)) for point in valid]
    wanted = [[f"{load}", figure(g.per_s, 4), hundredths(g.attainment), f"{g.dropped}"] for load, g in found]
    assert [row[1:] for row in opened.cells("#goodput-table")] == wanted


def test_slider_moves_bound_quickly(opened, valid):
    opened.fill(ttft="", tpot="", e2e="")
    before = opened.cells("#goodput-table")
    move = """place => {
        const slider = document.querySelector("#tpot-slider"), begun = performance.now();
        slider.value = place;
        slider.dispatchEvent(new Event("input"));
        return performance.now() - begun;
    }"""
    took = [opened.page.evaluate(move, place) for place in range(0, 1000, 100)]
    assert min(took) < 100, "the fastest of ten, because others may want the cores"
    assert float(opened.page.input_value("#tpot")) > 0 and opened.cells("#goodput-table") != before
    opened.page.evaluate(move, 1000)
    assert opened.page.input_value("#tpot") == ""
    opened.page.fill("#price-hour", "2.5")
    opened.page.fill("#price-kwh", "0.3")
    for row, point in zip(opened.cells("#cost-table"), valid, strict=True):
        gpu = 1e6 * 2.5 / (3600 * point.output_tokens_per_s)
        energy = 1e6 * point.energy_per_token_j / 3.6e6 * 0.3
        costs = [figure(value) for value in (1e3 * point.energy_per_token_j, gpu, energy, gpu + energy)]
        assert row[1:] == [str(point.concurrency), figure(point.output_tokens_per_s, 4), *costs]
    opened.page.fill("#price-hour", "")
    told = opened.cells("#cost-table")[0][1:]
    assert told[3] == told[5] == "-" and float(told[4]) > 0


def test_page_address_keeps_settings(opened):
    claims = opened.page.locator(".claim:visible")
    all_of_them = claims.count()
    opened.fill(ttft="60", tpot="", e2e="1800", attainment="50", **{"price-hour": "2"})
    opened.page.click("[data-filter=fails]")
    assert 0 < claims.count() < all_of_them
    states = "each => each.filter(one => !one.hidden).map(one => one.dataset.state)"
    assert set(opened.page.eval_on_selector_all("[data-state]", states)) == {"fails"}
    opened.page.click("#theme")
    rows, theme = opened.cells("#goodput-table"), opened.page.get_attribute("html", "data-theme")
    opened.again()
    values = [opened.page.input_value(f"#{name}") for name in ("e2e", "attainment", "price-hour")]
    assert values == ["1800", "50", "2"] and opened.cells("#goodput-table") == rows
    assert opened.page.get_attribute("[data-filter=fails]", "aria-pressed") == "true"
    assert opened.page.get_attribute("html", "data-theme") == theme
    opened.page.click("[data-filter='']")
    assert claims.count() == all_of_them
    opened.page.click("#theme")


def test_saved_table_contains_no_formula(browser, written, tmp_path):
    path = tmp_path / "formula.html"
    path.write_text(written.read_text("utf-8").replace('"series":"opt-2.7b"', '"series":"=1+1"'), "utf-8")
    with opened_in(browser, path) as seen:
        with seen.page.expect_download() as download:
            seen.page.locator("#throughput [data-save=csv]").click()
        head, *rows = csv.reader(Path(download.value.path()).read_text("utf-8").splitlines())
    assert rows and {row[head.index("series")] for row in rows} == {"'=1+1"}
    assert all(float(row[head.index("y")]) > 0 for row in rows)


def test_page_has_no_axe_violation(opened):
    opened.page.locator("#claims-title .term").click()
    expect(opened.page.locator(".meaning:popover-open")).to_be_visible()
    assert opened.violations() == []
    opened.page.keyboard.press("Escape")
    opened.page.click("[data-copy]")
    opened.page.wait_for_selector("[data-copy]:text('Copied')")
    assert opened.page.evaluate("navigator.clipboard.readText()") == opened.page.text_content(".command code")
    for kind, begins in (("svg", b"<svg"), ("png", b"\x89PNG"), ("csv", b'"x","y"')):
        with opened.page.expect_download() as download:
            opened.page.locator(f"#throughput [data-save={kind}]").click()
        assert download.value.suggested_filename == f"throughput-against-latency.{kind}"
        assert Path(download.value.path()).read_bytes().startswith(begins)


def test_another_page_joins_charts(opened, written, tmp_path):
    other, stranger = tmp_path / "other.html", tmp_path / "stranger.html"
    other.write_bytes(written.read_bytes())
    stranger.write_text("<!doctype html><p>")
    legend = opened.page.locator("#throughput .role-legend-label")
    assert legend.count() == 0, "one model needs no legend"
    opened.page.set_input_files("#other", stranger)
    opened.page.wait_for_selector("#trouble:text('stranger.html')")
    opened.page.set_input_files("#other", other)
    expect(legend.last).to_contain_text("other.html: opt-2.7b", timeout=PATIENCE_MS)


def test_page_fits_phone(phone):
    term, meaning = phone.page.locator("th .term:text('TTFT')").first, phone.page.locator(".meaning:popover-open")
    assert phone.width == 390
    term.focus()
    phone.page.keyboard.press("Enter")
    expect(meaning).to_contain_text("Time to first token")
    box = meaning.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    phone.page.keyboard.press("Escape")
    expect(meaning).to_have_count(0)
    described = term.evaluate("term => document.getElementById(term.getAttribute('aria-describedby')).textContent")
    assert described.startswith("Time to first token")


def test_page_follows_dark_mode(phone):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = phone.page.evaluate(ground)
    phone.page.emulate_media(color_scheme="dark")
    phone.page.reload()
    phone.page.wait_for_selector("html[data-ready=yes]")
    assert phone.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert phone.page.evaluate(ground) != light and phone.violations() == []
    phone.page.click("#theme")
    assert phone.page.evaluate(ground) == light
    phone.page.click("#theme")
    phone.page.emulate_media(media="print")
    ink = "getComputedStyle(document.querySelector('h1')).color"
    assert [phone.page.evaluate(each) for each in (ground, ink)] == ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]
    phone.page.emulate_media(media="screen")
    phone.page.click("#theme")
    assert phone.page.get_attribute("#theme", "aria-pressed") == "false"


def test_printed_tables_are_whole(phone):
    phone.page.set_viewport_size({"width": 718, "height": 1000})  # A4
    phone.page.emulate_media(media="print")
    phone.page.evaluate(UNFOLD)
    pre = phone.page.locator("pre").last
    assert pre.evaluate("pre => getComputedStyle(pre).overflowX") == "visible"
    assert pre.evaluate("pre => pre.scrollWidth / pre.clientWidth") < 1.2, "what the browser makes smaller"


def test_buttons_hide_without_javascript(browser, written):
    with browser.new_context(java_script_enabled=False) as context:
        (page := context.new_page()).goto(written.as_uri())
        assert page.locator("table").first.is_visible()
        dead = page.locator("button:not(.term), [type=file]")  # fields tell the bounds of the table
        assert dead.count() > 20 and not any(each.is_visible() for each in dead.all())


# The picture in README

PICTURE = CHECKOUT / "docs" / "images" / "page.png"
PICTURED = Path(stored("h200-vllm-0.26.0-staggered"))


def pictured() -> str:
    return tally(by_outcome(judged_again(read(PICTURED)).outcomes))


def draw_picture() -> None:
    """The top of the page in few colours, with what it says of the claims as a comment."""
    page = PICTURE.with_suffix(".html")
    main(["report", str(PICTURED), "--goodput", "ttft:200ms,tpot:20ms", "--show", "summary", "--html", str(page)])
    with contextmanager(launched)() as browser:
        shown = browser.new_page(viewport={"width": 1280, "height": 884})
        shown.goto(page.as_uri())
        shown.wait_for_selector("html[data-ready=yes]")
        drawn = shown.screenshot()
    page.unlink()
    comment = PngInfo()
    comment.add_text("Comment", pictured())
    Image.open(BytesIO(drawn)).convert("RGB").quantize(256).save(PICTURE, pnginfo=comment, optimize=True)


def test_picture_matches_current_page():
    """`PYTHONPATH=.:tests/support python tests/integration/report/test_page_in_browser.py` draws it anew."""
    assert Image.open(PICTURE).text["Comment"] == pictured()


if __name__ == "__main__":
    draw_picture()
