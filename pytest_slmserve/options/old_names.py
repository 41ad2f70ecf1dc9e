"""Names from before the first release, and what they are called now. To be deleted after it."""

from __future__ import annotations

from collections.abc import Iterable

OPTIONS = {  # of pytest: also in the environment and in ini files
    "--slm-batches": "--slm-concurrency",
    "--slm-door": "--slm-interface",
    "--slm-fake": "--slm-simulate",
    "--slm-lengths": "--slm-input-len and --slm-output-len",
    "--slm-memory-share": "--slm-gpu-memory-utilization",
    "--slm-slo": "--slm-goodput",
    "--slm-starts": "--slm-ramp-up",
    "--slm-tensor-parallel": "--slm-tensor-parallel-size",
    "--slm-weights": "--slm-load-format",
}
MARKER = {  # words of the slm marker
    "backend": "platform",
    "door": "interface",
    "memory_share": "gpu_memory_utilization",
    "starts": "ramp_up",
    "tensor_parallel": "tensor_parallel_size",
    "weights": "load_format",
}
COMMANDS = {  # of the command line, by command
    "advise": {"--memory-share": "--gpu-memory-utilization"},
    "measure": {"--concurrency": "--max-concurrency", "--requests": "--num-prompts", "--slo": "--goodput"},
    "report": {"--slo": "--goodput"},
}


def renamed_option(words: Iterable[str]) -> tuple[str, str] | None:
    """First word that is an old option, variable or ini key, and its new name; None where none is."""
    names = {form(old): form(new) for old, new in OPTIONS.items() for form in (str, _key, _variable)}
    return next(((name, names[name]) for word in words if (name := word.partition("=")[0].rstrip()) in names), None)


def renamed_word(command: str, words: Iterable[str]) -> tuple[str, str] | None:
    """First of `words` that is an old option of `command`, and its new name; None where none is."""
    old = COMMANDS.get(command, {})
    return next(((name, old[name]) for word in words if (name := word.partition("=")[0]) in old), None)


def _key(flags: str) -> str:
    return flags.replace("--", "").replace("-", "_")


def _variable(flags: str) -> str:
    return " and ".join(_key(flag).upper() for flag in flags.split(" and "))
