"""One call on a file fails, the first, the second, and so on, as SQLite tests it: in a process whose calls are ours.

Run by `python nth_call.py FOLDER WRITER ERROR`, with the library of `nth_call.c` loaded. Prints how many runs there
were, and a sentence for each that was not answered well, as JSON.
"""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
HALF = "half of a write"
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, HALF: 0}
MOST = 400  # calls of one run


def failures(folder: Path, writer: str, error: str) -> tuple[int, list[str]]:
    """How many runs of a writer there were, in each of which another call failed, and what was wrong with some."""
    library = folder / "nth_call.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "nth_call.c", "-ldl"], check=True)
    words = [sys.executable, str(HERE / "nth_call.py"), str(folder), writer, error]
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        words, env=os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True
    )
    count, wrong = json.loads(done.stdout)
    return count, wrong


def each_failure(folder: Path, writer: str, error: str) -> Iterator[str]:
    """Yield what was wrong with each run, or ""."""
    from campaign import MADE, SECOND, put_ready, writing
    from judged import Case

    case, told = Case(folder), folder / "told"
    put_ready(case, writer)
    for number in range(1, MOST):
        told.unlink(missing_ok=True)
        work = writing(case, writer)

        def planted(number: int = number, work: Callable[[], int] = work) -> int:
            os.environ |= {"SLM_BELOW": f"{folder}/out/", "SLM_TOLD": str(told)}
            os.environ |= {"SLM_ERRNO": str(ERRORS[error]), "SLM_NTH": str(number)}
            return work()

        seen = case.fork(planted)
        if not told.exists():
            return
        second = next(case.temporary.glob(SECOND), None)
        case.records = str(second or f"out/{'t' if writer == 'torn' else 'r'}.jsonl")
        try:
            kept = seen.text.count(MADE)
            case.judge("n-th call", seen, (0, 1, 3, 4, 10), kept=kept, may_stay=[SECOND])
            assert writer != "four" or kept == (0 if seen.status == 4 else 4), seen.text
            yield ""
        except AssertionError as wrong:
            yield f"== call {number} of {writer}, {error}: {told.read_text()}{wrong}"
        if second:
            second.unlink()
    raise AssertionError(f"{MOST} calls")


if __name__ == "__main__":
    found = list(each_failure(Path(sys.argv[1]), *sys.argv[2:]))
    print(json.dumps([len(found), list(filter(None, found))]))
