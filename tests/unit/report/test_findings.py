from __future__ import annotations

from dataclasses import replace

import pytest
from strategies import H200, law, measurement, noisy_curve, point

from pytest_slmserve.analysis.sweep.curve import Curve, curve_of, labels
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.sweeps import findings, heading, relative_range, remarks, skip_note, sweep_section
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB, ClosedLoop

BATCHES = (1, 4, 16, 64, 256)
CPU = Environment(platform="cpu", cpu="Imagined CPU")


def sweep(
    environment: Environment = H200, repeats: int = 2, noise: float = 0.002, model: str = "opt-1.3b", **numbers: float
) -> Curve:
    made = [
        measurement(c, law(c, **numbers) * (1 + noise * i), environment=environment, model=model, repeat=i)
        for c in BATCHES
        for i in range(repeats)
    ]
    return curve_of("opt-1.3b", made)


def found(curve: Curve, tolerance: float = 0.10) -> dict[str, str]:
    return dict(findings(curve, tolerance))


def test_hosts_are_those_of_valid_measurements():
    def at(host: str | None, **facts: object):
        return measurement(64, law(64), environment=replace(H200, host=host), **facts)

    assert measured(curve_of("x", [at("a"), at("b", repeat=1), at("c", repeat=2, failures=1)])).endswith(", 2 hosts")
    assert "host" not in measured(curve_of("x", [at(None)]))


def test_the_worst_of_littles_law_and_where():
    late = [measurement(4, law(4), repeat=i, admitted_early=0.02 * i) for i in range(2)]
    others = [measurement(c, law(c)) for c in BATCHES if c != 4]
    text = found(curve_of("opt-1.3b", [*others, *late]))["Little's law"]
    assert text.endswith("apart, at concurrency 4") and 1.5 < float(text.split("at most ")[1].split(" %")[0]) < 2.5
    exact = tuple(replace(point(c, [100.0 * c] * 2), little=0.0002) for c in (1, 2, 4))
    assert "Little's law" not in found(Curve(subject="x", points=exact)), "what rounds to nothing is not said"


def test_labels_tell_curves_of_one_subject_apart():
    together = curve_of("opt-1.3b", [measurement(1, 50.0, load=ClosedLoop(1, ramp_up="burst"))])
    longer = curve_of("opt-1.3b", [measurement(1, 50.0, load=ClosedLoop(1, window_s=9.0))])
    other = curve_of("opt-2.7b", [measurement(model="opt-2.7b")])
    assert labels([sweep(), other]) == ["opt-1.3b", "opt-2.7b"]
    assert labels([sweep(), together]) == ["opt-1.3b, ramp-up staggered", "opt-1.3b, ramp-up burst"]
    assert labels([sweep(), longer, other]) == ["opt-1.3b, window 5 s", "opt-1.3b, window 9 s", "opt-2.7b"]
    assert labels([sweep(), sweep(CPU)])[1].startswith("opt-1.3b, Imagined CPU")
    assert labels([Curve(subject="x"), Curve(subject="x")]) == ["x", "x"]


