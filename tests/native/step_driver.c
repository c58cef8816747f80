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
    return (tn_projection){parts, num_parts, num_in, num_out, NULL};
}

enum { LAYERS = 2, BLOCK_SIZE = 4, PARTS = 3 };

/* Of this pool, before layer `end`. */
static int64_t num_kv_layers(const tn_decoder *model, int64_t pool, int end) {
    int64_t num = 0;
    for (int n = 0; n < end; n++) {
        const tn_decoder_layer *layer = &model->layers[n];
        const int64_t token = 2 * layer->num_kv_heads * layer->head_dim;
        if (layer->pool != pool || layer->reads_keys) continue;
        if (layer->delta_taps.data == NULL && layer->qkv.num_parts)
            num += layer->convolution.data == NULL ? 1 : (model->hidden_size + token - 1) / token;
    }
    return num;
}

/* Queries, keys and values of a delta net. */
static int64_t num_channels(const tn_decoder *model) {
    return 2 * model->delta_key_heads * model->delta_key_size + model->delta_value_heads * model->delta_value_size;
}

/* Values, keys and queries of a Mamba-2 layer. */
static int64_t num_mamba_channels(const tn_decoder *model) {
    return model->mamba_heads * model->mamba_head_dim + 2 * model->mamba_groups * model->mamba_state_size;
}

/* Of a sequence's state, before layer `end`. */
static int64_t num_of_state(const tn_decoder *model, int end) {
    const int64_t matrices = model->delta_value_heads * model->delta_key_size * model->delta_value_size;
    int64_t num = 0;
    for (int n = 0; n < end; n++)
        if (model->layers[n].delta_taps.data != NULL)
            num += (model->delta_convolution_size - 1) * num_channels(model) + matrices;
        else if (model->layers[n].mamba_taps.data != NULL)
            num += (model->mamba_convolution_size - 1) * num_mamba_channels(model) +
                   model->mamba_heads * model->mamba_state_size * model->mamba_head_dim;
    return num;
}

/* Of the layers whose keys and values have the sizes of this one. */
static tn_kv new_pool(const tn_decoder *model, int layer, int64_t num_blocks, bool int8) {
    const tn_decoder_layer *own = &model->layers[layer];
    tn_kv kv = {.num_slots = num_blocks * BLOCK_SIZE, .block_size = BLOCK_SIZE, .dtype = int8 ? TN_I8 : model->dtype};
    const int64_t parts = model->latent_rank ? 1 : 2;
    const int64_t heads = num_kv_layers(model, own->pool, LAYERS) * parts * own->num_kv_heads * kv.num_slots;
    const int64_t item = model->dtype == TN_F32 ? 4 : 2;
    kv.data = exactly((size_t)(heads * own->head_dim * (int8 ? 1 : item)));
    kv.scale_dtype = model->dtype;
    if (int8) kv.scale = exactly((size_t)(heads * item));
    return kv;
}

/* Numbers of a row of x. */
static int64_t num_columns(const tn_decoder *model) {
    return model->hidden_size * (model->num_streams ? model->num_streams : 1);
}

/* A layer with a mixture, left in between; scratch keeps nothing. */
static void run_halves(tn_decoder_step_args *args) {
    const tn_decoder *model = args->model;
    const int64_t num_pairs = args->num_rows * model->num_experts_used;
    args->chosen = exactly(8 * (size_t)num_pairs);
    args->half = TN_UP_TO_ROUTER;
    if (tn_decoder_step(args) != TN_OK) fail("a status of the first half");
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        const bool ascends = pair % model->num_experts_used == 0 || args->chosen[pair - 1] < args->chosen[pair];
        if (!ascends || args->chosen[pair] < 0 || args->chosen[pair] >= model->num_experts) fail("a chosen expert");
    }
    memset(args->scratch, 0xff, (size_t)tn_decoder_scratch_bytes(model, args->num_rows));
    args->half = TN_FROM_ROUTER_ON;
    if (tn_decoder_step(args) != TN_OK) fail("a status of the second half");
    free(args->chosen);
    args->chosen = NULL, args->half = TN_WHOLE_LAYERS;
}

/* Rows [begin, end) of a sequence whose tokens lie in blocks from the last one down, with a copy of the state; `ends` of
 * its tokens, or NULL. */
