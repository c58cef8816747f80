/* Stages that multiply rows with a projection's matrices, inside a region. */
#ifndef TN_PROJECTION_H
#define TN_PROJECTION_H

#include "core.h"
#include "team.h"

enum { TN_MAX_PERMUTED_PARTS = 4 }; /* of a projection: queries, keys and values, or gate and up */

/* Rows of one product. `x` and `out` are in `dtype`. */
typedef struct tn_product {
    const tn_projection *projection;
    const void *x;        /* (num_rows, num_in) */
    void *permuted;       /* scratch: (num_rows, num_in) for each part that has an order of its own */
    void *packed;         /* scratch of tn_product_packed_bytes, on 64 bytes */
    void *out;            /* (num_rows, num_out) */
    int64_t num_rows;
    int32_t dtype;
    int32_t wide_out;     /* `out` is fp32 */
} tn_product;

/* Bytes of packed inputs (tiles.h) of any projection that takes at most `num_in` inputs, and at most `permuted_size` in
 * orders of its parts' own. */
int64_t tn_product_packed_bytes(int64_t num_rows, int64_t num_in, int64_t permuted_size, int dtype);

/* Forms of packed inputs that its parts without an order of their own take. */
int tn_projection_forms(const tn_projection *projection, int dtype);

/* Keeps inputs where the projection says so, puts them into the orders that parts have, and packs them for tiles; each with a
 * barrier. Nothing, where none is needed. */
void tn_input_stage(const tn_product *product, tn_region *region);

/* All columns. */
void tn_product_stage(const tn_product *product, tn_region *region);

/* Columns [begin, end), on the calling thread. */
void tn_product_columns(const tn_product *product, int64_t begin, int64_t end);

#endif