def test_engines_and_requests_that_differ_are_named_in_words():
    def changed(**fields):
        made = [replace(m, spec=replace(m.spec, **fields)) for m in sweep().measurements]
        return curve_of("opt-1.3b", made)

    limits = labels([changed(max_num_seqs=256), changed(enforce_eager=True), changed(kv_cache_bytes=3 * GIB)])
    assert limits[0] == "opt-1.3b, max_num_seqs 256, KV cache 4 GiB, no enforce_eager"
    assert limits[1] == "opt-1.3b, max_num_seqs 1024, KV cache 4 GiB, enforce_eager"
    assert "KV cache 3 GiB" in limits[2]
    graphs = labels([sweep(), changed(extra=(("max_cudagraph_capture_size", 2048),))])
    assert graphs == ["opt-1.3b, max_cudagraph_capture_size unset", "opt-1.3b, max_cudagraph_capture_size 2048"]
    two_gpus = changed(tensor_parallel_size=2, kv_cache_bytes=9 * GIB)
    assert labels([sweep(), two_gpus]) == ["opt-1.3b, TP 1", "opt-1.3b, TP 2"], "more GPUs have more cache"
    in_half = changed(tensor_parallel_size=2, kv_cache_bytes=4 * GIB)
    assert labels([two_gpus, in_half]) == ["opt-1.3b, KV cache 9 GiB", "opt-1.3b, KV cache 4 GiB"]

    def sent(hash_, **fields):
        made = [
            replace(m, workload=replace(m.workload, hash=hash_, spec=replace(m.workload.spec, **fields)))
            for m in sweep().measurements
        ]
        return curve_of("opt-1.3b", made)

    natural = labels([sweep(), sent("fedcba987654", prompt_tokens=None, output_tokens=None)])
    assert natural[0].endswith(" tokens") and natural[1] == "opt-1.3b, natural lengths"
    same_words = labels([sweep(), sent("fedcba987654")])
    assert same_words[1] == "opt-1.3b, workload fedcba", "nothing else tells them apart"


def test_spread_is_over_the_mean():
    assert relative_range(point(1, [90.0, 100.0, 110.0])) == pytest.approx(0.2)
    assert relative_range(point(1, [90.0])) is None and relative_range(point(1, [])) is None


def test_repeats_agree_by_so_much():
    points = tuple(point(c, [100.0, 100.0 + c]) for c in (1, 2, 4))
    assert found(Curve(subject="x", points=points))["repeats"] == (
        "differ by 2 % in the median, 3.9 % at most (at concurrency 4)"
    )
    assert "repeats" not in found(noisy_curve({1: 1.0, 2: 2.0}, repeats=1))


def test_the_plateau_with_its_confidence():
    text = found(noisy_curve({b: law(b) for b in (64, 128, 256, 512)}, noise=0.001))["plateau"]
    assert text == "from concurrency 256 (95 %: 256 to 256): past it a doubling gains less than 10 %"
    once = found(noisy_curve({b: law(b) for b in (64, 128, 256, 512)}, repeats=1, noise=0))["plateau"]
    assert once.startswith("from concurrency 256: past it") and "not certain: noise unknown" in once
    steep = found(noisy_curve({1: 1.0, 2: 2.0, 4: 4.0}))["plateau"]
    assert (
        steep.startswith("not reached: the last doubling (2 to 4) still gains 99.2 %") and "so it may be" not in steep
    )


def test_a_flat_stretch_that_does_not_last_is_no_plateau():
    """As OPT-125M on an H200, which gains 6 % from 128 to 256 and 53 % from 256 to 512."""
    bent = {64: 22.7, 128: 32.7, 256: 34.6, 512: 53.1}
    text = found(noisy_curve({**bent, 1024: 61.8}, noise=0.03, repeats=2))["plateau"]
    assert text.startswith("not reached: the last doubling (512 to 1024) still gains 1")
    assert ", so it may be from concurrency 512 on; it is flat from 128 to 256 (" in text
    assert "again from 256 to 512" in text
    later = found(noisy_curve({**bent, 1024: 53.5}, noise=0.001))["plateau"]
    assert later.startswith("from concurrency 512") and "it is flat from 128 to 256" in later


@pytest.mark.parametrize(
    ("rates", "cut", "text"),
    [
        ((12_141.0, 12_511.0, 10_893.0, 11_005.0), (), "12,511 at concurrency 2; concurrency 8 has 12 % less"),
        ((100.0, 101.0, 100.0), (), "101.0 at concurrency 2; concurrency 4 has about the same"),
        ((1.0, 2.0), (), "2.000 at concurrency 2, the largest load measured: throughput may still rise"),
        ((1.0, 2.0), ((4, "too large"),), "2.000 at concurrency 2, the largest load that fits"),
    ],
)
def test_the_best_load_and_what_lies_past_it(rates, cut, text):
    curve = noisy_curve(dict(zip((1, 2, 4, 8), rates)), noise=0)
    assert found(replace(curve, cut=cut))["most tokens/s"] == text


