// A CUDA driver without a device: the functions of libcuda that LibcudaDriver calls, on the host's memory.
//
// It is as asynchronous as CUDA: work is queued on streams, and runs only when something waits for it. So what is read
// before it was waited for is not there yet, in every run. Memory ends at a page that cannot be touched. A module is a
// shared library of kernels for the CPU (on_cpu.h), whose launches run block by block.
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

enum { INVALID_VALUE = 1, NO_MEMORY = 2, NO_DEVICE = 101, BAD_IMAGE = 200, NO_CONTEXT = 201, BAD_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, PINNED = 712, NOT_PINNED = 713 };
typedef void (*Kernel)(void**);
typedef void (*Run)(Kernel, void**, const unsigned* grid, unsigned block, unsigned shared_bytes);
struct Function { Kernel kernel; unsigned bytes; Run run; unsigned max_shared; };
struct Call { Function* function; unsigned grid[3], block, shared; std::vector<char> parameters; };
struct Graph;
struct Stream { std::deque<std::function<void()>> queue; uint64_t queued = 0, done = 0; Graph* captures = nullptr; };
struct Event { Stream* stream = nullptr; uint64_t count = 0; };
struct Graph { std::vector<Call> calls; };

static std::recursive_mutex lock;
static thread_local bool has_context;
static std::map<uintptr_t, std::pair<void*, size_t>> blocks;  // of the device: by address, the mapping
static std::map<uintptr_t, size_t> pinned;
static size_t total_bytes = 1u << 30, used_bytes;
static int lost_code;
static std::string failing;
static int failing_code;
static uint64_t num_launches;

#define ENTER(name)                                                     \
  std::lock_guard<std::recursive_mutex> guard(lock);                    \
  if (failing == name) { failing.clear(); return failing_code; }        \
  if (lost_code) return lost_code;
#define IN_CONTEXT(name) ENTER(name) if (!has_context) return NO_CONTEXT;
#define API extern "C" __attribute__((visibility("default")))

static void step(Stream* s) {
  auto work = std::move(s->queue.front());
  s->queue.pop_front();
  work();
  s->done++;
}
static void run_until(Stream* s, uint64_t count) { while (s->done < count && !s->queue.empty()) step(s); }
static int queue(Stream* s, std::function<void()> work) {
  if (!s) return BAD_HANDLE;  // the default stream would wait for all others
  s->queue.push_back(std::move(work)); s->queued++;
  return 0;
}

// For tests.
API void fail_next(const char* name, int code) { failing = name; failing_code = code; }
API void lose(int code) { lost_code = code; }
API void set_memory(size_t bytes) { total_bytes = bytes; }
API size_t memory_in_use() { return used_bytes; }
API uint64_t launches_run() { return num_launches; }

API int cuInit(unsigned) { ENTER("cuInit") return 0; }
API int cuDeviceGet(int* out, int index) { ENTER("cuDeviceGet") if (index) return NO_DEVICE; *out = 0; return 0; }
API int cuDeviceGetAttribute(int* out, int which, int) {
  ENTER("cuDeviceGetAttribute")
  *out = which == 75 ? 9 : which == 76 ? 0 : which == 16 ? 4 : 0;
  return 0;
}
API int cuDevicePrimaryCtxRetain(void** out, int) { ENTER("cuDevicePrimaryCtxRetain") *out = (void*)1; return 0; }
API int cuCtxSetCurrent(void* context) { ENTER("cuCtxSetCurrent") if (!context) return BAD_HANDLE; has_context = true; return 0; }
API int cuMemGetInfo_v2(size_t* free, size_t* total) { IN_CONTEXT("cuMemGetInfo_v2") *free = total_bytes - used_bytes; *total = total_bytes; return 0; }

