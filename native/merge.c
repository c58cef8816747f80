/* Planes → elements: what the loader writes into its slabs.
 *
 * A frame is gone through in stretches that every plane has in one row, so that each plane is shifted by one number all
 * along; and in pieces that stay in the first cache. The loops are for the compiler to make vectors of: no element
 * depends on another one. Words are written whole, under a mask, so a tier may be repeated.
 */
#include "fill.h"

#include <stdbool.h>
#include <string.h>

#include "isa.h"

enum { PIECE = 1024 /* elements at a time: their field is 2 or 4 KiB */ };

/* Where a frame's plane has the elements from one on. */
typedef struct {
    const uint8_t *bytes;
    int down;      /* bits below the element's */
    int64_t count; /* elements until the next row */
} place_t;

/* Element `at` of a frame of `count` elements, in a plane of `bits` bits an element. */
static place_t place_in(const uint8_t *frame, int bits, int64_t count, int64_t at) {
    const int share = 8 / bits;
    const int64_t row = (count + share - 1) / share;
    return (place_t){frame + at % row, (int)(at / row) * bits, row - at % row};
}

#define WORD uint16_t
#define NAMED(name) name##_16
#include "merge_words.h"
#undef WORD
#undef NAMED
#define WORD uint32_t
#define NAMED(name) name##_32
#include "merge_words.h"
#undef WORD
#undef NAMED

void tn_merge(const tn_merge_args *args) {
    const uint8_t *planes[TN_MAX_PLANES];
    memcpy(planes, args->planes, sizeof planes);
    for (int64_t begin = 0; begin < args->count; begin += args->frame_elements) {
        const int64_t left = args->count - begin;
        const int64_t count = left < args->frame_elements ? left : args->frame_elements;
        const uint8_t *exponents = args->exponents == NULL ? NULL : args->exponents + begin;
        if (args->word_bytes == 2)
            merge_frame_16((uint16_t *)args->out + begin, exponents, planes, args, count);
        else
            merge_frame_32((uint32_t *)args->out + begin, exponents, planes, args, count);
        for (int plane = 0; plane < args->num_planes; plane++) {
            const int share = 8 / args->plane_bits[plane];
            planes[plane] += (count + share - 1) / share;
        }
    }
}

void tn_add_differences(const tn_interleave_args *args) {
    const uint8_t *const *from = args->planes;
    switch (args->num_planes) {
    case 1: {
        uint8_t *out = args->out;
        for (int64_t i = 0; i < args->count; i++) {
            const uint8_t zigzag = from[0][i];
            out[i] = (uint8_t)(out[i] + (uint8_t)((zigzag >> 1) ^ -(zigzag & 1)));
        }
        return;
    }
    case 2: {
        uint16_t *out = args->out;
        const uint8_t *low = from[0], *high = from[1];
        for (int64_t i = 0; i < args->count; i++) {
            const uint16_t zigzag = (uint16_t)(low[i] | high[i] << 8);
            out[i] = (uint16_t)(out[i] + (uint16_t)((zigzag >> 1) ^ -(zigzag & 1)));
        }
        return;
    }
    case 4: {
        uint32_t *out = args->out;
        for (int64_t i = 0; i < args->count; i++) {
            const uint32_t zigzag = (uint32_t)(from[0][i] | from[1][i] << 8 | from[2][i] << 16) | (uint32_t)from[3][i] << 24;
            out[i] += (zigzag >> 1) ^ -(zigzag & 1);
        }
        return;
    }
    default: {
        uint64_t *out = args->out;
        for (int64_t i = 0; i < args->count; i++) {
            uint64_t zigzag = 0;
            for (int place = 0; place < 8; place++) zigzag |= (uint64_t)from[place][i] << 8 * place;
            out[i] += (zigzag >> 1) ^ -(zigzag & 1);
        }
    }
    }
}

void tn_interleave(const tn_interleave_args *args) {
    const uint8_t *const *from = args->planes;
    switch (args->num_planes) {
    case 2: {
        uint16_t *out = args->out;
        for (int64_t i = 0; i < args->count; i++) out[i] = (uint16_t)(from[0][i] | from[1][i] << 8);
        return;
    }
    case 4: {
        uint32_t *out = args->out;
        for (int64_t i = 0; i < args->count; i++)
            out[i] = (uint32_t)(from[0][i] | from[1][i] << 8 | from[2][i] << 16) | (uint32_t)from[3][i] << 24;
        return;
    }
    default: {
        uint8_t *out = args->out;
        for (int64_t i = 0; i < args->count; i++)
            for (int place = 0; place < 8; place++) out[8 * i + place] = from[place][i];
    }
    }
}
