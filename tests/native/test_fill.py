"""Parts are decoded to their elements for all encodings, on each instruction set, and damage is refused where it is."""

from __future__ import annotations

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
from tests.support.native import decoded_by, each_isa, loaded

from teneral.loader.format.manifest import DTYPE_BITS, FRAME_ELEMENTS, Encoding, Tier
from teneral.loader.native import fill, frames

KINDS = st.sampled_from(["weights", "repetitions", "zeros", "noise"])


@each_isa
@pytest.mark.parametrize("name", FLOAT_ENCODINGS)
def test_every_encoding_of_floats_gives_every_tier_and_every_bit_back(isa: str, name: str) -> None:
    dtype, _, _ = float_encoding(name)
    with decoded_by(isa):
        check_tiers(name, made_of("noise", 1003 * DTYPE_BITS[dtype] // 8, 3))


@each_isa
@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(FLOAT_ENCODINGS), kind=KINDS, count=COUNTS, seed=st.integers(0, 1 << 16))
def test_frames_of_all_sizes_and_kinds(isa: str, name: str, kind: str, count: int, seed: int) -> None:
    dtype, _, _ = float_encoding(name)
    with decoded_by(isa):
        check_tiers(name, made_of(kind, count * DTYPE_BITS[dtype] // 8, seed))


@each_isa
@pytest.mark.parametrize("name", ["bf16.3", "bf16.7", "f16.3", "f16.1.9"])
def test_all_bit_patterns_of_16_bits_come_back(isa: str, name: str) -> None:
    with decoded_by(isa):
        check_tiers(name, np.arange(1 << 16, dtype="<u2").view(np.uint8))


@each_isa
@pytest.mark.parametrize("dtype", WHOLE_BYTE_DTYPES)
@pytest.mark.parametrize("count", [1, 3, 16, 1000, FRAME_ELEMENTS + 5])
def test_elements_of_any_number_of_bytes_come_back(isa: str, dtype: str, count: int) -> None:
    tensor = tensor_of(dtype, Encoding.BYTES, count)
    data = made_of("noise", tensor.size_bytes, count)
    out = np.full_like(data, 0xA5)
    with decoded_by(isa):
        decode(tensor, store(dtype, Encoding.BYTES, data), Tier.DRAFT, out)
    assert np.array_equal(out, data)


@each_isa
@pytest.mark.parametrize("name", ["bf16.3", "f32.7"])
def test_floats_at_odd_addresses_are_merged(isa: str, name: str) -> None:
    dtype, encoding, known = float_encoding(name)
    data = made_of("noise", 4 * 1003, 1)
    tensor = tensor_of(dtype, encoding, data.size * 8 // DTYPE_BITS[dtype])
    memory = np.zeros(data.size + 1, np.uint8)
    parts = store(dtype, encoding, data)
    with decoded_by(isa):
        for tier in known:
            decode(tensor, parts, tier, memory[1:])
    assert np.array_equal(memory[1:], data)


@each_isa
def test_nothing_is_written_behind_the_last_element(isa: str) -> None:
    data = made_of("noise", 2 * 77, 1)
    memory = np.full(data.size + 64, 0x5A, np.uint8)
    parts = store("BF16", Encoding.BF16_3, data)
    with decoded_by(isa):
        for tier in (Tier.DRAFT, Tier.REFINE):
            decode(tensor_of("BF16", Encoding.BF16_3, 77), parts, tier, memory[: data.size])
    assert np.array_equal(memory[: data.size], data)
    assert (memory[data.size :] == 0x5A).all()


@each_isa
def test_the_declarations_are_the_librarys(isa: str) -> None:
    library = loaded(isa)
    library.check_struct("tn_fill_args", fill.FillArgs)
    library.check_struct("tn_decode_frames_args", frames.DecodeFramesArgs)
    library.check_size("tn_fill_plane", fill.PLANE.size)
    library.check_size("tn_fill_segment", fill.SEGMENT.size)