API int cuMemAlloc_v2(void** out, size_t size) {
  IN_CONTEXT("cuMemAlloc_v2")
  if (!size) return INVALID_VALUE;
  if (size > total_bytes - used_bytes) return NO_MEMORY;
  size_t page = sysconf(_SC_PAGESIZE), padded = (size + 255) / 256 * 256, whole = (padded + page - 1) / page * page + page;
  char* mapping = (char*)mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return NO_MEMORY;
  mprotect(mapping + whole - page, page, PROT_NONE);
  char* begin = mapping + whole - page - padded;
  memset(begin, 0xA5, padded);  // undefined content is no zeros
  blocks[(uintptr_t)begin] = {mapping, whole};
  used_bytes += whole;
  *out = begin;
  return 0;
}
API int cuMemFree_v2(void* address) {
  IN_CONTEXT("cuMemFree_v2")
  auto found = blocks.find((uintptr_t)address);
  if (found == blocks.end()) return INVALID_VALUE;
  munmap(found->second.first, found->second.second);
  used_bytes -= found->second.second;
  blocks.erase(found);
  return 0;
}
API int cuMemHostAlloc(void** out, size_t size, unsigned) { IN_CONTEXT("cuMemHostAlloc") *out = aligned_alloc(4096, (size + 4095) / 4096 * 4096); return *out ? 0 : NO_MEMORY; }
API int cuMemFreeHost(void* address) { IN_CONTEXT("cuMemFreeHost") free(address); return 0; }
API int cuMemHostRegister_v2(void* address, size_t size, unsigned) {
  IN_CONTEXT("cuMemHostRegister_v2")
  if (!size) return INVALID_VALUE;
  return pinned.emplace((uintptr_t)address, size).second ? 0 : PINNED;
}
API int cuMemHostUnregister(void* address) { IN_CONTEXT("cuMemHostUnregister") return pinned.erase((uintptr_t)address) ? 0 : NOT_PINNED; }

static int copy(void* to, const void* from, size_t size, void* s) { return queue((Stream*)s, [=] { memcpy(to, from, size); }); }
API int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t size, void* s) { IN_CONTEXT("cuMemcpyHtoDAsync_v2") return copy(to, from, size, s); }
API int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t size, void* s) { IN_CONTEXT("cuMemcpyDtoHAsync_v2") return copy(to, from, size, s); }
API int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t size, void* s) { IN_CONTEXT("cuMemcpyDtoDAsync_v2") return copy(to, from, size, s); }
API int cuMemsetD8Async(void* to, unsigned char byte, size_t size, void* s) { IN_CONTEXT("cuMemsetD8Async") return queue((Stream*)s, [=] { memset(to, byte, size); }); }

API int cuStreamCreate(void** out, unsigned) { IN_CONTEXT("cuStreamCreate") *out = new Stream; return 0; }
API int cuStreamSynchronize(void* s) { IN_CONTEXT("cuStreamSynchronize") if (!s) return BAD_HANDLE; run_until((Stream*)s, ((Stream*)s)->queued); return 0; }
API int cuEventCreate(void** out, unsigned) { IN_CONTEXT("cuEventCreate") *out = new Event; return 0; }
API int cuEventDestroy_v2(void* e) { IN_CONTEXT("cuEventDestroy_v2") delete (Event*)e; return 0; }
API int cuEventRecord(void* e, void* s) { IN_CONTEXT("cuEventRecord") if (!s) return BAD_HANDLE; *(Event*)e = {(Stream*)s, ((Stream*)s)->queued}; return 0; }
API int cuEventQuery(void* e) {
  IN_CONTEXT("cuEventQuery")
  Event* event = (Event*)e;
  if (!event->stream || event->stream->done >= event->count) return 0;
  step(event->stream);  // as time would
  return NOT_READY;
}
API int cuEventSynchronize(void* e) { IN_CONTEXT("cuEventSynchronize") Event* event = (Event*)e; if (event->stream) run_until(event->stream, event->count); return 0; }
API int cuStreamWaitEvent(void* s, void* e, unsigned) {
  IN_CONTEXT("cuStreamWaitEvent")
  Event at = *(Event*)e;
  return queue((Stream*)s, [=] { if (at.stream) run_until(at.stream, at.count); });
}

