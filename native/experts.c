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
#include "tiles.h"

enum { ALIGNMENT = 64 };

static void *take(char **scratch, int64_t bytes) {
    void *taken = *scratch;
    *scratch += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return taken;
}

/* Each expert's rows are packed into tiles of their own. */
enum { TILE_ROWS = 16 };

static int64_t tiles_of(int64_t num_rows) { return (num_rows + TILE_ROWS - 1) / TILE_ROWS; }

static int64_t packed_bytes(const tn_decoder *model, int64_t num_rows) {
    const int64_t most = model->hidden_size > model->expert_size ? model->hidden_size : model->expert_size;
    const int64_t pairs = num_rows * model->num_experts_used;
    const int64_t tiles = pairs / TILE_ROWS + (pairs < model->num_experts ? pairs : model->num_experts);
    return tn_product_packed_bytes(tiles * TILE_ROWS, most, 0, model->dtype);
}

int64_t tn_lay_out_mixture(tn_mixture *mixture, const tn_decoder *model, int64_t num_rows, char *scratch) {
    const int64_t pairs = num_rows * model->num_experts_used, item = element_bytes(model->dtype);
    char *next = scratch;
    mixture->scores = take(&next, num_rows * model->num_experts * (int64_t)sizeof(float));
    mixture->chosen = take(&next, pairs * (int64_t)sizeof(int64_t));
    mixture->weights = take(&next, pairs * (int64_t)sizeof(float));
    mixture->starts = take(&next, (model->num_experts + 1) * (int64_t)sizeof(int64_t));
    mixture->tiles = take(&next, (model->num_experts + 1) * (int64_t)sizeof(int64_t));
    mixture->place_of = take(&next, pairs * (int64_t)sizeof(int64_t));
    mixture->pair_at = take(&next, pairs * (int64_t)sizeof(int64_t));
    mixture->inputs = take(&next, pairs * model->hidden_size * item);
    mixture->gate_up = take(&next, pairs * 2 * model->expert_size * item);
    mixture->inner = take(&next, pairs * model->expert_size * item);
    mixture->packed = take(&next, packed_bytes(model, num_rows));
    return next - scratch;
}

/* ---- routing ---- */

/* Each expert's share of a row by its scores: their softmax, or the sigmoid of each. `powers` order as shares do, and
 * tell those apart that a division or a sigmoid makes equal. */
static void shares_of(const tn_decoder *model, const float *scores, float *powers, float *shares) {
    const int64_t num = model->num_experts;
    const int dtype = model->expert_scores_wide ? TN_F32 : model->dtype;
    float largest = -__builtin_inff(), total = 0.0f;
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        vf_store_part(powers + place, round_to(dtype, load_elements(scores, TN_F32, place, count)), count);
    }
    if (model->expert_sigmoid) {
        for (int64_t n = 0; n < num; n++) shares[n] = -powers[n];
        tn_exp(shares, shares, num);
        for (int64_t n = 0; n < num; n++) shares[n] = 1.0f / (1.0f + shares[n]);
        return;
    }
    for (int64_t n = 0; n < num; n++) largest = powers[n] > largest ? powers[n] : largest;
    for (int64_t n = 0; n < num; n++) powers[n] -= largest;
    tn_exp(powers, powers, num);
    for (int64_t n = 0; n < num; n++) total += powers[n];
    for (int64_t n = 0; n < num; n++) shares[n] = powers[n] / total;
}

/* The highest number that is not taken; of equal ones the first. */
static int64_t best_of(const float *numbers, const bool *is_taken, int64_t begin, int64_t end) {
    int64_t best = -1;
    for (int64_t n = begin; n < end; n++)
        if (!is_taken[n] && (best < 0 || numbers[n] > numbers[best])) best = n;
    return best;
}

/* Takes all experts but those of the row's groups. */
static void take_other_groups(const tn_decoder *model, const float *numbers, bool by_two, bool *is_taken) {
    const int64_t num_groups = model->num_expert_groups, size = model->num_experts / num_groups;
    float best[TN_MAX_EXPERTS];
    bool is_used[TN_MAX_EXPERTS] = {0};
    for (int64_t group = 0; group < num_groups; group++) {
        const int64_t begin = group * size, end = begin + size, first = best_of(numbers, is_taken, begin, end);
        best[group] = numbers[first];
        if (!by_two || size < 2) continue;
        is_taken[first] = true;
        best[group] += numbers[best_of(numbers, is_taken, begin, end)];
        is_taken[first] = false;
    }
    for (int64_t k = 0; k < model->num_expert_groups_used; k++) is_used[best_of(best, is_used, 0, num_groups)] = true;
    for (int64_t n = 0; n < model->num_experts; n++) is_taken[n] = !is_used[n / size];
}

