/* Reading weights: where a column's elements, scales and zeros lie, and scales as floats. */
#ifndef TN_WEIGHTS_H
#define TN_WEIGHTS_H

#include "blocks.h"
#include "core.h"
#include "elements.h"

/* The row of the stored matrix that holds a column's elements, scales and bias. */
TN_INLINE int64_t stored_row(const tn_matrix *w, int64_t column) { return w->row_step ? column * w->row_step : column; }

/* Of `num` elements. */
TN_INLINE int64_t bytes_of(const tn_matrix *w, int64_t num) {
    if (tn_is_blocks(w->dtype)) return num / tn_block_columns(w->dtype) * tn_block_bytes(w->dtype);
    return w->dtype == TN_U4 || w->dtype == TN_E2M1 ? num / 2 : num * (w->dtype == TN_F32 ? 4 : w->dtype == TN_I8 ? 1 : 2);
}

/* 2^(byte - 127), the smallest of which is no normal number. */
TN_INLINE float scale_of_e8m0(uint8_t byte) {
    return f32_of_bits(byte == 0 ? 0x400000u : byte == 255 ? 0x7fc00000u : (uint32_t)byte << 23);
}

/* F32, BF16 or F16. */
TN_INLINE float float_at(const void *from, int dtype, int64_t place) {
    const uint16_t *half = (const uint16_t *)from + place;
    return dtype == TN_F32 ? ((const float *)from)[place] : dtype == TN_BF16 ? f32_of_bf16(*half) : f32_of_f16(*half);
}

#endif
