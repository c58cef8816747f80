/* Gated short convolutions in place of attention: c * convolution(b * x) of the thirds b, c, x of a row.
 *
 * Each token's b * x lies in the pool, in the slots that its keys and values would have: a sequence whose blocks are
 * shared, copied, spilled or cut back needs no other state. */
#include "convolution.h"

#include "elements.h"
#include "heads.h"
#include "rows.h"

/* Numbers of a slot of the pool's vector `place`, as vectors of fp32. */
TN_INLINE vf load_pooled(const tn_kv *kv, int64_t place, int64_t head_dim, int64_t d, int count, int dtype) {
    if (kv->dtype != TN_I8) return load_elements(kv->data, kv->dtype, place * head_dim + d, count);
    const float scale = kv->scale_dtype == TN_BF16 ? f32_of_bf16(((const uint16_t *)kv->scale)[place])
                                                   : ((const float *)kv->scale)[place];
    const vf codes = vf_load_i8_part((const int8_t *)kv->data + place * head_dim + d, count);
    return round_to(dtype, vf_mul(codes, vf_set(scale)));
}

/* The pool's vector for numbers [chunk * head_dim, ...) of a row in this slot. */
static int64_t place_of(const tn_convolution *args, int64_t chunk, int64_t slot) {
    const tn_decoder *model = args->model;
    return (args->layer->kv_layer * 2 * model->num_kv_heads + chunk) * args->kv->num_slots + slot;
}

/* b * x of a row, into the pool. */
static void write_row(const tn_convolution *args, int64_t row) {
    const tn_decoder *model = args->model;
    const int64_t num = model->hidden_size, head_dim = model->head_dim;
    const int dtype = model->dtype;
    const char *b = element_at(args->thirds, dtype, row * 3 * num);
    char *x = element_at(b, dtype, 2 * num);
    for (int64_t d = 0; d < num; d += TN_LANES) {
        const int count = lanes_left(num - d);
        store_elements(x, dtype, d, vf_mul(load_elements(b, dtype, d, count), load_elements(x, dtype, d, count)), count);
    }
    for (int64_t d = 0; d < num; d += head_dim)
        tn_write_pooled(args->kv, place_of(args, d / head_dim, args->slots[row]), head_dim, element_at(x, dtype, d),
                        num - d < head_dim ? num - d : head_dim, dtype);
}

/* Taps of `count` channels from number d on: taps[t] has those of the token t before the row's own. */
static void load_taps(vf *taps, const tn_convolution *args, int64_t d, int count) {
    const int64_t size = args->model->convolution_size;
    float stored[TN_MAX_CONVOLUTION * TN_LANES], lanes[TN_LANES];
    for (int64_t n = 0; n < size * count; n += TN_LANES) {
        const int left = lanes_left(size * count - n);
        vf_store(stored + n, load_weights(&args->layer->convolution, d * size + n, left, args->model->dtype));
    }
    for (int64_t t = 0; t < size; t++) {
        for (int lane = 0; lane < TN_LANES; lane++)
            lanes[lane] = lane < count ? stored[lane * size + size - 1 - t] : 0.0f;
        taps[t] = vf_load(lanes);
    }
}

/* Oldest token first, as a product of the convolution's taps; rounded, and then times c. */
static void convolve_row(const tn_convolution *args, const tn_span *span, int64_t row) {
    const tn_decoder *model = args->model;
    const tn_kv *kv = args->kv;
    const int64_t num = model->hidden_size, head_dim = model->head_dim, size = model->convolution_size;
    const int dtype = model->dtype;
    const int64_t position = span->context_len - span->length + row - span->start;
    const int64_t num_seen = position + 1 < size ? position + 1 : size;
    int64_t slots[TN_MAX_CONVOLUTION];
    for (int64_t t = 0; t < num_seen; t++)
        slots[t] = span->blocks[(position - t) / kv->block_size] * kv->block_size + (position - t) % kv->block_size;
    const char *c = element_at(args->thirds, dtype, (row * 3 + 1) * num);
    char *out = element_at(args->out, dtype, row * num);
    const tn_vector *bias = &args->layer->convolution_bias;
    for (int64_t chunk = 0; chunk * head_dim < num; chunk++) {
        const int64_t first = chunk * head_dim, width = num - first < head_dim ? num - first : head_dim;
        for (int64_t d = 0; d < width; d += TN_LANES) {
            const int count = lanes_left(width - d);
            vf taps[TN_MAX_CONVOLUTION], sum = vf_zero();
            load_taps(taps, args, first + d, count);
            for (int64_t t = num_seen; t-- > 0;)
                sum = vf_fma(taps[t], load_pooled(kv, place_of(args, chunk, slots[t]), head_dim, d, count, dtype), sum);
            if (bias->data != NULL) sum = vf_add(sum, load_weights(bias, first + d, count, dtype));
            const vf gate = load_elements(c, dtype, first + d, count);
            store_elements(out, dtype, first + d, vf_mul(gate, round_to(dtype, sum)), count);
        }
    }
}

void tn_convolution_stages(const tn_convolution *args, tn_region *region) {
    EACH_ROW(region, args->num_rows) write_row(args, row);
    tn_barrier(region);
    const tn_span *span = args->spans; /* a thread's rows ascend */
    EACH_ROW(region, args->num_rows) {
        while (row >= span->start + span->length) span++;
        convolve_row(args, span, row);
    }
    tn_barrier(region);
}
