/* Products by tiles, inside a region, where the processor has them: of inputs in bf16 with weights in bf16 or integers.
 *
 * Inputs are "packed" first, once for all columns: into the order in which a tile takes them. */
#ifndef TN_TILES_H
#define TN_TILES_H

#include <stdbool.h>

#include "core.h"

#if defined(__AMX_BF16__) || defined(TN_SOFT_TILES)
#define TN_TILES 1
#endif

/* Forms of packed inputs: pairs of bf16, where fewer than 16 rows make narrow tiles; the same in whole tiles; integers. */
enum { TN_PAIRS = 1, TN_INTEGERS = 2, TN_WHOLE_PAIRS = 4 };

/* The form in which tiles multiply these weights with inputs of this dtype; 0: they do not. The number of rows decides
 * nothing, or it would change bits. */
int tn_packed_forms(const tn_matrix *w, int x_dtype);

/* Bytes of packed inputs: of all rows, in whole tiles, with room for each form. */
int64_t tn_packed_bytes(int64_t num_rows, int64_t num_in);

/* Packing into some forms is cut into this many pieces, which threads share: in tn_packed_bytes, at `packed` on 64 bytes. */
int64_t tn_pack_pieces(int64_t num_rows, int64_t num_in);
void tn_pack(int forms, void *packed, const void *x, int64_t x_stride, int64_t num_rows, int64_t num_in, int64_t piece);

/* Columns [begin, end) of the product, on the calling thread, of args->packed. Any split into ranges gives the same bits.
 *
 * `begin` should be a multiple of TN_TILES_COLUMNS. Takes about 700 KiB of stack. */
void tn_tiles_columns(const tn_linear_args *args, int64_t begin, int64_t end);

#define TN_TILES_COLUMNS 32

/* What a thread's tiles are set up for (isa_amx.h): results of 1 to 16 columns, or products with half steps of integers. */
typedef enum { TN_NO_TILES = 0, TN_WHOLE_TILES = 16, TN_HALF_TILES = 17 } tn_tile_shape;

/* A thread's tiles are set up before products by them, and given back at the end of a region, so that the system need
 * not save them. */
void tn_tiles_begin(tn_tile_shape shape);
void tn_tiles_end(void);

#endif
