/* An encoder's layers over texts that lie back to back: norm(x + attention(x)), then norm(x + mlp(x)); or, with
 * `pre_norm`, x + attention(norm(x)), then x + mlp(norm(x)).
 *
 * Otherwise like a decoder's step (decoder.c). */
#include <stdbool.h>

#include "attention.h"
#include "core.h"
#include "elements.h"
#include "linear.h"
#include "projection.h"
#include "rows.h"

enum { ALIGNMENT = 64, ALONE_ELEMENTS = 1 << 15 };

typedef struct {
    const tn_encoder_step_args *args;
    void *qkv;      /* (num_rows, 3, num_heads, head_dim) */
    void *attended; /* (num_rows, hidden_size) */
    void *more;     /* (num_rows, hidden_size): what is added to x */
    void *normed;   /* (num_rows, hidden_size), with pre_norm */
    void *gate_up;  /* (num_rows, 2 intermediate_size), of a gated MLP */
    void *inner;    /* (num_rows, intermediate_size) */
    void *clipped;  /* (num_rows, most inputs of a product), of a bounded model */
    void *packed;   /* inputs of one product at a time, as tiles take them */
} step_t;

/* Rows of `bounds`. */
enum { OF_QKV = 0, OF_OUTPUT = 3, OF_GATE_UP = 4, OF_DOWN = 6, NUM_BOUNDS = 4 };

