/* Products by tiles (isa_amx.h): out (rows, columns) = x (rows, K) times w (columns, K).
 *
 * Tiles compute the result's transpose. Weights are the operand `a`, 16 columns of 32 elements as they lie in memory;
 * inputs are `b`, packed: 16 pairs of elements by up to 16 rows. Other weights than bf16 are widened into a strip of tiles
 * while the tiles before them are multiplied (strips.h); integers of 8 bits without zeros are multiplied as such
 * (integer_tiles.c).
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

#include "integer_tiles.h"
#include "strips.h"

enum {
    BLOCK_ROWS = TN_BLOCK_ROWS,
    PANEL_ROWS = 512,
    PANEL_COLUMNS = 256,
    IN_PLACE_ROWS = 64, /* with more, bf16 are copied into a strip: there they share no places of the first cache */
    PIECE_STEPS = 16,   /* of a tile of rows: what is packed at a time */
    MANY_ROWS = 128,
};

/* ---- the tiles of a thread ---- */

#if defined(TN_SOFT_TILES)
_Thread_local tn_tile_shape tn_soft_shape;
#endif

static _Thread_local tn_tile_shape shape_now;

void tn_tiles_begin(tn_tile_shape shape) {
    if (shape_now == shape) return;
    tiles_configure(shape);
    shape_now = shape;
}

void tn_tiles_end(void) {
    if (shape_now == TN_NO_TILES) return;
    tiles_release();
    shape_now = TN_NO_TILES;
}

/* ---- packing ---- */

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

/* Columns of the tiles of inputs and sums: fewer where there are fewer rows, so that inputs take less of the first cache. */
static int width_of(int64_t num_rows) { return (int)least(num_rows, SIDE); }

/* Steps [begin, end) of a tile of rows: (steps, 16 pairs, `width` rows, 2). */
static void pack_pairs(uint16_t *packed, const uint16_t *x, int64_t x_stride, int64_t num_rows, int64_t num_in, int64_t tile,
                       int width, int64_t begin, int64_t end) {
    const int64_t steps = (num_in + STEP - 1) / STEP, rows = least(num_rows - tile * SIDE, SIDE);
    const uint16_t *from = x + tile * SIDE * x_stride;
    const __mmask16 mask = v_mask(width);
    for (int64_t step = begin; step < end; step++) {
        uint16_t *to = packed + (tile * steps + step) * width * STEP;
        if (width == 1) {
            _mm512_store_si512(to, load_step(from + step * STEP, num_in - step * STEP));
            continue;
        }
        __m512i r[SIDE];
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++)
            r[i] = i < rows ? load_step(from + i * x_stride + step * STEP, num_in - step * STEP) : _mm512_setzero_si512();
        transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++) _mm512_mask_storeu_epi32(to + i * width * 2, mask, r[i]);
    }
}

void tn_pack(int forms, void *packed, const void *x, int64_t x_stride, int64_t num_rows, int64_t num_in, int64_t piece) {
    const int64_t pieces = pieces_of_tile(num_rows, num_in), tile = piece / pieces, steps = (num_in + STEP - 1) / STEP;
    const int64_t size = steps_of_piece(num_rows, num_in), begin = piece % pieces * size, end = least(begin + size, steps);
    if (forms & (TN_PAIRS | TN_WHOLE_PAIRS)) {
        const int width = forms & TN_PAIRS ? width_of(num_rows) : SIDE;
        pack_pairs(packed, x, x_stride, num_rows, num_in, tile, width, begin, end);
    }
    if (forms & TN_INTEGERS)
        tn_pack_integers(integers_in(packed, num_rows, num_in), x, x_stride, num_rows, num_in, tile, begin * STEP,
                         least(end * STEP, num_in));
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
    int width;    /* of a tile: rows */
    int64_t tile; /* elements, from the first tile of rows to the second */
} inputs_t;

/* The tile of a step; its rows are adjacent. */
TN_INLINE const uint16_t *tile_of(const inputs_t *inputs, int step) { return inputs->x + step * inputs->width * STEP; }
TN_INLINE int64_t stride_of(const inputs_t *inputs) { return 4 * inputs->width; }

