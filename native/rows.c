/* Operations on rows: norms, residuals, activations, embeddings. Each row by itself, in fp32, rounded where a model
 * that computes in bf16 rounds. Sums have fixed lanes and a fixed tree, which depend on the number of columns only. */
#include "rows.h"

#include <math.h>
#include <stdbool.h>

#include "blocks.h"
#include "elements.h"
#include "functions.h"

enum {
    NUM_SUMS = 4,               /* that a row is summed into, so that additions need not wait for each other */
    ALONE_ELEMENTS = 1 << 15,   /* below this number, waking threads costs more than it gains */
};

/* ---- norms ---- */

/* The sum of (x - middle)^2. */
TN_INLINE float sum_of_squares(const void *x, float middle, int64_t num, const int dtype) {
    vf sums[NUM_SUMS] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    for (int64_t begin = 0; begin < num; begin += NUM_SUMS * TN_LANES) {
        for (int part = 0; part < NUM_SUMS; part++) {
            const int64_t place = begin + part * TN_LANES;
            if (place >= num) break;
            const int count = lanes_left(num - place);
            vf value = load_elements(x, dtype, place, count);
            if (middle != 0.0f) value = vf_sub(value, vf_set(middle));
            vf square = vf_mul(value, value);
            if (count < TN_LANES && middle != 0.0f) { /* the lanes behind the end are -middle now */
                float lanes[TN_LANES];
                vf_store(lanes, square);
                square = vf_load_part(lanes, count);
            }
            sums[part] = vf_add(sums[part], square);
        }
    }
    return vf_sum(vf_add(vf_add(sums[0], sums[1]), vf_add(sums[2], sums[3])));
}

TN_INLINE float sum_of(const void *x, int64_t num, const int dtype) {
    vf sums[NUM_SUMS] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    for (int64_t begin = 0; begin < num; begin += NUM_SUMS * TN_LANES) {
        for (int part = 0; part < NUM_SUMS; part++) {
            const int64_t place = begin + part * TN_LANES;
            if (place >= num) break;
            sums[part] = vf_add(sums[part], load_elements(x, dtype, place, lanes_left(num - place)));
        }
    }
    return vf_sum(vf_add(vf_add(sums[0], sums[1]), vf_add(sums[2], sums[3])));
}

TN_INLINE void norm_row(void *out, const void *x, const tn_vector *weight, int64_t num, float eps, const int kind,
                        const int dtype) {
    const float middle = kind == TN_LAYER ? sum_of(x, num, dtype) / (float)num : 0.0f;
    const vf factor = vf_set(1.0f / sqrtf(sum_of_squares(x, middle, num, dtype) / (float)num + eps));
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        vf unit = load_elements(x, dtype, place, count);
        if (kind == TN_LAYER) unit = vf_sub(unit, vf_set(middle));
        unit = vf_mul(unit, factor);
        if (kind == TN_RMS) {
            store_elements(out, dtype, place, vf_mul(round_to(dtype, unit), load_weights(weight, place, count, dtype)),
                           count);
            continue;
        }
        vf scale = load_elements(weight->data, weight->dtype, place, count);
        if (kind == TN_RMS_PLUS_ONE) scale = vf_add(vf_set(1.0f), scale);
        store_elements(out, dtype, place, vf_mul(unit, scale), count);
    }
}

/* A loop for each kind, so that nothing is decided within. */
#define EACH_KIND(dtype)                                                                                \
    switch (kind) {                                                                                     \
    case TN_RMS: norm_row(out, x, weight, num, eps, TN_RMS, dtype); return;                             \
    case TN_RMS_WIDE: norm_row(out, x, weight, num, eps, TN_RMS_WIDE, dtype); return;                   \
    case TN_RMS_PLUS_ONE: norm_row(out, x, weight, num, eps, TN_RMS_PLUS_ONE, dtype); return;           \
    default: norm_row(out, x, weight, num, eps, TN_LAYER, dtype); return;                               \
    }

void tn_norm_row(void *out, const void *x, const tn_vector *weight, int64_t num, float eps, int kind, int dtype) {
    if (dtype == TN_BF16) {
        EACH_KIND(TN_BF16)
    } else {
        EACH_KIND(TN_F32)
    }
}

