/* The team of threads, for the functions of the core: one region a call, stages within it.
 *
 *     static void body(void *arg, tn_region *region, int id) {
 *         for (int64_t chunk; (chunk = tn_next_chunk(region)) < num_chunks;) ...   // stage 1
 *         tn_barrier(region);
 *         for (int64_t chunk; (chunk = tn_next_chunk(region)) < more_chunks;) ...  // stage 2
 *     }
 *     tn_run(body, &arg);
 *
 * Every thread of a region must come to the same barriers in the same order.
 */
#ifndef TN_TEAM_H
#define TN_TEAM_H

#include <stdatomic.h>
#include <stdint.h>

/* A number that threads wait on. `sleepers` spares the waking call where all are awake. */
typedef struct tn_signal {
    _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
} tn_signal;

enum { TN_SHARES = 16 }; /* that a stage is cut into, at most: with more threads, some have one together */

/* A call's work on some threads. A body reads `num`, and leaves the rest to the functions below. */
typedef struct tn_region {
    int num;                                 /* threads */
    _Atomic int arrived;                     /* at the barrier */
    tn_signal phase;                         /* counts barriers */
    _Atomic int64_t waited_ns;               /* at barriers, by all threads together */
    _Alignas(64) _Atomic int64_t next_chunk; /* of the stage */
    struct {
        _Alignas(64) _Atomic uint64_t taken; /* chunks of the share: from its front, and from its back in the upper half */
    } shares[TN_SHARES];
} tn_region;

/* Called once on each thread: `id` counts from 0, the calling thread, to `region->num` - 1. */
typedef void (*tn_body)(void *arg, tn_region *region, int id);

/* Run `body` on all threads of the team; returns when all have returned. One region at a time: another caller waits. */
void tn_run(tn_body body, void *arg);

/* Run `body` on the calling thread only: for what is too small to wake others. */
void tn_run_alone(tn_body body, void *arg);

/* Inside a region: wait for all its threads. What they wrote before is visible after. Chunks begin at 0 again. */
void tn_barrier(tn_region *region);

/* Inside a region: the next chunk of the stage. Each number is handed out once. */
static inline int64_t tn_next_chunk(tn_region *region) {
    return atomic_fetch_add_explicit(&region->next_chunk, 1, memory_order_relaxed);
}

/* The same for stages that read memory: each thread takes the chunks of a share of its own, one after another, and then
 * from the ends of the others' shares. -1 when all `num_chunks` are taken. A stage calls either this or the above. */
int64_t tn_next_chunk_in_order(tn_region *region, int64_t num_chunks);

#endif
