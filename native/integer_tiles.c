/* Products of bf16 with integers by tiles of integers: out (rows, columns) = x (rows, K) times w (columns, K).
 *
 * A row of inputs is packed as integers of 16 bits: x * 2^(15 - e), rounded to nearest, ties to even, where e is the least
 * for which they are at most 32639, and at least -99. That is exact for inputs of more than 2^-7 times the largest one, and
 * others are off by at most 2^(e - 16). An integer is 256 * high + low, two signed bytes: a tile of weights, 16 columns of
 * 64 integers, is multiplied with both (isa_amx.h).
 *
 * K is cut into segments: the groups that share a scale, or parts of them or of K, as equal as may be, of at most MAX_BLOCK
 * elements. The sums of one are exact: t = fma(high, 256, low), of both as floats, and total = fma(t, scale, total),
 * ascending; where one scale is a column's, total = total + t, and the scale comes last. Then total is multiplied by the
 * row's 2^(e - 15). So neither rows, columns, blocks of K nor threads change a bit. A row with a number that is not finite
 * gives NaN.
 *
 * As with other weights (tiles.c), tiles compute the transpose, and work is cut into panels, whose blocks of inputs stay
 * in the second cache. Few rows take weights from where they are. For more, 32 columns of a block of K are copied into a
 * strip, by the first 16 rows, a step ahead of what they multiply. */
#include "integer_tiles.h"

#include "tile_results.h"
#include "tiles.h"

#if TN_TILES

#include "isa_amx.h"
#include "weights.h"

enum {
    STEP = 64,          /* elements of K in a tile */
    HALF = STEP / 2,    /* … in one of halves, where groups are not whole steps */
    SIDE = TN_TILE_SIDE,
    STRIP = TN_TILES_COLUMNS,
    PANEL_ROWS = 512,
    PANEL_COLUMNS = 256,
    MAX_BLOCK = 1024,   /* elements of K that are in a strip; a multiple of a step */
    IN_PLACE_ROWS = 64, /* with more, weights are copied into a strip: there they share no places of the first cache */
    MAX_SEGMENTS = MAX_BLOCK / HALF,
    MAX_STEPS = MAX_BLOCK / STEP + 1, /* a block may begin and end within a step */
    SHORT_ROW = 1024,   /* bytes of weights: of such rows, the processor does not guess the next ones in time */
    LEAST_EXPONENT = -99,
    FEW_ROWS = SIDE / 2, /* whose high and low bytes make up one tile */
};

/* Where weights are: in their rows, in a strip, or in rows from which a strip is filled. */
typedef enum { IN_PLACE, IN_STRIP, TO_STRIP } form_t;

bool tn_takes_integer_tiles(const tn_matrix *w) { return w->dtype == TN_I8 && w->zero == NULL; }

/* ---- packing ---- */

/* A tile of rows: (steps, high and low, 16 quads, 16 rows, 4) bytes, and a float of each row. If there are no more than
 * FEW_ROWS at all, high and low bytes share a tile: (steps, 16 quads, high and low, 8 rows, 4). */
static int64_t tile_bytes(int64_t num_in) {
    return round_up(num_in, STEP) / STEP * 2 * TILE_BYTES + SIDE * (int64_t)sizeof(float);
}

int64_t tn_integers_bytes(int64_t num_rows, int64_t num_in) { return round_up(num_rows, SIDE) / SIDE * tile_bytes(num_in); }

/* What a row is multiplied by when it is packed, and its results are in the end. */
typedef struct { float power, factor; } powers_t;

