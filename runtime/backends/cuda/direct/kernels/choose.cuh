// The choice of the next tokens, in the order and precision of step/sampling.py; a row is never mixed with another.
//
//   adjust    bias and penalties, on a copy of the rows that have some
//   weigh     a row's best token, what top-k, top-p and min-p keep of it, and the sum of its log probabilities
//   race      each kept token's probability divided by a random number of its own; the largest of each piece
//   conclude  the winner, and log probabilities
//
// Amounts that are compared are integers: tokens, or probabilities in units of 2 ** -40. So no result depends on the
// order in which threads add. Of equal scores top-p keeps the lowest ids that it needs; top-k keeps all.

#define NO_ROW 0xFFFFFFFFu
#define CHOOSE_THREADS 1024
#define RACE_THREADS 256
#define PIECE 4096
#define BUCKETS 1024
#define BUCKETS_PER_UNIT 32.0f

struct Request {  // of a row
  i64 seed, index;
  double top_p;  // 1: all
  float temperature;  // 0: the best token
  float log_min_p;  // -inf: all
  float repetition_penalty;
  u32 top_k;  // 0: all
  u32 num_top;  // log probabilities of so many; NO_ROW: of none, not even the token's
  u32 first_word;  // of the mask of tokens that may come; NO_ROW: all may
  u32 scores_row;  // where adjusted scores are; NO_ROW: there are none
  u32 bias_end, repeated_end, penalised_end;  // in the lists, one behind the other
  u32 bias_begin, unused;
};

struct Weighed {
  double sum;  // of exp(score - highest) of all tokens
  float best, highest;  // the highest legal score, and the highest
  u32 token;  // of the best
  u32 threshold;  // of keys: kept above it, and at it
  u32 tie_end;  // up to this token
  u32 unused;
};

struct Result {
  u32 token;
  float best;
  float logprob;
  u32 num_top;
};

struct Choose {
  const float* logits;  // (rows, vocab)
  float* scores;  // (adjusted rows, vocab)
  const Request* requests;  // (rows,)
  const u32* tokens;  // of the lists
  const float* values;
  const u32* words;  // of masks
  Weighed* weighed;  // (rows,)
  double* quotients;  // (rows, pieces)
  u32* winners;  // (rows, pieces)
  Result* results;  // (rows,)
  u32* top_tokens;  // (rows, max_top)
  float* top_logprobs;
  u32 vocab, max_top;
};

// A row's scores with its limits.
struct Row {
  const Request& request;
  const float* scores;
  const u32* words;

  __device__ __forceinline__ Row(const Choose& args, u32 row)
      : request(args.requests[row]),
        scores(request.scores_row == NO_ROW ? args.logits + (u64)row * args.vocab : args.scores + (u64)request.scores_row * args.vocab),
        words(request.first_word == NO_ROW ? nullptr : args.words + request.first_word) {}
  __device__ __forceinline__ bool is_legal(u32 token) const { return !words || words[token / 32] >> token % 32 & 1; }
  __device__ __forceinline__ float legal(u32 token) const { return is_legal(token) ? scores[token] : NONE; }
  // Below the best, 0 and less, by the temperature; + 0 makes of -0 the 0 that it equals.
  __device__ __forceinline__ float relative(u32 token, float best) const { return (legal(token) - best) / request.temperature + 0.0f; }
};

