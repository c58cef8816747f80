/* Products of inputs (rows, K) with weights (columns, K), for every dtype that weights have.
 *
 * An element of the result is one sum over K, in an order that depends on K, the dtypes and the instruction set only:
 * K is cut into blocks of BLOCK elements; within one, lanes sum over consecutive vectors (with U4 in AVX2, over those
 * of `vf_scale_u4`), a tree of halves adds the lanes, and the blocks are added ascending. Where weights of 8 bits, or
 * MXFP4, have scales, the lanes of each group are multiplied with the group's scale and added, ascending, before the
 * tree. So neither the number of rows, nor how tiles, chunks or threads cut the work, changes a bit.
 *
 * There are two ways to multiply: pairs of bf16 into fp32, where the processor has that and the inputs are bf16; and
 * fused fp32, with inputs that are copied in fp32. Weights of another form are widened by the tiles of few rows; for
 * more, they are written into a strip: some columns of one block, which stay in the cache while all rows are multiplied
 * with them. That is exact but for integers of 4 bits: those are scaled, and rounded to bf16 where pairs are multiplied.
 * Inputs are used as they are. Where the instruction for pairs is slow, they are fused products of fp32 with its bits:
 * of each pair the odd element's first, and with denormals as 0 (tn_set_fused_pairs).
 *
 * A tile is up to TILE_ROWS rows by 4 columns of the result, in registers. Its functions are written once, for a
 * number of rows that the compiler knows. Tiles make up panels, of as many rows and columns as let a block of the
 * inputs and of the weights stay in the second cache; the sums of a panel are kept while K is gone through.
 */
#include "linear.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>

#include "elements.h"
#include "isa.h"
#include "team.h"
#include "tiles.h"
#include "weights.h"

enum {
    BLOCK = 1024,            /* elements of K; a multiple of every vector, and of the runs of U4 */
    STEP = 32,               /* elements of pairs that are multiplied at a time */
    RUN = 64,                /* elements of U4 whose low and high halves share bytes */
    GROUP_STEP = 32,         /* groups are multiples of it, unless there is one a row */
    QUAD = 4,                /* columns of a tile */
    STRIP_COLUMNS = 16,
    WIDE_COLUMNS = 128,      /* whose sums are kept while K is gone through: a multiple of a strip's */
    PANEL_ROWS = 192,        /* … of these rows: a block of them and of the weights stays in the second cache */
    COPIED_ROWS = 128,       /* … or of these, where they are copied in fp32 */
    STRIDE = BLOCK + 16,     /* of copied rows and of strips: powers of two would share few places in the first cache */
    MAX_GROUPS = TN_BLOCK_GROUPS + TN_LANES, /* that share a block: at most one more than are whole; in vectors */
    AHEAD_BYTES = 2048,      /* of a column, asked for before they are widened */
    AHEAD_QUAD_BYTES = 8192, /* of quads, asked for before they are multiplied; twice as many of integers */
    LONG_QUAD_BYTES = 16384, /* do not stay in the first cache until they are used */
    FEW_ROWS = 16,           /* their inputs stay in the cache for all of K */
    MAX_BLOCKS = 64,         /* of K, in that order */
    MAX_I8_ROWS = 16,        /* for which tiles widen integers themselves: with more, a strip is faster */
    MAX_U4_ROWS = 8,
    MAX_E2M1_ROWS = 6,
    MAX_E4M3_ROWS = 8,
    MAX_BLOCKS_ROWS = 8,
    PAIRED = 2 * TN_LANES,   /* elements of a vector of pairs */
    FUSED_GROUPS = 8,        /* whose sums are scaled together */
    ALONE_PRODUCTS = 1 << 18 /* below this number, waking threads costs more than it gains */
};

/* Rows of a tile: what the registers hold. With scales there are totals besides, which short vectors keep in memory:
 * a group takes more of them, so that it matters less. The first rows, which leave weights in the strip, are fewer: they
 * need registers for them. */
#if TN_LANES == 16
enum { TILE_ROWS = 6, SCALED_TILE_ROWS = 4, FIRST_ROWS = 4 };
#elif TN_LANES == 8
enum { TILE_ROWS = 3, SCALED_TILE_ROWS = 3, FIRST_ROWS = 2 };
#else
enum { TILE_ROWS = 6, SCALED_TILE_ROWS = 6, FIRST_ROWS = 4 };
#endif

/* Weights of 4 columns in one block of K: bf16 or fp32, from where they were loaded or from a strip. */
typedef struct {
    const void *column[QUAD];
    float *strip;               /* (QUAD, STRIDE): weights in fp32, once they are widened */
    const float (*scale)[MAX_GROUPS]; /* of each group, (QUAD, groups) */
    const float (*offset)[MAX_GROUPS]; /* of U4 and blocks, added to scaled levels */
    const float *codes;         /* of codes: what they mean */
    int first_count;            /* elements of the first group that are in this block */
    int group_size;
    int count;                  /* elements of the block */
    int64_t ahead_bytes;        /* from each element to the one to ask for meanwhile */
    const char *ahead;          /* what to ask for at the first step of pairs, */
    int64_t ahead_next;         /* from one column's to the next one's, */
    int64_t ahead_step;         /* and from one step's to the next one's: of STEP elements; of U4 and blocks, of RUN */
    int64_t kept_bytes;         /* of PAIRED elements that fused first rows leave in the strip; 0 where they do not */
    vf (*totals)[QUAD];         /* memory for a tile's, where they are kept there */
} quartet_t;

/* ---- tiles ---- */

/* Ask memory for what follows a step's weights. */
TN_INLINE void ask_ahead(const char *ahead, const quartet_t *w) {
#pragma GCC unroll 4
    for (int j = 0; j < QUAD; j++) __builtin_prefetch(ahead + j * w->ahead_next);
}

#if TN_BF16_DOT
/* The products of a vector of each row with each column's from `place` on. */
TN_INLINE void dot_bf16(const int rows, vf sums[][QUAD], const uint16_t *x, int64_t x_stride, const uint16_t *const *column,
                        int place) {
    vb weights[QUAD];
    for (int j = 0; j < QUAD; j++) weights[j] = vb_load(column[j] + place);
    for (int i = 0; i < rows; i++) {
        const vb inputs = vb_load(x + i * x_stride);
        for (int j = 0; j < QUAD; j++) sums[i][j] = vb_dot(sums[i][j], inputs, weights[j]);
    }
}

/* Lanes of the products of `count` bf16 of each row with each column. */
TN_INLINE void sum_bf16(const int rows, const bool ahead, vf sums[][QUAD], const uint16_t *x, int64_t x_stride,
                        const quartet_t *w, int begin, int end) {
    const uint16_t *column[QUAD] = {w->column[0], w->column[1], w->column[2], w->column[3]};
    const char *next = w->ahead + begin / STEP * w->ahead_step;
    int k = begin;
    for (; k + STEP <= end; k += STEP, next += w->ahead_step) {
        if (ahead) {
            ask_ahead(next, w);
            const bool in_one_run = w->ahead_next < w->ahead_step;
            if (in_one_run) ask_ahead(next + w->ahead_step / 2, w); /* again: where many wait, some are lost */
        }
        for (int place = k; place < k + STEP; place += PAIRED) dot_bf16(rows, sums, x + place, x_stride, column, place);
    }
    for (; k + PAIRED <= end; k += PAIRED) dot_bf16(rows, sums, x + k, x_stride, column, k);
    if (k == end) return;
    for (int i = 0; i < rows; i++) {
        const vb inputs = vb_load_part(x + i * x_stride + k, end - k);
        for (int j = 0; j < QUAD; j++)
            sums[i][j] = vb_dot(sums[i][j], inputs, vb_load_part(column[j] + k, end - k));
    }
}
#endif

#if TN_INTEGER_TILES
/* The same with E2M1 of whole groups. */
TN_INLINE void sum_e2m1(const int rows, vf sums[][QUAD], const uint16_t *x, int64_t x_stride, const quartet_t *w,
                        int begin, int end) {
    const uint8_t *column[QUAD] = {w->column[0], w->column[1], w->column[2], w->column[3]};
    const char *next = w->ahead + begin / STEP * w->ahead_step;
    for (int k = begin; k < end; k += STEP, next += w->ahead_step) {
        ask_ahead(next, w);
        vb weights[QUAD];
        for (int j = 0; j < QUAD; j++) weights[j] = vb_load_e2m1(column[j] + k / 2);
        for (int i = 0; i < rows; i++) {
            const vb inputs = vb_load(x + i * x_stride + k);
            for (int j = 0; j < QUAD; j++) sums[i][j] = vb_dot(sums[i][j], inputs, weights[j]);
        }
    }
}

/* The same with E4M3. */
TN_INLINE void sum_e4m3(const int rows, vf sums[][QUAD], const uint16_t *x, int64_t x_stride, const quartet_t *w,
                        int begin, int end) {
    const uint8_t *column[QUAD] = {w->column[0], w->column[1], w->column[2], w->column[3]};
    const char *next = w->ahead + begin / STEP * w->ahead_step;
    int k = begin;
    for (; k + STEP <= end; k += STEP, next += w->ahead_step) {
        ask_ahead(next, w);
        vb weights[QUAD];
        for (int j = 0; j < QUAD; j++) weights[j] = vb_load_e4m3(column[j] + k);
        for (int i = 0; i < rows; i++) {
            const vb inputs = vb_load(x + i * x_stride + k);
            for (int j = 0; j < QUAD; j++) sums[i][j] = vb_dot(sums[i][j], inputs, weights[j]);
        }
    }
    if (k == end) return;
    for (int i = 0; i < rows; i++) {
        const vb inputs = vb_load_part(x + i * x_stride + k, end - k);
        for (int j = 0; j < QUAD; j++)
            sums[i][j] = vb_dot(sums[i][j], inputs, vb_load_e4m3_part(column[j] + k, end - k));
    }
}

/* The same with I8 that have no zeros. */
TN_INLINE void sum_i8(const int rows, vf sums[][QUAD], const uint16_t *x, int64_t x_stride, const quartet_t *w,
                      int begin, int end) {
    const int8_t *column[QUAD] = {w->column[0], w->column[1], w->column[2], w->column[3]};
    const char *next = w->ahead + begin / STEP * w->ahead_step;
    int k = begin;
    for (; k + STEP <= end; k += STEP, next += w->ahead_step) {
        ask_ahead(next, w);
        vb weights[QUAD];
        for (int j = 0; j < QUAD; j++) weights[j] = vb_load_i8(column[j] + k);
        for (int i = 0; i < rows; i++) {
            const vb inputs = vb_load(x + i * x_stride + k);
            for (int j = 0; j < QUAD; j++) sums[i][j] = vb_dot(sums[i][j], inputs, weights[j]);
        }
    }
    if (k == end) return;
    for (int i = 0; i < rows; i++) {
        const vb inputs = vb_load_part(x + i * x_stride + k, end - k);
        for (int j = 0; j < QUAD; j++)
            sums[i][j] = vb_dot(sums[i][j], inputs, vb_load_i8_part(column[j] + k, end - k));
    }
}

