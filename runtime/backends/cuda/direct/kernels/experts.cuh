// Mixtures of experts around their products: the experts that each row chooses, the pairs of a row and an expert grouped
// by expert, and the weighted sum of what they give. A row's choice and sum are its own; where its pairs lie among others
// changes no bit.

#define MAX_EXPERTS 1024
#define MAX_CHOSEN 32
#define GROUP_THREADS 256

struct RouteExperts {
  const float* scores;  // (rows, num)
  const void* correction;  // (num,), added to shares to choose; 0: none
  u32* chosen;  // (rows, num_used), ascending
  float* weights;  // (rows, num_used), of these
  const u32* counts;
  u32 num, num_used, correction_kind;
  u32 sigmoid, wide_scores, sum_to_1, rounds_weights, num_groups, num_groups_used;  // as `models.experts_config.Experts` has them
  float sum_eps, factor;
};

// Orders as floats do; of equal ones the first expert is the highest. Never 0.
__device__ __forceinline__ u64 rank_of(float score, u32 expert) {
  const u32 bits = bits_of_float(score + 0.0f);  // not -0
  return (u64)(bits >> 31 ? ~bits : bits | 0x80000000) << 32 | ~expert;
}

__device__ __forceinline__ float score_of(u64 rank) {
  const u32 bits = (u32)(rank >> 32);
  return float_of_bits(bits >> 31 ? bits & 0x7FFFFFFF : ~bits);
}

// The highest of `num` ranks, which becomes 0: its number. All lanes of a warp call it, which have every 32nd.
__device__ __forceinline__ u32 take_highest(u64* ranks, u32 num) {
  const u32 lane = lane_of(threadIdx.x);
  u64 own = 0;
  for (u32 n = lane; n < num; n += 32) own = max(own, ranks[n]);
  for (u32 mask = 16; mask; mask /= 2) own = max(own, shuffled(own, mask));
  const u32 number = ~(u32)own;
  if (number % 32 == lane) ranks[number] = 0;
  return number;
}

// Give ranks of 0 to experts of all groups but those whose best, or two best corrected ones together, are highest. A warp
// calls it.
__device__ __forceinline__ void leave_out_groups(const RouteExperts& args, u64* ranks, u64* of_groups) {
  const u32 lane = lane_of(threadIdx.x), size = args.num / args.num_groups;
  __syncwarp();
  for (u32 group = lane; group < args.num_groups; group += 32) {
    u64 first = 0, second = 0;
    for (u32 n = group * size; n < (group + 1) * size; n++) {
      second = max(second, min(first, ranks[n]));
      first = max(first, ranks[n]);
    }
    of_groups[group] = rank_of(score_of(first) + (args.correction && second ? score_of(second) : 0.0f), group);
  }
  for (u32 k = 0; k < args.num_groups_used; k++) take_highest(of_groups, args.num_groups);
  __syncwarp();
  for (u32 n = lane; n < args.num; n += 32)
    if (of_groups[n / size]) ranks[n] = 0;
}

// A warp a row. Any scores choose different experts that there are, NaN too.
KERNEL(route, RouteExperts, 32) {
  __shared__ float shares[MAX_EXPERTS];
  __shared__ u64 ranks[MAX_EXPERTS], of_groups[MAX_EXPERTS];
  __shared__ u32 best[MAX_CHOSEN];
  const u32 row = blockIdx.x, lane = threadIdx.x;
  if (row >= args.counts[NUM_ROWS]) return;
  float largest = NONE, total = 0;
  for (u32 n = lane; n < args.num; n += 32) {  // these are the lane's own, up to the choice
    const float score = args.scores[(u64)row * args.num + n];
    shares[n] = args.wide_scores ? score : rounded(score);
    ranks[n] = rank_of(shares[n], n);
    largest = fmaxf(largest, shares[n]);
  }
  for (u32 mask = 16; mask; mask /= 2) largest = fmaxf(largest, shuffled(largest, mask));
  for (u32 n = lane; n < args.num; n += 32) {
    shares[n] = args.sigmoid ? 1.0f / (1.0f + expf(-shares[n])) : expf(shares[n] - largest);
    total += shares[n];
  }
  total = args.sigmoid ? 1.0f : warp_sum(total);
  for (u32 n = lane; n < args.num; n += 32) {
    shares[n] /= total;
    if (args.correction) ranks[n] = rank_of(shares[n] + number_at(args.correction, n, args.correction_kind), n);
  }
  if (args.num_groups_used < args.num_groups) leave_out_groups(args, ranks, of_groups);
  for (u32 k = 0; k < args.num_used; k++) {
    const u32 expert = take_highest(ranks, args.num);
    if (lane == 0) best[k] = expert;
  }
  __syncwarp();
  float sum = 0;
  u32 place = 0;
  if (lane >= args.num_used) return;
  for (u32 k = 0; k < args.num_used; k++) {
    sum += shares[best[k]];
    place += best[k] < best[lane];
  }
  float weight = shares[best[lane]];
  if (args.sum_to_1) weight /= sum + args.sum_eps;
  weight *= args.factor;
  args.chosen[row * args.num_used + place] = best[lane];
  args.weights[row * args.num_used + place] = args.rounds_weights ? rounded(weight) : weight;
}

