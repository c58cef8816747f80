// Attention over the block table, for prompts and for single tokens alike.
//
// A sequence's keys are taken in tiles of 64 and splits of 256 at absolute places. Within a split the softmax is carried
// from tile to tile; splits are folded in order, from the first. What a row gives is therefore the same whether its
// prompt came whole or in chunks, whichever rows share its block, and whether one block folds the splits or each split
// has a block of its own and `merge_splits` folds them.
//
// An item is up to 16 * ROW_TILES pairs (token, query head) of one sequence and one key head, pairs of a token being
// neighbours. A block computes an item: each of 4 warps multiplies queries with 16 of a tile's keys, then the weights
// with the values of a quarter of the head's numbers.
//
// Latents are one key head, whose values are its first numbers: a tile of them is read once, and 8 warps share a block.

struct Item {
  u32 span, first_pair;
  u32 first_split, end_split;  // splits that it computes
  u32 slot;  // of the scratch, for the first of them; ALONE: it folds them itself
};
#define ALONE 0xFFFFFFFFu

struct Merge {
  u32 span, first_pair, first_slot, num_splits;
};

struct Attention {
  const u16* heads;  // (rows, row_heads, head_dim): queries first
  const void* keys;  // (blocks, block_size, num_kv_heads, head_dim): 16-bit floats, or int8
  const void* values;
  const u16* key_scales;  // (blocks, block_size, num_kv_heads) of int8
  const u16* value_scales;
  u16* out;  // (rows, num_heads, value_dim)
  float* split_sums;  // (slots, num_kv_heads, 16, value_dim): not divided
  float* split_scales;  // (slots, num_kv_heads, 16, 2): the largest score, and the sum of weights
  const Item* items;
  const Merge* merges;
  const u32* starts;  // (spans,): the span's first row
  const u32* lengths;  // how many rows it has
  const u32* contexts;  // how many tokens its sequence has, these included
  const u32* table_starts;  // where its block table begins
  const u32* blocks;
  const u32* counts;
  const float* bias;  // (num_heads, 2 * reach + 1), by the distance key - query: added to scores, times log2(e); 0: none
  u32 num_heads, num_kv_heads, row_heads, head_dim, value_dim, block_size;
  u32 window;  // how many tokens up to itself a token sees
  u32 ahead;  // how many tokens behind itself it sees; a step has all of a text's then
  u32 reach;
  float scale;  // of the scores, times log2(e); with a cap, divided by it instead
  float cap;  // times log2(e): scores are no larger; 0: none
};

#define TILE 64
#define TILES_PER_SPLIT 4

// The numbers of a key and of a value that a block has room for, and its warps.
template <u32 DIM>
struct Heads {
  static constexpr u32 KEY = DIM, VALUE = DIM, WARPS = 4;
  static constexpr bool ARE_LATENTS = false;
};
struct Latents {
  static constexpr u32 KEY = 576, VALUE = 512, WARPS = 8;
  static constexpr bool ARE_LATENTS = true;
};
#define MERGE_THREADS 128

// 2 ** (score - largest); nothing where there is no score.
__device__ __forceinline__ float weight_of(float score, float largest) { return score == NONE ? 0.0f : exp2f(score - largest); }

// What is known of a row, while its splits are folded.
struct Folded {
  float largest, total;
};

// The factors of what was folded before, and of one more split.
__device__ __forceinline__ void fold(Folded& row, float largest, float total, float& keep, float& add) {
  const float both = fmaxf(row.largest, largest);
  keep = weight_of(row.largest, both);
  add = weight_of(largest, both);
  row = {both, fmaf(total, add, row.total * keep)};
}
__device__ __forceinline__ float folded(float sum, float part, float keep, float add) { return fmaf(part, add, sum * keep); }

