/* Bytes → zstd frames of literals alone (RFC 8878): one block with Huffman codes in four streams and no sequences, or
 * raw bytes, or one repeated byte, whichever is shortest. Any zstd reads them, and huffman.c fast.
 *
 * Codes have at most 11 bits: optimal ones, by package-merge where Huffman's own are longer. Streams are read from their
 * ends, so they are written from the last symbol to the first. The same bytes on every machine. */
#include <stdbool.h>
#include <string.h>

#include "core.h"
#include "isa.h"

enum {
    SYMBOLS = 256,
    MAX_CODE_BITS = 11,
    MAX_DIRECT_WEIGHTS = 128,
    MIN_LITERALS = 32,   /* of fewer a tree costs more than it saves */
    MIN_FOUR = 256,      /* literals in four streams */
    FRAME_ROOM = 32,     /* headers and padding of a frame */
    STATES_LOG = 6,      /* of the weights' states: the most that the format allows */
    STATES = 1 << STATES_LOG,
    MAX_TREE_BYTES = 128,
};

TN_INLINE uint8_t *put_little(uint8_t *to, uint64_t value, int bytes) {
    memcpy(to, &value, (size_t)bytes);
    return to + bytes;
}

/* ---- counts ---- */

enum {
    STREAMS = 4,
    BLOCK = 4 * TN_LANES, /* bytes that are compared at once: a vector */
    NEAR = 16,            /* the highest symbols, which are nearly all exponents of weights */
    PAIRS = NEAR / 2,     /* of symbols: two are counted in the halves of a byte a lane */
    RUN_BLOCKS = 15,      /* whose counts fit half a byte, */
    MAX_BLOCKS = 16 * 15, /* and a byte */
    RUN_BYTES = RUN_BLOCKS * BLOCK,
};

typedef uint8_t block_t __attribute__((vector_size(BLOCK)));

/* Four tables, so that neighbours that are alike do not wait for each other's counts. */
static void count_any(uint32_t *counts, const uint8_t *src, int64_t size) {
    uint32_t tables[4][SYMBOLS] = {{0}};
    int64_t i = 0;
    for (; i + 4 <= size; i += 4)
        for (int table = 0; table < 4; table++) tables[table][src[i + table]]++;
    for (; i < size; i++) tables[0][src[i]]++;
    for (int symbol = 0; symbol < SYMBOLS; symbol++)
        counts[symbol] += tables[0][symbol] + tables[1][symbol] + tables[2][symbol] + tables[3][symbol];
}

/* Of each place below 16 the byte of a table, of which every 16 lanes have all; of 255 zero. */
TN_INLINE block_t look_up_near(block_t table, block_t places) {
#if defined(__AVX512BW__)
    return (block_t)_mm512_shuffle_epi8((__m512i)table, (__m512i)places);
#elif defined(__aarch64__)
    return (block_t)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)places);
#else
    return (block_t)_mm256_shuffle_epi8((__m256i)table, (__m256i)places);
#endif
}

TN_INLINE uint32_t sum_lanes(block_t bytes) {
    const uint64_t every_other = 0x00ff00ff00ff00ff;
    uint64_t words[BLOCK / 8], sums = 0; /* four of 16 bits */
    memcpy(words, &bytes, sizeof words);
    for (int i = 0; i < BLOCK / 8; i++) sums += (words[i] & every_other) + (words[i] >> 8 & every_other);
    return (uint32_t)(sums * 0x0001000100010001 >> 48);
}

/* Bytes that are nearly all among the NEAR highest ones, by looking up which of these each is; false, and nothing is
 * counted, where they are not. `size` is a multiple of BLOCK, at most MAX_BLOCKS of them. */
