"""One engine of vLLM's CPU backend, started once: it keeps the contract of all engines and serves a run of pytest from
end to end; its variables, its processes and its profiler; and what is said when its core dies, the last test."""

import gzip
import json
import os
import re
import signal
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from contract import Contract
from interfaces import small_workload
from processes import gone, group
from real_engine import NOTHING_COMPILED

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.advice.subjects import BLOCK_TOLERANCE
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines import pool
from pytest_slmserve.engines.base import PROFILE_FOLDER
from pytest_slmserve.engines.server import OfflineEngine
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.planner import engine_spec
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.kv_cache import predicted_blocks
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop
from pytest_slmserve.telemetry.host import probe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here"), pytest.mark.xdist_group("real offline")]
ASKED = {"cpu": True, "models": "opt-tiny", "max_num_seqs": "8"}
WORDS = ("--slm-cpu", "--slm-models=opt-tiny", "--slm-max-num-seqs=8", "--slm-concurrency=1,8", "--slm-repeats=1")
POINTS = """
    import pytest

    def test_point(slm_point):
        assert slm_point.measure()

    @pytest.mark.slm(claim="kv-blocks-as-predicted")
    def test_blocks(slm_claim):
        assert slm_claim()
"""


@pytest.fixture(scope="module")
def traces():
    """The folder that its profiler writes to."""
    with TemporaryDirectory(prefix="slm-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def engine(vllm_here, traces):
    """As `--slm-cpu` asks for it."""
    spec = engine_spec(read_options(ASKED, {}, {}), "cpu", "opt-tiny", probe("cpu").environment)
    own = {PROFILE_FOLDER: str(traces), **NOTHING_COMPILED}
    with closing(OfflineEngine(spec, extra_env=own).start()) as found:
        yield found


class TestContract(Contract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request):
        return request.getfixturevalue("engine")


def test_vllm_knows_our_variables(engine):
    """The engine core is forked and does not import vLLM once more: most of its memory is that of the worker."""
    log = engine.child.log.read_text("utf-8", errors="replace")
    assert "(EngineCore" in log and "Unknown vLLM environment variable" not in log
    processes = [Path("/proc", str(pid)) for pid in group(engine.child.process.pid)]
    [core] = [one for one in processes if b"VLLM::EngineCore" in (one / "cmdline").read_bytes()]
    shared = re.search(r"Shared_Dirty: +(\d+) kB", (core / "smaps_rollup").read_text())
    assert shared and int(shared[1]) > 100_000


class Lent:
    """The engine of this module, to a run that neither starts nor stops it."""

    def __init__(self, engine, spec):
        assert spec == engine.spec, "what the run asks for is what is here"
        self._engine = engine

    def start(self, on_wait=None):
        return self

    def close(self):
        self._engine = None

    def __getattr__(self, name):
        return getattr(self._engine, name)


@pytest.fixture
def finished(engine, pytester, monkeypatch):
    """A run of pytest on this engine, over two points."""
    monkeypatch.setattr(pool, "OfflineEngine", lambda spec, **_: Lent(engine, spec))
    monkeypatch.setattr("tempfile.tempdir", str(pytester.mkdir("tmp")))  # for its lock
    pytester.makepyfile(POINTS)
    return pytester.runpytest_inprocess(*WORDS, "-oslm_report=tables", "-p", "no:cacheprovider", "-v")


def test_report_repeats_finished_run(finished, engine, pytester, capsys):
    """Points, records and claims are the same in a report without vLLM."""
    finished.assert_outcomes(passed=3)
    found = read(records := pytester.path / ".slm/records.jsonl").measurements
    assert {m.load.concurrency for m in found} == {1, 8} and {m.launch for m in found} == {engine.launch}
    assert [checked[:2] for m in found if any((checked := check(m))[:2])] == []
    assert abs(found[0].resolved.kv_blocks - predicted_blocks(found[0].spec, found[0].resolved)) <= BLOCK_TOLERANCE
    rates = {m.load.concurrency: sum(m.run.steps.new_tokens) / m.run.steps.time_s[-1] for m in found}
    assert rates[1] < rates[8], "a larger load gives more throughput"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", None)
        capsys.readouterr()
        assert main(["report", str(records), "--show", "tables"]) in (0, 1, 10)
    rows = [line for line in finished.outlines if re.match(r" +[18] .*(yes|noisy|ok)$", line.rstrip())]
    again = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
    assert len(rows) >= 2 and {row.rstrip() for row in rows} <= again


def test_profile_trace_has_load_steps(engine, traces):
    workload = small_workload(requests=64, output_tokens=16)
    assert engine.profile(workload, ClosedLoop(4, window_s=1.0)) is None
    (trace,) = traces.rglob("*.pt.trace.json*")
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    # two steps of about 18: how many more fit into the profiled time depends on what else the machine does
    assert sum(name == "aten::linear" or "mm" in name for name in names) > 36
    assert engine.run(workload, ClosedLoop(4, window_s=0.5)).failures == 0, "it goes on serving"


def test_killed_engine_core_is_failure(engine):
    """The last one on this engine: it does not survive."""
    worker = engine.child.process.pid
    workload = small_workload(requests=16, output_tokens=32)
    assert engine.run(workload, OpenLoop(requests=2)).failures == 0
    cores = set(group(worker)) - {worker}
    cores -= {pid for pid in cores if b"guardian.py" in Path(f"/proc/{pid}/cmdline").read_bytes()}
    assert cores

    def kill(progress):
        while cores:
            os.kill(cores.pop(), signal.SIGKILL)

    with pytest.raises(EngineFailed) as caught:
        engine.run(workload, ClosedLoop(4, window_s=60.0), kill)
    assert "  | " in caught.value.problem and not engine.ready
    engine.child.keep_log = False
    engine.close()
    assert gone(worker)
