/* Decoder and encoder steps over random shapes, whole and in pieces, with equal bits: for sanitizers and emulators.
 *
 * Heap blocks have exactly the size that a function may touch. Exits with 1 and says where at the first difference. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

static uint64_t state = 88172645463325252u;

static uint32_t random_bits(void) { /* xorshift */
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16);
}

static int random_below(int limit) { return (int)(random_bits() % (uint32_t)limit); }
static float random_float(void) { return (float)((int)(random_bits() & 0xffff) - 32768) / 65536.0f; }

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", tn_describe(), what);
    exit(1);
}

static void *exactly(size_t bytes) {
    void *block = malloc(bytes ? bytes : 1);
    if (block == NULL) exit(2);
    memset(block, 0xff, bytes); /* NaN, in every dtype of floats */
    return block;
}

/* `num` random numbers in F32 or BF16. */
static void *numbers(int64_t num, int dtype) {
    char *made = exactly((size_t)num * (dtype == TN_F32 ? 4 : 2));
    for (int64_t i = 0; i < num; i++) {
        const float value = random_float();
        uint32_t bits;
        memcpy(&bits, &value, 4);
        const uint16_t half = (uint16_t)(bits >> 16);
        dtype == TN_F32 ? memcpy(made + 4 * i, &value, 4) : memcpy(made + 2 * i, &half, 2);
    }
    return made;
}

static tn_vector vector(int64_t num, int dtype) { return (tn_vector){.data = numbers(num, dtype), .dtype = dtype}; }

/* As many matrices as `num_parts`, of num_out columns together; some take their inputs in another order. */
static tn_projection projection(int num_parts, int64_t num_in, int64_t num_out, int dtype, bool may_permute) {
    tn_part *parts = exactly(sizeof(tn_part) * num_parts);
    for (int n = 0; n < num_parts; n++) {
        const int64_t share = n + 1 < num_parts ? num_out / num_parts : num_out - num_out / num_parts * (num_parts - 1);
        int64_t *columns = NULL;
        if (may_permute && random_below(3) == 0) {
            columns = exactly(8 * (size_t)num_in);
            for (int64_t i = 0; i < num_in; i++) columns[i] = num_in - 1 - i;
        }
        parts[n] = (tn_part){{.data = numbers(share * num_in, dtype), .num_out = share, .num_in = num_in, .dtype = dtype},
                             columns};
    }
    return (tn_projection){parts, num_parts, num_in, num_out};
}

enum { LAYERS = 2, BLOCK_SIZE = 4, PARTS = 3 };

static tn_kv new_pool(const tn_decoder *model, int64_t num_blocks, bool int8) {
    tn_kv kv = {.num_slots = num_blocks * BLOCK_SIZE, .block_size = BLOCK_SIZE, .dtype = int8 ? TN_I8 : model->dtype};
    const int64_t heads = LAYERS * 2 * model->num_kv_heads * kv.num_slots, item = model->dtype == TN_F32 ? 4 : 2;
    kv.data = exactly((size_t)(heads * model->head_dim * (int8 ? 1 : item)));
    kv.scale_dtype = model->dtype;
    if (int8) kv.scale = exactly((size_t)(heads * item));
    return kv;
}