/* The experts of one row, ascending, and their weights. Of equal scores the earlier one wins. */
static void route_row(const tn_mixture *mixture, const tn_decoder *model, const tn_decoder_layer *layer, int64_t row) {
    const int64_t num = model->num_experts, used = model->num_experts_used;
    const tn_vector *correction = &layer->correction, *factors = &layer->expert_factors;
    const bool is_corrected = correction->data != NULL;
    float powers[TN_MAX_EXPERTS] = {0}, shares[TN_MAX_EXPERTS] = {0};
    bool is_taken[TN_MAX_EXPERTS] = {0}, is_chosen[TN_MAX_EXPERTS] = {0};
    shares_of(model, mixture->scores + row * num, powers, shares);
    for (int64_t n = 0; is_corrected && n < num; n += TN_LANES) {
        const int count = lanes_left(num - n);
        const vf more = load_elements(correction->data, correction->dtype, n, count);
        vf_store_part(powers + n, vf_add(vf_load_part(shares + n, count), more), count);
    }
    if (model->num_expert_groups_used < model->num_expert_groups)
        take_other_groups(model, powers, is_corrected, is_taken);
    float of_chosen = 0.0f;
    for (int64_t k = 0; k < used; k++) {
        const int64_t best = best_of(powers, is_taken, 0, num);
        is_taken[best] = is_chosen[best] = true;
        of_chosen += shares[best];
    }
    int64_t pair = row * used;
    for (int64_t n = 0; n < num; n++) {
        if (!is_chosen[n]) continue;
        float weight = shares[n];
        if (model->expert_weights_sum_to_1) weight /= of_chosen + model->expert_sum_eps;
        weight *= model->expert_factor;
        if (factors->data != NULL) weight *= vf_sum(load_elements(factors->data, factors->dtype, n, 1));
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
    mixture->tiles[0] = 0;
    for (int64_t n = 0; n < model->num_experts; n++) {
        mixture->tiles[n + 1] = mixture->tiles[n] + tiles_of(starts[n + 1]);
        starts[n + 1] += starts[n];
    }
    int64_t next[TN_MAX_EXPERTS];
    for (int64_t n = 0; n < model->num_experts; n++) next[n] = starts[n];
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        const int64_t place = next[mixture->chosen[pair]]++;
        mixture->place_of[pair] = place;
        mixture->pair_at[place] = pair;
    }
}

/* ---- products ---- */

/* The packed inputs of an expert. */
static void *packed_of(const tn_mixture *mixture, int64_t expert, int64_t num_in) {
    return (char *)mixture->packed + mixture->tiles[expert] * tn_packed_bytes(TILE_ROWS, num_in);
}

/* A product of an expert with its rows. */
typedef const tn_projection *(*projection_t)(const tn_expert *expert);

static const tn_projection *gate_up_of(const tn_expert *expert) { return &expert->gate_up; }
static const tn_projection *down_of(const tn_expert *expert) { return &expert->down; }

/* Inputs of a product of all experts, packed; then a barrier. */
static void pack_stage(const tn_mixture *mixture, const tn_decoder *model, const tn_decoder_layer *layer,
                       projection_t projection, const void *x, tn_region *region) {
#if TN_TILES
    if (model->dtype != TN_BF16) return;
    const int64_t num_in = projection(layer->experts)->num_in;
    int64_t expert = -1, begin = 0, end = 0; /* pieces of the expert */
    for (int64_t piece; piece = tn_next_chunk(region), true;) {
        while (piece >= end) {
            if (++expert == model->num_experts) goto done;
            begin = end;
            end += tn_pack_pieces(mixture->starts[expert + 1] - mixture->starts[expert], num_in);
        }
        const int64_t first = mixture->starts[expert];
        const int forms = tn_projection_forms(projection(&layer->experts[expert]), model->dtype);
        tn_pack(forms, packed_of(mixture, expert, num_in), element_at(x, model->dtype, first * num_in), num_in,
                mixture->starts[expert + 1] - first, num_in, piece - begin);
    }
done:
    tn_barrier(region);
#else
    (void)mixture, (void)model, (void)layer, (void)projection, (void)x, (void)region;
#endif
}

