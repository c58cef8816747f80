/* Queries, keys and values of a step, inside a region. */
#ifndef TN_HEADS_H
#define TN_HEADS_H

#include "core.h"

/* One row of `tn_write_heads`. */
void tn_write_heads_row(const tn_heads_args *args, int64_t row);

#endif
