"""Where keys and values lie: one tensor for all layers, cut into blocks of a fixed number of tokens.

A block is the same stretch of slots in every layer. Token t of a sequence lies in number t // block_size of
its blocks, in slot t % block_size of that block. Heads come before slots, so a run of consecutive blocks is,
for one head, one stretch of memory, and reading it costs nothing. Who owns which block is the allocator's
business (`blocks.py`), not known here.

`KVPool` is what a model and an engine need of any storage; every kind passes the one contract suite in
`tests/runtime/kv/test_storage.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..engine.batch import SequenceSpan


@dataclass(frozen=True, slots=True)
class Extent:
    """Where `count` tokens of one sequence lie.

    Without `blocks`: in consecutive slots from `start`. With them: in those blocks' slots one behind
    another, of which the first `start` are skipped.
    """

    start: int
    count: int
    blocks: torch.Tensor | None = None  # (num_blocks,) int64


class KVPool(Protocol):
    """Keys and values of `num_blocks` blocks, however they are stored. Methods as `KVStorage` has them."""

    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    dtype: torch.dtype  # of what is written and read

    @property
    def device(self) -> torch.device: ...

    @property
    def element_bytes(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def layout(self) -> str: ...

    def copy_out(self, blocks: Sequence[int], into: torch.Tensor) -> None: ...

    def copy_in(self, blocks: Sequence[int], content: torch.Tensor) -> None: ...

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None: ...

    def write(self, layer: int, slots: torch.Tensor, keys_values: torch.Tensor) -> None: ...

    def extent(self, span: SequenceSpan, first: int = 0) -> Extent: ...

    def read(self, layer: int, extent: Extent) -> tuple[torch.Tensor, torch.Tensor]: ...


def extent_of(span: SequenceSpan, first: int, block_size: int, device: torch.device) -> Extent:
    """Where the tokens [first, span.context_len) of a sequence lie, in blocks of so many tokens."""
    count = span.context_len - first
    first_block, skipped = divmod(first, block_size)
    blocks = span.blocks[first_block : -(-span.context_len // block_size)]
    if blocks == tuple(range(blocks[0], blocks[0] + len(blocks))):
        return Extent(blocks[0] * block_size + skipped, count)
    return Extent(skipped, count, torch.tensor(blocks, device=device))


def copy_slots(data: torch.Tensor, source: int, target: int, count: int) -> None:
    """`count` slots from `source` on to those from `target` on, which are others; data (…, slots, last)."""
    data.narrow(-2, target, count).copy_(data.narrow(-2, source, count))


class KVStorage:
    """Keys and values of `num_blocks` blocks. Memory is reserved at once, and touched when it is written."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype  # of what is written and read
        self.data = torch.empty(
            (num_layers, 2, num_kv_heads, num_blocks * block_size, head_dim), dtype=dtype, device=device
        )
        # Views made once: every layer of every step wants its own, and indexing a list is cheaper.
        self._layers = list(self.data.unbind(0))
        self._keys = [layer[0] for layer in self._layers]
        self._values = [layer[1] for layer in self._layers]

    @staticmethod
    def block_bytes(
        num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> int:
        """What one block takes, in all layers together."""
        return num_layers * 2 * num_kv_heads * head_dim * block_size * dtype.itemsize

    @property
    def size_bytes(self) -> int:
        return self.data.nbytes

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def element_bytes(self) -> int:
        """Of the numbers that a block's bytes are."""
        return self.data.element_size()

    @property
    def layout(self) -> str:
        """How the bytes of a block are to be read: blocks of pools with equal layouts can be exchanged."""
        num_layers = len(self._layers)
        dtype = str(self.data.dtype).removeprefix("torch.")
        return f"{dtype}[{num_layers}, 2, {self.num_kv_heads}, {self.block_size}, {self.head_dim}]"

    def copy_out(self, blocks: Sequence[int], into: torch.Tensor) -> None:
        """The content of these blocks: `into` is (len(blocks), bytes of a block) uint8, on the CPU, contiguous."""
        by_block = self.data.view(len(self._layers), 2, self.num_kv_heads, self.num_blocks, -1)
        content = by_block[:, :, :, list(blocks)].movedim(
            3, 0
        )  # (blocks, layers, 2, kv_heads, slots * head_dim)
        into.view(self.data.dtype).view(content.shape).copy_(content)

    def copy_in(self, blocks: Sequence[int], content: torch.Tensor) -> None:
        """The reverse of `copy_out`. Nobody may read these different blocks meanwhile."""
        by_block = self.data.view(len(self._layers), 2, self.num_kv_heads, self.num_blocks, -1)
        places = by_block.movedim(3, 0)
        shape = (len(blocks), *places.shape[1:])
        places[list(blocks)] = content.view(self.data.dtype).view(shape).to(self.data.device)

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """The first tokens of one block, in all layers, to another; the rest of that stays what it is."""
        copy_slots(self.data, source * self.block_size, target * self.block_size, num_tokens)

    def write(self, layer: int, slots: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Stores T tokens: slots (T,) int64; keys_values (T, 2 * num_kv_heads, head_dim), keys first."""
        split = keys_values.view(len(slots), 2, self.num_kv_heads, -1)
        self._layers[layer].index_copy_(2, slots, split.permute(1, 2, 0, 3))

    def extent(self, span: SequenceSpan, first: int = 0) -> Extent:
        """Where the tokens [first, span.context_len) of a sequence lie."""
        return extent_of(span, first, self.block_size, self.device)

    def read(self, layer: int, extent: Extent) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, (num_kv_heads, extent.count, head_dim) each.

        Of consecutive slots they are views, valid until their blocks are written again; otherwise copies.
        """
        if extent.blocks is None:
            keys, values = self._keys[layer], self._values[layer]
        else:
            by_block = self._layers[layer].view(2, self.num_kv_heads, self.num_blocks, -1)
            gathered = by_block.index_select(2, extent.blocks)
            keys, values = gathered.view(2, self.num_kv_heads, -1, self.head_dim).unbind(0)
        return keys.narrow(1, extent.start, extent.count), values.narrow(1, extent.start, extent.count)
