/* AVX-512 F, BW, DQ and VL; and BF16 where the compiler has it. Read through isa.h only. */
#include <immintrin.h>

#define TN_LANES 16
typedef __m512 vf;

TN_INLINE __mmask16 v_mask(int count) { return (__mmask16)((1u << count) - 1); }

TN_INLINE vf vf_set(float value) { return _mm512_set1_ps(value); }
TN_INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }

TN_INLINE vf vf_load(const float *from) { return _mm512_loadu_ps(from); }
TN_INLINE vf vf_load_part(const float *from, int count) { return _mm512_maskz_loadu_ps(v_mask(count), from); }
TN_INLINE void vf_store(float *to, vf value) { _mm512_storeu_ps(to, value); }
TN_INLINE void vf_store_part(float *to, vf value, int count) { _mm512_mask_storeu_ps(to, v_mask(count), value); }

TN_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
TN_INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
TN_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
TN_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
TN_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); } /* a * b + c, rounded once */
TN_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }            /* b where either is NaN */
TN_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }            /* b where either is NaN */
TN_INLINE vf vf_sqrt(vf a) { return _mm512_sqrt_ps(a); }
TN_INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/* a < b ? then : otherwise, lane by lane; of a NaN otherwise. */
TN_INLINE vf vf_if_less(vf a, vf b, vf then, vf otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, then);
}

/* 2^n for whole n in [-126, 127]. */
TN_INLINE vf vf_pow2(vf n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}

/* ---- widening and rounding ---- */

TN_INLINE vf v_of_bf16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
TN_INLINE vf vf_load_bf16(const uint16_t *from) { return v_of_bf16(_mm256_loadu_si256((const void *)from)); }
TN_INLINE vf vf_load_bf16_part(const uint16_t *from, int count) {
    return v_of_bf16(_mm256_maskz_loadu_epi16(v_mask(count), from));
}
TN_INLINE vf vf_load_f16(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)from)); }
TN_INLINE vf vf_load_f16_part(const uint16_t *from, int count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(v_mask(count), from));
}
TN_INLINE vf vf_load_i8(const int8_t *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from)));
}

TN_INLINE float f32_of_f16(uint16_t bits) { return _cvtsh_ss(bits); }

/* The processor's own rounding would flush denormals. */
TN_INLINE __m256i v_to_bf16(vf value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16));
}
TN_INLINE void vf_store_bf16(uint16_t *to, vf value) { _mm256_storeu_si256((void *)to, v_to_bf16(value)); }
TN_INLINE void vf_store_bf16_part(uint16_t *to, vf value, int count) {
    _mm256_mask_storeu_epi16(to, v_mask(count), v_to_bf16(value));
}
TN_INLINE void vf_store_f16(uint16_t *to, vf value) {
    _mm256_storeu_si256((void *)to, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* Integers of 4 bits: TN_LANES bytes, whose low and whose high halves are 2 * TN_LANES levels. */
TN_INLINE void vf_load_u4(const uint8_t *from, vf *low, vf *high) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from));
    *low = _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(15)));
    *high = _mm512_cvtepi32_ps(_mm512_srli_epi32(bytes, 4));
}

/* TN_LANES numbers of 4 bits, two neighbours a byte: a sign, two bits of exponent and one of mantissa. */
TN_INLINE vf v_e2m1_values(void) {
    return _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f,
                          -6.0f);
}
TN_INLINE vf vf_load_e2m1(const uint8_t *from) {
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const void *)from));
    const __m512i both = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28)); /* the first one's, the second one's */
    return _mm512_permutexvar_ps(both, v_e2m1_values()); /* which looks at the lowest 4 bits of each */
}

/* TN_LANES codes of a table of 16, two neighbours a byte, the first one in its high half. */
TN_INLINE vf vf_load_codes(const uint8_t *from, const float *table) {
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const void *)from));
    const __m512i both = _mm512_or_si512(_mm512_srli_epi64(bytes, 4), _mm512_slli_epi64(bytes, 32));
    return _mm512_permutexvar_ps(both, _mm512_load_ps(table)); /* which looks at the lowest 4 bits of each */
}

