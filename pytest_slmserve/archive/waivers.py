"""The file of waivers: rows of JSON in a list, which people write and review. Its rules are in `gate.waivers`."""

from __future__ import annotations

import json
from pathlib import Path

from pytest_slmserve.analysis.gate.waivers import EXAMPLE, Waiver, waivers_of
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.files import content


def read_waivers(path: Path) -> tuple[Waiver, ...]:
    """The waivers of a file, in the order written. Raises BadUsage for no file, no JSON, or what is no waiver."""
    try:
        rows = json.loads(content(path).decode("utf-8"))
    except OSError as error:
        raise BadUsage(f"the waivers {path} cannot be read: {error.strerror}", f"a file of {EXAMPLE}") from None
    except json.JSONDecodeError as error:
        raise BadUsage(f"{path}, line {error.lineno}: no JSON ({error.msg})", EXAMPLE) from None
    except (UnicodeDecodeError, RecursionError):
        raise BadUsage(f"{path} is no JSON text", EXAMPLE) from None
    return waivers_of(rows, str(path))
