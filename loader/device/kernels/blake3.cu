// BLAKE3 of a stored part, and its comparison with the digest that the manifest has.
//
// A thread hashes a chunk of 1,024 bytes. A block joins its chunks, whose number is a power of 2 and which so are a
// subtree, and leaves one node; `blake3_root` joins the nodes. Where they differ, it sets DIGEST_DIFFERS in `wrong`, a
// word that kernels behind these on the stream look at: no answer of the host is waited for.
//
// The part begins at a multiple of 16 bytes. Compiled together with merge.cu and huf_frames.cu, by the tests for CPUs,
// too: there `__syncthreads` hands over to the block's next thread.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DIGEST_DIFFERS 1u  // a bit of `wrong`; no bit: all is right
#define CHUNK_BYTES 1024u
#define BLOCK_BYTES 64u
#define HASH_THREADS 128u  // of blake3_chunks: chunks of a block
#define ROOT_THREADS 256u
#define CHUNK_START 1u
#define CHUNK_END 2u
#define PARENT 4u
#define ROOT 8u

__device__ const u32 IV[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                              0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

__device__ inline u32 turn_right(u32 value, u32 bits) { return __funnelshift_r(value, value, bits); }

__device__ inline void mix(u32& a, u32& b, u32& c, u32& d, u32 x, u32 y) {
  a = a + b + x;
  d = turn_right(d ^ a, 16);
  c = c + d;
  b = turn_right(b ^ c, 12);
  a = a + b + y;
  d = turn_right(d ^ a, 8);
  c = c + d;
  b = turn_right(b ^ c, 7);
}

// One round, over the words of `m` in the order that is given: a macro, as indices that the compiler knows keep `m` in
// registers.
#define ROUND(a, b, c, d, e, f, g, h, i, j, k, l, n, o, p, q) \
  mix(v[0], v[4], v[8], v[12], m[a], m[b]);                   \
  mix(v[1], v[5], v[9], v[13], m[c], m[d]);                   \
  mix(v[2], v[6], v[10], v[14], m[e], m[f]);                  \
  mix(v[3], v[7], v[11], v[15], m[g], m[h]);                  \
  mix(v[0], v[5], v[10], v[15], m[i], m[j]);                  \
  mix(v[1], v[6], v[11], v[12], m[k], m[l]);                  \
  mix(v[2], v[7], v[8], v[13], m[n], m[o]);                   \
  mix(v[3], v[4], v[9], v[14], m[p], m[q]);

// The chaining value `cv` after the message block `m`.
__device__ inline void compress(u32* cv, const u32* m, u32 counter, u32 num_bytes, u32 flags) {
  u32 v[16] = {cv[0], cv[1], cv[2], cv[3], cv[4], cv[5], cv[6],     cv[7],
               IV[0], IV[1], IV[2], IV[3], counter, 0,   num_bytes, flags};
  ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
  ROUND(2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
  ROUND(3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1)
  ROUND(10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6)
  ROUND(12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4)
  ROUND(9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7)
  ROUND(11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13)
#pragma unroll
  for (u32 i = 0; i < 8; i++) cv[i] = v[i] ^ v[i + 8];
}

__device__ inline u32 chunks_in(u32 num_bytes) { return num_bytes ? (num_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES : 1; }

// 64 bytes at a multiple of 16, or the fewer that a chunk ends with, followed by zeros.
__device__ inline void load_block(u32* m, const uint4* from, u32 num_bytes) {
  if (num_bytes == BLOCK_BYTES) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const uint4 four = from[i];
      m[4 * i] = four.x;
      m[4 * i + 1] = four.y;
      m[4 * i + 2] = four.z;
      m[4 * i + 3] = four.w;
    }
    return;
  }
#pragma unroll
  for (u32 i = 0; i < 16; i++) {
    m[i] = 0;
    for (u32 j = 0; j < 4; j++)
      if (4 * i + j < num_bytes) m[i] |= (u32)((const u8*)from)[4 * i + j] << (8 * j);
  }
}

__device__ inline void hash_chunk(u32* cv, const u8* chunk, u32 number, u32 num_bytes, u32 root) {
  const u32 num_blocks = num_bytes ? (num_bytes + BLOCK_BYTES - 1) / BLOCK_BYTES : 1;
#pragma unroll
  for (u32 i = 0; i < 8; i++) cv[i] = IV[i];
  for (u32 block = 0; block < num_blocks; block++) {
    u32 m[16];
    const u32 left = num_bytes - BLOCK_BYTES * block, own = left < BLOCK_BYTES ? left : BLOCK_BYTES;
    load_block(m, (const uint4*)(chunk + BLOCK_BYTES * block), own);
    const u32 begin = block == 0 ? CHUNK_START : 0, end = block + 1 == num_blocks ? CHUNK_END | root : 0;
    compress(cv, m, number, own, begin | end);
  }
}

// Of a level with `count` nodes, what `pair` becomes; a single one at the end goes up as it is.
__device__ inline void join(u32* cv, const u32* nodes, u32 pair, u32 count, u32 root) {
  const bool is_pair = 2 * pair + 1 < count;
  u32 m[16];
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    m[i] = nodes[16 * pair + i];
    m[8 + i] = is_pair ? nodes[16 * pair + 8 + i] : 0;
    cv[i] = is_pair ? IV[i] : m[i];
  }
  if (is_pair) compress(cv, m, 0, BLOCK_BYTES, PARENT | (count == 2 ? root : 0));
}

