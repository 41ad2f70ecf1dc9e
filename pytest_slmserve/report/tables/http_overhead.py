"""Cost of the serving stack: a row for each load that was measured both without the server and through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_slmserve.analysis.compare.http_overhead import AtBothInterfaces, Interfaces, at_both_interfaces
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.labels import front_ends
from pytest_slmserve.report.numbers import change, changes, counted, figure, hundredths, milliseconds
from pytest_slmserve.report.tables.findings import served_on
from pytest_slmserve.report.text_table import Column, hanging, table

COLUMNS: tuple[Column[AtBothInterfaces], ...] = (
    Column("in\nflight", lambda at: str(at.concurrency)),
    Column("tokens/s\nengine", lambda at: figure(at.engine.output_tokens_per_s, 4)),
    Column("tokens/s\nserver", lambda at: figure(at.server.output_tokens_per_s, 4)),
    Column("change\n%", lambda at: change(at.ratio)),
    Column("95 %\n", lambda at: changes(at.ratio), rank=1),
    Column("TTFT ms\nengine", lambda at: milliseconds(at.engine.ttft_s), rank=2),
    Column("TTFT ms\nserver", lambda at: milliseconds(at.server.ttft_s), rank=2),
    Column("TPOT ms\nengine", lambda at: milliseconds(at.engine.tpot_s), rank=3),
    Column("TPOT ms\nserver", lambda at: milliseconds(at.server.tpot_s), rank=3),
    Column("step ms\nengine", lambda at: milliseconds(at.engine.step_s), rank=5),
    Column("step ms\nserver", lambda at: milliseconds(at.server.step_s), rank=5),
    Column("prompt steps\n% engine", lambda at: hundredths(at.prompt_steps[0]), rank=6),
    Column("prompt steps\n% server", lambda at: hundredths(at.prompt_steps[1]), rank=6),
    Column("own cores\nengine", lambda at: figure(at.engine.own_cores), rank=4),
    Column("own cores\nserver", lambda at: figure(at.server.own_cores), rank=4),
)
LEGEND = (
    "Interfaces: the same engine, requests and load, without HTTP and through the server. change: of output tokens/s. "
    "prompt steps: steps that processed a prompt: the fewer there are, the more prompts came together. own "
    "cores: CPU time of engine, server and client per second. A launch has luck of its own, so what one launch of each "
    "interface shows is of these launches."
)


def interfaces_report(curves: Sequence[Curve]) -> Iterator[str]:
    """A table for each model that was measured by both interfaces, and how to read it."""
    found = at_both_interfaces(curves)
    yield from map(_of_model, found)
    if found:
        yield hanging(LEGEND, 0)


def _of_model(interfaces: Interfaces) -> str:
    launches = " and ".join(counted(len(each.resolved), "launch") for each in (interfaces.engine, interfaces.server))
    through = f"{interfaces.server.subject} through the server{front_ends(interfaces.server.spec)} beside the engine"
    title = hanging(f"{through}: {served_on(interfaces.server.environment)}, {launches}", 2)
    return "\n".join([title, "", table(interfaces.loads, COLUMNS)])
