/* The two products of attention by tiles: queries with keys, and their exponentials with values. All are bf16. */
#ifndef TN_ATTEND_TILES_H
#define TN_ATTEND_TILES_H

#include "core.h"
#include "tiles.h"

enum { TN_ATTEND_ROWS = 32, TN_ATTEND_KEYS = 256, TN_SCORES_STRIDE = TN_ATTEND_KEYS + 4 };

/* Rows' queries, packed once for all chunks of keys, their scores, and the sums of values; keys [begin, end) are those that some row sees, of the chunk. */
typedef struct tn_attend_tiles {
    const uint16_t *packed;  /* of tn_pack: the rows' queries */
    float *scores;           /* (TN_ATTEND_ROWS, TN_SCORES_STRIDE) */
    float *sums;             /* (TN_ATTEND_ROWS, stride) */
    const int *begins, *ends; /* what each row sees */
    const uint16_t *vectors; /* keys or values: number t is at vectors + place[t] */
    const int64_t *place;
    int64_t stride;          /* elements of sums, at least head_dim in whole vectors */
    int64_t head_dim;        /* numbers of a vector, at most TN_MAX_HEAD_DIM */
    int num_rows, begin, end;
} tn_attend_tiles;

/* scores[row][t] = queries[row] * vectors[t], one chain over the head's numbers in steps of 32 (isa_amx.h), for all rows and
 * the keys [begin, end); others in [0, TN_ATTEND_KEYS) may be overwritten. */
void tn_score_tiles(const tn_attend_tiles *of);

/* sums[row] = the sum over t of scores[row][t] * vectors[t], over what the row sees: one chain over the chunk's keys in steps
 * of 32, from its first key on. A score is cut into two bf16, which have 16 of its 24 bits: each step adds the first ones'
 * products, and then the second ones'. */
void tn_value_tiles(const tn_attend_tiles *of);

#endif
