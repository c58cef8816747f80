/* Included before all of llama.cpp's C++. The `_tile_loadconfig` of GCC 12.2 and its contemporaries declares 8 of the 64
 * bytes that it reads, so that the compiler drops what is stored to the others; llama.cpp's products in AMX then end by
 * SIGILL. */
#if defined(__AMX_TILE__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(config)))
#endif
