/* Sums of a tile → results: turned, scaled, with the bias, rounded where they are bf16. */
#include "tile_results.h"

#include "tiles.h"

#if TN_TILES

#include "isa_amx.h"

TN_INLINE int columns_of(const tn_tile_result *result) { return (int)least(result->columns, TN_TILE_SIDE); }

/* One row's 16 columns. */
TN_INLINE vf row_of_sums(const tn_tile_result *result, int row) {
    const __m512i places = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                              _mm512_set1_epi32(TN_BLOCK_ROWS));
    vf sums = _mm512_i32gather_ps(places, result->sums + row, sizeof(float));
    if (result->scale != NULL) sums = vf_mul(sums, vf_load(result->scale));
    return result->bias == NULL ? sums : vf_add(sums, vf_load(result->bias));
}

/* Rounded by the processor: NaN stay, denormals are 0. */
TN_INLINE void store_row(const tn_linear_args *args, const tn_tile_result *result, int row, vf sums) {
    const __mmask16 mask = v_mask(columns_of(result));
    const int64_t place = (result->row + row) * args->out_stride + result->column;
    if (args->out_dtype == TN_F32)
        _mm512_mask_storeu_ps((float *)args->out + place, mask, sums);
    else
        _mm256_mask_storeu_epi16((uint16_t *)args->out + place, mask, (__m256i)_mm512_cvtneps_pbh(sums));
}

/* Pairs of columns, a word of 32 bits a row; then 8 by 16 words are turned, two rows 8 apart to a vector. */
TN_INLINE void store_bf16(const tn_linear_args *args, const tn_tile_result *result, const vf sums[TN_TILE_SIDE]) {
    const __m512i weave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i p[8], t[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        p[i] = _mm512_permutexvar_epi16(weave, (__m512i)_mm512_cvtne2ps_pbh(sums[2 * i + 1], sums[2 * i]));
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm512_unpacklo_epi32(p[i], p[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(p[i], p[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) { /* quarter q of p[i] and p[i + 4]: row 4 q + i, columns 0..7 and 8..15 */
        p[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        p[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        p[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        p[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_permutex2var_epi64(p[i], low, p[i + 4]);      /* rows i, 4 + i */
        t[4 + i] = _mm512_permutex2var_epi64(p[i], high, p[i + 4]); /* rows 8 + i, 12 + i */
    }
    const __mmask16 mask = v_mask(columns_of(result));
    uint16_t *to = (uint16_t *)args->out + result->row * args->out_stride + result->column;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const int row = i / 4 * 8 + i % 4;
        if (row < result->rows)
            _mm256_mask_storeu_epi16(to + row * args->out_stride, mask, _mm512_castsi512_si256(t[i]));
        if (row + 4 < result->rows)
            _mm256_mask_storeu_epi16(to + (row + 4) * args->out_stride, mask, _mm512_extracti64x4_epi64(t[i], 1));
    }
}

/* Sums times their scales, with the bias, rounded where the result is bf16. */
void tn_finish_tile(const tn_linear_args *args, const tn_tile_result *result) {
    enum { FEW = 4 };
    if (result->rows <= FEW) {
        for (int row = 0; row < result->rows; row++) store_row(args, result, row, row_of_sums(result, row));
        return;
    }
    vf sums[TN_TILE_SIDE];
#pragma GCC unroll 16
    for (int c = 0; c < TN_TILE_SIDE; c++) {
        sums[c] = vf_load(result->sums + c * TN_BLOCK_ROWS);
        if (result->scale != NULL) sums[c] = vf_mul(sums[c], vf_set(result->scale[c]));
        if (result->bias != NULL) sums[c] = vf_add(sums[c], vf_set(result->bias[c]));
    }
    if (args->out_dtype != TN_F32) {
        store_bf16(args, result, sums);
        return;
    }
    __m512i turned[TN_TILE_SIDE];
#pragma GCC unroll 16
    for (int c = 0; c < TN_TILE_SIDE; c++) turned[c] = _mm512_castps_si512(sums[c]);
    transpose(turned);
    for (int row = 0; row < result->rows; row++) store_row(args, result, row, _mm512_castsi512_ps(turned[row]));
}

#endif