static void run(const tn_decoder *model, const tn_kv *kv, const int64_t *blocks, const int64_t *ends,
                const float *const turns[2], const char *x, const char *inputs, char *out, int64_t begin, int64_t end,
                float *own_state, tn_save save) {
    const int64_t num = end - begin, row_bytes = num_columns(model) * (model->dtype == TN_F32 ? 4 : 2);
    int64_t *turn = exactly(8 * (size_t)num), *slots = exactly(8 * (size_t)num);
    for (int64_t i = 0; i < num; i++) {
        turn[i] = begin + i;
        slots[i] = blocks[(begin + i) / BLOCK_SIZE] * BLOCK_SIZE + (begin + i) % BLOCK_SIZE;
    }
    const tn_span span = {0, num, end, blocks, own_state, &save, save.state != NULL};
    const int64_t scratch_bytes = tn_decoder_scratch_bytes(model, num);
    void *scratch = aligned_alloc(64, (size_t)scratch_bytes);
    char *rows = exactly((size_t)(num * row_bytes));
    float *query_scales = exactly(sizeof(float) * (size_t)num);
    for (int64_t i = 0; i < num; i++) query_scales[i] = 1.0f + 0.01f * (float)(begin + i);
    memcpy(rows, x + begin * row_bytes, (size_t)(num * row_bytes));
    tn_decoder_step_args args = {.size = sizeof args, .model = model, .kv = kv, .spans = &span,
                                 .turns = turns[0], .local_turns = turns[1],
                                 .turn = turn, .slots = slots, .x = rows, .scratch = scratch,
                                 .ends = ends == NULL ? NULL : ends + begin, .num_spans = 1, .num_rows = num,
                                 .first = 0, .end = LAYERS, .query_scales = query_scales};
    const int64_t inputs_bytes = LAYERS * model->layer_input_size * (model->dtype == TN_F32 ? 4 : 2);
    if (inputs_bytes) args.layer_inputs = inputs + begin * inputs_bytes;
    if (random_below(2)) { /* left after a layer, and after the router of a mixture */
        for (int n = 0; n < LAYERS; n++) {
            args.first = n, args.end = n + 1;
            if (model->layers[n].experts != NULL && random_below(3)) run_halves(&args);
            else if (tn_decoder_step(&args) != TN_OK) fail("a status");
        }
    } else if (tn_decoder_step(&args) != TN_OK) {
        fail("a status");
    }
    memcpy(out + begin * row_bytes, rows, (size_t)(num * row_bytes));
    free(rows), free(scratch), free(turn), free(slots);
}

/* Attention over latents in place of keys and values. */
static void add_latents(tn_decoder *model) {
    model->num_heads = 1 + random_below(5), model->num_kv_heads = 1;
    model->latent_rank = 1 + random_below(100), model->rotary_dim = 2 * (1 + random_below(12));
    model->head_dim = model->latent_rank + model->rotary_dim;
    model->plain_dim = 1 + random_below(40), model->value_dim = 1 + random_below(40);
    model->query_rank = random_below(2) ? 1 + random_below(60) : 0;
    model->latent_norm_eps = 1e-5f;
}

static void add_latent_weights(const tn_decoder *model, tn_decoder_layer *layer) {
    const int dtype = model->dtype;
    const int64_t num_heads = model->num_heads, queries = num_heads * (model->plain_dim + model->rotary_dim);
    const int64_t down = (model->query_rank ? model->query_rank : queries) + model->head_dim;
    layer->qkv = projection(2, model->hidden_size, down, dtype, true);
    layer->query_norm = vector(model->query_rank, dtype);
    layer->key_norm = vector(model->latent_rank, TN_F32);
    if (model->query_rank) layer->query_up = projection(1, model->query_rank, queries, dtype, true);
    layer->key_up = projection(1, model->plain_dim, num_heads * model->latent_rank, dtype, false);
    layer->value_up = projection(1, model->latent_rank, num_heads * (model->plain_dim + model->value_dim), dtype, false);
    layer->output = projection(1, num_heads * model->value_dim, model->hidden_size, dtype, true);
}

