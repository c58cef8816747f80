// Zstd frames of literals -> bytes: what the packer writes (docs/decisions/0068). A warp a frame, a lane a stream.
//
// A frame has blocks of raw bytes, of one repeated byte, or of literals: raw, repeated, or in Huffman codes of at most
// 11 bits, in four streams or one. Frames with sequences never come here: the host has read all headers. What it has
// not done is compare the part's digest, so the bytes may be anything: outside of a frame's bytes, rounded out to 4,
// nothing is read, and outside of its output nothing is written. A frame that is not sound, or whose bytes have bits
// that must be 0, sets FRAME_DAMAGED in `wrong`.
//
// A stream is read from its end. A look-up of its next 11 bits gives up to 6 whole codes, as in native/huffman.c.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define FRAME_DAMAGED 2u  // a bit of `wrong`
#define LANES 32u
#define ALL_LANES 0xFFFFFFFFu
#define TABLE_BITS 11
#define MAX_SYMBOLS 6u
#define MAX_WEIGHTS 255
#define MAX_WEIGHT_STATES_LOG 6
#define MAX_FRAME_BLOCKS 256

// Offsets are from the image's first byte. Bytes from `check_from` on must have no bit of the second byte of `masks`,
// those before none of the first.
struct CodedFrame {
  u32 coded, coded_bytes;  // no bytes: the frame is raw, and lies at `out`
  u32 out, out_bytes;
  u32 check_from, masks;
};

struct Codes {
  // [1 << k, 2 << k) are the values of k bits: bytes 0 to 5 are symbols, byte 6 how many, byte 7 how many bits they take.
  u64 table[2 << TABLE_BITS];
  u8 code_bits[MAX_WEIGHTS + 1];  // by symbol
  u8 weights[MAX_WEIGHTS + 1];
  u8 symbols[MAX_WEIGHTS + 1];             // that have a code, the longest codes first
  u32 states[1 << MAX_WEIGHT_STATES_LOG];  // of weights: symbol | bits << 8 | next << 16
  int num_symbols, tree_bytes;
};

__device__ inline int highest_bit(u32 value) { return 31 - __clz(value); }

// 32 bits from `bit` on, with zeros for those that are not among the `size` bytes.
__device__ inline u32 bits_at(const u8* base, int size, int bit) {
  u64 word = 0;
  for (int i = 0; i < 5; i++) {
    const int at = (bit >> 3) + i;
    if (at >= 0 && at < size) word |= (u64)base[at] << (8 * i);
  }
  return (u32)(word >> (bit & 7));
}

// The `count` bits that begin at `bit`, which may lie before the first one: zeros are there.
__device__ inline u32 bits_ending(const u8* base, int size, int bit, int count) {
  const u32 found = bit < 0 ? (bit > -32 ? bits_at(base, size, 0) << -bit : 0) : bits_at(base, size, bit);
  return found & ((1u << count) - 1);
}

// ---- trees: by lane 0 ----