// Numbers as integers of the same order.
__device__ __forceinline__ u32 key_of(float x) {
  const u32 bits = bits_of_float(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ u64 mass_of(float relative) { return (u64)((double)expf(relative) * 1099511627776.0); }

struct Adjust {
  Choose choose;
  const u32* rows;  // (adjusted rows,)
};

KERNEL(adjust, Adjust, CHOOSE_THREADS) {
  const Choose& all = args.choose;
  const u32 row = args.rows[blockIdx.x];
  const Request& request = all.requests[row];
  float* scores = all.scores + (u64)request.scores_row * all.vocab;
  for (u32 token = threadIdx.x; token < all.vocab; token += CHOOSE_THREADS) scores[token] = all.logits[(u64)row * all.vocab + token];
  __syncthreads();
  // Tokens of a list are distinct.
  for (u32 at = request.bias_begin + threadIdx.x; at < request.bias_end; at += CHOOSE_THREADS) scores[all.tokens[at]] += all.values[at];
  __syncthreads();
  for (u32 at = request.bias_end + threadIdx.x; at < request.repeated_end; at += CHOOSE_THREADS) {
    const float old = scores[all.tokens[at]], penalty = request.repetition_penalty;
    scores[all.tokens[at]] = old > 0 ? old / penalty : old * penalty;
  }
  __syncthreads();
  for (u32 at = request.repeated_end + threadIdx.x; at < request.penalised_end; at += CHOOSE_THREADS) scores[all.tokens[at]] -= all.values[at];
}

struct Best {
  float score;
  u32 token;
};
// The higher score; of equal ones the lower token. NaN is the highest, as in numpy.
__device__ __forceinline__ bool is_better(float score, u32 token, const Best& than) {
  const bool is_nan = score != score, is_other_nan = than.score != than.score;
  if (is_nan != is_other_nan) return is_nan;
  if (score != than.score && !is_nan) return score > than.score;
  return token < than.token;
}

struct ChooseRoom {
  Best best[CHOOSE_THREADS];
  double sums[CHOOSE_THREADS];
  u64 amounts[BUCKETS];
  u64 before, total;
  u32 bucket;
};

// The best of all threads' own, for all of them. All threads call it.
__device__ __forceinline__ Best best_of(ChooseRoom& room, Best own) {
  room.best[threadIdx.x] = own;
  for (u32 step = CHOOSE_THREADS / 2; step; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step && is_better(room.best[threadIdx.x + step].score, room.best[threadIdx.x + step].token, room.best[threadIdx.x]))
      room.best[threadIdx.x] = room.best[threadIdx.x + step];
  }
  __syncthreads();
  const Best best = room.best[0];
  __syncthreads();
  return best;
}

__device__ __forceinline__ double sum_of(ChooseRoom& room, double own) {
  room.sums[threadIdx.x] = own;
  for (u32 step = CHOOSE_THREADS / 2; step; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) room.sums[threadIdx.x] += room.sums[threadIdx.x + step];
  }
  __syncthreads();
  const double sum = room.sums[0];
  __syncthreads();
  return sum;
}

// What is selected from: the tokens with keys from `least` on, each counting 1 or its probability.
struct Selection {
  const Row& row;
  float best;
  u32 vocab, least;
  bool by_mass;

  __device__ __forceinline__ u64 amount_of(float relative) const { return by_mass ? mass_of(relative) : 1; }
  static __device__ __forceinline__ u32 bucket_of(float relative) {
    return relative > -(BUCKETS / BUCKETS_PER_UNIT) ? min((u32)(-relative * BUCKETS_PER_UNIT), BUCKETS - 1u) : BUCKETS - 1u;
  }

  // Amounts of the buckets of one pass, and the first at which they reach `target`. Returns the amount before it.
  template <class Place>
  __device__ __forceinline__ u64 pass(ChooseRoom& room, u32 num_buckets, u64 before, double target, Place place) const {
    for (u32 at = threadIdx.x; at < num_buckets; at += CHOOSE_THREADS) room.amounts[at] = 0;
    __syncthreads();
    for (u32 token = threadIdx.x; token < vocab; token += CHOOSE_THREADS) {
      const float relative = row.relative(token, best);
      const u32 key = key_of(relative), own = key >= least ? place(relative, key) : NO_ROW;
      if (own != NO_ROW) atomicAdd(&room.amounts[own], amount_of(relative));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      u32 bucket = 0;
      for (; bucket + 1 < num_buckets && (double)(before + room.amounts[bucket]) < target; bucket++) before += room.amounts[bucket];
      room.bucket = bucket;
      room.before = before;
    }
    __syncthreads();
    return room.before;
  }

  // The key at which the amounts from the highest on reach `target`, and the amount above it.
  __device__ __forceinline__ u32 key_at(ChooseRoom& room, double target, u64& before) const {
    before = pass(room, BUCKETS, 0, target, [](float relative, u32) { return bucket_of(relative); });
    const u32 bucket = room.bucket;
    u32 prefix = 0;
    for (u32 shift = 24; shift < 32; shift -= 8) {  // until it wraps
      before = pass(room, 256, before, target, [&](float relative, u32 key) {
        const bool is_in = bucket_of(relative) == bucket && (shift == 24 || key >> (shift + 8) == prefix);
        return is_in ? 255 - (key >> shift & 255) : NO_ROW;
      });
      prefix = prefix << 8 | (255 - room.bucket);
    }
    return prefix;
  }