static bool count_near(uint32_t *counts, const uint8_t *src, int64_t size) {
    uint8_t last = 0;
    for (int64_t i = 0; i < size; i++) last = src[i] > last ? src[i] : last;
    const int first = last < NEAR ? 0 : last - NEAR + 1;
    block_t tables[PAIRS], low[PAIRS] = {{0}}, high[PAIRS] = {{0}};
    for (int pair = 0; pair < PAIRS; pair++)
        for (int lane = 0; lane < BLOCK; lane++) tables[pair][lane] = lane % 16 / 2 == pair ? (lane % 2 ? 16 : 1) : 0;
    uint32_t num_rare[MAX_BLOCKS / RUN_BLOCKS], all_rare = 0;
    for (int64_t i = 0, end; i < size; i = end) {
        block_t places, rare = {0}, sums[PAIRS] = {{0}};
        end = size - i < RUN_BYTES ? size : i + RUN_BYTES;
        for (int64_t j = i; j < end; j += BLOCK) {
            memcpy(&places, src + j, BLOCK);
            places -= (uint8_t)first;
            const block_t is_rare = (block_t)(places >= NEAR);
            rare -= is_rare, places |= is_rare;
            for (int pair = 0; pair < PAIRS; pair++) sums[pair] += look_up_near(tables[pair], places);
        }
        for (int pair = 0; pair < PAIRS; pair++) low[pair] += sums[pair] & 15, high[pair] += sums[pair] >> 4;
        num_rare[i / RUN_BYTES] = sum_lanes(rare);
        all_rare += num_rare[i / RUN_BYTES];
    }
    if (all_rare > size / 16) return false;
    for (int symbol = 0; symbol < NEAR; symbol++)
        counts[first + symbol] += sum_lanes((symbol % 2 ? high : low)[symbol / 2]);
    for (int64_t i = 0; i < size; i += RUN_BYTES)
        for (int64_t j = i; num_rare[i / RUN_BYTES] > 0; j += BLOCK) {
            block_t block;
            memcpy(&block, src + j, BLOCK);
            if (sum_lanes((block_t)(block < (uint8_t)first)) == 0) continue;
            for (int64_t k = j; k < j + BLOCK; k++)
                if (src[k] < first) counts[src[k]]++, num_rare[i / RUN_BYTES]--;
        }
    return true;
}

static void count_stream(uint32_t *counts, const uint8_t *src, int64_t size) {
    memset(counts, 0, SYMBOLS * sizeof *counts);
    int64_t i = 0;
    while (size - i >= BLOCK) {
        const int64_t blocks = (size - i) / BLOCK, bytes = BLOCK * (blocks < MAX_BLOCKS ? blocks : MAX_BLOCKS);
        if (!count_near(counts, src + i, bytes)) break;
        i += bytes;
    }
    count_any(counts, src + i, size - i);
}

/* ---- code lengths ---- */

typedef struct {
    uint32_t counts[SYMBOLS];
    uint32_t of_streams[STREAMS][SYMBOLS];
    uint8_t symbols[SYMBOLS]; /* those that there are, rare ones first */
    uint8_t bits[SYMBOLS];    /* by symbol; 0: there is none */
    uint16_t codes[SYMBOLS];
    int num;   /* symbols that there are */
    int first; /* the lowest of them */
    int last;  /* the highest */
} codes_t;

/* The symbols of one of the four streams: their number, of `size` in all. Each begins at a multiple of the first's. */
TN_INLINE int64_t stream_size(int64_t size, int stream) {
    const int64_t share = (size + STREAMS - 1) / STREAMS;
    return stream < STREAMS - 1 ? share : size - (STREAMS - 1) * share;
}

/* Each symbol's place is the number of those that are rarer, or as rare and lower: for the compiler to make vectors of. */
static void sort_symbols(codes_t *codes) {
    uint32_t keys[SYMBOLS];
    codes->num = 0;
    for (int symbol = 0; symbol < SYMBOLS; symbol++)
        if (codes->counts[symbol] != 0) keys[codes->num++] = codes->counts[symbol] << 8 | (uint32_t)symbol;
    codes->first = keys[0] & 255;
    codes->last = keys[codes->num - 1] & 255;
    for (int i = 0; i < codes->num; i++) {
        int place = 0;
        for (int j = 0; j < codes->num; j++) place += keys[j] < keys[i];
        codes->symbols[place] = (uint8_t)keys[i];
    }
}

