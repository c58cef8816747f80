/* Sequences of zstd: tables of states, and what they decode to, some literals and a match at a time. */
#include "frames.h"

enum { LITERALS, OFFSETS, MATCHES, NUM_KINDS };
enum { PREDEFINED, ONE_SYMBOL, DESCRIBED, REPEATED };
enum { MIN_STATES_LOG = 5, MAX_SYMBOLS_OF_KIND = 53, CHUNK = 16, PAIR = 2 * CHUNK, MAX_IN_PAIRS = 64 };

/* ---- tables of states ---- */

/* Lay `counts` of symbols, -1 for "less than one", out over 1 << log states. */
static void spread(tn_states *table, const int16_t *counts, int num, int log) {
    const int size = 1 << log, step = (size >> 1) + (size >> 3) + 3;
    uint16_t next[TN_MAX_STATE_SYMBOLS];
    int high = size - 1, place = 0;
    for (int symbol = 0; symbol < num; symbol++) {
        next[symbol] = (uint16_t)(counts[symbol] < 0 ? 1 : counts[symbol]);
        if (counts[symbol] < 0) table->states[high--].value = (uint32_t)symbol;
    }
    for (int symbol = 0; symbol < num; symbol++)
        for (int i = 0; i < counts[symbol]; i++) {
            table->states[place].value = (uint32_t)symbol;
            do place = (place + step) & (size - 1);
            while (place > high);
        }
    for (int i = 0; i < size; i++) {
        tn_state *state = &table->states[i];
        const uint16_t number = next[state->value]++;
        state->next_bits = (uint8_t)(log - highest_bit(number));
        state->next = (uint16_t)((number << state->next_bits) - size);
        state->value_bits = 0;
    }
    table->log = log;
}

/* The next 32 bits of what is read from its beginning. */
static uint32_t peek(const uint8_t *src, int64_t size, int64_t bit) {
    return (uint32_t)(load_word_within(src, size, bit >> 3) >> (bit & 7));
}

int64_t tn_read_states(tn_states *table, const uint8_t *src, int64_t size, int max_log, int max_symbol) {
    int16_t counts[TN_MAX_STATE_SYMBOLS];
    const int log = (int)(peek(src, size, 0) & 15) + MIN_STATES_LOG;
    if (log > max_log) return 0;
    int left = 1 << log; /* of the states */
    int64_t bit = 4;
    int num = 0;
    while (left > 0 && num <= max_symbol) {
        /* A number up to left + 1: the lower ones have a bit less. */
        const int bits = highest_bit((uint32_t)left + 1), half = 1 << bits, short_ones = 2 * half - 2 - left;
        const uint32_t next = peek(src, size, bit);
        int number = (int)(next & (uint32_t)(half - 1));
        bit += bits;
        if (number >= short_ones) {
            bit++;
            number = (int)(next & (uint32_t)(2 * half - 1));
            if (number >= half) number -= short_ones;
        }
        const int count = number - 1;
        left -= count < 0 ? 1 : count;
        counts[num++] = (int16_t)count;
        for (uint32_t zeros = count == 0 ? 3 : 0; zeros == 3;) {
            zeros = peek(src, size, bit) & 3;
            bit += 2;
            if (num + (int)zeros > max_symbol) return 0;
            for (uint32_t i = 0; i < zeros; i++) counts[num++] = 0;
        }
    }
    if (left != 0 || bit > 8 * size) return 0;
    spread(table, counts, num, log);
    return (bit + 7) / 8;
}

/* ---- what symbols mean ---- */

/* Lengths from a first one on: each symbol has those that its bits tell apart. */
static const uint8_t LITERAL_BITS[36] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  1,  1,
                                         1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
static const uint8_t MATCH_BITS[53] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                       0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1,
                                       2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

static const int16_t LITERAL_COUNTS[36] = {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2,
                                           2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
static const int16_t MATCH_COUNTS[53] = {1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                         1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                         1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};
static const int16_t OFFSET_COUNTS[29] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1,
                                          1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};

static const struct {
    const int16_t *counts; /* predefined */
    int num_counts;
    int log;
    int max_log;
    int max_symbol;
} KINDS[NUM_KINDS] = {
    [LITERALS] = {LITERAL_COUNTS, 36, 6, 9, 35},
    [OFFSETS] = {OFFSET_COUNTS, 29, 5, 8, 31},
    [MATCHES] = {MATCH_COUNTS, 53, 6, 9, 52},
};

