"""How true is the load generator? Clients of HTTP streams against a server that knows what it really did.

    python studies/client_accuracy.py --vllm-python PYTHON --aiperf AIPERF --sglang WHEEL --out accuracy.json
    python studies/client_accuracy.py --again studies/results/client-accuracy-2-cores.json.xz

The server (truth_server.py) has one core, the client another, or several. Every request's first token and its gaps are
compared with the server's own stamps of the same request; both read one monotonic clock. Streams start within one
inter-token latency of each other, as those of a busy engine do, and then all at once. At last 100 streams get faster
and faster tokens until the client's ITL is wrong by 10%, in its mean or in its tail.

CPU time: of this project's client all that it spends on a run, connecting and reading included; of the others what they
spend between the first request's arrival and the last token's writing.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.request import urlopen
from zipfile import ZipFile

import psutil
from common import keep, parser_of, results_in, results_options

from pytest_slmserve.engines.base import message_of
from pytest_slmserve.engines.child import Child
from pytest_slmserve.engines.loadgen.load_run import GROWTH, LEAST_S
from pytest_slmserve.report import text_table
from pytest_slmserve.schema.records import Samples
from pytest_slmserve.schema.specs import ClosedLoop

HERE = Path(__file__).parent
WORDS, WRONG, WARM_UP = 64, 0.10, 4
LADDER = (0.1, 0.05, 0.02, 0.01, 0.005, 0.003, 0.002, 0.0015, 0.001)  # inter-token latencies
AROUND_P99 = [0.985 + i / 1000 for i in range(11)]
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
LADDER_STREAMS, LADDER_S = 100, 2.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One load. starts: "spread" over one inter-token latency, or "together"."""

    streams: int
    tokens: int
    ttft_s: float
    itl_s: float
    starts: str

    @property
    def request_rate(self) -> float:
        """Starts per second; infinite if they are all at once."""
        return self.streams / self.itl_s if self.starts == "spread" else math.inf


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client says: by the request's number, its TTFT and mean ITL; and the 99th percentile of all gaps."""

    ttft_s: Mapping[int, float]
    itl_s: Mapping[int, float]
    itl_p99_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Error:
    """How far a client is off, in seconds; None: it said nothing. nominal: of the mean TTFT to what the server was
    asked for, its own lateness included. rate: tokens/s that the server wrote while all ran, and was asked for."""

    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    nominal: float
    itl_mean: float
    itl_p99: float
    true_ttft: float
    true_itl: float
    true_itl_p99: float
    lost: int
    rate: float
    asked_rate: float
    cpu_s_per_mtoken: float

    @property
    def worst(self) -> float:
        """The larger of the errors of the ITL, of its mean and of its tail, as a share."""
        return 1.0 if self.lost else max(self.itl_mean / self.true_itl, self.itl_p99 / self.true_itl_p99)


class Truth:
    """The server in a process of its own until the block ends, and what it tells."""

    def __init__(self, trial: Trial, core: int) -> None:
        command = [sys.executable, str(HERE / "truth_server.py"), "--core", str(core)]
        command += ["--ttft", f"{trial.ttft_s}", "--itl", f"{trial.itl_s}"]
        self.tokens, self.process = trial.tokens, subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def __enter__(self) -> Truth:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def rows(self) -> dict[int, dict[str, Any]]:
        """Requests by number; those of another length are the clients' own trials."""
        with urlopen(f"{self.url}/truth") as answer:
            told = json.load(answer)["rows"]
        return {row["number"]: row for row in told if len(row["writes"]) == self.tokens}


# The clients: each serves one trial, and says what it saw. program: what it needs of somebody else's


