#include "attend_tiles.h"

#include "isa.h"

#if TN_TILES

#include <stdbool.h>
#include <string.h>

#include "isa_amx.h"

enum {
    SIDE = 16,
    STEP = 32,
    KEY_STEPS = TN_ATTEND_KEYS / STEP,
    MAX_WIDTHS = TN_MAX_HEAD_DIM / SIDE, /* tiles of values side by side */
};

typedef uint16_t tile_t[SIDE * STEP];

static int least(int a, int b) { return a < b ? a : b; }

/* ---- scores: keys are the operand `a`, as they lie, and queries are `b` ---- */

/* 16 keys, where they lie or in `copy`. */
typedef struct {
    const uint16_t *first;
    int64_t stride; /* bytes */
} keys_t;

static bool is_even(const int64_t *place) {
    const int64_t step = place[1] - place[0];
    bool even = true;
    for (int t = 2; t < SIDE; t++) even &= place[t] - place[t - 1] == step;
    return even;
}

static keys_t keys_at(const tn_attend_tiles *of, int t, uint16_t copy[SIDE][TN_MAX_HEAD_DIM]) {
    if (t >= of->begin && t + SIDE <= of->end && of->head_dim % STEP == 0 && is_even(of->place + t))
        return (keys_t){of->vectors + of->place[t], 2 * (of->place[t + 1] - of->place[t])};
    const size_t bytes = (size_t)of->head_dim * 2, whole = (bytes + 2 * STEP - 1) / (2 * STEP) * (2 * STEP);
    for (int i = 0; i < SIDE; i++) {
        const size_t taken = t + i >= of->begin && t + i < of->end ? bytes : 0;
        if (taken) memcpy(copy[i], of->vectors + of->place[t + i], taken);
        memset((char *)copy[i] + taken, 0, whole - taken);
    }
    return (keys_t){copy[0], sizeof copy[0]};
}

/* Columns [t, t + 16) of the scores of 16 rows from `row` on; `turned` is their transpose, in rows of STEP. */
static void store_scores(const tn_attend_tiles *of, int row, int t, const float *turned) {
    __m512i r[SIDE];
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) r[i] = _mm512_loadu_si512(turned + i * STEP);
    transpose(r);
    float *to = of->scores + row * TN_SCORES_STRIDE + t;
    const int num = least(of->num_rows - row, SIDE);
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++)
        if (i < num) _mm512_storeu_si512(to + i * TN_SCORES_STRIDE, r[i]);
}

/* Two tiles of keys, or one, with two tiles of rows, or one. */
TN_INLINE void score_block(const bool two, const bool two_keys, const keys_t keys[2], const tile_t *packed, int steps,
                           float turned[STEP][STEP]) {
    tile_zero(0);
    if (two) tile_zero(1);
    if (two_keys) tile_zero(2);
    if (two && two_keys) tile_zero(3);
    for (int step = 0; step < steps; step++) {
        tile_load(6, packed[step], TILE_ROW_BYTES);
        tile_load(4, keys[0].first + step * STEP, keys[0].stride);
        tile_dot(0, 4, 6);
        if (two) {
            tile_load(7, packed[steps + step], TILE_ROW_BYTES);
            tile_dot(1, 4, 7);
        }
        if (!two_keys) continue;
        tile_load(5, keys[1].first + step * STEP, keys[1].stride);
        tile_dot(2, 5, 6);
        if (two) tile_dot(3, 5, 7);
    }
    tile_store(0, turned[0], sizeof turned[0]);
    if (two) tile_store(1, turned[0] + SIDE, sizeof turned[0]);
    if (two_keys) tile_store(2, turned[SIDE], sizeof turned[0]);
    if (two && two_keys) tile_store(3, turned[SIDE] + SIDE, sizeof turned[0]);
}