  __device__ __forceinline__ u64 total(ChooseRoom& room) const {
    if (threadIdx.x == 0) room.total = 0;
    __syncthreads();
    u64 own = 0;
    for (u32 token = threadIdx.x; token < vocab; token += CHOOSE_THREADS) {
      const float relative = row.relative(token, best);
      if (key_of(relative) >= least) own += amount_of(relative);
    }
    atomicAdd(&room.total, own);
    __syncthreads();
    return room.total;
  }

  // How many tokens below `end` have this key.
  __device__ __forceinline__ u32 count(ChooseRoom& room, u32 key, u32 end) const {
    __syncthreads();
    if (threadIdx.x == 0) room.total = 0;
    __syncthreads();
    u64 own = 0;
    for (u32 token = threadIdx.x; token < end; token += CHOOSE_THREADS) own += key_of(row.relative(token, best)) == key;
    atomicAdd(&room.total, own);
    __syncthreads();
    return (u32)room.total;
  }
};

// What top-k, top-p and min-p leave of a row.
__device__ __forceinline__ void keep(ChooseRoom& room, const Row& row, u32 vocab, Weighed& weighed) {
  const Request& request = row.request;
  weighed.threshold = 0;
  weighed.tie_end = vocab;
  u64 before;
  if (request.top_k && request.top_k < vocab)
    weighed.threshold = Selection{row, weighed.best, vocab, 0, false}.key_at(room, request.top_k, before);
  if (request.top_p < 1.0) {
    const Selection kept = {row, weighed.best, vocab, weighed.threshold, true};
    const double target = fmax(request.top_p * (double)kept.total(room), 1.0);
    const u32 key = kept.key_at(room, target, before);
    const u64 each = mass_of(float_of_bits(key >> 31 ? key & 0x7FFFFFFF : ~key));
    const double wanted = each ? ceil((target - (double)before) / (double)each) : 1.0;
    weighed.threshold = key;
    u32 low = 0, high = vocab;  // the first `tie_end` below which there are as many as wanted
    if ((double)kept.count(room, key, vocab) > wanted)
      while (low + 1 < high) {
        const u32 middle = (low + high) / 2;
        if ((double)kept.count(room, key, middle) >= wanted) high = middle;
        else low = middle;
      }
    weighed.tie_end = high;
  }
  const u32 least = key_of(request.log_min_p);
  if (least > weighed.threshold) { weighed.threshold = least; weighed.tie_end = vocab; }
}

KERNEL(weigh, Choose, CHOOSE_THREADS) {
  __shared__ ChooseRoom room;
  const Row row(args, blockIdx.x);
  Best legal = {NONE, args.vocab}, all = {NONE, args.vocab};
  for (u32 token = threadIdx.x; token < args.vocab; token += CHOOSE_THREADS) {
    const float score = row.scores[token];
    if (is_better(score, token, all)) all = {score, token};
    if (row.is_legal(token) && is_better(score, token, legal)) legal = {score, token};
  }
  legal = best_of(room, legal);
  all = row.words ? best_of(room, all) : legal;
  Weighed weighed = {0.0, legal.score, all.score, legal.token, 0, 0, 0};
  if (row.request.num_top != NO_ROW) {
    double own = 0;
    for (u32 token = threadIdx.x; token < args.vocab; token += CHOOSE_THREADS) own += exp((double)row.scores[token] - (double)all.score);
    weighed.sum = sum_of(room, own);
  }
  if (row.request.temperature != 0 && legal.score - legal.score == 0) keep(room, row, args.vocab, weighed);
  if (threadIdx.x == 0) args.weighed[blockIdx.x] = weighed;
}

