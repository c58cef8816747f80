"""Attention of a step's rows over cached keys and values, one sequence at a time, without padding.

The part that all layers share (the location of each sequence's keys, the keys visible to each row)
is planned once a step: `plan_attention` is pure bookkeeping, `paged_attention` computes one layer.
Keys and values are never repeated for the query heads that share them: with few rows these heads
become further rows of one product; with many, where the mask would grow with them, they stay heads,
and share the keys through a stride of 0. This module computes no rotary embeddings, and knows nothing of
projections or the owners of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...models.decoder_config import LayerRotary
from ...step.batch import SequenceSpan
from .storage import Extent, TorchPool
from .tensors import torch_dtype

# From here on folding is not faster on a CPU; measured with 7 query heads a key head.
MAX_FOLDED_ROWS = 16


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """The rows [start, start + length) of one sequence, and their keys and mask."""

    start: int
    length: int
    extent: Extent
    folded: bool
    is_causal: bool
    mask: (
        torch.Tensor | None
    )  # (rows, keys), 0 or -inf; rows are length, times the query heads a key head if folded


Turns = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, (T, 1, rotary_dim) each


@dataclass(frozen=True, slots=True)
class TorchStep:
    """The state that all layers share in one forward pass."""

    kv: TorchPool
    slots: torch.Tensor  # (T,) int64
    turns: dict[LayerRotary, Turns]
    plans: dict[int | None, tuple[SpanPlan, ...]]  # by sliding window
    seen: tuple[tuple[SequenceSpan, Extent], ...]  # tokens that each span's convolutions see
    query_scales: torch.Tensor | None = None  # (T, 1, 1), of layers that scale queries by their positions


def plan_attention(
    spans: Sequence[SequenceSpan],
    kv: TorchPool,
    *,
    num_heads: int,
    window: int | None,
    is_chunked: bool = False,
    is_bidirectional: bool = False,
) -> tuple[SpanPlan, ...]:
    """Plan for all layers whose tokens see `window` tokens back, themselves included (None: all), or with `is_chunked`
    from the last multiple of `window` on; with `is_bidirectional`, of spans without a past, `window` tokens to each
    side.
    """
    heads_a_key_head = num_heads // kv.num_kv_heads
    if is_bidirectional:
        return tuple(_plan_text(span, kv, heads_a_key_head, window) for span in spans)
    return tuple(_plan_span(span, kv, heads_a_key_head, window, is_chunked) for span in spans)


def _plan_text(span: SequenceSpan, kv: TorchPool, heads_a_key_head: int, window: int | None) -> SpanPlan:
    folded = span.length <= MAX_FOLDED_ROWS
    mask = None
    if window is not None and span.length > window + 1:
        place = torch.arange(span.length)
        mask = _mask((place - place.unsqueeze(1)).abs() > window, kv, heads_a_key_head if folded else 1)
    return SpanPlan(span.start, span.length, kv.extent(span, 0), folded, False, mask)


def _plan_span(
    span: SequenceSpan, kv: TorchPool, heads_a_key_head: int, window: int | None, is_chunked: bool
) -> SpanPlan:
    num_past = span.context_len - span.length
    # Keys before the first row's window are visible to no row, so they are not read.
    first = 0
    if window is not None:
        first = num_past - num_past % window if is_chunked else max(0, num_past + 1 - window)
    if window is not None and span.context_len <= window:
        window = None
    folded = span.length <= MAX_FOLDED_ROWS
    is_causal = not folded and num_past == 0 and window is None
    mask = None
    if span.length > 1 and not is_causal:
        hidden = _hidden(
            range(num_past, span.context_len), range(first, span.context_len), window, is_chunked
        )
        mask = _mask(hidden, kv, heads_a_key_head if folded else 1)
    return SpanPlan(span.start, span.length, kv.extent(span, first), folded, is_causal, mask)


def _mask(hidden: torch.Tensor, kv: TorchPool, repeats: int) -> torch.Tensor:
    """-inf where keys are hidden, each row `repeats` times."""
    hidden = hidden.repeat_interleave(repeats, dim=0)
    mask = torch.zeros(hidden.shape, dtype=torch_dtype(kv.dtype)).masked_fill_(hidden, float("-inf"))
    return mask.to(kv.device)


def _hidden(rows: range, keys: range, window: int | None, is_chunked: bool = False) -> torch.Tensor:
    """The mask of invisible keys, (rows, keys) bool. Both ranges are positions."""
    row = torch.arange(rows.start, rows.stop).unsqueeze(1)
    key = torch.arange(keys.start, keys.stop)
    if window is None:
        return key > row
    return (key > row) | ((key < row - row % window) if is_chunked else (key <= row - window))


def paged_attention(
    queries: torch.Tensor,
    kv: TorchPool,
    layer: int,
    plans: Sequence[SpanPlan],
    scale: float,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of queries (T, heads, head_dim), as (T, heads * head_dim).

    Keys and values must have been written. With a `cap`, scores s become cap · tanh(s / cap); with `sinks`, (heads,),
    each head has one more score, of a key without a value.
    """
    outputs = [
        _attend(
            queries[plan.start : plan.start + plan.length],
            *kv.read(layer, plan.extent),
            plan,
            scale,
            cap,
            sinks,
        )
        for plan in plans
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: SpanPlan,
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """queries (L, heads, d), keys and values (kv_heads, keys, d) → (L, heads * d)."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    # Key heads are the batch dimension: the kernel sees (kv_heads, heads, rows, d).
    keys, values = keys.unsqueeze(1), values.unsqueeze(1)
    grouped = queries.view(num_rows, num_kv_heads, group, head_dim).transpose(0, 1)  # (kv_heads, L, group, d)
    if plan.folded:
        rows = grouped.reshape(num_kv_heads, 1, num_rows * group, head_dim)
        if cap is None and sinks is None:
            out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=plan.mask, scale=scale)
        else:
            of_rows = None if sinks is None else sinks.view(num_kv_heads, 1, 1, group, 1)
            of_rows = (
                None
                if of_rows is None
                else of_rows.expand(-1, 1, num_rows, -1, -1).reshape(*rows.shape[:3], 1)
            )
            out = _plain_attention(rows, keys, values, plan, scale, cap, of_rows)
        out = out.view(num_kv_heads, num_rows, group, head_dim)
    else:
        keys, values = keys.expand(-1, group, -1, -1), values.expand(-1, group, -1, -1)
        heads = grouped.transpose(1, 2)
        if cap is None and sinks is None:
            out = F.scaled_dot_product_attention(
                heads, keys, values, attn_mask=plan.mask, is_causal=plan.is_causal, scale=scale
            ).transpose(1, 2)
        else:
            of_heads = None if sinks is None else sinks.view(num_kv_heads, group, 1, 1)
            out = _plain_attention(heads, keys, values, plan, scale, cap, of_heads).transpose(1, 2)
    return out.transpose(0, 1).reshape(num_rows, num_heads * head_dim)


def _plain_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: SpanPlan,
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of (…, rows, d) over (…, keys, d) with capped scores or with sinks, which torch's own
    does not support. `sinks` (…, rows or 1, 1) are scores of a key without a value.

    Scores and their exponentials are fp32.
    """
    scores = queries.float() @ keys.float().transpose(-1, -2)
    scores = scores.mul_(scale) if cap is None else scores.mul_(scale / cap).tanh_().mul_(cap)
    if plan.mask is not None:
        scores += plan.mask
    elif plan.is_causal:
        length = range(plan.length)
        scores.masked_fill_(_hidden(length, length, None).to(scores.device), float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        own = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, own], dim=-1), dim=-1)[..., :-1]
    return (weights @ values.float()).to(queries.dtype)
