/* Gated delta nets in place of attention: linear attention over a state of fixed size.
 *
 * Queries, keys and values pass a short convolution and SiLU; then each value head has a matrix S of (key_size,
 * value_size) fp32, and each token in turn makes of it
 *
 *     S = decay * S + k (beta * (v - decay * k S)),   out = q S,   normed and gated by SiLU(z)
 *
 * with q and k of unit length. A state is read before the first row of its span and written after the last one, so it
 * is that of a sequence's tokens so far. Sums over the key's numbers are in one order, token by token: results depend on
 * no chunks and no company. A column of S depends on no other column: TN_LANES of them at a time stay in the cache. */
#include "delta_net.h"

#include "elements.h"
#include "rows.h"
#include "states.h"

enum { SUMS = 4 }; /* of products over a key, each of every fourth number */

/* A unit of work: a key head of a span with the value heads that it serves. */
typedef struct {
    const tn_delta_net *args;
    const tn_span *span;
    int64_t mixed;     /* numbers of a row */
    int64_t key_size;
    int64_t value_size;
    int64_t queries;   /* where in a row the key head's numbers begin */
    int64_t keys;
    int64_t values;    /* of the first value head that it serves, as those below */
    int64_t gates;
    int64_t betas;
    int64_t decays;
    int64_t channels;  /* of the convolution */
    int64_t num_values; /* value heads that the key head serves */
    int64_t first;     /* of them */
    int64_t step;      /* from each of them to the next one */
    int64_t key_head;
    bool is_first;     /* the span begins its sequence: no state yet */
} tn_unit;

static const char *row_at(const tn_unit *unit, int64_t row) {
    return element_at(unit->args->mixed, unit->args->model->dtype, (unit->span->start + row) * unit->mixed);
}

/* A row's factors: of its queries, of its keys, and of each value head beta and decay. */
static float *factors_at(const tn_unit *unit, int64_t row) {
    const tn_decoder *model = unit->args->model;
    return unit->args->factors + (unit->span->start + row) * 2 * (model->delta_key_heads + model->delta_value_heads);
}

/* This layer's part of a state. */
static float *state_at(const tn_unit *unit, float *state) { return state + unit->args->layer->state_first; }

/* A head's channels, which begin at `place` of a row. */
static void convolve_head(const tn_unit *unit, int64_t place, int64_t channel, int64_t num) {
    const tn_decoder *model = unit->args->model;
    const tn_decoder_layer *layer = unit->args->layer;
    const tn_vector none = {0};
    const tn_channels channels = {.span = unit->span, .rows = unit->args->mixed, .taps = &layer->delta_taps,
                                  .bias = &none, .row_size = unit->mixed, .num_channels = unit->channels,
                                  .size = model->delta_convolution_size, .state_first = layer->state_first,
                                  .dtype = model->dtype};
    tn_convolve_channels(&channels, place, channel, num);
}

/* ---- factors ---- */

static float length_factor(const void *row, int dtype, int64_t first, int64_t num) {
    vf sum = vf_zero();
    for (int64_t d = 0; d < num; d += TN_LANES) {
        const vf x = load_elements(row, dtype, first + d, lanes_left(num - d));
        sum = vf_fma(x, x, sum);
    }
    return 1.0f / sqrtf(vf_sum(sum) + 1e-6f);
}

static void key_factors(const tn_unit *unit, int64_t row) {
    const int dtype = unit->args->model->dtype;
    const char *x = row_at(unit, row);
    float *factors = factors_at(unit, row) + 2 * unit->key_head;
    factors[0] = length_factor(x, dtype, unit->queries, unit->key_size) / sqrtf((float)unit->key_size);
    factors[1] = length_factor(x, dtype, unit->keys, unit->key_size);
}

/* The number of a value head after the first one of its key head. */
static int64_t own_number(const tn_unit *unit, int64_t head) { return head - unit->first; }

