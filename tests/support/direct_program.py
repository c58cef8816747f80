"""Tokens or embeddings of a model directory by the direct path, in a process that has no torch.

    python -m tests.support.direct_program FOLDER NUM_TOKENS

Reads prompts, a JSON list of lists of tokens, from its standard input; writes their answers, of an encoder their
embeddings, and the modules that it has imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.direct_engine import DirectModel, DirectRig

from teneral.runtime.models.decoder import Decoder
from teneral.runtime.tensors import DType, Tensor


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Those of a safetensors file."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    tensors: dict[str, Tensor] = {}
    for name, entry in json.loads(content[8:begin]).items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            dtype = DType(entry["dtype"])
            array = np.frombuffer(content[begin + first : begin + end], dtype.numpy).reshape(entry["shape"])
            tensors[name] = Tensor(dtype, array)
    return tensors


def main() -> None:
    folder, num_tokens = Path(sys.argv[1]), int(sys.argv[2])
    prompts = json.loads(sys.stdin.read())
    config = json.loads((folder / "config.json").read_text())
    model = DirectModel(config, tensors_of(folder / "model.safetensors"))
    answers: Any
    if isinstance(model.model, Decoder):
        with DirectRig(model) as rig:
            answers = rig.say(prompts, num_tokens)
    else:
        answers = model.model.embed(prompts).tolist()
    model.close()
    sys.stdout.write(json.dumps({"answers": answers, "modules": sorted(sys.modules)}))


if __name__ == "__main__":
    main()
