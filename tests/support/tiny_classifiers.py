"""Tiny classifiers, and a folder with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.support.tiny_models import save_tiny, tiny_config, transformers

LABELS = {0: "routine", 1: "urgent", 2: "spam"}


def tiny_classifier(family: str, dtype: torch.dtype = torch.float32) -> Any:
    config = tiny_config(family, id2label=LABELS, label2id={name: index for index, name in LABELS.items()})
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
