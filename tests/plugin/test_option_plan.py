"""--slm-plan prints items, engines, order and expected seconds, and runs nothing."""

from inside import SWEEP


def test_nothing_runs(sweep, pytester):
    result = sweep("--slm-plan")
    assert result.ret == 0
    assert not (pytester.path / ".slm").exists()
    assert not any("passed" in line for line in result.outlines)


def test_items_stand_in_order_engine_by_engine_with_claims_last(pytester):
    pytester.makepyfile(SWEEP)
    result = pytester.runpytest_inprocess(
        "--slm-simulate", "--slm-plan", "--slm-models=opt-125m,opt-350m", "--slm-concurrency=1,2"
    )
    result.stdout.fnmatch_lines(
        [
            "*0:00  start opt-125m (simulated, 0 s)",
            "*test_point?opt-125m-1? (* s)",
            "*test_point?opt-125m-2? (* s)",
            "*test_plateau?opt-125m? (measures nothing)",
            "*start opt-350m (simulated, 0 s)",
            "*test_point?opt-350m-1? (* s)",
            "*test_point?opt-350m-2? (* s)",
            "*test_plateau?opt-350m? (measures nothing)",
            "*end: 6 items",
        ],
        consecutive=True,
    )


def test_what_an_archive_answers_costs_nothing(sweep, kept):
    sweep()
    result = sweep("--slm-plan", "--slm-resume")
    result.stdout.fnmatch_lines(["*test_point?opt-125m-256? (measures nothing)"])
    assert " start " not in result.stdout.str(), "no engine"
