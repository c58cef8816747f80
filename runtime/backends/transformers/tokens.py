"""A pool whose slots hold tokens instead of keys and values.

The engine shares, copies and spills its blocks like those of any other pool. The library keeps the
keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...dtypes import DType
from ...kv.storage import Bytes
from ...step.batch import Int64s, SequenceSpan
from ...tensors import reserved


class TokenPool:
    """A `KVPool`."""

    num_kv_heads = 1
    head_dim = 1
    dtype = DType.I64
    element_bytes = 8

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._tokens = reserved((num_blocks, block_size), np.int64)

    @property
    def size_bytes(self) -> int:
        return self._tokens.nbytes

    @property
    def layout(self) -> str:
        return f"tokens[{self.block_size}]"

    def write(self, slots: Int64s, tokens: Int64s) -> None:
        self._tokens.reshape(-1)[slots] = tokens

    def context(self, span: SequenceSpan) -> list[int]:
        """All tokens of the sequence, including those of this step."""
        held: list[int] = self._tokens[list(span.blocks)].reshape(-1)[: span.context_len].tolist()
        return held

    def copy_out(self, blocks: Sequence[int], into: Bytes) -> None:
        into[:] = self._tokens[list(blocks)].view(np.uint8)

    def copy_in(self, blocks: Sequence[int], content: Bytes) -> None:
        self._tokens[list(blocks)] = content.view(np.int64)

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        self._tokens[target, :num_tokens] = self._tokens[source, :num_tokens]
