/* NEON, and BF16 where the compiler has it. Read through isa.h only. */
#include <arm_neon.h>

#define TN_LANES 4
typedef float32x4_t vf;

TN_INLINE uint16x4_t v_load16_part(const uint16_t *from, int count) {
    uint16_t lanes[TN_LANES] = {0};
    for (int lane = 0; lane < count; lane++) lanes[lane] = from[lane];
    return vld1_u16(lanes);
}

TN_INLINE vf vf_set(float value) { return vdupq_n_f32(value); }
TN_INLINE vf vf_zero(void) { return vdupq_n_f32(0.0f); }

TN_INLINE vf vf_load(const float *from) { return vld1q_f32(from); }
TN_INLINE vf vf_load_part(const float *from, int count) {
    float lanes[TN_LANES] = {0};
    for (int lane = 0; lane < count; lane++) lanes[lane] = from[lane];
    return vld1q_f32(lanes);
}
TN_INLINE void vf_store(float *to, vf value) { vst1q_f32(to, value); }
TN_INLINE void vf_store_part(float *to, vf value, int count) {
    float lanes[TN_LANES];
    vst1q_f32(lanes, value);
    for (int lane = 0; lane < count; lane++) to[lane] = lanes[lane];
}

TN_INLINE vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
TN_INLINE vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
TN_INLINE vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
TN_INLINE vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
TN_INLINE vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); } /* a * b + c, rounded once */
TN_INLINE vf vf_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); } /* b where either is NaN */
TN_INLINE vf vf_min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); } /* b where either is NaN */
TN_INLINE vf vf_sqrt(vf a) { return vsqrtq_f32(a); }
TN_INLINE vf vf_round(vf a) { return vrndnq_f32(a); }

/* a < b ? then : otherwise, lane by lane; of a NaN otherwise. */
TN_INLINE vf vf_if_less(vf a, vf b, vf then, vf otherwise) { return vbslq_f32(vcltq_f32(a, b), then, otherwise); }

/* 2^n for whole n in [-126, 127]. */
TN_INLINE vf vf_pow2(vf n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}

/* ---- widening and rounding ---- */

TN_INLINE vf v_of_bf16(uint16x4_t bits) { return vreinterpretq_f32_u32(vshll_n_u16(bits, 16)); }
TN_INLINE vf vf_load_bf16(const uint16_t *from) { return v_of_bf16(vld1_u16(from)); }
TN_INLINE vf vf_load_bf16_part(const uint16_t *from, int count) { return v_of_bf16(v_load16_part(from, count)); }
TN_INLINE vf vf_load_f16(const uint16_t *from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
TN_INLINE vf vf_load_f16_part(const uint16_t *from, int count) {
    return vcvt_f32_f16(vreinterpret_f16_u16(v_load16_part(from, count)));
}
TN_INLINE vf vf_load_i8(const int8_t *from) {
    const int16_t lanes[TN_LANES] = {from[0], from[1], from[2], from[3]};
    return vcvtq_f32_s32(vmovl_s16(vld1_s16(lanes)));
}

TN_INLINE float f32_of_f16(uint16_t bits) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))), 0); }

TN_INLINE uint16x4_t v_to_bf16(vf value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(value, value), rounded, quiet), 16);
}
TN_INLINE void vf_store_bf16(uint16_t *to, vf value) { vst1_u16(to, v_to_bf16(value)); }
TN_INLINE void vf_store_bf16_part(uint16_t *to, vf value, int count) {
    uint16_t lanes[TN_LANES];
    vf_store_bf16(lanes, value);
    for (int lane = 0; lane < count; lane++) to[lane] = lanes[lane];
}
TN_INLINE void vf_store_f16(uint16_t *to, vf value) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(value))); }

/* Integers of 4 bits: TN_LANES bytes, whose low and whose high halves are 2 * TN_LANES levels. */
TN_INLINE void vf_load_u4(const uint8_t *from, vf *low, vf *high) {
    const uint16_t lanes[TN_LANES] = {from[0], from[1], from[2], from[3]};
    const uint32x4_t bytes = vmovl_u16(vld1_u16(lanes));
    *low = vcvtq_f32_u32(vandq_u32(bytes, vdupq_n_u32(15)));
    *high = vcvtq_f32_u32(vshrq_n_u32(bytes, 4));
}

