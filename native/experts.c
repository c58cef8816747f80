/* Mixtures of experts: each row goes through those few experts that score highest.
 *
 * Rows are grouped by expert, so that an expert's weights are read once for all of them. What a row gives depends on
 * no other row: products take each row by itself, and its experts' outputs are added in the order of their numbers,
 * rounded as models that compute in the dtype round. */
#include "experts.h"

#include <stdbool.h>
#include <string.h>

#include "elements.h"
#include "linear.h"
#include "projection.h"
#include "rows.h"

enum { ALIGNMENT = 64 };

static void *take(char **scratch, int64_t bytes) {
    void *taken = *scratch;
    *scratch += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return taken;
}

int64_t tn_lay_out_mixture(tn_mixture *mixture, const tn_decoder *model, int64_t num_rows, char *scratch) {
    const int64_t pairs = num_rows * model->num_experts_used, item = element_bytes(model->dtype);
    char *next = scratch;
    mixture->scores = take(&next, num_rows * model->num_experts * item);
    mixture->chosen = take(&next, pairs * (int64_t)sizeof(int64_t));
    mixture->weights = take(&next, pairs * (int64_t)sizeof(float));
    mixture->starts = take(&next, (model->num_experts + 1) * (int64_t)sizeof(int64_t));
    mixture->place_of = take(&next, pairs * (int64_t)sizeof(int64_t));
    mixture->pair_at = take(&next, pairs * (int64_t)sizeof(int64_t));
    mixture->inputs = take(&next, pairs * model->hidden_size * item);
    mixture->gate_up = take(&next, pairs * 2 * model->expert_size * item);
    mixture->inner = take(&next, pairs * model->expert_size * item);
    return next - scratch;
}

/* ---- routing ---- */

/* Exponentials of a row's scores less the largest; returns their sum, in order. */
static float exponentials(float *powers, const void *scores, int64_t num, int dtype) {
    float largest = -__builtin_inff(), total = 0.0f;
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        vf_store_part(powers + place, load_elements(scores, dtype, place, count), count);
    }
    for (int64_t n = 0; n < num; n++) largest = powers[n] > largest ? powers[n] : largest;
    for (int64_t n = 0; n < num; n++) powers[n] -= largest;
    tn_exp(powers, powers, num);
    for (int64_t n = 0; n < num; n++) total += powers[n];
    return total;
}

/* The experts of one row, ascending, and their weights. Of equal scores the earlier one wins. */
static void route_row(const tn_mixture *mixture, const tn_decoder *model, int64_t row) {
    const int64_t num = model->num_experts, used = model->num_experts_used;
    float powers[TN_MAX_EXPERTS] = {0};
    bool is_chosen[TN_MAX_EXPERTS] = {0};
    float total = exponentials(powers, element_at(mixture->scores, model->dtype, row * num), num, model->dtype);
    float of_chosen = 0.0f;
    for (int64_t k = 0; k < used; k++) {
        int64_t best = -1;
        for (int64_t n = 0; n < num; n++)
            if (!is_chosen[n] && (best < 0 || powers[n] > powers[best])) best = n;
        is_chosen[best] = true;
        of_chosen += powers[best] / total;
    }
    int64_t pair = row * used;
    for (int64_t n = 0; n < num; n++) {
        if (!is_chosen[n]) continue;
        float weight = powers[n] / total;
        if (model->expert_weights_sum_to_1) weight /= of_chosen;
        if (model->expert_weights_rounded && model->dtype == TN_BF16) weight = f32_of_bf16(bf16_of_f32(weight));
        mixture->chosen[pair] = n;
        mixture->weights[pair++] = weight;
    }
}

/* Places of all pairs, grouped by expert, rows ascending. */
static void group(const tn_mixture *mixture, const tn_decoder *model, int64_t num_pairs) {
    int64_t *starts = mixture->starts;
    for (int64_t n = 0; n <= model->num_experts; n++) starts[n] = 0;
    for (int64_t pair = 0; pair < num_pairs; pair++) starts[mixture->chosen[pair] + 1]++;
    for (int64_t n = 0; n < model->num_experts; n++) starts[n + 1] += starts[n];
    int64_t next[TN_MAX_EXPERTS];
    for (int64_t n = 0; n < model->num_experts; n++) next[n] = starts[n];
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        const int64_t place = next[mixture->chosen[pair]]++;
        mixture->place_of[pair] = place;
        mixture->pair_at[place] = pair;
    }
}

/* ---- products ---- */

