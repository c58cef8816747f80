/* Attention of rows over the keys and values of their own sequence, paged or as rows of an encoder's.
 *
 * Each (row, head) is computed by itself, over chunks of CHUNK keys at absolute positions: the chunk's largest score,
 * sum of exponentials and weighted values, merged with those before, ascending. A score is a sum over the head's
 * numbers in lanes and a tree; a chunk's exponentials are summed in lanes by position; values are added one key after
 * another. Keys that a row does not see are left out, which equals adding an exact 0. So nothing depends on which rows
 * are computed together, and rows of one sequence that share a key head share its loads: a tile is up to TILE_ROWS of
 * them by 4 keys, or by 4 vectors of values, in registers.
 *
 * Keys and values in 8 bits are first written out as what they mean in the model's dtype, chunk by chunk. */
#include "attention.h"

#include <stdbool.h>

#include "attend_tiles.h"
#include "elements.h"
#include "functions.h"

enum {
    CHUNK = TN_ATTEND_KEYS, /* 256; a multiple of every vector */
    QUAD = 4,        /* keys, or vectors of values, of a tile */
    TASK_ROWS = TN_ATTEND_ROWS, /* 32, that a thread takes at a time: (row, head) pairs of one key head */
    LEAST_ROWS = 8,  /* of a task that is cut for other threads */
    ALONE_KEYS = 64, /* with so few rows times keys, waking threads costs more than it gains */
};

#if TN_LANES == 8
enum { TILE_ROWS = 3 };
#else
enum { TILE_ROWS = 6 };
#endif

static const float NO_SCORE = -1e30f; /* lower than any; finite, so that differences are no NaN */

/* Queries of one sequence that share a key head, and where its keys and values lie. */
typedef struct {
    const void *queries; /* of the first row's first head */
    void *out;
    int64_t query_stride, out_stride; /* elements, of rows */
    int64_t group;                    /* query heads, side by side in a row */
    int64_t first_position;           /* of the first row */
    int64_t num_keys;
    int64_t window;                   /* 0: all */
    bool sees_all;                    /* also keys behind its own; then the window is to each side */
    bool chunked;                     /* windows begin at multiples of their size */
    const int64_t *ends;              /* of the rows, or NULL: the key behind the last one that each sees */
    int64_t least, most;              /* every row sees keys from `least` on, and up to `most`, where that is not 0 */

    const void *keys, *values;             /* of token 0, or of slot 0 */
    const void *key_scales, *value_scales; /* of I8 */
    const int64_t *blocks;                 /* NULL: token t is at t * key_stride */
    int64_t block_size;
    int64_t key_stride;                    /* elements, of tokens or slots */
    int kv_dtype, scale_dtype;

    tn_distances distances; /* of this head */

    int64_t head_dim;
    int64_t value_dim; /* less than head_dim of latents: the first numbers of keys are the values */
    float scale;
    float cap; /* 0: none */
    tn_vector sinks; /* of all heads, or none */
    int64_t first_head;
    int dtype;
} sequence_t;

/* A task's rows: what they see, and what is known of them after some chunks. */
typedef struct {
    int num;
    int64_t pair;             /* the first one, of the sequence's */
    int64_t stride;           /* of queries, sums and outputs: head_dim in whole vectors */
    int64_t first[TASK_ROWS]; /* keys [first, last) are those that the row sees */
    int64_t last[TASK_ROWS];
    float largest[TASK_ROWS]; /* score */
    float total[TASK_ROWS];   /* of exponentials */
    _Alignas(64) float queries[TASK_ROWS * TN_MAX_HEAD_DIM]; /* bf16 where pairs are multiplied */
    _Alignas(64) float outputs[TASK_ROWS * TN_MAX_HEAD_DIM];
#if TN_TILES
    _Alignas(64) uint16_t packed[TASK_ROWS * TN_MAX_HEAD_DIM]; /* queries as tiles take them */
#endif

    int begin[TASK_ROWS], end[TASK_ROWS]; /* what the row sees of the chunk, counted from its first key */
    _Alignas(64) float scores[TASK_ROWS][TN_SCORES_STRIDE];
    _Alignas(64) float sums[TASK_ROWS * TN_MAX_HEAD_DIM]; /* of the chunk's values */
} rows_t;

/* Keys or values of one chunk: number t is at base + place[t] elements. */
typedef struct {
    const void *base;
    const int64_t *place;
} vectors_t;

/* ---- scores ---- */

