"""A session measures what is missing, keeps it at once, resumes what is valid, and says what it did; a sweep goes in
rounds, on until its claims are decided or its budget is spent, and an adaptive one measures what it needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from simulated_sessions import FEW_STEPS, MODEL, judged, point, records_of

from pytest_slmserve.analysis.metrics.validity import check, problems, trustworthy
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.archive.store import read
from pytest_slmserve.commands.report import judged_again
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.planner import check_there
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.screen import tables
from pytest_slmserve.report.sweeps import skip_note
from pytest_slmserve.run import executor
from pytest_slmserve.run import session as module
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.run.session import Rounds, Session, Sweeps
from pytest_slmserve.schema.errors import BadArchive, BadUsage, EngineFailed
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import ClosedLoop
from pytest_slmserve.telemetry.host import Host

PLATEAU = "throughput-plateau"


@pytest.fixture
def opened(opened):
    """Opens sessions of few steps on one archive; options go by their names."""
    return lambda **given: opened(**{"concurrency": "4,8,16", **FEW_STEPS, **given})


def stored(session):
    return list(read(session.options.records).measurements)


def loads(measurements):
    return [m.load.concurrency for m in measurements]


def sweep(session, only=(4, 8, 16)):
    planned = session.planner.sweep(MODEL)
    session.begin()
    for case in planned.cases:
        if case.concurrency in only:
            session.executor.measure(case)


def broken_at_first(monkeypatch, times):
    """The first measurements have a failed request."""
    left = [1] * times

    def sometimes(*arguments):
        [found] = measure_case(*arguments)
        return (replace(found, run=replace(found.run, failures=left.pop())) if left else found,)

    monkeypatch.setattr(executor, "measure_case", sometimes)


def said(session):
    """By the run itself, of what it judged."""
    found = Findings(curves=session.verdicts.curves(), judged=session.verdicts.judged)
    return [text for text, _ in tables(found)]


# What is measured, and where it is


def test_a_point_is_measured_once_on_one_engine_and_on_disk_at_once(opened):
    session = opened()
    first = list(point(session))
    assert len(first) == 2 == len(stored(session))
    assert point(session) == first and len(session.devices.pool.starts) == 1
    assert len(point(session, repeats=3)) == 3 == len(stored(session)), "only the missing one is measured"


def test_an_invalid_measurement_is_kept_shown_and_made_once_more(opened, monkeypatch):
    broken_at_first(monkeypatch, 1)
    session = opened()
    found = point(session)
    assert [bool(problems(m)) for m in found] == [True, False, False] and len(stored(session)) == 3
    assert trustworthy("opt-125m-8", [(m,) for m in found], 2).value == 2
    assert any("left out: concurrency 8: 2 of 3" in text for text in said(session))


def test_there_is_no_third_chance(opened, monkeypatch):
    broken_at_first(monkeypatch, 9)
    found = point(opened())
    assert len(found) == 3 and not trustworthy("opt-125m-8", [(m,) for m in found], 2)


def test_a_noisy_measurement_is_not_repeated_and_is_reused(opened):
    noisy = [*FEW_STEPS["engine_arg"], "slow_clock_from=8"]
    found = point(opened(engine_arg=noisy))
    assert len(found) == 2 and all(check(m).noise for m in found)
    again = opened(engine_arg=noisy, resume=True)
    assert [m.id for m in point(again)] == [m.id for m in found] and again.devices.pool.starts == []


def test_what_was_measured_before_an_engine_died_is_on_disk(opened):
    session = opened(engine_arg=[*FEW_STEPS["engine_arg"], "die_at=8"])
    with pytest.raises(EngineFailed):
        sweep(session)
    assert loads(stored(session)) == [4, 4]
    verdict = judged(session, PLATEAU)
    assert verdict.state is State.INCONCLUSIVE and "8, 16" in verdict.why


def test_replicas_are_kept_and_reused_as_a_set(opened):
    def measured(session):
        planner = session.planner
        case = planner.replicas_case(planner.replicas([MODEL] * 2), 8)
        return [[m.id for m in group] for group in session.executor.measure(case)]

    first = opened()
    found, again = measured(first), opened(resume=True)
    assert measured(again) == found and list(map(len, found)) == [2, 2] and again.devices.pool.starts == []
    assert list(again.findings().reused.values()) == [4] and len(first.findings().shared) == 1
    assert next(iter(again.findings().reused)).startswith("2 x ")


# Resuming


def test_a_resumed_session_measures_only_what_is_missing(opened):
    sweep(opened(), only=(4, 8))
    again = opened(resume=True)
    sweep(again)
    assert loads(stored(again)) == [4, 4, 8, 8, 16, 16]
    assert again.findings().reused == {"opt-125m at 4": 2, "opt-125m at 8": 2}
    assert again.findings().reused_from == again.options.records
    anew = opened()
    assert anew.results.repeats == {} == anew.findings().reused and anew.resumed is None


def test_invalid_measurements_and_pairs_of_a_gate_are_not_resumed(opened, monkeypatch):
    broken_at_first(monkeypatch, 1)
    point(opened(), repeats=1)
    again = opened(resume=True)
    assert [len(found) for found in again.results.repeats.values()] == [1] == [len(again.reused)]
    assert len(again.stored) == 2, "the other is known to be there"


def test_another_archive_may_be_resumed_and_is_not_written(opened, tmp_path):
    point(opened(records=str(tmp_path / "first.jsonl")))
    again = opened(resume=str(tmp_path / "first.jsonl"))
    point(again, repeats=3)
    assert len(stored(again)) == 1 and len(read(tmp_path / "first.jsonl").measurements) == 2


@pytest.mark.parametrize("resume", [True, "nowhere.jsonl"])
def test_an_archive_that_is_not_there_may_be_made_if_it_is_that_of_the_run(opened, resume):
    if resume is True:
        assert not opened(resume=True).resumes
    else:
        with pytest.raises(BadUsage) as caught:
            opened(resume=resume)
        assert "--slm-resume" in caught.value.problem and "nowhere.jsonl" in caught.value.problem


def test_a_damaged_archive_is_resumed_only_if_that_is_asked_for(opened):
    first = opened()
    point(first)
    first.close()
    path = Path(first.options.records)
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[0][:-20] + "\n", *lines[1:]]), "utf-8")
    with pytest.raises(BadArchive):
        opened(resume=True)
    session = opened(resume=True, skip_damaged=True)
    assert len(session.stored) == 2 and session.notes != []


# What belongs to a run


def test_records_of_a_formula_are_kept_only_where_an_archive_was_named(opened, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    session = opened(records=None)
    point(session)
    assert not session.keeps_records and session.executor.archive is None and "--slm-records" in session.notes[-1]
    assert session.findings().archives == [] and session.findings().records is None
    page = opened(records=None, html=str(tmp_path / "out.html"))
    point(page)
    assert page.findings().archives == [str(tmp_path / "out.html")] and not Path(".slm").exists()
    assert len(read(page.executor.archive.path).measurements) == 2, "for the page"
    kept = page.executor.archive.path
    page.close()
    assert not kept.exists()
    assert opened().keeps_records and opened(records=None, resume=True).keeps_records


def test_the_archive_has_by_what_a_run_is_judged(opened):
    session = opened(gate=None)
    session.claims, session.command = {"b", "a"}, "pytest -k mine"
    session.planner.sweep(MODEL)
    session.begin()
    assert session.findings().command == session.command
    plan = read(session.options.records).sessions[-1].plan
    assert (plan["claims"], plan["command"]) == (["a", "b"], "pytest -k mine")
    assert plan["interim_analyses"] == list(session.looks)
    assert len(plan["sweeps"]) == 1 and "gate" not in plan
    session.begin(compares=True)
    assert read(session.options.records).sessions[-1].plan["gate"]["pairs"] == 12
    gate = opened(gate=True, gate_pairs="6")
    gate.planner.sweep(MODEL)
    gate.begin()
    plan = read(gate.options.records).sessions[-1].plan
    assert plan["sweeps"] == {} and plan["gate"]["pairs"] == 6 and "claims" not in plan and "command" not in plan


@pytest.mark.parametrize(
    ("given", "looks", "budget_s"),
    [
        ({}, (2, 3, 4, 6, 8, 12, 16), 60.0),
        ({"repeats": "3", "budget": "9"}, (3, 4, 6, 8, 12, 16), 9.0),
        ({"repeats": "1"}, (1,), 60.0),
        ({"budget": "0"}, (2,), 0.0),
    ],
)
def test_a_sweep_goes_on_unless_it_has_no_budget_or_one_repeat(opened, given, looks, budget_s):
    session = opened(**given)
    assert (session.looks, session.budget_s) == (looks, budget_s)


def test_warnings_of_the_host_are_noted_once(opened, monkeypatch):
    host = Host(Environment(platform="simulated"), "simulated-noted", ("vLLM 99 is outside the tested range",))
    monkeypatch.setattr(module, "probe", lambda *_: host)
    session = opened()
    sweep(session)
    assert session.notes == ["vLLM 99 is outside the tested range"]


def test_a_model_that_does_not_fit_is_left_out_once_and_said(opened, monkeypatch):
    host = Host(Environment(platform="simulated", gpu_memory_bytes=9 << 30), "simulated-small")
    monkeypatch.setattr(module, "probe", lambda *_: host)
    session = opened(models=None)
    assert session.planner.models == session.planner.models == (MODEL, "opt-1.3b")
    assert len(session.notes) == 1 and session.notes[0].startswith("opt-2.7b")


def test_an_unknown_model_is_wrong_usage(opened):
    with pytest.raises(BadUsage) as caught:
        opened(models="opt-125m,gpt-5")
    assert "'gpt-5'" in caught.value.problem


def test_a_plan_needs_no_device(tmp_path, monkeypatch):
    def nothing_here(*_):
        raise BadUsage("no GPU here")

    monkeypatch.setattr(module, "probe", nothing_here)
    planned = Session.from_options(read_options({"gpu": True, "plan": True}, {}, {}), tmp_path)
    [note] = planned.notes
    assert "no GPU here" in note and "140 GiB" in note and len(planned.planner.sweep(MODEL).cases) > 9
    on_cpu = Session.from_options(read_options({"cpu": True, "plan": True}, {}, {}), tmp_path)
    assert on_cpu.notes == ["no GPU here"]
    with pytest.raises(BadUsage):
        Session.from_options(read_options({"gpu": True}, {}, {}), tmp_path)


def test_processes_of_a_cpu_engine_need_a_core_each():
    host = Host(Environment(platform="cpu", cores=2), "cpu")
    check_there(host, range(2))
    with pytest.raises(BadUsage) as caught:
        check_there(host, range(3))
    assert caught.value.problem.startswith("3 ") and caught.value.hint.startswith("2 ")


def test_closing_frees_device_and_archive_and_says_where_measurements_moved(opened, tmp_path, monkeypatch):
    session = opened()
    point(session)
    assert session.moved == ""
    monkeypatch.setattr(session.executor.archive, "moved", "it is in another file")
    session.close()
    assert session.devices.pool.current is None and session.notes[-1] == "it is in another file"
    assert opened().executor.archive.path == session.executor.archive.path


# Sweeps: in rounds, on until they are decided


def rounds_of(session):
    return Rounds(session, {case.concurrency: case for case in session.planner.sweep(MODEL).cases})


def inconclusive(*again):
    return Verdict("c", MODEL, State.INCONCLUSIVE, "", again=again)


def test_a_round_measures_all_loads_on_one_more_state_of_the_host(opened):
    rounds = rounds_of(opened())
    for number in (1, 2):
        rounds.round(number, [16, 4, 8])
    assert loads(stored(rounds.session)) == [4, 8, 16] * 2
    ends = [m.run.window_s[1] for m in stored(rounds.session)]
    assert rounds.spent_s == pytest.approx(sum(ends), abs=1e-4)
    rounds.round(2, [4])
    assert len(stored(rounds.session)) == 6, "nothing was missing"


def test_a_load_that_failed_is_not_tried_again_and_the_others_are(opened):
    rounds = rounds_of(opened(engine_arg=[*FEW_STEPS["engine_arg"], "die_at=8"]))
    rounds.round(1, [4, 8, 16])
    rounds.round(2, [4, 8, 16])
    assert loads(stored(rounds.session)) == [4, 4] and sorted(rounds.failed) == [8, 16]
    assert len(rounds.session.devices.pool.starts) == 3, "each failure ends an engine"


def test_loads_that_a_verdict_depends_on_are_measured_up_to_the_next_look(opened):
    rounds, asked = rounds_of(opened(budget="1000")), []
    rounds.round(1, [4, 8, 16])
    rounds.round(2, [4, 8, 16])
    rounds.session.looks = rounds.session.looks[:4]

    def judge():
        asked.append({load: len(rounds._repeats(load)) for load in (4, 8, 16)})
        return [inconclusive(8, 16, 99), Verdict("c", MODEL, State.PASSES, "", again=(4,))]

    rounds.until_decided(judge)
    assert [seen[8] for seen in asked] == list(rounds.session.looks), "judged at the looks, and only there"
    assert all(seen[4] == 2 and seen[16] == seen[8] for seen in asked), "a verdict that passes wants nothing"


def test_rounds_end_before_the_budget_is_exceeded(opened):
    rounds = rounds_of(opened())
    rounds.round(1, [4, 8]), rounds.round(2, [4, 8])
    each_s = rounds.spent_s / 4
    rounds.session.budget_s = rounds.spent_s + 2.5 * each_s
    rounds.until_decided(lambda: [inconclusive(4, 8)])
    assert loads(stored(rounds.session)).count(4) == 3 and rounds.spent_s <= rounds.session.budget_s


def test_a_load_that_failed_is_not_waited_for(opened):
    rounds = rounds_of(opened(engine_arg=[*FEW_STEPS["engine_arg"], "die_at=8"]))
    rounds.round(1, [4, 8])
    rounds.until_decided(lambda: [inconclusive(8)])
    assert loads(stored(rounds.session)) == [4]


def test_a_full_sweep_is_carried_out_once_and_on_until_its_claims_are_decided(opened):
    session = opened(concurrency="1,16,64", engine_arg=["t_inf=2000", "b_half=16", "noise=0.03"], budget="30")
    sweeps = Sweeps(session, {MODEL: [1, 16, 64]}, {MODEL: [session.verdicts.question(PLATEAU, MODEL)]})
    assert sweeps.repeats(MODEL, 1) == 2
    made = loads(stored(session))
    assert made[:6] == [1, 16, 64] * 2 and len(made) > 6 and set(made[6:]) <= {16, 64}
    assert sweeps.carry_out(MODEL) is sweeps.carry_out(MODEL) and loads(stored(session)) == made


def test_only_the_loads_of_the_items_are_measured_of_a_full_sweep(opened):
    session = opened()
    Sweeps(session, {MODEL: [8]}, {}).carry_out(MODEL)
    assert loads(stored(session)) == [8, 8]


# Adaptive sweeps

GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FAST = {"window": "1", "output_len": "16", "engine_arg": ["t_inf=20000", "b_half=20"]}


@pytest.fixture
def adaptive(opened):
    """Opens adaptive sweeps on one archive, one session after the other."""

    def open_sweeps(**given):
        session = opened(**{"sweep": "adaptive", "concurrency": ",".join(map(str, GRID)), **FAST, **given})
        session.planner.sweep(MODEL)
        session.begin()
        return Sweeps(session, {MODEL: GRID}, {})

    return open_sweeps


def measured(sweeps):
    """Loads in the order measured, over all sessions of the archive."""
    return loads(stored(sweeps.session))


def test_what_is_wanted_is_measured_in_its_order_and_no_more(adaptive):
    sweeps = adaptive()
    rounds = sweeps.carry_out(MODEL)
    order = list(dict.fromkeys(measured(sweeps)))
    assert order[:2] == [1, 256] and set(rounds.asked) == set(order) and len(order) < len(GRID)
    assert all(measured(sweeps).count(load) == repeats for load, repeats in rounds.asked.items())
    before = measured(sweeps)
    assert [sweeps.repeats(MODEL, load) for load in GRID] == [rounds.asked.get(load) for load in GRID]
    assert measured(sweeps) == before, "once carried out, it is over"
    curve = sweeps.session.verdicts.curve(MODEL)
    assert curve.adaptive and curve.missing == () and set(curve.unneeded) == set(GRID) - set(order)


def test_why_a_load_is_measured_is_told_while_it_is(adaptive):
    sweeps, told = adaptive(repeats="1"), []
    sweeps.session.executor.on_progress = lambda case, title, progress: told.append(title)
    sweeps.carry_out(MODEL)
    titles = list(dict.fromkeys(told))
    assert [title.partition(" (")[0] for title in titles[:2]] == [f"{MODEL} at {n}, repeat 1" for n in (1, 256)]
    assert all(title.endswith(")") for title in titles)


def test_the_report_on_the_archive_of_an_adaptive_sweep_says_what_the_run_said(adaptive):
    sweeps = adaptive()
    sweeps.carry_out(MODEL)
    for name in (PLATEAU, "latency-rises-past-plateau", "pareto-up-to-plateau"):
        judged(sweeps.session, name)
    later = "\n".join(text for text, _ in tables(judged_again(read(sweeps.session.options.records))))
    lines = "\n".join(said(sweeps.session)).splitlines()
    assert len(lines) > 20 and all(line in later for line in lines if "verdict" not in line)
    [plan] = read(sweeps.session.options.records).sessions[0].plan["sweeps"].values()
    assert plan == {"model": MODEL, "concurrencies": [*GRID], "skipped": [], "adaptive": {"tolerance": 0.1}}


def test_a_sweep_that_was_interrupted_is_inconclusive_and_goes_on_where_it_ended(adaptive, monkeypatch):
    made = []

    def twice(*arguments):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(measure_case(*arguments))
        return made[-1]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(executor, "measure_case", twice)
        first = adaptive()
        first.carry_out(MODEL)
    verdict = judged(first.session, PLATEAU)
    assert verdict.state is State.INCONCLUSIVE
    again = adaptive(resume=True)
    rounds = again.carry_out(MODEL)
    assert measured(again)[:2] == [1, 256] and measured(again).count(256) == 1
    assert f"concurrency {measured(again)[2]}" in verdict.why, "the next one, not those that may not be needed"
    assert 256 not in rounds.asked and again.repeats(MODEL, 256) == 1, "known, though this session did not ask for it"


def test_a_full_sweep_later_judges_by_all_its_loads(adaptive):
    first = adaptive()
    first.carry_out(MODEL)
    full = adaptive(sweep="full", resume=True).session
    for case in full.planner.sweep(MODEL).cases:
        records_of(full, full.planner.spec(MODEL), case.loads[0])
    curve = full.verdicts.curve(MODEL)
    assert [p.concurrency for p in curve.points] == list(GRID) and not curve.adaptive
    assert len(measured(first)) == 2 * len(GRID)


def test_a_failure_ends_the_sweep_and_is_that_of_its_load(adaptive):
    sweeps = adaptive(engine_arg=[*FAST["engine_arg"], "die_at=100"])
    assert sweeps.repeats(MODEL, 1) == 1 and sweeps.repeats(MODEL, 64) is None
    assert "concurrency 256" in skip_note(sweeps.session.verdicts.curve(MODEL), 64)
    with pytest.raises(EngineFailed):
        sweeps.repeats(MODEL, 256)
    assert measured(sweeps) == [1] and len(sweeps.session.devices.pool.starts) == 1, "not tried again"
    [note] = sweeps.session.notes
    assert MODEL in note and "concurrency 256" in note


def test_invalid_measurements_are_made_again_and_it_ends(adaptive, monkeypatch):
    broken_at_first(monkeypatch, 4)
    sweeps = adaptive()
    sweeps.carry_out(MODEL)
    assert measured(sweeps)[:4] == [1, 1, 2, 2], "twice in vain; the next larger load is then the smallest"
    curve = sweeps.session.verdicts.curve(MODEL)
    assert [p.concurrency for p in curve.points if not p.valid] == [1, 2]
    assert "1, 2" in judged(sweeps.session, "pareto-up-to-plateau").why
    assert not {1, 2} & set(judged(sweeps.session, PLATEAU).again), "which needs neither"


def test_two_models_are_two_sweeps(adaptive):
    sweeps = adaptive(models="opt-125m,opt-350m")
    rounds = [sweeps.carry_out(model) for model in sweeps.session.planner.models]
    assert all(each.asked for each in rounds) and rounds[0] is not rounds[1]
    assert [curve.adaptive for curve in sweeps.session.verdicts.curves()] == [True, True]


def test_a_load_beside_those_of_a_sweep_keeps_it_as_it_was(opened):
    session = opened()
    records_of(session, session.planner.spec(MODEL), ClosedLoop(12, window_s=1), 1)
    assert session.verdicts.curve(MODEL).missing == (4, 8, 16)
