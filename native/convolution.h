/* Gated short convolutions of a step, inside a region. */
#ifndef TN_CONVOLUTION_H
#define TN_CONVOLUTION_H

#include "core.h"
#include "team.h"

/* One layer's. */
typedef struct tn_convolution {
    const tn_decoder *model;
    const tn_decoder_layer *layer;
    const tn_kv *kv;
    const tn_span *spans; /* in the order of their rows */
    const int64_t *slots; /* (num_rows,) */
    void *thirds;         /* (num_rows, 3, hidden_size): b, c and x. Changed. */
    void *out;            /* (num_rows, hidden_size) */
    int64_t num_rows;
} tn_convolution;

void tn_convolution_stages(const tn_convolution *args, tn_region *region);

#endif