static powers_t powers_of(const uint16_t *row, int64_t num_in) {
    enum { BIAS = 127, NOT_FINITE = 255, BITS = 15, FRACTION = 0x7f };
    const __m512i no_sign = _mm512_set1_epi16(0x7fff);
    __m512i most = _mm512_setzero_si512();
    for (int64_t k = 0; k < num_in; k += HALF) {
        const __mmask32 mask = num_in - k >= HALF ? ~0u : (1u << (num_in - k)) - 1;
        most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, row + k), no_sign));
    }
    const __m512i words = _mm512_max_epu32(_mm512_and_si512(most, _mm512_set1_epi32(0xffff)), _mm512_srli_epi32(most, 16));
    const int largest = (int)_mm512_reduce_max_epu32(words);
    const int biased = (largest >> 7) + ((largest & FRACTION) == FRACTION); /* with all bits, it would be 32640 */
    if (largest >> 7 == NOT_FINITE) return (powers_t){0.0f, f32_of_bits(0x7fc00000u)};
    const int exponent = biased - BIAS + 1 > LEAST_EXPONENT ? biased - BIAS + 1 : LEAST_EXPONENT;
    return (powers_t){f32_of_bits((uint32_t)(BIAS + BITS - exponent) << 23),
                      f32_of_bits((uint32_t)(BIAS + exponent - BITS) << 23)};
}

/* 32 inputs, or those that are left. */
TN_INLINE __m512i integers_of(const uint16_t *from, int64_t left, __m512 power) {
    const __mmask32 mask = left >= HALF ? ~0u : left > 0 ? (1u << left) - 1 : 0;
    const __m512i pairs = _mm512_maskz_loadu_epi16(mask, from);
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
    const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(even, power)), high = _mm512_cvtps_epi32(_mm512_mul_ps(odd, power));
    return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16));
}

/* The low bytes, or the high ones, of 64 words. */
TN_INLINE __m512i half_of_words(__m512i first, __m512i second, const bool high) {
#if defined(__AVX512VBMI__)
    __m512i places = _mm512_set_epi8(126, 124, 122, 120, 118, 116, 114, 112, 110, 108, 106, 104, 102, 100, 98, 96, 94, 92, 90,
                                     88, 86, 84, 82, 80, 78, 76, 74, 72, 70, 68, 66, 64, 62, 60, 58, 56, 54, 52, 50, 48, 46,
                                     44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    if (high) places = _mm512_add_epi8(places, _mm512_set1_epi8(1));
    return _mm512_permutex2var_epi8(first, places, second);
#else
    if (high) first = _mm512_srli_epi16(first, 8), second = _mm512_srli_epi16(second, 8);
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(first)), _mm512_cvtepi16_epi8(second), 1);
#endif
}

/* The high and the low bytes of 64 inputs, or of those that are left. */
TN_INLINE void split_step(const uint16_t *from, int64_t left, __m512 power, __m512i *high, __m512i *low) {
    const __m512i first = integers_of(from, left, power), second = integers_of(from + HALF, left - HALF, power);
    const __m512i middle = _mm512_set1_epi16(128);
    *low = half_of_words(first, second, false);
    *high = half_of_words(_mm512_add_epi16(first, middle), _mm512_add_epi16(second, middle), true);
}

void tn_pack_integers(void *packed, const void *x, int64_t x_stride, int64_t num_rows, int64_t num_in, int64_t tile,
                      int64_t begin, int64_t end) {
    const int64_t rows = least(num_rows - tile * SIDE, SIDE);
    const uint16_t *from = (const uint16_t *)x + tile * SIDE * x_stride;
    char *to = (char *)packed + tile * tile_bytes(num_in);
    powers_t powers[SIDE] = {0};
    for (int64_t i = 0; i < rows; i++) powers[i] = powers_of(from + i * x_stride, num_in);
    if (begin == 0)
        for (int i = 0; i < SIDE; i++) ((float *)(to + tile_bytes(num_in)))[i - SIDE] = powers[i].factor;
    for (int64_t k = begin; k < end; k += STEP) {
        __m512i high[SIDE], low[SIDE];
        for (int i = 0; i < SIDE; i++) {
            high[i] = low[i] = _mm512_setzero_si512();
            if (i < rows && powers[i].power != 0.0f)
                split_step(from + i * x_stride + k, num_in - k, _mm512_set1_ps(powers[i].power), &high[i], &low[i]);
        }
        const bool few = num_rows <= FEW_ROWS;
        char *step = to + k / STEP * (few ? TILE_BYTES : 2 * TILE_BYTES);
        for (int i = 0; few && i < FEW_ROWS; i++) high[FEW_ROWS + i] = low[i];
        transpose(high);
        for (int i = 0; i < SIDE; i++) _mm512_store_si512(step + i * TILE_ROW_BYTES, high[i]);
        if (few) continue;
        transpose(low);
        for (int i = 0; i < SIDE; i++) _mm512_store_si512(step + TILE_BYTES + i * TILE_ROW_BYTES, low[i]);
    }
}

