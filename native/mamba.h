/* Mamba-2 layers of a step, inside a region. */
#ifndef TN_MAMBA_H
#define TN_MAMBA_H

#include <stdbool.h>

#include "core.h"
#include "team.h"

/* One layer's. */
typedef struct tn_mamba {
    const tn_decoder *model;
    const tn_decoder_layer *layer;
    const tn_span *spans;
    void *mixed;    /* (num_rows, tn_mamba_mixed): what `mamba_in` makes. Changed. */
    float *factors; /* scratch: (num_rows, 2 mamba_heads) */
    float *values;  /* scratch: (num_rows, mamba_heads * mamba_head_dim) */
    void *out;      /* likewise, in the model's dtype */
    int64_t num_spans;
    int64_t num_rows;
} tn_mamba;

void tn_mamba_stages(const tn_mamba *args, tn_region *region);

static inline int64_t tn_mamba_values(const tn_decoder *model) { return model->mamba_heads * model->mamba_head_dim; }

/* Numbers of a row that are convolved: values, keys and queries. */
static inline int64_t tn_mamba_channels(const tn_decoder *model) {
    return tn_mamba_values(model) + 2 * model->mamba_groups * model->mamba_state_size;
}

/* Numbers of a row that `mamba_in` makes: gates, those, and a time step of each head. */
static inline int64_t tn_mamba_mixed(const tn_decoder *model) {
    return tn_mamba_values(model) + tn_mamba_channels(model) + model->mamba_heads;
}

/* The sizes are among those that are computed. */
static inline bool tn_mamba_fits(const tn_decoder *model) {
    const int64_t size = model->mamba_state_size, seen = model->mamba_convolution_size;
    return size > 0 && size <= TN_MAX_MAMBA_STATE && size % 4 == 0 && seen >= 1 && seen <= TN_MAX_CONVOLUTION &&
           model->mamba_groups >= 1 && model->mamba_heads % model->mamba_groups == 0;
}

#endif
