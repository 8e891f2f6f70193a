// What happens at the start of every driver call: counting, injected faults, and the checks that the real driver makes.
#pragma once

#include <optional>

#include "state.h"

namespace tdsim {

enum class Needs { kNothing, kInit, kContext };

// Begins the call `function`. A value means: return it now. CUDA_SUCCESS among them is a skipped call.
std::optional<CUresult> begin_call(const char *function, Needs needs);

// True in a child made by fork() after cuInit. The worker threads were not copied and the mutex may be held for ever, so
// every call must return before it takes a lock. The real driver is unusable there too (CUDA_ERROR_NOT_INITIALIZED).
bool in_forked_child();
void driver_initialized();  // from here on, a forked child is cut off

void add_failure(const std::string &function, long nth, CUresult code, bool sticky);  // State::mutex held
void add_skip(const std::string &function, long nth);
void clear_faults();

// Marks the calling thread as running a host function, which must not call the driver.
struct InHostFunction {
  InHostFunction();
  ~InHostFunction();
};

// The driver's lock on a context, taken by calls that enqueue or free. Only contended with lock_while_sync=1.
class ContextLock {
 public:
  ContextLock(Context &context, const char *function);
  // False if an implicit synchronize held the lock until the hang limit; the context is broken then.
  explicit operator bool() const { return held_; }

 private:
  std::unique_lock<std::timed_mutex> lock_;
  bool held_ = true;
};

#define TDSIM_BEGIN(needs) \
  if (auto early = tdsim::begin_call(__func__, tdsim::Needs::needs)) return *early

}  // namespace tdsim
