"""Arguments for kernels, and the comparison of a launcher with the reference, on any device."""

from __future__ import annotations

import numpy as np
import torch
from tests.support.reference_kernels import ReferenceKernels

from teneral.runtime.backends.cuda import variants as v
from teneral.runtime.backends.cuda.tables import StepTables, tables_of
from teneral.runtime.backends.cuda.variants import ModelShape
from teneral.runtime.step.batch import SequenceSpan

TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 1e-4},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
    torch.float16: {"atol": 3e-3, "rtol": 3e-3},
}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def shape(**overrides) -> ModelShape:
    dtype = NAMES[overrides.pop("dtype", torch.float32)]
    base = {
        "dtype": dtype,
        "norm_dtype": dtype,
        "hidden_size": 48,
        "attended_size": 64,
        "inner_size": 1100,
        "head_dim": 16,
        "rotary_dim": overrides.get("head_dim", 16),
        "group": 1,
        "has_head_norms": False,
        "activation": "silu",
        "block_size": 4,
    }
    return ModelShape(**{**base, **overrides})


def both(launch, variant, grid, arguments, outputs, device="cpu"):
    """The kernel and its reference on copies of the same arguments; what must be the same afterwards, by number."""
    results = []
    for each_launch, where in ((launch, device), (ReferenceKernels(), "cpu")):
        own = [each.clone().to(where) if isinstance(each, torch.Tensor) else each for each in arguments]
        each_launch(variant, grid, *own)
        results.append([own[number].cpu() for number in outputs])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(
            ours, expected, equal_nan=True, **TOLERANCE.get(ours.dtype, {"atol": 0, "rtol": 0})
        )
    return results[0]


def integer_case(dtype, num_in, group_size, bits, has_zero, num_rows, num_out=37):
    """An integer product: its variant, grid, arguments, and the number of its result."""
    torch.manual_seed(0)
    variant = v.integer_variant(
        NAMES[dtype],
        "bf16",
        bits=bits,
        num_rows=num_rows,
        num_in=num_in,
        num_out=num_out,
        group_size=group_size,
        has_zero=has_zero,
    )
    num_groups = num_in // group_size
    x, out = torch.randn(num_rows, num_in).to(dtype), torch.full((num_rows, num_out), float("nan")).to(dtype)
    scale = (torch.rand(num_out, num_groups) / num_in / (1 if bits == 4 else 8)).bfloat16()
    if bits == 4:
        levels = torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8)
        zeros = [torch.randint(0, 16, (num_out, num_groups), dtype=torch.uint8) if has_zero else levels]
    else:
        levels, zeros = torch.randint(-128, 128, (num_out, num_in), dtype=torch.int8), []
    arguments = [x, levels, scale, *zeros, out, num_rows, num_out]
    return variant, (-(-num_out // dict(variant.constants)["COLUMNS"]),), arguments, [len(arguments) - 3]


def pool_and_tables(spans, *, kv_heads, head_dim, group, block_size, dtype) -> tuple:
    """Random heads of the spans' rows, and a pool whose unused slots are NaN."""
    torch.manual_seed(0)
    used = {block for span in spans for block in span.blocks}
    num_blocks = max(used, default=0) + 2
    keys, values = torch.full((2, num_blocks, block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    for span in spans:
        for token in range(span.context_len):
            for pool in (keys, values):
                pool[span.blocks[token // block_size], token % block_size] = torch.randn(kv_heads, head_dim)
    num_rows = sum(span.length for span in spans)
    heads = torch.randn(num_rows, kv_heads * (group + 2), head_dim).to(dtype)
    return heads, keys, values, tables_of(spans, group, torch.device("cpu"))


def spans_of(shares: list[tuple[int, int]], block_size: int) -> list[SequenceSpan]:
    """Each (tokens cached before, tokens of this step), in scattered blocks."""
    sizes = [-(-(past + new) // block_size) for past, new in shares]
    order = np.random.default_rng(1).permutation(sum(sizes)).tolist()
    spans, start = [], 0
    for (past, new), size in zip(shares, sizes, strict=True):
        blocks = tuple(order.pop() for _ in range(size))
        spans.append(SequenceSpan(start, new, past + new, blocks))
        start += new
    return spans


def attention(launch, own, heads, keys, values, tables: StepTables, num_heads, kv_heads, window, splits):
    """All rows of the tables, decoding or not. All memory is where `heads` are."""

    def unwritten(*sizes, dtype=torch.float32):
        return torch.full(sizes, float("nan"), dtype=dtype, device=heads.device)

    out = unwritten(len(heads), num_heads * own.head_dim, dtype=heads.dtype)
    numbers = (own.head_dim**-0.5 * 1.4426950408889634, heads.shape[1], num_heads, kv_heads, window)
    if len(tables.decoding):
        # As many splits, of whole pieces each, as hold the longest of the contexts
        seen = min(window, int(tables.contexts.max()))
        piece = v.decode_keys(own)
        split_keys = max(1, -(-seen // (splits * piece))) * piece
        size = len(tables.decoding) * num_heads * splits
        parts = unwritten(size, own.head_dim), unwritten(size)
        step_arrays = (tables.starts, tables.contexts, tables.table_starts, tables.blocks, tables.decoding)
        launch(
            v.decode_variant(own, is_split=splits > 1),
            (len(tables.decoding), kv_heads, splits),
            *(heads, keys, values, out, *parts, *step_arrays, *numbers, splits, split_keys),
        )
        if splits > 1:
            launch(
                v.merge_variant(own),
                (len(tables.decoding), num_heads),
                *(*parts, out, tables.starts, tables.decoding, num_heads, splits),
            )
    if len(tables.tiles):
        step_arrays = (
            tables.starts,
            tables.lengths,
            tables.contexts,
            tables.table_starts,
            tables.blocks,
            tables.tiles,
        )
        launch(
            v.chunk_variant(own),
            (len(tables.tiles), kv_heads),
            *(heads, keys, values, out, *step_arrays, *numbers),
        )
    return out
