// What all kernels share: 16-bit numbers, the matrix instruction, reductions, and what a step's counts mean.
//
// Every kernel has one parameter, a structure that arguments.py mirrors. Grids are made for a bucket of rows, and
// `counts` on the device says how many there are: so a step's launches do not change, and blocks without rows end at once.
//
// Nothing here depends on the number of rows of a step: each row's numbers are added in an order that the model decides.
// The tests compile this very source for CPUs, behind a header that has the functions between ON_DEVICE and its end.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define NONE (-INFINITY)
// A loop over registers: its indices must be constants.
#ifdef ON_CPU
#define EACH(i, num) for (u32 i = 0; i < (num); i++)
#else
#define EACH(i, num) _Pragma("unroll") for (u32 i = 0; i < (num); i++)
#endif

enum Count { NUM_ROWS, NUM_LOGITS, NUM_ITEMS, NUM_MERGES, NUM_PAIRS };  // pairs: of a row and an expert that it has chosen

// Pairs of one expert that a block of a mixture's products has, by their places; first == end: none.
struct Tile {
  u32 expert, first, end;
};

#ifndef ON_CPU  // ON_DEVICE
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define KERNEL(name, Arguments, threads) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Arguments args)
extern __shared__ uint4 shared_memory[];  // dynamic

__device__ __forceinline__ float float_of_bits(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 bits_of_float(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float shuffled(float x, u32 mask) { return __shfl_xor_sync(~0u, x, mask); }
__device__ __forceinline__ double shuffled(double x, u32 mask) { return __shfl_xor_sync(~0u, x, mask); }
__device__ __forceinline__ u64 shuffled(u64 x, u32 mask) { return __shfl_xor_sync(~0u, x, mask); }

// d += a * b of 16 x 16 and 16 x 8: mma.m16n8k16's own layout of fragments.
template <class T>
__device__ __forceinline__ void multiply_add(float* d, const u32* a, u32 b0, u32 b1) {
  if constexpr (T::IS_BF16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four transposed matrices of 8 x 8 from shared memory; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_transposed(u32* out, const void* row) {
  u32 address = (u32)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address));
}

struct Bf16 {
  static constexpr bool IS_BF16 = true;
  static __device__ __forceinline__ float wide(u16 x) { return __uint_as_float((u32)x << 16); }
  static __device__ __forceinline__ u32 pair(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
  }
  static __device__ __forceinline__ u32 fused(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
  }
};

struct F16 {
  static constexpr bool IS_BF16 = false;
  static __device__ __forceinline__ float wide(u16 x) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
    return out;
  }
  static __device__ __forceinline__ u32 pair(float low, float high) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
  }
  static __device__ __forceinline__ u32 fused(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
  }
};
#endif  // ON_DEVICE

#ifdef IN_F16  // what activations, keys and values are; one module each
typedef F16 T;
#else
typedef Bf16 T;
#endif

__device__ __forceinline__ float wide(u16 x) { return T::wide(x); }
__device__ __forceinline__ u16 narrow(float x) { return (u16)T::pair(x, x); }
__device__ __forceinline__ float rounded(float x) { return wide(narrow(x)); }

// A number of a weight that may have any of three types: 0 bf16, 1 fp16, 2 fp32.
__device__ __forceinline__ float number_at(const void* array, u64 at, u32 kind) {
  return kind == 2 ? ((const float*)array)[at] : kind == 1 ? F16::wide(((const u16*)array)[at]) : Bf16::wide(((const u16*)array)[at]);
}

__device__ __forceinline__ u32 lane_of(u32 thread) { return thread % 32; }

template <class Number>
__device__ __forceinline__ Number warp_sum(Number x) {
  for (u32 mask = 16; mask; mask /= 2) x += shuffled(x, mask);
  return x;
}

// The sum over a block of up to 32 warps, in the same order for every thread. All threads call it.
template <class Number>
__device__ __forceinline__ Number block_sum(Number x, Number* of_warps) {
  x = warp_sum(x);
  if (lane_of(threadIdx.x) == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  Number total = 0;
  for (u32 warp = 0; warp < blockDim.x / 32; warp++) total += of_warps[warp];
  __syncthreads();
  return total;
}
