// Preloaded into a server, it shifts the server's clock. Only the wall clock: event loops and allocators run on
// the monotonic one. The shift is read from a file that the test writes. Raw system calls and no dlsym, because
// allocators read the time while the loader still runs.

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

// The file: so many microseconds ahead; and since the moment `since_us`, so many millionths too fast.
struct skew {
    volatile int64_t ahead_us;
    volatile int64_t since_us;
    volatile int64_t fast_ppm;
};

static const struct skew *skew;

__attribute__((constructor)) static void open_skew(void) {
    const char *path = getenv("LOCK_TESTS_SKEW");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(struct skew), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) skew = mapped;
    close(file);
}

static int64_t shift_ns(int64_t now_ns) {
    if (!skew) return 0;
    int64_t drift = (now_ns / 1000 - skew->since_us) / 1000 * skew->fast_ppm;
    return skew->ahead_us * 1000 + drift;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int outcome = (int)syscall(SYS_clock_gettime, clock, at);
    if (outcome == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t now = (int64_t)at->tv_sec * 1000000000 + at->tv_nsec;
        now += shift_ns(now);
        at->tv_sec = now / 1000000000;
        at->tv_nsec = now % 1000000000;
    }
    return outcome;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    (void)zone;
    struct timespec now;
    int outcome = clock_gettime(CLOCK_REALTIME, &now);
    if (outcome == 0) {
        at->tv_sec = now.tv_sec;
        at->tv_usec = now.tv_nsec / 1000;
    }
    return outcome;
}

time_t time(time_t *at) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0) return (time_t)-1;
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
