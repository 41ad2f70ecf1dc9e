"""A sweep's section says of planted curves what its file keeps, any curve can be shown, and what is not known is not
told."""

import re
from dataclasses import replace

import strategies
from hypothesis import given
from planted import lawful
from sections import difference, in_words, rows_of, tables_of
from strategies import H200, WELL, at_share, curves, law, measurement, noisy_curve, planted_telemetry, point

from pytest_slmserve.analysis import metrics, verdict
from pytest_slmserve.analysis.claims.table import ClaimRow
from pytest_slmserve.analysis.points import Summary
from pytest_slmserve.analysis.sweep.curve import PLATEAU, Axes, Curve, curve_of, with_compared, with_plain
from pytest_slmserve.report import sweeps
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.section import Legend, Named, Section, Table
from pytest_slmserve.schema import sensors, specs
from pytest_slmserve.schema.records import Environment, Stream

BATCHES, OUTSIDE = (4, 16, 64, 256), {1: 100.0, 2: 190.0, 4: 350.0}
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CPU = Environment(platform="cpu", cpu="Imagined CPU", cores=2, vllm="0.32.0")
SIMULATED = Environment(platform="simulated", gpu_name="simulated")
# fmt: off
LIFELIKE = {
    "gpu_util": 1.0, "engine_active": 0.972, "sm_active": 0.718, "sm_active_max": 0.884, "sm_occupancy": 0.135,
    "sm_occupancy_max": 0.149, "dram_active": 0.613, "tensor_active": 0.0521, "power_w": 412.345,
    "power_limit_w": 700.0, "energy_per_token_j": 1.23456, "sm_clock_hz": 1.98e9, "power_capped": 0.954,
    "own_cores": 2.31, "probe_s": 0.0048, "probe_cpu_s": 0.0045, "unexplained": 0.412, "bound": "compute",
}
# fmt: on


def specified(made: Curve, **fields) -> Curve:
    """The same on another engine."""
    return curve_of(made.subject, [replace(m, spec=replace(m.spec, **fields)) for m in made.measurements])


def at(concurrency=8, rate=100.0, host=None, **facts):
    return measurement(concurrency, rate, environment=replace(CPU, host=host), **facts)


def adaptive(rates: dict[int, float]) -> Curve:
    made = [at(load, rate * (1 + 0.001 * i), repeat=i) for load, rate in rates.items() for i in range(2)]
    return curve_of("opt-1.3b", made, planned=GRID, adaptive=0.1)


def planted(*some, **more) -> Curve:
    return Curve(subject="opt-1.3b", points=some, **more)


def seen(concurrency=8, **figures):
    return replace(point(concurrency, [100.0, 101.0]), **figures)


LAWFUL = adaptive({load: law(load) for load in (1, 128, 256, 1024)})
DENTED = adaptive({1: 665.0, 512: 42274.0, 1024: 53466.0})  # OPT-125M on an H200
EARLY = adaptive({1: law(1), 1024: law(1024)})
BENT = {64: 22.7, 128: 32.7, 256: 34.6, 512: 53.1}  # OPT-125M on an H200: it gains 6% to 256, and then 53%
YOUNG = replace(seen(8), requests_per_s=2.0, e2e_s=3.0, batch=8.0)  # looked back upon, a rising load was a smaller one
FED, STARVED = (replace(seen(c), batch=b, kv_usage=0.3) for c, b in ((128, 120.0), (512, 240.0)))
SERVER = replace(at(), spec=replace(at().spec, interface="server"))
ENDPOINT = specs.EngineSpec("m", platform="remote", interface="endpoint", url="http://h/v1", extra=(("top_k", "5"),))
FLASH, STREAM = replace(strategies.RESOLVED, kv_blocks=1366, attention_backend="FLASH_ATTN"), Stream(0.01, 0.0, (), {})
SETTLED = at(load=specs.ClosedLoop(8, settle_lifetimes=2.0))
LENGTHS = replace(SETTLED.workload.spec, prompt_tokens=None, output_tokens=None)
NATURAL = replace(SETTLED, workload=replace(SETTLED.workload, spec=LENGTHS))
LATE = [at(c, law(c), repeat=i, first_early=0.02 * i * (c == 4)) for c in (4, 16) for i in range(2)]
CUT = ((512, "full"), (1024, "full"))
PARTLY = [at(c, law(c), repeat=i, preempted=c == 16) for c in (1, 4, 16) for i in range(2)]
UNSTEADY = {"steps": 200, "slow_from": 100, "slow_factor": 1.25}
NOISY = [at(c, law(c), repeat=i, steps=200) for c in (2, 4, 8) for i in range(2)]
NOISY += [at(8, law(8), repeat=2, **UNSTEADY), at(4, law(4), repeat=2, failures=1, **UNSTEADY)]
PLACES = [("one", "a"), ("two", "b"), ("three", "b")]
HOSTS = [at(c, law(c), host, repeat=i, launch=name) for c in (1, 4, 16) for i, (name, host) in enumerate(PLACES)]


