"""Fit the law of the card and the law of the host to all committed archives, and say how far they predict.

    python studies/two_laws.py            print the tables, after some minutes
    python studies/two_laws.py --write    also write the laws into the package, and the tables into docs/predict.md

A row is a point or a job on one host. It is predicted by laws that have seen nothing of its card, its host, its model,
or of all three. Half-widths are fitted to these errors, and their coverage is counted on hosts (of predictions by shape
alone: on models) that this second fit has not seen either. Beside it stand, on the same cases, the saturation model
that `predict` had before, and AIConfigurator 0.12.0 (`cli_estimate`, agg, vLLM 0.24.0, ISL 512, OSL 256, TP 1), whose
answers are kept in `results`.
"""

from __future__ import annotations

import json
import math
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache
from itertools import product
from statistics import fmean, median
from typing import Any

import numpy as np
from common import BASELINES, CHECKOUT, parser_of, results_in
from scipy.optimize import least_squares, linprog, nnls
from scipy.sparse import lil_matrix

from pytest_slmserve.analysis.advice import two_laws
from pytest_slmserve.analysis.advice.two_laws import HostCost, Laws, Seen, card_work, factors, host_work, step_times
from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.archive.store import read

FILE, PAGE = CHECKOUT / "pytest_slmserve/analysis/advice/two_laws.json", CHECKOUT / "docs/predict.md"
BEGINS, ENDS = "<!-- python studies/two_laws.py --write -->\n", "<!-- end -->\n"
SMALL = 9e8  # weights of a token: OPT-125M and Qwen3-0.6B have fewer
LEVEL = 0.97  # of rows: 95% of hosts and models, of which there are few
HOST_SD, LOOSE = 0.12, 0.1  # how far hosts of one cost are apart; beyond this an error of a row counts linearly
FEWEST = 8  # rows that tell how much slower a host is
STARTS = {"step": 2, "sequences": 0.02, "prompt_tokens": 0.05, "captured": 0.2, "launched": 0.6}  # ms
# Of q: 1 adds both, a large one takes the longer. None: as it fits best.
FORMS = {"card + host": 1.0, "the longer of both": 50.0, "(card^q + host^q)^(1/q)": None}
ALL_THREE, ANY = "card, host and model", "any one of these"


@cache
def rows() -> list[Seen]:
    """All rows of the committed archives of GPUs."""
    return two_laws.seen_in([m for path in sorted(BASELINES.glob("h*.jsonl.xz")) for m in read(path).measurements])


def stacked(those: Sequence[Seen], work: Callable[..., dict[str, float]]) -> tuple[list[str], Any, Any]:
    """Names of what is done; for each row and kind of step how often it comes, and how much of each is done."""
    names, kinds = list(work(those[0].setting, those[0].setting.steps[0])), max(len(r.setting.steps) for r in those)
    counts, amounts = np.zeros((len(those), kinds)), np.zeros((len(those), kinds, len(names)))
    for i, row in enumerate(those):
        for j, step in enumerate(row.setting.steps):
            counts[i, j], amounts[i, j] = step.count, [*work(row.setting, step).values()]
    return names, counts, amounts


