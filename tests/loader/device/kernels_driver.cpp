// Damaged frames and parts of any size through the kernels that see bytes before their digest is known, in allocations
// of exactly the bytes that they may touch: for the sanitizers (`scripts/sanitize-kernels`). Frames are the packer's;
// what a kernel takes must be what the native decoder makes of it.
//
//     kernels_driver [CASES]
#include "../../support/kernels_on_cpu.hpp"
//
#include "../../../src/teneral/loader/device/kernels/blake3.cu"
#include "../../../src/teneral/loader/device/kernels/huf_frames.cu"
//
#include <cstring>
#include <string>

extern "C" {
#include "../../../native/core.h"
}

static u64 seed = 88172645463325252ull;

static u32 any() {
  seed ^= seed << 13;
  seed ^= seed >> 7;
  seed ^= seed << 17;
  return (u32)(seed >> 16);
}

static void fail(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  std::exit(1);
}

// Symbols around one that is the most frequent, as exponents are; of a few kinds of spread.
static std::vector<u8> content_of(u32 size) {
  std::vector<u8> content(size);
  const u32 spread = any() % 5;
  for (u8& each : content) {
    u32 away = 0;
    while (away < 200 && any() % 8 < 1 + spread) away++;
    each = (u8)(120 - away);
  }
  return content;
}

static std::vector<u8> frame_of(const std::vector<u8>& content) {
  std::vector<u8> frame((size_t)tn_encoded_bound((int64_t)content.size(), TN_MAX_FRAME_BYTES));
  tn_encode_frames_args args = {};
  args.size = sizeof args;
  args.src = content.data();
  args.out = frame.data();
  args.src_bytes = (int64_t)content.size();
  args.out_bytes = (int64_t)frame.size();
  args.frame_bytes = TN_MAX_FRAME_BYTES;
  if (tn_encode_frames(&args) != TN_OK) fail("the packer's coder refused");
  frame.resize((size_t)args.end);
  return frame;
}

// Where the frame ends whose bytes, with its padding, these are.
static u32 end_of(const std::vector<u8>& frame, u32 content_bytes) {
  int64_t extents[2];
  tn_decode_frames_args args = {};
  args.size = sizeof args;
  args.src = frame.data();
  args.extents = extents;
  args.src_bytes = (int64_t)frame.size();
  args.out_bytes = content_bytes;
  args.frame_bytes = TN_MAX_FRAME_BYTES;
  if (tn_decode_frames(&args) != TN_OK) fail("the packer's frame is damaged");
  return (u32)extents[1];
}

static void damage(std::vector<u8>& frame) {
  for (u32 left = any() % 4; left > 0; left--) {
    const u32 most = any() % 3 && frame.size() > 120 ? 120 : (u32)frame.size(), at = any() % most;
    if (any() % 2)
      frame[at] ^= (u8)(1 << any() % 8);
    else
      frame[at] = (u8)any();
  }
  if (any() % 8 == 0) frame.resize(any() % frame.size());
}

// The native decoder's bytes of a frame, with the padding that it wants; empty where it refuses.
static std::vector<u8> by_host(std::vector<u8> frame, u32 content_bytes) {
  const u32 missing = (u32)-frame.size() & 7;
  if (missing) {
    const u8 head[8] = {0x50, 0x2A, 0x4D, 0x18, (u8)missing};
    frame.insert(frame.end(), head, head + 8);
    frame.resize(frame.size() + missing);
  }
  std::vector<u8> out(content_bytes);
  tn_decode_frames_args args = {};
  args.size = sizeof args;
  args.src = frame.data();
  args.out = out.data();
  args.src_bytes = (int64_t)frame.size();
  args.out_bytes = content_bytes;
  args.frame_bytes = TN_MAX_FRAME_BYTES;
  if (tn_decode_frames(&args) != TN_OK || args.end != args.src_bytes) out.clear();
  return out;
}

static bool decode_damaged(void) {
  static const u32 sizes[] = {1, 6, 200, 255, 256, 700, 3000, 20000, 65535, 65536};
  const u32 content_bytes = sizes[any() % 10];
  std::vector<u8> frame = frame_of(content_of(content_bytes));
  frame.resize(end_of(frame, content_bytes));
  const std::vector<u8> sound = frame;
  damage(frame);
  // The table; the frame, at any multiple of 8, rounded out to 4; its room, up to the allocation's last byte.
  const u32 begin = 32 + 8 * (any() % 3), end = begin + (u32)frame.size(), out = (end + 15) & ~15u;
  u8* image = (u8*)std::aligned_alloc(16, (out + content_bytes + 15) & ~15u);
  image = (u8*)std::realloc(image, out + content_bytes);
  std::memset(image, 0xA5, out + content_bytes);
  std::memcpy(image + begin, frame.data(), frame.size());
  CodedFrame* table = (CodedFrame*)image;
  *table = CodedFrame{begin, (u32)frame.size(), out, content_bytes, any() % (content_bytes + 1), 0};
  if (frame.empty()) table->coded_bytes = 1;  // none means another thing
  u32 wrong = 0;
  every_lane(1, LANES, any() % 2, [&] { huf_frames(image, 0, 1, &wrong); });
  const std::vector<u8> expected = by_host(frame, content_bytes);
  if (wrong == 0 && (expected.empty() || std::memcmp(image + out, expected.data(), content_bytes))) {
    fail("a kernel took what the host refuses, or decoded it otherwise");
  }
  if (wrong && frame == sound) fail("a kernel refused a frame of the packer's");
  std::free(image);
  return wrong == 0;
}

static void hash_any_size(void) {
  const u32 part_bytes = 1 + any() % (3 << 17), num_blocks = (part_bytes + (128 << 10) - 1) / (128 << 10);
  u8* image = (u8*)std::aligned_alloc(16, (part_bytes + 15) & ~15u);
  std::memset(image, (int)any(), part_bytes);
  u32* nodes = (u32*)std::malloc(32 * num_blocks);
  const u32 digest[8] = {};
  u32 wrong = 0;
  every_lane(num_blocks, HASH_THREADS, any() % 2, [&] { blake3_chunks(image, part_bytes, nodes); });
  every_lane(1, ROOT_THREADS, any() % 2, [&] { blake3_root(nodes, part_bytes, digest, &wrong); });
  if (wrong != DIGEST_DIFFERS) fail("a digest of zeros was found");
  std::free(nodes);
  std::free(image);
}

int main(int num_arguments, char** arguments) {
  const int cases = num_arguments > 1 ? std::atoi(arguments[1]) : 1000;
  int num_sound = 0;
  for (int number = 0; number < cases; number++) {
    num_sound += decode_damaged();
    if (number % 20 == 0) hash_any_size();
  }
  std::printf("%d frames, %d of them sound: nothing was read or written elsewhere\n", cases, num_sound);
  return 0;
}
