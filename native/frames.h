/* The parts of a zstd frame's decoder (RFC 8878): bits, entropy codes, sequences. Nothing here trusts what it reads: a
 * function that meets damage says so, and has read nothing outside of the bytes that it was given. */
#ifndef TN_FRAMES_H
#define TN_FRAMES_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "core.h"
#include "isa.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "streams of bits are read as little-endian words"
#endif

/* ---- bits ---- */

/* `value` is not 0. */
TN_INLINE int highest_bit(uint32_t value) { return 31 - __builtin_clz(value); }

TN_INLINE uint64_t load_word(const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

/* 8 bytes from `at` on, with zeros for those that are not among the `size` bytes. */
TN_INLINE uint64_t load_word_within(const uint8_t *bytes, int64_t size, int64_t at) {
    if (at + 8 <= size) return load_word(bytes + at);
    uint64_t word = 0;
    if (at < size) memcpy(&word, bytes + at, (size_t)(size - at));
    return word;
}

/* A stream of bits that is read from its end, where a 1 marks the first one. */
typedef struct {
    const uint8_t *bytes;
    int64_t size;
    int64_t left; /* bits that were not read; below 0 once more were read than there are */
} tn_bits;

/* False if nothing marks the first bit. */
TN_INLINE bool open_bits(tn_bits *bits, const uint8_t *bytes, int64_t size) {
    if (size < 1 || bytes[size - 1] == 0) return false;
    *bits = (tn_bits){bytes, size, 8 * (size - 1) + highest_bit(bytes[size - 1])};
    return true;
}

/* The next `count` bits, 0 to 56; 0 where they are not there. */
TN_INLINE uint64_t take_bits(tn_bits *bits, int count) {
    bits->left -= count;
    if (bits->left < 0) return 0;
    return load_word_within(bits->bytes, bits->size, bits->left >> 3) >> (bits->left & 7) & (((uint64_t)1 << count) - 1);
}

/* ---- finite state entropy (sequences.c; RFC 8878, section 4.1) ---- */

enum { TN_MAX_STATES = 512, TN_MAX_STATE_SYMBOLS = 256 };

typedef struct {
    uint16_t next;      /* the next state is this, plus the next bits */
    uint8_t next_bits;
    uint8_t value_bits; /* a value is `value`, plus the next bits */
    uint32_t value;
} tn_state;

typedef struct {
    tn_state states[TN_MAX_STATES];
    int log; /* 1 << log states */
} tn_states;

/* Make the table that the bytes describe, whose values are symbols. Returns how many bytes that took; 0 where they
 * are damaged, or describe more than 1 << max_log states or a symbol above `max_symbol`. */
int64_t tn_read_states(tn_states *table, const uint8_t *src, int64_t size, int max_log, int max_symbol);

/* ---- Huffman codes (huffman.c; section 4.2) ---- */

enum { TN_MAX_CODE_BITS = 11 };

/* What the next 11 bits hold. Of few symbols, or long codes: the first one in the high byte, and how many bits it takes. Otherwise whole codes, at most 6: a word's bytes are their symbols, then how many they are, then how many bits
 * they take; the first 1 << 11 words are scratch. */
typedef struct {
    union {
        uint16_t singles[1 << TN_MAX_CODE_BITS];
        uint64_t words[2 << TN_MAX_CODE_BITS];
    } table;
    uint8_t code_bits[256]; /* by symbol */
    bool is_single;
} tn_codes;

/* For literals of this many bytes, stored with their tree in `stored` bytes: how many bytes the tree took; 0 where it is
 * damaged. */
int64_t tn_read_codes(tn_codes *codes, const uint8_t *src, int64_t stored, int64_t num_literals);

/* Fill `out` from 1 or 4 streams, which must hold exactly that. False where they are damaged; writes to `out` alone. */
bool tn_decode_symbols(const tn_codes *codes, const uint8_t *src, int64_t size, int num_streams, uint8_t *out,
                       int64_t out_bytes);

/* ---- sequences (sequences.c; sections 3.1.1.3.2 and 3.1.1.4) ---- */

/* What one block of a frame hands on to the next. */
typedef struct {
    tn_states states[3]; /* of the lengths of literals, offsets, the lengths of matches */
    int64_t offsets[3];  /* the last ones */
    bool has_states;
} tn_history;

/* Where a block is written. */
typedef struct {
    uint8_t *begin;          /* of the frame's content, which matches refer to */
    uint8_t *out;            /* the block's first byte: moved to its end */
    const uint8_t *literals; /* from here to `end`, in the memory that is written, and at or behind `out` */
    uint8_t *end;            /* of the frame's content */
} tn_block;

/* Decode a block's sequences, which the bytes must hold exactly. False where they are damaged. */
bool tn_decode_sequences(tn_history *history, tn_block *block, const uint8_t *src, int64_t size);

/* ---- frames (frames.c; section 3.1.1) ---- */

/* Working memory of one frame after another. */
typedef struct {
    tn_codes codes;
    tn_history history;
    bool has_codes;
} tn_frame_state;

/* A run of frames, each with its padding, of which those before `at` were read. */
typedef struct {
    const uint8_t *src;
    int64_t size;
    int64_t at;
    int64_t end; /* of the last frame, without its padding */
} tn_frames;

/* Fill [out, out + count) from the next frame, which must hold exactly that; with NULL, step over it by its headers
 * alone. On a fault `at` is where the frame begins, or its padding, and `out` is undefined. */
tn_fault tn_next_frame(tn_frame_state *state, tn_frames *frames, uint8_t *out, int64_t count);

/* True if the frame of these bytes, which was stepped over, has no sequences: a device decodes it. */
bool tn_is_literal_frame(const uint8_t *src, int64_t size);

#endif
