"""Closed sets of words. A module of its own, because the options name them in every pytest run, measuring or not."""

from __future__ import annotations

from typing import Literal

Backend = Literal["cuda", "cpu", "fake"]
Weights = Literal["dummy", "real"]
Source = Literal["lengths", "sharegpt"]
Rule = Literal["human-first", "vllm"]
Starts = Literal["spread", "together"]
Sweeping = Literal["full", "adaptive"]  # which of the planned loads are measured
Side = Literal["baseline", "candidate"]  # of a gate
Sharing = Literal["time-slicing", "mps", "mig"]  # how several engines share one device
