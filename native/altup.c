/* AltUp, LAuReL and cut gates: each row by itself, rounded where a model that computes in bf16 rounds. Sums have fixed
 * lanes, which depend on the number of columns only. */
#include "altup.h"

#include <math.h>
#include <stddef.h>

#include "elements.h"
#include "functions.h"
#include "rows.h"

enum { ALONE_ELEMENTS = 1 << 15 }; /* below this number, waking threads costs more than it gains */
_Static_assert(TN_MAX_STREAMS <= TN_LANES, "a number of each stream fits into a vector");

static float rounded(int dtype, float value) {
    vf_store_part(&value, round_to(dtype, vf_set(value)), 1);
    return value;
}

/* ---- factors of streams ---- */

/* tanh(router(norm(x) / hidden_size)), each rounded: (num_streams,) */
static void route_row(const tn_altup *altup, const void *x, void *scratch, float *routed) {
    const tn_decoder *model = altup->model;
    const tn_vector *router = &altup->layer->stream_router;
    const int64_t num = model->hidden_size, num_streams = model->num_streams;
    const int dtype = model->dtype;
    vf sums[TN_MAX_STREAMS];
    for (int64_t s = 0; s < num_streams; s++) sums[s] = vf_zero();
    tn_norm_row(scratch, x, &altup->layer->stream_norm, num, model->norm_eps, model->norm, dtype);
    tn_scale_row(scratch, rounded(dtype, 1.0f / (float)num), num, dtype);
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        const vf value = load_elements(scratch, dtype, place, count);
        for (int64_t s = 0; s < num_streams; s++)
            sums[s] = vf_fma(value, load_elements(router->data, router->dtype, s * num + place, count), sums[s]);
    }
    for (int64_t s = 0; s < num_streams; s++) routed[s] = vf_sum(sums[s]);
    const vf scores = round_to(dtype, vf_load_part(routed, (int)num_streams));
    vf_store_part(routed, round_to(dtype, vf_tanh(scores)), (int)num_streams);
}

/* (num,) products of rows of weights with what `route_row` made, rounded. */
static void factors_of(const tn_vector *weights, const float *routed, int num_streams, int64_t num, int dtype,
                       float *factors) {
    const vf inputs = vf_load_part(routed, num_streams);
    for (int64_t n = 0; n < num; n++) {
        const vf row = load_elements(weights->data, weights->dtype, n * num_streams, num_streams);
        factors[n] = rounded(dtype, vf_sum(vf_mul(row, inputs)));
    }
}

static void predict_row(const tn_altup *altup, int64_t row) {
    const tn_decoder *model = altup->model;
    const int64_t num = model->hidden_size, num_streams = model->num_streams;
    const int dtype = model->dtype;
    void *streams = element_at(altup->streams, dtype, row * num_streams * num);
    void *x = element_at(altup->x, dtype, row * num);
    float routed[TN_MAX_STREAMS], factors[TN_MAX_STREAMS * TN_MAX_STREAMS];
    route_row(altup, element_at(streams, dtype, model->active_stream * num),
              element_at(altup->scratch, dtype, row * num), routed);
    factors_of(&altup->layer->stream_predictions, routed, (int)num_streams, num_streams * num_streams, dtype, factors);
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        vf before[TN_MAX_STREAMS];
        for (int64_t s = 0; s < num_streams; s++) before[s] = load_elements(streams, dtype, s * num + place, count);
        for (int64_t s = 0; s < num_streams; s++) {
            const float *own = factors + s * num_streams;
            vf sum = vf_mul(before[0], vf_set(own[0]));
            for (int64_t t = 1; t < num_streams; t++) sum = vf_fma(before[t], vf_set(own[t]), sum);
            sum = vf_add(round_to(dtype, sum), before[s]);
            store_elements(streams, dtype, s * num + place, sum, count);
            if (s == model->active_stream) store_elements(x, dtype, place, sum, count);
        }
    }
}

static void correct_row(const tn_altup *altup, int64_t row) {
    const tn_decoder *model = altup->model;
    const tn_vector *scale = &altup->layer->stream_scale;
    const int64_t num = model->hidden_size, num_streams = model->num_streams, active = model->active_stream * num;
    const int dtype = model->dtype;
    void *streams = element_at(altup->streams, dtype, row * num_streams * num);
    void *x = element_at(altup->x, dtype, row * num);
    float routed[TN_MAX_STREAMS], factors[TN_MAX_STREAMS];
    route_row(altup, x, element_at(altup->scratch, dtype, row * num), routed);
    factors_of(&altup->layer->stream_corrections, routed, (int)num_streams, num_streams, dtype, factors);
    for (int64_t s = 0; s < num_streams; s++) factors[s] = rounded(dtype, factors[s] + 1.0f);
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        const vf sum = load_elements(x, dtype, place, count);
        const vf change = round_to(dtype, vf_sub(sum, load_elements(streams, dtype, active + place, count)));
        for (int64_t s = 0; s < num_streams; s++) {
            const vf more = round_to(dtype, vf_mul(change, vf_set(factors[s])));
            const vf prediction = load_elements(streams, dtype, s * num + place, count);
            store_elements(streams, dtype, s * num + place, vf_add(more, prediction), count);
        }
        vf corrected = load_elements(streams, dtype, active + place, count);
        if (scale->data != NULL) corrected = vf_mul(corrected, load_weights(scale, place, count, dtype));
        store_elements(x, dtype, place, corrected, count);
    }
}

/* ---- stages ---- */

void tn_altup_predict_stage(const tn_altup *altup, tn_region *region) {
    EACH_ROW(region, altup->num_rows) predict_row(altup, row);
    tn_barrier(region);
}

