"""While a run measures, in each of its modes, its processes listen on the loopback address alone, and nobody else can
look into its folders. A run on Ray is in tests/integration/ray."""

import listeners
import pytest
from campaign import ENGINES, pytest_run
from judged import Case

TEST = """
def test_point(slm_measure):
    slm_measure(2, repeats=1)
"""
WINDOW = ("--slm-window=0.3", "--slm-records=r.jsonl", "--slm-repeats=1", "test_it.py")
ENDPOINT = ("--slm-models=m", "--slm-input-len=8", "--slm-output-len=4", "--slm-endpoint={}/good/v1/completions")


@pytest.mark.parametrize(("words", "servers", "processes"), [
    (ENGINES["simulated"], 0, 1), (ENGINES["stand-in"], 0, 2), ((*ENGINES["stand-in"], "--slm-interface=server"), 1, 3),
    (ENDPOINT, 0, 2),
], ids=["simulated", "engine", "server", "endpoint"])  # fmt: skip
def test_run_listens_on_loopback_only(case: Case, url: str, words, servers: int, processes: int) -> None:
    listeners.write_conftest(case.folder, listeners.AFTER_EACH)
    (case.folder / "test_it.py").write_text(TEST)
    seen = case.fork(pytest_run([*(word.format(url) for word in words), *WINDOW]))
    case.judge("listeners", seen, (0,))
    listeners.check(case.folder, servers, processes)
