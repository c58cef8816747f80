/* Products with several matrices of the same input, whose outputs lie side by side. */
#include "projection.h"

#include <stdbool.h>

#include "elements.h"
#include "linear.h"
#include "rows.h"

void tn_permute_stage(const tn_product *product, tn_region *region) {
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

void tn_product_columns(const tn_product *product, int64_t begin, int64_t end) {
    const tn_projection *of = product->projection;
    int64_t first = 0, first_permuted = 0; /* the part's first column; its first element of `permuted` */
    for (int64_t n = 0; n < of->num_parts && first < end; n++) {
        const tn_part *part = &of->parts[n];
        const void *x = product->x;
        if (part->columns != NULL) {
            x = element_at(product->permuted, product->dtype, first_permuted);
            first_permuted += product->num_rows * of->num_in;
        }
        const int64_t from = begin > first ? begin - first : 0;
        const int64_t to = end - first < part->matrix.num_out ? end - first : part->matrix.num_out;
        const tn_linear_args args = {
            .size = sizeof args,
            .weight = &part->matrix,
            .x = x,
            .out = element_at(product->out, product->dtype, first),
            .num_rows = product->num_rows,
            .x_stride = of->num_in,
            .out_stride = of->num_out,
            .x_dtype = product->dtype,
            .out_dtype = product->dtype,
        };
        if (from < to) tn_linear_columns(&args, from, to);
        first += part->matrix.num_out;
    }
}

void tn_product_stage(const tn_product *product, tn_region *region) {
    EACH_COLUMNS(region, product->projection->num_out) tn_product_columns(product, begin, end);
}
