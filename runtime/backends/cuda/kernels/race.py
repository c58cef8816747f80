"""The race that draws a token (docs/decisions/0015), for many rows at once.

Each candidate's number is derived from the sequence's seed, the token's index in it and its id
alone, by Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011), so it
depends neither on the device nor on the order. The numbers are exponential, in 64 bits: of 52
random ones, in the middle of their interval, so that none is 0.

No `from __future__ import annotations` here: Triton reads the annotations.
"""

import triton.language as tl


def race(
    scores,  # (rows, size) fp32: logarithms of what is proportional to the probability, the largest 0; -inf: not drawn
    tokens,  # (rows, size) int64: whose scores these are, if HAS_TOKENS; else token and place are the same
    seeds,  # (rows,) int64
    indexes,  # (rows,) int64
    best_quotients,  # (rows, programs 1) fp64
    best_places,  # (rows, programs 1) int64
    size,
    HAS_TOKENS: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    place = piece * PIECE + tl.arange(0, PIECE)
    is_there = place < size
    score = tl.load(scores + row * size + place, mask=is_there, other=float("-inf")).to(tl.float64)
    if HAS_TOKENS:
        token = tl.load(tokens + row * size + place, mask=is_there, other=0).to(tl.uint64)
    else:
        token = place.to(tl.uint64)
    seed = tl.load(seeds + row).to(tl.uint64)
    index = tl.load(indexes + row).to(tl.uint64)
    # Words of 32 bits in twice as many, so that products have their upper halves.
    key_0 = seed & 0xFFFFFFFF
    key_1 = seed >> 32
    word_0 = token
    word_1 = token * 0 + (index & 0xFFFFFFFF)
    word_2 = token * 0
    word_3 = token * 0
    for _ in range(10):
        product_0 = word_0 * 0xD2511F53
        product_2 = word_2 * 0xCD9E8D57
        word_0 = (product_2 >> 32) ^ word_1 ^ key_0
        word_2 = (product_0 >> 32) ^ word_3 ^ key_1
        word_1 = product_2 & 0xFFFFFFFF
        word_3 = product_0 & 0xFFFFFFFF
        key_0 = (key_0 + 0x9E3779B9) & 0xFFFFFFFF
        key_1 = (key_1 + 0xBB67AE85) & 0xFFFFFFFF
    bits = ((word_0 << 32) | word_1) >> 12
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ** -52
    quotient = tl.exp(score) / -tl.log(uniform)
    quotient = tl.where(is_there, quotient, -1.0)
    best = tl.max(quotient, 0)
    best_place = tl.min(tl.where(quotient == best, place, size), 0)
    tl.store(best_quotients + row * tl.num_programs(1) + piece, best)
    tl.store(best_places + row * tl.num_programs(1) + piece, best_place.to(tl.int64))