def noisy(*rates, loads=(1, 2, 4, 8), **words):
    return noisy_curve(dict(zip(loads, rates)), **words)


def headings() -> dict[str, Curve]:
    return {
        "three launches on two hosts": curve_of("opt-1.3b", HOSTS),
        "one repeat more": curve_of("opt-1.3b", [*HOSTS, at(1, law(1), repeat=9)]),
        "an invalid measurement of another host": curve_of("x", [at(8, 9.0, "a"), at(8, 9.0, "b", failures=1)]),
        "no valid repeat": curve_of("x", [at(failures=1)]),
        "a CPU": lawful((1,), environment=CPU),
        "adaptive": LAWFUL,
        "adaptive, not at its end": EARLY,
        "nothing": planted(),
        "an unknown GPU": lawful((1,), environment=replace(H200, gpu_name=None)),
        "simulated on two GPUs": specified(lawful((1,), environment=SIMULATED), tensor_parallel_size=2),
        "two GPUs": specified(lawful((1,)), tensor_parallel_size=2),
        "natural lengths, two lifetimes": curve_of("x", [NATURAL]),
        "limits that differ": curve_of("x", [at(), at(resolved=FLASH, launch="launch-2")]),
        "an endpoint": curve_of("m", [replace(at(), spec=ENDPOINT, run=replace(at().run, stream=STREAM))]),
    }  # fmt: skip


def laws() -> dict[str, Curve]:
    return {
        "a law of one repeat": lawful(BATCHES, (1.0,)),
        "weights explain the fixed part": lawful(BATCHES, (1.0, 1.01), b_half=1.0),
        "weights may explain the fixed part": lawful(BATCHES, (1.0, 1.01), b_half=5.5),
        "an unknown shape": lawful(BATCHES, model="/nowhere/unknown"),
    }


