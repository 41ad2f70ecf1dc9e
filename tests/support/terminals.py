"""A terminal of so many columns, for what is written only there."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence

WRITTEN_OVER = re.compile(r"\n([^\n]*)\x1b\[K\x1b\[1A\x1b\[\d+G")  # a line below the one that the cursor is on


def set_columns(descriptor: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def shown_on(columns: int, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """All that a command writes on a terminal with so many columns."""
    ours, theirs = pty.openpty()
    set_columns(theirs, columns)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.STDOUT, env=environment
    ) as process:
        os.close(theirs)
        text = b""
        try:
            while chunk := os.read(ours, 1 << 16):
                text += chunk
        except OSError:  # Linux ends a terminal that nobody has open any more so
            pass
        process.wait(60)
    os.close(ours)
    return text.decode("utf-8", "replace").replace("\r\n", "\n")


class Screen(io.StringIO):
    """A stream that says it is a terminal, of a width that is not known."""

    def isatty(self) -> bool:
        return True
