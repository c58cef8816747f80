"""Tokens from llama.cpp: `llama.py MODEL.gguf` reads a task and prints when each token came, both as JSON.

It uses llama.cpp's C interface, with its defaults. It runs in the peers' environment and knows nothing of Teneral.

The task is {"threads", "num_tokens", "decode": {name: [prompts]}, "prefill": {name: [prompts]}}, prompts being tokens;
the answer {"decode": {name: [[seconds of each token] of each prompt]}, "prefill": {name: [seconds of each prompt]},
"tokens": {name: [[tokens]]}, "token_bytes": weights that one token reads}. All prompts of a name under "decode" are
parallel sequences, those under "prefill" come one after the other. Choosing is greedy, by llama.cpp's own sampler.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gguf
import llama_cpp as api

STEP_TOKENS = 2048
WARM_UPS = 2


def main() -> None:
    task = json.load(sys.stdin)
    api.llama_backend_init()
    api.llama_log_set(_silent, None)
    model = api.llama_model_load_from_file(sys.argv[1].encode(), api.llama_model_default_params())
    if not model:
        raise SystemExit(f"{sys.argv[1]} could not be loaded")
    answer: dict[str, Any] = {
        "decode": {},
        "prefill": {},
        "tokens": {},
        "token_bytes": token_bytes(sys.argv[1]),
    }
    for name, prompts in task["prefill"].items():
        with parallel(model, 1, len(prompts[0]) + 1, task["threads"]) as sequences:
            sequences.run(prompts[:1], 1)
            answer["prefill"][name] = [sequences.run([prompt], 1)[0][0][0] for prompt in prompts]
    for name, prompts in task["decode"].items():
        room = len(prompts[0]) + task["num_tokens"]
        with parallel(model, len(prompts), room, task["threads"]) as sequences:
            for _ in range(WARM_UPS):
                sequences.run(prompts, 4)
            answer["decode"][name], answer["tokens"][name] = sequences.run(prompts, task["num_tokens"])
    print(json.dumps(answer))


class Sequences:
    """A batch of sequences of one context."""

    def __init__(self, context: Any, batch: Any, sampler: Any) -> None:
        self._context = context
        self._batch = batch
        self._sampler = sampler

    def run(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[float]], list[list[int]]]:
        """When each token of each sequence came, in seconds from the call, and the tokens."""
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        times: list[list[float]] = [[] for _ in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        start_s = time.monotonic()
        last_rows = self._prefill(prompts)
        while True:
            for number, row in enumerate(last_rows):
                tokens[number].append(api.llama_sampler_sample(self._sampler, self._context, row))
                times[number].append(time.monotonic() - start_s)
            if len(tokens[0]) == num_tokens:
                return times, tokens
            position = len(tokens[0]) - 1
            rows = [
                (own[-1], len(prompt) + position, number)
                for number, (own, prompt) in enumerate(zip(tokens, prompts, strict=True))
            ]
            self._decode(rows, set(range(len(rows))))
            last_rows = list(range(len(rows)))

    def _prefill(self, prompts: list[list[int]]) -> list[int]:
        """The rows of the prompts' last tokens. All prompts must fit into one step."""
        rows = [
            (token, place, number)
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        ends = [sum(map(len, prompts[: number + 1])) - 1 for number in range(len(prompts))]
        self._decode(rows, set(ends))
        return ends

    def _decode(self, rows: list[tuple[int, int, int]], wanted: set[int]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, number) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = number
            batch.logits[row] = row in wanted
        status = api.llama_decode(self._context, batch)
        if status:
            raise SystemExit(f"llama_decode says {status}")


@contextmanager
def parallel(model: Any, num_sequences: int, room: int, threads: int) -> Iterator[Sequences]:
    """A context for sequences of up to `room` tokens each."""
    settings = api.llama_context_default_params()
    settings.n_ctx = num_sequences * (-(-room // 256) * 256)
    settings.n_seq_max = num_sequences
    settings.n_batch = STEP_TOKENS
    settings.n_threads = settings.n_threads_batch = threads
    context = api.llama_init_from_model(model, settings)
    if not context:
        raise SystemExit(f"no context for {num_sequences} sequences of {room} tokens")
    batch = api.llama_batch_init(STEP_TOKENS, 0, 1)
    sampler = api.llama_sampler_init_greedy()
    try:
        yield Sequences(context, batch, sampler)
    finally:
        api.llama_sampler_free(sampler)
        api.llama_batch_free(batch)
        api.llama_free(context)


def token_bytes(path: str) -> int:
    """Of the weights, what one token needs: all of them, but of embeddings that are not also the head a row."""
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    is_tied = "output.weight" not in sizes
    return sum(sizes.values()) - (0 if is_tied else sizes["token_embd.weight"])


@api.llama_log_callback
def _silent(level: int, text: bytes, data: Any) -> None:
    pass


if __name__ == "__main__":
    main()
