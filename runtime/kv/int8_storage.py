"""Keys and values in half of the memory: 8-bit integers, with a scale for each token and head.

    x ≈ code · scale,   code in [-127, 127],   scale = max |x| / 127 of the head's numbers for that token

Keys and values have scales of their own, in the model's dtype. A code is found for the scale as that dtype holds it, so
reading multiplies exact numbers and rounds once. What is not finite comes back as NaN. As `KVStorage` in every other
way: the same blocks, slots and extents; only that what is read is always a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.batch import SequenceSpan
from .storage import Extent, copy_slots, extent_of

MAX_CODE = 127
WRITE_TOKENS = 512  # at a time: what is made on the way stays in the cache


class Int8KVStorage:
    """As `KVStorage`, with codes instead of numbers. Memory is reserved at once, and touched when it is written."""

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
        """`dtype` is that of what is written and read, and of the scales."""
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        shape = (num_layers, 2, num_kv_heads, num_blocks * block_size)
        self.codes = torch.empty((*shape, head_dim), dtype=torch.int8, device=device)
        self.scales = torch.empty((*shape, 1), dtype=dtype, device=device)
        # Views made once: every layer of every step wants its own, and indexing a list is cheaper.
        self._layers = list(zip(self.codes.unbind(0), self.scales.unbind(0), strict=True))

    @staticmethod
    def block_bytes(
        num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> int:
        """What one block takes, in all layers together."""
        return num_layers * 2 * num_kv_heads * (head_dim + dtype.itemsize) * block_size

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def element_bytes(self) -> int:
        """Of what most of a block's bytes are."""
        return 1

    @property
    def size_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def layout(self) -> str:
        """As `KVStorage.layout`: a block's codes, then its scales."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"int8+{dtype}[{len(self._layers)}, 2, {self.num_kv_heads}, {self.block_size}, {self.head_dim}+1]"
        )

    def copy_out(self, blocks: Sequence[int], into: torch.Tensor) -> None:
        """The content of these blocks: `into` is (len(blocks), bytes of a block) uint8, on the CPU, contiguous."""
        first = 0
        for data in (self.codes, self.scales):
            content = self._by_block(data)[:, :, :, list(blocks)].movedim(3, 0)
            content = content.reshape(len(blocks), -1).view(torch.uint8)
            into[:, first : first + content.shape[1]] = content.cpu()
            first += content.shape[1]

    def copy_in(self, blocks: Sequence[int], content: torch.Tensor) -> None:
        """The reverse of `copy_out`. Nobody may read these different blocks meanwhile."""
        first = 0
        for data in (self.codes, self.scales):
            places = self._by_block(data).movedim(3, 0)
            shape = (len(blocks), *places.shape[1:])
            num_bytes = places[0].numel() * data.element_size()
            part = content[:, first : first + num_bytes].contiguous()  # scales may lie at any byte
            places[list(blocks)] = part.view(data.dtype).view(shape).to(data.device)
            first += num_bytes

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """The first tokens of one block, in all layers, to another; the rest of that stays what it is."""
        for data in (self.codes, self.scales):
            copy_slots(data, source * self.block_size, target * self.block_size, num_tokens)

    def write(self, layer: int, slots: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Stores T tokens: slots (T,) int64; keys_values (T, 2 * num_kv_heads, head_dim), keys first."""
        codes, scales = self._layers[layer]
        pieces = zip(torch.split(slots, WRITE_TOKENS), torch.split(keys_values, WRITE_TOKENS), strict=True)
        for piece_slots, piece in pieces:
            new_codes, new_scales = _quantized(piece)
            split = (len(piece), 2, self.num_kv_heads, -1)
            codes.index_copy_(2, piece_slots, new_codes.view(split).permute(1, 2, 0, 3))
            scales.index_copy_(2, piece_slots, new_scales.view(split).permute(1, 2, 0, 3))

    def extent(self, span: SequenceSpan, first: int = 0) -> Extent:
        """Where the tokens [first, span.context_len) of a sequence lie."""
        return extent_of(span, first, self.block_size, self.device)

    def read(self, layer: int, extent: Extent) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, (num_kv_heads, extent.count, head_dim) each, copies in the dtype."""
        found = [self._gather(data, extent) for data in self._layers[layer]]
        codes, scales = (each.narrow(2, extent.start, extent.count) for each in found)
        # By way of fp32: its product is exact, and a third faster than one in 16 bits, which are not vectorised.
        keys, values = codes.float().mul_(scales.float()).to(self.dtype).unbind(0)
        return keys, values

    def _gather(self, data: torch.Tensor, extent: Extent) -> torch.Tensor:
        """(2, kv_heads, slots, last) What holds the extent, of one layer's codes or scales."""
        if extent.blocks is None:
            return data
        by_block = data.view(2, self.num_kv_heads, self.num_blocks, -1)
        return by_block.index_select(2, extent.blocks).view(2, self.num_kv_heads, -1, data.shape[-1])

    def _by_block(self, data: torch.Tensor) -> torch.Tensor:
        """(layers, 2, kv_heads, blocks, what a block has of a head)"""
        return data.view(len(self._layers), 2, self.num_kv_heads, self.num_blocks, -1)


def _quantized(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(…, head_dim) in any dtype → codes (…, head_dim) int8, and scales (…, 1) in that dtype."""
    new = numbers.float()
    scales = (new.abs().amax(-1, keepdim=True) / MAX_CODE).to(numbers.dtype)
    # A scale of 0 stands for nothing but zeros; one that is not finite makes NaN of the code 0.
    codes = (new / scales.float()).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-MAX_CODE, MAX_CODE)
    return codes.to(torch.int8), scales