/* The same with U4, of which a run is 64 elements in 32 bytes, of one group or of two. */
TN_INLINE void sum_u4(const int rows, const bool is_wide, vf sums[][QUAD], const uint16_t *x, int64_t x_stride,
                      const quartet_t *w) {
    const char *next = w->ahead;
    for (int begin = 0, group = 0, end; begin < w->count; begin = end, group += is_wide ? 1 : 2) {
        vb_levels levels[QUAD];
        for (int j = 0; j < QUAD; j++) {
            const float *scale = w->scale[j] + group, *offset = w->offset[j] + group;
            levels[j] = vb_levels_of(scale[0], offset[0], scale[!is_wide], offset[!is_wide]);
        }
        end = !is_wide ? begin + RUN : group == 0 ? w->first_count : begin + w->group_size;
        if (is_wide && end > w->count) end = w->count;
        for (int run = begin; run < end; run += RUN, next += w->ahead_step) {
            ask_ahead(next, w);
            vb half[2][QUAD];
            for (int j = 0; j < QUAD; j++)
                vb_load_u4((const uint8_t *)w->column[j] + run / 2, levels[j], &half[0][j], &half[1][j]);
            for (int which = 0; which < 2; which++)
                for (int i = 0; i < rows; i++) {
                    const vb inputs = vb_load(x + i * x_stride + run + RUN / 2 * which);
                    for (int j = 0; j < QUAD; j++) sums[i][j] = vb_dot(sums[i][j], inputs, half[which][j]);
                }
        }
    }
}
#endif

#if TN_INTEGER_TILES
/* The same with codes, in groups of whole runs. */
TN_INLINE void sum_codes(const int rows, vf sums[][QUAD], const uint16_t *x, int64_t x_stride, const quartet_t *w) {
    const char *next = w->ahead;
    for (int begin = 0, group = 0, end = w->first_count; begin < w->count; begin = end, end += w->group_size, group++) {
        if (end > w->count) end = w->count;
        vb_levels levels[QUAD];
        for (int j = 0; j < QUAD; j++) levels[j] = vb_levels_of_codes(w->codes, w->scale[j][group]);
        for (int k = begin; k < end; k += STEP) {
            if (k % RUN == 0) ask_ahead(next, w), next += w->ahead_step;
            vb weights[QUAD];
            for (int j = 0; j < QUAD; j++)
                weights[j] = vb_load_codes((const uint8_t *)w->column[j] + k / 2, levels[j]);
            for (int i = 0; i < rows; i++) {
                const vb inputs = vb_load(x + i * x_stride + k);
                for (int j = 0; j < QUAD; j++) sums[i][j] = vb_dot(sums[i][j], inputs, weights[j]);
            }
        }
    }
}

/* A run of 64 columns: number `run` of a block, or two small blocks, or one, where only 32 of `count` are left. */
TN_INLINE void load_blocks(const int dtype, const uint8_t *block, int run, int count, const float *scale,
                           const float *offset, vb *low, vb *high) {
    switch (dtype) {
    case TN_Q4_K: vb_load_q4_k(block, run, scale, offset, low, high); return;
    case TN_Q5_K: vb_load_q5_k(block, run, scale, offset, low, high); return;
    case TN_Q6_K: vb_load_q6_k(block, run, scale, low, high); return;
    default: break;
    }
    const int bytes = tn_block_bytes(dtype), header = dtype == TN_Q5_0 ? 2 : 4;
    vb *to[] = {low, high};
    *high = (vb){0};
    for (int n = 0; n < 2 && n * 32 < count; n++, block += bytes) {
        uint32_t fifths = 0;
        if (dtype != TN_Q4_1) memcpy(&fifths, block + header, sizeof fifths);
        *to[n] = vb_load_small(block + header + (dtype == TN_Q4_1 ? 0 : 4), fifths, scale[n], offset[n]);
    }
}

/* The same with blocks: two small ones are gone through like a run. */
TN_INLINE void sum_blocks(const int rows, const int dtype, vf sums[][QUAD], const uint16_t *x, int64_t x_stride,
                          const quartet_t *w) {
    const int columns = tn_block_columns(dtype), bytes = tn_block_bytes(dtype);
    const int runs = columns > RUN ? columns / RUN : 1, groups = RUN / tn_block_group(dtype); /* of a run */
    const int step = columns > RUN ? bytes : 2 * bytes;
    const uint8_t *block[QUAD] = {w->column[0], w->column[1], w->column[2], w->column[3]};
    const char *next = w->ahead;
    for (int k = 0, group = 0; k < w->count;) {
        for (int run = 0; run < runs && k < w->count; run++, k += RUN, group += groups, next += w->ahead_step) {
            ask_ahead(next, w);
            const bool is_half = columns < RUN && k + RUN > w->count; /* a small block is left */
            vb half[2][QUAD];
#pragma GCC unroll 4 /* or they are not in registers */
            for (int j = 0; j < QUAD; j++)
                load_blocks(dtype, block[j], run, w->count - k, w->scale[j] + group, w->offset[j] + group, &half[0][j],
                            &half[1][j]);
            for (int which = 0; which < 2 - is_half; which++)
                for (int i = 0; i < rows; i++) {
                    const vb inputs = vb_load(x + i * x_stride + k + RUN / 2 * which);
                    for (int j = 0; j < QUAD; j++) sums[i][j] = vb_dot(sums[i][j], inputs, half[which][j]);
                }
        }
        for (int j = 0; j < QUAD; j++) block[j] += step;
    }
}
#endif

/* Of the inputs, and of the weights as the tile takes them. */
typedef enum { BF16_PAIRS, BF16_FROM_MEMORY, BF16_AND_I8, BF16_AND_U4, BF16_AND_WIDE_U4, BF16_AND_E2M1, BF16_AND_E4M3,
               BF16_AND_CODES, BF16_AND_Q4_K, BF16_AND_Q5_K, BF16_AND_Q6_K, BF16_AND_Q4_1, BF16_AND_Q5_0, BF16_AND_Q5_1,
               FUSED_IN_STRIP, FUSED_AND_BF16, FUSED_AND_I8, FUSED_AND_E2M1,
               F32_IN_STRIP, F32_AND_F32, F32_AND_BF16, F32_AND_F16, F32_AND_I8, F32_AND_E2M1,
               F32_AND_E4M3, F32_AND_U4, F32_KEEPING_U4, F32_AND_LEVELS, F32_AND_HALF_LEVELS } way_t;

/* Whether inputs are copied in fp32, and whether as fused pairs. */
static bool is_f32(way_t way) { return way >= FUSED_IN_STRIP; }
static bool is_fused(way_t way) { return is_f32(way) && way < F32_IN_STRIP; }

/* Whether the strip has levels of blocks, in bytes, that tiles scale: of groups of 32 columns, or of half as many. */
static bool is_levels(way_t way) { return way >= F32_AND_LEVELS; }

/* TN_LANES weights of a column from element k on. */
TN_INLINE vf load_column(const way_t way, const void *column, int k) {
    switch (way) {
    case F32_AND_BF16: return vf_load_bf16((const uint16_t *)column + k);
    case F32_AND_F16: return vf_load_f16((const uint16_t *)column + k);
    case F32_AND_I8: return vf_load_i8((const int8_t *)column + k);
    case F32_AND_E2M1: return vf_load_e2m1((const uint8_t *)column + k / 2);
    case F32_AND_E4M3: return vf_load_e4m3((const uint8_t *)column + k);
    default: return vf_load((const float *)column + k);
    }
}

/* Where element k is. */
TN_INLINE const char *column_at(const way_t way, const void *column, int k) {
    const char *bytes = column;
    switch (way) {
    case FUSED_AND_BF16:
    case F32_AND_BF16:
    case F32_AND_F16: return bytes + 2 * k;
    case FUSED_AND_I8:
    case F32_AND_E4M3:
    case F32_AND_I8: return bytes + k;
    case FUSED_AND_E2M1:
    case F32_AND_E2M1: return bytes + k / 2;
    default: return bytes + 4 * k;
    }
}

/* The same in fp32: of whole vectors, since a strip has zeros up to there. Weights are widened while products wait for
 * their sums, and stay in the strip for later rows. */
TN_INLINE void sum_f32(const int rows, const way_t way, vf sums[][QUAD], const float *x, const quartet_t *w, int begin,
                       int end) {
    const int step = way == F32_AND_I8 || way == F32_AND_E2M1 || way == F32_AND_E4M3 ? 32
                     : way == F32_AND_BF16 || way == F32_AND_F16                    ? 16
                     : way == F32_AND_F32                                           ? 8
                                                                                    : TN_LANES; /* a strip may end there */
    const int num = step > TN_LANES ? step / TN_LANES : 1; /* vectors, of 32 bytes in memory */
    const bool keeps = rows == FIRST_ROWS && way != F32_IN_STRIP && way != F32_AND_F32;
    const void *column[QUAD] = {w->column[0], w->column[1], w->column[2], w->column[3]};
    float *strip = w->strip;
    const char *next = w->ahead + begin / step * (w->ahead_step * step / STEP);
    for (int k = begin; k < end; k += num * TN_LANES, next += w->ahead_step * step / STEP) {
        if (way != F32_IN_STRIP) ask_ahead(next, w);
#pragma GCC unroll 1 /* or registers do not suffice */
        for (int place = k; place < k + num * TN_LANES; place += TN_LANES) {
            vf inputs[TILE_ROWS];
            for (int i = 0; i < rows; i++) inputs[i] = vf_load(x + i * STRIDE + place);
            for (int j = 0; j < QUAD; j++) {
                float *kept = strip + j * STRIDE + place;
                const vf weights = way == F32_IN_STRIP ? vf_load(kept) : load_column(way, column[j], place);
                if (keeps) vf_store(kept, weights);
                for (int i = 0; i < rows; i++) sums[i][j] = vf_fma(inputs[i], weights, sums[i][j]);
            }
        }
    }
}

/* The same with U4, in runs. */
TN_INLINE void sum_u4_f32(const int rows, const bool keeps, vf sums[][QUAD], const float *x, const quartet_t *w) {
    const char *next = w->ahead;
    for (int run = 0; run < w->count; run += RUN, next += w->ahead_step) {
        const int step = run / GROUP_STEP;
        ask_ahead(next, w);
#pragma GCC unroll 4
        for (int j = 0; j < QUAD; j++) {
            const uint8_t *column = (const uint8_t *)w->column[j] + run / 2;
            vf weights[RUN / TN_LANES];
            vf_scale_u4(weights, column, w->scale[j] + step, w->offset[j] + step);
            for (int v = 0; v < RUN / TN_LANES; v++) {
                if (keeps) vf_store(w->strip + j * STRIDE + run + v * TN_LANES, weights[v]);
                for (int i = 0; i < rows; i++)
                    sums[i][j] = vf_fma(vf_load(x + i * STRIDE + run + v * TN_LANES), weights[v], sums[i][j]);
            }
        }
    }
}

