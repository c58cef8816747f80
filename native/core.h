/* The native core: every exported function, with shapes, dtypes and ownership. The only header that a caller needs.
 *
 * Conventions
 * - One function, one operation, one struct of arguments. The struct begins with its own size: a caller that was
 *   compiled or declared against another version gets TN_REFUSED and nothing is touched.
 * - Pointers are borrowed for the call. Inputs never overlap outputs. Rows are contiguous; a stride is the distance of
 *   two rows in elements.
 * - The caller has checked shapes, dtypes, bounds and alignment (elements on their own size; slabs of weights on 64
 *   bytes). C trusts it, asserts in debug builds, and never allocates.
 * - A result depends on its inputs and the instruction set only: on no number of rows, threads or chunks
 *   (docs/native.md, "Numbers").
 * - bf16 and fp16 are passed as uint16_t.
 */
#ifndef TN_CORE_H
#define TN_CORE_H

#include <stddef.h>
#include <stdint.h>

#define TN_VERSION 4
#define TN_EXPORT __attribute__((visibility("default")))

typedef enum tn_status {
    TN_OK = 0,
    TN_REFUSED = 1, /* a struct of another size, or a dtype that the function does not take */
    TN_ABORTED = 2, /* the caller's abort flag was set */
    TN_DAMAGED = 3, /* data from outside is not what its format says */
} tn_status;

typedef enum tn_dtype {
    TN_F32 = 0,
    TN_BF16 = 1,
    TN_F16 = 2,
    TN_I8 = 3,
    TN_U8 = 4,
    TN_I16 = 5,
    TN_U4 = 6, /* two a byte, in runs of 64 columns (docs/quantize.md, "The layout") */
    TN_E2M1 = 7, /* MXFP4's elements, two neighbours a byte, the first one in its low half */
    TN_E8M0 = 8, /* MXFP4's scales: 2^(byte - 127); 255 is NaN */
    TN_E4M3 = 9, /* floats of 8 bits, without infinities; 127 and 255 are NaN */
    TN_Q4_K = 10, /* ggml's blocks, as GGUF files have them (blocks.h): of 256 columns, */
    TN_Q5_K = 11,
    TN_Q6_K = 12,
    TN_Q4_1 = 13, /* and of 32 */
    TN_Q5_0 = 14,
    TN_Q5_1 = 15,
    TN_Q2_K = 16, /* of 256 again, */
    TN_Q3_K = 17,
    TN_IQ4_XS = 18,
    TN_IQ4_NL = 19, /* and of 32 */
    TN_NF4 = 20, /* codes of bitsandbytes' tables (weights.h), two neighbours a byte, the first one in its high half */
    TN_FP4 = 21,
} tn_dtype;

/* ---- the library ---- */

/* "version 3\nisa x86_64_v4\ntn_matrix 72\n...": the version, the instruction set, and the size of every struct. */
TN_EXPORT const char *tn_describe(void);

/* Once a process, before any other thread computes: asks the system for what the instruction set needs of it, which is
 * the permission to use tiles (Linux 5.16; later threads and forks inherit it). TN_REFUSED: use another library. */
TN_EXPORT int tn_start(void);

/* ---- the team (team.c) ---- */

/* How many threads compute, the calling one included, from the next call on. At least 1; until it is set, 1. */
TN_EXPORT void tn_set_threads(int32_t num_threads);

/* How many threads the next call computes with: fewer than were set while the team leaves one out. */
TN_EXPORT int32_t tn_num_threads(void);

/* ---- products (linear.c) ---- */

/* Whether products of bf16 with bf16 and with integers are fused products of fp32, one after the other of each pair, where
 * the library has the instruction for pairs: 0 until it is set. The bits are the same but for those of a NaN; on Intel's
 * processors these are faster, on AMD's that instruction is. Not while another function runs. */
TN_EXPORT void tn_set_fused_pairs(int32_t fused);

/* Weights (num_out, num_in) of a product, as they were loaded.
 *
 * Integers mean (q - zero) * scale, a scale for each group of columns; E2M1, E4M3 and codes mean their value times the
 * scale. */
typedef struct tn_matrix {
    const void *data;   /* (num_out, num_in) F32, BF16, F16, I8, E4M3; or U4, codes or E2M1, num_in / 2 bytes a row,
                         * num_in a multiple of 64 or 32; or blocks, of which num_in is a multiple */
    const void *scale;  /* (num_out / scale_rows, num_in / group_size), both rounded up, F32, BF16 or F16, of E2M1 E8M0;
                         * NULL for wider floats and blocks */
    const void *zero;   /* like scale: U8 with U4, at most 16; I16 with I8, |q - zero| <= 256. NULL: 8 or 0 */
    const void *bias;   /* (num_out,) F32, BF16 or F16; or NULL */
    int64_t num_out;
    int64_t num_in;
    int64_t group_size; /* a multiple of 32 that divides num_in (of E4M3 any), or num_in itself; of E2M1 32, of codes a
                         * multiple of 64; 0 without scales */
    int64_t scale_rows; /* of E4M3: rows that share scales. Of others 0: each has its own */
    int32_t dtype;
    int32_t scale_dtype;
    int32_t bias_dtype;
    int32_t row_step;   /* of E2M1: from one row to the next in data, scale and bias, in rows. Of others 0: adjacent */
} tn_matrix;

/* out = x @ w.T + bias: fp32 sums, rounded once where `out` is bf16. */
typedef struct tn_linear_args {
    size_t size;
    const tn_matrix *weight;
    const void *x;      /* (num_rows, num_in) F32 or BF16 */
    void *out;          /* (num_rows, num_out) F32 or BF16 */
    int64_t num_rows;
    int64_t x_stride;   /* elements */
    int64_t out_stride; /* elements */
    int32_t x_dtype;
    int32_t out_dtype;
    void *packed;       /* scratch of tn_linear_scratch_bytes, on 64 bytes; unused where that is 0 */
} tn_linear_args;

TN_EXPORT int tn_linear(const tn_linear_args *args);

/* Of the product; `packed` is not looked at. */
TN_EXPORT int64_t tn_linear_scratch_bytes(const tn_linear_args *args);

/* ---- elementwise ---- */

/* to[i] = e^from[i]: at most 1 ulp off, 0 below -104, infinity above 88.73. What attention and activations use. */
TN_EXPORT void tn_exp(const float *from, float *to, int64_t count);

