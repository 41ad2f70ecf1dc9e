"""Section and JSON facts of a gate, and explanations of differences between two sides."""

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from operator import itemgetter
from statistics import geometric_mean, median
from typing import Any

from pytest_slmserve.analysis.estimates import percent, percent_interval
from pytest_slmserve.analysis.gate import diagnosis
from pytest_slmserve.analysis.gate.decision import MAX_DROPPED, Comparison, InterimAnalysis, next_look
from pytest_slmserve.analysis.gate.diagnosis import BY_DEVICE, BY_STEP, PROBE, Change, Difference, Split
from pytest_slmserve.analysis.gate.launch_pairs import EXACT, GATED, OUTPUTS, SIDES, Gated, nothing_counts
from pytest_slmserve.analysis.gate.windows import beside_an_idle_one
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.verdict import State, all_of
from pytest_slmserve.archive.baselines import StoredNoise
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page import charts
from pytest_slmserve.report.section import Chart, Details, FiveLines, Legend, Look, Named, Part, Section, Table
from pytest_slmserve.report.text_table import ABSENT, Column, counted, figure, hundredths, interval_text
from pytest_slmserve.schema.errors import Caches, Side
from pytest_slmserve.schema.records import SIMULATED, Measurement, are_neighbors, release
from pytest_slmserve.schema.specs import GIB

NOTHING_DIFFERS = "nothing differs in the environments, in what the engines resolved, or in what was asked of them"
DIAGNOSIS_COLUMNS: tuple[Column[Change], ...] = (
    Column("", lambda c: c.name, "left"),
    Column("baseline", lambda c: figure(c.baseline)),
    Column("candidate", lambda c: figure(c.candidate)),
    Column("change", lambda c: _difference(c)),
    Column("%", lambda c: _signed_percents(c.relative)),
)
DIAGNOSIS_ROWS = {  # label and scale of each figure
    **{name: (name, 1000) for name in ("total", *BY_STEP, *BY_DEVICE)},
    "steps per request": ("steps per request", 1),
    "step": ("ms per step", 1000),
    **{name: (f"{name}, ms", 1000) for name in PROBE},
}
NOTABLE = 0.01  # a smaller change is not split, because its parts are noise
SPLIT_LEGEND = (
    "prefill: what prompts add to the steps. decode: the steps without that. host gap: no kernel ran on the GPU. The "
    "time is broken down twice: into prefill and decode, and into host gap and kernels."
)
PROBE_LEGEND = (
    "host-speed probe: a fixed piece of Python beside each window. If its CPU time changed, the cores had another "
    "speed beside that side; if only its time changed, others wanted them too, or the engine itself used more cores."
)


def diagnosis_parts(
    baseline: Sequence[Measurement], candidate: Sequence[Measurement], starts: bool = True
) -> Iterator[Part]:
    """Yield explanations of a difference between two sides: parts of the time, start-up times, and facts.

    Invalid measurements count only for start-up times and facts.

    Args:
        starts: whether start-up times are comparable.
    """
    divided = diagnosis.splits(baseline, candidate)
    for split in divided:
        counts = f"{split.baseline.measurements} and {counted(split.candidate.measurements, 'measurement')}"
        heading = f"where the time goes: {split.model}, {split.load.title}, seconds per 1,000 requests ({counts})"
        rows = [
            Change(label, scale * change.baseline, scale * change.candidate)
            for name, (label, scale) in DIAGNOSIS_ROWS.items()
            for change in split.known([name])
        ]
        caption = f"{split.model}, {split.load.title}: seconds per 1,000 requests"
        yield Table(rows, DIAGNOSIS_COLUMNS, caption, heading, always=len(DIAGNOSIS_COLUMNS))
        yield from split_findings(split)
    if divided:
        yield from ("", Legend(SPLIT_LEGEND))
    if any(split.known(PROBE) for split in divided):
        yield from ("", Legend(PROBE_LEGEND))
    for start in diagnosis.start_ups(baseline, candidate) if starts else ():
        relative = f" ({_signed_percents(start.relative)}%)" if start.relative is not None else ""
        told = f"{figure(start.baseline)} -> {figure(start.candidate)} s{relative}"
        yield from ("", f"start-up of {start.name}: {told}, mean of each side's launches")
    yield from difference_parts(diagnosis.fact_differences(baseline, candidate))


