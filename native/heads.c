/* A step's queries and keys, normalised and turned; keys and values on their way into the pool.
 *
 * In 8 bits a head's numbers are codes in [-127, 127] times their scale, max |x| / 127, as the pool's dtype for scales
 * holds it: runtime/kv/int8_storage.py is the norm. */
#include "heads.h"

#include <math.h>

#include "elements.h"
#include "rows.h"

enum { MAX_CODE = 127, ALONE_ROWS = 8 };

/* Number i turns with number i + rotary_dim / 2; products are rounded to `inner`, and their sum to `dtype`. */
TN_INLINE void turn(void *head, const float *cos, const float *sin, int64_t half, const int dtype, const int inner) {
    for (int64_t place = 0; place < half; place += TN_LANES) {
        const int count = lanes_left(half - place);
        const vf low = load_elements(head, dtype, place, count);
        const vf high = load_elements(head, dtype, place + half, count);
        const vf c = load_elements(cos, TN_F32, place, count), s = load_elements(sin, TN_F32, place, count);
        const vf low_cos = round_to(inner, vf_mul(low, c)), high_sin = round_to(inner, vf_mul(high, s));
        const vf high_cos = round_to(inner, vf_mul(high, c)), low_sin = round_to(inner, vf_mul(low, s));
        store_elements(head, dtype, place, vf_sub(low_cos, high_sin), count);
        store_elements(head, dtype, place + half, vf_add(high_cos, low_sin), count);
    }
}

static float element_of(const void *head, int64_t place, int dtype) {
    return dtype == TN_F32 ? ((const float *)head)[place] : f32_of_bf16(((const uint16_t *)head)[place]);
}

static float rounded(float value, int dtype) { return dtype == TN_F32 ? value : f32_of_bf16(bf16_of_f32(value)); }

static void set_element(void *head, int64_t place, float value, int dtype) {
    if (dtype == TN_F32)
        ((float *)head)[place] = value;
    else
        ((uint16_t *)head)[place] = bf16_of_f32(value);
}

/* The same of neighbours: number 2 i turns with number 2 i + 1. */
static void turn_neighbours(void *head, const float *cos, const float *sin, int64_t half, int dtype, int inner) {
    for (int64_t i = 0; i < half; i++) {
        const float low = element_of(head, 2 * i, dtype), high = element_of(head, 2 * i + 1, dtype);
        const float low_cos = rounded(low * cos[i], inner), high_sin = rounded(high * sin[i], inner);
        const float high_cos = rounded(high * cos[i], inner), low_sin = rounded(low * sin[i], inner);
        set_element(head, 2 * i, low_cos - high_sin, dtype);
        set_element(head, 2 * i + 1, high_cos + low_sin, dtype);
    }
}

static void norm_head(const tn_heads_args *args, void *head, const tn_vector *norm) {
    if (norm->data != NULL && !args->joint_norms)
        tn_norm_row(head, head, norm, args->head_dim, args->norm_eps, args->norm, args->dtype);
}

void tn_turn(const tn_heads_args *args, void *head, int64_t row) {
    if (args->turns == NULL) return;
    const float *cos = args->turns + args->turn[row] * args->rotary_dim, *sin = cos + args->rotary_dim / 2;
    if (args->interleaved)
        turn_neighbours(head, cos, sin, args->rotary_dim / 2, args->dtype, args->wide_turns ? TN_F32 : args->dtype);
    else if (args->dtype != TN_BF16)
        turn(head, cos, sin, args->rotary_dim / 2, TN_F32, TN_F32);
    else if (args->wide_turns)
        turn(head, cos, sin, args->rotary_dim / 2, TN_BF16, TN_F32);
    else
        turn(head, cos, sin, args->rotary_dim / 2, TN_BF16, TN_BF16);
}

static void norm_and_turn(const tn_heads_args *args, void *head, const tn_vector *norm, int64_t row) {
    if (!args->late_norms) norm_head(args, head, norm);
    tn_turn(args, head, row);
    if (args->late_norms) norm_head(args, head, norm);
}

/* A row's query heads, or key heads, as one. */
static void norm_heads(const tn_heads_args *args, void *heads, const tn_vector *norm, int64_t num) {
    if (norm->data != NULL && args->joint_norms)
        tn_norm_row(heads, heads, norm, num * args->head_dim, args->norm_eps, args->norm, args->dtype);
}

