"""The environment of a measurement: device, versions, host, and which of them must match to compare."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pytest_slmserve.schema.specs import EngineSpec, short_hash

SIMULATED = "SIMULATED ENGINE: these numbers come from a formula, not from a device"
# Two records may be compared, or one reused for the other, only where these agree. `host` is not among them: launches
# on two hosts of one kind differ by a few per cent, so a report names the hosts instead.
MUST_MATCH = ("platform", "gpu_name", "gpu_memory_bytes", "driver", "vllm", "torch", "cpu", "cores")
OF_AN_ENDPOINT = ("host", "url")  # of which they must agree too: 127.0.0.1 is another server on each host


@dataclass(frozen=True, slots=True)
class GpuPeaks:
    """Peak rates of one GPU as the user gave them: dense TFLOP/s, and GB/s of its memory."""

    tflops: float
    gbps: float

    def __str__(self) -> str:
        return f"tflops={self.tflops},gbps={self.gbps}"


@dataclass(frozen=True)  # no slots, as of a workload
class Environment:
    """The device, versions and host of a measurement. Every field may be None: not measured."""

    platform: str | None = None
    gpu_name: str | None = None
    gpu_memory_bytes: int | None = None
    driver: str | None = None
    cuda: str | None = None
    vllm: str | None = None
    torch: str | None = None
    python: str | None = None
    operating_system: str | None = None
    cpu: str | None = None
    cores: int | None = None
    host: str | None = None  # a hash: equal on one boot of one host
    git_commit: str | None = None
    pytest_slmserve: str | None = None
    url: str | None = None  # of an endpoint; all else is then of the host that its client runs on
    gpu_peaks: GpuPeaks | None = None
    of_gpus: int | None = None  # whose parts `cores` are; None: the cores were not divided among GPUs

    @property
    def kind(self) -> dict[str, Any]:
        """Values by field of all that has to match where measurements are compared."""
        names = (*MUST_MATCH, *OF_AN_ENDPOINT) if self.platform == "remote" else MUST_MATCH
        return {name: getattr(self, name) for name in names}

    @cached_property
    def key(self) -> str:
        return short_hash([*self.kind.values()])

    @property
    def title(self) -> str:
        """The device as people read it: name of the GPU, CPU and cores, or URL."""
        match self.platform:
            case "simulated":
                return f"a {SIMULATED}"
            case "remote":
                return f"whatever serves at {self.url or 'an endpoint'}"
            case "cpu":
                return f"{self.cpu or 'an unknown CPU'}, {self.cores or '-'} cores"
            case _:
                return self.gpu_name or "an unknown GPU"

    @property
    def mode(self) -> str:
        """The option of pytest that measures in such a place."""
        modes: dict[str | None, str] = {"cuda": "--slm-gpu", "cpu": "--slm-cpu", "simulated": "--slm-simulate"}
        return modes.get(self.platform, f"--slm-endpoint={self.url}")

    @cached_property
    def per_gpu_key(self) -> str:
        """Equal where engines have as many cores for each of their GPUs, if these are divided among them."""
        return self.on(1).key

    def on(self, gpus: int) -> Environment:
        """The environment of an engine on so many GPUs: with the cores of all of them, where each has a part."""
        if not (self.of_gpus and self.cores):
            return self
        return replace(self, cores=self.cores // self.of_gpus * gpus, of_gpus=gpus)

    def of(self, spec: EngineSpec) -> Environment:
        """The environment of `spec` on this host: with its URL, if it is an endpoint."""
        return replace(self, url=spec.url) if spec.url else self


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], sides: tuple[str, str] = ("there", "here")
) -> list[str]:
    """Clauses on what two sets of facts differ in, such as "driver 570.1 there, 580.2 here"."""
    clauses = []
    for name in dict.fromkeys([*one, *other]):
        values = [facts.get(name, "not set") for facts in (one, other)]
        if values[0] != values[1]:
            first, second = ("not known" if value is None else value for value in values)
            clauses.append(f"{name} {first} {sides[0]}, {second} {sides[1]}")
    return clauses


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.26.0rc1+cu130" is (0, 26, 0)."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in found[1].split(".")) if found else ()