/* Rows [begin, end) of a sequence whose tokens lie in blocks from the last one down. */
static void run(const tn_decoder *model, const tn_kv *kv, const int64_t *blocks, const float *turns, const char *x,
                char *out, int64_t begin, int64_t end) {
    const int64_t num = end - begin, row_bytes = model->hidden_size * (model->dtype == TN_F32 ? 4 : 2);
    int64_t *turn = exactly(8 * (size_t)num), *slots = exactly(8 * (size_t)num);
    for (int64_t i = 0; i < num; i++) {
        turn[i] = begin + i;
        slots[i] = blocks[(begin + i) / BLOCK_SIZE] * BLOCK_SIZE + (begin + i) % BLOCK_SIZE;
    }
    const tn_span span = {0, num, end, blocks};
    const int64_t scratch_bytes = tn_decoder_scratch_bytes(model, num);
    void *scratch = aligned_alloc(64, (size_t)scratch_bytes);
    char *rows = exactly((size_t)(num * row_bytes));
    memcpy(rows, x + begin * row_bytes, (size_t)(num * row_bytes));
    tn_decoder_step_args args = {.size = sizeof args, .model = model, .kv = kv, .spans = &span, .turns = turns,
                                 .turn = turn, .slots = slots, .x = rows, .scratch = scratch, .num_spans = 1,
                                 .num_rows = num, .first = 0, .end = LAYERS};
    if (random_below(2)) { /* left after a layer */
        args.end = 1;
        if (tn_decoder_step(&args) != TN_OK) fail("a status");
        args.first = 1, args.end = LAYERS;
    }
    if (tn_decoder_step(&args) != TN_OK) fail("a status");
    memcpy(out + begin * row_bytes, rows, (size_t)(num * row_bytes));
    free(rows), free(scratch), free(turn), free(slots);
}

static void check_decoder(int dtype, bool int8) {
    const int64_t heads = 1 + random_below(2), group = 1 + random_below(3), head_dim = 2 * (2 + random_below(40));
    tn_decoder_layer layers[LAYERS];
    tn_decoder model = {.layers = layers, .hidden_size = 5 + random_below(70), .num_heads = heads * group,
                        .intermediate_size = 3 + random_below(90), .num_kv_heads = heads, .head_dim = head_dim,
                        .rotary_dim = head_dim - 2 * random_below(2), .norm_eps = 1e-6f, .attention_scale = 0.1f,
                        .activation = random_below(4), .dtype = dtype};
    const int64_t attended = model.num_heads * head_dim;
    const int64_t widest = attended > model.hidden_size ? attended : model.hidden_size;
    model.permuted_size = PARTS * (widest > model.intermediate_size ? widest : model.intermediate_size);
    for (int n = 0; n < LAYERS; n++) {
        const tn_vector none = {0};
        const bool has_norms = random_below(2);
        layers[n] = (tn_decoder_layer){
            vector(model.hidden_size, dtype), has_norms ? vector(head_dim, dtype) : none,
            has_norms ? vector(head_dim, dtype) : none, vector(model.hidden_size, TN_F32),
            projection(3, model.hidden_size, attended + 2 * heads * head_dim, dtype, true),
            projection(1, attended, model.hidden_size, dtype, true),
            projection(2, model.hidden_size, 2 * model.intermediate_size, dtype, true),
            projection(1, model.intermediate_size, model.hidden_size, dtype, true), n ? 1 + random_below(300) : 0};
    }
    const int64_t num = 1 + random_below(300), num_blocks = (num + BLOCK_SIZE - 1) / BLOCK_SIZE;
    const size_t bytes = (size_t)(num * model.hidden_size * (dtype == TN_F32 ? 4 : 2));
    int64_t *blocks = exactly(8 * (size_t)num_blocks);
    for (int64_t n = 0; n < num_blocks; n++) blocks[n] = num_blocks - 1 - n;
    const float *turns = numbers(num * model.rotary_dim, TN_F32);
    const char *x = numbers(num * model.hidden_size, dtype);
    char *whole = exactly(bytes), *pieces = exactly(bytes);
    const tn_kv first = new_pool(&model, num_blocks, int8), second = new_pool(&model, num_blocks, int8);
    tn_set_threads(3);
    run(&model, &first, blocks, turns, x, whole, 0, num);
    tn_set_threads(1 + random_below(2));
    for (int64_t begin = 0, end; begin < num; begin = end) {
        end = begin + 1 + random_below((int)(num - begin));
        run(&model, &second, blocks, turns, x, pieces, begin, end);
    }
    if (memcmp(whole, pieces, bytes)) fail("a decoder's rows have other bits in pieces");
}

