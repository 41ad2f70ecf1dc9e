"""Headline ratios of pages: computed again from the archives, with number and interval, and held
against every committed archive that has the same case on another host.

A headline says which numbers its paragraph has to hold, in these digits. Hosts of one kind differ by up to a factor of
two, so a ratio stands with the number of its hosts, and with what it would be by the rates of every host that has but
one side.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import fmean
from typing import Any

import pytest
from committed import archive, names_of
from pages import ALL_PAGES
from scripts import RESULTS, checkout_script, loaded, needs_checkout
from written_pages import gates_of

from pytest_slmserve.analysis.claims.table import stored_curves
from pytest_slmserve.analysis.compare.changes import TOLERANCE, compare
from pytest_slmserve.analysis.compare.deployments import PairReplicas, compared, deployments
from pytest_slmserve.analysis.estimates import Interval, grouped
from pytest_slmserve.analysis.gate.decision import Comparison
from pytest_slmserve.analysis.gate.diagnosis import changed_cores
from pytest_slmserve.analysis.gate.launch_pairs import SIDES, Gated
from pytest_slmserve.analysis.points import Point, point_of, ratio
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.report.gate import stages_by_caches
from pytest_slmserve.schema.records import Measurement, hosts_of
from pytest_slmserve.schema.specs import is_steady

needs_checkout()
GPU_ARCHIVES = "h[12]00-*"
TIMES = "\N{MULTIPLICATION SIGN}"
LARGER = (("max_cudagraph_capture_size", 2048),)


def times(seen: Interval, digits: int = 2) -> str:
    """Return a ratio with its interval, as pages write it."""
    assert seen.low is not None and seen.high is not None, "a headline has an interval"
    return f"{seen.value:.{digits}f}{TIMES} ({seen.low:.{digits}f} to {seen.high:.{digits}f})"


def on(hosts: int) -> str:
    return "on one host" if hosts == 1 else f"on {hosts} hosts"


def case_of(m: Measurement) -> tuple[Any, ...]:
    """Equal where only the host and further engine arguments may differ."""
    return m.environment.gpu_name, m.environment.vllm, replace(m.spec, extra=()).family, m.workload.hash


@cache
def by_hosts(name: str, model: str, load: int) -> dict[str | None, dict[Any, Point]]:
    """Valid points of one engine of a model under a staggered load, as in the archive, of all archives: by host and by
    arguments."""

    def is_it(m: Measurement) -> bool:
        alone = m.alone and m.paired is None and is_steady(m.load) and m.load.ramp_up == "staggered"
        return alone and m.spec.model == model and m.load.max_concurrency == load

    (wanted,) = {case_of(m) for m in archive(name) if is_it(m)}
    every = {m.id: m for other in names_of(GPU_ARCHIVES) for m in archive(other) if is_it(m) and case_of(m) == wanted}
    found: dict[str | None, dict[Any, Point]] = {}
    for (host, arguments), same in grouped(every.values(), lambda m: (m.environment.host, m.spec.extra)).items():
        if (point := point_of([(m,) for m in same])).valid:
            found.setdefault(host, {})[arguments] = point
    return found


def served_over(baseline: Point, candidate: Point) -> Interval:
    """The ratio of tokens/s as `slmserve compare` has it: with what launches of their own may differ by."""
    sides = [[m for group in point.used for m in group] for point in (baseline, candidate)]
    (change,) = compare(*sides, TOLERANCE, ["output_tokens_per_s"]).changes
    return change.ratio


def larger_graphs() -> list[str]:
    """Qwen3 4B with larger CUDA graphs over vLLM's default. Hosts that have one side only stand in for that side."""
    hosts = by_hosts("h100-vllm-0.26.0-cuda-graphs", "qwen3-4b", 256)
    both = [each for each in hosts.values() if {(), LARGER} <= each.keys()]
    said = [*(times(served_over(each[()], each[LARGER])) for each in both), on(len(both))]
    said += [f"{len(each[side].repeats)} repeats" for each in both for side in ((), LARGER)]
    mixed = [
        (each.get(LARGER, own[LARGER]).output_tokens_per_s or 0) / (each.get((), own[()]).output_tokens_per_s or 0)
        for own in both
        for each in hosts.values()
        if each not in both and {(), LARGER} & each.keys()
    ]
    if mixed:
        said += [f"{min(mixed):.2f} to {max(mixed):.2f}", f"{len(hosts) - len(both)} other hosts"]
    return said