/* The same with levels of blocks, in groups of `size`. */
TN_INLINE void sum_levels(const int rows, const int size, vf sums[][QUAD], const float *x, const quartet_t *w) {
    for (int k = 0, group = 0; k < w->count; k += size, group++) {
#pragma GCC unroll 4
        for (int j = 0; j < QUAD; j++) {
            const int8_t *levels = (const int8_t *)w->column[j] + k;
            const vf scale = vf_set(w->scale[j][group]), offset = vf_set(w->offset[j][group]);
            for (int place = 0; place < size; place += TN_LANES) {
                const vf weights = vf_fma(vf_load_i8(levels + place), scale, offset);
                for (int i = 0; i < rows; i++) sums[i][j] = vf_fma(vf_load(x + i * STRIDE + k + place), weights, sums[i][j]);
            }
        }
    }
}

#if TN_FUSED_PAIRS
TN_INLINE void load_pairs(const way_t way, const void *column, int k, vf *odd, vf *even) {
    switch (way) {
    case FUSED_AND_BF16: vf_load_pairs_bf16((const uint16_t *)column + k, odd, even); return;
    case FUSED_AND_I8: vf_load_pairs_i8((const int8_t *)column + k, odd, even); return;
    default: vf_load_pairs_e2m1((const uint8_t *)column + k / 2, odd, even);
    }
}

/* The same with pairs in fp32: of PAIRED elements the odd ones, then the even ones, in inputs and strip. First rows ask
 * memory for two of the later quad's columns, and rows after them for the others: all at once would delay the first. */
TN_INLINE void sum_fused_strip(const int rows, vf sums[][QUAD], const float *x, const quartet_t *w, int begin, int end) {
    const float *strip = w->strip;
    const int64_t step_bytes = w->kept_bytes;
    const char *ahead = (const char *)w->column[2] + w->ahead_bytes + begin / PAIRED * step_bytes;
    const int64_t to_next = (const char *)w->column[3] - (const char *)w->column[2];
    for (int k = begin; k < end; k += PAIRED, ahead += step_bytes) {
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + to_next);
#pragma GCC unroll 1 /* or registers do not suffice */
        for (int place = k; place < k + PAIRED; place += TN_LANES) {
            vf inputs[TILE_ROWS];
            for (int i = 0; i < rows; i++) inputs[i] = vf_load(x + i * STRIDE + place);
            for (int j = 0; j < QUAD; j++) {
                const vf weights = vf_load(strip + j * STRIDE + place);
                for (int i = 0; i < rows; i++) sums[i][j] = vf_fma(inputs[i], weights, sums[i][j]);
            }
        }
    }
}

/* The same with weights from where they are, of whole PAIRED elements. */
TN_INLINE void sum_fused_in_place(const int rows, const way_t way, const bool keeps, vf sums[][QUAD], const float *x,
                                  const quartet_t *w, int begin, int end) {
    const bool is_held = rows <= FIRST_ROWS; /* inputs, in registers */
    const void *column[QUAD] = {w->column[0], w->column[1], w->column[2], w->column[3]};
    const int64_t ahead_bytes = w->ahead_bytes;
    for (int k = begin; k < end; k += PAIRED) {
        const float *from = x + k;
        vf inputs[2][TILE_ROWS];
        for (int i = 0; is_held && i < rows; i++) {
            inputs[0][i] = vf_load(from + i * STRIDE);
            inputs[1][i] = vf_load(from + i * STRIDE + TN_LANES);
        }
#pragma GCC unroll 4 /* or sums are not in registers */
        for (int j = 0; j < QUAD; j++) {
            if (!keeps || j < 2) __builtin_prefetch(column_at(way, column[j], k) + ahead_bytes);
            vf weights[2];
            load_pairs(way, column[j], k, &weights[0], &weights[1]);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                if (keeps) vf_store(w->strip + j * STRIDE + k + half * TN_LANES, weights[half]);
                for (int i = 0; i < rows; i++) {
                    const vf own = is_held ? inputs[half][i] : vf_load(from + i * STRIDE + half * TN_LANES);
                    sums[i][j] = vf_fma(own, weights[half], sums[i][j]);
                }
            }
        }
    }
}

TN_INLINE void sum_fused(const int rows, const way_t way, vf sums[][QUAD], const float *x, const quartet_t *w, int begin,
                         int end) {
    if (way == FUSED_IN_STRIP)
        sum_fused_strip(rows, sums, x, w, begin, end);
    else if (rows == FIRST_ROWS && w->kept_bytes)
        sum_fused_in_place(rows, way, true, sums, x, w, begin, end);
    else
        sum_fused_in_place(rows, way, false, sums, x, w, begin, end);
}

/* Denormals are 0 between the two. */
TN_INLINE uint32_t begin_flushing(const int rows, vf sums[][QUAD]) {
    const uint32_t before = v_flush_denormals();
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < QUAD; j++) sums[i][j] = v_hold(sums[i][j]);
    return before;
}
TN_INLINE void end_flushing(const int rows, vf sums[][QUAD], uint32_t before) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < QUAD; j++) sums[i][j] = v_hold(sums[i][j]);
    v_restore_denormals(before);
}
#endif

/* Lanes of elements [begin, end) of the block. */
TN_INLINE void sum_lanes(const int rows, const way_t way, vf sums[][QUAD], const void *x, int64_t x_stride,
                         const quartet_t *w, int begin, int end) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < QUAD; j++) sums[i][j] = vf_zero();
#if TN_BF16_DOT
    if (way == BF16_PAIRS || way == BF16_FROM_MEMORY) {
        sum_bf16(rows, way == BF16_FROM_MEMORY, sums, x, x_stride, w, begin, end);
        return;
    }
#endif
#if TN_INTEGER_TILES
    if (way == BF16_AND_I8) {
        sum_i8(rows, sums, x, x_stride, w, begin, end);
        return;
    }
    if (way == BF16_AND_E2M1) {
        sum_e2m1(rows, sums, x, x_stride, w, begin, end);
        return;
    }
    if (way == BF16_AND_E4M3) {
        sum_e4m3(rows, sums, x, x_stride, w, begin, end);
        return;
    }
    if (way == BF16_AND_U4 || way == BF16_AND_WIDE_U4) {
        sum_u4(rows, way == BF16_AND_WIDE_U4, sums, x, x_stride, w);
        return;
    }
    if (way == BF16_AND_CODES) {
        sum_codes(rows, sums, x, x_stride, w);
        return;
    }
    if (way >= BF16_AND_Q4_K && way <= BF16_AND_Q5_1) {
        sum_blocks(rows, TN_Q4_K + (int)(way - BF16_AND_Q4_K), sums, x, x_stride, w);
        return;
    }
#endif
    (void)x_stride;
#if TN_FUSED_PAIRS
    if (is_fused(way)) {
        const uint32_t before = begin_flushing(rows, sums);
        sum_fused(rows, way, sums, x, w, begin, end);
        end_flushing(rows, sums, before);
        return;
    }
#endif
    if (is_levels(way))
        sum_levels(rows, way == F32_AND_LEVELS ? GROUP_STEP : GROUP_STEP / 2, sums, x, w);
    else if (way == F32_AND_U4 || way == F32_KEEPING_U4)
        sum_u4_f32(rows, way == F32_KEEPING_U4, sums, x, w);
    else
        sum_f32(rows, way, sums, x, w, begin, end);
}

/* Write, or add where the block is not the first, one block's share of `rows` by 4 sums into the panel. */
TN_INLINE void tile(const int rows, const way_t way, const void *x, int64_t x_stride, const quartet_t *w, float *panel,
                    bool first) {
    vf sums[TILE_ROWS][QUAD];
    sum_lanes(rows, way, sums, x, x_stride, w, 0, w->count);
    for (int i = 0; i < rows; i++)
        vf_reduce4(panel + i * STRIP_COLUMNS, sums[i][0], sums[i][1], sums[i][2], sums[i][3], first);
}

/* The same with one scale for the whole block. */
TN_INLINE void evenly_scaled_tile(const int rows, const way_t way, const void *x, int64_t x_stride,
                                  const quartet_t *w, float *panel, bool first) {
    vf sums[TILE_ROWS][QUAD];
    sum_lanes(rows, way, sums, x, x_stride, w, 0, w->count);
    for (int j = 0; j < QUAD; j++) {
        const vf scale = vf_set(w->scale[j][0]);
        for (int i = 0; i < rows; i++) sums[i][j] = vf_fma(sums[i][j], scale, vf_zero());
    }
    for (int i = 0; i < rows; i++)
        vf_reduce4(panel + i * STRIP_COLUMNS, sums[i][0], sums[i][1], sums[i][2], sums[i][3], first);
}

/* The same with a scale for each group. */
TN_INLINE void scaled_tile(const int rows, const way_t way, const void *x, int64_t x_stride, const quartet_t *w,
                           float *panel, bool first) {
    vf sums[SCALED_TILE_ROWS][QUAD];
#if TN_LANES == 16
    vf totals[SCALED_TILE_ROWS][QUAD];
#else
    vf(*totals)[QUAD] = w->totals;
#endif
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < QUAD; j++) totals[i][j] = vf_zero();
    int begin = 0, end = w->first_count;
    for (int group = 0; begin < w->count; group++) {
        sum_lanes(rows, way, sums, x, x_stride, w, begin, end);
        for (int j = 0; j < QUAD; j++) {
            const vf scale = vf_set(w->scale[j][group]);
            for (int i = 0; i < rows; i++) totals[i][j] = vf_fma(sums[i][j], scale, totals[i][j]);
        }
        begin = end;
        end = end + w->group_size < w->count ? end + w->group_size : w->count;
    }
    for (int i = 0; i < rows; i++)
        vf_reduce4(panel + i * STRIP_COLUMNS, totals[i][0], totals[i][1], totals[i][2], totals[i][3], first);
}

