/* Planes → elements: the steps of fill.c. They trust their arguments, which fill.c has checked. */
#ifndef TN_FILL_H
#define TN_FILL_H

#include "core.h"

#define TN_MAX_PLANES 5 /* of a field: of 23 bits they are 8, 8, 4, 2 and 1 */

/* One tier of some floats, from planes into words: whole frames, or a single shorter one.
 *
 * The first tier writes exponents, signs and its mantissa bits; a later one replaces mantissa bits of what is there.
 * Bits that are not known yet become their middle: a 1, then zeros. */
typedef struct tn_merge_args {
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
} tn_merge_args;

void tn_merge(const tn_merge_args *args);

/* Bytes of elements, from a plane for each byte of an element, little end first. */
typedef struct tn_interleave_args {
    void *out;                /* (count, num_planes) bytes */
    const uint8_t *planes[8]; /* (count,) each */
    int64_t count;
    int64_t num_planes;       /* 2, 4 or 8 */
} tn_interleave_args;

void tn_interleave(const tn_interleave_args *args);

/* The same planes, of zigzag differences (2d, or -2d - 1 where d is negative), added to the elements that are there
 * (modulo 2^bits). `num_planes` is 2 or 4. Not to be repeated. */
void tn_add_differences(const tn_interleave_args *args);

/* Values of a sparse tensor, to their places among its elements (scatter.c; docs/format.md, "Sparse encodings").
 *
 * Elements from `begin` on are written until the last value has its place, or until all elements are; with no values,
 * up to the first element that wants one. In the first tier, `mask` says which do, and the others become zeros; in a
 * later one those that are not zeros do, and get bits of the value in place of all but `keep`. */
typedef struct tn_scatter_args {
    void *out;            /* (count,) words of `word_bytes` */
    const uint8_t *mask;  /* (count,) bits, eight neighbours a byte; NULL: a later tier */
    const uint8_t *signs; /* (num_signs,) bits, likewise, of the tensor's zeros in their order; NULL: all are 0 */
    const void *values;   /* (num_values,) words */
    int64_t count;        /* elements, of the segment */
    int64_t begin;
    int64_t num_before;   /* values before `begin`, so that the sign of the first zero is number `begin` - this one */
    int64_t num_values;
    int64_t num_signs;
    int64_t end;          /* written: the first element that was not handled */
    int64_t num_placed;   /* written */
    int32_t word_bytes;   /* 1 (without signs, in the first tier only), 2 or 4 */
    uint32_t keep;        /* of a later tier */
    int32_t has_zero;     /* written: a value has become a zero */
} tn_scatter_args;

void tn_scatter(tn_scatter_args *args);

#endif