/* beta = sigmoid(b), rounded; decay = exp(-exp(a_log) * softplus(a + bias)). */
static void value_factors(const tn_unit *unit, int64_t head, int64_t row) {
    const tn_decoder *model = unit->args->model;
    const tn_decoder_layer *layer = unit->args->layer;
    const int dtype = model->dtype;
    const int64_t number = own_number(unit, head);
    const char *x = row_at(unit, row);
    float *factors = factors_at(unit, row) + 2 * (model->delta_key_heads + head);
    float lanes[TN_LANES];
    vf_store(lanes, round_to(dtype, sigmoid(vf_set(element(x, dtype, unit->betas + number)))));
    factors[0] = lanes[0];
    const float a = element(x, dtype, unit->decays + number) + weight(&layer->delta_bias, head, dtype);
    factors[1] = exponential(-exponential(weight(&layer->delta_log, head, dtype)) * softplus(a));
}

/* ---- the recurrence ---- */

/* One token's, of columns [d, d + count) of a value head. */
static vf recur(vf *columns, const float *query, const float *key, int64_t num, vf value, float beta, float decay) {
    vf sums[SUMS];
    for (int n = 0; n < SUMS; n++) sums[n] = vf_zero();
    for (int64_t i = 0; i < num; i += SUMS)
        for (int n = 0; n < SUMS; n++) sums[n] = vf_fma(columns[i + n], vf_set(key[i + n]), sums[n]);
    const vf known = vf_mul(vf_set(decay), vf_add(vf_add(sums[0], sums[1]), vf_add(sums[2], sums[3])));
    const vf delta = vf_mul(vf_sub(value, known), vf_set(beta));
    for (int n = 0; n < SUMS; n++) sums[n] = vf_zero();
    for (int64_t i = 0; i < num; i += SUMS)
        for (int n = 0; n < SUMS; n++) {
            columns[i + n] = vf_fma(vf_set(key[i + n]), delta, vf_mul(columns[i + n], vf_set(decay)));
            sums[n] = vf_fma(columns[i + n], vf_set(query[i + n]), sums[n]);
        }
    return vf_add(vf_add(sums[0], sums[1]), vf_add(sums[2], sums[3]));
}

/* Columns [d, d + count) of a value head, through all rows of the span. */
static void recur_columns(const tn_unit *unit, int64_t head, int64_t d, int count) {
    const tn_decoder *model = unit->args->model;
    const tn_span *span = unit->span;
    const int64_t num = unit->key_size, stride = unit->value_size;
    const int64_t matrix = (model->delta_convolution_size - 1) * unit->channels + head * num * stride + d;
    const int64_t width = model->delta_value_heads * stride, place = head * stride + d;
    const int dtype = model->dtype;
    vf columns[TN_MAX_DELTA_KEY];
    float query[TN_MAX_DELTA_KEY + TN_LANES], key[TN_MAX_DELTA_KEY + TN_LANES];
    load_columns(columns, unit->is_first ? NULL : state_at(unit, span->state) + matrix, stride, num, count);
    int64_t save = 0;
    for (int64_t row = 0; row < span->length; row++) {
        const char *x = row_at(unit, row);
        const float *of_keys = factors_at(unit, row) + 2 * unit->key_head;
        const float *of_values = factors_at(unit, row) + 2 * (model->delta_key_heads + head);
        scaled(query, x, dtype, unit->queries, num, of_keys[0]);
        scaled(key, x, dtype, unit->keys, num, of_keys[1]);
        const vf value = load_elements(x, dtype, unit->values + own_number(unit, head) * stride + d, count);
        const vf out = recur(columns, query, key, num, value, of_values[0], of_values[1]);
        store_elements(unit->args->out, dtype, (span->start + row) * width + place, out, count);
        for (; save < span->num_saves && span->saves[save].num_rows == row + 1; save++)
            store_columns(state_at(unit, span->saves[save].state) + matrix, stride, columns, num, count);
    }
    store_columns(state_at(unit, span->state) + matrix, stride, columns, num, count);
}

