"""Nested results of other tools, converted to rows with the names of `vllm bench serve`.

The formats are those in public repositories: guidellm 0.2 to 0.8 (`benchmarks.json`), aiperf 0.1 to 0.11
(`profile_export_aiperf.json`), inference-perf 0.1 to 0.4 (`stage_N_lifecycle_metrics.json`). sglang's bench_serving
writes flat results with vLLM's names.

The "inter-token latency" of guidellm and aiperf is vLLM's TPOT, as a mean over requests.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

KNOB, THROUGHPUT, TPOT, TTFT = "max_concurrency", "output_throughput", "mean_tpot_ms", "mean_ttft_ms"
E2E, RATE, COMPLETED, FAILED, MODEL = "mean_e2el_ms", "request_throughput", "completed", "failed", "model_id"
IN_MS = {"ms": 1.0, "s": 1000.0, "sec": 1000.0, "seconds": 1000.0}


@dataclass(frozen=True, slots=True)
class Format:
    """Format of one tool's files.

    Attributes:
        each: entry with a list of results; "" if the file is one result.
        known: entry of each result that identifies the format.
        cells: places of each column's value, of which the first that exists is used.
        in_seconds: columns in seconds, unless the file gives a unit.
    """

    name: str
    each: str
    known: str
    cells: Mapping[str, tuple[str, ...]]
    in_seconds: frozenset[str] = frozenset()


FORMATS = (
    Format(
        "guidellm",
        "benchmarks",
        "metrics.output_tokens_per_second",
        {
            KNOB: tuple(
                f"{where}.strategy.{name}"
                for where in ("config", "args", "scheduler")
                for name in ("streams", "max_concurrency")
            ),
            THROUGHPUT: ("metrics.output_tokens_per_second.successful.mean",),
            TPOT: (
                "metrics.inter_token_latency_ms.successful.mean",
                "metrics.time_per_output_token_ms.successful.mean",
            ),
            TTFT: ("metrics.time_to_first_token_ms.successful.mean",),
            E2E: ("metrics.request_latency.successful.mean",),
            RATE: ("metrics.requests_per_second.successful.mean",),
            COMPLETED: ("metrics.request_totals.successful", "run_stats.requests_made.successful"),
            FAILED: ("metrics.request_totals.errored", "run_stats.requests_made.errored"),
        },
        frozenset({E2E}),
    ),
    Format(
        "aiperf",
        "",
        "output_token_throughput.avg",
        {
            KNOB: ("input_config.loadgen.concurrency", "input_config.phases.concurrency"),
            THROUGHPUT: ("output_token_throughput.avg",),
            TPOT: ("inter_token_latency.avg",),
            TTFT: ("time_to_first_token.avg",),
            E2E: ("request_latency.avg",),
            RATE: ("request_throughput.avg",),
            COMPLETED: ("request_count.avg",),
            FAILED: ("error_request_count.avg",),
            MODEL: ("input_config.endpoint.model_names", "input_config.models.items.name"),
        },
    ),
    Format(
        "inference-perf",
        "",
        "successes.throughput",
        {
            KNOB: ("load_summary.concurrency", "load_summary.concurrency_level"),
            THROUGHPUT: ("successes.throughput.output_tokens_per_sec",),
            TPOT: ("successes.latency.time_per_output_token.mean",),
            TTFT: ("successes.latency.time_to_first_token.mean",),
            E2E: ("successes.latency.request_latency.mean",),
            RATE: ("successes.throughput.requests_per_sec",),
            COMPLETED: ("successes.count",),
            FAILED: ("failures.count",),
        },
        frozenset({TPOT, TTFT, E2E}),
    ),
)


def found_at(value: Any, path: str) -> Any:
    """Return the value at a path of names with dots, using the first entry of each list, or None."""
    for name in path.split("."):
        while isinstance(value, list):
            value = value[0] if value else None
        value = value.get(name) if isinstance(value, dict) else None
    return value[0] if isinstance(value, list) and value else value


def rows_of_tool(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a known tool's file, with its name; nothing for any other file."""
    for tool in FORMATS:
        entries = result.get(tool.each) if tool.each else [result]
        if not isinstance(entries, list) or not any(found_at(each, tool.known) is not None for each in entries):
            continue
        for entry in entries:
            row: dict[str, Any] = {"tool": tool.name}
            for column, paths in tool.cells.items():
                place = next((path for path in paths if found_at(entry, path) is not None), "")
                value = found_at(entry, place) if place else None
                if column.endswith("_ms") and isinstance(value, int | float):
                    unit = found_at(entry, f"{place.rpartition('.')[0]}.unit")
                    value *= IN_MS.get(str(unit), 1000.0 if column in tool.in_seconds else 1.0)
                row[column] = value
            if row[KNOB] is None and found_at(entry, "config.strategy.type_") == "synchronous":
                row[KNOB] = 1
            yield row
        return
