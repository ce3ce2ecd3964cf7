/* Kills one process (SIGKILL) at a moment of its work in a folder.
 *
 *     cc -shared -fPIC -O2 -o kill_at.so kill_at.c
 *     KILL_AT=MOMENT:PASS KILL_UNDER=FOLDER LD_PRELOAD=kill_at.so PROGRAM
 *
 * MOMENT is one of these moments of calls that change FOLDER (an absolute path
 * without links in it) or what is in it:
 *
 *     after-mkdir   before-create after-create   before-write after-write
 *     before-link   after-link    before-unlink  after-unlink
 *     before-touch  after-touch   after-lock     *
 *
 * Here create makes a file that was not there, with a name or without, link
 * gives one its name, touch sets its times, lock takes a lock that nobody
 * shares, and * is any moment. PASS counts moments of that name from 1.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static char under[PATH_MAX], moment[32];
static long pass;
static atomic_long passed;

__attribute__((constructor)) static void Begin(void) {
  const char* const folder = getenv("KILL_UNDER");
  const char* const at = getenv("KILL_AT");
  char* end;
  const char* colon = at ? strchr(at, ':') : NULL;
  if (!at && !folder) return;
  if (colon) pass = strtol(colon + 1, &end, 10);
  if (!folder || !*folder || strlen(folder) >= sizeof(under) || !colon ||
      (size_t)(colon - at) >= sizeof(moment) || pass < 1 || *end) {
    fprintf(stderr, "kill_at: expected KILL_AT=MOMENT:PASS and KILL_UNDER\n");
    _exit(127);
  }
  memcpy(under, folder, strlen(folder));
  memcpy(moment, at, (size_t)(colon - at));
}

static int IsUnder(const char* path) {
  const size_t length = strlen(under);
  return pass != 0 && strncmp(path, under, length) == 0 &&
         (path[length] == '\0' || path[length] == '/');
}

/* Whether an open file is the folder, or lies in it. */
static int IsOpenUnder(int file) {
  char link[64], path[PATH_MAX];
  const int error = errno;
  ssize_t length;
  if (pass == 0) return 0;
  snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
  length = readlink(link, path, sizeof(path) - 1);
  errno = error;
  if (length < 0) return 0;
  path[length] = '\0';
  return IsUnder(path);
}

static void Reach(const char* name) {
  if (strcmp(moment, "*") != 0 && strcmp(moment, name) != 0) return;
  if (atomic_fetch_add(&passed, 1) + 1 == pass) raise(SIGKILL);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int mkdir(const char* path, mode_t mode) {
  const int result = REAL(mkdir)(path, mode);
  if (result == 0 && IsUnder(path)) Reach("after-mkdir");
  return result;
}

int mkdirat(int folder, const char* path, mode_t mode) {
  const int result = REAL(mkdirat)(folder, path, mode);
  if (result == 0 && IsOpenUnder(folder)) Reach("after-mkdir");
  return result;
}

int openat(int folder, const char* path, int flags, ...) {
  const int unnamed = (flags & O_TMPFILE) == O_TMPFILE;
  const int makes = unnamed || (flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL);
  const int counts = makes && IsOpenUnder(folder);
  mode_t mode = 0;
  int result;
  if (unnamed || (flags & O_CREAT) != 0) {
    va_list more;
    va_start(more, flags);
    mode = va_arg(more, mode_t);
    va_end(more);
  }
  if (counts) Reach("before-create");
  result = REAL(openat)(folder, path, flags, mode);
  if (counts && result >= 0) Reach("after-create");
  return result;
}

ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  const int counts = IsOpenUnder(file);
  ssize_t result;
  if (counts) Reach("before-write");
  result = REAL(pwrite)(file, data, size, offset);
  if (counts && result >= 0) Reach("after-write");
  return result;
}

int linkat(int from, const char* path, int to, const char* name, int flags) {
  const int counts = IsOpenUnder(to);
  int result;
  if (counts) Reach("before-link");
  result = REAL(linkat)(from, path, to, name, flags);
  if (counts && result == 0) Reach("after-link");
  return result;
}

/* How programs call renameat2 if the C library is older than it. */
long syscall(long number, ...) {
  va_list more;
  long arguments[6], result;
  int counts, i;
  va_start(more, number);
  for (i = 0; i < 6; ++i) arguments[i] = va_arg(more, long);
  va_end(more);
  counts = number == SYS_renameat2 && IsOpenUnder((int)arguments[2]);
  if (counts) Reach("before-link");
  result = REAL(syscall)(number, arguments[0], arguments[1], arguments[2],
                         arguments[3], arguments[4], arguments[5]);
  if (counts && result == 0) Reach("after-link");
  return result;
}

int unlinkat(int folder, const char* path, int flags) {
  const int counts = IsOpenUnder(folder);
  int result;
  if (counts) Reach("before-unlink");
  result = REAL(unlinkat)(folder, path, flags);
  if (counts && result == 0) Reach("after-unlink");
  return result;
}

int futimens(int file, const struct timespec times[2]) {
  const int counts = IsOpenUnder(file);
  int result;
  if (counts) Reach("before-touch");
  result = REAL(futimens)(file, times);
  if (counts && result == 0) Reach("after-touch");
  return result;
}

int fcntl(int file, int command, ...) {
  va_list more;
  void* argument;
  int counts, result;
  va_start(more, command);
  argument = va_arg(more, void*);
  va_end(more);
  counts = command == F_OFD_SETLK &&
           ((const struct flock*)argument)->l_type == F_WRLCK &&
           IsOpenUnder(file);
  result = REAL(fcntl)(file, command, argument);
  if (counts && result == 0) Reach("after-lock");
  return result;
}
