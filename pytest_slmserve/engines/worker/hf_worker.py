"""Transformers' generate() in its own process, on batches made one after the other: JSON lines, as vllm_worker.py.

    python hf_worker.py FD PARENT_PID

Needs the standard library, torch and Transformers, which come with vLLM. A batch is computed until its longest output
is complete, with prompts padded to the longest, and all of its requests are answered at its end. A row of the steps has
the slots of the batch as `running`, the tokens that a request still needed as `new_tokens`, and the prompt tokens that
were computed, padding among them.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from slm_pacing import batch_rows, next_batch
from slm_process import Ended, Lines, guarded

PROGRESS_S = 0.5
PADDING = 1  # an id like any other: the attention mask leaves it out


class BatchServer:
    """One model, and one way to batch."""

    def __init__(self, parent: Lines, arguments: dict[str, Any]) -> None:
        """Make the model and send the facts of it as "ready"; the parent hears of any error."""
        self.parent, self.arguments = parent, arguments
        self.prompts: list[list[int]] = []
        self.output_tokens: list[int] = []
        try:
            facts = self.start()
        except BaseException as error:
            parent.say(event="failed", cause=f"{type(error).__name__}: {error}")
            raise
        parent.say(event="ready", **facts)
        self.told = time.monotonic()  # when the parent was told something last

    def start(self) -> dict[str, Any]:
        import slm_facts  # noqa: F401 - waits for the turn of this engine
        import torch
        import transformers

        # It makes a plan for each shape that it has not seen (modelscope/FunASR issue 3704), which takes 40 ms on an
        # H200: in each step of a batch whose size is new. No way to batch is meant by that.
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

    def serve(self) -> None:
        """Answer the messages of the parent until it says "close"."""
        while (message := self.parent.hear())["op"] != "close":
            answer: dict[str, Any]
            match message["op"]:
                case "load":
                    self.prompts, self.output_tokens = message["prompts"], message["output_tokens"]
                    answer = {"event": "loaded"}
                case "tokens":
                    rows = [self.generate([n], message["length"], []) for n in range(message["requests"])]
                    answer = {"event": "tokens", "tokens": [row[0] for row in rows]}
                case "profile":
                    answer = {"event": "profiled", "problem": "Transformers has no profiler of vLLM's kind"}
                case _:
                    answer = self.run(message["load"]["schedule"])
            self.parent.say(**answer)
            self.told = time.monotonic()

    def run(self, times: Sequence[float]) -> dict[str, Any]:
        began, first = time.monotonic(), 0
        samples: list[tuple[Any, ...]] = []
        steps: list[tuple[Any, ...]] = []
        batching, most, wait_s = self.arguments["batching"], self.arguments["batch"], self.arguments["wait_s"]
        while first < len(times):
            at, count = next_batch(batching, times, first, time.monotonic() - began, most, wait_s)
            while (left := began + at - time.monotonic()) > 0:
                time.sleep(min(left, PROGRESS_S))
                self.tell(samples, 0)
            rows = [number % len(self.prompts) for number in range(first, first + count)]
            sent = [began + time_s for time_s in times[first : first + count]]
            requests = [(row, at, len(self.prompts[row]), self.output_tokens[row]) for row, at in zip(rows, sent)]
            stamps: list[float] = []
            started = time.monotonic()
            self.generate(rows, max(self.output_tokens[row] for row in rows), stamps, samples)
            made, answered = batch_rows(requests, started, stamps, time.monotonic())
            steps += made
            samples += answered
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

    def generate(
        self, rows: Sequence[int], tokens: int, stamps: list[float], before: Sequence[Any] = ()
    ) -> list[list[int]]:
        """The ids of `tokens` tokens for each of these prompts, served as one batch. stamps: gets the monotonic time of
        each step. before: the samples so far, for the progress."""
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
        """Tell the parent how far the run is, if it was told nothing for PROGRESS_S seconds."""
        if (now := time.monotonic()) - self.told > PROGRESS_S:
            self.parent.say(
                event="progress",
                phase="window",
                elapsed_s=now - (samples[0][1] if samples else now),
                done=len(samples),
                in_flight=in_flight,
                tokens_per_s=None,
            )
            self.told = time.monotonic()


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with guarded(sys.argv[2]), suppress(Ended):
        lines = Lines(socket.socket(fileno=descriptor))
        BatchServer(lines, lines.hear()).serve()
