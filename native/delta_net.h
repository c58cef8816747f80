/* Gated delta nets of a step, inside a region. */
#ifndef TN_DELTA_NET_H
#define TN_DELTA_NET_H

#include "core.h"
#include "team.h"

/* One layer's. */
typedef struct tn_delta_net {
    const tn_decoder *model;
    const tn_decoder_layer *layer;
    const tn_span *spans;
    void *mixed;    /* (num_rows, as many as `qkv` has outputs). Changed. */
    float *factors; /* scratch: (num_rows, 2 delta_key_heads + 2 delta_value_heads) */
    void *out;      /* (num_rows, delta_value_heads * delta_value_size) */
    int64_t num_spans;
} tn_delta_net;

void tn_delta_net_stage(const tn_delta_net *args, tn_region *region);

/* Numbers of a row that `qkv` makes: queries, keys and values, gates, betas and decays. */
static inline int64_t tn_delta_mixed(const tn_decoder *model) {
    return 2 * model->delta_key_heads * model->delta_key_size +
           2 * model->delta_value_heads * (model->delta_value_size + 1);
}

#endif
