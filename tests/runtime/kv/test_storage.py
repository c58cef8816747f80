"""Tokens written into blocks are read back in order, whatever the storage: exactly, or as near as 8
bits are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.runtime.backends.cuda.storage import DeviceKVStorage
from teneral.runtime.backends.torch.storage import MAX_CODE, TorchInt8KVStorage, TorchKVStorage, TorchPool
from teneral.runtime.backends.torch.tensors import torch_dtype
from teneral.runtime.kv.storage import Int8KVStorage, KVStorage, PoolShape
from teneral.runtime.step.batch import SequenceSpan
from teneral.runtime.tensors import DType

KINDS: list[Any] = [TorchKVStorage, TorchInt8KVStorage, DeviceKVStorage]
ON_HOST = {TorchKVStorage: KVStorage, TorchInt8KVStorage: Int8KVStorage}  # what other executors have
LAYERS, HEADS, DIM, BLOCKS, BLOCK_SIZE = 2, 3, 4, 12, 4


def shape(dtype: DType = DType.F32) -> PoolShape:
    return PoolShape(LAYERS, HEADS, DIM, BLOCKS, BLOCK_SIZE, dtype)


def storage(kind: Any = TorchKVStorage, dtype: DType = DType.F32) -> Any:
    return kind(shape(dtype))


def written(kv: TorchPool, blocks: tuple[int, ...], length: int, layer: int = 1) -> torch.Tensor:
    """Writes random tokens into a sequence's blocks, and returns them: (T, 2, heads, dim)."""
    slots = torch.tensor([blocks[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for t in range(length)])
    tokens = torch.randn(length, 2, HEADS, DIM).to(torch_dtype(kv.dtype))
    kv.write(layer, slots, tokens.view(length, 2 * HEADS, DIM))
    return tokens


def assert_same(kv: TorchPool, read: torch.Tensor, tokens: torch.Tensor) -> None:
    """read (heads, T, dim) is what was written of keys or of values, (T, heads, dim)."""
    expected = tokens.transpose(0, 1)
    if isinstance(kv, TorchKVStorage | DeviceKVStorage):
        assert torch.equal(read, expected)
        return
    assert read.dtype == torch_dtype(kv.dtype)
    # Half a step of the codes; and what the dtype rounds away, of the scale (a code may be cut off) and of the product.
    largest = expected.float().abs().amax(-1, keepdim=True)
    bound = largest * (0.5 / MAX_CODE + 2 * torch.finfo(torch_dtype(kv.dtype)).eps)
    assert ((read.float() - expected.float()).abs() <= bound).all()


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([DType.F32, DType.BF16, DType.F16]),
)
def test_tokens_are_read_back_from_any_blocks_and_from_any_of_them_on(data, kind, dtype):
    kv = storage(kind, dtype)
    blocks = tuple(data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=6, unique=True)))
    length = data.draw(st.integers(1, len(blocks) * BLOCK_SIZE))
    first = data.draw(st.integers(0, length - 1))
    tokens = written(kv, blocks, length)

    keys, values = kv.read(1, kv.extent(SequenceSpan(0, 1, length, blocks), first))

    assert_same(kv, keys, tokens[first:, 0])
    assert_same(kv, values, tokens[first:, 1])


def test_consecutive_blocks_are_read_without_a_copy():
    kv = storage()
    span = SequenceSpan(0, 1, 10, (4, 5, 6, 11))  # the last block is reserved, and not yet used
    written(kv, span.blocks, 10)

    keys, values = kv.read(1, kv.extent(span, first=3))

    storage_address = kv.data.untyped_storage().data_ptr()
    assert keys.untyped_storage().data_ptr() == storage_address
    assert values.untyped_storage().data_ptr() == storage_address
    assert keys.shape == (HEADS, 7, DIM)