/* x[i] = x[i] * scale, and then, unless cap is 0, cap * tanh(x[i] / cap): logits of models that say so. */
TN_EXPORT void tn_scale_and_cap(float *x, int64_t count, float scale, float cap);

/* ---- frames (frames.c; docs/format.md, "Frames") ---- */

#define TN_MAX_FRAME_BYTES 65536

/* Why data from outside is damaged; `loader/native/fill.py` says it in words. */
typedef enum tn_fault {
    TN_NO_FAULT = 0,
    TN_FRAME_ABSENT = 1,    /* no zstd frame begins there */
    TN_FRAME_KIND = 2,      /* it has no content size, or a window, a checksum or a dictionary */
    TN_FRAME_SIZE = 3,      /* it declares another size */
    TN_FRAME_BLOCKS = 4,    /* too many, or one of an unknown type */
    TN_FRAME_CUT = 5,       /* the bytes end within it or its padding */
    TN_FRAME_PADDING = 6,   /* not the shortest skippable frame of zeros */
    TN_FRAME_CONTENT = 7,   /* does not decode to the declared size */
    TN_FRAMES_FOLLOWED = 8, /* bytes follow the last frame */
    TN_RAW_SIZE = 9,        /* a raw plane has another size than its elements take, or lies outside of its part */
    TN_UNUSED_BITS = 10,    /* bits behind the last element are set */
    TN_EXPONENT_BITS = 11,  /* an exponent has more bits than the format */
    TN_MASK_COUNT = 12,     /* a mask has another number of values than the segment states */
    TN_TIER_COUNT = 13,     /* so have the tiers before */
    TN_ZERO_VALUE = 14,     /* a value of a sparse tensor is a zero */
} tn_fault;

/* Zstd frames that hold `frame_bytes` each, but for a shorter last one. They are checked: nothing outside `src` is read
 * and nothing outside `out` written, whatever the frames are. Of damaged ones `out` is undefined. */
typedef struct tn_decode_frames_args {
    size_t size;
    const uint8_t *src;  /* (src_bytes,): frames with their padding, and whatever follows */
    uint8_t *out;        /* (out_bytes,); NULL: headers and paddings are checked, and nothing is decoded */
    int64_t *extents;    /* written: (num_frames, 2), where each begins and ends in `src`, without padding; NULL: unused */
    int64_t src_bytes;
    int64_t out_bytes;
    int64_t frame_bytes; /* 1 to TN_MAX_FRAME_BYTES */
    int64_t end;         /* written: of the last frame's padding in `src`; of TN_DAMAGED where the fault is */
    int64_t fault;       /* written: a tn_fault */
} tn_decode_frames_args;

TN_EXPORT int tn_decode_frames(tn_decode_frames_args *args);

/* The reverse (huffman_encode.c), for packing: frames of literals alone, the same on every machine. */
typedef struct tn_encode_frames_args {
    size_t size;
    const uint8_t *src;  /* (src_bytes,) */
    uint8_t *out;        /* (out_bytes,), at least tn_encoded_bound */
    int64_t src_bytes;
    int64_t out_bytes;
    int64_t frame_bytes; /* 1 to TN_MAX_FRAME_BYTES: what each frame holds, but for a shorter last one */
    int64_t end;         /* written: the bytes of all frames, with their padding */
} tn_encode_frames_args;

TN_EXPORT int64_t tn_encoded_bound(int64_t src_bytes, int64_t frame_bytes);
TN_EXPORT int tn_encode_frames(tn_encode_frames_args *args);

/* ---- filling parts (fill.c; docs/format.md, "Encodings") ---- */

/* A plane of a segment: bytes [offset, offset + size) of its part. */
typedef struct tn_fill_plane {
    int64_t offset;
    int64_t size;
    uint8_t *out;     /* of TN_FILL_PLANES: the plane's decoded bytes; NULL: it is left out */
    int32_t bits;     /* of an element: 8, 4, 2 or 1; 0: the whole element */
    int32_t is_coded; /* 1: zstd frames of `TN_FRAME_ELEMENTS` elements each; 0: as it is */
} tn_fill_plane;

#define TN_FRAME_ELEMENTS 65536

/* What becomes of a segment's planes. */
typedef enum tn_fill_kind {
    TN_FILL_WHOLE = 0,       /* one raw plane: the elements */
    TN_FILL_BYTES = 1,       /* a plane for each byte of an element, little end first */
    TN_FILL_FLOATS = 2,      /* one tier of floats */
    TN_FILL_DIFFERENCES = 3, /* zigzag differences, added to the base's elements */
    TN_FILL_PLANES = 4,      /* nothing: each goes to its `out`, checked */
} tn_fill_kind;

/* Elements that follow one another in a tensor. */
typedef struct tn_fill_segment {
    void *out;                    /* (count,) elements, aligned to their size */
    const void *base;             /* of differences: the elements that they are added to; NULL: those of `out` */
    const tn_fill_plane *planes;  /* (num_planes,) in the format's order; a sparse first tier has two more in front: */
                                  /* its mask, and of floats its signs */
    int64_t count;                /* elements; of a sparse segment up to 2^24 */
    int64_t num_values;           /* of a sparse segment, elements that are not zero; -1: it is dense */
    int32_t kind;
    int32_t num_planes;
    int32_t element_bytes;        /* 1, 2, 4 or 8 */
    int32_t is_first;             /* 1: the first tier of the encoding; a later one needs what those before wrote */
    int32_t is_last;              /* 1: the last tier */
    int32_t exponent_bits;        /* of floats */
    int32_t mantissa_bits;        /* likewise */
    int32_t known_bits;           /* of the mantissa, with this tier */
} tn_fill_segment;

/* One verified part, or a piece of one, into the elements or planes of its segments. Takes no memory, and writes nothing
 * outside of the `out`s, whatever the part holds. After TN_DAMAGED these are undefined. */
typedef struct tn_fill_args {
    size_t size;
    const uint8_t *stored;           /* (stored_bytes,): the whole part */
    const tn_fill_segment *segments; /* (num_segments,) */
    uint8_t *scratch;                /* (scratch_bytes,), aligned to 64 bytes */
    int64_t stored_bytes;
    int64_t num_segments;
    int64_t scratch_bytes;           /* TN_FILL_SCRATCH_BYTES, and with sparse segments TN_FILL_SPARSE_BYTES */
    int64_t segment;                 /* written, of TN_DAMAGED: the segment's number, */
    int64_t plane;                   /* and its plane's; -1: no single one is at fault */
    int64_t at;                      /* and the byte in that plane */
    int64_t fault;                   /* a tn_fault */
} tn_fill_args;

