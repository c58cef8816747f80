/* Mamba-2 layers in place of attention: selective state spaces (arXiv 2405.21060) over a state of fixed size.
 *
 * Values x, keys B and queries C pass a short convolution and SiLU; heads of one group share B and C. Then each head has
 * a matrix S of (state_size, head_dim) fp32, and each token in turn makes of it
 *
 *     S = decay * S + B (step * x),   y = C S + skip * x
 *
 * with step = softplus(dt + bias) and decay = exp(-exp(log) * step); y times SiLU(z) is normed, each group by itself,
 * where there is a norm. A state is read before the first row of its span and written after the last one. Sums over a
 * state's numbers are in one order, token by token: results depend on no chunks and no company. What the convolution
 * makes is rounded, dt + bias, step, without a norm SiLU(z), and the output; all between them is fp32. */
#include "mamba.h"

#include "elements.h"
#include "rows.h"
#include "states.h"

enum {
    SUMS = 4,       /* of products over a state's numbers, each of every fourth number */
    CHANNELS = 128, /* that a thread convolves at a time */
};

/* ---- the inputs ---- */

static bool has_scales(const tn_decoder *model) {
    for (int n = 0; n < 5; n++)
        if (model->mamba_scales[n] != 1.0f) return true;
    return false;
}

/* Gates, values, keys, queries and time steps of a row, each times its scale, rounded. */
static void scale_row(const tn_mamba *args, int64_t row) {
    const tn_decoder *model = args->model;
    const int64_t values = tn_mamba_values(model), keys = model->mamba_groups * model->mamba_state_size;
    const int64_t sizes[5] = {values, values, keys, keys, model->mamba_heads};
    int64_t place = row * tn_mamba_mixed(model);
    for (int n = 0; n < 5; place += sizes[n++])
        tn_scale_row(element_at(args->mixed, model->dtype, place), model->mamba_scales[n], sizes[n], model->dtype);
}

static int64_t num_chunks(int64_t num, int64_t size) { return (num + size - 1) / size; }

/* ---- the convolution ---- */

static void convolve_chunk(const tn_mamba *args, const tn_span *span, int64_t first) {
    const tn_decoder *model = args->model;
    const tn_decoder_layer *layer = args->layer;
    const int64_t num = tn_mamba_channels(model), left = num - first;
    const tn_channels channels = {.span = span, .rows = args->mixed, .taps = &layer->mamba_taps,
                                  .bias = &layer->mamba_taps_bias, .row_size = tn_mamba_mixed(model),
                                  .num_channels = num, .size = model->mamba_convolution_size,
                                  .state_first = layer->state_first, .dtype = model->dtype};
    tn_convolve_channels(&channels, tn_mamba_values(model) + first, first, left < CHANNELS ? left : CHANNELS);
}

/* ---- the recurrence ---- */

/* A unit of work: a head of a span. */
typedef struct {
    const tn_mamba *args;
    const tn_span *span;
    int64_t head;
    int64_t values;  /* where in a row the head's numbers begin */
    int64_t keys;
    int64_t queries;
    int64_t matrix;  /* where in a state its matrix begins */
    float skip;
} tn_unit;

static const void *row_at(const tn_unit *unit, int64_t row) {
    const tn_decoder *model = unit->args->model;
    return element_at(unit->args->mixed, model->dtype, (unit->span->start + row) * tn_mamba_mixed(model));
}

/* A row's step and decay. */
static float *factors_at(const tn_unit *unit, int64_t row) {
    return unit->args->factors + 2 * ((unit->span->start + row) * unit->args->model->mamba_heads + unit->head);
}

static void make_factors(const tn_unit *unit) {
    const tn_decoder *model = unit->args->model;
    const tn_decoder_layer *layer = unit->args->layer;
    const int dtype = model->dtype;
    const int64_t place = tn_mamba_values(model) + tn_mamba_channels(model) + unit->head;
    const float bias = weight(&layer->mamba_step_bias, unit->head, dtype);
    const float speed = exponential(weight(&layer->mamba_log, unit->head, dtype));
    for (int64_t row = 0; row < unit->span->length; row++) {
        const float dt = rounded(dtype, element(row_at(unit, row), dtype, place) + bias);
        float *factors = factors_at(unit, row);
        factors[0] = rounded(dtype, softplus(dt));
        factors[1] = exponential(-speed * factors[0]);
    }
}

/* One token's, of some columns of a head. */
static vf recur(vf *columns, const float *query, const float *key, int64_t num, vf value, float decay) {
    vf sums[SUMS];
    for (int n = 0; n < SUMS; n++) sums[n] = vf_zero();
    for (int64_t i = 0; i < num; i += SUMS)
        for (int n = 0; n < SUMS; n++) {
            columns[i + n] = vf_fma(vf_set(key[i + n]), value, vf_mul(columns[i + n], vf_set(decay)));
            sums[n] = vf_fma(columns[i + n], vf_set(query[i + n]), sums[n]);
        }
    return vf_add(vf_add(sums[0], sums[1]), vf_add(sums[2], sums[3]));
}