def split_findings(split: Split) -> Iterator[str]:
    """Yield the parts that explain most of a change, and why other parts are unknown."""
    sides = dict(zip(SIDES, (split.baseline, split.candidate)))
    by_step, by_device, probe = map(split.known, (BY_STEP, BY_DEVICE, PROBE))
    change, count, step = (each.relative for each in split.known(("total", "steps per request", "step")))
    if change is None or abs(change) < NOTABLE:
        yield f"time per request changed by less than {percent(NOTABLE)}: there is nothing to explain at this load"
    else:
        for part, share in filter(None, map(diagnosis.explaining, (by_step, by_device))):
            more = ", and the other part went the other way" if round(share, 2) > 1 else ""
            yield f"most of the change is {part.name}: {percent(share)} of it{more}"
        yield f"steps per request {_signed_percents(count)}%, time per step {_signed_percents(step)}%"
    if any(abs(part.relative or 0.0) >= NOTABLE for part in probe):  # the host may cause the change of the total
        changed = ", ".join(f"{part.name} {_signed_percents(part.relative)}%" for part in probe)
        yield f"the host was not the same beside both sides: {changed}"
    unnamed = [name for name, side in sides.items() if not side.with_prompt]
    if not by_step and unnamed:
        yield f"prefill and decode unknown: no step is known to hold a prompt ({' and '.join(unnamed)})"
    elif not by_step:
        seen = f"{split.baseline.alone} and {split.candidate.alone}"
        yield (
            f"prefill and decode unknown: nearly every step holds a prompt at this load ({seen} steps only decode, "
            f"{diagnosis.FEWEST_ALONE} are wanted of each side); a smaller load tells them apart"
        )
    if not by_device:
        lacking = " and ".join(name for name, side in sides.items() if "host gap" not in side.figures)
        yield f"host gap unknown: no sensor told how long the GPU ran no kernel ({lacking})"


def difference_parts(differences: Sequence[Difference]) -> Iterator[Part]:
    """Yield a table of the facts that differ, with bytes in GiB if that distinguishes the sides."""
    rows = []
    for each in differences:
        sides = [[ABSENT if value is None else value for value in side] for side in (each.baseline, each.candidate)]
        in_gib = sides
        if each.field.endswith("_bytes"):
            in_gib = [[f"{figure(int(v) / GIB, 4)} GiB" if v.isdigit() else v for v in side] for side in sides]
        rows.append([each.field, *map(" or ".join, in_gib if in_gib[0] != in_gib[1] else sides)])
    columns = [Column(head, itemgetter(place), "left") for place, head in enumerate(("", *SIDES))]
    yield Table(rows, columns, "What differs", "what differs between the sides:", always=len(columns))
    if not rows:
        yield from ("", NOTHING_DIFFERS)


def _difference(seen: Change) -> str:
    decimals = len(figure(seen.baseline).partition(".")[2])
    text = f"{seen.absolute:+,.{decimals}f}"
    return text if text.strip("+-0.,") else text[1:]


def _signed_percents(relative: float | None) -> str:
    text = hundredths(relative, signed=True)
    return "0.0" if text == "+0.0" else text


CACHES = {
    "warm": "compile caches were warm: each side was launched before the first pair",
    "cold": "compile caches were cold: each launch had empty ones",
}
STATES = {  # of a gate of start-up times, by its caches
    ("cold", "warm"): "one start at a time: with empty compile caches, and again with what the first had compiled",
    ("cold",): "one start at a time, with empty compile caches",
    ("warm",): "one start at a time, with warm compile caches: each side was launched before the first pair",
}
STAGE_LEGEND = (
    "import: until the model's process has imported all. device, weights, kv cache: until it has them. profile: of the "
    "memory, with compiling if vLLM does not count that. compile: as vLLM counts it; with warm caches, reading them. "
    "capture: warm-up and CUDA graphs. rest: the front end. Seconds are means over the pairs."
)
LOOKS: dict[State, Look] = {State.PASSES: "good", State.FAILS: "bad", State.INCONCLUSIVE: "open"}
WORDS = {State.PASSES: "pass", State.FAILS: "fail", State.INCONCLUSIVE: "inconclusive"}  # in the texts of a gate
INFORMATION = (
    "Endpoints without a margin are shown only for information. own cores: CPU time per second of the run's processes."
)
KEY = (
    "candidate / baseline: Hodges-Lehmann estimate over the pairs. SD: standard deviation of a pair. detectable: the "
    "smallest slowdown that this number of pairs finds with a power of 90%, for endpoints that do not pass. "
    f"{INFORMATION} mean ratio: the geometric mean, which an interim analysis tests; both limits allow for the noise "
    "of that many pairs."
)
KEY_TOGETHER = (
    "candidate / baseline: geometric mean over the launches, with an interval that holds for other launches on this "
    "host. pairs: launches of both sides. SD: standard deviation of a pair of windows. detectable: the "
    "smallest slowdown that this number of launches finds with a power of 90%, for endpoints that do not pass. "
    f"{INFORMATION}"
)


def ratio_text(seen: Comparison) -> str:
    return ABSENT if seen.ratio is None else f"{seen.ratio.value:.4f}"


