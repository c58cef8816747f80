/* A decoder's step: all of its layers in one region, stage by stage, with a barrier between two stages.
 *
 * x + output(attention(qkv(norm(x)))), then x + down(activation(gate(y)) * up(y)) of y = norm(x); some models have
 * norms of what is added to x, too, or only these. What a stage writes is rounded to the model's dtype, as models that
 * compute in it round (docs/native.md, "Numbers"). In parallel layers the MLP takes the norm that attention takes. */
#include <stdbool.h>
#include <string.h>

#include "adapters.h"
#include "attention.h"
#include "convolution.h"
#include "core.h"
#include "elements.h"
#include "experts.h"
#include "heads.h"
#include "linear.h"
#include "projection.h"
#include "rows.h"

enum { ALIGNMENT = 64 };

/* Rows of a step in between, in scratch. */
typedef struct {
    const tn_decoder_step_args *args;
    tn_adapted adapted; /* of no layer and site yet */
    void *normed;   /* (num_rows, hidden_size): also what is added to x */
    void *heads;    /* (num_rows, num_heads + 2 num_kv_heads, head_dim), or (num_rows, 3, hidden_size) to convolve */
    void *attended; /* (num_rows, num_heads * head_dim), or (num_rows, hidden_size) of a convolution */
    void *gate_up;  /* (num_rows, 2 intermediate_size) */
    void *inner;    /* (num_rows, intermediate_size) */
    void *shared;   /* (num_rows, hidden_size): what the shared expert adds to a mixture */
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

/* Columns of an MLP between gate and down: of a dense one, or a shared expert. */
static int64_t most_inner(const tn_decoder *model) { return larger(model->intermediate_size, model->shared_size); }

/* Of any product. */
static int64_t most_inputs(const tn_decoder *model) {
    return larger(larger(model->num_heads * model->head_dim, model->hidden_size), most_inner(model));
}

/* Lays the step's rows out in scratch; returns how many bytes they take. */
static int64_t lay_out(step_t *step, const tn_decoder *model, int64_t num_rows, char *scratch) {
    const int dtype = model->dtype;
    const int64_t convolved = model->convolution_size ? model->hidden_size : 0;
    char *next = scratch;
    step->normed = take(&next, num_rows * model->hidden_size, dtype);
    const int64_t heads = (model->num_heads + 2 * model->num_kv_heads) * model->head_dim;
    step->heads = take(&next, num_rows * larger(heads, 3 * convolved), dtype);
    step->attended = take(&next, num_rows * larger(model->num_heads * model->head_dim, convolved), dtype);
    step->gate_up = take(&next, num_rows * 2 * most_inner(model), dtype);
    step->inner = take(&next, num_rows * most_inner(model), dtype);
    step->shared = take(&next, model->shared_size ? num_rows * model->hidden_size : 0, dtype);
    step->permuted = take(&next, num_rows * model->permuted_size, dtype);
    step->packed = next;
    next += tn_product_packed_bytes(num_rows, most_inputs(model), model->permuted_size, dtype);
    if (model->num_experts) next += tn_lay_out_mixture(&step->mixture, model, num_rows, next);
    return next - scratch;
}

/* ---- stages ---- */

static void norm_row(const tn_decoder *model, void *out, const void *x, const tn_vector *weight) {
    tn_norm_row(out, x, weight, model->hidden_size, model->norm_eps, model->norm, model->dtype);
}

/* normed = norm(x), where there is a norm. */
static void norm_stage(const step_t *step, const tn_vector *weight, tn_region *region) {
    const tn_decoder *model = step->args->model;
    if (weight->data == NULL) return;
    EACH_ROW(region, step->args->num_rows) {
        const int64_t place = row * model->hidden_size;
        norm_row(model, element_at(step->normed, model->dtype, place), element_at(step->args->x, model->dtype, place),
                 weight);
    }
    tn_barrier(region);
}

/* x += what `normed` holds, after a norm of its own and scaled, where there are such; then normed = norm(x), unless
 * there is no `next` norm. */
static void residual_stage(const step_t *step, const tn_vector *own, const tn_vector *next, tn_region *region) {
    const tn_decoder *model = step->args->model;
    EACH_ROW(region, step->args->num_rows) {
        const int64_t place = row * model->hidden_size;
        void *x = element_at(step->args->x, model->dtype, place);
        void *normed = element_at(step->normed, model->dtype, place);
        if (own->data != NULL) norm_row(model, normed, normed, own);
        if (model->residual_scale != 1.0f)
            tn_scale_row(normed, model->residual_scale, model->hidden_size, model->dtype);
        tn_add_row(x, normed, model->hidden_size, model->dtype);
        if (next != NULL && next->data != NULL) norm_row(model, normed, x, next);
    }
    tn_barrier(region);
}

/* What a projection behind this norm takes: x itself where there is none. */
static const void *input_of(const step_t *step, const tn_vector *norm) {
    return norm->data != NULL ? step->normed : step->args->x;
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

static void heads_stage(const step_t *step, const tn_decoder_layer *layer, tn_region *region) {
    const tn_decoder_step_args *args = step->args;
    const tn_decoder *model = args->model;
    const tn_heads_args heads = {
        .size = sizeof heads,
        .kv = args->kv,
        .heads = step->heads,
        .turns = layer->rotary == TN_ROTARY_MAIN    ? args->turns
                 : layer->rotary == TN_ROTARY_LOCAL ? args->local_turns
                                                    : NULL,
        .turn = args->turn,
        .slots = args->slots,
        .query_norm = layer->query_norm,
        .key_norm = layer->key_norm,
        .layer = layer->kv_layer,
        .num_rows = args->num_rows,
        .num_heads = model->num_heads,
        .num_kv_heads = model->num_kv_heads,
        .head_dim = model->head_dim,
        .rotary_dim = model->rotary_dim,
        .norm_eps = model->norm_eps,
        .dtype = model->dtype,
        .norm = model->norm,
        .joint_norms = model->joint_norms,
        .wide_turns = model->wide_turns,
        .interleaved = model->interleaved,
    };
    EACH_ROW(region, args->num_rows) tn_write_heads_row(&heads, row);
    tn_barrier(region);
}

static void attention_stage(const step_t *step, const tn_decoder_layer *layer, tn_region *region) {
    const tn_decoder_step_args *args = step->args;
    const tn_decoder *model = args->model;
    const tn_attention_args attention = {
        .size = sizeof attention,
        .kv = args->kv,
        .spans = args->spans,
        .queries = step->heads,
        .out = step->attended,
        .num_spans = args->num_spans,
        .query_stride = (model->num_heads + 2 * model->num_kv_heads) * model->head_dim,
        .out_stride = model->num_heads * model->head_dim,
        .layer = layer->kv_layer,
        .window = layer->window,
        .num_heads = model->num_heads,
        .num_kv_heads = model->num_kv_heads,
        .head_dim = model->head_dim,
        .scale = model->attention_scale,
        .dtype = model->dtype,
        .cap = model->score_cap,
        .sinks = layer->sinks,
    };
    tn_attention_stage(&attention, region);
    tn_barrier(region);
}

static void convolution_stages(const step_t *step, const tn_decoder_layer *layer, tn_region *region) {
    const tn_decoder_step_args *args = step->args;
    const tn_convolution convolution = {args->model, layer,       args->kv,       args->spans,
                                        args->slots, step->heads, step->attended, args->num_rows};
    tn_convolution_stages(&convolution, region);
}

/* Columns of gate and the same ones of up, and at once what becomes of them, while they are in the cache. */
static void mlp_stage(const step_t *step, const tn_decoder_layer *layer, int64_t index, tn_region *region) {
    const tn_decoder *model = step->args->model;
    const int64_t num_rows = step->args->num_rows, inner = layer->gate_up.num_out / 2;
    const int dtype = model->dtype;
    const void *x = model->parallel ? input_of(step, &layer->attention_norm) : input_of(step, &layer->mlp_norm);
    const tn_product product = {&layer->gate_up, x, step->permuted, step->packed, step->gate_up, num_rows, dtype, 0};
    const tn_adapted adapted = adapted_at(step, index, TN_AT_GATE_UP);
    tn_adapter_low_stage(&adapted, x, layer->gate_up.num_in, dtype, region);
    tn_input_stage(&product, region);
    EACH_COLUMNS(region, inner) {
        adapted_columns(&product, &adapted, begin, end);
        adapted_columns(&product, &adapted, inner + begin, inner + end);
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t gate = row * 2 * inner + begin;
            tn_activate_row(element_at(step->inner, dtype, row * inner + begin), element_at(step->gate_up, dtype, gate),
                            element_at(step->gate_up, dtype, gate + inner), end - begin, model->activation, dtype);
        }
    }
    tn_barrier(region);
}

/* What `normed` holds then is to be added to x. */
static void mlp_stages(const step_t *step, const tn_decoder_layer *layer, int64_t index, tn_region *region) {
    const tn_decoder *model = step->args->model;
    const bool is_mixture = layer->experts != NULL, has_mlp = layer->gate_up.num_parts > 0;
    const tn_adapted adapted = adapted_at(step, index, TN_AT_DOWN);
    if (is_mixture) {
        if (has_mlp) mlp_stage(step, layer, index, region); /* the shared expert takes the same rows */
        tn_mixture_stages(&step->mixture, model, layer, input_of(step, &layer->mlp_norm), step->normed,
                          step->args->num_rows, region);
        if (!has_mlp) return;
    }
    project_stage(step, &layer->down, &adapted, step->inner, is_mixture ? step->shared : step->normed, region);
    if (!is_mixture) return;
    EACH_ROW(region, step->args->num_rows) {
        const int64_t place = row * model->hidden_size;
        tn_add_row(element_at(step->normed, model->dtype, place), element_at(step->shared, model->dtype, place),
                   model->hidden_size, model->dtype);
    }
    tn_barrier(region);
}

/* The layer's attention or convolution; `normed` holds its input, and then that of the MLP. */
static void attention_stages(const step_t *step, const tn_decoder_layer *layer, int64_t index, tn_region *region) {
    const tn_adapted at_qkv = adapted_at(step, index, TN_AT_QKV);
    const tn_adapted at_output = adapted_at(step, index, TN_AT_OUTPUT);
    project_stage(step, &layer->qkv, &at_qkv, input_of(step, &layer->attention_norm), step->heads, region);
    if (layer->convolution.data != NULL) {
        convolution_stages(step, layer, region);
    } else {
        heads_stage(step, layer, region);
        attention_stage(step, layer, region);
    }
    if (step->args->model->parallel) mlp_stage(step, layer, index, region);
    project_stage(step, &layer->output, &at_output, step->attended, step->normed, region);
    residual_stage(step, &layer->attention_output_norm, &layer->mlp_norm, region);
}

static void up_to_router_body(void *arg, tn_region *region, int id) {
    (void)id;
    const step_t *step = arg;
    const tn_decoder_step_args *args = step->args;
    const tn_decoder_layer *layer = &args->model->layers[args->first];
    norm_stage(step, &layer->attention_norm, region);
    attention_stages(step, layer, args->first, region);
    tn_router_stages(&step->mixture, args->model, layer, input_of(step, &layer->mlp_norm), args->num_rows, region);
}

static void from_router_on_body(void *arg, tn_region *region, int id) {
    (void)id;
    const step_t *step = arg;
    const tn_decoder_step_args *args = step->args;
    const tn_decoder_layer *layer = &args->model->layers[args->first];
    norm_stage(step, &layer->mlp_norm, region);
    mlp_stages(step, layer, args->first, region);
    residual_stage(step, &layer->mlp_output_norm, NULL, region);
}

/* The layers one after another; `normed` holds the first one's input, and each leaves the next one's there. */
static void step_body(void *arg, tn_region *region, int id) {
    (void)id;
    const step_t *step = arg;
    const tn_decoder_step_args *args = step->args;
    const tn_decoder_layer *layers = args->model->layers;
    norm_stage(step, &layers[args->first].attention_norm, region);
    for (int64_t index = args->first; index < args->end; index++) {
        const tn_decoder_layer *layer = &layers[index];
        attention_stages(step, layer, index, region);
        if (!args->model->parallel && layer->experts == NULL) mlp_stage(step, layer, index, region);
        mlp_stages(step, layer, index, region);
        residual_stage(step, &layer->mlp_output_norm, index + 1 < args->end ? &layers[index + 1].attention_norm : NULL,
                       region);
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
    if (model->num_experts > TN_MAX_EXPERTS || (model->num_experts && model->parallel)) return TN_REFUSED;
    if (model->num_experts && (model->num_expert_groups < 1 || model->num_experts % model->num_expert_groups ||
                               model->num_experts_used * model->num_expert_groups >
                                   model->num_experts * model->num_expert_groups_used))
        return TN_REFUSED;
    if (model->dtype != TN_F32 && model->dtype != TN_BF16) return TN_REFUSED;
    if (model->convolution_size > TN_MAX_CONVOLUTION) return TN_REFUSED;
    if (kv->dtype == TN_I8 ? kv->scale == NULL : kv->dtype != model->dtype) return TN_REFUSED;
    if (args->first == args->end) return TN_OK;
    if (args->half != TN_WHOLE_LAYERS && (args->end != args->first + 1 || model->layers[args->first].experts == NULL))
        return TN_REFUSED;
    step_t step = {.args = args, .adapted = *adapted};
    lay_out(&step, model, args->num_rows, args->scratch);
    if (args->half == TN_UP_TO_ROUTER) {
        if (args->chosen == NULL) return TN_REFUSED;
        tn_run(up_to_router_body, &step);
        const size_t num = (size_t)(args->num_rows * model->num_experts_used);
        memcpy(args->chosen, step.mixture.chosen, num * sizeof *args->chosen);
        return TN_OK;
    }
    tn_run(args->half == TN_FROM_ROUTER_ON ? from_router_on_body : step_body, &step);
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
