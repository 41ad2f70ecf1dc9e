"""Puts the addresses of the repository that releases into a checkout, for the package index.

python .github/scripts/set_addresses.py https://github.com/OWNER/NAME v0.1.0

A checkout does not know where it is published, and the release of a fork must not point elsewhere. So pyproject.toml
has no [project.urls], and README.md has relative links, which an index cannot follow.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

URLS = """
[project.urls]
Source = "{url}"
Documentation = "{url}/blob/{tag}/docs/index.md"
Changelog = "{url}/blob/{tag}/CHANGELOG.md"
Issues = "{url}/issues"
"""
RELATIVE = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")  # a picture or not, its text, its target


def with_addresses(readme: str, url: str, tag: str) -> str:
    """The text with absolute links: pages as GitHub shows them, pictures as files."""
    return RELATIVE.sub(lambda m: f"{m[1]}{m[2]}({url}/{'raw' if m[1] else 'blob'}/{tag}/{m[3]})", readme)


def main(url: str, tag: str, checkout: Path = Path()) -> int:
    """0, or 1 where the project has addresses already: they would be there twice."""
    project, readme = checkout / "pyproject.toml", checkout / "README.md"
    told = project.read_text("utf-8")
    if "[project.urls]" in told:
        print("error: pyproject.toml has project URLs: nothing was changed", file=sys.stderr)
        return 1
    project.write_text(told + URLS.format(url=url, tag=tag), "utf-8")
    readme.write_text(with_addresses(readme.read_text("utf-8"), url, tag), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