/* TN_LANES E4M3: as fp16 they are 2^8 times smaller. All bits of exponent and mantissa set are NaN: one more carries. */
TN_INLINE vf vf_load_e4m3(const uint8_t *from) {
    const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)from)), 7);
    const __m256i carried = _mm256_add_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x3f80)), _mm256_set1_epi16(0x80));
    const __m256i is_nan = _mm256_and_si256(carried, _mm256_set1_epi16(0x4000));
    const __m256i halves = _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi16((short)0xbfff)), is_nan);
    return _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0f));
}

/* Scales and offsets of the 8 groups in a block of Q4_K or Q5_K (blocks.c): of its first 16 bytes, two fp16 and packed
 * words, the same bits as one after another. */
#define TN_LARGE_SCALES 1
TN_INLINE void vf_take_large_scales(float *scale, float *offset, const uint8_t *from) {
    const __m128i words = _mm_loadu_si128((const void *)from);
    const __m128i low = _mm_srlv_epi32(_mm_shuffle_epi32(words, 0xed), _mm_setr_epi32(0, 0, 0, 4)); /* a c b c */
    const __m128i high = _mm_srli_epi32(_mm_shuffle_epi32(words, 0xa5), 2);                         /* a a b b */
    const __m128i own = _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f);
    const __m128i top = _mm_setr_epi32(0, 0x30303030, 0, 0x30303030);
    const __m128i levels = _mm_or_si128(_mm_and_si128(low, own), _mm_and_si128(high, top));
    const __m128 steps = _mm_cvtph_ps(_mm_xor_si128(words, _mm_setr_epi32((int)0x80000000, 0, 0, 0)));
    const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const vf both = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(levels)),
                                  _mm512_permutexvar_ps(which, _mm512_castps128_ps512(steps)));
    _mm256_storeu_ps(scale, _mm512_castps512_ps256(both));
    _mm256_storeu_ps(offset, _mm512_extractf32x8_ps(both, 1));
}

/* Entries of a table of 16: `to` and `to` + 16 are those of the low and of the high halves of 16 bytes. */
TN_INLINE void v_look_up(int8_t *to, const uint8_t *halves, const int8_t *table) {
    const __m128i bytes = _mm_loadu_si128((const void *)halves), entries = _mm_loadu_si128((const void *)table);
    const __m128i low = _mm_set1_epi8(15);
    _mm_storeu_si128((void *)to, _mm_shuffle_epi8(entries, _mm_and_si128(bytes, low)));
    _mm_storeu_si128((void *)(to + 16), _mm_shuffle_epi8(entries, _mm_and_si128(_mm_srli_epi16(bytes, 4), low)));
}

/* ---- over lanes ---- */

TN_INLINE __m128 v_halves(__m512 a) { /* 16 lanes → 4 */
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

TN_INLINE float vf_sum(vf a) {
    __m128 four = v_halves(a);
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}

TN_INLINE float vf_largest(vf a) { return _mm512_reduce_max_ps(a); } /* no lane may be NaN */

/* to[0..3] = first ? sums : to[0..3] + sums, of the lanes of a, b, c and d: each the tree that `vf_sum` has. */
TN_INLINE void vf_reduce4(float *to, vf a, vf b, vf c, vf d, int first) {
    const vf ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const vf cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    vf sums = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0x4e));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0xb1));
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    __m128 four = _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, sums));
    if (!first) four = _mm_add_ps(_mm_loadu_ps(to), four);
    _mm_storeu_ps(to, four);
}

#if defined(__AVX512BF16__)
#define TN_BF16_DOT 1
typedef __m512bh vb;

TN_INLINE vb vb_load(const uint16_t *from) { return (vb)_mm512_loadu_si512(from); }
TN_INLINE void vb_store(uint16_t *to, vb value) { _mm512_storeu_si512(to, (__m512i)value); }
TN_INLINE vb vb_load_part(const uint16_t *from, int count) { /* count < 2 * TN_LANES */
    return (vb)_mm512_maskz_loadu_epi16((1u << count) - 1, from);
}
TN_INLINE vf vb_dot(vf sums, vb a, vb b) { return _mm512_dpbf16_ps(sums, a, b); }