def planted_curves() -> dict[str, Curve]:
    return {
        "an invalid measurement": curve_of("x", [at(8, 9.0), at(8, 9.0, failures=1)]),
        "no valid repeat": curve_of("x", [at(failures=1)]),
        "a CPU": lawful(BATCHES, environment=CPU),
        "a law": lawful(BATCHES),
        "a law that cannot be": noisy(10_300.0, 10_150.0, 10_000.0, loads=(16, 64, 256), noise=0.001),
        "no law": noisy(597.0, 2132.0, 5981.0, 12141.0, 12511.0, 10893.0, 11005.0, loads=(1, 4, 16, 64, 128, 256, 512)),
        "a plateau": noisy(*map(law, (64, 128, 256, 512)), loads=(64, 128, 256, 512), noise=0.001),
        "a plateau of one repeat": noisy(*map(law, (64, 128, 256, 512)), loads=(64, 128, 256, 512), noise=0, repeats=1),
        "no plateau": noisy(1.0, 2.0, 4.0, noise=0.001),
        "a flat stretch, and none in the end": noisy_curve({**BENT, 1024: 61.8}, noise=0.03, repeats=2),
        "a flat stretch before the plateau": noisy_curve({**BENT, 1024: 53.5}, noise=0.001),
        "less past the best": noisy(12141.0, 12511.0, 10893.0, 11005.0, noise=0),
        "the same past the best": noisy(100.0, 101.0, 100.0, noise=0),
        "two points": noisy(1.0, 2.0, noise=0),
        "the largest that fits": replace(noisy_curve({1: 1.0, 2: 2.0}, noise=0), cut=((4, "too large"),)),
        "one that is beaten": noisy(1.0, 1.9, 1.8, noise=0),
        "one point": noisy(1.0, repeats=1),
        "nothing": planted(),
        "nothing was measured": planted(missing=(1, 2)),
        "cut, missing, invalid and partly valid": curve_of(
            "x", [*PARTLY, at(4, law(4), repeat=2, failures=3)], planned=(1, 4, 16, 8, 32, 512), cut=CUT
        ),
        "a point without repeats": strategies.without(noisy_curve({4: 1.0, 8: 2.0}), 4),
        "not steady": curve_of("x", NOISY),
        "adaptive": LAWFUL,
        "adaptive without a law": DENTED,
        "external results": replace(noisy_curve(OUTSIDE), axes=Axes("batch", "tok", "lat_ms"), subject="mine"),
        "steps and clients differ": curve_of("opt-1.3b", LATE),
        "Little's law to what rounds to nothing": planted(*(replace(seen(c), little=0.0002) for c in (1, 2))),
        "counters while decoding": planted(
            seen(1, decode_dram=0.713, decode_tensor=0.032), seen(8, decode_dram=0.8, decode_tensor=0.1)
        ),
        "the same counters": planted(*(seen(c, decode_dram=0.7, decode_tensor=0.1) for c in (1, 8))),
        "counters of small loads": planted(seen(1, decode_dram=0.7, decode_tensor=0.1), seen(8)),
        "a rising load": planted(YOUNG),
        "a rising load of known settling": planted(YOUNG, measurements=(at(),)),
        "a load that is steady": planted(replace(YOUNG, e2e_s=3.9)),
        "a server that does not feed its engine": planted(FED, STARVED, measurements=(SERVER,)),
        "repeats on one host": planted(*(point(c, [100.0, 100.0 + c]) for c in (1, 2, 4))),
        "sensors": planted(*(seen(c, **LIFELIKE) for c in (1, 8))),
        "shapes alone": planted(seen(unexplained=0.3, bound="memory")),
        "some sensors, degraded and lost": planted(
            seen(1), seen(2, power_w=300.0, gpu_util=1.0), point(4, ()),
            seen(8, power_w=300.0, degraded=("it was slow",)), replace(point(9, ()), power_w=300.0),
        ),
        "an unknown data sheet": lawful((1,), environment=replace(H200, gpu_name="another")),
    }  # fmt: skip


def test_sweep_sections_match_expected_file():
    found = {name: Findings(curves=[made]) for name, made in planted_curves().items()}
    found["a limit"] = Findings(curves=[lawful(BATCHES)], slo=metrics.window.parse_slo("e2e:0.5s"))
    claim = ClaimRow(PLATEAU, parameters={"tolerance": 0.75})
    passes = verdict.Verdict(PLATEAU, "opt-1.3b", verdict.State.PASSES, "so"), claim
    found["a claim"] = Findings(curves=[lawful(BATCHES)], judged=[passes])
    found["none"] = Findings()
    shown = {name: re.sub("\n  .*", "", in_words(sweeps.sweep_sections(each))) for name, each in found.items()}
    fitted = {name: sweeps.findings(curve, 0.1) for name, curve in laws().items()}
    fitted |= {f"b_half {given}": sweeps.findings(lawful(BATCHES), 0.1, given) for given in (44.0, 30.0)}
    shown |= {f"law: {name}": in_words([Named([*pairs])]) for name, pairs in fitted.items()}
    shown |= {f"heading: {name}": "\n".join(sweeps.heading(made)) for name, made in headings().items()}
    skipped = {"predicted": (LAWFUL, 512), "not predicted": (DENTED, 256), "next": (EARLY, 4)}
    shown |= {f"skipped: {name}": sweeps.skip_note(*one) for name, one in skipped.items()}
    assert difference("sweeps", shown) == ""


@given(curves(repeats=1) | curves(repeats=2))
def test_every_curve_can_be_shown(curve):
    section = sweeps.sweep_section(curve, curve.subject, Findings())
    (table,) = tables_of(section)
    assert [row["valid"] for row in rows_of(table)] == ["yes"] * len(curve.points)
    assert ("plateau" in dict(sweeps.findings(curve, 0.1))) == (len(curve.points) > 1)
    rates = {str(p.concurrency): (p.output_tokens_per_s, -p.e2e_s) for p in curve.points}
    for row in rows_of(table):
        rate, wait = rates[row["concurrency"]]
        beaten = any(r >= rate and w >= wait and (r, w) != (rate, wait) for r, w in rates.values())
        assert row["Pareto"] == ("" if beaten else "*")