/* One step: `w` are 16 columns, and `half` bytes further on the other 16. */
TN_INLINE void multiply(const bool two, const char *w, int64_t stride, int64_t half, const inputs_t *inputs, int step) {
    const uint16_t *x = tile_of(inputs, step);
    tile_load(6, x, stride_of(inputs));
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

/* One of the two halves of the columns in one step of the strip, at `w`; the first half loads the inputs of both. */
TN_INLINE void load_half(const bool two, const uint16_t *w, const inputs_t *inputs, int step, const int half) {
    if (half != 0) {
        tile_load(5, w + SIDE * STEP, TILE_ROW_BYTES);
        return;
    }
    const uint16_t *x = tile_of(inputs, step);
    tile_load(6, x, stride_of(inputs));
    if (two) tile_load(7, x + inputs->tile, TILE_ROW_BYTES);
    tile_load(4, w, TILE_ROW_BYTES);
}

TN_INLINE void multiply_half(const bool two, const int half) {
    if (half == 0) {
        tile_dot(0, 4, 6);
        if (two) tile_dot(1, 4, 7);
    } else {
        tile_dot(2, 5, 6);
        if (two) tile_dot(3, 5, 7);
    }
}

/* All steps of weights that are widened. Each unit is multiplied while the next one is widened, in turns so short that the
 * processor has both in sight: a quarter is widened between the loading of tiles and their product. */
TN_INLINE void sum_widened(const form_t form, const bool two, strip_t *strip, const inputs_t *inputs) {
    place_t place = {0, strip->left};
    const int steps = (strip->count + STEP - 1) / STEP, units = (steps + 1) / 2;
    unit_t at = unit_at(form, strip, 0, &place);
    for (int quarter = 0; quarter < 4; quarter++) widen(form, strip, quarter, &at);
    for (int unit = 1; unit < units; unit++) {
        const uint16_t *before = at.to;
        at = unit_at(form, strip, unit, &place);
#pragma GCC unroll 4
        for (int turn = 0; turn < 4; turn++) {
            load_half(two, before + turn / 2 * STRIP * STEP, inputs, 2 * unit - 2 + turn / 2, turn % 2);
            widen(form, strip, turn, &at);
            multiply_half(two, turn % 2);
        }
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
    case FROM_U4_BY_TABLE: sum_form(FROM_U4_BY_TABLE, panel, inputs, two); return;
    case FROM_WIDE_U4_BY_TABLE: sum_form(FROM_WIDE_U4_BY_TABLE, panel, inputs, two); return;
    case FROM_WIDE_U4_AND_ZERO_BY_TABLE: sum_form(FROM_WIDE_U4_AND_ZERO_BY_TABLE, panel, inputs, two); return;
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
    const int width = width_of(args->num_rows);
    const int64_t steps = (w->num_in + STEP - 1) / STEP, tile = steps * width * STEP;
    strip_t *strip = &panel->strip;
    const bool one_block = panel->rows <= BLOCK_ROWS;
    form_t form = panel->form;
    if (form == IN_PLACE && (num < STRIP || panel->rows > IN_PLACE_ROWS)) form = FROM_BF16;
    if (is_by_table(form) && num < STRIP) form = w->zero != NULL ? FROM_U4_AND_ZERO : FROM_U4;
    strip->mask = one_block && form != FROM_BLOCKS ? 2 * RING - 1 : ~0;
    begin_strip(strip, form, w, panel->first + column, num, block);
    for (int row = 0; row < panel->rows; row += BLOCK_ROWS) {
        const bool two = panel->rows - row > SIDE;
        tn_tile_sums *sums = &panel->sums[column / STRIP][row / BLOCK_ROWS];
        tn_tile_sums *chain = panel->is_grouped ? &panel->group : sums;
        const inputs_t inputs = {
            .x = (const uint16_t *)args->packed + (panel->row + row) / SIDE * tile + block->begin / STEP * width * STEP,
            .width = width,
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
static bool is_endless(const panel_t *panel) {
    switch (panel->form) {
    case IN_PLACE:
    case FROM_I8_AND_ZERO:
    case FROM_E2M1:
    case FROM_E4M3: return true;
    default: return is_by_table(panel->form) && panel->num % STRIP == 0;
    }
}

/* Elements of a block: K in equal parts that fit in a strip, or all of it. */
static int64_t block_elements(const panel_t *panel) {
    const int64_t num_in = panel->args->weight->num_in;
    if (panel->rows <= BLOCK_ROWS && is_endless(panel)) return num_in;
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
    case TN_U4:
        if (w->group_size % UNIT == 0 && w->scale_dtype != TN_F32)
            return w->zero != NULL ? FROM_WIDE_U4_AND_ZERO_BY_TABLE : FROM_WIDE_U4_BY_TABLE;
        if (w->zero != NULL) return FROM_U4_AND_ZERO;
        return w->scale_dtype != TN_F32 ? FROM_U4_BY_TABLE : FROM_U4;
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
    if (is_by_table(panel.form) || panel.form == FROM_E2M1) need_levels(args->weight);
    panel.is_grouped = is_grouped(args->weight);
    panel.num_pending = 0;
    tn_tiles_begin((tn_tile_shape)width_of(args->num_rows));
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