struct GroupPairs {
  const u32* chosen;  // (pairs,)
  u32* rows;  // (pairs,): the row of each place
  u32* places;  // (pairs,): the place of each pair
  Tile* tiles;  // (num_tiles,)
  const u32* counts;
  u32 num, num_used, tile_rows, num_tiles;
};

// Give each pair a place, those of an expert one behind the other in the order of their rows, and cut an expert's places
// into tiles. A block an expert, which counts all pairs: blocks need nothing of each other.
KERNEL(group_pairs, GroupPairs, GROUP_THREADS) {
  __shared__ u32 num_of[MAX_EXPERTS], own_of[GROUP_THREADS];
  __shared__ u64 of_warps[32];
  const u32 expert = blockIdx.x, num_pairs = args.counts[NUM_PAIRS], thread = threadIdx.x;
  for (u32 n = thread; n < args.num; n += GROUP_THREADS) num_of[n] = 0;
  __syncthreads();
  const u32 length = (num_pairs + GROUP_THREADS - 1) / GROUP_THREADS;
  const u32 begin = min(thread * length, num_pairs), end = min(begin + length, num_pairs);
  u32 own = 0;  // of this expert, among the thread's pairs
  for (u32 pair = begin; pair < end; pair++) {
    atomicAdd(&num_of[args.chosen[pair]], 1u);
    own += args.chosen[pair] == expert;
  }
  own_of[thread] = own;
  __syncthreads();
  u64 before = 0;  // places of experts before this one, and their tiles in the upper half
  for (u32 n = thread; n < expert; n += GROUP_THREADS)
    before += num_of[n] | (u64)((num_of[n] + args.tile_rows - 1) / args.tile_rows) << 32;
  before = block_sum(before, of_warps);
  const u32 first = (u32)before, last = first + num_of[expert], first_tile = (u32)(before >> 32);
  const u32 end_tile = first_tile + (num_of[expert] + args.tile_rows - 1) / args.tile_rows;
  for (u32 tile = first_tile + thread; tile < end_tile; tile += GROUP_THREADS) {
    const u32 from = first + (tile - first_tile) * args.tile_rows;
    args.tiles[tile] = {expert, from, min(from + args.tile_rows, last)};
  }
  if (expert == args.num - 1)
    for (u32 tile = end_tile + thread; tile < args.num_tiles; tile += GROUP_THREADS) args.tiles[tile] = {0, 0, 0};
  u32 place = first;
  for (u32 other = 0; own && other < thread; other++) place += own_of[other];
  for (u32 pair = begin; pair < end; pair++) {
    if (args.chosen[pair] != expert) continue;
    args.rows[place] = pair / args.num_used;
    args.places[pair] = place++;
  }
}

struct AddExperts {
  u16* out;  // (rows, size)
  const u16* made;  // (pairs, size), by places
  const u32* places;  // (rows, num_used)
  const float* weights;  // (rows, num_used)
  const u16* shared;  // (rows, size) of the shared expert; 0: none
  const u16* shared_gate;  // (rows,): by its sigmoid shared rows are multiplied; 0: none
  const u32* counts;
  u32 size, num_used;
  u32 adds;  // to what is in out
};

// out = the sum of made * weight in the order of experts, and the shared one's. Rounded as transformers does.
KERNEL(add_experts, AddExperts, 256) {
  const u32 row = blockIdx.x, at = blockIdx.y * blockDim.x + threadIdx.x;
  if (row >= args.counts[NUM_ROWS] || at >= args.size) return;
  float sum = 0;
  for (u32 pair = row * args.num_used; pair < (row + 1) * args.num_used; pair++)
    sum = rounded(sum + rounded(wide(args.made[(u64)args.places[pair] * args.size + at]) * args.weights[pair]));
  const u64 own = (u64)row * args.size + at;
  if (args.shared) {
    float shared = wide(args.shared[own]);
    if (args.shared_gate) shared = rounded(shared * rounded(1.0f / (1.0f + expf(-wide(args.shared_gate[row])))));
    sum = rounded(sum + shared);
  }
  args.out[own] = narrow(args.adds ? wide(args.out[own]) + sum : sum);
}
