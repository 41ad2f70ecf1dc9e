"""What does the plugin cost a project that does not use it, and what does pytest-benchmark cost it? In CPU time.

    python studies/idle_cost.py --triples 30

Each triple runs pytest on one trivial test three times: without either plugin, with pytest-benchmark alone, and with
pytest-slmserve alone. The three take turns in being first, and no other plugin is loaded. A plugin's cost is the median
over triples of its CPU time (user and system, of all processes) less that of the plain run beside it. So a machine that
grows slower meanwhile, or has other work, changes all three. The study takes a minute on an idle machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from math import nan
from pathlib import Path
from statistics import median, quantiles

from common import cpu_s, parser_of

BOUND_MS, BOUND_RATIO = 15.0, 0.5
PLAIN, THEIRS, OURS = "plain pytest", "pytest-benchmark", "pytest-slmserve"
PLUGINS = {PLAIN: None, THEIRS: "benchmark", OURS: "slmserve"}  # names of their entry points
HEAVY = ("vllm", "torch", "numpy", "psutil", "pynvml", "transformers", "vl_convert", "tabulate")
LOOK = f"import sys, atexit\natexit.register(lambda: print('heavy:', [m for m in {HEAVY!r} if m in sys.modules]))\n"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--triples", type=int, default=30)
    triples = parser.parse_args().triples
    installed = sorted({entry.name for entry in entry_points(group="pytest11")})
    if missing := {name for name in PLUGINS.values() if name} - set(installed):
        parser.error(f"not installed here: {', '.join(sorted(missing))}")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a checkout has no compiled files yet, an installation has
    spent_ms: dict[str, list[float]] = {arm: [] for arm in PLUGINS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_nothing.py").write_text("def test_nothing(): pass\n")
        (folder / "conftest.py").write_text(LOOK)
        words = {
            arm: ["pytest", "-q", "-p", "no:cacheprovider", *(f"-pno:{each}" for each in installed if each != plugin)]
            for arm, plugin in PLUGINS.items()
        }
        shown = subprocess.run([sys.executable, "-m", *words[OURS]], cwd=folder, capture_output=True, text=True).stdout
        print(shown.splitlines()[-1])
        for number in range(-1, triples):
            first = number % len(words)
            for arm in [*words, *words][first : first + len(words)]:
                ms = 1e3 * cpu_s(words[arm], folder)
                if number >= 0:  # the first triple fills caches
                    spent_ms[arm].append(ms)
    print(f"{PLAIN}: {median(spent_ms[PLAIN]):.1f} ms of CPU time (median of {triples} triples)")
    adds = {}
    for arm in (THEIRS, OURS):
        extra = [one - plain for one, plain in zip(spent_ms[arm], spent_ms[PLAIN])]
        adds[arm] = median(extra)
        low, _, high = quantiles(extra, n=4) if len(extra) > 1 else extra * 3
        print(f"{arm} adds {adds[arm]:.1f} ms (half of the triples: {low:.1f} to {high:.1f})")
    print(f"pytest-slmserve: {'at most' if adds[OURS] <= BOUND_MS else 'ABOVE'} {BOUND_MS:.0f} ms")
    ratio = adds[OURS] / adds[THEIRS] if adds[THEIRS] > 0 else nan  # so few triples that all is noise
    print(f"ratio of medians {ratio:.2f}: {'at most' if ratio <= BOUND_RATIO else 'ABOVE'} {BOUND_RATIO:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
