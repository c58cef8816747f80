// Blocks of keys and values between the pool and the order in which they are stored: (block, layer, keys or values, head,
// slot, number), as the host's pool has them; of latents, which are keys alone, with 1 in place of 2. Of int8, pairs of codes are copied as one number, and scales as heads of one.

struct CopyBlocks {
  u16* pool;  // (layers, 2, pool_blocks, block_size, num_kv_heads, head_dim)
  u16* stored;  // (blocks, layers, 2, num_kv_heads, block_size, head_dim), blocks `stored_size` apart
  const u32* blocks;  // (blocks,)
  u32 pool_blocks, block_size, num_kv_heads, head_dim, stored_size, is_in;
};

KERNEL(copy_blocks, CopyBlocks, 256) {
  const u32 plane = blockIdx.y, row = args.num_kv_heads * args.head_dim, size = args.block_size * row;
  u16* pooled = args.pool + ((u64)plane * args.pool_blocks + args.blocks[blockIdx.x]) * size;
  u16* stored = args.stored + (u64)blockIdx.x * args.stored_size + (u64)plane * size;
  for (u32 at = threadIdx.x; at < size; at += blockDim.x) {
    const u32 dim = at % args.head_dim, slot = at / args.head_dim % args.block_size, head = at / args.head_dim / args.block_size;
    const u32 in_pool = slot * row + head * args.head_dim + dim;
    if (args.is_in) pooled[in_pool] = stored[at];
    else stored[at] = pooled[in_pool];
  }
}

struct CopyTokens {
  u16* pool;
  u32 pool_blocks, block_size, row;  // row: num_kv_heads * head_dim
  u32 source, target, num_tokens;
};

// The first tokens of one block to another, in one layer's keys or values a block of the grid.
KERNEL(copy_tokens, CopyTokens, 256) {
  const u64 plane = (u64)blockIdx.x * args.pool_blocks, size = (u64)args.block_size * args.row;
  const u16* from = args.pool + (plane + args.source) * size;
  u16* to = args.pool + (plane + args.target) * size;
  for (u32 at = threadIdx.x; at < args.num_tokens * args.row; at += blockDim.x) to[at] = from[at];
}
