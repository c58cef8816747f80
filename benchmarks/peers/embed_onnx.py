"""One embedding in a bare process, as people write it with onnxruntime and no server.

    python embed_onnx.py export MODEL.onnx DIRECTORY    once: the encoder of DIRECTORY as ONNX
    python embed_onnx.py embed MODEL.onnx DIRECTORY     tokenize one text, embed it, print the vector's first number

It runs in the peers' environment and knows nothing of Teneral.
"""

from __future__ import annotations

import sys
from pathlib import Path

TEXT = "The quick brown fox jumps over the lazy dog, and then " * 3
INPUTS = ["input_ids", "attention_mask", "token_type_ids"]


def main() -> None:
    way, model, directory = sys.argv[1:]
    {"export": export, "embed": embed}[way](model, directory)


def export(model: str, directory: str) -> None:
    import torch
    from transformers import AutoModel

    class Encoder(torch.nn.Module):
        """The last hidden states alone."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = AutoModel.from_pretrained(directory, attn_implementation="eager").float().eval()

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.encoder(ids, attention_mask=mask, token_type_ids=types)[0]
            return hidden

    ids = torch.ones(1, 16, dtype=torch.int64)
    axes = {name: {0: "batch", 1: "tokens"} for name in [*INPUTS, "hidden"]}
    unfinished = Path(model).with_suffix(".unfinished")
    torch.onnx.export(
        Encoder(),
        (ids, ids, torch.zeros_like(ids)),
        str(unfinished),
        input_names=INPUTS,
        output_names=["hidden"],
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )
    unfinished.rename(model)


def embed(model: str, directory: str) -> None:
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    ids = np.array([Tokenizer.from_file(f"{directory}/tokenizer.json").encode(TEXT).ids], np.int64)
    values = (ids, np.ones_like(ids), np.zeros_like(ids))
    hidden = session.run(None, dict(zip(INPUTS, values, strict=True)))[0]
    vector = hidden[0].mean(axis=0)
    print(float(vector[0] / np.linalg.norm(vector)))


if __name__ == "__main__":
    main()
