"""What does the plugin cost a project that does not use it? Prints CPU times of plain pytest runs, with and without.

    python benchmarks/idle_cost.py --pairs 30

Each pair runs `pytest` on one trivial test with the plugin idle and with `-p no:slmserve`, in alternating order.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

BOUND_MS = 15.0
HEAVY = ("vllm", "torch", "numpy", "psutil", "pynvml", "transformers", "matplotlib", "tabulate")
LOOK = f"import sys, atexit\natexit.register(lambda: print('heavy:', [m for m in {HEAVY!r} if m in sys.modules]))\n"


def cpu_ms(folder: Path, *arguments: str) -> float:
    """CPU time, user and system, of one run and its children, in milliseconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_nothing.py").write_text("def test_nothing(): pass\n")
        (folder / "conftest.py").write_text(LOOK)
        shown = subprocess.run([sys.executable, "-m", "pytest"], cwd=folder, capture_output=True, text=True).stdout
        print(shown.splitlines()[-1])
        with_it, without = [], []
        for number in range(-1, pairs):
            runs = [(with_it, ()), (without, ("-p", "no:slmserve"))]
            for times, arguments in runs if number % 2 else reversed(runs):
                spent = cpu_ms(folder, *arguments)
                if number >= 0:  # the first pair fills caches
                    times.append(spent)
    extra = median(a - b for a, b in zip(with_it, without))
    print(f"idle plugin {median(with_it):.1f} ms, without {median(without):.1f} ms of CPU time ({pairs} pairs)")
    print(f"median of differences {extra:.1f} ms: {'at most' if extra <= BOUND_MS else 'ABOVE'} {BOUND_MS:.0f} ms")


if __name__ == "__main__":
    main()