def fitted(those: Sequence[Seen], sharpness: float | None = None) -> tuple[Laws, Any]:
    """Both laws by least squares on relative errors, first of the seconds of kernels, then of those that passed; and
    the errors. A model on a card that has many rows counts less per row. How much slower a host is than its cost says
    is an effect of its own, which no prediction has."""
    names, counts, amounts = stacked(those, card_work)
    passed = np.array([row.seconds for row in those])
    kernels, many = passed * [row.busy for row in those], Counter((row.model, row.gpu) for row in those)
    weights = np.array([many[row.model, row.gpu] ** -0.25 for row in those])
    design = np.einsum("rk,rkn->rn", counts, amounts) / kernels[:, None]
    card, _ = nnls(design * weights[:, None], weights)
    run = amounts @ card
    run *= (kernels / (counts * run).sum(1))[:, None]  # as measured, divided among the kinds of steps as by the law
    hosts, costs = sorted({row.host for row in those}), {row.host: row.cost for row in those if row.cost}
    usual = np.exp(np.mean([np.log(astuple(cost)) for cost in costs.values()], axis=0))
    above = np.array([np.log(astuple(costs[h]) / usual) if h in costs else (0.0, 0.0) for h in hosts])
    at = np.array([hosts.index(row.host) for row in those])
    of_host, _, prepared = stacked(those, host_work)
    n, starts = len(of_host), np.log([STARTS.get(name, 0.01) for name in of_host])
    begin = np.concatenate([starts, [1.0, 1.0, math.log(3)], np.zeros(len(hosts))])

    def off(x: Any) -> Any:
        q = sharpness or 1 + math.exp(x[n + 2])
        prepare = prepared @ np.exp(x[:n]) * np.exp(above @ x[n : n + 2] + x[n + 3 :])[at][:, None]
        return np.log(
            (counts * np.exp(np.logaddexp(q * np.log(run + 1e-12), q * np.log(prepare + 1e-12)) / q)).sum(1) / passed
        )

    def errors(x: Any) -> Any:
        return np.concatenate(
            [off(x), 0.02 * (x[:n] - starts), 0.15 * (x[n : n + 2] - 1), x[n + 3 :] * LOOSE / HOST_SD]
        )

    depends = lil_matrix((len(errors(begin)), len(begin)), dtype=int)
    depends[:, : n + 3] = 1
    depends[np.arange(len(those)), n + 3 + at] = 1
    depends[len(those) + n + 2 + np.arange(len(hosts)), n + 3 + np.arange(len(hosts))] = 1
    x = least_squares(errors, begin, loss="soft_l1", f_scale=LOOSE, jac_sparsity=depends, max_nfev=60).x
    coefficients = (dict(zip(of, map(float, by))) for of, by in ((names, card), (of_host, np.exp(x[:n]))))
    q, powers = sharpness or 1 + math.exp(x[n + 2]), tuple(map(float, x[n : n + 2]))
    return Laws(*coefficients, q, HostCost(*map(float, usual)), powers), off(x)


@dataclass(frozen=True)
class Error:
    """A held-out row. seconds, kernels: logarithms of measured over predicted. share: of the host, as predicted. known:
    whether the prediction had the cost of the host. ttft, own, tpot: of a steady load TTFT, and the step of a prompt,
    in predicted mean steps, and the logarithm of measured TPOT over predicted. effect, told: how much slower its host
    is by its rows, and by its cost, both as logarithms."""

    row: int
    unseen: str
    seconds: float
    kernels: float
    share: float
    records: bool
    known: bool
    ttft: float | None
    own: float
    tpot: float
    effect: float
    told: float


Fold = tuple[str, Callable[[Seen], bool], Callable[[Seen], bool], float | None]


def folds() -> Iterator[Fold]:
    """Yield what is unseen, which rows are, which of the others the laws are fitted to, and the form of the law."""
    for gpu in dict.fromkeys(row.gpu for row in rows()):
        yield "card", lambda r, g=gpu: r.gpu == g, lambda r: True, None
        for model in dict.fromkeys(row.model for row in rows() if row.gpu == gpu):
            pair = (gpu, model)
            yield (
                ALL_THREE,
                lambda r, p=pair: (r.gpu, r.model) == p,
                lambda r, p=pair: r.gpu != p[0] and r.model != p[1],
                None,
            )
    for model in dict.fromkeys(row.model for row in rows()):
        yield "model", lambda r, m=model: r.model == m, lambda r: True, None
    for form, sharpness in FORMS.items():
        for host in dict.fromkeys(row.host for row in rows()):
            yield "host" if sharpness is None else form, lambda r, h=host: r.host == h, lambda r: True, sharpness


def errors_of(number: int) -> list[Error]:
    """The errors of a fold, with the cost of the host if there is one, and without."""
    unseen, those, others, sharpness = [*folds()][number]
    learnt = [row for row in rows() if others(row) and not those(row)]
    laws, _ = fitted(learnt, sharpness)
    found = []
    for i, row in enumerate(rows()):
        if not those(row):
            continue
        records = [] if "model" in unseen else [r for r in learnt if r.model == row.model]
        card, host = factors(row.setting, records, laws)
        measured = step_times(row.setting, laws, row.seconds * row.busy / step_times(row.setting, laws).card_s)
        effect = math.log(row.seconds / measured.seconds) / max(measured.host_share, 0.5)
        for cost in {row.cost, None}:
            law = step_times(row.setting, laws, card, host * laws.slower(cost))
            seconds, kernels = math.log(row.seconds / law.seconds), math.log(row.seconds * row.busy / law.card_s)
            mean, point = law.seconds / row.setting.work.output_tokens, row.point
            steady = point.ttft_s and point.tpot_s and not row.setting.together
            ttft, tpot = (point.ttft_s / mean, math.log(point.tpot_s / mean)) if steady else (None, 0.0)
            told = math.log(laws.slower(row.cost))
            known, own = cost is not None, law.each[-1] / mean
            of = (law.host_share, bool(records), known, ttft, own, tpot, effect, told)
            found.append(Error(i, unseen, seconds, kernels, *of))
    return found


