/* Products by tiles (isa_amx.h): out (rows, columns) = x (rows, K) times w (columns, K).
 *
 * Tiles compute the result's transpose. Weights are the operand `a`, 16 columns of 32 elements as they lie in memory;
 * inputs are `b`, packed: 16 pairs of elements by 16 rows. Other weights than bf16 are widened into a strip of tiles while
 * the tiles before them are multiplied; integers of 8 bits without zeros are multiplied as such (integer_tiles.c).
 *
 * An element of the result is one chain over K in steps of 32, ascending: c = c + (even + odd), from +0; elements behind
 * K are zeros on both sides. Where E4M3, or I8 with zeros, has several groups of scales, each has a chain of its own, and
 * total = fma(chain, scale, total), ascending; with one scale a column, the sum is multiplied with it. Others are scaled
 * first, and rounded to bf16, which is exact for MXFP4 within the range of bf16. A chain can be stored and loaded again:
 * neither blocks of K, nor rows, columns or threads change a bit.
 *
 * Work is cut into panels: some rows and some columns, whose sums are kept while K is gone through in blocks. A block of a
 * panel's inputs stays in the second cache, and a strip of 32 columns in the first or second one while all rows are
 * multiplied with it, 32 at a time, by four tiles of sums. */
#include "tiles.h"

#include "isa.h"

#if TN_TILES

#include <assert.h>
#include <string.h>

#include "integer_tiles.h"
#include "isa_amx.h"
#include "tile_results.h"
#include "weights.h"

enum {
    STEP = 32,          /* elements of K in a tile */
    UNIT = 64,          /* elements that are widened together: a run of U4 */
    SIDE = TN_TILE_SIDE,
    STRIP = TN_TILES_COLUMNS,
    BLOCK_ROWS = TN_BLOCK_ROWS,
    PANEL_ROWS = 512,
    PANEL_COLUMNS = 256,
    MAX_BLOCK = 1280,   /* elements of K that are in a strip; a multiple of a unit */
    IN_PLACE_ROWS = 64, /* with more, bf16 are copied into a strip: there they share no places of the first cache */
    MAX_GROUPS = MAX_BLOCK / SIDE + 16, /* of 16 elements at least; one more than are whole; in vectors */
    RING = 4,           /* units of a strip that only one block of rows needs */
    PIECE_STEPS = 16,   /* of a tile of rows: what is packed at a time */
    MANY_ROWS = 128,
};

typedef enum { IN_PLACE, STRIP_ONLY, FROM_BF16, FROM_I8_AND_ZERO, FROM_U4, FROM_U4_AND_ZERO,
               FROM_CODES, FROM_E2M1, FROM_E4M3, FROM_Q4_K, FROM_Q5_K, FROM_Q6_K, FROM_BLOCKS } form_t;

/* ---- the tiles of a thread ---- */

#if defined(TN_SOFT_TILES)
_Thread_local bool tn_soft_halves;
#endif

static _Thread_local tn_tile_shape shape_now;

void tn_tiles_begin(tn_tile_shape shape) {
    if (shape_now == shape) return;
    tiles_configure(shape == TN_HALF_TILES);
    shape_now = shape;
}

void tn_tiles_end(void) {
    if (shape_now == TN_NO_TILES) return;
    tiles_release();
    shape_now = TN_NO_TILES;
}

/* ---- packing ---- */

/* `left` bf16, or STEP where there are more; zeros behind them. */
TN_INLINE __m512i load_step(const uint16_t *from, int64_t left) {
    const __mmask32 mask = left >= STEP ? ~0u : (1u << left) - 1;
    return _mm512_maskz_loadu_epi16(mask, from);
}

static int64_t pairs_bytes(int64_t num_rows, int64_t num_in) { return round_up(num_rows, SIDE) * round_up(num_in, STEP) * 2; }

int64_t tn_packed_bytes(int64_t num_rows, int64_t num_in) {
    return pairs_bytes(num_rows, num_in) + tn_integers_bytes(num_rows, num_in);
}

static void *integers_in(void *packed, int64_t num_rows, int64_t num_in) {
    return (char *)packed + pairs_bytes(num_rows, num_in);
}

