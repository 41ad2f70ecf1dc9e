"""Texts, tables, commands, pages and pictures of six archives that together have nearly all of them are as their golden
files have them. Nightly looks at all archives."""

import pytest
from golden import DRAWN, archives, difference, elsewhere
from scripts import in_checkout


@in_checkout
@pytest.mark.parametrize("name", DRAWN)
def test_archive_matches_golden_file(name):
    with elsewhere(archives()[name]) as path:
        assert difference(name, path) == ""