def ends_text(seen: Comparison) -> str:
    return interval_text(seen.ratio, "{:.4f}".format)


def margin_text(seen: Comparison) -> str:
    return f"{100 * seen.margin:.3g}" if seen.gated else ABSENT


COLUMNS: tuple[Column[Comparison], ...] = (  # 80 columns show the outcome, the estimate and the margin
    Column("endpoint", lambda c: c.name, "left"),
    Column("better", lambda c: c.better, "left", rank=6),
    Column("pairs", lambda c: str(c.n), rank=4),
    Column("candidate /\nbaseline", ratio_text),
    Column("95%", ends_text, "left", rank=1),
    Column("SD\n%", lambda c: _percents(c.sd), rank=5),
    # If an endpoint passes, its noise was small enough.
    Column(
        "detectable\n% worse",
        lambda c: _percents(None if c.gated and c.outcome is State.PASSES else c.detectable),
        rank=3,
    ),
    Column("margin\n%", margin_text),
    Column("", lambda c: WORDS[c.outcome] if c.gated else "", "left"),
)

Stage = tuple[Change, float]  # and seconds of the baseline's whole start
STAGE_COLUMNS: tuple[Column[Stage], ...] = (
    Column("stage", lambda row: row[0].name, "left"),
    Column("baseline\ns", lambda row: f"{row[0].baseline:.2f}"),
    Column("candidate\ns", lambda row: f"{row[0].candidate:.2f}"),
    Column("change\ns", lambda row: f"{round(row[0].absolute, 2) or 0.0:+.2f}"),
    Column("% of the\nstart", lambda row: _signed_percents(row[0].absolute / row[1])),
)
Step = tuple[str, InterimAnalysis]  # name of the endpoint, and one of its analyses
INTERIM: tuple[Column[Step], ...] = (
    Column("interim analysis", lambda step: step[0], "left"),
    Column("pairs", lambda step: str(step[1].pairs)),
    Column("mean\nratio", lambda step: f"{step[1].mean:.4f}"),
    Column("fails if mean\nis worse than", lambda step: f"{step[1].fails_beyond:.4f}"),
    Column("passes if mean\nis better than", lambda step: f"{step[1].passes_within:.4f}"),
    Column("", lambda step: WORDS[step[1].outcome], "left"),
)


def gate_section(gated: Gated) -> Section:
    """Return the section of a gate, with explanations if it fails."""
    endpoints, reasons, interim = comparison_parts(gated.compared)
    parts: list[Part] = [SIMULATED] if is_simulated(gated) else []
    parts += [*(f"  {side}: {words}" for side, words in described_sides(gated))]
    parts += [f"  {together_text(gated) if gated.terms.together else caches_text(gated)}"] if gated.pairs else []
    nothing = f"nothing was compared: {nothing_counts(gated.dropped, gated.lost)}"
    parts += [endpoints, f"  {thresholds_text(gated)}", reasons] if gated.gated else ["", nothing]
    for verdict in gated.exact:
        parts.append(f"{EXACT.get(verdict.claim, verdict.claim)}: {WORDS[verdict.state]}, {verdict.why}")
    parts += told_of(gated)
    parts += stage_parts(gated)
    parts += [f"next: {': '.join(filter(None, more))}"] if any(more := next_step(gated)) else []
    parts += [outputs] if (outputs := outputs_text(gated)) else []
    parts += [f"excluded: {why}" for why in gated.dropped]
    key = KEY_TOGETHER if gated.terms.together else KEY
    parts += [Details("How it was decided, and what the columns mean"), interim, "", Legend(key)]
    if gated.outcome is State.FAILS:
        sides = gated.measurements("baseline"), gated.measurements("candidate")
        explained = diagnosis_parts(*sides, starts=not gated.terms.together)
        if gated.terms.launches == "start":  # its stages already explain the time
            explained = difference_parts(diagnosis.fact_differences(*sides))
        parts += [Details("Where the time goes, and what differs"), *explained]
    ticks = ["launches of both sides"] if gated.terms.together else []
    charts = partial(gate_charts, gated.compared, *ticks)
    return Section(title(gated), parts, LOOKS[gated.outcome], charts, unit=unit_of(gated))


def unit_of(gated: Gated) -> str:
    """Return the unit of the outputs; empty without pairs."""
    return next((m.workload.unit for m in gated.measurements("baseline")), "")


def stages_by_caches(gated: Gated) -> dict[Caches, tuple[Change, ...]]:
    """Return the stages of the start by state of the caches; none for sides that start at once."""
    told: Sequence[Caches] = () if gated.terms.together else gated.states
    sides = {how: (gated.measurements("baseline", how), gated.measurements("candidate", how)) for how in told}
    return {how: stages for how, both in sides.items() if (stages := diagnosis.stage_changes(*both))}