#if TN_BF16_DOT
TN_INLINE void dot_pairs(const int rows, vf sums[][QUAD], const uint16_t *queries, int64_t stride,
                         const uint16_t *const key[QUAD], int64_t num) {
    int64_t d = 0;
    for (; d + 2 * TN_LANES <= num; d += 2 * TN_LANES) {
        vb keys[QUAD];
        for (int j = 0; j < QUAD; j++) keys[j] = vb_load(key[j] + d);
        for (int i = 0; i < rows; i++) {
            const vb query = vb_load(queries + i * stride + d);
            for (int j = 0; j < QUAD; j++) sums[i][j] = vb_dot(sums[i][j], query, keys[j]);
        }
    }
    if (d == num) return;
    for (int i = 0; i < rows; i++) {
        const vb query = vb_load_part(queries + i * stride + d, (int)(num - d));
        for (int j = 0; j < QUAD; j++)
            sums[i][j] = vb_dot(sums[i][j], query, vb_load_part(key[j] + d, (int)(num - d)));
    }
}
#endif

TN_INLINE void dot_f32(const int rows, const int dtype, vf sums[][QUAD], const float *queries, int64_t stride,
                       const void *const key[QUAD], int64_t num) {
    for (int64_t d = 0; d < num; d += TN_LANES) {
        const int count = lanes_left(num - d);
        vf keys[QUAD];
        for (int j = 0; j < QUAD; j++) keys[j] = load_elements(key[j], dtype, d, count);
        for (int i = 0; i < rows; i++) {
            const vf query = vf_load(queries + i * stride + d);
            for (int j = 0; j < QUAD; j++) sums[i][j] = vf_fma(query, keys[j], sums[i][j]);
        }
    }
}

/* Scores of the rows [row, row + rows) with the keys [begin, end) of the chunk. Up to 3 behind them are overwritten. */
TN_INLINE void score_tile(const int rows, const int dtype, rows_t *task, int row, const vectors_t *keys, int begin,
                          int end, int64_t head_dim) {
    for (int t = begin; t < end; t += QUAD) {
        const void *key[QUAD];
        for (int j = 0; j < QUAD; j++)
            key[j] = element_at(keys->base, dtype, keys->place[t + j < end ? t + j : end - 1]);
        vf sums[TILE_ROWS][QUAD];
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < QUAD; j++) sums[i][j] = vf_zero();
#if TN_BF16_DOT
        if (dtype == TN_BF16)
            dot_pairs(rows, sums, (const uint16_t *)task->queries + row * task->stride, task->stride,
                      (const uint16_t *const *)key, head_dim);
        else
#endif
            dot_f32(rows, dtype, sums, task->queries + row * task->stride, task->stride, key, head_dim);
        for (int i = 0; i < rows; i++)
            vf_reduce4(task->scores[row + i] + t, sums[i][0], sums[i][1], sums[i][2], sums[i][3], true);
    }
}

/* ---- values ---- */