def test_the_law_and_its_fixed_part_against_shapes():
    """b_half 45 at 10,000 tokens/s: 4.5 ms; the weights of OPT-1.3B take 2.6315 GB / 4.8 TB/s = 0.548 ms."""
    seen = found(sweep())
    assert "T_inf 10,010 tokens/s, b_half 45.0 sequences (95 %: " in seen["saturation law"]
    assert "off by 0 % in the mean, 0 % at most" in seen["saturation law"]
    assert seen["fixed part"].startswith("4.50 ms of every step fitted (95 %: ")
    assert "0.548 ms to read the weights at 4,800 GB/s (b_half from shapes is 167 sequences)" in seen["fixed part"]
    assert seen["fixed part"].endswith(
        "the other 3.95 ms is the host, the launching of kernels, and memory below its data sheet"
    )
    assert "(95 %" not in found(sweep(repeats=1))["saturation law"]


def test_a_half_saturation_that_cannot_be_is_not_identified():
    """Steps that grow by more than the batch does: as fitted, b_half is below 0, and so is the fixed part."""
    seen = found(noisy_curve({16: 10_300.0, 64: 10_150.0, 256: 10_000.0}, noise=0.001))
    assert seen["saturation law"].startswith("not identified: the points fit a b_half below 0, which cannot be; off by")
    assert "fixed part" not in seen


def test_a_law_that_is_far_off_is_not_taken_apart():
    """As OPT-1.3B on an H200 with a staggered ramp-up, whose throughput falls past 128."""
    rates = {1: 597.0, 4: 2132.0, 16: 5981.0, 64: 12_141.0, 128: 12_511.0, 256: 10_893.0, 512: 11_005.0}
    seen = found(noisy_curve(rates, noise=0.001))
    assert "does not describe this curve: at its best off by" in seen["saturation law"] and "fixed part" not in seen


@pytest.mark.parametrize(("t_inf", "b_half"), [(10_000.0, 1.0), (10_000.0, 5.5)])
def test_no_host_is_made_up_where_weights_explain_the_fixed_part(t_inf, b_half):
    seen = found(sweep(noise=0.01, t_inf=t_inf, b_half=b_half))["fixed part"]
    assert "no time is left for the host" in seen and "the other" not in seen


def test_without_a_data_sheet_or_a_shape_nothing_is_split():
    seen = found(sweep(CPU))
    assert seen["fixed part"].endswith("; b_half from shapes is 167 sequences")
    assert not {"roofline", "regime"} & seen.keys()
    seen = found(sweep(model="/nowhere/unknown"))
    assert seen["fixed part"].startswith("4.50 ms of every step fitted (95 %: ") and "shapes" not in seen["fixed part"]


def test_nothing_is_said_of_what_is_not_there():
    assert found(Curve(subject="x")) == {}
    assert found(noisy_curve({4: 1.0}, repeats=1)).keys() == {"most tokens/s"}
    assert not {"saturation law", "fixed part"} & found(noisy_curve({1: 1.0, 2: 2.0})).keys(), "too few for a law"


def test_latencies_of_a_load_that_was_still_rising_are_told():
    """At constant load requests/s x E2E is the batch; looked back upon, a rising load was a smaller one."""
    young = replace(noisy_curve({8: 800.0}).points[0], requests_per_s=2.0, e2e_s=3.0, batch=8.0)
    settled = replace(young, e2e_s=3.9)
    seen = found(Curve(subject="x", points=(young,)))["latency"]
    assert seen.startswith("requests/s x mean E2E is up to 25 % less than the batch (at concurrency 8)")
    told = found(Curve(subject="x", points=(young,), measurements=(measurement(),)))["latency"]
    assert told.endswith("too low (the load had settled for 1 lifetimes)")
    assert "latency" not in found(Curve(subject="x", points=(settled,)))
    assert "latency" not in found(sweep()), "the planted loads are steady"