TN_INLINE void layer_norm_row(void *out, const void *x, const tn_vector *weight, const tn_vector *bias, int64_t num,
                              float eps, const bool plus_one, const int dtype) {
    const float mean = sum_of(x, num, dtype) / (float)num;
    const vf factor = vf_set(1.0f / sqrtf(sum_of_squares(x, mean, num, dtype) / (float)num + eps));
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        const vf unit = vf_mul(vf_sub(load_elements(x, dtype, place, count), vf_set(mean)), factor);
        vf scale = load_weights(weight, place, count, dtype);
        if (plus_one) scale = vf_add(vf_set(1.0f), scale);
        const vf result = vf_fma(unit, scale, load_weights(bias, place, count, dtype));
        store_elements(out, dtype, place, result, count);
    }
}

void tn_layer_norm_row(void *out, const void *x, const tn_vector *weight, const tn_vector *bias, int64_t num,
                       float eps, int kind, int dtype) {
    const bool plus_one = kind == TN_LAYER_PLUS_ONE;
    if (dtype == TN_BF16)
        layer_norm_row(out, x, weight, bias, num, eps, plus_one, TN_BF16);
    else
        layer_norm_row(out, x, weight, bias, num, eps, plus_one, TN_F32);
}

/* ---- inputs in 8 bits ---- */

float tn_largest_size(const void *x, int64_t num, int dtype) {
    float lanes[TN_LANES], largest = 0.0f;
    for (int64_t place = 0; place < num; place += TN_LANES) {
        vf_store(lanes, load_elements(x, dtype, place, lanes_left(num - place)));
        for (int lane = 0; lane < TN_LANES; lane++) {
            const float size = fabsf(lanes[lane]);
            if (isnan(size)) return size;
            if (size > largest) largest = size;
        }
    }
    return largest;
}

void tn_round_to_codes_row(void *x, int64_t num, int dtype) {
    const float largest = tn_largest_size(x, num, dtype), scale = 127.0f / (largest < 1e-5f ? 1e-5f : largest);
    float lanes[TN_LANES];
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        vf_store(lanes, vf_mul(load_elements(x, dtype, place, count), vf_set(scale)));
        for (int lane = 0; lane < TN_LANES; lane++) lanes[lane] = rintf(lanes[lane]);
        store_elements(x, dtype, place, vf_div(vf_load_part(lanes, count), vf_set(scale)), count);
    }
}

/* ---- element by element ---- */

void tn_add_row(void *x, const void *more, int64_t num, int dtype) {
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        const vf sum = vf_add(load_elements(x, dtype, place, count), load_elements(more, dtype, place, count));
        store_elements(x, dtype, place, sum, count);
    }
}

void tn_scale_row(void *x, float factor, int64_t num, int dtype) {
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        store_elements(x, dtype, place, vf_mul(load_elements(x, dtype, place, count), vf_set(factor)), count);
    }
}

TN_INLINE void activate_row(void *out, const void *gate, const void *up, int64_t num, const int activation,
                            const int dtype) {
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        vf value = vf_activation(activation, load_elements(gate, dtype, place, count));
        if (up != NULL) value = vf_mul(round_to(dtype, value), load_elements(up, dtype, place, count));
        store_elements(out, dtype, place, value, count);
    }
}

void tn_clamped_swiglu_row(void *out, const void *gate, const void *up, int64_t num, float alpha, float limit,
                           int dtype) {
    const vf one = vf_set(1.0f), most = vf_set(limit), least = vf_set(-limit);
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        /* The limit first, so that a NaN passes. */
        const vf g = vf_min(most, load_elements(gate, dtype, place, count));
        const vf u = vf_max(least, vf_min(most, load_elements(up, dtype, place, count)));
        const vf grown = vf_add(one, vf_exp(vf_mul(g, vf_set(-alpha))));
        store_elements(out, dtype, place, vf_mul(vf_div(g, grown), vf_add(u, one)), count);
    }
}

