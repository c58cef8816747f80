#include "latent.h"

#include <string.h>

#include "elements.h"
#include "heads.h"
#include "linear.h"
#include "projection.h"
#include "rows.h"
#include "tiles.h"

/* Numbers of a query head. */
static int64_t query_dim(const tn_decoder *model) { return model->plain_dim + model->rotary_dim; }

/* Numbers of a row before its latent. */
static int64_t query_inputs(const tn_decoder *model) {
    return model->query_rank ? model->query_rank : model->num_heads * query_dim(model);
}

int64_t tn_latent_down_size(const tn_decoder *model) { return query_inputs(model) + model->head_dim; }

static int64_t packed_head_bytes(const tn_decoder *model, int64_t num_rows) {
    if (model->dtype != TN_BF16) return 0;
    return tn_packed_bytes(num_rows, model->plain_dim > model->latent_rank ? model->plain_dim : model->latent_rank);
}

int64_t tn_latent_packed_bytes(const tn_decoder *model, int64_t num_rows) {
    return model->num_heads * packed_head_bytes(model, num_rows);
}

/* The row's latent and turned key into the pool, and the inputs of query_up. */
static void write_row(const tn_latent *latent, int64_t row) {
    const tn_decoder *model = latent->args->model;
    const tn_decoder_layer *layer = latent->layer;
    const int dtype = model->dtype;
    char *down = element_at(latent->down, dtype, row * tn_latent_down_size(model));
    char *own = element_at(down, dtype, query_inputs(model));
    tn_norm_row(own, own, &layer->key_norm, model->latent_rank, model->latent_norm_eps, model->norm, dtype);
    tn_turn(latent->heads, element_at(own, dtype, model->latent_rank), row);
    tn_write_pooled(latent->args->kv, layer->kv_layer * latent->args->kv->num_slots + latent->args->slots[row],
                    model->head_dim, own, model->head_dim, dtype);
    if (model->query_rank)
        tn_norm_row(element_at(latent->low, dtype, row * model->query_rank), down, &layer->query_norm, model->query_rank,
                    model->latent_norm_eps, model->norm, dtype);
}

/* Rows [first, first + num_out) of a matrix with one head's numbers of all rows. */
typedef struct {
    const tn_projection *projection;
    const void *x; /* of the first row */
    void *out;
    int64_t x_stride, out_stride;
    int64_t first, num_out;
} head_product_t;

static void run_product(const tn_latent *latent, const head_product_t *product, int64_t head) {
    const tn_decoder *model = latent->args->model;
    const tn_matrix *weight = &product->projection->parts[0].matrix;
    const int64_t num_rows = latent->args->num_rows;
    tn_linear_args args = {
        .size = sizeof args,
        .weight = weight,
        .x = product->x,
        /* Column `first` is the head's first one: what would be before it is not written. */
        .out = element_at(product->out, model->dtype, -product->first),
        .num_rows = num_rows,
        .x_stride = product->x_stride,
        .out_stride = product->out_stride,
        .x_dtype = model->dtype,
        .out_dtype = model->dtype,
    };
    const int forms = tn_packed_forms(weight, model->dtype);
    if (forms) {
        args.packed = (char *)latent->packed_heads + head * packed_head_bytes(model, num_rows);
#if TN_TILES
        for (int64_t piece = 0; piece < tn_pack_pieces(num_rows, weight->num_in); piece++)
            tn_pack(forms, args.packed, args.x, args.x_stride, num_rows, weight->num_in, piece);
#endif
    }
    tn_linear_columns(&args, product->first, product->first + product->num_out);
}

/* A head's queries: plain numbers as the latent's are multiplied, and behind them the turned ones. */
static void absorb_head(const tn_latent *latent, int64_t head) {
    const tn_decoder *model = latent->args->model;
    const int dtype = model->dtype;
    void *queries = model->query_rank ? latent->queries : latent->down;
    const int64_t stride = model->query_rank ? model->num_heads * query_dim(model) : tn_latent_down_size(model);
    const int64_t out_stride = model->num_heads * model->head_dim;
    char *own = element_at(queries, dtype, head * query_dim(model));
    char *out = element_at(latent->absorbed, dtype, head * model->head_dim);
    const head_product_t product = {&latent->layer->key_up, own,    out, stride, out_stride, head * model->latent_rank,
                                    model->latent_rank};
    run_product(latent, &product, head);
    for (int64_t row = 0; row < latent->args->num_rows; row++) {
        void *turned = element_at(own, dtype, row * stride + model->plain_dim);
        tn_turn(latent->heads, turned, row);
        memcpy(element_at(out, dtype, row * out_stride + model->latent_rank), turned,
               (size_t)(model->rotary_dim * element_bytes(dtype)));
    }
}

void tn_latent_query_stages(const tn_latent *latent, tn_region *region) {
    const tn_decoder *model = latent->args->model;
    EACH_ROW(region, latent->args->num_rows) write_row(latent, row);
    tn_barrier(region);
    if (model->query_rank) {
        const tn_product product = {&latent->layer->query_up, latent->low, latent->permuted, latent->packed,
                                    latent->queries, latent->args->num_rows, model->dtype, 0};
        tn_input_stage(&product, region);
        tn_product_stage(&product, region);
        tn_barrier(region);
    }
    for (int64_t head; (head = tn_next_chunk(region)) < model->num_heads;) absorb_head(latent, head);
    tn_barrier(region);
}

void tn_latent_value_stage(const tn_latent *latent, tn_region *region) {
    const tn_decoder *model = latent->args->model;
    for (int64_t head; (head = tn_next_chunk(region)) < model->num_heads;) {
        const head_product_t product = {
            .projection = &latent->layer->value_up,
            .x = element_at(latent->absorbed, model->dtype, head * model->head_dim),
            .out = element_at(latent->out, model->dtype, head * model->value_dim),
            .x_stride = model->num_heads * model->head_dim,
            .out_stride = model->num_heads * model->value_dim,
            .first = head * (model->plain_dim + model->value_dim) + model->plain_dim,
            .num_out = model->value_dim,
        };
        run_product(latent, &product, head);
    }
    tn_barrier(region);
}
