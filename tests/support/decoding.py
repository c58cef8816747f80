"""Drives a `Decoder` step by step in tests: sequences, their blocks, and batches of any mixture of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from teneral.runtime.models.decoder import Decoder
from teneral.runtime.step.batch import SequenceSpan, StepBatch


class Stepper:
    """Holds the KV cache of some sequences. Blocks are handed out in `block_order` as sequences grow."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int = 64,
        block_size: int = 8,
        block_order: Iterable[int] | None = None,
    ) -> None:
        self.decoder = decoder
        self.kv = decoder.new_kv(num_blocks, block_size)
        self._block_size = block_size
        self._free = list(block_order if block_order is not None else range(num_blocks))
        self._blocks: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(
        self, work: dict[str, Sequence[int]], *, on_layer: Callable[..., Any] | None = None
    ) -> dict[str, torch.Tensor]:
        """Runs these new tokens of each sequence in one batch: logits of all their rows."""
        batch = self.batch(work)
        logits = torch.from_numpy(self.decoder.forward(batch, self.kv, on_layer=on_layer))
        return {
            name: logits[span.start : span.start + span.length]
            for name, span in zip(work, batch.spans, strict=True)
        }

    def batch(self, work: dict[str, Sequence[int]]) -> StepBatch:
        """The batch that appends these tokens to their sequences, and asks for the logits of all rows."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[SequenceSpan] = []
        for name, new in work.items():
            cached = self._lengths.get(name, 0)
            end = cached + len(new)
            blocks = self._blocks.setdefault(name, [])
            while len(blocks) * self._block_size < end:
                blocks.append(self._free.pop(0))
            spans.append(SequenceSpan(len(tokens), len(new), end, tuple(blocks)))
            tokens += new
            positions += range(cached, end)
            slots += [
                blocks[at // self._block_size] * self._block_size + at % self._block_size
                for at in range(cached, end)
            ]
            self._lengths[name] = end
        return StepBatch(
            np.array(tokens, dtype=np.int64),
            np.array(positions, dtype=np.int64),
            np.array(slots, dtype=np.int64),
            tuple(spans),
            np.arange(len(tokens)),
        )

    def greedy(self, prompts: dict[str, Sequence[int]], num_tokens: int) -> dict[str, list[int]]:
        """Continues all prompts together, each step one batch, by the likeliest token."""
        chosen: dict[str, list[int]] = {name: [] for name in prompts}
        work = dict(prompts)
        for _ in range(num_tokens):
            for name, logits in self.step(work).items():
                chosen[name].append(int(logits[-1].argmax()))
            work = {name: [tokens[-1]] for name, tokens in chosen.items()}
        return chosen


def prompt_of(length: int, *, vocab_size: int = 256, seed: int = 0) -> list[int]:
    """Random tokens, the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


@torch.no_grad()
def oracle_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """What transformers says of every row, (rows, vocab_size) fp32."""
    return model(torch.tensor([tokens])).logits[0].float()


@torch.no_grad()
def oracle_behind(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The greedy tokens of transformers behind the prompt, and behind each of these tokens but the last, in one pass:
    `tokens` themselves, where they are its own.
    """
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    return model(ids).logits[0, len(prompt) - 1 :].argmax(-1).tolist()


@torch.no_grad()
def oracle_greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers continues a prompt with, using its own cache."""
    # transformers 5.24 renamed the argument and the field.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids, cache, chosen = torch.tensor([prompt]), None, []
    for number in range(num_tokens):
        # Models that begin with a Mamba-2 layer count the cache's tokens wrong.
        end = len(prompt) + number
        positions = {"position_ids": torch.arange(end - ids.shape[1], end)[None]}
        out = model(ids, **{name: cache}, **positions, use_cache=True)
        cache = getattr(out, name)
        chosen.append(int(out.logits[0, -1].argmax()))
        ids = torch.tensor([[chosen[-1]]])
    return chosen
