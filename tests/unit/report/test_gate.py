"""A gate tells its outcome, what can decide it and in how long, and where the time goes between two sides: each part is
the one that was planted, and what cannot be known is named with the side that lacks it."""

from dataclasses import replace
from types import SimpleNamespace

from launches import launch_of_both, pair_of_launches, pairs
from planted import gated
from sections import difference, in_words, sentences_of, tables_of
from strategies import H200, RESOLVED, measurement
from traces import traced

from pytest_slmserve.analysis.estimates import percent
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.diagnosis import Difference
from pytest_slmserve.analysis.gate.launch_pairs import OUTPUTS, Answers, Differs, judge_gate
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report import findings, gate
from pytest_slmserve.report.page.writer import page_content
from pytest_slmserve.report.screen import screen
from pytest_slmserve.report.section import in_units, section_markdown, section_text
from pytest_slmserve.schema import records, sensors

NOISY = [m for n in range(1, 13) for m in pair_of_launches(n, speed=1.2 if n % 2 else 0.8)]
SECONDS = {"baseline": (0.5, 0.7, 9.0, 0.6), "candidate": (11.0, 11.0, 12.0, None)}  # to compile


def days_apart(days):
    """Nine pairs, of which all but four were measured some days later."""
    late = [(m, f"01-0{days if m.paired.pair > 4 else 1}") for m in NOISY if m.paired.pair <= 9]
    return [replace(m, measured_at=m.measured_at.replace("01-01", day)) for m, day in late]


def compiled(untold=None):
    took = [(m, None if m.paired.side == untold else SECONDS[m.paired.side][m.paired.pair - 1]) for m in pairs(4)]
    return [replace(m, resolved=replace(m.resolved, compile_s=seconds)) for m, seconds in took]


def eager_candidate():
    specs = [(m, replace(m.spec, enforce_eager=m.paired.side == "candidate", env=(("A", "1"),))) for m in pairs(4)]
    return [replace(m, spec=spec) for m, spec in specs]


def test_gate_sections_match_expected_file():
    """A pair takes a minute, one pair more is for launches that do not count, and a pause is no time of its pairs."""
    found = {
        "fails": pairs(4, speed=0.9),
        "inconclusive: a new gate needs twice as many pairs": NOISY,
        "a pair is left out": [*pairs(2), *pair_of_launches(3, failures=1)],
        **{f"of {n} pairs": pairs(n) for n in (1, 2, 3, 4)},
        **{f"interrupted for {days - 1} days": days_apart(days) for days in (1, 4)},
        "fails before its first look": pairs(2, kv_blocks=1000),
        "no pair": pairs(4, failures=1),
        **{f"{n} pairs without {name}": pairs(n, **{name: None}) for n in (4, 12) for name in ("ready_s", "kv_blocks")},
        "another candidate": eager_candidate(),
        **{f"compiled, {untold} untold": compiled(untold) for untold in (None, *SECONDS)},
    }
    shown = {name: gated(measured) for name, measured in found.items()}
    sections = {name: gate.gate_section(each) for name, each in shown.items()}
    texts = {name: "\n".join([each.title, *sentences_of(each)]) for name, each in sections.items()}
    texts |= {name: in_words([sections[name]]) for name in ("fails", "a pair is left out")}
    texts["has few pairs"] = "\n".join(name for name, each in shown.items() if gate.has_few_pairs(each))
    answers = [(True, None), (True, Differs(2, 7, 11, 13)), (False, None)]
    seen = [SimpleNamespace(exact=(), answers=Answers(4, 16, 4, steady, differs)) for steady, differs in answers]
    texts["tokens that are compared"] = "\n".join(map(gate.outputs_text, seen))
    assert difference("gates", texts) == ""


def of_releases(measured, *releases):
    sides = dict(zip(("baseline", "candidate"), releases))
    found = [(m, replace(m.environment, vllm=sides[m.paired.side])) for m in measured]
    return [replace(m, environment=environment) for m, environment in found]


def test_trust_is_of_endpoint_in_answer():
    """The host decides output tokens/s, which come after what the GPU decides, without noise."""
    found = gated([m for n in (1, 2) for m in launch_of_both(n, seconds=1.2, share=0.5, noise=0.04)])
    busy, worse = found.gated[0], next(each for each in found.gated if each.outcome is State.INCONCLUSIVE)
    five = gate.five_lines([found], findings.Findings())
    assert busy.outcome is State.PASSES and busy.sd < 0.001 < 0.03 < worse.sd
    assert worse.name == "output tokens/s, large load" and "output tokens/s at the large load" in five.answer
    assert f"scatter by {percent(worse.sd)}" in five.trust