def stage_parts(gated: Gated) -> Iterator[Part]:
    """Yield the stages of the start: a line if the start passes, else a table.

    A gate of loads has them only if its start fails.
    """
    label, starts = GATED["start"].label, gated.terms.launches == "start"
    outcome = all_of(each.outcome for each in gated.gated if each.name.startswith(label))
    found = stages_by_caches(gated) if starts or outcome is State.FAILS else {}
    for how, stages in found.items():
        start_s = math.fsum(each.baseline for each in stages)
        if outcome is State.PASSES:
            told = ", ".join(f"{s.name} {s.baseline:.1f} ({round(s.absolute, 1) or 0.0:+.1f})" for s in stages)
            yield f"a {how} start of the baseline, s (and the change): {told}"
            continue
        whole = Change(label, start_s, math.fsum(each.candidate for each in stages))
        rows = [(each, start_s) for each in (*stages, whole)]
        yield Table(rows, STAGE_COLUMNS, f"Stages of a {how} start", f"stages of a {how} start:", len(STAGE_COLUMNS))
    if found and outcome is not State.PASSES:
        yield from ("", Legend(STAGE_LEGEND))


def thresholds_text(gated: Gated) -> str:
    margins = sorted({each.margin for each in gated.gated})
    shown = " and ".join(map(percent, margins))
    half = f" ({' and '.join(percent(margin / 2) for margin in margins)})"
    less = f"less than the margin ({shown}) worse"
    return f"passes: shown to be {less}; fails: shown to be worse, by more than half the margin{half}"


def gate_charts(compared: Sequence[Comparison], ticks: str = "pairs of launches") -> Iterator[Chart]:
    """Yield all endpoints with their pairs, then the interim analyses.

    Args:
        ticks: name of the pairs.
    """
    note = f"Ticks: {ticks}. Bars: 95% interval. Upright line of an endpoint: its margin."
    yield Chart("Candidate over baseline", charts.gate_forest(compared), note)
    for each in compared:
        if each.interim:
            yield Chart(f"Interim analyses: {each.name}", charts.interim(each), "Dashed: the margin, and no change.")


def comparison_parts(compared: Sequence[Comparison]) -> tuple[Table, Named, Table]:
    """Return the endpoints, the reasons for gated outcomes, and the interim analyses."""
    reasons = [(each.name, f"{WORDS[each.outcome]}: {each.why}") for each in compared if each.gated]
    steps = [(each.name, step) for each in compared for step in each.interim]
    endpoints = Table(compared, COLUMNS, caption="Endpoints", always=len(COLUMNS))
    return endpoints, Named(reasons), Table(steps, INTERIM, caption="Interim analyses")


def gate_facts(gated: Gated, found: Findings | None = None) -> dict[str, Any]:
    return {
        "five": five_lines([gated], found or Findings()).named,
        **facts(gated, "model", "dropped", "answers"),
        "caches": " and ".join(gated.states),
        "outcome": WORDS[gated.outcome],
        "pairs": len(gated.pairs),
        "launches": gated.terms.launches,
        "windows": gated.windows,
        "refused": gated.refused,
        "layers": diagnosis.worse_layers(gated),
        "sides": dict(described_sides(gated)),
        "gated": map(comparison_facts, gated.gated),
        "shown": map(comparison_facts, gated.shown),
        "exact": {each.claim: each for each in gated.exact},
        **({"stages": stages} if (stages := stages_by_caches(gated)) else {}),
    }


FINAL = re.compile(r"\d+(\.\d+)+")  # a release that is not a release candidate
WORST = (State.FAILS, State.INCONCLUSIVE, State.PASSES)

SHARED = ("gpu_memory_utilization", "kv_cache_bytes")  # divided between sides on one GPU


def answering(gates: Sequence[Gated]) -> list[Gated]:
    """Return the gates without those inconclusive ones that another gate decided later.

    It has the same sides, requests and loads on a machine of the same kind, but other terms: the same gate again could
    pass by chance. Sides on one GPU share its memory, and have fewer output tokens.
    """

    def question(gated: Gated) -> tuple[object, ...]:
        firsts = gated.firsts.values()
        equal = {name for name in SHARED if len({m.spec.facts.get(name) for m in firsts}) == 1}
        sides = {
            side: (
                {name: value for name, value in m.spec.facts.items() if name not in equal},
                asdict(m.workload.spec) | {"output_tokens": None},
                (m.environment.vllm, m.environment.gpu_name or m.environment.cpu),
            )
            for side, m in gated.firsts.items()
        }
        return gated.model, gated.terms.launches == "start", sides

    def began_at(gated: Gated) -> str:
        return min((m.measured_at for m in gated.firsts.values()), default="")

    def loads(gated: Gated) -> set[int | None]:
        return {m.load.max_concurrency for m in gated.measurements("baseline")}

    def decides(later: Gated, gated: Gated) -> bool:
        return (
            later.outcome is not State.INCONCLUSIVE
            and later.terms != gated.terms
            and began_at(later) > began_at(gated)
            and loads(later) >= loads(gated)
            and question(later) == question(gated)
        )

    return [
        gated
        for gated in gates
        if gated.outcome is not State.INCONCLUSIVE or not any(decides(later, gated) for later in gates)
    ]