/* A loop for each function, so that nothing is decided within. */
#define EACH_ACTIVATION(dtype)                                                                 \
    switch (activation) {                                                                      \
    case TN_SILU: activate_row(out, gate, up, num, TN_SILU, dtype); return;                    \
    case TN_GELU: activate_row(out, gate, up, num, TN_GELU, dtype); return;                    \
    case TN_GELU_TANH: activate_row(out, gate, up, num, TN_GELU_TANH, dtype); return;          \
    case TN_TANH: activate_row(out, gate, up, num, TN_TANH, dtype); return;                    \
    case TN_RELU2: activate_row(out, gate, up, num, TN_RELU2, dtype); return;                  \
    case TN_GELU_QUICK: activate_row(out, gate, up, num, TN_GELU_QUICK, dtype); return;        \
    default: activate_row(out, gate, up, num, TN_RELU, dtype); return;                         \
    }

void tn_activate_row(void *out, const void *gate, const void *up, int64_t num, int activation, int dtype) {
    if (dtype == TN_BF16) {
        EACH_ACTIVATION(TN_BF16)
    } else {
        EACH_ACTIVATION(TN_F32)
    }
}

void tn_turn_head(void *head, const float *cos, const float *sin, int64_t half, int dtype) {
    for (int64_t place = 0; place < half; place += TN_LANES) {
        const int count = lanes_left(half - place);
        const vf low = load_elements(head, dtype, place, count);
        const vf high = load_elements(head, dtype, place + half, count);
        const vf c = load_elements(cos, TN_F32, place, count), s = load_elements(sin, TN_F32, place, count);
        store_elements(head, dtype, place, vf_sub(vf_mul(low, c), vf_mul(high, s)), count);
        store_elements(head, dtype, place + half, vf_add(vf_mul(high, c), vf_mul(low, s)), count);
    }
}

void tn_clip_row(void *out, const void *x, float least, float most, int64_t num, int dtype) {
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        const vf raised = vf_max(vf_set(least), load_elements(x, dtype, place, count)); /* so that a NaN passes */
        store_elements(out, dtype, place, vf_min(vf_set(most), raised), count);
    }
}

void tn_permute_row(void *to, const void *from, const int64_t *places, int64_t num, int dtype) {
    if (dtype == TN_F32)
        for (int64_t i = 0; i < num; i++) ((float *)to)[i] = ((const float *)from)[places[i]];
    else
        for (int64_t i = 0; i < num; i++) ((uint16_t *)to)[i] = ((const uint16_t *)from)[places[i]];
}

/* ---- embeddings ---- */

static void embed_blocks(const tn_embed_args *args, void *out, int64_t token) {
    const int columns = tn_block_columns(args->table_dtype), bytes = tn_block_bytes(args->table_dtype);
    const char *from = (const char *)args->table + token * (args->num_columns / columns) * bytes;
    float numbers[TN_BLOCK_COLUMNS];
    for (int64_t begin = 0; begin < args->num_columns; begin += TN_BLOCK_COLUMNS) {
        const int64_t left = args->num_columns - begin;
        const int count = left < TN_BLOCK_COLUMNS ? (int)left : TN_BLOCK_COLUMNS;
        tn_widen_blocks(numbers, from + begin / columns * bytes, count, args->table_dtype);
        for (int k = 0; k < count; k += TN_LANES)
            store_elements(out, args->dtype, begin + k, vf_load(numbers + k), TN_LANES);
    }
    if (args->factor != 1.0f) tn_scale_row(out, args->factor, args->num_columns, args->dtype);
}

static void embed_row(const tn_embed_args *args, int64_t row) {
    const int64_t token = args->tokens[row], num = args->num_columns, first = token * num;
    void *out = element_at(args->out, args->dtype, row * num);
    const int64_t group_size = args->scale != NULL ? args->group_size : num;
    const int64_t first_group = token * (num / group_size);
    if (tn_is_blocks(args->table_dtype)) {
        embed_blocks(args, out, token);
        return;
    }
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        vf value;
        if (args->table_dtype != TN_I8) {
            value = load_elements(args->table, args->table_dtype, first + place, count);
        } else {
            int8_t codes[TN_LANES] = {0};
            memcpy(codes, (const int8_t *)args->table + first + place, (size_t)count);
            float scale[TN_LANES] = {0};
            vf_store(scale, load_elements(args->scale, args->scale_dtype, first_group + place / group_size, 1));
            value = vf_mul(vf_load_i8(codes), vf_set(scale[0]));
        }
        store_elements(out, args->dtype, place, value, count);
    }
    if (args->factor != 1.0f) tn_scale_row(out, args->factor, num, args->dtype);
}