def widths(errors: Sequence[Error], card: float | None = None) -> tuple[float, float]:
    """Half-widths that hold LEVEL of the errors of steps that the card alone, and the host alone limits: a regression
    of that quantile on the host's share. card: if that of the card is known."""
    share, off = np.array([e.share for e in errors]), np.array([abs(e.seconds) for e in errors])
    design = np.column_stack([1 - share, share])
    if card is not None:
        off, design = off - card * (1 - share), design[:, 1:]
    n, k = design.shape
    costs = np.concatenate([np.zeros(k), np.full(n, LEVEL), np.full(n, 1 - LEVEL)])
    found = linprog(costs, A_eq=np.hstack([design, np.eye(n), -np.eye(n)]), b_eq=off).x[:k]
    return (*(() if card is None else (card,)), *map(float, found))  # type: ignore[return-value]


def spread_of(errors: Sequence[Error]) -> dict[str, dict[str, float]]:
    """The half-widths of `Laws.spread`."""
    found = {}
    for name in ("records", "shape"):
        mine = [e for e in errors if e.records is (name == "records")]
        card, host = widths([e for e in mine if e.known])
        _, unknown = widths([e for e in mine if not e.known], card)
        found[name] = {"card": card, "host": host, "unknown": max(unknown, host)}
    return found


def half_width(e: Error, spread: dict[str, dict[str, float]]) -> float:
    return two_laws.half_width(spread, e.share, e.records, e.known)


def percents(values: Sequence[float]) -> str:
    return f"{100 * median(map(abs, values)):.1f}" if values else "-"


def table(columns: str, lines: Sequence[Sequence[object]]) -> str:
    names = columns.split(", ")
    ruled = [names, ["---", *["---:"] * (len(names) - 1)], *lines]
    return "\n".join(f"|{'|'.join(map(str, line))}|" for line in ruled)


Bars = dict[str, tuple[float, float, float]]  # by what is unseen: both median errors, and coverage


def study() -> tuple[Laws, str, Bars]:
    """The laws with their intervals; all tables, as Markdown; and what bars are set for."""
    every = rows()
    with multiprocessing.get_context("fork").Pool(2) as pool:  # a row holds its archive's open file: nothing is sent
        errors = [e for each in pool.map(errors_of, range(len([*folds()])), 1) for e in each]
    main = [e for e in errors if e.unseen not in FORMS]
    spread = spread_of(main)

    def held_out(e: Error) -> str:
        return every[e.row].host if e.records else every[e.row].model

    without = {name: spread_of([e for e in main if held_out(e) != name]) for name in {held_out(e) for e in main}}
    inside = {id(e): abs(e.seconds) <= half_width(e, without[held_out(e)]) for e in main}

    def small(those: Sequence[Error]) -> list[Error]:
        return [e for e in those if every[e.row].setting.work.parameters < SMALL]

    def summary(those: Sequence[Error]) -> list[str]:
        wide = median(math.exp(half_width(e, spread)) for e in those)
        return [f"{100 * fmean(inside[id(e)] for e in those):.1f}", f"{wide:.2f}"]

    best = [e for e in main if e.known or every[e.row].cost is None]  # a row's prediction by all that is known
    of = {name: [e for e in best if e.unseen == name] for name in ("card", "model", "host", ALL_THREE)}
    of |= {ANY: [e for e in best if e.unseen != ALL_THREE]}
    bars = {name: (median(abs(e.seconds) for e in those), median(abs(e.seconds) for e in small(those)),
                   fmean(inside[id(e)] for e in those)) for name, those in of.items()}  # fmt: skip
    parts = [table(
        "unseen, predictions, error %, below 1B %, of tokens per busy second %, inside the interval %, half-width",
        [[name, len(e), percents([x.seconds for x in e]), percents([x.seconds for x in small(e)]),
          percents([x.kernels for x in e]), *summary(e)] for name, e in of.items()])]  # fmt: skip
    kinds = []
    for has, known, host in product((True, False), repeat=3):
        e = [x for x in main if (x.records, x.known, x.share > 0.5) == (has, known, host)]
        words = ("its shape alone", "records of the model")[has], ("host unknown", "cost of the host")[known]
        name = f"{'; '.join(words)}; the {('card', 'host')[host]} limits"
        kinds.append([name, len(e), percents([x.seconds for x in e]), *summary(e)])
    parts.append(table("known, predictions, error %, inside the interval %, half-width", kinds))
    parts.append(table(
        "model, cases, saturation model %, laws card unseen %, cases, AIConfigurator %, model unseen %, card unseen %",
        [*beside(best)]))  # fmt: skip
    forms = []
    for form in FORMS:
        those = [e for e in errors if e.unseen == (form if FORMS[form] else "host")]
        mine = [e for e in those if e.known or every[e.row].cost is None]
        limited = grouped([e for e in mine if e.known and e.share > 0.5], lambda e: every[e.row].host).values()
        pairs = [(median(e.effect for e in each), each[0].told) for each in limited if len(each) >= FEWEST]
        explained = 1 - fmean((a - b) ** 2 for a, b in pairs) / np.var([a for a, _ in pairs])
        errs = percents([e.seconds for e in mine]), percents([e.seconds for e in small(mine)])
        forms.append([form, *errs, len(pairs), f"{100 * explained:.0f}"])
    columns = "law of a step, error on unseen hosts %, below 1B %, hosts, variance that their cost explains %"
    parts.append(table(columns, forms))
    laws, off = fitted(every)
    q = replace(laws, spread=spread, latency=latency_of(of[ANY], spread), cards=sorted({r.gpu for r in every}))
    parts.append(f"The laws fit {len(every)} rows with a median error of {percents([*off])}%; q is {q.sharpness:.1f}.")
    return q, "\n\n".join(parts) + "\n", bars


