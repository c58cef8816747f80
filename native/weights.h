/* Reading weights: where a column's elements, scales and zeros lie, and scales as floats. */
#ifndef TN_WEIGHTS_H
#define TN_WEIGHTS_H

#include "blocks.h"
#include "core.h"
#include "elements.h"

/* The row of the stored matrix that holds a column's elements, scales and bias. */
TN_INLINE int64_t stored_row(const tn_matrix *w, int64_t column) { return w->row_step ? column * w->row_step : column; }

/* The row of `scale` that holds a column's; in 32 bits, in which divisions take a third of the time. */
TN_INLINE int64_t scale_row(const tn_matrix *w, int64_t column) {
    return w->scale_rows > 1 ? (int64_t)((uint32_t)column / (uint32_t)w->scale_rows) : stored_row(w, column);
}

/* Groups of columns, the last of which may be smaller. */
TN_INLINE int64_t groups_of(const tn_matrix *w) {
    return ((uint32_t)w->num_in + (uint32_t)w->group_size - 1) / (uint32_t)w->group_size;
}

/* Whether weights are codes, of a table. */
TN_INLINE bool is_codes(const tn_matrix *w) { return w->dtype == TN_NF4 || w->dtype == TN_FP4; }

/* The sixteen values of bitsandbytes' codes: quantiles of a normal distribution, and floats of 4 bits over 12. */
TN_INLINE const float *codes_of(int dtype) {
    static const _Alignas(64) float nf4[16] = {
        -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
        -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
        0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
    };
    static const _Alignas(64) float fp4[16] = {
        0.0f, 0.0625f / 12.0f, 8.0f / 12.0f, 1.0f, 4.0f / 12.0f, 6.0f / 12.0f, 2.0f / 12.0f, 3.0f / 12.0f,
        0.0f, -0.0625f / 12.0f, -8.0f / 12.0f, -1.0f, -4.0f / 12.0f, -6.0f / 12.0f, -2.0f / 12.0f, -3.0f / 12.0f,
    };
    return dtype == TN_NF4 ? nf4 : fp4;
}

/* Whether weights take a byte each, and the sums of their products are scaled. */
TN_INLINE bool is_bytes(const tn_matrix *w) { return w->dtype == TN_I8 || w->dtype == TN_E4M3; }

/* Of `num` elements. */
TN_INLINE int64_t bytes_of(const tn_matrix *w, int64_t num) {
    if (tn_is_blocks(w->dtype)) return num / tn_block_columns(w->dtype) * tn_block_bytes(w->dtype);
    if (is_codes(w)) return num / 2;
    return w->dtype == TN_U4 || w->dtype == TN_E2M1 ? num / 2 : num * (w->dtype == TN_F32 ? 4 : is_bytes(w) ? 1 : 2);
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
