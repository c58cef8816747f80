"""Planes are merged to the bits that numpy merges them to, for all encodings, on each instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.test_codec import (
    COUNTS,
    FLOAT_ENCODINGS,
    WHOLE_BYTE_DTYPES,
    check_tiers,
    decode,
    float_encoding,
    made_of,
    store,
    tensor_of,
)
from tests.support.native import ISAS, loaded

from teneral.loader.format.manifest import DTYPE_BITS, FRAME_ELEMENTS, Encoding, Tier
from teneral.loader.native import merge

KINDS = st.sampled_from(["weights", "repetitions", "zeros", "noise"])
NUMPY = "numpy"
each_way = pytest.mark.parametrize("way", [*ISAS, NUMPY])


@contextmanager
def merging_by(way: str) -> Iterator[None]:
    """Merge with one library, or with numpy as where there is none."""
    functions = None if way == NUMPY else loaded(way).functions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "_merge_function", lambda: functions and functions.tn_merge)
        patch.setattr(merge, "_interleave_function", lambda: functions and functions.tn_interleave)
        yield


@each_way
@pytest.mark.parametrize("name", FLOAT_ENCODINGS)
def test_every_encoding_of_floats_gives_every_tier_and_every_bit_back(way: str, name: str) -> None:
    dtype, _, _ = float_encoding(name)
    with merging_by(way):
        check_tiers(name, made_of("noise", 1003 * DTYPE_BITS[dtype] // 8, 3))


@each_way
@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(FLOAT_ENCODINGS), kind=KINDS, count=COUNTS, seed=st.integers(0, 1 << 16))
def test_frames_of_all_sizes_and_kinds(way: str, name: str, kind: str, count: int, seed: int) -> None:
    dtype, _, _ = float_encoding(name)
    with merging_by(way):
        check_tiers(name, made_of(kind, count * DTYPE_BITS[dtype] // 8, seed))


@each_way
@pytest.mark.parametrize("name", ["bf16.3", "bf16.7", "f16.3", "f16.1.9"])
def test_all_bit_patterns_of_16_bits_come_back(way: str, name: str) -> None:
    with merging_by(way):
        check_tiers(name, np.arange(1 << 16, dtype="<u2").view(np.uint8))


@each_way
@pytest.mark.parametrize("dtype", WHOLE_BYTE_DTYPES)
@pytest.mark.parametrize("count", [1, 3, 16, 1000, FRAME_ELEMENTS + 5])
def test_elements_of_any_number_of_bytes_come_back(way: str, dtype: str, count: int) -> None:
    tensor = tensor_of(dtype, Encoding.BYTES, count)
    data = made_of("noise", tensor.size_bytes, count)
    out = np.full_like(data, 0xA5)
    with merging_by(way):
        decode(tensor, store(dtype, Encoding.BYTES, data), Tier.DRAFT, out)
    assert np.array_equal(out, data)


@each_way
@pytest.mark.parametrize("name", ["bf16.3", "f32.7"])
def test_floats_at_odd_addresses_are_merged(way: str, name: str) -> None:
    dtype, encoding, known = float_encoding(name)
    data = made_of("noise", 4 * 1003, 1)
    tensor = tensor_of(dtype, encoding, data.size * 8 // DTYPE_BITS[dtype])
    memory = np.zeros(data.size + 1, np.uint8)
    parts = store(dtype, encoding, data)
    with merging_by(way):
        for tier in known:
            decode(tensor, parts, tier, memory[1:])
    assert np.array_equal(memory[1:], data)


@each_way
def test_nothing_is_written_behind_the_last_element(way: str) -> None:
    data = made_of("noise", 2 * 77, 1)
    memory = np.full(data.size + 64, 0x5A, np.uint8)
    parts = store("BF16", Encoding.BF16_3, data)
    with merging_by(way):
        for tier in (Tier.DRAFT, Tier.REFINE):
            decode(tensor_of("BF16", Encoding.BF16_3, 77), parts, tier, memory[: data.size])
    assert np.array_equal(memory[: data.size], data)
    assert (memory[data.size :] == 0x5A).all()


@pytest.mark.parametrize("isa", ISAS)
def test_the_declarations_are_the_librarys(isa: str) -> None:
    loaded(isa).check_struct("tn_merge_args", merge.MergeArgs)
    loaded(isa).check_struct("tn_interleave_args", merge.InterleaveArgs)