/* Steps of a tile of rows that are packed at a time: all of many rows, whose largest numbers are then looked for once. */
static int64_t steps_of_piece(int64_t num_rows, int64_t num_in) {
    return num_rows > MANY_ROWS ? (num_in + STEP - 1) / STEP : PIECE_STEPS;
}

static int64_t pieces_of_tile(int64_t num_rows, int64_t num_in) {
    const int64_t elements = STEP * steps_of_piece(num_rows, num_in);
    return (num_in + elements - 1) / elements;
}

int64_t tn_pack_pieces(int64_t num_rows, int64_t num_in) {
    return (num_rows + SIDE - 1) / SIDE * pieces_of_tile(num_rows, num_in);
}

/* Steps [begin, end) of a tile of rows: (steps, 16 pairs, 16 rows, 2). */
static void pack_pairs(uint16_t *packed, const uint16_t *x, int64_t x_stride, int64_t num_rows, int64_t num_in, int64_t tile,
                       int64_t begin, int64_t end) {
    const int64_t steps = (num_in + STEP - 1) / STEP, rows = least(num_rows - tile * SIDE, SIDE);
    const uint16_t *from = x + tile * SIDE * x_stride;
    for (int64_t step = begin; step < end; step++) {
        __m512i r[SIDE];
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++)
            r[i] = i < rows ? load_step(from + i * x_stride + step * STEP, num_in - step * STEP) : _mm512_setzero_si512();
        transpose(r);
        uint16_t *to = packed + (tile * steps + step) * (TILE_BYTES / 2);
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++) _mm512_store_si512(to + i * STEP, r[i]);
    }
}

void tn_pack(int forms, void *packed, const void *x, int64_t x_stride, int64_t num_rows, int64_t num_in, int64_t piece) {
    const int64_t pieces = pieces_of_tile(num_rows, num_in), tile = piece / pieces, steps = (num_in + STEP - 1) / STEP;
    const int64_t size = steps_of_piece(num_rows, num_in), begin = piece % pieces * size, end = least(begin + size, steps);
    if (forms & TN_PAIRS) pack_pairs(packed, x, x_stride, num_rows, num_in, tile, begin, end);
    if (forms & TN_INTEGERS)
        tn_pack_integers(integers_in(packed, num_rows, num_in), x, x_stride, num_rows, num_in, tile, begin * STEP,
                         least(end * STEP, num_in));
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
    const char *column[STRIP]; /* the block's first element; the last column stands for missing ones */
    const char *more[STRIP];   /* of E2M1: its scales in the block */
    float scale[STRIP][MAX_GROUPS];
    float level[STRIP][MAX_GROUPS]; /* of U4, that means 0: where not all of them are 8 */
    int zero[STRIP];                 /* of I8 */
    const float *codes;              /* of codes: what they mean */
    int64_t stride;                  /* bytes from a column to the next, where they are taken from where they are */
    int64_t next_bytes;              /* from each element to the one in the next strip, which is asked for meanwhile */
    int mask;                        /* of steps: those of a ring take each other's places */
    int count, group_size, left;
} strip_t;

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

/* Columns [first, first + num). */
static void begin_strip(strip_t *strip, const form_t form, const tn_matrix *w, int64_t first, int num, const block_t *block) {
    strip->stride = bytes_of(w, w->num_in);
    strip->next_bytes = STRIP * stored_row(w, 1) * strip->stride;
    strip->count = block->count;
    strip->group_size = (int)w->group_size;
    strip->left = block->left;
    strip->codes = codes_of(w->dtype);
    for (int c = 0; c < STRIP; c++) {
        const int64_t column = first + (c < num ? c : num - 1), row = stored_row(w, column);
        strip->column[c] = (const char *)w->data + bytes_of(w, row * w->num_in + block->begin);
        if (w->dtype == TN_E2M1)
            strip->more[c] = (const char *)w->scale + row * (w->num_in / STEP) + block->begin / STEP;
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

/* The sixteen levels less `zero`, scaled. */
TN_INLINE vf levels_of_u4(float scale, float zero) {
    const vf levels = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return vf_mul(vf_sub(levels, vf_set(zero)), vf_set(scale));
}

TN_INLINE vb levels_of_e2m1(float scale) {
    const vf table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                                    -3.0f, -4.0f, -6.0f);
    const vf levels = vf_mul(table, vf_set(scale));
    return _mm512_cvtne2ps_pbh(levels, levels); /* twice: five bits are looked at, of which one is the neighbour's */
}

TN_INLINE __m512i e2m1_of(const char *from, vb levels) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from));
    const __m512i both = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    return _mm512_permutexvar_epi16(both, (__m512i)levels);
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

