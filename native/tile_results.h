/* What products by tiles share: sizes, and results of sums that lie as tiles leave them, [column][row]. */
#ifndef TN_TILE_RESULTS_H
#define TN_TILE_RESULTS_H

#include "core.h"
#include "tiles.h"

enum { TN_TILE_SIDE = 16, TN_BLOCK_ROWS = 32 };

static inline int64_t round_up(int64_t number, int64_t to) { return (number + to - 1) / to * to; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Sums of 32 columns by 32 rows: four tiles side by side. */
typedef float tn_tile_sums[TN_TILES_COLUMNS][TN_BLOCK_ROWS];

/* A tile of sums, 16 columns by up to 16 rows, that becomes results. */
typedef struct tn_tile_result {
    const float *sums;  /* of TN_BLOCK_ROWS rows each */
    const float *scale; /* of 16 columns; or NULL */
    const float *bias;  /* of 16 columns; or NULL */
    int64_t row, column;
    int rows, columns;
} tn_tile_result;

void tn_finish_tile(const tn_linear_args *args, const tn_tile_result *result);

#endif