/* The sums of `vb_dot` are those of two products in fp32, odd elements' before even ones', with denormals as 0; on Intel's
 * processors that takes half of the time. Denormals are 0 from `v_flush_denormals` to `v_restore_denormals`, which takes
 * what the former returned. */
#define TN_FUSED_PAIRS 1
TN_INLINE uint32_t v_flush_denormals(void) {
    uint32_t before;
    __asm__ volatile("vstmxcsr %0" : "=m"(before));
    const uint32_t flushing = before | 0x8040; /* FTZ, DAZ */
    __asm__ volatile("vldmxcsr %0" ::"m"(flushing));
    return before;
}
TN_INLINE void v_restore_denormals(uint32_t before) { __asm__ volatile("vldmxcsr %0" ::"m"(before)); }
TN_INLINE vf v_hold(vf sum) { /* the compiler moves no product of the sum across it */
    __asm__ volatile("" : "+v"(sum));
    return sum;
}

/* 2 * TN_LANES elements, the odd ones and the even ones. */
TN_INLINE void vf_load_pairs_bf16(const uint16_t *from, vf *odd, vf *even) {
    const __m512i pairs = _mm512_loadu_si512(from);
    *odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}
/* Bits 8 to 15, or the lowest 8, of a word become the last ones of 2^15 + 128 + integer, or 2^23 + 128 + integer. */
TN_INLINE void vf_load_pairs_i8(const int8_t *from, vf *odd, vf *even) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from));
    enum { AND_XOR = 0x6a }; /* words & second ^ third */
    const __m512i high = _mm512_ternarylogic_epi32(words, _mm512_set1_epi32(0xff00), _mm512_set1_epi32(0x47008000), AND_XOR);
    const __m512i low = _mm512_ternarylogic_epi32(words, _mm512_set1_epi32(0xff), _mm512_set1_epi32(0x4b000080), AND_XOR);
    *odd = vf_sub(_mm512_castsi512_ps(high), vf_set(0x1p15f + 128));
    *even = vf_sub(_mm512_castsi512_ps(low), vf_set(0x1p23f + 128));
}
TN_INLINE void vf_load_pairs_e2m1(const uint8_t *from, vf *odd, vf *even) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from));
    *odd = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), v_e2m1_values());
    *even = _mm512_permutexvar_ps(bytes, v_e2m1_values()); /* which looks at the lowest 4 bits of each */
}

/* Of 2 * TN_LANES elements; denormals become 0, as `vb_dot` takes them. */
#define TN_ROUND_PAIR 1
TN_INLINE void vf_store_bf16_pair(uint16_t *to, vf low, vf high) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

TN_INLINE vb v_of_i8(__m128i low, __m128i high) {
    return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high)),
                               _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low)));
}

/* 32 integers less `zero` as bf16, exactly: they have at most 8 bits. */
TN_INLINE void vb_expand_i8(uint16_t *to, const int8_t *from, int zero) {
    const __m512i less = _mm512_set1_epi32(zero);
    const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from));
    const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(from + 16)));
    const vb both = _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(_mm512_sub_epi32(high, less)),
                                        _mm512_cvtepi32_ps(_mm512_sub_epi32(low, less)));
    _mm512_storeu_si512(to, (__m512i)both);
}

/* The sixteen levels of 4 bits times a scale plus an offset, rounded to bf16: of the next group, then of this one. */
typedef __m512i vb_levels;
TN_INLINE vb_levels vb_levels_of(float scale, float offset, float next_scale, float next_offset) {
    const vf levels = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (__m512i)_mm512_cvtne2ps_pbh(vf_fma(levels, vf_set(scale), vf_set(offset)),
                                        vf_fma(levels, vf_set(next_scale), vf_set(next_offset)));
}

/* 32 bytes → 32 columns of their low halves, which are of the first group, and 32 of their high ones. */
TN_INLINE void vb_load_u4(const uint8_t *from, vb_levels levels, vb *low, vb *high) {
    const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)from));
    enum { AND_OR = 0xea }; /* bytes & second | third: the second half of the table */
    const __m512i lows = _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi16(15), _mm512_set1_epi16(16), AND_OR);
    *low = (vb)_mm512_permutexvar_epi16(lows, levels);
    *high = (vb)_mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), levels);
}
TN_INLINE void vb_expand_u4(uint16_t *low, uint16_t *high, const uint8_t *from, vb_levels levels) {
    vb low_values, high_values;
    vb_load_u4(from, levels, &low_values, &high_values);
    _mm512_storeu_si512(low, (__m512i)low_values);
    _mm512_storeu_si512(high, (__m512i)high_values);
}

