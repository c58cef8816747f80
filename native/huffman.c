/* Huffman codes of zstd: several symbols a look-up, four streams side by side.
 *
 * A table of single symbols serves long codes, of which a look-up finds hardly more than one, and few literals. That of
 * several, of all 2^k values of the next k bits, is made of smaller ones: behind a code of n bits come k - n more, so
 * the values that begin with it are the table of k - n bits, each with one symbol before the others. Tables of 0 to 11
 * bits are filled in this way, from one run of words to another. */
#include "frames.h"

enum {
    TABLE_BITS = TN_MAX_CODE_BITS,
    MAX_SYMBOLS = 6, /* a look-up */
    LOOK_UPS = 5,    /* between two loads: their bits, and 7 that were read before, leave one of 64 */
    MIN_ROOM = MAX_SYMBOLS * (LOOK_UPS - 1) + 8, /* in `out`, for all of them: a word is written at a time */
    MAX_READ = 7,    /* bytes that they take */
    MAX_WEIGHTS = 255,
    MIN_WORDS_LITERALS = 1 << 14,
    LONG_CODE_BITS = 6,
    MAX_WEIGHT_STATES_LOG = 6,
};

/* ---- trees ---- */

/* Weights that two turns of states give, one of them at a time; how many there are, or 0 if damaged. */
static int read_compressed_weights(uint8_t *weights, const uint8_t *src, int64_t size) {
    tn_states table;
    tn_bits bits;
    const int64_t begin = tn_read_states(&table, src, size, MAX_WEIGHT_STATES_LOG, TABLE_BITS);
    if (begin == 0 || !open_bits(&bits, src + begin, size - begin)) return 0;
    uint64_t turn = take_bits(&bits, table.log), other = take_bits(&bits, table.log);
    if (bits.left < 0) return 0;
    for (int num = 0; num < MAX_WEIGHTS - 1;) {
        const tn_state state = table.states[turn];
        weights[num++] = (uint8_t)state.value;
        turn = other;
        other = state.next + take_bits(&bits, state.next_bits);
        if (bits.left >= 0) continue;
        weights[num++] = (uint8_t)table.states[turn].value;
        return num;
    }
    return 0;
}

/* As `read_compressed_weights`, of a whole tree's description; `taken` gets how many bytes it has. */
static int read_weights(uint8_t *weights, const uint8_t *src, int64_t size, int64_t *taken) {
    if (size < 1) return 0;
    const int head = src[0];
    const int num = head - 127;
    *taken = 1 + (num > 0 ? (num + 1) / 2 : head);
    if (*taken > size) return 0;
    if (num <= 0) return read_compressed_weights(weights, src + 1, head);
    for (int i = 0; i < num; i++) weights[i] = i % 2 ? src[1 + i / 2] & 15 : src[1 + i / 2] >> 4;
    return num;
}

/* Sort symbols by weight, the longest codes first, into `symbols`; how many have a code, or 0 if the weights, of which
 * the last is added, are those of no tree. */
static int sort_symbols(tn_codes *codes, uint8_t *symbols, uint8_t *weights, int num) {
    int of_weight[TABLE_BITS + 1] = {0}, place[TABLE_BITS + 1];
    uint32_t total = 0;
    for (int i = 0; i < num; i++) {
        if (weights[i] > TABLE_BITS) return 0;
        of_weight[weights[i]]++;
        total += (uint32_t)(1 << weights[i]) >> 1;
    }
    if (total == 0) return 0;
    const int longest = highest_bit(total) + 1;
    const uint32_t rest = (uint32_t)(1 << longest) - total;
    if (longest > TABLE_BITS || (rest & (rest - 1)) != 0) return 0;
    weights[num] = (uint8_t)(highest_bit(rest) + 1);
    of_weight[weights[num]]++;
    if (of_weight[1] < 2 || of_weight[1] % 2) return 0;
    place[1] = 0;
    for (int weight = 2; weight <= TABLE_BITS; weight++) place[weight] = place[weight - 1] + of_weight[weight - 1];
    for (int symbol = 0; symbol <= num; symbol++) {
        const int weight = weights[symbol];
        codes->code_bits[symbol] = (uint8_t)(longest + 1 - weight);
        if (weight > 0) symbols[place[weight]++] = (uint8_t)symbol;
    }
    return place[TABLE_BITS];
}

/* ---- the table ---- */

TN_INLINE int symbols_of(uint64_t word) { return (int)(word >> 48 & 255); }

/* Put a symbol of `code_bits` bits before those of each word. */
static void put_before(uint64_t *to, const uint64_t *from, int count, uint8_t symbol, int code_bits) {
    const uint64_t more = (uint64_t)code_bits << 56 | (uint64_t)1 << 48 | symbol;
    const uint64_t symbols = ((uint64_t)1 << 40) - 1, numbers = (uint64_t)0xffff << 48;
    for (int i = 0; i < count; i++) to[i] = ((from[i] & symbols) << 8) + (from[i] & numbers) + more;
}

