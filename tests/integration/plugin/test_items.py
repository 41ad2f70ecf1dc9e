"""Items in a run: one for each point, job and claim, each engine started once, each case measured once; the same again
where it is resumed; and what a run without a mode makes of them, its length, its header and its help.

What a marker, fixtures and options make of one item is told in tests/unit/plugin."""

import re

import pytest
from inner_runs import SWEEP

from pytest_slmserve.options.table import OPTS
from pytest_slmserve.plugin import SESSION, session_hooks

MIXED = """
    import pytest

    two = [pytest.param(n, marks=pytest.mark.slm(max_num_seqs=n)) for n in (8, 16)]

    @pytest.mark.slm(model="opt-1.3b")
    def test_first(slm_measure): assert slm_measure(2).valid

    @pytest.mark.slm(model="opt-125m", max_num_seqs=4)
    @pytest.mark.parametrize("limit", two)
    def test_limited(slm_engine, limit):
        assert (slm_engine.spec.model, slm_engine.spec.max_num_seqs) == ("opt-125m", limit)

    @pytest.mark.slm(model="opt-1.3b")
    def test_again(slm_engine, sharegpt): assert slm_engine.spec.model == "opt-1.3b" and len(sharegpt.requests) == 1024

    def test_sweep(slm_point): assert slm_point.measure()

    POINTS = [("opt-125m", 16), ("opt-350m", 4), ("opt-1.3b", 4)]

    @pytest.mark.slm(points=POINTS)
    def test_named(slm_point): assert slm_point.measure()

    @pytest.mark.slm(points=[("opt-1.3b", 4)])
    def test_of_others(slm_point): assert False

    SHORT = dict(lengths=(16, 32), ramp_up="burst")

    @pytest.mark.slm(points=[("opt-125m", n) for n in (1, 4, 8)], **SHORT)
    def test_short(slm_point): assert slm_point.measure()

    @pytest.mark.slm(claim="decode-stays-memory-bound", models=["opt-125m"], **SHORT)
    def test_claim(slm_claim):
        verdict = slm_claim()
        assert verdict.n == 6

    @pytest.mark.slm(model="opt-125m", lengths=(8, 32), ramp_up="burst")
    def test_own(sharegpt, slm_measure):
        assert (sharegpt.mean_prompt_tokens, sharegpt.mean_output_tokens) == (8, 32)
        assert slm_measure(8).valid

    @pytest.mark.slm(model="opt-350m", max_num_seqs=4)
    def test_narrow(slm_measure): assert slm_measure(2).valid

    @pytest.mark.slm(claim="kv-blocks-as-predicted", models=["opt-350m"])
    def test_of_the_options_engine(slm_claim):
        verdict = slm_claim()
        assert verdict and verdict.n == 4
"""
JOBS = """
    import pytest

    JOBS = {
        "gpu": [
            {"model": "opt-125m", "requests": 100, "lengths": (32, tokens), "rate": rate}
            for tokens in (8, 64)
            for rate in (float("inf"), 5)
        ]
    }
    HELD = [{"model": "opt-125m", "requests": 64, "lengths": (32, 32), "kv_requests": n} for n in (4, 64, None)]
    BOUND = [
        {"model": "opt-350m", "requests": 64, "lengths": (64, 16), "max_num_seqs": n, "gpu_memory": "40GiB"}
        for n in (16, 64)
    ]

    @pytest.mark.slm(jobs=JOBS)
    def test_job(slm_job_point): assert slm_job_point.measure()

    @pytest.mark.slm(jobs=JOBS)
    def test_job_again(slm_job_point): assert slm_job_point.measure()

    @pytest.mark.slm(claim="longer-outputs-fewer-requests", jobs=JOBS)
    def test_longer(slm_claim): assert slm_claim()

    @pytest.mark.slm(claim="throughput-follows-arrivals", jobs=JOBS)
    def test_follows(slm_claim): assert slm_claim()

    @pytest.mark.slm(jobs=HELD)
    def test_held(slm_job_point): assert slm_job_point.measure()

    @pytest.mark.slm(claim="throughput-grows-with-kv-blocks", jobs=HELD)
    def test_grows(slm_claim): assert slm_claim()

    @pytest.mark.slm(jobs=BOUND)
    def test_bound(slm_job_point): assert slm_job_point.measure()
"""
NO_FUNCTION = """
    import pytest

    def pytest_collect_file(parent, file_path):
        if file_path.suffix == ".txt":
            return OneItem.from_parent(parent, path=file_path)

    class OneItem(pytest.File):
        def collect(self):
            item = NoFunction.from_parent(self, name="checked")
            item.add_marker(pytest.mark.slm(model="opt-125m"))
            yield item

    class NoFunction(pytest.Item):
        def runtest(self): pass
        def reportinfo(self): return self.path, 0, self.name
"""
FEW = """--slm-simulate --slm-repeats=2 --slm-window=1 --slm-input-len=64 --slm-output-len=32 -v -rs
    --slm-engine-arg=t_inf=4000
    --slm-engine-arg=b_half=16"""
CHOSEN = "--slm-models=opt-125m,opt-350m --slm-concurrency=4,16"
FILES = {"conftest.py": NO_FUNCTION, "one.txt": "", "test_mixed.py": MIXED, "test_jobs.py": JOBS}


class Starts:
    """Keeps what the session's pool has started."""

    def pytest_sessionfinish(self, session):
        self.specs = list(session.config.stash[SESSION].devices.pool.starts)