/* Put what they mean in the place of a table's symbols. */
static void give_meaning(tn_states *table, int kind) {
    uint32_t first[MAX_SYMBOLS_OF_KIND];
    const uint8_t *bits = kind == LITERALS ? LITERAL_BITS : MATCH_BITS;
    first[0] = kind == LITERALS ? 0 : 3;
    for (int symbol = 1; kind != OFFSETS && symbol <= KINDS[kind].max_symbol; symbol++)
        first[symbol] = first[symbol - 1] + (1u << bits[symbol - 1]);
    for (int i = 0; i < 1 << table->log; i++) {
        const uint32_t symbol = table->states[i].value;
        table->states[i].value_bits = kind == OFFSETS ? (uint8_t)symbol : bits[symbol];
        table->states[i].value = kind == OFFSETS ? 1u << symbol : first[symbol];
    }
}

/* Bytes that the table of one kind took, or -1. */
static int64_t read_table(tn_history *history, int kind, int mode, const uint8_t *src, int64_t size) {
    tn_states *table = &history->states[kind];
    int64_t taken = 0;
    switch (mode) {
    case PREDEFINED: spread(table, KINDS[kind].counts, KINDS[kind].num_counts, KINDS[kind].log); break;
    case ONE_SYMBOL:
        if (size < 1 || src[0] > KINDS[kind].max_symbol) return -1;
        table->log = 0;
        table->states[0] = (tn_state){.value = src[0]};
        taken = 1;
        break;
    case DESCRIBED:
        taken = tn_read_states(table, src, size, KINDS[kind].max_log, KINDS[kind].max_symbol);
        if (taken == 0) return -1;
        break;
    default: return history->has_states ? 0 : -1;
    }
    give_meaning(table, kind);
    return taken;
}

/* ---- sequences ---- */

/* The offset that a value of 1 to 3 repeats or a greater one is, which becomes the last one; 0 where it is none. */
TN_INLINE int64_t next_offset(int64_t *last, int64_t value, bool has_literals) {
    if (value > 3) {
        last[2] = last[1];
        last[1] = last[0];
        return last[0] = value - 3;
    }
    const int64_t which = value - has_literals;
    const int64_t offset = which == 3 ? last[0] - 1 : last[which];
    if (which > 1) last[2] = last[1];
    if (which > 0) last[1] = last[0];
    return last[0] = offset;
}

/* Copy `count` bytes and up to 31 more, two chunks at a time. */
TN_INLINE void copy_pairs(uint8_t *out, const uint8_t *from, int64_t count) {
    int64_t i = 0;
    do {
        memmove(out + i, from + i, CHUNK);
        memmove(out + i + CHUNK, from + i + CHUNK, CHUNK);
        i += PAIR;
    } while (i < count);
}

/* Both move on: `out` at most up to the literals that are left. */
TN_INLINE bool copy_literals(tn_block *block, int64_t count) {
    const int64_t left = block->end - block->literals;
    if (count > left) return false;
    /* Pairs of chunks must not write over literals that are still to come. */
    if (count <= MAX_IN_PAIRS && count <= left - PAIR && block->literals - block->out >= PAIR)
        copy_pairs(block->out, block->literals, count);
    else
        memmove(block->out, block->literals, (size_t)count);
    block->out += count;
    block->literals += count;
    return true;
}

/* What is `offset` bytes before `out`, `count` bytes of it and up to 31 more. */
TN_INLINE void repeat(uint8_t *out, int64_t offset, int64_t count) {
    static const uint8_t strides[8] = {0, 8, 8, 6, 8, 5, 6, 7}; /* the multiples of offsets that are nearest to 8 */
    if (offset >= CHUNK) {
        copy_pairs(out, out - offset, count);
    } else if (offset >= 8) {
        for (int64_t i = 0; i < count; i += 8) memcpy(out + i, out + i - offset, 8);
    } else {
        uint64_t word = load_word(out - offset) & (((uint64_t)1 << 8 * offset) - 1);
        for (int64_t bits = 8 * offset; bits < 64; bits *= 2) word |= word << bits;
        for (int64_t i = 0; i < count; i += strides[offset]) memcpy(out + i, &word, 8);
    }
}

