/* Rows of numbers in the dtypes that models have, read and written as vectors of fp32.
 *
 * `count` is TN_LANES, or less at a row's end; what lies behind it is neither read nor written, and its lanes are 0. */
#ifndef TN_ELEMENTS_H
#define TN_ELEMENTS_H

#include "core.h"
#include "isa.h"

/* F32 or BF16, of which the core's own rows are. */
TN_INLINE int64_t element_bytes(int dtype) { return dtype == TN_F32 ? 4 : 2; }

TN_INLINE void *element_at(const void *rows, int dtype, int64_t place) {
    return (char *)rows + place * element_bytes(dtype);
}

TN_INLINE int lanes_left(int64_t left) { return left < TN_LANES ? (int)left : TN_LANES; }

TN_INLINE vf load_elements(const void *from, int dtype, int64_t place, int count) {
    const float *wide = (const float *)from + place;
    const uint16_t *half = (const uint16_t *)from + place;
    if (count == TN_LANES)
        return dtype == TN_F32 ? vf_load(wide) : dtype == TN_BF16 ? vf_load_bf16(half) : vf_load_f16(half);
    return dtype == TN_F32    ? vf_load_part(wide, count)
           : dtype == TN_BF16 ? vf_load_bf16_part(half, count)
                              : vf_load_f16_part(half, count);
}

/* F32 or BF16. */
TN_INLINE void store_elements(void *to, int dtype, int64_t place, vf value, int count) {
    float *wide = (float *)to + place;
    uint16_t *half = (uint16_t *)to + place;
    if (dtype == TN_F32)
        count == TN_LANES ? vf_store(wide, value) : vf_store_part(wide, value, count);
    else
        count == TN_LANES ? vf_store_bf16(half, value) : vf_store_bf16_part(half, value, count);
}

/* What a model that computes in `dtype` keeps of a number. */
TN_INLINE vf round_to(int dtype, vf value) { return dtype == TN_BF16 ? vf_round_bf16(value) : value; }

/* A vector of weights, rounded to what the model computes in. */
TN_INLINE vf load_weights(const tn_vector *weights, int64_t place, int count, int dtype) {
    return round_to(dtype, load_elements(weights->data, weights->dtype, place, count));
}

#endif