def ours(trial: Trial, truth: Truth, cores: Sequence[int], folder: Path, program: str | None) -> Seen:
    def bodies(count: int, tokens: int) -> dict[str, Any]:
        facts = {"max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
        texts = [json.dumps({"prompt": f"{i}", **facts}) for i in range(count)]
        return {"op": "load", "bodies": texts, "output_tokens": [tokens] * count}

    load = message_of(ClosedLoop(trial.streams, requests=trial.streams))
    if trial.starts == "spread":
        schedule = [i * trial.itl_s / trial.streams for i in range(trial.streams)]
        load = {"kind": "open_loop", "schedule": schedule, "window": [0.0, 1e6]}
    warm_up = message_of(ClosedLoop(WARM_UP, requests=WARM_UP))
    child = Child([sys.executable, "-m", "pytest_slmserve.engines.loadgen.load_run"], dict(os.environ), cores=cores)
    try:
        for message, event in (
            ({"url": f"{truth.url}/v1/completions", "headers": {}, "timeout_s": 120.0}, "ready"),
            (bodies(WARM_UP, 2), "loaded"),
            ({"op": "run", "load": warm_up}, "done"),
            (bodies(trial.streams, trial.tokens), "loaded"),
            ({"op": "run", "load": load}, "done"),
        ):
            child.send(**message)
            while (done := child.receive(180, "measuring"))["event"] == "progress":
                pass
            if done["event"] != event or done.get("failures"):
                sys.exit(f"our own client said {done}")
        child.send(op="close")
        child.end()
    finally:
        child.kill()
    numbers = {row["name"]: number for number, row in truth.rows().items()}
    ttft, itl, told = {}, {}, Samples(*zip(*(row[:-1] for row in done["samples"])))
    stamps = zip(told.request, told.sent_s, told.first_token_s, told.last_token_s, told.output_tokens)
    for request, sent, first, last, tokens in stamps:
        number = numbers[f"{request}"]
        ttft[number], itl[number] = first - sent, (last - first) / (tokens - 1)
    return Seen(ttft, itl, fmean(percentile_of(done["gaps"][0], share) for share in AROUND_P99), done["client_cpu_s"])


def percentile_of(gaps: dict[str, Any], share: float) -> float:
    """Of a histogram, to the middle of a bin."""
    counts = sorted((int(index), count) for index, count in gaps["counts"].items())
    left = share * sum(count for _, count in counts)
    for index, count in counts:
        left -= count
        if left <= 0:
            return LEAST_S * GROWTH ** (index + 0.5)
    raise ValueError("no gaps")


class CpuTime(threading.Thread):
    """CPU time of a process and its children, noted all the time; `stop` before it is asked."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.process = psutil.Process(pid)
        self.times: list[float] = []
        self.cpu: list[float] = []
        self._stop_it = threading.Event()

    def run(self) -> None:
        known: dict[int, float] = {}
        while not self._stop_it.wait(0.05):
            with suppress(psutil.Error):
                for process in (self.process, *self.process.children(recursive=True)):
                    with suppress(psutil.Error):
                        spent = process.cpu_times()
                        known[process.pid] = spent.user + spent.system
            self.times.append(time.monotonic())
            self.cpu.append(sum(known.values()))

    def stop(self) -> None:
        self._stop_it.set()
        self.join()

    def of(self, truth: Truth) -> float:
        """From the first request's arrival to the last token's writing."""
        rows = truth.rows().values()
        begin, end = min(row["arrived"] for row in rows), max(row["writes"][-1] for row in rows)
        first = max(0, bisect_left(self.times, begin) - 1)
        last = min(len(self.times) - 1, bisect_left(self.times, end))
        return self.cpu[last] - self.cpu[first]


def run_pinned(
    command: Sequence[str],
    options: Mapping[str, object],
    cores: Sequence[int],
    folder: Path,
    variables: Mapping[str, str] = OFFLINE,
) -> CpuTime:
    """The client of somebody else on cores of its own. Raises PeerFailed where it fails."""
    log = folder / "client.log"
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, *words], env={**os.environ, **variables}, stdout=out, stderr=out)
    os.sched_setaffinity(process.pid, cores)
    spent = CpuTime(process.pid)
    spent.start()
    try:
        if process.wait(600):
            raise PeerFailed(f"{log.read_text(errors='replace')[-1500:]}")
    finally:
        process.kill()
        spent.stop()
    return spent


class PeerFailed(Exception):
    """Another's client did not work here."""


# As `vllm bench serve` does it, whose own entry point asks for a distribution that builds for the CPU name otherwise.
RUN_VLLM = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
RUN_RUST = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_bench", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.run_argv(["bench", *sys.argv[2:]])
"""


def vllm(trial: Trial, truth: Truth, cores: Sequence[int], folder: Path, program: str) -> Seen:
    """`vllm bench serve`; program: an interpreter that has vLLM."""
    options = {
        "backend": "openai",
        "base-url": truth.url,
        "endpoint": "/v1/completions",
        "model": "truth",
        "tokenizer": tokenizer(folder),
        "dataset-name": "random",
        "random-input-len": 8,
        "random-output-len": trial.tokens,
        "num-prompts": trial.streams,
        "request-rate": trial.request_rate,
        "burstiness": "inf",
        "result-dir": folder,
        "result-filename": "vllm.json",
    }
    flags = ["--save-result", "--save-detailed", "--ignore-eos", "--disable-tqdm"]
    spent = run_pinned([program, "-c", RUN_VLLM, *flags], options, cores, folder)
    told = json.loads((folder / "vllm.json").read_text())
    numbers = [int(text.split()[0]) if text else -1 for text in told["generated_texts"]]
    itl = {n: fmean(gaps) for n, gaps in zip(numbers, told["itls"]) if gaps}
    return Seen(dict(zip(numbers, told["ttfts"])), itl, p99(list(chain(*told["itls"]))), spent.of(truth))


def sglang(trial: Trial, truth: Truth, cores: Sequence[int], folder: Path, program: str) -> Seen:
    """sglang's client in Rust; program: its wheel. It tells TTFT and gaps in the order of requests, but not which is
    which, so that they are compared in order of size."""
    out = folder / "sglang.jsonl"
    out.unlink(missing_ok=True)
    options = {
        "backend": "vllm",
        "base-url": truth.url,
        "model": "truth",
        "dataset-name": "random-ids",
        "vocab-size": 60,
        "random-range-ratio": 1.0,
        "random-input-len": 8,
        "random-output-len": trial.tokens,
        "num-prompts": trial.streams,
        "request-rate": trial.request_rate,
        "warmup-requests": 0,
        "output-file": out,
    }
    with ZipFile(program) as archive:
        (name,) = (n for n in archive.namelist() if "/_bench." in n and n.endswith(".so"))
        module = archive.extract(name, folder)
    flags = ["--tokenize-prompt", "--disable-retokenize", "--output-details"]
    spent = run_pinned([sys.executable, "-c", RUN_RUST, module, *flags], options, cores, folder)
    told, rows = json.loads(out.read_text().splitlines()[-1]), truth.rows()
    ttft = in_order_of_size(told["ttfts"], {n: first_s(row) for n, row in rows.items()})
    means = [fmean(gaps) for gaps in told["itls"] if gaps]
    itl = in_order_of_size(means, {n: mean_gap(row) for n, row in rows.items()})
    return Seen(ttft, itl, p99(list(chain(*told["itls"]))), spent.of(truth))


def aiperf(trial: Trial, truth: Truth, cores: Sequence[int], folder: Path, program: str) -> Seen:
    """NVIDIA's client; program: its script, in an environment of its own."""
    out = Path(tempfile.mkdtemp(dir=folder))
    options: dict[str, object] = {
        "model": "truth",
        "url": truth.url,
        "endpoint-type": "completions",
        "tokenizer": tokenizer(folder),
        "synthetic-input-tokens-mean": 8,
        "output-tokens-mean": trial.tokens,
        "request-count": trial.streams,
        "concurrency": trial.streams,
        "artifact-dir": out,
        "export-level": "records",
        "ui": "none",
    }
    if trial.starts == "spread":
        options |= {"request-rate": trial.request_rate, "request-rate-mode": "constant"}
    spent = run_pinned([program, "profile", "--streaming"], options, cores, folder, {})  # offline it takes no folder
    (records,) = out.rglob("profile_export.jsonl")
    numbers = {row["name"]: number for number, row in truth.rows().items()}
    ttft, itl, gaps = {}, {}, []
    for record in map(json.loads, records.open()):
        number, metrics = numbers.get(record["metadata"].get("x_request_id")), record["metrics"]
        if number is None or "time_to_first_token" not in metrics:
            continue
        ttft[number] = metrics["time_to_first_token"]["value"] / 1e3
        itl[number] = metrics["inter_token_latency"]["value"] / 1e3
        gaps += [gap / 1e3 for gap in metrics.get("inter_chunk_latency", {}).get("value", ())]
    return Seen(ttft, itl, p99(gaps) if gaps else float("nan"), spent.of(truth))


OURS = "pytest-slmserve"
CLIENTS: dict[str, Callable[..., Seen]] = {
    OURS: ours,
    "vllm bench serve": vllm,
    "sglang (Rust)": sglang,
    "aiperf": aiperf,
}


def tokenizer(folder: Path) -> Path:
    """A folder with a tokenizer of a few words, which needs no hub."""
    made = folder / "tokenizer"
    if made.exists():
        return made
    made.mkdir()
    words = {f"w{i}": i for i in range(WORDS)} | {"t": WORDS, "[UNK]": WORDS + 1}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    facts = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    facts |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": model}
    (made / "tokenizer.json").write_text(json.dumps(facts))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "model_max_length": 4096}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    (made / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": len(words)}))
    return made


# Comparing


def first_s(row: dict[str, Any]) -> float:
    return row["writes"][0] - row["arrived"]


def mean_gap(row: dict[str, Any]) -> float:
    return (row["writes"][-1] - row["writes"][0]) / (len(row["writes"]) - 1)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def p99(values: Sequence[float]) -> float:
    """The mean of the quantiles around it: where one pause of the server is 1% of all gaps, one rank is everything."""
    ordered = sorted(values)
    return fmean(ordered[round(share * (len(ordered) - 1))] for share in AROUND_P99)


def in_order_of_size(values: Sequence[float], true: Mapping[int, float]) -> dict[int, float]:
    return dict(zip(sorted(true, key=true.__getitem__), sorted(values)))


def compare(seen: Seen, rows: Mapping[int, dict[str, Any]], trial: Trial) -> Error:
    both = rows.keys() & seen.ttft_s.keys()
    if not both:
        raise PeerFailed("it told of no request that the server knows")
    ttft = [abs(seen.ttft_s[n] - first_s(rows[n])) for n in both]
    gaps = [after - before for row in rows.values() for before, after in pairwise(row["writes"])]
    true_p99 = p99(gaps)
    tokens = sum(len(row["writes"]) for row in rows.values())
    true_itl = fmean(mean_gap(rows[n]) for n in both)
    return Error(
        ttft_mean=fmean(ttft),
        ttft_p50=percentile(ttft, 0.5),
        ttft_p99=percentile(ttft, 0.99),
        nominal=fmean(seen.ttft_s[n] for n in both) - trial.ttft_s,
        itl_mean=fmean(abs(seen.itl_s[n] - mean_gap(rows[n])) for n in both if n in seen.itl_s),
        itl_p99=abs(seen.itl_p99_s - true_p99),
        true_ttft=fmean(first_s(rows[n]) for n in both),
        true_itl=true_itl,
        true_itl_p99=true_p99,
        lost=trial.streams - len(both),
        rate=trial.streams / true_itl,
        asked_rate=trial.streams / trial.itl_s,
        cpu_s_per_mtoken=1e6 * seen.cpu_s / tokens,
    )


@dataclass
class Bench:
    """Trials of some clients, by name, against a server on one core."""

    clients: Mapping[str, Callable[[Trial, Truth], Seen]]
    core: int
    found: list[tuple[str, Trial, Error]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def attempt(self, name: str, trial: Trial) -> Error | None:
        with Truth(trial, self.core) as truth:
            try:
                seen = self.clients[name](trial, truth)
                error = compare(seen, truth.rows(), trial)
            except (PeerFailed, OSError, KeyError, ValueError, subprocess.TimeoutExpired) as problem:
                if name == OURS:
                    raise
                self.failed[name] = f"{type(problem).__name__}: {problem}"
                return None
        self.found.append((name, trial, error))
        print(f"{name}, {trial.streams} {trial.starts}, ITL {1e3 * trial.itl_s:g} ms: TTFT error p99 "
              f"{1e3 * error.ttft_p99:.3f} ms, {error.rate:.0f} tokens/s", flush=True)  # fmt: skip
        return error

    def climb(self, name: str, ttft_s: float, rungs: Sequence[float]) -> tuple[float, str]:
        """The greatest rate of tokens before the error passes 10%, and what came after it."""
        best = 0.0
        for itl_s in rungs:
            tokens = max(20, round(LADDER_S / itl_s))
            error = self.attempt(name, Trial(LADDER_STREAMS, tokens, ttft_s, itl_s, "spread"))
            if error is None:
                return best, "failed"
            if error.worst > WRONG:
                return best, f"wrong by {error.worst:.0%} at {error.rate:.0f}"
            best = max(best, error.rate)
            if error.rate < (1 - WRONG) * error.asked_rate:
                return best, "the server gave no more"
        return best, "no more was tried"


HEAD = (
    "client", "starts", "streams", "TTFT err mean", "p50", "p99", "to nominal", "ITL err mean", "p99", "lost",
    "tokens/s", "CPU s/Mtoken",
)  # fmt: skip


def table(found: Sequence[tuple[str, Trial, Error]]) -> str:
    rows = []
    for name, trial, e in found:
        errors = (e.ttft_mean, e.ttft_p50, e.ttft_p99, e.nominal, e.itl_mean, e.itl_p99)
        ms = [f"{1e3 * value:.3f}" for value in errors]
        cells = [name, trial.starts, trial.streams, *ms, e.lost, f"{e.rate:.0f}", f"{e.cpu_s_per_mtoken:.1f}"]
        rows.append([str(cell) for cell in cells])
    columns = [text_table.Column(head, itemgetter(place)) for place, head in enumerate(HEAD)]
    return text_table.table(rows, columns, always=len(HEAD))


def tell_ratios(found: Sequence[tuple[str, Trial, Error]], best: Mapping[str, tuple[float, str]]) -> None:
    ours = {trial: e for name, trial, e in found if name == OURS}
    for name, trial, e in found:
        if name != OURS and trial in ours:
            mine = ours[trial]
            print(f"{name}, {trial.streams} {trial.starts}: {e.ttft_p99 / mine.ttft_p99:.0f} times our TTFT error p99, "
                  f"{e.cpu_s_per_mtoken / mine.cpu_s_per_mtoken:.1f} times our CPU time")  # fmt: skip
    for name, (rate, why) in best.items():
        ratio = f", of which ours is {best[OURS][0] / rate:.1f} times" if rate and name != OURS else ""
        print(f"{name}: {rate:.0f} tokens/s within {WRONG:.0%} ({why}){ratio}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 100, 500, 1000])
    parser.add_argument("--tokens", type=int, default=50, help="of each request")
    parser.add_argument("--ttft", type=float, default=50.0, help="milliseconds")
    parser.add_argument("--itl", type=float, default=100.0, help="milliseconds; 20 where there are many cores")
    parser.add_argument("--cores", type=int, nargs="+", default=[0, 1], help="the server's, and then the client's")
    parser.add_argument("--ladder", type=float, nargs="*", default=[1e3 * s for s in LADDER], help="ITLs, milliseconds")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM")
    parser.add_argument("--aiperf", help="the aiperf script")
    parser.add_argument("--sglang", type=Path, help="sglang's wheel, whose Rust client is taken")
    results_options(parser)
    args = parser.parse_args()
    if args.again:
        return tell(results_in(args.again))
    core, *cores = args.cores
    if not cores:
        parser.error("--cores has two or more: the server's, and then the client's")
    programs = dict(zip(CLIENTS, (None, args.vllm_python, args.sglang, args.aiperf)))
    with tempfile.TemporaryDirectory(prefix="accuracy-") as name:
        facts: dict[str, Any] = {"cores": cores, "folder": Path(name)}
        clients = {
            client: partial(CLIENTS[client], program=program, **facts)
            for client, program in programs.items()
            if program or client == OURS
        }
        bench, best, rungs = Bench(clients, core), {}, [itl / 1e3 for itl in args.ladder]
        try:
            for starts in ("spread", "together"):
                for streams in args.streams:
                    trial = Trial(streams, args.tokens, args.ttft / 1e3, args.itl / 1e3, starts)
                    for client in clients:
                        bench.attempt(client, trial)
            for client in clients if rungs else ():
                best[client] = bench.climb(client, args.ttft / 1e3, rungs)
        finally:  # a run that is broken off keeps what it found
            found = [{"client": client, **asdict(trial), **asdict(error)} for client, trial, error in bench.found]
            told = {"cores": args.cores, "found": found, "best": best, "failed": bench.failed}
            keep(args.out, told)
    tell(told)
    for client in (client for client in programs if client not in clients):
        print(f"{client} was not given")


def tell(told: Mapping[str, Any]) -> None:
    """Print the trials of one run but for those with faster and faster tokens, and how far each client came there."""
    found: list[tuple[str, Trial, Error]] = []
    for row in (row for row in told["found"] if row["tokens"] == told["found"][0]["tokens"]):
        trial, error = ({f.name: row[f.name] for f in fields(kind)} for kind in (Trial, Error))
        found.append((row["client"], Trial(**trial), Error(**error)))
    if "cores" in told:
        print("\ncore of the server, then those of the client:", *told["cores"])
    print(f"milliseconds\n{table(found)}\n")
    tell_ratios(found, told["best"])
    for client, why in told["failed"].items():
        print(f"{client} failed: {why}")


if __name__ == "__main__":
    main()
