"""The last screen: what is on it, in which order, and that it is one screen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from launches import pairs
from strategies import H200, job_point, law, measurement, noisy_curve, point, shared_point

from pytest_slmserve.analysis.claims.table import ClaimRow
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import judge_gate
from pytest_slmserve.analysis.metrics.window import parse_slo
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report import screen as last_screen
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.screen import MOST_LINES, screen
from pytest_slmserve.report.text_table import laid_out
from pytest_slmserve.report.verdicts import remedy
from pytest_slmserve.schema.records import Environment

BATCHES = (64, 128, 256, 512)
EXPECTED_TO_FAIL = ClaimRow("table-1-batch-fits", expected="fails", evidence="238 fit, the paper has 256")


@pytest.fixture(autouse=True)
def eighty_columns() -> Iterator[None]:
    with laid_out(80):
        yield


def sweep(model: str = "opt-1.3b", environment: Environment = H200, repeats: int = 2) -> Curve:
    made = [
        measurement(c, law(c) * (1 + 0.002 * i), model=model, environment=environment, repeat=i)
        for c in BATCHES
        for i in range(repeats)
    ]
    return curve_of(model, made)


def verdict(state: State, claim: str = "throughput-plateau", subject: str = "opt-1.3b", **facts: object) -> Verdict:
    return Verdict(claim, subject, state, "because of this", **facts)  # type: ignore[arg-type]


def lines_of(**found: object) -> list[str]:
    return [text for text, _ in screen(Findings(**found))]  # type: ignore[arg-type]


def rows(lines: list[str]) -> dict[str, list[str]]:
    """Cells by the first word of a line."""
    return {line.split()[0]: line.split()[1:] for line in lines if line.strip()}


def test_a_model_without_a_sweep_has_its_line_beside_those_that_have_one():
    alone = curve_of("opt-125m", [measurement(64, 500.0, model="opt-125m", repeat=i) for i in range(2)])
    further = replace(curve_of("opt-1.3b", [measurement(8, 100.0)]), beside=True)
    shown = rows(lines_of(curves=[sweep(), alone, further]))
    assert shown["opt-125m"][0] == "64" and shown["opt-1.3b"][0] == "from"


def test_a_model_is_a_line_with_its_figures_where_the_plateau_begins():
    curve = sweep()
    at = next(p for p in curve.points if p.concurrency == 256)
    lines = lines_of(curves=[curve], archives=["a.jsonl"])
    assert lines[0] == "NVIDIA H200, vLLM 0.26.0"
    assert rows(lines)["opt-1.3b"][:4] == ["from", "256", "256", f"{at.output_tokens_per_s:,.0f}"]
    assert lines[-2:] == ["archive: a.jsonl", "more: slmserve report a.jsonl"]
    assert lines_of(curves=[curve])[-1] == "more: -v, or --slm-report=tables", "nothing was kept"


def test_without_a_plateau_the_figures_are_those_of_the_most_throughput():
    rising = noisy_curve({1: 1000.0, 2: 2000.0, 4: 4000.0}, noise=0.001)
    assert rows(lines_of(curves=[rising]))["opt-1.3b"][:3] == ["past", "4", "4"]
    unsure = noisy_curve({1: 1000.0, 2: 2000.0, 4: 4000.0}, noise=0.0, repeats=1)
    assert rows(lines_of(curves=[unsure]))["opt-1.3b"][:2] == ["past", "4?"], "nothing tells the noise"
    noisy = noisy_curve({1: 1000.0, 2: 2000.0, 4: 2100.0}, noise=0.1, repeats=2)
    assert noisy.pareto_plateau().state is State.INCONCLUSIVE
    assert rows(lines_of(curves=[noisy]))["opt-1.3b"][1].endswith("?"), "the claim is inconclusive"
    alone = Curve(subject="opt-1.3b", points=(point(8, [100.0]),))
    assert rows(lines_of(curves=[alone]))["opt-1.3b"][:2] == ["8", "100.0"], "one point has no plateau to be named"


def test_the_largest_load_within_the_slo_and_the_energy_have_columns_where_they_are_known():
    curve = sweep()
    assert "SLO" not in " ".join(lines_of(curves=[curve])) and "J/" not in " ".join(lines_of(curves=[curve]))
    slow = curve.points[2].e2e_s
    assert slow is not None
    with_slo = lines_of(curves=[curve], slo=parse_slo(f"e2e:{slow:.3f}s"))
    assert with_slo[0].endswith(f"SLO e2e:{1e3 * slow:.0f}ms of 90 % of the requests")
    assert rows(with_slo)["opt-1.3b"][-1] in ("128", "256")
    assert rows(lines_of(curves=[curve], slo=parse_slo("e2e:999s")))["opt-1.3b"][-1] == ">=512"
    assert rows(lines_of(curves=[curve], slo=parse_slo("e2e:1ms")))["opt-1.3b"][-1] == "none"
    with_energy = replace(curve, points=tuple(replace(p, energy_per_token_j=0.0512) for p in curve.points))
    assert rows(lines_of(curves=[with_energy]))["opt-1.3b"][-1] == "0.0512"


def test_devices_have_a_table_each_and_simulated_numbers_shout():
    text = "\n".join(lines_of(curves=[sweep(), sweep(environment=Environment(platform="simulated"))]))
    assert text.count("plateau") == 2 and "SIMULATED ENGINE: these numbers come from a formula" in text


def test_replicas_and_jobs():
    alone = replace(point(96, [1000.0, 1010.0]), e2e_s=24.6, e2e_p99_s=25.1)
    shared = [shared_point(2, (1200.0, 1210.0)), shared_point(2, (900.0, 910.0), sharing="time-slicing")]
    curve = Curve(subject="opt-1.3b", points=(alone,), shared=tuple(shared), measurements=(measurement(),))
    text = " ".join(" ".join(lines_of(curves=[curve], shared=shared, jobs=[job_point()])).split())
    assert "replicas: 2 x opt-1.3b, mps: 1,205 tokens/s at concurrency 96, +19.9 % (95 %: " in text
    assert "over one engine; most of 2 deployments and loads" in text
    assert (
        "job: opt-6.7b: 10.05 requests/s, 2,573 tokens/s, mean E2E 2.01 s (500 of 512/256 tokens, all at once)" in text
    )
    text = " ".join(" ".join(lines_of(jobs=[job_point(), job_point(output_tokens=32)])).split())
    assert "Jobs on NVIDIA H200, vLLM 0.26.0" in text and "opt-6.7b 512/256 500 at once" in text


def test_claims_are_counted_and_those_that_fail_have_a_sentence():
    judged = [
        (verdict(State.PASSES), None),
        (verdict(State.FAILS, "table-1-batch-fits"), EXPECTED_TO_FAIL),
        (verdict(State.FAILS, subject="opt-2.7b"), None),
        (verdict(State.PASSES, "table-1-batch-fits", "opt-2.7b"), EXPECTED_TO_FAIL),
    ]
    lines = screen(Findings(judged=judged))
    assert lines == [
        ("claims: 1 pass, 1 fail as expected, 1 FAIL, 1 PASS, UNEXPECTED", "red"),
        ("  FAILS throughput-plateau, opt-2.7b: because of this", "red"),
        ("  PASSES, UNEXPECTED table-1-batch-fits, opt-2.7b: because of this", "red"),
    ]
    either = replace(EXPECTED_TO_FAIL, expected="either")
    open_ones = [(verdict(state), either) for state in (State.FAILS, State.INCONCLUSIVE)]
    text = "claims: 1 pass, 1 fail as expected; either expected: 1 fail, 1 inconclusive"
    assert screen(Findings(judged=[*judged[:2], *open_ones])) == [(text, "green")]
    assert screen(Findings(judged=judged[:2])) == [("claims: 1 pass, 1 fail as expected", "green")]
    assert screen(Findings(judged=judged[:2], strict=True))[0][1] == "red"


def test_inconclusive_claims_are_together_by_what_would_decide_them():
    noisy = {"value": 0.1, "low": 0.05, "high": 0.15}
    judged = [(verdict(State.INCONCLUSIVE, subject=f"opt-{size}", **noisy), None) for size in ("125m", "1.3b", "2.7b")]
    lost = Verdict.inconclusive("pareto-up-to-plateau", "opt-1.3b", "not measured at concurrency 8")
    assert lines_of(curves=[sweep()], judged=[*judged, (lost, None)])[-6:-1] == [
        "claims: 4 inconclusive",
        "  inconclusive: --slm-gpu --slm-resume --slm-repeats 4 or a longer --slm-window",
        "    may decide: throughput-plateau (3 verdicts)",
        "  inconclusive: --slm-gpu --slm-resume measures what is missing or invalid:",
        "    pareto-up-to-plateau (opt-1.3b)",
    ]
    assert remedy(Verdict.inconclusive("x", "y", "noise unknown: one repeat of each point"), []).endswith(
        "tells the noise"
    )
    assert remedy(Verdict.inconclusive("x", "y", "no sensor told it"), []) == "no sensor told it"


def test_what_was_disturbed_is_named_the_worst_first():
    curve = noisy_curve({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0})
    cold, busy = (replace(p, degraded=(f"another process took {p.concurrency} % of it",)) for p in curve.points[:2])
    lines = lines_of(curves=[replace(curve, points=(cold, busy, point(4, ()), curve.points[3]))], jobs=[job_point(())])
    assert lines[-4:-1] == [
        "disturbed: 4 of 5 points",
        "  INVALID: opt-1.3b at 4; opt-6.7b, jobs at once: planted: invalid",
        "  degraded: opt-1.3b at 1, 2: another process took 1 % of it",
    ]


def test_noise_comes_last_and_what_was_left_out_before_it():
    curve = noisy_curve({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0})
    slow = tuple(
        replace(p, noise=tuple(f"not steady: {p.concurrency * i} apart" for i in (1, 2))) for p in curve.points
    )
    partly = replace(slow[0], left_out=1, problems=("1 requests failed",))
    lines = lines_of(curves=[replace(curve, points=(partly, *slow[1:3], curve.points[3]))])
    assert lines[-4:-1] == [
        "disturbed: 3 of 4 points",
        "  some left out: opt-1.3b at 1: 1 requests failed",
        "  noisy, kept: opt-1.3b at 2, 4: not steady: 2 apart, and 1 more like it",
    ]


def test_a_gate_has_its_outcome_first_and_the_endpoints_that_do_not_pass_before_the_others():
    slower = judge_gate(pairs(6, speed=0.9), GateCriteria())
    lines = lines_of(gates=[slower], archives=["a.jsonl"], written="written: gate.json and gate.md")
    assert lines[0] == "opt-1.3b: FAIL after 6 pairs of launches" and "  fail" in lines[4]
    why = "10 % lower (0.9 times the baseline) in the first 4 pairs, which noise does not explain"
    assert " ".join(" ".join(lines[5:7]).split()) == why
    assert lines[-3:] == ["written: gate.json and gate.md", "archive: a.jsonl", "more: slmserve report a.jsonl"]


def test_nothing_is_said_of_nothing():
    assert lines_of() == []
    assert lines_of(notes=["the line was torn"], archives=["a.jsonl"]) == ["note: the line was torn"]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_it_is_one_screen_however_much_there_is(width):
    """Nine models, twenty jobs, and everything wrong."""
    wrong = "a reason of many words " * 20
    models = [f"model-{number}" for number in range(9)]
    judged = [(replace(verdict(State.FAILS, subject=model), why=wrong), None) for model in models]
    judged += [(Verdict.inconclusive(f"claim-{model}", model, f"{model} {wrong}"), None) for model in models]
    curves = [replace(sweep(), subject=model) for model in models]
    curves = [replace(c, points=tuple(replace(p, degraded=(wrong,)) for p in c.points)) for c in curves]
    jobs = [job_point(output_tokens=number) for number in range(1, 21)]
    found = Findings(curves=curves, judged=judged, jobs=jobs, notes=[wrong] * 5, archives=["a.jsonl"])
    with laid_out(width):
        lines = [text for text, _ in screen(found)]
    assert max(map(len, lines)) <= width and len(lines) == MOST_LINES
    text = "\n".join(lines)
    assert "model-0  from" in text and "FAILS throughput-plateau, model-0" in text and "inconclusive: model-0" in text
    assert (
        "more models" in text
        and "20 jobs, which the tables have" in text
        and lines[-1] == "more: slmserve report a.jsonl"
    )


def test_the_parts_are_made_once_however_little_room_there_is(monkeypatch):
    made = []
    monkeypatch.setattr(last_screen.sweeps, "overview_tables", lambda found: made.append(found) or [])
    assert len(lines_of(notes=["many words " * 100] * 9)) <= MOST_LINES and len(made) == 1


def test_several_gates_are_one_screen():
    lines = lines_of(gates=[judge_gate(pairs(6, speed=0.9), GateCriteria())] * 4, archives=["a.jsonl"])
    assert len(lines) <= MOST_LINES and lines.count("opt-1.3b: FAIL after 6 pairs of launches") == 4


def test_the_usual_run_is_within_24_lines_with_the_line_of_pytest_above():
    curves = [sweep(model) for model in ("opt-125m", "opt-1.3b", "opt-2.7b")]
    judged = [(verdict(State.FAILS, f"claim-{n}", "opt-1.3b"), None) for n in range(30)]
    judged += [(Verdict.inconclusive("other", "opt-125m", "for want of data"), None)]
    lines = lines_of(curves=curves, judged=judged, jobs=[job_point()] * 9, notes=["a note"] * 9, archives=["a.jsonl"])
    assert len(lines) == MOST_LINES == 23
    assert sum("FAILS" in line for line in lines) >= 5, "what fails has more room than notes"
