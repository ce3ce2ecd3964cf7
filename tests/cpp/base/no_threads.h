#ifndef GEMMAKV_TESTS_CPP_BASE_NO_THREADS_H_
#define GEMMAKV_TESTS_CPP_BASE_NO_THREADS_H_

#include <sys/resource.h>
#include <unistd.h>

namespace gkv {

// Lets the system refuse this process any further thread. For children of
// fork(): root, whom no such limit holds, becomes another user for good.
class NoThreads {
 public:
  NoThreads() {
    if (geteuid() == 0 && setuid(65534) != 0) _exit(99);
    getrlimit(RLIMIT_NPROC, &before_);
    rlimit none = before_;
    none.rlim_cur = 0;
    setrlimit(RLIMIT_NPROC, &none);
  }
  ~NoThreads() { setrlimit(RLIMIT_NPROC, &before_); }
  NoThreads(const NoThreads&) = delete;

 private:
  rlimit before_;
};

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CPP_BASE_NO_THREADS_H_
