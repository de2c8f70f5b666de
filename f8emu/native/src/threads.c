/* Threads of a call, which compute in the default floating-point environment.

   Where torch has loaded an OpenMP with the interface of gcc's, its team does the work: after each of torch's own
   parallel operations its threads spin for a millisecond, and take the cores from any others. Elsewhere, and in a child
   of fork, which has lost the team's threads, threads are started for the call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "width.h"

/* The caller may have set another rounding, or that subnormals are 0. */
uint64_t f8_enter(void) {
#if defined(__x86_64__)
    unsigned state = _mm_getcsr();
    _mm_setcsr(0x1F80);
    return state;
#elif defined(__aarch64__)
    uint64_t state;
    __asm__ volatile("mrs %0, fpcr" : "=r"(state));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return state;
#else
    return 0;
#endif
}

void f8_leave(uint64_t state) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)state);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(state));
#else
    (void)state;
#endif
}

typedef struct {
    void (*work)(void *job);
    void *job;
} share;

static void enter(void *given) {
    const share *share = given;
    uint64_t state = f8_enter();
    share->work(share->job);
    f8_leave(state);
}

static void *start(void *given) {
    enter(given);
    return 0;
}

typedef void (*team)(void (*work)(void *), void *share, unsigned threads, unsigned flags);
static int is_child;

static void note_child(void) { is_child = 1; }

static void watch_forks(void) { pthread_atfork(0, 0, note_child); }

static team find_team(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    return is_child ? 0 : (team)dlsym(RTLD_DEFAULT, "GOMP_parallel");
}

void f8_on_threads(int64_t threads, int64_t most, void (*work)(void *job), void *job) {
    share share = {work, job};
    team parallel = threads > 1 ? find_team() : 0;
    if (parallel) { /* of the size that torch's operations have: another one starts and ends threads */
        parallel(enter, &share, (unsigned)most, 0);
        return;
    }
    pthread_t others[256];
    int64_t started = 0;
    /* Where a thread does not start, its share is done by the others. */
    while (started < threads - 1 && started < 256 && !pthread_create(&others[started], 0, start, &share)) started++;
    enter(&share);
    for (int64_t i = 0; i < started; i++) pthread_join(others[i], 0);
}