#if TN_FUSED_PAIRS
/* The same of fused pairs. Their scales' products keep denormals, so that groups are gone through some at a time. */
TN_INLINE void fused_scaled_tile(const int rows, const way_t way, const void *x, int64_t x_stride, const quartet_t *w,
                                 float *panel, bool first) {
    vf totals[SCALED_TILE_ROWS][QUAD], sums[FUSED_GROUPS][SCALED_TILE_ROWS][QUAD];
    (void)x_stride;
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < QUAD; j++) totals[i][j] = vf_zero();
    int begin = 0, end = w->first_count;
    for (int group = 0, num; begin < w->count; group += num) {
        const uint32_t before = v_flush_denormals();
        for (num = 0; num < FUSED_GROUPS && begin < w->count; num++) {
            vf own[SCALED_TILE_ROWS][QUAD];
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < QUAD; j++) own[i][j] = v_hold(vf_zero());
            sum_fused(rows, way, own, x, w, begin, end);
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < QUAD; j++) sums[num][i][j] = v_hold(own[i][j]);
            begin = end;
            end = end + w->group_size < w->count ? end + w->group_size : w->count;
        }
        v_restore_denormals(before);
        for (int n = 0; n < num; n++)
            for (int j = 0; j < QUAD; j++) {
                const vf scale = vf_set(w->scale[j][group + n]);
                for (int i = 0; i < rows; i++) totals[i][j] = vf_fma(sums[n][i][j], scale, totals[i][j]);
            }
    }
    for (int i = 0; i < rows; i++)
        vf_reduce4(panel + i * STRIP_COLUMNS, totals[i][0], totals[i][1], totals[i][2], totals[i][3], first);
}
#endif

/* A tile of the number of rows that `rows` is: a function each, so that sums stay in registers. */
#define AT_MOST(most, rows) ((rows) < (most) ? (rows) : (most))
#define HEIGHT(function, most, way, height)                                                                      \
    case height:                                                                                                 \
        if (height <= most) function(AT_MOST(most, height), way, x, x_stride, w, panel, first);                  \
        return;
#define EACH_HEIGHT(function, most, way)                                                                         \
    switch (rows) {                                                                                              \
        HEIGHT(function, most, way, 1)                                                                           \
        HEIGHT(function, most, way, 2)                                                                           \
        HEIGHT(function, most, way, 3)                                                                           \
        HEIGHT(function, most, way, 4)                                                                           \
        HEIGHT(function, most, way, 5)                                                                           \
        HEIGHT(function, most, way, 6)                                                                           \
    }

typedef void (*tile_t)(int rows, const void *x, int64_t x_stride, const quartet_t *w, float *panel, bool first);

#define TILE(name, function, most, way)                                                                              \
    static void name(int rows, const void *x, int64_t x_stride, const quartet_t *w, float *panel, bool first) {      \
        EACH_HEIGHT(function, most, way)                                                                             \
    }
TILE(tile_strip, tile, TILE_ROWS, F32_IN_STRIP)
TILE(tile_f32_and_f32, tile, TILE_ROWS, F32_AND_F32)
TILE(tile_f32_and_bf16, tile, TILE_ROWS, F32_AND_BF16)
TILE(tile_f32_and_f16, tile, TILE_ROWS, F32_AND_F16)
TILE(tile_f32_and_u4, tile, TILE_ROWS, F32_AND_U4)
TILE(tile_f32_keeping_u4, tile, 1, F32_KEEPING_U4)
TILE(tile_f32_and_levels, tile, FIRST_ROWS, F32_AND_LEVELS)
TILE(tile_f32_and_half_levels, tile, FIRST_ROWS, F32_AND_HALF_LEVELS)
TILE(evenly_scaled_strip, evenly_scaled_tile, TILE_ROWS, F32_IN_STRIP)
TILE(evenly_scaled_f32_and_i8, evenly_scaled_tile, TILE_ROWS, F32_AND_I8)
TILE(scaled_strip, scaled_tile, SCALED_TILE_ROWS, F32_IN_STRIP)
TILE(scaled_f32_and_i8, scaled_tile, SCALED_TILE_ROWS, F32_AND_I8)
TILE(scaled_f32_and_e2m1, scaled_tile, SCALED_TILE_ROWS, F32_AND_E2M1)
TILE(evenly_scaled_f32_and_e4m3, evenly_scaled_tile, SCALED_TILE_ROWS, F32_AND_E4M3)
TILE(scaled_f32_and_e4m3, scaled_tile, SCALED_TILE_ROWS, F32_AND_E4M3)
#if TN_BF16_DOT
TILE(tile_bf16, tile, TILE_ROWS, BF16_PAIRS)
TILE(tile_bf16_from_memory, tile, TILE_ROWS, BF16_FROM_MEMORY)
TILE(evenly_scaled_bf16, evenly_scaled_tile, TILE_ROWS, BF16_PAIRS)
TILE(scaled_bf16, scaled_tile, SCALED_TILE_ROWS, BF16_PAIRS)
#endif
#if TN_INTEGER_TILES
TILE(evenly_scaled_i8, evenly_scaled_tile, TILE_ROWS, BF16_AND_I8)
TILE(scaled_i8, scaled_tile, SCALED_TILE_ROWS, BF16_AND_I8)
TILE(tile_u4, tile, SCALED_TILE_ROWS, BF16_AND_U4)
TILE(tile_wide_u4, tile, SCALED_TILE_ROWS, BF16_AND_WIDE_U4)
TILE(tile_codes, tile, SCALED_TILE_ROWS, BF16_AND_CODES)
TILE(scaled_e2m1, scaled_tile, SCALED_TILE_ROWS, BF16_AND_E2M1)
TILE(evenly_scaled_e4m3, evenly_scaled_tile, SCALED_TILE_ROWS, BF16_AND_E4M3)
TILE(scaled_e4m3, scaled_tile, SCALED_TILE_ROWS, BF16_AND_E4M3)
TILE(tile_q4_k, tile, SCALED_TILE_ROWS, BF16_AND_Q4_K)
TILE(tile_q5_k, tile, SCALED_TILE_ROWS, BF16_AND_Q5_K)
TILE(tile_q6_k, tile, SCALED_TILE_ROWS, BF16_AND_Q6_K)
TILE(tile_q4_1, tile, SCALED_TILE_ROWS, BF16_AND_Q4_1)
TILE(tile_q5_0, tile, SCALED_TILE_ROWS, BF16_AND_Q5_0)
TILE(tile_q5_1, tile, SCALED_TILE_ROWS, BF16_AND_Q5_1)
#endif

#if TN_FUSED_PAIRS
TILE(tile_fused_strip, tile, TILE_ROWS, FUSED_IN_STRIP)
TILE(evenly_scaled_fused_strip, evenly_scaled_tile, TILE_ROWS, FUSED_IN_STRIP)
TILE(scaled_fused_strip, fused_scaled_tile, SCALED_TILE_ROWS, FUSED_IN_STRIP)
TILE(tile_fused_bf16, tile, TILE_ROWS, FUSED_AND_BF16)
TILE(evenly_scaled_fused_i8, evenly_scaled_tile, TILE_ROWS, FUSED_AND_I8)
TILE(scaled_fused_i8, fused_scaled_tile, SCALED_TILE_ROWS, FUSED_AND_I8)
TILE(scaled_fused_e2m1, fused_scaled_tile, SCALED_TILE_ROWS, FUSED_AND_E2M1)
#endif

/* How the groups of a block are scaled. */
typedef enum { NOT_SCALED, EVENLY_SCALED, SCALED } scaling_t;

static tile_t tile_for(way_t way, scaling_t scaling) {
    switch (way) {
#if TN_BF16_DOT
    case BF16_PAIRS: return (const tile_t[]){tile_bf16, evenly_scaled_bf16, scaled_bf16}[scaling];
    case BF16_FROM_MEMORY: return tile_bf16_from_memory;
#endif
#if TN_INTEGER_TILES
    case BF16_AND_I8: return scaling == SCALED ? scaled_i8 : evenly_scaled_i8;
    case BF16_AND_U4: return tile_u4;
    case BF16_AND_WIDE_U4: return tile_wide_u4;
    case BF16_AND_CODES: return tile_codes;
    case BF16_AND_E2M1: return scaled_e2m1;
    case BF16_AND_E4M3: return scaling == SCALED ? scaled_e4m3 : evenly_scaled_e4m3;
    case BF16_AND_Q4_K: return tile_q4_k;
    case BF16_AND_Q5_K: return tile_q5_k;
    case BF16_AND_Q6_K: return tile_q6_k;
    case BF16_AND_Q4_1: return tile_q4_1;
    case BF16_AND_Q5_0: return tile_q5_0;
    case BF16_AND_Q5_1: return tile_q5_1;
#endif
#if TN_FUSED_PAIRS
    case FUSED_IN_STRIP:
        return (const tile_t[]){tile_fused_strip, evenly_scaled_fused_strip, scaled_fused_strip}[scaling];
    case FUSED_AND_BF16: return tile_fused_bf16;
    case FUSED_AND_I8: return scaling == SCALED ? scaled_fused_i8 : evenly_scaled_fused_i8;
    case FUSED_AND_E2M1: return scaled_fused_e2m1;
#endif
    case F32_AND_F32: return tile_f32_and_f32;
    case F32_AND_BF16: return tile_f32_and_bf16;
    case F32_AND_F16: return tile_f32_and_f16;
    case F32_AND_U4: return tile_f32_and_u4;
    case F32_KEEPING_U4: return tile_f32_keeping_u4;
    case F32_AND_LEVELS: return tile_f32_and_levels;
    case F32_AND_HALF_LEVELS: return tile_f32_and_half_levels;
    case F32_AND_I8: return scaling == SCALED ? scaled_f32_and_i8 : evenly_scaled_f32_and_i8;
    case F32_AND_E2M1: return scaled_f32_and_e2m1;
    case F32_AND_E4M3: return scaling == SCALED ? scaled_f32_and_e4m3 : evenly_scaled_f32_and_e4m3;
    default: return (const tile_t[]){tile_strip, evenly_scaled_strip, scaled_strip}[scaling];
    }
}

/* ---- strips: weights as the tiles take them ---- */

/* Columns of one block, and the scales of its groups. */
typedef struct {
    _Alignas(4096) unsigned char weights[STRIP_COLUMNS][STRIDE * sizeof(float)]; /* bf16 or fp32 */
    _Alignas(2048) float inputs[COPIED_ROWS * STRIDE]; /* of blocks, (rows, STRIDE) each; half a page from the weights,
                                                        * or loads would wait for stores that they do not depend on */
    float scale[STRIP_COLUMNS][MAX_GROUPS];
    float offset[STRIP_COLUMNS][MAX_GROUPS];
    vf totals[SCALED_TILE_ROWS][QUAD];
    quartet_t quad[STRIP_COLUMNS / QUAD];
} strip_t;
_Static_assert((int)BLOCK <= (int)TN_BLOCK_COLUMNS && BLOCK % 256 == 0, "a block of K is whole blocks of a file");
_Static_assert(offsetof(strip_t, inputs) % 4096 == 2048, "inputs are half a page from the weights");