/* A unit of 16 columns: where it lies, and the groups that its two steps are in. */
typedef struct {
    int unit, left; /* elements from it on */
    int first_group, second_group;
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
        _mm_prefetch((const char *)own + strip->next_bytes, _MM_HINT_T1);
        _mm_prefetch((const char *)own + strip->next_bytes + TILE_ROW_BYTES, _MM_HINT_T1);
        *low = load_step(own, left);
        if (has_second) *high = load_step(own + STEP, left - STEP);
        return;
    }
    case FROM_I8_AND_ZERO: {
        const int8_t *own = (const int8_t *)from + at->unit * UNIT;
        const int zero = strip->zero[c];
        _mm_prefetch((const char *)(own + strip->next_bytes), _MM_HINT_T1);
        *low = i8_of(own, left, zero);
        if (has_second) *high = i8_of(own + STEP, left - STEP, zero);
        return;
    }
    case FROM_E4M3: {
        const uint8_t *own = (const uint8_t *)from + at->unit * UNIT;
        _mm_prefetch((const char *)(own + strip->next_bytes), _MM_HINT_T1);
        *low = (__m512i)(left < STEP ? vb_load_e4m3_part(own, left) : vb_load_e4m3(own));
        if (!has_second) return;
        *high = (__m512i)(left < UNIT ? vb_load_e4m3_part(own + STEP, left - STEP) : vb_load_e4m3(own + STEP));
        return;
    }
    case FROM_U4:
    case FROM_U4_AND_ZERO: {
        const float *scale = strip->scale[c], *level = strip->level[c];
        const bool has_zero = form == FROM_U4_AND_ZERO;
        if (at->unit % 2 == 0) _mm_prefetch((const char *)(from + at->unit * (UNIT / 2) + strip->next_bytes), _MM_HINT_T1);
        const vf first = levels_of_u4(scale[at->first_group], has_zero ? level[at->first_group] : 8.0f);
        const vf second = levels_of_u4(scale[at->second_group], has_zero ? level[at->second_group] : 8.0f);
        vb both[2];
        vb_load_u4((const uint8_t *)from + at->unit * (UNIT / 2), (__m512i)_mm512_cvtne2ps_pbh(first, second), &both[0],
                   &both[1]);
        *low = (__m512i)both[0];
        *high = (__m512i)both[1];
        return;
    }
    case FROM_CODES: {
        const uint8_t *own = (const uint8_t *)from + at->unit * (UNIT / 2);
        if (at->unit % 2 == 0) _mm_prefetch((const char *)(own + strip->next_bytes), _MM_HINT_T1);
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
        _mm_prefetch((const char *)(block + run * (tn_block_bytes(dtype) / runs) + strip->next_bytes), _MM_HINT_T1);
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
        if (at->unit % 2 == 0) _mm_prefetch((const char *)(own + strip->next_bytes), _MM_HINT_T1);
        *low = e2m1_of(own, levels_of_e2m1(scale_of_e8m0(scales[0])));
        if (has_second) *high = e2m1_of(own + STEP / 2, levels_of_e2m1(scale_of_e8m0(scales[1])));
    }
    }
}

/* A unit of the strip, as `widen` takes it in quarters of 8 columns. */
TN_INLINE unit_t unit_at(const form_t form, const strip_t *strip, int unit, place_t *place) {
    unit_t at = {.unit = unit, .left = strip->count - unit * UNIT};
    if (form == FROM_U4 || form == FROM_U4_AND_ZERO || form == FROM_CODES) {
        at.first_group = place->group;
        next_step(place, strip->group_size);
        at.second_group = place->group;
        next_step(place, strip->group_size);
    }
    return at;
}