def worst_of(gates: Sequence[Gated]) -> Gated:
    """Return the first gate that fails, else the first inconclusive one, else that of the newest release."""
    worst = min(gates, key=lambda gated: WORST.index(gated.outcome))
    newest = max(gates, key=lambda gated: [*map(release, compared_releases(gated)[1:])])
    return newest if worst.outcome is State.PASSES else worst


def five_lines(gates: Sequence[Gated], found: Findings) -> FiveLines:
    """Return the five lines of the worst gate.

    Args:
        found: results files, HTML report and command of the run, if known.
    """
    answers = answering(gates)
    gated = worst_of(answers)
    outcome, releases = gated.outcome, compared_releases(gated)
    if (own := found.gate_archives.get(gated.gate)) and (len(gates) == 1 or outcome is not State.PASSES):
        found = replace(found, archives=[own])
    before = ", after the inconclusive ones" if len(answers) < len(gates) else ""
    all_pass = f"; {len(answers)} of {len(gates)} gates pass{before}"
    several = "" if len(gates) < 2 else all_pass if outcome is State.PASSES else f"; the worst of {len(gates)} gates"
    compared = [replace(e, name=e.name.replace(", ", " at the ")) for e in gated.gated if e.outcome is outcome]
    exact = {EXACT.get(each.claim, each.claim): each.why for each in gated.exact if each.state is outcome}
    reasons = [*(f"{each.name}: {each.why}" for each in compared), *(f"{name}: {why}" for name, why in exact.items())]
    answer, why = f"{gated.model} is not judged", next(iter(reasons), "no endpoint could be judged")
    if not gated.pairs and outcome is State.INCONCLUSIVE:
        why = nothing_counts(gated.dropped, gated.lost)
    elif has_few_pairs(gated):
        answer, why = f"the speed of {gated.model} is not judged yet", compared[0].why if compared else why
    elif compared and (seen := compared[0].ratio) and not any(None in pair for pair in compared[0].pairs):
        baseline, candidate = (f"vLLM {each}" for each in releases) if releases else ("the baseline", "the candidate")
        does = "serves {} at" if compared[0].better == "higher" else "of {} takes"
        answer = f"{candidate} {does.format(gated.model)} {seen.value:.3f} times the {compared[0].name} of {baseline}"
        sure, most = interval_text(seen, "{:.3f}".format), 1 + compared[0].margin
        fails, above = outcome is State.FAILS, compared[0].better == "higher"
        limit = (math.sqrt(most) if fails else most) ** (-1 if above else 1)
        limits = f"{'fails' if fails else 'passes'} {'above' if above != fails else 'below'} {limit:.3f}"
        answer += f" ({f'95%: {sure}; ' if sure != ABSENT else ''}{limits})"
    elif exact and outcome is not State.INCONCLUSIVE:
        answer, why = f"{gated.model}: {why}", "it is worse in memory"
        if OUTPUTS in exact:
            why = "the candidate gives the tokens of the baseline another probability"

    if outcome is State.PASSES:
        why = f"within their margins: {', '.join([*(each.name for each in compared), *exact])}"
    elif layers := [text for text in told_of(gated) if text.startswith("slower in: ")]:
        why = layers[0]
    left = [name for name in gated.refused if name not in {each.name for each in gated.gated}]
    more = [f"not judged: {' and '.join(left)}"] if left else []
    why = "; ".join(filter(None, (why, *more, cores_text(gated), next_step(gated)[0])))
    answer = f"{outcome.value.upper()}: {answer}{several}"
    told = answer, why, command_after(gated, found), trust(gated, compared), found.where
    return until_now(FiveLines(*told, LOOKS[outcome], unit_of(gated)), found)


def until_now(five: FiveLines, found: Findings) -> FiveLines:
    """Return the five lines, which an interrupted run without a failure tells to continue."""
    if not found.interrupted or five.look == "bad":
        return five
    state, _, answer = five.answer.partition(": ")
    go_on = with_options(found.command, "--slm-resume") if found.archives else found.command
    return replace(five, answer=f"INTERRUPTED, {state} so far: {answer}", do_this=go_on, look="open")


