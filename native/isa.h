/* Vectors of floats, and the dozen operations on them that each instruction set writes in its own way.
 *
 * `vf` holds TN_LANES floats in fp32, in which everything is computed. `..._part` functions read or write the first
 * `count` lanes only, 0 <= count <= TN_LANES; the other lanes are 0. Loads and stores need no alignment.
 * Sums over lanes are trees of halves: lane i and lane i + TN_LANES / 2 first.
 *
 * Where TN_BF16_DOT is defined, `vb` holds 2 * TN_LANES bf16, and vb_dot adds products of neighbours to fp32 lanes.
 */
#ifndef TN_ISA_H
#define TN_ISA_H

#include <stdint.h>
#include <string.h>

#define TN_INLINE static inline __attribute__((always_inline))

/* ---- scalars, the same everywhere ---- */

TN_INLINE float f32_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

TN_INLINE uint32_t bits_of_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

TN_INLINE float f32_of_bf16(uint16_t bits) { return f32_of_bits((uint32_t)bits << 16); }

/* Rounded to nearest, ties to even; a NaN stays one. */
TN_INLINE uint16_t bf16_of_f32(float value) {
    const uint32_t bits = bits_of_f32(value);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX512F__)
#include "isa_avx512.h"
#elif defined(__AVX2__)
#include "isa_avx2.h"
#elif defined(__aarch64__)
#include "isa_neon.h"
#else
#error "no vectors for this processor: isa.h knows AVX-512, AVX2 with FMA and F16C, and NEON"
#endif

/* ---- made of the above ---- */

/* e^x, at most 1 ulp off: 0 below -104, infinity above 88.73, NaN of NaN. Denormal results are kept.
 *
 * x = n log 2 + r, with log 2 in two parts so that r is exact to the last bit where n is large; e^r is a polynomial of
 * degree 6, fitted over |r| <= log(2) / 2 (error 1e-8); 2^n is multiplied in two halves, since it may have no float. */
TN_INLINE vf vf_exp(vf x) {
    x = vf_min(vf_set(89.0f), vf_max(vf_set(-104.0f), x)); /* in this order, so that a NaN passes */
    const vf n = vf_round(vf_mul(x, vf_set(0x1.715476p+0f)));
    vf r = vf_fma(n, vf_set(-0x1.62e400p-1f), x);
    r = vf_fma(n, vf_set(-0x1.7f7d1cp-20f), r);
    vf p = vf_set(0x1.6d4382p-10f);
    p = vf_fma(p, r, vf_set(0x1.120ba6p-7f));
    p = vf_fma(p, r, vf_set(0x1.5554e8p-5f));
    p = vf_fma(p, r, vf_set(0x1.5554dcp-3f));
    p = vf_fma(p, r, vf_set(0.5f));
    p = vf_fma(p, r, vf_set(1.0f));
    p = vf_fma(p, r, vf_set(1.0f));
    const vf half = vf_round(vf_mul(n, vf_set(0.5f)));
    return vf_mul(vf_mul(p, vf_pow2(half)), vf_pow2(vf_sub(n, half)));
}

/* The first `count` of TN_LANES integers. */
TN_INLINE vf vf_load_i8_part(const int8_t *from, int count) {
    int8_t lanes[TN_LANES] = {0};
    for (int lane = 0; lane < count; lane++) lanes[lane] = from[lane];
    return vf_load_i8(lanes);
}

/* The first `count` of TN_LANES floats of 8 bits. */
TN_INLINE vf vf_load_e4m3_part(const uint8_t *from, int count) {
    uint8_t lanes[TN_LANES] = {0};
    for (int lane = 0; lane < count; lane++) lanes[lane] = from[lane];
    return vf_load_e4m3(lanes);
}

#ifndef TN_U4_WORDS
/* A run of 64 integers of 4 bits in 32 bytes, times their scales plus their offsets, of a group in the low halves and one in
 * the high ones. */
TN_INLINE vf vf_u4_factors(int half) { return (void)half, vf_set(1.0f); }
TN_INLINE void vf_scale_u4(vf *to, const uint8_t *from, const float *scale, const float *offset) {
    for (int n = 0; n < 32 / TN_LANES; n++) {
        vf low, high;
        vf_load_u4(from + n * TN_LANES, &low, &high);
        to[n] = vf_fma(low, vf_set(scale[0]), vf_set(offset[0]));
        to[32 / TN_LANES + n] = vf_fma(high, vf_set(scale[1]), vf_set(offset[1]));
    }
}
TN_INLINE void vf_order_f32(float *to, const float *columns) {
    for (int n = 0; n < 32; n += TN_LANES) vf_store(to + n, vf_load(columns + n));
}
TN_INLINE void vf_order_bf16(float *to, const uint16_t *columns) {
    for (int n = 0; n < 32; n += TN_LANES) vf_store(to + n, vf_load_bf16(columns + n));
}
#endif

#ifndef TN_ROUND_PAIR
TN_INLINE void vf_store_bf16_pair(uint16_t *to, vf low, vf high) {
    vf_store_bf16(to, low);
    vf_store_bf16(to + TN_LANES, high);
}
#endif

/* Rounded to bf16, and back: what a bf16 model keeps of it. */
TN_INLINE vf vf_round_bf16(vf value) {
    uint16_t rounded[TN_LANES];
    vf_store_bf16(rounded, value);
    return vf_load_bf16(rounded);
}

#endif
