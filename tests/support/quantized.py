"""The numbers of quantised weights, worked out one by one, and GPTQ and AWQ tensors packed number
by number: written from the documents, without the code that is tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbours a nibble holds, from the lowest on


def slow_dequantize(weight: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None) -> np.ndarray:
    """(N, K) float32 of int8 (N, K) or uint8 (N, K / 2), as docs/quantize.md says it."""
    is_packed = weight.dtype == np.uint8
    rows, columns = weight.shape[0], weight.shape[1] * (2 if is_packed else 1)
    group_size = columns // scale.shape[1]
    out = np.empty((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            group = column // group_size
            if is_packed:
                run, place = divmod(column, 64)
                byte = int(weight[row, run * 32 + place % 32])
                level = byte >> 4 if place >= 32 else byte & 15
                level -= 8 if zero is None else int(zero[row, group])
            else:
                level = int(weight[row, column]) - (0 if zero is None else int(zero[row, group]))
            out[row, column] = np.float32(level) * np.float32(scale[row, group])
    return out


def pack_words(numbers: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> np.ndarray:
    """(R, C) integers → (R, C * bits / 32) int32. Place i of a word holds its number `places[i]`."""
    per_word = 32 // bits
    places = places or tuple(range(per_word))
    out = np.zeros((numbers.shape[0], numbers.shape[1] // per_word), np.uint64)
    for word in range(out.shape[1]):
        for place, number in enumerate(places):
            out[:, word] += numbers[:, word * per_word + number].astype(np.uint64) << np.uint64(place * bits)
    return out.astype(np.uint32).view(np.int32)


def gptq_tensors(
    name: str,
    levels: np.ndarray,
    zeros: np.ndarray,
    scales: np.ndarray,
    *,
    bits: int = 4,
    order: np.ndarray | None = None,
    minus_one: bool = True,
) -> dict[str, torch.Tensor]:
    """Of integers (N, K), zeros and scales (N, groups), and the group of each column."""
    stored = pack_words(zeros.T, bits).view(np.uint32)
    if minus_one:  # while packed, as the tools that write zeros of 0 do it
        stored = stored - np.uint32(0x11111111 if bits == 4 else 0x01010101)
    tensors = {
        f"{name}.qweight": torch.from_numpy(np.ascontiguousarray(pack_words(levels, bits).T)),
        f"{name}.qzeros": torch.from_numpy(stored.view(np.int32).copy()),
        f"{name}.scales": torch.from_numpy(np.ascontiguousarray(scales.T.astype(np.float16))),
    }
    if order is not None:
        tensors[f"{name}.g_idx"] = torch.from_numpy(order.astype(np.int32))
    return tensors


def awq_tensors(
    name: str, levels: np.ndarray, zeros: np.ndarray, scales: np.ndarray
) -> dict[str, torch.Tensor]:
    return {
        f"{name}.qweight": torch.from_numpy(pack_words(levels.T, 4, AWQ_ORDER)),
        f"{name}.qzeros": torch.from_numpy(pack_words(zeros.T, 4, AWQ_ORDER)),
        f"{name}.scales": torch.from_numpy(np.ascontiguousarray(scales.T.astype(np.float16))),
    }


def dense(levels: np.ndarray, zeros: np.ndarray, scales: np.ndarray, order: np.ndarray) -> torch.Tensor:
    """(N, K) float32: what the integers mean. `order` is the group of each column."""
    scales = scales.astype(np.float16).astype(np.float32)
    return torch.from_numpy((levels.astype(np.float32) - zeros[:, order]) * scales[:, order]).to(
        torch.float32
    )


class ForeignMatrix:
    """A matrix of GPTQ or AWQ: random integers (N, K), zeros and scales (N, groups); columns in groups that `act_order`
    shuffles.
    """

    def __init__(
        self, rows: int, columns: int, note: dict[str, Any], *, seed: int = 0, act_order: bool = False
    ) -> None:
        rng = np.random.default_rng(seed)
        self.note = note
        self.bits = note["bits"]
        size = columns if note["group_size"] == -1 else note["group_size"]
        shape = (rows, columns // size)
        self.levels = rng.integers(0, 1 << self.bits, (rows, columns))
        middle = np.full(shape, 1 << (self.bits - 1))
        self.zeros = middle if note.get("sym") else rng.integers(0, 1 << self.bits, shape)
        self.scales = rng.uniform(0.5, 1.5, shape) * 0.5 / (1 << self.bits)
        self.order = np.arange(columns) // size
        self.act_order = act_order
        if act_order:
            np.random.default_rng(123).shuffle(self.order)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        parts = (self.levels, self.zeros, self.scales)
        if self.note["quant_method"] == "awq":
            return awq_tensors(name, *parts)
        is_first = self.note.get("checkpoint_format", "gptq") == "gptq"
        order = self.order if self.act_order else None
        return gptq_tensors(name, *parts, bits=self.bits, order=order, minus_one=is_first)

    def weight(self) -> torch.Tensor:
        return dense(self.levels, self.zeros, self.scales, self.order)


def meant(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights that those of an artifact mean, in fp32."""

    def array(name: str) -> np.ndarray:
        return tensors[name].float().numpy()

    found = {}
    for name, tensor in tensors.items():
        if f"{name}_scale" in tensors:
            zero = f"{name.removesuffix('weight')}weight_zero"
            parts = tensor.numpy(), array(f"{name}_scale"), array(zero) if zero in tensors else None
            found[name] = torch.from_numpy(slow_dequantize(*parts))
        elif not name.endswith((".weight_scale", ".weight_zero")):
            found[name] = tensor.float()
    return found
