/* A mixture of experts inside a region. */
#ifndef TN_EXPERTS_H
#define TN_EXPERTS_H

#include "core.h"
#include "team.h"

/* Scratch of a mixture. A pair is a row with one of its experts: pair row * num_experts_used + k, k ascending with the
 * expert's number. */
typedef struct tn_mixture {
    float *scores;    /* (num_rows, num_experts) */
    int64_t *chosen;  /* (pairs,) numbers of experts */
    float *weights;   /* (pairs,) */
    int64_t *starts;  /* (num_experts + 1,) places of each expert's pairs */
    int64_t *tiles;   /* (num_experts + 1,) packed tiles of rows before each expert's */
    int64_t *place_of; /* (pairs,) */
    int64_t *pair_at; /* (pairs,) by place */
    void *inputs;     /* (pairs, hidden_size) by place; then outputs */
    void *gate_up;    /* (pairs, 2 expert_size) */
    void *inner;      /* (pairs, expert_size) */
    void *packed;     /* inputs of the router, or of all experts, as tiles take them */
} tn_mixture;

/* Bytes of it, laid out from `scratch` on: NULL only counts. */
int64_t tn_lay_out_mixture(tn_mixture *mixture, const tn_decoder *model, int64_t num_rows, char *scratch);

/* The experts of each row of x (num_rows, hidden_size), and their weights: reads no expert. */
void tn_router_stages(const tn_mixture *mixture, const tn_decoder *model, const tn_decoder_layer *layer, const void *x,
                      int64_t num_rows, tn_region *region);

/* out = the weighted sum of what each row's experts make of x (num_rows, hidden_size): behind tn_router_stages, which
 * may have had other inputs. */
void tn_mixture_stages(const tn_mixture *mixture, const tn_decoder *model, const tn_decoder_layer *layer, const void *x,
                       void *out, int64_t num_rows, tn_region *region);

#endif
