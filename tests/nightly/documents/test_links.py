"""Links of all pages to other sites are well formed, and the verdicts of today are those of the archives."""

import re

import pytest
from pages import ALL_PAGES, unfenced
from scripts import checkout_script, loaded, needs_checkout

needs_checkout()
ADDRESS = re.compile(r"https://[\w-]+(\.[\w-]+)+(:\d+)?(/[\w./~%?=&#+-]*)?")


@pytest.mark.parametrize("name", ALL_PAGES)
def test_external_links_are_well_formed(name: str) -> None:
    """Whether a site answers, no test asks: tests need no network."""
    text = unfenced(ALL_PAGES[name].read_text("utf-8"))
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert len(targets) == text.count("](")
    assert [target for target in targets if ":" in target and not ADDRESS.fullmatch(target)] == []
    papers = re.findall(r"arXiv[: ]([\w.]*\w)", text)
    assert [paper for paper in papers if not re.fullmatch(r"\d{4}\.\d{5}", paper)] == []
    assert [pair for pair in re.findall(r"\[arXiv:([\d.]+)\]\(\S+/([\d.]+)\)", text) if len(set(pair)) > 1] == []


def test_todays_verdicts_match_archives() -> None:
    with loaded(checkout_script("studies/claims_today.py")) as script:
        assert script.PAGE.read_text("utf-8") == script.page(), "python studies/claims_today.py writes it"
