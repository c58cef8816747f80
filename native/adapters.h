/* Low-rank adapters of a step's rows, inside a region: y += factor * (x A^T) B^T of those rows that have one. */
#ifndef TN_ADAPTERS_H
#define TN_ADAPTERS_H

#include <stdbool.h>

#include "core.h"
#include "team.h"

/* A step's adapters at one projection of one layer. */
typedef struct tn_adapted {
    const tn_adapter_run *runs;
    float *low;         /* scratch: (rows, low_stride) */
    int64_t num_runs;
    int64_t low_stride; /* elements: at least the ranks of any site's parts together */
    int64_t layer;
    int32_t site;       /* tn_adapter_place */
} tn_adapted;

/* Whether some rows have an adapter here. */
bool tn_is_adapted(const tn_adapted *adapted);

/* low = x A^T of all adapted rows, then a barrier; nothing, where there are none. x is (rows, num_in) in `dtype`. */
void tn_adapter_low_stage(const tn_adapted *adapted, const void *x, int64_t num_in, int dtype, tn_region *region);

/* Columns [begin, end) of out (rows, num_out), on the calling thread: adapted rows are widened, summed with their
 * adapter's part, and rounded again. Any split into ranges gives the same bits. */
void tn_adapter_columns(const tn_adapted *adapted, void *out, int64_t num_out, int dtype, int64_t begin, int64_t end);

#endif
