"""Transformers' generate() in its own process, on batches one after the other, for the messages of vllm_worker.py.

    python hf_worker.py FD PARENT_PID

Needs the standard library, torch and Transformers. A batch is computed until its longest output is complete, with
prompts padded to the longest, and its requests are answered at its end. A row of the steps has the slots of the batch
as `running`, the tokens still needed as `new_tokens`, and the computed prompt tokens with padding.
"""

import time
from collections.abc import Sequence
from typing import Any

from slm_pacing import serve_batches  # this folder is on the path, its package is not
from vllm_worker import PROGRESS_S, Server, run_worker

PADDING = 1  # an id like any other: the attention mask leaves it out


class BatchServer(Server):  # type: ignore[misc]
    """A server of one model, with one way to batch."""

    async def start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        import torch
        import transformers

        # cuDNN plans for each new shape (modelscope/FunASR issue 3704), which takes 40 ms on an H200 in each step of a
        # batch of a new size. This is not a cost of batching.
        torch.backends.cuda.enable_cudnn_sdp(False)
        import slm_facts  # noqa: F401 - waits for the turn of this engine

        self.device, self.way = arguments["device"], arguments
        self.began = self.told = time.monotonic()  # of a run; told: time of the last report
        if self.device == "cpu":
            torch.set_num_threads(1)  # several wait for each other at every kernel: 200 ms a step on a busy host
        torch.manual_seed(arguments["seed"])
        name, auto = arguments["model"], transformers.AutoModelForCausalLM
        if arguments["load_format"] == "dummy":
            with torch.device(self.device):
                model = auto.from_config(transformers.AutoConfig.from_pretrained(name))
        else:
            model = auto.from_pretrained(name)
        self.model = model.to(device=self.device, dtype=getattr(torch, arguments["dtype"])).eval()
        self.model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=PADDING)
        return {
            "weight_bytes": sum(p.numel() * p.element_size() for p in self.model.parameters()),
            "attention_backend": f"{getattr(self.model.config, '_attn_implementation', 'unknown')}, without cuDNN",
            "max_num_seqs": arguments["batch"],
            "max_model_len": arguments["max_model_len"],
            "dtype": arguments["dtype"],
            "transformers": transformers.__version__,
        }

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        match message["op"]:
            case "tokens":
                rows = [self.generate([n], message["length"], [], n) for n in range(message["requests"])]
                return {"event": "tokens", "tokens": [row[0] for row in rows]}
            case "profile":
                return {"event": "profiled", "problem": "Transformers has no profiler of vLLM's kind"}
        self.began = self.told = time.monotonic()

        def serve(at: float, rows: list[int], tokens: int, done: int) -> tuple[float, list[float], float]:
            while (left := at - time.monotonic()) > 0:
                time.sleep(min(left, PROGRESS_S))
                self.tell(done, 0)
            started, stamps = time.monotonic(), list[float]()
            self.generate(rows, tokens, stamps, done)
            return started, stamps, time.monotonic()

        lengths = [(len(each["prompt_token_ids"]), tokens) for each, tokens in zip(self.prompts, self.output_tokens)]
        due = [self.began + seconds for seconds in message["load"]["schedule"]]
        samples, steps = serve_batches(self.way, due, lengths, serve, self.began)
        return {
            "event": "done",
            "began": self.began,
            "window": (self.began, time.monotonic()),
            "samples": samples,
            "steps": steps,
            "failed": [],
            "first_failure": None,
        }

    def generate(self, rows: Sequence[int], tokens: int, stamps: list[float], done: int) -> list[list[int]]:
        """Return the ids of `tokens` tokens for each of these prompts, served as one batch.

        Args:
            stamps: gets the monotonic time of each step.
            done: number of earlier requests, for the progress.
        """
        import torch

        prompts = [self.prompts[row]["prompt_token_ids"] for row in rows]
        longest = max(map(len, prompts))
        ids = [[PADDING] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]

        def stepped(found: Any, scores: Any, **_: Any) -> Any:
            stamps.append(time.monotonic())
            self.tell(done, len(rows))
            return torch.zeros(found.shape[0], dtype=torch.bool, device=found.device)

        with torch.inference_mode():
            made = self.model.generate(
                input_ids=torch.tensor(ids, device=self.device),
                attention_mask=torch.tensor(mask, device=self.device),
                max_new_tokens=tokens,
                stopping_criteria=[stepped],
            )
        return [list(map(int, row[longest:])) for row in made.cpu()]

    def tell(self, done: int, in_flight: int) -> None:
        """Report the progress, at most once in PROGRESS_S seconds."""
        if (now := time.monotonic()) - self.told > PROGRESS_S:
            shown = {"elapsed_s": now - self.began, "done": done, "in_flight": in_flight, "tokens_per_s": None}
            self.write(event="progress", phase="window", **shown)
            self.told = now


if __name__ == "__main__":
    run_worker(BatchServer)
