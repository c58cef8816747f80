"""The storage of keys and values: its protocol, as models and the engine use it, its default size,
and the host's pool.

A pool has blocks of a fixed number of tokens. Allocation is separate (`blocks.py`). Every kind of
pool passes the one contract suite in `tests/runtime/kv/test_storage.py`.

The host's pool is one array for all layers, or one for those of each size. A block is the same
stretch of slots in every layer.
Token t of a sequence lies in number t // block_size of its blocks, in slot t % block_size of that
block. Heads come before slots, so a run of consecutive blocks is contiguous for each head, and is
read without a copy. Executors write and read the arrays themselves.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..tensors import DType, reserved

Bytes = npt.NDArray[np.uint8]


class KVKind(enum.StrEnum):
    """The storage format of a pool."""

    MODEL = "model"  # the model's own dtype
    INT8 = "int8"  # integers and a scale for each token and head


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


class KVLayers(NamedTuple):
    """Layers of a pool whose keys and values have the same sizes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class PoolShape(NamedTuple):
    """The sizes of a pool, and the dtype of the keys and values that a model writes and reads."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    dtype: DType
    num_parts: int = 2  # of a layer: keys and values; 1: latents, which both are made of
    state_size: int = 0  # fp32 numbers of one sequence's recurrent state, in all layers together
    num_states: int = 0
    others: tuple[KVLayers, ...] = ()  # layers of other sizes, which have arrays of their own

    def layout(self, kind: str, *, extra: str = "") -> str:
        """The text of `KVPool.layout`."""
        return " + ".join(
            f"{kind}[{each.num_layers}, {self.num_parts}, {each.num_kv_heads}, {self.block_size}, "
            f"{each.head_dim}{extra}]"
            for each in self.groups
        )

    @property
    def groups(self) -> tuple[PoolShape, ...]:
        """The same pool with the layers of one size each."""
        alone = self._replace(others=())
        return alone, *(alone._replace(**other._asdict()) for other in self.others)

    @property
    def vectors(self) -> tuple[int, int, int, int]:
        """(layers, parts, kv_heads, slots): how the vectors of `head_dim` numbers lie."""
        return self.num_layers, self.num_parts, self.num_kv_heads, self.num_blocks * self.block_size


class _Blocks:
    """The attributes that all pools share, wherever their arrays lie."""

    def __init__(self, shape: PoolShape) -> None:
        self.shape = shape
        self.num_layers, self.num_kv_heads, self.head_dim = shape[:3]
        self.num_blocks, self.block_size, self.dtype, self.num_parts = shape[3:7]


class FloatBlocks(_Blocks):
    """The sizes of blocks in the model's dtype."""

    @staticmethod
    def block_bytes(shape: PoolShape) -> int:
        """The bytes of one block, in all layers together."""
        return sum(
            math.prod(each.vectors) // each.num_blocks * each.head_dim * each.dtype.size_bytes
            for each in shape.groups
        )

    @property
    def layout(self) -> str:
        return self.shape.layout(self.dtype.label)


class Int8Blocks(_Blocks):
    """The sizes of blocks of int8 codes, and of their scales in the model's dtype."""

    @staticmethod
    def block_bytes(shape: PoolShape) -> int:
        """The bytes of one block, in all layers together."""
        return sum(
            math.prod(each.vectors) // each.num_blocks * (each.head_dim + each.dtype.size_bytes)
            for each in shape.groups
        )

    @property
    def element_bytes(self) -> int:
        """The size of a code; codes are most of a block's bytes."""
        return 1

    @property
    def layout(self) -> str:
        """The layout of a block: its codes, then its scales."""
        return self.shape.layout(f"int8+{self.dtype.label}", extra="+1")


def by_block(data: Any, num_blocks: int) -> Any:
    """(layers, parts, kv_heads, slots, last) → (blocks, layers, parts, kv_heads, slots a block * last), a view."""
    return data.reshape(*data.shape[:3], num_blocks, -1).transpose(3, 0, 1, 2, 4)


# The pool's share of the memory left by the weights on a CPU: the rest is for activations, staging,
# and the container's other processes.
KV_SHARE = 0.4
DEFAULT_KV_BYTES = 4 << 30
MIN_KV_BYTES = 1 << 20
DEVICE_KV_SHARE = 0.9
# A few hundred kernels' records for each size, and the activations that they share.
GRAPH_BYTES = 256 << 20
SPARE_BYTES = 512 << 20


