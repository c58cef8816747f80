// out = x @ W.T + bias: one family for floats, int8, int4 and fp8, for any number of rows of x.
//
// W is the left operand of the matrix instruction: 16 of its rows, and 8 rows of x. A row of W is cut into stretches of
// `length` columns, a number that the matrix alone decides. Each stretch is summed in the order of its columns, by one
// accumulator; stretches are added in order, from the first. `few` gives each stretch a warp and adds them in shared
// memory; `many` computes them one after another in registers: the sums are the same, bit for bit, and so they are
// whatever the number of rows.
//
// Integers become 16-bit floats without a conversion: 0x4300 is 128 in bf16, whose last bit is 1, so `| level` adds the
// level, and what is subtracted then is exact. The scales of a group multiply its sum, not its weights.
//
// No shared memory feeds the matrix instruction. Which column of a stretch meets which place in the instruction is
// free, as long as W and x agree: lane c of a row takes 8 neighbours, one read of 16 bytes.
//
// The products of a mixture's experts are the same, one launch for all: a block's rows of x are those of one expert, as
// `group_pairs` has put them into tiles.

struct Product {
  const u8* weight;  // (num_out, num_in) in the format's own layout, rows at multiples of 16 bytes (int4, int8, fp8: 8; words: 4)
  const void* scale;  // (num_out / scale_rows, rounded up, num_in / group); 0 for floats
  const u8* zero;  // of 4 bits, (num_out, num_in / group); 0: all are 8
  const void* bias;  // (num_out,); 0: none
  const u16* x;  // (rows, num_in)
  void* out;  // (rows, out_stride), from the first of the columns that this matrix writes
  const u32* counts;
  u32 count;  // which of them is the number of rows
  u32 num_out, num_in, length, group, scale_rows, zero_more, out_stride;
  u32 scale_kind, bias_kind;  // as number_at has it
  u32 mode;  // STORE, ADD or STORE_WIDE
};
enum Mode { STORE, ADD, STORE_WIDE };

struct MatrixPart {
  const u8* weight;  // these four as Product has them
  const void* scale;
  const u8* zero;
  const void* bias;
};

struct ExpertProduct {
  Product each;  // of a part; out has those of an expert side by side
  const MatrixPart* parts;  // (experts, num_parts)
  const Tile* tiles;
  const u32* rows;  // the row of x for each row of out; 0: the same
  u32 num_parts;
};

// A block's own.
struct PartProduct : Product {
  const u32* rows;
};
__device__ __forceinline__ const u16* x_of(const Product& args, u32 row) { return args.x + (u64)row * args.num_in; }
__device__ __forceinline__ const u16* x_of(const PartProduct& args, u32 row) { return args.x + (u64)(args.rows ? args.rows[row] : row) * args.num_in; }

#define STRETCHES 8
#define FEW_THREADS (32 * STRETCHES)
#define MANY_THREADS 256

// A row of W where rows lie one behind the other, what a lane has of it for CHUNKS * 32 columns, and the number that
// multiplies a group's sum.
template <class Raw, u32 BITS>
struct InRows {
  static __device__ __forceinline__ const u8* row(const Product& args, u32 number) { return args.weight + number * ((u64)args.num_in * BITS / 8); }
  static __device__ __forceinline__ Raw load(const Product& args, const u8* row, u32 number, u32 column, u32 c) {
    return *(const Raw*)(row + (u64)column * BITS / 8 + c * sizeof(Raw));
  }
  static __device__ __forceinline__ float scale(const Product& args, u32 number, u32 group, u32 num_groups) {
    return number_at(args.scale, (u64)(number / args.scale_rows) * num_groups + group, args.scale_kind);
  }
  static __device__ __forceinline__ u32 zero(const Product& args, u32 number, u32 group, u32 num_groups) { return 0; }
};

// `expand` gives those columns as 16-bit floats, 8 of each 32 as 4 pairs.
struct Float : InRows<uint4, 16> {
  static constexpr u32 CHUNKS = 1;
  static constexpr bool HAS_SCALE = false;
  typedef uint4 Raw;
  static __device__ __forceinline__ void expand(u32* out, const Raw& raw, u32 chunk, u32 offset) {
    out[0] = raw.x; out[1] = raw.y; out[2] = raw.z; out[3] = raw.w;
  }
};