#define TN_FILL_SCRATCH_BYTES (8 * TN_FRAME_ELEMENTS)
#define TN_FILL_SPARSE_BYTES (TN_FILL_SCRATCH_BYTES + 8 * TN_FRAME_ELEMENTS + 2 * (1 << 21))

TN_EXPORT int tn_fill_part(tn_fill_args *args);

/* ---- walking parts (walk.c), for devices that verify, decode and merge them ---- */

/* A part's image begins with the part as it is stored; offsets in what follows are from its first byte. The kernels in
 * `loader/device/kernels` read these three. */

/* A frame of a plane, to be decoded to `out`; of a raw plane, which lies there, `coded_bytes` is 0. Bytes from
 * `check_from` on have no bit of the second byte of `masks`, those before none of the first. */
typedef struct tn_coded_frame {
    uint32_t coded, coded_bytes;
    uint32_t out, out_bytes;
    uint32_t check_from, masks;
} tn_coded_frame;

/* The elements of a frame, and where each plane has its bits of them. */
typedef struct tn_merged_frame {
    uint64_t out; /* of the first element, in the weights */
    uint32_t count, unused;
    uint32_t planes[8];
} tn_merged_frame;

/* Bytes that are weights as they are. */
typedef struct tn_copied_bytes {
    uint64_t out;
    uint32_t from, num_bytes;
} tn_copied_bytes;

typedef struct tn_walk_plane {
    int64_t offset; /* in the part */
    int64_t size;
    int64_t room;   /* where its decoded bytes go; unused where it is raw */
    int32_t bits;   /* of an element: 8, 4, 2 or 1; 0: the whole element */
    int32_t is_coded;
} tn_walk_plane;

/* Elements that follow one another in a tensor; never sparse ones or differences. */
typedef struct tn_walk_segment {
    void *entries;                /* written: tn_merged_frame, one for each TN_FRAME_ELEMENTS elements, or the fewer */
                                  /* that are left; of a flat one a single tn_copied_bytes */
    const tn_walk_plane *planes;  /* (num_planes,) */
    int64_t out;                  /* where its elements go, in the weights */
    int64_t count;
    int32_t num_planes;
    int32_t element_bytes;
    int32_t exponent_bits;        /* that bytes of the first plane may have, of the first tier of floats; else 8 */
    int32_t is_flat;              /* 1: its one plane is its elements */
} tn_walk_segment;

/* Nothing is decoded, and the bytes may be any. TN_DAMAGED: they are not what the manifest says, or have frames with
 * sequences; the host looks then. */
typedef struct tn_walk_args {
    size_t size;
    const uint8_t *stored;           /* (stored_bytes,): the part */
    const tn_walk_segment *segments; /* (num_segments,) */
    tn_coded_frame *frames;          /* written: (num_frames,), those of coded planes and those with bits to check */
    int64_t stored_bytes;
    int64_t num_segments;
    int64_t num_frames;              /* that the manifest promises */
} tn_walk_args;

TN_EXPORT int tn_walk_part(const tn_walk_args *args);

/* ---- splitting floats (split.c), for packing ---- */

#define TN_MAX_SPLIT_PLANES 16 /* of all tiers */

/* Some bits of each word: those of `mask` behind `mantissa_down` bits, and of `sign` behind `sign_down`. */
typedef struct tn_split_plane {
    uint8_t *out;
    int64_t out_bytes; /* at least the plane's; coded: at least tn_encoded_bound(the plane's, a frame's) */
    int64_t end;       /* written: where its bytes end in `out` */
    uint32_t mask;
    uint32_t sign;
    int32_t mantissa_down;
    int32_t sign_down;
    int32_t bits;      /* of an element: 8, 4, 2 or 1 */
    int32_t is_coded;  /* 1: each frame as tn_encode_frames makes it, from the cache */
} tn_split_plane;

/* Floats into planes of all tiers, a frame of each after another. */
typedef struct tn_split_args {
    size_t size;
    const void *words; /* (count,) of `word_bytes` */
    tn_split_plane *planes;
    int64_t count;
    int32_t num_planes;
    int32_t word_bytes; /* 2 or 4 */
} tn_split_args;

TN_EXPORT int tn_split(const tn_split_args *args);

/* A vector of weights: of a norm. */
typedef struct tn_vector {
    const void *data; /* F32, BF16 or F16; NULL: there is none */
    int32_t dtype;
    int32_t reserved; /* 0 */
} tn_vector;

/* ---- rows (rows.c): each row by itself; `dtype` is F32 or BF16, of all rows ---- */

typedef enum tn_activation {
    TN_SILU = 0,
    TN_GELU = 1,
    TN_GELU_TANH = 2,
    TN_RELU = 3,
    TN_TANH = 4,
    TN_RELU2 = 5,      /* the square of ReLU */
    TN_GELU_QUICK = 6, /* x / (1 + e^-1.702x) */
} tn_activation;

/* The rows of some tokens, rounded once. */
typedef struct tn_embed_args {
    size_t size;
    const void *table;     /* (vocab, num_columns) F32, BF16, F16, I8 or blocks */
    const void *scale;     /* (vocab, num_columns / group_size) F32, BF16 or F16, of rows of I8; else NULL */
    const int64_t *tokens; /* (num_rows,) below vocab */
    void *out;             /* (num_rows, num_columns) */
    int64_t num_rows;
    int64_t num_columns;
    int32_t table_dtype;
    int32_t scale_dtype;
    int32_t dtype;
    int32_t group_size;    /* columns that share a scale: a multiple of 32 that divides num_columns, or all of them */
    float factor;          /* unless it is 1, rows are multiplied with it once they are rounded, and rounded again */
    int32_t reserved;      /* 0 */
} tn_embed_args;

TN_EXPORT int tn_embed(const tn_embed_args *args);

/* x += more, rounded; and then times `factor`, rounded again, unless that is 1. */
typedef struct tn_add_args {
    size_t size;
    void *x;             /* (num_rows, num_columns) */
    const void *more;    /* likewise, or one row for all */
    int64_t num_rows;
    int64_t num_columns;
    int64_t more_stride; /* elements, of rows; 0: one row */
    int32_t dtype;
    float factor;
} tn_add_args;

TN_EXPORT int tn_add(const tn_add_args *args);