static void count_symbols(codes_t *codes, const uint8_t *src, int64_t size) {
    memset(codes->counts, 0, sizeof codes->counts);
    if (size < MIN_FOUR) count_any(codes->counts, src, size);
    for (int stream = 0; size >= MIN_FOUR && stream < STREAMS; stream++) {
        uint32_t *own = codes->of_streams[stream];
        count_stream(own, src + stream * stream_size(size, 0), stream_size(size, stream));
        for (int symbol = 0; symbol < SYMBOLS; symbol++) codes->counts[symbol] += own[symbol];
    }
    memset(codes->bits, 0, sizeof codes->bits);
    sort_symbols(codes);
}

/* Huffman's codes, by two queues; false if one has more than MAX_CODE_BITS. */
static bool find_lengths(codes_t *codes) {
    uint32_t sums[SYMBOLS];
    uint16_t parents[2 * SYMBOLS];
    const int num = codes->num;
    int leaf = 0, pair = 0;
    for (int made = 0; made < num - 1; made++) {
        sums[made] = 0;
        for (int side = 0; side < 2; side++) {
            const bool takes_leaf = leaf < num && (pair == made || codes->counts[codes->symbols[leaf]] <= sums[pair]);
            sums[made] += takes_leaf ? codes->counts[codes->symbols[leaf]] : sums[pair];
            parents[takes_leaf ? leaf++ : num + pair++] = (uint16_t)(num + made);
        }
    }
    uint8_t depths[2 * SYMBOLS];
    depths[2 * num - 2] = 0;
    for (int node = 2 * num - 3; node >= 0; node--) {
        depths[node] = (uint8_t)(depths[parents[node]] + 1);
        if (node < num) codes->bits[codes->symbols[node]] = depths[node];
    }
    return codes->bits[codes->symbols[0]] <= MAX_CODE_BITS; /* the rarest one is among the longest */
}

/* The best codes of at most MAX_CODE_BITS, by package-merge: of each level's items, coins and packages of two from the
 * level below, the cheapest 2 (n - 1) are taken on the last; a symbol has as many bits as coins were taken of it. */
static void limit_lengths(codes_t *codes) {
    const int num = codes->num;
    uint32_t costs[2][2 * SYMBOLS];
    bool is_coin[MAX_CODE_BITS][2 * SYMBOLS];
    int size = 0;
    for (int level = 0; level < MAX_CODE_BITS; level++) {
        const uint32_t *below = costs[(level + 1) % 2];
        uint32_t *own = costs[level % 2];
        const int packages = size / 2;
        int coin = 0, package = 0, made = 0;
        while (coin < num || package < packages) {
            const uint32_t packed = package < packages ? below[2 * package] + below[2 * package + 1] : 0;
            const bool takes_coin = coin < num && (package == packages || codes->counts[codes->symbols[coin]] <= packed);
            is_coin[level][made] = takes_coin;
            own[made++] = takes_coin ? codes->counts[codes->symbols[coin++]] : packed;
            if (!takes_coin) package++;
        }
        size = made;
    }
    memset(codes->bits, 0, sizeof codes->bits);
    int taken = 2 * (num - 1);
    for (int level = MAX_CODE_BITS - 1; level >= 0; level--) {
        int coins = 0;
        for (int i = 0; i < taken; i++) coins += is_coin[level][i];
        for (int i = 0; i < coins; i++) codes->bits[codes->symbols[i]]++;
        taken = 2 * (taken - coins);
    }
}

/* Codes from the longest on, symbols of one length in their order; returns the bits of the longest. */
static int assign_codes(codes_t *codes) {
    int longest = 0;
    for (int symbol = 0; symbol <= codes->last; symbol++) longest = codes->bits[symbol] > longest ? codes->bits[symbol] : longest;
    uint32_t place = 0; /* of 1 << longest */
    for (int bits = longest; bits > 0; bits--)
        for (int symbol = 0; symbol <= codes->last; symbol++)
            if (codes->bits[symbol] == bits) {
                codes->codes[symbol] = (uint16_t)(place >> (longest - bits));
                place += 1u << (longest - bits);
            }
    return longest;
}