/* ---- blocks of K ---- */

/* Elements [begin, end) of a strip, of the block's group number `group`. */
typedef struct { int begin, end, group; } segment_t;

typedef struct {
    int64_t first; /* element of K where strips begin: a multiple of a step */
    int64_t end;
    int64_t first_group, num_groups; /* in the block; of a column */
    int groups, num;
    segment_t segment[MAX_SEGMENTS];
} block_t;

static bool is_grouped(const tn_matrix *w) { return w->group_size < w->num_in; }
static bool is_halved(const tn_matrix *w) { return is_grouped(w) && w->group_size % STEP != 0; }

/* Elements of segments; the last one of a group may have fewer. */
static int64_t segment_elements(const tn_matrix *w) {
    const int64_t parts = (w->group_size + MAX_BLOCK - 1) / MAX_BLOCK;
    return parts == 1 ? w->group_size : round_up((w->group_size + parts - 1) / parts, STEP);
}

/* As many segments from `begin` on, where one begins, as a strip holds. */
static void begin_block(block_t *block, const tn_matrix *w, int64_t begin) {
    const int64_t size = segment_elements(w), limit = least(begin + MAX_BLOCK, w->num_in);
    int64_t group = (uint32_t)begin / (uint32_t)w->group_size; /* divisions take three times as long in 64 bits */
    int64_t group_end = (group + 1) * w->group_size;
    *block = (block_t){.first = begin / STEP * STEP, .first_group = group, .num_groups = groups_of(w)};
    while (begin < limit) {
        const int64_t end = least(begin + size, group_end);
        if (end > limit) break;
        block->segment[block->num++] = (segment_t){(int)(begin - block->first), (int)(end - block->first),
                                                   (int)(group - block->first_group)};
        begin = end;
        if (begin < group_end) continue;
        group++;
        group_end += w->group_size;
    }
    block->end = begin;
    block->groups = block->segment[block->num - 1].group + 1;
}

/* ---- strips ---- */

/* 32 columns of a block. */
typedef struct {
    _Alignas(4096) int8_t tiles[MAX_STEPS][2][SIDE * STEP];
    const int8_t *column[STRIP]; /* at the block's first element; the last column stands for missing ones */
    float scale[STRIP][MAX_SEGMENTS + TN_LANES]; /* of the block's groups; in vectors */
    int64_t stride;            /* bytes from a column to the next */
    int64_t count;             /* elements from the block's first one on, to the end of the row */
    int steps;
} strip_t;

/* A column's scales. */
static void take_scales(strip_t *strip, int c, const tn_matrix *w, int64_t place, int groups) {
    for (int group = 0; group < groups; group += TN_LANES)
        vf_store(strip->scale[c] + group, load_elements(w->scale, w->scale_dtype, place + group, lanes_left(groups - group)));
}

/* Columns [first, first + num). */
static void begin_strip(strip_t *strip, const tn_matrix *w, int64_t first, int num, const block_t *block) {
    strip->stride = w->num_in;
    strip->count = w->num_in - block->first;
    strip->steps = (int)((block->end - block->first + STEP - 1) / STEP);
    for (int c = 0; c < STRIP; c++) {
        const int64_t column = first + (c < num ? c : num - 1);
        strip->column[c] = (const int8_t *)w->data + column * w->num_in + block->first;
        if (is_grouped(w))
            take_scales(strip, c, w, column * block->num_groups + block->first_group, block->groups);
    }
}

