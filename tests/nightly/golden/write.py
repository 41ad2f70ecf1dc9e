"""Rewrite the golden files of the archives whose name contains a NAME, or all of them; print the lines that change.

python tests/nightly/golden/write.py [NAME ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from golden import rewrite

if __name__ == "__main__":
    rewrite(sys.argv[1:])