/* Kinds of norms without a bias: x / sqrt(mean(x^2) + eps), times the weight, rounded. */
typedef enum tn_norm_kind {
    TN_RMS = 0,          /* the quotient and the weight are rounded to `dtype` first */
    TN_RMS_WIDE = 1,     /* neither is */
    TN_RMS_PLUS_ONE = 2, /* neither is, and 1 + weight takes the weight's place */
    TN_LAYER = 3,        /* neither is, and x - mean(x) takes the place of x */
    TN_LAYER_PLUS_ONE = 4, /* likewise with 1 + weight; there is a bias */
} tn_norm_kind;

/* Without a bias a norm of one of these kinds. With one the layer norm: (x - mean) / sqrt(variance + eps) * weight + bias, rounded once,
 * of weights that are rounded to `dtype` first; 1 + weight of TN_LAYER_PLUS_ONE. */
typedef struct tn_norm_args {
    size_t size;
    const void *x; /* (num_rows, num_columns) */
    void *out;     /* likewise; may be x */
    tn_vector weight;
    tn_vector bias;
    int64_t num_rows;
    int64_t num_columns;
    float eps;
    int32_t dtype;
    int32_t kind;     /* tn_norm_kind */
    float factor;     /* unless it is 1, x is multiplied with it first, and rounded */
} tn_norm_args;

TN_EXPORT int tn_norm(const tn_norm_args *args);

/* activation(gate), rounded, times up, rounded; without `up` the former. */
typedef struct tn_activate_args {
    size_t size;
    const void *gate;   /* (num_rows, num_columns) */
    const void *up;     /* likewise, or NULL */
    void *out;          /* likewise; may be gate or up */
    int64_t num_rows;
    int64_t num_columns;
    int64_t in_stride;  /* elements, of gate and up */
    int64_t out_stride; /* elements */
    int32_t activation;
    int32_t dtype;
} tn_activate_args;

TN_EXPORT int tn_activate(const tn_activate_args *args);

/* ---- keys and values (heads.c) ---- */

/* A pool of keys and values, cut into blocks of slots. */
typedef struct tn_kv {
    void *data;         /* (num_layers, 2, num_kv_heads, num_slots, head_dim) F32, BF16 or I8; of latents (num_layers, 1, ...) */
    void *scale;        /* (num_layers, 2, num_kv_heads, num_slots) F32 or BF16, of I8; else NULL */
    int64_t num_slots;
    int64_t block_size; /* slots; divides num_slots */
    int32_t dtype;
    int32_t scale_dtype;
} tn_kv;

/* Turns a step's queries and keys, after their norms where there are some, and puts keys and values into the pool. */
typedef struct tn_heads_args {
    size_t size;
    const tn_kv *kv;
    void *heads;            /* (num_rows, num_heads + 2 * num_kv_heads, head_dim): queries, keys, values; with
                             * keys_are_values without these. Changed. */
    const float *turns;     /* (positions, rotary_dim): cosines, then sines, rounded to `dtype` unless wide_turns; NULL:
                             * nothing is turned */
    const int64_t *turn;    /* (num_rows,) the row of `turns` that each row takes */
    const int64_t *slots;   /* (num_rows,) below num_slots, no two alike */
    const float *query_scales; /* (num_rows,) or NULL: what a row's queries are multiplied with at last */
    tn_vector query_norm;   /* (head_dim,), or with joint_norms of all heads */
    tn_vector key_norm;
    tn_vector value_norm;   /* (head_dim,) */
    int64_t layer;
    int64_t num_rows;
    int64_t num_heads;
    int64_t num_kv_heads;   /* 0: there are queries alone */
    int64_t head_dim;       /* at most TN_MAX_HEAD_DIM */
    int64_t rotary_dim;     /* even, at most head_dim */
    float norm_eps;
    int32_t dtype;          /* F32 or BF16 */
    int32_t norm;           /* tn_norm_kind */
    int32_t joint_norms;    /* all heads of a row are normalised as one */
    int32_t late_norms;     /* heads are normalised once they are turned; not with joint_norms */
    int32_t wide_turns;     /* turned in fp32, rounded once; otherwise each product is rounded */
    int32_t interleaved;    /* number 2 i turns with 2 i + 1; otherwise number i with i + rotary_dim / 2 */
    int32_t keys_are_values; /* values are keys before their norm */
} tn_heads_args;

TN_EXPORT int tn_write_heads(const tn_heads_args *args);

/* ---- attention (attention.c) ---- */

#define TN_MAX_HEAD_DIM 576 /* a multiple of 32 */

/* Rows [start, start + length) of a step: the newest `length` tokens of a sequence of `context_len`. */
typedef struct tn_span {
    int64_t start;
    int64_t length;
    int64_t context_len;
    const int64_t *blocks; /* token t lies in block blocks[t / block_size] of the pool */
    float *state;          /* of models with delta nets or Mamba-2 layers: read unless the span begins its sequence, and written */
    const struct tn_save *saves; /* ascending: copies of the state in between */
    int64_t num_saves;
} tn_span;

/* A copy of a span's state. */
typedef struct tn_save {
    int64_t num_rows; /* after this number of the span's rows */
    float *state;
} tn_save;

/* Each row's queries over its sequence's keys, up to its own, to its end or all; num_kv_heads divides num_heads. */
typedef struct tn_attention_args {
    size_t size;
    const tn_kv *kv;      /* holds the rows' own keys and values already */
    const tn_span *spans; /* (num_spans,) in the order of their rows */
    const void *queries;  /* (rows, num_heads, head_dim) in `dtype` */
    void *out;            /* likewise */
    int64_t num_spans;
    int64_t query_stride; /* elements, of rows */
    int64_t out_stride;   /* likewise */
    int64_t layer;
    int64_t window;       /* tokens that a row sees, its own included; with bidirectional to each side of its own; 0: all */
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;     /* at most TN_MAX_HEAD_DIM */
    int64_t latent_rank;  /* values are this many first numbers of their keys, and so are a head's in `out`; 0: the pool has
                           * values of their own */
    float scale;          /* of scores */
    int32_t dtype;        /* F32 or BF16 */
    float cap;            /* scaled scores s become cap * tanh(s / cap); 0: they do not */
    int32_t bidirectional; /* rows see keys behind their own, too */
    tn_vector sinks;      /* (num_heads,) or none: one more score of each head, of a key without a value */
    const int64_t *ends;  /* (rows,) or NULL: a row sees its sequence's tokens before this one, which is behind its own,
                           * at most the context's length, and never before an earlier row's; a window ends there, too */
    int32_t chunked;      /* a row sees those of its window that have its position divided by the window's size; not with
                           * bidirectional */
    int32_t reserved;     /* 0 */
    int64_t first_key;    /* no row sees those before it */
    int64_t last_key;     /* every row sees the keys [first_key, last_key); 0: as above */
} tn_attention_args;