/* Adds to `width` vectors of each row's sums, from element d on, the values of the keys [begin, end). */
TN_INLINE void value_tile(const int rows, const int width, const int dtype, rows_t *task, int row,
                          const vectors_t *values, int begin, int end, int64_t d, int count) {
    float *to = task->sums + row * task->stride + d;
    vf sums[TILE_ROWS][QUAD];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j++) sums[i][j] = vf_load(to + i * task->stride + j * TN_LANES);
    for (int t = begin; t < end; t++) {
        const int64_t place = values->place[t] + d;
        vf value[QUAD];
        for (int j = 0; j < width; j++) value[j] = load_elements(values->base, dtype, place + j * TN_LANES, count);
        for (int i = 0; i < rows; i++) {
            const vf weight = vf_set(task->scores[row + i][t]);
            for (int j = 0; j < width; j++) sums[i][j] = vf_fma(weight, value[j], sums[i][j]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j++) vf_store(to + i * task->stride + j * TN_LANES, sums[i][j]);
}

TN_INLINE void value_tiles(const int rows, const int dtype, rows_t *task, int row, const vectors_t *values, int begin,
                           int end, int64_t head_dim) {
    int64_t d = 0;
    for (; d + QUAD * TN_LANES <= head_dim; d += QUAD * TN_LANES)
        value_tile(rows, QUAD, dtype, task, row, values, begin, end, d, TN_LANES);
    for (; d + 2 * TN_LANES <= head_dim; d += 2 * TN_LANES)
        value_tile(rows, 2, dtype, task, row, values, begin, end, d, TN_LANES);
    for (; d < head_dim; d += TN_LANES)
        value_tile(rows, 1, dtype, task, row, values, begin, end, d, lanes_left(head_dim - d));
}

/* ---- tiles of as many rows as there are: a function each, so that sums stay in registers ---- */

#define AT_MOST(most, rows) ((rows) < (most) ? (rows) : (most))
#define EACH_HEIGHT(function, dtype)                                                                        \
    switch (rows) {                                                                                         \
    case 1: function(1, dtype, task, row, vectors, begin, end, head_dim); return;                           \
    case 2: function(2, dtype, task, row, vectors, begin, end, head_dim); return;                           \
    case 3: function(3, dtype, task, row, vectors, begin, end, head_dim); return;                           \
    case 4: function(AT_MOST(TILE_ROWS, 4), dtype, task, row, vectors, begin, end, head_dim); return;       \
    case 5: function(AT_MOST(TILE_ROWS, 5), dtype, task, row, vectors, begin, end, head_dim); return;       \
    default: function(AT_MOST(TILE_ROWS, 6), dtype, task, row, vectors, begin, end, head_dim); return;      \
    }

typedef void (*pass_t)(int rows, rows_t *task, int row, const vectors_t *vectors, int begin, int end, int64_t head_dim);

#define PASS(name, function, dtype)                                                                       \
    static void name(int rows, rows_t *task, int row, const vectors_t *vectors, int begin, int end,       \
                     int64_t head_dim) {                                                                  \
        EACH_HEIGHT(function, dtype)                                                                      \
    }
PASS(scores_bf16, score_tile, TN_BF16)
PASS(scores_f32, score_tile, TN_F32)
PASS(values_bf16, value_tiles, TN_BF16)
PASS(values_f32, value_tiles, TN_F32)

/* A pass of `num` rows over what each sees of the chunk: together where all do, and ascending for each. */
static void tile_pass(pass_t pass, int num, rows_t *task, int row, const vectors_t *vectors, int64_t head_dim) {
    int begin = 0, end = CHUNK;
    for (int i = row; i < row + num; i++) {
        if (task->begin[i] > begin) begin = task->begin[i];
        if (task->end[i] < end) end = task->end[i];
    }
    if (begin > end) end = begin; /* nothing is seen by all */
    for (int i = row; i < row + num; i++) {
        const int until = task->end[i] < begin ? task->end[i] : begin;
        if (task->begin[i] < until) pass(1, task, i, vectors, task->begin[i], until, head_dim);
    }
    if (begin < end) pass(num, task, row, vectors, begin, end, head_dim);
    for (int i = row; i < row + num; i++) {
        const int from = task->begin[i] > end ? task->begin[i] : end;
        if (from < task->end[i]) pass(1, task, i, vectors, from, task->end[i], head_dim);
    }
}

/* The same of all rows, tile by tile. */
static void task_pass(pass_t pass, rows_t *task, const vectors_t *vectors, int64_t head_dim) {
    for (int row = 0, num; row < task->num; row += num) {
        const int left = task->num - row;
        num = left <= TILE_ROWS ? left : left < 2 * TILE_ROWS ? (left + 1) / 2 : TILE_ROWS;
        tile_pass(pass, num, task, row, vectors, head_dim);
    }
}

/* ---- exponentials ---- */

static float exp_of(float x) {
    float lanes[TN_LANES];
    vf_store(lanes, vf_exp(vf_set(x)));
    return lanes[0];
}

/* Scores [begin, end) → cap * tanh(score * scale / cap). */
static void cap_scores(float *scores, int begin, int end, float scale, float cap) {
    for (int t = begin; t < end; t += TN_LANES) {
        const int count = lanes_left(end - t);
        const vf scaled = vf_div(vf_mul(vf_load_part(scores + t, count), vf_set(scale)), vf_set(cap));
        vf_store_part(scores + t, vf_mul(vf_tanh(scaled), vf_set(cap)), count);
    }
}

/* Scores [begin, end) → exp(score * scale - largest), and 0 for the rest of the vectors; returns their sum. */
static float exponentials(float *scores, int begin, int end, float scale, float *largest) {
    const int first = begin / TN_LANES * TN_LANES, last = (end + TN_LANES - 1) / TN_LANES * TN_LANES;
    for (int t = first; t < begin; t++) scores[t] = -__builtin_inff();
    for (int t = end; t < last; t++) scores[t] = -__builtin_inff();
    vf most = vf_set(NO_SCORE);
    for (int t = first; t < last; t += TN_LANES) {
        const vf scaled = vf_mul(vf_load(scores + t), vf_set(scale));
        vf_store(scores + t, scaled);
        most = vf_max(scaled, most); /* in this order, so that a NaN is passed over here */
    }
    *largest = vf_largest(most);
    vf sum = vf_zero();
    for (int t = first; t < last; t += TN_LANES) {
        const vf power = vf_exp(vf_sub(vf_load(scores + t), vf_set(*largest)));
        vf_store(scores + t, power);
        sum = vf_add(sum, power);
    }
    return vf_sum(sum);
}

/* Adds a chunk's sums to what a row has from the chunks before. */
static void merge(rows_t *task, int row, float largest, float total, int64_t head_dim) {
    const float most = largest > task->largest[row] ? largest : task->largest[row];
    const float before = exp_of(task->largest[row] - most), now = exp_of(largest - most);
    task->largest[row] = most;
    task->total[row] = task->total[row] * before + total * now;
    const float *sums = task->sums + row * task->stride;
    float *outputs = task->outputs + row * task->stride;
    for (int64_t d = 0; d < head_dim; d += TN_LANES)
        vf_store(outputs + d, vf_fma(vf_load(sums + d), vf_set(now), vf_mul(vf_load(outputs + d), vf_set(before))));
}

/* ---- what scores know of distances ---- */

/* Scores [begin, end) of a row, of which `bias` has the distances from that of score 0 on: score * scale + bias. */
static void add_bias(float *scores, const float *bias, int begin, int end, float scale) {
    for (int t = begin; t < end; t += TN_LANES) {
        const int count = end - t < TN_LANES ? end - t : TN_LANES;
        const vf sum = vf_fma(vf_load_part(scores + t, count), vf_set(scale), vf_load_part(bias + t, count));
        vf_store_part(scores + t, sum, count);
    }
}

/* Adds to the scores [begin, end) of a query what it makes of the distances' keys, and the keys of their queries.
 * Number t has the bucket buckets[t]. Lanes and a tree for each, as for scores. */
TN_INLINE void add_distances(const sequence_t *of, const int dtype, float *scores, const void *query,
                             const vectors_t *keys, const int64_t *buckets, int begin, int end) {
    const tn_distances *distances = &of->distances;
    const int64_t stride = of->out_stride; /* of a bucket: all heads */
    for (int t = begin; t < end; t += QUAD) {
        const void *key[QUAD], *its_key[QUAD], *its_query[QUAD];
        for (int j = 0; j < QUAD; j++) {
            const int at = t + j < end ? t + j : end - 1;
            key[j] = element_at(keys->base, dtype, keys->place[at]);
            its_key[j] = element_at(distances->keys, dtype, buckets[at] * stride);
            its_query[j] = element_at(distances->queries, dtype, buckets[at] * stride);
        }
        vf sums[QUAD];
        for (int j = 0; j < QUAD; j++) sums[j] = vf_zero();
        for (int64_t d = 0; d < of->head_dim; d += TN_LANES) {
            const int count = lanes_left(of->head_dim - d);
            const vf numbers = load_elements(query, dtype, d, count);
            for (int j = 0; j < QUAD; j++) {
                sums[j] = vf_fma(numbers, load_elements(its_key[j], dtype, d, count), sums[j]);
                sums[j] = vf_fma(load_elements(key[j], dtype, d, count), load_elements(its_query[j], dtype, d, count),
                                 sums[j]);
            }
        }
        float four[QUAD];
        vf_reduce4(four, sums[0], sums[1], sums[2], sums[3], true);
        for (int j = 0; j < QUAD && t + j < end; j++) scores[t + j] += four[j];
    }
}

/* ---- chunks ---- */

/* What codes mean: times their scale, rounded to the model's dtype. */
static void expand(const sequence_t *of, void *to, const void *codes, const void *scales, const int64_t *slots,
                   int begin, int end) {
    for (int t = begin; t < end; t++) {
        const int8_t *from = (const int8_t *)codes + slots[t] * of->key_stride;
        const float scale = of->scale_dtype == TN_F32 ? ((const float *)scales)[slots[t]]
                                                      : f32_of_bf16(((const uint16_t *)scales)[slots[t]]);
        for (int64_t d = 0; d < of->head_dim; d += TN_LANES) {
            const int count = lanes_left(of->head_dim - d);
            int8_t part[TN_LANES] = {0};
            if (count < TN_LANES) memcpy(part, from + d, (size_t)count);
            const vf value = vf_mul(vf_load_i8(count < TN_LANES ? part : from + d), vf_set(scale));
            store_elements(to, of->dtype, t * of->head_dim + d, value, count);
        }
    }
}

/* Where the tokens [begin, end) of the chunk that begins with token `first` are, in slots. */
static void find_slots(const sequence_t *of, int64_t *slots, int64_t first, int begin, int end) {
    if (of->blocks == NULL) {
        for (int t = begin; t < end; t++) slots[t] = first + t;
        return;
    }
    for (int t = begin, next; t < end; t = next) {
        const int64_t block = (first + t) / of->block_size, in_block = (first + t) % of->block_size;
        const int64_t left = of->block_size - in_block, slot = of->blocks[block] * of->block_size + in_block;
        next = left < end - t ? t + (int)left : end;
        for (int i = t; i < next; i++) slots[i] = slot + (i - t);
    }
}

/* Codes of the chunk's keys or values written out into `buffer`, or where they are. */
static vectors_t vectors_of(const sequence_t *of, void *buffer, int64_t *place, const void *data, const void *scales,
                            const int64_t *slots, int begin, int end) {
    if (of->kv_dtype != TN_I8) {
        for (int t = begin; t < end; t++) place[t] = slots[t] * of->key_stride;
        return (vectors_t){data, place};
    }
    expand(of, buffer, data, scales, slots, begin, end);
    for (int t = begin; t < end; t++) place[t] = t * of->head_dim;
    return (vectors_t){buffer, place};
}

/* The row and the head, within the group, of a sequence's (row, head) pair. */
static int64_t row_of(const sequence_t *of, int64_t pair) { return pair / of->group; }
static int64_t head_of(const sequence_t *of, int64_t pair) { return pair % of->group; }

/* What the distances add to the scores of a task's rows, over keys of the chunk that begins with token `first`. What is
 * left to be multiplied with is returned: 1, or the sequence's scale. */
static float score_distances(const sequence_t *of, rows_t *task, const vectors_t *keys, int64_t first) {
    const tn_distances *distances = &of->distances;
    if (distances->bias == NULL && distances->keys == NULL) return of->scale;
    for (int row = 0; row < task->num; row++) {
        const int64_t position = row_of(of, task->pair + row); /* a text's rows are from its first token on */
        const int64_t from = first - position + distances->reach; /* the number of the chunk's first key's distance */
        float *scores = task->scores[row];
        const int begin = task->begin[row], end = task->end[row];
        if (distances->bias != NULL) {
            add_bias(scores, distances->bias + from, begin, end, of->scale);
            continue;
        }
        const void *query = element_at(of->queries, of->dtype, position * of->query_stride);
        if (of->dtype == TN_BF16)
            add_distances(of, TN_BF16, scores, query, keys, distances->buckets + from, begin, end);
        else
            add_distances(of, TN_F32, scores, query, keys, distances->buckets + from, begin, end);
    }
    return distances->bias != NULL ? 1.0f : of->scale;
}

#if TN_TILES
static tn_attend_tiles tiles_of(rows_t *task, const vectors_t *vectors, int begin, int end, int64_t head_dim) {
    return (tn_attend_tiles){
        .packed = task->packed,
        .scores = task->scores[0],
        .sums = task->sums,
        .begins = task->begin,
        .ends = task->end,
        .vectors = vectors->base,
        .place = vectors->place,
        .stride = task->stride,
        .head_dim = head_dim,
        .num_rows = task->num,
        .begin = begin,
        .end = end,
    };
}
#endif

/* The two products of all rows of a task: by tiles, or by vectors. */
static void score_rows(rows_t *task, const vectors_t *keys, int begin, int end, int64_t head_dim, int dtype) {
#if TN_TILES
    if (dtype == TN_BF16) {
        const tn_attend_tiles tiles = tiles_of(task, keys, begin, end, head_dim);
        tn_score_tiles(&tiles);
        return;
    }
#endif
    (void)begin, (void)end;
    task_pass(dtype == TN_BF16 ? scores_bf16 : scores_f32, task, keys, head_dim);
}

static void sum_values(rows_t *task, const vectors_t *values, int begin, int end, int64_t head_dim, int dtype) {
#if TN_TILES
    if (dtype == TN_BF16) {
        const tn_attend_tiles tiles = tiles_of(task, values, begin, end, head_dim);
        tn_value_tiles(&tiles);
        return;
    }
#endif
    (void)begin, (void)end;
    memset(task->sums, 0, (size_t)(task->num * task->stride) * sizeof(float));
    task_pass(dtype == TN_BF16 ? values_bf16 : values_f32, task, values, head_dim);
}

/* All rows of a task over the keys [begin, end) of the chunk that begins with token `first`. */
static void attend_chunk(const sequence_t *of, rows_t *task, int64_t first, int begin, int end) {
    _Alignas(64) float buffer[CHUNK * TN_MAX_HEAD_DIM];
    int64_t slots[CHUNK], place[CHUNK];
    float largest[TASK_ROWS], total[TASK_ROWS];
    find_slots(of, slots, first, begin, end);
    const vectors_t keys = vectors_of(of, buffer, place, of->keys, of->key_scales, slots, begin, end);
    score_rows(task, &keys, begin, end, of->head_dim, of->dtype);
    const float scale = score_distances(of, task, &keys, first);
    for (int row = 0; row < task->num; row++) {
        const int from = task->begin[row], to = task->end[row];
        if (from == to) continue;
        if (of->cap != 0.0f) cap_scores(task->scores[row], from, to, of->scale, of->cap);
        total[row] = exponentials(task->scores[row], from, to, of->cap != 0.0f ? 1.0f : scale, &largest[row]);
    }
    const vectors_t values = of->values == of->keys /* of latents: they are there */
                                 ? keys
                                 : vectors_of(of, buffer, place, of->values, of->value_scales, slots, begin, end);
    sum_values(task, &values, begin, end, of->value_dim, of->dtype);
    for (int row = 0; row < task->num; row++)
        if (task->begin[row] < task->end[row]) merge(task, row, largest[row], total[row], of->value_dim);
}

/* ---- tasks ---- */

static void load_query(const sequence_t *of, rows_t *task, int row, int64_t pair) {
    const int64_t place = row_of(of, pair) * of->query_stride + head_of(of, pair) * of->head_dim;
#if TN_BF16_DOT
    if (of->dtype == TN_BF16) {
        memcpy((uint16_t *)task->queries + row * task->stride, (const uint16_t *)of->queries + place,
               (size_t)of->head_dim * 2);
        return;
    }
#endif
    for (int64_t d = 0; d < of->head_dim; d += TN_LANES)
        vf_store(task->queries + row * task->stride + d,
                 load_elements(of->queries, of->dtype, place + d, lanes_left(of->head_dim - d)));
}

static void store_output(const sequence_t *of, const rows_t *task, int row, int64_t pair) {
    const int64_t place = row_of(of, pair) * of->out_stride + head_of(of, pair) * of->head_dim;
    float total = task->total[row], factor = 1.0f;
    if (of->sinks.data != NULL) {
        const int64_t head = of->first_head + head_of(of, pair);
        const float sink = vf_sum(load_elements(of->sinks.data, of->sinks.dtype, head, 1));
        const float largest = task->largest[row];
        const float most = sink > largest ? sink : largest;
        factor = exp_of(largest - most);
        total = total * factor + exp_of(sink - most);
    }
    for (int64_t d = 0; d < of->value_dim; d += TN_LANES) {
        const vf output = vf_mul(vf_load(task->outputs + row * task->stride + d), vf_set(factor));
        store_elements(of->out, of->dtype, place + d, vf_div(output, vf_set(total)), lanes_left(of->value_dim - d));
    }
}

/* Of the keys [first, last) that a row sees, those in the chunk that begins with `chunk`. */
static void clip(rows_t *task, int row, int64_t chunk) {
    const int64_t begin = task->first[row] - chunk, end = task->last[row] - chunk;
    task->begin[row] = begin < 0 ? 0 : begin > CHUNK ? CHUNK : (int)begin;
    task->end[row] = end > CHUNK ? CHUNK : end < task->begin[row] ? task->begin[row] : (int)end;
}

/* The keys [first, last) that the row at a position sees. */
static int64_t first_key(const sequence_t *of, int64_t position) {
    if (of->chunked && of->window) return position - position % of->window;
    const int64_t before = of->sees_all ? of->window : of->window - 1; /* of which it sees no more than these */
    return of->window && position > before ? position - before : of->least;
}
static int64_t last_key(const sequence_t *of, int64_t position) {
    if (of->most) return of->most;
    if (of->ends != NULL) return of->ends[position - of->first_position];
    if (!of->sees_all) return position + 1;
    return of->window && position + of->window < of->num_keys ? position + of->window + 1 : of->num_keys;
}

/* The pairs [pair, pair + num) of a sequence. */
static void attend(const sequence_t *of, int64_t pair, int num) {
    rows_t task;
    task.num = num;
    task.pair = pair;
    task.stride = (of->head_dim + TN_LANES - 1) / TN_LANES * TN_LANES;
    memset(task.outputs, 0, (size_t)(num * task.stride) * sizeof(float));
    for (int row = 0; row < num; row++) {
        const int64_t position = of->first_position + row_of(of, pair + row);
        task.first[row] = first_key(of, position);
        task.last[row] = last_key(of, position);
        task.largest[row] = NO_SCORE;
        task.total[row] = 0.0f;
        load_query(of, &task, row, pair + row);
    }
#if TN_TILES
    const int64_t pieces = of->dtype == TN_BF16 ? tn_pack_pieces(num, of->head_dim) : 0;
    for (int64_t piece = 0; piece < pieces; piece++)
        tn_pack(TN_WHOLE_PAIRS, task.packed, task.queries, task.stride, num, of->head_dim, piece);
#endif
    /* Later rows see no fewer keys at the end. */
    const int64_t first_position = of->first_position + row_of(of, pair);
    const int64_t last = last_key(of, of->first_position + row_of(of, pair + num - 1));
    for (int64_t chunk = first_key(of, first_position) / CHUNK * CHUNK; chunk < last; chunk += CHUNK) {
        for (int row = 0; row < num; row++) clip(&task, row, chunk);
        attend_chunk(of, &task, chunk, task.begin[0], task.end[num - 1]);
    }
    for (int row = 0; row < num; row++) store_output(of, &task, row, pair + row);
}

static int64_t tasks_of(int64_t num_pairs, int rows) { return (num_pairs + rows - 1) / rows; }

/* Task number `task`, of `rows` pairs, of one key head's pairs. */
static void run_task(const sequence_t *of, int64_t task, int64_t num_pairs, int rows) {
    const int64_t pair = task * rows, left = num_pairs - pair;
    attend(of, pair, left < rows ? (int)left : rows);
}

/* ---- stages ---- */

static sequence_t sequence_of(const tn_attention_args *args, const tn_span *span, int64_t kv_head) {
    const tn_kv *kv = args->kv;
    const int64_t group = args->num_heads / args->num_kv_heads, first_head = kv_head * group * args->head_dim;
    const int64_t parts = args->latent_rank ? 1 : 2;
    const int64_t key_place = (args->layer * parts * args->num_kv_heads + kv_head) * kv->num_slots;
    const int64_t value_place = key_place + (parts - 1) * args->num_kv_heads * kv->num_slots;
    const int64_t item = kv->dtype == TN_I8 ? 1 : element_bytes(kv->dtype);
    const int64_t scale_bytes = kv->scale == NULL ? 0 : element_bytes(kv->scale_dtype);
    return (sequence_t){
        .queries = element_at(args->queries, args->dtype, span->start * args->query_stride + first_head),
        .out = element_at(args->out, args->dtype, span->start * args->out_stride + first_head),
        .query_stride = args->query_stride,
        .out_stride = args->out_stride,
        .group = group,
        .first_position = span->context_len - span->length,
        .num_keys = span->context_len,
        .sees_all = args->bidirectional != 0,
        .chunked = args->chunked != 0,
        .ends = args->ends == NULL ? NULL : args->ends + span->start,
        .least = args->first_key,
        .most = args->last_key,
        .window = args->window,
        .keys = (const char *)kv->data + key_place * args->head_dim * item,
        .values = (const char *)kv->data + value_place * args->head_dim * item,
        .key_scales = (const char *)kv->scale + key_place * scale_bytes,
        .value_scales = (const char *)kv->scale + value_place * scale_bytes,
        .blocks = span->blocks,
        .block_size = kv->block_size,
        .key_stride = args->head_dim,
        .kv_dtype = kv->dtype,
        .scale_dtype = kv->scale_dtype,
        .head_dim = args->head_dim,
        .value_dim = args->latent_rank ? args->latent_rank : args->head_dim,
        .scale = args->scale,
        .cap = args->cap,
        .sinks = args->sinks,
        .first_head = kv_head * group,
        .dtype = args->dtype,
    };
}

static int64_t tasks_of_span(const tn_attention_args *args, const tn_span *span, int rows) {
    return tasks_of(span->length * (args->num_heads / args->num_kv_heads), rows) * args->num_kv_heads;
}

static int64_t tasks_of_spans(const tn_attention_args *args, int rows) {
    int64_t num_tasks = 0;
    for (int64_t n = 0; n < args->num_spans; n++) num_tasks += tasks_of_span(args, &args->spans[n], rows);
    return num_tasks;
}

void tn_attention_stage(const tn_attention_args *args, tn_region *region) {
    int rows = TASK_ROWS; /* fewer where threads would have none: many heads of one sequence may share a key head */
    int64_t num_tasks = tasks_of_spans(args, rows);
    while (num_tasks < region->num && rows > LEAST_ROWS) num_tasks = tasks_of_spans(args, rows /= 2);
    /* From the last one: later rows see more keys, and what takes longest is begun first. */
    int64_t span = args->num_spans, first = num_tasks; /* of the span */
    for (int64_t task; (task = num_tasks - 1 - tn_next_chunk(region)) >= 0;) {
        while (task < first) first -= tasks_of_span(args, &args->spans[--span], rows);
        const int64_t kv_head = (task - first) % args->num_kv_heads;
        const sequence_t of = sequence_of(args, &args->spans[span], kv_head);
        run_task(&of, (task - first) / args->num_kv_heads, args->spans[span].length * of.group, rows);
    }
}

static tn_distances distances_of(const tn_text_attention_args *args, int64_t head) {
    tn_distances of = args->distances;
    const int64_t place = head * args->head_dim;
    if (of.bias != NULL) of.bias += head * (2 * of.reach + 1);
    if (of.keys != NULL) of.keys = element_at(of.keys, args->dtype, place);
    if (of.queries != NULL) of.queries = element_at(of.queries, args->dtype, place);
    return of;
}

static sequence_t text_of(const tn_text_attention_args *args, int64_t text, int64_t head) {
    const int64_t hidden = args->num_heads * args->head_dim, start = args->starts[text];
    const int64_t place = start * 3 * hidden + head * args->head_dim;
    return (sequence_t){
        .queries = element_at(args->qkv, args->dtype, place),
        .out = element_at(args->out, args->dtype, start * hidden + head * args->head_dim),
        .query_stride = 3 * hidden,
        .out_stride = hidden,
        .group = 1,
        .num_keys = args->starts[text + 1] - start,
        .sees_all = true,
        .window = args->window,
        .distances = distances_of(args, head),
        .keys = element_at(args->qkv, args->dtype, place + hidden),
        .values = element_at(args->qkv, args->dtype, place + 2 * hidden),
        .key_stride = 3 * hidden,
        .kv_dtype = args->dtype,
        .head_dim = args->head_dim,
        .value_dim = args->head_dim,
        .scale = args->scale,
        .dtype = args->dtype,
    };
}

void tn_text_attention_stage(const tn_text_attention_args *args, tn_region *region) {
    int64_t text = -1, first = 0, end = 0; /* tasks of the text */
    for (int64_t task; task = tn_next_chunk(region), true;) {
        while (task >= end) {
            if (++text == args->num_texts) return;
            first = end;
            end += tasks_of(args->starts[text + 1] - args->starts[text], TASK_ROWS) * args->num_heads;
        }
        const sequence_t of = text_of(args, text, (task - first) % args->num_heads);
        run_task(&of, (task - first) / args->num_heads, of.num_keys, TASK_ROWS);
    }
}

/* ---- the exported functions ---- */

static bool takes(int dtype, int64_t head_dim) {
    return (dtype == TN_F32 || dtype == TN_BF16) && head_dim <= TN_MAX_HEAD_DIM;
}

static void attention_body(void *arg, tn_region *region, int id) {
    (void)id;
    tn_attention_stage(arg, region);
}

int tn_attention(const tn_attention_args *args) {
    if (args->size != sizeof *args || !takes(args->dtype, args->head_dim)) return TN_REFUSED;
    if (args->latent_rank < 0 || args->latent_rank > args->head_dim) return TN_REFUSED;
    if (args->chunked && args->bidirectional) return TN_REFUSED;
    if (args->first_key < 0 || (args->first_key && args->window)) return TN_REFUSED;
    const tn_kv *kv = args->kv;
    if (kv->dtype == TN_I8 ? kv->scale == NULL : kv->dtype != args->dtype) return TN_REFUSED;
    int64_t num_keys = 0;
    for (int64_t n = 0; n < args->num_spans; n++) num_keys += args->spans[n].length * args->spans[n].context_len;
    (num_keys < ALONE_KEYS ? tn_run_alone : tn_run)(attention_body, (void *)args);
    return TN_OK;
}

static void text_attention_body(void *arg, tn_region *region, int id) {
    (void)id;
    tn_text_attention_stage(arg, region);
}

int tn_text_attention(const tn_text_attention_args *args) {
    if (args->size != sizeof *args || !takes(args->dtype, args->head_dim)) return TN_REFUSED;
    const int64_t num_rows = args->starts[args->num_texts];
    (num_rows < ALONE_KEYS ? tn_run_alone : tn_run)(text_attention_body, (void *)args);
    return TN_OK;
}