// Weights in fp32, which are rounded as they are read.
struct EightWide {
  uint4 low, high;
};
struct Wide : InRows<EightWide, 32> {
  static constexpr u32 CHUNKS = 1;
  static constexpr bool HAS_SCALE = false;
  typedef EightWide Raw;
  static __device__ __forceinline__ void expand(u32* out, const Raw& raw, u32 chunk, u32 offset) {
    out[0] = T::pair(float_of_bits(raw.low.x), float_of_bits(raw.low.y)), out[1] = T::pair(float_of_bits(raw.low.z), float_of_bits(raw.low.w));
    out[2] = T::pair(float_of_bits(raw.high.x), float_of_bits(raw.high.y)), out[3] = T::pair(float_of_bits(raw.high.z), float_of_bits(raw.high.w));
  }
};

// (low, high) of bytes 2 i and 2 i + 1 of two words, each in the low byte of a half.
__device__ __forceinline__ u32 spread(const uint2& raw, u32 pair) {
  const u32 word = pair < 2 ? raw.x : raw.y;
  const u32 own = pair % 2 ? word >> 16 : word;
  return (own & 0xFF) | (own & 0xFF00) << 8;
}

#ifdef IN_F16
#define MAGIC 0x64006400u  // 1024 in each half
#define MAGIC_NUMBER 1024.0f
#else
#define MAGIC 0x43004300u
#define MAGIC_NUMBER 128.0f
#endif
#define ONES T::pair(1.0f, 1.0f)

struct Int4 : InRows<uint2, 4> {  // of 64 columns the first 32 are the low bits of 32 bytes, the others the high ones
  static constexpr u32 CHUNKS = 2;
  static constexpr bool HAS_SCALE = true;
  typedef uint2 Raw;
  static __device__ __forceinline__ u32 zero(const Product& args, u32 number, u32 group, u32 num_groups) {
    return args.zero ? args.zero[(u64)number * num_groups + group] : 8;
  }
  static __device__ __forceinline__ void expand(u32* out, const Raw& raw, u32 chunk, u32 zero) {
    const float offset = -MAGIC_NUMBER - (float)zero;
    const u32 offsets = T::pair(offset, offset);
    EACH(pair, 4)
      out[pair] = T::fused(((spread(raw, pair) >> 4 * chunk) & 0x000F000F) | MAGIC, ONES, offsets);
  }
};

struct Int8 : InRows<uint2, 8> {
  static constexpr u32 CHUNKS = 1;
  static constexpr bool HAS_SCALE = true;
  typedef uint2 Raw;
  static __device__ __forceinline__ void expand(u32* out, const Raw& raw, u32 chunk, u32 zero) {
    EACH(pair, 4) {
      const u32 levels = spread(raw, pair) ^ 0x00800080;  // 128 more than they are
#ifdef IN_F16
      out[pair] = T::fused(levels | MAGIC, ONES, T::pair(-1152.0f, -1152.0f));
#else  // bf16 has not enough bits for 128 and a level, so by way of fp32: 0x4B000000 is 2 ** 23
      const float low = float_of_bits((levels & 0xFF) | 0x4B000000) - 8388736.0f;
      const float high = float_of_bits(levels >> 16 | 0x4B000000) - 8388736.0f;
      out[pair] = T::pair(low, high);
#endif
    }
  }
};

struct Fp8 : InRows<uint2, 8> {  // E4M3; what would be NaN is 480
  static constexpr u32 CHUNKS = 1;
  static constexpr bool HAS_SCALE = true;
  typedef uint2 Raw;
  static __device__ __forceinline__ void expand(u32* out, const Raw& raw, u32 chunk, u32 zero) {
    EACH(pair, 4) {
      const u32 codes = spread(raw, pair) << 8, signs = codes & 0x80008000, rest = codes & 0x7F007F00;
#ifdef IN_F16  // exponents are 8 too small
      out[pair] = T::fused(signs | rest >> 1, T::pair(256.0f, 256.0f), 0x80008000);
#else  // 120 too small
      out[pair] = T::fused(signs | rest >> 4, 0x7B807B80, 0x80008000);
#endif
    }
  }
};