TN_INLINE void widen_quarter(const form_t form, const bool is_whole, strip_t *strip, int quarter, const unit_t *at) {
    enum { NUM = STRIP / 4 };
    const int place = quarter % 2 * NUM * STEP, half = quarter / 2;
    uint16_t *first = strip->tiles[(2 * at->unit) & strip->mask][half] + place;
    uint16_t *second = strip->tiles[(2 * at->unit + 1) & strip->mask][half] + place;
#pragma GCC unroll 8
    for (int c = 0; c < NUM; c++) {
        __m512i low, high;
        widen_column(form, is_whole, strip, quarter * NUM + c, at, &low, &high);
        _mm512_store_si512(first + c * STEP, low);
        _mm512_store_si512(second + c * STEP, high);
    }
}

/* 64 elements of 8 columns, or those that are left. */
TN_INLINE void widen(const form_t form, strip_t *strip, int quarter, const unit_t *at) {
    if (at->left >= UNIT)
        widen_quarter(form, true, strip, quarter, at);
    else
        widen_quarter(form, false, strip, quarter, at);
}

/* ---- sums ---- */

/* Of the tiles' registers: sums 0 to 3 are [half of the columns][half of the rows]; 4 and 5 weights, 6 and 7 inputs. */
TN_INLINE void zero_sums(const bool two) {
    tile_zero(0);
    tile_zero(2);
    if (!two) return;
    tile_zero(1);
    tile_zero(3);
}

TN_INLINE void load_sums(const bool two, const tn_tile_sums sums) {
    tile_load(0, sums[0], sizeof sums[0]);
    tile_load(2, sums[SIDE], sizeof sums[0]);
    if (!two) return;
    tile_load(1, sums[0] + SIDE, sizeof sums[0]);
    tile_load(3, sums[SIDE] + SIDE, sizeof sums[0]);
}

TN_INLINE void store_sums(const bool two, tn_tile_sums sums) {
    tile_store(0, sums[0], sizeof sums[0]);
    tile_store(2, sums[SIDE], sizeof sums[0]);
    if (!two) return;
    tile_store(1, sums[0] + SIDE, sizeof sums[0]);
    tile_store(3, sums[SIDE] + SIDE, sizeof sums[0]);
}

/* Packed inputs of a block for one or two tiles of rows. */
typedef struct {
    const uint16_t *x;
    int64_t tile; /* elements, from the first tile of rows to the second */
} inputs_t;

/* One step: `w` are 16 columns, and `half` bytes further on the other 16. */
TN_INLINE void multiply(const bool two, const char *w, int64_t stride, int64_t half, const inputs_t *inputs, int step) {
    const uint16_t *x = inputs->x + step * (TILE_BYTES / 2);
    tile_load(6, x, TILE_ROW_BYTES);
    tile_load(4, w, stride);
    tile_dot(0, 4, 6);
    tile_load(5, w + half, stride);
    tile_dot(2, 5, 6);
    if (!two) return;
    tile_load(7, x + inputs->tile, TILE_ROW_BYTES);
    tile_dot(1, 4, 7);
    tile_dot(3, 5, 7);
}

TN_INLINE void multiply_in_strip(const bool two, const strip_t *strip, const inputs_t *inputs, int step) {
    multiply(two, (const char *)strip->tiles[step & strip->mask][0], TILE_ROW_BYTES, TILE_BYTES, inputs, step);
}

/* Steps [begin, end) of weights that are there. */
TN_INLINE void sum_there(const bool in_place, const bool two, const strip_t *strip,
                         const inputs_t *inputs, int begin, int end) {
    const char *w = strip->column[0];
    for (int step = begin; step < end; step++) {
        if (!in_place) {
            multiply_in_strip(two, strip, inputs, step);
            continue;
        }
        multiply(two, w + step * TILE_ROW_BYTES, strip->stride, SIDE * strip->stride, inputs, step);
    }
}

