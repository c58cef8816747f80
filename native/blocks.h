/* Blocks of integers as GGUF files have them, and the numbers that they mean.
 *
 * A row is a run of blocks, each of which holds the levels of 32 or 256 columns and their scales. A number is
 * level * scale + offset in fp32, as ggml has it: the product is exact, and the sum is rounded once. The layouts are
 * those of ggml's `ggml-common.h`; `loader/format/gguf/blocks.py` has them in numpy. */
#ifndef TN_BLOCKS_H
#define TN_BLOCKS_H

#include <stdbool.h>
#include <stdint.h>

#include "core.h"
#include "isa.h"

enum {
    TN_BLOCK_COLUMNS = 1024,                   /* at most, that are widened at a time: a multiple of every block */
    TN_BLOCK_GROUPS = TN_BLOCK_COLUMNS / 16,   /* of these, that have scales of their own */
};

/* Columns and bytes of a block; 0 of dtypes that are none. */
TN_INLINE int tn_block_columns(int dtype) {
    switch (dtype) {
    case TN_Q4_K:
    case TN_Q5_K:
    case TN_Q6_K:
    case TN_Q2_K:
    case TN_Q3_K:
    case TN_IQ4_XS: return 256;
    case TN_Q4_1:
    case TN_Q5_0:
    case TN_Q5_1:
    case TN_IQ4_NL: return 32;
    default: return 0;
    }
}
TN_INLINE int tn_block_bytes(int dtype) {
    switch (dtype) {
    case TN_Q4_K: return 144;
    case TN_Q5_K: return 176;
    case TN_Q6_K: return 210;
    case TN_Q4_1: return 20;
    case TN_Q5_0: return 22;
    case TN_Q5_1: return 24;
    case TN_Q2_K: return 84;
    case TN_Q3_K: return 110;
    case TN_IQ4_XS: return 136;
    case TN_IQ4_NL: return 18;
    default: return 0;
    }
}
/* Columns that share a scale. */
TN_INLINE int tn_block_group(int dtype) { return dtype == TN_Q6_K || dtype == TN_Q2_K || dtype == TN_Q3_K ? 16 : 32; }
TN_INLINE bool tn_is_blocks(int dtype) { return dtype >= TN_Q4_K && dtype <= TN_IQ4_NL; }

/* The scale and the offset of each group of `count` columns. */
void tn_block_scales(float *scale, float *offset, const void *blocks, int count, int dtype);

/* The level of each of `count` columns, a multiple of the block's. */
void tn_block_levels(int8_t *level, const void *blocks, int count, int dtype);

/* `count` numbers, a multiple of the block's and at most TN_BLOCK_COLUMNS, from blocks on: in fp32, or rounded to bf16. */
void tn_widen_blocks(float *to, const void *from, int count, int dtype);
void tn_round_blocks(uint16_t *to, const void *from, int count, int dtype);

#endif
