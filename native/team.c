/* The team of threads: one a process, made on first use, asleep between regions.
 *
 * Nothing is made before it is needed, so that a process may fork first; a child that was forked later finds an empty
 * team and makes its own. Waiting spins for a while, then yields, then sleeps on a futex: the others' work is short,
 * but they may have lost their cores. When waiting takes more than half of a region, others use the cores: the team
 * leaves a thread out for a while, which is faster then; for 4 ms at first, since a moment's disturbance must
 * not slow down a whole prompt. After a pause all threads are tried again: what took the cores before it has ended, most
 * likely. Results never depend on the number of threads.
 */
#define _GNU_SOURCE
#include "team.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core.h"
#include "tiles.h"

enum {
    MAX_THREADS = 1 << 8,
    NUM_BITS = 10,                       /* of `begun`: threads of the region; the others count regions */
    SPIN_NS = 20 * 1000,                 /* then others may have the core */
    AWAKE_NS = 200 * 1000,               /* then the thread sleeps until it is woken */
    MEASURED_NS = 1000 * 1000,           /* shorter regions say nothing about the cores */
    FIRST_WITHOUT_NS = 4 * 1000 * 1000,  /* for which a thread is left out, before all are tried again ... */
    MOST_WITHOUT_NS = 512 * 1000 * 1000, /* ... and when that has failed again and again: twice as long each time */
    PAUSE_NS = 50 * 1000 * 1000,         /* between two regions: what was measured before it is out of date */
    WAITING_SHARE = 2,                   /* a share of one in this number of a region's time is too much */
    STACK_BYTES = 3 << 20,               /* attention takes 1.3 MiB; thread sanitizers 0.8 of every stack */
};

static struct {
    pthread_mutex_t in_use; /* by the caller whose region is under way */
    _Atomic int wanted;     /* threads that were set, the calling one included */
    _Atomic int left_out;   /* of these, until `all_at_ns` */
    int64_t all_at_ns;
    int64_t without_ns;     /* how long that was; 0 after regions that went well */
    int64_t ended_ns;       /* the last region */
    int made;               /* threads that exist besides the calling one */
    bool handles_forks;
    uint32_t begun_before;  /* `begun` when the newest threads were made */

    tn_signal begun;        /* regions, and the number of threads of the one under way */
    tn_signal running;      /* threads of it that have not returned, besides the calling one */
    tn_body body;
    void *arg;
    tn_region *region;
} team = {.in_use = PTHREAD_MUTEX_INITIALIZER, .wanted = 1};

static _Thread_local int thread_id; /* within the team; 0 of threads that call */

