// What the loader's kernels need of CUDA, on a CPU: to be included before them. Blocks run one after another.
//
// `every_thread` is for kernels without barriers: a block's threads are a loop. In `every_lane` they are contexts that
// take turns, each until it comes to a barrier or to its end; one that ends while others wait at a barrier is a defect,
// and ends the process. With `reversed`, the last lane goes first: what differs then lacks a barrier.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return uint2{x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }
struct Place { unsigned x, y, z; };
static thread_local Place threadIdx, blockIdx, blockDim, gridDim;
#define __global__
#define __device__
#define __shared__ static thread_local
#define __launch_bounds__(n)
#define __restrict__

static const unsigned MAX_LANES = 256, STACK_BYTES = 64 << 10;

struct Lanes {
  ucontext_t scheduler, contexts[MAX_LANES];
  std::vector<char> stacks = std::vector<char>((size_t)MAX_LANES * STACK_BYTES);
  bool is_done[MAX_LANES];
  int votes[MAX_LANES];
  void (*run)(const void*);
  const void* body;
};
static thread_local Lanes* lanes_of_block;

static inline void wait_for_all() {
  Lanes& lanes = *lanes_of_block;
  const Place own = threadIdx;
  swapcontext(&lanes.contexts[own.x], &lanes.scheduler);
  threadIdx = own;
}
static inline void __syncthreads() { wait_for_all(); }
static inline void __syncwarp() { wait_for_all(); }
static inline int __all_sync(unsigned, int vote) {
  Lanes& lanes = *lanes_of_block;
  lanes.votes[threadIdx.x] = vote;
  wait_for_all();
  int all = 1;
  for (unsigned lane = 0; lane < blockDim.x; lane++) all &= lanes.votes[lane] != 0;
  wait_for_all();
  return all;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return bits ? low >> bits | high << (32 - bits) : low;
}
static inline int __clz(unsigned value) { return value ? __builtin_clz(value) : 32; }
static inline unsigned atomicOr(unsigned* place, unsigned bits) { return __atomic_fetch_or(place, bits, __ATOMIC_RELAXED); }

static void lane_body() {
  Lanes& lanes = *lanes_of_block;
  lanes.run(lanes.body);
  lanes.is_done[threadIdx.x] = true;
}

static void run_lanes(Lanes& lanes, unsigned num, bool reversed) {
  for (unsigned lane = 0; lane < num; lane++) {
    ucontext_t& context = lanes.contexts[lane];
    getcontext(&context);
    context.uc_stack.ss_sp = lanes.stacks.data() + (size_t)lane * STACK_BYTES;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = &lanes.scheduler;
    makecontext(&context, lane_body, 0);
    lanes.is_done[lane] = false;
  }
  for (unsigned num_done = 0; num_done == 0;) {
    for (unsigned turn = 0; turn < num; turn++) {
      const unsigned lane = reversed ? num - 1 - turn : turn;
      threadIdx = Place{lane, 0, 0};
      swapcontext(&lanes.scheduler, &lanes.contexts[lane]);
      num_done += lanes.is_done[lane];
    }
    if (num_done > 0 && num_done < num) {
      std::fprintf(stderr, "%u of %u lanes ended while the others wait at a barrier\n", num_done, num);
      std::abort();
    }
  }
}

template <typename Body>
static void every_lane(unsigned grid, unsigned num_lanes, bool reversed, const Body& body) {
  static thread_local Lanes lanes;
  lanes_of_block = &lanes;
  lanes.run = [](const void* given) { (*(const Body*)given)(); };
  lanes.body = &body;
  gridDim = Place{grid, 1, 1};
  blockDim = Place{num_lanes, 1, 1};
  for (unsigned block = 0; block < grid; block++) {
    blockIdx = Place{reversed ? grid - 1 - block : block, 0, 0};
    run_lanes(lanes, num_lanes, reversed);
  }
}

template <typename Body>
static void every_thread(unsigned grid_x, unsigned grid_y, unsigned num_threads, const Body& body) {
  gridDim = Place{grid_x, grid_y, 1};
  blockDim = Place{num_threads, 1, 1};
  for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x++)
      for (threadIdx.x = 0; threadIdx.x < num_threads; threadIdx.x++) body();
}