TN_EXPORT int tn_attention(const tn_attention_args *args);

/* What scores know of the distance of two rows: key - query, from -reach to reach, is number distance + reach.
 *
 * With `bias` a score is query * key * scale + bias. With `keys` it is (query * key + query * keys[bucket] +
 * queries[bucket] * key) * scale, of the bucket of their distance. NULLs: a score depends on no distance. */
typedef struct tn_distances {
    const float *bias;      /* (num_heads, 2 * reach + 1) */
    const void *keys;       /* (buckets, num_heads, head_dim) in the rows' dtype */
    const void *queries;    /* likewise */
    const int64_t *buckets; /* (2 * reach + 1,) */
    int64_t reach;          /* at least the longest text's rows, less one */
} tn_distances;

/* Every row of a text over those rows of the same text that are in its window. */
typedef struct tn_text_attention_args {
    size_t size;
    const void *qkv;       /* (rows, 3, num_heads, head_dim) in `dtype`: queries, keys, values */
    void *out;             /* (rows, num_heads, head_dim) */
    const int64_t *starts; /* (num_texts + 1,): text i is rows [starts[i], starts[i + 1]) */
    tn_distances distances;
    int64_t num_texts;
    int64_t num_heads;
    int64_t head_dim;      /* at most TN_MAX_HEAD_DIM */
    int64_t window;        /* rows to each side that a row sees; 0: all */
    float scale;
    int32_t dtype;         /* F32 or BF16 */
} tn_text_attention_args;

TN_EXPORT int tn_text_attention(const tn_text_attention_args *args);

/* ---- decoders (decoder.c) ---- */

/* One matrix of a projection. */
typedef struct tn_part {
    tn_matrix matrix;
    const int64_t *columns; /* (num_in,): x[:, columns] takes the place of x; NULL: x as it is */
} tn_part;

/* A product with matrices of the same input, whose outputs lie side by side. */
typedef struct tn_projection {
    const tn_part *parts;
    int64_t num_parts;
    int64_t num_in;
    int64_t num_out; /* of all parts together */
    void *inputs;    /* (num_rows, num_in): gets what a step's product takes; or NULL. Not of experts, routers or latents' value_up. */
} tn_projection;

/* What turns a layer's queries and keys. */
typedef enum tn_rotary {
    TN_ROTARY_MAIN = 0,
    TN_ROTARY_LOCAL = 1, /* local_turns */
    TN_ROTARY_NONE = 2,
} tn_rotary;

#define TN_MAX_EXPERTS 1024

/* One expert of a mixture. Its parts have no orders of columns of their own. */
typedef struct tn_expert {
    tn_projection gate_up; /* to gate, then up */
    tn_projection down;
} tn_expert;

#define TN_MAX_CONVOLUTION 16
#define TN_MAX_DELTA_KEY 256
#define TN_MAX_MAMBA_STATE 256
#define TN_MAX_STREAMS 4

/* A layer attends, or convolves: it has a convolution's taps then, `qkv` is to the thirds b, c and x of a row, and
 * `output` takes c * convolution(b * x). Of a model with latents `qkv` is to the inputs of `query_up`, or to query heads
 * where there is none, and then to a latent and a key that is turned (latent.h). Or it is a gated delta net
 * (delta_net.c) and has `delta_taps`: `qkv` is to queries, keys and values, whose channels the taps convolve, to gates,
 * and to a beta and a decay of each value head. Or it is a Mamba-2 layer (mamba.c) and has `mamba_taps`: `qkv` is to
 * gates, to values, keys and queries, whose channels the taps convolve, and to a time step of each head. */