def test_an_engine_that_its_server_does_not_feed_is_told():
    served = replace(measurement(), spec=replace(measurement().spec, interface="server"))
    fed, starved = (
        replace(noisy_curve({c: 900.0}).points[0], batch=b, kv_usage=0.3) for c, b in ((128, 120.0), (512, 240.0))
    )
    assert "front end" not in found(Curve(subject="x", points=(fed,), measurements=(served,)))
    text = found(Curve(subject="x", points=(fed, starved), measurements=(served,)))["front end"]
    assert text.startswith("at concurrency 512 the engine holds 240 in the mean") and "api_server_count" in text
    waits = replace(starved, kv_usage=0.99)  # in the engine's own queue
    assert "front end" not in found(Curve(subject="x", points=(fed, waits), measurements=(served,)))
    assert "front end" not in found(Curve(subject="x", points=(starved,), measurements=(measurement(),)))
    small = replace(served, spec=replace(served.spec, max_num_seqs=256))
    assert "front end" not in found(Curve(subject="x", points=(starved,), measurements=(small,)))


def test_several_hosts_are_named_where_repeats_differ():
    made = [
        measurement(c, law(c), repeat=i, environment=replace(H200, host=host))
        for c in BATCHES
        for i, host in enumerate("ab")
    ]
    assert found(curve_of("x", made))["repeats"].endswith("; 2 hosts took part, whose difference is in it")
    assert "hosts" not in found(sweep())["repeats"]


GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def swept(rates: dict[int, float]) -> Curve:
    made = [measurement(load, rate * (1 + 0.001 * i), repeat=i) for load, rate in rates.items() for i in range(2)]
    return curve_of("opt-1.3b", made, planned=GRID, adaptive=0.1)


LAWFUL = swept({load: law(load) for load in (1, 128, 256, 1024)})
DENTED = swept({1: 665.0, 512: 42274.0, 1024: 53466.0})  # OPT-125M on an H200


def measured(curve: Curve) -> str:
    return [*heading(curve)][-1]


def test_predictions_stand_below_the_table_and_in_the_reason_of_a_skip():
    [remark] = remarks(LAWFUL)
    assert remark.startswith("not measured, predicted: tokens/s 426 at 2, 817 at 4, 1,510 at 8, 2,")
    assert "told the neighbours of a measured load, the saturation law misses it by at most 0" in remark
    assert skip_note(LAWFUL, 512).startswith(
        "not needed: the adaptive sweep found the plateau without it; predicted: 9,1"
    )
    assert remark in sweep_section(LAWFUL, "opt-1.3b", Findings()).parts


def test_where_the_law_does_not_describe_the_curve_there_are_none():
    assert next(remarks(DENTED)).startswith(
        "not measured, not needed: concurrency 2, 4, 8, 16, 32, 64, 128, 256; no prediction"
    )
    assert skip_note(DENTED, 256).endswith("the saturation law misses it by at most 17.4 % (at 512)")
    assert "predicted" not in skip_note(DENTED, 256)


def test_a_sweep_that_has_not_ended_says_what_was_next():
    early = swept({1: law(1), 1024: law(1024)})
    assert [*remarks(early)] == ["not measured, though planned: concurrency 256"]
    assert skip_note(early, 4) == "the adaptive sweep ended early: concurrency 256 was next"
    assert "measured: 2 points (adaptive sweep, not at its end), " in measured(early)


def test_the_amount_tells_what_kind_of_sweep_it_was():
    assert "measured: 4 points (adaptive sweep, 7 planned loads not needed), " in measured(LAWFUL)
    assert "measured: 1 point, " in measured(curve_of("opt-1.3b", [measurement(1)], planned=[1]))