/* One of the two halves of the columns in one step of the strip; the first half loads the inputs of both. */
TN_INLINE void multiply_half(const bool two, const strip_t *strip, const inputs_t *inputs, int step, const int half) {
    const void *w = strip->tiles[step & strip->mask][half];
    const uint16_t *x = inputs->x + step * (TILE_BYTES / 2);
    if (half == 0) {
        tile_load(6, x, TILE_ROW_BYTES);
        if (two) tile_load(7, x + inputs->tile, TILE_ROW_BYTES);
        tile_load(4, w, TILE_ROW_BYTES);
        tile_dot(0, 4, 6);
        if (two) tile_dot(1, 4, 7);
    } else {
        tile_load(5, w, TILE_ROW_BYTES);
        tile_dot(2, 5, 6);
        if (two) tile_dot(3, 5, 7);
    }
}

/* All steps of weights that are widened. Each unit is multiplied while the next one is widened, in turns so short that the
 * processor has both in sight. */
TN_INLINE void sum_widened(const form_t form, const bool two, strip_t *strip, const inputs_t *inputs) {
    place_t place = {0, strip->left};
    const int steps = (strip->count + STEP - 1) / STEP, units = (steps + 1) / 2;
    unit_t at = unit_at(form, strip, 0, &place);
    for (int quarter = 0; quarter < 4; quarter++) widen(form, strip, quarter, &at);
    for (int unit = 1; unit < units; unit++) {
        at = unit_at(form, strip, unit, &place);
        widen(form, strip, 0, &at);
        multiply_half(two, strip, inputs, 2 * unit - 2, 0);
        widen(form, strip, 1, &at);
        multiply_half(two, strip, inputs, 2 * unit - 2, 1);
        widen(form, strip, 2, &at);
        multiply_half(two, strip, inputs, 2 * unit - 1, 0);
        widen(form, strip, 3, &at);
        multiply_half(two, strip, inputs, 2 * unit - 1, 1);
    }
    for (int step = 2 * units - 2; step < steps; step++) multiply_in_strip(two, strip, inputs, step);
}

/* ---- panels ---- */

typedef struct {
    const tn_linear_args *args;
    form_t form;
    int64_t row, first;
    int rows, num;
    bool is_grouped;
    strip_t strip;
    _Alignas(64) tn_tile_sums group; /* sums of one group */
    _Alignas(64) tn_tile_sums sums[PANEL_COLUMNS / STRIP][PANEL_ROWS / BLOCK_ROWS];
    float bias[PANEL_COLUMNS + SIDE], scale[PANEL_COLUMNS + SIDE]; /* of columns */
    tn_tile_result pending[4]; /* results to finish while tiles multiply */
    int num_pending;
} panel_t;

/* One block of K for 32 rows. */
TN_INLINE void sum_rows(const form_t form, const bool two, panel_t *panel, const inputs_t *inputs) {
    strip_t *strip = &panel->strip;
    if (form != IN_PLACE && form != STRIP_ONLY) {
        sum_widened(form, two, strip, inputs);
        return;
    }
    const int steps = (strip->count + STEP - 1) / STEP, num = panel->num_pending;
    int done = 0;
    for (int n = 0; n < num; n++) {
        const int until = steps * (n + 1) / (num + 1);
        sum_there(form == IN_PLACE, two, strip, inputs, done, until);
        done = until;
        tn_finish_tile(panel->args, &panel->pending[n]);
    }
    panel->num_pending = 0;
    sum_there(form == IN_PLACE, two, strip, inputs, done, steps);
}

static void finish_pending(panel_t *panel) {
    for (int n = 0; n < panel->num_pending; n++) tn_finish_tile(panel->args, &panel->pending[n]);
    panel->num_pending = 0;
}

/* total = fma(group, scale, total), of the group that a block has ended. */
static void add_group(panel_t *panel, tn_tile_sums total, bool is_first) {
    for (int c = 0; c < STRIP; c++) {
        const vf scale = vf_set(panel->strip.scale[c][0]);
        for (int row = 0; row < BLOCK_ROWS; row += SIDE) {
            const vf before = is_first ? vf_zero() : vf_load(total[c] + row);
            vf_store(total[c] + row, vf_fma(vf_load(panel->group[c] + row), scale, before));
        }
    }
}

TN_INLINE void sum_form(const form_t form, panel_t *panel, const inputs_t *inputs, bool two) {
    if (two)
        sum_rows(form, true, panel, inputs);
    else
        sum_rows(form, false, panel, inputs);
}

