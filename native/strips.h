/* Strips: 32 columns of a block of K, as tiles take them, whose weights become bf16. Read by tiles.c alone.
 *
 * A strip is widened a quarter of a unit at a time, 8 columns of 64 elements, while tiles multiply what came before. The
 * levels of U4, (q - 8) * scale, are in a table for each scale in bf16: that is one load, and computing 16 levels seven
 * operations. So are those of E2M1. */
#ifndef TN_STRIPS_H
#define TN_STRIPS_H

#include <assert.h>
#include <pthread.h>
#include <string.h>

#include "isa.h"
#include "isa_amx.h"
#include "tile_results.h"
#include "weights.h"

enum {
    U4_LEVELS = 32,
    STEP = 32,          /* elements of K in a tile */
    UNIT = 64,          /* elements that are widened together: a run of U4 */
    SIDE = TN_TILE_SIDE,
    STRIP = TN_TILES_COLUMNS,
    MAX_BLOCK = 1280,   /* elements of K that are in a strip; a multiple of a unit */
    MAX_GROUPS = MAX_BLOCK / SIDE + 16, /* of 16 elements at least; one more than are whole; in vectors */
    RING = 2,           /* units of a strip that only one block of rows needs: one is multiplied, one widened */
    SHORT_ROW = 1024,   /* bytes: with such rows the strip after the next one is asked for, with others the next one */
    LINE = 64,          /* bytes that memory gives at a time */
};

/* Where weights are: in their rows, in the strip, or in rows of one of these dtypes, from which the strip is filled. */
typedef enum { IN_PLACE, STRIP_ONLY, FROM_BF16, FROM_I8_AND_ZERO, FROM_U4, FROM_U4_AND_ZERO, FROM_U4_BY_TABLE,
               FROM_WIDE_U4_BY_TABLE, FROM_WIDE_U4_AND_ZERO_BY_TABLE, FROM_CODES, FROM_E2M1, FROM_E4M3, FROM_Q4_K, FROM_Q5_K, FROM_Q6_K, FROM_BLOCKS } form_t;

/* U4 under scales of 16 bits, whose levels are in a table; "wide" are those of which a unit has one scale a column. */
TN_INLINE bool is_by_table(const form_t form) {
    return form == FROM_U4_BY_TABLE || form == FROM_WIDE_U4_BY_TABLE || form == FROM_WIDE_U4_AND_ZERO_BY_TABLE;
}

/* `left` bf16, or STEP where there are more; zeros behind them. */
TN_INLINE __m512i load_step(const uint16_t *from, int64_t left) {
    const __mmask32 mask = left >= STEP ? ~0u : (1u << left) - 1;
    return _mm512_maskz_loadu_epi16(mask, from);
}

/* ---- blocks of K ---- */

/* Elements [begin, begin + count) of K, and the groups of scales that lie in them. */
typedef struct {
    int64_t begin;
    int count, steps;
    int64_t num_groups;  /* of a column */
    int64_t first_group;
    int left;            /* elements of the first group that are in the block */
    int groups;
    bool begins, ends; /* a chain */
} block_t;

static bool is_grouped(const tn_matrix *w) { return is_bytes(w) && w->group_size < w->num_in; }

static block_t block_at(const tn_matrix *w, int64_t begin, int64_t most) {
    int64_t end = least(begin + most, w->num_in);
    block_t block = {.begin = begin, .begins = begin == 0};
    if (w->scale != NULL) {
        const uint32_t size = (uint32_t)w->group_size; /* divisions take three times as long in 64 bits */
        block.num_groups = groups_of(w);
        block.first_group = (uint32_t)begin / size;
        const int64_t group_end = least((block.first_group + 1) * w->group_size, w->num_in);
        block.ends = end >= group_end;
        if (is_grouped(w)) {
            end = least(end, group_end);
            block.begins = begin == block.first_group * w->group_size;
        }
        block.left = (int)(least(group_end, end) - begin);
        block.groups = (int)((uint32_t)(end - 1) / size - block.first_group) + 1;
    }
    if (!is_grouped(w)) block.ends = end == w->num_in;
    block.count = (int)(end - begin);
    block.steps = (block.count + STEP - 1) / STEP;
    return block;
}