// Shared memory of a block: rows are padded by 16 bytes, so that lanes meet different banks.
template <u32 DIM, u32 ROW_TILES>
struct Room {
  u16 queries[16 * ROW_TILES][DIM + 8];
  u16 values[TILE][DIM + 8];  // or latents, which are keys, too
  u16 weights[16 * ROW_TILES][TILE + 8];
  float scores[16 * ROW_TILES][TILE + 4];
  float largest[16 * ROW_TILES], total[16 * ROW_TILES], correction[16 * ROW_TILES];
  Folded folded[16 * ROW_TILES];
  float keep[16 * ROW_TILES], add[16 * ROW_TILES];
};

// The row of a token's keys in the pool, of head_dim numbers.
__device__ __forceinline__ u64 place_of(const Attention& args, const u32* table, u32 token, u32 kv_head) {
  return ((u64)table[token / args.block_size] * args.block_size + token % args.block_size) * args.num_kv_heads + kv_head;
}

// 8 numbers of a row, zeros behind its end.
__device__ __forceinline__ uint4 eight_of(const u16* row, u32 at, u32 dim) {
  return at < dim ? *(const uint4*)(row + at) : uint4{0, 0, 0, 0};
}

// What a pool's rows are made of, and 8 numbers of one.
struct FloatPool {
  static __device__ __forceinline__ uint4 eight(const void* numbers, const u16* scales, u64 row, u32 at, u32 dim) {
    return eight_of((const u16*)numbers + row * dim, at, dim);
  }
};

struct Int8Pool {  // a code times its row's scale, rounded
  static __device__ __forceinline__ u32 two(u32 codes, u32 scales) {  // both are exact in 16 bits, so one rounding
    return T::fused(T::pair((float)(signed char)codes, (float)(signed char)(codes >> 8)), scales, 0x80008000);
  }
  static __device__ __forceinline__ uint4 eight(const void* numbers, const u16* scales, u64 row, u32 at, u32 dim) {
    if (at >= dim) return uint4{0, 0, 0, 0};
    const uint2 codes = *(const uint2*)((const u8*)numbers + row * dim + at);
    const u32 both = scales[row] | (u32)scales[row] << 16;
    return uint4{two(codes.x, both), two(codes.x >> 16, both), two(codes.y, both), two(codes.y >> 16, both)};
  }
};

template <class H, u32 ROW_TILES, class Pool>
struct AttentionBlock {
  static constexpr u32 ROWS = 16 * ROW_TILES, DIM = H::KEY, THREADS = 32 * H::WARPS;
  static constexpr u32 OF_WARP = H::VALUE / H::WARPS, PARTS = OF_WARP / 8;  // numbers of values that a warp has: parts of 8
  static constexpr u32 KEYS = TILE / H::WARPS;  // of a tile, that a warp has
  const Attention& args;
  Room<DIM, ROW_TILES>& room;
  const u32 kv_head, group, warp, lane, g, c;
  u32 start, length, context, first_pair, num_pairs, num_tiles;
  const u32* table;
  float sums[ROW_TILES][PARTS][4];

  __device__ __forceinline__ AttentionBlock(const Attention& args, Room<DIM, ROW_TILES>& room, const Item& item)
      : args(args), room(room), kv_head(blockIdx.y), group(args.num_heads / args.num_kv_heads), warp(threadIdx.x / 32),
        lane(lane_of(threadIdx.x)), g(lane / 4), c(lane % 4) {
    start = args.starts[item.span];
    length = args.lengths[item.span];
    context = args.contexts[item.span];
    table = args.blocks + args.table_starts[item.span];
    first_pair = item.first_pair;
    num_pairs = min(ROWS, length * group - first_pair);
    num_tiles = (num_pairs + 15) / 16;  // of rows; the others are left out
  }

  __device__ __forceinline__ u32 position_of(u32 row) const { return context - length + (first_pair + row) / group; }

  // The first and the last that any of the rows sees.
  __device__ __forceinline__ u32 last_key() const { return min(position_of(num_pairs - 1) + args.ahead, context - 1); }
  __device__ __forceinline__ u32 first_key() const { return position_of(0) + 1 > args.window ? position_of(0) + 1 - args.window : 0; }