typedef struct tn_decoder_layer {
    tn_vector attention_norm;        /* (hidden_size,) or none */
    tn_vector query_norm;            /* (head_dim,), or with joint_norms of all heads; of latents (query_rank,); or none */
    tn_vector key_norm;              /* likewise, of latents (latent_rank,) */
    tn_vector attention_output_norm; /* (hidden_size,) or none: of what attention adds to x */
    tn_vector mlp_norm;              /* (hidden_size,) or none */
    tn_vector mlp_output_norm;       /* likewise */
    tn_vector attention_norm_bias;   /* (hidden_size,) or none, of layer norms */
    tn_vector mlp_norm_bias;
    tn_vector attention_inner_norm;  /* (columns of `output`,) or none: of its input */
    tn_vector mlp_inner_norm;        /* (columns of `down`,) or none, likewise; not in layers with a mixture */
    tn_projection qkv;               /* to query heads, key heads, value heads; the last, or both, may be missing; or of
                                      * no parts: nothing attends */
    tn_projection query_up;          /* of latents: to query heads of plain_dim + rotary_dim numbers; or of no parts */
    tn_projection key_up;            /* likewise: (num_heads * latent_rank, plain_dim), what queries are multiplied with */
    tn_projection value_up;          /* likewise: (num_heads * (plain_dim + value_dim), latent_rank); the first plain_dim rows
                                      * of a head are not read */
    tn_projection output;
    tn_projection gate_up;           /* to gate, then up, or with `plain_mlp` to up alone; in layers with a mixture the
                                        shared expert's, or of no parts */
    tn_projection down;
    tn_projection router;            /* to the experts' scores, in layers with a mixture */
    tn_projection shared_gate;       /* to one number, with whose sigmoid the shared expert's output is multiplied; or of
                                      * no parts */
    tn_projection mamba_in;          /* of a Mamba-2 layer, in place of attention or parallel to it: to gates, values, keys,
                                      * queries and time steps; or of no parts */
    tn_projection mamba_out;
    tn_vector correction;            /* (num_experts,) or none: added to scores to choose, and not to weights */
    tn_vector router_norm;           /* (hidden_size,) or none, with which experts join the MLP: of x for the router, */
    tn_vector expert_norm;           /* of x for the experts, */
    tn_vector expert_output_norm;    /* of their output, */
    tn_vector shared_output_norm;    /* and of the MLP's, before they are added */
    tn_vector expert_factors;        /* (num_experts,) or none: what weights are multiplied with at last */
    const tn_expert *experts;        /* (num_experts,) or NULL */
    tn_vector sinks;                 /* as in tn_attention_args */
    tn_vector convolution;           /* (hidden_size, convolution_size) taps, that of a row's own token last; or none */
    tn_vector convolution_bias;      /* (hidden_size,) or none */
    tn_vector value_norm;            /* (head_dim,) or none */
    tn_projection input_gate;        /* to layer_input_size numbers; or of no parts: the layer has no inputs of its own */
    tn_projection input_up;          /* x += norm(input_up(activation(input_gate(x)) * inputs)), behind the MLP */
    tn_vector input_norm;            /* (hidden_size,) */
    tn_vector scalar;                /* (1,) or none: x is multiplied with it at the layer's end */
    tn_projection laurel_down;       /* with laurel_rank, to as many numbers of attention's input y */
    tn_projection laurel_up;         /* x becomes (x + attention(y) + y + norm(laurel_up(laurel_down(y)))) / sqrt(2) then */
    tn_vector laurel_norm;           /* (hidden_size,) */
    tn_vector stream_norm;           /* (hidden_size,), with num_streams (altup.h), */
    tn_vector stream_router;         /* (num_streams, hidden_size), */
    tn_vector stream_predictions;    /* (num_streams * num_streams, num_streams), */
    tn_vector stream_corrections;    /* (num_streams, num_streams), */
    tn_vector stream_scale;          /* (hidden_size,) or none: of what the layer's inputs are multiplied with */
    int64_t num_kv_heads;            /* of attention */
    int64_t head_dim;                /* likewise */
    int64_t pool;                    /* number of the pool with its keys and values */
    int64_t kv_layer;                /* that pool's layer with them; a convolution's b * x is in those from
                                      * it on, (2 * num_kv_heads * head_dim) numbers each */
    tn_vector delta_taps;            /* (queries, keys and values of all heads, delta_convolution_size); or none */
    tn_vector delta_log;             /* (delta_value_heads,) each */
    tn_vector delta_bias;
    tn_vector delta_norm;            /* (delta_value_size,) */
    tn_vector mamba_taps;            /* (values of all heads, keys and queries of all groups, mamba_convolution_size); or none */
    tn_vector mamba_taps_bias;       /* one for each of these channels, or none */
    tn_vector mamba_log;             /* (mamba_heads,) each: of the speed of decay, */
    tn_vector mamba_step_bias;       /* of time steps, */
    tn_vector mamba_skip;            /* what values are multiplied with that are added to outputs */
    tn_vector mamba_norm;            /* (mamba_heads * mamba_head_dim,), or none */
    int64_t state_first;             /* number of a state at which this layer's part begins: (delta_convolution_size - 1,
                                      * channels) inputs, then (delta_value_heads, delta_key_size, delta_value_size); of
                                      * Mamba-2 likewise, then (mamba_heads, mamba_state_size, mamba_head_dim) */
    int64_t window;                  /* 0: all */
    int32_t rotary;                  /* tn_rotary */
    int32_t scales_queries;          /* by the step's query_scales */
    int32_t reads_keys;              /* of an earlier layer: `qkv` is to queries alone, and kv_layer is that layer's */
    int32_t keys_are_values;         /* before their norm; `qkv` is to queries and keys alone */
    int32_t cuts_gates;              /* an MLP's gates are less their mean and `gate_cut` of their standard deviations, */
    float gate_cut;                  /* and at least 0, before the activation */
    tn_vector cross_norm;            /* (hidden_size,), with source_len: x += output(attention(query(norm(x)))) over the */
    tn_vector cross_norm_bias;       /* sources, between attention and MLP */
    tn_projection cross_query;       /* likewise; or of no parts */
    tn_projection cross_keys;        /* of a source, to its keys and values */
    tn_projection cross_output;
} tn_decoder_layer;

/* Where `qkv` of a delta net has the numbers of each head. */
typedef enum tn_delta_order {
    TN_DELTA_APART = 0,   /* all queries, keys, values, gates, betas, decays */
    TN_DELTA_GROUPED = 1, /* queries, keys, values and gates of each key head, then betas and decays of each */
    TN_DELTA_SPLIT = 2,   /* all queries, keys, values, gates, then betas and decays of each key head */
    TN_DELTA_TILED = 3,   /* as apart; value head v is of key head v % delta_key_heads, not of one of its neighbours' */
} tn_delta_order;