/* As `put_before`, where there are codes of a single bit: words that are full lose their last symbol. */
static void put_before_or_drop(uint64_t *to, const uint64_t *from, int count, uint8_t symbol, const uint8_t *code_bits) {
    for (int i = 0; i < count; i++) {
        uint64_t word = from[i];
        if (symbols_of(word) == MAX_SYMBOLS) {
            const int last = word >> 8 * (MAX_SYMBOLS - 1) & 255;
            word -= (uint64_t)code_bits[last] << 56 | (uint64_t)1 << 48;
        }
        put_before(to + i, &word, 1, symbol, code_bits[symbol]);
    }
}

static void make_singles(tn_codes *codes, const uint8_t *symbols, int num) {
    uint16_t *to = codes->table.singles + (1 << TABLE_BITS);
    for (int i = num - 1; i >= 0; i--) {
        const int code_bits = codes->code_bits[symbols[i]], count = 1 << (TABLE_BITS - code_bits);
        to -= count;
        for (int j = 0; j < count; j++) to[j] = (uint16_t)(symbols[i] << 8 | code_bits);
    }
}

static void make_words(tn_codes *codes, const uint8_t *symbols, int num) {
    const bool can_be_full = codes->code_bits[symbols[num - 1]] * MAX_SYMBOLS < TABLE_BITS;
    int first = num; /* of the symbols whose codes have at most k bits */
    for (int k = 0; k <= TABLE_BITS; k++) {
        uint64_t *table = codes->table.words + (1 << k), *to = table + (1 << k);
        while (first > 0 && codes->code_bits[symbols[first - 1]] <= k) first--;
        for (int i = num - 1; i >= first; i--) {
            const int code_bits = codes->code_bits[symbols[i]], count = 1 << (k - code_bits);
            to -= count;
            if (can_be_full)
                put_before_or_drop(to, codes->table.words + count, count, symbols[i], codes->code_bits);
            else
                put_before(to, codes->table.words + count, count, symbols[i], code_bits);
        }
        memset(table, 0, (size_t)((char *)to - (char *)table)); /* codes that are longer */
    }
}

int64_t tn_read_codes(tn_codes *codes, const uint8_t *src, int64_t stored, int64_t num_literals) {
    uint8_t weights[MAX_WEIGHTS + 1], symbols[MAX_WEIGHTS + 1];
    int64_t taken = 0;
    int num = read_weights(weights, src, stored, &taken);
    if (num == 0 || (num = sort_symbols(codes, symbols, weights, num)) == 0) return 0;
    codes->is_single = num_literals < MIN_WORDS_LITERALS || 8 * stored > LONG_CODE_BITS * num_literals;
    if (codes->is_single)
        make_singles(codes, symbols, num);
    else
        make_words(codes, symbols, num);
    return taken;
}

/* ---- streams ---- */

typedef struct {
    uint64_t word;     /* the next bits from the highest on, then a 1, then zeros */
    const uint8_t *at; /* of the word in the stream */
    const uint8_t *begin;
    uint8_t *out;
    uint8_t *end;
} stream_t;

/* How many times LOOK_UPS fit into what is left of a stream and of its output, whatever they give. */
TN_INLINE int64_t safe_turns(const stream_t *stream) {
    const int64_t room = (stream->end - stream->out - (MIN_ROOM - LOOK_UPS * MAX_SYMBOLS)) / (LOOK_UPS * MAX_SYMBOLS);
    const int64_t bytes = (stream->at - stream->begin) / MAX_READ;
    return room < bytes ? room : bytes;
}

TN_INLINE void look_up(uint64_t *word, uint8_t **out, const uint64_t *table) {
    const uint8_t *found = (const uint8_t *)(table + (*word >> (64 - TABLE_BITS)));
    memcpy(*out, found, sizeof *table);
    *word <<= found[7] & 63;
    *out += found[6];
}

TN_INLINE void load(uint64_t *word, const uint8_t **at) {
    const uint64_t taken = (uint64_t)__builtin_ctzll(*word);
    *at -= taken >> 3;
    *word = (load_word(*at) | 1) << (taken & 7);
}

static void decode_words(const uint64_t *table, stream_t *streams) {
    for (;;) {
        int64_t turns = safe_turns(&streams[0]);
        for (int i = 1; i < 4; i++) {
            const int64_t of_stream = safe_turns(&streams[i]);
            turns = of_stream < turns ? of_stream : turns;
        }
        if (turns <= 0) return;
        stream_t a = streams[0], b = streams[1], c = streams[2], d = streams[3];
        for (; turns > 0; turns--) {
            for (int i = 0; i < LOOK_UPS; i++) {
                look_up(&a.word, &a.out, table);
                look_up(&b.word, &b.out, table);
                look_up(&c.word, &c.out, table);
                look_up(&d.word, &d.out, table);
            }
            load(&a.word, &a.at);
            load(&b.word, &b.at);
            load(&c.word, &c.at);
            load(&d.word, &d.at);
        }
        streams[0] = a, streams[1] = b, streams[2] = c, streams[3] = d;
    }
}