/* The first `count` of them; of dtypes that are not in runs or groups. */
TN_INLINE vf load_column_part(const way_t way, const void *column, int k, int count) {
    switch (way) {
    case F32_AND_BF16: return vf_load_bf16_part((const uint16_t *)column + k, count);
    case F32_AND_F16: return vf_load_f16_part((const uint16_t *)column + k, count);
    case F32_AND_I8: return vf_load_i8_part((const int8_t *)column + k, count);
    case F32_AND_E4M3: return vf_load_e4m3_part((const uint8_t *)column + k, count);
    default: return vf_load_part((const float *)column + k, count);
    }
}

/* `count` weights less `zero`, and zeros up to a whole vector. */
TN_INLINE void widen(const way_t way, float *to, const void *from, int count, int zero) {
    const vf less = vf_set((float)zero);
    int k = 0;
    for (; k + 16 <= count; k += 16) {
        __builtin_prefetch(column_at(way, from, k) + AHEAD_BYTES);
        for (int v = k; v < k + 16; v += TN_LANES) vf_store(to + v, vf_sub(load_column(way, from, v), less));
    }
    for (; k < count; k += TN_LANES) {
        const vf weights = count - k < TN_LANES ? load_column_part(way, from, k, count - k) : load_column(way, from, k);
        vf_store(to + k, vf_sub(weights, less));
    }
}

#if TN_BF16_DOT
static void expand_i8_bf16(uint16_t *to, const int8_t *from, int count, int zero) {
    int k = 0;
    for (; k + 32 <= count; k += 32) {
        __builtin_prefetch(from + k + AHEAD_BYTES);
        vb_expand_i8(to + k, from + k, zero);
    }
    for (; k < count; k++) to[k] = bf16_of_f32((float)(from[k] - zero));
}
#endif

/* `count` elements of I8 from `from`; `zero_place` is that of the first one's group, of which `left` follow. */
static void expand_i8(void *to, const tn_matrix *w, const int8_t *from, int count, int64_t zero_place, int64_t left,
                      bool to_bf16) {
    if (w->zero == NULL) left = count;
    for (int k = 0; k < count; k += (int)left, left = w->group_size, zero_place++) {
        if (left > count - k) left = count - k;
        const int zero = w->zero == NULL ? 0 : ((const int16_t *)w->zero)[zero_place];
#if TN_BF16_DOT
        if (to_bf16) {
            expand_i8_bf16((uint16_t *)to + k, from + k, (int)left, zero);
            continue;
        }
#endif
        (void)to_bf16;
        widen(F32_AND_I8, (float *)to + k, from + k, (int)left, zero);
    }
}

#if TN_BF16_DOT
/* `count` elements of U4 times their scales, plus their offsets. `left`: elements of the first group. */
static void expand_u4_bf16(uint16_t *to, const uint8_t *from, int count, int64_t left, int64_t group_size,
                           const float *scale, const float *offset) {
    const int step = group_size % RUN != 0; /* from the group of a run's low halves to that of its high ones */
    for (int k = 0; k < count; k += RUN, from += RUN / 2, to += RUN) {
        __builtin_prefetch(from + AHEAD_BYTES);
        vb_expand_u4(to, to + RUN / 2, from, vb_levels_of(scale[0], offset[0], scale[step], offset[step]));
        left -= RUN;
        if (step == 0 && left > 0) continue;
        left += group_size;
        scale += 1 + step;
        offset += 1 + step;
    }
}

/* `count` codes times their scales; of whole runs, as groups are. `left`: elements of the first group. */
static void expand_codes_bf16(uint16_t *to, const uint8_t *from, int count, int64_t left, const tn_matrix *w,
                              const float *scale) {
    const float *codes = codes_of(w->dtype);
    for (int k = 0; k < count; k += RUN) {
        __builtin_prefetch(from + k / 2 + AHEAD_BYTES);
#if TN_INTEGER_TILES
        const vb_levels levels = vb_levels_of_codes(codes, *scale);
        vb_store(to + k, vb_load_codes(from + k / 2, levels));
        vb_store(to + k + RUN / 2, vb_load_codes(from + k / 2 + RUN / 4, levels));
#else
        for (int v = k; v < k + RUN; v += TN_LANES)
            vf_store_bf16(to + v, vf_mul(vf_load_codes(from + v / 2, codes), vf_set(*scale)));
#endif
        left -= RUN;
        if (left > 0) continue;
        left = w->group_size;
        scale++;
    }
}

/* `count` elements of blocks, whose groups are there. */
static void expand_blocks_bf16(uint16_t *to, const uint8_t *from, int count, int dtype, const float *scale,
                               const float *offset) {
#if TN_INTEGER_TILES
#define EXPAND(type)                                                                                          \
    case type:                                                                                                \
        for (int k = 0; k < count; k += RUN, scale += RUN / tn_block_group(type), offset += RUN / tn_block_group(type)) { \
            const int columns = tn_block_columns(type);                                                       \
            vb low, high;                                                                                     \
            load_blocks(type, from + k / columns * tn_block_bytes(type), k % columns / RUN, count - k, scale, offset, \
                        &low, &high);                                                                         \
            vb_store(to + k, low);                                                                            \
            vb_store(to + k + RUN / 2, high); /* a strip has room behind its end */                            \
        }                                                                                                     \
        return;
    switch (dtype) {
        EXPAND(TN_Q4_K)
        EXPAND(TN_Q5_K)
        EXPAND(TN_Q4_1)
        EXPAND(TN_Q5_0)
        EXPAND(TN_Q5_1)
    }
#undef EXPAND
#endif
    (void)scale;
    (void)offset;
    tn_round_blocks(to, from, count, dtype);
}

/* `count` elements of E4M3. */
static void expand_e4m3_bf16(uint16_t *to, const uint8_t *from, int count) {
    int k = 0;
#if TN_INTEGER_TILES
    for (; k + 32 <= count; k += 32) {
        __builtin_prefetch(from + k + AHEAD_BYTES);
        vb_store(to + k, vb_load_e4m3(from + k));
    }
#endif
    for (; k + TN_LANES <= count; k += TN_LANES) vf_store_bf16(to + k, vf_load_e4m3(from + k));
    if (k < count) vf_store_bf16_part(to + k, vf_load_e4m3_part(from + k, count - k), count - k);
}

/* `count` elements of E2M1, a multiple of 32. */
static void expand_e2m1_bf16(uint16_t *to, const uint8_t *from, int count) {
    for (int k = 0; k < count; k += TN_LANES) {
        if (k % 32 == 0) __builtin_prefetch(from + k / 2 + AHEAD_BYTES);
        vf_store_bf16(to + k, vf_load_e2m1(from + k / 2));
    }
}
#endif

/* `count` elements of U4 in fp32, in which products of bf16 and fp16 scales are exact. */
static void expand_u4_f32(float *to, const uint8_t *from, int count, const float *scale, const float *offset) {
    for (int k = 0; k < count; k += RUN) {
        const int step = k / GROUP_STEP;
        __builtin_prefetch(from + k / 2 + AHEAD_BYTES);
        vf weights[RUN / TN_LANES];
        vf_scale_u4(weights, from + k / 2, scale + step, offset + step);
        for (int v = 0; v < RUN / TN_LANES; v++) vf_store(to + k + v * TN_LANES, weights[v]);
    }
}

/* `count` codes in fp32 times their scales, as above. */
static void expand_codes_f32(float *to, const uint8_t *from, int count, int64_t left, const tn_matrix *w,
                             const float *scale) {
    const float *codes = codes_of(w->dtype);
    for (int k = 0; k < count; k += RUN) {
        __builtin_prefetch(from + k / 2 + AHEAD_BYTES);
        for (int v = k; v < k + RUN; v += TN_LANES)
            vf_store(to + v, vf_mul(vf_load_codes(from + v / 2, codes), vf_set(*scale)));
        left -= RUN;
        if (left > 0) continue;
        left = w->group_size;
        scale++;
    }
}

/* What to ask memory for: from a quad's first weights, and from one column's and one step's to the next one's. */
typedef struct {
    int64_t first, next, step;
} ahead_t;

/* A block of K, and its groups. */
typedef struct {
    int64_t begin;       /* elements [begin, begin + count) of K */
    int count;
    int64_t begin_bytes; /* of a column before `begin` */
    int64_t stride;      /* from one column to the next in memory, in bytes */
    int64_t num_groups;  /* of a column, all in all; 0 without scales */
    int64_t first_group; /* that the block begins in */
    int64_t left;        /* elements of that group from `begin` on */
    int groups;          /* that the block has a part of */
    int64_t ahead_bytes; /* from each element to the one to ask for meanwhile */
    ahead_t ahead;       /* the same in steps */
    int64_t kept_bytes;  /* as a quartet has them */
    const float *inputs; /* (rows of a panel, STRIDE), or NULL where they are not copied */
} block_t;

/* From an element of a block to the one that is `most` bytes of quads further on, in the order that they are gone
 * through: the same block of later columns, or first all blocks of the same ones. */
static int64_t ahead_bytes(const tn_matrix *w, int64_t begin, bool along_k) {
    const uint32_t most = w->scale == NULL ? AHEAD_QUAD_BYTES : 2 * AHEAD_QUAD_BYTES;
    const uint32_t block_bytes = (uint32_t)bytes_of(w, w->num_in < BLOCK ? w->num_in : BLOCK);
    const int64_t quad_bytes = bytes_of(w, stored_row(w, QUAD) * w->num_in);
    const uint32_t quads = QUAD * block_bytes < most ? most / (QUAD * block_bytes) : 1;
    if (!along_k) return quads * quad_bytes;
    const uint32_t num_blocks = (uint32_t)(w->num_in + BLOCK - 1) / BLOCK, now = (uint32_t)begin / BLOCK;
    const uint32_t then = now + quads;
    return then / num_blocks * quad_bytes + ((int64_t)(then % num_blocks) - now) * block_bytes;
}

/* Quads that are gone through as they lie in memory, and are not long, are asked for like that: bytes of all columns in
 * one run. The others are asked for as they are used: in each column for itself. */
static ahead_t ahead_of(const tn_matrix *w, const block_t *block, bool along_k) {
    const int64_t step_bytes = bytes_of(w, 256) / (w->dtype == TN_U4 || is_codes(w) || tn_is_blocks(w->dtype) ? 256 / RUN : 256 / STEP);
    const int64_t quad_bytes = QUAD * block->stride, most = quad_bytes > AHEAD_QUAD_BYTES ? quad_bytes : AHEAD_QUAD_BYTES;
    const bool in_order = along_k || w->num_in <= BLOCK;
    if (!in_order || w->row_step != 0 || quad_bytes > LONG_QUAD_BYTES)
        return (ahead_t){block->ahead_bytes, block->stride, step_bytes};
    return (ahead_t){(QUAD - 1) * block->begin_bytes + most, step_bytes, QUAD * step_bytes};
}