def compared_releases(gated: Gated) -> list[str]:
    """Return the vLLM releases of both sides; empty if equal or unknown."""
    found = [m.environment.vllm for side in SIDES if (m := gated.firsts.get(side)) and m.environment.vllm]
    return found if len(set(found)) > 1 else []


def with_options(command: str, options: str) -> str:
    """Return a command with these options, in place of options of the same names."""
    for name in re.findall(r"([\w-]+)(?:=\S+)?", options.replace("-o ", "")):
        command = re.sub(rf" (?:-o )?{name}(?:=\S+)?(?= |$)", "", command)
    return f"{command} {options}"


def command_after(gated: Gated, found: Findings) -> str:
    """Return the command after a gate, or another next step.

    It installs a pass, continues an inconclusive gate, finds the first of several slow releases, or traces a failure.
    """
    releases, (_, options) = compared_releases(gated), next_step(gated)
    command = found.gate_commands.get(gated.gate) or found.command
    final = bool(releases) and all(map(FINAL.fullmatch, releases)) and not found.bisects
    if gated.outcome is State.PASSES:
        return f"pip install vllm=={releases[1]}" if final else "nothing: the candidate may replace the baseline"
    if gated.outcome is State.INCONCLUSIVE and not options:
        return "slmserve doctor"
    first = [m for pair in gated.pairs[:1] for m in pair.baseline.at_each_load]
    upgrade = final and release(releases[0]) < release(releases[1])
    if gated.outcome is State.FAILS and first and upgrade and not are_neighbors(*releases):
        same = [first[0].environment.mode, f"--slm-models={first[0].spec.model}"]
        same.append(f"--slm-concurrency={','.join(f'{m.load.max_concurrency}' for m in first)}")
        own = ("--slm-side=", "--slm-records=")  # bisect has its own
        typed = [word for word in shlex.split(command)[1:] if not word.startswith(own) and word != "--slm-gate"]
        words = ["slmserve", "bisect", "--good", releases[0], "--bad", releases[1], "--", *(typed or same)]
        return shlex.join(words)
    speed = gated.slow_load is not None
    traced = "slm_profile=" in command or any(m.spec.interface == "server" for m in first)
    if gated.outcome is State.FAILS and (not speed or traced):
        return found.shown_again or "compare what differs between the sides, which the tables have"
    options = options or "-o slm_profile=traces"
    if {"--slm-gate", "--slm-calibrate"} & {*shlex.split(command)}:  # else it had one of the loads, of its model
        options = re.sub(r" --slm-concurrency=\S+", "", options)
    if not command:
        return f"the command of this gate again, with {options}"
    return with_options(command, options)


def trust(gated: Gated, compared: Sequence[Comparison]) -> str:
    """Return the launches, scatter of the first of these endpoints, hosts, disturbed windows and calibration."""
    seen = [m for side in SIDES for m in gated.measurements(side)]
    if not gated.pairs:
        return "no pair of launches counts"
    simulated = [SIMULATED] if is_simulated(gated) else []
    made = counted(len(gated.pairs), "pair") + " of launches"
    if gated.terms.together:
        windows = counted(sum(gated.windows), "pair")
        made = f"{counted(len(gated.pairs), 'launch')} of both sides at once, with {windows} of windows"
    spread = next((each.sd for each in compared if each.sd is not None), None)
    made += "" if spread is None else f" that scatter by {percent(spread)}"
    hosts = counted(len({m.environment.host for m in seen}), "host")
    disturbed = f"the host disturbed {sum(bool(check(m).noise) for m in seen)} of {counted(len(seen), 'window')}"
    known = "this runner is calibrated" if gated.calibrated else "this runner is not calibrated (--slm-calibrate)"
    return "; ".join([*simulated, f"{made}, on {hosts}", disturbed, known])


def title(gated: Gated) -> str:
    if gated.terms.together:
        launches = counted(len(gated.pairs), "launch")
        return f"{gated.model}: {WORDS[gated.outcome].upper()} after {launches} of both sides at once"
    if has_few_pairs(gated):
        what = "start" if gated.terms.launches == "start" else "speed"
        return f"{gated.model}: {what} NOT JUDGED after {counted(len(gated.pairs), 'pair')} of launches"
    return f"{gated.model}: {WORDS[gated.outcome].upper()} after {len(gated.pairs)} pairs of launches"


def is_simulated(gated: Gated) -> bool:
    return any(pair.baseline.measurements[0].environment.platform == "simulated" for pair in gated.pairs)


def has_few_pairs(gated: Gated) -> bool:
    """Return whether an inconclusive gate has some pairs, but too few for an interim analysis."""
    few = 0 < len(gated.pairs) < gated.terms.looks(gated.terms.pairs)[0]
    return few and gated.outcome is State.INCONCLUSIVE and not gated.terms.together


