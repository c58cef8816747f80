/* Parts → elements: frames are decoded and merged one after another, while they are in the cache.
 *
 * A segment's planes are cut alike: a frame of each holds the bits of the same `TN_FRAME_ELEMENTS` elements. So one is
 * taken of each plane, where it lies if it is raw, and what they say goes to the elements. Nothing is trusted: sizes,
 * headers, bits that mean nothing and counts are checked before they are used, so that a part with a right digest can
 * do no more than its packer could. */
#include "fill.h"

#include <stdbool.h>
#include <string.h>

#include "frames.h"

enum {
    MAX_PLANES = 8, /* of values */
    MAX_COUNT = 1 << 24,
    MAX_BITS_BYTES = MAX_COUNT / 8, /* of a mask, or of signs */
    WHOLE = 0,
};

/* Where a segment's values come from, and the memory to work in. */
typedef struct {
    const uint8_t *stored;
    int64_t stored_bytes;
    tn_frame_state frames;
    uint8_t *pieces; /* (MAX_PLANES, TN_FRAME_ELEMENTS) */
    uint8_t *values; /* (TN_FRAME_ELEMENTS,) words of up to 8 bytes, of a sparse segment; and then its mask and signs */
    tn_fill_args *args;
} filler_t;

/* A plane as it is read, frame by frame. */
typedef struct {
    const tn_fill_plane *plane;
    tn_frames frames; /* of a raw plane `at` alone is used */
    uint8_t *room;    /* for a decoded frame */
} reader_t;

static bool fails(filler_t *filler, tn_fault fault, int64_t plane, int64_t at) {
    filler->args->fault = fault;
    filler->args->plane = plane;
    filler->args->at = at;
    return false;
}

/* Of one frame, or of several, each of which has whole bytes. */
TN_INLINE int64_t plane_bytes(int64_t count, int bits, int element_bytes) {
    if (bits == WHOLE) return count * element_bytes;
    const int share = 8 / bits;
    return (count + share - 1) / share;
}

/* False if a raw plane has not the size that `size` bytes take. Coded ones are checked as they are read. */
static bool open_plane(filler_t *filler, reader_t *reader, const tn_fill_plane *plane, int64_t number, int64_t size,
                       uint8_t *room) {
    int64_t begin = plane->offset, end = plane->offset + plane->size;
    if (begin < 0 || plane->size < 0 || end > filler->stored_bytes) { /* what is not there cannot be read */
        begin = begin < 0 || begin > filler->stored_bytes ? filler->stored_bytes : begin;
        end = filler->stored_bytes;
    }
    *reader = (reader_t){plane, {.src = filler->stored + begin, .size = end - begin}, room};
    return plane->is_coded || end - begin == size || fails(filler, TN_RAW_SIZE, number, size);
}

/* The next frame's `bytes`: where they lie, or decoded to `out`, or else to the reader's room. NULL where damaged. */
static const uint8_t *next_piece(filler_t *filler, reader_t *reader, int64_t number, int64_t bytes, uint8_t *out) {
    tn_frames *frames = &reader->frames;
    if (!reader->plane->is_coded) {
        const uint8_t *piece = frames->src + frames->at;
        frames->at += bytes;
        if (out == NULL) return piece;
        memcpy(out, piece, (size_t)bytes);
        return out;
    }
    uint8_t *to = out != NULL ? out : reader->room;
    const tn_fault fault = tn_next_frame(&filler->frames, frames, to, bytes);
    return fault == TN_NO_FAULT || fails(filler, fault, number, frames->at) ? to : NULL;
}

static bool close_plane(filler_t *filler, const reader_t *reader, int64_t number) {
    const tn_frames *frames = &reader->frames;
    return frames->at == frames->size || fails(filler, TN_FRAMES_FOLLOWED, number, frames->size - frames->at);
}

/* ---- checks ---- */

/* True if bits behind the last of `count` elements of a frame are set. */
static bool has_unused_bits(const uint8_t *frame, int bits, int64_t count) {
    if (bits == WHOLE || bits == 8) return false;
    const int share = 8 / bits;
    if (count % share == 0) return false;
    const int64_t row = (count + share - 1) / share, full = count / row, more = count % row;
    unsigned found = 0;
    if (full + 1 < share)
        for (int64_t i = 0; i < more; i++) found |= (unsigned)frame[i] >> (full + 1) * bits;
    for (int64_t i = more; i < row; i++) found |= (unsigned)frame[i] >> full * bits;
    return found != 0;
}