static block_t block_at(const tn_matrix *w, int64_t begin, bool along_k) {
    block_t block = {.begin = begin, .count = (int)(w->num_in - begin < BLOCK ? w->num_in - begin : BLOCK)};
    block.begin_bytes = bytes_of(w, begin);
    block.stride = bytes_of(w, stored_row(w, 1) * w->num_in);
    block.ahead_bytes = ahead_bytes(w, begin, along_k);
    block.ahead = ahead_of(w, &block, along_k);
    if (w->scale != NULL) { /* in 32 bits: divisions take three times as long in 64 */
        const uint32_t size = (uint32_t)w->group_size, first = (uint32_t)begin;
        block.num_groups = groups_of(w);
        block.first_group = first / size;
        block.left = (block.first_group + 1) * size - begin;
        block.groups = (int)((first + (uint32_t)block.count - 1) / size - (uint32_t)block.first_group) + 1;
    }
    return block;
}

/* Whether tiles take the weights from where they are. */
static bool is_in_place(way_t way) {
    return way != BF16_PAIRS && way != F32_IN_STRIP && way != FUSED_IN_STRIP && !is_levels(way);
}

#if TN_FUSED_PAIRS
/* `count` bf16 in fp32: of PAIRED elements the odd ones, then the even ones, and zeros up to there. */
static void split_pairs(float *to, const uint16_t *from, int count) {
    int k = 0;
    for (; k + PAIRED <= count; k += PAIRED) {
        vf odd, even;
        vf_load_pairs_bf16(from + k, &odd, &even);
        vf_store(to + k, odd);
        vf_store(to + k + TN_LANES, even);
    }
    if (k == count) return;
    uint16_t last[PAIRED] = {0};
    memcpy(last, from + k, (size_t)(count - k) * sizeof *last);
    split_pairs(to + k, last, PAIRED);
}

/* The same of a column's elements of a block. */
static void expand_pairs(strip_t *strip, int n, const tn_matrix *w, const void *from, const block_t *block,
                         int64_t zero_place) {
    uint16_t in_bf16[BLOCK];
    const void *pairs = in_bf16;
    switch (w->dtype) {
    case TN_I8: expand_i8(in_bf16, w, from, block->count, zero_place, block->left, true); break;
    case TN_U4:
        expand_u4_bf16(in_bf16, from, block->count, block->left, w->group_size, strip->scale[n], strip->offset[n]);
        break;
    case TN_NF4:
    case TN_FP4: expand_codes_bf16(in_bf16, from, block->count, block->left, w, strip->scale[n]); break;
    case TN_E2M1: expand_e2m1_bf16(in_bf16, from, block->count); break;
    case TN_E4M3: expand_e4m3_bf16(in_bf16, from, block->count); break;
    case TN_BF16: pairs = from; break;
    default: tn_round_blocks(in_bf16, from, block->count, w->dtype);
    }
    split_pairs((float *)strip->weights[n], pairs, block->count);
}
#endif

/* Write a column's elements of a block, the strip's number n, as tiles take them; its groups are there. */
static void expand(strip_t *strip, int n, const tn_matrix *w, int64_t column, const block_t *block, way_t way) {
    void *to = strip->weights[n];
    const void *from = (const char *)w->data + bytes_of(w, stored_row(w, column) * w->num_in + block->begin);
    const int64_t zero_place = column * block->num_groups + block->first_group;
#if TN_FUSED_PAIRS
    if (way == FUSED_IN_STRIP) {
        expand_pairs(strip, n, w, from, block, zero_place);
        return;
    }
#endif
#if TN_BF16_DOT
    if (way == BF16_PAIRS && w->dtype == TN_U4) {
        expand_u4_bf16(to, from, block->count, block->left, w->group_size, strip->scale[n], strip->offset[n]);
        return;
    }
    if (way == BF16_PAIRS && is_codes(w)) {
        expand_codes_bf16(to, from, block->count, block->left, w, strip->scale[n]);
        return;
    }
    if (way == BF16_PAIRS && w->dtype == TN_E2M1) {
        expand_e2m1_bf16(to, from, block->count);
        return;
    }
    if (way == BF16_PAIRS && w->dtype == TN_E4M3) {
        expand_e4m3_bf16(to, from, block->count);
        return;
    }
    if (way == BF16_PAIRS && tn_is_blocks(w->dtype)) {
        expand_blocks_bf16(to, from, block->count, w->dtype, strip->scale[n], strip->offset[n]);
        return;
    }
#endif
    if (is_levels(way)) {
        tn_block_levels(to, from, block->count, w->dtype);
        return;
    }
    switch (w->dtype) {
    case TN_I8: expand_i8(to, w, from, block->count, zero_place, block->left, way == BF16_PAIRS); return;
    case TN_U4: expand_u4_f32(to, from, block->count, strip->scale[n], strip->offset[n]); return;
    case TN_NF4:
    case TN_FP4: expand_codes_f32(to, from, block->count, block->left, w, strip->scale[n]); return;
    case TN_F32: widen(F32_AND_F32, to, from, block->count, 0); return;
    case TN_BF16: widen(F32_AND_BF16, to, from, block->count, 0); return;
    case TN_F16: widen(F32_AND_F16, to, from, block->count, 0); return;
    case TN_E4M3: widen(F32_AND_E4M3, to, from, block->count, 0); return;
    default: tn_widen_blocks(to, from, block->count, w->dtype);
    }
}

/* Scales and offsets of groups become those of each GROUP_STEP elements: in whole vectors, the next group's over them. */
static void spread_groups(float *scale, float *offset, const float *scales, const float *offsets, const tn_matrix *w,
                          const block_t *block) {
    int64_t end = block->left;
    for (int group = 0, step = 0; group < block->groups; group++, end += w->group_size) {
        const int last = (int)(end < block->count ? end : block->count) / GROUP_STEP;
        const vf own = vf_mul(vf_set(scales[group]), vf_u4_factors(step % 2));
        for (int to = step; to < last; to += TN_LANES) {
            vf_store(scale + to, own);
            vf_store(offset + to, vf_set(offsets[group]));
        }
        step = last;
    }
}

/* `count` things of `bytes` each, of which `left` can be read: a copy, where vectors would read more. */
static const void *readable(const void *from, void *copy, int count, int64_t left, int bytes) {
    if (left >= count + TN_LANES) return from;
    memset(copy, 0, (size_t)(MAX_GROUPS * bytes));
    return memcpy(copy, from, (size_t)(count * bytes));
}

/* Scales of `count` groups as floats, and the offsets of U4. */
TN_INLINE void take_scales(float *scale, float *offset, const tn_matrix *w, const int dtype, int64_t place, int count,
                           int64_t left) {
    uint32_t scales[MAX_GROUPS];
    int8_t zeros[MAX_GROUPS];
    const int bytes = dtype == TN_F32 ? 4 : 2;
    const void *from = readable((const char *)w->scale + place * bytes, scales, count, left, bytes);
    if (w->dtype != TN_U4) {
        for (int n = 0; n < count; n += TN_LANES) vf_store(scale + n, load_elements(from, dtype, n, TN_LANES));
        return;
    }
    const vf factors = w->group_size == GROUP_STEP ? vf_u4_factors(0) : vf_set(1.0f);
    const int8_t *zero = w->zero == NULL ? NULL : readable((const int8_t *)w->zero + place, zeros, count, left, 1);
    for (int n = 0; n < count; n += TN_LANES) {
        const vf own = load_elements(from, dtype, n, TN_LANES);
        const vf level = zero == NULL ? vf_set(8.0f) : vf_load_i8(zero + n); /* at most 16 */
        vf_store(offset + n, vf_mul(vf_sub(vf_zero(), level), own));
        vf_store(scale + n, vf_mul(own, factors));
    }
}

/* The scales of the block's groups, and the offsets of U4: of columns [column, column + num) as numbers n to n + 3 of the
 * strip, of which the last one stands for those that are missing. */
static void take_groups(strip_t *strip, int n, const tn_matrix *w, int64_t column, int num, const block_t *block,
                        bool in_f32) {
    const int64_t end = (scale_row(w, w->num_out - 1) + 1) * block->num_groups;
    const int scale_bytes = w->scale_dtype == TN_F32 ? 4 : w->scale_dtype == TN_E8M0 ? 1 : 2;
    const bool in_steps = in_f32 || w->group_size % RUN != 0; /* tiles take two halves of a run apart */
    const bool is_spread = w->dtype == TN_U4 && w->group_size != GROUP_STEP && in_steps;
    float scales[MAX_GROUPS], offsets[MAX_GROUPS];
    for (int j = 0; j < QUAD; j++) {
        const int64_t own = column + (j < num ? j : num - 1);
        const int64_t place = scale_row(w, own) * block->num_groups + block->first_group;
        const int64_t next = scale_row(w, own + STRIP_COLUMNS) * block->num_groups + block->first_group; /* strip */
        if (block->begin == 0) __builtin_prefetch((const char *)w->scale + next * scale_bytes);
        if (is_bytes(w) && block->groups == 1) {
            strip->scale[n + j][0] = float_at(w->scale, w->scale_dtype, place);
            continue;
        }
        __builtin_prefetch((const char *)w->scale + (next + block->groups - 1) * scale_bytes);
        if (w->zero != NULL) __builtin_prefetch((const uint8_t *)w->zero + next + block->groups - 1);
        float *scale = is_spread ? scales : strip->scale[n + j], *offset = is_spread ? offsets : strip->offset[n + j];
        switch (w->scale_dtype) {
        case TN_BF16: take_scales(scale, offset, w, TN_BF16, place, block->groups, end - place); break;
        case TN_F16: take_scales(scale, offset, w, TN_F16, place, block->groups, end - place); break;
        case TN_F32: take_scales(scale, offset, w, TN_F32, place, block->groups, end - place); break;
        default:
            for (int k = 0; k < block->groups; k++) scale[k] = scale_of_e8m0(((const uint8_t *)w->scale)[place + k]);
        }
        if (is_spread) spread_groups(strip->scale[n + j], strip->offset[n + j], scales, offsets, w, block);
    }
}

/* The same of blocks, for tiles that scale levels, and strips of pairs: others take blocks apart by themselves. */
static void take_block_groups(strip_t *strip, int n, const tn_matrix *w, const char *columns, int num, int64_t stride,
                              const block_t *block, way_t way) {
    if (is_f32(way) ? !is_levels(way) : w->dtype > TN_Q5_1) return;
    const uint8_t *from[QUAD];
    for (int j = 0; j < QUAD; j++) from[j] = (const uint8_t *)columns + (j < num ? j : num - 1) * stride;
#if TN_LARGE_SCALES
    if (w->dtype == TN_Q4_K || w->dtype == TN_Q5_K) {
        const int bytes = tn_block_bytes(w->dtype);
        for (int each = 0; each < block->count / 256; each++)
            for (int j = 0; j < QUAD; j++)
                vf_take_large_scales(strip->scale[n + j] + 8 * each, strip->offset[n + j] + 8 * each, from[j] + each * bytes);
        return;
    }
#endif
    for (int j = 0; j < QUAD; j++)
        tn_block_scales(strip->scale[n + j], strip->offset[n + j], from[j], block->count, w->dtype);
}

