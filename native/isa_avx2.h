/* AVX2 with FMA and F16C. Read through isa.h only. */
#include <immintrin.h>

#define TN_LANES 8
typedef __m256 vf;

/* All ones in the first `count` lanes. */
TN_INLINE __m256i v_mask(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
TN_INLINE __m128i v_load16_part(const uint16_t *from, int count) {
    uint16_t lanes[TN_LANES] = {0};
    for (int lane = 0; lane < count; lane++) lanes[lane] = from[lane];
    return _mm_loadu_si128((const void *)lanes);
}

TN_INLINE vf vf_set(float value) { return _mm256_set1_ps(value); }
TN_INLINE vf vf_zero(void) { return _mm256_setzero_ps(); }

TN_INLINE vf vf_load(const float *from) { return _mm256_loadu_ps(from); }
TN_INLINE vf vf_load_part(const float *from, int count) { return _mm256_maskload_ps(from, v_mask(count)); }
TN_INLINE void vf_store(float *to, vf value) { _mm256_storeu_ps(to, value); }
TN_INLINE void vf_store_part(float *to, vf value, int count) { _mm256_maskstore_ps(to, v_mask(count), value); }

TN_INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
TN_INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
TN_INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
TN_INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
TN_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); } /* a * b + c, rounded once */
TN_INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }            /* b where either is NaN */
TN_INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }            /* b where either is NaN */
TN_INLINE vf vf_sqrt(vf a) { return _mm256_sqrt_ps(a); }
TN_INLINE vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/* a < b ? then : otherwise, lane by lane; of a NaN otherwise. */
TN_INLINE vf vf_if_less(vf a, vf b, vf then, vf otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

/* 2^n for whole n in [-126, 127]. */
TN_INLINE vf vf_pow2(vf n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}

/* ---- widening and rounding ---- */

TN_INLINE vf v_of_bf16(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
TN_INLINE vf vf_load_bf16(const uint16_t *from) { return v_of_bf16(_mm_loadu_si128((const void *)from)); }
TN_INLINE vf vf_load_bf16_part(const uint16_t *from, int count) { return v_of_bf16(v_load16_part(from, count)); }
TN_INLINE vf vf_load_f16(const uint16_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)from)); }
TN_INLINE vf vf_load_f16_part(const uint16_t *from, int count) { return _mm256_cvtph_ps(v_load16_part(from, count)); }
TN_INLINE vf vf_load_i8(const int8_t *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from)));
}

TN_INLINE float f32_of_f16(uint16_t bits) { return _cvtsh_ss(bits); }

TN_INLINE __m128i v_to_bf16(vf value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i chosen = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m256i packed = _mm256_packus_epi32(chosen, chosen); /* within each half */
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
TN_INLINE void vf_store_bf16(uint16_t *to, vf value) { _mm_storeu_si128((void *)to, v_to_bf16(value)); }
TN_INLINE void vf_store_bf16_part(uint16_t *to, vf value, int count) {
    uint16_t lanes[TN_LANES];
    vf_store_bf16(lanes, value);
    for (int lane = 0; lane < count; lane++) to[lane] = lanes[lane];
}
TN_INLINE void vf_store_f16(uint16_t *to, vf value) {
    _mm_storeu_si128((void *)to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* Integers of 4 bits: a run of 64 in 32 bytes, times their scales plus their offsets, of a group in the low halves and one
 * in the high ones.
 *
 * A word has eight levels, of which shifts and masks leave one: so lanes are 4 columns apart, and levels of high halves
 * are 16 times too large, by which their scales were divided. */
#define TN_U4_WORDS 1
TN_INLINE vf vf_u4_factors(int half) { /* of scales of half runs in turn, the first of which is low: 0, or high: 1 */
    static const float factors[TN_LANES + 1] = {1.0f, 0x1p-4f, 1.0f, 0x1p-4f, 1.0f, 0x1p-4f, 1.0f, 0x1p-4f, 1.0f};
    return vf_load(factors + half);
}
TN_INLINE void vf_scale_u4(vf *to, const uint8_t *from, const float *scale, const float *offset) {
    const __m256i words = _mm256_loadu_si256((const void *)from);
    const __m256i low = _mm256_set1_epi32(0xf), high = _mm256_set1_epi32(0xf0);
    for (int byte = 0; byte < 4; byte++) {
        const __m256i shifted = _mm256_srli_epi32(words, 8 * byte);
        to[byte] = vf_fma(_mm256_cvtepi32_ps(_mm256_and_si256(shifted, low)), vf_set(scale[0]), vf_set(offset[0]));
        to[4 + byte] = vf_fma(_mm256_cvtepi32_ps(_mm256_and_si256(shifted, high)), vf_set(scale[1]), vf_set(offset[1]));
    }
}

/* 32 columns as floats in the order of those vectors. */
TN_INLINE void vf_order_f32(float *to, const float *columns) {
    vf pairs[4];
    for (int n = 0; n < 4; n++) /* columns 4n to 4n + 3, and 4n + 16 to 4n + 19 */
        pairs[n] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(columns + 4 * n)),
                                        _mm_loadu_ps(columns + 4 * n + 16), 1);
    const vf a = _mm256_unpacklo_ps(pairs[0], pairs[1]), b = _mm256_unpackhi_ps(pairs[0], pairs[1]);
    const vf c = _mm256_unpacklo_ps(pairs[2], pairs[3]), d = _mm256_unpackhi_ps(pairs[2], pairs[3]);
    vf_store(to, _mm256_shuffle_ps(a, c, 0x44));
    vf_store(to + 8, _mm256_shuffle_ps(a, c, 0xee));
    vf_store(to + 16, _mm256_shuffle_ps(b, d, 0x44));
    vf_store(to + 24, _mm256_shuffle_ps(b, d, 0xee));
}
TN_INLINE void vf_order_bf16(float *to, const uint16_t *columns) {
    const vf a = _mm256_loadu_ps((const void *)columns), b = _mm256_loadu_ps((const void *)(columns + 16));
    for (int pair = 0; pair < 2; pair++, to += 16) { /* of four neighbours */
        const vf mixed = pair == 0 ? _mm256_shuffle_ps(a, b, 0x88) : _mm256_shuffle_ps(a, b, 0xdd);
        const __m256i both = _mm256_permute4x64_epi64(_mm256_castps_si256(mixed), 0xd8);
        vf_store(to, _mm256_castsi256_ps(_mm256_slli_epi32(both, 16)));
        vf_store(to + 8, _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000))));
    }
}