def test_failing_gate_names_each_layer_once():
    found = gated([m for n in (1, 2) for m in launch_of_both(n, seconds=1.1, kernels=1.1)])
    (slower,) = [text for text in gate.told_of(found) if text.startswith("slower in: ")]
    assert slower.count("kernels (") == 1 and "large load 9.1% lower; " in slower and "small load" in slower


def test_gate_says_how_many_windows_its_launches_have():
    counts = {
        n: [m for k, made in enumerate(n, 1) for m in launch_of_both(k, windows=made)] for n in ((10, 10), (10, 14))
    }
    told = [gate.together_text(gated(each)) for each in counts.values()]
    assert "8 pairs of windows" in told[0] and "8 to 12 pairs of windows" in told[1]


def test_gates_keep_units_in_mixed_report():
    plain = pairs(4, speed=0.9)
    embedded = [replace(m, workload=replace(m.workload, kind="embed")) for m in plain]
    found = findings.Findings(gates=[gated(embedded), gated(plain)])
    assert found.unit == "output"
    for each, unit in zip(found.gates, ("texts/s", "output tokens/s")):
        for section in (gate.gate_section(each), gate.five_lines([each], found).section):
            text = section_text(in_units(section, found.unit))
            assert f" {unit}" in text.replace("\n", " ") and "outputs/s" not in text


def test_five_lines_tell_worst_gate():
    command = "pytest -k 'a b' --slm-gpu --slm-gate --slm-gate-margin=0.02 '--slm-side=candidate:python=v b' -o a=b"
    ran = findings.Findings(command=command, archives=["r.jsonl"], page="gate.html")
    slower = pairs(4, speed=0.95)
    found = {
        "fails between releases": (of_releases(slower, "0.24.0", "0.26.0"), ran),
        "fails between releases by an unknown command": (of_releases(slower, "0.24.0", "0.26.0"), None),
        "fails between neighbors": (of_releases(slower, "0.25.1", "0.26.0"), ran),
        "fails between a release and a commit": (of_releases(slower, "0.25.1", "0.26.1.dev3+gabc"), ran),
        "fails by engine arguments": (slower, ran),
        "fails by arguments of servers": ([replace(m, spec=replace(m.spec, interface="server")) for m in slower], ran),
        "fails in its KV blocks": (pairs(4, kv_blocks=1000), ran),
        "passes between releases": (of_releases(pairs(4), "0.25.1", "0.26.0"), ran),
        "is not decided yet": (pairs(3), ran),
        "is not decided at its end": (NOISY, ran),
        "lacks a value": (pairs(12, ready_s=None), ran),
        "compared nothing": (pairs(4, failures=1), None),
    }
    gates = {name: (gated(measured), told or findings.Findings()) for name, (measured, told) in found.items()}
    lines = {name: gate.five_lines([each], told) for name, (each, told) in gates.items()}
    all_of_them = [each for each, _ in gates.values()]
    lines["several"] = gate.five_lines(all_of_them[::-1], ran)
    lines["calibrated"] = gate.five_lines([replace(all_of_them[0], calibrated=True)], ran)
    shown = {name: "\n".join([each.answer, *each.below]) for name, each in lines.items()}
    assert difference("five-lines", shown) == ""
    assert (
        lines["several"].answer.startswith("FAILS: opt-1.3b: KV blocks")
        and "worst of 12 gates" in lines["several"].answer
    )
    facts = gate.gate_facts(all_of_them[0], ran)["five"]
    assert [*facts] == ["answer", "why", "do_this", "trust", "where"] and facts == lines["fails between releases"].named
    pages = [page_content(findings.Findings(gates=[all_of_them[n]]), 0, {})["answers"] for n in (6, 7, 8)]
    assert [five.look for (five,) in pages] == ["bad", "good", "open"]


