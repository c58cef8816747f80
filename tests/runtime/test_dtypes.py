"""bf16 in numpy against torch's."""

from __future__ import annotations

import numpy as np
import torch

from teneral.runtime.tensors import DType, from_float32, to_float32


def numbers() -> np.ndarray:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    special = np.array(
        [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 1, 0x3F808000, 0x3F818000], np.uint32
    )
    return np.concatenate([special, bits]).view(np.float32)


def test_rounding_to_bf16_is_torchs():
    wide = numbers()

    own = from_float32(wide, DType.BF16)

    theirs = torch.from_numpy(wide).to(torch.bfloat16).view(torch.uint16).numpy()
    is_number = ~np.isnan(wide)
    np.testing.assert_array_equal(own[is_number], theirs[is_number])
    assert np.isnan(to_float32(own, DType.BF16)[~is_number]).all()


def test_bf16_comes_back_exactly():
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    wide = to_float32(bits, DType.BF16)

    is_number = ~np.isnan(wide)
    np.testing.assert_array_equal(from_float32(wide, DType.BF16)[is_number], bits[is_number])


def test_labels_are_those_of_config_json():
    for dtype in DType:
        assert DType.of_label(dtype.label) is dtype
    assert (DType.BF16.label, DType.F32.label, DType.I8.label) == ("bfloat16", "float32", "int8")
