"""KV storage in a layout for devices, and the division of a device's memory.

A token's keys are contiguous memory, which a kernel writes and reads as a unit, and so is a block:
its place in the pool does not matter. `copy_out` returns the order of `KVStorage`, so blocks move
between both kinds of pools like between two of one kind, and both read each other's snapshots.

Of the memory, weights come first, then room for the largest step, for recorded steps and for
unforeseen needs (libraries' workspaces, the allocator's rounding); keys and values get most of the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...kv.storage import Bytes, PoolShape
from ..torch.storage import Extent, TorchFloatBlocks
from ..torch.tensors import torch_dtype

if TYPE_CHECKING:
    from ...models.spec import DecoderSpec

MAX_STEP_TOKENS = 2_048  # as `EngineOptions`


class DeviceKVStorage(TorchFloatBlocks):
    """A `KVPool` on a device. Memory is reserved at once. All copies are enqueued on the current
    stream of the calling thread.
    """

    def __init__(self, shape: PoolShape, *, device: torch.device | None = None) -> None:
        sizes = (
            shape.num_layers,
            2,
            shape.num_blocks,
            shape.block_size,
            shape.num_kv_heads,
            shape.head_dim,
        )
        super().__init__(shape, torch.empty(sizes, dtype=torch_dtype(shape.dtype), device=device))
        self._layers = [(layer[0], layer[1]) for layer in self.data.unbind(0)]

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values for kernels, (blocks, block_size, kv_heads, head_dim) each."""
        return self._layers[layer]

    def copy_out(self, blocks: Sequence[int], into: Bytes) -> None:
        """Copy the content of these blocks: `into` is (len(blocks), bytes of a block),
        C-contiguous.

        Waits for the copy. Takes as much memory again on the device meanwhile.
        """
        content = self._by_block()[
            self._numbers(blocks)
        ].contiguous()  # (blocks, layers, 2, kv_heads, slots, d)
        torch.from_numpy(into).view(self.data.dtype).view(content.shape).copy_(content)

    def copy_in(self, blocks: Sequence[int], content: Bytes) -> None:
        """The reverse of `copy_out`. The blocks are distinct, and no other thread may read them
        meanwhile.
        """
        places = self._by_block()
        shape = (len(blocks), *places.shape[1:])
        places[self._numbers(blocks)] = (
            torch.from_numpy(content).view(self.data.dtype).view(shape).to(self.device)
        )

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of one block, in all layers, to another, whose other tokens stay
        unchanged.
        """
        self.data[:, :, target, :num_tokens].copy_(self.data[:, :, source, :num_tokens])

    def write(self, layer: int, slots: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store T tokens: slots (T,) int64; keys_values (T, 2 * num_kv_heads, head_dim), keys
        first.
        """
        split = keys_values.view(len(slots), 2, self.num_kv_heads, -1)
        for kind, places in enumerate(self._layers[layer]):
            places.view(-1, self.num_kv_heads, self.head_dim).index_copy_(0, slots, split[:, kind])

    def read(self, layer: int, extent: Extent) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, (num_kv_heads, extent.count, head_dim) each, for torch's attention."""
        found = []
        for places in self._layers[layer]:
            some = places if extent.blocks is None else places.index_select(0, extent.blocks)
            tokens = some.view(-1, self.num_kv_heads, self.head_dim)
            found.append(tokens.narrow(0, extent.start, extent.count).transpose(0, 1))
        return found[0], found[1]

    def _by_block(self) -> torch.Tensor:
        """(blocks, layers, 2, kv_heads, block_size, head_dim), a view."""
        return self.data.permute(2, 0, 1, 4, 3, 5)

    def _numbers(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(blocks), dtype=torch.int64, device=self.device)


def device_memory(device: str, spec: DecoderSpec, *, max_rows: int) -> tuple[int, int, int]:
    """(free, total, largest step) bytes of this device's memory."""
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info(torch.device(device))
    return free_bytes, total_bytes, activation_bytes(spec, MAX_STEP_TOKENS, max_rows)


def activation_bytes(spec: DecoderSpec, max_step_tokens: int, max_rows: int) -> int:
    """An upper bound of the largest step's memory, weights and cache excluded.

    A layer holds at the same time: the rows, their norm, queries with keys and values, the output
    of attention, the gate's two products and their product. Then logits, in the model's dtype and
    in fp32, and as much again while tokens are chosen.
    """
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    of_row = 3 * spec.hidden_size + heads + spec.num_heads * spec.head_dim + 3 * spec.intermediate_size
    of_logits = spec.vocab_size * (spec.dtype.size_bytes + 3 * 4)
    return max_step_tokens * of_row * spec.dtype.size_bytes + max_rows * of_logits
