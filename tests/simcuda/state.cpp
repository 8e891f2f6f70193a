#include "state.h"

#include <pthread.h>

#include <cstdio>
#include <cstdlib>

#include "faults.h"

namespace tdsim {

State &state() {
  static State *const only = [] {
    auto *s = new State;
    for (int device = 0; device < kMaxDevices; device++) s->contexts[device].device = device;
    return s;
  }();
  return *only;
}

Context *&current_context() {
  thread_local Context *current = nullptr;
  return current;
}

std::chrono::milliseconds hang_time() { return std::chrono::milliseconds(state().config.hang_ms); }

void State::violation(const std::string &what) {
  violations.push_back(what);
  if (getenv("TDSIM_VERBOSE")) fprintf(stderr, "tdsim: %s\n", what.c_str());
}

// Runs when the process ends, after the exit handlers of libraries that were loaded later. Operations still queued are
// never started: what they would touch may be gone.
__attribute__((destructor)) static void stop_starting_work() {
  if (in_forked_child()) return;
  std::lock_guard<std::mutex> guard(state().mutex);
  state().exiting = true;
}

}  // namespace tdsim