/* ---- strips ---- */

/* 32 columns of a block of K. */
typedef struct {
    _Alignas(4096) uint16_t tiles[MAX_BLOCK / STEP][2][SIDE * STEP]; /* widened */
    const char *column[STRIP]; /* the block's first element; the last column stands for missing ones. By table: of the first */
    const char *more[STRIP];   /* of E2M1: its scales in the block */
    float scale[STRIP][MAX_GROUPS];
    float level[STRIP][MAX_GROUPS];  /* of U4, that means 0: where not all of them are 8 */
    const uint16_t (*levels)[U4_LEVELS]; /* the table of U4 */
    const uint16_t *scales;          /* of U4 by table: the first column's, where they lie, */
    const uint8_t *zeros;            /* and its zeros, if they are not 8; */
    int64_t num_groups;              /* from one column's to the next one's, */
    int scale_bytes;                 /* and of a unit of all columns */
    int64_t next_scales;             /* bytes from the scales of U4 by table, or of E2M1, to those of a later strip */
    int zero[STRIP];                 /* of I8 */
    const float *codes;              /* of codes: what they mean */
    int64_t stride;                  /* bytes from a column to the next, where they are taken from where they are */
    int64_t next_bytes;              /* from this strip to a later one, which memory is asked for meanwhile */
    const char *ahead;               /* where that one's elements of the block are, if its columns are adjacent */
    int mask;                        /* of steps: those of a ring take each other's places */
    int count, group_size, left;
} strip_t;

/* ---- tables of levels ---- */

enum { E2M1_LEVELS = 16 };

/* (q - zero) * scale of U4, rounded to bf16, for each scale of 16 bits; q - zero is -16 to 15. Of a scale and a zero, the
 * sixteen levels begin 16 - zero behind the first. A level below the first of all belongs to the guard. */
typedef struct {
    pthread_once_t once;
    _Alignas(64) uint16_t guard[U4_LEVELS], levels[1 << 16][U4_LEVELS];
} u4_table_t;

static u4_table_t bf16_table = {.once = PTHREAD_ONCE_INIT}, f16_table = {.once = PTHREAD_ONCE_INIT};
static _Alignas(64) uint16_t e2m1_levels[1 << 8][E2M1_LEVELS];

/* Sixteen levels, twice: five bits are looked at, of which one is a neighbour's. */
TN_INLINE __m512i levels_twice(const uint16_t *levels) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)levels));
}

TN_INLINE vf levels_from(float first) {
    return vf_add(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), vf_set(first));
}