/* Columns [begin, end) of gate and up of one expert, or of up alone, and what becomes of them. */
static void gate_up_columns(const tn_mixture *mixture, const tn_decoder *model, const tn_decoder_layer *layer,
                            int64_t expert, int64_t begin, int64_t end) {
    const int64_t inner = model->expert_size, first = mixture->starts[expert];
    const int64_t num_rows = mixture->starts[expert + 1] - first, num_out = model->plain_mlp ? inner : 2 * inner;
    const int dtype = model->dtype;
    const tn_product product = {
        .projection = &layer->experts[expert].gate_up,
        .x = element_at(mixture->inputs, dtype, first * model->hidden_size),
        .packed = packed_of(mixture, expert, model->hidden_size),
        .out = element_at(mixture->gate_up, dtype, first * num_out),
        .num_rows = num_rows,
        .dtype = dtype,
    };
    tn_product_columns(&product, begin, end);
    if (!model->plain_mlp) tn_product_columns(&product, inner + begin, inner + end);
    for (int64_t row = first; row < first + num_rows; row++) {
        const int64_t gate = row * num_out + begin;
        void *out = element_at(mixture->inner, dtype, row * inner + begin);
        const void *gates = element_at(mixture->gate_up, dtype, gate);
        const void *ups = model->plain_mlp ? NULL : element_at(mixture->gate_up, dtype, gate + inner);
        if (model->swiglu_limit != 0.0f)
            tn_clamped_swiglu_row(out, gates, ups, end - begin, model->swiglu_alpha, model->swiglu_limit, dtype);
        else
            tn_activate_row(out, gates, ups, end - begin, model->activation, dtype);
    }
}

static void down_columns(const tn_mixture *mixture, const tn_decoder *model, const tn_decoder_layer *layer,
                         int64_t expert, int64_t begin, int64_t end) {
    const int64_t first = mixture->starts[expert];
    const int dtype = model->dtype;
    const tn_product product = {
        .projection = &layer->experts[expert].down,
        .x = element_at(mixture->inner, dtype, first * model->expert_size),
        .packed = packed_of(mixture, expert, model->expert_size),
        .out = element_at(mixture->inputs, dtype, first * model->hidden_size),
        .num_rows = mixture->starts[expert + 1] - first,
        .dtype = dtype,
    };
    tn_product_columns(&product, begin, end);
}

/* Columns [begin, end) of one expert, of all of its rows. */
typedef void (*columns_t)(const tn_mixture *mixture, const tn_decoder *model, const tn_decoder_layer *layer,
                          int64_t expert, int64_t begin, int64_t end);

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
        const int64_t begin = task % chunks * chunk;
        columns(mixture, model, layer, expert, begin, begin + chunk < num_columns ? begin + chunk : num_columns);
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
            const float weight = model->experts_weigh_inputs ? 1.0f : mixture->weights[pair];
            sum = round_to(dtype, vf_add(sum, round_to(dtype, vf_mul(made, vf_set(weight)))));
        }
        store_elements(out, dtype, row * num + d, sum, count);
    }
}

void tn_router_stages(const tn_mixture *mixture, const tn_decoder *model, const tn_decoder_layer *layer, const void *x,
                      int64_t num_rows, tn_region *region) {
    const tn_product scores = {&layer->router, x, NULL, mixture->packed, mixture->scores, num_rows, model->dtype, 1};
    tn_input_stage(&scores, region);
    tn_product_stage(&scores, region);
    tn_barrier(region);
    EACH_ROW(region, num_rows) route_row(mixture, model, layer, row);
    tn_barrier(region);
}

void tn_mixture_stages(const tn_mixture *mixture, const tn_decoder *model, const tn_decoder_layer *layer, const void *x,
                       void *out, int64_t num_rows, tn_region *region) {
    const int64_t num_pairs = num_rows * model->num_experts_used;
    const size_t row_bytes = (size_t)(model->hidden_size * element_bytes(model->dtype));
    if (tn_next_chunk(region) == 0) group(mixture, model, num_pairs);
    tn_barrier(region);
    EACH_ROW(region, num_pairs) {
        const int64_t pair = mixture->pair_at[row], from = pair / model->num_experts_used;
        void *input = element_at(mixture->inputs, model->dtype, row * model->hidden_size);
        memcpy(input, element_at(x, model->dtype, from * model->hidden_size), row_bytes);
        if (model->experts_weigh_inputs) tn_scale_row(input, mixture->weights[pair], model->hidden_size, model->dtype);
    }
    tn_barrier(region);
    pack_stage(mixture, model, layer, gate_up_of, mixture->inputs, region);
    each_expert(gate_up_columns, mixture, model, layer, model->expert_size, region);
    pack_stage(mixture, model, layer, down_of, mixture->inner, region);
    each_expert(down_columns, mixture, model, layer, model->hidden_size, region);
    EACH_ROW(region, num_rows) sum_row(mixture, model, out, row);
    tn_barrier(region);
}