/* Gated delta nets in place of some layers' attention. */
static void add_delta_nets(tn_decoder *model) {
    model->delta_key_heads = 1 + random_below(2), model->delta_value_heads = model->delta_key_heads * (1 + random_below(2));
    model->delta_key_size = 4 * (1 + random_below(10)), model->delta_value_size = 1 + random_below(40);
    model->delta_convolution_size = 1 + random_below(TN_MAX_CONVOLUTION);
    model->delta_order = random_below(4);
}

static void add_delta_net_weights(const tn_decoder *model, tn_decoder_layer *layer) {
    const int dtype = model->dtype;
    const int64_t heads = model->delta_value_heads, values = heads * model->delta_value_size;
    layer->qkv = projection(PARTS, model->hidden_size, num_channels(model) + values + 2 * heads, dtype, true);
    layer->output = projection(1, values, model->hidden_size, dtype, true);
    layer->delta_taps = vector(num_channels(model) * model->delta_convolution_size, dtype);
    layer->delta_log = vector(heads, TN_F32), layer->delta_bias = vector(heads, dtype);
    layer->delta_norm = vector(model->delta_value_size, TN_F32);
}

/* Mamba-2 layers likewise. */
static void add_mamba(tn_decoder *model) {
    model->mamba_groups = 1 + random_below(3), model->mamba_heads = model->mamba_groups * (1 + random_below(3));
    model->mamba_head_dim = 1 + random_below(40), model->mamba_state_size = 4 * (1 + random_below(10));
    model->mamba_convolution_size = 1 + random_below(TN_MAX_CONVOLUTION);
    model->parallel = 0;
    for (int n = 0; n < 5; n++) model->mamba_scales[n] = n && random_below(2) ? 0.6f : 1.0f;
}

static void add_mamba_weights(const tn_decoder *model, tn_decoder_layer *layer) {
    const int dtype = model->dtype;
    const int64_t heads = model->mamba_heads, values = heads * model->mamba_head_dim, num = num_mamba_channels(model);
    if (random_below(2)) layer->qkv = layer->output = (tn_projection){0}; /* nothing attends as well */
    layer->mamba_in = projection(PARTS, model->hidden_size, values + num + heads, dtype, true);
    layer->mamba_out = projection(1, values, model->hidden_size, dtype, true);
    layer->mamba_taps = vector(num * model->mamba_convolution_size, dtype);
    if (random_below(2)) layer->mamba_taps_bias = vector(num, TN_F32);
    layer->mamba_log = vector(heads, TN_F32), layer->mamba_step_bias = vector(heads, dtype);
    layer->mamba_skip = vector(heads, dtype);
    if (random_below(2)) layer->mamba_norm = vector(values, TN_F32);
}

/* Layers of different heads, the last of which may attend to another one's keys; values that are keys. */
static void add_layer_shapes(tn_decoder *model, tn_decoder_layer layers[LAYERS]) {
    tn_decoder_layer *last = &layers[LAYERS - 1];
    const int64_t hidden = model->hidden_size;
    const int dtype = model->dtype;
    model->local_rotary_dim = model->rotary_dim;
    layers[0].rotary = TN_ROTARY_LOCAL, last->kv_layer = 0;
    if (random_below(2)) { /* others have the sizes of the first one */
        last->reads_keys = 1, last->rotary = TN_ROTARY_LOCAL;
    } else {
        last->pool = 1, last->num_kv_heads = model->num_heads, last->head_dim = 2 * (2 + random_below(40));
        last->rotary = random_below(2) ? TN_ROTARY_MAIN : TN_ROTARY_NONE;
        last->keys_are_values = random_below(2);
        model->rotary_dim = last->head_dim;
        model->num_kv_heads = last->num_kv_heads;
        if (last->head_dim > model->head_dim) model->head_dim = last->head_dim;
    }
    for (int n = 0; n < LAYERS; n++) {
        const int64_t kinds = layers[n].reads_keys ? 0 : layers[n].keys_are_values ? 1 : 2, num = layers[n].head_dim;
        const int64_t attended = model->num_heads * num, made = attended + kinds * layers[n].num_kv_heads * num;
        layers[n].qkv = projection(2, hidden, made, dtype, true);
        layers[n].output = projection(1, attended, hidden, dtype, true);
        layers[n].query_norm = vector(num, dtype), layers[n].key_norm = vector(num, TN_F32);
        if (random_below(2)) layers[n].value_norm = vector(num, TN_F32);
        layers[n].attention_inner_norm = (tn_vector){0};
    }
    const int64_t most = model->num_heads * model->head_dim;
    if (PARTS * most > model->permuted_size) model->permuted_size = PARTS * most;
}

