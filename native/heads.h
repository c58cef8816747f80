/* Queries, keys and values of a step, inside a region. */
#ifndef TN_HEADS_H
#define TN_HEADS_H

#include "core.h"

/* One row of `tn_write_heads`. */
void tn_write_heads_row(const tn_heads_args *args, int64_t row);

/* Turns the first rotary_dim numbers of `head` as the row's position says. */
void tn_turn(const tn_heads_args *args, void *head, int64_t row);

/* The first `num` numbers of the pool's vector `place`, which has head_dim: in 8 bits with a scale of their own. */
void tn_write_pooled(const tn_kv *kv, int64_t place, int64_t head_dim, const void *numbers, int64_t num, int dtype);

#endif
