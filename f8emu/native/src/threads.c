/* Threads of a call, which compute in the default floating-point environment. */
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

static void *enter(void *given) {
    const share *share = given;
    uint64_t state = f8_enter();
    share->work(share->job);
    f8_leave(state);
    return 0;
}

void f8_on_threads(int64_t threads, void (*work)(void *job), void *job) {
    share share = {work, job};
    pthread_t others[256];
    int64_t started = 0;
    /* Where a thread does not start, its share is done by the others. */
    while (started < threads - 1 && started < 256 && !pthread_create(&others[started], 0, enter, &share)) started++;
    enter(&share);
    for (int64_t i = 0; i < started; i++) pthread_join(others[i], 0);
}
