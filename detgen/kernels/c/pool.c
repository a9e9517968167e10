/* The threads of pool.h: started when they are first needed, asleep while there is nothing to do. */

#include <pthread.h>

#include "pool.h"

static struct {
    pthread_mutex_t turn;
    int threads;            /* that were started */
    atomic_int generation;  /* of the work below */
    atomic_int sleepers;    /* threads that wait for the next generation */
    atomic_int seats;       /* threads that may still join */
    Tally left;             /* threads that joined and are through */
    Work work;
    void *of;
} pool = {.turn = PTHREAD_MUTEX_INITIALIZER};

static void *serve(void *unused) {
    int known = 0;
    (void)unused;
    for (;;) {
        int spins = 0, generation;
        while ((generation = atomic_load(&pool.generation)) == known)
            if (++spins < SPINS) breathe();
            else {
                atomic_fetch_add(&pool.sleepers, 1);
                sleep_while(&pool.generation, known);
                atomic_fetch_sub(&pool.sleepers, 1);
            }
        known = generation;
        int seat = atomic_load(&pool.seats);
        while (seat > 0 && !atomic_compare_exchange_weak(&pool.seats, &seat, seat - 1)) continue;
        if (seat <= 0) continue;
        pool.work(pool.of, seat);
        atomic_fetch_add(&pool.left.count, 1);
        if (atomic_load(&pool.left.sleepers)) wake(&pool.left.count, 1);
    }
    return 0;
}

/* A child process has none of the threads. */
static void forget_threads(void) {
    pthread_mutex_init(&pool.turn, 0);
    pool.threads = 0;
    atomic_store(&pool.sleepers, 0);
}

static int start_threads(int threads) {
    static int prepared;
    if (!prepared) prepared = !pthread_atfork(0, 0, forget_threads);
    for (; pool.threads < threads; pool.threads++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, serve, 0)) break;
        pthread_detach(thread);
    }
    return pool.threads < threads ? pool.threads : threads;
}

void together(Work work, void *of, int threads) {
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads <= 1 || pthread_mutex_trylock(&pool.turn)) { /* others are at work: this thread does it alone */
        work(of, 0);
        return;
    }
    int others = start_threads(threads - 1);
    pool.work = work, pool.of = of;
    atomic_store(&pool.left.count, 0);
    atomic_store(&pool.seats, others);
    atomic_fetch_add(&pool.generation, 1);
    if (atomic_load(&pool.sleepers)) wake(&pool.generation, others);
    work(of, 0);
    int joined = others - atomic_exchange(&pool.seats, 0);
    await(&pool.left, joined);
    pthread_mutex_unlock(&pool.turn);
}
