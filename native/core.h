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

#define TN_VERSION 1
#define TN_EXPORT __attribute__((visibility("default")))

typedef enum tn_status {
    TN_OK = 0,
    TN_REFUSED = 1, /* a struct of another size, or a dtype that the function does not take */
    TN_ABORTED = 2, /* the caller's abort flag was set */
} tn_status;

typedef enum tn_dtype {
    TN_F32 = 0,
    TN_BF16 = 1,
    TN_F16 = 2,
    TN_I8 = 3,
    TN_U8 = 4,
    TN_I16 = 5,
    TN_U4 = 6, /* two a byte, in runs of 64 columns (docs/quantize.md, "The layout") */
} tn_dtype;

/* ---- the library ---- */

/* "version 1\nisa x86_64_v4\ntn_matrix 72\n...": the version, the instruction set, and the size of every struct. */
TN_EXPORT const char *tn_describe(void);

/* ---- the team (team.c) ---- */

/* How many threads compute, the calling one included, from the next call on. At least 1; until it is set, 1. */
TN_EXPORT void tn_set_threads(int32_t num_threads);

/* How many threads the next call computes with: fewer than were set while the team leaves one out. */
TN_EXPORT int32_t tn_num_threads(void);

/* ---- products (linear.c) ---- */

/* Weights (num_out, num_in) of a product, as they were loaded.
 *
 * Integers mean (q - zero) * scale, a scale for each group of columns. */
typedef struct tn_matrix {
    const void *data;   /* (num_out, num_in) F32, BF16, F16, I8; or U4, num_in / 2 bytes a row, num_in % 64 == 0 */
    const void *scale;  /* (num_out, num_in / group_size) F32 or BF16; NULL for floats */
    const void *zero;   /* like scale: U8 with U4, I16 with I8, |q - zero| <= 256. NULL: 8 with U4, 0 with I8 */
    const void *bias;   /* (num_out,) F32, BF16 or F16; or NULL */
    int64_t num_out;
    int64_t num_in;
    int64_t group_size; /* a multiple of 32 that divides num_in, or num_in itself; 0 for floats */
    int32_t dtype;
    int32_t scale_dtype;
    int32_t bias_dtype;
    int32_t reserved;   /* 0 */
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
} tn_linear_args;

TN_EXPORT int tn_linear(const tn_linear_args *args);

/* ---- elementwise ---- */

/* to[i] = e^from[i]: at most 1 ulp off, 0 below -104, infinity above 88.73. What attention and activations use. */
TN_EXPORT void tn_exp(const float *from, float *to, int64_t count);

/* ---- merging planes (merge.c; docs/format.md, "Encodings") ---- */

#define TN_MAX_PLANES 5 /* of a field: of 23 bits they are 8, 8, 4, 2 and 1 */

/* One tier of some floats, from planes into words: whole frames, or a single shorter one.
 *
 * The first tier writes exponents, signs and its mantissa bits; a later one replaces mantissa bits of what is there.
 * Bits that are not known yet become their middle: a 1, then zeros. */
typedef struct tn_merge_args {
    size_t size;
    void *out;                              /* (count,) words of `word_bytes` */
    const uint8_t *exponents;               /* (count,), none with more bits than the format has; NULL: a later tier */
    const uint8_t *planes[TN_MAX_PLANES];   /* of the field, its highest bits first */
    int64_t count;                          /* elements */
    int64_t frame_elements;                 /* a multiple of 8 */
    int32_t plane_bits[TN_MAX_PLANES];      /* 8, 4, 2 or 1 */
    int32_t num_planes;
    int32_t word_bytes;                     /* 2 or 4 */
    int32_t mantissa_bits;                  /* of the format */
    int32_t known_bits;                     /* of these, with this tier */
    int32_t reserved;                       /* 0 */
} tn_merge_args;

TN_EXPORT int tn_merge(const tn_merge_args *args);

/* Bytes of elements, from a plane for each byte of an element, little end first. */
typedef struct tn_interleave_args {
    size_t size;
    void *out;                /* (count, num_planes) bytes */
    const uint8_t *planes[8]; /* (count,) each */
    int64_t count;
    int64_t num_planes;       /* 2, 4 or 8 */
} tn_interleave_args;

TN_EXPORT int tn_interleave(const tn_interleave_args *args);

#endif