/* One step of a strip. */
TN_INLINE void fill_step(strip_t *strip, int step) {
    const int64_t left = strip->count - step * STEP;
    const __mmask64 mask = left >= STEP ? ~0ull : (1ull << left) - 1;
#pragma GCC unroll 8
    for (int c = 0; c < STRIP; c++)
        _mm512_store_si512(strip->tiles[step][c / SIDE] + c % SIDE * STEP,
                           _mm512_maskz_loadu_epi8(mask, strip->column[c] + step * STEP));
}

/* ---- sums ---- */

/* Of 32 columns by 16 rows: [of high bytes, of low ones][column][row]; or of few rows: [0][column][high and low, row]. */
typedef int32_t integers_t[2][STRIP][SIDE];

/* One step, or half of one, from element k of the strip on. */
TN_INLINE void multiply(const bool in_place, const bool few, const strip_t *strip, const char *inputs, int k) {
    const char *x = inputs + (few ? 1 : 2) * (k / STEP * TILE_BYTES) + k % STEP * SIDE;
    const int8_t *w = in_place ? strip->column[0] + k : strip->tiles[k / STEP][0] + k % STEP;
    const int64_t stride = in_place ? strip->stride : STEP;
    if (in_place && stride <= SHORT_ROW && k % STEP == 0)
        for (int c = 0; c < STRIP; c++) _mm_prefetch((const char *)w + (STRIP + c) * stride, _MM_HINT_T1);
    tile_load(6, x, TILE_ROW_BYTES);
    tile_load(4, w, stride);
    tile_dot_integers(0, 4, 6);
    tile_load(5, w + SIDE * stride, stride);
    tile_dot_integers(1, 5, 6);
    if (few) return;
    tile_load(7, x + TILE_BYTES, TILE_ROW_BYTES);
    tile_dot_integers(2, 4, 7);
    tile_dot_integers(3, 5, 7);
}

TN_INLINE void zero_sums(const bool few) {
    tile_zero(0);
    tile_zero(1);
    if (few) return;
    tile_zero(2);
    tile_zero(3);
}

TN_INLINE void store_sums(const bool few, integers_t to) {
    tile_store(0, to[0][0], TILE_ROW_BYTES);
    tile_store(1, to[0][SIDE], TILE_ROW_BYTES);
    if (few) return;
    tile_store(2, to[1][0], TILE_ROW_BYTES);
    tile_store(3, to[1][SIDE], TILE_ROW_BYTES);
}

/* What a segment adds to the totals of 16 rows. */
typedef struct {
    const float *scale;  /* of columns, a row of the strip's apart; or NULL */
    const float *factor; /* of rows, after the last segment; or NULL */
    bool is_first;
} ending_t;

/* A column's sums of a segment, of 16 rows, or of few and 0. */
TN_INLINE vf sums_of(const bool few, const integers_t integers, int column) {
    const vf first = _mm512_cvtepi32_ps(_mm512_load_si512(integers[0][column]));
    if (!few) return vf_fma(first, vf_set(256.0f), _mm512_cvtepi32_ps(_mm512_load_si512(integers[1][column])));
    const __m256 high = _mm512_castps512_ps256(first), low = _mm512_extractf32x8_ps(first, 1);
    return _mm512_zextps256_ps512(_mm256_fmadd_ps(high, _mm256_set1_ps(256.0f), low));
}

