"""Errors that the user can fix, types of option values, and functions that read and write files and JSON safely."""

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

ENDS_WITH = " ends with\n"  # between the path of a log and its last lines


def printed_hint(hint: str) -> str:
    """Return a hint as it is printed: a sentence unchanged, anything else after "try:"."""
    return hint if hint[:1].isupper() and hint.endswith(".") else f"try: {hint}"


class SlmError(Exception):
    """Base class of errors that the user can fix: the problem in one sentence, and a hint.

    Control characters are escaped, because both may quote a server, a file or a log.
    """

    layout: ClassVar[str] = ""  # characters that move the cursor and stay as they are

    def __init__(self, problem: str, hint: str = "") -> None:
        from pytest_slmserve.schema.printable import printable  # its patterns cost an idle run more than this module

        problem, hint = printable(problem, self.layout), printable(hint, self.layout)
        super().__init__(f"{problem}\n  {printed_hint(hint)}" if hint else problem)
        self.problem = problem
        self.hint = hint

    @property
    def cause(self) -> str:
        """Problem without the last lines of a log."""
        return self.problem.partition(ENDS_WITH)[0]


def to_install(extra: str) -> str:
    """Return the command that installs the packages of an extra.

    It names the packages, because this project is on no index, and a stranger could take its name.
    """
    from importlib.metadata import requires

    needed = [text.partition(";") for text in requires("pytest-slmserve") or ()]
    packages = [f"'{name.strip()}'" for name, _, marker in needed if f'extra == "{extra}"' in marker.replace("'", '"')]
    return f"pip install {' '.join(packages)}"


# Errors that arise if a file of ours has values of unexpected kinds.
UNUSABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


@contextmanager
def naming(who: str, kind: type[SlmError] = SlmError) -> Iterator[None]:
    """Context manager that puts `who` in front of the problem of errors of this kind."""
    try:
        yield
    except kind as error:
        raise type(error)(f"{who}: {error.problem}", error.hint) from error


@contextmanager
def of_a_command(*kinds: type[SlmError], records: str = "--records") -> Iterator[None]:
    """Context manager that rewrites pytest's options in hints to a command's, such as `--slm-x` to `--x`.

    Args:
        records: replaces `--slm-records`.
    """
    try:
        yield
    except kinds as error:
        hint = error.hint.replace("--slm-records", records).replace("--slm-", "--")
        hint = re.sub(r"-o slm_(\w+)", lambda name: f"--{name[1].replace('_', '-')}", hint)
        raise type(error)(error.problem, hint) from None


class BadUsage(SlmError):
    """Option, marker or specification that cannot be carried out (exit status 4)."""


class BadDataset(SlmError):
    """Dataset file that is not ShareGPT, or ends too early."""


class BadArchive(SlmError):
    """Results file that cannot be read, or has the format of another release."""


class DeviceBusy(BadUsage):
    """Device that another run uses: two runs would disturb each other."""


class EngineFailed(SlmError):
    """Engine that did not start or ended early, with the last lines of its log."""

    layout = "\n\t"


class DoesNotFit(SlmError):
    """Load that does not fit in the KV cache of the running engine."""


class SensorFailed(SlmError):
    """Source of telemetry that is missing or stopped answering."""


class TooFewPoints(SlmError):
    """Too few points to fit the saturation model or to evaluate a claim."""


Platform = Literal["cuda", "cpu", "simulated", "remote"]  # remote: a server at a URL
LoadFormat = Literal["dummy", "auto"]
# vLLM's engine without HTTP, vLLM's server, any other HTTP server, or Transformers' generate().
Interface = Literal["engine", "server", "endpoint", "transformers"]
OwnInterface = Literal["engine", "server"]  # of an engine that the plugin starts
Source = Literal["lengths", "sharegpt", "trace", "trace-lengths"]
Rule = Literal["human-first", "vllm"]
Kind = Literal["generate", "embed", "classify", "rerank"]  # of requests; see `schema.specs.Request`
RampUp = Literal["staggered", "burst"]
Traffic = Literal["uniform", "zipf"]  # distribution of requests over adapters
Suite = Literal["core", "papers", "all"]  # of built-in tests; each includes the suites before it
Sweeping = Literal["full", "adaptive"]  # which of the planned loads are measured
Detail = Literal["summary", "tables", "all"]  # of the printed report
Side = Literal["baseline", "candidate"]  # of a gate
Batching = Literal["none", "static", "dynamic"]  # of Transformers; vLLM batches continuously
Caches = Literal["warm", "cold"]  # compile cache at a launch of a gate
Launches = Literal["together", "start", "apart"]  # of the sides of a gate, on one device; start: only start-up
OwnSharing = Literal["time-slicing", "mps", "mig", "gpus"]  # how several engines share a device; gpus: one for each
Sharing = Literal["time-slicing", "mps", "mig", "gpus", "urls"]  # urls: endpoints, whose devices are unknown


