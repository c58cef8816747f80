// CUDA's language, as far as the kernels use it, on a CPU: a block's threads are coroutines of one thread, which change
// at every barrier. The kernels' source is compiled behind this header unchanged (kernels_of_cuda.py).
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#define ON_CPU 1
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static
// A kernel has one parameter, a structure: `name_bytes` is its size.
#define KERNEL(name, Arguments, threads)                                                        \
  static void name##_body(const Arguments& args);                                               \
  extern "C" const unsigned name##_bytes;                                                       \
  const unsigned name##_bytes = sizeof(Arguments);                                              \
  extern "C" void name(void** parameters) { name##_body(*(const Arguments*)parameters[0]); }    \
  static void name##_body(const Arguments& args)
struct Dim { unsigned x, y, z; };
static Dim threadIdx, blockIdx, gridDim, blockDim;
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };

struct Fiber { ucontext_t start; jmp_buf at; char* stack; bool has_begun, is_done; int waits; unsigned exchanges; };
enum { RUNS, FOR_BLOCK, FOR_WARP };
static const unsigned MAX_THREADS = 1024, STACK_BYTES = 64 << 10;
static Fiber fibers[MAX_THREADS];
static unsigned current, num_threads;
static jmp_buf scheduler;
static void (*fiber_kernel)(void**);
static void** fiber_parameters;
alignas(128) static char shared_memory[228 << 10];

static void enter(unsigned number) {
  Fiber& fiber = fibers[number];
  current = number;
  threadIdx = {number, 0, 0};
  if (fiber.has_begun) _longjmp(fiber.at, 1);
  fiber.has_begun = true;
  setcontext(&fiber.start);
}
// Goes on with the next lane of the warp that runs, or without one in the scheduler.
static void wait_for(int what) {
  Fiber& self = fibers[current];
  self.waits = what;
  if (_setjmp(self.at)) return;
  for (unsigned next = current + 1; next % 32 && next < num_threads; next++)
    if (fibers[next].waits == RUNS && !fibers[next].is_done) enter(next);
  _longjmp(scheduler, 1);
}
static void fiber_main() {
  for (;;) {
    fiber_kernel(fiber_parameters);
    fibers[current].is_done = true;
    wait_for(RUNS);  // until the next block has work for it
  }
}
static inline void __syncthreads() { wait_for(FOR_BLOCK); }
static inline void __syncwarp() { wait_for(FOR_WARP); }

static void resume(unsigned number) {
  if (!_setjmp(scheduler)) enter(number);
}
static void run_block(unsigned num) {
  num_threads = num;
  for (unsigned i = 0; i < num; i++) {
    Fiber& fiber = fibers[i];
    if (!fiber.stack) {
      fiber.stack = (char*)malloc(STACK_BYTES);
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack;
      fiber.start.uc_stack.ss_size = STACK_BYTES;
      fiber.start.uc_link = nullptr;
      makecontext(&fiber.start, fiber_main, 0);
    }
    fiber.is_done = false;
    fiber.waits = RUNS;
  }
  for (;;) {
    unsigned num_done = 0, num_block = 0;
    bool progress = false;
    for (unsigned first = 0; first < num; first += 32) {
      // A warp goes on until all its lanes wait for the block or are done.
      for (;;) {
        unsigned at_warp = 0, live = 0;
        for (unsigned i = first; i < first + 32 && i < num; i++) {
          if (!fibers[i].is_done && fibers[i].waits == RUNS) { resume(i); progress = true; }
          live += !fibers[i].is_done;
          at_warp += !fibers[i].is_done && fibers[i].waits == FOR_WARP;
        }
        if (!at_warp) break;
        if (at_warp != live) { fprintf(stderr, "a warp's lanes are at different barriers\n"); abort(); }
        for (unsigned i = first; i < first + 32 && i < num; i++) fibers[i].waits = fibers[i].is_done ? fibers[i].waits : RUNS;
      }
    }
    for (unsigned i = 0; i < num; i++) { num_done += fibers[i].is_done; num_block += !fibers[i].is_done && fibers[i].waits == FOR_BLOCK; }
    if (num_done == num) return;
    if (num_done + num_block != num || (num_done && num_block)) { fprintf(stderr, "%u threads ended before a barrier of %u\n", num_done, num_block); abort(); }
    for (unsigned i = 0; i < num; i++) fibers[i].waits = RUNS;
    if (!progress) abort();
  }
}
extern "C" void run_on_cpu(void (*kernel)(void**), void** parameters, const unsigned* grid, unsigned block, unsigned shared_bytes) {
  fiber_kernel = kernel;
  fiber_parameters = parameters;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block, 1, 1};
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (unsigned x = 0; x < grid[0]; x++) {
        blockIdx = {x, y, z};
        memset(shared_memory, 0xA5, shared_bytes);
        run_block(block);
      }
}