// The table of states that a tree's weights are coded with (RFC 8878, section 4.1.1): its logarithm, and in `begin`
// where the states' bits begin; 0 if damaged.
__device__ inline int read_states(Codes& codes, const u8* src, int size, int* begin) {
  int log = (int)(bits_at(src, size, 0) & 15) + 5, bit = 4, num = 0;
  if (log > MAX_WEIGHT_STATES_LOG) return 0;
  int left = 1 << log, counts[TABLE_BITS + 1];
  while (left > 0 && num <= TABLE_BITS) {
    const int bits = highest_bit(left + 1), half = 1 << bits, num_short = 2 * half - 2 - left;
    const u32 next = bits_at(src, size, bit);
    int number = (int)(next & (half - 1));
    bit += bits;
    if (number >= num_short) {
      number = (int)(next & (2 * half - 1));
      if (number >= half) number -= num_short;
      bit++;
    }
    const int count = number - 1;
    left -= count < 0 ? 1 : count;
    counts[num++] = count;
    for (u32 zeros = count == 0 ? 3 : 0; zeros == 3;) {
      zeros = bits_at(src, size, bit) & 3;
      bit += 2;
      if (num + (int)zeros > TABLE_BITS + 1) return 0;
      for (u32 i = 0; i < zeros; i++) counts[num++] = 0;
    }
  }
  if (left != 0 || bit > 8 * size) return 0;
  const int num_states = 1 << log, step = (num_states >> 1) + (num_states >> 3) + 3;
  int last = num_states - 1, place = 0;
  u32 seen[TABLE_BITS + 1];
  for (int symbol = 0; symbol < num; symbol++) {
    seen[symbol] = counts[symbol] < 0 ? 1 : (u32)counts[symbol];
    if (counts[symbol] < 0) codes.states[last--] = (u32)symbol;
  }
  for (int symbol = 0; symbol < num; symbol++)
    for (int i = 0; i < counts[symbol]; i++) {
      codes.states[place] = (u32)symbol;
      do place = (place + step) & (num_states - 1);
      while (place > last);
    }
  for (int i = 0; i < num_states; i++) {
    const u32 symbol = codes.states[i], number = seen[symbol]++;
    const u32 bits = (u32)(log - highest_bit(number));
    codes.states[i] = symbol | bits << 8 | ((number << bits) - (u32)num_states) << 16;
  }
  *begin = (bit + 7) / 8;
  return log;
}

// Weights that two turns of states give, one of them at a time: how many, or 0.
__device__ inline int read_compressed_weights(Codes& codes, const u8* src, int size) {
  int begin;
  const int log = read_states(codes, src, size, &begin);
  if (log == 0 || begin >= size || src[size - 1] == 0) return 0;
  const int first = 8 * begin;
  int at = 8 * (size - 1) + highest_bit(src[size - 1]) - 2 * log;
  if (at < first) return 0;
  u32 turn = bits_ending(src, size, at + log, log), other = bits_ending(src, size, at, log);
  for (int num = 0; num < MAX_WEIGHTS - 1;) {
    const u32 state = codes.states[turn];
    codes.weights[num++] = (u8)state;
    turn = other;
    const int bits = (int)(state >> 8 & 255);
    at -= bits;
    if (at >= first) {
      other = (state >> 16) + bits_ending(src, size, at, bits);
      continue;
    }
    codes.weights[num++] = (u8)codes.states[turn];
    return num;
  }
  return 0;
}

// The weights of a tree's description, but for the last: how many, or 0.
__device__ inline int read_weights(Codes& codes, const u8* src, int size) {
  if (size < 1) return 0;
  const int head = src[0], num = head - 127;
  codes.tree_bytes = 1 + (num > 0 ? (num + 1) / 2 : head);
  if (codes.tree_bytes > size) return 0;
  if (num <= 0) return read_compressed_weights(codes, src + 1, head);
  for (int i = 0; i < num; i++) codes.weights[i] = i % 2 ? src[1 + i / 2] & 15 : src[1 + i / 2] >> 4;
  return num;
}

// Read a tree, and sort its symbols: true if it is sound.
__device__ inline bool read_tree(Codes& codes, const u8* src, int size) {
  const int num = read_weights(codes, src, size);
  int of_weight[TABLE_BITS + 1] = {0}, place[TABLE_BITS + 1];
  u32 total = 0;
  for (int i = 0; i < num; i++) {
    if (codes.weights[i] > TABLE_BITS) return false;
    of_weight[codes.weights[i]]++;
    total += (1u << codes.weights[i]) >> 1;
  }
  if (total == 0) return false;
  const int longest = highest_bit(total) + 1;
  const u32 rest = (1u << longest) - total;
  if (longest > TABLE_BITS || (rest & (rest - 1)) != 0) return false;
  codes.weights[num] = (u8)(highest_bit(rest) + 1);
  of_weight[codes.weights[num]]++;
  if (of_weight[1] < 2 || of_weight[1] % 2) return false;
  place[1] = 0;
  for (int weight = 2; weight <= TABLE_BITS; weight++) place[weight] = place[weight - 1] + of_weight[weight - 1];
  for (int symbol = 0; symbol <= num; symbol++) {
    const int weight = codes.weights[symbol];
    codes.code_bits[symbol] = (u8)(longest + 1 - weight);
    if (weight > 0) codes.symbols[place[weight]++] = (u8)symbol;
  }
  codes.num_symbols = place[TABLE_BITS];
  return true;
}

