/* Products with several matrices of the same input, whose outputs lie side by side. */
#include "projection.h"

#include <stdbool.h>
#include <string.h>

#include "elements.h"
#include "linear.h"
#include "rows.h"
#include "tiles.h"

static void permute_stage(const tn_product *product, tn_region *region) {
    const tn_projection *of = product->projection;
    bool is_permuted = false;
    for (int64_t n = 0; n < of->num_parts; n++) is_permuted |= of->parts[n].columns != NULL;
    if (!is_permuted) return;
    EACH_ROW(region, product->num_rows) {
        const void *from = element_at(product->x, product->dtype, row * of->num_in);
        int64_t first = 0; /* element of `permuted` */
        for (int64_t n = 0; n < of->num_parts; n++) {
            if (of->parts[n].columns == NULL) continue;
            void *to = element_at(product->permuted, product->dtype, first + row * of->num_in);
            tn_permute_row(to, from, of->parts[n].columns, of->num_in, product->dtype);
            first += product->num_rows * of->num_in;
        }
    }
    tn_barrier(region);
}

/* The inputs of a part: as they are, or in its order, and the place of both in scratch. */
typedef struct {
    const void *x;
    void *packed; /* NULL: tiles do not take the part */
    int64_t num_permuted; /* parts before it that have orders of their own */
} inputs_t;

static inputs_t inputs_of(const tn_product *product, int64_t part, int64_t num_permuted) {
    const tn_projection *of = product->projection;
    const bool is_permuted = of->parts[part].columns != NULL;
    const int64_t place = is_permuted ? 1 + num_permuted : 0; /* of packed inputs; first come those as they are */
    inputs_t inputs = {.x = product->x, .num_permuted = num_permuted + is_permuted};
    if (is_permuted) inputs.x = element_at(product->permuted, product->dtype, num_permuted * product->num_rows * of->num_in);
    if (tn_packed_forms(&of->parts[part].matrix, product->dtype))
        inputs.packed = (char *)product->packed + place * tn_packed_bytes(product->num_rows, of->num_in);
    return inputs;
}

int64_t tn_product_packed_bytes(int64_t num_rows, int64_t num_in, int64_t permuted_size, int dtype) {
    if (dtype != TN_BF16) return 0;
    return tn_packed_bytes(num_rows, num_in) + tn_packed_bytes(num_rows, permuted_size + TN_MAX_PERMUTED_PARTS * 64);
}

int tn_projection_forms(const tn_projection *projection, int dtype) {
    int forms = 0;
    for (int64_t n = 0; n < projection->num_parts; n++)
        if (projection->parts[n].columns == NULL) forms |= tn_packed_forms(&projection->parts[n].matrix, dtype);
    return forms;
}

static void pack_stage(const tn_product *product, tn_region *region) {
#if TN_TILES
    const tn_projection *of = product->projection;
    const int64_t pieces = tn_pack_pieces(product->num_rows, of->num_in);
    int missing = tn_projection_forms(of, product->dtype); /* forms of inputs as they are, which parts share */
    int64_t num_permuted = 0, begin = 0, next = -1;
    for (int64_t n = 0; n < of->num_parts; n++) {
        const inputs_t inputs = inputs_of(product, n, num_permuted);
        const bool is_permuted = of->parts[n].columns != NULL;
        const int forms = is_permuted ? tn_packed_forms(&of->parts[n].matrix, product->dtype) : missing;
        num_permuted = inputs.num_permuted;
        if (inputs.packed == NULL || forms == 0) continue;
        if (!is_permuted) missing = 0;
        for (; next < 0 || next < begin + pieces; next = tn_next_chunk(region))
            if (next >= begin)
                tn_pack(forms, inputs.packed, inputs.x, of->num_in, product->num_rows, of->num_in, next - begin);
        begin += pieces;
    }
    if (begin) tn_barrier(region);
#else
    (void)product;
    (void)region;
#endif
}

static void keep_stage(const tn_product *product, tn_region *region) {
    const tn_projection *of = product->projection;
    const size_t bytes = (size_t)(of->num_in * element_bytes(product->dtype));
    if (of->inputs == NULL) return;
    EACH_ROW(region, product->num_rows)
        memcpy((char *)of->inputs + (size_t)row * bytes, (const char *)product->x + (size_t)row * bytes, bytes);
    tn_barrier(region);
}

void tn_input_stage(const tn_product *product, tn_region *region) {
    keep_stage(product, region);
    permute_stage(product, region);
    pack_stage(product, region);
}

void tn_product_columns(const tn_product *product, int64_t begin, int64_t end) {
    const tn_projection *of = product->projection;
    const int out_dtype = product->wide_out ? TN_F32 : product->dtype;
    int64_t first = 0, num_permuted = 0; /* the part's first column; parts before it with orders of their own */
    for (int64_t n = 0; n < of->num_parts && first < end; n++) {
        const tn_part *part = &of->parts[n];
        const inputs_t inputs = inputs_of(product, n, num_permuted);
        num_permuted = inputs.num_permuted;
        const int64_t from = begin > first ? begin - first : 0;
        const int64_t to = end - first < part->matrix.num_out ? end - first : part->matrix.num_out;
        const tn_linear_args args = {
            .size = sizeof args,
            .weight = &part->matrix,
            .x = inputs.x,
            .out = element_at(product->out, out_dtype, first),
            .num_rows = product->num_rows,
            .x_stride = of->num_in,
            .out_stride = of->num_out,
            .x_dtype = product->dtype,
            .out_dtype = out_dtype,
            .packed = inputs.packed,
        };
        if (from < to) tn_linear_columns(&args, from, to);
        first += part->matrix.num_out;
    }
}

void tn_product_stage(const tn_product *product, tn_region *region) {
    EACH_COLUMNS(region, product->projection->num_out) tn_product_columns(product, begin, end);
}