static void make_u4(u4_table_t *table, int scale_dtype) {
    for (int bits = 0; bits < 1 << 16; bits++) {
        const uint16_t half = (uint16_t)bits;
        const vf scale = vf_set(float_at(&half, scale_dtype, 0));
        const vf low = vf_mul(levels_from(-16.0f), scale), high = vf_mul(levels_from(0.0f), scale);
        _mm512_storeu_si512(table->levels[bits], (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

static void make_bf16_table(void) { make_u4(&bf16_table, TN_BF16); }
static void make_f16_table(void) { make_u4(&f16_table, TN_F16); }

static void make_e2m1(void) {
    const vf levels = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f,
                                     -4.0f, -6.0f);
    for (int scale = 0; scale < 1 << 8; scale++)
        _mm256_store_si256((void *)e2m1_levels[scale],
                           (__m256i)_mm512_cvtneps_pbh(vf_mul(levels, vf_set(scale_of_e8m0((uint8_t)scale)))));
}

/* Before levels are read. A table of U4 takes four megabytes, which only who reads it has. */
static void need_levels(const tn_matrix *w) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (w->dtype == TN_E2M1)
        pthread_once(&once, make_e2m1);
    else if (w->scale_dtype == TN_BF16)
        pthread_once(&bf16_table.once, make_bf16_table);
    else
        pthread_once(&f16_table.once, make_f16_table);
}

/* ---- scales of a strip ---- */

/* Scales of a column's groups in the block, and the zeros of U4. */
TN_INLINE void take_groups(strip_t *strip, int c, const tn_matrix *w, const int scale_dtype, int64_t place, int groups) {
    for (int group = 0; group < groups; group += TN_LANES) {
        const int count = lanes_left(groups - group);
        vf_store(strip->scale[c] + group, load_elements(w->scale, scale_dtype, place + group, count));
        if (w->dtype != TN_U4 || w->zero == NULL) continue;
        const __m128i zeros = _mm_maskz_loadu_epi8(v_mask(count), (const uint8_t *)w->zero + place + group);
        vf_store(strip->level[c] + group, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(zeros)));
    }
}

static void take_scales(strip_t *strip, int c, const tn_matrix *w, int64_t column, const block_t *block) {
    const int64_t place = scale_row(w, column) * block->num_groups + block->first_group;
    if (block->groups == 1 && is_bytes(w)) {
        strip->scale[c][0] = float_at(w->scale, w->scale_dtype, place);
        strip->zero[c] = w->zero == NULL ? 0 : ((const int16_t *)w->zero)[place];
        return;
    }
    switch (w->scale_dtype) {
    case TN_BF16: take_groups(strip, c, w, TN_BF16, place, block->groups); return;
    case TN_F16: take_groups(strip, c, w, TN_F16, place, block->groups); return;
    default: take_groups(strip, c, w, TN_F32, place, block->groups);
    }
}

/* All of a column's blocks, into the strip. */
static void round_column(strip_t *strip, int c, int dtype) {
    uint16_t rounded[TN_BLOCK_COLUMNS];
    const char *from = strip->column[c];
    for (int begin = 0, count; begin < strip->count; begin += count) {
        count = (int)least(strip->count - begin, TN_BLOCK_COLUMNS);
        tn_round_blocks(rounded, from + begin / tn_block_columns(dtype) * tn_block_bytes(dtype), count, dtype);
        for (int k = 0; k < count; k += STEP)
            memcpy(&strip->tiles[(begin + k) / STEP][c / SIDE][c % SIDE * STEP], rounded + k, TILE_ROW_BYTES);
    }
}

/* Columns [first, first + num), by table all that a strip has. */
static void begin_strip(strip_t *strip, form_t form, const tn_matrix *w, int64_t first, int num, const block_t *block) {
    strip->stride = bytes_of(w, w->num_in);
    const char *data = (const char *)w->data + bytes_of(w, block->begin);
    const int64_t step = stored_row(w, 1);
    strip->count = block->count;
    strip->group_size = (int)w->group_size;
    strip->left = block->left;
    strip->codes = codes_of(w->dtype);
    strip->next_bytes = (strip->stride > SHORT_ROW ? 1 : 2) * STRIP * step * strip->stride;
    strip->ahead = (const char *)w->data + first * strip->stride + strip->next_bytes + STRIP * bytes_of(w, block->begin);
    const int64_t next_groups = strip->next_bytes / strip->stride * block->num_groups;
    strip->next_scales = next_groups * (w->dtype == TN_E2M1 ? 1 : (int64_t)sizeof(uint16_t));
    if (is_by_table(form)) {
        const int64_t group = first * block->num_groups + block->first_group;
        strip->column[0] = data + first * strip->stride;
        strip->num_groups = block->num_groups;
        strip->levels = w->scale_dtype == TN_BF16 ? bf16_table.levels : f16_table.levels;
        strip->scales = (const uint16_t *)w->scale + group;
        strip->zeros = w->zero == NULL ? NULL : (const uint8_t *)w->zero + group;
        strip->scale_bytes = (int)(STRIP * sizeof(uint16_t) * UNIT / w->group_size);
        return;
    }
    for (int c = 0; c < STRIP; c++) strip->column[c] = data + (first + least(c, num - 1)) * step * strip->stride;
    for (int c = 0; c < STRIP; c++) {
        const int64_t column = first + least(c, num - 1);
        if (w->dtype == TN_E2M1)
            strip->more[c] = (const char *)w->scale + stored_row(w, column) * (w->num_in / STEP) + block->begin / STEP;
        else if (w->scale != NULL)
            take_scales(strip, c, w, column, block);
        else if (form == FROM_BLOCKS)
            round_column(strip, c, w->dtype);
        else if (tn_is_blocks(w->dtype))
            tn_block_scales(strip->scale[c], strip->level[c], strip->column[c], block->count, w->dtype);
    }
}

/* A unit's place within groups, which is gone through in steps of 32. */
typedef struct { int group, left; } place_t;

TN_INLINE void next_step(place_t *place, int group_size) {
    place->left -= STEP;
    if (place->left > 0) return;
    place->left = group_size;
    place->group++;
}

TN_INLINE __m512i e2m1_of(const char *from, __m512i levels) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from));
    const __m512i both = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    return _mm512_permutexvar_epi16(both, levels);
}

