"""Attention over keys and values in blocks: of one new token a sequence, and of many.

Keys and values are (blocks, tokens of a block, key heads, HEAD_DIM), reached through `blocks`: those of sequence `span`
begin at `table_starts[span]`. A program computes all query heads that share a key head, so that a key is read once
for all of them. Sums are in fp32, and softmax is taken as the keys come by, its scale corrected when a larger score
appears (Dao et al., FlashAttention, 2022, and its second version, 2023). `scale` holds log2(e), since powers of 2 are
what the hardware has.

With few sequences one program a key head would leave most of the device idle, so the keys of a sequence are cut into
splits of one size, which `merge_splits` joins (Dao et al., Flash-Decoding, 2023); those behind a sequence's end have
nothing to do. How many programs there are, and what each reads, depends on no length that is read on the device: so a
step can be recorded once and replayed, and computes what it computes when it is launched.

No `from __future__ import annotations` here: Triton looks at the annotations.
"""

import triton.language as tl


def decode_attention(
    queries,  # (rows, row_heads, HEAD_DIM), of which the first num_heads are queries
    keys,
    values,
    out,  # (rows, num_heads * HEAD_DIM)
    split_out,  # (programs 0, num_heads, num_splits, HEAD_DIM) fp32, if IS_SPLIT
    split_scale,  # (programs 0, num_heads, num_splits) fp32, if IS_SPLIT
    starts,  # (spans,) int64, all of these: the span's row
    contexts,  # how many tokens its sequence has, this one included; 0: a row that is only there to fill up
    table_starts,
    blocks,
    spans,  # which spans to compute: a program's first number is the place here
    scale,
    row_heads,
    num_heads,
    num_kv_heads,
    window,  # tokens that a token sees, itself included
    num_splits,
    split_keys,  # tokens of each split; num_splits of them hold all that a token sees
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # at least as many as query heads share a key head
    KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    number = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    span = tl.load(spans + number)
    start = tl.load(starts + span)
    context = tl.load(contexts + span).to(tl.int32)
    table = blocks + tl.load(table_starts + span)

    first = tl.maximum(context - window, 0)
    begin = first + split * split_keys
    end = tl.minimum(begin + split_keys, context)

    group = num_heads // num_kv_heads
    member = tl.arange(0, ROWS)
    head = kv_head * group + member
    is_head = member < group
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    of_query = (start * row_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    query = tl.load(queries + of_query, mask=is_head[:, None] & is_dim[None, :], other=0.0)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    sums = tl.full([ROWS, PADDED_DIM], 0.0, tl.float32)
    for key in range(begin, end, KEYS):
        at = key + tl.arange(0, KEYS)
        is_key = at < end
        block = tl.load(table + at // BLOCK_SIZE, mask=is_key, other=0)
        place = (block * BLOCK_SIZE + at % BLOCK_SIZE) * num_kv_heads + kv_head
        offset = place[:, None] * HEAD_DIM + dim[None, :]
        is_there = is_key[:, None] & is_dim[None, :]
        some_keys = tl.load(keys + offset, mask=is_there, other=0.0)
        scores = tl.dot(query, tl.trans(some_keys), input_precision="ieee") * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        correction = tl.exp2(largest - new_largest)
        total = total * correction + tl.sum(weights, 1)
        some_values = tl.load(values + offset, mask=is_there, other=0.0)
        sums = sums * correction[:, None]
        sums += tl.dot(weights.to(some_values.dtype), some_values, input_precision="ieee")
        largest = new_largest

    is_empty = total == 0.0
    result = sums / tl.where(is_empty, 1.0, total)[:, None]
    if IS_SPLIT:
        of_split = (number.to(tl.int64) * num_heads + head) * num_splits + split
        summary = tl.where(is_empty, float("-inf"), largest + tl.log2(tl.where(is_empty, 1.0, total)))
        tl.store(split_scale + of_split, summary, mask=is_head)
        of_result = of_split[:, None] * HEAD_DIM + dim[None, :]
        tl.store(split_out + of_result, result, mask=is_head[:, None] & is_dim[None, :])
    else:
        of_result = (start * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(
            out + of_result,
            result.to(out.dtype.element_ty),
            mask=is_head[:, None] & is_dim[None, :],
        )


def merge_splits(
    split_out,
    split_scale,
    out,
    starts,
    spans,
    num_heads,
    num_splits,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLITS: tl.constexpr,  # num_splits at most
):
    """Combine the splits of one query head, each weighted by the mass of its keys."""
    number = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(starts + tl.load(spans + number))
    split = tl.arange(0, SPLITS)
    is_split = split < num_splits
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    of_split = (number.to(tl.int64) * num_heads + head) * num_splits + split
    summary = tl.load(split_scale + of_split, mask=is_split, other=float("-inf"))
    largest = tl.max(summary, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # no keys at all: zeros
    weights = tl.exp2(summary - largest)
    total = tl.sum(weights, 0)
    is_there = (weights > 0.0)[:, None] & is_dim[None, :]
    parts = tl.load(split_out + of_split[:, None] * HEAD_DIM + dim[None, :], mask=is_there, other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    of_result = (start * num_heads + head) * HEAD_DIM + dim
    tl.store(out + of_result, result.to(out.dtype.element_ty), mask=is_dim)


def chunk_attention(
    queries,
    keys,
    values,
    out,
    starts,  # (spans,) int64: the span's first row
    lengths,  # (spans,) int64: how many rows it has
    contexts,  # (spans,) int64: how many tokens its sequence has, these included
    table_starts,
    blocks,
    tiles,  # (programs 0, 2) int64: a span, and the first of its rows times `group` that the program computes
    scale,
    row_heads,
    num_heads,
    num_kv_heads,
    window,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attention of rows whose sequences may have earlier tokens in the cache. The rows' own keys
    and values are already stored.
    """
    span = tl.load(tiles + 2 * tl.program_id(0))
    first_row = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int32)
    kv_head = tl.program_id(1)
    start = tl.load(starts + span)
    length = tl.load(lengths + span).to(tl.int32)
    context = tl.load(contexts + span).to(tl.int32)
    table = blocks + tl.load(table_starts + span)

    group = num_heads // num_kv_heads
    row = first_row + tl.arange(0, ROWS)
    token = row // group
    head = kv_head * group + row % group
    is_row = token < length
    position = context - length + token
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    of_query = ((start + token) * row_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    query = tl.load(queries + of_query, mask=is_row[:, None] & is_dim[None, :], other=0.0)

    # The visible keys begin at the first token's window and end at the last token.
    begin = tl.maximum(context - length + first_row // group + 1 - window, 0)
    last_token = tl.minimum((first_row + ROWS - 1) // group, length - 1)
    end = context - length + last_token + 1
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    sums = tl.full([ROWS, PADDED_DIM], 0.0, tl.float32)
    for key in range(begin, end, KEYS):
        at = key + tl.arange(0, KEYS)
        is_key = at < end
        block = tl.load(table + at // BLOCK_SIZE, mask=is_key, other=0)
        place = (block * BLOCK_SIZE + at % BLOCK_SIZE) * num_kv_heads + kv_head
        offset = place[:, None] * HEAD_DIM + dim[None, :]
        is_there = is_key[:, None] & is_dim[None, :]
        some_keys = tl.load(keys + offset, mask=is_there, other=0.0)
        scores = tl.dot(query, tl.trans(some_keys), input_precision="ieee") * scale
        sees = (at[None, :] <= position[:, None]) & (at[None, :] > position[:, None] - window)
        scores = tl.where(sees & is_key[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # For a row that has seen no keys yet, the weights must be zeros, not -inf minus -inf.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        correction = tl.exp2(largest - base)
        total = total * correction + tl.sum(weights, 1)
        some_values = tl.load(values + offset, mask=is_there, other=0.0)
        sums = sums * correction[:, None]
        sums += tl.dot(weights.to(some_values.dtype), some_values, input_precision="ieee")
        largest = new_largest

    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    of_result = ((start + token) * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out + of_result, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])
