// The operations on rows other than products and attention: embeddings, norms, heads, the gate, pooling, each in one pass.
// Results are rounded where transformers rounds.

struct Embed {
  const void* table;  // (vocab, size) floats, or int8
  const void* table_scale;  // (vocab, size / group) of int8; 0: floats
  const u32* tokens;  // (rows,)
  u16* out;  // (rows, size)
  const u32* counts;
  const void* type_table;  // (types, size) floats; 0: none
  const u32* types;  // (rows,)
  const void* position_table;  // (positions, size) floats; 0: none
  const u32* positions;  // (rows,)
  u32 size, group, scale_kind;
  u32 table_kind;  // of all floats
  u32 first_position;  // the row of a text's first token
  float scale;
};

// out = table[token] * scale + type_table[type] + position_table[position].
KERNEL(embed, Embed, 256) {
  if (blockIdx.x >= args.counts[NUM_ROWS]) return;
  const u64 token = args.tokens[blockIdx.x], row = token * args.size;
  u16* to = args.out + (u64)blockIdx.x * args.size;
  for (u32 at = threadIdx.x; at < args.size; at += blockDim.x) {
    float number;
    if (args.table_scale)
      number = rounded((float)((const signed char*)args.table)[row + at] * number_at(args.table_scale, token * (args.size / args.group) + at / args.group, args.scale_kind));
    else
      number = rounded(number_at(args.table, row + at, args.table_kind));
    u16 made = narrow(number * args.scale);
    if (args.type_table) made = narrow(wide(made) + rounded(number_at(args.type_table, (u64)args.types[blockIdx.x] * args.size + at, args.table_kind)));
    if (args.position_table) {
      const u64 position = args.positions[blockIdx.x] + args.first_position;
      made = narrow(wide(made) + rounded(number_at(args.position_table, position * args.size + at, args.table_kind)));
    }
    to[at] = made;
  }
}

enum NormKind { RMS, RMS_WIDE, RMS_PLUS_ONE, LAYER };  // as `models.decoder_config.Norm`

// A number of a norm's output; `unit` is x / rms(x), or (x - mean) / deviation.
__device__ __forceinline__ u16 weighted(float unit, const void* weight, u32 at, u32 weight_kind, u32 kind) {
  const float own = number_at(weight, at, weight_kind);
  if (kind == RMS) return narrow(rounded(unit) * rounded(own));
  return narrow(unit * (kind == RMS_PLUS_ONE ? 1.0f + own : own));
}

// The mean that a norm of this kind subtracts, and the factor for what is left. All threads of a block call it.
struct Scaling {
  float mean, factor;
};
__device__ __forceinline__ Scaling scaling_of(const u16* row, u32 size, u32 kind, float eps, float* of_warps) {
  float mean = 0, squares = 0;
  if (kind == LAYER) {
    for (u32 at = threadIdx.x; at < size; at += blockDim.x) mean += wide(row[at]);
    mean = block_sum(mean, of_warps) / (float)size;
  }
  for (u32 at = threadIdx.x; at < size; at += blockDim.x) squares = fmaf(wide(row[at]) - mean, wide(row[at]) - mean, squares);
  return {mean, 1.0f / sqrtf(block_sum(squares, of_warps) / (float)size + eps)};
}

struct NormRows {
  const u16* x;  // (rows, x_stride), of which a norm takes the first `size` numbers
  const void* weight;  // (size,)
  const void* bias;  // (size,); 0: none
  u16* out;  // (rows, out_stride); may be x
  const u32* rows;  // the row of x for each row of out; 0: the same
  const u32* counts;
  u32 count, size, x_stride, out_stride, weight_kind, bias_kind, kind;
  float eps;
};

// out = norm(x).
KERNEL(norm_rows, NormRows, 256) {
  __shared__ float of_warps[32];
  if (blockIdx.x >= args.counts[args.count]) return;
  const u16* from = args.x + (u64)(args.rows ? args.rows[blockIdx.x] : blockIdx.x) * args.x_stride;
  u16* to = args.out + (u64)blockIdx.x * args.out_stride;
  const Scaling scaling = scaling_of(from, args.size, args.kind, args.eps, of_warps);
  for (u32 at = threadIdx.x; at < args.size; at += blockDim.x) {
    const float unit = (wide(from[at]) - scaling.mean) * scaling.factor;
    if (args.bias) to[at] = narrow(fmaf(unit, number_at(args.weight, at, args.weight_kind), number_at(args.bias, at, args.bias_kind)));
    else to[at] = weighted(unit, args.weight, at, args.weight_kind, args.kind);
  }
}