static void *take(char **scratch, int64_t num_elements, int dtype) {
    void *taken = *scratch;
    *scratch += (num_elements * element_bytes(dtype) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return taken;
}

static int64_t lay_out(step_t *step, const tn_encoder *model, int64_t num_rows, char *scratch) {
    char *next = scratch;
    step->qkv = take(&next, num_rows * 3 * model->num_heads * model->head_dim, model->dtype);
    step->attended = take(&next, num_rows * model->num_heads * model->head_dim, model->dtype);
    step->more = take(&next, num_rows * model->hidden_size, model->dtype);
    step->normed = take(&next, model->pre_norm ? num_rows * model->hidden_size : 0, model->dtype);
    step->gate_up = take(&next, model->gated ? num_rows * 2 * model->intermediate_size : 0, model->dtype);
    step->inner = take(&next, num_rows * model->intermediate_size, model->dtype);
    const int64_t heads = model->num_heads * model->head_dim;
    const int64_t wide = heads > model->hidden_size ? heads : model->hidden_size;
    const int64_t most = wide > model->intermediate_size ? wide : model->intermediate_size;
    step->clipped = take(&next, model->bounded ? num_rows * most : 0, model->dtype);
    step->packed = next;
    next += tn_product_packed_bytes(num_rows, most, 0, model->dtype);
    return next - scratch;
}

/* ---- stages ---- */

/* The product with one of `num` matrices of the same size, side by side, whose inputs and outputs are clipped. */
static void bounded_stage(const step_t *step, const tn_projection *projection, int64_t number, int64_t num,
                          const float *bounds, const void *x, void *out, tn_region *region) {
    const int64_t num_rows = step->args->num_rows, num_in = projection->num_in, columns = projection->num_out / num;
    const int dtype = step->args->model->dtype;
    EACH_ROW(region, num_rows)
        tn_clip_row(element_at(step->clipped, dtype, row * num_in), element_at(x, dtype, row * num_in), bounds[0],
                    bounds[1], num_in, dtype);
    tn_barrier(region);
    const tn_product product = {projection, step->clipped, NULL, step->packed, out, num_rows, dtype, 0};
    tn_input_stage(&product, region);
    EACH_COLUMNS(region, columns) {
        const int64_t first = number * columns + begin;
        tn_product_columns(&product, first, number * columns + end);
        for (int64_t row = 0; row < num_rows; row++) {
            void *place = element_at(out, dtype, row * projection->num_out + first);
            tn_clip_row(place, place, bounds[2], bounds[3], end - begin, dtype);
        }
    }
    tn_barrier(region);
}

/* `num` matrices side by side, of which the first has row `first` of the bounds, where there are such. */
static void project_stage(const step_t *step, const tn_encoder_layer *layer, const tn_projection *projection,
                          int first, int num, const void *x, void *out, tn_region *region) {
    if (step->args->model->bounded) {
        for (int64_t number = 0; number < num; number++)
            bounded_stage(step, projection, number, num, layer->bounds + (first + number) * NUM_BOUNDS, x, out, region);
        return;
    }
    const tn_product product = {projection, x, NULL, step->packed, out, step->args->num_rows,
                                step->args->model->dtype, 0};
    tn_input_stage(&product, region);
    tn_product_stage(&product, region);
    tn_barrier(region);
}

static void norm_head(const tn_encoder *model, void *head, const tn_vector *norm) {
    if (norm->data != NULL) tn_norm_row(head, head, norm, model->head_dim, model->norm_eps, model->norm, model->dtype);
}

/* Heads are normalised, and queries and keys turn by their positions. */
static void heads_stage(const step_t *step, const tn_encoder_layer *layer, tn_region *region) {
    const tn_encoder_step_args *args = step->args;
    const tn_encoder *model = args->model;
    const float *turns = layer->window ? args->local_turns : args->turns;
    const tn_vector *norms[] = {&layer->query_norm, &layer->key_norm, &layer->value_norm};
    const int64_t half = model->rotary_dim / 2, own = half / model->turned_parts;
    EACH_ROW(region, args->num_rows) {
        const float *cos = model->rotary_dim ? turns + args->turn[row] * model->rotary_dim : NULL;
        for (int64_t head = 0; head < 3 * model->num_heads; head++) {
            const int64_t place = (row * 3 * model->num_heads + head) * model->head_dim;
            norm_head(model, element_at(step->qkv, model->dtype, place), norms[head / model->num_heads]);
            if (head >= 2 * model->num_heads || !half) continue;
            for (int64_t at = 0; at < half; at += own)
                tn_turn_head(element_at(step->qkv, model->dtype, place + 2 * at), cos + at, cos + half + at, own,
                             model->dtype);
        }
    }
    tn_barrier(region);
}

static void attention_stage(const step_t *step, const tn_encoder_layer *layer, tn_region *region) {
    const tn_encoder *model = step->args->model;
    const tn_text_attention_args attention = {
        .size = sizeof attention,
        .qkv = step->qkv,
        .out = step->attended,
        .starts = step->args->starts,
        .distances = {
            .bias = step->args->bias,
            .keys = layer->position_keys,
            .queries = layer->position_queries,
            .buckets = step->args->buckets,
            .reach = step->args->reach,
        },
        .num_texts = step->args->num_texts,
        .num_heads = model->num_heads,
        .head_dim = model->head_dim,
        .window = layer->window,
        .scale = model->attention_scale,
        .dtype = model->dtype,
    };
    tn_text_attention_stage(&attention, region);
    tn_barrier(region);
}

static void norm_row(const tn_encoder *model, void *out, const void *x, const tn_vector *weight,
                     const tn_vector *bias) {
    if (model->norm == TN_LAYER)
        tn_layer_norm_row(out, x, weight, bias, model->hidden_size, model->norm_eps, TN_LAYER, model->dtype);
    else
        tn_norm_row(out, x, weight, model->hidden_size, model->norm_eps, model->norm, model->dtype);
}

/* x = norm(x + more) */
static void residual_stage(const step_t *step, const tn_vector *weight, const tn_vector *bias, tn_region *region) {
    const tn_encoder *model = step->args->model;
    EACH_ROW(region, step->args->num_rows) {
        void *x = element_at(step->args->x, model->dtype, row * model->hidden_size);
        tn_add_row(x, element_at(step->more, model->dtype, row * model->hidden_size), model->hidden_size, model->dtype);
        norm_row(model, x, x, weight, bias);
    }
    tn_barrier(region);
}

/* normed = norm(x) */
static void norm_stage(const step_t *step, const tn_vector *weight, const tn_vector *bias, tn_region *region) {
    const tn_encoder *model = step->args->model;
    EACH_ROW(region, step->args->num_rows) {
        const int64_t place = row * model->hidden_size;
        norm_row(model, element_at(step->normed, model->dtype, place), element_at(step->args->x, model->dtype, place),
                 weight, bias);
    }
    tn_barrier(region);
}

/* x += more, or its norm */
static void add_stage(const step_t *step, const tn_vector *norm, tn_region *region) {
    const tn_encoder *model = step->args->model;
    EACH_ROW(region, step->args->num_rows) {
        const int64_t place = row * model->hidden_size;
        void *more = element_at(step->more, model->dtype, place);
        if (norm->data != NULL) norm_row(model, more, more, norm, NULL);
        tn_add_row(element_at(step->args->x, model->dtype, place), more, model->hidden_size, model->dtype);
    }
    tn_barrier(region);
}

/* Columns of gate and the same ones of up, and at once what becomes of them, while they are in the cache. */
static void gated_stage(const step_t *step, const tn_projection *gate_up, const void *x, tn_region *region) {
    const tn_encoder *model = step->args->model;
    const int64_t num_rows = step->args->num_rows, inner = model->intermediate_size;
    const int dtype = model->dtype;
    const tn_product product = {gate_up, x, NULL, step->packed, step->gate_up, num_rows, dtype, 0};
    tn_input_stage(&product, region);
    EACH_COLUMNS(region, inner) {
        tn_product_columns(&product, begin, end);
        tn_product_columns(&product, inner + begin, inner + end);
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t gate = row * 2 * inner + begin;
            tn_activate_row(element_at(step->inner, dtype, row * inner + begin), element_at(step->gate_up, dtype, gate),
                            element_at(step->gate_up, dtype, gate + inner), end - begin, model->activation, dtype);
        }
    }
    tn_barrier(region);
}

