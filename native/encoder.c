/* An encoder's layers over texts that lie back to back: norm(x + attention(x)), then norm(x + down(activation(up(x)))).
 *
 * As a decoder's step (decoder.c) in everything that is not said here. */
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
    void *inner;    /* (num_rows, intermediate_size) */
} step_t;

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
    step->inner = take(&next, num_rows * model->intermediate_size, model->dtype);
    return next - scratch;
}

/* ---- stages ---- */

static void project_stage(const step_t *step, const tn_projection *projection, const void *x, void *out,
                          tn_region *region) {
    const tn_product product = {projection, x, NULL, out, step->args->num_rows, step->args->model->dtype};
    tn_product_stage(&product, region);
    tn_barrier(region);
}

static void attention_stage(const step_t *step, tn_region *region) {
    const tn_encoder *model = step->args->model;
    const tn_text_attention_args attention = {
        .size = sizeof attention,
        .qkv = step->qkv,
        .out = step->attended,
        .starts = step->args->starts,
        .num_texts = step->args->num_texts,
        .num_heads = model->num_heads,
        .head_dim = model->head_dim,
        .scale = model->attention_scale,
        .dtype = model->dtype,
    };
    tn_text_attention_stage(&attention, region);
    tn_barrier(region);
}

/* x = norm(x + more) */
static void residual_stage(const step_t *step, const tn_vector *weight, const tn_vector *bias, tn_region *region) {
    const tn_encoder *model = step->args->model;
    EACH_ROW(region, step->args->num_rows) {
        void *x = element_at(step->args->x, model->dtype, row * model->hidden_size);
        tn_add_row(x, element_at(step->more, model->dtype, row * model->hidden_size), model->hidden_size, model->dtype);
        tn_layer_norm_row(x, x, weight, bias, model->hidden_size, model->norm_eps, model->dtype);
    }
    tn_barrier(region);
}

/* Columns of up, and at once their activations, while they are in the cache. */
static void up_stage(const step_t *step, const tn_projection *up, tn_region *region) {
    const tn_encoder *model = step->args->model;
    const int64_t num_rows = step->args->num_rows, inner = model->intermediate_size;
    const int64_t chunk = tn_linear_chunk(inner, region->num);
    const tn_product product = {up, step->args->x, NULL, step->inner, num_rows, model->dtype};
    for (int64_t begin; (begin = tn_next_chunk(region) * chunk) < inner;) {
        const int64_t end = begin + chunk < inner ? begin + chunk : inner;
        tn_product_columns(&product, begin, end);
        for (int64_t row = 0; row < num_rows; row++) {
            void *place = element_at(step->inner, model->dtype, row * inner + begin);
            tn_activate_row(place, place, NULL, end - begin, model->activation, model->dtype);
        }
    }
    tn_barrier(region);
}

static void step_body(void *arg, tn_region *region, int id) {
    (void)id;
    const step_t *step = arg;
    for (int64_t index = step->args->first; index < step->args->end; index++) {
        const tn_encoder_layer *layer = &step->args->model->layers[index];
        project_stage(step, &layer->qkv, step->args->x, step->qkv, region);
        attention_stage(step, region);
        project_stage(step, &layer->output, step->attended, step->more, region);
        residual_stage(step, &layer->attention_norm_weight, &layer->attention_norm_bias, region);
        up_stage(step, &layer->up, region);
        project_stage(step, &layer->down, step->inner, step->more, region);
        residual_stage(step, &layer->mlp_norm_weight, &layer->mlp_norm_bias, region);
    }
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