/* The norm of a head's outputs, times SiLU of its gate, rounded once. */
static void gate_head(const tn_unit *unit, int64_t head, int64_t row) {
    const tn_decoder *model = unit->args->model;
    const int64_t num = unit->value_size, gates = unit->gates + own_number(unit, head) * num;
    const int dtype = model->dtype;
    void *out = element_at(unit->args->out, dtype,
                           ((unit->span->start + row) * model->delta_value_heads + head) * num);
    tn_norm_row(out, out, &unit->args->layer->delta_norm, num, model->norm_eps, TN_RMS, dtype);
    for (int64_t d = 0; d < num; d += TN_LANES) {
        const int count = lanes_left(num - d);
        const vf gate = load_elements(row_at(unit, row), dtype, gates + d, count);
        store_elements(out, dtype, d, vf_mul(load_elements(out, dtype, d, count), vf_mul(gate, sigmoid(gate))), count);
    }
}

static void run_unit(const tn_unit *unit) {
    const tn_decoder *model = unit->args->model;
    const int64_t length = unit->span->length, key_head = unit->key_head, size = unit->value_size;
    const int64_t keys = model->delta_key_heads * unit->key_size;
    convolve_head(unit, unit->queries, key_head * unit->key_size, unit->key_size);
    convolve_head(unit, unit->keys, keys + key_head * unit->key_size, unit->key_size);
    for (int64_t row = 0; row < length; row++) key_factors(unit, row);
    for (int64_t i = 0; i < unit->num_values; i++) {
        const int64_t head = unit->first + i * unit->step;
        convolve_head(unit, unit->values + own_number(unit, head) * size, 2 * keys + head * size, size);
        for (int64_t row = 0; row < length; row++) value_factors(unit, head, row);
        for (int64_t d = 0; d < size; d += TN_LANES) recur_columns(unit, head, d, lanes_left(size - d));
        for (int64_t row = 0; row < length; row++) gate_head(unit, head, row);
    }
}

/* The unit with its places in a row. */
static tn_unit unit_of(const tn_delta_net *args, const tn_span *span, int64_t head) {
    const tn_decoder *model = args->model;
    const int64_t heads = model->delta_key_heads, key_size = model->delta_key_size, size = model->delta_value_size;
    const int64_t num = model->delta_value_heads / heads, keys = heads * key_size, values = heads * num * size;
    tn_unit unit = {.args = args, .span = span, .mixed = tn_delta_mixed(model), .key_size = key_size,
                    .value_size = size, .channels = 2 * keys + values, .num_values = num, .key_head = head,
                    .first = head * num, .step = 1, .is_first = tn_begins(span)};
    if (model->delta_order == TN_DELTA_TILED) {
        unit.first = head;
        unit.step = heads;
    }
    if (model->delta_order == TN_DELTA_GROUPED) {
        unit.queries = head * 2 * (key_size + num * size);
        unit.keys = unit.queries + key_size;
        unit.values = unit.keys + key_size;
        unit.gates = unit.values + num * size;
    } else {
        unit.queries = head * key_size;
        unit.keys = keys + head * key_size;
        unit.values = 2 * keys + unit.first * size;
        unit.gates = unit.values + values;
    }
    if (model->delta_order == TN_DELTA_GROUPED || model->delta_order == TN_DELTA_SPLIT) {
        unit.betas = 2 * (keys + values) + head * 2 * num;
        unit.decays = unit.betas + num;
    } else {
        unit.betas = 2 * (keys + values) + unit.first;
        unit.decays = unit.betas + heads * num;
    }
    return unit;
}

void tn_delta_net_stage(const tn_delta_net *args, tn_region *region) {
    const int64_t num_heads = args->model->delta_key_heads;
    for (int64_t chunk; (chunk = tn_next_chunk(region)) < args->num_spans * num_heads;) {
        const tn_unit unit = unit_of(args, &args->spans[chunk / num_heads], chunk % num_heads);
        run_unit(&unit);
    }
    tn_barrier(region);
}
