/* Several streams of x, of which a layer computes one (AltUp, arXiv 2301.13310), and what else such layers have: a low-rank
 * product next to attention (LAuReL, arXiv 2411.07501), and gates of which the largest alone pass. Inside a region.
 *
 * A layer predicts each stream from all of them. To the active one's prediction it adds what other models' layers add to
 * x, and corrects each prediction by a multiple of the sum's difference from it. What streams are multiplied with depends
 * on the row: x of the active one, normalised, gives as many numbers as there are streams, and these the factors. */
#ifndef TN_ALTUP_H
#define TN_ALTUP_H

#include "core.h"
#include "team.h"

/* A step's rows in one layer. */
typedef struct tn_altup {
    const tn_decoder *model;
    const tn_decoder_layer *layer;
    void *streams; /* (num_rows, num_streams, hidden_size) */
    void *x;       /* (num_rows, hidden_size) */
    void *scratch; /* likewise */
    int64_t num_rows;
} tn_altup;

/* Streams become their predictions, and x that of the active one; then a barrier. */
void tn_altup_predict_stage(const tn_altup *altup, tn_region *region);

/* Streams become their corrections by x, and x that of the active one, times stream_scale; then a barrier. */
void tn_altup_correct_stage(const tn_altup *altup, tn_region *region);

/* Each stream but the first += more (num_rows, hidden_size), which is normalised by input_norm first; then a barrier. */
void tn_altup_spread_stage(const tn_altup *altup, void *more, tn_region *region);

/* product = input + norm(product), (num_rows, hidden_size); then a barrier. */
void tn_laurel_stage(const tn_altup *altup, const void *input, void *product, tn_region *region);

/* x = (x + product) / sqrt(2), each rounded; then a barrier. */
void tn_laurel_join_stage(const tn_altup *altup, const void *product, tn_region *region);

/* gates = max(0, gates - (mean + num_deviations * standard deviation)) of a row's gates, each rounded. */
void tn_cut_gates_row(void *gates, int64_t num, float num_deviations, int dtype);

#endif
