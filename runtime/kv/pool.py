"""The storage protocol of keys and values, as models and the engine use it.

A pool has blocks of a fixed number of tokens. Allocation is separate (`blocks.py`). Every kind of
pool passes the one contract suite in `tests/runtime/kv/test_storage.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..dtypes import DType

Bytes = npt.NDArray[np.uint8]


class KVPool(Protocol):
    """Keys and values of `num_blocks` blocks, in any format and place."""

    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    dtype: DType  # of the keys and values that a model writes and reads

    @property
    def element_bytes(self) -> int:
        """The size of the numbers that make up most of a block's bytes."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def layout(self) -> str:
        """The layout of a block's bytes. Blocks of pools with equal layouts are interchangeable."""

    def copy_out(self, blocks: Sequence[int], into: Bytes) -> None:
        """Copy the content of these blocks: `into` is (len(blocks), bytes of a block),
        C-contiguous.
        """

    def copy_in(self, blocks: Sequence[int], content: Bytes) -> None:
        """The reverse of `copy_out`. The blocks are distinct, and no other thread may read them
        meanwhile.
        """

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of one block, in all layers, to another, whose other tokens stay
        unchanged.
        """


def layout_of(
    kind: str, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, *, extra: str = ""
) -> str:
    """The text of `KVPool.layout`."""
    return f"{kind}[{num_layers}, 2, {num_kv_heads}, {block_size}, {head_dim}{extra}]"


def by_block(data: Any, num_blocks: int) -> Any:
    """(layers, 2, kv_heads, slots, last) → (blocks, layers, 2, kv_heads, slots a block * last), a view."""
    layers, two, heads = data.shape[:3]
    return data.reshape(layers, two, heads, num_blocks, -1).transpose(3, 0, 1, 2, 4)