/* Integers become vectors so fast that a tile takes them from where they are. */
#define TN_INTEGER_TILES 1
TN_INLINE vb vb_load_i8(const int8_t *from) {
    return v_of_i8(_mm_loadu_si128((const void *)from), _mm_loadu_si128((const void *)(from + 16)));
}
TN_INLINE vb vb_load_e2m1(const uint8_t *from) { /* 16 bytes */
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from));
    const __m512i both = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    const __m512i table = _mm512_set_epi16(
        (short)0xc0c0, (short)0xc080, (short)0xc040, (short)0xc000, (short)0xbfc0, (short)0xbf80, (short)0xbf00,
        (short)0x8000, 0x40c0, 0x4080, 0x4040, 0x4000, 0x3fc0, 0x3f80, 0x3f00, 0x0000, (short)0xc0c0, (short)0xc080,
        (short)0xc040, (short)0xc000, (short)0xbfc0, (short)0xbf80, (short)0xbf00, (short)0x8000, 0x40c0, 0x4080, 0x4040,
        0x4000, 0x3fc0, 0x3f80, 0x3f00, 0x0000); /* twice: five bits are looked at, of which one is the neighbour's */
    return (vb)_mm512_permutexvar_epi16(both, table);
}

/* Sixteen values times a scale, rounded to bf16, and 32 codes of them. */
TN_INLINE vb_levels vb_levels_of_codes(const float *table, float scale) {
    const vf levels = vf_mul(_mm512_load_ps(table), vf_set(scale));
    return (__m512i)_mm512_cvtne2ps_pbh(levels, levels); /* twice: five bits are looked at, of which one is the neighbour's */
}
TN_INLINE vb vb_load_codes(const uint8_t *from, vb_levels levels) { /* 16 bytes */
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from));
    const __m512i both = _mm512_or_si512(_mm512_srli_epi32(bytes, 4), _mm512_slli_epi32(bytes, 16));
    return (vb)_mm512_permutexvar_epi16(both, levels);
}

/* 32 E4M3: a longer exponent, but for those without one and for NaN, sizes below 8 and 127, which a table has. */
TN_INLINE vb v_of_e4m3(__m256i bytes) {
    const __m512i words = _mm512_cvtepu8_epi16(bytes), size = _mm512_and_si512(words, _mm512_set1_epi16(0x7f));
    const __m512i table = _mm512_set_epi16(0x7fc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x3c60,
                                           0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0); /* five bits are looked at */
    const __mmask32 is_other =
        _mm512_cmpgt_epu16_mask(_mm512_sub_epi16(size, _mm512_set1_epi16(8)), _mm512_set1_epi16(118));
    const __m512i longer = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(0x3c00));
    const __m512i value = _mm512_mask_permutexvar_epi16(longer, is_other, size, table);
    enum { OR_AND = 0xf8 }; /* value | (words & sign) */
    return (vb)_mm512_ternarylogic_epi32(value, _mm512_slli_epi16(words, 8), _mm512_set1_epi16((short)0x8000), OR_AND);
}
TN_INLINE vb vb_load_e4m3(const uint8_t *from) { return v_of_e4m3(_mm256_loadu_si256((const void *)from)); }
TN_INLINE vb vb_load_e4m3_part(const uint8_t *from, int count) { /* count < 32 */
    return v_of_e4m3(_mm256_maskz_loadu_epi8((1u << count) - 1, from));
}

/* The same of Q4_K, whose products with scales are exact: two operations, of units that lookups leave idle. */
TN_INLINE vb_levels vb_levels_of_q4_k(const float *scale, const float *offset) {
    const vf levels = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (__m512i)_mm512_cvtne2ps_pbh(vf_add(vf_mul(levels, vf_set(scale[0])), vf_set(offset[0])),
                                        vf_add(vf_mul(levels, vf_set(scale[1])), vf_set(offset[1])));
}