def next_step(gated: Gated) -> tuple[str, str]:
    """Return what may resolve an inconclusive gate, and options to add to its command.

    It is more pairs or launches, with their time, or a repair, or a new gate. Both texts are empty for any other gate.
    """
    if gated.outcome is not State.INCONCLUSIVE:
        return "", ""
    there, most, together = len(gated.pairs), gated.terms.pairs, gated.terms.together
    goes_on = "--slm-gate --slm-resume" + ("" if together else f" --slm-gate-launches={gated.terms.launches}")
    if not there:  # with few problems, it was interrupted in its first pair
        return ("the same gate can go on", goes_on) if len(gated.dropped) <= MAX_DROPPED else ("", "")
    if together and (gated.settled or there >= most):
        return "a gate that launches its sides one after the other may decide", "--slm-gate-launches=apart"
    unknown = any(each.state is State.INCONCLUSIVE and each.value is None for each in gated.exact)
    if unknown or any(each.n < there for each in gated.gated):
        return "repair what is missing (slmserve doctor), and gate again", ""
    starts = gated.terms.launches == "start"
    # Else this runner is too noisy for more pairs to help.
    waits = gated.unsure_of_memory or not all(each.decided_at for each in gated.gated)
    if not together and len(gated.dropped) > MAX_DROPPED:
        return "repair what makes pairs invalid (slmserve doctor), and gate again", ""
    if not waits or there >= most:
        if starts:
            return "a new gate on a host whose starts scatter less may decide (slmserve doctor)", ""
        more = f"a new gate of up to {2 * most} pairs, a quieter host (slmserve doctor) or a larger margin may decide"
        return more, f"-o slm_gate_pairs={2 * most}"
    look = next_look(there, gated.terms) or most
    takes = everything = ""
    if there > 1:
        # The time of a pair includes its engine starts, which two pairs may have at once. One more pair is for launches
        # that do not count. The minimum ignores a pause.
        began = (min(m.measured_at for launch in pair.launches for m in launch.measurements) for pair in gated.pairs)
        times, step = sorted(map(datetime.fromisoformat, began)), min(2, there - 1)
        each_s = min((after - before).total_seconds() / step for before, after in zip(times, times[step:]))
        takes = f", about {(look - there + 1) * each_s:.0f} s,"
        everything = f", and all {most} take {(most - there + 1) * each_s:.0f} s" if look < most else ""
    more = counted(look - there, "more launch" if together else "more pair")
    loads = ",".join(f"{m.load.max_concurrency}" for m in gated.pairs[0].baseline.at_each_load)
    what = "" if together or starts else f" --slm-concurrency={loads}"
    unsure = [each.name for each in gated.gated if each.outcome is State.INCONCLUSIVE]
    does = "may show that it only seems so" if unsure and gated.refused.keys() >= {*unsure} else "can decide"
    return f"{more}{takes} {does}{everything}", f"{goes_on}{what}"


def caches_text(gated: Gated) -> str:
    """Return the state of the compilation caches, and the median seconds of compilation on each side.

    A low number means that the cache was hit.
    """
    if gated.terms.launches == "start":
        return STATES[gated.states]
    seconds = ([s for m in gated.measurements(side) if (s := m.resolved.compile_s) is not None] for side in SIDES)
    took = [figure(median(each), 2) for each in seconds if each]
    told = f"; compiling took {' and '.join(took)} s of a start" if len(took) == len(SIDES) else ""
    return f"{CACHES[gated.caches]}{told}"


def together_text(gated: Gated) -> str:
    """Return the windows, launches and allowances of sides that share one GPU."""
    window = gated.pairs[0].baseline.at_each_load[-1]
    allowed = " or ".join(dict.fromkeys(f"{percent(each.sd)} ({each.source})" for each in gated.allowances.values()))
    loads = counted(window.load.requests or 0, "request")
    pairs = " to ".join(map(str, sorted({min(gated.windows), max(gated.windows)})))
    count = counted(len(gated.pairs), "launch")
    return (
        f"both live on one GPU, with half of its memory each; {count} of both with {pairs} pairs of windows at each "
        f"load, a window of {loads} of {window.workload.each}; launches may differ by {allowed}; of one host"
    )


def told_of(gated: Gated) -> list[str]:
    """Return layers in which a failing candidate is worse, endpoints that are not judged, and a change of own cores."""
    left = [each.name for each in gated.shown if each.name in gated.refused]
    told = [f"{name} is not judged: {gated.refused[name]}" for name in left]
    found = diagnosis.layers(gated.compared) if gated.outcome is State.FAILS else []
    stages = stages_by_caches(gated) if found else {}
    worse = dict[str, list[str]]()
    for layer, each in found:
        if each.ratio and (change := each.ratio.value - 1):
            text = f"{each.name} {percent(abs(change))} {'lower' if change < 0 else 'higher'}"
            how = next((how for how in stages if layer == "start" and (how in each.name or len(stages) == 1)), None)
            if how and (most := diagnosis.explaining(stages[how])):
                text += f": {most[0].name} {most[0].absolute:+.1f} s"
            worse.setdefault(layer, []).append(text)
    layers = ", ".join(f"{layer} ({'; '.join(texts)})" for layer, texts in worse.items())
    slower = f"slower in: {layers}" if worse else ""
    return [*filter(None, (slower, *told, cores_text(gated)))]


