"""Drives a decoder outside of the engine: a few sequences, each in a stretch of the KV storage of its own.

No scheduling, sharing or freeing: whoever makes it says how many sequences there are and how long they get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..engine.batch import SequenceSpan, StepBatch
from ..kv.kinds import KVKind
from ..models.decoder import Decoder

_BLOCK_TOKENS = 16
_ALL_LAYERS = "layers"  # what a forward pass calls them where compiled kernels compute them at once


@dataclass(slots=True)
class Steps:
    """How a decoder is driven, and, counted while it is, who computed.

    `max_rows` is for whoever reads a text to stay within, where it is to be read in short steps. What is longer all the
    same, as a prompt is, is not counted.
    """

    max_rows: int | None = None
    kv: KVKind = KVKind.MODEL
    counted: int = 0  # steps of up to `max_rows` rows
    by_kernels: int = 0  # of these: those whose layers were computed by compiled kernels


class Sequences:
    """`count` sequences, empty at first, of up to `max_tokens` each. Memory: their keys and values."""

    def __init__(self, decoder: Decoder, count: int, max_tokens: int, steps: Steps | None = None) -> None:
        self._decoder = decoder
        self._steps = steps or Steps()
        self._blocks_each = -(-max_tokens // _BLOCK_TOKENS)
        self._kv = decoder.new_kv(count * self._blocks_each, _BLOCK_TOKENS, kind=self._steps.kv)
        self._lengths = [0] * count

    def feed(self, new: Mapping[int, Sequence[int]], *, num_logits: int) -> torch.Tensor:
        """Append tokens to some sequences, by number, in one forward pass.

        Returns the logits of the last `num_logits` tokens of each, (len(new) * num_logits, vocab_size) fp32. Each
        gets at least that many tokens.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        spans: list[SequenceSpan] = []
        for number, added in new.items():
            first_block, begin = number * self._blocks_each, self._lengths[number]
            end = begin + len(added)
            blocks = tuple(range(first_block, first_block - (-end // _BLOCK_TOKENS)))
            spans.append(SequenceSpan(len(tokens), len(added), end, blocks))
            tokens += added
            positions += range(begin, end)
            slots += range(first_block * _BLOCK_TOKENS + begin, first_block * _BLOCK_TOKENS + end)
            rows += range(len(tokens) - num_logits, len(tokens))
            self._lengths[number] = end
        split = torch.tensor([tokens, positions, slots], dtype=torch.int64)
        batch = StepBatch(split[0], split[1], split[2], tuple(spans), torch.tensor(rows, dtype=torch.int64))
        self._steps.counted += self._steps.max_rows is not None and len(tokens) <= self._steps.max_rows
        return self._decoder.forward(batch, self._kv, on_layer=self._count)

    def clear(self) -> None:
        """Make all sequences empty again."""
        self._lengths = [0] * len(self._lengths)

    def _count(self, index: int, name: str, start_s: float, end_s: float) -> None:
        self._steps.by_kernels += name == _ALL_LAYERS