def test_layers_and_other_blocks_are_left_alone():
    kv = storage()
    kv.data.fill_(7.0)

    written(kv, (2,), 4)

    assert (kv.data[0] == 7.0).all()
    others = [slot for slot in range(BLOCKS * BLOCK_SIZE) if not 8 <= slot < 12]
    assert (kv.data[1][:, :, others] == 7.0).all()
    assert not (kv.data[1][:, :, 8:12] == 7.0).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_its_size_is_that_of_its_blocks(kind, dtype):
    kv = storage(kind, dtype)

    assert kv.size_bytes == BLOCKS * kind.block_bytes(shape(dtype))
    assert not KVStorage.block_bytes(shape(dtype)) % kv.element_bytes
    numbers = LAYERS * 2 * HEADS * BLOCKS * BLOCK_SIZE
    in_codes = kind is TorchInt8KVStorage
    assert kv.size_bytes == numbers * (DIM + dtype.size_bytes if in_codes else DIM * dtype.size_bytes)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), kind=st.sampled_from(KINDS), dtype=st.sampled_from([DType.F32, DType.BF16]))
def test_blocks_that_are_copied_out_and_in_elsewhere_hold_the_same_tokens(data, kind, dtype):
    there, here = storage(kind, dtype), storage(kind, dtype)
    some_blocks = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=6, unique=True)
    blocks = tuple(data.draw(some_blocks))
    others = tuple(data.draw(st.permutations(range(BLOCKS)))[: len(blocks)])
    written(there, blocks, len(blocks) * BLOCK_SIZE)
    unused = [block for block in range(BLOCKS) if block not in others]
    kept = written(here, tuple(unused), len(unused) * BLOCK_SIZE)
    block_bytes = kind.block_bytes(shape(dtype))
    content = np.empty((len(blocks), block_bytes), np.uint8)

    there.copy_out(blocks, content)
    here.copy_in(others, content)

    span = SequenceSpan(0, 1, len(blocks) * BLOCK_SIZE, blocks)
    moved = SequenceSpan(0, 1, len(blocks) * BLOCK_SIZE, others)
    for one, other in zip(there.read(1, there.extent(span)), here.read(1, here.extent(moved)), strict=True):
        assert torch.equal(one, other)
    keys, _ = here.read(1, here.extent(SequenceSpan(0, 1, len(kept), tuple(unused))))
    assert_same(here, keys, kept[:, 0])
    again = np.empty_like(content)
    here.copy_out(others, again)
    np.testing.assert_array_equal(again, content)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), kind=st.sampled_from(KINDS), dtype=st.sampled_from([DType.F32, DType.BF16]))
def test_the_first_tokens_of_a_block_are_copied_in_all_layers_and_nothing_else_is_changed(data, kind, dtype):
    kv = storage(kind, dtype)
    everything = SequenceSpan(0, 1, BLOCKS * BLOCK_SIZE, tuple(range(BLOCKS)))
    for layer in range(LAYERS):
        written(kv, everything.blocks, BLOCKS * BLOCK_SIZE, layer)
    source, target = data.draw(st.permutations(range(BLOCKS)))[:2]
    num_tokens = data.draw(st.integers(1, BLOCK_SIZE))
    before = np.empty((BLOCKS, kv.size_bytes // BLOCKS), np.uint8)
    kv.copy_out(everything.blocks, before)
    read = [kv.read(layer, kv.extent(everything)) for layer in range(LAYERS)]
    expected = [[each.clone() for each in pair] for pair in read]

    kv.copy_tokens(source, target, num_tokens)

    for layer, pair in enumerate(expected):
        for each, now in zip(pair, kv.read(layer, kv.extent(everything)), strict=True):
            by_block = each.view(HEADS, BLOCKS, BLOCK_SIZE, DIM)
            by_block[:, target, :num_tokens] = by_block[:, source, :num_tokens].clone()
            assert torch.equal(now, each)
    after = np.empty_like(before)
    kv.copy_out(everything.blocks, after)
    unconcerned = [block for block in range(BLOCKS) if block != target]
    np.testing.assert_array_equal(after[unconcerned], before[unconcerned])
    if num_tokens == BLOCK_SIZE:
        np.testing.assert_array_equal(after[target], before[source])


@pytest.mark.parametrize("kind", list(ON_HOST))
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16])
def test_a_pool_of_arrays_has_the_blocks_layout_and_size_of_one_of_tensors(kind, dtype):
    torchs, arrays = storage(kind, dtype), storage(ON_HOST[kind], dtype)
    written(torchs, tuple(range(BLOCKS)), BLOCKS * BLOCK_SIZE)
    everything, block_bytes = list(range(BLOCKS)), torchs.size_bytes // BLOCKS
    content = np.zeros((BLOCKS, block_bytes), np.uint8)
    torchs.copy_out(everything, content)

    arrays.copy_in(everything, content)
    for pool in (torchs, arrays):
        pool.copy_tokens(2, 7, 3)

    expected, found = np.zeros_like(content), np.ones_like(content)
    torchs.copy_out([7, 2, 5], expected[:3])
    arrays.copy_out([7, 2, 5], found[:3])
    np.testing.assert_array_equal(found[:3], expected[:3])
    assert (arrays.layout, arrays.size_bytes, arrays.element_bytes) == (
        torchs.layout,
        torchs.size_bytes,
        torchs.element_bytes,
    )