/* ---- the exported functions ---- */

static bool is_row_dtype(int dtype) { return dtype == TN_F32 || dtype == TN_BF16; }

static void run(tn_body body, const void *args, int64_t num_elements) {
    (num_elements < ALONE_ELEMENTS ? tn_run_alone : tn_run)(body, (void *)args);
}

static void embed_body(void *arg, tn_region *region, int id) {
    (void)id;
    const tn_embed_args *args = arg;
    EACH_ROW(region, args->num_rows) embed_row(args, row);
}

int tn_embed(const tn_embed_args *args) {
    if (args->size != sizeof *args || !is_row_dtype(args->dtype)) return TN_REFUSED;
    const bool is_blocks = tn_is_blocks(args->table_dtype) && tn_block_bytes(args->table_dtype) != 0;
    if ((args->table_dtype == TN_I8) != (args->scale != NULL)) return TN_REFUSED;
    if (args->table_dtype > TN_I8 && !is_blocks) return TN_REFUSED;
    run(embed_body, args, args->num_rows * args->num_columns);
    return TN_OK;
}

static void add_body(void *arg, tn_region *region, int id) {
    (void)id;
    const tn_add_args *args = arg;
    EACH_ROW(region, args->num_rows) {
        void *x = element_at(args->x, args->dtype, row * args->num_columns);
        tn_add_row(x, element_at(args->more, args->dtype, row * args->more_stride), args->num_columns, args->dtype);
        if (args->factor != 1.0f) tn_scale_row(x, args->factor, args->num_columns, args->dtype);
    }
}

int tn_add(const tn_add_args *args) {
    if (args->size != sizeof *args || !is_row_dtype(args->dtype)) return TN_REFUSED;
    run(add_body, args, args->num_rows * args->num_columns);
    return TN_OK;
}

static void norm_body(void *arg, tn_region *region, int id) {
    (void)id;
    const tn_norm_args *args = arg;
    EACH_ROW(region, args->num_rows) {
        const void *x = element_at(args->x, args->dtype, row * args->num_columns);
        void *out = element_at(args->out, args->dtype, row * args->num_columns);
        if (args->factor != 1.0f) {
            memmove(out, x, (size_t)(args->num_columns * element_bytes(args->dtype)));
            tn_scale_row(out, args->factor, args->num_columns, args->dtype);
            x = out;
        }
        if (args->bias.data == NULL)
            tn_norm_row(out, x, &args->weight, args->num_columns, args->eps, args->kind, args->dtype);
        else
            tn_layer_norm_row(out, x, &args->weight, &args->bias, args->num_columns, args->eps, args->kind,
                              args->dtype);
    }
}

int tn_norm(const tn_norm_args *args) {
    if (args->size != sizeof *args || !is_row_dtype(args->dtype)) return TN_REFUSED;
    if (args->kind < TN_RMS || args->kind > TN_LAYER_PLUS_ONE) return TN_REFUSED;
    if (args->kind == TN_LAYER_PLUS_ONE && args->bias.data == NULL) return TN_REFUSED;
    run(norm_body, args, args->num_rows * args->num_columns);
    return TN_OK;
}

static void activate_body(void *arg, tn_region *region, int id) {
    (void)id;
    const tn_activate_args *args = arg;
    EACH_ROW(region, args->num_rows) {
        const void *up = args->up == NULL ? NULL : element_at(args->up, args->dtype, row * args->in_stride);
        tn_activate_row(element_at(args->out, args->dtype, row * args->out_stride),
                        element_at(args->gate, args->dtype, row * args->in_stride), up, args->num_columns,
                        args->activation, args->dtype);
    }
}

int tn_activate(const tn_activate_args *args) {
    if (args->size != sizeof *args || !is_row_dtype(args->dtype)) return TN_REFUSED;
    if (args->activation < TN_SILU || args->activation > TN_GELU_QUICK) return TN_REFUSED;
    run(activate_body, args, args->num_rows * args->num_columns);
    return TN_OK;
}