API int cuModuleLoadData(void** out, const void* image) {
  IN_CONTEXT("cuModuleLoadData")
  const Elf64_Ehdr* head = (const Elf64_Ehdr*)image;
  if (memcmp(head->e_ident, ELFMAG, SELFMAG) || head->e_type != ET_DYN) return BAD_IMAGE;
  size_t size = head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
  char path[] = "/tmp/kernels-XXXXXX";
  int file = mkstemp(path);
  bool written = file >= 0 && write(file, image, size) == (ssize_t)size;
  close(file);
  *out = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  unlink(path);
  return *out ? 0 : BAD_IMAGE;
}
API int cuModuleGetFunction(void** out, void* module, const char* name) {
  IN_CONTEXT("cuModuleGetFunction")
  void *kernel = dlsym(module, name), *bytes = dlsym(module, (std::string(name) + "_bytes").c_str()), *run = dlsym(module, "run_on_cpu");
  if (!kernel || !bytes || !run) return NOT_FOUND;
  *out = new Function{(Kernel)kernel, *(unsigned*)bytes, (Run)run, 48 << 10};
  return 0;
}
API int cuFuncSetAttribute(void* function, int which, int value) { IN_CONTEXT("cuFuncSetAttribute") if (which != 8 || value > 227 << 10) return INVALID_VALUE; ((Function*)function)->max_shared = value; return 0; }

static int call_of(Call* out, void* function, const unsigned* grid, const unsigned* block, unsigned shared, void** parameters) {
  Function* f = (Function*)function;
  if (!grid[0] || !grid[1] || !grid[2] || grid[1] > 65535 || grid[2] > 65535 || !block[0] || block[0] * block[1] * block[2] > 1024) return INVALID_VALUE;
  if (block[1] != 1 || block[2] != 1 || shared > f->max_shared) return INVALID_VALUE;
  const char* given = (const char*)parameters[0];
  *out = {f, {grid[0], grid[1], grid[2]}, block[0], shared, std::vector<char>(given, given + f->bytes)};
  return 0;
}
static void run(Call& call) {
  void* place = call.parameters.data();
  call.function->run(call.function->kernel, &place, call.grid, call.block, call.shared);
  num_launches++;
}
API int cuLaunchKernel(void* f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* s, void** parameters, void**) {
  IN_CONTEXT("cuLaunchKernel")
  unsigned grid[3] = {x, y, z}, block[3] = {bx, by, bz};
  Call call;
  if (int code = call_of(&call, f, grid, block, shared, parameters)) return code;
  if (s && ((Stream*)s)->captures) { ((Stream*)s)->captures->calls.push_back(call); return 0; }
  return queue((Stream*)s, [call]() mutable { run(call); });
}
API int begin_capture(void* s) { IN_CONTEXT("begin_capture") ((Stream*)s)->captures = new Graph; return 0; }
API int end_capture(void** out, void* s) { IN_CONTEXT("end_capture") *out = ((Stream*)s)->captures; ((Stream*)s)->captures = nullptr; return 0; }
struct Node { void* function; unsigned grid[3], block[3], shared; void** parameters; void **extra, *kernel, *context; };
API int cuGraphCreate(void** out, unsigned) { IN_CONTEXT("cuGraphCreate") *out = new Graph; return 0; }
API int cuGraphAddKernelNode_v2(void** out, void* graph, void** after, size_t num_after, const Node* node) {
  IN_CONTEXT("cuGraphAddKernelNode_v2")
  Graph* g = (Graph*)graph;
  // Only chains: each behind the one before.
  if (num_after != (g->calls.empty() ? 0 : 1) || (num_after && (uintptr_t)*after != g->calls.size())) return INVALID_VALUE;
  Call call;
  if (int code = call_of(&call, node->function, node->grid, node->block, node->shared, node->parameters)) return code;
  g->calls.push_back(call);
  *out = (void*)g->calls.size();
  return 0;
}
API int cuGraphInstantiateWithFlags(void** out, void* graph, unsigned long long) { IN_CONTEXT("cuGraphInstantiateWithFlags") *out = new Graph(*(Graph*)graph); return 0; }
API int cuGraphLaunch(void* graph, void* s) { IN_CONTEXT("cuGraphLaunch") Graph g = *(Graph*)graph; return queue((Stream*)s, [g]() mutable { for (Call& call : g.calls) run(call); }); }
API int cuGraphDestroy(void* graph) { IN_CONTEXT("cuGraphDestroy") delete (Graph*)graph; return 0; }
API int cuGraphExecDestroy(void* graph) { IN_CONTEXT("cuGraphExecDestroy") delete (Graph*)graph; return 0; }