TN_INLINE void add_segment(const bool few, tn_tile_sums sums, int row, const integers_t integers, const ending_t *ending) {
    for (int c = 0; c < STRIP; c++) {
        vf total = sums_of(few, integers, c);
        float *to = sums[c] + row;
        if (ending->scale != NULL) {
            const vf scale = vf_set(ending->scale[c * (MAX_SEGMENTS + TN_LANES)]);
            total = vf_fma(total, scale, ending->is_first ? vf_zero() : vf_load(to));
        } else if (!ending->is_first) {
            total = vf_add(vf_load(to), total);
        }
        vf_store(to, ending->factor == NULL ? total : vf_mul(total, vf_load(ending->factor)));
    }
}

typedef struct {
    const tn_linear_args *args;
    const char *packed;
    int64_t row, first;
    int rows, num;
    block_t block;
    strip_t strip;
    _Alignas(64) integers_t integers[2]; /* of two segments in turn */
    _Alignas(64) tn_tile_sums sums[PANEL_COLUMNS / STRIP][PANEL_ROWS / TN_BLOCK_ROWS];
    float bias[PANEL_COLUMNS + SIDE], scale[PANEL_COLUMNS + SIDE]; /* of columns */
    tn_tile_result pending[2]; /* results to finish while tiles multiply */
    int num_pending;
} panel_t;

static void finish_one(panel_t *panel) {
    if (panel->num_pending > 0) tn_finish_tile(panel->args, &panel->pending[--panel->num_pending]);
}

static ending_t ending_of(const panel_t *panel, int number, const float *factors) {
    const tn_matrix *w = panel->args->weight;
    const block_t *block = &panel->block;
    const bool is_last = block->end == w->num_in && number == block->num - 1;
    return (ending_t){.scale = is_grouped(w) ? panel->strip.scale[0] + block->segment[number].group : NULL,
                      .factor = is_last ? factors : NULL,
                      .is_first = block->first == 0 && number == 0};
}

/* One block of K for 16 rows. Each segment is added while the next one is multiplied. */
TN_INLINE void sum_rows(const form_t form, const bool halves, const bool few, panel_t *panel, tn_tile_sums sums, int row,
                        const char *inputs, const float *factors) {
    const block_t *block = &panel->block;
    strip_t *strip = &panel->strip;
    int filled = 0; /* steps of the strip */
    for (int n = 0; n <= block->num; n++) {
        if (n < block->num) {
            const segment_t *segment = &block->segment[n];
            zero_sums(few);
            for (int k = segment->begin; k < segment->end; k += halves ? HALF : STEP) {
                for (; form == TO_STRIP && filled <= k / STEP + 1 && filled < strip->steps; filled++) fill_step(strip, filled);
                multiply(form == IN_PLACE, few, strip, inputs, k);
                if (k % (4 * STEP) == 0) finish_one(panel);
            }
        }
        if (n > 0) {
            const ending_t ending = ending_of(panel, n - 1, factors);
            add_segment(few, sums, row, panel->integers[(n - 1) % 2], &ending);
        }
        if (n < block->num) store_sums(few, panel->integers[n % 2]);
    }
}

static void sum_form(form_t form, panel_t *panel, tn_tile_sums sums, int row, const char *inputs, const float *factors) {
    const bool halves = is_halved(panel->args->weight), few = panel->args->num_rows <= FEW_ROWS;
#define CASE(FORM, HALVES, FEW)                                                                                 \
    if (form == FORM && halves == HALVES && few == FEW) {                                                       \
        sum_rows(FORM, HALVES, FEW, panel, sums, row, inputs, factors);                                         \
        return;                                                                                                 \
    }
#define CASES(FORM) CASE(FORM, false, false) CASE(FORM, false, true) CASE(FORM, true, false) CASE(FORM, true, true)
    CASES(IN_PLACE) CASES(IN_STRIP) CASES(TO_STRIP)
#undef CASES
#undef CASE
}

/* The form of a strip of `num` columns, for the first rows. */
static form_t form_of(const panel_t *panel, int num) {
    const tn_matrix *w = panel->args->weight;
    const bool is_whole = num == STRIP && w->num_in % (is_halved(w) ? HALF : STEP) == 0;
    return is_whole && panel->rows <= IN_PLACE_ROWS ? IN_PLACE : TO_STRIP;
}