/* 32 integers less `zero`, or the `left` first ones; zeros behind them. */
TN_INLINE __m512i i8_of(const int8_t *from, int left, int zero) {
    if (left < STEP) {
        uint16_t rounded[STEP] = {0};
        for (int k = 0; k < left; k++) rounded[k] = bf16_of_f32((float)(from[k] - zero));
        return _mm512_loadu_si512(rounded);
    }
    uint16_t expanded[STEP];
    vb_expand_i8(expanded, from, zero);
    return _mm512_loadu_si512(expanded);
}

/* A unit: where it goes, and the groups that its two steps are in. */
typedef struct {
    uint16_t *to;    /* its two steps in the strip, which are adjacent */
    int unit, left;  /* elements from it on */
    int first_group, second_group;
    /* Of U4 by table, of the first column that is not widened yet: */
    const char *from;
    const uint16_t *scale;
    const uint8_t *zero;
} unit_t;

/* 64 elements of one column, or with !is_whole those that are `left`, as bf16. */
TN_INLINE void widen_column(const form_t form, const bool is_whole, const strip_t *strip, int c, const unit_t *at,
                            __m512i *low, __m512i *high) {
    const bool has_second = is_whole || at->left > STEP;
    const int left = is_whole ? UNIT : at->left;
    const char *from = strip->column[c];
    *high = _mm512_setzero_si512();
    switch (form) {
    case FROM_BF16: {
        const uint16_t *own = (const uint16_t *)from + at->unit * UNIT;
        *low = load_step(own, left);
        if (has_second) *high = load_step(own + STEP, left - STEP);
        return;
    }
    case FROM_I8_AND_ZERO: {
        const int8_t *own = (const int8_t *)from + at->unit * UNIT;
        const int zero = strip->zero[c];
        *low = i8_of(own, left, zero);
        if (has_second) *high = i8_of(own + STEP, left - STEP, zero);
        return;
    }
    case FROM_E4M3: {
        const uint8_t *own = (const uint8_t *)from + at->unit * UNIT;
        *low = (__m512i)(left < STEP ? vb_load_e4m3_part(own, left) : vb_load_e4m3(own));
        if (!has_second) return;
        *high = (__m512i)(left < UNIT ? vb_load_e4m3_part(own + STEP, left - STEP) : vb_load_e4m3(own + STEP));
        return;
    }
    case FROM_U4:
    case FROM_U4_AND_ZERO: {
        const float *scale = strip->scale[c], *level = strip->level[c];
        const bool has_zero = form == FROM_U4_AND_ZERO;
        const vf first = vf_mul(levels_from(has_zero ? -level[at->first_group] : -8.0f), vf_set(scale[at->first_group]));
        const vf second = vf_mul(levels_from(has_zero ? -level[at->second_group] : -8.0f), vf_set(scale[at->second_group]));
        vb both[2];
        vb_load_u4((const uint8_t *)from + at->unit * (UNIT / 2), (__m512i)_mm512_cvtne2ps_pbh(first, second), &both[0],
                   &both[1]);
        *low = (__m512i)both[0];
        *high = (__m512i)both[1];
        return;
    }
    case FROM_CODES: {
        const uint8_t *own = (const uint8_t *)from + at->unit * (UNIT / 2);
        const vb_levels levels = vb_levels_of_codes(strip->codes, strip->scale[c][at->first_group]);
        *low = (__m512i)vb_load_codes(own, levels);
        *high = (__m512i)vb_load_codes(own + STEP / 2, levels);
        return;
    }
    case FROM_Q4_K:
    case FROM_Q5_K:
    case FROM_Q6_K: {
        const int dtype = form == FROM_Q4_K ? TN_Q4_K : form == FROM_Q5_K ? TN_Q5_K : TN_Q6_K;
        const int runs = tn_block_columns(dtype) / UNIT;
        const uint8_t *block = (const uint8_t *)from + at->unit / runs * tn_block_bytes(dtype);
        const int run = at->unit % runs, group = at->unit * (UNIT / tn_block_group(dtype));
        const float *scale = strip->scale[c] + group, *offset = strip->level[c] + group;
        vb both[2];
        if (form == FROM_Q4_K) vb_load_q4_k(block, run, scale, offset, &both[0], &both[1]);
        if (form == FROM_Q5_K) vb_load_q5_k(block, run, scale, offset, &both[0], &both[1]);
        if (form == FROM_Q6_K) vb_load_q6_k(block, run, scale, &both[0], &both[1]);
        *low = (__m512i)both[0];
        *high = (__m512i)both[1];
        return;
    }
    default: {
        const char *own = from + at->unit * (UNIT / 2);
        const uint8_t *scales = (const uint8_t *)strip->more[c] + 2 * at->unit;
        *low = e2m1_of(own, levels_twice(e2m1_levels[scales[0]]));
        if (has_second) *high = e2m1_of(own + STEP / 2, levels_twice(e2m1_levels[scales[1]]));
    }
    }
}