// ---- the table: by all lanes ----

// Behind a code of n bits stands what the table of k - n bits has; a full word loses its last symbol.
__device__ inline u64 put_before(const Codes& codes, u64 word, u32 symbol) {
  if ((word >> 48 & 255) == MAX_SYMBOLS) {
    word -= ((u64)codes.code_bits[word >> 40 & 255] << 56) + ((u64)1 << 48);
  }
  const u64 symbols = word & (((u64)1 << 40) - 1), numbers = word & ((u64)0xFFFF << 48);
  return (symbols << 8) + numbers + ((u64)codes.code_bits[symbol] << 56 | (u64)1 << 48 | symbol);
}

__device__ inline void fill_table(Codes& codes, u32 lane) {
  for (u32 k = 0; k <= TABLE_BITS; k++) {
    for (u32 value = lane; value < 1u << k; value += LANES) {
      u64 found = 0;      // of codes that are longer
      u32 end = 1u << k;  // short codes have the highest values
      for (int i = codes.num_symbols - 1; i >= 0; i--) {
        const u32 symbol = codes.symbols[i], bits = codes.code_bits[symbol];
        if (bits > k) break;
        const u32 span = 1u << (k - bits);
        end -= span;
        if (value < end) continue;
        found = put_before(codes, codes.table[span + (value - end)], symbol);
        break;
      }
      codes.table[(1u << k) + value] = found;
    }
    __syncwarp();
  }
}

// ---- streams: by one lane each ----

// The bits of a stream that were not taken, the next ones highest. Words are loaded aligned, and one ahead, so that no
// look-up waits for memory.
struct Stream {
  const u32* words;
  u64 buffer;
  u32 next;
  int word;  // of `next`; below 0: zeros
  int have;  // bits in the buffer
  int left;  // bits that were not taken; below 0: more were than there are
};

__device__ inline void open_stream(Stream& stream, const u8* src, int size) {
  const u32 before = (u32)((u64)src & 3);
  stream.words = (const u32*)(src - before);
  stream.left = 8 * (size - 1) + highest_bit(src[size - 1]);
  const int at = 8 * (int)before + stream.left;
  stream.word = at >> 5;
  stream.have = at & 31;
  const u32 own = stream.have ? stream.words[stream.word] & ((1u << stream.have) - 1) : 0;
  stream.buffer = stream.have ? (u64)own << (64 - stream.have) : 0;
  stream.word--;
  stream.next = stream.word >= 0 ? stream.words[stream.word] : 0;
}

__device__ inline void refill(Stream& stream) {
  if (stream.have > 32) return;
  stream.buffer |= (u64)stream.next << (32 - stream.have);
  stream.have += 32;
  stream.word--;
  stream.next = stream.word >= 0 ? stream.words[stream.word] : 0;
}

__device__ inline void take(Stream& stream, u32 bits) {
  stream.buffer <<= bits;
  stream.have -= (int)bits;
  stream.left -= (int)bits;
}