// Words of 8 neighbouring columns, from the lowest bits on, as compressed-tensors has them. Words of `zero` have 8 rows.
struct Packed : InRows<u32, 4> {
  static constexpr u32 CHUNKS = 1;
  static constexpr bool HAS_SCALE = true;
  typedef u32 Raw;
  static __device__ __forceinline__ u32 zero(const Product& args, u32 number, u32 group, u32 num_groups) {
    if (!args.zero) return 8;
    return ((const u32*)args.zero)[(u64)(number / 8) * num_groups + group] >> 4 * (number % 8) & 15;
  }
  static __device__ __forceinline__ void expand(u32* out, const Raw& raw, u32 chunk, u32 zero) {
    const float offset = -MAGIC_NUMBER - (float)zero;
    const u32 offsets = T::pair(offset, offset);
    EACH(pair, 4) {
      const u32 both = raw >> 8 * pair;
      out[pair] = T::fused((both & 0xF) | (both & 0xF0) << 12 | MAGIC, ONES, offsets);
    }
  }
};

// The same words, one of all rows behind the other, and so scales and zeros, groups first.
struct Gptq : Packed {
  static __device__ __forceinline__ const u8* row(const Product& args, u32 number) { return args.weight + 4ull * number; }
  static __device__ __forceinline__ u32 load(const Product& args, const u8* row, u32 number, u32 column, u32 c) {
    return ((const u32*)row)[(u64)(column / 8 + c) * args.num_out];
  }
  static __device__ __forceinline__ float scale(const Product& args, u32 number, u32 group, u32 num_groups) {
    return number_at(args.scale, (u64)group * args.num_out + number, args.scale_kind);
  }
  static __device__ __forceinline__ u32 zero(const Product& args, u32 number, u32 group, u32 num_groups) {
    // Of GPTQ's first format 1 was taken off each while they stood packed: `zero_more` is added so.
    return (((const u32*)args.zero)[(u64)group * (args.num_out / 8) + number / 8] + args.zero_more) >> 4 * (number % 8) & 15;
  }
};

// Words of 8 neighbouring rows, the even ones first, one of all of them behind the other; zeros likewise.
struct Awq : Gptq {
  static __device__ __forceinline__ u32 nibble(u32 word, u32 number) { return word >> 4 * (number % 2 * 4 + number % 8 / 2) & 15; }
  static __device__ __forceinline__ const u8* row(const Product& args, u32 number) { return args.weight + 4ull * (number / 8); }
  static __device__ __forceinline__ u32 load(const Product& args, const u8* row, u32 number, u32 column, u32 c) {
    u32 words[8], raw = 0;
    EACH(i, 8) words[i] = ((const u32*)row)[(u64)(column + 8 * c + i) * (args.num_out / 8)];
    EACH(i, 8) raw |= nibble(words[i], number) << 4 * i;
    return raw;
  }
  static __device__ __forceinline__ u32 zero(const Product& args, u32 number, u32 group, u32 num_groups) {
    return nibble(((const u32*)args.zero)[(u64)group * (args.num_out / 8) + number / 8], number);
  }
};