/* The 32 levels of up to 5 bits of a group, times its scale plus its offset, rounded to bf16. */
TN_INLINE __m512i v_table(float scale, float offset) {
    const vf low = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const vf high = _mm512_setr_ps(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
    return (__m512i)_mm512_cvtne2ps_pbh(vf_fma(high, vf_set(scale), vf_set(offset)),
                                        vf_fma(low, vf_set(scale), vf_set(offset)));
}

/* Runs of 64 columns in blocks of 256 (blocks.h): the first 32, and the others. `scale` and `offset` are of their groups. */
TN_INLINE void vb_load_q4_k(const uint8_t *block, int run, const float *scale, const float *offset, vb *low, vb *high) {
    vb_load_u4(block + 16 + 32 * run, vb_levels_of_q4_k(scale, offset), low, high);
}
TN_INLINE void vb_load_q5_k(const uint8_t *block, int run, const float *scale, const float *offset, vb *low, vb *high) {
    const __m512i fifths = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(block + 16)));
    const __m512i halves = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(block + 48 + 32 * run)));
    const __m512i sixteen = _mm512_set1_epi16(16);
    __m512i lows = _mm512_and_si512(halves, _mm512_set1_epi16(15)), highs = _mm512_srli_epi16(halves, 4);
    lows = _mm512_mask_add_epi16(lows, _mm512_test_epi16_mask(fifths, _mm512_set1_epi16((short)(1 << 2 * run))), lows, sixteen);
    highs = _mm512_mask_add_epi16(highs, _mm512_test_epi16_mask(fifths, _mm512_set1_epi16((short)(2 << 2 * run))), highs, sixteen);
    *low = (vb)_mm512_permutexvar_epi16(lows, v_table(scale[0], offset[0]));
    *high = (vb)_mm512_permutexvar_epi16(highs, v_table(scale[1], offset[1]));
}
/* 32 levels of 6 bits times the scales of their two groups: `halves` and `tops` after rotations of each 4 bytes. */
TN_INLINE vb v_of_q6(const uint8_t *halves, int right, const uint8_t *tops, int left, const float *scale) {
    const __m256i low = _mm256_srlv_epi32(_mm256_loadu_si256((const void *)halves), _mm256_set1_epi32(right));
    const __m256i high = _mm256_rolv_epi32(_mm256_loadu_si256((const void *)tops), _mm256_set1_epi32(left));
    const __m256i four = _mm256_and_si256(low, _mm256_set1_epi8(0x0f)), two = _mm256_and_si256(high, _mm256_set1_epi8(0x30));
    const __m256i levels = _mm256_sub_epi8(_mm256_or_si256(four, two), _mm256_set1_epi8(32));
    const vf first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(levels)));
    const vf second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(levels, 1)));
    return _mm512_cvtne2ps_pbh(vf_mul(second, vf_set(scale[1])), vf_mul(first, vf_set(scale[0])));
}
TN_INLINE void vb_load_q6_k(const uint8_t *block, int run, const float *scale, vb *low, vb *high) {
    const uint8_t *halves = block + run / 2 * 64, *tops = block + 128 + run / 2 * 32;
    const int right = run % 2 * 4; /* of the second run, high halves, and higher bits */
    *low = v_of_q6(halves, right, tops, 4 - right, scale);
    *high = v_of_q6(halves + 32, right, tops, 2 - right, scale + 2);
}

/* 32 columns: levels j and j + 16 are the halves of byte j, and bit j of `fifths` is level j's fifth one. */
TN_INLINE vb vb_load_small(const uint8_t *halves, uint32_t fifths, float scale, float offset) {
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)halves));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_and_si256(bytes, _mm256_set1_epi16(15))),
                                            _mm256_srli_epi16(bytes, 4), 1);
    const __m512i levels = _mm512_mask_add_epi16(both, fifths, both, _mm512_set1_epi16(16));
    return (vb)_mm512_permutexvar_epi16(levels, v_table(scale, offset));
}

TN_INLINE vb vb_load_i8_part(const int8_t *from, int count) { /* count < 32 */
    const __m256i bytes = _mm256_maskz_loadu_epi8((1u << count) - 1, from);
    return v_of_i8(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
}
#endif