// What lanes of a warp give each other: one barrier each, as the places of every second exchange are others. A lane reads
// before its next barrier, and so before another one can write there again.
template <class Given>
struct Exchanged {
  const char (*places)[64];
  const Given& operator[](unsigned lane) const { return *(const Given*)places[lane]; }
};
template <class Given>
static Exchanged<Given> exchange(const Given& given) {
  alignas(64) static char places[2][MAX_THREADS][64];
  static_assert(sizeof(Given) <= 64);
  unsigned turn = fibers[current].exchanges++ % 2;
  new (places[turn][current]) Given(given);
  __syncwarp();
  return {&places[turn][current / 32 * 32]};
}
template <class Number>
static Number shuffled(Number x, unsigned mask) { return exchange(x)[(threadIdx.x % 32) ^ mask]; }

static inline float float_of_bits(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline unsigned bits_of_float(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
template <class Number>
static Number min(Number a, Number b) { return a < b ? a : b; }
template <class Number>
static Number max(Number a, Number b) { return a > b ? a : b; }
template <class Number>
static void atomicAdd(Number* at, Number by) { *at += by; }

struct Bf16 {
  static constexpr bool IS_BF16 = true;
  static float wide(unsigned short x) { return float_of_bits((unsigned)x << 16); }
  static unsigned short narrow(float x) {
    unsigned bits = bits_of_float(x);
    return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  }
  static unsigned pair(float low, float high) { return narrow(low) | (unsigned)narrow(high) << 16; }
  static unsigned fused(unsigned a, unsigned b, unsigned c) { return pair(fmaf(wide(a), wide(b), wide(c)), fmaf(wide(a >> 16), wide(b >> 16), wide(c >> 16))); }
};
struct F16 {
  static constexpr bool IS_BF16 = false;
  static float wide(unsigned short x) {
    unsigned exponent = x >> 10 & 31, fraction = x & 1023;
    float size = exponent == 31 ? (fraction ? NAN : INFINITY) : exponent ? float_of_bits((exponent + 112) << 23 | fraction << 13) : fraction * 0x1p-24f;
    return x >> 15 ? -size : size;
  }
  static unsigned short narrow(float x) {
    unsigned bits = bits_of_float(x), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
    if (x != x) return 0x7FFF;
    if (size >= bits_of_float(65520)) return sign | 0x7C00;
    if (size < bits_of_float(0x1p-14f)) return sign | (unsigned)((float_of_bits(size) * 0x1p24f + 0x1p23f) - 0x1p23f);  // to even
    return sign | (((size + 0xFFF + (size >> 13 & 1)) >> 13) - (112 << 10));
  }
  static unsigned pair(float low, float high) { return narrow(low) | (unsigned)narrow(high) << 16; }
  static unsigned fused(unsigned a, unsigned b, unsigned c) { return pair(fmaf(wide(a), wide(b), wide(c)), fmaf(wide(a >> 16), wide(b >> 16), wide(c >> 16))); }
};

// mma.m16n8k16: lane 4 g + c has rows g and g + 8 of a, column g of b, and columns 2 c and 2 c + 1 of d.
struct Fragments { float a[4][2], b[2][2]; };
template <class T>
static void multiply_add(float* d, const unsigned* a, unsigned b0, unsigned b1) {
  Fragments own;
  for (unsigned i = 0; i < 8; i++) own.a[i / 2][i % 2] = T::wide(a[i / 2] >> 16 * (i % 2));
  for (unsigned i = 0; i < 4; i++) own.b[i / 2][i % 2] = T::wide((i < 2 ? b0 : b1) >> 16 * (i % 2));
  const Exchanged<Fragments> all = exchange(own);
  const unsigned g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  for (unsigned i = 0; i < 4; i++)
    for (unsigned k = 0; k < 16; k += 2) {
      const unsigned lane = k % 8 / 2, column = 2 * c + i % 2;
      const float *x = all[4 * g + lane].a[i / 2 + 2 * (k / 8)], *y = all[4 * column + lane].b[k / 8];
      d[i] += x[0] * y[0];
      d[i] += x[1] * y[1];
    }
}
static inline void load_transposed(unsigned* out, const void* row) {
  const Exchanged<const void*> rows = exchange(row);
  const unsigned g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  for (unsigned matrix = 0; matrix < 4; matrix++) {
    const unsigned short *one = (const unsigned short*)rows[8 * matrix + 2 * c], *two = (const unsigned short*)rows[8 * matrix + 2 * c + 1];
    out[matrix] = one[g] | (unsigned)two[g] << 16;
  }
}
