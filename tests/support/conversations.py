"""A ShareGPT file whose lengths lie on vLLM's bounds, and tokenizers that count words: for tests without a Hub."""

import json
import random
from pathlib import Path

BOUNDS = [1, 2, 3, 4, 5, 8, 1019, 1020, 1022, 1023, 1024, 1025, 1026, 2040, 2043, 2044, 2045]


def turn(words: int, name: str, role: str = "human") -> dict[str, str]:
    return {"from": role, "value": " ".join([name, *["w"] * (words - 1)])}


def clustered(count: int = 70) -> list[dict[str, object]]:
    """Conversations whose lengths lie on vLLM's bounds, one token to either side or far from them; some are none."""
    draw = random.Random(5)
    entries: list[dict[str, object]] = [{"id": "empty", "conversations": []}]
    for number in range(count):
        turns = draw.choice((1, 2, 2, 2, 2, 2, 3, 4))
        roles = draw.choice((("human", "gpt"), ("gpt", "human")))
        said = [turn(draw.choice(BOUNDS), f"{number}.{at}", roles[at % 2]) for at in range(turns)]
        entries.append({"id": str(number), "conversations": said})
    return entries


def write_tokenizer(folder: Path, *, bos: bool) -> None:
    """One id for each word that is separated by space, and <s> before every text if it is asked for."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "w": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def write_dataset(folder: Path) -> tuple[Path, Path]:
    """The file and a tokenizer's folder, made in `folder`."""
    path = folder / "sharegpt.json"
    path.write_text(json.dumps(clustered()), "utf-8")
    write_tokenizer(folder / "words", bos=True)
    return path, folder / "words"