@cache
def sets_under_mps() -> list[PairReplicas]:
    """All pairs of two engines under MPS and one alone on that host, with two repeats of each or more, once."""
    found: dict[tuple[str, ...], PairReplicas] = {}
    for name in names_of(GPU_ARCHIVES):
        if any(m.replica and m.replica.sharing == "mps" for m in archive(name)):
            for curve in stored_curves(archive(name), []):
                for shared, alone in compared(curve, "mps"):
                    if shared.count == 2 and min(len(shared.repeats), len(alone.repeats)) > 1:
                        found[shared.records] = shared, alone
    return [*found.values()]


def extremes(pairs: Sequence[PairReplicas]) -> list[str]:
    seen = sorted((ratio(*pair) for pair in pairs), key=lambda one: one.value)
    hosts = hosts_of(m for shared, _ in pairs for group in shared.used for m in group) - {None}
    return [times(seen[0]), times(seen[-1]), f"{len(pairs)} sets {on(len(hosts))}"]


def two_engines(least: float, most: float) -> list[str]:
    """The least and the largest gain of two engines if one keeps the GPU busy for a share between these."""
    busy = [(pair, pair[1].engine_active) for pair in sets_under_mps()]
    return extremes([pair for pair, share in busy if share is not None and least < share < most])


def two_engines_of_today() -> list[str]:
    """The same of the models that the papers did not have, as changes."""
    seen = [ratio(*pair).value - 1 for pair in sets_under_mps() if not (pair[0].model or "").startswith("opt-")]
    return [f"{100 * min(seen):+.0f}% to {100 * max(seen):+.0f}%"]


def throughput_in(name: str) -> tuple[Gated, Comparison]:
    """Return the gate of an archive, and its comparison of output tokens/s."""
    (gated,) = gates_of(name)
    return gated, next(one for one in gated.gated if one.name == "output tokens/s")


def gate_of_two_releases() -> list[str]:
    """Pairs of launches are made on one host each, so all hosts that have both sides are in the archive."""
    gated, seen = throughput_in("h200-vllm-0.20.2-0.26.0-gate")
    low, high = seen.ratio.low, seen.ratio.high
    assert low is not None and high is not None and high < 1 and seen.n == len(gated.pairs)
    hosts = hosts_of(m for side in SIDES for m in gated.measurements(side))
    said = [times(seen.ratio, 3), f"{seen.n} pairs of launches {on(len(hosts))}"]
    return [*said, f"within {100 * seen.margin:.0f}%", f"slower by {100 * (1 - high):.1f}% to {100 * (1 - low):.1f}%"]


def gates_of_json() -> list[str]:
    """Output tokens/s of vLLM 0.24.0 with JSON, relative to 0.23.0, by all gates of the two; one of them fails."""
    found = [throughput_in(name) for name in names_of("h200-vllm-0.23.0-0.24.0-gate-json*")]
    assert [gated.model for gated, seen in found if seen.outcome is State.FAILS] == ["opt-13b"]
    kept = [[side for side in pair if side] for gated, _ in found for pair in own_cores_in(gated).pairs]
    old, new = (" to ".join(f"{end(side):.2g}" for end in (min, max)) for side in zip(*kept))
    said = [times(seen.ratio, 2 if gated.model == "gemma-3-270m" else 3) for gated, seen in found]
    return [*said, f"keeps {old} cores", f"keeps {new}"]


def own_cores_in(gated: Gated) -> Comparison:
    """Return the comparison of own cores if it clearly differs."""
    seen = changed_cores(gated.shown)
    assert seen is not None
    return seen


