/* Every function of the native core over random cases, compared with plain loops: for sanitizers and emulators.
 *
 * Heap blocks have exactly the size that a function may touch. Exits with 1 and says where at the first difference. */
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fill.h"
#include "frames_for_driver.h"
#include "team.h"

static uint64_t state = 88172645463325252u;

static uint32_t random_bits(void) { /* xorshift */
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16);
}

static int random_below(int limit) { return (int)(random_bits() % (uint32_t)limit); }
static float random_float(void) { return (float)((int)(random_bits() & 0xffff) - 32768) / 16384.0f; }

static void fail(const char *what) {
    fprintf(stderr, "%s differs\n", what);
    exit(1);
}

static void *exactly(size_t bytes) {
    void *block = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (block == NULL) exit(2);
    /* The block ends where the data does, so that a sanitizer sees what is read behind. */
    return (char *)block + ((bytes + 63) / 64 * 64 - bytes) / 16 * 16;
}

static float widen(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static uint16_t bf16_of(float value) { /* truncated: the cases are made of it */
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return (uint16_t)(word >> 16);
}

static float rounded_to_bf16(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return widen((uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16));
}

/* ---- products ---- */

typedef struct {
    tn_matrix matrix;
    double *means; /* (num_out, num_in) */
} weights_t;

static weights_t make_weights(int dtype, int num_out, int num_in, int group_size, bool has_zero) {
    weights_t made = {{.num_out = num_out, .num_in = num_in, .dtype = dtype}, exactly(sizeof(double) * num_out * num_in)};
    const int item_bits = dtype == TN_F32 ? 32 : dtype == TN_BF16 || dtype == TN_F16 ? 16 : dtype == TN_I8 ? 8 : 4;
    const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int num_groups = num_in / group_size;
    uint8_t *data = exactly((size_t)num_out * num_in * item_bits / 8);
    float *scale = exactly(sizeof(float) * num_out * num_groups);
    uint8_t *powers = exactly(num_out * num_groups);
    uint8_t *zero4 = exactly(num_out * num_groups);
    int16_t *zero8 = exactly(sizeof(int16_t) * num_out * num_groups);
    for (int group = 0; group < num_out * num_groups; group++) {
        scale[group] = widen(bf16_of(random_float())); /* whose products with levels are exact */
        powers[group] = (uint8_t)(120 + random_below(16));
        zero4[group] = (uint8_t)random_below(16);
        zero8[group] = (int16_t)(random_below(257) - 128);
    }
    for (int n = 0; n < num_out; n++) {
        for (int k = 0; k < num_in; k++) {
            const int place = n * num_in + k, group = n * num_groups + k / group_size;
            const float value = random_float();
            double mean = value;
            if (dtype == TN_F32) memcpy(data + 4 * place, &value, 4);
            if (dtype == TN_BF16) {
                const uint16_t bits = bf16_of(value);
                memcpy(data + 2 * place, &bits, 2);
                mean = widen(bits);
            }
            if (dtype == TN_F16) {
                const int power = random_below(16);
                const uint16_t bits = (uint16_t)(power << 10 | random_below(2) << 15);
                memcpy(data + 2 * place, &bits, 2);
                mean = power ? ldexp(bits >> 15 ? -1.0 : 1.0, power - 15) : 0.0;
            }
            if (dtype == TN_I8) {
                data[place] = (uint8_t)random_bits();
                mean = ((int8_t)data[place] - (has_zero ? zero8[group] : 0)) * (double)scale[group];
            }
            if (dtype == TN_U4) {
                const int level = random_below(16), column = k % 64;
                uint8_t *byte = data + (n * num_in + k - column) / 2 + column % 32;
                *byte = (uint8_t)(column < 32 ? level : (*byte & 15) | level << 4);
                mean = (level - (has_zero ? zero4[group] : 8)) * (double)scale[group];
            }
            if (dtype == TN_E2M1) {
                const int level = random_below(16);
                uint8_t *byte = data + place / 2;
                *byte = (uint8_t)(k % 2 ? (*byte & 15) | level << 4 : level);
                mean = ldexp(level & 8 ? -e2m1[level & 7] : e2m1[level & 7], powers[group] - 127);
            }
            made.means[place] = mean;
        }
    }
    made.matrix.data = data;
    if (dtype == TN_I8 || dtype == TN_U4) {
        made.matrix.scale = scale;
        made.matrix.group_size = group_size;
        if (has_zero) made.matrix.zero = dtype == TN_I8 ? (void *)zero8 : (void *)zero4;
    }
    if (dtype == TN_E2M1) {
        made.matrix.scale = powers;
        made.matrix.scale_dtype = TN_E8M0;
        made.matrix.group_size = group_size;
        made.matrix.row_step = 1;
    }
    return made;
}

/* The product with scratch of exactly the size that it asks for. */
/* Any bits, but for scales, which are numbers. What they mean is what embeddings of them are. */
static weights_t make_blocks(int dtype, int num_out, int num_blocks) {
    const int bytes[] = {144, 176, 210, 20, 22, 24, 84, 110, 136, 18};
    const int scales[][2] = {{0, 2}, {0, 2}, {208, 208}, {0, 2}, {0, 0}, {0, 2}, {80, 82}, {108, 108}, {0, 0}, {0, 0}};
    const int type = dtype - TN_Q4_K, columns = bytes[type] > 32 ? 256 : 32, num_in = num_blocks * columns;
    weights_t made = {{.num_out = num_out, .num_in = num_in, .dtype = dtype}, exactly(sizeof(double) * num_out * num_in)};
    uint8_t *data = exactly((size_t)num_out * num_blocks * bytes[type]);
    for (int n = 0; n < num_out * num_blocks; n++) {
        uint8_t *block = data + n * bytes[type];
        for (int at = 0; at < bytes[type]; at++) block[at] = (uint8_t)random_bits();
        for (int which = 0; which < 2; which++) block[scales[type][which] + 1] = (uint8_t)(0x20 + random_below(8));
    }
    made.matrix.data = data;
    int64_t *rows = exactly(sizeof(int64_t) * num_out);
    float *numbers = exactly(sizeof(float) * num_out * num_in);
    for (int n = 0; n < num_out; n++) rows[n] = n;
    const tn_embed_args args = {.size = sizeof args, .table = data, .tokens = rows, .out = numbers, .num_rows = num_out,
                                .num_columns = num_in, .table_dtype = dtype, .dtype = TN_F32, .factor = 1.0f};
    if (tn_embed(&args) != TN_OK) fail("a status");
    for (int n = 0; n < num_out * num_in; n++) made.means[n] = numbers[n];
    return made;
}

static void run_linear(tn_linear_args *args) {
    const int64_t num_bytes = tn_linear_scratch_bytes(args);
    args->packed = num_bytes ? aligned_alloc(64, (size_t)num_bytes) : NULL;
    if (tn_linear(args) != TN_OK) fail("a status");
    free(args->packed);
}

static void check_product(const weights_t *weights, int rows, int x_dtype) {
    const int num_in = (int)weights->matrix.num_in, num_out = (int)weights->matrix.num_out;
    void *x = exactly((size_t)rows * num_in * (x_dtype == TN_F32 ? 4 : 2));
    double *meant = exactly(sizeof(double) * rows * num_in);
    float *out = exactly(sizeof(float) * rows * num_out), *alone = exactly(sizeof(float) * num_out);
    for (int place = 0; place < rows * num_in; place++) {
        const float value = random_float();
        if (x_dtype == TN_F32) ((float *)x)[place] = value;
        else ((uint16_t *)x)[place] = bf16_of(value);
        meant[place] = x_dtype == TN_F32 ? value : widen(bf16_of(value));
    }
    tn_linear_args args = {sizeof args, &weights->matrix, x, out, rows, num_in, num_out, x_dtype, TN_F32, NULL};
    tn_set_fused_pairs(random_below(2));
    run_linear(&args);
    const bool is_rounded = (weights->matrix.dtype == TN_U4 || weights->matrix.dtype >= TN_Q4_K) && x_dtype == TN_BF16 &&
                            (strstr(tn_describe(), "bf16") || strstr(tn_describe(), "amx"));
    for (int row = 0; row < rows; row++) {
        for (int n = 0; n < num_out; n++) {
            double sum = 0, size = 1e-30;
            for (int k = 0; k < num_in; k++) {
                const double mean = weights->means[n * num_in + k];
                const double product = meant[row * num_in + k] * (is_rounded ? rounded_to_bf16((float)mean) : mean);
                sum += product;
                size += fabs(product);
            }
            if (!(fabs(out[row * num_out + n] - sum) <= 4e-6 * size)) fail("a product");
        }
    }
    const int row = random_below(rows);
    const int threads = 1 + random_below(5);
    tn_set_threads(threads);
    tn_set_fused_pairs(random_below(2));
    args.x = (char *)x + (size_t)row * num_in * (x_dtype == TN_F32 ? 4 : 2);
    args.out = alone;
    args.num_rows = 1;
    run_linear(&args);
    if (memcmp(alone, out + row * num_out, sizeof(float) * num_out)) fail("a row that is alone");
}

static void check_products(int cases) {
    const int dtypes[] = {TN_F32, TN_BF16, TN_F16, TN_I8, TN_U4, TN_E2M1, TN_Q4_K, TN_Q5_K, TN_Q6_K, TN_Q4_1, TN_Q5_0, TN_Q5_1, TN_Q2_K, TN_Q3_K, TN_IQ4_XS, TN_IQ4_NL};
    const int num_dtypes = (int)(sizeof dtypes / sizeof *dtypes);
    for (int number = 0; number < cases; number++) {
        const int dtype = dtypes[number % num_dtypes], num_out = 1 + random_below(70);
        int group_size = 1 + random_below(1200), num_in = group_size;
        if (dtype == TN_U4 || (dtype == TN_I8 && random_below(2))) {
            group_size = 32 * (1 + random_below(5));
            num_in = group_size * 2 * (1 + random_below(6));
        }
        if (dtype == TN_E2M1) {
            group_size = 32;
            num_in = group_size * (1 + random_below(50));
        }
        const weights_t weights = dtype >= TN_Q4_K
                                      ? make_blocks(dtype, num_out, 1 + random_below(6))
                                      : make_weights(dtype, num_out, num_in, group_size, random_below(2));
        check_product(&weights, 1 + random_below(number % 7 ? 20 : 210), number % 2 ? TN_F32 : TN_BF16);
    }
}

/* ---- merging ---- */

static uint32_t plane_value(const uint8_t *plane, int bits, int64_t count, int64_t frame, int64_t element) {
    const int share = 8 / bits;
    const int64_t begin = element / frame * frame, left = count - begin < frame ? count - begin : frame;
    const int64_t row = (left + share - 1) / share, at = element - begin;
    return plane[begin / share + at % row] >> (at / row * bits) & ((1u << bits) - 1);
}

static void check_merge(int word_bytes, int mantissa_bits, int before, int known, int64_t count, int64_t frame) {
    tn_merge_args args = {.count = count, .frame_elements = frame, .word_bytes = word_bytes,
                          .mantissa_bits = mantissa_bits, .known_bits = known};
    const bool is_first = before < 0;
    const int field_bits = is_first ? 1 + known : known - before;
    for (int left = field_bits; left;) {
        const int bits = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        args.plane_bits[args.num_planes] = bits;
        uint8_t *plane = exactly((size_t)((count * bits + 7) / 8 + 1));
        for (int64_t place = 0; place < (count * bits + 7) / 8 + 1; place++) plane[place] = (uint8_t)random_bits();
        args.planes[args.num_planes++] = plane;
        left -= bits;
    }
    uint8_t *exponents = exactly((size_t)count), *out = exactly((size_t)(count * word_bytes));
    uint32_t *expected = exactly((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) {
        exponents[i] = (uint8_t)(random_bits() & (mantissa_bits == 10 ? 31 : 255));
        uint32_t word = random_bits() & (word_bytes == 2 ? 0xffff : ~0u), field = 0;
        memcpy(out + i * word_bytes, &word, (size_t)word_bytes);
        for (int plane = 0; plane < args.num_planes; plane++)
            field = field << args.plane_bits[plane] | plane_value(args.planes[plane], args.plane_bits[plane], count, frame, i);
        const int unknown = mantissa_bits - known;
        const uint32_t fill = unknown ? 1u << (unknown - 1) : 0;
        if (is_first)
            word = (field >> known) << (8 * word_bytes - 1) | (uint32_t)exponents[i] << mantissa_bits |
                   (field & ((1u << known) - 1)) << unknown | fill;
        else
            word = (word & ~0u << (mantissa_bits - before)) | field << unknown | fill;
        expected[i] = word;
    }
    args.out = out;
    args.exponents = is_first ? exponents : NULL;
    tn_merge(&args);
    for (int64_t i = 0; i < count; i++)
        if (memcmp(out + i * word_bytes, &expected[i], (size_t)word_bytes)) fail("a merged float");
}

static void check_merges(void) {
    const struct { int word_bytes, mantissa_bits; } formats[] = {{2, 7}, {2, 10}, {4, 23}};
    for (int format = 0; format < 3; format++)
        for (int known = 0; known <= formats[format].mantissa_bits; known++)
            for (int before = -1; before < known; before++)
                check_merge(formats[format].word_bytes, formats[format].mantissa_bits, before, known,
                            1 + random_below(5000), 64 * (1 + random_below(40)));
}

static void check_interleave(int num_planes, int64_t count) {
    tn_interleave_args args = {.count = count, .num_planes = num_planes};
    uint8_t *planes[8], *out = exactly((size_t)(count * num_planes));
    for (int plane = 0; plane < num_planes; plane++) {
        args.planes[plane] = planes[plane] = exactly((size_t)count);
        for (int64_t i = 0; i < count; i++) planes[plane][i] = (uint8_t)random_bits();
    }
    args.out = out;
    tn_interleave(&args);
    for (int64_t i = 0; i < count; i++)
        for (int plane = 0; plane < num_planes; plane++)
            if (out[i * num_planes + plane] != planes[plane][i]) fail("an interleaved byte");
}

static void check_differences(int num_planes, int64_t count) {
    tn_interleave_args args = {.count = count, .num_planes = num_planes};
    uint8_t *planes[8], *out = exactly((size_t)(count * num_planes));
    uint32_t *expected = exactly((size_t)count * 4);
    for (int plane = 0; plane < num_planes; plane++) args.planes[plane] = planes[plane] = exactly((size_t)count);
    for (int64_t i = 0; i < count; i++) {
        uint32_t zigzag = 0, word = random_bits() & (num_planes == 2 ? 0xffff : ~0u);
        for (int plane = 0; plane < num_planes; plane++) {
            planes[plane][i] = (uint8_t)random_bits();
            zigzag |= (uint32_t)planes[plane][i] << 8 * plane;
        }
        memcpy(out + i * num_planes, &word, (size_t)num_planes);
        expected[i] = zigzag & 1 ? word - zigzag / 2 - 1 : word + zigzag / 2;
    }
    args.out = out;
    tn_add_differences(&args);
    for (int64_t i = 0; i < count; i++)
        if (memcmp(out + i * num_planes, &expected[i], (size_t)num_planes)) fail("a sum");
}

static uint8_t *random_bytes(int64_t count) { /* a block of exactly this size, without zeros */
    uint8_t *bytes = malloc((size_t)count + !count);
    if (bytes == NULL) exit(2);
    for (int64_t i = 0; i < count; i++) bytes[i] = (uint8_t)(1 + random_below(255));
    return bytes;
}

static unsigned bit_at(const uint8_t *bits, int64_t at) { return bits[at >> 3] >> (at & 7) & 1u; }

/* Values to their places in two calls and a last one without any; then bits of a later tier over them. */
static void check_scatter(int word_bytes, int64_t count, int percent, bool has_signs) {
    uint8_t *mask = calloc((size_t)(count + 7) / 8, 1), *signs = random_bytes((count + 7) / 8);
    int64_t num_values = 0;
    for (int64_t i = 0; i < count; i++)
        if (random_below(100) < percent) mask[i >> 3] |= (uint8_t)(1 << (i & 7)), num_values++;
    uint8_t *values = random_bytes(num_values * word_bytes), *out = random_bytes(count * word_bytes);
    uint8_t *expected = calloc((size_t)count, (size_t)word_bytes);
    int64_t value = 0, zero = 0;
    for (int64_t i = 0; i < count; i++)
        if (bit_at(mask, i))
            memcpy(expected + i * word_bytes, values + value++ * word_bytes, (size_t)word_bytes);
        else if (has_signs && bit_at(signs, zero++))
            expected[i * word_bytes + word_bytes - 1] = 0x80;
    tn_scatter_args args = {.out = out, .mask = mask, .count = count, .word_bytes = word_bytes};
    if (has_signs) args.signs = signs, args.num_signs = count - num_values;
    const int64_t cuts[] = {0, num_values / 3, num_values, num_values};
    for (int tier = 0; tier < (word_bytes == 1 ? 1 : 2); tier++) {
        for (int call = 0; call < 3; call++) {
            args.num_values = cuts[call + 1] - cuts[call];
            uint8_t *piece = random_bytes(args.num_values * word_bytes); /* what is behind it is not there */
            memcpy(piece, values + cuts[call] * word_bytes, (size_t)(args.num_values * word_bytes));
            args.values = piece;
            tn_scatter(&args);
            if (args.num_placed != args.num_values || args.has_zero) fail("a status");
            args.begin = args.end;
            args.num_before += args.num_placed;
            free(piece);
        }
        if (args.end != count) fail("the end of the elements");
        if (memcmp(out, expected, (size_t)(count * word_bytes))) fail("a scattered value");
        /* The same values again, as bits of a later tier that keeps nothing. */
        args.mask = args.signs = NULL;
        args.begin = args.num_before = 0;
    }
    uint8_t *blocks[] = {mask, signs, values, out, expected};
    for (int block = 0; block < 5; block++) free(blocks[block]);
}

/* ---- frames ---- */

/* Decodes a frame whose size is in 1, 2 or 4 bytes, and that nothing follows, in blocks of exactly its size. */
static int decode_frame(const uint8_t *frame, int64_t bytes, int64_t content_bytes) {
    const int64_t missing = -bytes & 7;
    uint8_t *src = calloc((size_t)(bytes + (missing ? 8 + missing : 0)), 1), *out = malloc((size_t)content_bytes);
    if (src == NULL || out == NULL) exit(2);
    memcpy(src, frame, (size_t)bytes);
    if (missing) memcpy(src + bytes, (const uint8_t[]){0x50, 0x2a, 0x4d, 0x18, (uint8_t)missing}, 5);
    tn_decode_frames_args args = {.size = sizeof args, .src = src, .out = out, .src_bytes = bytes + (missing ? 8 + missing : 0),
                                  .out_bytes = content_bytes, .frame_bytes = content_bytes};
    const int status = tn_decode_frames(&args);
    if (args.end > args.src_bytes || (status == TN_OK) != (args.fault == TN_NO_FAULT)) fail("the end of a frame");
    free(src);
    free(out);
    return status;
}

/* Whole frames, and those in which bytes were changed or lost: decoded or refused, within their bounds. */
static void check_frames(int num_changed) {
    for (size_t number = 0; number < sizeof FRAMES / sizeof *FRAMES; number++) {
        uint8_t frame[1024], spoilt[1024];
        const int bytes = (int)strlen(FRAMES[number]) / 2;
        for (int i = 0; i < bytes; i++) sscanf(FRAMES[number] + 2 * i, "%2hhx", &frame[i]);
        int64_t content_bytes = 0;
        memcpy(&content_bytes, frame + 5, (size_t[]){1, 2, 4}[frame[4] >> 6]);
        if (frame[4] >> 6 == 1) content_bytes += 256;
        if (decode_frame(frame, bytes, content_bytes) != TN_OK) fail("the status of a frame");
        if (decode_frame(frame, bytes - 1, content_bytes) != TN_DAMAGED) fail("the status of a frame without its end");
        for (int turn = 0; turn < num_changed; turn++) {
            memcpy(spoilt, frame, (size_t)bytes);
            for (int change = random_below(4); change >= 0; change--)
                spoilt[9 + random_below(bytes - 9)] = (uint8_t)random_bits();
            const int status = decode_frame(spoilt, bytes - random_below(2) * random_below(9), content_bytes);
            if (status != TN_OK && status != TN_DAMAGED) fail("the status of a changed frame");
        }
    }
}

/* What is made decodes to what it was made of, within the bound. */
static void check_encode(void) {
    const int64_t bytes = 1 + random_below(random_below(2) ? 600 : 90000), frame = 1 + random_below(random_below(2) ? 300 : 65536);
    const int width = 1 + random_below(8);
    tn_encode_frames_args args = {.size = sizeof args, .src_bytes = bytes, .frame_bytes = frame,
                                  .out_bytes = tn_encoded_bound(bytes, frame)};
    uint8_t *src = malloc((size_t)bytes), *coded = malloc((size_t)args.out_bytes), *out = malloc((size_t)bytes);
    if (src == NULL || coded == NULL || out == NULL) exit(2);
    for (int64_t i = 0; i < bytes; i++) { /* rarer and rarer symbols */
        int symbol = 0;
        while (symbol < 255 && random_below(width) == 0) symbol += 1 + random_below(3);
        src[i] = (uint8_t)symbol;
    }
    args.src = src, args.out = coded;
    if (tn_encode_frames(&args) != TN_OK || args.end > args.out_bytes) fail("the status of frames that are made");
    uint8_t *exact = malloc((size_t)args.end);
    if (exact == NULL) exit(2);
    memcpy(exact, coded, (size_t)args.end);
    tn_decode_frames_args back = {.size = sizeof back, .src = exact, .out = out, .src_bytes = args.end, .out_bytes = bytes,
                                  .frame_bytes = frame};
    if (tn_decode_frames(&back) != TN_OK || memcmp(src, out, (size_t)bytes)) fail("a frame that was made here");
    free(src), free(coded), free(out), free(exact);
}

/* Coded planes decode to what the raw ones are, each in exactly the room that it may touch. */
static void check_split(void) {
    const int64_t count = 1 + random_below(random_below(2) ? 300 : 140000), width = 2 + 2 * random_below(2);
    const int bits = 1 << random_below(4), frame = TN_FRAME_ELEMENTS * bits / 8;
    const int64_t bytes = (count * bits + 7) / 8, bound = tn_encoded_bound(bytes, frame);
    uint8_t *words = malloc((size_t)(count * width)), *raw = malloc((size_t)bytes), *coded = malloc((size_t)bound);
    if (words == NULL || raw == NULL || coded == NULL) exit(2);
    for (int64_t i = 0; i < count * width; i++) words[i] = (uint8_t)(random_bits() & random_bits() & random_bits());
    tn_split_plane planes[2] = {{.out = raw, .out_bytes = bytes, .mask = (1u << bits >> 1) - 1, .sign = 1u << bits >> 1,
                                 .mantissa_down = random_below(8), .sign_down = random_below(8), .bits = bits}};
    planes[1] = planes[0], planes[1].out = coded, planes[1].out_bytes = bound, planes[1].is_coded = 1;
    tn_split_args args = {.size = sizeof args, .words = words, .planes = planes, .count = count, .num_planes = 2,
                          .word_bytes = (int)width};
    if (tn_split(&args) != TN_OK || planes[0].end != bytes || planes[1].end > bound) fail("the status of planes");
    uint8_t *exact = malloc((size_t)planes[1].end), *out = malloc((size_t)bytes);
    if (exact == NULL || out == NULL) exit(2);
    memcpy(exact, coded, (size_t)planes[1].end);
    tn_decode_frames_args back = {.size = sizeof back, .src = exact, .out = out, .src_bytes = planes[1].end,
                                  .out_bytes = bytes, .frame_bytes = frame};
    if (tn_decode_frames(&back) != TN_OK || memcmp(raw, out, (size_t)bytes)) fail("a coded plane");
    planes[1].out_bytes = bound - 1;
    if (tn_split(&args) != TN_REFUSED) fail("a plane without room");
    free(words), free(raw), free(coded), free(exact), free(out);
}

/* ---- parts ---- */

/* Segments of random planes, most of which lie: sizes, offsets, counts of values, frames that are noise or spoilt. Every
 * block has exactly the size that may be touched. */
static void check_fill(void) {
    static const int shapes[][2] = {{8, 0}, {4, 2}, {1, 1}};
    const int width = 1 << random_below(4), kind = random_below(5), is_sparse = random_below(3) == 0;
    const int64_t count = 1 + random_below(random_below(2) ? 100 : 70000), bytes = 8 + random_below(40000);
    uint8_t *stored = malloc((size_t)bytes), *out = malloc((size_t)(count * width)), *scratch = aligned_alloc(64, TN_FILL_SPARSE_BYTES);
    uint8_t *base = calloc((size_t)(count * width), 1), *apart = malloc((size_t)(count * 8));
    if (stored == NULL || out == NULL || scratch == NULL || base == NULL || apart == NULL) exit(2);
    for (int64_t i = 0; i < bytes; i++) stored[i] = (uint8_t)random_bits();
    tn_fill_plane planes[TN_MAX_PLANES + 6];
    tn_fill_segment segment = {.out = out, .base = random_below(2) ? base : NULL, .planes = planes, .count = count,
                               .num_values = is_sparse ? random_below((int)count + 1) : -1, .kind = kind, .element_bytes = width,
                               .is_first = random_below(2), .is_last = random_below(2), .exponent_bits = width == 4 ? 8 : 5,
                               .mantissa_bits = width == 4 ? 23 : 10, .known_bits = 3, .num_planes = kind == TN_FILL_FLOATS ? 2 + random_below(4) : kind == TN_FILL_WHOLE ? 1 : random_below(4) ? width : 1 + random_below(10)};
    memset(out, 0x3f, (size_t)(count * width));
    int64_t at = 0;
    for (int i = 0; i < segment.num_planes; i++) {
        const int bits = kind == TN_FILL_WHOLE ? 0 : i == 0 || kind == TN_FILL_BYTES ? 8 : shapes[random_below(3)][0];
        const int64_t right = bits == 0 ? count * width : (count * bits + 7) / 8;
        planes[i] = (tn_fill_plane){.offset = random_below(8) ? at : random_below((int)bytes + 9) - 4,
                                    .size = random_below(4) ? right : random_below((int)bytes), .bits = bits,
                                    .out = kind == TN_FILL_PLANES && random_below(4) ? apart : NULL,
                                    .is_coded = random_below(2)};
        if (planes[i].is_coded && planes[i].offset >= 0 && planes[i].offset + 200 < bytes) {
            const char *frame = FRAMES[random_below((int)(sizeof FRAMES / sizeof *FRAMES))];
            const int length = (int)strlen(frame) / 2;
            for (int j = 0; j < length && planes[i].offset + j < bytes; j++)
                sscanf(frame + 2 * j, "%2hhx", &stored[planes[i].offset + j]);
            if (random_below(2)) stored[planes[i].offset + random_below(length < 200 ? length : 200)] ^= 1 << random_below(8);
        }
        at += right;
        if (at >= bytes) at = 0;
    }
    int field_bits = 0; /* most floats are possible, so that they are looked at */
    for (int i = (is_sparse && segment.is_first ? 2 : 0) + segment.is_first; i < segment.num_planes; i++) field_bits += planes[i].bits;
    if (random_below(8)) segment.known_bits = field_bits - segment.is_first;
    tn_fill_args args = {.size = sizeof args, .stored = stored, .segments = &segment, .scratch = scratch, .stored_bytes = bytes,
                         .num_segments = 1, .scratch_bytes = TN_FILL_SPARSE_BYTES};
    const int status = tn_fill_part(&args);
    if (status != TN_OK && status != TN_DAMAGED && status != TN_REFUSED) fail("the status of a part");
    free(stored), free(out), free(scratch), free(base), free(apart);
}

/* ---- the rest ---- */

/* The same for a walk: of planes that lie, or have any bytes. Tables have exactly the room that was promised. */
static void check_walk(void) {
    static const int all_bits[] = {8, 4, 2, 1, 0};
    const int64_t count = 1 + random_below(random_below(2) ? 100 : 200000), bytes = 8 + random_below(40000);
    const int64_t num_entries = (count + TN_FRAME_ELEMENTS - 1) / TN_FRAME_ELEMENTS, num_frames = random_below(12);
    uint8_t *stored = malloc((size_t)bytes);
    for (int64_t i = 0; i < bytes; i++) stored[i] = (uint8_t)random_bits();
    const char *frame = FRAMES[random_below((int)(sizeof FRAMES / sizeof *FRAMES))];
    for (int64_t i = 0; i < (int64_t)strlen(frame) / 2 && i < bytes; i++) sscanf(frame + 2 * i, "%2hhx", &stored[i]);
    if (random_below(2)) stored[random_below(bytes < 200 ? (int)bytes : 200)] ^= 1 << random_below(8);
    tn_walk_plane planes[9];
    const int is_flat = random_below(3) == 0, num_planes = is_flat ? 1 : random_below(10);
    for (int i = 0; i < num_planes; i++) {
        const int bits = all_bits[random_below(is_flat ? 5 : 4)];
        const int64_t right = bits == 0 ? 2 * count : (count * bits + 7) / 8;
        planes[i] = (tn_walk_plane){.offset = random_below(4) ? 0 : 8 * random_below((int)bytes) - 800,
                                    .size = random_below(2) ? right : random_below((int)bytes + 9), .room = random_bits(),
                                    .bits = bits, .is_coded = random_below(2)};
    }
    void *entries = malloc(is_flat ? sizeof(tn_copied_bytes) : (size_t)num_entries * sizeof(tn_merged_frame));
    tn_coded_frame *frames = malloc((size_t)num_frames * sizeof *frames + 1);
    if (stored == NULL || entries == NULL || frames == NULL) exit(2);
    tn_walk_segment segment = {.entries = entries, .planes = planes, .count = count, .num_planes = num_planes,
                               .element_bytes = 2, .exponent_bits = random_below(2) ? 5 : 8, .is_flat = is_flat};
    tn_walk_args args = {.size = sizeof args, .stored = stored, .segments = &segment, .frames = frames,
                         .stored_bytes = bytes, .num_segments = 1, .num_frames = num_frames};
    const int status = tn_walk_part(&args);
    if (status != TN_OK && status != TN_DAMAGED) fail("a walk was refused");
    free(stored), free(entries), free(frames);
}

static void check_exp(void) {
    enum { COUNT = 100003 };
    float *x = exactly(sizeof(float) * COUNT), *out = exactly(sizeof(float) * COUNT);
    for (int i = 0; i < COUNT; i++) x[i] = random_float() * 43.0f;
    tn_exp(x, out, COUNT);
    for (int i = 0; i < COUNT; i++)
        if (!(fabs(out[i] - exp(x[i])) <= 1.2e-7 * exp(x[i]))) fail("an exponential");
}

static void *call_often(void *weights) {
    const weights_t *shared = weights;
    const int num_in = (int)shared->matrix.num_in, num_out = (int)shared->matrix.num_out;
    float *x = exactly(sizeof(float) * 4 * num_in), *out = exactly(sizeof(float) * 4 * num_out);
    for (int i = 0; i < 4 * num_in; i++) x[i] = 1.0f;
    tn_linear_args args = {sizeof args, &shared->matrix, x, out, 4, num_in, num_out, TN_F32, TN_F32, NULL};
    for (int turn = 0; turn < 40; turn++) run_linear(&args);
    return NULL;
}

static void check_callers_at_once(void) {
    weights_t weights = make_weights(TN_F32, 640, 512, 512, false);
    pthread_t callers[3];
    tn_set_threads(3);
    for (int i = 0; i < 3; i++) pthread_create(&callers[i], NULL, call_often, &weights);
    for (int i = 0; i < 3; i++) pthread_join(callers[i], NULL);
}

static void wait_for_one(void *arg, tn_region *region, int id) {
    (void)arg;
    const struct timespec pause = {.tv_nsec = 50 * 1000 * 1000};
    if (id == 1) nanosleep(&pause, NULL);
    tn_barrier(region);
}

typedef struct {
    _Atomic int64_t sums[4]; /* a bit a chunk, of each stage */
    int num_threads;         /* of the region */
} stages_t;

static void count_chunks(void *arg, tn_region *region, int id) {
    stages_t *stages = arg;
    if (id == 0) stages->num_threads = region->num;
    for (int stage = 0; stage < 4; stage++) {
        for (int64_t chunk; (chunk = tn_next_chunk(region)) < 10;) atomic_fetch_add(&stages->sums[stage], 1 << chunk);
        tn_barrier(region);
    }
}

/* Regions until one has all three threads: for 512 ms at most, however fast regions are. */
static void check_until_all_take_part(void) {
    const time_t begin_s = time(NULL);
    for (;;) {
        stages_t stages = {0};
        tn_run(count_chunks, &stages);
        for (int stage = 0; stage < 4; stage++)
            if (atomic_load(&stages.sums[stage]) != (1 << 10) - 1) fail("the chunks of a stage");
        if (stages.num_threads == 3) return;
        if (time(NULL) - begin_s > 60) fail("the number of threads in the end");
    }
}

/* A thread that others wait for is left out for some regions, and each chunk of each stage is handed out once. */
static void check_team(void) {
    tn_set_threads(3);
    check_until_all_take_part();
    /* More than once, since where others use the cores all threads may come late. */
    for (int turn = 0; turn < 10 && tn_num_threads() == 3; turn++) tn_run(wait_for_one, NULL);
    if (tn_num_threads() == 3) fail("the number of threads after waiting");
    check_until_all_take_part();
}

int main(int argc, char **argv) {
    if (tn_start() != TN_OK) {
        printf("the system refuses what this instruction set needs: not run\n");
        return 0;
    }
    check_products(argc > 1 ? atoi(argv[1]) : 200);
    check_merges();
    for (int64_t count = 1; count < 200; count += 33) {
        check_interleave(2, count);
        check_interleave(4, count);
        check_interleave(8, count);
    }
    for (int64_t count = 1; count < 400; count += 21) {
        check_differences(2, count);
        check_differences(4, count);
        for (int percent = 0; percent <= 100; percent += 25) {
            check_scatter(1, count, percent, false);
            check_scatter(2, count, percent, percent % 50 == 0);
            check_scatter(4, count, percent, percent % 50 != 0);
            check_scatter(2, count, percent, true);
        }
    }
    check_frames(100 * (argc > 1 ? atoi(argv[1]) : 200));
    for (int i = 0; i < 8 * (argc > 1 ? atoi(argv[1]) : 200); i++) check_fill(), check_walk(), check_encode(), check_split();
    check_exp();
    check_callers_at_once();
    check_team();
    return 0;
}
