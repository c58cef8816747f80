/* Runs of zstd frames, as docs/format.md ("Frames") has them: their headers, blocks and literals.
 *
 * A block's literals are decoded to the end of the room that is left in the frame's content, and move to the front as
 * its sequences are run: the room between them is that of the matches, so it is over where they meet. */
#include "frames.h"

#include "core.h"

enum {
    MAX_BLOCKS = 256,
    ALIGNMENT = 8,
};
enum { RAW_BLOCK, RLE_BLOCK, COMPRESSED_BLOCK };
enum { RAW_LITERALS, RLE_LITERALS, COMPRESSED_LITERALS, TREELESS_LITERALS };

static const uint8_t MAGIC[4] = {0x28, 0xb5, 0x2f, 0xfd}, SKIPPABLE_MAGIC[4] = {0x50, 0x2a, 0x4d, 0x18};

/* ---- literals ---- */

/* Literals that are there, or one for all of them; bytes taken, or 0. */
static int64_t read_plain_literals(tn_block *block, const uint8_t *src, int64_t size) {
    const int form = src[0] >> 2 & 3, head = form == 1 ? 2 : form == 3 ? 3 : 1;
    if (size < head) return 0;
    int64_t count = src[0] >> 3;
    if (head == 2) count = (src[0] | src[1] << 8) >> 4;
    if (head == 3) count = (src[0] | src[1] << 8 | src[2] << 16) >> 4;
    const bool is_raw = (src[0] & 3) == RAW_LITERALS;
    const int64_t stored = is_raw ? count : 1;
    if (count > block->end - block->out || stored > size - head) return 0;
    uint8_t *to = block->end - count;
    block->literals = to;
    if (is_raw)
        memcpy(to, src + head, (size_t)count);
    else
        memset(to, src[head], (size_t)count);
    return head + stored;
}

typedef struct {
    int64_t count;
    int64_t stored; /* bytes behind the header */
    int head;       /* bytes of the header; 0 if it is not there */
    int num_streams;
} coded_literals_t;

static coded_literals_t read_literals_header(const uint8_t *src, int64_t size) {
    const int form = src[0] >> 2 & 3, head = form < 2 ? 3 : form + 2, bits = form < 2 ? 10 : 4 * form + 6;
    if (size < head) return (coded_literals_t){0};
    const uint64_t word = load_word_within(src, size, 0) >> 4, mask = ((uint64_t)1 << bits) - 1;
    return (coded_literals_t){(int64_t)(word & mask), (int64_t)(word >> bits & mask), head, form == 0 ? 1 : 4};
}

/* Literals in Huffman codes of a tree of their own or of the last one; bytes taken, or 0. */
static int64_t read_coded_literals(tn_frame_state *state, tn_block *block, const uint8_t *src, int64_t size) {
    const coded_literals_t header = read_literals_header(src, size);
    const int64_t head = header.head, count = header.count, stored = header.stored;
    if (head == 0 || count > block->end - block->out || stored > size - head) return 0;
    if (header.num_streams > 1 && count < 6) return 0;
    int64_t taken = 0;
    if ((src[0] & 3) == COMPRESSED_LITERALS) {
        state->has_codes = (taken = tn_read_codes(&state->codes, src + head, stored, count)) > 0;
    }
    uint8_t *to = block->end - count;
    block->literals = to;
    if (!state->has_codes ||
        !tn_decode_symbols(&state->codes, src + head + taken, stored - taken, header.num_streams, to, count))
        return 0;
    return head + stored;
}

/* ---- blocks and frames ---- */

static bool decode_block(tn_frame_state *state, tn_block *block, const uint8_t *src, int64_t size) {
    if (size < 1 || size > block->end - block->begin) return false;
    const int64_t taken = (src[0] & 3) < COMPRESSED_LITERALS ? read_plain_literals(block, src, size)
                                                             : read_coded_literals(state, block, src, size);
    return taken > 0 && tn_decode_sequences(&state->history, block, src + taken, size - taken);
}