/* ---- the tree's description ---- */

/* Shares of STATES for weights that occur so often, at least 1 of each; false if there is a single weight. */
static bool share_states(int *shares, const int *counts, int num_weights, int total) {
    int left = STATES, largest = 0;
    for (int weight = 0; weight < num_weights; weight++) {
        shares[weight] = counts[weight] * STATES / total;
        if (counts[weight] > 0 && shares[weight] == 0) shares[weight] = 1;
        left -= shares[weight];
        if (counts[weight] > counts[largest]) largest = weight;
    }
    for (; left < 0; left++) { /* those that were given too much are the largest ones */
        int most = 0;
        for (int weight = 1; weight < num_weights; weight++) most = shares[weight] > shares[most] ? weight : most;
        shares[most]--;
    }
    shares[largest] += left;
    return shares[largest] < STATES;
}

typedef struct {
    uint64_t word;
    int bits;
    uint8_t *to;
} bits_t;

TN_INLINE void put_bits(bits_t *bits, uint64_t value, int count) {
    bits->word |= value << bits->bits;
    bits->bits += count;
}

/* Whole bytes go to memory, of which eight are written. */
TN_INLINE void flush_bits(bits_t *bits) {
    memcpy(bits->to, &bits->word, sizeof bits->word);
    bits->to += bits->bits >> 3;
    bits->word >>= bits->bits & ~7;
    bits->bits &= 7;
}

/* RFC 8878, section 4.1.1. */
static uint8_t *put_shares(uint8_t *to, const int *shares, int num_weights) {
    bits_t bits = {0, 0, to};
    int left = STATES + 1, threshold = STATES, width = STATES_LOG + 1;
    put_bits(&bits, STATES_LOG - 5, 4);
    for (int weight = 0; weight < num_weights && left > 1;) {
        const int share = shares[weight++], most = 2 * threshold - 1 - left;
        left -= share;
        int value = share + 1;
        if (value >= threshold) value += most;
        put_bits(&bits, (uint64_t)value, width - (value < most));
        flush_bits(&bits);
        while (left < threshold) width--, threshold >>= 1;
        if (share != 0) continue;
        int zeros = 0;
        while (weight < num_weights && shares[weight] == 0) weight++, zeros++;
        for (; zeros >= 3; zeros -= 3) put_bits(&bits, 3, 2);
        put_bits(&bits, (uint64_t)zeros, 2);
        flush_bits(&bits);
    }
    flush_bits(&bits);
    return bits.to + (bits.bits > 0);
}

/* The weights in two turns of states; where they end, or NULL if states cannot describe them. */
static uint8_t *put_states(uint8_t *to, const uint8_t *weights, int num) {
    int counts[MAX_CODE_BITS + 1] = {0}, shares[MAX_CODE_BITS + 1], first[MAX_CODE_BITS + 1], num_weights = 0;
    for (int i = 0; i < num; i++) {
        counts[weights[i]]++;
        if (weights[i] >= num_weights) num_weights = weights[i] + 1;
    }
    if (num < 2 || !share_states(shares, counts, num_weights, num)) return NULL;
    to = put_shares(to, shares, num_weights);
    uint8_t spread[STATES], places[STATES]; /* `places`: each weight's states, in order */
    int at = 0, place = 0;
    for (int weight = 0; weight < num_weights; weight++) {
        first[weight] = at;
        at += shares[weight];
        for (int i = 0; i < shares[weight]; i++) {
            spread[place] = (uint8_t)weight;
            place = (place + (STATES >> 1) + (STATES >> 3) + 3) & (STATES - 1);
        }
    }
    int next[MAX_CODE_BITS + 1];
    memcpy(next, first, sizeof next);
    for (int state = 0; state < STATES; state++) places[next[spread[state]]++] = (uint8_t)state;
    bits_t bits = {0, 0, to};
    int turns[2];
    for (int i = num - 1; i >= 0; i--) {
        const int weight = weights[i], share = shares[weight];
        if (i >= num - 2) {
            turns[i % 2] = STATES + places[first[weight]];
            continue;
        }
        const int state = turns[i % 2];
        int width = 0;
        while (state >> width >= 2 * share) width++;
        put_bits(&bits, (uint64_t)(state & ((1 << width) - 1)), width);
        flush_bits(&bits);
        turns[i % 2] = STATES + places[first[weight] + (state >> width) - share];
    }
    put_bits(&bits, (uint64_t)(turns[1] - STATES), STATES_LOG);
    put_bits(&bits, (uint64_t)(turns[0] - STATES), STATES_LOG);
    put_bits(&bits, 1, 1);
    flush_bits(&bits);
    return bits.to + (bits.bits > 0);
}