void tn_score_tiles(const tn_attend_tiles *of) {
    _Alignas(64) uint16_t copies[2][SIDE][TN_MAX_HEAD_DIM];
    _Alignas(64) float turned[STEP][STEP];
    const int steps = (int)(of->head_dim + STEP - 1) / STEP;
    const bool two = of->num_rows > SIDE;
    const tile_t *packed = (const tile_t *)of->packed;
    tn_tiles_begin(TN_WHOLE_TILES);
    for (int t = of->begin / SIDE * SIDE; t < of->end; t += 2 * SIDE) {
        const bool two_keys = t + SIDE < of->end;
        const keys_t keys[2] = {keys_at(of, t, copies[0]),
                                two_keys ? keys_at(of, t + SIDE, copies[1]) : (keys_t){copies[1][0], 0}};
        if (two && two_keys)
            score_block(true, true, keys, packed, steps, turned);
        else if (two)
            score_block(true, false, keys, packed, steps, turned);
        else if (two_keys)
            score_block(false, true, keys, packed, steps, turned);
        else
            score_block(false, false, keys, packed, steps, turned);
        for (int row = 0; row < of->num_rows; row += SIDE) {
            store_scores(of, row, t, turned[0] + row);
            if (two_keys) store_scores(of, row, t + SIDE, turned[SIDE] + row);
        }
    }
}

/* ---- values: scores are the operand `a`, and values are `b`, in pairs of keys ---- */

/* Scores as two bf16 each, and the values of keys that some row sees. */
typedef struct {
    _Alignas(64) uint16_t high[TN_ATTEND_ROWS][TN_ATTEND_KEYS];
    _Alignas(64) uint16_t low[TN_ATTEND_ROWS][TN_ATTEND_KEYS];
    _Alignas(64) tile_t values[KEY_STEPS][MAX_WIDTHS];
} work_t;

/* Steps [first, last) of rows [row, row + num), and zeros up to a whole tile; 0 for keys that a row does not see. */
static void cut_scores(const tn_attend_tiles *of, work_t *work, int row, int num, int first, int last) {
    for (int i = 0; i < (num + SIDE - 1) / SIDE * SIDE; i++) {
        const float *scores = of->scores + (row + i) * TN_SCORES_STRIDE;
        const int begin = i < num ? of->begins[row + i] : 0, end = i < num ? of->ends[row + i] : 0;
        for (int t = first * STEP; t < last * STEP; t += SIDE) {
            const int from = begin > t ? least(begin - t, SIDE) : 0, to = end > t ? least(end - t, SIDE) : 0;
            const __mmask16 seen = from < to ? (__mmask16)(v_mask(to) & ~v_mask(from)) : 0;
            const vf score = _mm512_maskz_loadu_ps(seen, scores + t);
            const __m256i high = (__m256i)_mm512_cvtneps_pbh(score);
            const vf rest = vf_sub(score, v_of_bf16(high)); /* exactly */
            _mm256_store_si256((void *)(work->high[i] + t), high);
            _mm256_store_si256((void *)(work->low[i] + t), (__m256i)_mm512_cvtneps_pbh(rest));
        }
    }
}

/* Two keys' values side by side: 32 numbers of each, of which those behind the head, and those of keys that are not in
 * [begin, end), are 0. Returns whether one is infinite or no number. */
TN_INLINE bool pair_values(const tn_attend_tiles *of, int t, int d, int begin, int end, uint16_t *to, uint16_t *next) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16)), exponent = _mm512_set1_epi16(0x7f80);
    const int left = (int)of->head_dim - d;
    const __mmask32 mask = left >= STEP ? ~0u : (1u << left) - 1;
    __m512i first = _mm512_setzero_si512(), second = first;
    if (t >= begin && t < end) first = _mm512_maskz_loadu_epi16(mask, of->vectors + of->place[t] + d);
    if (t + 1 >= begin && t + 1 < end) second = _mm512_maskz_loadu_epi16(mask, of->vectors + of->place[t + 1] + d);
    _mm512_store_si512(to, _mm512_permutex2var_epi16(first, low, second));
    if (left > SIDE) _mm512_store_si512(next, _mm512_permutex2var_epi16(first, high, second));
    const __mmask32 odd = _mm512_cmpeq_epi16_mask(_mm512_and_si512(first, exponent), exponent) |
                          _mm512_cmpeq_epi16_mask(_mm512_and_si512(second, exponent), exponent);
    return odd != 0;
}

