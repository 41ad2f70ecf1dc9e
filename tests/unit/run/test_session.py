"""A session measures what is missing, keeps it at once, resumes what is valid, and says what it did; a sweep goes in
rounds, on until its claims are decided or its budget is spent, and an adaptive one measures what it needs."""

from collections import Counter
from dataclasses import replace
from itertools import chain, count, repeat
from pathlib import Path
from unittest.mock import Mock

import pytest
from refusals import refused
from simulated_sessions import FEW_STEPS, MODEL, judged, point, records_of, stored, sweep

from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.archive.store import read
from pytest_slmserve.commands.report import judged_again
from pytest_slmserve.options.read import read_options
from pytest_slmserve.report.sweeps import skip_note
from pytest_slmserve.run import executor, session as module
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.run.session import Rounds, Session, Sweeps
from pytest_slmserve.schema.errors import BadArchive, BadUsage, EngineFailed
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.telemetry.host import Host

PLATEAU = "throughput-plateau"


@pytest.fixture
def opened(opened):
    """Opens sessions of few steps on one archive; options go by their names."""
    return lambda **given: opened(**{"concurrency": "4,8,16", **FEW_STEPS, **given})


def loads(measurements):
    return [m.load.concurrency for m in measurements]


def broken_at_first(monkeypatch, times):
    """The first measurements have a failed request."""
    failures = chain([1] * times, repeat(0))

    def sometimes(*arguments):
        [found] = measure_case(*arguments)
        return (replace(found, run=replace(found.run, failures=next(failures))),)

    monkeypatch.setattr(executor, "measure_case", sometimes)


def test_noisy_measurements_are_reused(opened, monkeypatch):
    noisy = [*FEW_STEPS["engine_arg"], "slow_clock_from=8"]
    found = point(opened(engine_arg=noisy))
    assert [bool(check(m).noise) for m in found] == [True, True]
    again = opened(engine_arg=noisy, resume=True)
    assert [m.id for m in point(again)] == [m.id for m in found] and again.devices.pool.starts == []

    def measured(session):
        case = session.planner.replicas_case(session.planner.replicas([MODEL] * 2), 8)
        return [[m.id for m in group] for group in session.executor.measure(case)]

    first = opened()
    found, again = measured(first), opened(resume=True)
    assert measured(again) == found and list(map(len, found)) == [2, 2] and again.devices.pool.starts == []
    [(title, reused)] = again.findings().reused.items()
    assert title.startswith("2 x ") and reused == 4 and len(first.findings().shared) == 1
    broken_at_first(monkeypatch, 1)
    point(opened(archive="broken"), repeats=1)
    again = opened(archive="broken", resume=True)
    assert [len(found) for found in again.results.repeats.values()] == [len(again.reused)] == [1]
    assert len(again.stored) == 2


def test_resumed_session_measures_missing_repeats(opened, tmp_path):
    sweep(opened(), (4, 8))
    again = opened(resume=True)
    sweep(again, (4, 8, 16))
    assert loads(stored(again)) == [4, 4, 8, 8, 16, 16]
    found = again.findings()
    assert (found.reused, found.reused_from) == ({"opt-125m at 4": 2, "opt-125m at 8": 2}, again.options.records)
    later = replace(again.host.environment, host="booted later")
    again.host = replace(again.host, environment=later)
    assert "(4 of another host" in again.findings().reused_from
    anew = opened()
    assert (anew.results.repeats, anew.findings().reused, anew.resumed) == ({}, {}, None)
    first = str(tmp_path / "first.jsonl")
    with refused("--slm-resume", first):
        opened(archive="mine", resume=first)
    point(opened(records=first, resume=True))  # that of the run may be made
    again = opened(archive="mine", resume=first)
    point(again, repeats=3)
    assert len(stored(again)) == 1 and len(read(first).measurements) == 2
    first = opened(archive="damaged")
    point(first)
    first.close()
    path = Path(first.options.records)
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[0][:-20] + "\n", *lines[1:]]), "utf-8")
    with pytest.raises(BadArchive):
        opened(archive="damaged", resume=True)
    session = opened(archive="damaged", resume=True, skip_damaged=True)
    assert len(session.stored) == 2 and session.notes != []