/* The shorter description of the tree; its end, or NULL if there is none. */
static uint8_t *put_tree(uint8_t *to, const codes_t *codes, int longest) {
    uint8_t weights[SYMBOLS], states[2 * MAX_TREE_BYTES + 8];
    const int num = codes->last; /* the last one's weight follows from the others */
    for (int symbol = 0; symbol < num; symbol++)
        weights[symbol] = codes->bits[symbol] ? (uint8_t)(longest + 1 - codes->bits[symbol]) : 0;
    const uint8_t *end = put_states(states, weights, num);
    const int64_t bytes = end == NULL ? MAX_TREE_BYTES : end - states, direct = (num + 1) / 2;
    if (bytes < MAX_TREE_BYTES && (bytes < direct || num > MAX_DIRECT_WEIGHTS)) {
        *to++ = (uint8_t)bytes;
        memcpy(to, states, (size_t)bytes);
        return to + bytes;
    }
    if (num > MAX_DIRECT_WEIGHTS) return NULL;
    *to++ = (uint8_t)(127 + num);
    weights[num] = 0;
    for (int i = 0; i < num; i += 2) *to++ = (uint8_t)(weights[i] << 4 | weights[i + 1]);
    return to;
}

/* ---- streams and frames ---- */

/* `table` has codes << 4 | their bits. */
TN_INLINE void put_symbol(bits_t *bits, const uint16_t *table, uint8_t symbol) {
    put_bits(bits, (uint64_t)table[symbol] >> 4, table[symbol] & 15);
}

/* From the last symbol to the first, behind what is in `bits`; where they end. At most 44 bits between two flushes, and 7
 * before. */
static uint8_t *put_stream(bits_t bits, const uint16_t *table, const uint8_t *src, int64_t size) {
    int64_t i = size;
    for (; i % 4 != 0; i--) put_symbol(&bits, table, src[i - 1]);
    flush_bits(&bits);
    for (; i > 0; i -= 4) {
        for (int j = 1; j <= 4; j++) put_symbol(&bits, table, src[i - j]);
        flush_bits(&bits);
    }
    put_bits(&bits, 1, 1);
    flush_bits(&bits);
    return bits.to + (bits.bits > 0);
}

#ifdef __AVX512BW__
enum { RUN = 32, QUADS = RUN / 4, MAX_FLUSHED_BITS = 56 }; /* a run: symbols of a stream that are coded at once */