def default_kv_bytes(weight_bytes: int, free_bytes: int | None) -> int:
    """The default size of the pool on a CPU: a bounded share of the memory left by the weights
    (None: unknown).
    """
    if free_bytes is None:
        return DEFAULT_KV_BYTES
    return max(MIN_KV_BYTES, min(DEFAULT_KV_BYTES, int(KV_SHARE * (free_bytes - weight_bytes))))


def device_kv_bytes(free_bytes: int, step_bytes: int) -> int:
    """The default size of the pool on a device whose weights have their memory: most of the free bytes that the largest
    step, graphs and a spare leave.
    """
    return max(MIN_KV_BYTES, int(DEVICE_KV_SHARE * (free_bytes - spare_bytes(step_bytes))))


def spare_bytes(step_bytes: int) -> int:
    """The memory of a device that its pool leaves: for the largest step, graphs and a spare."""
    return step_bytes + GRAPH_BYTES + SPARE_BYTES


class _Arrays(_Blocks):
    """The arrays of a host's pool. Memory is reserved at once, and touched when it is written.

    `groups` are data and scales, if there are such, of layers of the same sizes: (layers, parts, kv_heads,
    num_blocks * block_size, head_dim or 1), keys, then values. `states` is (num_states, state_size) fp32, of recurrent
    states.
    """

    def __init__(self, shape: PoolShape) -> None:
        super().__init__(shape)
        self.num_states = shape.num_states
        self.states = reserved((shape.num_states, shape.state_size), np.float32)
        self.groups = tuple(self._reserve(each) for each in shape.groups)
        self._arrays = [array for group in self.groups for array in group if array is not None]

    def _reserve(self, shape: PoolShape) -> tuple[Any, Any]:
        """Of layers of the same sizes."""
        raise NotImplementedError

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    def copy_out(self, blocks: Sequence[int], into: Bytes) -> None:
        first = 0
        for data in self._arrays:
            content = by_block(data, self.num_blocks)[list(blocks)].reshape(len(blocks), -1).view(np.uint8)
            into[:, first : first + content.shape[1]] = content
            first += content.shape[1]

    def copy_in(self, blocks: Sequence[int], content: Bytes) -> None:
        first = 0
        for data in self._arrays:
            places = by_block(data, self.num_blocks)
            num_bytes = places[0].size * data.itemsize
            # Scales may be unaligned.
            part = np.ascontiguousarray(content[:, first : first + num_bytes])
            places[list(blocks)] = part.view(data.dtype).reshape(len(blocks), *places.shape[1:])
            first += num_bytes

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        for data in self._arrays:
            copy_slots(data, source * self.block_size, target * self.block_size, num_tokens)

    def copy_state(self, source: int, target: int) -> None:
        """Copy a sequence's state to another place."""
        self.states[target] = self.states[source]


class KVStorage(_Arrays, FloatBlocks):
    """Keys and values of `num_blocks` blocks in the model's dtype; BF16 is held as uint16."""

    def _reserve(self, shape: PoolShape) -> tuple[Any, Any]:
        return reserved((*shape.vectors, shape.head_dim), shape.dtype.numpy), None

    @property
    def data(self) -> Any:
        """That of the first layers' size, as all have in most models."""
        return self.groups[0][0]

    @property
    def element_bytes(self) -> int:
        return self.dtype.size_bytes


class Int8KVStorage(_Arrays, Int8Blocks):
    """Keys and values in half of the memory: 8-bit integers, with a scale for each token and head.

        x ≈ code · scale,   code in [-127, 127],   scale = max |x| / 127 of the head's numbers for that token

    Keys and values have scales of their own, in the model's dtype. A code is computed for the scale
    as rounded to that dtype, so reading multiplies exact numbers and rounds once. Numbers that are
    not finite come back as NaN: their scale is not finite, and their code 0. Data are int8, scales
    (…, slots, 1) in `dtype`.
    """

    def _reserve(self, shape: PoolShape) -> tuple[Any, Any]:
        codes = reserved((*shape.vectors, shape.head_dim), np.int8)
        return codes, reserved((*shape.vectors, 1), shape.dtype.numpy)

    @property
    def codes(self) -> Any:
        """Those of the first layers' size, as all have in most models."""
        return self.groups[0][0]

    @property
    def scales(self) -> Any:
        """Of these codes."""
        return self.groups[0][1]


def copy_slots(data: Any, source: int, target: int, count: int) -> None:
    """Copy `count` slots from `source` on to those from `target` on; data is (…, slots, last). They
    must not overlap.
    """
    data[..., target : target + count, :] = data[..., source : source + count, :]