static void check_encoder(int dtype) {
    const int64_t heads = 1 + random_below(3), head_dim = 1 + random_below(40), hidden = heads * head_dim;
    tn_encoder_layer layers[LAYERS];
    const tn_encoder model = {layers, hidden, 1 + random_below(90), heads, head_dim, 1e-6f, 0.1f, random_below(4), dtype};
    for (int n = 0; n < LAYERS; n++)
        layers[n] = (tn_encoder_layer){projection(3, hidden, 3 * hidden, dtype, false),
                                       projection(1, hidden, hidden, dtype, false),
                                       projection(1, hidden, model.intermediate_size, dtype, false),
                                       projection(1, model.intermediate_size, hidden, dtype, false),
                                       vector(hidden, dtype), vector(hidden, dtype), vector(hidden, dtype),
                                       vector(hidden, TN_F32)};
    const int64_t lengths[2] = {1 + random_below(290), 1 + random_below(40)};
    const int64_t starts[3] = {0, lengths[0], lengths[0] + lengths[1]}, item = dtype == TN_F32 ? 4 : 2;
    char *x = numbers(starts[2] * hidden, dtype);
    char *alone = exactly((size_t)(lengths[0] * hidden * item));
    memcpy(alone, x, (size_t)(lengths[0] * hidden * item));
    void *scratch = aligned_alloc(64, (size_t)tn_encoder_scratch_bytes(&model, starts[2]));
    tn_encoder_step_args args = {.size = sizeof args, .model = &model, .starts = starts, .x = x, .scratch = scratch,
                                 .num_texts = 2, .num_rows = starts[2], .first = 0, .end = LAYERS};
    tn_set_threads(3);
    if (tn_encoder_step(&args) != TN_OK) fail("a status");
    args.x = alone, args.num_texts = 1, args.num_rows = lengths[0];
    if (tn_encoder_step(&args) != TN_OK) fail("a status");
    if (memcmp(x, alone, (size_t)(lengths[0] * hidden * item))) fail("a text has other bits in company");
    float *means = exactly(sizeof(float) * (size_t)(2 * hidden));
    const tn_mean_args mean = {sizeof mean, x, starts, means, 2, hidden, dtype, 0};
    if (tn_mean(&mean) != TN_OK) fail("a status");
    free(scratch);
}

static void check_embeddings(int dtype, int table_dtype) {
    const bool has_groups = random_below(2) == 0;
    const int64_t columns = has_groups ? 32 * (1 + random_below(4)) : 1 + random_below(70), tokens[3] = {4, 0, 2};
    const int64_t groups = has_groups ? columns / 32 : 1;
    const void *table = table_dtype == TN_I8 ? exactly((size_t)(5 * columns)) : numbers(5 * columns, table_dtype);
    const tn_embed_args args = {.size = sizeof args, .table = table, .tokens = tokens, .num_rows = 3,
                                .scale = table_dtype == TN_I8 ? numbers(5 * groups, TN_BF16) : NULL,
                                .out = exactly((size_t)(3 * columns * (dtype == TN_F32 ? 4 : 2))),
                                .num_columns = columns, .table_dtype = table_dtype, .scale_dtype = TN_BF16,
                                .dtype = dtype, .group_size = (int32_t)(columns / groups)};
    if (tn_embed(&args) != TN_OK) fail("a status");
}

int main(int argc, char **argv) {
    for (int turn = argc > 1 ? atoi(argv[1]) : 50; turn > 0; turn--) {
        const int dtype = turn % 2 ? TN_BF16 : TN_F32;
        check_decoder(dtype, turn % 4 / 2);
        check_encoder(dtype);
        check_embeddings(dtype, turn % 3 == 0 ? TN_I8 : turn % 3 == 1 ? TN_BF16 : TN_F32);
    }
    printf("%s", tn_describe());
    return 0;
}
