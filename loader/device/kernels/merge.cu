// Planes become words in a model's weights.
//
// An image is what is uploaded of one part (loader/device/image.py): tables, then planes. A table is a Recipe and an
// array of Frames. A frame is 65,536 elements of one tensor, or the fewer that are its last ones (docs/format.md, "Packed
// planes"): in a plane of b bits, element i stands in byte i mod h, from bit b * (i div h) on, h = ceil(count / (8 / b)).
// In whole frames all of h, and so every row of elements, is a multiple of 8,192: neighbours in memory are read
// together. Shorter frames are done element by element.
//
// All offsets are from the image's or the weights' first byte, checked when the tables were made. Planes begin
// at multiples of 16 bytes in the image, tensors at multiples of 64 in the weights. Nothing here waits, shares memory
// between threads, or writes a word twice: the same source is compiled for CPUs by the tests, and run there.
//
// Where `wrong` is not null and not 0, kernels before have found the part's digest or a frame wrong (blake3.cu,
// huf_frames.cu), and not one weight is written.
//
// Blocks have THREADS threads. Of the grid, y goes over frames and x over what a frame is cut into; any size will do.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define FRAME_ELEMENTS 65536u
#define MAX_PLANES 8
#define THREADS 256u
#define RUN 8u  // elements that a thread takes at once
#define UNROLLED 4u

struct Recipe {
  u64 keep, fill;
  u32 num_planes, word_bytes, sign_plane, sign_up;
  u32 bits[MAX_PLANES], up[MAX_PLANES];
};

struct Frame {
  u64 out;  // of its first element, in the weights
  u32 count, unused;
  u32 planes[MAX_PLANES];  // of its piece of each plane, in the image
};

template <typename Word>
union Run {
  Word words[RUN];
  uint4 vectors[RUN * sizeof(Word) / 16];
};

template <typename Word>
__device__ inline Word place(const Recipe& recipe, u32 plane, u32 value) {
  u32 bits = recipe.bits[plane];
  if (plane == recipe.sign_plane) {
    Word sign = (Word)((Word)(value >> (bits - 1)) << recipe.sign_up);
    return (Word)(sign | (Word)((Word)(value & ((1u << (bits - 1)) - 1)) << recipe.up[plane]));
  }
  return (Word)((Word)value << recipe.up[plane]);
}

// A frame of any count, element by element.
template <typename Word>
__device__ inline void merge_short_frame(const Recipe& recipe, const Frame& frame, const u8* image, Word* out) {
  for (u32 element = blockIdx.x * THREADS + threadIdx.x; element < frame.count; element += gridDim.x * THREADS) {
    Word word = recipe.keep ? (Word)(out[element] & (Word)recipe.keep) : (Word)0;
    for (u32 plane = 0; plane < recipe.num_planes; plane++) {
      u32 bits = recipe.bits[plane], share = 8 / bits;
      u32 row = (frame.count + share - 1) / share;
      u32 packed = image[frame.planes[plane] + element % row] >> (element / row * bits);
      word |= place<Word>(recipe, plane, packed & ((1u << bits) - 1));
    }
    out[element] = (Word)(word | (Word)recipe.fill);
  }
}

// A whole frame, RUN elements at once: they lie in one row of each plane.
template <typename Word>
__device__ inline void merge_whole_frame(const Recipe& recipe, const Frame& frame, const u8* image, Word* out) {
  const u32 num_vectors = RUN * sizeof(Word) / 16;
  for (u32 run = blockIdx.x * THREADS + threadIdx.x; run < FRAME_ELEMENTS / RUN; run += gridDim.x * THREADS) {
    u32 first = run * RUN;
    uint4* memory = (uint4*)(out + first);
    Run<Word> result;
    for (u32 vector = 0; vector < num_vectors; vector++) {
      result.vectors[vector] = recipe.keep ? memory[vector] : make_uint4(0, 0, 0, 0);
    }
    for (u32 element = 0; element < RUN; element++) {
      result.words[element] = (Word)(result.words[element] & (Word)recipe.keep);
    }
    for (u32 plane = 0; plane < recipe.num_planes; plane++) {
      u32 bits = recipe.bits[plane], row = FRAME_ELEMENTS / 8 * bits;
      u64 packed = *(const u64*)(image + frame.planes[plane] + first % row) >> (first / row * bits);
      for (u32 element = 0; element < RUN; element++) {
        u32 value = (u32)(packed >> (8 * element)) & ((1u << bits) - 1);
        result.words[element] |= place<Word>(recipe, plane, value);
      }
    }
    for (u32 element = 0; element < RUN; element++) {
      result.words[element] |= (Word)recipe.fill;
    }
    for (u32 vector = 0; vector < num_vectors; vector++) {
      memory[vector] = result.vectors[vector];
    }
  }
}

