"""Tokens from ONNX Runtime: `genai.py DIRECTORY` reads a task and prints when each token came, both as JSON.

Task and answer are those of `llama.py`. DIRECTORY is what onnxruntime-genai's own builder made of a checkpoint. It runs
in the peers' environment and knows nothing of Teneral.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime_genai as genai

WARM_UPS = 2

Prompts = list[list[int]]


def main() -> None:
    directory = sys.argv[1]
    task = json.load(sys.stdin)
    config = genai.Config(directory)
    config.clear_providers()
    threads = {"intra_op_num_threads": task["threads"]}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
    model = genai.Model(config)
    answer: dict[str, Any] = {
        "decode": {},
        "prefill": {},
        "tokens": {},
        "token_bytes": token_bytes(Path(directory)),
    }
    for name, prompts in task["prefill"].items():
        run(model, prompts[:1], 1)
        answer["prefill"][name] = [run(model, [prompt], 1)[0][0][0] for prompt in prompts]
    for name, prompts in task["decode"].items():
        for _ in range(WARM_UPS):
            run(model, prompts, 4)
        answer["decode"][name], answer["tokens"][name] = run(model, prompts, task["num_tokens"])
    print(json.dumps(answer))


def run(model: Any, prompts: Prompts, num_tokens: int) -> tuple[list[list[float]], list[list[int]]]:
    """When each token of each sequence came, in seconds from the call, and the tokens."""
    length = len(prompts[0]) + num_tokens
    settings = genai.GeneratorParams(model)
    settings.set_search_options(
        batch_size=len(prompts), min_length=length, max_length=length, do_sample=False
    )
    times: list[float] = []
    rows = []
    start_s = time.monotonic()
    generator = genai.Generator(model, settings)
    generator.append_tokens(np.array(prompts, np.int32))
    while len(rows) < num_tokens:
        generator.generate_next_token()
        rows.append(list(map(int, generator.get_next_tokens())))
        times.append(time.monotonic() - start_s)
    return [times] * len(prompts), [list(tokens) for tokens in zip(*rows, strict=True)]


def token_bytes(directory: Path) -> int:
    """Of the weights, what one token needs: all that products read, so not the embeddings' table."""
    graph = onnx.load(directory / "model.onnx", load_external_data=False).graph
    sizes = {
        tensor.name: next((int(entry.value) for entry in tensor.external_data if entry.key == "length"), 0)
        for tensor in graph.initializer
    }
    looked_up = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    multiplied = {name for node in graph.node if node.op_type.startswith("MatMul") for name in node.input}
    return sum(size for name, size in sizes.items() if name not in looked_up or name in multiplied)


if __name__ == "__main__":
    main()