// Philox4x32-10 (Salmon et al., 2011): two words of a token's random numbers.
__device__ __forceinline__ u64 random_bits(u64 seed, u64 index, u32 token) {
  u32 key_0 = (u32)seed, key_1 = (u32)(seed >> 32), word_0 = token, word_1 = (u32)index, word_2 = 0, word_3 = 0;
  for (u32 round = 0; round < 10; round++) {
    const u64 product_0 = (u64)word_0 * 0xD2511F53u, product_2 = (u64)word_2 * 0xCD9E8D57u;
    word_0 = (u32)(product_2 >> 32) ^ word_1 ^ key_0;
    word_2 = (u32)(product_0 >> 32) ^ word_3 ^ key_1;
    word_1 = (u32)product_2;
    word_3 = (u32)product_0;
    key_0 += 0x9E3779B9u;
    key_1 += 0xBB67AE85u;
  }
  return (u64)word_0 << 32 | word_1;
}

// A block has a piece of a row.
KERNEL(race, Choose, RACE_THREADS) {
  __shared__ double quotients[RACE_THREADS];
  __shared__ u32 tokens[RACE_THREADS];
  const Row row(args, blockIdx.x);
  if (row.request.temperature == 0) return;
  const Weighed weighed = args.weighed[blockIdx.x];
  double best = -1;
  u32 winner = args.vocab;
  const u32 end = min(PIECE * (blockIdx.y + 1), args.vocab);
  for (u32 token = PIECE * blockIdx.y + threadIdx.x; token < end; token += RACE_THREADS) {
    const float relative = row.relative(token, weighed.best);
    const u32 key = key_of(relative);
    if (key < weighed.threshold || (key == weighed.threshold && token >= weighed.tie_end) || relative == NONE) continue;
    // 52 random bits, in the middle of their interval, so that none is 0.
    const double uniform = ((double)(random_bits((u64)row.request.seed, (u64)row.request.index, token) >> 12) + 0.5) * 2.220446049250313e-16;
    const double quotient = exp((double)relative) / -log(uniform);
    if (quotient > best) { best = quotient; winner = token; }
  }
  quotients[threadIdx.x] = best;
  tokens[threadIdx.x] = winner;
  __syncthreads();
  if (threadIdx.x) return;
  for (u32 other = 1; other < RACE_THREADS; other++)
    if (quotients[other] > best || (quotients[other] == best && tokens[other] < winner)) { best = quotients[other]; winner = tokens[other]; }
  args.quotients[(u64)blockIdx.x * gridDim.y + blockIdx.y] = best;
  args.winners[(u64)blockIdx.x * gridDim.y + blockIdx.y] = winner;
}

KERNEL(conclude, Choose, CHOOSE_THREADS) {
  __shared__ ChooseRoom room;
  const Row row(args, blockIdx.x);
  const Weighed weighed = args.weighed[blockIdx.x];
  const u32 num_pieces = (args.vocab + PIECE - 1) / PIECE;
  u32 token = weighed.token;
  if (row.request.temperature != 0) {
    double best = -1;
    for (u32 piece = 0; piece < num_pieces; piece++) {  // tokens ascend
      const u64 at = (u64)blockIdx.x * num_pieces + piece;
      if (args.quotients[at] > best) { best = args.quotients[at]; token = args.winners[at]; }
    }
  }
  Result result = {token, weighed.best, 0.0f, 0};
  if (row.request.num_top != NO_ROW) {
    const double offset = (double)weighed.highest + log(weighed.sum);
    if (token < args.vocab) result.logprob = (float)((double)row.scores[token] - offset);
    Best last = {INFINITY, 0};
    for (; result.num_top < row.request.num_top; result.num_top++) {
      Best own = {NONE, args.vocab};
      for (u32 other = threadIdx.x; other < args.vocab; other += CHOOSE_THREADS) {
        const float score = row.scores[other];
        const bool is_left = score < last.score || (score == last.score && other > last.token);
        if (is_left && is_better(score, other, own)) own = {score, other};
      }
      last = best_of(room, own);
      if (last.token >= args.vocab || last.score == NONE) break;
      if (threadIdx.x == 0) {
        args.top_tokens[(u64)blockIdx.x * args.max_top + result.num_top] = last.token;
        args.top_logprobs[(u64)blockIdx.x * args.max_top + result.num_top] = (float)((double)last.score - offset);
      }
    }
  }
  if (threadIdx.x == 0) args.results[blockIdx.x] = result;
}
