"""Closed sets of words. A module of its own, because the options name them in every pytest run, measuring or not."""

from __future__ import annotations

from typing import Literal

Platform = Literal["cuda", "cpu", "simulated", "remote"]  # remote: whatever answers at a URL
LoadFormat = Literal["dummy", "auto"]
# Into vLLM's engine itself, by HTTP into its server, or into any other, or into Transformers' generate().
Interface = Literal["engine", "server", "endpoint", "transformers"]
OwnInterface = Literal["engine", "server"]  # of an engine that is started here
Source = Literal["lengths", "sharegpt", "trace", "trace-lengths"]
Rule = Literal["human-first", "vllm"]
RampUp = Literal["staggered", "burst"]
Suite = Literal["core", "papers", "all"]  # of the shipped tests; each has those before it
Sweeping = Literal["full", "adaptive"]  # which of the planned loads are measured
Detail = Literal["summary", "tables", "all"]  # of what is printed of a run
Side = Literal["baseline", "candidate"]  # of a gate
Batching = Literal["none", "static", "dynamic"]  # of Transformers; vLLM batches continuously
Caches = Literal["warm", "cold"]  # of compiled code, at a launch of a gate
OwnSharing = Literal["time-slicing", "mps", "mig", "gpus"]  # how several engines share one device; gpus: one for each
Sharing = Literal["time-slicing", "mps", "mig", "gpus", "urls"]  # urls: of endpoints; what they share is not told
