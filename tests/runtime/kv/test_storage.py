"""What is written into blocks is read back in order, as a view where that is possible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.runtime.engine.batch import SequenceSpan
from teneral.runtime.kv.storage import KVStorage

LAYERS, HEADS, DIM, BLOCKS, BLOCK_SIZE = 2, 3, 4, 12, 4


def storage() -> KVStorage:
    return KVStorage(LAYERS, HEADS, DIM, num_blocks=BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32)


def written(kv: KVStorage, blocks: tuple[int, ...], length: int, layer: int = 1) -> torch.Tensor:
    """Writes random tokens into a sequence's blocks, and returns them: (T, 2, heads, dim)."""
    slots = torch.tensor([blocks[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for t in range(length)])
    tokens = torch.randn(length, 2, HEADS, DIM)
    kv.write(layer, slots, tokens.view(length, 2 * HEADS, DIM))
    return tokens


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_tokens_are_read_back_from_any_blocks_and_from_any_of_them_on(data):
    kv = storage()
    blocks = tuple(data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=6, unique=True)))
    length = data.draw(st.integers(1, len(blocks) * BLOCK_SIZE))
    first = data.draw(st.integers(0, length - 1))
    tokens = written(kv, blocks, length)

    keys, values = kv.read(1, kv.extent(SequenceSpan(0, 1, length, blocks), first))

    assert torch.equal(keys, tokens[first:, 0].transpose(0, 1))
    assert torch.equal(values, tokens[first:, 1].transpose(0, 1))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_size_is_that_of_its_blocks(dtype):
    kv = KVStorage(LAYERS, HEADS, DIM, num_blocks=BLOCKS, block_size=BLOCK_SIZE, dtype=dtype)

    assert kv.size_bytes == BLOCKS * KVStorage.block_bytes(LAYERS, HEADS, DIM, BLOCK_SIZE, dtype)
    assert kv.size_bytes == kv.data.numel() * dtype.itemsize


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_blocks_that_are_copied_out_and_in_elsewhere_hold_the_same_tokens(data):
    there, here = storage(), storage()
    here.data.fill_(-1.0)
    some_blocks = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=6, unique=True)
    blocks = tuple(data.draw(some_blocks))
    others = tuple(data.draw(st.permutations(range(BLOCKS)))[: len(blocks)])
    tokens = written(there, blocks, len(blocks) * BLOCK_SIZE)
    block_bytes = KVStorage.block_bytes(LAYERS, HEADS, DIM, BLOCK_SIZE, torch.float32)
    content = torch.empty((len(blocks), block_bytes), dtype=torch.uint8)

    there.copy_out(blocks, content)
    here.copy_in(others, content)

    keys, values = here.read(1, here.extent(SequenceSpan(0, 1, len(blocks) * BLOCK_SIZE, others), 0))
    assert torch.equal(keys, tokens[:, 0].transpose(0, 1))
    assert torch.equal(values, tokens[:, 1].transpose(0, 1))
    untouched = [block for block in range(BLOCKS) if block not in others]
    by_block = here.data.view(LAYERS, 2, HEADS, BLOCKS, -1)
    assert (by_block[:, :, :, untouched] == -1.0).all()
    assert there.layout == here.layout == "float32[2, 2, 3, 4, 4]"