/* Columns [begin, end) of gate and up of one expert, and what becomes of them. */
static void gate_up_columns(const tn_mixture *mixture, const tn_decoder *model, const tn_expert *expert, int64_t first,
                            int64_t num_rows, int64_t begin, int64_t end) {
    const int64_t inner = model->expert_size;
    const int dtype = model->dtype;
    const tn_product product = {&expert->gate_up, element_at(mixture->inputs, dtype, first * model->hidden_size), NULL,
                                element_at(mixture->gate_up, dtype, first * 2 * inner), num_rows, dtype};
    tn_product_columns(&product, begin, end);
    tn_product_columns(&product, inner + begin, inner + end);
    for (int64_t row = first; row < first + num_rows; row++) {
        const int64_t gate = row * 2 * inner + begin;
        void *out = element_at(mixture->inner, dtype, row * inner + begin);
        const void *gates = element_at(mixture->gate_up, dtype, gate);
        const void *ups = element_at(mixture->gate_up, dtype, gate + inner);
        if (model->swiglu_limit != 0.0f)
            tn_clamped_swiglu_row(out, gates, ups, end - begin, model->swiglu_alpha, model->swiglu_limit, dtype);
        else
            tn_activate_row(out, gates, ups, end - begin, model->activation, dtype);
    }
}

static void down_columns(const tn_mixture *mixture, const tn_decoder *model, const tn_expert *expert, int64_t first,
                         int64_t num_rows, int64_t begin, int64_t end) {
    const int dtype = model->dtype;
    const tn_product product = {&expert->down, element_at(mixture->inner, dtype, first * model->expert_size), NULL,
                                element_at(mixture->inputs, dtype, first * model->hidden_size), num_rows, dtype};
    tn_product_columns(&product, begin, end);
}

typedef void (*columns_t)(const tn_mixture *mixture, const tn_decoder *model, const tn_expert *expert, int64_t first,
                          int64_t num_rows, int64_t begin, int64_t end);

/* A stage: all columns of all experts that have rows. */
static void each_expert(columns_t columns, const tn_mixture *mixture, const tn_decoder *model,
                        const tn_decoder_layer *layer, int64_t num_columns, tn_region *region) {
    const int64_t chunk = tn_linear_chunk(num_columns, region->num), chunks = (num_columns + chunk - 1) / chunk;
    int64_t expert = -1, passed = 0; /* experts with rows, up to this one */
    for (int64_t task; task = tn_next_chunk(region), true;) {
        while (passed * chunks <= task) {
            if (++expert == model->num_experts) goto done;
            passed += mixture->starts[expert + 1] > mixture->starts[expert];
        }
        const int64_t first = mixture->starts[expert], begin = task % chunks * chunk;
        columns(mixture, model, &layer->experts[expert], first, mixture->starts[expert + 1] - first, begin,
                begin + chunk < num_columns ? begin + chunk : num_columns);
    }
done:
    tn_barrier(region);
}

/* ---- the sum ---- */

static void sum_row(const tn_mixture *mixture, const tn_decoder *model, void *out, int64_t row) {
    const int64_t num = model->hidden_size, used = model->num_experts_used;
    const int dtype = model->dtype;
    for (int64_t d = 0; d < num; d += TN_LANES) {
        const int count = lanes_left(num - d);
        vf sum = vf_zero();
        for (int64_t pair = row * used; pair < (row + 1) * used; pair++) {
            const vf made = load_elements(mixture->inputs, dtype, mixture->place_of[pair] * num + d, count);
            sum = round_to(dtype, vf_add(sum, round_to(dtype, vf_mul(made, vf_set(mixture->weights[pair])))));
        }
        store_elements(out, dtype, row * num + d, sum, count);
    }
}

void tn_router_stages(const tn_mixture *mixture, const tn_decoder *model, const tn_decoder_layer *layer, const void *x,
                      int64_t num_rows, tn_region *region) {
    const tn_product scores = {&layer->router, x, NULL, mixture->scores, num_rows, model->dtype};
    tn_product_stage(&scores, region);
    tn_barrier(region);
    EACH_ROW(region, num_rows) route_row(mixture, model, row);
    tn_barrier(region);
}

void tn_mixture_stages(const tn_mixture *mixture, const tn_decoder *model, const tn_decoder_layer *layer, const void *x,
                       void *out, int64_t num_rows, tn_region *region) {
    const int64_t num_pairs = num_rows * model->num_experts_used;
    const size_t row_bytes = (size_t)(model->hidden_size * element_bytes(model->dtype));
    tn_router_stages(mixture, model, layer, x, num_rows, region);
    if (tn_next_chunk(region) == 0) group(mixture, model, num_pairs);
    tn_barrier(region);
    EACH_ROW(region, num_pairs) {
        const int64_t from = mixture->pair_at[row] / model->num_experts_used;
        memcpy(element_at(mixture->inputs, model->dtype, row * model->hidden_size),
               element_at(x, model->dtype, from * model->hidden_size), row_bytes);
    }
    tn_barrier(region);
    each_expert(gate_up_columns, mixture, model, layer, model->expert_size, region);
    each_expert(down_columns, mixture, model, layer, model->hidden_size, region);
    EACH_ROW(region, num_rows) sum_row(mixture, model, out, row);
    tn_barrier(region);
}