static void sum_any(form_t form, panel_t *panel, const inputs_t *inputs, bool two) {
    switch (form) {
    case IN_PLACE: sum_form(IN_PLACE, panel, inputs, two); return;
    case STRIP_ONLY: sum_form(STRIP_ONLY, panel, inputs, two); return;
    case FROM_BF16: sum_form(FROM_BF16, panel, inputs, two); return;
    case FROM_I8_AND_ZERO: sum_form(FROM_I8_AND_ZERO, panel, inputs, two); return;
    case FROM_U4: sum_form(FROM_U4, panel, inputs, two); return;
    case FROM_U4_AND_ZERO: sum_form(FROM_U4_AND_ZERO, panel, inputs, two); return;
    case FROM_CODES: sum_form(FROM_CODES, panel, inputs, two); return;
    case FROM_E4M3: sum_form(FROM_E4M3, panel, inputs, two); return;
    case FROM_Q4_K: sum_form(FROM_Q4_K, panel, inputs, two); return;
    case FROM_Q5_K: sum_form(FROM_Q5_K, panel, inputs, two); return;
    case FROM_Q6_K: sum_form(FROM_Q6_K, panel, inputs, two); return;
    default: sum_form(FROM_E2M1, panel, inputs, two);
    }
}

/* The results of 32 rows of a strip, to finish later. */
static void expect_results(panel_t *panel, int column, int row, const tn_tile_sums sums) {
    const bool is_scaled = is_bytes(panel->args->weight) && !panel->is_grouped;
    const bool has_bias = panel->args->weight->bias != NULL;
    for (int r = 0; r < BLOCK_ROWS && row + r < panel->rows; r += SIDE)
        for (int c = 0; c < STRIP && column + c < panel->num; c += SIDE)
            panel->pending[panel->num_pending++] = (tn_tile_result){
                .sums = sums[c] + r,
                .scale = is_scaled ? panel->scale + column + c : NULL,
                .bias = has_bias ? panel->bias + column + c : NULL,
                .row = panel->row + row + r,
                .column = panel->first + column + c,
                .rows = (int)least(panel->rows - row - r, SIDE),
                .columns = panel->num - column - c,
            };
}

/* The strip's columns in one block, of all rows of the panel. */
static void sum_strip(panel_t *panel, int column, const block_t *block) {
    const tn_linear_args *args = panel->args;
    const tn_matrix *w = args->weight;
    const int num = (int)least(panel->num - column, STRIP);
    const int64_t steps = (w->num_in + STEP - 1) / STEP, tile = steps * (TILE_BYTES / 2);
    strip_t *strip = &panel->strip;
    const bool one_block = panel->rows <= BLOCK_ROWS;
    const form_t form = panel->form == IN_PLACE && (num < STRIP || panel->rows > IN_PLACE_ROWS) ? FROM_BF16 : panel->form;
    strip->mask = one_block && form != FROM_BLOCKS ? 2 * RING - 1 : ~0;
    begin_strip(strip, form, w, panel->first + column, num, block);
    for (int row = 0; row < panel->rows; row += BLOCK_ROWS) {
        const bool two = panel->rows - row > SIDE;
        tn_tile_sums *sums = &panel->sums[column / STRIP][row / BLOCK_ROWS];
        tn_tile_sums *chain = panel->is_grouped ? &panel->group : sums;
        const inputs_t inputs = {
            .x = (const uint16_t *)args->packed + ((panel->row + row) / SIDE) * tile + block->begin / STEP * (TILE_BYTES / 2),
            .tile = tile};
        if (block->begins)
            zero_sums(two);
        else if (!one_block)
            load_sums(two, *chain);
        const bool is_widened = form == FROM_BLOCKS || (row > 0 && form != IN_PLACE);
        sum_any(is_widened ? STRIP_ONLY : form, panel, &inputs, two);
        if (one_block && !block->ends) continue;
        finish_pending(panel);
        store_sums(two, *chain);
        if (panel->is_grouped && block->ends) add_group(panel, *sums, block->begin + block->count == w->group_size);
        if (block->begin + block->count == w->num_in) expect_results(panel, column, row, *sums);
    }
    finish_pending(panel);
}