template <typename Word>
__device__ inline void merge_words(const u8* image, u32 table, u32 num_frames, u8* weights, const u32* wrong) {
  if (wrong && *wrong) return;
  const Recipe& recipe = *(const Recipe*)(image + table);
  const Frame* frames = (const Frame*)(image + table + sizeof(Recipe));
  for (u32 number = blockIdx.y; number < num_frames; number += gridDim.y) {
    const Frame& frame = frames[number];
    Word* out = (Word*)(weights + frame.out);
    if (frame.count == FRAME_ELEMENTS) {
      merge_whole_frame<Word>(recipe, frame, image, out);
    } else {
      merge_short_frame<Word>(recipe, frame, image, out);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    merge_words_16(const u8* image, u32 table, u32 num_frames, u8* weights, const u32* wrong) {
  merge_words<u16>(image, table, num_frames, weights, wrong);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    merge_words_32(const u8* image, u32 table, u32 num_frames, u8* weights, const u32* wrong) {
  merge_words<u32>(image, table, num_frames, weights, wrong);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    merge_words_64(const u8* image, u32 table, u32 num_frames, u8* weights, const u32* wrong) {
  merge_words<u64>(image, table, num_frames, weights, wrong);
}

// The lower, or the upper two of four bytes, each in a half of its own.
__device__ inline u32 widen_low(u32 bytes) { return (bytes & 0xFFu) | (bytes & 0xFF00u) << 8; }
__device__ inline u32 widen_high(u32 bytes) { return (bytes >> 16 & 0xFFu) | (bytes >> 8 & 0xFF0000u); }

// Two bf16 of two exponents and two nibbles: sign and three mantissa bits; of the four others, the middle.
__device__ inline u32 draft_pair(u32 exponents, u32 nibbles) {
  return exponents << 7 | (nibbles & 0x00080008u) << 12 | (nibbles & 0x00070007u) << 4 | 0x00080008u;
}

__device__ inline uint4 draft_run(uint2 exponents, uint2 nibbles) {
  return make_uint4(draft_pair(widen_low(exponents.x), widen_low(nibbles.x)),
                    draft_pair(widen_high(exponents.x), widen_high(nibbles.x)),
                    draft_pair(widen_low(exponents.y), widen_low(nibbles.y)),
                    draft_pair(widen_high(exponents.y), widen_high(nibbles.y)));
}

__device__ inline uint4 refine_run(uint4 words, uint2 nibbles) {
  return make_uint4((words.x & 0xFFF0FFF0u) | widen_low(nibbles.x), (words.y & 0xFFF0FFF0u) | widen_high(nibbles.x),
                    (words.z & 0xFFF0FFF0u) | widen_low(nibbles.y), (words.w & 0xFFF0FFF0u) | widen_high(nibbles.y));
}

__device__ inline uint2 low_nibbles(uint2 bytes) { return make_uint2(bytes.x & 0x0F0F0F0Fu, bytes.y & 0x0F0F0F0Fu); }
__device__ inline uint2 high_nibbles(uint2 bytes) {
  return make_uint2(bytes.x >> 4 & 0x0F0F0F0Fu, bytes.y >> 4 & 0x0F0F0F0Fu);
}

// Of a whole frame, the runs [first, first + UNROLLED * THREADS) of the first half, and as many of the second, which
// share their nibbles' bytes. Loads come before stores, so that many are on their way.
__device__ inline void draft_slice(const uint2* exponents, const uint2* nibbles, uint4* out, u32 first) {
  const u32 half = FRAME_ELEMENTS / 2 / RUN;
  uint2 low[UNROLLED], high[UNROLLED], both[UNROLLED];
#pragma unroll
  for (u32 turn = 0; turn < UNROLLED; turn++) {
    u32 run = first + turn * THREADS + threadIdx.x;
    low[turn] = exponents[run];
    high[turn] = exponents[half + run];
    both[turn] = nibbles[run];
  }
#pragma unroll
  for (u32 turn = 0; turn < UNROLLED; turn++) {
    u32 run = first + turn * THREADS + threadIdx.x;
    out[run] = draft_run(low[turn], low_nibbles(both[turn]));
    out[half + run] = draft_run(high[turn], high_nibbles(both[turn]));
  }
}

__device__ inline void refine_slice(const uint2* nibbles, uint4* out, u32 first) {
  const u32 half = FRAME_ELEMENTS / 2 / RUN;
  uint2 both[UNROLLED];
  uint4 low[UNROLLED], high[UNROLLED];
#pragma unroll
  for (u32 turn = 0; turn < UNROLLED; turn++) {
    u32 run = first + turn * THREADS + threadIdx.x;
    both[turn] = nibbles[run];
    low[turn] = out[run];
    high[turn] = out[half + run];
  }
#pragma unroll
  for (u32 turn = 0; turn < UNROLLED; turn++) {
    u32 run = first + turn * THREADS + threadIdx.x;
    out[run] = refine_run(low[turn], low_nibbles(both[turn]));
    out[half + run] = refine_run(high[turn], high_nibbles(both[turn]));
  }
}

// bf16 with 3 mantissa bits known: exponents and nibbles -> words. The default draft.
extern "C" __global__ void __launch_bounds__(THREADS)
    merge_bf16_draft(const u8* __restrict__ image, u32 table, u32 num_frames, u8* __restrict__ weights,
                     const u32* wrong) {
  if (wrong && *wrong) return;
  const Frame* frames = (const Frame*)(image + table + sizeof(Recipe));
  for (u32 number = blockIdx.y; number < num_frames; number += gridDim.y) {
    const Frame& frame = frames[number];
    u8* out = weights + frame.out;
    if (frame.count != FRAME_ELEMENTS) {
      merge_short_frame<u16>(*(const Recipe*)(image + table), frame, image, (u16*)out);
      continue;
    }
    const uint2* exponents = (const uint2*)(image + frame.planes[0]);
    const uint2* nibbles = (const uint2*)(image + frame.planes[1]);
    const u32 slice = UNROLLED * THREADS;
    for (u32 first = blockIdx.x * slice; first < FRAME_ELEMENTS / 2 / RUN; first += gridDim.x * slice) {
      draft_slice(exponents, nibbles, (uint4*)out, first);
    }
  }
}

// Words of 16 bits with the 4 lowest replaced by a nibble: what makes the default draft exact.
extern "C" __global__ void __launch_bounds__(THREADS)
    refine_low_nibbles(const u8* __restrict__ image, u32 table, u32 num_frames, u8* __restrict__ weights,
                       const u32* wrong) {
  if (wrong && *wrong) return;
  const Frame* frames = (const Frame*)(image + table + sizeof(Recipe));
  for (u32 number = blockIdx.y; number < num_frames; number += gridDim.y) {
    const Frame& frame = frames[number];
    u8* out = weights + frame.out;
    if (frame.count != FRAME_ELEMENTS) {
      merge_short_frame<u16>(*(const Recipe*)(image + table), frame, image, (u16*)out);
      continue;
    }
    const uint2* nibbles = (const uint2*)(image + frame.planes[0]);
    const u32 slice = UNROLLED * THREADS;
    for (u32 first = blockIdx.x * slice; first < FRAME_ELEMENTS / 2 / RUN; first += gridDim.x * slice) {
      refine_slice(nibbles, (uint4*)out, first);
    }
  }
}

struct Copied {
  u64 out;  // in the weights
  u32 from, num_bytes;  // in the image
};

// Bytes that are weights as they are. Both sides begin at multiples of 8 bytes.
extern "C" __global__ void __launch_bounds__(THREADS)
    copy_if(const u8* image, u32 table, u32 num, u8* weights, const u32* wrong) {
  if (wrong && *wrong) return;
  const Copied* entries = (const Copied*)(image + table);
  for (u32 number = blockIdx.y; number < num; number += gridDim.y) {
    const Copied entry = entries[number];
    const u64* from = (const u64*)(image + entry.from);
    u64* out = (u64*)(weights + entry.out);
    const u32 first = blockIdx.x * THREADS + threadIdx.x, num_words = entry.num_bytes / 8;
    for (u32 i = first; i < num_words; i += gridDim.x * THREADS) out[i] = from[i];
    const u32 rest = 8 * num_words + first;
    if (rest < entry.num_bytes) ((u8*)out)[rest] = ((const u8*)from)[rest];
  }
}

// The arguments of a decompressor of frames, made of offsets that were uploaded. For each of `num` chunks: where its coded
// bytes are and how many, and where its decoded ones belong and how many, as four numbers of 32 bits, from the image on.
extern "C" __global__ void __launch_bounds__(THREADS)
    resolve_chunks(u8* image, u32 table, u32 num, u64* coded, u64* coded_bytes, u64* decoded, u64* decoded_bytes) {
  for (u32 chunk = blockIdx.x * THREADS + threadIdx.x; chunk < num; chunk += gridDim.x * THREADS) {
    const u32* numbers = (const u32*)(image + table) + 4 * chunk;
    coded[chunk] = (u64)(image + numbers[0]);
    coded_bytes[chunk] = numbers[1];
    decoded[chunk] = (u64)(image + numbers[2]);
    decoded_bytes[chunk] = numbers[3];
  }
}