def test_starved_engine_blames_front_end():
    def told(*points, m=SERVER) -> bool:
        return "front end" in dict(sweeps.findings(planted(*points, measurements=(m,)), 0.1))

    small = replace(SERVER, spec=replace(SERVER.spec, max_num_seqs=256))
    assert told(replace(STARVED, kv_usage=None)) and told(replace(STARVED, batch=0.75 * 512))
    assert not told(FED) and not told(replace(STARVED, batch=0.76 * 512))
    assert not told(FED, replace(STARVED, kv_usage=0.99)), "they wait in the engine's own queue"
    assert not told(STARVED, m=at()) and not told(STARVED, m=small)
    made = [measurement(8, 100.0, repeat=i, failures=3 * (i == 2)) for i in range(3)]
    (said,) = sweeps.remarks(curve_of("opt-1.3b", made))
    item = metrics.validity.trustworthy("opt-1.3b-8", [(m,) for m in made], 2)
    assert item and item.why.endswith(said.split("are used: ")[1])
    drafting = replace(seen(8), acceptance_length=2.7512)
    asked = replace(at(), spec=replace(at().spec, extra=(("speculative_config", NGRAM),)))
    plain, speculative = (planted(each, measurements=(m,)) for each, m in ((seen(8), at()), (drafting, asked)))
    assert [column for column in sweeps.point_columns(plain) if column.name == "acceptance"] == []
    [shown] = [column for column in sweeps.point_columns(speculative) if column.name == "acceptance"]
    assert shown.cell(drafting) == "2.75"
    assert [*sweeps.remarks(plain)] == [] and "nothing of real text" in " ".join(sweeps.remarks(speculative))

    def slower(concurrency, cpu_ms, model="a"):
        """A measurement beside which a host-speed probe took so long, and waited as long again."""
        made = measurement(concurrency, law(concurrency), model=model)
        pieces = {sensors.OWN_CORES: 1.0, sensors.PROBE: 2e-3 * cpu_ms, sensors.PROBE_CPU: 1e-3 * cpu_ms}
        return replace(made, run=replace(made.run, telemetry=planted_telemetry(pieces, interval_s=0.001, until_s=0.7)))

    curve = curve_of("a", [slower(1, 4.0), slower(2, 5.0), slower(4, 4.0)])
    found = Findings(curves=[curve, curve_of("b", [slower(c, 8.0, "b") for c in (1, 2)])])
    tables = [rows_of(sweeps.sensor_table(each, "", found)) for each in found.curves]
    speeds = [[(row["host speed %"], row["host wait %"]) for row in rows] for rows in tables]
    assert speeds == [[("100.0", "50.0"), ("80.0", "50.0"), ("100.0", "50.0")], [("50.0", "50.0")] * 2]
    legends = [part.text for part in sweeps.sweep_sections(found) if isinstance(part, Legend)]
    assert sweeps.COLUMN_LEGEND["host speed %"] in legends[1]


def spent(model, concurrency, joules, limit=700.0, environment=H200) -> Curve:
    figures = {"energy_per_token_j": joules, "power_w": 350.0, "power_limit_w": limit}
    shown = seen(concurrency, **figures, each=(Summary(**figures),) * 2)
    made = measurement(concurrency, 1000.0, model=model, environment=environment)
    return Curve(subject=model, points=(shown,), measurements=(made,))