/* Whether a block of K needs no more of a strip than its ring: it has no list of groups. */
static bool is_endless(form_t form) {
    return form == IN_PLACE || form == FROM_I8_AND_ZERO || form == FROM_E4M3 || form == FROM_E2M1;
}

/* Elements of a block: K in equal parts that fit in a strip, or all of it. */
static int64_t block_elements(const panel_t *panel) {
    const int64_t num_in = panel->args->weight->num_in;
    if (panel->rows <= BLOCK_ROWS && is_endless(panel->form)) return num_in;
    const int64_t blocks = (num_in + MAX_BLOCK - 1) / MAX_BLOCK;
    const int columns = tn_block_columns(panel->args->weight->dtype);
    return round_up((num_in + blocks - 1) / blocks, columns > UNIT ? columns : UNIT);
}

static void sum_panel(panel_t *panel) {
    const tn_matrix *w = panel->args->weight;
    const int64_t most = block_elements(panel);
    for (int n = 0; n < panel->num; n++) {
        const int64_t column = panel->first + n;
        if (is_bytes(w) && !panel->is_grouped) panel->scale[n] = float_at(w->scale, w->scale_dtype, scale_row(w, column));
        if (w->bias != NULL) panel->bias[n] = float_at(w->bias, w->bias_dtype, stored_row(w, column));
    }
    if (panel->rows <= BLOCK_ROWS) { /* as they lie in memory; sums stay in their registers */
        for (int column = 0; column < panel->num; column += STRIP)
            for (int64_t begin = 0, end; begin < w->num_in; begin = end) {
                const block_t block = block_at(w, begin, most);
                end = begin + block.count;
                sum_strip(panel, column, &block);
            }
        return;
    }
    for (int64_t begin = 0, end; begin < w->num_in; begin = end) {
        const block_t block = block_at(w, begin, most);
        end = begin + block.count;
        for (int column = 0; column < panel->num; column += STRIP) sum_strip(panel, column, &block);
    }
}

static form_t form_of(const tn_matrix *w) {
    switch (w->dtype) {
    case TN_BF16: return w->num_in % STEP ? FROM_BF16 : IN_PLACE;
    case TN_I8: return FROM_I8_AND_ZERO;
    case TN_U4: return w->zero == NULL ? FROM_U4 : FROM_U4_AND_ZERO;
    case TN_NF4:
    case TN_FP4: return FROM_CODES;
    case TN_E4M3: return FROM_E4M3;
    case TN_E2M1: return FROM_E2M1;
    case TN_Q4_K: return FROM_Q4_K;
    case TN_Q5_K: return FROM_Q5_K;
    case TN_Q6_K: return FROM_Q6_K;
    default: return FROM_BLOCKS;
    }
}

int tn_packed_forms(const tn_matrix *w, int x_dtype) {
    if (x_dtype != TN_BF16) return 0;
    if (tn_takes_integer_tiles(w)) return TN_INTEGERS;
    return w->dtype == TN_BF16 || w->scale != NULL || tn_is_blocks(w->dtype) ? TN_PAIRS : 0;
}

void tn_tiles_columns(const tn_linear_args *args, int64_t begin, int64_t end) {
    if (tn_takes_integer_tiles(args->weight)) {
        tn_integer_columns(args, integers_in(args->packed, args->num_rows, args->weight->num_in), begin, end);
        return;
    }
    panel_t panel;
    panel.args = args;
    panel.form = form_of(args->weight);
    panel.is_grouped = is_grouped(args->weight);
    panel.num_pending = 0;
    tn_tiles_begin(TN_WHOLE_TILES);
    for (panel.row = 0; panel.row < args->num_rows; panel.row += PANEL_ROWS) {
        panel.rows = (int)least(args->num_rows - panel.row, PANEL_ROWS);
        for (panel.first = begin; panel.first < end; panel.first += PANEL_COLUMNS) {
            panel.num = (int)least(end - panel.first, PANEL_COLUMNS);
            sum_panel(&panel);
        }
    }
}

#else

int tn_packed_forms(const tn_matrix *w, int x_dtype) { return (void)w, (void)x_dtype, 0; }
int64_t tn_packed_bytes(int64_t num_rows, int64_t num_in) { return (void)num_rows, (void)num_in, 0; }
void tn_tiles_end(void) {}

#endif
