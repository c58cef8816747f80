/* Low-rank adapters: rows of one step may have different ones, in runs of neighbouring rows.
 *
 * The first product, to a row's few low numbers, is `tn_linear_columns` in fp32. The second is a sum over ranks,
 * ascending, by fused multiply-adds into fp32, a lane a column: so a row's bits depend on no other row, and on no split
 * of rows, columns or threads. B is transposed, which makes lanes of columns contiguous, and spares sums over lanes. */
#include "adapters.h"

#include "elements.h"
#include "linear.h"

enum { TILE_ROWS = 4, TILE_VECTORS = 2 };

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

/* Columns [begin, end) of the part, of `rows` rows; `out` is at the part's first column. */
TN_INLINE void add_tile(const int rows, const tn_adapter_part *part, const float *low, int64_t low_stride, void *out,
                        int64_t out_stride, int dtype, int64_t begin, int64_t end) {
    for (int64_t column = begin; column < end; column += TILE_VECTORS * TN_LANES) {
        int count[TILE_VECTORS];
        vf sums[TILE_ROWS][TILE_VECTORS];
        for (int v = 0; v < TILE_VECTORS; v++) {
            const int64_t left = end - column - v * TN_LANES;
            count[v] = left > 0 ? lanes_left(left) : 0;
            for (int i = 0; i < rows; i++) sums[i][v] = vf_zero();
        }
        for (int64_t k = 0; k < part->rank; k++) {
            for (int v = 0; v < TILE_VECTORS; v++) {
                if (count[v] == 0) continue;
                const int64_t place = k * part->num_out + column + v * TN_LANES;
                const vf b = load_elements(part->b, part->dtype, place, count[v]);
                for (int i = 0; i < rows; i++) sums[i][v] = vf_fma(vf_set(low[i * low_stride + k]), b, sums[i][v]);
            }
        }
        const vf factor = vf_set(part->factor);
        for (int i = 0; i < rows; i++) {
            for (int v = 0; v < TILE_VECTORS; v++) {
                if (count[v] == 0) continue;
                const int64_t place = i * out_stride + column + v * TN_LANES;
                const vf y = load_elements(out, dtype, place, count[v]);
                store_elements(out, dtype, place, vf_fma(factor, sums[i][v], y), count[v]);
            }
        }
    }
}

static void add_part(const tn_adapter_part *part, const tn_adapter_run *run, const float *low, int64_t low_stride,
                     void *out, int64_t out_stride, int dtype, int64_t begin, int64_t end) {
    int64_t row = run->start;
    const int64_t last = run->start + run->length;
    for (; row + TILE_ROWS <= last; row += TILE_ROWS)
        add_tile(TILE_ROWS, part, low + row * low_stride, low_stride, element_at(out, dtype, row * out_stride),
                 out_stride, dtype, begin, end);
    for (; row < last; row++)
        add_tile(1, part, low + row * low_stride, low_stride, element_at(out, dtype, row * out_stride), out_stride,
                 dtype, begin, end);
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
            if (from < to)
                add_part(part, run, adapted->low + first_low, adapted->low_stride, element_at(out, dtype, part->first),
                         num_out, dtype, from, to);
            first_low += part->rank;
        }
    }
}
