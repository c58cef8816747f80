#include "states.h"

/* Taps of `count` channels from number d on: taps[t] has those of the oldest token but t. */
static void load_taps(vf *taps, const tn_channels *channels, int64_t d, int count) {
    const int64_t size = channels->size;
    float stored[TN_MAX_CONVOLUTION * TN_LANES], lanes[TN_LANES];
    for (int64_t n = 0; n < size * count; n += TN_LANES) {
        const int left = lanes_left(size * count - n);
        vf_store(stored + n, load_weights(channels->taps, d * size + n, left, channels->dtype));
    }
    for (int64_t t = 0; t < size; t++) {
        for (int lane = 0; lane < TN_LANES; lane++) lanes[lane] = lane < count ? stored[lane * size + t] : 0.0f;
        taps[t] = vf_load(lanes);
    }
}

/* The last inputs of channels [d, d + count), oldest first. */
static void store_window(const tn_channels *channels, float *state, int64_t d, const vf *window, int count) {
    float *inputs = state + channels->state_first + d;
    for (int64_t t = 0; t + 1 < channels->size; t++)
        vf_store_part(inputs + t * channels->num_channels, window[t], count);
}

/* Channels [d, d + count) of all rows of the span, which begin at `place` of a row. */
static void convolve(const tn_channels *channels, int64_t place, int64_t d, int count) {
    const tn_span *span = channels->span;
    const int64_t size = channels->size;
    const int dtype = channels->dtype;
    const bool is_first = tn_begins(span), has_bias = channels->bias->data != NULL;
    const vf bias = has_bias ? load_weights(channels->bias, d, count, dtype) : vf_zero();
    vf taps[TN_MAX_CONVOLUTION], window[TN_MAX_CONVOLUTION];
    load_taps(taps, channels, d, count);
    for (int64_t t = 0; t < size; t++)
        window[t] = t + 1 == size || is_first
                        ? vf_zero()
                        : vf_load_part(span->state + channels->state_first + t * channels->num_channels + d, count);
    int64_t save = 0;
    for (int64_t row = 0; row < span->length; row++) {
        void *x = element_at(channels->rows, dtype, (span->start + row) * channels->row_size);
        window[size - 1] = load_elements(x, dtype, place, count);
        vf sum = vf_mul(taps[0], window[0]);
        for (int64_t t = 1; t < size; t++) sum = vf_fma(taps[t], window[t], sum);
        if (has_bias) sum = vf_add(sum, bias);
        sum = round_to(dtype, sum);
        store_elements(x, dtype, place, vf_mul(sum, sigmoid(sum)), count);
        for (int64_t t = 0; t + 1 < size; t++) window[t] = window[t + 1];
        for (; save < span->num_saves && span->saves[save].num_rows == row + 1; save++)
            store_window(channels, span->saves[save].state, d, window, count);
    }
    store_window(channels, span->state, d, window, count);
}

void tn_convolve_channels(const tn_channels *channels, int64_t place, int64_t channel, int64_t num) {
    for (int64_t d = 0; d < num; d += TN_LANES) convolve(channels, place + d, channel + d, lanes_left(num - d));
}