@pytest.fixture(scope="module")
def everything(runs):
    """The run of all, and the engines that it started."""
    started = Starts()
    return runs.anew(FILES, FEW, CHOSEN, ".", plugins=[started]), started.specs


@pytest.fixture
def first(everything):
    return everything[0]


def test_each_engine_starts_once(everything):
    first, started = everything
    assert [name for name, found in first.outcomes.items() if found != "PASSED"] == ["test_of_others[-]"]
    assert first.ret == 0 and len(started) == len(set(started))
    assert [spec.max_num_seqs for spec in started if spec.model == "opt-1.3b"] == [1024]
    assert "checked PASSED" in first.out, "an item without fixtures measures nothing"
    order = list(first.outcomes)
    assert order.index("test_claim[opt-125m]") > max(order.index(f"test_short[opt-125m-{n}]") for n in (1, 4, 8))
    assert set(order[-6:]) >= {"test_longer[opt-125m]", "test_follows[opt-125m]", "test_grows[opt-125m]"}
    assert "test_named[opt-1.3b-4]" not in order and "test_bound[opt-350m-16-64-at-once-most-64-in-40GiB]" in order
    first.says("*none of its models is measured in this run*", "slmserve: 2 tests of opt-1.3b, as the marker has it:*")


def test_each_case_is_measured_once(first, runs):
    loops = [m for m in first.measured() if m.load.max_concurrency]
    usual = [(m.spec.model, m.load.concurrency) for m in loops if m.workload.mean_prompt_tokens == 64]
    planned = [(model, n) for model in ("opt-125m", "opt-350m") for n in (4, 16)]
    assert sorted(usual) == sorted([*planned, ("opt-1.3b", 2), ("opt-350m", 2)] * 2)
    seen = {(m.workload.mean_prompt_tokens, m.load.ramp_up) for m in loops}
    assert seen == {(64, "staggered"), (16, "burst"), (8, "burst")}
    jobs = [m for m in first.measured() if not m.load.max_concurrency]
    assert len(jobs) == 2 * (4 + 3 + 2) and len({m.key for m in jobs}) == 9
    assert {m.resolved.kv_blocks for m in jobs if m.workload.mean_prompt_tokens == 32} > {17, 257}
    bound = [m.spec for m in jobs if m.spec.model == "opt-350m"]
    assert {spec.max_num_seqs for spec in bound} == {16, 64} and all(s.kv_cache_bytes < 36 << 30 for s in bound)
    before, text = len(first.measured()), first.report()[1]
    assert "Jobs on simulated" in text and "longer-outputs-fewer-requests" in text
    again = runs.anew({}, FEW, CHOSEN, ". --slm-resume", folder=first.folder)
    assert (again.ret, again.outcomes, len(again.measured())) == (0, first.outcomes, before)


def test_plan_prices_each_engine_once(runs, monkeypatch):
    tests = " ".join(f"test_jobs.py::test_{name}" for name in ("job", "job_again", "longer"))
    text = runs({"test_jobs.py": JOBS}, FEW, CHOSEN, tests, "--slm-plan").out
    assert text.count("start opt-125m") == 1 and "test_longer[opt-125m] (measures nothing)" in text
    again = re.findall(r"test_job_again\[opt-125m-8-100-at-once\] \((.+)\)", text)
    assert again in (["0 s"], ["measures nothing"])
    assert "engine starts" not in runs(SWEEP, FEW, CHOSEN).out, "a short run says nothing"
    monkeypatch.setattr(session_hooks, "LONG_S", 0.0)
    long, plan = runs.anew(SWEEP, FEW, CHOSEN, "-k 4"), runs.anew(SWEEP, FEW, CHOSEN, "-k 4 --slm-plan")
    long.says("slmserve: *2 engine starts, 2 models*--slm-plan lists them")
    plan.says("*2 engine starts*")
    assert "lists them" not in plan.out
    ran = runs({}, "--pyargs pytest_slmserve.benchmarks.test_gate --slm-simulate --slm-gate --slm-plan")
    ran.says("*test_no_worse?opt-125m-throughput?*")


def test_options_come_from_every_source(runs, monkeypatch):
    monkeypatch.setenv("SLM_SEED", "2")
    ini = "[pytest]\nslm_seed = 3\nslm_window = 9\n"
    ran = runs.anew({"test_it.py": SWEEP, "pytest.ini": ini}, FEW, "--slm-plan")
    ran.says("slmserve: simulated, *sensors: simulated; *window (command line), *seed (environment)*")
    text = runs.anew({}, "--help", columns=80).out
    groups = re.findall(r"^slmserve: (.+):$", text, re.MULTILINE)
    assert groups == ["what to run", "load", "engine", "replicas", "gate", "telemetry", "records", "cluster"]
    assert all(opt.flag in text for opt in OPTS if not opt.ini_only) and "slm_gate_pairs" in text
    assert "share of the GPU memory that the engine may use; default: 0.9" in " ".join(text.split())
    marker = "@pytest.mark.slm(model='opt-125m', max_model_len=20)"
    runs(f"import pytest\n{marker}\ndef test_it(slm_measure): pass", FEW).refuses("test_it", "96", "20")
    ran = runs(FILES, "-rs test_mixed.py test_jobs.py")
    assert ran.counts.keys() == {"skipped"}
    ran.says("SKIPPED*--slm-gpu, --slm-cpu, --slm-simulate or --slm-endpoint*")
    monkeypatch.setenv("SLM_REQUIRE_GPU", "1")
    runs.anew(FILES, "test_mixed.py").refuses("SLM_REQUIRE_GPU=1")
