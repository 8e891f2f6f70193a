// A pread and a pwritev that misbehave on request: short reads and writes, interruptions, delays, errors, files that
// shrink under the reader.
//
// The native core reads and writes through function pointers; tests point them at simio_pread and simio_pwritev.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define SIMIO_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Fault {
  bool of_writes;
  long nth;  // of the calls on a matching file from now on; 0: every one
  int error;  // 0: truncate the file instead
  std::string path_part;
  long seen = 0;
};

struct State {
  std::mutex mutex;
  long short_reads = 0;  // 1: each call moves between 1 byte and what was asked for
  long eintr_every = 0;  // every nth call fails with EINTR; 0: none
  long delay_us = 0;     // each call first waits for a random time up to this
  long calls = 0;
  std::vector<Fault> faults;
  std::mt19937 random{1};
};

State &state() {
  static State *const only = new State;  // reader threads may outlive main(): never destroyed
  return *only;
}

std::string fd_link(int fd) { return "/proc/self/fd/" + std::to_string(fd); }

std::string path_of(int fd) {
  char path[PATH_MAX];
  const ssize_t length = readlink(fd_link(fd).c_str(), path, sizeof path);
  return length > 0 ? std::string(path, size_t(length)) : std::string();
}

// Through the link: the reader's own descriptor is read-only.
void truncate_to_half(int fd) {
  struct stat info;
  const int writable = open(fd_link(fd).c_str(), O_WRONLY | O_CLOEXEC);
  if (writable < 0 || fstat(writable, &info) || ftruncate(writable, info.st_size / 2)) perror("simio: truncate");
  if (writable >= 0) close(writable);
}

// What becomes of one call: an errno, or how many bytes it may move.
struct Fate {
  int error = 0;
  bool truncate = false;
  std::chrono::microseconds delay{0};
  size_t bytes;
};

Fate decide(int fd, bool writes, size_t bytes) {
  auto &s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  Fate fate;
  fate.bytes = bytes;
  s.calls++;
  if (s.delay_us > 0) fate.delay = std::chrono::microseconds(s.random() % unsigned(s.delay_us + 1));
  if (s.eintr_every > 0 && s.calls % s.eintr_every == 0) fate.error = EINTR;
  const std::string path = s.faults.empty() ? std::string() : path_of(fd);
  for (Fault &fault : s.faults) {
    if (fault.of_writes != writes || path.find(fault.path_part) == std::string::npos) continue;
    if (++fault.seen != fault.nth && fault.nth) continue;
    if (fault.error) {
      fate.error = fault.error;
    } else {
      fate.truncate = true;
    }
  }
  if (s.short_reads && bytes > 1) fate.bytes = 1 + s.random() % bytes;
  return fate;
}

}  // namespace

SIMIO_EXPORT ssize_t simio_pread(int fd, void *buffer, size_t bytes, off_t offset) {
  const Fate fate = decide(fd, false, bytes);
  if (fate.error) {
    errno = fate.error;
    return -1;
  }
  std::this_thread::sleep_for(fate.delay);
  if (fate.truncate) truncate_to_half(fd);
  return pread(fd, buffer, fate.bytes, offset);
}

SIMIO_EXPORT ssize_t simio_pwritev(int fd, const iovec *parts, int count, off_t offset) {
  size_t bytes = 0;
  for (int i = 0; i < count; i++) bytes += parts[i].iov_len;
  const Fate fate = decide(fd, true, bytes);
  if (fate.error) {
    errno = fate.error;
    return -1;
  }
  std::this_thread::sleep_for(fate.delay);
  std::vector<iovec> some;
  size_t left = fate.bytes;
  for (int i = 0; i < count && left; i++) {
    some.push_back({parts[i].iov_base, std::min(left, parts[i].iov_len)});
    left -= some.back().iov_len;
  }
  return pwritev(fd, some.data(), int(some.size()), offset);
}

// Settings: short_reads, eintr_every, delay_us. Returns 0, or -1 for a name that does not exist.
SIMIO_EXPORT int simio_set(const char *name, long value) {
  auto &s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  const std::string wanted(name);
  if (wanted == "short_reads") {
    s.short_reads = value;
  } else if (wanted == "eintr_every") {
    s.eintr_every = value;
  } else if (wanted == "delay_us") {
    s.delay_us = value;
  } else {
    return -1;
  }
  return 0;
}

// The nth read from now on of a file whose path contains `path_part` fails with `error` (an errno; 0 = every one).
SIMIO_EXPORT void simio_fail(long nth, int error, const char *path_part) {
  std::lock_guard<std::mutex> guard(state().mutex);
  state().faults.push_back({false, nth, error, path_part});
}

// Likewise the nth write.
SIMIO_EXPORT void simio_fail_write(long nth, int error, const char *path_part) {
  std::lock_guard<std::mutex> guard(state().mutex);
  state().faults.push_back({true, nth, error, path_part});
}

// At the nth such read, the file loses its second half first.
SIMIO_EXPORT void simio_truncate_at(long nth, const char *path_part) {
  std::lock_guard<std::mutex> guard(state().mutex);
  state().faults.push_back({false, nth, 0, path_part});
}

// Reads and writes since the last reset.
SIMIO_EXPORT long simio_calls() {
  std::lock_guard<std::mutex> guard(state().mutex);
  return state().calls;
}

SIMIO_EXPORT void simio_reset() {
  auto &s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  s.short_reads = s.eintr_every = s.delay_us = s.calls = 0;
  s.faults.clear();
  s.random.seed(1);
}