def test_later_gate_answers_inconclusive_one():
    """But not an earlier one, one of the same terms, or of other sides or machines; and a failure stays."""

    def other(speed=1.0, at="2031", half=True, **facts):
        """A gate of other terms, and by default with half of the memory and fewer output tokens."""
        made = [replace(m, measured_at=at + m.measured_at[4:], **facts) for m in pairs(4, speed=speed)]
        if half:
            made = [replace(m, spec=replace(m.spec, gpu_memory_utilization=0.45)) for m in made]
            shorter = [replace(m.workload, hash="f" * 12, spec=replace(m.workload.spec, output_tokens=8)) for m in made]
            made = [replace(m, workload=workload) for m, workload in zip(made, shorter)]
        return judge_gate(made, GateCriteria(pairs=24))

    few, first = gated(pairs(2)), pairs(1)[0]
    for later in (other(), other(half=False)):
        for gates in ([few, later], [later, few]):
            five = gate.five_lines(gates, findings.Findings())
            assert five.answer.startswith("PASSES") and "1 of 2 gates pass, after" in five.answer
    elsewhere = replace(first.environment, gpu_name="another GPU")
    same_terms = gated([replace(m, measured_at="2031" + m.measured_at[4:]) for m in pairs(4)])
    eager = replace(first.spec, enforce_eager=True)
    for each in (other(at="2001"), same_terms, other(environment=elsewhere), other(spec=eager)):
        assert gate.answering([few, each]) == [few, each] and gate.worst_of([each, few]) is few
    fails = gated(pairs(4, speed=0.9))
    assert gate.worst_of([fails, few, other()]) is fails


def test_outputs_fail_without_a_pair():
    differs = Verdict(OUTPUTS, "opt-1.3b", State.FAILS, "it changes by 1.5 nats")
    five = gate.five_lines([replace(gated(pairs(4, failures=1)), exact=(differs,))], findings.Findings())
    assert five.answer.startswith("FAILS: opt-1.3b: outputs: it changes") and five.do_this.startswith("compare what")


def test_gate_diagnosis_matches_expected_file():
    for platform in ("simulated", "cuda"):
        measured = [replace(m, environment=replace(m.environment, platform=platform)) for m in pairs(4)]
        found = gated(measured)
        section, told = gate.gate_section(found), findings.Findings(gates=[found], measurements=measured)
        screened = "\n".join(line for line, _ in screen(told))
        for said in (section_text(section), section_markdown(section), screened, page_content(told, 0, {})["title"]):
            assert (records.SIMULATED in said) is (platform == "simulated")
    shown = {name: in_words(gate.diagnosis_parts([one], [other])) for name, (one, other) in SIDES.items()}
    shown["bytes"] = in_words(gate.difference_parts((CACHE, NEARLY)))
    shown["no difference"] = in_words(gate.difference_parts(()))
    assert difference("diagnoses", shown) == ""
    (table, *_) = tables_of(gate.diagnosis_parts(*([side] for side in SIDES["slower"])))
    assert {name: [float(text) for text in sides[:2]] for name, *sides in table.cells.rows} == {
        "prefill": [6, 6], "decode": [16, 20], "host gap": [5.5, 5.2], "kernels": [16.5, 20.8], "total": [22, 26],
        "steps per request": [4, 4], "ms per step": [5.5, 6.5],
    }  # fmt: skip


def with_probe(wall_s, cpu_s):
    seen = (m := traced()).run.telemetry
    columns = {**seen.columns, sensors.PROBE: (wall_s,) * len(seen), sensors.PROBE_CPU: (cpu_s,) * len(seen)}
    return replace(m, run=replace(m.run, telemetry=replace(seen, columns=columns)))


NEWER = {"environment": replace(H200, vllm="0.27.0"), "resolved": replace(RESOLVED, async_scheduling=True)}
SIDES = {
    "slower": (traced(0.004, idle=0.25, lag=0), traced(0.005, idle=0.2, lag=0)),
    "less than a hundredth slower": (traced(0.004), traced(0.00402)),
    "no sensor beside the candidate": (traced(idle=0.25), traced(0.005, idle=None)),
    "no sensor beside the baseline": (traced(idle=None), traced(0.005, idle=0.25)),
    "no sensor": (traced(idle=None), traced(0.005, idle=None)),
    "a prompt in each step": (traced(concurrency=32), traced(0.005, concurrency=32)),
    "prompts that are not known": (traced(), measurement()),
    "another release, slower to start": (traced(), traced(0.005, ready_s=36.0, **NEWER)),
    "a slower host": (with_probe(0.005, 0.004), with_probe(0.006, 0.00402)),
    "the same host": (with_probe(0.005, 0.004), with_probe(0.005, 0.004)),
    "a probe beside one side": (traced(), with_probe(0.005, 0.004)),
}
CACHE = Difference("kv_cache_bytes", (str(1 << 33),), (str(100 << 30), None))
NEARLY = Difference("gpu_memory_bytes", (str(1 << 33),), (str((1 << 33) + 1),))  # which GiB do not tell apart
