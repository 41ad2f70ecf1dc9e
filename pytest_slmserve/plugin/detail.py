"""How much is printed at the end of a run, by us and by pytest-benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_slmserve.plugin.items import SESSION

if TYPE_CHECKING:
    from pytest_slmserve.schema.literals import Detail

OUR_KEY = "records"  # in the `extra_info` of a benchmark that shows a point of ours


def detail_of(config: pytest.Config) -> Detail:
    """The detail that the command line asks for; else by pytest's -v and -q, or as the other options say."""
    options, verbose = config.stash[SESSION].options, config.option.verbose
    if options.source["report"] == "command line" or not verbose:
        return options.report
    if verbose < 0:
        return "summary"
    return "all" if verbose > 1 or options.report == "all" else "tables"


def groups_to_show(
    config: pytest.Config, groups: list[tuple[str | None, list[Any]]]
) -> list[tuple[str | None, list[Any]]]:
    """Groups of benchmarks for pytest-benchmark's own table. Points of ours are in it where all is shown, or where it
    compares or draws; their groups say that a time there is that of a request, not of the test."""
    wanted = config.getoption("benchmark_compare") or config.getoption("benchmark_histogram")
    shown = wanted or (SESSION in config.stash and detail_of(config) == "all")
    found: list[tuple[str | None, list[Any]]] = []
    for name, benchmarks in groups:
        ours = [each for each in benchmarks if OUR_KEY in each["extra_info"]]
        others = [each for each in benchmarks if OUR_KEY not in each["extra_info"]]
        found += [(name, others)] if others else []
        found += [(f"s per request: {name}" if name else "s per request", ours)] if ours and shown else []
    return found
