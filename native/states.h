/* What layers over a state of each sequence share: the short convolution of their channels, and numbers one by one.
 *
 * A layer's part of a state begins with the convolution's last inputs, oldest first, (size - 1, num_channels), and has
 * matrices of fp32 behind them. A column of a matrix depends on no other column: TN_LANES of them at a time stay in the
 * cache while the rows of a span pass. */
#ifndef TN_STATES_H
#define TN_STATES_H

#include <math.h>
#include <stdbool.h>

#include "core.h"
#include "elements.h"

/* A layer's channels in the rows of a span. */
typedef struct tn_channels {
    const tn_span *span;
    void *rows;            /* of the whole step. Changed. */
    const tn_vector *taps; /* (num_channels, size), that of a row's own token last */
    const tn_vector *bias; /* (num_channels,), or none */
    int64_t row_size;      /* numbers of a row */
    int64_t num_channels;
    int64_t size;          /* tokens that the convolution sees */
    int64_t state_first;   /* of the layer in a state */
    int dtype;
} tn_channels;

/* SiLU of the convolution of channels [channel, channel + num), which begin at `place` of each row, in place; the sum is
 * rounded, and the product. Reads and writes the span's state, and writes its copies. */
void tn_convolve_channels(const tn_channels *channels, int64_t place, int64_t channel, int64_t num);

/* The span begins its sequence, which has no state yet. */
static inline bool tn_begins(const tn_span *span) { return span->context_len == span->length; }

TN_INLINE float exponential(float x) {
    float lanes[TN_LANES];
    vf_store(lanes, vf_exp(vf_set(x)));
    return lanes[0];
}

TN_INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(exponential(x)); }

TN_INLINE vf sigmoid(vf x) { return vf_div(vf_set(1.0f), vf_add(vf_set(1.0f), vf_exp(vf_sub(vf_zero(), x)))); }

/* Of rows. */
TN_INLINE float element(const void *from, int dtype, int64_t place) {
    return dtype == TN_F32 ? ((const float *)from)[place] : f32_of_bf16(((const uint16_t *)from)[place]);
}

TN_INLINE float rounded(int dtype, float x) {
    float lanes[TN_LANES];
    vf_store(lanes, round_to(dtype, vf_set(x)));
    return lanes[0];
}

TN_INLINE float weight(const tn_vector *weights, int64_t place, int dtype) {
    float lanes[TN_LANES];
    vf_store(lanes, load_weights(weights, place, 1, dtype));
    return lanes[0];
}

/* Numbers [first, first + num) of a row times `factor`; `to` has room for the next multiple of TN_LANES. */
TN_INLINE void scaled(float *to, const void *row, int dtype, int64_t first, int64_t num, float factor) {
    for (int64_t i = 0; i < num; i += TN_LANES)
        vf_store(to + i, vf_mul(load_elements(row, dtype, first + i, lanes_left(num - i)), vf_set(factor)));
}

/* The same columns of `num` rows of a matrix; NULL: zeros. */
TN_INLINE void load_columns(vf *columns, const float *matrix, int64_t stride, int64_t num, int count) {
    for (int64_t i = 0; i < num; i++)
        columns[i] = matrix == NULL ? vf_zero() : vf_load_part(matrix + i * stride, count);
}

TN_INLINE void store_columns(float *matrix, int64_t stride, const vf *columns, int64_t num, int count) {
    for (int64_t i = 0; i < num; i++) vf_store_part(matrix + i * stride, columns[i], count);
}

#endif