NO_FILE = "it is a device or a pipe, not a file"


def regular(path: str, flags: int) -> int:
    """Return a descriptor: an `opener` for `open` that refuses FIFOs and devices, which may block or have no end."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        why = {errno.ENXIO: NO_FILE, errno.ELOOP: "it is a symbolic link"}  # ENXIO: of a FIFO that nobody reads
        raise OSError(error.errno, why.get(error.errno or 0, error.strerror), path) from None
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # `open` itself refuses a folder
        os.close(descriptor)
        raise OSError(errno.EINVAL, NO_FILE, path)
    return descriptor


def single(path: str, flags: int) -> int:
    """Return a descriptor as `regular` does, but refuse links and files with a second name, and truncate only then."""
    descriptor = regular(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it has another name too", path)
    if flags & os.O_TRUNC:
        os.ftruncate(descriptor, 0)
    return descriptor


def check_place(path: Path) -> None:
    """Raise OSError if a folder, a device or a pipe is at the path of a new file; `write_file` replaces a link."""
    mode = path.lstat().st_mode if os.path.lexists(path) else stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise OSError(errno.EINVAL, NO_FILE, str(path))


def write_file(path: Path, data: str | bytes) -> None:
    """Write a file under a random name, then rename it: readers see no part, and a link's target stays as it is.

    Raises:
        OSError: also as in `check_place`.
    """
    check_place(path)
    new = path.with_name(f".{os.urandom(8).hex()}.new")
    try:
        with new.open("xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        new.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            new.unlink()


def content(path: Path, most: int | None = None) -> bytes:
    """Return all bytes of a file. Raise OSError also if it is larger than `most` bytes or than the memory."""
    try:
        with open(path, "rb", opener=regular) as file:
            if most is not None and os.fstat(file.fileno()).st_size > most:
                raise OSError(errno.EFBIG, f"it is larger than {most / 10**6:g} MB", str(path))
            return file.read()
    except (MemoryError, OverflowError):
        raise OSError(errno.ENOMEM, "it is larger than the memory", str(path)) from None


LARGEST_JSON = 100_000_000  # bytes of a file or text: the largest header of safetensors
DEEPEST_JSON = 100  # levels, because Python parses deeper values than its own recursive functions can handle
_DECODER = json.JSONDecoder()


def read_json(path: Path, hint: str, name: str = "") -> Any:
    """Return the value of a JSON file that others wrote, named `name` in errors, or raise BadUsage with this hint."""
    name = name or str(path)
    try:
        return json_value(content(path, LARGEST_JSON))
    except OSError as error:
        raise BadUsage(f"{name} cannot be read: {error.strerror}", hint) from None
    except json.JSONDecodeError as error:
        raise BadUsage(f"{name} is not JSON text: line {error.lineno}, {error.msg}", hint) from None
    except ValueError as wanted:
        raise BadUsage(f"{name} is not {wanted}", hint) from None


def json_value(text: str | bytes, *, kept: bool = False) -> Any:
    """Return the value of a JSON text that others wrote; as in Python, NaN and Infinity are numbers.

    Args:
        kept: for a record, so NaN, Infinity and invalid Unicode are errors.

    Raises:
        ValueError: with the kind of text that is accepted, or JSONDecodeError if the text is not JSON.
    """
    if len(text) > LARGEST_JSON:
        raise ValueError(f"JSON of at most {LARGEST_JSON // 10**6} MB")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError("JSON text in UTF-8") from None
    found, _ = json_at(text.strip())
    try:
        if kept:
            json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise ValueError("JSON of finite numbers and Unicode") from None
    return found


def json_at(text: str, at: int | None = None) -> tuple[Any, int]:
    """Return the JSON value at this index of a text, and the index of its end; None is for the whole text."""
    deep = ValueError(f"JSON of at most {DEEPEST_JSON} levels")
    try:
        found, end = (_DECODER.decode(text), len(text)) if at is None else _DECODER.raw_decode(text, at)
    except RecursionError:
        raise deep from None
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python's own limit, because reading them takes time by their square
        raise ValueError("JSON of numbers with at most some thousand digits") from None
    if text.count("[", at, end) + text.count("{", at, end) <= DEEPEST_JSON:
        return found, end
    level = [found]
    for _ in range(DEEPEST_JSON):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    if level:
        raise deep
    return found, end


def try_lock(file: IO[Any], *, shared: bool = False) -> bool:
    """Lock an open file until it is closed; return False at once if another lock prevents that."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_file(path: Path) -> bool:
    """Return whether this path is a file; False also for an impossible name."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def user_cache(name: str = "pytest-slmserve") -> Path:
    """Return a folder in the user's cache, by the XDG Base Directory Specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / name
