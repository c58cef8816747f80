/* Low-rank adapters: rows of one step may have different ones, in runs of neighbouring rows.
 *
 * The first product, to a row's few low numbers, is `tn_linear_columns` in fp32. The second is a sum over ranks,
 * ascending, by fused multiply-adds into fp32, a lane a column: so a row's bits depend on no other row, and on no split
 * of rows, columns or threads. B is transposed, which makes lanes of columns contiguous, and spares sums over lanes. */
#include "adapters.h"

#include "elements.h"
#include "linear.h"

enum { TILE_ROWS = 4, TILE_VECTORS = 2, ROW_VECTORS = 8 };

static const tn_adapter_site *site_of(const tn_adapted *adapted, const tn_adapter_run *run) {
    return &run->layers[adapted->layer].sites[adapted->site];
}

bool tn_is_adapted(const tn_adapted *adapted) {
    for (int64_t n = 0; n < adapted->num_runs; n++)
        if (site_of(adapted, &adapted->runs[n])->num_parts) return true;
    return false;
}

void tn_adapter_low_stage(const tn_adapted *adapted, const void *x, int64_t num_in, int dtype, tn_region *region) {
    if (!tn_is_adapted(adapted)) return;
    for (int64_t n; (n = tn_next_chunk(region)) < adapted->num_runs;) {
        const tn_adapter_run *run = &adapted->runs[n];
        const tn_adapter_site *site = site_of(adapted, run);
        if (site->num_parts == 0) continue;
        const tn_linear_args args = {
            .size = sizeof args,
            .weight = &site->a,
            .x = element_at(x, dtype, run->start * num_in),
            .out = adapted->low + run->start * adapted->low_stride,
            .num_rows = run->length,
            .x_stride = num_in,
            .out_stride = adapted->low_stride,
            .x_dtype = dtype,
            .out_dtype = TN_F32,
        };
        tn_linear_columns(&args, 0, site->a.num_out);
    }
    tn_barrier(region);
}

/* `vectors` whole vectors of columns from `column` on, or of one vector the first `count` lanes. Each tile sums a row's
 * column in the same order, whatever its shape. B's rows lie far apart: tiles of one row take several lines of each. */
TN_INLINE void add_tile(const int rows, const int vectors, const int count, const int b_dtype,
                        const tn_adapter_part *part, const float *low, int64_t low_stride, void *out,
                        int64_t out_stride, int dtype, int64_t column) {
    vf sums[TILE_ROWS][ROW_VECTORS];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) sums[i][v] = vf_zero();
    for (int64_t k = 0; k < part->rank; k++) {
        const int64_t place = k * part->num_out + column;
        for (int v = 0; v < vectors; v++) {
            const vf b = load_elements(part->b, b_dtype, place + v * TN_LANES, count);
            for (int i = 0; i < rows; i++) sums[i][v] = vf_fma(vf_set(low[i * low_stride + k]), b, sums[i][v]);
        }
    }
    const vf factor = vf_set(part->factor);
    for (int i = 0; i < rows; i++) {
        for (int v = 0; v < vectors; v++) {
            const int64_t place = i * out_stride + column + v * TN_LANES;
            const vf y = load_elements(out, dtype, place, count);
            store_elements(out, dtype, place, vf_fma(factor, sums[i][v], y), count);
        }
    }
}

/* Columns [begin, end) of the part, of `rows` rows; `out` is at the part's first column. */
TN_INLINE void add_rows(const int rows, const int vectors, const int b_dtype, const tn_adapter_part *part,
                        const float *low, int64_t low_stride, void *out, int64_t out_stride, int dtype, int64_t begin,
                        int64_t end) {
    int64_t column = begin;
    for (; column + vectors * TN_LANES <= end; column += vectors * TN_LANES)
        add_tile(rows, vectors, TN_LANES, b_dtype, part, low, low_stride, out, out_stride, dtype, column);
    for (; column < end; column += TN_LANES)
        add_tile(rows, 1, lanes_left(end - column), b_dtype, part, low, low_stride, out, out_stride, dtype, column);
}

TN_INLINE void add_part(const int b_dtype, const tn_adapter_part *part, const tn_adapter_run *run, const float *low,
                        int64_t low_stride, void *out, int64_t out_stride, int dtype, int64_t begin, int64_t end) {
    int64_t row = run->start;
    const int64_t last = run->start + run->length;
    for (; row + TILE_ROWS <= last; row += TILE_ROWS)
        add_rows(TILE_ROWS, TILE_VECTORS, b_dtype, part, low + row * low_stride, low_stride,
                 element_at(out, dtype, row * out_stride), out_stride, dtype, begin, end);
    for (; row < last; row++)
        add_rows(1, ROW_VECTORS, b_dtype, part, low + row * low_stride, low_stride,
                 element_at(out, dtype, row * out_stride), out_stride, dtype, begin, end);
}

void tn_adapter_columns(const tn_adapted *adapted, void *out, int64_t num_out, int dtype, int64_t begin, int64_t end) {
    for (int64_t n = 0; n < adapted->num_runs; n++) {
        const tn_adapter_run *run = &adapted->runs[n];
        const tn_adapter_site *site = site_of(adapted, run);
        int64_t first_low = 0; /* column of `low` */
        for (int64_t p = 0; p < site->num_parts; p++) {
            const tn_adapter_part *part = &site->parts[p];
            const int64_t from = begin > part->first ? begin - part->first : 0;
            const int64_t to = end - part->first < part->num_out ? end - part->first : part->num_out;
            const float *low = adapted->low + first_low;
            void *own = element_at(out, dtype, part->first);
            if (from < to && part->dtype == TN_BF16)
                add_part(TN_BF16, part, run, low, adapted->low_stride, own, num_out, dtype, from, to);
            else if (from < to)
                add_part(TN_F32, part, run, low, adapted->low_stride, own, num_out, dtype, from, to);
            first_low += part->rank;
        }
    }
}