/* The results of 16 rows of a strip, to finish later. */
static void expect_results(panel_t *panel, int column, int row, const tn_tile_sums sums) {
    const tn_matrix *w = panel->args->weight;
    while (panel->num_pending) finish_one(panel);
    for (int c = 0; c < STRIP && column + c < panel->num; c += SIDE)
        panel->pending[panel->num_pending++] = (tn_tile_result){
            .sums = sums[c] + row % TN_BLOCK_ROWS,
            .scale = is_grouped(w) ? NULL : panel->scale + column + c,
            .bias = w->bias == NULL ? NULL : panel->bias + column + c,
            .row = panel->row + row,
            .column = panel->first + column + c,
            .rows = (int)least(panel->rows - row, SIDE),
            .columns = panel->num - column - c,
        };
}

/* The strip's columns in the panel's block, of all its rows. */
static void sum_strip(panel_t *panel, int column) {
    const tn_matrix *w = panel->args->weight;
    const int num = (int)least(panel->num - column, STRIP);
    const int64_t bytes = tile_bytes(w->num_in);
    const form_t form = form_of(panel, num);
    const bool few = panel->args->num_rows <= FEW_ROWS;
    begin_strip(&panel->strip, w, panel->first + column, num, &panel->block);
    for (int row = 0; row < panel->rows; row += SIDE) {
        const char *tile = panel->packed + (panel->row + row) / SIDE * bytes;
        const float *factors = (const float *)(tile + bytes) - SIDE;
        float(*sums)[TN_BLOCK_ROWS] = panel->sums[column / STRIP][row / TN_BLOCK_ROWS];
        sum_form(row > 0 && form != IN_PLACE ? IN_STRIP : form, panel, sums, row % TN_BLOCK_ROWS,
                 tile + panel->block.first * (few ? SIDE : 2 * SIDE), factors);
        if (panel->block.end == w->num_in) expect_results(panel, column, row, sums);
    }
    while (panel->num_pending) finish_one(panel);
}

static void sum_panel(panel_t *panel) {
    const tn_matrix *w = panel->args->weight;
    for (int n = 0; n < panel->num; n++) {
        const int64_t column = panel->first + n;
        if (!is_grouped(w)) panel->scale[n] = float_at(w->scale, w->scale_dtype, column);
        if (w->bias != NULL) panel->bias[n] = float_at(w->bias, w->bias_dtype, column);
    }
    if (panel->rows <= TN_BLOCK_ROWS) { /* as they lie in memory */
        for (int column = 0; column < panel->num; column += STRIP)
            for (int64_t begin = 0; begin < w->num_in; begin = panel->block.end) {
                begin_block(&panel->block, w, begin);
                sum_strip(panel, column);
            }
        return;
    }
    for (int64_t begin = 0; begin < w->num_in; begin = panel->block.end) {
        begin_block(&panel->block, w, begin);
        for (int column = 0; column < panel->num; column += STRIP) sum_strip(panel, column);
    }
}

void tn_integer_columns(const tn_linear_args *args, const void *packed, int64_t begin, int64_t end) {
    panel_t panel;
    panel.args = args;
    panel.packed = packed;
    panel.num_pending = 0;
    tn_tiles_begin(is_halved(args->weight) ? TN_HALF_TILES : TN_WHOLE_TILES);
    for (panel.row = 0; panel.row < args->num_rows; panel.row += PANEL_ROWS) {
        panel.rows = (int)least(args->num_rows - panel.row, PANEL_ROWS);
        for (panel.first = begin; panel.first < end; panel.first += PANEL_COLUMNS) {
            panel.num = (int)least(end - panel.first, PANEL_COLUMNS);
            sum_panel(&panel);
        }
    }
}

#endif