def at_a_small_load() -> list[str]:
    """Mean E2E of OPT-1.3B of 0.26.0 over 0.25.1 at the small load, on each host, where no gate judges it."""
    gates = [gated for name in names_of("h200-vllm-0.25.1-0.26.0-gate*") for gated in gates_of(name)]
    shown = [one for gated in gates if gated.model == "opt-1.3b" for one in gated.compared]
    found = [one for one in shown if one.name in ("mean E2E, small load", "mean E2E")]
    assert {one.outcome for one in found if one.gated} == {State.INCONCLUSIVE}
    return [times(one.ratio) for one in found if one.ratio]


def less_of_the_host() -> list[str]:
    """Own cores by all gates of two releases whose sides clearly differ in them, at 256."""
    gates = [gated for name in names_of("h200-vllm-0.*-0.*-gate*") if "json" not in name for gated in gates_of(name)]
    seen = [(gated.model, one) for gated in gates if gated.terms.together and (one := changed_cores(gated.shown))]
    assert sorted(model for model, _ in seen) == ["opt-1.3b", "opt-1.3b", "opt-1.3b", "qwen3-0.6b"]
    return [times(one.ratio) for _, one in seen if one.ratio]


def worst_of_neighbors(model: str, figure: str) -> tuple[str, str, list[Gated]]:
    """Return the limit of a figure in all that is judged, the number of hosts, and the gates of a model's neighbors."""
    names = [name for name in names_of("h200-vllm-0.2*-0.2*-gate*") if not re.search("json|0.20.2-0.26.0", name)]
    found = [gated for name in names for gated in gates_of(name)]
    gates = [gated for gated in found if gated.model == model and gated.terms.together]
    judged = [one for gated in gates for one in gated.gated if figure in one.name]
    assert {one.outcome for one in judged} == {State.PASSES}
    worst = max(1 / one.ratio.low - 1 for one in judged if one.ratio and one.ratio.low)
    hosts = hosts_of(m for gated in gates for m in gated.measurements("baseline"))
    return f"{100 * worst:.1f}%", on(len(hosts)), gates


def opt_of_all_releases() -> list[str]:
    worst, hosts, _ = worst_of_neighbors("opt-1.3b", "tokens")
    return [worst, hosts]


def qwen_of_all_releases() -> list[str]:
    """Kernels and throughput of Qwen3 0.6B by gates of neighbors that share the GPU: as a language model, and for
    embeddings."""
    worst, hosts, gates = worst_of_neighbors("qwen3-0.6b", "busy second")
    served = [one for gated in gates for one in gated.gated if one.name.startswith("output tokens/s")]
    assert {one.outcome for one in served} == {State.INCONCLUSIVE} and len(gates) - len(served) == 11
    whys = [one.why.rpartition("a slowdown of ")[2] for one in served if "a slowdown of" in one.why]
    found_from = sorted(float(why.rstrip("%")) for why in whys)
    assert (len(served), len(whys)) == (5, 4)
    return [f"{len(gates)} gates", worst, hosts, f"slowdown of {found_from[0]:g}% to {found_from[-1]:g}%"]


def embeddings(*pairs: str, name: str) -> list[Interval]:
    """Return the ratio of one endpoint, at the large load if there are two, by each gate of embeddings."""
    names = [each for pair in pairs for each in names_of(f"h200-vllm-{pair}-gate-embed*")]
    compared = [one for each in names for gated in gates_of(each) for one in gated.compared]
    seen = [one for one in compared if one.name in (name, f"{name}, large load")]
    assert len(seen) == len(names)
    return [one.ratio for one in seen if one.ratio]