TN_INLINE bool copy_match(tn_block *block, int64_t offset, int64_t count) {
    const int64_t room = block->literals - block->out, safe = count < room - PAIR ? count : room - PAIR;
    uint8_t *out = block->out;
    if (offset < 1 || offset > out - block->begin || count > room) return false;
    if (safe > 0) repeat(out, offset, safe);
    for (int64_t i = safe > 0 ? safe : 0; i < count; i++) out[i] = out[i - offset];
    block->out += count;
    return true;
}

/* The bits of one sequence, and of the states of the next one: from a word that was loaded for all of them where they
 * are certain to be there and to fit, else one by one. */
typedef struct {
    uint64_t word; /* the next bits from the highest on */
    bool is_loaded;
} ahead_t;

TN_INLINE ahead_t look_ahead(const tn_bits *bits, const tn_state *states) {
    int count = 0;
    for (int kind = 0; kind < NUM_KINDS; kind++) count += states[kind].value_bits + states[kind].next_bits;
    if (count > 56 || bits->left < 64) return (ahead_t){0, false};
    const int64_t last = bits->left - 1;
    return (ahead_t){load_word(bits->bytes + (last >> 3) - 7) << (~last & 7), true};
}

TN_INLINE int64_t take(tn_bits *bits, ahead_t *ahead, int count) {
    if (!ahead->is_loaded) return (int64_t)take_bits(bits, count);
    const uint64_t taken = ahead->word >> 1 >> (63 - count);
    ahead->word <<= count;
    bits->left -= count;
    return (int64_t)taken;
}

static bool run_sequences(tn_history *history, tn_block *to, tn_bits *from, int64_t num) {
    const tn_state *tables[NUM_KINDS];
    uint64_t place[NUM_KINDS];
    tn_block block = *to;
    tn_bits bits = *from;
    for (int kind = 0; kind < NUM_KINDS; kind++) {
        tables[kind] = history->states[kind].states;
        place[kind] = take_bits(&bits, history->states[kind].log);
    }
    while (bits.left >= 0) {
        tn_state states[NUM_KINDS];
        for (int kind = 0; kind < NUM_KINDS; kind++) states[kind] = tables[kind][place[kind]];
        ahead_t ahead = look_ahead(&bits, states);
        const int64_t value = states[OFFSETS].value + take(&bits, &ahead, states[OFFSETS].value_bits);
        const int64_t match = states[MATCHES].value + take(&bits, &ahead, states[MATCHES].value_bits);
        const int64_t before = states[LITERALS].value + take(&bits, &ahead, states[LITERALS].value_bits);
        const int64_t offset = next_offset(history->offsets, value, before > 0);
        if (!copy_literals(&block, before) || !copy_match(&block, offset, match)) return false;
        if (--num == 0) break;
        place[LITERALS] = states[LITERALS].next + (uint64_t)take(&bits, &ahead, states[LITERALS].next_bits);
        place[MATCHES] = states[MATCHES].next + (uint64_t)take(&bits, &ahead, states[MATCHES].next_bits);
        place[OFFSETS] = states[OFFSETS].next + (uint64_t)take(&bits, &ahead, states[OFFSETS].next_bits);
    }
    *to = block;
    return bits.left == 0;
}

bool tn_decode_sequences(tn_history *history, tn_block *block, const uint8_t *src, int64_t size) {
    if (size < 1) return false;
    const int64_t head = src[0] < 128 ? 1 : src[0] < 255 ? 2 : 3;
    if (size < head) return false;
    int64_t num = src[0];
    if (head == 2) num = (src[0] - 128) << 8 | src[1];
    if (head == 3) num = (src[1] | src[2] << 8) + 0x7f00;
    int64_t at = head;
    if (num == 0) {
        if (at != size) return false;
    } else {
        if (at == size) return false;
        const int modes = src[at++];
        if (modes & 3) return false;
        for (int kind = 0; kind < NUM_KINDS; kind++) {
            const int64_t taken = read_table(history, kind, modes >> (6 - 2 * kind) & 3, src + at, size - at);
            if (taken < 0) return false;
            at += taken;
        }
        tn_bits bits;
        if (!open_bits(&bits, src + at, size - at) || !run_sequences(history, block, &bits, num)) return false;
        history->has_states = true;
    }
    return copy_literals(block, block->end - block->literals);
}
