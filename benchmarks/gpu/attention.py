"""The attention kernels alone, with the heads of Llama-3.1-8B: one new token a sequence, and prompts against SDPA.

    python -m benchmarks.gpu.attention [--json FILE]

For one token a sequence the keys and values must be read once: the result is their bytes over the time, relative to a
copy's bandwidth in the same run. Prompts are computed over the pool by Teneral's kernel, and by torch's over the same
keys and values in adjacent memory. All kernels are replayed from graphs.
"""

from __future__ import annotations

import random
from typing import Any

from benchmarks.gpu import model_8b
from benchmarks.gpu.check import claim
from benchmarks.report import table

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DECODE = ((1, 1024), (1, 8192), (1, 65_536), (8, 4096), (32, 2048), (128, 1024))  # sequences, tokens of each
PROMPTS = ((0, 512), (0, 2048), (2048, 512), (8192, 2048))  # tokens in the pool, and new ones behind them
STAGES = (3, 5)  # of loading keys and values ahead
MAX_CONTEXT = 65_536  # of the server that would record such steps
DECODE_GOAL = 0.6  # of a copy's bandwidth, for the largest


def main() -> int:
    options = model_8b.parse(__doc__)
    if not model_8b.require_device():
        return 2
    copy_bytes_s = model_8b.copy_bytes_s()
    measured: dict[str, Any] = {"copy_bytes_s": copy_bytes_s, "decode": [], "prompts": []}
    for num, context in DECODE:
        shares = [(context - 1, 1)] * num
        by_stages = {stages: attend_s(shares, num_stages=stages) for stages in STAGES}
        seconds = min(by_stages.values())
        read_bytes = num * context * KV_HEADS * HEAD_DIM * 2 * 2
        measured["decode"].append(
            {
                "sequences": num,
                "context": context,
                "us": seconds * 1e6,
                "us_by_stages": {stages: each * 1e6 for stages, each in by_stages.items()},
                "us_recorded": attend_s(shares, is_recorded=True) * 1e6,
                "of_a_copy": read_bytes / seconds / copy_bytes_s,
            }
        )
        model_8b.keep(options.json, "attention", measured, [])  # as soon as it is known
    for past, new in PROMPTS:
        seconds = attend_s([(past, new)])
        pairs = new * past + new * (new + 1) / 2
        flops = 4 * pairs * HEADS * HEAD_DIM
        measured["prompts"].append(
            {
                "past": past,
                "new": new,
                "us": seconds * 1e6,
                "tflops": flops / seconds / 1e12,
                "sdpa_us": sdpa_s(past, new) * 1e6,
            }
        )
    best = max(row["of_a_copy"] for row in measured["decode"])
    claims = [claim("attention of one token a sequence, of the bandwidth of a copy", best, DECODE_GOAL)]
    model_8b.keep(options.json, "attention", measured, claims)
    rows = [
        [
            str(r["sequences"]),
            str(r["context"]),
            *(f"{r['us_by_stages'][stages]:.0f}" for stages in STAGES),
            f"{r['us_recorded']:.0f}",
            f"{r['of_a_copy']:.0%}",
        ]
        for r in measured["decode"]
    ]
    titles = [*(f"µs a layer, {stages} stages" for stages in STAGES), "recorded", "of a copy's bandwidth"]
    print(table(["sequences", "tokens of each", *titles], rows))
    rows = [
        [str(r["past"]), str(r["new"]), f"{r['us']:.0f}", f"{r['tflops']:.0f}", f"{r['sdpa_us']:.0f}"]
        for r in measured["prompts"]
    ]
    print(table(["in the pool", "new", "µs a layer", "TFLOP/s", "SDPA, µs"], rows))
    return 0


def attend_s(shares: list[tuple[int, int]], *, num_stages: int = 5, is_recorded: bool = False) -> float:
    """Seconds for one layer's attention of sequences with (cached, new) tokens, in scattered blocks. A recorded step
    has the splits of the longest context.
    """
    import torch

    from teneral.runtime.backends.cuda import variants as v
    from teneral.runtime.backends.cuda.tables import split_keys, tables_of
    from teneral.runtime.backends.cuda.warm_up import open_launcher
    from teneral.runtime.step.batch import SequenceSpan

    group = HEADS // KV_HEADS
    shape = v.ModelShape(
        "bf16", "bf16", 4096, 4096, 14336, HEAD_DIM, HEAD_DIM, group, False, "silu", BLOCK_SIZE
    )
    sizes = [-(-(past + new) // BLOCK_SIZE) for past, new in shares]
    order = list(range(sum(sizes)))
    random.Random(0).shuffle(order)
    spans, start = [], 0
    for (past, new), size in zip(shares, sizes, strict=True):
        blocks = tuple(order.pop() for _ in range(size))
        spans.append(SequenceSpan(start, new, past + new, blocks))
        start += new
    cuda = {"dtype": torch.bfloat16, "device": "cuda"}
    heads = torch.randn((start, HEADS + 2 * KV_HEADS, HEAD_DIM), **cuda)
    keys, values = torch.randn((2, sum(sizes), BLOCK_SIZE, KV_HEADS, HEAD_DIM), **cuda)
    out = torch.empty((start, HEADS * HEAD_DIM), **cuda)
    tables = tables_of(spans, group, torch.device("cuda"))
    launch, _ = open_launcher(torch.device("cuda:0"), None)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    numbers = (HEAD_DIM**-0.5 * 1.4426950408889634, HEADS + 2 * KV_HEADS, HEADS, KV_HEADS, 1 << 30)
    num_decoding = len(tables.decoding)
    longest = max(s.context_len for s in spans)
    of_split = split_keys(num_decoding, KV_HEADS, processors, MAX_CONTEXT, v.decode_keys(shape))
    splits = -(-(MAX_CONTEXT if is_recorded else longest) // of_split)
    parts = torch.empty((num_decoding * HEADS * splits, HEAD_DIM), dtype=torch.float32, device="cuda")
    scales = torch.empty(len(parts), dtype=torch.float32, device="cuda")

    def work() -> None:
        if num_decoding:
            launch(
                v.decode_variant(shape, is_split=splits > 1, num_stages=num_stages),
                (num_decoding, KV_HEADS, splits),
                *(heads, keys, values, out, parts, scales, tables.starts, tables.contexts),
                *(tables.table_starts, tables.blocks, tables.decoding, *numbers, splits, of_split),
            )
            if splits > 1:
                launch(
                    v.merge_variant(shape),
                    (num_decoding, HEADS),
                    *(parts, scales, out, tables.starts, tables.decoding, HEADS, splits),
                )
        if len(tables.tiles):
            launch(
                v.chunk_variant(shape),
                (len(tables.tiles), KV_HEADS),
                *(heads, keys, values, out, tables.starts, tables.lengths, tables.contexts),
                *(tables.table_starts, tables.blocks, tables.tiles, *numbers),
            )

    return model_8b.device_s(model_8b.recorded(work))


def sdpa_s(past: int, new: int) -> float:
    """The same by torch, which has to be given keys and values without gaps; that is not counted."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention.bias import causal_lower_right

    cuda = {"dtype": torch.bfloat16, "device": "cuda"}
    queries = torch.randn((1, HEADS, new, HEAD_DIM), **cuda)
    keys, values = torch.randn((2, 1, HEADS, past + new, HEAD_DIM), **cuda)
    mask = causal_lower_right(new, past + new)
    work = model_8b.recorded(lambda: F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask))
    return model_8b.device_s(work)


if __name__ == "__main__":
    model_8b.leave(main())
