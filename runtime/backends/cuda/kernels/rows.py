"""The operations on a layer's rows other than products and attention, each in one pass.

Results are rounded where torch rounds (`backends/torch/layers.py`), so that both compute
the same step.

No `from __future__ import annotations` here: Triton reads the annotations.
"""

import triton.language as tl


def rms_norm(
    x,  # (rows, size); with ADDS it is changed
    added,  # (rows, size): what is added to x first, if ADDS
    weight,  # (size,)
    out,  # (rows, size)
    eps,
    SIZE: tl.constexpr,  # known, so that numbers are read many at a time
    PADDED: tl.constexpr,
    ADDS: tl.constexpr,
):
    """x += added; out = x / rms(x) * weight."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, PADDED)
    is_there = at < SIZE
    dtype = x.dtype.element_ty
    here = tl.load(x + row + at, mask=is_there, other=0.0)
    if ADDS:
        more = tl.load(added + row + at, mask=is_there, other=0.0)
        here = (here.to(tl.float32) + more.to(tl.float32)).to(dtype)
        tl.store(x + row + at, here, mask=is_there)
    wide = here.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) * (1.0 / SIZE) + eps)
    unit = (wide * factor).to(dtype).to(tl.float32)
    own_weight = tl.load(weight + at, mask=is_there, other=0.0).to(dtype).to(tl.float32)
    tl.store(out + row + at, (unit * own_weight).to(dtype), mask=is_there)


def place_heads(
    heads,  # (rows, num_heads + 2 * num_kv_heads, HEAD_DIM): queries, keys, values. Queries and keys are changed
    cos,  # (rows, ROTARY)
    sin,  # the first half of each negated
    query_norm,  # (HEAD_DIM,); the keys' norm follows; used if NORMS
    key_norm,
    keys,  # (slots, num_kv_heads, HEAD_DIM)
    values,
    slots,  # (rows,) int64; below 0: nothing is written
    num_heads,
    num_kv_heads,
    eps,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    PADDED_HALF: tl.constexpr,  # at least ROTARY / 2
    PADDED_REST: tl.constexpr,  # at least what is not turned; 0 if all is
    HEADS: tl.constexpr,  # that a program has
    NORMS: tl.constexpr,
):
    """Normalise and rotate queries and keys, and store keys and values in their slots."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    num_rotated = num_heads + num_kv_heads
    is_head = head < num_rotated + num_kv_heads
    is_query = (head < num_heads)[:, None]
    is_value = (head >= num_rotated)[:, None]
    dtype = heads.dtype.element_ty
    source = heads + ((row * (num_rotated + num_kv_heads) + head) * HEAD_DIM)[:, None]
    half = tl.arange(0, PADDED_HALF)
    is_half = half < ROTARY // 2
    is_there = is_head[:, None] & is_half[None, :]
    low_at = half[None, :]
    high_at = half[None, :] + ROTARY // 2
    stored_low = tl.load(source + low_at, mask=is_there, other=0.0)
    stored_high = tl.load(source + high_at, mask=is_there, other=0.0)
    low = stored_low.to(tl.float32)
    high = stored_high.to(tl.float32)
    if PADDED_REST > 0:
        rest = ROTARY + tl.arange(0, PADDED_REST)
        is_rest = rest < HEAD_DIM
        is_rest_there = is_head[:, None] & is_rest[None, :]
        stored_rest = tl.load(source + rest[None, :], mask=is_rest_there, other=0.0)
    if NORMS:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if PADDED_REST > 0:
            last = stored_rest.to(tl.float32)
            squares += tl.sum(last * last, 1)
        factor = (1.0 / tl.sqrt(squares * (1.0 / HEAD_DIM) + eps))[:, None]
        query_low = tl.load(query_norm + low_at, mask=is_half[None, :], other=0.0)
        key_low = tl.load(key_norm + low_at, mask=is_half[None, :], other=0.0)
        weight_low = tl.where(is_query, query_low, key_low).to(dtype).to(tl.float32)
        low = ((low * factor).to(dtype).to(tl.float32) * weight_low).to(dtype).to(tl.float32)
        query_high = tl.load(query_norm + high_at, mask=is_half[None, :], other=0.0)
        key_high = tl.load(key_norm + high_at, mask=is_half[None, :], other=0.0)
        weight_high = tl.where(is_query, query_high, key_high).to(dtype).to(tl.float32)
        high = ((high * factor).to(dtype).to(tl.float32) * weight_high).to(dtype).to(tl.float32)
        if PADDED_REST > 0:
            query_rest = tl.load(query_norm + rest[None, :], mask=is_rest[None, :], other=0.0)
            key_rest = tl.load(key_norm + rest[None, :], mask=is_rest[None, :], other=0.0)
            weight_rest = tl.where(is_query, query_rest, key_rest).to(dtype).to(tl.float32)
            last = (last * factor).to(dtype).to(tl.float32) * weight_rest
            stored_rest = tl.where(is_value, stored_rest, last.to(dtype))
    angle = row * ROTARY + half[None, :]
    low_cos = tl.load(cos + angle, mask=is_half[None, :], other=0.0).to(tl.float32)
    low_sin = tl.load(sin + angle, mask=is_half[None, :], other=0.0).to(tl.float32)
    high_cos = tl.load(cos + angle + ROTARY // 2, mask=is_half[None, :], other=0.0).to(tl.float32)
    high_sin = tl.load(sin + angle + ROTARY // 2, mask=is_half[None, :], other=0.0).to(tl.float32)
    turned_low = (low * low_cos).to(dtype).to(tl.float32) + (high * low_sin).to(dtype).to(tl.float32)
    turned_high = (high * high_cos).to(dtype).to(tl.float32) + (low * high_sin).to(dtype).to(tl.float32)
    new_low = tl.where(is_value, stored_low, turned_low.to(dtype))
    new_high = tl.where(is_value, stored_high, turned_high.to(dtype))
    tl.store(source + low_at, new_low, mask=is_there)
    tl.store(source + high_at, new_high, mask=is_there)
    if PADDED_REST > 0:
        tl.store(source + rest[None, :], stored_rest, mask=is_rest_there)

    slot = tl.load(slots + row)
    is_written = (slot >= 0) & is_head
    kv_head = tl.where(head < num_rotated, head - num_heads, head - num_rotated)
    place = ((slot * num_kv_heads + kv_head) * HEAD_DIM)[:, None]
    is_key_here = (is_written & (head >= num_heads) & (head < num_rotated))[:, None]
    is_value_here = (is_written & (head >= num_rotated))[:, None]
    tl.store(keys + place + low_at, new_low, mask=is_half[None, :] & is_key_here)
    tl.store(keys + place + high_at, new_high, mask=is_half[None, :] & is_key_here)
    tl.store(values + place + low_at, new_low, mask=is_half[None, :] & is_value_here)
    tl.store(values + place + high_at, new_high, mask=is_half[None, :] & is_value_here)
    if PADDED_REST > 0:
        tl.store(keys + place + rest[None, :], stored_rest, mask=is_rest[None, :] & is_key_here)
        tl.store(values + place + rest[None, :], stored_rest, mask=is_rest[None, :] & is_value_here)


def gate(
    product,  # (rows, 2 * size): what passes the gate decides, then what passes it
    out,  # (rows, size)
    SIZE: tl.constexpr,
    KIND: tl.constexpr,  # 0: silu, 1: gelu, 2: gelu by tanh, 3: relu
    PIECE: tl.constexpr,
):
    """activation(first half) * second half."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_there = at < SIZE
    dtype = out.dtype.element_ty
    x = tl.load(product + row * 2 * SIZE + at, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(product + row * 2 * SIZE + SIZE + at, mask=is_there, other=0.0).to(tl.float32)
    if KIND == 0:
        active = x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        active = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # tanh, from a power that cannot overflow
        power = tl.exp(-2.0 * tl.abs(inner))
        tanh = (1.0 - power) / (1.0 + power)
        active = 0.5 * x * (1.0 + tl.where(inner < 0.0, -tanh, tanh))
    else:
        active = tl.maximum(x, 0.0)
    tl.store(out + row * SIZE + at, (active.to(dtype).to(tl.float32) * up).to(dtype), mask=is_there)