/* A unit of the strip, as `widen` takes it in quarters of 8 columns, ascending. */
TN_INLINE unit_t unit_at(const form_t form, strip_t *strip, int unit, place_t *place) {
    unit_t at = {.to = strip->tiles[(2 * unit) & strip->mask][0], .unit = unit, .left = strip->count - unit * UNIT};
    if (form == FROM_U4 || form == FROM_U4_AND_ZERO || is_by_table(form) || form == FROM_CODES) {
        at.first_group = place->group;
        next_step(place, strip->group_size);
        at.second_group = place->group;
        next_step(place, strip->group_size);
    }
    if (is_by_table(form)) {
        at.from = strip->column[0] + unit * (UNIT / 2);
        at.scale = strip->scales + at.first_group;
        at.zero = strip->zeros + at.first_group;
    }
    return at;
}

/* Bytes of a unit of one column. */
TN_INLINE int unit_bytes(const form_t form) {
    switch (form) {
    case FROM_BF16: return 2 * UNIT;
    case FROM_I8_AND_ZERO:
    case FROM_E4M3: return UNIT;
    case FROM_Q4_K: return tn_block_bytes(TN_Q4_K) * UNIT / tn_block_columns(TN_Q4_K);
    case FROM_Q5_K: return tn_block_bytes(TN_Q5_K) * UNIT / tn_block_columns(TN_Q5_K);
    case FROM_Q6_K: return tn_block_bytes(TN_Q6_K) * UNIT / tn_block_columns(TN_Q6_K);
    default: return UNIT / 2;
    }
}