def slower_embeddings() -> list[str]:
    """Texts/s of Qwen3 0.6B of a release that the next one replaces, with the layer where each side had the whole GPU,
    and of one that polls for results."""
    said = [times(one, 3) for one in embeddings("0.24.0-0.25.1", "0.25.1-0.26.0", name="output tokens/s")]
    apart, served = throughput_in("h200-vllm-0.24.0-0.25.1-gate-embed-apart")
    layers = [one.ratio.value for one in apart.shown if "busy second" in one.name or "with a kernel" in one.name]
    _, polling = throughput_in("h200-vllm-0.25.1-gate-embed-apart-polling")
    counts = [f"{sum(new < old for old, new in each.pairs)} of {each.n} pairs" for each in (served, polling)]
    scatter = f"scatter by {100 * polling.sd:.0f}%"
    return [*said, *(f"{each:.3f}{TIMES}" for each in layers), times(polling.ratio, 3), *counts, scatter]


def faster_embeddings() -> list[str]:
    """Texts per busy second of Qwen3 0.6B, in percent more, on two hosts."""
    ratios = embeddings("0.23.0-0.24.0", name="tokens per busy second")
    shares = [[100 * (each - 1) for each in (one.value, one.low, one.high) if each is not None] for one in ratios]
    return ["{:.1f}% ({:.1f} to {:.1f})".format(*each) for each in shares]


def both_starts() -> list[str]:
    """Pairs of launches, and seconds of the baseline's start with cold and with warm caches."""
    (gated,) = gates_of("cpu-vllm-0.32.0-gate-start-both-caches-same")
    assert gated.outcome is State.PASSES and gated.states == ("cold", "warm")
    stages = stages_by_caches(gated)
    cold, warm = ({each.name: each.baseline for each in stages[how]} for how in gated.states)
    seconds = [f"{sum(each.values()):.0f} s with {how}" for how, each in (("cold", cold), ("warm", warm))]
    return [
        f"{len(gated.pairs)} pairs of launches",
        *seconds,
        f"compiles for {cold['profile'] - warm['profile']:.0f} s",
    ]


def fewer_threads() -> list[str]:
    """JSON output of OPT-13B with one thread of OpenMP, relative to the default."""
    gated, seen = throughput_in("h200-vllm-0.26.0-gate-json-omp-threads")
    before, after = map(fmean, zip(*own_cores_in(gated).pairs))
    return [times(seen.ratio, 3), f"{after:.2g} cores busy instead of {before:.2g}"]


def clients() -> list[str]:
    """The 99th percentile of the error with 1,000 streams at once, of all committed results."""
    errors: dict[str, list[float]] = {}
    with loaded(checkout_script("studies/common.py")) as common:
        files = [common.results_in(path) for path in sorted(RESULTS.glob("client-accuracy-*.json.xz"))]
    for one in (one for told in files for one in told["found"]):
        if one["streams"] == 1000 and one["starts"] == "together":
            errors.setdefault(one["client"].split()[0], []).append(1000 * one["ttft_p99"])
    assert {len(each) for each in errors.values()} == {len(files)}
    ours = errors.pop("pytest-slmserve")
    others = [f"{min(each):,.0f} to {max(each):,.0f}" for each in errors.values()]
    return [f"at most {max(ours):.2f} ms", f"one trial on each of {len(files)} set-ups", *others]


def four_gpus() -> list[str]:
    """OPT-1.3B over two GPUs, and a replica on each of four, over one; hosts of all archives that have either."""
    name = "h200-vllm-0.26.0-several-gpus"
    served = {
        (one.gpus, one.engines): one.served
        for curve in stored_curves(archive(name), [])
        for one in deployments(curve)
        if curve.subject.split(",")[0] == "opt-1.3b" and one.concurrency == 192
    }
    ours = (m for other in names_of("*") for m in archive(other) if m.spec.model == "opt-1.3b")
    several = [m for m in ours if m.spec.tensor_parallel_size > 1 or (m.replica and m.replica.sharing == "gpus")]
    return [*(times(ratio(served[way], served[1, 1])) for way in ((2, 1), (4, 4))), on(len(hosts_of(several)))]


def lacks(said: Callable[[], list[str]], text: str) -> list[str]:
    return [each for each in said() if not re.search(rf"(?<![\d.,]){re.escape(each)}", text)]


