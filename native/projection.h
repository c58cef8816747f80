/* Stages that multiply rows with a projection's matrices, inside a region. */
#ifndef TN_PROJECTION_H
#define TN_PROJECTION_H

#include "core.h"
#include "team.h"

/* Rows of one product. `x` and `out` are in `dtype`. */
typedef struct tn_product {
    const tn_projection *projection;
    const void *x;        /* (num_rows, num_in) */
    const void *permuted; /* scratch: (num_rows, num_in) for each part that has an order of its own */
    void *out;            /* (num_rows, num_out) */
    int64_t num_rows;
    int32_t dtype;
} tn_product;

/* Puts inputs into the orders that parts have; then a barrier. Nothing, where none has one. */
void tn_permute_stage(const tn_product *product, tn_region *region);

/* All columns. */
void tn_product_stage(const tn_product *product, tn_region *region);

/* Columns [begin, end), on the calling thread. */
void tn_product_columns(const tn_product *product, int64_t begin, int64_t end);

#endif
