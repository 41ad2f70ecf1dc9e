"""Both laws: steps of a load by arithmetic, a step about as long as the longer of card and host, records that correct,
intervals as wide as what is not known, and what counts as a record."""

import math
from dataclasses import replace
from functools import cache

import pytest
from committed import archive
from refusals import refused
from strategies import H200, measurement

from pytest_slmserve.analysis.advice import two_laws
from pytest_slmserve.analysis.advice.two_laws import (
    LAWS,
    HostCost,
    Seen,
    StepKind,
    batch_to_choose,
    factors,
    gpu_named,
    host_cost,
    interval_verdicts,
    predict_load,
    seen_in,
    steady_settings,
    step_kinds,
    step_times,
)
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.specs import EngineSpec

ON = {name: gpu_named(name) for name in ("L4", "H100", "H200")}
SLOW, FAST = (HostCost(*(factor * ms for ms in (LAWS.usual.fast_s, LAWS.usual.middle_s))) for factor in (1.2, 0.9))


def settings(model: str = "opt-125m", gpu: str = "H100", **extra: object):
    return steady_settings(EngineSpec(model, kv_cache_bytes=0, extra=tuple(extra.items())), 512, 256, ON[gpu])


def seen(setting, card: float = 1.0, host: float = 1.0, cost: HostCost | None = LAWS.usual, where: str = "a") -> Seen:
    """What is measured if card and host take so many times as long as the laws say."""
    law = step_times(setting, LAWS, card, host * LAWS.slower(cost))
    rate, busy = setting.tokens / law.seconds, law.card_s / law.seconds
    return Seen(setting, rate, busy, "opt-125m", setting.gpu.family, where, cost, a_point())


@cache
def a_point() -> Point:
    return seen_in(planted())[0].point


def planted():
    return archive("h100-vllm-0.26.0-core-third-host")


def test_load_steps_cover_all_prompts():
    work = settings()[0].work
    assert step_kinds(work, 64, together=False) == (StepKind(192.0, 64), StepKind(64.0, 64, 1.0))
    assert step_kinds(work, 512, together=False) == (StepKind(256.0, 512, 2.0),)
    assert step_kinds(work, 32, together=True) == (StepKind(2, 16.0, 16.0), StepKind(255, 32))
    job = step_kinds(work, 64, together=True, requests=100)
    assert sum(step.count * step.prompts for step in job) == 100 and len(job) == 4


def test_slower_side_sets_step_time():
    for setting in (*settings(), *settings("qwen3-4b", "L4")):
        law = step_times(setting)
        assert law.card_s < law.seconds and 0 < law.host_share < 1
        assert step_times(setting, LAWS, host=1e-9).seconds == pytest.approx(law.card_s)
        slower = step_times(setting, LAWS, host=1.01)
        assert math.log(slower.seconds / law.seconds) / math.log(1.01) == pytest.approx(law.host_share, abs=0.01)
    eager, captured = (step_times(settings(max_cudagraph_capture_size=n)[7]).seconds for n in (512, 2048))
    assert eager > 1.3 * captured, "graphs for prompts spare the host their launches"


def test_slower_host_serves_less():
    for model in ("opt-125m", "qwen3-4b"):
        rates = [p.tokens_per_s.value for p in map(predict_load, settings(model))]
        steps = [p.tpot_s.value for p in map(predict_load, settings(model))]
        assert rates == sorted(rates) and steps == sorted(steps)
        for s in settings(model):
            slow, usual, fast = (predict_load(s, cost=cost) for cost in (SLOW, LAWS.usual, FAST))
            assert slow.tokens_per_s.value < usual.tokens_per_s.value < fast.tokens_per_s.value
            assert slow.card_share < fast.card_share
    slowest = [predict_load(settings("qwen3-4b", gpu)[5]).tokens_per_s.value for gpu in ("L4", "H100", "H200")]
    assert slowest == sorted(slowest)


def test_known_host_cost_narrows_interval():
    setting = settings()[6]
    bare, known = predict_load(setting), predict_load(setting, cost=LAWS.usual)
    assert bare.tokens_per_s.high > known.tokens_per_s.high and bare.half_widths[""] > known.half_widths[""]
    assert bare.half_widths[two_laws.COST] == known.half_widths[""] and bare.limit == "host"
    card = predict_load(settings("qwen3-4b", "L4")[5], cost=LAWS.usual)
    assert card.half_widths[two_laws.RECORDS] < 0.5 * card.half_widths[""], "the card limits: records tell most"


@pytest.mark.parametrize(("card", "host"), [(1.2, 1.0), (1.0, 1.3), (0.8, 0.9)])
def test_records_correct_both_laws(card, host):
    sweep = settings()
    few = factors(sweep[6], [seen(sweep[6], card, host)])
    hosts = [seen(s, card, host, where=name) for s in sweep for name in "abcde"]
    many = factors(sweep[6], hosts)
    for by_few, by_many, planted in zip(few, many, (card, host)):
        assert by_many == pytest.approx(planted, rel=0.07)
        assert abs(math.log(by_few / planted)) >= abs(math.log(by_many / planted)) - 1e-9
    assert factors(sweep[6], []) == (1.0, 1.0)


def test_measured_rate_passes_inside_interval():
    sweep = settings()
    for off, state in ((1.0, State.PASSES), (3.0, State.FAILS)):
        (verdict,) = interval_verdicts([seen(s, off, off) for s in sweep], [])
        assert verdict.state is state and "H100" in verdict.why
    assert interval_verdicts([], []) == []


def test_chosen_batch_has_range():
    batch = batch_to_choose(settings("qwen3-4b", "L4"))
    assert batch.low <= batch.value <= batch.high < 512
    assert batch_to_choose(settings("opt-125m", "H200"), cost=SLOW).value > batch.value


def test_only_plain_engines_are_records():
    found = seen_in(planted())
    assert {row.gpu for row in found} == {"H100"} and {row.model for row in found} == {"opt-125m", "opt-1.3b"}
    assert all(row.cost and 0.003 < row.cost.fast_s <= row.cost.middle_s < 0.01 for row in found)
    first = planted()[0]
    for spec in ({"prefix_caching": True}, {"extra": (("enable_lora", True),)}, {"tensor_parallel_size": 2}):
        assert seen_in([replace(first, spec=replace(first.spec, **spec))]) == []
    assert seen_in([measurement(8, 100.0, environment=H200)]) == [], "no counter tells when a kernel ran"
    assert host_cost([]) is None and host_cost([0.004, 0.004, 0.008]) == HostCost(0.004, 0.004)


def test_data_sheet_matches_gpu_name():
    names = {"h200": "H200", "NVIDIA L4": "L4", "NVIDIA A100-SXM4-40GB": "A100-40", "L40S": "L40S", "B200": "B200"}
    assert {name: gpu_named(name).family for name in names} == names
    with refused("MI300X", hint="H200"):
        gpu_named("MI300X")
    with refused("uncounted", hint="catalogue"):
        spec = EngineSpec("opt-125m")
        steady_settings(
            replace(spec, model="uncounted", model_facts=replace(spec.model_facts, windows=None)), 8, 8, ON["L4"]
        )