/* A run's codes, four in a word and eight in a word; the latter are the ones in even places. True if eight always fit. */
TN_INLINE bool join_codes(const codes_t *codes, const uint16_t *table, const uint8_t *src, uint64_t words[2][QUADS],
                          uint64_t bits[2][QUADS]) {
    const __m512i symbols = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)src));
    int begin = codes->first & ~63; /* of 64 entries, which two vectors have */
    __m512i entries = _mm512_permutex2var_epi16(_mm512_load_si512(table + begin), symbols, _mm512_load_si512(table + begin + 32));
    while ((begin += 64) <= codes->last) {
        const __m512i more = _mm512_permutex2var_epi16(_mm512_load_si512(table + begin), symbols, _mm512_load_si512(table + begin + 32));
        entries = _mm512_mask_mov_epi16(entries, _mm512_cmpge_epu16_mask(symbols, _mm512_set1_epi16((short)begin)), more);
    }
    __m512i count = _mm512_and_si512(entries, _mm512_set1_epi16(15)), code = _mm512_srli_epi16(entries, 4);
    __m512i odd = _mm512_srli_epi32(count, 16), low = _mm512_set1_epi32(0xffff);
    code = _mm512_or_si512(_mm512_srli_epi32(code, 16), _mm512_sllv_epi32(_mm512_and_si512(code, low), odd));
    count = _mm512_add_epi32(odd, _mm512_and_si512(count, low));
    odd = _mm512_srli_epi64(count, 32), low = _mm512_set1_epi64(0xffffffff);
    code = _mm512_or_si512(_mm512_srli_epi64(code, 32), _mm512_sllv_epi64(_mm512_and_si512(code, low), odd));
    count = _mm512_add_epi64(odd, _mm512_and_si512(count, low));
    _mm512_storeu_si512(words[0], code);
    _mm512_storeu_si512(bits[0], count);
    odd = _mm512_shuffle_epi32(count, _MM_PERM_BADC); /* each word's neighbour; of even words this is the odd one */
    code = _mm512_or_si512(_mm512_shuffle_epi32(code, _MM_PERM_BADC), _mm512_sllv_epi64(code, odd));
    count = _mm512_add_epi64(odd, count);
    _mm512_storeu_si512(words[1], code);
    _mm512_storeu_si512(bits[1], count);
    return _mm512_cmpgt_epu64_mask(count, _mm512_set1_epi64(MAX_FLUSHED_BITS)) == 0;
}

/* The last RUN symbols before each of `ends`, which are moved there. */
TN_INLINE void put_runs(bits_t *streams, const codes_t *codes, const uint16_t *table, const uint8_t **ends) {
    uint64_t words[STREAMS][2][QUADS], bits[STREAMS][2][QUADS];
    bool fit = true;
    for (int stream = 0; stream < STREAMS; stream++)
        fit &= join_codes(codes, table, ends[stream] -= RUN, words[stream], bits[stream]);
    for (int word = QUADS - 1 - fit; word >= 0; word -= 1 + fit)
        for (int stream = 0; stream < STREAMS; stream++) {
            put_bits(&streams[stream], words[stream][fit][word], (int)bits[stream][fit][word]);
            flush_bits(&streams[stream]);
        }
}
#endif

/* Four streams, after the sizes of three of them; where they end. With vectors they are written side by side, since a
 * word has to wait for the place where the one before ended. */
static uint8_t *put_four_streams(uint8_t *to, const codes_t *codes, const uint16_t *table, const uint8_t *src, int64_t size) {
    bits_t streams[STREAMS];
    const uint8_t *ends[STREAMS];
    uint8_t *begins[STREAMS], *at = to + 2 * (STREAMS - 1);
    for (int stream = 0; stream < STREAMS; stream++) {
        int64_t num_bits = 1;
        for (int symbol = codes->first; symbol <= codes->last; symbol++)
            num_bits += (int64_t)codes->of_streams[stream][symbol] * codes->bits[symbol];
        if (stream < STREAMS - 1) put_little(to + 2 * stream, (uint64_t)((num_bits + 7) / 8), 2);
        streams[stream] = (bits_t){0, 0, begins[stream] = at};
        ends[stream] = src + stream * stream_size(size, 0) + stream_size(size, stream);
        at += (num_bits + 7) / 8;
    }
#ifdef __AVX512BW__
    /* A flush writes eight bytes. 64 symbols are left, so that they are none of the next stream's. */
    for (int64_t left = stream_size(size, STREAMS - 1); left >= RUN + 64; left -= RUN)
        put_runs(streams, codes, table, ends);
#endif
    for (int stream = 0; stream < STREAMS; stream++) {
        const uint8_t *begin = src + stream * stream_size(size, 0);
        uint8_t next[8], *behind = stream < STREAMS - 1 ? begins[stream + 1] : at;
        memcpy(next, behind, sizeof next);
        put_stream(streams[stream], table, begin, ends[stream] - begin);
        memcpy(behind, next, sizeof next);
    }
    return at;
}

