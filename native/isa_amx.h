/* Tiles: eight registers of 16 rows by 64 bytes, and products of two of them. Read by what multiplies with tiles.
 *
 * tile_dot adds to a tile c of 16 by 16 floats the product of `a`, 16 rows of 32 bf16, with `b`, 16 pairs of bf16 by 16
 * columns: c[i][n] = c[i][n] + (even + odd), where `even` and `odd` are chains of 16 fused multiply-adds each, from +0,
 * ascending, over a[i][2p] * b[p][n][0] and over a[i][2p + 1] * b[p][n][1]. Every sum is rounded to nearest, ties to even;
 * denormals, of inputs and of results, are 0 (Intel's manual, TDPBF16PS).
 *
 * tile_dot_integers does so with integers: c are 32 bits, `a` 16 rows of 64 signed bytes, and `b` 16 quads of them by 16
 * columns. Sums are exact, or wrap around (TDPBSSD).
 *
 * Registers are whole; or narrow, then 0 to 3, 6 and 7 have fewer columns; or halves, then 4 and 5 are 16 rows by 32 bytes,
 * and 6 and 7 have 8 rows.
 *
 * With TN_SOFT_TILES the same is done in memory, bit for bit, which tests use where the processor has no tiles.
 * Registers have numbers that the compiler knows. */
#ifndef TN_ISA_AMX_H
#define TN_ISA_AMX_H

#include <immintrin.h>
#include <string.h>

#include "isa.h"
#include "tiles.h"

enum { TILE_BYTES = 1024, TILE_ROW_BYTES = 64 };

TN_INLINE int tile_rows(tn_tile_shape shape, int tile) { return shape == TN_HALF_TILES && tile >= 6 ? 8 : 16; }
TN_INLINE int tile_row_bytes(tn_tile_shape shape, int tile) {
    const bool is_weights = tile == 4 || tile == 5;
    if (shape == TN_HALF_TILES) return is_weights ? TILE_ROW_BYTES / 2 : TILE_ROW_BYTES;
    return is_weights ? TILE_ROW_BYTES : (int)shape * 4;
}

#if defined(TN_SOFT_TILES)

static _Thread_local _Alignas(64) unsigned char soft_tile[8][16][TILE_ROW_BYTES];
extern _Thread_local tn_tile_shape tn_soft_shape;

TN_INLINE void tiles_configure(tn_tile_shape shape) { tn_soft_shape = shape; }
TN_INLINE void tiles_release(void) {}
TN_INLINE void tile_zero(const int to) { memset(soft_tile[to], 0, TILE_BYTES); }
TN_INLINE void tile_load(const int to, const void *from, int64_t stride) {
    memset(soft_tile[to], 0, TILE_BYTES);
    for (int row = 0; row < tile_rows(tn_soft_shape, to); row++)
        memcpy(soft_tile[to][row], (const char *)from + row * stride, tile_row_bytes(tn_soft_shape, to));
}
TN_INLINE void tile_store(const int from, void *to, int64_t stride) {
    for (int row = 0; row < 16; row++)
        memcpy((char *)to + row * stride, soft_tile[from][row], tile_row_bytes(tn_soft_shape, from));
}
/* A function of its own, so that no sum moves to where denormals count. */
static __attribute__((noinline)) void soft_products(const int c, const int a, const int b) {
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    for (int row = 0; row < 16; row++) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int pair = 0; pair < 16; pair++) {
            uint16_t own[2];
            memcpy(own, soft_tile[a][row] + 4 * pair, sizeof own);
            const __m512i pairs = _mm512_load_si512(soft_tile[b][pair]);
            const __m512 firsts = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
            const __m512 seconds = _mm512_castsi512_ps(_mm512_and_si512(pairs, high));
            even = _mm512_fmadd_ps(_mm512_set1_ps(f32_of_bf16(own[0])), firsts, even);
            odd = _mm512_fmadd_ps(_mm512_set1_ps(f32_of_bf16(own[1])), seconds, odd);
        }
        float *sums = (float *)soft_tile[c][row];
        _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), _mm512_add_ps(even, odd)));
    }
}
TN_INLINE void tile_dot(const int c, const int a, const int b) {
    enum { DENORMALS_ARE_0 = 0x8040 };
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | DENORMALS_ARE_0);
    soft_products(c, a, b);
    _mm_setcsr(before);
}
TN_INLINE void tile_dot_integers(const int c, const int a, const int b) {
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 16; column++) {
            uint32_t sum;
            memcpy(&sum, soft_tile[c][row] + 4 * column, sizeof sum);
            for (int k = 0; k < TILE_ROW_BYTES; k++)
                sum += (uint32_t)((int8_t)soft_tile[a][row][k] * (int8_t)soft_tile[b][k / 4][4 * column + k % 4]);
            memcpy(soft_tile[c][row] + 4 * column, &sum, sizeof sum);
        }
}

#else

/* The compiler's own intrinsic takes its operand for eight bytes in some versions. */
TN_INLINE void tiles_configure(tn_tile_shape shape) {
    typedef struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config_t;
    _Static_assert(sizeof(config_t) == 64, "as LDTILECFG reads it");
    config_t config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = (uint16_t)tile_row_bytes(shape, tile);
        config.rows[tile] = (uint8_t)tile_rows(shape, tile);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
TN_INLINE void tiles_release(void) { _tile_release(); }

#define tile_zero(to) _tile_zero(to)
#define tile_store(from, to, stride) _tile_stored(from, to, stride)
#define tile_dot(c, a, b) _tile_dpbf16ps(c, a, b)
#define tile_dot_integers(c, a, b) _tile_dpbssd(c, a, b)
#if defined(__clang__)
#define tile_load(to, from, stride) _tile_loadd(to, from, stride)
#else /* gcc's own does not say that it reads memory, so that stores before it could be moved behind it */
#define tile_load(to, from, stride)                                                                             \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #to ::"r"(from), "r"((int64_t)(stride)) : "memory")
#endif

#endif

/* 16 by 16 words of 32 bits: columns become rows. */
TN_INLINE void transpose(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

#endif
