/* Floats → planes, for packing: their exponents, and their fields in planes of 8, 4, 2 or 1 bits an element, as they are
 * or coded. A frame of elements goes to all planes while it is in the cache. merge.c is the way back. The loops are for
 * the compiler to make vectors of. */
#include <stdbool.h>

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

static bool has_room(const tn_split_plane *plane, int64_t count) {
    const int bits = plane->bits;
    if (bits != 8 && bits != 4 && bits != 2 && bits != 1) return false;
    const int64_t bytes = (count * bits + 7) / 8, bound = tn_encoded_bound(bytes, TN_FRAME_ELEMENTS * bits / 8);
    return plane->out_bytes >= (plane->is_coded ? bound : bytes);
}

int tn_split(const tn_split_args *args) {
    if (args->size != sizeof *args || (args->word_bytes != 2 && args->word_bytes != 4)) return TN_REFUSED;
    if (args->num_planes < 1 || args->num_planes > TN_MAX_SPLIT_PLANES) return TN_REFUSED;
    for (int i = 0; i < args->num_planes; i++) {
        if (!has_room(&args->planes[i], args->count)) return TN_REFUSED;
        args->planes[i].end = 0;
    }
    uint8_t piece[TN_FRAME_ELEMENTS];
    for (int64_t begin = 0, count; begin < args->count; begin += count) {
        count = args->count - begin < TN_FRAME_ELEMENTS ? args->count - begin : TN_FRAME_ELEMENTS;
        for (int i = 0; i < args->num_planes; i++) {
            tn_split_plane *plane = &args->planes[i];
            uint8_t *out = plane->out + plane->end, *to = plane->is_coded ? piece : out;
            if (args->word_bytes == 2)
                split_plane_16((const uint16_t *)args->words + begin, count, plane, to);
            else
                split_plane_32((const uint32_t *)args->words + begin, count, plane, to);
            const int64_t bytes = (count * plane->bits + 7) / 8;
            plane->end += bytes;
            if (!plane->is_coded) continue;
            tn_encode_frames_args frame = {.size = sizeof frame, .src = piece, .src_bytes = bytes, .frame_bytes = bytes,
                                           .out = out, .out_bytes = plane->out_bytes - plane->end + bytes};
            if (tn_encode_frames(&frame) != TN_OK) return TN_REFUSED;
            plane->end += frame.end - bytes;
        }
    }
    return TN_OK;
}