/* What does not change with the columns. */
static void start_strip(strip_t *strip, const tn_matrix *w) {
    for (int n = 0; n < STRIP_COLUMNS; n += QUAD) {
        quartet_t *quad = &strip->quad[n / QUAD];
        quad->scale = (const float(*)[MAX_GROUPS])strip->scale[n];
        quad->offset = (const float(*)[MAX_GROUPS])strip->offset[n];
        quad->strip = (float *)strip->weights[n];
        quad->codes = codes_of(w->dtype);
        quad->group_size = (int)(w->group_size < BLOCK ? w->group_size : BLOCK);
        quad->totals = strip->totals;
    }
}

/* Columns [first, first + num) of a block.
 *
 * The last quad's missing columns are its last one again: what is computed of them is not used. */
static void fill_strip(strip_t *strip, const tn_matrix *w, int64_t first, int num, const block_t *block, way_t way) {
    const bool in_place = is_in_place(way);
    const int64_t stride = block->stride;
    const char *column = (const char *)w->data + first * stride + block->begin_bytes;
    const int first_count = (int)(block->left < block->count ? block->left : block->count);
    for (int n = 0; n < num; n += QUAD) {
        quartet_t *quad = &strip->quad[n / QUAD];
        quad->count = block->count;
        quad->first_count = first_count;
        quad->ahead_bytes = block->ahead_bytes;
        quad->ahead = column + n * stride + block->ahead.first;
        quad->ahead_next = block->ahead.next;
        quad->ahead_step = block->ahead.step;
        quad->kept_bytes = block->kept_bytes;
        if (tn_is_blocks(w->dtype)) take_block_groups(strip, n, w, column + n * stride, num - n, stride, block, way);
        if (w->scale != NULL) take_groups(strip, n, w, first + n, num - n, block, is_f32(way) && !is_fused(way));
        for (int j = 0; j < QUAD; j++) {
            const int from = n + j < num ? n + j : num - 1;
            if (!in_place) expand(strip, n + j, w, first + from, block, way);
            quad->column[j] = in_place ? column + from * stride : (const char *)strip->weights[n + j];
        }
    }
}

/* ---- columns ---- */

/* The first row leaves U4 in the strip if whole tiles are left: it delays them less than a strip that is written before,
 * but a thin tile would cost more. */
static way_t way_in_f32(const tn_matrix *w, int64_t num_rows) {
    if (tn_is_blocks(w->dtype) && num_rows <= FIRST_ROWS)
        return tn_block_group(w->dtype) == GROUP_STEP ? F32_AND_LEVELS : F32_AND_HALF_LEVELS;
    if (tn_is_blocks(w->dtype) || is_codes(w)) return F32_IN_STRIP;
    if (w->num_in % GROUP_STEP || (w->dtype == TN_I8 && w->zero != NULL)) return F32_IN_STRIP;
    switch (w->dtype) {
    case TN_F32: return F32_AND_F32;
    case TN_BF16: return F32_AND_BF16;
    case TN_F16: return F32_AND_F16;
    case TN_I8: return F32_AND_I8;
    case TN_E4M3: return F32_AND_E4M3;
    case TN_U4:
        if (num_rows <= TILE_ROWS) return F32_AND_U4;
        return num_rows % TILE_ROWS == 1 ? F32_KEEPING_U4 : F32_IN_STRIP;
    default: return F32_AND_E2M1;
    }
}

static bool fuses_pairs;

void tn_set_fused_pairs(int32_t fused) { fuses_pairs = fused != 0; }

#if TN_FUSED_PAIRS
/* Whether fused pairs are faster: where few rows wait for memory, they are for integers of 8 bits alone, whose pairs
 * would have to be rounded to bf16 first. */
static bool is_worth_fusing(const tn_matrix *w, int64_t num_rows) {
    if (!fuses_pairs || w->dtype == TN_F32 || w->dtype == TN_F16) return false;
    return num_rows > TILE_ROWS || (w->dtype == TN_I8 && w->zero == NULL && w->num_in % PAIRED == 0);
}

static way_t way_in_pairs(const tn_matrix *w) {
    if (w->num_in % PAIRED || w->zero != NULL) return FUSED_IN_STRIP;
    if (w->dtype == TN_U4 || w->dtype == TN_E4M3 || is_codes(w) || tn_is_blocks(w->dtype)) return FUSED_IN_STRIP;
    return w->dtype == TN_BF16 ? FUSED_AND_BF16 : w->dtype == TN_I8 ? FUSED_AND_I8 : FUSED_AND_E2M1;
}
#endif

static way_t way_of(const tn_linear_args *args) {
    const tn_matrix *w = args->weight;
#if TN_BF16_DOT
    if (args->x_dtype == TN_F32) return way_in_f32(w, args->num_rows);
#if TN_FUSED_PAIRS
    if (is_worth_fusing(w, args->num_rows)) return way_in_pairs(w);
#endif
#if TN_INTEGER_TILES
    if (w->dtype == TN_U4 && args->num_rows <= MAX_U4_ROWS)
        return w->group_size % RUN == 0 ? BF16_AND_WIDE_U4 : BF16_AND_U4;
    if (is_codes(w) && args->num_rows <= MAX_U4_ROWS) return BF16_AND_CODES;
    if (w->dtype == TN_E2M1 && args->num_rows <= MAX_E2M1_ROWS) return BF16_AND_E2M1;
    if (w->dtype == TN_E4M3 && args->num_rows <= MAX_E4M3_ROWS) return BF16_AND_E4M3;
    if (w->dtype >= TN_Q4_K && w->dtype <= TN_Q5_1 && args->num_rows <= MAX_BLOCKS_ROWS)
        return BF16_AND_Q4_K + (way_t)(w->dtype - TN_Q4_K);
    if (args->num_rows <= MAX_I8_ROWS && w->dtype == TN_I8 && w->zero == NULL) return BF16_AND_I8;
#endif
    if (w->dtype == TN_BF16) return BF16_FROM_MEMORY;
    if (w->scale != NULL || tn_is_blocks(w->dtype)) return BF16_PAIRS;
#endif
    return way_in_f32(w, args->num_rows);
}

/* Heights that leave no thin rest: 8 rows are 4 and 4, not 6 and 2. */
static int tile_rows(int64_t left, int most) {
    if (left <= most) return (int)left;
    return left < 2 * most ? (int)(left + 1) / 2 : most;
}

/* A piece of the product whose sums are kept: rows and columns, each a half-open range by its first and number. */
typedef struct {
    const tn_linear_args *args;
    way_t way;
    int64_t first_row, first;
    int rows, num;
    float *sums;    /* (strips, rows, STRIP_COLUMNS) */
    float *inputs;  /* of blocks, (rows, STRIDE) each */
    bool is_copied; /* for the panel before, of the same rows */
} panel_t;

/* `count` inputs from number `place` on, in fp32, with zeros up to a whole vector; those of U4 in its order. */
TN_INLINE void copy_inputs(float *to, const void *x, const int dtype, int64_t place, int count, bool is_u4) {
    int k = 0;
    if (is_u4) {
        for (; k < count; k += GROUP_STEP) {
            if (dtype == TN_F32)
                vf_order_f32(to + k, (const float *)x + place + k);
            else
                vf_order_bf16(to + k, (const uint16_t *)x + place + k);
        }
        return;
    }
    for (; k + TN_LANES <= count; k += TN_LANES) vf_store(to + k, load_elements(x, dtype, place + k, TN_LANES));
    if (k < count) vf_store(to + k, load_elements(x, dtype, place + k, count - k));
}

/* The copied inputs of a block, number `n` of those that there are; NULL where pairs are multiplied. */
static const float *inputs_of(const panel_t *panel, const block_t *block, int n) {
    const tn_linear_args *args = panel->args;
    if (!is_f32(panel->way)) return NULL;
    float *inputs = panel->inputs + (int64_t)n * panel->rows * STRIDE;
    for (int row = 0; row < panel->rows && !panel->is_copied; row++) {
        const int64_t place = (panel->first_row + row) * args->x_stride + block->begin;
        float *to = inputs + row * STRIDE;
        const bool is_u4 = args->weight->dtype == TN_U4;
#if TN_FUSED_PAIRS
        if (is_fused(panel->way)) {
            split_pairs(to, (const uint16_t *)args->x + place, block->count);
            continue;
        }
#endif
        if (args->x_dtype == TN_F32)
            copy_inputs(to, args->x, TN_F32, place, block->count, is_u4);
        else
            copy_inputs(to, args->x, TN_BF16, place, block->count, is_u4);
    }
    return inputs;
}

static bool is_f32_strip(way_t way) { return way == F32_IN_STRIP || way == FUSED_IN_STRIP; }

/* The way of all but the first rows: their tiles find in the cache what the first ones found in memory or widened. */
static way_t later_way(way_t way) {
    if (way == BF16_FROM_MEMORY) return BF16_PAIRS;
    if (is_fused(way)) return FUSED_IN_STRIP;
    return is_f32(way) && way != F32_AND_F32 ? F32_IN_STRIP : way;
}

/* The tiles of a block: of the first rows, and of later ones. */
typedef struct {
    tile_t first, later;
    int max_rows;
} tiles_t;

static tiles_t tiles_for(const tn_matrix *w, const block_t *block, way_t way) {
    const bool is_scaled = w->scale != NULL && w->dtype != TN_U4 && !is_codes(w); /* which are scaled as they are widened */
    const scaling_t scaling = !is_scaled ? NOT_SCALED : block->groups == 1 ? EVENLY_SCALED : SCALED;
    const bool is_widening =
        (way >= BF16_AND_U4 && way <= BF16_AND_Q5_1) || way == F32_AND_E2M1 || way == F32_AND_E4M3 || way == FUSED_AND_E2M1;
    return (tiles_t){tile_for(way, scaling), tile_for(later_way(way), scaling),
                     scaling == SCALED || is_widening ? SCALED_TILE_ROWS : TILE_ROWS};
}

/* What first rows of a panel leave in the strip, as quartets have it. */
static int64_t kept_bytes(const panel_t *panel, const tiles_t *tiles) {
    const bool keeps = is_fused(panel->way) && is_in_place(panel->way) && panel->rows > tiles->max_rows;
    return keeps ? bytes_of(panel->args->weight, PAIRED) : 0;
}