IDLE, BUSY = partial(two_engines, 0, 0.5), partial(two_engines, 0.9, 1.01)
HEADLINES = [  # the page, how the paragraph or table begins, and the numbers that it has to hold
    ("docs/accuracy.md", "| client |", clients),
    ("docs/results.md", "- [The gate of 0.26.0 against 0.20.2]", gate_of_two_releases),
    ("docs/results.md", "- JSON output needs more.", gates_of_json),
    ("docs/results.md", "- At concurrency 8, the host decides", at_a_small_load),
    ("docs/results.md", "- OPT-1.3B needs less of the host", less_of_the_host),
    ("docs/results.md", "- Gates of all six steps", opt_of_all_releases),
    ("docs/results.md", "- The kernels of Qwen3 0.6B pass", qwen_of_all_releases),
    ("docs/results.md", "- Embeddings of 0.25.1 may be slower", slower_embeddings),
    ("docs/results.md", "- The kernels of embeddings", faster_embeddings),
    ("docs/results.md", "- A gate judges the start", both_starts),
    ("docs/results.md", "- JSON output needs more.", fewer_threads),
    ("docs/results.md", "- [Qwen3 4B at concurrency 256]", larger_graphs),
    ("docs/results.md", "| busy share of a single engine", IDLE),
    ("docs/results.md", "| busy share of a single engine", BUSY),
    ("docs/results.md", "Two engines of the newer models", two_engines_of_today),
    ("docs/results.md", "| model on [H200s]", four_gpus),
]
CONTRADICTED = [  # sentences that archives of other hosts, or a second repeat, contradict
    (clients, "this client 0.01 ms, sglang's 85, aiperf's 95, vLLM's `bench serve` 437"),
    (gate_of_two_releases, f"throughput 0.996{TIMES} (0.977 to 0.999), within 3%: passes; start: not known"),
    (at_a_small_load, f"1.21{TIMES} (1.09 to 1.34) as long on one host"),
    (less_of_the_host, f"0.50{TIMES} as many cores, and 0.69{TIMES}"),
    (gates_of_json, f"0.978{TIMES} (0.965 to 0.991), and a small model 0.70{TIMES} (0.47 to 1.06)"),
    (fewer_threads, f"serves 1.005{TIMES} (0.992 to 1.019), with fewer cores"),
    (both_starts, "5 pairs of launches, 37 s with cold caches and 28 s with warm ones, because it compiles for 8 s"),
    (opt_of_all_releases, "No release is slower by more than 2.1%, on 3 hosts"),
    (qwen_of_all_releases, "12 gates, at most 2.0% slower"),
    (slower_embeddings, f"0.963{TIMES} (0.929 to 0.997) and 1.063{TIMES} (1.013 to 1.115)"),
    (faster_embeddings, "2.8% (1.4 to 4.2) more texts per busy second than 0.23.0"),
    (larger_graphs, f"1.89{TIMES} (1.12 to 3.20) the tokens/s; `slmserve advise` says where to try it"),
    (larger_graphs, f"on one host 1.89{TIMES} (1.12 to 3.20; 2 repeats of each) the tokens/s"),
    (IDLE, f"2.3{TIMES} as much if one engine keeps the GPU busy for 37% of the time"),
    (BUSY, f"0.85 to 1.07{TIMES} as much if it does for over 90%"),
    (two_engines_of_today, "OPT-2.7B never, newer models -15% to +134%."),
]


def paragraph(page: str, begins: str) -> str:
    """Return the text from the only line that begins so to the next blank line."""
    found = re.findall(rf"^{re.escape(begins)}.*?\n\n", ALL_PAGES[page].read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (text,) = found
    return str(text)


@pytest.mark.parametrize(("page", "begins", "said"), HEADLINES)
def test_headline_agrees_with_all_archives(page: str, begins: str, said: Callable[[], list[str]]) -> None:
    assert lacks(said, paragraph(page, begins)) == []


@pytest.mark.parametrize(("said", "text"), CONTRADICTED)
def test_contradicted_headline_is_found(said: Callable[[], list[str]], text: str) -> None:
    assert lacks(said, text) != []