def latency_of(errors: Sequence[Error], spread: dict[str, dict[str, float]]) -> dict[str, float]:
    """`Laws.latency`: the wait of the median, and the factors by which half-widths hold LEVEL of TTFT and of TPOT."""
    steady = [(e, 1 - 1 / rows()[e.row].setting.load) for e in errors if e.ttft]
    wait = median((e.ttft - e.own) / others for e, others in steady if others)
    off = {"ttft": [abs(math.log(e.ttft / (e.own + wait * others))) for e, others in steady]}
    off["tpot"] = [abs(e.tpot) for e, _ in steady]
    wide = [half_width(e, spread) for e, _ in steady]
    return {"wait": wait} | {name: float(np.quantile(np.divide(each, wide), LEVEL)) for name, each in off.items()}


def beside(best: Sequence[Error]) -> Iterator[list[object]]:
    """Yield a line for each model that another predicts too, and one for all, on the cases of either."""
    before = results_in(CHECKOUT / "studies/results/predict-by-saturation-law.json.xz")
    answers = {tuple(k): rate for *k, rate in results_in(CHECKOUT / "studies/results/aiconfigurator-0.12.0.json")}
    mine = {(e.unseen, rows()[e.row].point.used[0][0].key, rows()[e.row].host): e for e in best}
    old, aic = [], []
    for key, hosts, ratios in before:
        if len(hosts) == 1 and (e := mine.get(("card", key, hosts[0]))):
            old += [(rows()[e.row].model, math.log(ratio), e.seconds) for ratio in ratios]
    for (unseen, key, host), e in mine.items():
        s, row = rows()[e.row].setting, rows()[e.row]
        asked = (s.work.prompt_tokens, s.work.output_tokens) == (512, 256) and len(s.steps) < 3
        rate = answers.get((row.model, row.gpu, s.load)) if asked and unseen == "model" else None
        if rate and (by_records := mine.get(("card", key, host))):
            aic.append((row.model, math.log(rate / row.tokens_per_s), e.seconds, by_records.seconds))
    for model in [*dict.fromkeys(r.model for r in rows()), "all"]:
        these, those = ([x for x in each if model in (x[0], "all")] for each in (old, aic))
        if these or those:
            yield [model, len(these), *(percents([x[i] for x in these]) for i in (1, 2)),
                   len(those), *(percents([x[i] for x in those]) for i in (1, 2, 3))]  # fmt: skip


def rounded(laws: Laws) -> str:
    """The laws as the package has them: a line for each part, with numbers of five digits."""
    short = json.loads(json.dumps(asdict(laws)), parse_float=lambda number: float(f"{float(number):.5g}"))
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in short.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--write", action="store_true", help="write the laws, and the tables of docs/predict.md")
    given = parser.parse_args()
    laws, text, _ = study()
    print(text)
    if given.write:
        FILE.write_text(rounded(laws), "utf-8")
        before, _, after = PAGE.read_text("utf-8").partition(BEGINS)
        PAGE.write_text(f"{before}{BEGINS}\n{text}\n{ENDS}{after.partition(ENDS)[2]}", "utf-8")


if __name__ == "__main__":
    main()
