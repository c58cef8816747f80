/* A decoder's step: all of its layers in one region, stage by stage, with a barrier between two stages.
 *
 * x + output(attention(qkv(norm(x)))), then x + down(activation(gate(y)) * up(y)) of y = norm(x); some models have
 * norms of what is added to x, too, or only these; some have no gate, some layers only one of the two. What a stage
 * writes is rounded to the model's dtype, as models that compute in it round (docs/native.md, "Numbers"). In parallel
 * layers the MLP takes the norm that attention takes, or one of its own of the same x. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "adapters.h"
#include "altup.h"
#include "attention.h"
#include "convolution.h"
#include "core.h"
#include "delta_net.h"
#include "elements.h"
#include "experts.h"
#include "heads.h"
#include "latent.h"
#include "linear.h"
#include "mamba.h"
#include "projection.h"
#include "rows.h"

enum { ALIGNMENT = 64 };

/* Rows of a step in between, in scratch. */
typedef struct {
    const tn_decoder_step_args *args;
    tn_adapted adapted; /* of no layer and site yet */
    void *x;        /* (num_rows, hidden_size): args->x, or of several streams the active one's */
    void *normed;   /* (num_rows, hidden_size): also what is added to x */
    void *heads;    /* (num_rows, num_heads + 2 num_kv_heads, head_dim), or (num_rows, 3, hidden_size) to convolve; of
                     * latents what `qkv` makes */
    void *attended; /* (num_rows, num_heads * head_dim), or (num_rows, hidden_size) of a convolution; of latents the
                     * sums, of a delta net or Mamba-2 the values */
    void *mixed;    /* inputs of a delta net or Mamba-2, or what `qkv` makes in another order than `heads` */
    float *factors; /* of a delta net or Mamba-2 */
    float *values;  /* of Mamba-2, before the norm */
    tn_latent latent; /* of no layer yet */
    void *gate_up;  /* (num_rows, 2 intermediate_size) */
    void *inner;    /* (num_rows, intermediate_size) */
    void *shared;   /* (num_rows, hidden_size): what the shared expert adds to a mixture, or Mamba-2 or a low-rank product
                     * to attention */
    float *gates;   /* (num_rows,): what it is gated with, before the sigmoid */
    void *permuted; /* (num_rows, permuted_size) */
    void *packed;   /* inputs of one product at a time, as tiles take them */
    tn_mixture mixture;
} step_t;

