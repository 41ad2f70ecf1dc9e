"""Transformers' generate() in its own process, on batches made one after the other: JSON lines, as vllm_worker.py.

    python hf_worker.py FD PARENT_PID

Needs the standard library, torch and Transformers, which come with vLLM. A batch is computed until its longest output
is there, prompts padded to the longest, and all of its requests are answered at its end. A row of the steps has the
slots of the batch as `running`, the tokens that somebody asked for as `new_tokens`, and the prompt tokens that were
computed, padding among them.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from slm_guarded import guarded
from slm_lines import Ended, Lines
from slm_pacing import batch_rows, next_batch

PROGRESS_S = 0.5
PADDING = 1  # an id like any other: the attention mask leaves it out


class Parent(Lines):  # type: ignore[misc]
    """Lines from and to the process that started us."""

    told = 0.0  # when it was told something last

    def say(self, **message: Any) -> None:
        super().say(**message)
        self.told = time.monotonic()

    @property
    def waits(self) -> bool:
        """Report whether the parent has heard nothing for PROGRESS_S seconds."""
        return time.monotonic() - self.told > PROGRESS_S


class BatchServer:
    """One model, one way to batch."""

    def __init__(self, parent: Parent, arguments: dict[str, Any]) -> None:
        self.parent, self.arguments = parent, arguments
        self.prompts: list[list[int]] = []
        self.output_tokens: list[int] = []

    def start(self) -> dict[str, Any]:
        import torch
        import transformers

        # It makes a plan for each shape that it has not seen (modelscope/FunASR issue 3704), 40 ms on an H200: in each
        # step of a batch whose size is new. No way to batch is meant by that.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if self.arguments["device"] == "cpu":
            torch.set_num_threads(1)  # several wait for each other at every kernel: beside other work, 200 ms a step
        torch.manual_seed(self.arguments["seed"])
        dtype, device = getattr(torch, self.arguments["dtype"]), self.arguments["device"]
        name, auto = self.arguments["model"], transformers.AutoModelForCausalLM
        if self.arguments["load_format"] == "dummy":
            with torch.device(device):
                model = auto.from_config(transformers.AutoConfig.from_pretrained(name))
        else:
            model = auto.from_pretrained(name)
        self.model, self.device = model.to(device=device, dtype=dtype).eval(), device
        self.model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=PADDING)
        return {
            "weight_bytes": sum(p.numel() * p.element_size() for p in self.model.parameters()),
            "attention_backend": f"{getattr(self.model.config, '_attn_implementation', 'unknown')}, without cuDNN",
            "max_num_seqs": self.arguments["batch"],
            "max_model_len": self.arguments["max_model_len"],
            "dtype": self.arguments["dtype"],
            "transformers": transformers.__version__,
        }

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        match message["op"]:
            case "load":
                self.prompts, self.output_tokens = message["prompts"], message["output_tokens"]
                return {"event": "loaded"}
            case "tokens":
                rows = [self.generate([n], message["length"], []) for n in range(message["requests"])]
                return {"event": "tokens", "tokens": [row[0] for row in rows]}
            case "profile":
                return {"event": "profiled", "problem": "Transformers has no profiler of vLLM's kind"}
        return self.run(message["load"])

    def run(self, load: dict[str, Any]) -> dict[str, Any]:
        times = load["schedule"]
        began, first = time.monotonic(), 0
        samples: list[tuple[Any, ...]] = []
        steps: list[tuple[Any, ...]] = []
        options = self.arguments["batching"], self.arguments["batch"], self.arguments["wait_s"]
        while first < len(times):
            at, count = next_batch(options[0], times, first, time.monotonic() - began, *options[1:])
            self.sleep_until(began + at, samples)
            self.batch([began + t for t in times[first : first + count]], first, samples, steps)
            first += count
        return {
            "event": "done",
            "began": began,
            "window": (began, time.monotonic()),
            "samples": [list(column) for column in zip(*samples)],
            "steps": [list(column) for column in zip(*steps)],
            "failures": 0,
            "first_failure": None,
        }

    def sleep_until(self, at: float, samples: Sequence[Any]) -> None:
        while (left := at - time.monotonic()) > 0:
            time.sleep(min(left, PROGRESS_S))
            self.tell(samples, 0)

    def batch(
        self, sent: Sequence[float], first: int, samples: list[tuple[Any, ...]], steps: list[tuple[Any, ...]]
    ) -> None:
        """Serve these requests, and add a row for each, and for each step."""
        rows = [(first + i) % len(self.prompts) for i in range(len(sent))]
        requests = [(row, at, len(self.prompts[row]), self.output_tokens[row]) for row, at in zip(rows, sent)]
        stamps: list[float] = []
        started = time.monotonic()
        self.generate(rows, max(self.output_tokens[row] for row in rows), stamps, samples)
        made, answered = batch_rows(requests, started, stamps, time.monotonic())
        steps += made
        samples += answered

    def generate(
        self, rows: Sequence[int], tokens: int, stamps: list[float], before: Sequence[Any] = ()
    ) -> list[list[int]]:
        """The ids of `tokens` tokens for each of these prompts, served as one batch. stamps: gets the monotonic time of
        each step."""
        import torch

        prompts = [self.prompts[row] for row in rows]
        longest = max(map(len, prompts))
        ids = [[PADDING] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]

        def stepped(found: Any, scores: Any, **_: Any) -> Any:
            stamps.append(time.monotonic())
            self.tell(before, len(rows))
            return torch.zeros(found.shape[0], dtype=torch.bool, device=found.device)

        with torch.inference_mode():
            made = self.model.generate(
                input_ids=torch.tensor(ids, device=self.device),
                attention_mask=torch.tensor(mask, device=self.device),
                max_new_tokens=tokens,
                stopping_criteria=[stepped],
            )
        return [list(map(int, row[longest:])) for row in made.cpu()]

    def tell(self, samples: Sequence[Any], in_flight: int) -> None:
        if self.parent.waits:
            now = time.monotonic()
            self.parent.say(
                event="progress",
                phase="window",
                elapsed_s=now - (samples[0][1] if samples else now),
                done=len(samples),
                in_flight=in_flight,
                tokens_per_s=None,
            )


def serve_batches(parent: Parent) -> None:
    batches = BatchServer(parent, parent.hear())
    try:
        facts = batches.start()
    except BaseException as error:
        parent.say(event="failed", cause=f"{type(error).__name__}: {error}")
        raise
    parent.say(event="ready", **facts)
    while (message := parent.hear())["op"] != "close":
        parent.say(**batches.answer(message))


def _main() -> None:
    descriptor, parent = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(descriptor, False)
    with guarded(parent), suppress(Ended):
        serve_batches(Parent(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    _main()