/* Inputs of layers by themselves, and numbers that layers end with. */
static void add_layer_inputs(tn_decoder *model, tn_decoder_layer layers[LAYERS]) {
    const int64_t hidden = model->hidden_size, num = 1 + random_below(120);
    model->layer_input_size = num, model->num_layers = LAYERS;
    if (PARTS * num > model->permuted_size) model->permuted_size = PARTS * num;
    for (int n = 0; n < LAYERS; n++) {
        layers[n].input_gate = projection(1, hidden, num, model->dtype, true);
        layers[n].input_up = projection(2, num, hidden, model->dtype, true);
        layers[n].input_norm = vector(hidden, model->dtype);
        if (random_below(2)) layers[n].scalar = vector(1, TN_F32);
    }
}

/* Several streams of x, a product next to attention, or both, and gates that are cut; there are norms without biases. */
static void add_streams(tn_decoder *model, tn_decoder_layer layers[LAYERS]) {
    const int64_t hidden = model->hidden_size, rank = 1 + random_below(40), more = 1 + random_below(2);
    const int dtype = model->dtype;
    if (random_below(2) || !model->layer_input_size) model->laurel_rank = rank;
    if (model->layer_input_size) model->num_streams = 1 + random_below(TN_MAX_STREAMS);
    if (model->num_streams) model->active_stream = random_below((int)model->num_streams);
    if (PARTS * rank > model->permuted_size) model->permuted_size = PARTS * rank;
    const int64_t num = model->num_streams;
    for (int n = 0; n < LAYERS; n++) {
        layers[n].cuts_gates = random_below(2), layers[n].gate_cut = 1.5f - (float)n;
        if (model->laurel_rank) {
            layers[n].laurel_down = projection((int)more, hidden, rank, dtype, rank > more);
            layers[n].laurel_up = projection(1, rank, hidden, dtype, true);
            layers[n].laurel_norm = vector(hidden, TN_F32);
        }
        if (!num) continue;
        layers[n].stream_norm = vector(hidden, dtype), layers[n].stream_router = vector(num * hidden, dtype);
        layers[n].stream_predictions = vector(num * num * num, TN_F32);
        layers[n].stream_corrections = vector(num * num, dtype);
        if (random_below(2)) layers[n].stream_scale = vector(hidden, dtype);
    }
}

static bool have_both_parts(const tn_decoder_layer layers[LAYERS]) {
    bool have = true;
    for (int n = 0; n < LAYERS; n++) have &= layers[n].qkv.num_parts && layers[n].gate_up.num_parts;
    return have;
}