static bool has_long_exponent(const uint8_t *exponents, int64_t count, int bits) {
    uint8_t found = 0;
    if (bits >= 8) return false;
    for (int64_t i = 0; i < count; i++) found |= exponents[i];
    return found >> bits != 0;
}

/* ---- planes of values ---- */

typedef struct {
    reader_t readers[MAX_PLANES];
    const tn_fill_plane *planes;
    int64_t first; /* number of the first one in the segment */
    int num;
} planes_t;

static bool open_planes(filler_t *filler, planes_t *planes, const tn_fill_segment *segment, int64_t first, int64_t count) {
    planes->planes = segment->planes + first;
    planes->first = first;
    planes->num = (int)(segment->num_planes - first);
    for (int i = 0; i < planes->num; i++) {
        const int64_t size = plane_bytes(count, planes->planes[i].bits, segment->element_bytes);
        uint8_t *room = filler->pieces + (int64_t)i * TN_FRAME_ELEMENTS;
        if (!open_plane(filler, &planes->readers[i], &planes->planes[i], first + i, size, room)) return false;
    }
    return true;
}

/* The next frame of each plane, checked; false where one is damaged. */
static bool next_pieces(filler_t *filler, planes_t *planes, const tn_fill_segment *segment, int64_t count,
                        const uint8_t **pieces) {
    for (int i = 0; i < planes->num; i++) {
        const int bits = planes->planes[i].bits;
        pieces[i] = next_piece(filler, &planes->readers[i], planes->first + i, plane_bytes(count, bits, 1), NULL);
        if (pieces[i] == NULL) return false;
        if (has_unused_bits(pieces[i], bits, count)) return fails(filler, TN_UNUSED_BITS, planes->first + i, 0);
    }
    if (segment->kind == TN_FILL_FLOATS && segment->is_first && has_long_exponent(pieces[0], count, segment->exponent_bits))
        return fails(filler, TN_EXPONENT_BITS, planes->first, 0);
    return true;
}

static bool close_planes(filler_t *filler, const planes_t *planes) {
    for (int i = 0; i < planes->num; i++)
        if (!close_plane(filler, &planes->readers[i], planes->first + i)) return false;
    return true;
}

/* ---- dense segments ---- */

static void merge(const tn_fill_segment *segment, const tn_fill_plane *planes, int num, const uint8_t *const *pieces,
                  int64_t count, void *out) {
    const int before = segment->is_first ? 1 : 0; /* the exponents */
    tn_merge_args args = {.out = out, .exponents = before ? pieces[0] : NULL, .count = count,
                          .frame_elements = TN_FRAME_ELEMENTS, .num_planes = num - before,
                          .word_bytes = segment->element_bytes, .mantissa_bits = segment->mantissa_bits,
                          .known_bits = segment->known_bits};
    for (int i = before; i < num; i++) {
        args.planes[i - before] = pieces[i];
        args.plane_bits[i - before] = planes[i].bits;
    }
    tn_merge(&args);
}

static bool fill_dense(filler_t *filler, const tn_fill_segment *segment) {
    planes_t planes;
    if (!open_planes(filler, &planes, segment, 0, segment->count)) return false;
    for (int64_t begin = 0, count; begin < segment->count; begin += count) {
        count = segment->count - begin < TN_FRAME_ELEMENTS ? segment->count - begin : TN_FRAME_ELEMENTS;
        uint8_t *out = (uint8_t *)segment->out + begin * segment->element_bytes;
        const uint8_t *pieces[MAX_PLANES];
        if (segment->kind == TN_FILL_BYTES && planes.num == 1) { /* straight to where it belongs */
            if (next_piece(filler, &planes.readers[0], 0, count, out) == NULL) return false;
            continue;
        }
        if (!next_pieces(filler, &planes, segment, count, pieces)) return false;
        if (segment->kind == TN_FILL_FLOATS) {
            merge(segment, planes.planes, planes.num, pieces, count, out);
            continue;
        }
        tn_interleave_args args = {.out = out, .count = count, .num_planes = planes.num};
        memcpy(args.planes, pieces, (size_t)planes.num * sizeof *pieces);
        if (segment->kind == TN_FILL_BYTES) {
            tn_interleave(&args);
        } else {
            if (segment->base != NULL)
                memcpy(out, (const uint8_t *)segment->base + begin * segment->element_bytes,
                       (size_t)(count * segment->element_bytes));
            tn_add_differences(&args);
        }
    }
    return close_planes(filler, &planes);
}