  __device__ __forceinline__ u16* out_of(u32 row) const {
    const u32 pair = first_pair + row;
    return args.out + ((u64)(start + pair / group) * args.num_heads + kv_head * group + pair % group) * args.value_dim;
  }

  __device__ __forceinline__ void load_queries() {
    for (u32 at = threadIdx.x; at < ROWS * DIM / 8; at += THREADS) {
      const u32 row = at / (DIM / 8), dim = at % (DIM / 8) * 8, pair = first_pair + row;
      const u64 head = (u64)(start + pair / group) * args.row_heads + kv_head * group + pair % group;
      const uint4 some = row < num_pairs ? eight_of(args.heads + head * args.head_dim, dim, args.head_dim) : uint4{0, 0, 0, 0};
      *(uint4*)&room.queries[row][dim] = some;
    }
    for (u32 row = threadIdx.x; row < ROWS; row += THREADS) room.folded[row] = {NONE, 0.0f};
  }

  // A split: the sums of its weighted values stay in registers, its scales in shared memory.
  __device__ __forceinline__ void compute_split(u32 split) {
    for (u32 row = threadIdx.x; row < ROWS; row += THREADS) { room.largest[row] = NONE; room.total[row] = 0; }
    EACH(r, ROW_TILES)
      EACH(part, PARTS)
        EACH(i, 4) sums[r][part][i] = 0;
    const u32 last = last_key(), from = first_key();
    for (u32 number = 0; number < TILES_PER_SPLIT; number++) {
      const u32 key = (split * TILES_PER_SPLIT + number) * TILE;
      if (key > last) break;
      if (key + TILE <= from) continue;
      __syncthreads();
      load_values(key);
      if (H::ARE_LATENTS) __syncthreads();
      score(key);
      if (args.bias) add_bias(key);
      __syncthreads();
      weigh();
      __syncthreads();
      sum_values();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void load_values(u32 key) {
    for (u32 at = threadIdx.x; at < TILE * DIM / 8; at += THREADS) {
      const u32 own = at / (DIM / 8), dim = at % (DIM / 8) * 8;
      const bool is_there = key + own < context;
      uint4 some = {0, 0, 0, 0};
      if (is_there) some = Pool::eight(args.values, args.value_scales, place_of(args, table, key + own, kv_head), dim, args.head_dim);
      *(uint4*)&room.values[own][dim] = some;
    }
  }

  __device__ __forceinline__ void score(u32 key) {
    EACH(eight, KEYS / 8) {
      const u32 first = KEYS * warp + 8 * eight, own = key + first + g;
      uint4 of_key[DIM / 32];
      EACH(part, DIM / 32) {
        of_key[part] = uint4{0, 0, 0, 0};
        if (H::ARE_LATENTS) of_key[part] = *(const uint4*)&room.values[first + g][32 * part + 8 * c];
        else if (own < context) of_key[part] = Pool::eight(args.keys, args.key_scales, place_of(args, table, own, kv_head), 32 * part + 8 * c, args.head_dim);
      }
      EACH(r, ROW_TILES) {
        if (r >= num_tiles) break;
        float acc[4] = {};
        EACH(part, DIM / 32) {
          const uint4 low = *(const uint4*)&room.queries[16 * r + g][32 * part + 8 * c];
          const uint4 high = *(const uint4*)&room.queries[16 * r + 8 + g][32 * part + 8 * c];
          const u32 one[4] = {low.x, high.x, low.y, high.y}, two[4] = {low.z, high.z, low.w, high.w};
          multiply_add<T>(acc, one, of_key[part].x, of_key[part].y);
          multiply_add<T>(acc, two, of_key[part].z, of_key[part].w);
        }
        EACH(i, 4) {
          const u32 row = 16 * r + g + 8 * (i / 2), at = first + 2 * c + i % 2, position = position_of(row);
          const bool sees = key + at <= position + args.ahead && key + at < context && position < key + at + args.window && row < num_pairs;
          const float scaled = acc[i] * args.scale;
          room.scores[row][at] = !sees ? NONE : args.cap > 0 ? args.cap * tanhf(scaled) : scaled;
        }
      }
    }
  }

  // Each thread adds it to the scores that it wrote. Apart from these, whose registers it would take.
  __device__ __forceinline__ void add_bias(u32 key) {
    for (u32 eight = 0; eight < KEYS / 8; eight++)
      for (u32 r = 0; r < num_tiles; r++)
        for (u32 i = 0; i < 4; i++) {
          const u32 row = 16 * r + g + 8 * (i / 2), at = KEYS * warp + 8 * eight + 2 * c + i % 2;
          if (room.scores[row][at] == NONE) continue;
          const u64 head = kv_head * group + (first_pair + row) % group;
          room.scores[row][at] += args.bias[head * (2ull * args.reach + 1) + key + at + args.reach - position_of(row)];
        }
  }

  // Scores become weights; 8 lanes a row, in an order that does not depend on ROW_TILES.
  __device__ __forceinline__ void weigh() {
    if (H::WARPS > 4 && warp >= 4) return;
    for (u32 r = 0; r < num_tiles; r++) {
      const u32 row = 16 * r + threadIdx.x / 8, own = threadIdx.x % 8;
      float largest = NONE, total = 0;
      for (u32 at = own; at < TILE; at += 8) largest = fmaxf(largest, room.scores[row][at]);
      for (u32 mask = 4; mask; mask /= 2) largest = fmaxf(largest, shuffled(largest, mask));
      const float before = room.largest[row], now = fmaxf(before, largest);
      for (u32 at = own; at < TILE; at += 8) {
        const float weight = weight_of(room.scores[row][at], now);
        room.weights[row][at] = narrow(weight);
        total += weight;
      }
      for (u32 mask = 4; mask; mask /= 2) total += shuffled(total, mask);
      __syncwarp();  // all have read what one of them writes
      if (own == 0) {
        const float correction = weight_of(before, now);
        room.correction[row] = correction;
        room.total[row] = fmaf(room.total[row], correction, total);
        room.largest[row] = now;
      }
    }
  }

  __device__ __forceinline__ void sum_values() {
    EACH(r, ROW_TILES)
      EACH(part, PARTS)
        EACH(i, 4) sums[r][part][i] *= room.correction[16 * r + g + 8 * (i / 2)];
    for (u32 sixteen = 0; sixteen < TILE; sixteen += 16)
      for (u32 part = 0; part < PARTS; part += 2) {
        // Matrices: keys 0 to 7 and 8 to 15 of one part, then of the next; a head of 32 has only one part a warp.
        u32 of_values[4];
        const u32 matrix = lane / 8, next = PARTS > 1 ? matrix / 2 : 0;
        load_transposed(of_values, &room.values[sixteen + 8 * (matrix % 2) + lane % 8][warp * OF_WARP + 8 * (part + next)]);
        EACH(r, ROW_TILES) {
          if (r >= num_tiles) break;
          const u16 *low = &room.weights[16 * r + g][sixteen + 2 * c], *high = &room.weights[16 * r + 8 + g][sixteen + 2 * c];
          const u32 weights[4] = {*(const u32*)low, *(const u32*)high, *(const u32*)(low + 8), *(const u32*)(high + 8)};
          multiply_add<T>(sums[r][part], weights, of_values[0], of_values[1]);
          if constexpr (PARTS > 1) multiply_add<T>(sums[r][part + 1], weights, of_values[2], of_values[3]);
        }
      }
  }

  // Visit this thread's numbers: their row, and their place in the head.
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) {
    EACH(r, ROW_TILES)
      EACH(part, PARTS)
        EACH(i, 4) {
          const u32 row = 16 * r + g + 8 * (i / 2), dim = warp * OF_WARP + 8 * part + 2 * c + i % 2;
          if (row < num_pairs && dim < args.value_dim) visit(r, part, i, row, dim);
        }
  }

  __device__ __forceinline__ void fold_splits(u32 first, u32 end) {
    float all[ROW_TILES][PARTS][4] = {};
    // What no row sees changes nothing.
    const u32 behind = min(end, last_key() / (TILE * TILES_PER_SPLIT) + 1);
    for (u32 split = max(first, first_key() / (TILE * TILES_PER_SPLIT)); split < behind; split++) {
      compute_split(split);
      for (u32 row = threadIdx.x; row < ROWS; row += THREADS) fold(room.folded[row], room.largest[row], room.total[row], room.keep[row], room.add[row]);
      __syncthreads();
      each([&](u32 r, u32 part, u32 i, u32 row, u32 dim) { all[r][part][i] = folded(all[r][part][i], sums[r][part][i], room.keep[row], room.add[row]); });
    }
    each([&](u32 r, u32 part, u32 i, u32 row, u32 dim) { out_of(row)[dim] = narrow(all[r][part][i] / room.folded[row].total); });
  }

  // Items whose splits are folded later have at most 16 pairs.
  __device__ __forceinline__ void store_splits(u32 first, u32 end, u32 slot) {
    for (u32 split = first; split < end; split++) {
      compute_split(split);
      const u64 place = ((u64)(slot + split - first) * args.num_kv_heads + kv_head) * 16;
      each([&](u32 r, u32 part, u32 i, u32 row, u32 dim) { args.split_sums[(place + row) * args.value_dim + dim] = sums[r][part][i]; });
      for (u32 row = threadIdx.x; row < num_pairs; row += THREADS) {
        args.split_scales[2 * (place + row)] = room.largest[row];
        args.split_scales[2 * (place + row) + 1] = room.total[row];
      }
    }
  }
};

template <class H, u32 ROW_TILES, class Pool>
__device__ __forceinline__ void attend(const Attention& args) {
  if (blockIdx.x >= args.counts[NUM_ITEMS]) return;
  const Item item = args.items[blockIdx.x];
  AttentionBlock<H, ROW_TILES, Pool> block(args, *(Room<H::KEY, ROW_TILES>*)shared_memory, item);
  block.load_queries();
  __syncthreads();
  if (item.slot == ALONE) block.fold_splits(item.first_split, item.end_split);
  else block.store_splits(item.first_split, item.end_split, item.slot);
}

#define ATTENTION_16(name, H, Pool) \
  KERNEL(attention_##name##_16, Attention, 32 * H::WARPS) { attend<H, 1, Pool>(args); }
#define ATTENTION_64(name, H, Pool) \
  KERNEL(attention_##name##_64, Attention, 32 * H::WARPS) { attend<H, 4, Pool>(args); }

// Fold the splits of an item of up to 16 pairs, as `fold_splits` does.
KERNEL(merge_splits, Attention, MERGE_THREADS) {
  if (blockIdx.x >= args.counts[NUM_MERGES]) return;
  const Merge merge = args.merges[blockIdx.x];
  const u32 kv_head = blockIdx.y, group = args.num_heads / args.num_kv_heads, start = args.starts[merge.span];
  const u32 num_pairs = min(16u, args.lengths[merge.span] * group - merge.first_pair);
  for (u32 at = threadIdx.x; at < num_pairs * args.value_dim; at += MERGE_THREADS) {
    const u32 row = at / args.value_dim, dim = at % args.value_dim, pair = merge.first_pair + row;
    Folded known = {NONE, 0.0f};
    float sum = 0, keep, add;
    for (u32 split = 0; split < merge.num_splits; split++) {
      const u64 place = ((u64)(merge.first_slot + split) * args.num_kv_heads + kv_head) * 16 + row;
      fold(known, args.split_scales[2 * place], args.split_scales[2 * place + 1], keep, add);
      sum = folded(sum, args.split_sums[place * args.value_dim + dim], keep, add);
    }
    args.out[((u64)(start + pair / group) * args.num_heads + kv_head * group + pair % group) * args.value_dim + dim] = narrow(sum / known.total);
  }
}