/* Gate and up apart, and then what becomes of them. */
static void bounded_up_stages(const step_t *step, const tn_encoder_layer *layer, const void *x, tn_region *region) {
    const tn_encoder *model = step->args->model;
    const int64_t inner = model->intermediate_size;
    project_stage(step, layer, &layer->up, OF_GATE_UP, 2, x, step->gate_up, region);
    EACH_ROW(region, step->args->num_rows) {
        const void *gate = element_at(step->gate_up, model->dtype, row * 2 * inner);
        tn_activate_row(element_at(step->inner, model->dtype, row * inner), gate,
                        element_at(gate, model->dtype, inner), inner, model->activation, model->dtype);
    }
    tn_barrier(region);
}

/* Columns of up, and at once their activations, while they are in the cache. */
static void up_stage(const step_t *step, const tn_encoder_layer *layer, const void *x, tn_region *region) {
    const tn_encoder *model = step->args->model;
    const tn_projection *up = &layer->up;
    if (model->bounded) {
        bounded_up_stages(step, layer, x, region);
        return;
    }
    if (model->gated) {
        gated_stage(step, up, x, region);
        return;
    }
    const int64_t num_rows = step->args->num_rows, inner = model->intermediate_size;
    const tn_product product = {up, x, NULL, step->packed, step->inner, num_rows, model->dtype, 0};
    tn_input_stage(&product, region);
    EACH_COLUMNS(region, inner) {
        tn_product_columns(&product, begin, end);
        for (int64_t row = 0; row < num_rows; row++) {
            void *place = element_at(step->inner, model->dtype, row * inner + begin);
            tn_activate_row(place, place, NULL, end - begin, model->activation, model->dtype);
        }
    }
    tn_barrier(region);
}