static bool fill_whole(filler_t *filler, const tn_fill_segment *segment) {
    const int64_t size = segment->count * segment->element_bytes;
    reader_t reader;
    if (segment->planes[0].is_coded) return fails(filler, TN_RAW_SIZE, 0, size);
    if (!open_plane(filler, &reader, &segment->planes[0], 0, size, NULL)) return false;
    memcpy(segment->out, reader.frames.src, (size_t)size);
    return true;
}

/* ---- planes that are merged elsewhere ---- */

static bool fill_plane(filler_t *filler, const tn_fill_segment *segment, int64_t number) {
    const tn_fill_plane *plane = &segment->planes[number];
    const int bits = plane->bits;
    reader_t reader;
    if (bits == WHOLE && plane->is_coded)
        return fails(filler, TN_RAW_SIZE, number, segment->count * segment->element_bytes);
    if (!open_plane(filler, &reader, plane, number, plane_bytes(segment->count, bits, segment->element_bytes), NULL))
        return false;
    uint8_t *out = plane->out;
    for (int64_t begin = 0, count; begin < segment->count; begin += count) {
        count = segment->count - begin < TN_FRAME_ELEMENTS ? segment->count - begin : TN_FRAME_ELEMENTS;
        const int64_t bytes = plane_bytes(count, bits, segment->element_bytes);
        if (next_piece(filler, &reader, number, bytes, out) == NULL) return false;
        if (has_unused_bits(out, bits, count)) return fails(filler, TN_UNUSED_BITS, number, 0);
        if (number == 0 && segment->exponent_bits && segment->is_first &&
            has_long_exponent(out, count, segment->exponent_bits))
            return fails(filler, TN_EXPONENT_BITS, number, 0);
        out += bytes;
    }
    return close_plane(filler, &reader, number);
}

static bool fill_planes(filler_t *filler, const tn_fill_segment *segment) {
    for (int64_t number = 0; number < segment->num_planes; number++)
        if (segment->planes[number].out != NULL && !fill_plane(filler, segment, number)) return false;
    return true;
}

/* ---- sparse segments ---- */

/* A mask or signs, whole: `num_bits` of them. NULL where damaged. */
static const uint8_t *read_bits(filler_t *filler, const tn_fill_plane *plane, int64_t number, int64_t num_bits,
                                uint8_t *room) {
    const int64_t size = (num_bits + 7) / 8, frame_bytes = TN_FRAME_ELEMENTS / 8;
    reader_t reader;
    if (!open_plane(filler, &reader, plane, number, size, room)) return NULL;
    if (plane->is_coded) {
        for (int64_t begin = 0; begin < size; begin += frame_bytes) {
            const int64_t bytes = size - begin < frame_bytes ? size - begin : frame_bytes;
            if (next_piece(filler, &reader, number, bytes, room + begin) == NULL) return NULL;
        }
        if (!close_plane(filler, &reader, number)) return NULL;
    }
    const uint8_t *bits = plane->is_coded ? room : reader.frames.src;
    if (num_bits % 8 != 0 && bits[size - 1] >> num_bits % 8 != 0) return fails(filler, TN_UNUSED_BITS, number, 0), NULL;
    return bits;
}

static bool has_bits(const uint8_t *bits, int64_t size) {
    uint8_t found = 0;
    for (int64_t i = 0; i < size; i++) found |= bits[i];
    return found != 0;
}

static bool fill_sparse(filler_t *filler, const tn_fill_segment *segment) {
    const int64_t num_signs = segment->count - segment->num_values;
    const bool is_float = segment->kind == TN_FILL_FLOATS;
    const tn_fault wrong_count = segment->is_first ? TN_MASK_COUNT : TN_TIER_COUNT;
    tn_scatter_args args = {.out = segment->out, .count = segment->count, .word_bytes = segment->element_bytes,
                            .num_signs = num_signs};
    int64_t first = 0;
    if (segment->is_first) {
        uint8_t *room = filler->values + 8 * TN_FRAME_ELEMENTS;
        if ((args.mask = read_bits(filler, &segment->planes[first], first, segment->count, room)) == NULL) return false;
        first++;
        if (is_float) {
            const uint8_t *signs = read_bits(filler, &segment->planes[first], first, num_signs, room + MAX_BITS_BYTES);
            if (signs == NULL) return false;
            if (has_bits(signs, (num_signs + 7) / 8)) args.signs = signs;
            first++;
        }
    } else {
        const int unknown = segment->mantissa_bits - segment->known_bits;
        int field_bits = 0;
        for (int i = 0; i < segment->num_planes; i++) field_bits += segment->planes[i].bits;
        args.keep = ~(uint32_t)0 << (unknown + field_bits);
    }
    planes_t planes;
    if (!open_planes(filler, &planes, segment, first, segment->num_values)) return false;
    bool has_zero = false;
    for (int64_t begin = 0, count; begin < segment->num_values; begin += count) {
        count = segment->num_values - begin < TN_FRAME_ELEMENTS ? segment->num_values - begin : TN_FRAME_ELEMENTS;
        const uint8_t *pieces[MAX_PLANES];
        if (!next_pieces(filler, &planes, segment, count, pieces)) return false;
        args.values = pieces[0];
        if (is_float) {
            if (!segment->is_first) memset(filler->values, 0, (size_t)(count * segment->element_bytes));
            merge(segment, planes.planes, planes.num, pieces, count, filler->values);
            args.values = filler->values;
        }
        args.num_values = count;
        tn_scatter(&args);
        has_zero |= args.has_zero;
        if (args.num_placed != count) return fails(filler, wrong_count, -1, 0);
        args.begin = args.end;
        args.num_before += count;
    }
    if (!close_planes(filler, &planes)) return false;
    args.num_values = 0; /* the zeros behind the last value */
    tn_scatter(&args);
    if (args.end != segment->count) return fails(filler, wrong_count, -1, 0);
    return !has_zero || !segment->is_last || fails(filler, TN_ZERO_VALUE, -1, 0);
}