// True if the `size` bytes hold exactly `count` symbols, which go to `out`.
__device__ inline bool decode_stream(const Codes& codes, const u8* src, int size, u8* out, int count) {
  if (size < 1 || src[size - 1] == 0) return false;
  Stream stream;
  open_stream(stream, src, size);
  const u64* table = codes.table + (1 << TABLE_BITS);
  int done = 0;
  if (((u64)out & 7) == 0) {
    u64 pack = 0;  // symbols that make no whole word yet
    u32 packed = 0;
    while (count - done >= 16) {
      refill(stream);
      const u64 found = table[stream.buffer >> (64 - TABLE_BITS)], symbols = found & (((u64)1 << 48) - 1);
      const u32 num = (u32)(found >> 48) & 255;
      if (num == 0) return false;
      take(stream, (u32)(found >> 56));
      pack |= symbols << (8 * packed);
      packed += num;
      if (packed >= 8) {
        *(u64*)(out + done) = pack;
        done += 8;
        packed -= 8;
        pack = symbols >> (8 * (num - packed));
      }
    }
    for (u32 i = 0; i < packed; i++) out[done++] = (u8)(pack >> (8 * i));
  }
  while (done < count && stream.left > 0) {
    refill(stream);
    const u8 symbol = (u8)table[stream.buffer >> (64 - TABLE_BITS)];
    take(stream, codes.code_bits[symbol]);
    out[done++] = symbol;
  }
  return done == count && stream.left == 0;
}

// ---- blocks: by all lanes, which decide alike ----

__device__ inline void copy_or_repeat(u8* out, const u8* src, int count, bool repeats, u32 lane) {
  for (int i = (int)lane; i < count; i += (int)LANES) out[i] = src[repeats ? 0 : i];
}

// Where a frame is read and written, and what is left of both.
struct Cursor {
  const u8 *src, *src_end;
  u8 *out, *out_end;
  bool has_codes;  // of a block before
};

// Raw or repeated literals: bytes taken of the block's `size`, or 0.
__device__ inline int read_plain_literals(Cursor& cursor, int size, u32 lane) {
  const u8* src = cursor.src;
  const int form = src[0] >> 2 & 3, head = form == 1 ? 2 : form == 3 ? 3 : 1;
  if (head >= size) return 0;
  int count = src[0] >> 3;
  if (head == 2) count = (src[0] | src[1] << 8) >> 4;
  if (head == 3) count = (src[0] | src[1] << 8 | src[2] << 16) >> 4;
  const bool repeats = (src[0] & 3) == 1;
  const int stored = repeats ? 1 : count;
  if (stored > size - head || count > cursor.out_end - cursor.out) return 0;
  copy_or_repeat(cursor.out, src + head, count, repeats, lane);
  cursor.out += count;
  return head + stored;
}

// Literals in Huffman codes, of a tree of their own or of the last one: bytes taken of the block's `size`, or 0.
__device__ inline int read_coded_literals(Codes& codes, Cursor& cursor, int size, u32 lane) {
  const u8* src = cursor.src;
  const int form = src[0] >> 2 & 3, head = form < 2 ? 3 : form + 2, bits = form < 2 ? 10 : 4 * form + 6;
  const int num_streams = form == 0 ? 1 : 4;
  if (head >= size) return 0;
  u64 word = 0;
  for (int i = 0; i < head; i++) word |= (u64)src[i] << (8 * i);
  const int mask = (1 << bits) - 1, count = (int)(word >> 4) & mask, stored = (int)(word >> (4 + bits)) & mask;
  if (stored > size - head || count > cursor.out_end - cursor.out || (num_streams > 1 && count < 6)) return 0;
  const u8* from = src + head;
  int left = stored;
  if ((src[0] & 3) == 2) {
    __syncwarp();  // no lane needs the codes before any more
    if (lane == 0) codes.num_symbols = read_tree(codes, from, left) ? codes.num_symbols : 0;
    __syncwarp();
    cursor.has_codes = codes.num_symbols > 0;
    if (!cursor.has_codes) return 0;
    from += codes.tree_bytes;
    left -= codes.tree_bytes;
    fill_table(codes, lane);
  }
  const int share = (count + num_streams - 1) / num_streams, jump = 2 * (num_streams - 1);
  if (!cursor.has_codes || left < jump || count < share * (num_streams - 1)) return 0;
  bool is_sound = true;
  if (lane < (u32)num_streams) {
    int begin = jump, own = 0;
    for (int i = 0; i <= (int)lane; i++) {
      begin += own;
      own = i == num_streams - 1 ? left - begin : from[2 * i] | from[2 * i + 1] << 8;
    }
    const int first = (int)lane * share, num = (int)lane == num_streams - 1 ? count - first : share;
    is_sound = own > 0 && begin + own <= left && decode_stream(codes, from + begin, own, cursor.out + first, num);
  }
  if (!__all_sync(ALL_LANES, is_sound)) return 0;
  cursor.out += count;
  return head + stored;
}

