/* Values of a sparse tensor → their places: what the loader writes into its slabs.
 *
 * Eight elements at a time, by a table that says of each byte of a mask which of the next values goes where: one
 * shuffle of 16-bit words, or of bytes. Words of 32 bits, and the ends, go one by one and without a branch. Nothing is
 * read behind the last value or sign, and nothing written behind the last element.
 */
#include "fill.h"

#include <stdbool.h>
#include <string.h>

#include "isa.h"

#if defined(__AVX2__)
#include <immintrin.h>
typedef __m128i bytes_t;
TN_INLINE bytes_t load(const void *from) { return _mm_loadu_si128(from); }
TN_INLINE bytes_t load_half(const void *from) { return _mm_loadl_epi64(from); }
TN_INLINE void store(void *to, bytes_t bytes) { _mm_storeu_si128(to, bytes); }
TN_INLINE void store_half(void *to, bytes_t bytes) { _mm_storel_epi64(to, bytes); }
/* Of each index the byte; 0 where it is 128 or more. */
TN_INLINE bytes_t pick(bytes_t bytes, bytes_t indices) { return _mm_shuffle_epi8(bytes, indices); }
TN_INLINE bytes_t both(bytes_t one, bytes_t other) { return _mm_and_si128(one, other); }
TN_INLINE bytes_t either(bytes_t one, bytes_t other) { return _mm_or_si128(one, other); }
TN_INLINE bytes_t without(bytes_t bytes, bytes_t those) { return _mm_andnot_si128(those, bytes); }
TN_INLINE bytes_t spread_word(uint16_t word) { return _mm_set1_epi16((short)word); }
/* The words of which the high bytes are these eight, and the low ones 0. */
TN_INLINE bytes_t high_bytes(bytes_t half) { return _mm_unpacklo_epi8(_mm_setzero_si128(), half); }
/* Indices of words → those of their bytes; 255 stays. */
TN_INLINE bytes_t byte_indices(bytes_t half) {
    const bytes_t twice = _mm_unpacklo_epi8(half, half);
    return _mm_adds_epu8(_mm_adds_epu8(twice, twice), _mm_set1_epi16(0x0100));
}
/* All ones where a word is 0. */
TN_INLINE bytes_t zero_words(bytes_t words) { return _mm_cmpeq_epi16(words, _mm_setzero_si128()); }
/* A bit of each word that is all ones or 0, the first in the lowest. */
TN_INLINE unsigned bits_of_words(bytes_t words) {
    return (unsigned)_mm_movemask_epi8(_mm_packs_epi16(words, _mm_setzero_si128()));
}
TN_INLINE bool has_bits(bytes_t bytes) { return !_mm_testz_si128(bytes, bytes); }
#else
#include <arm_neon.h>
typedef uint8x16_t bytes_t;
TN_INLINE bytes_t load(const void *from) { return vld1q_u8(from); }
TN_INLINE bytes_t load_half(const void *from) { return vcombine_u8(vld1_u8(from), vdup_n_u8(0)); }
TN_INLINE void store(void *to, bytes_t bytes) { vst1q_u8(to, bytes); }
TN_INLINE void store_half(void *to, bytes_t bytes) { vst1_u8(to, vget_low_u8(bytes)); }
TN_INLINE bytes_t pick(bytes_t bytes, bytes_t indices) { return vqtbl1q_u8(bytes, indices); }
TN_INLINE bytes_t both(bytes_t one, bytes_t other) { return vandq_u8(one, other); }
TN_INLINE bytes_t either(bytes_t one, bytes_t other) { return vorrq_u8(one, other); }
TN_INLINE bytes_t without(bytes_t bytes, bytes_t those) { return vbicq_u8(bytes, those); }
TN_INLINE bytes_t spread_word(uint16_t word) { return vreinterpretq_u8_u16(vdupq_n_u16(word)); }
TN_INLINE bytes_t high_bytes(bytes_t half) { return vzip1q_u8(vdupq_n_u8(0), half); }
TN_INLINE bytes_t byte_indices(bytes_t half) {
    const bytes_t twice = vzip1q_u8(half, half);
    return vqaddq_u8(vqaddq_u8(twice, twice), spread_word(0x0100));
}
TN_INLINE bytes_t zero_words(bytes_t words) {
    return vreinterpretq_u8_u16(vceqzq_u16(vreinterpretq_u16_u8(words)));
}
TN_INLINE unsigned bits_of_words(bytes_t words) {
    static const uint16_t bits[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    return vaddvq_u16(vandq_u16(vreinterpretq_u16_u8(words), vld1q_u16(bits)));
}
TN_INLINE bool has_bits(bytes_t bytes) { return vmaxvq_u8(bytes) != 0; }
#endif

#define BITS_BELOW(mask, bit) (uint8_t)__builtin_popcount((mask) & ((1u << (bit)) - 1))
#define RANK(mask, bit) ((mask) >> (bit) & 1 ? BITS_BELOW(mask, bit) : 255)
#define SIGN(mask, bit) ((mask) >> (bit) & 1 ? 0x80 : 0)
#define EACH_BIT(of, mask)                                                                                         \
    {of(mask, 0), of(mask, 1), of(mask, 2), of(mask, 3), of(mask, 4), of(mask, 5), of(mask, 6), of(mask, 7)}
#define ROWS_4(of, m) EACH_BIT(of, m), EACH_BIT(of, (m) + 1), EACH_BIT(of, (m) + 2), EACH_BIT(of, (m) + 3)
#define ROWS_16(of, m) ROWS_4(of, m), ROWS_4(of, (m) + 4), ROWS_4(of, (m) + 8), ROWS_4(of, (m) + 12)
#define ROWS_64(of, m) ROWS_16(of, m), ROWS_16(of, (m) + 16), ROWS_16(of, (m) + 32), ROWS_16(of, (m) + 48)
#define ROWS_256(of) ROWS_64(of, 0u), ROWS_64(of, 64u), ROWS_64(of, 128u), ROWS_64(of, 192u)

/* Of each byte of a mask, and of each bit in it: how many bits below it are set; 255 of one that is not. */
static const uint8_t ranks[256][8] = {ROWS_256(RANK)};
/* Of each byte: its bits, as the highest bits of bytes. */
static const uint8_t tops[256][8] = {ROWS_256(SIGN)};

TN_INLINE unsigned bit_of(const uint8_t *bits, int64_t at) { return bits[at >> 3] >> (at & 7) & 1u; }

typedef struct {
    int64_t element; /* the next one */
    int64_t value;   /* the next one */
    int64_t sign;    /* the next zero's */
    bool has_zero;
} cursor_t;

#define WORD uint8_t
#define MAGNITUDE 0xffu
#define NAMED(name) name##_8
#include "scatter_words.h"
#undef WORD
#undef MAGNITUDE
#undef NAMED
#define WORD uint16_t
#define MAGNITUDE 0x7fffu
#define NAMED(name) name##_16
#include "scatter_words.h"
#undef WORD
#undef MAGNITUDE
#undef NAMED
#define WORD uint32_t
#define MAGNITUDE 0x7fffffffu
#define NAMED(name) name##_32
#include "scatter_words.h"
#undef WORD
#undef MAGNITUDE
#undef NAMED

/* The loops below take eight elements at a time from a whole byte of the mask on, as long as there are as many elements
 * and values. Their cursors are copies, which stay in registers whatever is written. */

static void expand_bytes(const tn_scatter_args *args, cursor_t *cursor) {
    const uint8_t *values = args->values, *mask = args->mask;
    uint8_t *out = args->out;
    const int64_t last_value = args->num_values - 8, last_element = args->count - 8;
    cursor_t at = *cursor;
    for (; at.element <= last_element && at.value <= last_value; at.element += 8) {
        const unsigned eight = mask[at.element >> 3];
        store_half(out + at.element, pick(load_half(values + at.value), load_half(ranks[eight])));
        at.value += __builtin_popcount(eight);
    }
    *cursor = at;
}

static void expand_words(const tn_scatter_args *args, cursor_t *cursor) {
    const uint16_t *values = args->values;
    const uint8_t *mask = args->mask;
    uint16_t *out = args->out;
    const int64_t last_value = args->num_values - 8, last_element = args->count - 8;
    cursor_t at = *cursor;
    for (; at.element <= last_element && at.value <= last_value; at.element += 8) {
        const unsigned eight = mask[at.element >> 3];
        store(out + at.element, pick(load(values + at.value), byte_indices(load_half(ranks[eight]))));
        at.value += __builtin_popcount(eight);
    }
    *cursor = at;
}

static void expand_signed_words(const tn_scatter_args *args, cursor_t *cursor) {
    const uint16_t *values = args->values;
    const uint8_t *mask = args->mask, *signs = args->signs;
    uint16_t *out = args->out;
    const int64_t last_value = args->num_values - 8, last_element = args->count - 8;
    const int64_t last_sign = args->num_signs - 16; /* so that a 16-bit word of them can be read */
    cursor_t at = *cursor;
    for (; at.element <= last_element && at.value <= last_value && at.sign <= last_sign; at.element += 8) {
        const unsigned eight = mask[at.element >> 3];
        const uint8_t *first = signs + (at.sign >> 3);
        const unsigned sign_bits = (first[0] | (unsigned)first[1] << 8) >> (at.sign & 7) & 255u;
        const bytes_t words = pick(load(values + at.value), byte_indices(load_half(ranks[eight])));
        const bytes_t tops_of_zeros = pick(load_half(tops[sign_bits]), load_half(ranks[~eight & 255u]));
        store(out + at.element, either(words, high_bytes(tops_of_zeros)));
        const int num_values = __builtin_popcount(eight);
        at.value += num_values;
        at.sign += 8 - num_values;
    }
    *cursor = at;
}

static void refine_words(const tn_scatter_args *args, cursor_t *cursor) {
    const uint16_t *values = args->values;
    uint16_t *out = args->out;
    const int64_t last_value = args->num_values - 8, last_element = args->count - 8;
    const bytes_t keep = spread_word((uint16_t)args->keep), magnitude = spread_word(0x7fff);
    bytes_t lost = spread_word(0);
    cursor_t at = *cursor;
    for (; at.element <= last_element && at.value <= last_value; at.element += 8) {
        const bytes_t words = load(out + at.element), zeros = zero_words(both(words, magnitude));
        const unsigned eight = ~bits_of_words(zeros) & 255u;
        const bytes_t bits = pick(load(values + at.value), byte_indices(load_half(ranks[eight])));
        /* Zeros have no bits but their signs, and get none. */
        const bytes_t refined = either(both(words, either(keep, zeros)), bits);
        lost = either(lost, without(zero_words(both(refined, magnitude)), zeros));
        store(out + at.element, refined);
        at.value += __builtin_popcount(eight);
    }
    at.has_zero |= has_bits(lost);
    *cursor = at;
}

void tn_scatter(tn_scatter_args *args) {
    cursor_t at = {.element = args->begin, .sign = args->begin - args->num_before};
    switch (args->word_bytes) {
    case 1:
        scatter_8(args, &at, true);
        expand_bytes(args, &at);
        scatter_8(args, &at, false);
        at.has_zero = at.has_zero || any_zero_8(args->values, at.value);
        break;
    case 2:
        scatter_16(args, &at, true);
        if (args->mask == NULL)
            refine_words(args, &at);
        else if (args->signs == NULL)
            expand_words(args, &at);
        else
            expand_signed_words(args, &at);
        scatter_16(args, &at, false);
        at.has_zero = at.has_zero || (args->mask != NULL && any_zero_16(args->values, at.value));
        break;
    default: scatter_32(args, &at, false);
    }
    args->end = at.element;
    args->num_placed = at.value;
    args->has_zero = at.has_zero;
}
