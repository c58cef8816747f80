/* Products inside a region: what `tn_linear` and the decoder's step are made of. */
#ifndef TN_LINEAR_H
#define TN_LINEAR_H

#include <stdbool.h>

#include "core.h"
#include "team.h"
#include "tiles.h"

/* Columns [begin, end) of the product, on the calling thread. Any split into ranges gives the same bits.
 *
 * `begin` should be a multiple of TN_LINEAR_COLUMNS, or work is repeated. Takes about 700 KiB of stack. */
void tn_linear_columns(const tn_linear_args *args, int64_t begin, int64_t end);

/* How many columns to take at a time, for about eight chunks a thread. A multiple of TN_LINEAR_COLUMNS. */
int64_t tn_linear_chunk(int64_t num_out, int num_threads);

/* The next columns [*begin, *end) of `num_out` in a stage; false when all are taken. */
bool tn_next_columns(tn_region *region, int64_t num_out, int64_t *begin, int64_t *end);

/* A stage: the statement for columns [begin, end) of `num_out`, which the region's threads share. */
#define EACH_COLUMNS(region, num_out) for (int64_t begin, end; tn_next_columns(region, num_out, &begin, &end);)

#if TN_TILES
#define TN_LINEAR_COLUMNS TN_TILES_COLUMNS
#else
#define TN_LINEAR_COLUMNS 16
#endif

/* Whether the structs are of this version and the dtypes known: TN_OK or TN_REFUSED. */
int tn_linear_check(const tn_linear_args *args);

#endif
