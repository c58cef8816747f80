/* Products inside a region: what `tn_linear` and the decoder's step are made of. */
#ifndef TN_LINEAR_H
#define TN_LINEAR_H

#include "core.h"

/* Columns [begin, end) of the product, on the calling thread. Any split into ranges gives the same bits.
 *
 * `begin` should be a multiple of TN_LINEAR_COLUMNS, or work is repeated. Takes about 170 KiB of stack. */
void tn_linear_columns(const tn_linear_args *args, int64_t begin, int64_t end);

/* How many columns to take at a time, for about eight chunks a thread. A multiple of TN_LINEAR_COLUMNS. */
int64_t tn_linear_chunk(int64_t num_out, int num_threads);

#define TN_LINEAR_COLUMNS 16

/* Whether the structs are of this version and the dtypes known: TN_OK or TN_REFUSED. */
int tn_linear_check(const tn_linear_args *args);

#endif