// One block, whose header gives the kind and the bytes: true if it is sound, and has no sequences.
__device__ inline bool decode_block(Codes& codes, Cursor& cursor, int kind, int size, u32 lane) {
  const int stored = kind == 1 ? 1 : size;
  if (kind == 3 || stored > cursor.src_end - cursor.src) return false;
  if (kind < 2) {
    if (size > cursor.out_end - cursor.out) return false;
    copy_or_repeat(cursor.out, cursor.src, size, kind == 1, lane);
    cursor.out += size;
  } else {
    if (size < 2) return false;
    const bool is_plain = (cursor.src[0] & 3) < 2;
    const int taken = is_plain ? read_plain_literals(cursor, size, lane) : read_coded_literals(codes, cursor, size, lane);
    if (taken == 0 || taken + 1 != size || cursor.src[taken] != 0) return false;
  }
  cursor.src += stored;
  return true;
}

__device__ inline bool decode_frame(Codes& codes, const CodedFrame& frame, u8* image, u32 lane) {
  const u8* src = image + frame.coded;
  u8* out = image + frame.out;
  if (frame.coded_bytes < 9 || src[0] != 0x28 || src[1] != 0xB5 || src[2] != 0x2F || src[3] != 0xFD) return false;
  if ((src[4] & 0x3F) != 0x20) return false;
  const int field = src[4] >> 6;  // of the content's size: 1, 2 or 4 bytes; in 8 none of ours is given
  u32 declared = src[5];
  if (field == 1) declared = (src[5] | src[6] << 8) + 256u;
  if (field == 2) declared = src[5] | src[6] << 8 | src[7] << 16 | (u32)src[8] << 24;
  if (field == 3 || declared != frame.out_bytes) return false;
  Cursor cursor = {src + 5 + (1 << field), src + frame.coded_bytes, out, out + frame.out_bytes, false};
  for (int number = 0; number < MAX_FRAME_BLOCKS; number++) {
    if (cursor.src_end - cursor.src < 3) return false;
    const int head = cursor.src[0] | cursor.src[1] << 8 | cursor.src[2] << 16;
    cursor.src += 3;
    if (!decode_block(codes, cursor, head >> 1 & 3, head >> 3, lane)) return false;
    if (head & 1) return cursor.src == cursor.src_end && cursor.out == cursor.out_end;
  }
  return false;
}

// This lane's share of a frame's bytes: true if none has a bit that must be 0.
__device__ inline bool has_allowed_bits(const CodedFrame& frame, const u8* out, u32 lane) {
  const u32 before = frame.masks & 255, behind = frame.masks >> 8 & 255;
  u32 found = 0;
  if (before)
    for (u32 i = lane; i < frame.check_from; i += LANES) found |= out[i] & before;
  if (behind)
    for (u32 i = frame.check_from + lane; i < frame.out_bytes; i += LANES) found |= out[i] & behind;
  return found == 0;
}

extern "C" __global__ void __launch_bounds__(LANES) huf_frames(u8* image, u32 table, u32 num_frames, u32* wrong) {
  __shared__ Codes codes;
  const u32 lane = threadIdx.x;
  for (u32 number = blockIdx.x; number < num_frames; number += gridDim.x) {
    const CodedFrame frame = ((const CodedFrame*)(image + table))[number];
    bool is_sound = frame.coded_bytes == 0 || decode_frame(codes, frame, image, lane);
    __syncwarp();  // each lane checks bytes that others have written
    is_sound = __all_sync(ALL_LANES, is_sound && has_allowed_bits(frame, image + frame.out, lane));
    if (lane == 0 && !is_sound) atomicOr(wrong, FRAME_DAMAGED);
  }
}