/* A block's literals and its 0 sequences; their end, or NULL if raw bytes take less. */
static uint8_t *put_literals(uint8_t *to, codes_t *codes, const uint8_t *src, int64_t size) {
    if (!find_lengths(codes)) limit_lengths(codes);
    const int longest = assign_codes(codes);
    int64_t num_bits = 0;
    uint16_t table[SYMBOLS] __attribute__((aligned(64))) = {0};
    for (int symbol = codes->first; symbol <= codes->last; symbol++) {
        num_bits += (int64_t)codes->counts[symbol] * codes->bits[symbol];
        table[symbol] = (uint16_t)(codes->codes[symbol] << 4 | codes->bits[symbol]);
    }
    if (num_bits / 8 + MAX_TREE_BYTES + FRAME_ROOM >= size) return NULL;
    const int num_streams = size < MIN_FOUR ? 1 : 4, form = num_streams == 1 ? 0 : size < 1 << 10 ? 1 : size < 1 << 14 ? 2 : 3;
    const int head = form < 2 ? 3 : form + 2, width = form < 2 ? 10 : 4 * form + 6;
    uint8_t *body = to + head, *end = put_tree(body, codes, longest);
    if (end == NULL) return NULL;
    end = num_streams == 1 ? put_stream((bits_t){0, 0, end}, table, src, size) : put_four_streams(end, codes, table, src, size);
    put_little(to, 2 | (uint64_t)form << 2 | (uint64_t)size << 4 | (uint64_t)(end - body) << (4 + width), head);
    *end++ = 0;
    return end;
}

static uint8_t *put_frame(uint8_t *to, codes_t *codes, const uint8_t *src, int64_t size) {
    enum { RAW, RLE, COMPRESSED };
    uint8_t *begin = to;
    to = put_little(to, 0xfd2fb528, 4);
    const int field = size < 256 ? 1 : 2;
    *to++ = field == 1 ? 0x20 : 0x60; /* a single segment, whose size follows */
    to = put_little(to, (uint64_t)(field == 1 ? size : size - 256), field);
    count_symbols(codes, src, size);
    uint8_t *block = to + 3, *end = NULL;
    int kind = RLE;
    int64_t stated = size;
    if (codes->num == 1) {
        *block = src[0];
        end = block + 1;
    } else if (size >= MIN_LITERALS && (end = put_literals(block, codes, src, size)) != NULL && end - block < size) {
        kind = COMPRESSED;
        stated = end - block;
    } else {
        kind = RAW;
        memcpy(block, src, (size_t)size);
        end = block + size;
    }
    put_little(to, 1 | (uint64_t)kind << 1 | (uint64_t)stated << 3, 3);
    const int64_t missing = -(end - begin) & 7;
    if (missing) { /* the shortest skippable frame of zeros */
        end = put_little(put_little(end, 0x184d2a50, 4), (uint64_t)missing, 4);
        memset(end, 0, (size_t)missing);
        end += missing;
    }
    return end;
}

int64_t tn_encoded_bound(int64_t src_bytes, int64_t frame_bytes) {
    const int64_t num_frames = (src_bytes + frame_bytes - 1) / frame_bytes;
    return src_bytes + num_frames * FRAME_ROOM + 4 * MAX_TREE_BYTES;
}

int tn_encode_frames(tn_encode_frames_args *args) {
    const int64_t frame_bytes = args->frame_bytes;
    if (args->size != sizeof *args || frame_bytes < 1 || frame_bytes > TN_MAX_FRAME_BYTES ||
        args->out_bytes < tn_encoded_bound(args->src_bytes, frame_bytes))
        return TN_REFUSED;
    codes_t codes;
    uint8_t *to = args->out;
    for (int64_t begin = 0; begin < args->src_bytes; begin += frame_bytes) {
        const int64_t left = args->src_bytes - begin;
        to = put_frame(to, &codes, args->src + begin, left < frame_bytes ? left : frame_bytes);
    }
    args->end = to - args->out;
    return TN_OK;
}