/* ---- waiting ---- */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sequentially consistent on both sides: either the sleeper sees the new value, or `announce` sees the sleeper. */
static void sleep_while(tn_signal *signal, uint32_t old) {
    atomic_fetch_add(&signal->sleepers, 1);
    while (atomic_load(&signal->value) == old)
        syscall(SYS_futex, &signal->value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    atomic_fetch_sub(&signal->sleepers, 1);
}

/* Wake those that sleep until `signal` changes, which it just did. */
static void announce(tn_signal *signal) {
    if (atomic_load(&signal->sleepers)) syscall(SYS_futex, &signal->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Wait until `signal` is no longer `old`. Returns for how long. */
static int64_t wait_while(tn_signal *signal, uint32_t old) {
    if (atomic_load_explicit(&signal->value, memory_order_acquire) != old) return 0;
    const int64_t begin_ns = now_ns();
    int64_t waited_ns = 0;
    while (waited_ns < AWAKE_NS) {
        for (int turn = 0; turn < 16; turn++) {
            if (atomic_load_explicit(&signal->value, memory_order_acquire) != old) return now_ns() - begin_ns;
            pause_briefly();
        }
        waited_ns = now_ns() - begin_ns;
        if (waited_ns > SPIN_NS) sched_yield();
    }
    sleep_while(signal, old);
    return now_ns() - begin_ns;
}

/* ---- inside a region ---- */

static int num_shares(const tn_region *region) { return region->num < TN_SHARES ? region->num : TN_SHARES; }

/* A chunk of a share of `size` that none has, from its front or its back; -1 when there is none. */
static int64_t take_chunk(_Atomic uint64_t *taken, int64_t size, bool from_back) {
    uint64_t old = atomic_load_explicit(taken, memory_order_relaxed), front, back;
    do {
        front = old & UINT32_MAX;
        back = old >> 32;
        if ((int64_t)(front + back) >= size) return -1;
    } while (!atomic_compare_exchange_weak_explicit(taken, &old, old + (from_back ? (uint64_t)1 << 32 : 1),
                                                    memory_order_relaxed, memory_order_relaxed));
    return from_back ? size - 1 - (int64_t)back : (int64_t)front;
}

int64_t tn_next_chunk_in_order(tn_region *region, int64_t num_chunks) {
    const int num = num_shares(region);
    for (int n = 0; n < num; n++) {
        const int share = (thread_id + n) % num;
        const int64_t begin = num_chunks * share / num, end = num_chunks * (share + 1) / num;
        const int64_t chunk = take_chunk(&region->shares[share].taken, end - begin, n > 0);
        if (chunk >= 0) return begin + chunk;
    }
    return -1;
}

static void begin_stage(tn_region *region) {
    atomic_store_explicit(&region->next_chunk, 0, memory_order_relaxed);
    for (int n = 0; n < num_shares(region); n++)
        atomic_store_explicit(&region->shares[n].taken, 0, memory_order_relaxed);
}

void tn_barrier(tn_region *region) {
    if (region->num == 1) {
        begin_stage(region);
        return;
    }
    const uint32_t phase = atomic_load_explicit(&region->phase.value, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&region->arrived, 1, memory_order_acq_rel) == region->num - 1) {
        atomic_store_explicit(&region->arrived, 0, memory_order_relaxed);
        begin_stage(region);
        atomic_store(&region->phase.value, phase + 1);
        announce(&region->phase);
        return;
    }
    const int64_t waited_ns = wait_while(&region->phase, phase);
    if (waited_ns) atomic_fetch_add_explicit(&region->waited_ns, waited_ns, memory_order_relaxed);
}

/* ---- threads ---- */

static void *thread_main(void *id_arg) {
    const uint32_t id = (uint32_t)(intptr_t)id_arg;
    thread_id = (int)id;
    uint32_t seen = team.begun_before;
    for (;;) {
        wait_while(&team.begun, seen);
        /* A thread that is left out may miss regions; one that takes part cannot, for its region waits for it. */
        seen = atomic_load(&team.begun.value);
        if (id >= (seen & ((1u << NUM_BITS) - 1))) continue;
        team.body(team.arg, team.region, (int)id);
        tn_tiles_end();
        if (atomic_fetch_sub(&team.running.value, 1) == 1) announce(&team.running);
    }
    return NULL;
}

/* In a child that was just forked: the threads are gone, and another thread's region has no end. */
static void forget_threads(void) {
    const int wanted = atomic_load(&team.wanted);
    memset(&team, 0, sizeof team);
    pthread_mutex_init(&team.in_use, NULL);
    atomic_store(&team.wanted, wanted);
    team.handles_forks = true;
}

/* Make threads until there are `num`, the calling one included, or as many as the system has. Returns how many. */
static int make_threads(int num) {
    if (team.made + 1 >= num) return num;
    if (!team.handles_forks) team.handles_forks = pthread_atfork(NULL, NULL, forget_threads) == 0;
    if (!team.handles_forks) return 1;
    team.begun_before = atomic_load(&team.begun.value);
    sigset_t all, before; /* signals are for the process's own threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (int id = team.made + 1; id < num; id++) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, thread_main, (void *)(intptr_t)id)) break;
        team.made = id;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return team.made + 1;
}

/* Leave one more thread out where the threads of a region, which ends now, waited for each other too long. */
static void judge(const tn_region *region, int64_t took_ns) {
    if (region->num == 1 || took_ns < MEASURED_NS) return;
    if (atomic_load(&region->waited_ns) > took_ns * (region->num - 1) / WAITING_SHARE) {
        const int64_t longer_ns = 2 * team.without_ns;
        atomic_fetch_add(&team.left_out, 1);
        team.without_ns = longer_ns < FIRST_WITHOUT_NS ? FIRST_WITHOUT_NS
                          : longer_ns > MOST_WITHOUT_NS ? MOST_WITHOUT_NS
                                                        : longer_ns;
        team.all_at_ns = team.ended_ns + team.without_ns;
    } else if (!atomic_load(&team.left_out)) {
        team.without_ns /= 2;
    }
}

/* Have all threads again once their time has come, and forget what was measured before a pause. */
static void recall(int64_t begin_ns) {
    const bool is_paused = begin_ns - team.ended_ns >= PAUSE_NS;
    if (is_paused) team.without_ns = 0;
    if (is_paused || begin_ns >= team.all_at_ns) atomic_store(&team.left_out, 0);
}

/* ---- regions ---- */

void tn_run_alone(tn_body body, void *arg) {
    tn_region region = {.num = 1};
    body(arg, &region, 0);
    tn_tiles_end();
}

void tn_run(tn_body body, void *arg) {
    if (atomic_load(&team.wanted) == 1) {
        tn_run_alone(body, arg);
        return;
    }
    pthread_mutex_lock(&team.in_use);
    const int64_t begin_ns = now_ns();
    recall(begin_ns);
    tn_region region = {.num = make_threads(tn_num_threads())};
    if (region.num > 1) {
        team.body = body;
        team.arg = arg;
        team.region = &region;
        atomic_store(&team.running.value, (uint32_t)region.num - 1);
        const uint32_t regions = (atomic_load(&team.begun.value) >> NUM_BITS) + 1;
        atomic_store(&team.begun.value, regions << NUM_BITS | (uint32_t)region.num);
        announce(&team.begun);
    }
    body(arg, &region, 0);
    tn_tiles_end();
    int64_t waited_ns = 0;
    for (uint32_t running; region.num > 1 && (running = atomic_load(&team.running.value));)
        waited_ns += wait_while(&team.running, running);
    atomic_fetch_add(&region.waited_ns, waited_ns);
    team.ended_ns = now_ns();
    judge(&region, team.ended_ns - begin_ns);
    pthread_mutex_unlock(&team.in_use);
}

void tn_set_threads(int32_t num_threads) {
    atomic_store(&team.wanted, num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads);
}

int32_t tn_num_threads(void) {
    const int num = atomic_load(&team.wanted) - atomic_load(&team.left_out);
    return num < 1 ? 1 : num;
}
