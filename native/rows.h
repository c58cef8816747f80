/* Operations on one row, inside a region. `dtype` is that of rows: F32 or BF16. */
#ifndef TN_ROWS_H
#define TN_ROWS_H

#include "core.h"
#include "team.h"

/* out = a norm of x, of one of the kinds of tn_norm_kind; out may be x. */
void tn_norm_row(void *out, const void *x, const tn_vector *weight, int64_t num, float eps, int kind, int dtype);

/* out = the layer norm of x, by 1 + weight of TN_LAYER_PLUS_ONE; out may be x. */
void tn_layer_norm_row(void *out, const void *x, const tn_vector *weight, const tn_vector *bias, int64_t num,
                       float eps, int kind, int dtype);

/* x += more, rounded. */
void tn_add_row(void *x, const void *more, int64_t num, int dtype);

/* The largest |x|, or NaN where there is one. */
float tn_largest_size(const void *x, int64_t num, int dtype);

/* x rounded to integers of 8 bits times its largest size / 127, and then to `dtype`. */
void tn_round_to_codes_row(void *x, int64_t num, int dtype);

/* x *= factor, rounded. */
void tn_scale_row(void *x, float factor, int64_t num, int dtype);

/* out = activation(gate), rounded, times up, rounded; `up` may be NULL, and out one of them. */
/* g / (1 + e^(-alpha g)) (u + 1) of g = min(gate, limit) and u = up clipped to +-limit, rounded once. */
void tn_clamped_swiglu_row(void *out, const void *gate, const void *up, int64_t num, float alpha, float limit, int dtype);

void tn_activate_row(void *out, const void *gate, const void *up, int64_t num, int activation, int dtype);

/* Numbers i and i + half of a head turn by cos[i] and sin[i]: in fp32, rounded once. */
void tn_turn_head(void *head, const float *cos, const float *sin, int64_t half, int dtype);

/* out = x, and at least `least` and at most `most`; out may be x. */
void tn_clip_row(void *out, const void *x, float least, float most, int64_t num, int dtype);

/* to[i] = from[places[i]] */
void tn_permute_row(void *to, const void *from, const int64_t *places, int64_t num, int dtype);

/* How many rows to take at a time, for about eight chunks a thread. */
static inline int64_t tn_rows_chunk(int64_t num_rows, int num_threads) { return num_rows / (8 * num_threads) + 1; }

/* A stage: the statement for each `row` of [0, num_rows), which the region's threads share. */
#define EACH_ROW(region, num_rows)                                                                 \
    for (int64_t chunk_ = tn_rows_chunk(num_rows, (region)->num), begin_;                          \
         (begin_ = tn_next_chunk(region) * chunk_) < (num_rows);)                                  \
        for (int64_t row = begin_, end_ = begin_ + chunk_ < (num_rows) ? begin_ + chunk_ : (num_rows); \
             row < end_; row++)

#endif