static void check_decoder(int dtype, bool int8) {
    const int64_t heads = 1 + random_below(2), group = 1 + random_below(3), head_dim = 2 * (2 + random_below(40));
    tn_decoder_layer layers[LAYERS];
    tn_decoder model = {.layers = layers, .hidden_size = 5 + random_below(70), .num_heads = heads * group,
                        .intermediate_size = 3 + random_below(90), .num_kv_heads = heads, .head_dim = head_dim,
                        .rotary_dim = head_dim - 2 * random_below(2), .norm_eps = 1e-6f, .attention_scale = 0.1f,
                        .score_cap = random_below(2) ? 0.5f : 0.0f, .residual_scale = random_below(2) ? 0.3f : 1.0f,
                        .activation = random_below(6), .dtype = dtype, .norm = random_below(4),
                        .joint_norms = random_below(2), .late_norms = random_below(2), .wide_turns = random_below(2),
                        .interleaved = random_below(2), .parallel = random_below(2), .plain_mlp = random_below(2),
                        .mlp_residual_scale = random_below(2) ? 0.4f : 1.0f, .attention_output_scale = 0.9f,
                        .mamba_output_scale = 0.7f, .gate_scale = random_below(2) ? 0.8f : 1.0f};
    if (random_below(3) == 0) model.convolution_size = 1 + random_below(TN_MAX_CONVOLUTION);
    else if (random_below(3) == 0) add_latents(&model);
    else if (random_below(3) == 0) add_delta_nets(&model);
    else if (random_below(2)) add_mamba(&model);
    model.gated_attention = !model.latent_rank && random_below(3) == 0;
    model.interleaved_qkv = group == 1 && !model.latent_rank && !model.gated_attention && random_below(2);
    if (random_below(3) == 0 && !model.parallel) {
        model.num_experts = 1 + random_below(9);
        model.num_experts_used = 1 + random_below((int)model.num_experts);
        model.expert_size = 1 + random_below(40);
        model.num_expert_groups = model.num_experts % 2 ? 1 : 2;
        const bool fits = 2 * model.num_experts_used <= model.num_experts;
        model.num_expert_groups_used = fits ? 1 : model.num_expert_groups;
        model.expert_sigmoid = random_below(2), model.expert_scores_wide = random_below(2);
        model.expert_sum_eps = 1e-6f, model.expert_factor = 1.5f;
        if (random_below(2)) model.shared_size = 1 + random_below(100);
        model.expert_weights_sum_to_1 = random_below(2), model.expert_weights_rounded = random_below(2);
        model.experts_weigh_inputs = random_below(2);
        if (!model.plain_mlp && random_below(2)) model.swiglu_alpha = 1.7f, model.swiglu_limit = 0.4f;
        model.gate_scale = 1.0f;
    }
    model.local_rotary_dim = model.rotary_dim;
    model.chunked_windows = random_below(2);
    model.rounds_inputs = !model.num_experts && random_below(3) == 0;
    const bool has_input_norms = random_below(3), has_output_norms = random_below(2);
    const bool has_norm_bias = has_input_norms && random_below(2);
    const bool has_mlp_norm = has_input_norms && (!model.parallel || random_below(2));
    if (has_norm_bias && random_below(2)) model.norm = TN_LAYER_PLUS_ONE;
    const int64_t attended = model.num_heads * (model.latent_rank ? model.value_dim : head_dim);
    const int64_t of_delta = model.delta_value_heads * model.delta_value_size;
    const int64_t of_mamba = model.mamba_heads * model.mamba_head_dim;
    const int64_t values = of_delta > of_mamba ? of_delta : of_mamba, made = attended > values ? attended : values;
    const int64_t widest = made > model.hidden_size ? made : model.hidden_size;
    const int64_t inner = model.shared_size > model.intermediate_size ? model.shared_size : model.intermediate_size;
    const int64_t most = widest > inner ? widest : inner;
    model.permuted_size = PARTS * (most > model.query_rank ? most : model.query_rank);
    for (int n = 0; n < LAYERS; n++) {
        const tn_vector none = {0};
        const bool has_inner_norms = model.norm != TN_LAYER_PLUS_ONE && !values && random_below(2);
        const bool has_norms = random_below(2), convolves = model.convolution_size && random_below(3);
        const int64_t hidden = model.hidden_size, inner = model.intermediate_size;
        const int64_t queries = model.gated_attention ? 2 * attended : attended;
        layers[n] = (tn_decoder_layer){
            .attention_norm = has_input_norms ? vector(hidden, dtype) : none,
            .query_norm = has_norms ? vector(model.joint_norms ? attended : head_dim, dtype) : none,
            .key_norm = has_norms ? vector(model.joint_norms ? heads * head_dim : head_dim, dtype) : none,
            .attention_output_norm = has_output_norms ? vector(hidden, dtype) : none,
            .mlp_norm = has_mlp_norm ? vector(hidden, TN_F32) : none,
            .mlp_output_norm = has_output_norms ? vector(hidden, TN_F32) : none,
            .attention_norm_bias = has_norm_bias ? vector(hidden, dtype) : none,
            .mlp_norm_bias = has_norm_bias && has_mlp_norm ? vector(hidden, TN_F32) : none,
            .attention_inner_norm = has_inner_norms ? vector(convolves ? hidden : attended, dtype) : none,
            .mlp_inner_norm = has_inner_norms ? vector(inner, TN_F32) : none,
            .qkv = projection(3, hidden, convolves ? 3 * hidden : queries + 2 * heads * head_dim, dtype, true),
            .output = projection(1, convolves ? hidden : attended, hidden, dtype, true),
            .convolution = convolves ? vector(hidden * model.convolution_size, dtype) : none,
            .convolution_bias = convolves && random_below(2) ? vector(hidden, TN_F32) : none,
            .num_kv_heads = model.num_kv_heads,
            .head_dim = model.head_dim,
            .kv_layer = num_kv_layers(&model, 0, n),
            .gate_up = projection(2, hidden, (model.plain_mlp ? 1 : 2) * inner, dtype, true),
            .down = projection(1, inner, hidden, dtype, true),
            .window = n ? 1 + random_below(300) : 0,
            .sinks = random_below(2) ? vector(model.num_heads, dtype) : none,
            .rotary = random_below(3),
            .scales_queries = random_below(2)};
        if (model.latent_rank) add_latent_weights(&model, &layers[n]);
        layers[n].state_first = num_of_state(&model, n);
        if (model.delta_key_heads && random_below(3)) add_delta_net_weights(&model, &layers[n]);
        if (model.mamba_heads && random_below(3)) add_mamba_weights(&model, &layers[n]);
        const int parts = model.parallel ? 0 : random_below(4); /* some layers have one part alone */
        if (parts == 1 && !layers[n].delta_taps.data && !convolves) layers[n].qkv = layers[n].output = (tn_projection){0};
        if (parts == 2) {
            layers[n].gate_up = layers[n].down = (tn_projection){0};
            continue;
        }
        if (!model.num_experts || random_below(3) == 0) continue; /* some layers have an MLP */
        tn_expert *experts = exactly(sizeof(tn_expert) * (size_t)model.num_experts);
        for (int64_t e = 0; e < model.num_experts; e++)
            experts[e] = (tn_expert){projection(2, hidden, (model.plain_mlp ? 1 : 2) * model.expert_size, dtype, false),
                                     projection(1, model.expert_size, hidden, dtype, false)};
        layers[n].experts = experts;
        layers[n].router = projection(1, hidden, model.num_experts, dtype, false);
        layers[n].correction = random_below(2) ? vector(model.num_experts, TN_F32) : none;
        layers[n].gate_up = layers[n].down = (tn_projection){0};
        if (!model.shared_size) continue;
        if (random_below(2)) layers[n].shared_gate = projection(1, hidden, 1, dtype, false);
        layers[n].gate_up = projection(2, hidden, (model.plain_mlp ? 1 : 2) * model.shared_size, dtype, true);
        layers[n].down = projection(1, model.shared_size, hidden, dtype, true);
        if (!has_mlp_norm || has_norm_bias || random_below(2)) continue; /* the experts join it */
        layers[n].router_norm = vector(hidden, dtype), layers[n].expert_norm = vector(hidden, TN_F32);
        layers[n].expert_output_norm = vector(hidden, dtype), layers[n].shared_output_norm = vector(hidden, dtype);
        layers[n].expert_factors = vector(model.num_experts, dtype);
    }
    const bool has_others = model.latent_rank || model.convolution_size || values || model.gated_attention;
    if (!has_others && !model.interleaved_qkv && !model.joint_norms && random_below(2)) add_layer_shapes(&model, layers);
    if (random_below(3) == 0 && !has_norm_bias) add_layer_inputs(&model, layers);
    const bool can_have_streams = !has_norm_bias && !model.parallel && !model.num_experts && !model.mamba_heads;
    if (can_have_streams && have_both_parts(layers) && random_below(2)) add_streams(&model, layers);
    const int64_t num = 1 + random_below(300), num_blocks = (num + BLOCK_SIZE - 1) / BLOCK_SIZE;
    const size_t bytes = (size_t)(num * num_columns(&model) * (dtype == TN_F32 ? 4 : 2));
    int64_t *blocks = exactly(8 * (size_t)num_blocks);
    for (int64_t n = 0; n < num_blocks; n++) blocks[n] = num_blocks - 1 - n;
    int64_t *ends = random_below(2) ? exactly(8 * (size_t)num) : NULL; /* an image's tokens see one another */
    const int64_t image = random_below((int)num), behind = image + 1 + random_below((int)(num - image));
    for (int64_t n = 0; ends != NULL && n < num; n++) ends[n] = n >= image && n < behind ? behind : n + 1;
    const float *const turns[2] = {numbers(num * model.rotary_dim, TN_F32), numbers(num * model.local_rotary_dim, TN_F32)};
    const char *x = numbers(num * num_columns(&model), dtype);
    const char *inputs = numbers(num * LAYERS * model.layer_input_size, dtype);
    char *whole = exactly(bytes), *pieces = exactly(bytes);
    const int other = layers[LAYERS - 1].pool ? LAYERS - 1 : 0;
    const tn_kv first[2] = {new_pool(&model, 0, num_blocks, int8), new_pool(&model, other, num_blocks, int8)};
    const tn_kv second[2] = {new_pool(&model, 0, num_blocks, int8), new_pool(&model, other, num_blocks, int8)};
    const size_t state_bytes = sizeof(float) * (size_t)num_of_state(&model, LAYERS);
    float *states[2] = {exactly(state_bytes), exactly(state_bytes)}, *saved = exactly(state_bytes);
    int64_t cut = 1 + random_below((int)num);
    if (ends != NULL) cut = ends[cut - 1];
    const tn_save none = {0}, at_cut = {cut, state_bytes ? saved : NULL};
    tn_set_threads(3);
    run(&model, first, blocks, ends, turns, x, inputs, whole, 0, num, states[0], at_cut);
    tn_set_threads(1 + random_below(2));
    for (int64_t begin = 0, end; begin < num; begin = end) {
        end = begin ? begin + 1 + random_below((int)(num - begin)) : cut;
        if (ends != NULL) end = ends[end - 1];
        run(&model, second, blocks, ends, turns, x, inputs, pieces, begin, end, states[1], none);
        if (!begin && memcmp(states[1], saved, state_bytes)) fail("a copy of a state is not the state");
    }
    if (memcmp(whole, pieces, bytes)) fail("a decoder's rows have other bits in pieces");
    if (memcmp(states[0], states[1], state_bytes)) fail("a state has other bits in pieces");
}