/* Columns [d, d + count) of the head, through all rows of the span; times SiLU of the gates. */
static void recur_columns(const tn_unit *unit, int64_t d, int count) {
    const tn_decoder *model = unit->args->model;
    const tn_span *span = unit->span;
    const int64_t num = model->mamba_state_size, stride = model->mamba_head_dim, matrix = unit->matrix + d;
    const int64_t place = unit->head * stride + d;
    const int dtype = model->dtype, gate_dtype = unit->args->layer->mamba_norm.data == NULL ? dtype : TN_F32;
    vf columns[TN_MAX_MAMBA_STATE];
    float query[TN_MAX_MAMBA_STATE + TN_LANES], key[TN_MAX_MAMBA_STATE + TN_LANES];
    load_columns(columns, tn_begins(span) ? NULL : span->state + matrix, stride, num, count);
    int64_t save = 0;
    for (int64_t row = 0; row < span->length; row++) {
        const void *x = row_at(unit, row);
        const float *factors = factors_at(unit, row);
        scaled(query, x, dtype, unit->queries, num, 1.0f);
        scaled(key, x, dtype, unit->keys, num, 1.0f);
        const vf value = load_elements(x, dtype, unit->values + d, count), gate = load_elements(x, dtype, place, count);
        const vf sum = recur(columns, query, key, num, vf_mul(value, vf_set(factors[0])), factors[1]);
        const vf share = round_to(gate_dtype, vf_mul(gate, sigmoid(gate)));
        const vf made = vf_mul(vf_fma(vf_set(unit->skip), value, sum), share);
        store_elements(unit->args->values, TN_F32, (span->start + row) * tn_mamba_values(model) + place, made, count);
        for (; save < span->num_saves && span->saves[save].num_rows == row + 1; save++)
            store_columns(span->saves[save].state + matrix, stride, columns, num, count);
    }
    store_columns(span->state + matrix, stride, columns, num, count);
}

static void run_head(const tn_mamba *args, const tn_span *span, int64_t head) {
    const tn_decoder *model = args->model;
    const int64_t values = tn_mamba_values(model), size = model->mamba_state_size, head_dim = model->mamba_head_dim;
    const int64_t group = head / (model->mamba_heads / model->mamba_groups);
    const int64_t inputs = (model->mamba_convolution_size - 1) * tn_mamba_channels(model);
    const tn_unit unit = {.args = args, .span = span, .head = head,
                          .values = values + head * head_dim,
                          .keys = 2 * values + group * size,
                          .queries = 2 * values + (model->mamba_groups + group) * size,
                          .matrix = args->layer->state_first + inputs + head * size * head_dim,
                          .skip = weight(&args->layer->mamba_skip, head, model->dtype)};
    make_factors(&unit);
    for (int64_t d = 0; d < head_dim; d += TN_LANES) recur_columns(&unit, d, lanes_left(head_dim - d));
}

/* ---- the norm ---- */

/* x / rms(x) of each group, times the weight, rounded once. */
static void norm_row(const tn_mamba *args, int64_t row) {
    const tn_decoder *model = args->model;
    const int64_t values = tn_mamba_values(model), size = values / model->mamba_groups;
    for (int64_t first = 0; first < values; first += size) {
        const float *made = args->values + row * values + first;
        vf sum = vf_zero();
        for (int64_t d = 0; d < size; d += TN_LANES) {
            const vf x = load_elements(made, TN_F32, d, lanes_left(size - d));
            sum = vf_fma(x, x, sum);
        }
        const vf factor = vf_set(1.0f / sqrtf(vf_sum(sum) / (float)size + model->norm_eps));
        for (int64_t d = 0; d < size; d += TN_LANES) {
            const int count = lanes_left(size - d);
            const vf own = load_weights(&args->layer->mamba_norm, first + d, count, model->dtype);
            const vf x = load_elements(made, TN_F32, d, count);
            store_elements(args->out, model->dtype, row * values + first + d, vf_mul(own, vf_mul(x, factor)), count);
        }
    }
}

static void round_row(const tn_mamba *args, int64_t row) {
    const int64_t values = tn_mamba_values(args->model), first = row * values;
    for (int64_t d = 0; d < values; d += TN_LANES) {
        const int count = lanes_left(values - d);
        store_elements(args->out, args->model->dtype, first + d, load_elements(args->values, TN_F32, first + d, count),
                       count);
    }
}

void tn_mamba_stages(const tn_mamba *args, tn_region *region) {
    const int64_t num_heads = args->model->mamba_heads;
    const bool is_normed = args->layer->mamba_norm.data != NULL;
    if (has_scales(args->model)) {
        EACH_ROW(region, args->num_rows) scale_row(args, row);
        tn_barrier(region);
    }
    const int64_t parts = num_chunks(tn_mamba_channels(args->model), CHANNELS);
    for (int64_t chunk; (chunk = tn_next_chunk(region)) < args->num_spans * parts;)
        convolve_chunk(args, &args->spans[chunk / parts], chunk % parts * CHANNELS);
    tn_barrier(region);
    for (int64_t chunk; (chunk = tn_next_chunk(region)) < args->num_spans * num_heads;)
        run_head(args, &args->spans[chunk / num_heads], chunk % num_heads);
    tn_barrier(region);
    EACH_ROW(region, args->num_rows) {
        if (is_normed)
            norm_row(args, row);
        else
            round_row(args, row);
    }
    tn_barrier(region);
}
