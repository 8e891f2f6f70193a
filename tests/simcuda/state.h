// The one state of the simulation: its lock, its settings, its findings.
//
// Lock order: the context lock (faults.h), then State::mutex. Nothing waits for anything else while holding State::mutex.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"

namespace tdsim {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

constexpr int kMaxDevices = 8;

// Settings, by name in tdsim_set. X(name, default)
//   devices           how many devices there are (1 to 8)
//   version           driver version; cuGetProcAddress_v2 hides what is newer
//   delay_us          every copy, host function and fill first waits for a random time up to this
//   fixed_delay       1: waits for exactly delay_us
//   gbps_x10          link rate in tenths of GB/s; 0: as fast as memcpy
//   pinned_limit      bytes of pinned memory that the machine allows; -1: no limit
//   device_limit      bytes of device memory per device; -1: no limit
//   connections       hardware queues per context that streams share; 0: one for each stream
//   queue_depth       operations that a hardware queue holds before the enqueuing call blocks; 0: no limit
//   memops            0: stream memory operations return CUDA_ERROR_NOT_SUPPORTED
//   early_write       1: value writes take effect when they are enqueued, not in stream order (a slot freed too early)
//   free_syncs        1: cuMemFree first waits for the context's streams, as the documentation allows
//   lock_while_sync   1: that wait holds the context's lock, so calls that enqueue block meanwhile
//   capturing         1: every stream reports an active graph capture
//   poison            0: fresh memory is zeroed and nothing is poisoned
//   hang_ms           how long nothing may move before a wait counts as a hang, is reported, and is given up
//   seed              of the random delays
#define TDSIM_CONFIG(X)                                                                                          \
  X(devices, 2) X(version, 13000) X(delay_us, 0) X(fixed_delay, 0) X(gbps_x10, 0) X(pinned_limit, -1)             \
  X(device_limit, -1) X(connections, 0) X(queue_depth, 0) X(memops, 1) X(early_write, 0) X(free_syncs, 1)         \
  X(lock_while_sync, 0) X(capturing, 0) X(poison, 1) X(hang_ms, 8000) X(seed, 1)

struct Config {
#define TDSIM_FIELD(name, value) long name = value;
  TDSIM_CONFIG(TDSIM_FIELD)
#undef TDSIM_FIELD
};

struct Stream;
struct Event;
struct Channel;

// A device's primary context. It exists from the start and lives as long as the process; `retained` says if it is in use.
struct Context {
  int device = 0;
  long retained = 0;
  long retained_ever = 0;
  long device_bytes = 0;
  CUresult broken = CUDA_SUCCESS;  // a sticky error: every call in this context returns it
  std::shared_ptr<Stream> legacy;  // the default stream, handle 0
  std::vector<std::weak_ptr<Stream>> streams;  // destroyed ones too, as long as work is pending in them
  std::vector<std::shared_ptr<Channel>> shared_channels;
  std::timed_mutex api_lock;
};

struct State {
  std::mutex mutex;                  // guards everything below
  std::condition_variable progress;  // something finished, or the settings changed
  Clock::time_point last_progress = Clock::now();

  Config config;
  long config_epoch = 0;
  bool initialized = false;
  bool exiting = false;  // the process is ending: start nothing more
  Context contexts[kMaxDevices];
  long pinned_bytes = 0;
  uintptr_t next_handle = 0x10000;
  std::map<uintptr_t, std::shared_ptr<Stream>> streams;
  std::map<uintptr_t, std::shared_ptr<Event>> events;
  std::vector<std::weak_ptr<Channel>> channels;

  std::vector<std::string> violations;
  std::map<std::string, long> stats;

  void violation(const std::string &what);
};

// Never destroyed. Worker threads are detached and may outlive main(); a destructor at exit would take the mutex and the
// queues away under them.
State &state();

// The context current on the calling thread, or nullptr.
Context *&current_context();

std::chrono::milliseconds hang_time();  // State::mutex held

// Waits until `done()`. False when nothing in the whole simulation has moved for `patience` times hang_ms.
template <class Predicate>
bool wait_progress(Lock &lock, int patience, std::chrono::microseconds poll, Predicate done) {
  auto &s = state();
  const auto began = Clock::now();
  while (!done()) {
    s.progress.wait_for(lock, poll);
    const auto limit = hang_time() * patience;
    const auto now = Clock::now();
    // The second bound is for two parties that keep each other busy for ever.
    if (now - std::max(began, s.last_progress) > limit || now - began > 10 * limit) return done();
  }
  return true;
}

constexpr std::chrono::microseconds kNotified{20000};  // `progress` is notified; this only bounds the hang check
constexpr std::chrono::microseconds kPolled{50};       // host memory changes without a notification

}  // namespace tdsim
