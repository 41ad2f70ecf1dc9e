"""`slmserve doctor`: what this host can measure, and what would spoil it.

It changes nothing and starts no engine. A warning is what makes numbers worse or fewer, a problem is what a run ends
with, or what makes its numbers wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pytest_slmserve.commands.cli import FAILS, HOLDS, USAGE, Commands, add_command
from pytest_slmserve.commands.doctor.finding import Finding, Places, State
from pytest_slmserve.commands.doctor.gpu_checks import asking, of_card, of_gpu, of_mps
from pytest_slmserve.commands.doctor.host_checks import of_host
from pytest_slmserve.commands.doctor.software_checks import of_extras, of_lock, of_python, of_telemetry
from pytest_slmserve.engines.launch.device_lock import DeviceLock
from pytest_slmserve.report.text_table import hanging

STATUS = f"{HOLDS} nothing is a problem; {FAILS} something is; {USAGE} wrong usage."
COLOURS: dict[State, int] = {"ok": 32, "warning": 33, "problem": 31}


def add(commands: Commands) -> None:
    words = "say what this host can measure, and what would spoil it"
    command = add_command(commands, "doctor", words, STATUS, doctor)
    names = "an interpreter that may have vLLM; may be given again (default: the one that runs this)"
    command.add_argument("--python", metavar="PATH", action="append", default=[], help=names)


def doctor(given: argparse.Namespace) -> int:
    """Print the page about this host and the interpreters."""
    findings = examine(given.python or [sys.executable])
    terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print("\n".join(lines(findings, colour=terminal)))
    return FAILS if any(finding.state == "problem" for finding in findings) else HOLDS


def lines(findings: Sequence[Finding], *, colour: bool = False) -> list[str]:
    """The text of each finding, in columns, and a line that counts them."""
    width = max(len(finding.name) for finding in findings)
    rows = []
    for finding in findings:
        state, advice = f"{finding.state:<7}", f" -> {finding.advice}" if finding.advice else ""
        shown = hanging(f"{state}  {finding.name:<{width}}  {finding.found}{advice}", width + 11)
        rows.append(f"\033[{COLOURS[finding.state]}m{state}\033[0m{shown[7:]}" if colour else shown)
    counts = [sum(f.state == state for f in findings) for state in ("problem", "warning")]
    return [*rows, f"problems: {counts[0]}, warnings: {counts[1]}"]


def examine(pythons: Sequence[str], places: Places | None = None) -> list[Finding]:
    """All that is found, in the order in which it is shown."""
    places = places or Places()
    gpu, first = of_gpu()
    device = gpu.uuid if gpu else "cpu"
    findings = [first, *(of_python(python, has_gpu=gpu is not None) for python in pythons), of_telemetry(device)]
    if gpu:
        findings += of_card(asking(gpu.uuid))
        findings.append(of_mps(places))
    findings.append(of_lock(DeviceLock(device, places.temporary).path))
    return [*findings, *of_host(places), *of_extras()]
