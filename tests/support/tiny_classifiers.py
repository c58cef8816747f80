"""Tiny classifiers, and a folder with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tests.support.instances import TinyParts
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import (
    ENCODER_SPECIAL_TOKENS,
    config_json,
    save_tiny,
    tensors_of,
    tiny_config,
    transformers,
)

from teneral.runtime.text.tokenizer import TextTokenizer

LABELS = {0: "routine", 1: "urgent", 2: "spam"}


def tiny_classifier(family: str, dtype: torch.dtype = torch.float32, *, num_labels: int = 3) -> Any:
    labels = {index: LABELS[index] for index in range(num_labels)}
    config = tiny_config(family, id2label=labels, label2id={name: index for index, name in labels.items()})
    model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_(1.0 + 0.2 * noise if is_scale else 0.15 * noise)
    return model.to(dtype).eval()


def save_classifier(directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A classifier of the BERT family, with its tokenizer."""
    folder = save_tiny("bert", directory)
    tiny_classifier("bert", dtype).save_pretrained(folder)
    return folder


def classifier_parts(directory: Path, family: str = "bert", num_labels: int = 3) -> TinyParts:
    """A classifier with a tokenizer that has its family's template for pairs: RoBERTa's has one type for all tokens,
    and one more token between the texts.
    """
    folder = save_tiny("bert", directory)
    file = json.loads((folder / "tokenizer.json").read_text())
    special = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ("[CLS]", "[SEP]")]
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
    if family == "bert":
        second["Sequence"]["type_id"] = 1
        last = {"SpecialToken": {"id": "[SEP]", "type_id": 1}}
        file["post_processor"]["pair"] = [special[0], first, special[1], second, last]
    else:
        file["post_processor"]["pair"] = [special[0], first, special[1], special[1], second, special[1]]
    (folder / "tokenizer.json").write_text(json.dumps(file))
    oracle = tiny_classifier(family, num_labels=num_labels)
    return TinyParts(
        model=build_model(config_json(oracle), DictWeights(tensors_of(oracle))),
        tokenizer=TextTokenizer.from_files(
            lambda name: path.read_bytes() if (path := folder / name).exists() else None
        ),
    )


def pair_ids(first: str, second: str, family: str = "roberta") -> tuple[list[int], list[int]]:
    """A pair as that tokenizer has it, which knows bytes, and its types: 1 begins it, 2 ends each text."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [
        [len(ENCODER_SPECIAL_TOKENS) + alphabet.index(letter.replace(" ", "Ġ")) for letter in text]
        for text in (first, second)
    ]
    if family != "bert":
        ids = [1, *own[0], 2, 2, *own[1], 2]
        return ids, [0] * len(ids)
    return [1, *own[0], 2, *own[1], 2], [0] * (len(own[0]) + 2) + [1] * (len(own[1]) + 1)
