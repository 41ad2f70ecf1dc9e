"""Runs whose steps take what they were told to: so much to decode, and so much more where there is a prompt. And
whether runs share one window, by their steps."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from strategies import RESOLVED, changed, measurement, planted_telemetry

from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Measurement, Run

LATE_S = 0.1  # in which a worker hears of its window
PROMPT = 64  # tokens, of all requests of `strategies.measurement`


def traced(
    decode_s=0.004, prompt_s=0.006, *, lag=1, concurrency=8, idle: float | None = 0.25, ready_s: float | None = 30.0,
    steps=320, resolved=RESOLVED, **more: object,
) -> Measurement:  # fmt: skip
    """A measurement of whose steps each takes `decode_s`, and `prompt_s` more for each prompt, whose tokens the trace
    names `lag` rows later. idle: share of time without a kernel, by the sensors; None: there are none."""
    limits = replace(resolved, ready_s=ready_s)
    m = measurement(concurrency, concurrency / 1e-3, steps=steps, resolved=limits, **more)
    # Its trace names each prompt in the step that gave the first token.
    first, ends = m.run.samples.first_token_s, m.run.steps.time_s
    rows = Counter(bisect_left(ends, at - 1e-9) for at in first if at is not None)
    m = changed(m, "run", "steps", prompt_tokens=[PROMPT * rows[i] for i in range(len(ends))])
    run = _with_times(m.run, lambda prompts: decode_s + prompts * prompt_s, lag)
    columns, until_s = {} if idle is None else {sensors.ENGINE_ACTIVE: 1 - idle}, run.window_s[1]
    seen = planted_telemetry(columns, until_s=until_s, interval_s=until_s / 40)
    return replace(m, run=replace(run, telemetry=seen if columns else None))


def _with_times(run: Run, step_s: Callable[[float], float], lag: int) -> Run:
    """The same run whose steps take as long as their prompts say."""
    old, named = [0.0, *run.steps.time_s], [*run.steps.prompt_tokens, *(0,) * lag]
    new = [0.0, *accumulate(step_s(named[row + lag] / PROMPT) for row in range(len(run.steps)))]
    at = [new[bisect_left(old, time - 1e-9)] for time in run.window_s]

    def moved(times: Sequence[float | None]) -> list[float | None]:
        return [None if time is None else new[bisect_left(old, time - 1e-9)] for time in times]

    names = ("sent_s", "admitted_s", "first_token_s", "last_token_s")
    samples = replace(run.samples, **{name: moved(getattr(run.samples, name)) for name in names})
    return replace(run, samples=samples, steps=replace(run.steps, time_s=new[1:]), window_s=(at[0], at[1]))


def share_a_window(runs: Sequence[Run]) -> bool:
    """True where all windows begin and end together: a later one by a step of its engine, however long that took, or
    LATE_S."""
    for bounds in zip(*([run.began_s + at for at in run.window_s] for run in runs)):
        for run, own in zip(runs, bounds):
            steps = sum(min(bounds) < run.began_s + ended < own for ended in run.steps.time_s)
            if own - min(bounds) >= LATE_S and steps > 1:
                return False
    return True
