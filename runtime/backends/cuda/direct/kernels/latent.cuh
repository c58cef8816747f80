// Attention over latents, around `attention.cuh`: a head's queries times its rows for keys, and its sums of latents times
// its rows for values. Both are rows of one matrix, which is read where it lies.

struct AbsorbQueries {
  const u16* weight;  // (num_heads, head_rows, rank): of each head plain_dim rows for keys, then those for values
  const u16* queries;  // (rows, num_heads) heads of query_dim numbers, rows `query_stride` apart: plain_dim come first
  u16* out;  // (rows, num_heads, out_dim), of which the first `rank` are written
  const u32* counts;
  u32 num_heads, head_rows, rank, plain_dim, query_dim, query_stride, out_dim;
};

#define ABSORB_THREADS 256
#define ABSORB_TILES 4  // of 8 rows of queries, that a block has

// out = query @ rows: the transposed rows are the left operand of the matrix instruction. Which row meets which place in it
// is free, so a lane reads 8 neighbours of 4 rows, and pairs two rows' numbers in registers. A warp has 64 columns, and
// sums them over all rows in order, by one accumulator.
KERNEL(absorb_queries, AbsorbQueries, ABSORB_THREADS) {
  const u32 first = 8 * ABSORB_TILES * blockIdx.x, num_rows = args.counts[NUM_ROWS], head = blockIdx.y, lane = lane_of(threadIdx.x);
  const u32 g = lane / 4, c = lane % 4, of_warp = 64 * (ABSORB_THREADS / 32 * blockIdx.z + threadIdx.x / 32), column = of_warp + 8 * g;
  if (first >= num_rows || of_warp >= args.rank) return;
  const u32 num_tiles = min((u32)ABSORB_TILES, (num_rows - first + 7) / 8);
  const u16* rows = args.weight + (u64)head * args.head_rows * args.rank + column;
  const u16* queries[ABSORB_TILES];  // those behind the last are the last, and not stored
  EACH(t, ABSORB_TILES) queries[t] = args.queries + (u64)min(first + 8 * t + g, num_rows - 1) * args.query_stride + head * args.query_dim;
  float sums[ABSORB_TILES][4][4] = {};
  for (u32 k = 0; k < args.plain_dim; k += 16) {
    uint4 w[4] = {};
    EACH(i, 4)
      if (column < args.rank) w[i] = *(const uint4*)(rows + (u64)(k + 4 * c + i) * args.rank);
    const u32 words[4][4] = {{w[0].x, w[1].x, w[2].x, w[3].x}, {w[0].y, w[1].y, w[2].y, w[3].y}, {w[0].z, w[1].z, w[2].z, w[3].z}, {w[0].w, w[1].w, w[2].w, w[3].w}};
    EACH(t, ABSORB_TILES) {
      if (t >= num_tiles) break;
      const uint2 query = *(const uint2*)(queries[t] + k + 4 * c);
      EACH(pair, 4) {  // of columns
        const u32* two = words[pair];
        const u32 turned[4] = {(two[0] & 0xFFFF) | two[1] << 16, two[0] >> 16 | (two[1] & 0xFFFF0000), (two[2] & 0xFFFF) | two[3] << 16, two[2] >> 16 | (two[3] & 0xFFFF0000)};
        multiply_add<T>(sums[t][pair], turned, query.x, query.y);
      }
    }
  }
  if (column >= args.rank) return;
  EACH(t, ABSORB_TILES)
    EACH(low, 2) {
      const u32 row = first + 8 * t + 2 * c + low;
      u32 made[4];
      EACH(pair, 4) made[pair] = T::pair(sums[t][pair][low], sums[t][pair][2 + low]);
      if (row < num_rows) *(uint4*)(args.out + ((u64)row * args.num_heads + head) * args.out_dim + column) = uint4{made[0], made[1], made[2], made[3]};
    }
}

struct HeadProduct {
  Product each;  // of a head; x and out have those of all heads side by side
  u32 head_rows;  // from a head's first row of the matrix to the next one's
  u32 x_stride;
};

// A block's own.
struct OfHead : Product {
  u32 x_stride;
};
__device__ __forceinline__ const u16* x_of(const OfHead& args, u32 row) { return args.x + (u64)row * args.x_stride; }

// The product of the head that a block has, and of that the block's rows of W, in steps of `step`.
__device__ __forceinline__ OfHead of_head(const HeadProduct& args, u32 step, u32* row) {
  const u32 blocks = (args.each.num_out + step - 1) / step, head = blockIdx.y / blocks;
  OfHead own = {args.each, args.x_stride};
  own.weight += (u64)head * args.head_rows * own.num_in * sizeof(u16);
  own.x += head * own.num_in;
  own.out = (u16*)own.out + head * own.num_out;
  *row = blockIdx.y % blocks * step;
  return own;
}

template <u32 TOKENS>
__device__ __forceinline__ void few_of_heads(const HeadProduct& args) {
  const u32 token = blockIdx.x * 8 * TOKENS, num_tokens = args.each.counts[NUM_ROWS];
  if (token >= num_tokens) return;
  u32 row;
  const OfHead own = of_head(args, 16, &row);
  few<Float, TOKENS>(own, token, num_tokens, row);
}

KERNEL(latent_8, HeadProduct, FEW_THREADS) { few_of_heads<1>(args); }
KERNEL(latent_16, HeadProduct, FEW_THREADS) { few_of_heads<2>(args); }
KERNEL(latent_32, HeadProduct, FEW_THREADS) { few_of_heads<4>(args); }
KERNEL(latent_64, HeadProduct, FEW_THREADS) { few_of_heads<8>(args); }
KERNEL(latent_many, HeadProduct, MANY_THREADS) {
  u32 row;
  const OfHead own = of_head(args, 128, &row);
  many<Float, 8>(own, blockIdx.x * 128, args.each.counts[NUM_ROWS], row);
}

struct TransposeMatrix {
  const u16* source;  // (num_in, num_out)
  u16* out;  // (num_out, num_in)
  u32 num_in, num_out;
};

// A block 32 x 32 numbers.
KERNEL(transpose_matrix, TransposeMatrix, 256) {
  __shared__ u16 tile[32][33];
  const u32 in = 32 * blockIdx.x, out = 32 * blockIdx.y, column = threadIdx.x % 32;
  for (u32 row = threadIdx.x / 32; row < 32; row += 8)
    if (in + row < args.num_in && out + column < args.num_out) tile[row][column] = args.source[(u64)(in + row) * args.num_out + out + column];
  __syncthreads();
  for (u32 row = threadIdx.x / 32; row < 32; row += 8)
    if (out + row < args.num_out && in + column < args.num_in) args.out[(u64)(out + row) * args.num_in + in + column] = tile[column][row];
}