def test_unnamed_simulation_keeps_no_records(opened, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    session = opened(records=None)
    point(session)
    assert not session.keeps_records and "--slm-records" in session.notes[-1]
    assert session.findings().archives == [], "what it is judged by goes with it"
    page = opened(records=None, html=str(tmp_path / "out.html"))
    point(page)
    assert page.findings().archives == [str(tmp_path / "out.html")] and not Path(".slm").exists()
    kept = page.executor.archive.path
    assert len(read(kept).measurements) == 2, "for the page"
    page.close()
    assert not kept.exists()
    assert opened().keeps_records and opened(records=None, resume=True).keeps_records
    session = opened()
    point(session)
    assert session.moved == ""
    monkeypatch.setattr(session.executor.archive, "moved", "it is in another file")
    session.close()
    assert session.devices.pool.current is None and session.notes[-1] == "it is in another file"
    assert opened().executor.archive.path == session.executor.archive.path


@pytest.mark.parametrize(("given", "compares", "sweeps", "pairs", "looks", "budget_s"), [
    ({}, False, 1, None, (1, 2, 3, 4, 6, 8, 12, 16), 60.0),
    ({"repeats": "3", "budget": "9"}, True, 1, 12, (3, 4, 6, 8, 12, 16), 9.0),
    ({"gate": True, "gate_pairs": "6"}, False, 0, 6, (1, 2, 3, 4, 6, 8, 12, 16), 60.0),
    ({"repeats": "1"}, False, 1, None, (1,), 60.0),
    ({"budget": "0"}, False, 1, None, (2,), 0.0),
])  # fmt: skip
def test_archive_keeps_judging_criteria(opened, given, compares, sweeps, pairs, looks, budget_s):
    session = opened(**given)
    session.planner.sweep(MODEL)
    session.begin(compares)
    plan = read(session.options.records).sessions[-1].plan
    assert (len(plan["sweeps"]), plan.get("gate", {}).get("pairs")) == (sweeps, pairs)
    assert (plan["interim_analyses"], session.looks, session.budget_s) == ([*looks], looks, budget_s)
    session.claims, session.command = {"b", "a"}, "pytest -k mine"
    session.begin(compares)
    told = {"claims": ["a", "b"], "command": "pytest -k mine"}
    assert read(session.options.records).sessions[-1].plan == plan | told and not plan.keys() & told.keys()
    assert session.findings().command == session.command


def test_plan_needs_no_device(tmp_path, monkeypatch, opened):
    def session(**given):
        return Session.from_options(read_options(given, {}, {}), tmp_path)

    monkeypatch.setattr(module, "probe", Mock(side_effect=BadUsage("no GPU here")))
    planned = session(gpu=True, plan=True)
    [note] = planned.notes
    assert "no GPU here" in note and "140 GiB" in note and len(planned.planner.sweep(MODEL).cases) > 9
    assert session(cpu=True, plan=True).notes == ["no GPU here"]
    with pytest.raises(BadUsage):
        session(gpu=True)
    small = Environment(platform="simulated", gpu_memory_bytes=9 << 30)
    monkeypatch.setattr(module, "probe", lambda *_: Host(small, "simulated-small", ("vLLM 99 is too new",)))
    session = opened(models=None)
    sweep(session, (4, 8, 16))
    assert session.planner.models == session.planner.models == (MODEL, "opt-1.3b")
    assert [note.partition(" ")[0] for note in session.notes] == ["vLLM", "opt-2.7b"]


@pytest.fixture
def rounds(opened):
    """Opens rounds that have begun, each on an archive of its own; the engine dies at a load of 8, or of none."""
    archives = count()

    def begun(numbers=(), only=(4, 8, 16), dies=(), **given):
        session = opened(archive=f"rounds {next(archives)}", engine_arg=[*FEW_STEPS["engine_arg"], *dies], **given)
        found = Rounds(session, {case.concurrency: case for case in session.planner.sweep(MODEL).cases})
        for number in numbers:
            found.round(number, only)
        return found

    return begun


def swept(session, numbers, *claims):
    """The planned sweep of a model, with the loads and the claims that items ask for."""
    cases = {case.concurrency: case for case in session.planner.sweep(MODEL).cases if case.concurrency in numbers}
    [series] = {case.series for case in cases.values()}
    return Sweeps(session, {series: cases}, {series: [session.verdicts.question(claim, MODEL) for claim in claims]})


def carry_out(sweeps):
    [series] = sweeps.cases
    return sweeps.carry_out(series)


def repeats(sweeps, load):
    [cases] = sweeps.cases.values()
    return sweeps.repeats(cases[load])


def inconclusive(*again, claim="c", more=1):
    return Verdict(claim, MODEL, State.INCONCLUSIVE, "", again=again, more_repeats=more)


def test_round_repeats_every_load(rounds):
    begun = rounds((1, 2), (16, 4, 8))
    assert loads(stored(begun.session)) == [4, 8, 16] * 2
    spent_s = sum(m.run.window_s[1] for m in stored(begun.session))
    assert [*begun.session.executor.spent_s.values()] == [pytest.approx(spent_s, abs=1e-4)]
    begun.round(2, [4])
    assert len(stored(begun.session)) == 6, "nothing was missing"
    begun = rounds((1, 2), dies=["die_at=8"])
    begun.until_decided(lambda: [inconclusive(8)])
    assert loads(stored(begun.session)) == [4, 4] and sorted(begun.failed) == [8, 16]
    assert len(begun.session.devices.pool.starts) == 3, "each failure ends an engine"
    begun, asked = rounds((1, 2), budget="1000"), []
    begun.session.looks = begun.session.looks[:4]

    def judge():
        asked.append({load: len(begun._repeats(load)) for load in (4, 8, 16)})
        return [inconclusive(8, 16, 99), Verdict("c", MODEL, State.PASSES, "", again=(4,))]

    begun.until_decided(judge)
    looks = [{4: 2, 8: look, 16: look} for look in (2, 3, 4)]
    assert asked == looks, "judged at the looks, and only there; a verdict that passes wants nothing"


def test_rounds_end_within_budget(rounds):
    begun = rounds((1, 2), (4, 8))
    [(engine, spent_s)] = begun.session.executor.spent_s.items()
    begun.session.budget_s = spent_s * (1 + 2.5 / 4)
    begun.until_decided(lambda: [inconclusive(4, 8)])
    assert loads(stored(begun.session)).count(4) == 3
    assert begun.session.executor.spent_s[engine] <= begun.session.budget_s
    begun = rounds((1,), budget="1")
    begun.session.budget_s = 0.1
    begun.until_decided(lambda: [inconclusive(4, 16)])
    assert loads(stored(begun.session)) == [4, 8, 16, 4, 16] and begun.asked == {4: 2, 8: 1, 16: 2}
    begun = rounds((1,), budget="1000")
    beyond, left_s = begun.cases[16], begun.left_s
    kept = []
    for state in (State.INCONCLUSIVE, State.FAILS, State.PASSES):
        begun.reserve(Verdict("gpu-plateau", MODEL, state, "", value=0.1), beyond)
        kept.append(left_s - begun.left_s)
    assert kept[0] == kept[1] > 0 == kept[2], "not twice"
    # A claim that the budget is far from deciding is given up once that is known, and that is said once.
    begun, said = rounds((1, 2), budget="1000"), []
    begun.session.say = said.append
    hopeless, dear = inconclusive(4, claim="hopeless", more=None), inconclusive(4, 8, claim="dear", more=10**6)
    begun.until_decided(lambda: [hopeless, dear, inconclusive(16)])
    counted = Counter(loads(stored(begun.session)))
    assert counted == {4: 4, 8: 4, 16: 16} and begun.asked == {4: 4, 8: 4, 16: 16}
    told = [next(claim for claim in ("hopeless", "dear") if claim in text) for text in said]
    assert told == ["hopeless", "dear"]


def test_sweep_is_carried_out_once(opened, tmp_path):
    """Of what the GPU does the three smallest loads tell the noise, of what was seen a second round of all does, if the
    budget pays for it; then the largest loads are repeated."""
    law = {"concurrency": "1,2,4,16,64", "engine_arg": ["t_inf=2000", "b_half=5", "noise=0.03"]}
    for claim, again in ((PLATEAU, [1, 2, 4, 16, 64]), ("gpu-plateau", [1, 2, 4])):
        session = opened(**law, budget="60", records=str(tmp_path / claim))
        sweeps = swept(session, [1, 2, 4, 16, 64], claim)
        assert repeats(sweeps, 1) == 2 and repeats(sweeps, 64) > 2
        made = loads(stored(session))
        assert made[: 5 + len(again)] == [1, 2, 4, 16, 64, *again] and set(made[5 + len(again) :]) <= {16, 64}
    assert carry_out(sweeps) is carry_out(sweeps) and loads(stored(session)) == made
    session, said = opened(**law, budget="1", records=str(tmp_path / "poor")), []
    session.say = said.append
    poor = swept(session, [1, 2, 4, 16, 64], "gpu-plateau", PLATEAU)
    assert [repeats(poor, load) for load in (4, 16, 64)] == [2, 1, 1] and "second round" in said[-1]
    assert judged(session, PLATEAU).state is State.INCONCLUSIVE
    session = opened(engine_arg=[*FEW_STEPS["engine_arg"], "noise=0"])
    first = swept(session, [4, 8, 16], PLATEAU, "gpu-plateau")
    [(series, cases)] = first.cases.items()
    burst = {n: replace(case, loads=(replace(case.loads[0], ramp_up="burst"),)) for n, case in cases.items()}
    both = Sweeps(session, {series: cases, burst[4].series: burst}, first.claims)
    asked = Mock(wraps=session.verdicts.verdict)
    session.verdicts.verdict = asked
    both.carry_out(series)
    asked = [call.args[0].row.claim for call in asked.call_args_list]
    assert asked == sorted(asked) and {*asked} == {"gpu-plateau", PLATEAU}
    [alone] = session.executor.spent_s.values()
    both.carry_out(burst[4].series)
    [together] = session.executor.spent_s.values()
    assert together > alone > 0


@pytest.mark.parametrize(("given", "claims", "times"), [
    ({"repeats": "1"}, [PLATEAU], 1), ({"repeats": "2"}, [PLATEAU], 2),
    ({"repeats": "3"}, [PLATEAU], 3), ({"budget": "0"}, [PLATEAU], 2), ({}, [], 2),
])  # fmt: skip
def test_options_set_round_count(opened, given, claims, times):
    session = opened(**given)
    sweeps = swept(session, [4, 8, 16], *claims)
    assert [repeats(sweeps, load) for load in (4, 8, 16)] == [times] * 3
    assert loads(stored(session)) == [4, 8, 16] * times


@pytest.mark.parametrize(("law", "budget", "beyond"), [
    (["t_inf=90000", "b_half=400"], "9000", 2),  # a doubling still gains over 20%
    (["t_inf=90000", "b_half=400"], "4", 0),
    (["t_inf=90000", "b_half=400"], "0", 0),
    (["t_inf=90000", "b_half=16"], "9000", 0),
])  # fmt: skip
def test_curve_without_plateau_continues(opened, law, budget, beyond):
    session, said = opened(concurrency=None, engine_arg=law, budget=budget), []
    session.say = said.append
    sweeps = swept(session, [1, 256, 512, 1024], "gpu-plateau")
    session.begin()
    carry_out(sweeps)
    assert loads(stored(session)).count(2048) == beyond and len(said) == (beyond > 0 or budget == "4")
    assert all("2048" in text for text in said)
    verdict = judged(session, "gpu-plateau")
    assert (verdict.state is State.PASSES) == (law[1] == "b_half=16")
    [curve] = judged_again(read(session.options.records)).curves
    assert [p.concurrency for p in curve.points][-1] == (2048 if beyond else 1024)


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
        return swept(session, GRID)

    return open_sweeps


def measured(sweeps):
    """Loads in the order measured, over all sessions of the archive."""
    return loads(stored(sweeps.session))


def test_adaptive_sweep_measures_wanted_loads(adaptive):
    sweeps, told = adaptive(), []
    sweeps.session.executor.on_progress = lambda case, title, progress: told.append(title)
    rounds = carry_out(sweeps)
    assert told[0].startswith(f"{MODEL} at 1, repeat 1 (") and all(title.endswith(")") for title in told)
    order = list(dict.fromkeys(measured(sweeps)))
    assert order[:2] == [1, 256] and set(rounds.asked) == set(order) and len(order) < len(GRID)
    assert all(measured(sweeps).count(load) == repeats for load, repeats in rounds.asked.items())
    before = measured(sweeps)
    assert [repeats(sweeps, load) for load in GRID] == [rounds.asked.get(load) for load in GRID]
    assert measured(sweeps) == before, "once carried out, it is over"
    curve = sweeps.session.verdicts.curve(MODEL)
    assert curve.adaptive and curve.missing == () and set(curve.unneeded) == set(GRID) - set(order)
    [later] = judged_again(read(sweeps.session.options.records)).curves
    assert (later.adaptive, later.missing, later.unneeded) == (curve.adaptive, (), curve.unneeded), "in its report too"
    first = adaptive(archive="full")
    carry_out(first)
    full = adaptive(archive="full", sweep="full", resume=True).session
    for case in full.planner.sweep(MODEL).cases:
        records_of(full, full.planner.spec(MODEL), case.loads[0])
    curve = full.verdicts.curve(MODEL)
    assert [p.concurrency for p in curve.points] == list(GRID) and not curve.adaptive
    assert len(measured(first)) == 2 * len(GRID)


def test_interrupted_sweep_resumes(adaptive, monkeypatch):
    sweeps = adaptive(engine_arg=[*FAST["engine_arg"], "die_at=100"])
    assert repeats(sweeps, 1) == 1 and repeats(sweeps, 64) is None
    assert "concurrency 256" in skip_note(sweeps.session.verdicts.curve(MODEL), 64)
    with pytest.raises(EngineFailed):
        repeats(sweeps, 256)
    assert measured(sweeps) == [1] and len(sweeps.session.devices.pool.starts) == 1, "not tried again"
    [note] = sweeps.session.notes
    assert MODEL in note and "concurrency 256" in note
    broken_at_first(monkeypatch, 4)
    sweeps = adaptive(archive="broken")
    carry_out(sweeps)
    assert measured(sweeps)[:4] == [1, 1, 2, 2], "twice in vain; the next larger load is then the smallest"
    curve = sweeps.session.verdicts.curve(MODEL)
    assert [p.concurrency for p in curve.points if not p.valid] == [1, 2]
    assert "1, 2" in judged(sweeps.session, "pareto-up-to-plateau").why
    assert not {1, 2} & set(judged(sweeps.session, PLATEAU).again), "which needs neither"
    breaks = chain([measure_case] * 2, [Mock(side_effect=KeyboardInterrupt)])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(executor, "measure_case", lambda *arguments: next(breaks)(*arguments))
        first = adaptive(archive="interrupted")
        carry_out(first)
    verdict, again = judged(first.session, PLATEAU), adaptive(archive="interrupted", resume=True)
    rounds = carry_out(again)
    assert measured(again)[:2] == [1, 256] and measured(again).count(256) == 1
    assert verdict.state is State.INCONCLUSIVE and f"concurrency {measured(again)[2]}" in verdict.why, "the next one"
    assert 256 not in rounds.asked and repeats(again, 256) == 1, "known, though this session did not ask for it"