/* ---- into the pool ---- */

/* A code for each number, by the scale as it is held. Zeros of what is not finite, and of a scale of 0. */
static void write_codes(int8_t *codes, const void *head, float scale, int64_t num, int dtype) {
    float lanes[TN_LANES];
    for (int64_t place = 0; place < num; place += TN_LANES) {
        const int count = lanes_left(num - place);
        vf_store(lanes, vf_div(load_elements(head, dtype, place, count), vf_set(scale)));
        for (int lane = 0; lane < count; lane++) {
            const float exact = isfinite(lanes[lane]) ? lanes[lane] : 0.0f;
            const float code = rintf(exact);
            codes[place + lane] = (int8_t)(code > MAX_CODE ? MAX_CODE : code < -MAX_CODE ? -MAX_CODE : code);
        }
    }
}

void tn_write_pooled(const tn_kv *kv, int64_t place, int64_t head_dim, const void *numbers, int64_t num, int dtype) {
    if (kv->dtype != TN_I8) {
        memcpy(element_at(kv->data, kv->dtype, place * head_dim), numbers, (size_t)(num * element_bytes(kv->dtype)));
        return;
    }
    float scale = tn_largest_size(numbers, num, dtype) / MAX_CODE;
    if (kv->scale_dtype == TN_BF16) {
        const uint16_t rounded = bf16_of_f32(scale);
        ((uint16_t *)kv->scale)[place] = rounded;
        scale = f32_of_bf16(rounded);
    } else {
        ((float *)kv->scale)[place] = scale;
    }
    write_codes((int8_t *)kv->data + place * head_dim, numbers, scale, num, dtype);
}

/* `part` is 0 for keys, 1 for values. */
static void write_head(const tn_heads_args *args, const void *head, int part, int64_t kv_head, int64_t row) {
    const int64_t vector = (args->layer * 2 + part) * args->num_kv_heads + kv_head;
    tn_write_pooled(args->kv, vector * args->kv->num_slots + args->slots[row], args->head_dim, head, args->head_dim,
                    args->dtype);
}

void tn_write_heads_row(const tn_heads_args *args, int64_t row) {
    const int64_t num_heads = args->num_heads, num_keys = args->num_kv_heads, num = args->head_dim;
    const int64_t num_all = num_heads + (args->keys_are_values ? 1 : 2) * num_keys;
    char *heads = element_at(args->heads, args->dtype, row * num_all * num);
    float copy[TN_MAX_HEAD_DIM];
    const int64_t head_bytes = num * element_bytes(args->dtype);
    norm_heads(args, heads, &args->query_norm, num_heads);
    norm_heads(args, heads + num_heads * head_bytes, &args->key_norm, num_keys);
    for (int64_t n = 0; n < num_heads; n++) {
        norm_and_turn(args, heads + n * head_bytes, &args->query_norm, row);
        if (args->query_scales != NULL) tn_scale_row(heads + n * head_bytes, args->query_scales[row], num, args->dtype);
    }
    for (int64_t n = 0; n < num_keys; n++) {
        char *key = heads + (num_heads + n) * head_bytes;
        void *value = args->keys_are_values ? memcpy(copy, key, (size_t)head_bytes) : key + num_keys * head_bytes;
        if (args->value_norm.data != NULL)
            tn_norm_row(value, value, &args->value_norm, num, args->norm_eps, args->norm, args->dtype);
        norm_and_turn(args, key, &args->key_norm, row);
        write_head(args, key, 0, n, row);
        write_head(args, value, 1, n, row);
    }
}

static void heads_body(void *arg, tn_region *region, int id) {
    (void)id;
    const tn_heads_args *args = arg;
    EACH_ROW(region, args->num_rows) tn_write_heads_row(args, row);
}

int tn_write_heads(const tn_heads_args *args) {
    if (args->size != sizeof *args || (args->dtype != TN_F32 && args->dtype != TN_BF16)) return TN_REFUSED;
    const tn_kv *kv = args->kv;
    if (kv->dtype == TN_I8 ? kv->scale == NULL : kv->dtype != args->dtype) return TN_REFUSED;
    (args->num_rows < ALONE_ROWS ? tn_run_alone : tn_run)(heads_body, (void *)args);
    return TN_OK;
}