static bool take_values(const tn_attend_tiles *of, work_t *work, int begin, int end) {
    bool has_odd = false;
    for (int t = begin / STEP * STEP; t < end; t += 2)
        for (int d = 0; d < of->head_dim; d += STEP) {
            tile_t *tiles = &work->values[t / STEP][d / SIDE];
            const int place = t % STEP / 2 * STEP;
            has_odd |= pair_values(of, t, d, begin, end, tiles[0] + place, tiles[1 % MAX_WIDTHS] + place);
        }
    if (end % STEP) /* the rest of the last step */
        for (int d = 0; d < of->head_dim; d += SIDE)
            memset(work->values[end / STEP][d / SIDE] + (end % STEP + 1) / 2 * STEP, 0,
                   (size_t)(SIDE - (end % STEP + 1) / 2) * STEP * 2);
    return has_odd;
}

/* Two tiles of the head's numbers, or one, of two tiles of rows, or one. */
TN_INLINE void value_block(const bool two, const bool two_widths, const work_t *work, int width, int first, int last,
                           float *sums, int64_t stride) {
    const int64_t bytes = stride * (int64_t)sizeof(float);
    tile_zero(0);
    if (two) tile_zero(1);
    if (two_widths) tile_zero(2);
    if (two && two_widths) tile_zero(3);
    for (int step = first; step < last; step++) {
        tile_load(6, work->values[step][width], TILE_ROW_BYTES);
        if (two_widths) tile_load(7, work->values[step][width + 1], TILE_ROW_BYTES);
        tile_load(4, work->high[0] + step * STEP, sizeof work->high[0]);
        tile_dot(0, 4, 6);
        if (two_widths) tile_dot(2, 4, 7);
        tile_load(5, work->low[0] + step * STEP, sizeof work->low[0]);
        tile_dot(0, 5, 6);
        if (two_widths) tile_dot(2, 5, 7);
        if (!two) continue;
        tile_load(4, work->high[SIDE] + step * STEP, sizeof work->high[0]);
        tile_dot(1, 4, 6);
        if (two_widths) tile_dot(3, 4, 7);
        tile_load(5, work->low[SIDE] + step * STEP, sizeof work->low[0]);
        tile_dot(1, 5, 6);
        if (two_widths) tile_dot(3, 5, 7);
    }
    tile_store(0, sums, bytes);
    if (two) tile_store(1, sums + SIDE * stride, bytes);
    if (two_widths) tile_store(2, sums + SIDE, bytes);
    if (two && two_widths) tile_store(3, sums + SIDE * stride + SIDE, bytes);
}

/* Rows [row, row + num), `num` at most 16 unless it is all of them. `sums` has whole tiles. */
static void sum_values(const tn_attend_tiles *of, const work_t *work, int num, int first, int last, float *sums) {
    for (int width = 0; width * SIDE < of->head_dim; width += 2) {
        const bool two_widths = (width + 1) * SIDE < of->head_dim;
        float *to = sums + width * SIDE;
        if (num > SIDE && two_widths)
            value_block(true, true, work, width, first, last, to, of->stride);
        else if (num > SIDE)
            value_block(true, false, work, width, first, last, to, of->stride);
        else if (two_widths)
            value_block(false, true, work, width, first, last, to, of->stride);
        else
            value_block(false, false, work, width, first, last, to, of->stride);
    }
}

/* Each row by itself, so that values of keys that it does not see are zeros: 0 times infinity would not be 0. */
static void sum_rows_apart(const tn_attend_tiles *of, work_t *work) {
    _Alignas(64) float sums[SIDE * TN_MAX_HEAD_DIM];
    for (int row = 0; row < of->num_rows; row++) {
        const int begin = of->begins[row], end = of->ends[row];
        if (begin >= end) continue;
        const int first = begin / STEP, last = (end + STEP - 1) / STEP;
        cut_scores(of, work, row, 1, first, last);
        take_values(of, work, begin, end);
        sum_values(of, work, 1, first, last, sums);
        memcpy(of->sums + row * of->stride, sums, (size_t)of->stride * sizeof(float));
    }
}

void tn_value_tiles(const tn_attend_tiles *of) {
    work_t work;
    const int first = of->begin / STEP, last = (of->end + STEP - 1) / STEP;
    tn_tiles_begin(TN_WHOLE_TILES);
    if (take_values(of, &work, of->begin, of->end)) {
        sum_rows_apart(of, &work);
        return;
    }
    cut_scores(of, &work, 0, of->num_rows, first, last);
    sum_values(of, &work, of->num_rows, first, last, of->sums);
}

#endif
