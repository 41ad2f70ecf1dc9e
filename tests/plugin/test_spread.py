"""`-n`: a worker for each GPU, here simulated ones; one archive and one report as from a run without."""

from __future__ import annotations

import shutil
from collections import Counter
from tempfile import TemporaryDirectory

import pytest
from inside import usage_error
from shipped import put

from pytest_slmserve.archive.store import read

pytest.importorskip("xdist")

SWEEPS = """
    import pytest

    def test_point(slm_point):
        assert slm_point.measure()

    @pytest.mark.slm(claim="throughput-plateau")
    def test_plateau(slm_claim):
        assert slm_claim()

    @pytest.mark.slm(models=("opt-1.3b",))
    def test_of_two_models(slm_session, slm_model):
        known = {m.spec.model for m in slm_session.results.measurements()}
        assert {"facebook/opt-125m", "facebook/opt-1.3b"} <= {*known, *(f"facebook/{name}" for name in known)}
"""
KILLED = """
    import os, pathlib, signal
    import pytest

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(item):
        once = pathlib.Path(str(item.config.rootpath)) / "killed"
        if item.name == "test_point[opt-1.3b-64]" and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
MODELS = (
    "--slm-simulate",
    "--slm-models=opt-125m,opt-1.3b",
    "--slm-concurrency=1,16,64,128,256",
    "-p",
    "no:cacheprovider",
)


@pytest.fixture
def spread(pytester):
    """Runs a file of sweeps by two workers, in a process of its own: `spread("--slm-repeats=3")`."""
    pytester.makepyfile(SWEEPS)
    return lambda *args: pytester.runpytest_subprocess(*MODELS, "-n2", *args)


def records(pytester, name=".slm/records.jsonl"):
    return read(pytester.path / name).measurements


def test_two_workers_make_one_archive_and_one_report(spread, pytester):
    result = spread("-v")
    result.assert_outcomes(passed=13)
    found = records(pytester)
    assert Counter(m.key for m in found) == dict.fromkeys({m.key for m in found}, 2) and len(found) == 20
    assert len({m.launch for m in found}) == 2, "an engine starts once"
    assert not (pytester.path / ".slm" / "records.jsonl.parts").exists()
    text = result.stdout.str()
    assert "[gw0]" in text and "[gw1]" in text and "test_point[opt-125m-64] " in text
    assert text.count("throughput-plateau: ") == 1 and text.count("measured: 5 points, 2 repeats each, 1 launch") == 2
    assert "whether engines on several GPUs disturbed each other was not looked at" in text


def test_an_engine_that_others_would_wait_for_is_divided(spread, pytester):
    """What reads it comes when both parts are there."""
    result = spread("--slm-models=opt-125m", "--slm-engine-arg=lasts_s=0.1")
    result.assert_outcomes(passed=6, skipped=1)
    found = records(pytester)
    assert set(Counter(m.key for m in found).values()) == {2} and len(found) == 10
    assert len({m.launch for m in found}) == 2
    assert len({(m.launch, m.load.concurrency) for m in found}) == 5, "all repeats of a point are of one launch"
    result.stdout.fnmatch_lines(["*measured: 5 points, 2 repeats each, 2 launches*", "*holds*opt-125m*plateau from*"])


AS_THEY_GO = {
    "adaptive": ("--slm-sweep=adaptive", ""),
    "a sweep": ("-v", "def test_as_it_goes(slm_sweep): slm_sweep(concurrency=[1, 16, 64])"),
    "a point and more": ("-v", "def test_more(slm_point, slm_measure): slm_point.measure(), slm_measure(1)"),
    "looks around": ("-v", "def test_seen(slm_point, slm_session): assert len(slm_session.results.repeats) == 5"),
}


@pytest.mark.parametrize("kind", AS_THEY_GO)
def test_what_an_engine_measured_is_not_measured_again_elsewhere(spread, pytester, kind):
    """An adaptive sweep goes by what it found, and a test that asks as it goes may ask for a point."""
    option, test = AS_THEY_GO[kind]
    pytester.makepyfile(f"{SWEEPS}\n    {test}\n")
    assert spread("--slm-models=opt-125m", option).ret == 0
    counted = Counter(m.key for m in records(pytester))
    assert set(counted.values()) <= {1, 2} and len({m.launch for m in records(pytester)}) == 1


def test_the_report_of_a_run_without_is_the_same(spread, pytester):
    def tables(result):
        return [line for line in result.outlines if line.lstrip()[:1].isdigit() and "*" in line]

    together = tables(spread("--slm-window=4"))
    alone = tables(pytester.runpytest_subprocess(*MODELS, "--slm-window=4", "--slm-records=alone.jsonl"))
    assert together == alone and len(together) == 10


def test_a_worker_that_is_killed_loses_one_item_and_nothing_is_measured_twice(spread, pytester):
    pytester.makeconftest(KILLED)
    result = spread()
    result.assert_outcomes(passed=13, failed=1)
    result.stdout.fnmatch_lines(["*crashed while running*test_point*opt-1.3b-64*"])
    found = records(pytester)
    assert set(Counter(m.key for m in found).values()) == {2} and len(found) == 20
    assert len({m.launch for m in found}) == 3, "the engine of the one that was killed starts anew"


def test_a_run_goes_on_by_what_is_there_and_by_what_workers_of_a_killed_run_have_left(spread, pytester):
    spread("-k", "125m").assert_outcomes(passed=6)
    folder = pytester.path / ".slm" / "records.jsonl.parts"
    folder.mkdir()
    shutil.move(pytester.path / ".slm" / "records.jsonl", folder / "gw0.jsonl")
    result = spread("--slm-resume")
    result.assert_outcomes(passed=13)
    result.stdout.fnmatch_lines(
        [
            "note: 10 measurements of workers that were stopped are in *records.jsonl now",
            "10 measurements were reused from .slm/records.jsonl: *",
        ]
    )
    assert len(records(pytester)) == 20 and not folder.exists()
    left = {m.launch for m in records(pytester) if "1.3b" in m.spec.model}
    assert len(left) == 2, "what is known takes no time, so the one engine that is left is divided"


JUDGED = """
    import pytest

    def test_point(slm_point):
        assert slm_point.measure()

    @pytest.mark.slm(claim="throughput-plateau")
    def test_plateau(slm_claim, request):
        verdict = slm_claim()
        with (request.config.rootpath / "judged").open("a") as file:
            print(*verdict.records, file=file)
        assert verdict
