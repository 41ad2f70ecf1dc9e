"""One family of errors: what was seen, then what to type; and files, and JSON of others, as we read them, with errors
that name them."""

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
    """Return a hint as it is printed: a sentence as it is, and a command, an option or a value after "try:"."""
    return hint if hint[:1].isupper() and hint.endswith(".") else f"try: {hint}"


class SlmError(Exception):
    """A problem that the user can act on, in one sentence, and what to do about it. Both may repeat what a server, a
    file or a log says: a terminal shall not obey that."""

    layout: ClassVar[str] = ""  # characters that move the cursor and stay as they are

    def __init__(self, problem: str, hint: str = "") -> None:
        from pytest_slmserve.schema.printable import printable  # its patterns cost an idle run more than this module

        problem, hint = printable(problem, self.layout), printable(hint, self.layout)
        super().__init__(f"{problem}\n  {printed_hint(hint)}" if hint else problem)
        self.problem = problem
        self.hint = hint

    @property
    def cause(self) -> str:
        """The problem without the end of a log, which was shown once."""
        return self.problem.partition(ENDS_WITH)[0]


def to_install(extra: str) -> str:
    """Return the command that installs the packages of an extra, by their own names: this one is on no index, and a
    stranger could take its name there."""
    from importlib.metadata import requires

    needed = [text.partition(";") for text in requires("pytest-slmserve") or ()]
    packages = [f"'{name.strip()}'" for name, _, marker in needed if f'extra == "{extra}"' in marker.replace("'", '"')]
    return f"pip install {' '.join(packages)}"


# What is raised by reading plain values of any kind from a file of ours.
UNUSABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


@contextmanager
def naming(who: str, kind: type[SlmError] = SlmError) -> Iterator[None]:
    """Context manager that raises errors of this kind again, with `who` before their problem."""
    try:
        yield
    except kind as error:
        raise type(error)(f"{who}: {error.problem}", error.hint) from error


@contextmanager
def of_a_command(*kinds: type[SlmError], records: str = "--records") -> Iterator[None]:
    """Errors of these kinds name options of a command: those of pytest without our prefix. records: of the archive."""
    try:
        yield
    except kinds as error:
        hint = error.hint.replace("--slm-records", records).replace("--slm-", "--")
        hint = re.sub(r"-o slm_(\w+)", lambda name: f"--{name[1].replace('_', '-')}", hint)
        raise type(error)(error.problem, hint) from None


class BadUsage(SlmError):
    """An option, marker or specification that cannot be carried out; exit status 4 on a command line."""


class BadDataset(SlmError):
    """A file of conversations that is not ShareGPT, or ends too early."""


class BadArchive(SlmError):
    """An archive line that cannot be read, or was written by a newer release."""


class DeviceBusy(BadUsage):
    """Another run holds the device: two at once would measure each other."""


class EngineFailed(SlmError):
    """An engine that did not start, or ended before its work was done; with the end of its log."""

    layout = "\n\t"


class DoesNotFit(SlmError):
    """A load for which an engine, now that it runs, has no room in its KV cache."""


class SensorFailed(SlmError):
    """A source of telemetry that is not there, or cannot answer any more."""


class TooFewPoints(SlmError):
    """A law cannot be fitted, or a claim not judged, from so few points."""


Platform = Literal["cuda", "cpu", "simulated", "remote"]  # remote: whatever answers at a URL
LoadFormat = Literal["dummy", "auto"]
# Into vLLM's engine itself, by HTTP into its server, or into any other, or into Transformers' generate().
Interface = Literal["engine", "server", "endpoint", "transformers"]
OwnInterface = Literal["engine", "server"]  # of an engine that is started here
Source = Literal["lengths", "sharegpt", "trace", "trace-lengths"]
Rule = Literal["human-first", "vllm"]
Kind = Literal["generate", "embed", "classify", "rerank"]  # of what is asked of a model; see `schema.specs.Request`
RampUp = Literal["staggered", "burst"]
Traffic = Literal["uniform", "zipf"]  # which adapters requests ask for
Suite = Literal["core", "papers", "all"]  # of the shipped tests; each has those before it
Sweeping = Literal["full", "adaptive"]  # which of the planned loads are measured
Detail = Literal["summary", "tables", "all"]  # of what is printed of a run
Side = Literal["baseline", "candidate"]  # of a gate
Batching = Literal["none", "static", "dynamic"]  # of Transformers; vLLM batches continuously
Caches = Literal["warm", "cold"]  # of compiled code, at a launch of a gate
Launches = Literal["together", "start", "apart"]  # of the sides of a gate, on one device; start: and nothing else
OwnSharing = Literal["time-slicing", "mps", "mig", "gpus"]  # how several engines share one device; gpus: one for each
Sharing = Literal["time-slicing", "mps", "mig", "gpus", "urls"]  # urls: of endpoints; what they share is not told


NO_FILE = "it is a device or a pipe, not a file"


def regular(path: str, flags: int) -> int:
    """An opener for `open` that takes files only: a FIFO would be waited for, a device may have no end. A link is
    followed, as is right for a file that the user named."""
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
    """An opener for `open` of a file whose place others may have taken: it follows no link, takes no file that has
    another name too, and empties nothing before it knows that."""
    descriptor = regular(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it has another name too", path)
    if flags & os.O_TRUNC:
        os.ftruncate(descriptor, 0)
    return descriptor


def check_place(path: Path) -> None:
    """Raise OSError if a folder, a device or a pipe is where a file is to be put. Of a link the link is replaced."""
    mode = path.lstat().st_mode if os.path.lexists(path) else stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise OSError(errno.EINVAL, NO_FILE, str(path))


def write_file(path: Path, data: str | bytes) -> None:
    """Write a whole file under a random name beside it, and rename that: nobody sees a part, two writers do not mix,
    and what a link there names stays as it is. Raises OSError; see `check_place`."""
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
    """Return all bytes of a file. most: so many at most. Raises OSError, also where it is larger than that or the
    memory."""
    try:
        with open(path, "rb", opener=regular) as file:
            if most is not None and os.fstat(file.fileno()).st_size > most:
                raise OSError(errno.EFBIG, f"it is larger than {most / 10**6:g} MB", str(path))
            return file.read()
    except (MemoryError, OverflowError):
        raise OSError(errno.ENOMEM, "it is larger than the memory", str(path)) from None


LARGEST_JSON = 100_000_000  # bytes of a file or text: as much as the head of safetensors may have
DEEPEST_JSON = 100  # levels: Python reads more than its own functions can walk through
_DECODER = json.JSONDecoder()


def read_json(path: Path, hint: str, name: str = "") -> Any:
    """Return the value of a file of others, as `json_value` reads it. name: told in place of its path. Raises
    BadUsage."""
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
    """Return the value of a text of others that is JSON and nothing more. Of a key that stands there twice the last is
    read, and NaN and Infinity are, as Python writes them. kept: in a record, so neither they are, nor what is no
    Unicode. Raises JSONDecodeError, or ValueError that says what is wanted."""
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
    """Return the value that begins at this place of a text of others, and where it ends; no place: all of it is the
    value. Raises as `json_value`."""
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
    """Lock an open file until it is closed, and return whether that could be: if another holds the lock nobody waits.
    shared: together with other shared locks. Raises OSError if the file system has no locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_file(path: Path) -> bool:
    """Return whether it names a file; a name that no file can have does not."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def user_cache(name: str = "pytest-slmserve") -> Path:
    """Return a folder in the user's cache by the XDG Base Directory Specification, for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / name
