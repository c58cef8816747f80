"""A model in tensorizer's format: `serialize.py DIRECTORY TARGET` writes TARGET/model.tensors and the small files.

A head that is tied to the embeddings is left out, which `write_module` would store a second time; `tie_weights` brings
it back.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tensorizer import TensorSerializer
from transformers import AutoModelForCausalLM


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target / path.name)
    model = AutoModelForCausalLM.from_pretrained(source)
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().register_parameter("weight", None)
    unfinished = target / "model.unfinished"
    serializer = TensorSerializer(str(unfinished))
    serializer.write_module(model)
    serializer.close()
    unfinished.rename(target / "model.tensors")


if __name__ == "__main__":
    main()
