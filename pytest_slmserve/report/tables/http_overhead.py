"""What the serving stack costs: a row for each load that was measured without and through the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_slmserve.analysis.compare.http_overhead import AtBothDoors, Doors, at_both_doors
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.labels import front_ends
from pytest_slmserve.report.numbers import change, changes, counted, figure, hundredths, milliseconds
from pytest_slmserve.report.tables.findings import served_on
from pytest_slmserve.report.text_table import Column, hanging, table

COLUMNS: tuple[Column[AtBothDoors], ...] = (
    Column("in\nflight", lambda at: str(at.concurrency)),
    Column("tokens/s\noffline", lambda at: figure(at.offline.output_tokens_per_s, 4)),
    Column("\nserver", lambda at: figure(at.server.output_tokens_per_s, 4)),
    Column("change\n%", lambda at: change(at.ratio)),
    Column("95 %\n", lambda at: changes(at.ratio)),
    Column("TTFT ms\noffline", lambda at: milliseconds(at.offline.ttft_s)),
    Column("\nserver", lambda at: milliseconds(at.server.ttft_s)),
    Column("TPOT ms\noffline", lambda at: milliseconds(at.offline.tpot_s)),
    Column("\nserver", lambda at: milliseconds(at.server.tpot_s)),
    Column("step ms\noffline", lambda at: milliseconds(at.offline.step_s)),
    Column("\nserver", lambda at: milliseconds(at.server.step_s)),
    Column("prompt\nsteps %", lambda at: hundredths(at.prompt_steps[0])),
    Column("\nserver", lambda at: hundredths(at.prompt_steps[1])),
    Column("own cores\noffline", lambda at: figure(at.offline.own_cores)),
    Column("\nserver", lambda at: figure(at.server.own_cores)),
)
LEGEND = (
    "Doors: the same engine, requests and load, without HTTP and through the server. change: of output tokens/s. "
    "prompt steps: steps that processed a prompt: the fewer there are, the more prompts came together. own "
    "cores: CPU time of engine, server and client per second. A launch has luck of its own, so what one launch of each "
    "door shows is of these launches."
)


def doors_report(curves: Sequence[Curve]) -> Iterator[str]:
    """A table for each model that was measured by both doors, and how to read it."""
    found = at_both_doors(curves)
    yield from map(_of_model, found)
    if found:
        yield hanging(LEGEND, 0)


def _of_model(doors: Doors) -> str:
    launches = " and ".join(counted(len(each.resolved), "launch") for each in (doors.offline, doors.server))
    through = f"{doors.server.subject} through the server{front_ends(doors.server.spec)} beside offline"
    title = hanging(f"{through}: {served_on(doors.server.environment)}, {launches}", 2)
    return "\n".join([title, "", table(doors.loads, COLUMNS)])
