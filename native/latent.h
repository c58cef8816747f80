/* Attention over latents, inside a region: keys and values of all heads are products with one latent a token, and one
 * turned key, which the pool has side by side.
 *
 * A head's score is (query * key_up) * latent + turned query * turned key, and its output value_up * (the weighted sum of
 * latents): the products with the latent itself are never made, and a token has as few numbers in prompts as later. */
#ifndef TN_LATENT_H
#define TN_LATENT_H

#include "core.h"
#include "team.h"

/* A step's rows in one layer, in scratch. */
typedef struct tn_latent {
    const tn_decoder_step_args *args;
    const tn_decoder_layer *layer;
    const tn_heads_args *heads; /* what turns rows; head_dim is not looked at */
    void *down;     /* (num_rows, layer->qkv.num_out): made by `qkv` */
    void *low;      /* (num_rows, query_rank) */
    void *queries;  /* (num_rows, num_heads, plain_dim + rotary_dim), with query_up; else they are in `down` */
    void *absorbed; /* (num_rows, num_heads, head_dim): queries, then in their first numbers sums of latents */
    void *out;      /* (num_rows, num_heads, value_dim) */
    void *permuted; /* as in tn_product, of query_up */
    void *packed;
    void *packed_heads; /* tn_latent_packed_bytes, on 64 bytes */
} tn_latent;

/* Writes the pool's latents, and leaves queries in `absorbed`; then a barrier. */
void tn_latent_query_stages(const tn_latent *latent, tn_region *region);

/* From sums of latents in `absorbed` to `out`; then a barrier. */
void tn_latent_value_stage(const tn_latent *latent, tn_region *region);

/* Numbers of a row in `qkv`'s output. */
int64_t tn_latent_down_size(const tn_decoder *model);

/* Bytes of the inputs of all heads' products, as tiles take them. */
int64_t tn_latent_packed_bytes(const tn_decoder *model, int64_t num_rows);

#endif