struct AddRows {
  u16* x;  // (rows, size)
  const u16* more;  // (rows, size)
  const void* weight;  // (size,) of a norm; 0: none
  const u32* counts;
  u32 size, weight_kind, kind;
  float eps, scale;
};

// x += norm(more) * scale.
KERNEL(add_rows, AddRows, 256) {
  __shared__ float of_warps[32];
  if (blockIdx.x >= args.counts[NUM_ROWS]) return;
  u16* to = args.x + (u64)blockIdx.x * args.size;
  const u16* more = args.more + (u64)blockIdx.x * args.size;
  Scaling scaling = {0, 1};
  if (args.weight) scaling = scaling_of(more, args.size, args.kind, args.eps, of_warps);
  for (u32 at = threadIdx.x; at < args.size; at += blockDim.x) {
    u16 added = more[at];
    if (args.weight) added = weighted((wide(added) - scaling.mean) * scaling.factor, args.weight, at, args.weight_kind, args.kind);
    to[at] = narrow(wide(to[at]) + rounded(wide(added) * args.scale));
  }
}

struct ScaleLogits {
  float* logits;  // (rows, size)
  const u32* counts;
  u32 size;
  float scale, cap;  // no cap: 0
};

// logits *= scale, and then no larger than the cap.
KERNEL(scale_logits, ScaleLogits, 256) {
  const u32 at = blockIdx.y * blockDim.x + threadIdx.x;
  if (blockIdx.x >= args.counts[NUM_LOGITS] || at >= args.size) return;
  float* logit = args.logits + (u64)blockIdx.x * args.size + at;
  const float scaled = *logit * args.scale;
  *logit = args.cap > 0 ? args.cap * tanhf(scaled / args.cap) : scaled;
}

struct PlaceHeads {
  u16* heads;  // (rows, num_heads + 2 * num_kv_heads, head_dim): queries, keys, values; queries are changed
  const float* cos;  // (positions, rotary_dim / 2); 0: heads are not rotated
  const float* sin;
  const void* query_norm;  // (head_dim,); 0: no norms
  const void* key_norm;
  void* keys;  // (slots, num_kv_heads, head_dim): 16-bit floats, or int8
  void* values;
  u16* key_scales;  // (slots, num_kv_heads) of int8; 0: floats
  u16* value_scales;
  const u32* positions;  // (rows,)
  const u32* slots;  // (rows,)
  const u32* counts;
  u32 num_heads, num_kv_heads, head_dim, rotary_dim, weight_kind, kind;
  u32 interleaved;  // number 2 i turns with 2 i + 1, not with that half of the rotated ones further on
  u32 wide_turns;  // what is added is not rounded before
  float eps;
};
#define MAX_HEAD_DIM 256

// Store a head's numbers, which are 16-bit floats, as codes of 8 bits and a scale: the largest one's size / 127, rounded.
// The codes of what is not finite are 0, and its scale is not finite. A warp calls it.
__device__ __forceinline__ void store_codes(const float* numbers, u32 dim, signed char* codes, u16* scale) {
  u64 largest = 0;  // bits, which order as sizes do, and NaN above all
  for (u32 at = lane_of(threadIdx.x); at < dim; at += 32) largest = max(largest, (u64)bits_of_float(fabsf(numbers[at])));
  for (u32 mask = 16; mask; mask /= 2) largest = max(largest, shuffled(largest, mask));
  const float factor = rounded(float_of_bits((u32)largest) / 127.0f);
  for (u32 at = lane_of(threadIdx.x); at < dim; at += 32) {
    const float exact = numbers[at] / factor;
    codes[at] = exact - exact == 0 ? (signed char)fminf(fmaxf(rintf(exact), -127.0f), 127.0f) : 0;
  }
  if (lane_of(threadIdx.x) == 0) *scale = narrow(factor);
}