static void check_encoder(int dtype) {
    enum { BUCKETS = 5, REACH = 300 };
    const bool is_bounded = random_below(3) == 0;
    const bool has_turns = random_below(2), has_bias = random_below(3) == 0, has_keys = !has_bias && random_below(2);
    const int64_t heads = 1 + random_below(3), hidden_part = 1 + random_below(40);
    const int64_t head_dim = has_turns ? 2 * hidden_part : hidden_part, hidden = heads * head_dim;
    tn_encoder_layer layers[LAYERS];
    const tn_encoder model = {.layers = layers, .hidden_size = hidden, .intermediate_size = 1 + random_below(90),
                              .num_heads = heads, .head_dim = head_dim, .rotary_dim = has_turns ? head_dim : 0,
                              .norm_eps = 1e-6f, .attention_scale = 0.1f, .activation = random_below(4), .dtype = dtype,
                              .pre_norm = random_below(2), .gated = is_bounded || random_below(2),
                              .norm = random_below(2) ? TN_LAYER : TN_RMS, .bounded = is_bounded,
                              .turned_parts = has_turns && head_dim % 4 == 0 ? 1 + random_below(2) : 1};
    const bool is_rms = model.norm == TN_RMS, has_head_norms = is_rms && random_below(2);
    const bool has_output_norms = is_rms && model.pre_norm && random_below(2);
    float *bounds = exactly(sizeof(float) * 7 * 4);
    for (int n = 0; n < 7 * 4; n++) bounds[n] = (n % 2 ? 0.01f : -0.01f) * (float)(1 + random_below(300));
    for (int n = 0; n < LAYERS; n++) {
        const tn_vector none = {0};
        const bool has_norm = n || !model.pre_norm;
        layers[n] = (tn_encoder_layer){projection(3, hidden, 3 * hidden, dtype, false),
                                       projection(1, hidden, hidden, dtype, false),
                                       projection(1 + random_below(2), hidden,
                                                  model.intermediate_size * (model.gated ? 2 : 1), dtype, false),
                                       projection(1, model.intermediate_size, hidden, dtype, false),
                                       has_norm ? vector(hidden, dtype) : none, has_norm ? vector(hidden, dtype) : none,
                                       vector(hidden, dtype), vector(hidden, TN_F32),
                                       has_keys ? numbers(BUCKETS * hidden, dtype) : NULL,
                                       has_keys ? numbers(BUCKETS * hidden, dtype) : NULL, n ? random_below(60) : 0};
        if (has_head_norms)
            layers[n].query_norm = vector(head_dim, dtype), layers[n].key_norm = vector(head_dim, dtype),
            layers[n].value_norm = vector(head_dim, TN_F32);
        if (has_output_norms)
            layers[n].attention_output_norm = vector(hidden, dtype), layers[n].mlp_output_norm = vector(hidden, dtype);
        layers[n].bounds = is_bounded ? bounds : NULL;
    }
    int64_t *buckets = exactly(8 * (2 * REACH + 1));
    for (int n = 0; n < 2 * REACH + 1; n++) buckets[n] = random_below(BUCKETS);
    const int64_t lengths[2] = {1 + random_below(290), 1 + random_below(40)};
    const int64_t starts[3] = {0, lengths[0], lengths[0] + lengths[1]}, item = dtype == TN_F32 ? 4 : 2;
    char *x = numbers(starts[2] * hidden, dtype);
    char *alone = exactly((size_t)(lengths[0] * hidden * item));
    memcpy(alone, x, (size_t)(lengths[0] * hidden * item));
    int64_t *turn = exactly(8 * (size_t)starts[2]);
    for (int64_t i = 0; i < starts[2]; i++) turn[i] = i < starts[1] ? i : i - starts[1];
    const int64_t longest = lengths[0] > lengths[1] ? lengths[0] : lengths[1];
    void *scratch = aligned_alloc(64, (size_t)tn_encoder_scratch_bytes(&model, starts[2]));
    tn_encoder_step_args args = {.size = sizeof args, .model = &model, .starts = starts, .turn = turn,
                                 .turns = numbers(longest * head_dim, TN_F32),
                                 .local_turns = numbers(longest * head_dim, TN_F32),
                                 .bias = has_bias ? numbers(heads * (2 * REACH + 1), TN_F32) : NULL,
                                 .buckets = has_keys ? buckets : NULL, .x = x, .scratch = scratch, .reach = REACH,
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
                                .dtype = dtype, .group_size = (int32_t)(columns / groups),
                                 .factor = random_below(2) ? 1.0f : 5.5f};
    if (tn_embed(&args) != TN_OK) fail("a status");
}

