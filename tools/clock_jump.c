/* Shifts the wall clock of one process while it runs.
 *
 *     cc -shared -fPIC -O2 -o clock_jump.so clock_jump.c
 *     GEMMAKV_CLOCK_FILE=FILE LD_PRELOAD=clock_jump.so PROGRAM
 *
 * FILE holds one signed 64-bit number in the machine's byte order: the seconds
 * that are added to CLOCK_REALTIME wherever the C library tells it. The file is
 * mapped, so writing to it moves the clock of all processes that have it, at
 * once. Clocks that nobody sets (CLOCK_MONOTONIC, CLOCK_BOOTTIME) stay as they
 * are, and so do the times that the kernel gives to files. A wait until a
 * moment of CLOCK_REALTIME would get a moment of this clock and wait by the
 * kernel's; tests/python/support/clock.py checks that the project has no such
 * wait.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t* shift;
static int (*real)(clockid_t, struct timespec*);

/* Constructors of other libraries may ask for the time before ours has run. */
static void Begin(void) {
  const char* name;
  int file;
  if (real) return;
  name = getenv("GEMMAKV_CLOCK_FILE");
  if (name) {
    file = open(name, O_RDONLY | O_CLOEXEC);
    void* data = file < 0 ? MAP_FAILED
                          : mmap(NULL, sizeof(*shift), PROT_READ, MAP_SHARED,
                                 file, 0);
    if (data == MAP_FAILED) {
      perror("clock_jump: GEMMAKV_CLOCK_FILE");
      _exit(127);
    }
    close(file);
    shift = data;
  }
  real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT,
                                                     "clock_gettime");
}

__attribute__((constructor)) static void AtStart(void) { Begin(); }

int clock_gettime(clockid_t id, struct timespec* now) {
  int result;
  Begin();
  result = real(id, now);
  if (result == 0 && shift &&
      (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE ||
       id == CLOCK_TAI)) {
    now->tv_sec += *shift;
  }
  return result;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  struct timespec found;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &found) != 0) return -1;
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* to) {
  struct timespec found;
  if (clock_gettime(CLOCK_REALTIME, &found) != 0) return -1;
  if (to) *to = found.tv_sec;
  return found.tv_sec;
}

int timespec_get(struct timespec* now, int base) {
  return base == TIME_UTC && clock_gettime(CLOCK_REALTIME, now) == 0 ? base : 0;
}