// Turn pairs of numbers, `half` of them, by the angles of a position. Whoever wrote them is waited for. A warp calls it.
__device__ __forceinline__ void turn(float* numbers, u32 half, const float* cosines, const float* sines, bool is_interleaved, bool is_wide) {
  for (u32 at = lane_of(threadIdx.x); at < half; at += 32) {
    const u32 first = is_interleaved ? 2 * at : at, second = is_interleaved ? 2 * at + 1 : at + half;
    const float low = numbers[first], high = numbers[second];
    float cos = cosines[at], sin = sines[at];
    float of_first[2] = {low * cos, high * sin}, of_second[2] = {high * cos, low * sin};
    if (!is_wide) {
      cos = rounded(cos), sin = rounded(sin);
      of_first[0] = rounded(low * cos), of_first[1] = rounded(high * sin);
      of_second[0] = rounded(high * cos), of_second[1] = rounded(low * sin);
    }
    numbers[first] = rounded(of_first[0] - of_first[1]);
    numbers[second] = rounded(of_second[0] + of_second[1]);
  }
}

// Normalise and rotate queries and keys, and store keys and values in their slots. A warp a head.
KERNEL(place_heads, PlaceHeads, 128) {
  __shared__ float own[4][MAX_HEAD_DIM];
  const u32 row = blockIdx.x, lane = lane_of(threadIdx.x), warp = threadIdx.x / 32, head = 4 * blockIdx.y + warp;
  const u32 num_rotated = args.num_heads + args.num_kv_heads, num_all = num_rotated + args.num_kv_heads, dim = args.head_dim;
  if (row >= args.counts[NUM_ROWS] || head >= num_all) return;
  u16* from = args.heads + ((u64)row * num_all + head) * dim;
  const bool is_query = head < args.num_heads, is_value = head >= num_rotated;
  float* numbers = own[warp];
  float sum = 0, squares = 0;
  for (u32 at = lane; at < dim; at += 32) {
    numbers[at] = wide(from[at]);
    sum += numbers[at];
  }
  if (args.query_norm && !is_value) {
    const float mean = args.kind == LAYER ? warp_sum(sum) / (float)dim : 0.0f;
    for (u32 at = lane; at < dim; at += 32) squares = fmaf(numbers[at] - mean, numbers[at] - mean, squares);
    const float factor = 1.0f / sqrtf(warp_sum(squares) / (float)dim + args.eps);
    const void* weight = is_query ? args.query_norm : args.key_norm;
    for (u32 at = lane; at < dim; at += 32)
      numbers[at] = wide(weighted((numbers[at] - mean) * factor, weight, at, args.weight_kind, args.kind));
  }
  __syncwarp();
  const u32 half = args.cos && !is_value ? args.rotary_dim / 2 : 0;
  const u64 angles = (u64)args.positions[row] * half;
  turn(numbers, half, args.cos + angles, args.sin + angles, args.interleaved, args.wide_turns);
  __syncwarp();
  const u64 slot = (u64)args.slots[row] * args.num_kv_heads + head - (is_value ? num_rotated : args.num_heads);
  void* pool = is_value ? args.values : args.keys;
  u16* scales = is_value ? args.value_scales : args.key_scales;
  if (!is_query && scales) {
    store_codes(numbers, dim, (signed char*)pool + slot * dim, scales + slot);
    return;
  }
  u16* to = is_query ? from : (u16*)pool + slot * dim;
  for (u32 at = lane; at < dim; at += 32) to[at] = narrow(numbers[at]);
}

struct PlaceLatents {
  const u16* queries;  // (rows, num_heads) heads, rows `query_stride` apart: plain_dim numbers, then those that turn
  const u16* latents;  // rows `latent_stride` apart: a normalised latent of `rank` numbers, then the key that turns
  u16* absorbed;  // (rows, num_heads, rank + rotary_dim), of which the turned numbers are written
  void* pool;  // (slots, rank + rotary_dim): 16-bit floats, or int8
  u16* scales;  // (slots,) of int8; 0: floats
  const float* cos;  // (positions, rotary_dim / 2)
  const float* sin;
  const u32* positions;  // (rows,)
  const u32* slots;  // (rows,)
  const u32* counts;
  u32 num_heads, plain_dim, rotary_dim, rank, query_stride, latent_stride;
  u32 interleaved, wide_turns;  // as PlaceHeads has them
};
#define MAX_LATENT_DIM 576

