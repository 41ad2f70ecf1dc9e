"""The site, which `tox -e docs` builds into .tox/docs/html without a network."""

from __future__ import annotations

import re
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

project = "pytest-slmserve"
author = copyright = "the pytest-slmserve developers"
version = release = installed(project)

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_llms_txt",
    "sphinxext.opengraph",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3  # pages link into each other as deep as this
# Types that a signature names and no page explains: the standard library's, aliases, and the bases of points.
# Sphinx cuts a signature that has a literal before a tuple in pieces.
ALIASES = "Bound|GateLaunch|GpuPeaks|Path|Progress|Recorded|ReplicaGroup|ReplicaSummary|Sharing|Summary|T|WindowBarrier"
ALIASES += r"|Peaks|Work|tuple\[str"
nitpick_ignore_regex = [("py:class", rf"collections\.abc\..*|(.*\.)?({ALIASES})"), ("py:obj", r"typing\.Literal\[.*")]
nitpick_ignore = [("py:exc", "BadUsage")]  # an SlmError, as which users catch it
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = project
ogp_social_cards = {"enable": False}

DOCS = Path(__file__).parent


def _without_links_out(app: Any, name: str, text: list[str]) -> None:
    """Leave the words of links to pages and folders of the repository, which are no part of the site."""

    def words(link: re.Match[str]) -> str:
        there = DOCS / link[2]
        return link[1] if there.is_dir() or there.suffix == ".md" else link[0]

    text[0] = re.sub(r"\[([^]]*)\]\((\.\./[^)#]*)[^)]*\)", words, text[0])


def setup(app: Any) -> None:
    app.connect("source-read", _without_links_out)