/* One block's share of the sums of all rows with the strip's columns, [first, first + num). */
static void sum_strip(const panel_t *panel, strip_t *strip, int64_t first, int num, const block_t *block,
                      const tiles_t *tiles) {
    const tn_linear_args *args = panel->args;
    const int64_t offset = first - panel->first, within = offset % STRIP_COLUMNS;
    float *sums = panel->sums + (offset - within) * panel->rows + within;
    const bool keeps = is_f32_strip(later_way(panel->way)) && panel->rows > tiles->max_rows;
    const int first_rows = panel->way == F32_KEEPING_U4 ? 1 : FIRST_ROWS;
    for (int row = 0, height; row < panel->rows; row += height) {
        height = row == 0 && keeps ? first_rows : tile_rows(panel->rows - row, tiles->max_rows);
        const void *x = block->inputs != NULL
                            ? (const void *)(block->inputs + row * STRIDE)
                            : (const uint16_t *)args->x + (panel->first_row + row) * args->x_stride + block->begin;
        const tile_t tile_of = row == 0 ? tiles->first : tiles->later;
        for (int n = 0; n < num; n += QUAD)
            tile_of(height, x, args->x_stride, &strip->quad[n / QUAD], sums + row * STRIP_COLUMNS + n,
                    block->begin == 0);
    }
}

/* Columns [n, n + num) of the panel in one block of K. */
TN_INLINE void sum_block(const panel_t *panel, strip_t *strip, int n, int num, const block_t *block,
                         const tiles_t *tiles) {
    fill_strip(strip, panel->args->weight, panel->first + n, num, block, panel->way);
    sum_strip(panel, strip, panel->first + n, num, block, tiles);
}

/* The panel's sums over all of K. */
static void sum_panel(const panel_t *panel, strip_t *strip) {
    const tn_matrix *w = panel->args->weight;
    const way_t later = later_way(panel->way);
    const bool has_strip = later == BF16_PAIRS ? w->dtype != TN_BF16
                                               : is_levels(panel->way) || (is_f32_strip(later) && panel->rows > TILE_ROWS);
    const int width = has_strip ? QUAD : STRIP_COLUMNS; /* a quad's strip stays in the first cache */
    for (int64_t begin = 0; begin < w->num_in; begin += BLOCK) {
        block_t block = block_at(w, begin, false);
        const tiles_t tiles = tiles_for(w, &block, panel->way);
        block.inputs = inputs_of(panel, &block, 0);
        block.kept_bytes = kept_bytes(panel, &tiles);
        for (int n = 0; n < panel->num; n += width)
            sum_block(panel, strip, n, panel->num - n < width ? panel->num - n : width, &block, &tiles);
    }
}

/* Whether a panel's columns are better gone through one after another, as they lie in memory. */
static bool is_along_k(const panel_t *panel) {
    const tn_matrix *w = panel->args->weight;
    const int64_t num_blocks = (w->num_in + BLOCK - 1) / BLOCK;
    const bool is_integer = w->scale != NULL || tn_is_blocks(w->dtype);
    const int64_t quad_bytes = bytes_of(w, QUAD * w->num_in);
    const bool is_floats = panel->way == F32_AND_BF16 || panel->way == F32_AND_F16 || panel->way == F32_AND_F32;
    if (panel->way == BF16_FROM_MEMORY || is_floats)
        return panel->rows <= (is_floats ? 1 : SCALED_TILE_ROWS) && quad_bytes <= LONG_QUAD_BYTES;
    if (panel->rows > FEW_ROWS || !is_integer || num_blocks == 1 || num_blocks > MAX_BLOCKS) return false;
    if (is_f32(panel->way)) return panel->rows * num_blocks <= COPIED_ROWS;
    return is_in_place(panel->way) || tn_is_blocks(w->dtype);
}

/* The same in that order. Each sum adds its blocks ascending, as above. */
static void sum_panel_along_k(const panel_t *panel, strip_t *strip) {
    const tn_matrix *w = panel->args->weight;
    block_t blocks[MAX_BLOCKS];
    tiles_t tiles[MAX_BLOCKS];
    int num_blocks = 0;
    for (; num_blocks * BLOCK < w->num_in; num_blocks++) {
        block_t *block = &blocks[num_blocks];
        *block = block_at(w, num_blocks * BLOCK, true);
        tiles[num_blocks] = tiles_for(w, block, panel->way);
        block->inputs = inputs_of(panel, block, num_blocks);
        block->kept_bytes = kept_bytes(panel, &tiles[num_blocks]);
    }
    for (int n = 0; n < panel->num; n += QUAD)
        for (int each = 0; each < num_blocks; each++)
            sum_block(panel, strip, n, panel->num - n < QUAD ? panel->num - n : QUAD, &blocks[each], &tiles[each]);
}

/* A strip's sums → results: with the bias, rounded where the result is bf16. */
static void finish_strip(const float *sums_of_rows, const tn_linear_args *args, int64_t first_row, int rows,
                         int64_t first, int num) {
    const tn_matrix *w = args->weight;
    float bias[STRIP_COLUMNS] = {0};
    for (int n = 0; n < num && w->bias != NULL; n++) {
        const int64_t place = stored_row(w, first + n);
        bias[n] = float_at(w->bias, w->bias_dtype, place);
    }
    for (int row = 0; row < rows; row++) {
        const int64_t place = (first_row + row) * args->out_stride + first;
        for (int n = 0; n < num; n += TN_LANES) {
            const int count = num - n < TN_LANES ? num - n : TN_LANES;
            vf sums = vf_load(sums_of_rows + row * STRIP_COLUMNS + n);
            if (w->bias != NULL) sums = vf_add(sums, vf_load(bias + n));
            store_elements(args->out, args->out_dtype, place + n, sums, count);
        }
    }
}

/* By vectors. */
static __attribute__((noinline)) void vector_columns(const tn_linear_args *args, int64_t begin, int64_t end) {
    strip_t strip;
    float sums[PANEL_ROWS * WIDE_COLUMNS];
    const way_t way = way_of(args);
    const int most = is_f32(way) ? COPIED_ROWS : PANEL_ROWS;
    start_strip(&strip, args->weight);
    for (int64_t row = 0; row < args->num_rows; row += most) {
        const int rows = (int)(args->num_rows - row < most ? args->num_rows - row : most);
        bool is_copied = false;
        for (int64_t first = begin; first < end; first += WIDE_COLUMNS) {
            const int num = (int)(end - first < WIDE_COLUMNS ? end - first : WIDE_COLUMNS);
            const panel_t panel = {args, way, row, first, rows, num, sums, strip.inputs, is_copied};
            const bool along_k = is_along_k(&panel);
            (along_k ? sum_panel_along_k : sum_panel)(&panel, &strip);
            is_copied = along_k || args->weight->num_in <= BLOCK;
            for (int n = 0; n < num; n += STRIP_COLUMNS)
                finish_strip(sums + n * rows, args, row, rows, first + n,
                             num - n < STRIP_COLUMNS ? num - n : STRIP_COLUMNS);
        }
    }
}

void tn_linear_columns(const tn_linear_args *args, int64_t begin, int64_t end) {
#if TN_TILES
    if (args->packed != NULL && tn_packed_forms(args->weight, args->x_dtype)) {
        tn_tiles_columns(args, begin, end);
        return;
    }
#endif
    vector_columns(args, begin, end);
}

int64_t tn_linear_chunk(int64_t num_out, int num_threads) {
    const int64_t about = num_out / (8 * num_threads) + 1;
    return (about + TN_LINEAR_COLUMNS - 1) / TN_LINEAR_COLUMNS * TN_LINEAR_COLUMNS;
}

bool tn_next_columns(tn_region *region, int64_t num_out, int64_t *begin, int64_t *end) {
    const int64_t chunk = tn_linear_chunk(num_out, region->num);
    const int64_t next = tn_next_chunk_in_order(region, (num_out + chunk - 1) / chunk);
    *begin = next * chunk;
    *end = *begin + chunk < num_out ? *begin + chunk : num_out;
    return next >= 0;
}

/* ---- the exported function ---- */

static void linear_body(void *arg, tn_region *region, int id) {
    (void)id;
    const tn_linear_args *args = arg;
#if TN_TILES
    const int forms = tn_packed_forms(args->weight, args->x_dtype);
    if (forms) {
        const int64_t pieces = tn_pack_pieces(args->num_rows, args->weight->num_in);
        for (int64_t piece; (piece = tn_next_chunk(region)) < pieces;)
            tn_pack(forms, args->packed, args->x, args->x_stride, args->num_rows, args->weight->num_in, piece);
        tn_barrier(region);
    }
#endif
    EACH_COLUMNS(region, args->weight->num_out) tn_linear_columns(args, begin, end);
}

int tn_linear_check(const tn_linear_args *args) {
    if (args->size != sizeof *args) return TN_REFUSED;
    const tn_matrix *w = args->weight;
    const bool is_integer = is_bytes(w) || w->dtype == TN_U4 || w->dtype == TN_E2M1 || is_codes(w);
    const bool is_blocks = tn_is_blocks(w->dtype) && tn_block_bytes(w->dtype) != 0;
    if (!is_integer && !is_blocks && w->dtype != TN_F32 && w->dtype != TN_BF16 && w->dtype != TN_F16) return TN_REFUSED;
    if (is_integer != (w->scale != NULL)) return TN_REFUSED;
    if (args->x_dtype != TN_F32 && args->x_dtype != TN_BF16) return TN_REFUSED;
    if (args->out_dtype != TN_F32 && args->out_dtype != TN_BF16) return TN_REFUSED;
    assert(!is_integer || w->group_size % GROUP_STEP == 0 || w->group_size == w->num_in);
    assert(!is_integer || w->num_in % w->group_size == 0 || w->dtype == TN_E4M3);
    assert(w->scale_rows == 0 || w->dtype == TN_E4M3);
    assert((w->dtype != TN_U4 && !is_codes(w)) || w->num_in % RUN == 0);
    assert(!is_codes(w) || w->group_size % RUN == 0);
    assert(!is_blocks || w->num_in % tn_block_columns(w->dtype) == 0);
    if ((w->dtype == TN_E2M1) != (w->scale != NULL && w->scale_dtype == TN_E8M0)) return TN_REFUSED;
    assert(w->dtype == TN_E2M1 ? w->group_size == GROUP_STEP && w->num_in % GROUP_STEP == 0 : w->row_step == 0);
    return TN_OK;
}

int64_t tn_linear_scratch_bytes(const tn_linear_args *args) {
    return tn_packed_forms(args->weight, args->x_dtype) ? tn_packed_bytes(args->num_rows, args->weight->num_in) : 0;
}

int tn_linear(const tn_linear_args *args) {
    if (tn_linear_check(args) != TN_OK) return TN_REFUSED;
    if (tn_packed_forms(args->weight, args->x_dtype) && args->packed == NULL) return TN_REFUSED;
    const bool is_small = args->num_rows * args->weight->num_out * args->weight->num_in < ALONE_PRODUCTS;
    (is_small ? tn_run_alone : tn_run)(linear_body, (void *)args);
    return TN_OK;
}
