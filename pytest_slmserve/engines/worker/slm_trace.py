"""A plugin for vLLM's own server (entry point group `vllm.stat_logger_plugins`) that writes its limits and its steps.

It writes lines of JSON to the file that SLM_TRACE names. vLLM loads it in the process that answers requests, whose
clock a client on this host reads too.
"""

import json
import os
from pathlib import Path
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase
from vllm_worker import resolved, step_row  # this folder is on the path, its package is not


class TraceWriter(StatLoggerBase):  # type: ignore[misc]
    """A stat logger that writes each step at once, because our client reads the file when the run is over."""

    def __init__(self, vllm_config: Any, *_: Any, **__: Any) -> None:
        self.config = vllm_config
        self.file = Path(os.environ["SLM_TRACE"]).open("ab", buffering=0)  # noqa: SIM115

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
        if row := step_row(scheduler_stats, iteration_stats):
            self.file.write(json.dumps(row).encode() + b"\n")

    def log_engine_initialized(self) -> None:
        self.file.write(json.dumps(resolved(self.config)).encode() + b"\n")