def cores_text(gated: Gated) -> str:
    """Return how many cores each side keeps busy if their numbers clearly differ, else ""."""
    if not (seen := diagnosis.changed_cores(gated.shown)):
        return ""
    known = [(before, after) for before, after in seen.pairs if before and after]
    baseline, candidate = (figure(geometric_mean(side), 2) for side in zip(*known))
    return f"a run keeps {candidate} cores of the host busy with the candidate, and {baseline} with the baseline"


def times_the_cores(gated: Gated) -> str:
    """Return the own cores of the candidate over those of the baseline if they clearly differ, else ""."""
    seen = diagnosis.changed_cores(gated.shown)
    return f"{figure(seen.ratio.value, 2)} times the own cores" if seen and seen.ratio else ""


def beside_texts(model: str, measurements: Sequence[Measurement]) -> list[str]:
    """Return the speed of an engine next to an idle one over that of a single one, if calibrated."""
    found = beside_an_idle_one(m for m in measurements if m.paired)
    told = [f"{percent_interval(ratio)} of its {name} alone" for name, ratio in found.items()]
    return [f"{model} beside an idle engine has {' and '.join(told)}"] if told else []


def outputs_text(gated: Gated) -> str:
    """Return how the tokens of both sides compare with dummy weights; empty for real ones, which have a verdict."""
    if (seen := gated.answers) is None or any(verdict.claim == OUTPUTS for verdict in gated.exact):
        return ""
    differ = "are the same"
    if at := seen.differs:
        differ = f"differ from token {at.position} of request {at.request} on ({at.baseline} and {at.candidate})"
    differ += "" if seen.steady else "; launches of one side differ among themselves"
    asked = f"the first {seen.tokens} greedy tokens of {counted(seen.requests, 'request')}"
    return f"outputs: {asked} {differ}; whether they are right, dummy weights cannot tell"


def calibration_text(kept: StoredNoise) -> str:
    """Return the noise of pairs on this runner, and the detection rates of its gates."""
    place, seen, pairs = kept.place, kept.calibration.unchanged, len(kept.calibration.noise.costs)
    spread = ", ".join(f"{name} {percent_interval(sd)}" for name, sd in kept.calibration.noise.spread.items())
    worse = ", ".join(f"{name} {percent(rates.fail)}" for name, rates in kept.calibration.worse.items())
    return (
        f"{place.model}, by {pairs} pairs of equal sides ({kept.measured_at[:10]}), which scatter by {spread}: an "
        f"unchanged candidate passes in {percent(seen.passed)} and fails in {percent(seen.fail)} of gates, after "
        f"{seen.pairs:.1f} pairs in the mean; "
        f"one that is worse by the margin ({percent(place.margin)}, or an endpoint's own) fails: {worse}"
    )


def described_sides(gated: Gated) -> Iterator[tuple[Side, str]]:
    for side in SIDES if gated.pairs else ():
        each = gated.pairs[0].launch(side).at_each_load
        loads = " and ".join(str(m.load.max_concurrency) for m in each)
        vllm, spec = each[0].environment.vllm, each[0].spec
        words = [f"vLLM {vllm}" if vllm else "no vLLM", *([spec.python] if spec.python else [])]
        words += [f"max_num_seqs {spec.max_num_seqs:,}", f"max_num_batched_tokens {spec.max_num_batched_tokens:,}"]
        words += ["eager"] if spec.enforce_eager else []
        words += [f"{name}={value}" for name, value in (*spec.env, *spec.extra)]
        yield side, ", ".join([*words, *([] if gated.terms.launches == "start" else [f"at concurrency {loads}"])])


def _percents(share: float | None) -> str:
    return figure(None if share is None else 100 * share, 2)


def comparison_facts(seen: Comparison) -> dict[str, Any]:
    """Return the facts of an endpoint for JSON. Only gated ones have an outcome.

    `worse`, `margin` and `detectable` are shares. A negative `worse` means better.
    """
    found = facts(seen, "name", "better", "n", "decided_at", "ratio", "sd", "detectable")
    found["worse"] = None if seen.worse is None else math.expm1(seen.worse)
    return {**found, "outcome": WORDS[seen.outcome], **facts(seen, "why", "margin")} if seen.gated else found