// Turn queries and the key that all heads share, and store it behind its latent in their slot. A warp a head.
KERNEL(place_latents, PlaceLatents, 128) {
  __shared__ float own[4][MAX_LATENT_DIM];
  const u32 row = blockIdx.x, lane = lane_of(threadIdx.x), warp = threadIdx.x / 32, head = 4 * blockIdx.y + warp;
  if (row >= args.counts[NUM_ROWS] || head > args.num_heads) return;
  const bool is_latent = head == args.num_heads;
  const u32 before = is_latent ? args.rank : 0, dim = before + args.rotary_dim, pooled_dim = args.rank + args.rotary_dim;
  const u16* from = is_latent ? args.latents + (u64)row * args.latent_stride
                              : args.queries + (u64)row * args.query_stride + head * (args.plain_dim + args.rotary_dim) + args.plain_dim;
  float* numbers = own[warp];
  for (u32 at = lane; at < dim; at += 32) numbers[at] = wide(from[at]);
  __syncwarp();
  const u32 half = args.rotary_dim / 2;
  const u64 angles = (u64)args.positions[row] * half;
  turn(numbers + before, half, args.cos + angles, args.sin + angles, args.interleaved, args.wide_turns);
  __syncwarp();
  if (is_latent && args.scales) {
    store_codes(numbers, dim, (signed char*)args.pool + (u64)args.slots[row] * dim, args.scales + args.slots[row]);
    return;
  }
  u16* to = is_latent ? (u16*)args.pool + (u64)args.slots[row] * dim : args.absorbed + ((u64)row * args.num_heads + head) * pooled_dim + args.rank;
  for (u32 at = lane; at < dim; at += 32) to[at] = narrow(numbers[at]);
}

struct Gate {
  const u16* product;  // (rows, 2 * size): what passes the gate decides, then what passes it; (rows, size) where all passes
  u16* out;  // (rows, size)
  const u32* counts;
  u32 count, size;
  u32 kind;  // 0: silu, 1: gelu, 2: gelu by tanh, 3: relu, 4: tanh
  u32 is_open;  // all passes
};

__device__ __forceinline__ float activated(float x, u32 kind) {
  if (kind == 0) return x / (1.0f + expf(-x));
  if (kind == 1) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  if (kind == 2) return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  return kind == 4 ? tanhf(x) : fmaxf(x, 0.0f);
}

// out = activation(first half) * second half, or activation(product).
KERNEL(gate, Gate, 256) {
  const u32 at = blockIdx.y * blockDim.x + threadIdx.x;
  if (blockIdx.x >= args.counts[args.count] || at >= args.size) return;
  const u16* row = args.product + (args.is_open ? 1ull : 2ull) * blockIdx.x * args.size;
  const u16 active = narrow(activated(wide(row[at]), args.kind));
  args.out[(u64)blockIdx.x * args.size + at] = args.is_open ? active : narrow(wide(active) * wide(row[args.size + at]));
}

enum PoolKind { MEAN, CLS, MAX, LAST, MEAN_SQRT, WEIGHTED_MEAN };  // as `models.spec.Pooling`

struct PoolRows {
  const u16* x;  // (rows, size)
  void* out;  // (texts, size) fp32, or 16-bit floats
  const u32* starts;  // (texts,): a text's first row
  const u32* lengths;
  const u32* counts;
  u32 size, kind;
  u32 is_narrow;  // out has 16-bit floats
};

// A row for each text: its first, its last, or of all of its rows, which are added in order.
KERNEL(pool_rows, PoolRows, 256) {
  const u32 text = blockIdx.x, at = blockIdx.y * blockDim.x + threadIdx.x;
  if (text >= args.counts[NUM_LOGITS] || at >= args.size) return;
  const u32 num = args.lengths[text];
  const u16* from = args.x + (u64)args.starts[text] * args.size + at;
  float made = wide(from[args.kind == LAST ? (u64)(num - 1) * args.size : 0]);
  if (args.kind == MAX)
    for (u32 row = 1; row < num; row++) made = fmaxf(made, wide(from[(u64)row * args.size]));
  if (args.kind == MEAN || args.kind == MEAN_SQRT || args.kind == WEIGHTED_MEAN) {
    float total = 1;
    for (u32 row = 1; row < num; row++) {
      const float weight = args.kind == WEIGHTED_MEAN ? (float)(row + 1) : 1.0f;
      made = fmaf(wide(from[(u64)row * args.size]), weight, made);
      total += weight;
    }
    made = made / (args.kind == MEAN_SQRT ? sqrtf(total) : total);
  }
  const u64 place = (u64)text * args.size + at;
  if (args.is_narrow) ((u16*)args.out)[place] = narrow(made);
  else ((float*)args.out)[place] = made;
}