static void decode_words_alone(const uint64_t *table, stream_t *stream) {
    for (int64_t turns; (turns = safe_turns(stream)) > 0;)
        for (; turns > 0; turns--) {
            for (int i = 0; i < LOOK_UPS; i++) look_up(&stream->word, &stream->out, table);
            load(&stream->word, &stream->at);
        }
}

/* As `safe_turns`, of single symbols. */
TN_INLINE int64_t safe_single_turns(const stream_t *stream) {
    const int64_t room = (stream->end - stream->out) / LOOK_UPS, bytes = (stream->at - stream->begin) / MAX_READ;
    return room < bytes ? room : bytes;
}

TN_INLINE void look_up_single(uint64_t *word, uint8_t *out, const uint16_t *table) {
    const unsigned found = table[*word >> (64 - TABLE_BITS)];
    *out = (uint8_t)(found >> 8);
    *word <<= found & 63;
    /* Four streams are no vector: their gathers take five times as long. */
    __asm__("" : "+r"(*word));
}

static void decode_singles(const uint16_t *table, stream_t *streams) {
    for (;;) {
        int64_t turns = safe_single_turns(&streams[0]);
        for (int i = 1; i < 4; i++) {
            const int64_t of_stream = safe_single_turns(&streams[i]);
            turns = of_stream < turns ? of_stream : turns;
        }
        if (turns <= 0) return;
        stream_t a = streams[0], b = streams[1], c = streams[2], d = streams[3];
        for (; turns > 0; turns--) {
            _Pragma("GCC unroll 5") for (int i = 0; i < LOOK_UPS; i++) {
                look_up_single(&a.word, a.out++, table);
                look_up_single(&b.word, b.out++, table);
                look_up_single(&c.word, c.out++, table);
                look_up_single(&d.word, d.out++, table);
            }
            load(&a.word, &a.at);
            load(&b.word, &b.at);
            load(&c.word, &c.at);
            load(&d.word, &d.at);
        }
        streams[0] = a, streams[1] = b, streams[2] = c, streams[3] = d;
    }
}

static void decode_singles_alone(const uint16_t *table, stream_t *stream) {
    for (int64_t turns; (turns = safe_single_turns(stream)) > 0;) {
        stream_t a = *stream;
        for (; turns > 0; turns--) {
            for (int i = 0; i < LOOK_UPS; i++) look_up_single(&a.word, a.out++, table);
            load(&a.word, &a.at);
        }
        *stream = a;
    }
}

/* The rest of a stream, symbol by symbol; false unless it ends where its output does. */
static bool finish(const tn_codes *codes, tn_bits *bits, uint8_t *out, uint8_t *end) {
    const uint64_t *words = codes->table.words + (1 << TABLE_BITS);
    while (out < end && bits->left > 0) {
        const int64_t low = bits->left - TABLE_BITS;
        const uint64_t next = low >= 0 ? load_word_within(bits->bytes, bits->size, low >> 3) >> (low & 7)
                                       : load_word_within(bits->bytes, bits->size, 0) << -low;
        const uint64_t found = next & ((1 << TABLE_BITS) - 1);
        *out = (uint8_t)(codes->is_single ? codes->table.singles[found] >> 8 : words[found]);
        bits->left -= codes->code_bits[*out++];
    }
    return out == end && bits->left == 0;
}

bool tn_decode_symbols(const tn_codes *codes, const uint8_t *src, int64_t size, int num_streams, uint8_t *out,
                       int64_t out_bytes) {
    const uint64_t *words = codes->table.words + (1 << TABLE_BITS);
    const uint16_t *singles = codes->table.singles;
    const int64_t head = 2 * (num_streams - 1), share = (out_bytes + num_streams - 1) / num_streams;
    if (size < head || out_bytes < share * (num_streams - 1)) return false;
    const uint8_t *begin = src + head;
    tn_bits bits[4];
    stream_t streams[4];
    bool all_long = num_streams == 4;
    for (int i = 0; i < num_streams; i++) {
        const bool is_last = i == num_streams - 1;
        const int64_t bytes = is_last ? src + size - begin : src[2 * i] | src[2 * i + 1] << 8;
        if (bytes > src + size - begin || !open_bits(&bits[i], begin, bytes)) return false;
        uint8_t *to = out + i * share;
        streams[i] = (stream_t){0, begin + bytes - 8, begin, to, is_last ? out + out_bytes : to + share};
        if (bytes >= 8)
            streams[i].word = (load_word(streams[i].at) | 1) << (8 * bytes - bits[i].left);
        else
            all_long = false;
        begin += bytes;
    }
    if (all_long && codes->is_single) decode_singles(singles, streams);
    if (all_long && !codes->is_single) decode_words(words, streams);
    for (int i = 0; i < num_streams; i++) {
        if (bits[i].size >= 8) {
            if (codes->is_single)
                decode_singles_alone(singles, &streams[i]);
            else
                decode_words_alone(words, &streams[i]);
            bits[i].left = 8 * (streams[i].at - streams[i].begin) + 64 - __builtin_ctzll(streams[i].word);
        }
        if (!finish(codes, &bits[i], streams[i].out, streams[i].end)) return false;
    }
    return true;
}