/* TN_LANES numbers of 4 bits, two neighbours a byte: a sign, two bits of exponent and one of mantissa. */
TN_INLINE vf vf_load_e2m1(const uint8_t *from) {
    int four;
    memcpy(&four, from, sizeof four);
    const __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
    const __m256i both = _mm256_or_si256(bytes, _mm256_slli_epi64(bytes, 28)); /* the first one's, the second one's */
    const vf table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(both, _mm256_set1_epi32(8)), 28);
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, both), _mm256_castsi256_ps(sign));
}

/* TN_LANES codes of a table of 16, two neighbours a byte, the first one in its high half. */
TN_INLINE vf vf_load_codes(const uint8_t *from, const float *table) {
    int four;
    memcpy(&four, from, sizeof four);
    const __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
    const __m256i both = _mm256_or_si256(_mm256_srli_epi64(bytes, 4), _mm256_slli_epi64(bytes, 32));
    const vf low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), both); /* by the lowest 3 bits of each */
    const vf high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), both);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(both, 28)));
}

/* TN_LANES E4M3: as fp16 they are 2^8 times smaller. All bits of exponent and mantissa set are NaN: one more carries. */
TN_INLINE vf vf_load_e4m3(const uint8_t *from) {
    const __m128i bits = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)from)), 7);
    const __m128i carried = _mm_add_epi16(_mm_and_si128(bits, _mm_set1_epi16(0x3f80)), _mm_set1_epi16(0x80));
    const __m128i is_nan = _mm_and_si128(carried, _mm_set1_epi16(0x4000));
    const __m128i halves = _mm_or_si128(_mm_and_si128(bits, _mm_set1_epi16((short)0xbfff)), is_nan);
    return _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0f));
}

/* Entries of a table of 16: `to` and `to` + 16 are those of the low and of the high halves of 16 bytes. */
TN_INLINE void v_look_up(int8_t *to, const uint8_t *halves, const int8_t *table) {
    const __m128i bytes = _mm_loadu_si128((const void *)halves), entries = _mm_loadu_si128((const void *)table);
    const __m128i low = _mm_set1_epi8(15);
    _mm_storeu_si128((void *)to, _mm_shuffle_epi8(entries, _mm_and_si128(bytes, low)));
    _mm_storeu_si128((void *)(to + 16), _mm_shuffle_epi8(entries, _mm_and_si128(_mm_srli_epi16(bytes, 4), low)));
}

/* ---- over lanes ---- */

TN_INLINE __m128 v_halves(__m256 a) { /* 8 lanes → 4 */
    return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
}

TN_INLINE float vf_sum(vf a) {
    __m128 four = v_halves(a);
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}

TN_INLINE float vf_largest(vf a) { /* no lane may be NaN */
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

/* to[0..3] = first ? sums : to[0..3] + sums, of the lanes of a, b, c and d: each the tree that `vf_sum` has. */
TN_INLINE void vf_reduce4(float *to, vf a, vf b, vf c, vf d, int first) {
    const __m128 a4 = v_halves(a), b4 = v_halves(b), c4 = v_halves(c), d4 = v_halves(d);
    const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a4, b4), _mm_unpackhi_ps(a4, b4)); /* a0+a2 b0+b2 a1+a3 b1+b3 */
    const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c4, d4), _mm_unpackhi_ps(c4, d4));
    __m128 four = _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
    if (!first) four = _mm_add_ps(_mm_loadu_ps(to), four);
    _mm_storeu_ps(to, four);
}