// total += the columns [begin, end) of 16 * ROWS rows of W from `row` on, times 8 * TOKENS rows of x from `token` on, which
// end before `end_token`.
template <class F, u32 ROWS, u32 TOKENS, class Arguments>
__device__ __forceinline__ void sum_stretch(const Arguments& args, u32 row, u32 token, u32 end_token, u32 begin, u32 end, float total[ROWS][TOKENS][4]) {
  const u32 lane = lane_of(threadIdx.x), g = lane / 4, c = lane % 4;
  const u8* of_row[ROWS][2];
  u32 numbers[ROWS][2];
  const u16* of_token[TOKENS];
  EACH(r, ROWS)
    EACH(half, 2) {  // rows behind the last are the last, and not stored
      numbers[r][half] = min(row + 16 * r + 8 * half + g, args.num_out - 1);
      of_row[r][half] = F::row(args, numbers[r][half]);
    }
  EACH(t, TOKENS) of_token[t] = x_of(args, min(token + 8 * t + g, end_token - 1));
  float acc[ROWS][TOKENS][4] = {};
  const u32 num_groups = F::HAS_SCALE ? args.num_in / args.group : 1;
  u32 left = F::HAS_SCALE ? args.group - begin % args.group : 0;  // columns of this group
  u32 number = F::HAS_SCALE ? begin / args.group : 0;
  constexpr u32 SIZE = sizeof(typename F::Raw) > 16 ? 2 : 1;
  constexpr u32 STEP = 32 * F::CHUNKS, AHEAD = (ROWS * TOKENS > 4 ? 2 : 4) / SIZE;  // reads that are under way together
#pragma unroll 1
  for (u32 first = begin; first < end; first += STEP * AHEAD) {
    typename F::Raw raw[AHEAD][ROWS][2];
    EACH(ahead, AHEAD)
      EACH(r, ROWS)
        EACH(half, 2)
          if (first + ahead * STEP < end)
            raw[ahead][r][half] = F::load(args, of_row[r][half], numbers[r][half], first + ahead * STEP, c);
    EACH(step, AHEAD * F::CHUNKS) {
      const u32 ahead = step / F::CHUNKS, chunk = step % F::CHUNKS, k = first + 32 * step;
      if (k >= end) break;
      u32 w[ROWS][2][4];
      EACH(r, ROWS)
        EACH(half, 2) F::expand(w[r][half], raw[ahead][r][half], chunk, F::zero(args, numbers[r][half], number, num_groups));
      EACH(t, TOKENS) {
        const uint4 x = *(const uint4*)(of_token[t] + k + 8 * c);
        EACH(r, ROWS) {
          const u32 one[4] = {w[r][0][0], w[r][1][0], w[r][0][1], w[r][1][1]};
          const u32 two[4] = {w[r][0][2], w[r][1][2], w[r][0][3], w[r][1][3]};
          multiply_add<T>(acc[r][t], one, x.x, x.y);
          multiply_add<T>(acc[r][t], two, x.z, x.w);
        }
      }
      if (!F::HAS_SCALE) continue;
      left -= 32;
      if (left && k + 32 < end) continue;
      EACH(r, ROWS)
        EACH(half, 2) {
          const float factor = F::scale(args, numbers[r][half], number, num_groups);
          EACH(t, TOKENS)
            EACH(low, 2) {
              const u32 i = 2 * half + low;
              total[r][t][i] = fmaf(acc[r][t][i], factor, total[r][t][i]);
              acc[r][t][i] = 0;
            }
        }
      if (!left) { left = args.group; number++; }
    }
  }
  if (!F::HAS_SCALE)
    EACH(r, ROWS)
      EACH(t, TOKENS)
        EACH(i, 4) total[r][t][i] += acc[r][t][i];
}

__device__ __forceinline__ void store(const Product& args, u32 row, u32 token, float sum) {
  if (args.bias) sum += number_at(args.bias, row, args.bias_kind);
  const u64 at = (u64)token * args.out_stride + row;
  if (args.mode == STORE_WIDE) ((float*)args.out)[at] = sum;
  else if (args.mode == STORE) ((u16*)args.out)[at] = narrow(sum);
  else ((u16*)args.out)[at] = narrow(wide(((u16*)args.out)[at]) + rounded(sum));
}

// A block has the 16 rows of W from `row` on and up to 8 * TOKENS of x: a warp a stretch. Blocks with the same rows of W
// are neighbours, and read them from the cache.
template <class F, u32 TOKENS, class Arguments>
__device__ __forceinline__ void few(const Arguments& args, u32 token, u32 end_token, u32 row) {
  __shared__ float sums[STRETCHES][8 * TOKENS][17];
  const u32 stretch = threadIdx.x / 32, g = lane_of(threadIdx.x) / 4, c = threadIdx.x % 4;
  const u32 begin = min(stretch * args.length, args.num_in), end = min(begin + args.length, args.num_in);
  float total[1][TOKENS][4] = {};
  if (begin < end) sum_stretch<F, 1, TOKENS>(args, row, token, end_token, begin, end, total);
  EACH(t, TOKENS)
    EACH(i, 4) sums[stretch][8 * t + 2 * c + i % 2][g + 8 * (i / 2)] = total[0][t][i];
  __syncthreads();
  const u32 num_stretches = (args.num_in + args.length - 1) / args.length;
  for (u32 at = threadIdx.x; at < 16 * 8 * TOKENS; at += FEW_THREADS) {
    const u32 own_row = at % 16, own_token = at / 16;
    if (row + own_row >= args.num_out || token + own_token >= end_token) continue;
    float sum = 0;
    for (u32 number = 0; number < num_stretches; number++) sum += sums[number][own_token][own_row];
    store(args, row + own_row, token + own_token, sum);
  }
}

