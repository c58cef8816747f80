// Low-rank adapters: out += factor * (x @ A.T) @ B, of each row's own adapter. A row's sums are its own, and so they do not
// depend on the adapters of others. Compiled with rows.cuh.

#define NO_ADAPTER 0xFFFFFFFF
#define LOW_BLOCKS 8
#define SITE_PARTS 3

// What an adapter adds to one projection of one layer: `models.adapter.AdapterSite`.
struct DeviceAdapterSite {
  const void* a;  // (num_low, num_in)
  u32 num_low, num_parts, a_kind, b_kind;
};

// Columns [first, first + num_out) gain factor * low @ b, of the next `rank` low numbers.
struct DeviceAdapterPart {
  const void* b;  // (rank, num_out)
  u32 first, num_out, rank;
  float factor;
};

struct Adapt {
  const DeviceAdapterSite* sites;  // (slots, num_sites)
  const DeviceAdapterPart* parts;  // (slots, num_sites, SITE_PARTS)
  const u32* slots;  // (rows,): of the row's adapter; NO_ADAPTER: it has none
  const u16* x;  // (rows, num_in)
  float* low;  // (rows, low_stride)
  u16* out;  // (rows, num_out)
  const u32* counts;
  u32 num_sites, site, num_in, num_out, low_stride;
};

// low = x @ A.T. A warp a number.
KERNEL(adapter_low, Adapt, 128) {
  const u32 row = blockIdx.x, lane = lane_of(threadIdx.x);
  if (row >= args.counts[NUM_ROWS] || args.slots[row] == NO_ADAPTER) return;
  const DeviceAdapterSite site = args.sites[(u64)args.slots[row] * args.num_sites + args.site];
  const u16* x = args.x + (u64)row * args.num_in;
  for (u32 k = 4 * blockIdx.y + threadIdx.x / 32; k < site.num_low; k += 4 * LOW_BLOCKS) {
    float sum = 0;
    for (u32 at = lane; at < args.num_in; at += 32) sum = fmaf(wide(x[at]), number_at(site.a, (u64)k * args.num_in + at, site.a_kind), sum);
    sum = warp_sum(sum);
    if (lane == 0) args.low[(u64)row * args.low_stride + k] = sum;
  }
}

// out += factor * low @ B, ranks ascending. A thread a column.
KERNEL(adapter_add, Adapt, 256) {
  const u32 row = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
  if (row >= args.counts[NUM_ROWS] || column >= args.num_out || args.slots[row] == NO_ADAPTER) return;
  const u64 number = (u64)args.slots[row] * args.num_sites + args.site;
  const DeviceAdapterSite site = args.sites[number];
  const float* low = args.low + (u64)row * args.low_stride;
  for (u32 p = 0; p < site.num_parts; p++) {
    const DeviceAdapterPart part = args.parts[number * SITE_PARTS + p];
    const u32 own = column - part.first;
    if (column >= part.first && own < part.num_out) {
      float sum = 0;
      for (u32 k = 0; k < part.rank; k++) sum = fmaf(low[k], number_at(part.b, (u64)k * part.num_out + own, site.b_kind), sum);
      u16* to = args.out + (u64)row * args.num_out + column;
      *to = narrow(fmaf(part.factor, sum, wide(*to)));
    }
    low += part.rank;
  }
}