static void check_streams(int dtype) {
    const int64_t rows = 1 + random_below(40), streams = 1 + random_below(5), columns = 1 + random_below(300);
    const int64_t item = dtype == TN_F32 ? 4 : 2, row_bytes = streams * columns * item;
    char *x = numbers(rows * streams * columns, dtype), *alone = exactly((size_t)row_bytes);
    memcpy(alone, x + (rows - 1) * row_bytes, (size_t)row_bytes);
    char *mean = exactly((size_t)(rows * columns * item)), *own_mean = exactly((size_t)(columns * item));
    tn_match_args args = {sizeof args, x, mean, rows, streams, columns, dtype, 0};
    tn_set_threads(3);
    if (tn_match(&args) != TN_OK) fail("a status");
    args.x = alone, args.mean = own_mean, args.num_rows = 1;
    if (tn_match(&args) != TN_OK) fail("a status");
    if (memcmp(alone, x + (rows - 1) * row_bytes, (size_t)row_bytes) ||
        memcmp(own_mean, mean + (rows - 1) * columns * item, (size_t)(columns * item)))
        fail("streams of a row have other bits in company");
    args.mean = NULL;
    if (tn_match(&args) != TN_OK) fail("a status");
}

int main(int argc, char **argv) {
    if (tn_start() != TN_OK) {
        printf("the system refuses what this instruction set needs: not run\n");
        return 0;
    }
    for (int turn = argc > 1 ? atoi(argv[1]) : 50; turn > 0; turn--) {
        const int dtype = turn % 2 ? TN_BF16 : TN_F32;
        check_decoder(dtype, turn % 4 / 2);
        check_encoder(dtype);
        check_streams(dtype);
        check_embeddings(dtype, turn % 3 == 0 ? TN_I8 : turn % 3 == 1 ? TN_BF16 : TN_F32);
    }
    printf("%s", tn_describe());
    return 0;
}
