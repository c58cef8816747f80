"""The numbers of quantised weights, worked out one by one, and GPTQ and AWQ tensors packed number
by number: written from the documents, without the code that is tested.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}


# As transformers writes them; the last one is not doubly quantised.
NF4 = {
    "quant_method": "bitsandbytes",
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": ["lm_head"],
    "llm_int8_threshold": 6.0,
}
FP4 = {**NF4, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}
LLM_INT8 = {**NF4, "load_in_4bit": False, "load_in_8bit": True, "_load_in_4bit": False, "_load_in_8bit": True}
# Of bitsandbytes' codes: quantiles of a normal distribution; floats with two bits of exponent and one of mantissa.
CODE_TABLES = {
    "nf4": [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    "fp4": [sign * number / 12 for sign in (1, -1) for number in (0, 0.0625, 8, 12, 4, 6, 2, 3)],
}


def compressed(form: str, *, activations: bool = False, **weights: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors with one scheme, as llm-compressor writes it."""
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None}
    scheme |= {"dynamic": False, "actorder": None, "observer": "minmax", "observer_kwargs": {}, **weights}
    inputs = {"num_bits": 8, "type": scheme["type"], "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": inputs if activations else None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


PACKED_INT4 = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False)
INT8_ROWS = compressed("int-quantized", activations=True)
FP8_ROWS = compressed("float-quantized", activations=True, type="float")

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


