// The operations on rows other than products and attention: embeddings, norms, heads and the gate, each in one pass.
// Results are rounded where transformers rounds.

struct Embed {
  const void* table;  // (vocab, size) 16-bit floats, or int8
  const void* table_scale;  // (vocab, size / group) of int8; 0: floats
  const u32* tokens;  // (rows,)
  u16* out;  // (rows, size)
  const u32* counts;
  u32 size, group, scale_kind;
  float scale;
};

// out = table[token] * scale.
KERNEL(embed, Embed, 256) {
  if (blockIdx.x >= args.counts[NUM_ROWS]) return;
  const u64 token = args.tokens[blockIdx.x], row = token * args.size;
  u16* to = args.out + (u64)blockIdx.x * args.size;
  for (u32 at = threadIdx.x; at < args.size; at += blockDim.x) {
    float number;
    if (args.table_scale)
      number = rounded((float)((const signed char*)args.table)[row + at] * number_at(args.table_scale, token * (args.size / args.group) + at / args.group, args.scale_kind));
    else
      number = wide(((const u16*)args.table)[row + at]);
    to[at] = narrow(number * args.scale);
  }
}

struct RmsNorm {
  const u16* x;  // (rows, size)
  const void* weight;  // (size,)
  u16* out;  // (rows, size)
  const u32* rows;  // the row of x for each row of out; 0: the same
  const u32* counts;
  u32 count, size, weight_kind;
  float eps;
};

// out = x / rms(x) * weight.
KERNEL(rms_norm, RmsNorm, 256) {
  __shared__ float of_warps[32];
  if (blockIdx.x >= args.counts[args.count]) return;
  const u16* from = args.x + (u64)(args.rows ? args.rows[blockIdx.x] : blockIdx.x) * args.size;
  u16* to = args.out + (u64)blockIdx.x * args.size;
  float squares = 0;
  for (u32 at = threadIdx.x; at < args.size; at += blockDim.x) squares = fmaf(wide(from[at]), wide(from[at]), squares);
  const float factor = 1.0f / sqrtf(block_sum(squares, of_warps) / (float)args.size + args.eps);
  for (u32 at = threadIdx.x; at < args.size; at += blockDim.x)
    to[at] = narrow(rounded(wide(from[at]) * factor) * rounded(number_at(args.weight, at, args.weight_kind)));
}

struct PlaceHeads {
  u16* heads;  // (rows, num_heads + 2 * num_kv_heads, head_dim): queries, keys, values; queries are changed
  const float* cos;  // (positions, rotary_dim / 2)
  const float* sin;
  const void* query_norm;  // (head_dim,); 0: no norms
  const void* key_norm;
  u16* keys;  // (slots, num_kv_heads, head_dim)
  u16* values;
  const u32* positions;  // (rows,)
  const u32* slots;  // (rows,)
  const u32* counts;
  u32 num_heads, num_kv_heads, head_dim, rotary_dim, norm_kind;
  float eps;
};
#define MAX_HEAD_DIM 256

// Normalise and rotate queries and keys, and store keys and values in their slots. A warp a head.
KERNEL(place_heads, PlaceHeads, 128) {
  __shared__ float own[4][MAX_HEAD_DIM];
  const u32 row = blockIdx.x, lane = lane_of(threadIdx.x), warp = threadIdx.x / 32, head = 4 * blockIdx.y + warp;
  const u32 num_rotated = args.num_heads + args.num_kv_heads, num_all = num_rotated + args.num_kv_heads, dim = args.head_dim;
  if (row >= args.counts[NUM_ROWS] || head >= num_all) return;
  u16* from = args.heads + ((u64)row * num_all + head) * dim;
  const bool is_query = head < args.num_heads, is_value = head >= num_rotated;
  const u64 slot = (u64)args.slots[row] * args.num_kv_heads;
  u16* to = is_query ? from : is_value ? args.values + (slot + head - num_rotated) * dim : args.keys + (slot + head - args.num_heads) * dim;
  if (is_value) {
    for (u32 at = lane; at < dim; at += 32) to[at] = from[at];
    return;
  }
  float* numbers = own[warp];
  float squares = 0;
  for (u32 at = lane; at < dim; at += 32) {
    numbers[at] = wide(from[at]);
    squares = fmaf(numbers[at], numbers[at], squares);
  }
  if (args.query_norm) {
    const float factor = 1.0f / sqrtf(warp_sum(squares) / (float)dim + args.eps);
    const void* weight = is_query ? args.query_norm : args.key_norm;
    for (u32 at = lane; at < dim; at += 32)
      numbers[at] = rounded(rounded(numbers[at] * factor) * rounded(number_at(weight, at, args.norm_kind)));
  }
  __syncwarp();
  const u32 half = args.rotary_dim / 2;
  const u64 angles = (u64)args.positions[row] * half;
  for (u32 at = lane; at < half; at += 32) {
    const float low = numbers[at], high = numbers[at + half], cos = rounded(args.cos[angles + at]), sin = rounded(args.sin[angles + at]);
    to[at] = narrow(rounded(low * cos) - rounded(high * sin));
    to[at + half] = narrow(rounded(high * cos) + rounded(low * sin));
  }
  for (u32 at = args.rotary_dim + lane; at < dim; at += 32) to[at] = narrow(numbers[at]);
}

struct Gate {
  const u16* product;  // (rows, 2 * size): what passes the gate decides, then what passes it
  u16* out;  // (rows, size)
  const u32* counts;
  u32 size, kind;  // 0: silu, 1: gelu, 2: gelu by tanh, 3: relu
};

__device__ __forceinline__ float activated(float x, u32 kind) {
  if (kind == 0) return x / (1.0f + expf(-x));
  if (kind == 1) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  if (kind == 2) return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  return fmaxf(x, 0.0f);
}

// out = activation(first half) * second half.
KERNEL(gate, Gate, 256) {
  const u32 at = blockIdx.y * blockDim.x + threadIdx.x;
  if (blockIdx.x >= args.counts[NUM_ROWS] || at >= args.size) return;
  const u16* row = args.product + 2ull * blockIdx.x * args.size;
  args.out[(u64)blockIdx.x * args.size + at] = narrow(rounded(activated(wide(row[at]), args.kind)) * wide(row[args.size + at]));
}
