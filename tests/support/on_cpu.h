// CUDA's language, as far as the kernels use it, on a CPU: a block's threads are coroutines of one thread, which change
// at every barrier. The kernels' source is compiled behind this header unchanged (kernels_of_cuda.py).
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

struct Fiber { ucontext_t start; jmp_buf at; char* stack; bool has_begun, is_done; int waits; };
enum { RUNS, FOR_BLOCK, FOR_WARP };
static const unsigned MAX_THREADS = 1024, STACK_BYTES = 64 << 10;
static Fiber fibers[MAX_THREADS];
static unsigned current;
static jmp_buf scheduler;
static void (*fiber_kernel)(void**);
static void** fiber_parameters;
alignas(128) static char shared_memory[228 << 10];

static void fiber_main() {
  fiber_kernel(fiber_parameters);
  fibers[current].is_done = true;
  _longjmp(scheduler, 1);
}
static void wait_for(int what) {
  Fiber& self = fibers[current];
  self.waits = what;
  if (!_setjmp(self.at)) _longjmp(scheduler, 1);
}
static inline void __syncthreads() { wait_for(FOR_BLOCK); }
static inline void __syncwarp() { wait_for(FOR_WARP); }

static void resume(unsigned number) {
  Fiber& fiber = fibers[number];
  current = number;
  threadIdx = {number, 0, 0};
  fiber.waits = RUNS;
  if (_setjmp(scheduler)) return;
  if (fiber.has_begun) _longjmp(fiber.at, 1);
  fiber.has_begun = true;
  setcontext(&fiber.start);
}
static void run_block(unsigned num) {
  for (unsigned i = 0; i < num; i++) {
    Fiber& fiber = fibers[i];
    if (!fiber.stack) fiber.stack = (char*)malloc(STACK_BYTES);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack;
    fiber.start.uc_stack.ss_size = STACK_BYTES;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, fiber_main, 0);
    fiber.has_begun = fiber.is_done = false;
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
