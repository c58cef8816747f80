/* Blocks of integers as GGUF files have them: levels, scales and offsets, and numbers from them. */
#include "blocks.h"

#include <string.h>

#include "elements.h"

enum {
    GROUP = 32,         /* columns of a block, */
    LARGE = 256,        /* or of a large one */
    AHEAD_BYTES = 8192, /* asked for before they are taken apart */
};

static float half_at(const uint8_t *from) {
    uint16_t bits;
    memcpy(&bits, from, sizeof bits);
    return f32_of_f16(bits);
}

static uint32_t word_at(const uint8_t *from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

/* ---- scales and offsets ---- */

/* Scales and minima of 8 groups, 6 bits each: groups 4 to 7 have their top 2 bits next to those of 0 to 3. */
static void take_large_scales(float *restrict scale, float *restrict offset, const uint8_t *from) {
#if TN_LARGE_SCALES
    vf_take_large_scales(scale, offset, from);
#else
    const float step = half_at(from), minimum_step = -half_at(from + 2);
    const uint32_t first = word_at(from + 4), second = word_at(from + 8), third = word_at(from + 12);
    const uint32_t packed[] = {
        first & 0x3f3f3f3fu,
        (third & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u),
        second & 0x3f3f3f3fu,
        (third >> 4 & 0x0f0f0f0fu) | (second >> 2 & 0x30303030u),
    };
    uint8_t levels[16];
    memcpy(levels, packed, sizeof levels);
    for (int n = 0; n < 8; n++) scale[n] = step * (float)levels[n];
    for (int n = 0; n < 8; n++) offset[n] = minimum_step * (float)levels[8 + n];
#endif
}

static void take_q6_k_scales(float *restrict scale, float *restrict offset, const uint8_t *from) {
    const vf step = vf_set(half_at(from + 208));
    int8_t levels[16 + TN_LANES]; /* vectors of them may be read whole */
    memcpy(levels, from + 192, 16);
    for (int n = 0; n < 16; n += TN_LANES) vf_store(scale + n, vf_mul(vf_load_i8(levels + n), step));
    for (int n = 0; n < 16; n += TN_LANES) vf_store(offset + n, vf_set(-0.0f)); /* which leaves the sign of a zero */
}

/* 4 bits each, of a scale in the low half and a minimum in the high one. */
static void take_q2_k_scales(float *restrict scale, float *restrict offset, const uint8_t *from) {
    const float step = half_at(from + 80), minimum_step = -half_at(from + 82);
    for (int n = 0; n < 16; n++) {
        scale[n] = step * (float)(from[n] & 15);
        offset[n] = minimum_step * (float)(from[n] >> 4);
    }
}

/* 6 bits each, less 32: the low 4 of groups 0 to 7 and 8 to 15 in halves of 8 bytes, the high 2 in the last 4 bytes. */
static void take_q3_k_scales(float *restrict scale, float *restrict offset, const uint8_t *from) {
    const float step = half_at(from + 108);
    const uint8_t *packed = from + 96;
    for (int n = 0; n < 16; n++) {
        const int low = n < 8 ? packed[n] & 15 : packed[n - 8] >> 4, high = packed[8 + n % 4] >> n / 4 * 2 & 3;
        scale[n] = step * (float)((low | high << 4) - 32);
        offset[n] = 0.0f;
    }
}

/* 6 bits each, less 32: the low 4 in halves of 4 bytes, the high 2 in a word. */
static void take_iq4_xs_scales(float *restrict scale, float *restrict offset, const uint8_t *from) {
    const float step = half_at(from);
    const int high = from[2] | from[3] << 8;
    for (int n = 0; n < 8; n++) {
        scale[n] = step * (float)(((from[4 + n / 2] >> n % 2 * 4 & 15) | (high >> 2 * n & 3) << 4) - 32);
        offset[n] = 0.0f;
    }
}

static void take_small_scales(float *scale, float *offset, const uint8_t *from, int dtype) {
    *scale = half_at(from);
    *offset = dtype == TN_IQ4_NL ? 0.0f : dtype == TN_Q5_0 ? -16.0f * *scale : half_at(from + 2);
}

void tn_block_scales(float *scale, float *offset, const void *blocks, int count, int dtype) {
    const uint8_t *from = blocks;
    const int bytes = tn_block_bytes(dtype), num = tn_block_columns(dtype) == LARGE ? count / LARGE : count / GROUP;
#define EACH_BLOCK(take, groups) \
    for (int n = 0; n < num; n++) take(scale + n * groups, offset + n * groups, from + n * bytes)
    switch (dtype) {
    case TN_Q4_K:
    case TN_Q5_K: EACH_BLOCK(take_large_scales, 8); return;
    case TN_Q6_K: EACH_BLOCK(take_q6_k_scales, 16); return;
    case TN_Q2_K: EACH_BLOCK(take_q2_k_scales, 16); return;
    case TN_Q3_K: EACH_BLOCK(take_q3_k_scales, 16); return;
    case TN_IQ4_XS: EACH_BLOCK(take_iq4_xs_scales, 8); return;
    default:
        for (int n = 0; n < num; n++) take_small_scales(scale + n, offset + n, from + n * bytes, dtype);
    }
#undef EACH_BLOCK
}

/* ---- levels ---- */

/* Levels j and j + 16 are the halves of byte j. */
static void take_halves(int8_t *level, const uint8_t *from) {
    const uint64_t low = 0x0f0f0f0f0f0f0f0fu;
    for (int n = 0; n < GROUP / 2; n += 8) {
        uint64_t bytes;
        memcpy(&bytes, from + n, sizeof bytes);
        const uint64_t halves[] = {bytes & low, bytes >> 4 & low};
        memcpy(level + n, &halves[0], sizeof bytes);
        memcpy(level + n + GROUP / 2, &halves[1], sizeof bytes);
    }
}

/* Bit j of `bits` is level j's fifth one: eight bits become eight bytes, by sums that carry into each byte's highest bit. */
static void add_fifths(int8_t *level, uint32_t bits) {
    for (int n = 0; n < GROUP; n += 8) {
        const uint64_t own = (bits >> n & 255) * 0x0101010101010101u & 0x8040201008040201u;
        const uint64_t fifths = ((own + 0x00406070787c7e7fu) >> 7 & 0x0101010101010101u) << 4;
        uint64_t levels;
        memcpy(&levels, level + n, sizeof levels);
        levels |= fifths;
        memcpy(level + n, &levels, sizeof levels);
    }
}

/* Of 64 columns, the first 32 are the low halves of 32 bytes, and the others the high ones. */
static void take_q4_k(int8_t *restrict level, const uint8_t *restrict halves) {
    for (int run = 0; run < LARGE / 64; run++, level += 64, halves += 32)
        for (int j = 0; j < 32; j++) {
            level[j] = (int8_t)(halves[j] & 15);
            level[j + 32] = (int8_t)(halves[j] >> 4);
        }
}

/* Bit g of byte j is the fifth one of group g's j. */
static void take_q5_k(int8_t *restrict level, const uint8_t *restrict fifths, const uint8_t *restrict halves) {
    for (int run = 0; run < LARGE / 64; run++, level += 64, halves += 32)
        for (int j = 0; j < 32; j++) {
            const int fifth = fifths[j] >> (2 * run);
            level[j] = (int8_t)((halves[j] & 15) | (fifth & 1) << 4);
            level[j + 32] = (int8_t)(halves[j] >> 4 | (fifth & 2) << 3);
        }
}

/* Two halves of 128 columns: 64 bytes with the low 4 bits, and 32 with the high 2 of four quarters. */
static void take_q6_k(int8_t *restrict level, const uint8_t *restrict low, const uint8_t *restrict high) {
    for (int half = 0; half < 2; half++, level += 128, low += 64, high += 32)
        for (int j = 0; j < 32; j++) {
            level[j] = (int8_t)(((low[j] & 15) | (high[j] & 3) << 4) - 32);
            level[j + 32] = (int8_t)(((low[j + 32] & 15) | (high[j] >> 2 & 3) << 4) - 32);
            level[j + 64] = (int8_t)((low[j] >> 4 | (high[j] >> 4 & 3) << 4) - 32);
            level[j + 96] = (int8_t)((low[j + 32] >> 4 | (high[j] >> 6) << 4) - 32);
        }
}

/* Of 128 columns, bits 2 j and 2 j + 1 of 32 bytes are those of columns 32 j to 32 j + 31. */
static void take_q2_k(int8_t *restrict level, const uint8_t *restrict pairs) {
    for (int half = 0; half < 2; half++, pairs += 32)
        for (int quarter = 0; quarter < 4; quarter++, level += 32)
            for (int j = 0; j < 32; j++) level[j] = (int8_t)(pairs[j] >> 2 * quarter & 3);
}

/* The same, less 4 where a bit of `fours` is not set: bit g of byte j is of column 32 g + j. */
static void take_q3_k(int8_t *restrict level, const uint8_t *restrict fours, const uint8_t *restrict pairs) {
    for (int half = 0; half < 2; half++, pairs += 32)
        for (int quarter = 0; quarter < 4; quarter++, level += 32)
            for (int j = 0; j < 32; j++)
                level[j] = (int8_t)((pairs[j] >> 2 * quarter & 3) + (fours[j] >> (4 * half + quarter) & 1) * 4 - 4);
}

/* Half bytes as `take_halves` has them, for levels of a table. */
static void take_from_table(int8_t *level, const uint8_t *from) {
    static const int8_t table[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    v_look_up(level, from, table);
}

void tn_block_levels(int8_t *level, const void *blocks, int count, int dtype) {
    const uint8_t *from = blocks;
    const int columns = tn_block_columns(dtype), bytes = tn_block_bytes(dtype);
    for (int n = 0; n < count / columns * bytes; n += 64) __builtin_prefetch(from + n + AHEAD_BYTES);
    for (int n = 0; n < count / columns; n++, from += bytes, level += columns) {
        switch (dtype) {
        case TN_Q4_K: take_q4_k(level, from + 16); break;
        case TN_Q5_K: take_q5_k(level, from + 16, from + 48); break;
        case TN_Q6_K: take_q6_k(level, from, from + 128); break;
        case TN_Q2_K: take_q2_k(level, from + 16); break;
        case TN_Q3_K: take_q3_k(level, from, from + 32); break;
        case TN_IQ4_XS:
            for (int group = 0; group < LARGE / GROUP; group++)
                take_from_table(level + group * GROUP, from + 8 + group * GROUP / 2);
            break;
        case TN_IQ4_NL: take_from_table(level, from + 2); break;
        case TN_Q4_1: take_halves(level, from + 4); break;
        case TN_Q5_0:
            take_halves(level, from + 6);
            add_fifths(level, word_at(from + 2));
            break;
        default:
            take_halves(level, from + 8);
            add_fifths(level, word_at(from + 4));
        }
    }
}

/* ---- numbers ---- */

/* Some blocks, taken apart. */
typedef struct {
    _Alignas(64) int8_t level[TN_BLOCK_COLUMNS];
    float scale[TN_BLOCK_GROUPS];
    float offset[TN_BLOCK_GROUPS];
} parts_t;

static void take_parts(parts_t *parts, const void *from, int count, int dtype) {
    tn_block_levels(parts->level, from, count, dtype);
    tn_block_scales(parts->scale, parts->offset, from, count, dtype);
}

TN_INLINE vf number_at(const parts_t *parts, int k, const int size) {
    const int group = k / size;
    return vf_fma(vf_load_i8(parts->level + k), vf_set(parts->scale[group]), vf_set(parts->offset[group]));
}

TN_INLINE void widen(float *to, const parts_t *parts, int count, const int size) {
    for (int k = 0; k < count; k += size)
        for (int v = k; v < k + size; v += TN_LANES) vf_store(to + v, number_at(parts, v, size));
}

TN_INLINE void round_all(uint16_t *to, const parts_t *parts, int count, const int size) {
    for (int k = 0; k < count; k += 2 * TN_LANES)
        vf_store_bf16_pair(to + k, number_at(parts, k, size), number_at(parts, k + TN_LANES, size));
}

void tn_widen_blocks(float *to, const void *from, int count, int dtype) {
    parts_t parts;
    take_parts(&parts, from, count, dtype);
    if (tn_block_group(dtype) == 16)
        widen(to, &parts, count, 16);
    else
        widen(to, &parts, count, 32);
}

void tn_round_blocks(uint16_t *to, const void *from, int count, int dtype) {
    parts_t parts;
    take_parts(&parts, from, count, dtype);
    if (tn_block_group(dtype) == 16)
        round_all(to, &parts, count, 16);
    else
        round_all(to, &parts, count, 32);
}