"""


TOGETHER = """
    import time
    import pytest

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item):
        def meet(where):
            (item.config.rootpath / f"{where} {point.case.model}").touch()
            while len([*item.config.rootpath.glob(f"{where} *")]) < 2:
                time.sleep(0.01)

        point = item.funcargs.get("slm_point")
        if point and point.case.concurrency == 1:
            point.session.engine(point.session.planner.spec(point.case.model))
            meet("begins")
        yield
        if point and point.case.concurrency == 256:
            meet("ends")
"""


def test_cells_alone_and_beside_others(spread, pytester):
    """What is measured alone joins the curves, so whatever judges these waits for it."""
    pytester.makepyfile(JUDGED)
    pytester.makeconftest(TOGETHER)
    put(pytester.path, "test_neighbours")
    result = spread()
    result.assert_outcomes(passed=14)
    assert "was not looked at" not in result.stdout.str()
    assert result.stdout.str().count("output tokens/s alone against beside others") == 2
    found = records(pytester)
    alone = [m for m in found if not m.neighbours]
    assert sorted(m.load.concurrency for m in alone) == [1, 1, 256, 256] and len(found) == 24
    assert {m.id for m in found} == {*(pytester.path / "judged").read_text("utf-8").split()}, "all that report judges"


def test_without_workers_nobody_is_beside(pytester):
    put(pytester.path, "test_neighbours")
    result = pytester.runpytest_subprocess(*MODELS, "-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["*compares what was measured beside others with the same alone: needs -n*"])


def test_an_engine_on_two_gpus_waits_for_both(spread, pytester):
    pytester.makepyfile(
        SWEEPS
        + """
    @pytest.mark.slm(models=("opt-350m",))
    def test_on_gpus(slm_gpus_point):
        assert slm_gpus_point.measure()
    """
    )
    result = spread("--slm-tensor-parallel-size=1,2", "--slm-models=opt-125m,opt-350m,opt-1.3b")
    assert result.parseoutcomes().get("errors", 0) == 0
    wide = [m for m in records(pytester) if m.spec.tensor_parallel_size == 2]
    assert wide and {m.neighbours for m in wide} == {0}


def test_nobody_waits_for_a_gpu_of_a_worker_that_waits_for_its_last_item(pytester):
    """Engines on one GPU of which a worker has the last cells, and knows not yet whether it reads in the end."""
    wide = (
        "--slm-models=opt-1.3b",
        "--slm-tensor-parallel-size=1,2",
        "--slm-concurrency=64,128,256",
        "--slm-repeats=1",
    )
    put(pytester.path, "test_tensor_parallel")
    chosen = "point or less_per or on_each"
    slow = "--slm-engine-arg=lasts_s=0.2"  # a worker has its cells for a while
    result = pytester.runpytest_subprocess(*MODELS, "-n2", *wide, slow, "-k", chosen, timeout=60)
    assert result.parseoutcomes() == {"passed": 9, "undecided": 2}
    found = {m.spec.tensor_parallel_size: m for m in records(pytester) if not m.replica}
    assert found[2].environment.cores == 2 * found[1].environment.cores
    result.stdout.fnmatch_lines(
        ["*64*2 replicas, a GPU each*", "*on 2 GPUs it serves 0.9[67]* times as much per GPU as on 1 GPU*"]
    )


def test_only_sweeps_that_items_ask_for_are_planned(pytester):
    """No sweep could have a load that does not fit. In the comparison some of its requests wait."""
    wide = ("--slm-models=opt-13b", "--slm-tensor-parallel-size=1,2", "--slm-concurrency=16,256", "--slm-repeats=1")
    put(pytester.path, "test_tensor_parallel")
    result = pytester.runpytest_subprocess(*MODELS, "-n2", *wide, "-k", "point")
    result.assert_outcomes(passed=5)
    assert "throughput-plateau" not in result.stdout.str()
    pytester.makepyfile(test_parallel=SWEEPS)
    result = pytester.runpytest_subprocess(*MODELS, "-n2", *wide)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stdout.str().count("256 requests in flight do not fit opt-13b: the KV cache holds 167") == 1


def test_a_plan_is_made_by_one_process_for_as_many_gpus(spread):
    result = spread("--slm-plan")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["GPU 0: *", "GPU 1: *", "spread by engine: *"])


REFUSED = {
    (*MODELS, "-n2", "--slm-gate"): "a gate compares two sides",
    (*MODELS, "-n2", "--slm-models=opt-2b"): "unknown model 'opt-2b'",
    (*MODELS, "-n99"): "each worker has a GPU of its own, and 8 GPUs visible",
    (
        *MODELS,
        "-n2",
        "--slm-tensor-parallel-size=1,2,4",
    ): "an engine on 4 GPUs is asked for, and the workers have 2 in all",
    (*MODELS, "--dist=load", "--tx=ssh=elsewhere"): "workers on other hosts see other GPUs",
    ("--slm-endpoint=http://h/v1/completions", "--slm-models=m", "-n2"): "load for each other at one server",
}


@pytest.mark.parametrize("options", REFUSED, ids=REFUSED.values())
def test_what_several_cannot_do(pytester, options):
    assert REFUSED[options] in usage_error(pytester.runpytest_inprocess(*options))


def test_what_is_found_wrong_when_items_are_made_is_told_once(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.slm(modle='opt-125m')\ndef test_it(slm_engine): pass")
    result = pytester.runpytest_subprocess(*MODELS, "-n2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stdout.str().count("has no modle") == 1 and "Traceback" not in result.stdout.str()


@pytest.mark.slow
def test_two_engines_on_two_halves_of_the_cpu(pytester, monkeypatch, vllm_here):
    pytester.makepyfile(
        """
    def test_point(slm_point):
        slm_point.measure()  # it may be unsteady: other tests work on these cores
    """
    )
    models = (
        "--slm-cpu",
        "--slm-models=opt-tiny,llama-tiny",
        "--slm-concurrency=4",
        "--slm-window=2",
        "--slm-repeats=1",
    )
    with TemporaryDirectory(prefix="slm-") as tmp:  # a lock of its own on the device; vLLM's sockets want a short path
        monkeypatch.setenv("TMPDIR", tmp)
        result = pytester.runpytest_subprocess(*models, "-n2", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)
    found = records(pytester)
    assert {m.spec.model for m in found} == {"opt-tiny", "llama-tiny"} and len({m.launch for m in found}) == 2
    assert {m.environment.cores for m in found} == {1}