typedef struct tn_decoder {
    const tn_decoder_layer *layers; /* those of a call must be filled in */
    int64_t hidden_size;
    int64_t intermediate_size;      /* the most of any layer */
    int64_t num_heads;
    int64_t num_kv_heads;           /* likewise */
    int64_t head_dim;               /* likewise */
    int64_t rotary_dim;             /* of the main turns */
    int64_t local_rotary_dim;
    int64_t num_layers;
    int64_t layer_input_size;       /* numbers of each layer's own inputs; 0: there are none */
    int64_t permuted_size;          /* the most inputs that one projection takes in orders of their parts' own; 0: none */
    int64_t num_experts;            /* of a mixture, at most TN_MAX_EXPERTS; 0: there is none */
    int64_t num_experts_used;       /* by each row: those with the highest scores */
    int64_t expert_size;            /* intermediate size of each */
    int64_t shared_size;            /* of the shared expert, or the MLP that experts join, whose output is added to the
                                     * others'; 0: there is none */
    int64_t num_expert_groups;      /* equal runs of experts, at least 1 */
    int64_t num_expert_groups_used; /* by each row: with the highest expert's score, or two highest with corrections */
    int64_t latent_rank;            /* numbers of a token's latent, which has head_dim with its rotary key; 0: there is none */
    int64_t query_rank;             /* of latents: inputs of query_up; 0: there is none */
    int64_t plain_dim;              /* likewise: numbers of a query head before those that are turned */
    int64_t value_dim;              /* likewise: of an output head */
    int64_t convolution_size;       /* tokens that a convolution sees, at most TN_MAX_CONVOLUTION; 0: no layer has one */
    int64_t delta_key_heads;        /* of delta nets; 0: no layer has one */
    int64_t delta_value_heads;      /* a multiple of these */
    int64_t delta_key_size;         /* of a head: a multiple of 4, at most TN_MAX_DELTA_KEY */
    int64_t delta_value_size;
    int64_t delta_convolution_size; /* tokens that its convolution sees, at most TN_MAX_CONVOLUTION */
    int64_t delta_order;            /* one of TN_DELTA_…: where `qkv` has the numbers of each head */
    int64_t mamba_heads;            /* of Mamba-2 layers; 0: no layer is one */
    int64_t mamba_groups;           /* equal runs of heads that share keys and queries, and a norm */
    int64_t mamba_head_dim;
    int64_t mamba_state_size;       /* of keys and queries: a multiple of 4, at most TN_MAX_MAMBA_STATE */
    int64_t mamba_convolution_size; /* tokens that its convolution sees, at most TN_MAX_CONVOLUTION */
    int64_t laurel_rank;            /* of a product next to attention, in layers with both parts; 0: there is none. Like the
                                     * next not of parallel layers, nor with mixtures or Mamba-2 */
    int64_t num_streams;            /* of x (altup.h), at most TN_MAX_STREAMS, in layers with both parts and inputs of their
                                     * own, which are added to all but the first; 0: x is one */
    int64_t active_stream;          /* the one that layers compute */
    float norm_eps;
    float attention_scale;
    float score_cap;                /* as in tn_attention_args */
    float residual_scale;           /* unless it is 1, what attention adds is multiplied with it, and rounded */
    int32_t activation;
    int32_t dtype;                  /* of rows: F32 or BF16 */
    int32_t plain_mlp;              /* down(activation(up(y))): no gate */
    int32_t norm;                   /* tn_norm_kind, of all norms */
    int32_t joint_norms;            /* as in tn_heads_args */
    int32_t late_norms;             /* likewise */
    int32_t wide_turns;             /* likewise */
    int32_t interleaved;            /* likewise */
    int32_t parallel;               /* the MLP takes what attention takes, or the mlp_norm of what attention's norm takes */
    int32_t expert_weights_sum_to_1; /* otherwise they are shares of all experts */
    int32_t expert_weights_rounded; /* to `dtype` */
    float swiglu_alpha;             /* experts compute g / (1 + e^(-alpha * g)) * (u + 1), rounded once, of */
    float swiglu_limit;             /* g = min(gate, limit) and u = up clipped to +-limit; 0: the activation */
    int32_t expert_sigmoid;         /* shares are sigmoids of scores, one by one; otherwise their softmax */
    int32_t expert_scores_wide;     /* scores are fp32; otherwise rounded to `dtype` */
    float expert_sum_eps;           /* added to the sum that weights are divided by */
    float expert_factor;            /* of weights, behind that */
    int32_t bidirectional;          /* as in tn_attention_args: a step has all tokens of its sequences */
    float latent_norm_eps;          /* of the norms of latents and of query_up's inputs */
    int32_t gated_attention;        /* `qkv` makes a gate behind each query head; outputs are times its sigmoid */
    int32_t interleaved_qkv;        /* `qkv` makes each head's query, key and value in turn; num_kv_heads is num_heads */
    int32_t rounds_inputs;          /* of layers' projections to 8 bits, a row's largest size being 127; there are input norms,
                                     * and no mixtures */
    int32_t chunked_windows;        /* as in tn_attention_args */
    int32_t experts_weigh_inputs;   /* weights are multiplied with experts' inputs, rounded, not with their outputs */
    float mlp_residual_scale;       /* as residual_scale, of what the MLP adds */
    float gate_scale;               /* likewise of an MLP's gates, before the activation; 1 with mixtures */
    float attention_output_scale;   /* likewise of outputs of attention that has Mamba-2 parallel to it, */
    float mamba_output_scale;       /* and of that Mamba-2's */
    float mamba_scales[5];          /* likewise of what `mamba_in` makes: gates, values, keys, queries, time steps */
    int32_t ends_in_windows;        /* `ends` are those of layers with a window alone */
    int64_t source_len;             /* each sequence's first tokens, whose keys and values are made of an encoder's rows, by
                                     * TN_SOURCES, where others have their own; attention itself sees those behind them; 0: none */
} tn_decoder;

/* A step can leave a layer with a mixture after its router, so that only the chosen experts need to be there. What the
 * two halves make together is what the whole layer makes, bit for bit: the second one computes the router again. */
typedef enum tn_half {
    TN_WHOLE_LAYERS = 0,
    TN_UP_TO_ROUTER = 1,  /* of one layer with a mixture: keys, values, attention, and `chosen`; reads no expert */
    TN_FROM_ROUTER_ON = 2, /* the rest of that layer; reads the experts that are chosen */
    TN_SOURCES = 3,       /* of rows that are an encoder's, which stay: their keys and values in each of the layers */
} tn_half;

/* Layers [first, end) of a step: writes its keys and values, and then attends. */
typedef struct tn_decoder_step_args {
    size_t size;
    const tn_decoder *model;
    const tn_kv *kv;          /* (pools,) with the same blocks */
    const tn_span *spans;
    const float *turns;       /* as in tn_heads_args */
    const float *local_turns; /* likewise, of layers that say so */
    const int64_t *turn;      /* (num_rows,) */
    const int64_t *slots;     /* (num_rows,) */
    void *x;                  /* (num_rows, hidden_size): changed to what comes out of the last of the layers; with
                               * num_streams (num_rows, num_streams, hidden_size) */
    void *scratch;            /* on 64 bytes */
    const int64_t *ends;      /* as in tn_attention_args */
    int64_t *chosen;          /* with TN_UP_TO_ROUTER: gets (num_rows, num_experts_used), ascending; else NULL */
    const float *query_scales; /* as in tn_heads_args, of layers that say so */
    const void *layer_inputs; /* (num_rows, num_layers, layer_input_size), where layers have inputs */
    void *cross_queries;      /* gets (end - first, num_rows, num_heads * head_dim): the queries of the attention over the
                               * sources, with source_len; or NULL */
    int64_t num_spans;
    int64_t num_rows;
    int64_t first;
    int64_t end;
    int32_t half;             /* tn_half */
    int32_t reserved;         /* 0 */
} tn_decoder_step_args;

TN_EXPORT int tn_decoder_step(const tn_decoder_step_args *args);

/* Of a step of `num_rows` rows. */
TN_EXPORT int64_t tn_decoder_scratch_bytes(const tn_decoder *model, int64_t num_rows);

/* ---- streams of a decoder's x (altup.c) ---- */

