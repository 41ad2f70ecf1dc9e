"""The table says of each claim what it compares and what to expect: the most specific row rules, in memory and from
a record; what a run planned and judged is told again from its archive, whose fault is what cannot be used."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import pytest
from facts import tells
from launches import pairs
from refusals import refused
from stored_records import having
from strategies import FAILS, H200, INCONCLUSIVE, PASSES, judge, law, measurement, noisy_curve, planted_telemetry

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.claims.table import CLAIMS, ROWS, ClaimRow, judge_all, judge_row, row_for, stored_curves
from pytest_slmserve.analysis.compare.deployments import CLAIM
from pytest_slmserve.analysis.metrics.gpu_figures import GPUS
from pytest_slmserve.analysis.points import by_series
from pytest_slmserve.analysis.sweep.curve import GPU_PLATEAU, LATENCY, PARETO, Curve, curve_of
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.errors import BadArchive, Sharing
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

PLATEAU, DEARER, BLOCKS = "throughput-plateau", "energy-per-token-grows-with-model", "kv-blocks-as-predicted"
BATCHES, TWO = (64, 128, 256, 512), (64, 128)
EARLIER, BETWEEN, LATER = (f"{day}T00:00:00+00:00" for day in ("2025-12-31", "2026-01-01", "2026-06-01"))
TERMS = {"margin": 0.03, "alpha": 0.01, "beta": 0.05, "pairs": 12}
(SERIES,) = by_series([measurement()])
TABLE = (
    ClaimRow(PLATEAU),
    ClaimRow(PLATEAU, device="cuda", evidence="platform"),
    ClaimRow(PLATEAU, device="H200", evidence="family"),
    ClaimRow(PLATEAU, device="H200", ramp_up="burst", evidence="ramp_up"),
    ClaimRow(PLATEAU, device="H200", interface="server", evidence="interface"),
    ClaimRow(PLATEAU, device="H200", vllm=("0.26", "0.27"), evidence="release"),
    ClaimRow(PLATEAU, model="opt-13b", expected="fails", evidence="model"),
)


def test_claim_table_is_complete():
    """Each states a sentence, tells its estimate, and has a row everywhere; no two rows are of one place. A claim on
    sharing stands for one of each way."""
    for claim in CLAIMS.values():
        assert claim.statement.endswith(".") and claim.source and "{" not in claim.statement
        assert not claim.compares or (claim.threshold in claim.parameters and re.search(r"{(|told|does)}", claim.words))
        for environment in (None, Environment(), H200, Environment(platform="cpu", vllm="0.32.0")):
            assert row_for(claim.name, "some-model", environment).expected == claim.expected
    for row in ROWS:
        assert row.claim in CLAIMS and row.evidence
        assert row.device in {"*", "cuda", "cpu", "simulated", *(gpu.family for gpu in GPUS)}
    places = [(row.claim, row.model, row.device, row.interface, row.ramp_up, row.vllm) for row in ROWS]
    assert len(set(places)) == len(places)
    for name in ("replicas-pay", "replicas-keep-the-tail"):
        ways = {way: CLAIMS[f"{name}-{way}"].parameters["sharing"] for way in get_args(Sharing) if way != "urls"}
        assert all(way == said for way, said in ways.items()) and f"{name}-urls" not in CLAIMS
    # Those on replicas are tested for each way to share, and named without it.
    planted = "".join(path.read_text("utf-8") for path in Path(__file__).parents[1].glob("*/test_*.py"))

    def written(claim):
        way = claim.parameters.get("sharing", "")
        return f'"{claim.name.removeprefix("replicas-").removesuffix(f"-{way}") if way else claim.name}"'

    names = {claim.name for claim in CLAIMS.values() if written(claim) not in planted}
    assert names <= {PLATEAU, GPU_PLATEAU, LATENCY, PARETO, CLAIM}, "constants of the package"


@pytest.mark.parametrize(("where", "evidence"), [
    (("opt-1.3b", None), ""),
    (("opt-1.3b", Environment(platform="cpu")), ""),
    (("opt-1.3b", Environment(platform="cuda", gpu_name="NVIDIA L4")), "platform"),
    (("opt-1.3b", replace(H200, vllm="0.25.1")), "family"),
    (("opt-1.3b", replace(H200, vllm=None)), "family"),
    (("opt-1.3b", replace(H200, vllm="0.27.0")), "family"),
    (("opt-1.3b", replace(H200, vllm="0.26.0rc1+cu130")), "release"),
    (("facebook/opt-13b", H200), "model"),
    # A row of an interface or a ramp-up goes before one of a release, after one that names the device better.
    (("opt-1.3b", H200, "engine", "burst"), "ramp_up"),
    (("opt-1.3b", H200, "engine", "staggered"), "release"),
    (("opt-1.3b", H200, None, None), "release"),
    (("opt-1.3b", H200, "server", "burst"), "interface"),
    (("opt-1.3b", H200, "server", None), "interface"),
    (("opt-1.3b", Environment(platform="cuda"), "engine", "burst"), "platform"),
    (("opt-1.3b", Environment(platform="cuda"), "server", "burst"), "platform"),
])  # fmt: skip
def test_most_specific_claim_row_wins(where, evidence):
    assert [row_for(PLATEAU, *where, rows=rows).evidence for rows in (TABLE, TABLE[::-1])] == [evidence] * 2
    rows = (ClaimRow(PLATEAU), ClaimRow(PLATEAU, vllm=("0.26", ""), evidence="new"))
    found = [row_for(PLATEAU, "x", Environment(vllm=version), rows=rows).evidence for version in ("1.0", "0.9.2")]
    assert found == ["new", ""]


@pytest.mark.parametrize(("name", "rows", "facts", "hint"), [
    ("flying", ROWS, ("'flying'",), PLATEAU), ("throughput-platau", ROWS, ("'throughput-platau'",), PLATEAU),
    (PLATEAU, (ClaimRow(PLATEAU, model="opt-2.7b"),), (PLATEAU, "opt-1.3b"), ""),
])  # fmt: skip
def test_unknown_claim_suggests_nearest_name(name, rows, facts, hint):
    with refused(*facts, hint=hint):
        row_for(name, "opt-1.3b", rows=rows)


def test_expected_claim_verdicts_hold():
    for model in ("opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b"):
        row = row_for("table-1-batch-fits", model)
        verdict = judge_row(row, Curve(subject=model))
        assert verdict.state is State(row.expected)
        assert row.expected == "passes" or verdict.why.split()[0] == row.evidence.split()[0], "the arithmetic agrees"
    small = [(DEARER, "opt-125m"), (PLATEAU, "opt-1.3b"), ("table-1-batch-fits", "x"), ("table-1-request-size", "x")]
    read = [table.models_read(CLAIMS[name], model) for name, model in (*small, (DEARER, "facebook/opt-1.3b"))]
    assert read == [("opt-125m",), ("opt-1.3b",), (), (), ("facebook/opt-1.3b", "opt-125m")]
    # On an H200 OPT-125M has no plateau offline; through one front end, which does not feed its engine, it has.
    found = {way: row_for(PLATEAU, "opt-125m", H200, way, "staggered").expected for way in ("engine", "server")}
    assert found == {"engine": "fails", "server": "passes"}
    measured = curve_of("opt-1.3b", [measurement(c, law(c), model="facebook/opt-1.3b") for c in (1, 2, 4)])
    for name, claim in CLAIMS.items():
        row = row_for(name, "facebook/opt-1.3b")
        assert judge_row(row, measured).subject == "opt-1.3b"
        assert claim.of == "arithmetic" or judge_row(row, Curve(subject="opt-1.3b")).state is INCONCLUSIVE
    curve = noisy_curve({2**i: law(2**i) for i in range(10)}, noise=0.003)
    found = [judge_row(row_for(name, "opt-1.3b"), curve) for name in (PLATEAU, LATENCY, PARETO)]
    assert [(each.claim, each.state) for each in found] == [(name, PASSES) for name in (PLATEAU, LATENCY, PARETO)]
    assert judge(PLATEAU, curve, tolerance=0.01).state is FAILS
    made = [measurement(c, law(c), launch=f"launch-{c}") for c in (1, 2, 4)]
    for blocks, state in ((1365, PASSES), (1000, FAILS), (None, INCONCLUSIVE)):
        launches = [made[0], *having(made[1:2], resolved={"kv_blocks": blocks}), made[2]]
        verdict = judge_row(row_for(BLOCKS, "opt-1.3b"), curve_of("opt-1.3b", launches))
        assert verdict.state is state and len(verdict.records) == 3


def sweep(batches=BATCHES, **facts: object):
    """Measured from the second of these moments on."""
    return [measurement(c, law(c) * (1 + 0.001 * i), repeat=i, **facts) for c in batches for i in range(2)]


def plan_of(concurrencies, cut=(), series: str = SERIES, **more: object):
    return {"sweeps": {series: {"model": "opt-1.3b", "concurrencies": list(concurrencies), "skipped": cut, **more}}}


PLAN = plan_of(BATCHES, [[1024, "too large"]])


def again(measurements, *plans):
    return list(table.stored_gates(measurements, plans))


@pytest.mark.parametrize(("fact", "call"), [
    *(("claims", lambda rows=rows: table.rows_from({"rows": rows}))
      for rows in (5, [5], [{"model": "opt-1.3b"}], [{"claim": ["x"]}], [{"claim": "x", "vllm": 5}])),
    *(("plan", lambda plan=plan: stored_curves(sweep(), [(EARLIER, plan)])) for plan in (
        {"sweeps": 5}, {"sweeps": {SERIES: 5}}, plan_of(["x"]), plan_of((), cut=5), plan_of((), cut=[[1]]),
        plan_of((1,), adaptive=5), plan_of((1,), adaptive={"tolerance": "much"}))),
    *((fact, lambda: judge_all(stored_curves(sweep(), []), (ClaimRow(PLATEAU),))) for fact in (PLATEAU, "tolerance")),
    *(("gate", lambda terms=terms: again(pairs(4), (EARLIER, {"gate": terms}))) for terms in (
        {}, None, 3, {**TERMS, "margin": "wide"}, {**TERMS, "margin": 2.0}, {**TERMS, "pairs": 1})),
])  # fmt: skip
def test_malformed_archive_rows_are_refused(fact, call):
    with refused(fact, kind=BadArchive):
        call()


def test_claim_rows_survive_record():
    stored = [{**json.loads(json.dumps(asdict(row))), "added_later": 1} for row in (*ROWS, *TABLE)]
    assert table.rows_from({"rows": stored}) == (*ROWS, *TABLE)
    assert table.rows_from({"rows": [asdict(row) for row in ROWS]}) == ROWS == table.rows_from({})
    mine = replace(ROWS[0], parameters={"tolerance": 0.5})
    rows = table.rows_from({"rows": [asdict(mine)]})
    assert row_for(mine.claim, "opt-1.3b", rows=rows).parameters == {"tolerance": 0.5}
    assert {row.claim for row in rows} == CLAIMS.keys()
    together = [measurement(c, 50.0, load=ClosedLoop(c, ramp_up="burst")) for c in (1, 2)]
    other, mine = sweep(TWO, model="opt-2.7b"), having(sweep((1, 2)), spec={"max_num_seqs": 64})
    made = [*other, *sweep(), *together, measurement(load=OpenLoop(requests=4)), *mine]
    found = stored_curves(made, [(EARLIER, plan_of((*BATCHES, 1024)))])
    seen = [(c.subject, len(c.points), c.missing) for c in found]
    assert seen == [("opt-2.7b", 2, ()), ("opt-1.3b", 4, (1024,)), ("opt-1.3b", 2, ()), ("opt-1.3b", 2, ())]
    larger = having(sweep((1024,)), spec={"max_num_seqs": 2048})
    [beyond], [series] = by_series(larger), by_series(sweep())
    plan = {"sweeps": {series: {**PLAN["sweeps"][series], "beyond": beyond}}}
    (curve,) = stored_curves([*larger, *sweep()], [(EARLIER, plan)])
    assert [p.concurrency for p in curve.points] == [*BATCHES, 1024]
    assert len(stored_curves([*larger, *sweep()], [(EARLIER, PLAN)])) == 2


@pytest.mark.parametrize(("measured", "sessions", "missing", "cut"), [
    (TWO, [(EARLIER, PLAN)], (256, 512), ((1024, "too large"),)),
    # The session that measured last has the word.
    (TWO, [(EARLIER, PLAN), (BETWEEN, plan_of(TWO)), (LATER, PLAN)], (), ()),
    (TWO, [(LATER, PLAN)], (), ()),  # no session had begun
    (TWO, [(EARLIER, {})], (), ()),
    (TWO, [(EARLIER, PLAN), (BETWEEN, {})], (256, 512), ((1024, "too large"),)),
    # An adaptive sweep needs no more than it measured.
    ((1, 128, 256, 512), [(EARLIER, plan_of((1, *BATCHES), adaptive={"tolerance": 0.1}))], (), ()),
    ((1, 512), [(EARLIER, plan_of((1, *BATCHES), adaptive={"tolerance": 0.1}))], (256,), ()),
])  # fmt: skip
def test_session_tells_planned_loads(measured, sessions, missing, cut):
    (curve,) = stored_curves(sweep(measured), sessions)
    assert (curve.subject, tuple(p.concurrency for p in curve.points)) == ("opt-1.3b", measured)
    assert (curve.missing, curve.cut) == (missing, cut)
    assert curve.unneeded == ((64,) if measured == (1, 128, 256, 512) else ())
    assert bool(curve.adaptive) is (1 in measured)


def test_every_curve_gets_every_claim():
    judged = judge_all(stored_curves([*sweep(), *sweep(model="opt-2.7b")], []), ROWS)
    subjects = [(v.claim, v.subject) for v, _ in judged]
    of_arithmetic = sum(len(claim.models) for claim in CLAIMS.values() if claim.of == "arithmetic")
    assert len(subjects) == 4 * 2 + 1 + of_arithmetic == len(set(subjects))  # one is of OPT-1.3B alone
    assert all(row.claim == v.claim for v, row in judged)
    plateaus = {v.subject: v.state for v, _ in judged if v.claim == PLATEAU}
    assert plateaus == dict.fromkeys(("opt-1.3b", "opt-2.7b"), PASSES)

    seen = {"telemetry": planted_telemetry(interval_s=0.05, until_s=6.0)}
    small, large = (
        having([measurement(load, rate, model=model, repeat=i, steps=400) for i in range(2)], run=seen)
        for load, rate, model in ((512, 4e4, "opt-125m"), (256, 2e4, "opt-1.3b"))
    )
    judged = (judge_all(stored_curves(made, []), ROWS) for made in ([*small, *large], large))
    both, alone = ([v for v, _ in each if v.claim == DEARER] for each in judged)
    assert [(v.subject, v.value) for v in both] == [("opt-1.3b", pytest.approx(2.0, rel=0.01))] and alone == []
    made = [*sweep(), *sweep(model="opt-2.7b")]
    planned, other = stored_curves(made, [(EARLIER, PLAN)])
    assert not planned.beside and other.beside
    of_other = {v.claim for v, _ in judge_all([planned, other], ROWS) if v.subject == "opt-2.7b"}
    assert of_other == {BLOCKS, "table-1-batch-fits", "larger-models-cannot-hold-500"}
    assert not any(curve.beside for curve in stored_curves(made, [])), "no session said what it was for"


TOGETHER = [measurement(c, law(c), load=ClosedLoop(c, ramp_up="burst"), repeat=i) for c in BATCHES for i in (0, 1)]
SERVED = having(sweep(), spec={"interface": "server"})
STRICT = ClaimRow(PLATEAU, parameters={"tolerance": 0.01}, expected="fails")


@pytest.mark.parametrize(("only", "others"), [({"ramp_up": "burst"}, TOGETHER), ({"interface": "server"}, SERVED)])
def test_special_row_rules_matching_curves(only, others):
    judged = judge_all(stored_curves([*sweep(), *others], []), (*ROWS, replace(STRICT, **only)))
    found = {v.subject: row.expected for v, row in judged if v.claim == PLATEAU}
    assert [*found.values()] == ["passes", "fails"] and all(tells(subject, "opt-1.3b") for subject in found)
    found, rows = stored_curves(sweep(), []), table.rows_from({"rows": [asdict(STRICT)]})
    verdict, told = (next(v for v, _ in judge_all(found, rows, *today)) for today in ((), (ROWS,)))
    assert verdict.state is told.state is FAILS
    assert told.why.startswith(verdict.why) and tells(told.why.removeprefix(verdict.why), "passes")


def test_gate_uses_its_session_terms():
    """5% worse: within the wider margin, and not within the usual one."""
    made = pairs(4, speed=1 / 1.05)
    [(usual, note)] = again(made, (EARLIER, {"gate": TERMS}), (LATER, {"gate": {**TERMS, "margin": 0.5}}))
    [(wide, _)] = again(made, (EARLIER, {"gate": {**TERMS, "margin": 0.2}}))
    assert (usual.outcome, usual.terms.margin, note) == (FAILS, 0.03, "")
    assert (wide.outcome, wide.terms.margin, wide.terms.pairs, wide.gate) == (PASSES, 0.2, 12, "gate")
    for plans in ((), ((EARLIER, {}),), ((EARLIER, {"sweeps": {}}),), ((LATER, {"gate": TERMS}),)):  # no terms
        other = having(pairs(4, speed=0.9), paired={"gate": "other"})
        (gated, note), (failed, _) = again([*pairs(4), *other, *having(pairs(1), paired=None)], *plans)
        assert gated.terms.margin == 0.03 and gated.outcome is PASSES and tells(note, "opt-1.3b", "3%", 12)
        assert failed.outcome is FAILS and again(having(pairs(1), paired=None)) == []
