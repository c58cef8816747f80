"""References of each kernel, in plain torch and numpy: quick enough for whole engines, and the
measure of kernels.

A `Launcher`, as the interpreter is one: it gets the arguments that a device would, and may use nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from teneral.runtime.backends.cuda.variants import Variant
from teneral.runtime.backends.torch.layers import dequantize

ACTIVATIONS = (F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.relu)


class ReferenceKernels:
    """Counts what it was asked for."""

    def __init__(self) -> None:
        self.launched: Counter[Variant] = Counter()

    def __call__(self, variant: Variant, grid: tuple[int, ...], *arguments: Any) -> None:
        self.launched[variant] += 1
        for argument, (name, kind) in zip(arguments, variant.signature, strict=True):
            check_argument(variant, name, kind, argument)
        globals()[f"_{variant.kernel}"](dict(variant.constants), grid, *arguments)

    def prepare(self, variants: Iterable[Variant]) -> None:
        pass


_DTYPES = {
    "*bf16": torch.bfloat16,
    "*fp16": torch.float16,
    "*fp32": torch.float32,
    "*fp64": torch.float64,
    "*i64": torch.int64,
    "*i8": torch.int8,
    "*u8": torch.uint8,
}


def check_argument(variant: Variant, name: str, kind: str, argument: Any) -> None:
    """That it is what a binary of this variant would take it for."""
    if kind.startswith("*"):
        assert argument.dtype is _DTYPES[kind], f"{variant.kernel}: {name} is {argument.dtype}, not {kind}"
        assert argument.is_contiguous() or name in ("queries", "x"), f"{variant.kernel}: {name} has gaps"
    elif kind == "i32":
        assert isinstance(argument, int), f"{variant.kernel}: {name}"
        assert -(1 << 31) <= argument < 1 << 31
    else:
        assert isinstance(argument, float), f"{variant.kernel}: {name}"


def _rms_norm(c, grid, x, added, weight, out, eps):
    size = c["SIZE"]
    assert (grid, x.shape[1]) == ((len(x),), size)
    if c["ADDS"]:
        x += added
    wide = x.float()
    unit = (wide * (wide.square().sum(-1, keepdim=True) / size + eps).rsqrt()).to(x.dtype)
    out.copy_(unit * weight.to(x.dtype))


def _row_product(c, grid, x, matrix, added, out, num_out):
    assert grid == (-(-num_out // c["ROWS"]),)
    assert matrix.shape == (num_out, c["SIZE"])
    product = matrix.float() @ x.view(-1).float()
    if c["ADDS"]:
        product += added.view(-1).float()
    out.view(-1).copy_(product)


def _int4_product(c, grid, x, levels, scale, zero, out, num_rows, num_out):
    assert levels.shape == (num_out, c["SIZE"] // 2)
    _integer_product(c, grid, x, levels, scale, zero if c["HAS_ZERO"] else None, out, num_rows, num_out)


def _int8_product(c, grid, x, levels, scale, out, num_rows, num_out):
    assert levels.shape == (num_out, c["SIZE"])
    _integer_product(c, grid, x, levels, scale, None, out, num_rows, num_out)


def _integer_product(c, grid, x, levels, scale, zero, out, num_rows, num_out):
    assert grid == (-(-num_out // c["COLUMNS"]),)
    assert x.shape == (num_rows, c["SIZE"])
    assert num_rows <= c["ROWS"]
    assert scale.shape == (num_out, c["SIZE"] // c["GROUP"])
    weights = dequantize(levels, scale, zero).to(x.dtype).float()
    out.copy_(x.float() @ weights.T)


def _gate(c, grid, product, out):
    size = c["SIZE"]
    assert product.shape[1] == 2 * size
    assert grid == (len(product), -(-size // c["PIECE"]))
    out.copy_(ACTIVATIONS[c["KIND"]](product[:, :size].float()).to(out.dtype) * product[:, size:])


def _place_heads(
    c, grid, heads, cos, sin, query_norm, key_norm, keys, values, slots, num_heads, num_kv_heads, eps
):
    assert grid == (len(heads), -(-(num_heads + 2 * num_kv_heads) // c["HEADS"]))
    rotary, half, dtype = c["ROTARY"], c["ROTARY"] // 2, heads.dtype
    turned = heads[:, : num_heads + num_kv_heads]
    if c["NORMS"]:
        wide = turned.float()
        unit = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(dtype)
        turned[:, :num_heads] = unit[:, :num_heads] * query_norm.to(dtype)
        turned[:, num_heads:] = unit[:, num_heads:] * key_norm.to(dtype)
    cos, sin = cos.view(-1, 1, rotary), sin.view(-1, 1, rotary)
    part = turned[..., :rotary]
    part.copy_(part * cos + part.roll(half, -1) * sin)
    for row in (slots >= 0).nonzero().flatten().tolist():
        for pool, first in ((keys, num_heads), (values, num_heads + num_kv_heads)):
            pool.view(-1, *pool.shape[-2:])[slots[row]] = heads[row, first : first + num_kv_heads]


def _attend(c, rows, position, at, keys, values, table, scale, window):
    """rows (L, heads, d) at these positions, over the tokens at `at`: (L, heads, d) fp32."""
    size = c["BLOCK_SIZE"]
    slots = table[at // size] * size + at % size
    some_keys, some_values = (pool.view(-1, *pool.shape[-2:])[slots].float() for pool in (keys, values))
    group = rows.shape[1] // some_keys.shape[1]
    some_keys, some_values = (some.repeat_interleave(group, 1) for some in (some_keys, some_values))
    scores = torch.einsum("lhd,khd->hlk", rows.float(), some_keys) * scale * float(np.log(2))
    sees = (at[None] <= position[:, None]) & (at[None] > position[:, None] - window)
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    return torch.einsum("hlk,khd->lhd", weights, some_values)


def _decode_attention(
    c, grid, queries, keys, values, out, split_out, split_scale, starts, contexts, table_starts, blocks,
    spans, scale, row_heads, num_heads, num_kv_heads, window, num_splits, split_keys,
):  # fmt: skip
    assert grid == (len(spans), num_kv_heads, num_splits)
    assert bool(c["IS_SPLIT"]) == (num_splits > 1)
    assert split_keys % c["KEYS"] == 0
    queries = queries.view(-1, row_heads, c["HEAD_DIM"])
    for number, span in enumerate(spans.tolist()):
        start, context = int(starts[span]), int(contexts[span])
        result = torch.zeros(1, num_heads, c["HEAD_DIM"])
        assert num_splits * split_keys >= min(context, window), "keys that no split reads"
        if context:
            at = torch.arange(context)
            rows, table = queries[start : start + 1, :num_heads], blocks[table_starts[span] :]
            position = torch.tensor([context - 1])
            result = _attend(c, rows, position, at, keys, values, table, scale, window)
        if c["IS_SPLIT"]:  # all in the first split: the others have seen nothing
            split_out.view(len(spans), num_heads, num_splits, -1)[number] = 0
            split_out.view(len(spans), num_heads, num_splits, -1)[number, :, 0] = result[0]
            split_scale.view(len(spans), num_heads, num_splits)[number] = float("-inf")
            split_scale.view(len(spans), num_heads, num_splits)[number, :, 0] = (
                0 if context else float("-inf")
            )
        else:
            out[start] = result.reshape(-1)


def _merge_splits(c, grid, split_out, split_scale, out, starts, spans, num_heads, num_splits):
    assert grid == (len(spans), num_heads)
    parts = split_out.view(len(spans), num_heads, num_splits, -1)
    scales = split_scale.view(len(spans), num_heads, num_splits)
    for number, span in enumerate(spans.tolist()):
        weights = torch.exp2(scales[number] - scales[number].amax(-1, keepdim=True)).nan_to_num_(0.0)
        total = weights.sum(-1, keepdim=True)
        result = (parts[number] * weights[..., None]).sum(1) / torch.where(total == 0, 1.0, total)
        out[starts[span]] = result.reshape(-1)


def _chunk_attention(
    c, grid, queries, keys, values, out, starts, lengths, contexts, table_starts, blocks, tiles,
    scale, row_heads, num_heads, num_kv_heads, window,
):  # fmt: skip
    assert grid == (len(tiles), num_kv_heads)
    queries = queries.view(-1, row_heads, c["HEAD_DIM"])
    group = num_heads // num_kv_heads
    covered = Counter()
    for span, first in tiles.tolist():
        covered[span] += min(c["ROWS"], int(lengths[span]) * group - first)
    for span, num_covered in covered.items():
        start, length, context = int(starts[span]), int(lengths[span]), int(contexts[span])
        assert num_covered == length * group
        rows, table = queries[start : start + length, :num_heads], blocks[table_starts[span] :]
        position = torch.arange(context - length, context)
        result = _attend(c, rows, position, torch.arange(context), keys, values, table, scale, window)
        out[start : start + length] = result.reshape(length, -1).to(out.dtype)


def _race(c, grid, scores, tokens, seeds, indexes, best_quotients, best_places, size):
    num_pieces = -(-size // c["PIECE"])
    assert grid == (len(scores), num_pieces)
    for row in range(len(scores)):
        ids = tokens[row].numpy() if c["HAS_TOKENS"] else np.arange(size)
        noise = device_exponentials(int(seeds[row]), int(indexes[row]), ids)
        quotients = np.exp(scores[row].double().numpy()) / noise
        for piece in range(num_pieces):
            some = quotients[piece * c["PIECE"] : (piece + 1) * c["PIECE"]]
            best_quotients[row, piece] = float(some.max())
            best_places[row, piece] = int(some.argmax()) + piece * c["PIECE"]


def device_exponentials(seed: int, index: int, tokens: np.ndarray) -> np.ndarray:
    """The numbers that a device races with, for these ids."""
    words = philox(seed % (1 << 64), np.array([tokens, np.full_like(tokens, index), 0 * tokens, 0 * tokens]))
    uniform = (((words[0] << np.uint64(32)) | words[1]) >> np.uint64(12)).astype(np.float64)
    return -np.log((uniform + 0.5) * 2.0**-52)


def philox(key: int, counters: np.ndarray) -> np.ndarray:
    """Philox4x32-10 as its paper has it. counters (4, N) → words (4, N), uint64 below 2 ** 32."""
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = counters.astype(np.uint64) & mask
    k0, k1 = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)
    for _ in range(10):
        p0, p2 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        high = np.uint64(32)
        c0, c1, c2, c3 = (p2 >> high) ^ c1 ^ k0, p2 & mask, (p0 >> high) ^ c3 ^ k1, p0 & mask
        k0 = np.uint64((int(k0) + 0x9E3779B9) & 0xFFFFFFFF)
        k1 = np.uint64((int(k1) + 0xBB67AE85) & 0xFFFFFFFF)
    return np.array([c0, c1, c2, c3])