/* All streams but the first become as large as it: each is multiplied with the root of the mean of its squares, and divided by
 * its own, of which the mean is at least 1e-5. Squares, means, roots and each product are rounded. */
typedef struct tn_match_args {
    size_t size;
    void *x;           /* (num_rows, num_streams, num_columns): changed */
    void *mean;        /* (num_rows, num_columns): gets the mean of the streams then; or NULL */
    int64_t num_rows;
    int64_t num_streams;
    int64_t num_columns;
    int32_t dtype;     /* F32 or BF16 */
    int32_t reserved;  /* 0 */
} tn_match_args;

TN_EXPORT int tn_match(const tn_match_args *args);

/* ---- low-rank adapters of decoders (adapters.c) ---- */

/* One low-rank product: columns [first, first + num_out) of a projection's output gain factor * (low @ b). */
typedef struct tn_adapter_part {
    const void *b;   /* (rank, num_out) F32 or BF16: B, transposed */
    int64_t first;
    int64_t num_out;
    int64_t rank;
    float factor;
    int32_t dtype;
} tn_adapter_part;

/* What an adapter adds to one projection. */
typedef struct tn_adapter_site {
    tn_matrix a;                  /* (ranks of all parts together, num_in) F32 or BF16: each part's A in turn */
    const tn_adapter_part *parts; /* ascending, none over another */
    int64_t num_parts;            /* 0: the projection is as it is */
} tn_adapter_site;

typedef enum tn_adapter_place {
    TN_AT_QKV = 0,
    TN_AT_OUTPUT = 1,
    TN_AT_GATE_UP = 2,
    TN_AT_DOWN = 3,
    TN_AT_MAMBA_IN = 4,
    TN_AT_MAMBA_OUT = 5,
} tn_adapter_place;

#define TN_ADAPTER_PLACES 6

typedef struct tn_adapter_layer {
    tn_adapter_site sites[TN_ADAPTER_PLACES]; /* by tn_adapter_place */
} tn_adapter_layer;

/* Rows [start, start + length) of a step, which have the same adapter. */
typedef struct tn_adapter_run {
    const tn_adapter_layer *layers; /* (num_layers,); those of a call must be filled in */
    int64_t start;
    int64_t length;
} tn_adapter_run;

/* A decoder's step, some of whose rows have adapters. Rows of none are as `tn_decoder_step` makes them, bit for bit. */
typedef struct tn_adapted_step_args {
    size_t size;
    const tn_decoder_step_args *step;
    const tn_adapter_run *runs; /* (num_runs,) ascending, none over another */
    float *low;                 /* scratch: (rows of the step, low_stride) */
    int64_t num_runs;
    int64_t low_stride;         /* at least the rows of any site's `a` */
} tn_adapted_step_args;

TN_EXPORT int tn_adapted_decoder_step(const tn_adapted_step_args *args);

/* ---- encoders (encoder.c) ---- */

typedef struct tn_encoder_layer {
    tn_projection qkv; /* to queries, keys and values of all heads */
    tn_projection output;
    tn_projection up;  /* of a gated MLP: to gate, then up */
    tn_projection down;
    tn_vector attention_norm_weight; /* (hidden_size,) each; with pre_norm NULL: there is none */
    tn_vector attention_norm_bias;
    tn_vector mlp_norm_weight;
    tn_vector mlp_norm_bias;
    const void *position_keys;       /* tn_distances.keys and .queries of this layer, or NULL */
    const void *position_queries;
    int64_t window;                  /* as in tn_text_attention_args */
    tn_vector attention_output_norm; /* (hidden_size,), with pre_norm and TN_RMS: of what attention adds; NULL: none */
    tn_vector mlp_output_norm;       /* likewise, of what the MLP adds */
    tn_vector query_norm;            /* (head_dim,) each, with TN_RMS, of each head before it is turned; NULL: none */
    tn_vector key_norm;
    tn_vector value_norm;
    const float *bounds;             /* (7, 4), if the model is `bounded`: what inputs of products with queries, keys,
                                      * values, output, gate, up and down are at least and at most, then their outputs */
} tn_encoder_layer;

typedef struct tn_encoder {
    const tn_encoder_layer *layers;
    int64_t hidden_size;
    int64_t intermediate_size;
    int64_t num_heads;
    int64_t head_dim;
    int64_t rotary_dim; /* even, at most head_dim; 0: queries and keys are not turned */
    float norm_eps;
    float attention_scale;
    int32_t activation;
    int32_t dtype;      /* F32 or BF16 */
    int32_t pre_norm;   /* x + attention(norm(x)), then x + mlp(norm(x)); 0: the norm is of the sum */
    int32_t gated;      /* down(activation(gate) * up); 0: down(activation(up)) */
    int32_t norm;       /* of all norms, which have biases if it is TN_LAYER */
    int32_t turned_parts; /* at least 1: equal parts of a head's first rotary_dim numbers, which turn by themselves */
    int32_t bounded;    /* layers have `bounds`; with `gated` */
} tn_encoder;

/* Layers [first, end) over texts back to back. */
typedef struct tn_encoder_step_args {
    size_t size;
    const tn_encoder *model;
    const int64_t *starts;    /* as in tn_text_attention_args */
    const float *turns;       /* (positions, rotary_dim): cosines, then sines, of layers without a window */
    const float *local_turns; /* likewise, of layers with one */
    const int64_t *turn;      /* (num_rows,) the row of `turns` that each row takes */
    const float *bias;        /* tn_distances, but for what is a layer's */
    const int64_t *buckets;
    void *x;                  /* (rows, hidden_size): changed */
    void *scratch;            /* on 64 bytes */
    int64_t reach;
    int64_t num_texts;
    int64_t num_rows;
    int64_t first;
    int64_t end;
} tn_encoder_step_args;

TN_EXPORT int tn_encoder_step(const tn_encoder_step_args *args);

TN_EXPORT int64_t tn_encoder_scratch_bytes(const tn_encoder *model, int64_t num_rows);

/* The mean of each text's rows, in fp32; rows are added in order. */
typedef struct tn_mean_args {
    size_t size;
    const void *x;         /* (rows, num_columns) */
    const int64_t *starts; /* (num_texts + 1,) */
    float *out;            /* (num_texts, num_columns) */
    int64_t num_texts;
    int64_t num_columns;
    int32_t dtype;         /* F32 or BF16 */
    int32_t reserved;      /* 0 */
} tn_mean_args;

TN_EXPORT int tn_mean(const tn_mean_args *args);

#endif
