"""Products and embeddings of ggml's blocks are those of the numbers that the blocks mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.gguf_files import random_blocks
from tests.support.native import (
    ISAS,
    Array,
    each_isa,
    fused_pairs,
    loaded,
    multiplies_bf16,
    product,
    threads,
    widened,
)

from teneral.loader.format.gguf.blocks import BLOCK_TYPES, BlockType
from teneral.runtime.backends.native import arrays
from teneral.runtime.backends.native.operations import Operations
from teneral.runtime.backends.native.products import Weight

KEPT = [kind for kind in BLOCK_TYPES.values() if kind.is_kept]
each_kind = pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)


def blocks_of(kind: BlockType, num_rows: int, num_blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    """(rows, blocks, bytes)"""
    made = random_blocks(kind, num_rows * num_blocks, seed)
    return np.ascontiguousarray(made.reshape(num_rows, num_blocks, -1))


def numbers_of(kind: BlockType, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return kind.to_floats(blocks.reshape(-1, kind.block_bytes)).reshape(len(blocks), -1)


def inputs(num_rows: int, num_in: int, dtype: str, seed: int = 1) -> Array:
    x = np.random.default_rng(seed).standard_normal((num_rows, num_in)).astype(np.float32)
    return arrays.to_bf16(x) if dtype == "bf16" else x


@each_isa
@each_kind
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 17, 40])
def test_products_have_the_bits_of_floats(isa: str, kind: BlockType, dtype: str, num_rows: int) -> None:
    """Of numbers rounded to bf16 where pairs are multiplied, else of the numbers."""
    num_blocks = 1280 // kind.elements
    data = blocks_of(kind, 37, num_blocks)
    meant = numbers_of(kind, data)
    x = inputs(num_rows, meant.shape[1], dtype)
    in_pairs = dtype == "bf16" and multiplies_bf16(isa)
    same = Weight(arrays.to_bf16(meant) if in_pairs else meant)
    ours = product(isa, x, Weight(data))
    np.testing.assert_array_equal(ours.view(np.uint32), product(isa, x, same).view(np.uint32))
    if in_pairs:
        with fused_pairs(isa):
            np.testing.assert_array_equal(product(isa, x, Weight(data)), ours)


@each_kind
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_company_changes_a_row(kind: BlockType, data: st.DataObject) -> None:
    isa = data.draw(st.sampled_from([each for each in ISAS if isinstance(each, str)]))
    num_blocks = data.draw(st.integers(1, 3000 // kind.elements))
    num_out, num_rows = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 50))
    bias = data.draw(st.sampled_from([None, np.arange(num_out, dtype=np.float32)]))
    dtype = data.draw(st.sampled_from(["fp32", "bf16"]))
    weight = Weight(blocks_of(kind, num_out, num_blocks), bias=bias)
    x = inputs(num_rows, weight.num_in, dtype)
    whole = product(isa, x, weight)
    row = data.draw(st.integers(0, num_rows - 1))
    np.testing.assert_array_equal(product(isa, x[row : row + 1], weight)[0], whole[row])
    with threads(isa, 3):
        np.testing.assert_array_equal(product(isa, x, weight), whole)


@each_isa
@each_kind
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_embeddings_are_rows_rounded_once(isa: str, kind: BlockType, dtype: str) -> None:
    table = blocks_of(kind, 50, 1280 // kind.elements)
    meant = numbers_of(kind, table)
    tokens = np.array([0, 49, 7, 7], np.int64)
    out = np.empty((4, meant.shape[1]), np.uint16 if dtype == "bf16" else np.float32)
    made = Operations(loaded(isa)).embed(table, None, tokens, out)
    want = arrays.to_bf16(meant[tokens]) if dtype == "bf16" else meant[tokens]
    np.testing.assert_array_equal(widened(made), widened(want))


def test_other_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="no blocks of 143"):
        Weight(np.zeros((2, 3, 143), np.uint8))
    with pytest.raises(ValueError, match="no scales"):
        Weight(np.zeros((2, 1, 144), np.uint8), scale=np.zeros((2, 8), np.float32))


@each_kind
def test_the_core_and_the_reader_know_the_same_blocks(kind: BlockType) -> None:
    dtype, columns = arrays.block_columns(np.zeros((1, 1, kind.block_bytes), np.uint8))
    assert (dtype.name, columns) == (kind.name, kind.elements)