/* TN_LANES numbers of 4 bits, two neighbours a byte: a sign, two bits of exponent and one of mantissa. */
TN_INLINE vf vf_load_e2m1(const uint8_t *from) {
    static const float table[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    const float lanes[TN_LANES] = {table[from[0] & 15], table[from[0] >> 4], table[from[1] & 15], table[from[1] >> 4]};
    return vld1q_f32(lanes);
}

/* TN_LANES codes of a table of 16, two neighbours a byte, the first one in its high half. */
TN_INLINE vf vf_load_codes(const uint8_t *from, const float *table) {
    const float lanes[TN_LANES] = {table[from[0] >> 4], table[from[0] & 15], table[from[1] >> 4], table[from[1] & 15]};
    return vld1q_f32(lanes);
}

/* TN_LANES E4M3: as fp16 they are 2^8 times smaller. All bits of exponent and mantissa set are NaN: one more carries. */
TN_INLINE vf vf_load_e4m3(const uint8_t *from) {
    const uint16_t lanes[TN_LANES] = {from[0], from[1], from[2], from[3]};
    const uint16x4_t bytes = vld1_u16(lanes), size = vand_u16(bytes, vdup_n_u16(0x7f));
    const uint16x4_t is_nan = vand_u16(vadd_u16(vshl_n_u16(size, 7), vdup_n_u16(0x80)), vdup_n_u16(0x4000));
    const uint16x4_t sign = vshl_n_u16(vand_u16(bytes, vdup_n_u16(0x80)), 8);
    const uint16x4_t halves = vorr_u16(vorr_u16(vshl_n_u16(size, 7), sign), is_nan);
    return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(halves)), 256.0f);
}

/* Entries of a table of 16: `to` and `to` + 16 are those of the low and of the high halves of 16 bytes. */
TN_INLINE void v_look_up(int8_t *to, const uint8_t *halves, const int8_t *table) {
    const uint8x16_t bytes = vld1q_u8(halves);
    const int8x16_t entries = vld1q_s8(table);
    vst1q_s8(to, vqtbl1q_s8(entries, vandq_u8(bytes, vdupq_n_u8(15))));
    vst1q_s8(to + 16, vqtbl1q_s8(entries, vshrq_n_u8(bytes, 4)));
}

/* ---- over lanes ---- */

TN_INLINE float vf_sum(vf a) {
    const float32x2_t two = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

TN_INLINE float vf_largest(vf a) { return vmaxvq_f32(a); } /* no lane may be NaN */

/* to[0..3] = first ? sums : to[0..3] + sums, of the lanes of a, b, c and d: each the tree that `vf_sum` has. */
TN_INLINE void vf_reduce4(float *to, vf a, vf b, vf c, vf d, int first) {
    const vf ab = vcombine_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a)), vadd_f32(vget_low_f32(b), vget_high_f32(b)));
    const vf cd = vcombine_f32(vadd_f32(vget_low_f32(c), vget_high_f32(c)), vadd_f32(vget_low_f32(d), vget_high_f32(d)));
    vf four = vpaddq_f32(ab, cd);
    if (!first) four = vaddq_f32(vld1q_f32(to), four);
    vst1q_f32(to, four);
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define TN_BF16_DOT 1
typedef bfloat16x8_t vb;

TN_INLINE vb vb_load(const uint16_t *from) { return vreinterpretq_bf16_u16(vld1q_u16(from)); }
TN_INLINE vb vb_load_part(const uint16_t *from, int count) { /* count < 2 * TN_LANES */
    uint16_t lanes[2 * TN_LANES] = {0};
    for (int lane = 0; lane < count; lane++) lanes[lane] = from[lane];
    return vb_load(lanes);
}
TN_INLINE vf vb_dot(vf sums, vb a, vb b) { return vbfdotq_f32(sums, a, b); }

/* 32 integers less `zero` as bf16, exactly: they have at most 8 bits. */
TN_INLINE void vb_expand_i8(uint16_t *to, const int8_t *from, int zero) {
    for (int place = 0; place < 32; place += TN_LANES)
        vf_store_bf16(to + place, vf_sub(vf_load_i8(from + place), vf_set((float)zero)));
}

/* The scales of sixteen levels, and the offsets that are added to the products, for two groups. */
typedef struct { vf scale[2], offset[2]; } vb_levels;
TN_INLINE vb_levels vb_levels_of(float scale, float offset, float next_scale, float next_offset) {
    return (vb_levels){{vf_set(scale), vf_set(next_scale)}, {vf_set(offset), vf_set(next_offset)}};
}

/* 32 bytes → 32 columns of their low halves, which are of the first group, and 32 of their high ones. */
TN_INLINE void vb_expand_u4(uint16_t *low, uint16_t *high, const uint8_t *from, vb_levels levels) {
    for (int place = 0; place < 32; place += TN_LANES) {
        vf low_levels, high_levels;
        vf_load_u4(from + place, &low_levels, &high_levels);
        vf_store_bf16(low + place, vf_fma(low_levels, levels.scale[0], levels.offset[0]));
        vf_store_bf16(high + place, vf_fma(high_levels, levels.scale[1], levels.offset[1]));
    }
}
#endif