void tn_altup_correct_stage(const tn_altup *altup, tn_region *region) {
    EACH_ROW(region, altup->num_rows) correct_row(altup, row);
    tn_barrier(region);
}

void tn_altup_spread_stage(const tn_altup *altup, void *more, tn_region *region) {
    const tn_decoder *model = altup->model;
    const int64_t num = model->hidden_size, num_streams = model->num_streams;
    const int dtype = model->dtype;
    EACH_ROW(region, altup->num_rows) {
        void *own = element_at(more, dtype, row * num);
        tn_norm_row(own, own, &altup->layer->input_norm, num, model->norm_eps, model->norm, dtype);
        for (int64_t s = 1; s < num_streams; s++)
            tn_add_row(element_at(altup->streams, dtype, (row * num_streams + s) * num), own, num, dtype);
    }
    tn_barrier(region);
}

void tn_laurel_stage(const tn_altup *altup, const void *input, void *product, tn_region *region) {
    const tn_decoder *model = altup->model;
    const int64_t num = model->hidden_size;
    EACH_ROW(region, altup->num_rows) {
        void *own = element_at(product, model->dtype, row * num);
        tn_norm_row(own, own, &altup->layer->laurel_norm, num, model->norm_eps, model->norm, model->dtype);
        tn_add_row(own, element_at(input, model->dtype, row * num), num, model->dtype);
    }
    tn_barrier(region);
}

void tn_laurel_join_stage(const tn_altup *altup, const void *product, tn_region *region) {
    const int64_t num = altup->model->hidden_size;
    const int dtype = altup->model->dtype;
    const vf root = vf_set(0x1.6a09e6p+0f);
    EACH_ROW(region, altup->num_rows) {
        for (int64_t place = row * num; place < (row + 1) * num; place += TN_LANES) {
            const int count = lanes_left((row + 1) * num - place);
            const vf sum = vf_add(load_elements(altup->x, dtype, place, count),
                                  load_elements(product, dtype, place, count));
            store_elements(altup->x, dtype, place, vf_div(round_to(dtype, sum), root), count);
        }
    }
    tn_barrier(region);
}

/* ---- moments of a row ---- */

/* The sum of (x - middle)^2, of which each is rounded to `dtype` first where `is_rounded`. */
static float squares_of(const void *x, float middle, int64_t num, int dtype, int is_rounded) {
    vf sum = vf_zero();
    float lanes[TN_LANES];
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        const vf value = vf_sub(load_elements(x, dtype, place, count), vf_set(middle));
        vf square = vf_mul(value, value);
        if (is_rounded) square = round_to(dtype, square);
        if (count < TN_LANES) { /* the lanes behind the end are -middle */
            vf_store(lanes, square);
            square = vf_load_part(lanes, count);
        }
        sum = vf_add(sum, square);
    }
    return vf_sum(sum);
}

void tn_cut_gates_row(void *gates, int64_t num, float num_deviations, int dtype) {
    vf sum = vf_zero();
    for (int64_t place = 0; place < num; place += TN_LANES)
        sum = vf_add(sum, load_elements(gates, dtype, place, lanes_left(num - place)));
    const float mean = vf_sum(sum) / (float)num;
    const float deviation = rounded(dtype, sqrtf(squares_of(gates, mean, num, dtype, 0) / (float)num));
    const float above = rounded(dtype, deviation * rounded(dtype, num_deviations));
    const vf least = vf_set(rounded(dtype, rounded(dtype, mean) + above));
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        const vf left = round_to(dtype, vf_sub(load_elements(gates, dtype, place, count), least));
        store_elements(gates, dtype, place, vf_max(vf_zero(), left), count); /* in this order, so that a NaN passes */
    }
}

/* ---- before the first layer, and behind the last one ---- */

static void match_row(const tn_match_args *args, int64_t row) {
    const int64_t num = args->num_columns, num_streams = args->num_streams;
    const int dtype = args->dtype;
    void *first = element_at(args->x, dtype, row * num_streams * num);
    const float least = rounded(dtype, 1e-5f);
    const float target = rounded(dtype, sqrtf(rounded(dtype, squares_of(first, 0.0f, num, dtype, 1) / (float)num)));
    for (int64_t s = 1; s < num_streams; s++) {
        void *own = element_at(first, dtype, s * num);
        const float mean = rounded(dtype, squares_of(own, 0.0f, num, dtype, 1) / (float)num);
        const vf size = vf_set(rounded(dtype, sqrtf(mean < least ? least : mean)));
        for (int64_t place = 0; place < num; place += TN_LANES) {
            const int count = lanes_left(num - place);
            const vf value = vf_mul(load_elements(own, dtype, place, count), vf_set(target));
            store_elements(own, dtype, place, vf_div(round_to(dtype, value), size), count);
        }
    }
    if (args->mean == NULL) return;
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        vf sum = vf_zero();
        for (int64_t s = 0; s < num_streams; s++) sum = vf_add(sum, load_elements(first, dtype, s * num + place, count));
        store_elements(args->mean, dtype, row * num + place, vf_div(sum, vf_set((float)num_streams)), count);
    }
}

static void match_body(void *arg, tn_region *region, int id) {
    (void)id;
    const tn_match_args *args = arg;
    EACH_ROW(region, args->num_rows) match_row(args, row);
}

int tn_match(const tn_match_args *args) {
    if (args->size != sizeof *args || (args->dtype != TN_F32 && args->dtype != TN_BF16)) return TN_REFUSED;
    const int64_t num_elements = args->num_rows * args->num_streams * args->num_columns;
    (num_elements < ALONE_ELEMENTS ? tn_run_alone : tn_run)(match_body, (void *)args);
    return TN_OK;
}