// A block has 128 rows of W from `row` on and 16 * TOKENS of x: each of 8 warps has 32 and 8 * TOKENS, and all stretches.
template <class F, u32 TOKENS, class Arguments>
__device__ __forceinline__ void many(const Arguments& args, u32 first_token, u32 end_token, u32 first_row) {
  const u32 warp = threadIdx.x / 32, g = lane_of(threadIdx.x) / 4, c = threadIdx.x % 4;
  const u32 token = first_token + 8 * TOKENS * (warp / 4), row = first_row + 32 * (warp % 4);
  if (token >= end_token || row >= args.num_out) return;  // nothing below waits for other warps
  float sum[2][TOKENS][4] = {};
#pragma unroll 1
  for (u32 begin = 0; begin < args.num_in; begin += args.length) {
    float total[2][TOKENS][4] = {};
    sum_stretch<F, 2, TOKENS>(args, row, token, end_token, begin, min(begin + args.length, args.num_in), total);
    EACH(r, 2)
      EACH(t, TOKENS)
        EACH(i, 4) sum[r][t][i] += total[r][t][i];
  }
  EACH(r, 2)
    EACH(t, TOKENS)
      EACH(i, 4) {
        const u32 own_row = row + 16 * r + 8 * (i / 2) + g, own_token = token + 8 * t + 2 * c + i % 2;
        if (own_row < args.num_out && own_token < end_token) store(args, own_row, own_token, sum[r][t][i]);
      }
}

template <class F, u32 TOKENS>
__device__ __forceinline__ void few_of(const Product& args) {
  const u32 token = blockIdx.x * 8 * TOKENS, num_tokens = args.counts[args.count];
  if (token < num_tokens) few<F, TOKENS>(args, token, num_tokens, 16 * blockIdx.y);
}

template <class F>
__device__ __forceinline__ void many_of(const Product& args) {
  many<F, 8>(args, blockIdx.x * 128, args.counts[args.count], blockIdx.y * 128);
}

// The product of the expert and the part that a block has, and of that the block's rows of W, in steps of `step`.
__device__ __forceinline__ PartProduct of_expert(const ExpertProduct& args, const Tile& tile, u32 step, u32* row) {
  const u32 blocks = (args.each.num_out + step - 1) / step, number = blockIdx.y / blocks;
  const MatrixPart part = args.parts[tile.expert * args.num_parts + number];
  PartProduct own = {args.each, args.rows};
  own.weight = part.weight, own.scale = part.scale, own.zero = part.zero, own.bias = part.bias;
  own.out = (u16*)own.out + number * own.num_out;
  *row = blockIdx.y % blocks * step;
  return own;
}

template <class F, u32 TOKENS>
__device__ __forceinline__ void few_of_experts(const ExpertProduct& args) {
  const Tile tile = args.tiles[blockIdx.x];
  if (tile.first == tile.end) return;
  u32 row;
  const PartProduct own = of_expert(args, tile, 16, &row);
  few<F, TOKENS>(own, tile.first, tile.end, row);
}

template <class F>
__device__ __forceinline__ void many_of_experts(const ExpertProduct& args) {
  const Tile tile = args.tiles[blockIdx.x];
  if (tile.first == tile.end) return;
  u32 row;
  const PartProduct own = of_expert(args, tile, 128, &row);
  many<F, 4>(own, tile.first, tile.end, row);
}

#define PRODUCTS(name, Format)                                                         \
  KERNEL(product_##name##_8, Product, FEW_THREADS) { few_of<Format, 1>(args); }        \
  KERNEL(product_##name##_16, Product, FEW_THREADS) { few_of<Format, 2>(args); }       \
  KERNEL(product_##name##_32, Product, FEW_THREADS) { few_of<Format, 4>(args); }       \
  KERNEL(product_##name##_64, Product, FEW_THREADS) { few_of<Format, 8>(args); }       \
  KERNEL(product_##name##_many, Product, MANY_THREADS) { many_of<Format>(args); }

#define EXPERT_PRODUCTS(name, Format)                                                                    \
  KERNEL(experts_##name##_8, ExpertProduct, FEW_THREADS) { few_of_experts<Format, 1>(args); }     \
  KERNEL(experts_##name##_16, ExpertProduct, FEW_THREADS) { few_of_experts<Format, 2>(args); }    \
  KERNEL(experts_##name##_32, ExpertProduct, FEW_THREADS) { few_of_experts<Format, 4>(args); }    \
  KERNEL(experts_##name##_64, ExpertProduct, FEW_THREADS) { few_of_experts<Format, 8>(args); }    \
  KERNEL(experts_##name##_many, ExpertProduct, MANY_THREADS) { many_of_experts<Format>(args); }