/* The next `num_elements` of scratch: NULL scratch only counts. */
static void *take(char **scratch, int64_t num_elements, int dtype) {
    void *taken = *scratch;
    *scratch += (num_elements * element_bytes(dtype) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return taken;
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Columns of an MLP between gate and down: of a dense one, or a shared expert; or of a layer's inputs, or what lies
 * between the two products next to attention. */
static int64_t most_inner(const tn_decoder *model) {
    const int64_t others = larger(model->layer_input_size, model->laurel_rank);
    return larger(larger(model->intermediate_size, model->shared_size), others);
}

/* Columns of what attention makes, or what is in its place. */
static int64_t attended_size(const tn_decoder *model) {
    const int64_t attended = model->num_heads * (model->latent_rank ? model->value_dim : model->head_dim);
    return larger(attended, larger(model->delta_value_heads * model->delta_value_size, tn_mamba_values(model)));
}

/* Of any product. */
static int64_t most_inputs(const tn_decoder *model) {
    return larger(larger(attended_size(model), model->hidden_size), larger(most_inner(model), model->query_rank));
}

/* Columns of queries, keys and values with gates, or in another order than attention has them; 0: as it has them. */
static int64_t mixed_columns(const tn_decoder *model) {
    const int64_t kinds = model->gated_attention ? 2 : 1;
    if (!model->gated_attention && !model->interleaved_qkv) return 0;
    return (kinds * model->num_heads + 2 * model->num_kv_heads) * model->head_dim;
}

/* Rows of latent attention, which no other model has. */
static void lay_out_latent(tn_latent *latent, const tn_decoder *model, int64_t num_rows, char **next) {
    const int dtype = model->dtype;
    const int64_t queries = model->num_heads * (model->plain_dim + model->rotary_dim);
    latent->low = take(next, num_rows * model->query_rank, dtype);
    latent->queries = take(next, model->query_rank ? num_rows * queries : 0, dtype);
    latent->absorbed = take(next, num_rows * model->num_heads * model->head_dim, dtype);
    latent->packed_heads = *next;
    *next += tn_latent_packed_bytes(model, num_rows);
}

/* Lays the step's rows out in scratch; returns how many bytes they take. */
static int64_t lay_out(step_t *step, const tn_decoder *model, int64_t num_rows, char *scratch) {
    const int dtype = model->dtype;
    const int64_t convolved = model->convolution_size ? model->hidden_size : 0;
    char *next = scratch;
    step->normed = take(&next, num_rows * model->hidden_size, dtype);
    step->x = take(&next, model->num_streams ? num_rows * model->hidden_size : 0, dtype);
    const int64_t heads = model->latent_rank ? tn_latent_down_size(model)
                                             : (model->num_heads + 2 * model->num_kv_heads) * model->head_dim;
    step->heads = take(&next, num_rows * larger(heads, 3 * convolved), dtype);
    step->attended = take(&next, num_rows * larger(attended_size(model), convolved), dtype);
    const int64_t of_states = larger(tn_delta_mixed(model), tn_mamba_mixed(model));
    step->mixed = take(&next, num_rows * larger(mixed_columns(model), of_states), dtype);
    const int64_t num_factors = model->delta_key_heads + model->delta_value_heads + model->mamba_heads;
    step->factors = take(&next, num_rows * 2 * num_factors, TN_F32);
    step->values = take(&next, num_rows * tn_mamba_values(model), TN_F32);
    step->gate_up = take(&next, num_rows * 2 * most_inner(model), dtype);
    step->inner = take(&next, num_rows * most_inner(model), dtype);
    const bool has_more = model->shared_size || model->mamba_heads || model->laurel_rank;
    step->shared = take(&next, has_more ? num_rows * model->hidden_size : 0, dtype);
    step->gates = take(&next, model->shared_size ? num_rows : 0, TN_F32);
    step->permuted = take(&next, num_rows * model->permuted_size, dtype);
    step->packed = next;
    next += tn_product_packed_bytes(num_rows, most_inputs(model), model->permuted_size, dtype);
    if (model->latent_rank) lay_out_latent(&step->latent, model, num_rows, &next);
    if (model->num_experts) next += tn_lay_out_mixture(&step->mixture, model, num_rows, next);
    return next - scratch;
}

/* ---- stages ---- */

/* A norm, or none: `weight` has no data then. */
typedef struct {
    tn_vector weight;
    tn_vector bias; /* of layer norms, or none */
} norm_t;

static norm_t attention_norm(const tn_decoder_layer *layer) {
    return (norm_t){layer->attention_norm, layer->attention_norm_bias};
}

static norm_t mlp_norm(const tn_decoder_layer *layer) { return (norm_t){layer->mlp_norm, layer->mlp_norm_bias}; }

static norm_t cross_norm(const tn_decoder_layer *layer) {
    return (norm_t){layer->cross_norm, layer->cross_norm_bias};
}

static bool has_mixer(const tn_decoder_layer *layer) { return layer->qkv.num_parts || layer->mamba_in.num_parts; }

static bool has_mlp(const tn_decoder_layer *layer) { return layer->gate_up.num_parts || layer->experts != NULL; }

/* That of the layer's first input. */
static norm_t first_norm(const tn_decoder_layer *layer) {
    return has_mixer(layer) ? attention_norm(layer) : mlp_norm(layer);
}

static void norm_row(const tn_decoder *model, void *out, const void *x, const tn_vector *weight,
                     const tn_vector *bias) {
    if (bias != NULL && bias->data != NULL)
        tn_layer_norm_row(out, x, weight, bias, model->hidden_size, model->norm_eps, model->norm, model->dtype);
    else
        tn_norm_row(out, x, weight, model->hidden_size, model->norm_eps, model->norm, model->dtype);
}

/* normed = norm(x), where there is a norm. */
static void norm_stage(const step_t *step, norm_t norm, tn_region *region) {
    const tn_decoder *model = step->args->model;
    if (norm.weight.data == NULL) return;
    EACH_ROW(region, step->args->num_rows) {
        const int64_t place = row * model->hidden_size;
        void *normed = element_at(step->normed, model->dtype, place);
        norm_row(model, normed, element_at(step->x, model->dtype, place), &norm.weight, &norm.bias);
        if (model->rounds_inputs) tn_round_to_codes_row(normed, model->hidden_size, model->dtype);
    }
    tn_barrier(region);
}

/* x += what `normed` holds, after a norm of its own and scaled, where there are such; then x *= scalar, where there is
 * one, and normed = norm(x), unless there is no `next` norm. */
static void residual_stage(const step_t *step, const tn_vector *own, float scale, const tn_vector *scalar, norm_t next,
                           tn_region *region) {
    const tn_decoder *model = step->args->model;
    EACH_ROW(region, step->args->num_rows) {
        const int64_t place = row * model->hidden_size;
        void *x = element_at(step->x, model->dtype, place);
        void *normed = element_at(step->normed, model->dtype, place);
        if (own->data != NULL) norm_row(model, normed, normed, own, NULL);
        if (scale != 1.0f) tn_scale_row(normed, scale, model->hidden_size, model->dtype);
        tn_add_row(x, normed, model->hidden_size, model->dtype);
        if (scalar != NULL && scalar->data != NULL)
            tn_scale_row(x, vf_sum(load_elements(scalar->data, scalar->dtype, 0, 1)), model->hidden_size, model->dtype);
        if (next.weight.data == NULL) continue;
        norm_row(model, normed, x, &next.weight, &next.bias);
        if (model->rounds_inputs) tn_round_to_codes_row(normed, model->hidden_size, model->dtype);
    }
    tn_barrier(region);
}

/* rows = norm(rows), where there is a norm, of `num` numbers each: what attention or an activation made. Rounded, where
 * inputs are. */
static void inner_stage(const step_t *step, void *rows, const tn_vector *weight, int64_t num, tn_region *region) {
    const tn_decoder *model = step->args->model;
    if (weight->data == NULL && !model->rounds_inputs) return;
    EACH_ROW(region, step->args->num_rows) {
        void *own = element_at(rows, model->dtype, row * num);
        if (weight->data != NULL) tn_norm_row(own, own, weight, num, model->norm_eps, model->norm, model->dtype);
        if (model->rounds_inputs) tn_round_to_codes_row(own, num, model->dtype);
    }
    tn_barrier(region);
}

/* What a projection behind this norm takes: x itself where there is none. */
static const void *input_of(const step_t *step, const tn_vector *norm) {
    return norm->data != NULL ? step->normed : step->x;
}

static tn_adapted adapted_at(const step_t *step, int64_t layer, int32_t site) {
    tn_adapted adapted = step->adapted;
    adapted.layer = layer;
    adapted.site = site;
    return adapted;
}

/* The product's columns [begin, end), with what adapters add to them while they are in the cache. */
static void adapted_columns(const tn_product *product, const tn_adapted *adapted, int64_t begin, int64_t end) {
    tn_product_columns(product, begin, end);
    tn_adapter_columns(adapted, product->out, product->projection->num_out, product->dtype, begin, end);
}

static void project_stage(const step_t *step, const tn_projection *projection, const tn_adapted *adapted,
                          const void *x, void *out, tn_region *region) {
    const tn_product product = {projection, x, step->permuted, step->packed, out, step->args->num_rows,
                                step->args->model->dtype, 0};
    tn_adapter_low_stage(adapted, x, projection->num_in, product.dtype, region);
    tn_input_stage(&product, region);
    if (adapted->num_runs) {
        EACH_COLUMNS(region, projection->num_out) adapted_columns(&product, adapted, begin, end);
    } else {
        tn_product_stage(&product, region);
    }
    tn_barrier(region);
}

/* Queries, keys and values of a row to where attention has them. Behind each query there is its key and value, or a gate,
 * which stays. */
static void part_heads(const step_t *step, int64_t row) {
    const tn_decoder *model = step->args->model;
    const int64_t num_heads = model->num_heads, bytes = model->head_dim * element_bytes(model->dtype);
    const int64_t num_parts = model->interleaved_qkv ? 3 : 1, apart = model->interleaved_qkv ? 3 : 2;
    const char *from = element_at(step->mixed, model->dtype, row * mixed_columns(model));
    char *to = (char *)step->heads + row * (num_heads + 2 * model->num_kv_heads) * bytes;
    for (int64_t part = 0; part < num_parts; part++)
        for (int64_t head = 0; head < num_heads; head++)
            memcpy(to + (part * num_heads + head) * bytes, from + (apart * head + part) * bytes, (size_t)bytes);
    if (model->gated_attention)
        memcpy(to + num_heads * bytes, from + 2 * num_heads * bytes, (size_t)(2 * model->num_kv_heads * bytes));
}

/* Outputs of attention times the sigmoids of their gates, each rounded. */
static void gate_stage(const step_t *step, tn_region *region) {
    const tn_decoder *model = step->args->model;
    const int64_t num = model->head_dim;
    const int dtype = model->dtype;
    EACH_ROW(region, step->args->num_rows) {
        for (int64_t head = 0; head < model->num_heads; head++) {
            const int64_t gates = row * mixed_columns(model) + (2 * head + 1) * num;
            const int64_t outputs = (row * model->num_heads + head) * num;
            for (int64_t d = 0; d < num; d += TN_LANES) {
                const int count = lanes_left(num - d);
                const vf gate = load_elements(step->mixed, dtype, gates + d, count);
                const vf share = vf_div(vf_set(1.0f), vf_add(vf_set(1.0f), vf_exp(vf_sub(vf_zero(), gate))));
                const vf out = load_elements(step->attended, dtype, outputs + d, count);
                store_elements(step->attended, dtype, outputs + d, vf_mul(out, round_to(dtype, share)), count);
            }
        }
    }
    tn_barrier(region);
}

/* From one row of queries to the next: keys and values are behind them, where the layer has its own. */
static int64_t heads_stride(const tn_decoder *model, const tn_decoder_layer *layer) {
    const int64_t kinds = layer->reads_keys ? 0 : layer->keys_are_values ? 1 : 2;
    return (model->num_heads + kinds * layer->num_kv_heads) * layer->head_dim;
}

static tn_heads_args heads_of(const step_t *step, const tn_decoder_layer *layer) {
    const tn_decoder_step_args *args = step->args;
    const tn_decoder *model = args->model;
    return (tn_heads_args){
        .size = sizeof(tn_heads_args),
        .kv = &args->kv[layer->pool],
        .heads = step->heads,
        .turns = layer->rotary == TN_ROTARY_MAIN    ? args->turns
                 : layer->rotary == TN_ROTARY_LOCAL ? args->local_turns
                                                    : NULL,
        .turn = args->turn,
        .slots = args->slots,
        .query_scales = layer->scales_queries ? args->query_scales : NULL,
        .query_norm = layer->query_norm,
        .key_norm = layer->key_norm,
        .value_norm = layer->value_norm,
        .layer = layer->kv_layer,
        .num_rows = args->num_rows,
        .num_heads = model->num_heads,
        .num_kv_heads = layer->reads_keys ? 0 : layer->num_kv_heads,
        .head_dim = layer->head_dim,
        .rotary_dim = layer->rotary == TN_ROTARY_LOCAL ? model->local_rotary_dim : model->rotary_dim,
        .norm_eps = model->norm_eps,
        .dtype = model->dtype,
        .norm = model->norm,
        .joint_norms = model->joint_norms,
        .late_norms = model->late_norms,
        .wide_turns = model->wide_turns,
        .interleaved = model->interleaved,
        .keys_are_values = layer->keys_are_values,
    };
}

static void heads_stage(const step_t *step, const tn_decoder_layer *layer, tn_region *region) {
    const tn_heads_args heads = heads_of(step, layer);
    EACH_ROW(region, step->args->num_rows) {
        if (mixed_columns(step->args->model)) part_heads(step, row);
        tn_write_heads_row(&heads, row);
    }
    tn_barrier(region);
}

/* Of queries that are `query_stride` numbers apart, over the keys from `first_key` on, all of those before `last_key`
 * where that is not 0. */
static void attend_stage(const step_t *step, const tn_decoder_layer *layer, const void *queries, int64_t query_stride,
                         void *out, int64_t first_key, int64_t last_key, tn_region *region) {
    const tn_decoder_step_args *args = step->args;
    const tn_decoder *model = args->model;
    const tn_attention_args attention = {
        .size = sizeof attention,
        .kv = &args->kv[layer->pool],
        .spans = args->spans,
        .queries = queries,
        .out = out,
        .num_spans = args->num_spans,
        .query_stride = query_stride,
        .out_stride = model->num_heads * layer->head_dim,
        .layer = layer->kv_layer,
        .window = layer->window,
        .num_heads = model->num_heads,
        .num_kv_heads = layer->num_kv_heads,
        .head_dim = layer->head_dim,
        .latent_rank = model->latent_rank,
        .scale = model->attention_scale,
        .dtype = model->dtype,
        .cap = model->score_cap,
        .bidirectional = model->bidirectional,
        .sinks = layer->sinks,
        .ends = layer->window || !model->ends_in_windows ? args->ends : NULL,
        .chunked = model->chunked_windows,
        .first_key = first_key,
        .last_key = last_key,
    };
    tn_attention_stage(&attention, region);
    tn_barrier(region);
}

/* Over the sequence's own keys. */
static void attention_stage(const step_t *step, const tn_decoder_layer *layer, const void *queries,
                            int64_t query_stride, void *out, tn_region *region) {
    attend_stage(step, layer, queries, query_stride, out, step->args->model->source_len, 0, region);
}

/* Each row's sums of latents take the place of its queries: no other row reads these. */
static void latent_stages(const step_t *step, const tn_decoder_layer *layer, tn_region *region) {
    const tn_decoder *model = step->args->model;
    const tn_heads_args heads = heads_of(step, layer);
    tn_latent latent = step->latent;
    latent.args = step->args, latent.layer = layer, latent.heads = &heads;
    latent.down = step->heads, latent.out = step->attended;
    latent.permuted = step->permuted, latent.packed = step->packed;
    tn_latent_query_stages(&latent, region);
    attention_stage(step, layer, latent.absorbed, model->num_heads * model->head_dim, latent.absorbed, region);
    tn_latent_value_stage(&latent, region);
}

static void convolution_stages(const step_t *step, const tn_decoder_layer *layer, tn_region *region) {
    const tn_decoder_step_args *args = step->args;
    const tn_convolution convolution = {args->model, layer,       args->kv,       args->spans,
                                        args->slots, step->heads, step->attended, args->num_rows};
    tn_convolution_stages(&convolution, region);
}

/* inner = activation(gate) * up of a row's columns [begin, end). */
static void activate(const step_t *step, const tn_decoder_layer *layer, int64_t row, int64_t begin, int64_t end) {
    const tn_decoder *model = step->args->model;
    const bool has_gate = !model->plain_mlp;
    const int64_t num_out = layer->gate_up.num_out, inner = num_out / (has_gate ? 2 : 1);
    void *gate = element_at(step->gate_up, model->dtype, row * num_out + begin);
    if (model->gate_scale != 1.0f) tn_scale_row(gate, model->gate_scale, end - begin, model->dtype);
    tn_activate_row(element_at(step->inner, model->dtype, row * inner + begin), gate,
                    has_gate ? element_at(gate, model->dtype, inner) : NULL, end - begin, model->activation,
                    model->dtype);
}

/* Columns of gate and the same ones of up, and at once what becomes of them, while they are in the cache; where gates are
 * cut, once a row has all of them. */
static void mlp_stage(const step_t *step, const tn_decoder_layer *layer, int64_t index, tn_region *region) {
    const tn_decoder *model = step->args->model;
    const bool has_gate = !model->plain_mlp;
    const int64_t num_rows = step->args->num_rows, inner = layer->gate_up.num_out / (has_gate ? 2 : 1);
    const int dtype = model->dtype;
    const bool shares_norm = model->parallel && layer->mlp_norm.data == NULL;
    const void *x = input_of(step, shares_norm ? &layer->attention_norm : &layer->mlp_norm);
    const tn_product product = {&layer->gate_up, x, step->permuted, step->packed, step->gate_up, num_rows, dtype, 0};
    const tn_adapted adapted = adapted_at(step, index, TN_AT_GATE_UP);
    tn_adapter_low_stage(&adapted, x, layer->gate_up.num_in, dtype, region);
    tn_input_stage(&product, region);
    EACH_COLUMNS(region, inner) {
        adapted_columns(&product, &adapted, begin, end);
        if (has_gate) adapted_columns(&product, &adapted, inner + begin, inner + end);
        for (int64_t row = 0; row < num_rows && !layer->cuts_gates; row++) activate(step, layer, row, begin, end);
    }
    tn_barrier(region);
    if (!layer->cuts_gates) return;
    EACH_ROW(region, num_rows) {
        tn_cut_gates_row(element_at(step->gate_up, dtype, row * layer->gate_up.num_out), inner, layer->gate_cut, dtype);
        activate(step, layer, row, 0, inner);
    }
    tn_barrier(region);
}

/* The numbers that gate the shared expert, which takes the same rows. */
static void shared_gate_stage(const step_t *step, const tn_decoder_layer *layer, tn_region *region) {
    const tn_product product = {&layer->shared_gate, input_of(step, &layer->mlp_norm), step->permuted, step->packed,
                                step->gates, step->args->num_rows, step->args->model->dtype, 1};
    if (!layer->shared_gate.num_parts) return;
    tn_input_stage(&product, region);
    tn_product_stage(&product, region);
    tn_barrier(region);
}

/* normed += shared, gated where there is a gate: its number and the sigmoid of that are rounded. Both are normalised
 * first, where experts join the MLP. */
static void add_shared_row(const step_t *step, const tn_decoder_layer *layer, int64_t row) {
    const tn_decoder *model = step->args->model;
    void *shared = element_at(step->shared, model->dtype, row * model->hidden_size);
    void *normed = element_at(step->normed, model->dtype, row * model->hidden_size);
    if (layer->expert_output_norm.data != NULL) norm_row(model, normed, normed, &layer->expert_output_norm, NULL);
    if (layer->shared_output_norm.data != NULL) norm_row(model, shared, shared, &layer->shared_output_norm, NULL);
    if (layer->shared_gate.num_parts) {
        const vf gate = round_to(model->dtype, vf_set(step->gates[row])), one = vf_set(1.0f);
        float share;
        vf_store_part(&share, round_to(model->dtype, vf_div(one, vf_add(one, vf_exp(vf_sub(vf_zero(), gate))))), 1);
        tn_scale_row(shared, share, model->hidden_size, model->dtype);
    }
    tn_add_row(normed, shared, model->hidden_size, model->dtype);
}

/* The experts of each row. Where they join the MLP, the router takes x: its unit times a weight, over the root of its
 * size, each rounded. */
static void router_stages(const step_t *step, const tn_decoder_layer *layer, tn_region *region) {
    const tn_decoder *model = step->args->model;
    const int64_t num = model->hidden_size;
    if (layer->router_norm.data != NULL) {
        const float factor = (float)(1.0 / sqrt((double)num));
        EACH_ROW(region, step->args->num_rows) {
            void *normed = element_at(step->normed, model->dtype, row * num);
            tn_norm_row(normed, element_at(step->x, model->dtype, row * num), &layer->router_norm, num,
                        model->norm_eps, TN_RMS, model->dtype);
            tn_scale_row(normed, factor, num, model->dtype);
        }
        tn_barrier(region);
    }
    const void *x = layer->router_norm.data != NULL ? step->normed : input_of(step, &layer->mlp_norm);
    tn_router_stages(&step->mixture, model, layer, x, step->args->num_rows, region);
}

/* What `normed` holds then is to be added to x. */
static void mlp_stages(const step_t *step, const tn_decoder_layer *layer, int64_t index, tn_region *region) {
    const tn_decoder *model = step->args->model;
    const bool is_mixture = layer->experts != NULL, has_mlp = layer->gate_up.num_parts > 0;
    const tn_adapted adapted = adapted_at(step, index, TN_AT_DOWN);
    if (is_mixture) {
        if (has_mlp) mlp_stage(step, layer, index, region); /* the shared expert takes the same rows */
        shared_gate_stage(step, layer, region);
        router_stages(step, layer, region);
        const norm_t expert_norm = {layer->expert_norm, {0}};
        norm_stage(step, expert_norm, region);
        tn_mixture_stages(&step->mixture, model, layer, input_of(step, &layer->mlp_norm), step->normed,
                          step->args->num_rows, region);
        if (!has_mlp) return;
    }
    if (!is_mixture) inner_stage(step, step->inner, &layer->mlp_inner_norm, layer->down.num_in, region);
    project_stage(step, &layer->down, &adapted, step->inner, is_mixture ? step->shared : step->normed, region);
    if (!is_mixture) return;
    EACH_ROW(region, step->args->num_rows) add_shared_row(step, layer, row);
    tn_barrier(region);
}

static void delta_net_stage(const step_t *step, const tn_decoder_layer *layer, tn_region *region) {
    const tn_decoder_step_args *args = step->args;
    const tn_delta_net net = {args->model,   layer,          args->spans,    step->mixed,
                              step->factors, step->attended, args->num_spans};
    tn_delta_net_stage(&net, region);
}

/* A Mamba-2 layer of what `normed` holds, which stays. */
static void mamba_stages(const step_t *step, const tn_decoder_layer *layer, int64_t index, void *out,
                         tn_region *region) {
    const tn_decoder_step_args *args = step->args;
    const tn_adapted at_in = adapted_at(step, index, TN_AT_MAMBA_IN);
    const tn_adapted at_out = adapted_at(step, index, TN_AT_MAMBA_OUT);
    const tn_vector no_norm = {0};
    const tn_mamba mamba = {args->model,  layer,          args->spans,     step->mixed,   step->factors,
                            step->values, step->attended, args->num_spans, args->num_rows};
    project_stage(step, &layer->mamba_in, &at_in, input_of(step, &layer->attention_norm), step->mixed, region);
    tn_mamba_stages(&mamba, region);
    inner_stage(step, step->attended, &no_norm, layer->mamba_out.num_in, region);
    project_stage(step, &layer->mamba_out, &at_out, step->attended, out, region);
}

/* normed and shared, each scaled and rounded, become normed: their sum. */
static void sum_stage(const step_t *step, tn_region *region) {
    const tn_decoder *model = step->args->model;
    const int64_t num = model->hidden_size;
    EACH_ROW(region, step->args->num_rows) {
        void *normed = element_at(step->normed, model->dtype, row * num);
        void *shared = element_at(step->shared, model->dtype, row * num);
        tn_scale_row(normed, model->attention_output_scale, num, model->dtype);
        tn_scale_row(shared, model->mamba_output_scale, num, model->dtype);
        tn_add_row(normed, shared, num, model->dtype);
    }
    tn_barrier(region);
}

/* Attention of what `normed` holds, or what is in its place; then that holds the output. */
static void attention_stages(const step_t *step, const tn_decoder_layer *layer, int64_t index, tn_region *region) {
    const tn_decoder *model = step->args->model;
    const tn_adapted at_qkv = adapted_at(step, index, TN_AT_QKV);
    const tn_adapted at_output = adapted_at(step, index, TN_AT_OUTPUT);
    const bool is_delta_net = layer->delta_taps.data != NULL, convolves = layer->convolution.data != NULL;
    const bool is_mixed = is_delta_net || (!convolves && mixed_columns(model) > 0);
    project_stage(step, &layer->qkv, &at_qkv, input_of(step, &layer->attention_norm),
                  is_mixed ? step->mixed : step->heads, region);
    if (is_delta_net) {
        delta_net_stage(step, layer, region);
    } else if (convolves) {
        convolution_stages(step, layer, region);
    } else if (model->latent_rank) {
        latent_stages(step, layer, region);
    } else {
        heads_stage(step, layer, region);
        attention_stage(step, layer, step->heads, heads_stride(model, layer), step->attended, region);
        if (model->gated_attention) gate_stage(step, region);
    }
    if (model->parallel) {
        norm_stage(step, mlp_norm(layer), region);
        mlp_stage(step, layer, index, region);
    }
    inner_stage(step, step->attended, &layer->attention_inner_norm, layer->output.num_in, region);
    project_stage(step, &layer->output, &at_output, step->attended, step->normed, region);
}

static tn_altup altup_of(const step_t *step, const tn_decoder_layer *layer) {
    return (tn_altup){step->args->model, layer, step->args->x, step->x, step->normed, step->args->num_rows};
}

/* The product next to attention, whose input `normed` holds and keeps. */
static void laurel_stages(const step_t *step, const tn_decoder_layer *layer, tn_region *region) {
    const tn_altup altup = altup_of(step, layer);
    const tn_adapted none = {0};
    const void *x = input_of(step, &layer->attention_norm);
    project_stage(step, &layer->laurel_down, &none, x, step->gate_up, region);
    project_stage(step, &layer->laurel_up, &none, step->gate_up, step->shared, region);
    tn_laurel_stage(&altup, x, step->shared, region);
}

/* Attention over the sources, of what `normed` holds; then that holds the output. */
static void cross_stages(const step_t *step, const tn_decoder_layer *layer, int64_t index, tn_region *region) {
    const tn_decoder_step_args *args = step->args;
    const tn_adapted none = {0};
    const int64_t num = layer->cross_query.num_out;
    const int dtype = args->model->dtype;
    project_stage(step, &layer->cross_query, &none, step->normed, step->heads, region);
    if (args->cross_queries != NULL) {
        EACH_ROW(region, args->num_rows) {
            void *kept = element_at(args->cross_queries, dtype, ((index - args->first) * args->num_rows + row) * num);
            memcpy(kept, element_at(step->heads, dtype, row * num), (size_t)(num * element_bytes(dtype)));
        }
        tn_barrier(region);
    }
    attend_stage(step, layer, step->heads, layer->cross_query.num_out, step->attended, 0, step->args->model->source_len,
                 region);
    project_stage(step, &layer->cross_output, &none, step->attended, step->normed, region);
}

/* The end of a layer: what its last part adds, and what the layer's own inputs do. `normed` holds `next` of x then. */
static void last_stages(const step_t *step, int64_t index, const tn_vector *own, float scale, norm_t next,
                        tn_region *region) {
    const tn_decoder_step_args *args = step->args;
    const tn_decoder *model = args->model;
    const tn_decoder_layer *layer = &model->layers[index];
    if (!layer->input_gate.num_parts) {
        residual_stage(step, own, scale, &layer->scalar, next, region);
        return;
    }
    const tn_adapted none = {0};
    const norm_t no_norm = {0};
    const int64_t num = model->layer_input_size;
    const tn_altup altup = altup_of(step, layer);
    residual_stage(step, own, scale, NULL, no_norm, region);
    if (model->num_streams) tn_altup_correct_stage(&altup, region);
    project_stage(step, &layer->input_gate, &none, step->x, step->gate_up, region);
    EACH_ROW(region, args->num_rows) {
        void *inner = element_at(step->inner, model->dtype, row * num);
        const void *gate = element_at(step->gate_up, model->dtype, row * num);
        const int64_t place = (row * model->num_layers + index) * num;
        tn_activate_row(inner, gate, element_at(args->layer_inputs, model->dtype, place), num, model->activation,
                        model->dtype);
    }
    tn_barrier(region);
    project_stage(step, &layer->input_up, &none, step->inner, step->normed, region);
    if (model->num_streams)
        tn_altup_spread_stage(&altup, step->normed, region);
    else
        residual_stage(step, &layer->input_norm, 1.0f, &layer->scalar, next, region);
}

/* The layer's attention, or what is in its place or parallel to it. `normed` holds its input, and then the MLP's, or
 * where there is no MLP `next` of x. */
static void mixer_stages(const step_t *step, int64_t index, norm_t next, tn_region *region) {
    const tn_decoder *model = step->args->model;
    const tn_decoder_layer *layer = &model->layers[index];
    const tn_vector *own = &layer->attention_output_norm;
    const bool attends = layer->qkv.num_parts > 0, has_mamba = layer->mamba_in.num_parts > 0;
    const norm_t none = {0};
    if (model->laurel_rank) laurel_stages(step, layer, region);
    if (has_mamba) mamba_stages(step, layer, index, attends ? step->shared : step->normed, region);
    if (attends) attention_stages(step, layer, index, region);
    if (attends && has_mamba) sum_stage(step, region);
    if (layer->cross_query.num_parts) {
        residual_stage(step, own, model->residual_scale, NULL, cross_norm(layer), region);
        cross_stages(step, layer, index, region);
    }
    if (!has_mlp(layer)) {
        last_stages(step, index, own, model->residual_scale, next, region);
        return;
    }
    const bool is_last = !model->parallel && !model->laurel_rank; /* of what comes before the MLP's norm */
    residual_stage(step, own, model->residual_scale, NULL, is_last ? mlp_norm(layer) : none, region);
    if (!model->laurel_rank) return;
    const tn_altup altup = altup_of(step, layer);
    tn_laurel_join_stage(&altup, step->shared, region);
    norm_stage(step, mlp_norm(layer), region);
}

static void up_to_router_body(void *arg, tn_region *region, int id) {
    (void)id;
    const step_t *step = arg;
    const tn_decoder_step_args *args = step->args;
    const tn_decoder_layer *layer = &args->model->layers[args->first];
    const norm_t none = {0};
    norm_stage(step, first_norm(layer), region);
    if (has_mixer(layer)) mixer_stages(step, args->first, none, region);
    router_stages(step, layer, region);
}

static void from_router_on_body(void *arg, tn_region *region, int id) {
    (void)id;
    const step_t *step = arg;
    const tn_decoder_step_args *args = step->args;
    const tn_decoder_layer *layer = &args->model->layers[args->first];
    const norm_t none = {0};
    norm_stage(step, mlp_norm(layer), region);
    mlp_stages(step, layer, args->first, region);
    last_stages(step, args->first, &layer->mlp_output_norm, args->model->mlp_residual_scale, none, region);
}

/* Keys and values of the sources in each layer. */
static void sources_body(void *arg, tn_region *region, int id) {
    (void)id;
    const step_t *step = arg;
    const tn_decoder_step_args *args = step->args;
    const tn_adapted none = {0};
    for (int64_t index = args->first; index < args->end; index++) {
        const tn_decoder_layer *layer = &args->model->layers[index];
        tn_heads_args heads = heads_of(step, layer);
        heads.num_heads = 0;
        project_stage(step, &layer->cross_keys, &none, args->x, step->heads, region);
        EACH_ROW(region, args->num_rows) tn_write_heads_row(&heads, row);
        tn_barrier(region);
    }
}

/* The layers one after another; `normed` holds the first one's input, and each leaves the next one's there, unless that is a
 * prediction yet to be made. */
static void step_body(void *arg, tn_region *region, int id) {
    (void)id;
    const step_t *step = arg;
    const tn_decoder_step_args *args = step->args;
    const tn_decoder *model = args->model;
    const norm_t none = {0};
    if (!model->num_streams) norm_stage(step, first_norm(&model->layers[args->first]), region);
    for (int64_t index = args->first; index < args->end; index++) {
        const tn_decoder_layer *layer = &model->layers[index];
        const bool is_next = index + 1 < args->end && !model->num_streams;
        const norm_t next = is_next ? first_norm(&model->layers[index + 1]) : none;
        if (model->num_streams) {
            const tn_altup altup = altup_of(step, layer);
            tn_altup_predict_stage(&altup, region);
            norm_stage(step, first_norm(layer), region);
        }
        if (has_mixer(layer)) mixer_stages(step, index, next, region);
        if (!has_mlp(layer)) continue;
        if (!model->parallel && layer->experts == NULL) mlp_stage(step, layer, index, region);
        mlp_stages(step, layer, index, region);
        last_stages(step, index, &layer->mlp_output_norm, model->mlp_residual_scale, next, region);
    }
}

/* ---- the exported functions ---- */

int64_t tn_decoder_scratch_bytes(const tn_decoder *model, int64_t num_rows) {
    step_t step;
    return lay_out(&step, model, num_rows, NULL);
}

static int run_step(const tn_decoder_step_args *args, const tn_adapted *adapted) {
    const tn_decoder *model = args->model;
    const tn_kv *kv = args->kv;
    if (args->size != sizeof *args || model->head_dim > TN_MAX_HEAD_DIM) return TN_REFUSED;
    if (model->num_experts > TN_MAX_EXPERTS || (model->plain_mlp && model->swiglu_limit != 0.0f)) return TN_REFUSED;
    if (model->num_experts && (model->parallel || model->rounds_inputs || model->gate_scale != 1.0f)) return TN_REFUSED;
    if (model->num_experts && (model->num_expert_groups < 1 || model->num_experts % model->num_expert_groups ||
                               model->num_experts_used * model->num_expert_groups >
                                   model->num_experts * model->num_expert_groups_used))
        return TN_REFUSED;
    if (model->dtype != TN_F32 && model->dtype != TN_BF16) return TN_REFUSED;
    if (model->layer_input_size && args->layer_inputs == NULL) return TN_REFUSED;
    if (model->convolution_size > TN_MAX_CONVOLUTION) return TN_REFUSED;
    if (model->chunked_windows && model->bidirectional) return TN_REFUSED;
    if (model->interleaved_qkv && (model->num_kv_heads != model->num_heads || model->gated_attention))
        return TN_REFUSED;
    if (model->latent_rank && (model->latent_rank + model->rotary_dim != model->head_dim || model->num_kv_heads != 1))
        return TN_REFUSED;
    if (model->delta_key_heads &&
        (model->delta_key_size > TN_MAX_DELTA_KEY || model->delta_key_size % 4 || model->delta_convolution_size < 1 ||
         model->delta_convolution_size > TN_MAX_CONVOLUTION || model->delta_value_heads % model->delta_key_heads))
        return TN_REFUSED;
    if (model->mamba_heads && (!tn_mamba_fits(model) || model->parallel)) return TN_REFUSED;
    const bool has_streams = model->num_streams > 0 || model->laurel_rank > 0;
    if (has_streams && (model->parallel || model->num_experts || model->mamba_heads)) return TN_REFUSED;
    if (model->num_streams > TN_MAX_STREAMS || (model->num_streams && !model->layer_input_size)) return TN_REFUSED;
    if (model->num_streams && (model->active_stream < 0 || model->active_stream >= model->num_streams)) return TN_REFUSED;
    if ((args->half == TN_SOURCES) > (model->source_len > 0)) return TN_REFUSED;
    if (kv->dtype == TN_I8 ? kv->scale == NULL : kv->dtype != model->dtype) return TN_REFUSED;
    if (args->first == args->end) return TN_OK;
    const bool is_half = args->half != TN_WHOLE_LAYERS && args->half != TN_SOURCES;
    if (is_half && (args->end != args->first + 1 || model->layers[args->first].experts == NULL))
        return TN_REFUSED;
    step_t step = {.args = args, .adapted = *adapted};
    lay_out(&step, model, args->num_rows, args->scratch);
    if (!model->num_streams) step.x = args->x;
    if (args->half == TN_UP_TO_ROUTER) {
        if (args->chosen == NULL) return TN_REFUSED;
        tn_run(up_to_router_body, &step);
        const size_t num = (size_t)(args->num_rows * model->num_experts_used);
        memcpy(args->chosen, step.mixture.chosen, num * sizeof *args->chosen);
        return TN_OK;
    }
    tn_run(args->half == TN_SOURCES          ? sources_body
           : args->half == TN_FROM_ROUTER_ON ? from_router_on_body
                                             : step_body,
           &step);
    return TN_OK;
}

int tn_decoder_step(const tn_decoder_step_args *args) {
    const tn_adapted none = {0};
    return run_step(args, &none);
}

int tn_adapted_decoder_step(const tn_adapted_step_args *args) {
    if (args->size != sizeof *args) return TN_REFUSED;
    const tn_adapted adapted = {args->runs, args->low, args->num_runs, args->low_stride, 0, 0};
    return run_step(args->step, &adapted);
}