def test_pools_whose_blocks_can_be_exchanged_have_equal_layouts():
    assert storage().layout == storage().layout == "float32[2, 2, 3, 4, 4]"
    layouts = {storage(kind, dtype).layout for kind in KINDS for dtype in (DType.F32, DType.BF16)}
    assert len(layouts) == 4
    assert storage().layout == storage(DeviceKVStorage).layout


def test_blocks_move_between_a_device_and_the_cpu_as_between_two_of_a_kind():
    device, cpu, back = storage(DeviceKVStorage), storage(), storage(DeviceKVStorage)
    tokens = written(device, (3, 7), 2 * BLOCK_SIZE)
    content = np.empty((2, KVStorage.block_bytes(shape())), np.uint8)

    device.copy_out((3, 7), content)
    cpu.copy_in((1, 0), content)
    cpu.copy_out((1, 0), content)
    back.copy_in((5, 2), content)

    for kv, blocks in ((cpu, (1, 0)), (back, (5, 2))):
        keys, values = kv.read(1, kv.extent(SequenceSpan(0, 1, 2 * BLOCK_SIZE, blocks)))
        assert_same(kv, keys, tokens[:, 0])
        assert_same(kv, values, tokens[:, 1])


# In 8 bits


@settings(deadline=None, max_examples=60)
@given(
    exponent=st.integers(-20, 14),
    dtype=st.sampled_from([DType.F32, DType.BF16]),
    seed=st.integers(0, 99),
)
def test_every_token_and_head_has_a_scale_of_its_own(exponent, dtype, seed):
    kv = storage(TorchInt8KVStorage, dtype)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn((BLOCK_SIZE, 2, HEADS, DIM), generator=generator)
    tokens = (
        tokens * 2.0 ** torch.randint(-8, 9, (BLOCK_SIZE, 2, HEADS, 1), generator=generator) * 2.0**exponent
    ).to(torch_dtype(dtype))
    kv.write(0, torch.arange(BLOCK_SIZE), tokens.view(BLOCK_SIZE, 2 * HEADS, DIM))
    keys, values = kv.read(0, kv.extent(SequenceSpan(0, 1, BLOCK_SIZE, (0,))))
    assert_same(kv, keys, tokens[:, 0])
    assert_same(kv, values, tokens[:, 1])


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16])
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_a_number(dtype):
    kv = storage(TorchInt8KVStorage, dtype)
    tokens = torch.zeros((3, 2 * HEADS, DIM), dtype=torch_dtype(dtype))
    tokens[1, :, 0] = float("inf")
    tokens[2, :, 1] = float("nan")
    kv.write(0, torch.arange(3), tokens)
    for read in kv.read(0, kv.extent(SequenceSpan(0, 1, 3, (0,)))):
        assert (read[:, 0] == 0).all()
        assert read[:, 1:].isnan().all()