def test_overview_tables_match_expected_files():
    some = spent("opt-125m", 512, 0.00843), spent("opt-1.3b", 256, 0.0476, limit=500.0), spent("opt-2.7b", 128, 0.09)
    unknown, small = spent("opt-6.7b", 64, 0.2, limit=None), spent("opt-1.3b", 64, 0.1)  # not the batch of OPT-1.3B
    limits = [planted_telemetry({**WELL, sensors.POWER_LIMIT: limit}, interval_s=0.1) for limit in (700.0, 500.0)]
    made = [measurement(512, 1e4, repeat=i, model="opt-125m", steps=120) for i in range(2)]
    both = curve_of("opt-125m", [replace(m, run=replace(m.run, telemetry=limits[i])) for i, m in enumerate(made)])
    other = replace(H200, gpu_name="NVIDIA H100 80GB HBM3")
    found = {
        "three limits": [*some, unknown, small],
        "two devices": [spent("opt-125m", 512, 0.01), spent("opt-125m", 512, 0.02, environment=other)],
        "repeats under two limits": [both],
        "no energy": [lawful(BATCHES)],
    }
    shown = {name: in_words(sweeps.energy_sections(Findings(curves=some))) for name, some in found.items()}
    assert difference("energy", shown) == ""
    half, least = at_share(0.5, (1500.0, 1515.0), (0.06, 0.061), hits=0.4), at_share(0.0, (1000.0, 1005.0))
    found = {"two shares": with_compared([half, least]), "one share": with_compared([half]), "none": [lawful(BATCHES)]}
    found["of one repeat"] = with_compared([at_share(share, (1e3,), (0.1,)) for share in (0.0, 0.5)])
    shown = {name: in_words(sweeps.hit_rate_sections(some)) for name, some in found.items()}
    assert difference("hits", shown) == ""
    section, _ = sweeps.hit_rate_sections(found["two shares"])
    rows = [(row["share %"], row["hit rate %"], row["change %"]) for row in rows_of(section.parts[0])]
    assert rows == [("0.0", "0.0", "-"), ("50.0", "40.6", "+50.4")]
    knee = lawful((64, 128, 256, 512))
    costly = replace(knee, points=tuple(replace(p, energy_per_token_j=0.0512) for p in knee.points))
    further = replace(curve_of("opt-1.3b", [measurement(8, 100.0)]), beside=True)
    slos = {bound: metrics.window.parse_slo(f"e2e:{bound}s") for bound in (999, 0.03, f"{knee.points[2].e2e_s:.3f}")}
    found = {
        "two models": Findings(curves=[knee, lawful((64,), model="opt-125m"), further]),
        "past the last": Findings(curves=[noisy_curve({1: 1e3, 2: 2e3, 4: 4e3}, noise=0.001)]),
        "past the last, of unknown noise": Findings(curves=[noisy_curve({1: 1e3, 2: 2e3, 4: 4e3}, noise=0, repeats=1)]),
        "inconclusive": Findings(curves=[noisy_curve({1: 1e3, 2: 2e3, 4: 2.1e3}, noise=0.1, repeats=2)]),
        "one point": Findings(curves=[noisy_curve({8: 100.0}, noise=0, repeats=1)]),
        "no valid point": Findings(curves=[curve_of("x", [at(failures=1)])]),
        "energy on two devices": Findings(curves=[costly, lawful((64, 128, 256, 512), environment=SIMULATED)]),
        **{f"limit {bound} s": Findings(curves=[knee], slo=slo) for bound, slo in slos.items()},
    }
    tables = {name: sweeps.overview_tables(each) for name, each in found.items()}
    shown = {name: in_words(Section(table.caption, [table]) for table in some) for name, some in tables.items()}
    assert difference("overview", shown) == ""


def test_speedup_stands_beside_acceptance():
    def of(rates, *extra):
        made = replace(at(), spec=replace(at().spec, extra=extra))
        points = [replace(point(c, [r, 1.01 * r]), acceptance_length=2.5 if extra else None) for c, r in rates.items()]
        return Curve(subject="opt-1.3b", points=tuple(points), measurements=(made,))

    plain, drafting = with_plain(
        [of({1: 100.0, 8: 400.0}), of({1: 150.0, 8: 300.0, 16: 9.0}, ("speculative_config", NGRAM))]
    )
    rows = rows_of(Table(drafting.points, sweeps.point_columns(drafting)))
    assert [(row["acceptance"], row["speedup %"]) for row in rows] == [
        ("2.50", "+50.0"),
        ("2.50", "-25.0"),
        ("2.50", "-"),
    ]
    assert all(" to " in row["95%"] for row in rows[:2])
    assert not {"acceptance", "speedup %"} & {column.name for column in sweeps.point_columns(plain)}


def test_structured_output_follows_free_text():
    free, asked = at_share(None, (1000.0, 1005.0)), {"response_format": '{"type": "array"}'}
    formats = at_share(None, (900.0, 905.0), **asked), at_share(None, (950.0, 955.0), response_format="json")
    found = {"two formats": with_compared([*formats, free]), "no free text": with_compared(formats)}
    shown = {name: in_words(sweeps.format_sections(some)) for name, some in found.items()}
    assert difference("formats", shown) == ""
    section, _ = sweeps.format_sections(found["two formats"])
    rows = [(row["output"], row["change %"], row["change % TPOT"]) for row in rows_of(section.parts[0])]
    assert [row[0].partition(" schema")[0] for row in rows] == ["free text", "JSON", "JSON by"]
    assert rows[0][1:] == ("-", "-") and rows[1][1:] == ("-5.0", "+5.2")