/* The bytes of a header that is as the format has it and declares `count`; otherwise 0, with the reason in `fault`. */
static int64_t read_header(const uint8_t *src, int64_t size, int64_t count, tn_fault *fault) {
    static const int8_t field_bytes[4] = {1, 2, 4, 8};
    *fault = TN_FRAME_CUT;
    if (size < 5) return 0;
    *fault = TN_FRAME_ABSENT;
    if (memcmp(src, MAGIC, sizeof MAGIC)) return 0;
    *fault = TN_FRAME_KIND;
    if ((src[4] & 0x3f) != 0x20) return 0;
    *fault = TN_FRAME_CUT;
    const int field = field_bytes[src[4] >> 6];
    if (size < 5 + field) return 0;
    uint64_t declared = 0;
    memcpy(&declared, src + 5, (size_t)field);
    *fault = TN_FRAME_SIZE;
    if (declared + (field == 2 ? 256 : 0) != (uint64_t)count) return 0;
    *fault = TN_NO_FAULT;
    return 5 + field;
}

/* The bytes of a frame of `count` bytes, by its headers alone; otherwise 0, with the reason in `fault`. */
static int64_t step_over(const uint8_t *src, int64_t size, int64_t count, tn_fault *fault) {
    int64_t at = read_header(src, size, count, fault);
    if (at == 0) return 0;
    for (int i = 0; i < MAX_BLOCKS; i++) {
        *fault = TN_FRAME_CUT;
        if (size - at < 3) return 0;
        const int64_t head = src[at] | src[at + 1] << 8 | src[at + 2] << 16;
        const int kind = head >> 1 & 3;
        *fault = TN_FRAME_BLOCKS;
        if (kind > COMPRESSED_BLOCK) return 0;
        at += 3 + (kind == RLE_BLOCK ? 1 : head >> 3);
        *fault = TN_FRAME_CUT;
        if (at > size) return 0;
        *fault = TN_NO_FAULT;
        if (head & 1) return at;
    }
    *fault = TN_FRAME_BLOCKS;
    return 0;
}

/* Fill [out, out + count) from the frame at `src`; the bytes that it has, or 0. */
static int64_t decode_frame(tn_frame_state *state, const uint8_t *src, int64_t size, uint8_t *out, int64_t count) {
    tn_fault fault;
    int64_t at = read_header(src, size, count, &fault);
    if (at == 0) return 0;
    tn_block block = {.begin = out, .out = out, .literals = out + count, .end = out + count};
    state->has_codes = state->history.has_states = false;
    memcpy(state->history.offsets, (const int64_t[]){1, 4, 8}, sizeof state->history.offsets);
    for (int i = 0; i < MAX_BLOCKS; i++) {
        if (size - at < 3) return 0;
        const int64_t head = src[at] | src[at + 1] << 8 | src[at + 2] << 16, bytes = head >> 3;
        const int kind = head >> 1 & 3;
        const int64_t stored = kind == RLE_BLOCK ? 1 : bytes;
        at += 3;
        if (stored > size - at) return 0;
        if (kind == COMPRESSED_BLOCK) {
            if (!decode_block(state, &block, src + at, bytes)) return 0;
        } else {
            if (kind > COMPRESSED_BLOCK || bytes > block.end - block.out) return 0;
            if (kind == RAW_BLOCK)
                memcpy(block.out, src + at, (size_t)bytes);
            else
                memset(block.out, src[at], (size_t)bytes);
            block.out += bytes;
        }
        at += stored;
        if (head & 1) return block.out == block.end ? at : 0;
    }
    return 0;
}

