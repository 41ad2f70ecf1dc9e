"""How far do the claims on adapters hold in the raw results that their authors published (arXiv:2508.08343)?

    git clone https://github.com/FerranAgulloLopez/GPULLMAdapterOptimization
    python studies/adapters_published.py --clone GPULLMAdapterOptimization --out adapters.json

Reads the outputs of their benchmark from the clone's objects, so that a bare one does too, and keeps of each run what
was asked for and what was served. Llama-2-7B serves 1,500 requests that come at once, to no adapter, one, and more, on
as many slots all along; then to no adapter, on ever more slots. Llama-3.1-8B and Qwen2.5-7B serve adapters at rates for
an hour, on a slot for each and on fewer; there a run starves if it serves less than 0.9 of the tokens that came.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean

from common import keep, parser_of, results_in, results_options

ROOT = "benchmarks/lora/definitive_results/"
STARVED = 0.9
OUTPUT = re.compile(r"Output token throughput \(tok/s\): +([\d.]+)")
CAME = re.compile(r"Prompts retrieved: (\d+) . Total input tokens: \d+ . Total output tokens: (\d+)")
COMPUTE = re.compile(r"compute_overhead/llama-2-7b/(\w+)_dataset/_(\d+)_(\d+)__(\d+)/log")
MEMORY = re.compile(r"memory_overhead/llama-2-7b/(mean)_dataset/_(\d+)_(\d+)_/log")
RATES = re.compile(r"real_results/([\w.-]+)/rank_\d+_rates_([\d._]+)/_(\d+)_(\d+)_(\d+)_/log")
HOUR = 3.0  # hours of requests that their client prepares, of which it sends one

Row = list[object]  # what was asked for, and last the output tokens/s, None without a result


def outputs(clone: Path) -> Iterator[tuple[str, str]]:
    """Yield each output of their benchmark in the newest commit, and its path below ROOT."""
    git = ["git", "-C", str(clone)]
    listed = subprocess.run([*git, "ls-tree", "-r", "HEAD", ROOT], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        facts, path = line.split("\t", 1)
        if re.search(r"/log_\d+\.out$", path) and any(each.search(path) for each in (COMPUTE, MEMORY, RATES)):
            object_id = facts.split()[2]
            text = subprocess.run([*git, "cat-file", "-p", object_id], capture_output=True, check=True).stdout
            yield path[len(ROOT) :], text.decode("utf-8", "replace")


def rows(found: Iterable[tuple[str, str]]) -> dict[str, list[Row]]:
    """Return the runs of each kind: compute [lengths, slots, rank, adapters], memory [slots, rank], rates [model,
    rates, slots, adapters, rank, output tokens/s that came]."""
    kinds: dict[str, list[Row]] = {"compute": [], "memory": [], "rates": []}
    for path, text in found:
        rate = float(told[-1]) if (told := OUTPUT.findall(text)) else None
        if match := COMPUTE.search(path):
            lengths, *numbers = match.groups()
            kinds["compute"].append([lengths, *map(int, numbers), rate])
        elif match := MEMORY.search(path):
            kinds["memory"].append([*map(int, match.groups()[1:]), rate])
        elif match := RATES.search(path):
            model, rates, *numbers = match.groups()
            came = CAME.search(text)
            tokens = round(int(came[2]) / (HOUR * 3600), 1) if came else None
            kinds["rates"].append([model, rates, *map(int, numbers), tokens, rate])
    return {kind: sorted(each, key=str) for kind, each in kinds.items()}


def compute(kept: list[Row]) -> None:
    table = {tuple(row[:-1]): row[-1] for row in kept if row[-1]}
    print("Llama-2-7B, all at once: output tokens/s over those of the model alone, by the number of adapters")
    alone, more = [], []
    for lengths, slots, rank in sorted({key[:3] for key in table}, key=str):
        counts = sorted(key[3] for key in table if key[:3] == (lengths, slots, rank))
        rates = [table[lengths, slots, rank, n] for n in counts]
        if counts[:2] != [0, 1]:
            continue
        shares = ", ".join(f"{n}: {rate / rates[0]:.2f}" for n, rate in zip(counts[1:], rates[1:]))
        print(f"  {lengths} lengths, {slots} slots of rank {rank}: {shares}")
        alone.append(rates[1] / rates[0])
        more.append(rates[-1] / rates[1])
    one, most = (f"{min(shares):.2f} to {max(shares):.2f}" for shares in (alone, more))
    print(f"  one adapter serves {one} of what none does; the most serve {most} of what one does")


def memory(kept: list[Row]) -> None:
    print("Llama-2-7B, all at once, to no adapter: output tokens/s by the number of slots")
    for rank in sorted({row[1] for row in kept}, key=str):
        rates = {row[0]: row[2] for row in sorted(kept, key=lambda row: row[0]) if row[1] == rank}
        started = {slots: rate for slots, rate in rates.items() if rate}
        last = max(started)  # some smaller numbers have no result either, which is not for want of memory
        failed = [slots for slots, rate in rates.items() if not rate and slots > last]
        print(
            f"  rank {rank}: {', '.join(f'{n}: {rate:.0f}' for n, rate in started.items())}; "
            f"{last} slots serve {started[last] / started[min(started)]:.2f} of one, {min(failed)} and more gave none"
        )


def rates(kept: list[Row]) -> None:
    groups: dict[tuple[object, ...], dict[int, tuple[float, float]]] = {}
    for model, per_s, slots, count, rank, came, rate in kept:
        if rate:
            groups.setdefault((model, per_s, rank, count), {})[slots] = rate, rate / came
    several = {key: by_slots for key, by_slots in groups.items() if len(by_slots) > 1}
    print(f"At rates, for an hour: {sum(map(len, groups.values()))} runs that ended")
    for speed, low in (("low", True), ("high", False)):
        best = {k: v for k, v in several.items() if k[1].startswith("0.1") is low}
        served = [share for by_slots in best.values() for _, share in by_slots.values()]
        fewest = [by_slots[min(by_slots)][0] / max(rate for rate, _ in by_slots.values()) for by_slots in best.values()]
        whole = {k: v for k, v in best.items() if k[3] in v}  # a slot for each of the adapters
        each = [by_slots[key[3]][0] / max(rate for rate, _ in by_slots.values()) for key, by_slots in whole.items()]
        beaten = sum(share < 1 for share in each)
        print(
            f"  {speed} rates: {sum(share < STARVED for share in served)} of {len(served)} starve; the fewest slots "
            f"serve {min(fewest):.2f} to {max(fewest):.2f} of the best number, a slot for each {min(each):.2f} to "
            f"{max(each):.2f} (mean {fmean(each):.2f}): fewer serve more in {beaten} of {len(each)}"
        )
    at = several["llama-3.1-8b-instruct", "1.6_0.8_0.4", 16, 64]
    print(f"  Llama-3.1-8B, 64 adapters of rank 16: {', '.join(f'{n} slots: {at[n][0]:.0f}' for n in sorted(at))}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--clone", type=Path, help="clone of their repository")
    results_options(parser)
    args = parser.parse_args()
    if not (args.clone or args.again):
        parser.error("--clone FOLDER, or --again FILE")
    found = results_in(args.again) if args.again else rows(outputs(args.clone))
    compute(found["compute"])
    memory(found["memory"])
    rates(found["rates"])
    keep(args.out, found)


if __name__ == "__main__":
    main()