/* Asks memory for a quarter of a unit of a later strip, in the order in which it lies there. */
TN_INLINE void ask_ahead(const form_t form, const strip_t *strip, int unit, int quarter) {
    if (form == FROM_E2M1) { /* columns may be apart; a line has two units */
        for (int c = quarter * (STRIP / 4); c < (quarter + 1) * (STRIP / 4) && unit % 2 == quarter / 2; c++)
            _mm_prefetch(strip->column[c] + unit * (UNIT / 2) + strip->next_bytes, _MM_HINT_T1);
        for (int c = quarter * (STRIP / 4); c < (quarter + 1) * (STRIP / 4) && unit % (LINE / 2) == 0; c++)
            _mm_prefetch(strip->more[c] + 2 * unit + strip->next_scales, _MM_HINT_T1);
        return;
    }
    if (is_by_table(form) && quarter == 0)
        for (int k = 0; k < strip->scale_bytes; k += LINE)
            _mm_prefetch((const char *)strip->scales + strip->next_scales + unit * strip->scale_bytes + k, _MM_HINT_T1);
    const int bytes = STRIP / 4 * unit_bytes(form);
    const char *from = strip->ahead + (unit * 4 + quarter) * bytes;
    for (int k = 0; k < bytes; k += LINE) _mm_prefetch(from + k, _MM_HINT_T1);
}

/* The next columns of a unit of U4 by table. */
TN_INLINE void widen_by_table(const form_t form, const strip_t *strip, const int num, unit_t *at, uint16_t *first,
                              uint16_t *second) {
    const bool is_wide = form != FROM_U4_BY_TABLE, has_zero = form == FROM_WIDE_U4_AND_ZERO_BY_TABLE;
    const int64_t stride = strip->stride, num_groups = strip->num_groups; /* not read again after each store */
    const uint16_t (*levels)[U4_LEVELS] = strip->levels;
    const int to_second = at->second_group - at->first_group;
#pragma GCC unroll 8
    for (int c = 0; c < num; c++) {
        const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)at->from));
        const int begin = has_zero ? 16 - *at->zero % U4_LEVELS : 8; /* also where a zero is not what it may be */
        const __m512i low = levels_twice(levels[at->scale[0]] + begin);
        const __m512i high = is_wide ? low : levels_twice(levels[at->scale[to_second]] + begin);
        _mm512_store_si512(first + c * STEP, _mm512_permutexvar_epi16(bytes, low));
        _mm512_store_si512(second + c * STEP, _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), high));
        at->from += stride;
        at->scale += num_groups;
        if (has_zero) at->zero += num_groups;
    }
}

TN_INLINE void widen_quarter(const form_t form, const bool is_whole, const strip_t *strip, int quarter, unit_t *at) {
    enum { NUM = STRIP / 4 };
    uint16_t *first = at->to + quarter * NUM * STEP, *second = first + STRIP * STEP;
    ask_ahead(form, strip, at->unit, quarter);
    if (is_by_table(form)) {
        widen_by_table(form, strip, NUM, at, first, second);
        return;
    }
#pragma GCC unroll 8
    for (int c = 0; c < NUM; c++) {
        __m512i low, high;
        widen_column(form, is_whole, strip, quarter * NUM + c, at, &low, &high);
        _mm512_store_si512(first + c * STEP, low);
        _mm512_store_si512(second + c * STEP, high);
    }
}

/* 64 elements of 8 columns, or those that are left; by table they are always there. */
TN_INLINE void widen(const form_t form, const strip_t *strip, int quarter, unit_t *at) {
    if (is_by_table(form) || at->left >= UNIT)
        widen_quarter(form, true, strip, quarter, at);
    else
        widen_quarter(form, false, strip, quarter, at);
}

#endif