// A grid of a block for each HASH_THREADS chunks. Each leaves a node of 32 bytes.
extern "C" __global__ void __launch_bounds__(HASH_THREADS)
    blake3_chunks(const u8* __restrict__ image, u32 part_bytes, u32* __restrict__ nodes) {
  __shared__ u32 tree[HASH_THREADS * 8];
  const u32 total = chunks_in(part_bytes), first = blockIdx.x * HASH_THREADS, chunk = first + threadIdx.x;
  u32 cv[8];
  if (chunk < total) {
    const u32 left = part_bytes - CHUNK_BYTES * chunk;
    hash_chunk(cv, image + (u64)CHUNK_BYTES * chunk, chunk, left < CHUNK_BYTES ? left : CHUNK_BYTES, total == 1 ? ROOT : 0);
#pragma unroll
    for (u32 i = 0; i < 8; i++) tree[8 * threadIdx.x + i] = cv[i];
  }
  __syncthreads();
  const u32 own = total - first < HASH_THREADS ? total - first : HASH_THREADS, root = total <= HASH_THREADS ? ROOT : 0;
  for (u32 count = own; count > 1; count = (count + 1) / 2) {
    const bool has_pair = 2 * threadIdx.x < count;
    if (has_pair) join(cv, tree, threadIdx.x, count, root);
    __syncthreads();
    if (has_pair)
      for (u32 i = 0; i < 8; i++) tree[8 * threadIdx.x + i] = cv[i];
    __syncthreads();
  }
  if (threadIdx.x < 8) nodes[8 * blockIdx.x + threadIdx.x] = tree[threadIdx.x];
}

// One block: the rest of the tree, in place, and the comparison.
extern "C" __global__ void __launch_bounds__(ROOT_THREADS)
    blake3_root(u32* nodes, u32 part_bytes, const u32* digest, u32* wrong) {
  u32 cv[8];
  for (u32 count = (chunks_in(part_bytes) + HASH_THREADS - 1) / HASH_THREADS; count > 1; count = (count + 1) / 2)
    for (u32 base = 0; 2 * base < count; base += blockDim.x) {  // a pair's node lies in front of the pair
      const u32 pair = base + threadIdx.x;
      const bool has_pair = 2 * pair < count;
      if (has_pair) join(cv, nodes, pair, count, ROOT);
      __syncthreads();
      if (has_pair)
        for (u32 i = 0; i < 8; i++) nodes[8 * pair + i] = cv[i];
      __syncthreads();
    }
  if (threadIdx.x > 0) return;
  u32 differs = 0;
  for (u32 i = 0; i < 8; i++) differs |= nodes[i] ^ digest[i];
  if (differs) atomicOr(wrong, DIGEST_DIFFERS);
}
