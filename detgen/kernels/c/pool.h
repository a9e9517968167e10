/* Threads that work on a pass together, and wait for each other without keeping a processor busy for long.
 *
 * A pass is a list of steps, a step a number of tasks that any thread may take; which one takes it changes no result. A
 * step is over when its tasks are done, not when all threads have arrived: one that the system has put aside holds the
 * others up only for the task that it has begun. */

#ifndef DETGEN_POOL
#define DETGEN_POOL

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MOST_THREADS 256
#define SPINS 1500 /* looks at a number before a thread sleeps: some ten microseconds */

static inline void breathe(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleeps while a number is `seen`, or not at all. */
static inline void sleep_while(atomic_int *number, int seen) {
#ifdef __linux__
    syscall(SYS_futex, number, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
#else
    if (atomic_load(number) == seen) sched_yield();
#endif
}

static inline void wake(atomic_int *number, int threads) {
#ifdef __linux__
    syscall(SYS_futex, number, FUTEX_WAKE_PRIVATE, threads, 0, 0, 0);
#endif
}

/* A count up to a total. */
typedef struct {
    atomic_int count, sleepers;
} Tally;

static inline void tally(Tally *t, int total) {
    if (atomic_fetch_add(&t->count, 1) + 1 == total && atomic_load(&t->sleepers)) wake(&t->count, MOST_THREADS);
}

static inline void await(Tally *t, int total) {
    int seen;
    for (int spins = 0; (seen = atomic_load(&t->count)) < total; spins++)
        if (spins < SPINS) breathe();
        else {
            atomic_fetch_add(&t->sleepers, 1);
            if ((seen = atomic_load(&t->count)) < total) sleep_while(&t->count, seen);
            atomic_fetch_sub(&t->sleepers, 1);
        }
}

typedef void (*Work)(void *of, int thread);

/* Runs work in this thread, as number 0, and in up to `threads` - 1 others, 1 to `threads` - 1. Whether others join is
 * not said: the work has to be such that any number of threads can do it. */
void together(Work work, void *of, int threads);

#endif
