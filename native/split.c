/* Floats → planes, for packing: one tier's exponents, and its field in planes of 8, 4, 2 or 1 bits an element, frame by
 * frame. merge.c is the way back. The loops are for the compiler to make vectors of. */
#include "core.h"

#include "isa.h"

#define WORD uint16_t
#define NAMED(name) name##_16
#include "split_words.h"
#undef WORD
#undef NAMED
#define WORD uint32_t
#define NAMED(name) name##_32
#include "split_words.h"
#undef WORD
#undef NAMED

int tn_split(const tn_split_args *args) {
    if (args->size != sizeof *args || (args->word_bytes != 2 && args->word_bytes != 4)) return TN_REFUSED;
    if (args->num_planes < 1 || args->num_planes > TN_MAX_SPLIT_PLANES) return TN_REFUSED;
    int64_t at[TN_MAX_SPLIT_PLANES] = {0};
    for (int64_t begin = 0, count; begin < args->count; begin += count) {
        count = args->count - begin < TN_FRAME_ELEMENTS ? args->count - begin : TN_FRAME_ELEMENTS;
        int below = args->field_bits;
        for (int plane = 0; plane < args->num_planes; plane++) {
            const int bits = args->plane_bits[plane];
            uint8_t *to = args->planes[plane] + at[plane];
            below -= plane == 0 && args->has_exponents ? 0 : bits;
            if (args->word_bytes == 2)
                split_plane_16((const uint16_t *)args->words + begin, count, args, plane, below, to);
            else
                split_plane_32((const uint32_t *)args->words + begin, count, args, plane, below, to);
            at[plane] += (count * bits + 7) / 8;
        }
    }
    return TN_OK;
}
