"""What a model and an engine need of any storage for keys and values.

A pool has blocks of a fixed number of tokens. Who owns which block is the allocator's business (`blocks.py`), not known
here. Every kind of pool passes the one contract suite in `tests/runtime/kv/test_storage.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..dtypes import DType

Bytes = npt.NDArray[np.uint8]


class KVPool(Protocol):
    """Keys and values of `num_blocks` blocks, however and wherever they are stored."""

    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    dtype: DType  # of what a model writes and reads

    @property
    def element_bytes(self) -> int:
        """Of the numbers that most of a block's bytes are."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def layout(self) -> str:
        """How the bytes of a block are to be read: blocks of pools with equal layouts can be exchanged."""

    def copy_out(self, blocks: Sequence[int], into: Bytes) -> None:
        """The content of these blocks: `into` is (len(blocks), bytes of a block), C-contiguous."""

    def copy_in(self, blocks: Sequence[int], content: Bytes) -> None:
        """The reverse of `copy_out`. Nobody may read these different blocks meanwhile."""

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """The first tokens of one block, in all layers, to another; the rest of that stays what it is."""


def layout_of(
    kind: str, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, *, extra: str = ""
) -> str:
    """As `KVPool.layout` has it."""
    return f"{kind}[{num_layers}, 2, {num_kv_heads}, {block_size}, {head_dim}{extra}]"


def by_block(data: Any, num_blocks: int) -> Any:
    """(layers, 2, kv_heads, slots, last) → (blocks, layers, 2, kv_heads, slots a block * last), a view."""
    layers, two, heads = data.shape[:3]
    return data.reshape(layers, two, heads, num_blocks, -1).transpose(3, 0, 1, 2, 4)
