/* Stored parts → tables of a device's kernels: headers are read, and no frame is decoded.
 *
 * The bytes were not compared with a digest yet, so they may be any: nothing outside of them is read, and a table is
 * written only where it has room. What a table says of a frame is what its header says; the kernel that decodes it
 * checks the rest. */
#include <stdbool.h>

#include "core.h"
#include "frames.h"

enum { WHOLE = 0, MAX_PLANES = 8 };

typedef struct {
    const tn_walk_args *args;
    int64_t num_frames; /* written */
} walker_t;

static int64_t plane_bytes(int64_t count, int bits, int element_bytes) {
    if (bits == WHOLE) return count * element_bytes;
    const int share = 8 / bits;
    return (count + share - 1) / share;
}

static uint32_t bits_from(int64_t bit) { return bit < 8 ? 0xffu << bit & 0xff : 0; }

/* Bits that are 0 in a plane's piece of `count` elements: behind the last one, and those that no exponent has. */
static void set_checks(tn_coded_frame *frame, int64_t count, int bits, int exponent_bits) {
    uint32_t before = 0, behind = 0;
    if (bits != WHOLE) {
        const int64_t row = plane_bytes(count, bits, 0), full = count / row;
        before = bits_from((full + 1) * bits);
        behind = bits_from(full * bits) | bits_from(exponent_bits);
        frame->check_from = (uint32_t)(count % row);
    }
    frame->masks = (frame->check_from > 0 ? before : 0) | behind << 8;
}

static bool add_frame(walker_t *walker, const tn_coded_frame *frame) {
    if (walker->num_frames == walker->args->num_frames) return false;
    walker->args->frames[walker->num_frames++] = *frame;
    return true;
}

/* The frames of one plane; `first` gets where its decoded bytes begin. */
static bool walk_plane(walker_t *walker, const tn_walk_segment *segment, int number, int64_t *first) {
    const tn_walk_plane *plane = &segment->planes[number];
    const int64_t size = plane_bytes(segment->count, plane->bits, segment->element_bytes);
    const int64_t stored_bytes = walker->args->stored_bytes;
    if (plane->offset < 0 || plane->size < 0 || plane->offset > stored_bytes - plane->size || plane->offset % 8) return false;
    if (!plane->is_coded && plane->size != size) return false;
    if (plane->is_coded && plane->bits == WHOLE) return false;
    const int exponent_bits = number == 0 ? segment->exponent_bits : 8;
    tn_frames frames = {.src = walker->args->stored + plane->offset, .size = plane->size};
    int64_t out = *first = plane->is_coded ? plane->room : plane->offset;
    for (int64_t begin = 0, count; begin < segment->count; begin += count) {
        count = segment->count - begin < TN_FRAME_ELEMENTS ? segment->count - begin : TN_FRAME_ELEMENTS;
        const int64_t bytes = plane_bytes(count, plane->bits, segment->element_bytes), at = frames.at;
        tn_coded_frame frame = {.out = (uint32_t)out, .out_bytes = (uint32_t)bytes};
        set_checks(&frame, count, plane->bits, exponent_bits);
        if (plane->is_coded) {
            if (tn_next_frame(NULL, &frames, NULL, bytes) != TN_NO_FAULT) return false;
            if (!tn_is_literal_frame(frames.src + at, frames.end - at)) return false;
            frame.coded = (uint32_t)(plane->offset + at);
            frame.coded_bytes = (uint32_t)(frames.end - at);
        }
        if ((plane->is_coded || frame.masks != 0) && !add_frame(walker, &frame)) return false;
        out += bytes;
    }
    return !plane->is_coded || frames.at == frames.size;
}

static bool walk_segment(walker_t *walker, const tn_walk_segment *segment) {
    int64_t first[MAX_PLANES];
    if (segment->num_planes < 1 || segment->num_planes > MAX_PLANES || segment->count < 0) return false;
    for (int i = 0; i < segment->num_planes; i++)
        if (!walk_plane(walker, segment, i, &first[i])) return false;
    if (segment->is_flat) {
        *(tn_copied_bytes *)segment->entries = (tn_copied_bytes){
            (uint64_t)segment->out, (uint32_t)first[0], (uint32_t)(segment->count * segment->element_bytes)};
        return true;
    }
    tn_merged_frame *entry = segment->entries;
    for (int64_t begin = 0; begin < segment->count; begin += TN_FRAME_ELEMENTS, entry++) {
        const int64_t left = segment->count - begin;
        *entry = (tn_merged_frame){.out = (uint64_t)(segment->out + begin * segment->element_bytes),
                                   .count = (uint32_t)(left < TN_FRAME_ELEMENTS ? left : TN_FRAME_ELEMENTS)};
        for (int i = 0; i < segment->num_planes; i++)
            entry->planes[i] = (uint32_t)(first[i] + plane_bytes(begin, segment->planes[i].bits, 0));
    }
    return true;
}

int tn_walk_part(const tn_walk_args *args) {
    if (args->size != sizeof *args) return TN_REFUSED;
    walker_t walker = {.args = args};
    for (int64_t i = 0; i < args->num_segments; i++)
        if (!walk_segment(&walker, &args->segments[i])) return TN_DAMAGED;
    return walker.num_frames == args->num_frames ? TN_OK : TN_DAMAGED;
}