/* Bytes that follow a frame up to the next multiple of 8: the shortest skippable frame of zeros, or -1. */
static int64_t padding_after(const uint8_t *src, int64_t size, int64_t at, tn_fault *fault) {
    const int64_t missing = -at & (ALIGNMENT - 1);
    if (missing == 0) return 0;
    uint8_t expected[8 + ALIGNMENT] = {0};
    memcpy(expected, SKIPPABLE_MAGIC, sizeof SKIPPABLE_MAGIC);
    expected[4] = (uint8_t)missing;
    const int64_t bytes = 8 + missing;
    *fault = size - at < bytes ? TN_FRAME_CUT : TN_FRAME_PADDING;
    return size - at >= bytes && memcmp(src + at, expected, (size_t)bytes) == 0 ? bytes : -1;
}

tn_fault tn_next_frame(tn_frame_state *state, tn_frames *frames, uint8_t *out, int64_t count) {
    const uint8_t *src = frames->src + frames->at;
    const int64_t size = frames->size - frames->at;
    tn_fault fault = TN_NO_FAULT;
    int64_t taken = out == NULL ? step_over(src, size, count, &fault) : decode_frame(state, src, size, out, count);
    if (taken == 0 && fault == TN_NO_FAULT && step_over(src, size, count, &fault) != 0) fault = TN_FRAME_CONTENT;
    if (fault != TN_NO_FAULT) return fault;
    const int64_t padding = padding_after(src, size, taken, &fault);
    if (padding < 0) {
        frames->at += taken; /* the padding begins there */
        return fault;
    }
    frames->end = frames->at + taken;
    frames->at = frames->end + padding;
    return TN_NO_FAULT;
}

/* True if a block is literals, and the byte that says that no sequences follow. */
static bool is_literal_block(const uint8_t *src, int64_t size) {
    if (size < 2) return false;
    const int kind = src[0] & 3, form = src[0] >> 2 & 3;
    int64_t taken;
    if (kind == RAW_LITERALS || kind == RLE_LITERALS) {
        const int head = form == 1 ? 2 : form == 3 ? 3 : 1;
        const uint64_t word = load_word_within(src, size, 0) & (((uint64_t)1 << 8 * head) - 1);
        taken = head + (kind == RLE_LITERALS ? 1 : (int64_t)(word >> (head == 1 ? 3 : 4)));
    } else {
        const coded_literals_t header = read_literals_header(src, size);
        taken = header.head + header.stored;
        if (header.head == 0) return false;
    }
    return taken + 1 == size && src[taken] == 0;
}

bool tn_is_literal_frame(const uint8_t *src, int64_t size) {
    const int field = src[4] >> 6;
    if (field == 3) return false; /* a size of 8 bytes */
    for (int64_t at = 5 + (1 << field); size - at >= 3;) {
        const int64_t head = src[at] | src[at + 1] << 8 | src[at + 2] << 16;
        const int kind = head >> 1 & 3;
        at += 3;
        if (kind == COMPRESSED_BLOCK && !is_literal_block(src + at, head >> 3)) return false;
        if (head & 1) return true;
        at += kind == RLE_BLOCK ? 1 : head >> 3;
    }
    return false;
}

int tn_decode_frames(tn_decode_frames_args *args) {
    if (args->size != sizeof *args || args->frame_bytes < 1 || args->frame_bytes > TN_MAX_FRAME_BYTES) return TN_REFUSED;
    tn_frame_state state;
    tn_frames frames = {.src = args->src, .size = args->src_bytes};
    args->end = 0;
    int64_t num = 0;
    for (int64_t begin = 0; begin < args->out_bytes; begin += args->frame_bytes) {
        const int64_t left = args->out_bytes - begin, count = left < args->frame_bytes ? left : args->frame_bytes;
        uint8_t *out = args->out == NULL ? NULL : args->out + begin;
        const int64_t frame_begin = frames.at;
        args->fault = tn_next_frame(&state, &frames, out, count);
        args->end = frames.at;
        if (args->fault != TN_NO_FAULT) return TN_DAMAGED;
        if (args->extents == NULL) continue;
        args->extents[num++] = frame_begin;
        args->extents[num++] = frames.end;
    }
    return TN_OK;
}