class CompressedMatrix:
    """A matrix of compressed-tensors in 4 or 8 bits, packed or not, with random signed integers (N, K)."""

    def __init__(
        self, rows: int, columns: int, note: dict[str, Any], *, seed: int = 0, act_order: bool = False
    ) -> None:
        rng = np.random.default_rng(seed)
        (group,) = note["config_groups"].values()
        scheme = group["weights"]
        self.bits, self.is_packed = scheme["num_bits"], note["format"] == "pack-quantized"
        half = 1 << (self.bits - 1)
        size = scheme["group_size"] or columns
        shape = (rows, columns // size)
        self.levels = rng.integers(-half, half, (rows, columns))
        self.zeros = None if scheme["symmetric"] else rng.integers(-half, half, shape)
        self.scales = torch.from_numpy(rng.uniform(0.5, 1.5, shape) / 4 / half).to(torch.bfloat16)
        self.order = np.arange(columns) // size
        self.act_order = act_order
        if act_order:
            np.random.default_rng(123).shuffle(self.order)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        scale = {f"{name}.weight_scale": self.scales}
        if not self.is_packed:
            return {f"{name}.weight": torch.from_numpy(self.levels.astype(np.int8)), **scale}
        half = 1 << (self.bits - 1)
        found = {
            f"{name}.weight_packed": torch.from_numpy(pack_words(self.levels + half, self.bits)),
            f"{name}.weight_shape": torch.tensor(self.levels.shape),
            **scale,
        }
        if self.zeros is not None:
            packed = pack_words(np.ascontiguousarray((self.zeros + half).T), self.bits)
            found[f"{name}.weight_zero_point"] = torch.from_numpy(np.ascontiguousarray(packed.T))
        if self.act_order:
            found[f"{name}.weight_g_idx"] = torch.from_numpy(self.order.astype(np.int32))
        return found

    def weight(self) -> torch.Tensor:
        zeros = np.zeros(self.scales.shape) if self.zeros is None else self.zeros
        grouped = (self.levels - zeros[:, self.order]) * self.scales.double().numpy()[:, self.order]
        return torch.from_numpy(grouped).float()


class Float8Matrix:
    """A matrix of fp8 with random numbers (N, K) of all sizes, and scales of blocks, of rows, or one."""

    def __init__(self, rows: int, columns: int, note: dict[str, Any], *, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
        codes[codes % 128 == 127] = 0  # NaN
        self.numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        self.is_inverse = note["quant_method"] == "fp8" and note.get("weight_block_size") is not None
        if self.is_inverse:
            self.block = tuple(note["weight_block_size"])
        else:
            has_rows = note["quant_method"] == "compressed-tensors"
            self.block = (1, columns) if has_rows else (rows, columns)
        shape = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        self.scales = torch.from_numpy(rng.uniform(0.5, 1.5, shape).astype(np.float32) / 1000)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        scales = self.scales[0, 0] if self.block == tuple(self.numbers.shape) else self.scales
        scale_name = f"{name}.weight_scale" + "_inv" * self.is_inverse
        return {
            f"{name}.weight": self.numbers,
            scale_name: scales.clone(),
            f"{name}.input_scale": torch.ones(1),
        }

    def weight(self) -> torch.Tensor:
        rows, columns = self.numbers.shape
        spread = self.scales.repeat_interleave(self.block[0], 0)[:rows]
        return self.numbers.float() * spread.repeat_interleave(self.block[1], 1)[:, :columns]


class BitsandbytesMatrix:
    """A random matrix (N, K) of codes or of integers of 8 bits, as bitsandbytes stores it."""

    def __init__(
        self, rows: int, columns: int, note: dict[str, Any], *, seed: int = 0, block: int = 64
    ) -> None:
        rng = np.random.default_rng(seed)
        self.shape, self.block = (rows, columns), block
        self.kind = note["bnb_4bit_quant_type"] if note["load_in_4bit"] else "int8"
        self.table = np.float32(CODE_TABLES.get(self.kind, []))
        if self.kind == "int8":
            self.numbers = rng.integers(-127, 128, self.shape).astype(np.int8)
            self.absmax = rng.uniform(0.1, 0.3, rows).astype(np.float32)
            return
        self.codes = rng.integers(0, 16, self.shape).astype(np.uint8)
        num_blocks = rows * columns // block
        self.nested: dict[str, Any] = {}
        self.absmax = rng.uniform(0.1, 0.3, num_blocks).astype(np.float32)
        if note["bnb_4bit_use_double_quant"]:
            self.absmax = rng.integers(0, 256, num_blocks).astype(np.uint8)
            self.nested = {
                "nested_absmax": rng.uniform(0.05, 0.1, -(-num_blocks // 256)).astype(np.float32),
                "nested_quant_map": np.sort(rng.uniform(-1, 1, 256)).astype(np.float32),
            }

    def state(self) -> dict[str, Any]:
        known = {"quant_type": self.kind, "blocksize": self.block, "dtype": "bfloat16", "shape": self.shape}
        nested = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.15}
        return known | (nested if self.nested else {})

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        if self.kind == "int8":
            form = {f"{name}.weight_format": np.array(0, np.uint8)}
            found = {f"{name}.weight": self.numbers, f"{name}.SCB": self.absmax, **form}
        else:
            pairs = self.codes.reshape(-1, 2)
            state = np.frombuffer(json.dumps(self.state()).encode(), np.uint8)
            found = {
                f"{name}.weight": (pairs[:, :1] << 4 | pairs[:, 1:]).astype(np.uint8),
                f"{name}.weight.absmax": self.absmax,
                f"{name}.weight.quant_map": self.table,
                **{f"{name}.weight.{key}": each for key, each in self.nested.items()},
                f"{name}.weight.quant_state.bitsandbytes__{self.kind}": state.copy(),
            }
        return {key: torch.from_numpy(np.array(each)) for key, each in found.items()}

    def weight(self) -> torch.Tensor:
        if self.kind == "int8":
            return torch.from_numpy(self.numbers * (self.absmax[:, None] / np.float32(127)))
        absmax = self.absmax
        if self.nested:
            largest = self.nested["nested_absmax"].repeat(256)[: absmax.size]
            absmax = self.nested["nested_quant_map"][absmax] * largest + np.float32(0.15)
        meant = self.table[self.codes].reshape(-1, self.block) * absmax[:, None]
        return torch.from_numpy(meant.reshape(self.shape).astype(np.float32))


def stored_matrix(
    rows: int, columns: int, note: dict[str, Any], *, seed: int = 0, act_order: bool = False
) -> ForeignMatrix | CompressedMatrix | Float8Matrix | BitsandbytesMatrix:
    """A random matrix as the tool of this quantization_config stores it."""
    if note["quant_method"] == "bitsandbytes":
        return BitsandbytesMatrix(rows, columns, note, seed=seed)
    if note["quant_method"] == "fp8" or note.get("format") == "float-quantized":
        return Float8Matrix(rows, columns, note, seed=seed)
    kind = CompressedMatrix if note["quant_method"] == "compressed-tensors" else ForeignMatrix
    return kind(rows, columns, note, seed=seed, act_order=act_order)


def meant(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights that those of an artifact mean, in fp32."""

    def array(name: str) -> np.ndarray:
        return tensors[name].float().numpy()

    found = {}
    for name, tensor in tensors.items():
        if f"{name}_scale" in tensors:
            zero = f"{name.removesuffix('weight')}weight_zero"
            parts = tensor.numpy(), array(f"{name}_scale"), array(zero) if zero in tensors else None
            weight = torch.from_numpy(slow_dequantize(*parts))
            found[name] = weight.T if ".h." in name else weight  # GPT-2's float matrices have inputs first
        elif not name.endswith((".weight_scale", ".weight_zero")):
            found[name] = tensor.float()
    return found