/* ---- a part ---- */

/* False for what no format asks for: nothing is read then. */
static bool is_possible(const tn_fill_segment *segment, const tn_fill_args *args) {
    const int width = segment->element_bytes, kind = segment->kind;
    const bool is_sparse = segment->num_values >= 0, is_float = kind == TN_FILL_FLOATS;
    const int in_front = is_sparse && segment->is_first ? 1 + is_float : 0;
    if (segment->count < 0 || (is_sparse && segment->count > MAX_COUNT) || segment->num_values > segment->count) return false;
    if (segment->num_planes < 1 + in_front || segment->num_planes > MAX_PLANES + in_front) return false;
    if (width != 1 && width != 2 && width != 4 && width != 8) return false;
    if (args->scratch_bytes < (is_sparse ? TN_FILL_SPARSE_BYTES : TN_FILL_SCRATCH_BYTES)) return false;
    for (int i = 0; i < segment->num_planes; i++) {
        const int bits = segment->planes[i].bits;
        if (bits != 8 && bits != 4 && bits != 2 && bits != 1 && bits != WHOLE) return false;
        if (i >= in_front && bits == WHOLE && kind != TN_FILL_WHOLE && kind != TN_FILL_PLANES) return false;
    }
    switch (kind) {
    case TN_FILL_WHOLE: return !is_sparse && segment->num_planes == 1;
    case TN_FILL_BYTES: return is_sparse ? width == 1 && segment->is_first && segment->num_planes == 2 : segment->num_planes == width;
    case TN_FILL_FLOATS: {
        const int first = in_front + (segment->is_first ? 1 : 0), known = segment->known_bits;
        int field_bits = 0;
        for (int i = first; i < segment->num_planes; i++) field_bits += segment->planes[i].bits;
        if ((width != 2 && width != 4) || 1 + segment->exponent_bits + segment->mantissa_bits != 8 * width) return false;
        if (segment->num_planes == first || segment->num_planes - first > TN_MAX_PLANES) return false;
        return known <= segment->mantissa_bits && (segment->is_first ? field_bits == 1 + known : field_bits <= known);
    }
    case TN_FILL_DIFFERENCES: return !is_sparse && segment->num_planes == width;
    case TN_FILL_PLANES: return !is_sparse;
    default: return false;
    }
}

static bool fill_segment(filler_t *filler, const tn_fill_segment *segment) {
    if (segment->num_values >= 0) return fill_sparse(filler, segment);
    if (segment->kind == TN_FILL_PLANES) return fill_planes(filler, segment);
    return segment->kind == TN_FILL_WHOLE ? fill_whole(filler, segment) : fill_dense(filler, segment);
}

int tn_fill_part(tn_fill_args *args) {
    if (args->size != sizeof *args) return TN_REFUSED;
    for (int64_t i = 0; i < args->num_segments; i++)
        if (!is_possible(&args->segments[i], args)) return TN_REFUSED;
    filler_t filler = {.stored = args->stored, .stored_bytes = args->stored_bytes, .pieces = args->scratch,
                       .values = args->scratch + TN_FILL_SCRATCH_BYTES, .args = args};
    for (args->segment = 0; args->segment < args->num_segments; args->segment++)
        if (!fill_segment(&filler, &args->segments[args->segment])) return TN_DAMAGED;
    return TN_OK;
}
