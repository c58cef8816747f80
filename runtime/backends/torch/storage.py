"""Pools of keys and values in torch tensors, on the CPU or a device, and their reads for attention.

Content and layout are those of `kv/storage.py`: blocks move between both kinds of pools like
between two of one kind. Reads return views of consecutive slots, and copies of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...kv.storage import Bytes, FloatBlocks, Int8Blocks, KVPool, PoolShape
from ...step.batch import SequenceSpan
from .tensors import torch_dtype

MAX_CODE = 127
# Tokens written at a time, so that temporaries stay in the cache.
WRITE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Extent:
    """The location of `count` tokens of one sequence.

    Without `blocks`: consecutive slots from `start`. With them: the slots of these blocks in order,
    of which the first `start` are skipped.
    """

    start: int
    count: int
    blocks: torch.Tensor | None = None  # (num_blocks,) int64


class TorchPool(KVPool, Protocol):
    """The methods that torch's attention needs in addition to `KVPool`."""

    @property
    def device(self) -> torch.device: ...

    def write(self, layer: int, slots: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store T tokens: slots (T,) int64; keys_values (T, parts * num_kv_heads, head_dim), keys
        first.
        """

    def extent(self, span: SequenceSpan, first: int = 0) -> Extent:
        """The location of the tokens [first, span.context_len) of a sequence."""

    def read(self, layer: int, extent: Extent) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, (num_kv_heads, extent.count, head_dim) each."""


def extent_of(span: SequenceSpan, first: int, block_size: int, device: torch.device) -> Extent:
    """The location of the tokens [first, span.context_len) of a sequence, in blocks of `block_size`
    tokens.
    """
    count = span.context_len - first
    first_block, skipped = divmod(first, block_size)
    blocks = span.blocks[first_block : -(-span.context_len // block_size)]
    if blocks == tuple(range(blocks[0], blocks[0] + len(blocks))):
        return Extent(blocks[0] * block_size + skipped, count)
    return Extent(skipped, count, torch.tensor(blocks, device=device))


def copy_slots(data: torch.Tensor, source: int, target: int, count: int) -> None:
    """Copy `count` slots from `source` on to those from `target` on; data is (…, slots, last). They
    must not overlap.
    """
    data.narrow(-2, target, count).copy_(data.narrow(-2, source, count))


class TorchFloatBlocks(FloatBlocks):
    """Blocks in the model's dtype, in one tensor."""

    def __init__(self, shape: PoolShape, data: torch.Tensor) -> None:
        super().__init__(shape)
        self.data = data

    @property
    def size_bytes(self) -> int:
        return self.data.nbytes

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def element_bytes(self) -> int:
        """The size of the numbers in a block's bytes."""
        return self.data.element_size()

    def extent(self, span: SequenceSpan, first: int = 0) -> Extent:
        """The location of the tokens [first, span.context_len) of a sequence."""
        return extent_of(span, first, self.block_size, self.device)


class TorchKVStorage(TorchFloatBlocks):
    """Keys and values of `num_blocks` blocks. Memory is reserved at once, and touched when it is
    written.
    """

    def __init__(self, shape: PoolShape, *, device: torch.device | None = None) -> None:
        sizes = (*shape.vectors, shape.head_dim)
        super().__init__(shape, torch.empty(sizes, dtype=torch_dtype(shape.dtype), device=device))
        # Views made once: every layer of every step needs its own, and indexing a list is cheaper.
        self._layers = list(self.data.unbind(0))
        self._keys = [layer[0] for layer in self._layers]
        self._values = [layer[-1] for layer in self._layers]

    def copy_out(self, blocks: Sequence[int], into: Bytes) -> None:
        """Copy the content of these blocks: `into` is (len(blocks), bytes of a block),
        C-contiguous.
        """
        by_block = self.data.view(len(self._layers), self.num_parts, self.num_kv_heads, self.num_blocks, -1)
        content = by_block[:, :, :, list(blocks)].movedim(
            3, 0
        )  # (blocks, layers, parts, kv_heads, slots * head_dim)
        torch.from_numpy(into).view(self.data.dtype).view(content.shape).copy_(content)

    def copy_in(self, blocks: Sequence[int], content: Bytes) -> None:
        """The reverse of `copy_out`. The blocks are distinct, and no other thread may read them
        meanwhile.
        """
        by_block = self.data.view(len(self._layers), self.num_parts, self.num_kv_heads, self.num_blocks, -1)
        places = by_block.movedim(3, 0)
        shape = (len(blocks), *places.shape[1:])
        places[list(blocks)] = (
            torch.from_numpy(content).view(self.data.dtype).view(shape).to(self.data.device)
        )

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of one block, in all layers, to another, whose other tokens stay
        unchanged.
        """
        copy_slots(self.data, source * self.block_size, target * self.block_size, num_tokens)

    def write(self, layer: int, slots: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store T tokens: slots (T,) int64; keys_values (T, parts * num_kv_heads, head_dim), keys
        first.
        """
        split = keys_values.view(len(slots), self.num_parts, self.num_kv_heads, -1)
        self._layers[layer].index_copy_(2, slots, split.permute(1, 2, 0, 3))

    def read(self, layer: int, extent: Extent) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, (num_kv_heads, extent.count, head_dim) each.

        Consecutive slots give views, valid until their blocks are written again; others give
        copies.
        """
        if extent.blocks is None:
            keys, values = self._keys[layer], self._values[layer]
        else:
            by_block = self._layers[layer].view(self.num_parts, self.num_kv_heads, self.num_blocks, -1)
            gathered = by_block.index_select(2, extent.blocks)
            parts = gathered.view(self.num_parts, self.num_kv_heads, -1, self.head_dim)
            keys, values = parts[0], parts[-1]
        return keys.narrow(1, extent.start, extent.count), values.narrow(1, extent.start, extent.count)


class TorchInt8KVStorage(Int8Blocks):
    """A pool like `TorchKVStorage` that stores int8 codes and scales. Memory is reserved at once,
    and touched when it is written.
    """

    def __init__(self, shape: PoolShape, *, device: torch.device | None = None) -> None:
        super().__init__(shape)
        self.codes = torch.empty((*shape.vectors, shape.head_dim), dtype=torch.int8, device=device)
        self._torch_dtype = torch_dtype(shape.dtype)
        self.scales = torch.empty((*shape.vectors, 1), dtype=self._torch_dtype, device=device)
        # Views made once: every layer of every step needs its own, and indexing a list is cheaper.
        self._layers = list(zip(self.codes.unbind(0), self.scales.unbind(0), strict=True))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def size_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def copy_out(self, blocks: Sequence[int], into: Bytes) -> None:
        """Copy the content of these blocks: `into` is (len(blocks), bytes of a block),
        C-contiguous.
        """
        first = 0
        for data in (self.codes, self.scales):
            content = self._by_block(data)[:, :, :, list(blocks)].movedim(3, 0)
            content = content.reshape(len(blocks), -1).view(torch.uint8)
            into[:, first : first + content.shape[1]] = content.cpu().numpy()
            first += content.shape[1]

    def copy_in(self, blocks: Sequence[int], content: Bytes) -> None:
        """The reverse of `copy_out`. The blocks are distinct, and no other thread may read them
        meanwhile.
        """
        first = 0
        for data in (self.codes, self.scales):
            places = self._by_block(data).movedim(3, 0)
            shape = (len(blocks), *places.shape[1:])
            num_bytes = places[0].numel() * data.element_size()
            # Scales may be unaligned.
            part = torch.from_numpy(np.ascontiguousarray(content[:, first : first + num_bytes]))
            places[list(blocks)] = part.view(data.dtype).view(shape).to(data.device)
            first += num_bytes

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of one block, in all layers, to another, whose other tokens stay
        unchanged.
        """
        for data in (self.codes, self.scales):
            copy_slots(data, source * self.block_size, target * self.block_size, num_tokens)

    def write(self, layer: int, slots: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store T tokens: slots (T,) int64; keys_values (T, parts * num_kv_heads, head_dim), keys
        first.
        """
        codes, scales = self._layers[layer]
        pieces = zip(torch.split(slots, WRITE_TOKENS), torch.split(keys_values, WRITE_TOKENS), strict=True)
        for piece_slots, piece in pieces:
            new_codes, new_scales = _quantized(piece)
            split = (len(piece), self.num_parts, self.num_kv_heads, -1)
            codes.index_copy_(2, piece_slots, new_codes.view(split).permute(1, 2, 0, 3))
            scales.index_copy_(2, piece_slots, new_scales.view(split).permute(1, 2, 0, 3))

    def extent(self, span: SequenceSpan, first: int = 0) -> Extent:
        """The location of the tokens [first, span.context_len) of a sequence."""
        return extent_of(span, first, self.block_size, self.device)

    def read(self, layer: int, extent: Extent) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, (num_kv_heads, extent.count, head_dim) each, copies in the dtype."""
        found = [self._gather(data, extent) for data in self._layers[layer]]
        codes, scales = (each.narrow(2, extent.start, extent.count) for each in found)
        # Through fp32: its product is exact, and a third faster than one in 16 bits, which is not
        # vectorised.
        parts = codes.float().mul_(scales.float()).to(self._torch_dtype)
        return parts[0], parts[-1]

    def _gather(self, data: torch.Tensor, extent: Extent) -> torch.Tensor:
        """The slots of the extent, of one layer's codes or scales: (parts, kv_heads, slots, last)."""
        if extent.blocks is None:
            return data
        by_block = data.view(self.num_parts, self.num_kv_heads, self.num_blocks, -1)
        found = by_block.index_select(2, extent.blocks)
        return found.view(self.num_parts, self.num_kv_heads, -1, data.shape[-1])

    def _by_block(self, data: torch.Tensor) -> torch.Tensor:
        """(layers, parts, kv_heads, blocks, bytes of a head in a block)"""
        return data.view(len(self._layers), self.num_parts, self.num_kv_heads, self.num_blocks, -1)


def _quantized(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(…, head_dim) in any dtype → codes (…, head_dim) int8, and scales (…, 1) in that dtype."""
    new = numbers.float()
    scales = (new.abs().amax(-1, keepdim=True) / MAX_CODE).to(numbers.dtype)
    # A scale of 0 stands for zeros only; a scale that is not finite turns the code 0 into NaN.
    codes = (new / scales.float()).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-MAX_CODE, MAX_CODE)
    return codes.to(torch.int8), scales