/* What attention makes of `x`, in `more`. */
static void attend_stages(const step_t *step, const tn_encoder_layer *layer, const void *x, tn_region *region) {
    project_stage(step, layer, &layer->qkv, OF_QKV, 3, x, step->qkv, region);
    if (step->args->model->rotary_dim || layer->query_norm.data != NULL) heads_stage(step, layer, region);
    attention_stage(step, layer, region);
    project_stage(step, layer, &layer->output, OF_OUTPUT, 1, step->attended, step->more, region);
}

static void pre_norm_layer(const step_t *step, const tn_encoder_layer *layer, tn_region *region) {
    const bool has_norm = layer->attention_norm_weight.data != NULL;
    if (has_norm) norm_stage(step, &layer->attention_norm_weight, &layer->attention_norm_bias, region);
    attend_stages(step, layer, has_norm ? step->normed : step->args->x, region);
    add_stage(step, &layer->attention_output_norm, region);
    norm_stage(step, &layer->mlp_norm_weight, &layer->mlp_norm_bias, region);
    up_stage(step, layer, step->normed, region);
    project_stage(step, layer, &layer->down, OF_DOWN, 1, step->inner, step->more, region);
    add_stage(step, &layer->mlp_output_norm, region);
}

static void post_norm_layer(const step_t *step, const tn_encoder_layer *layer, tn_region *region) {
    attend_stages(step, layer, step->args->x, region);
    residual_stage(step, &layer->attention_norm_weight, &layer->attention_norm_bias, region);
    up_stage(step, layer, step->args->x, region);
    project_stage(step, layer, &layer->down, OF_DOWN, 1, step->inner, step->more, region);
    residual_stage(step, &layer->mlp_norm_weight, &layer->mlp_norm_bias, region);
}

static void step_body(void *arg, tn_region *region, int id) {
    (void)id;
    const step_t *step = arg;
    const tn_encoder *model = step->args->model;
    for (int64_t index = step->args->first; index < step->args->end; index++)
        (model->pre_norm ? pre_norm_layer : post_norm_layer)(step, &model->layers[index], region);
}

static void mean_body(void *arg, tn_region *region, int id) {
    (void)id;
    const tn_mean_args *args = arg;
    for (int64_t text; (text = tn_next_chunk(region)) < args->num_texts;) {
        const int64_t begin = args->starts[text], end = args->starts[text + 1];
        for (int64_t place = 0; place < args->num_columns; place += TN_LANES) {
            const int count = lanes_left(args->num_columns - place);
            vf sum = vf_zero();
            for (int64_t row = begin; row < end; row++)
                sum = vf_add(sum, load_elements(args->x, args->dtype, row * args->num_columns + place, count));
            store_elements(args->out, TN_F32, text * args->num_columns + place,
                           vf_div(sum, vf_set((float)(end - begin))), count);
        }
    }
}

/* ---- the exported functions ---- */

int64_t tn_encoder_scratch_bytes(const tn_encoder *model, int64_t num_rows) {
    step_t step;
    return lay_out(&step, model, num_rows, NULL);
}

int tn_encoder_step(const tn_encoder_step_args *args) {
    const tn_encoder *model = args->model;
    if (args->size != sizeof *args || model->head_dim > TN_MAX_HEAD_DIM) return TN_REFUSED;
    if (model->dtype != TN_F32 && model->dtype != TN_BF16) return TN_REFUSED;
    step_t step = {.args = args};
    lay_out(&step, model, args->num_rows, args->scratch);
    tn_run(step_body, &step);
    return TN_OK;
}

int tn_mean(const tn_mean_args *args) {
    if (args->size != sizeof *args || (args->dtype != TN_F32 && args->dtype != TN_BF16)) return TN_REFUSED;
    const bool is_small = args->starts[args->num_texts] * args->num_columns < ALONE_ELEMENTS;
    (is_small ? tn_run_alone : tn_run)(mean_body, (void *)args);
    return TN_OK;
}
