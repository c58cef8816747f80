/* Products of inputs in bf16 with integers of 8 bits, by tiles of integers. Called by tiles.c. */
#ifndef TN_INTEGER_TILES_H
#define TN_INTEGER_TILES_H

#include <stdbool.h>

#include "core.h"

/* Whether tiles of integers multiply these weights: integers of 8 bits without zeros. */
bool tn_takes_integer_tiles(const tn_matrix *w);

/* Inputs as integers, of all rows in whole tiles; packed a piece of a tile of 16 rows at a time. */
int64_t tn_integers_bytes(int64_t num_rows, int64_t num_in);
void tn_pack_integers(void *packed, const void *x, int64_t x_stride, int64_t num_rows, int64_t num_in, int64_t tile,
                      int64_t begin, int64_t end);

/* As tn_tiles_columns, of `packed` inputs. */
void tn_integer_columns(const tn_linear_args *args, const void *packed, int64_t begin, int64_t end);

#endif
