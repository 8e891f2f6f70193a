#include "faults.h"

#include <pthread.h>

namespace tdsim {
namespace {

struct Fault {
  long nth;
  long seen = 0;
  std::optional<CUresult> failure;  // none: a skip
  bool sticky = false;

  bool hits() { return ++seen == nth || nth == 0; }
};

std::multimap<std::string, Fault> &faults() {  // leaked like State, and guarded by its mutex
  static auto *const only = new std::multimap<std::string, Fault>;
  return *only;
}

std::atomic<bool> used{false};
std::atomic<bool> forked{false};
thread_local bool in_host_function = false;

}  // namespace

bool in_forked_child() { return forked; }

void driver_initialized() {
  static const int once = pthread_atfork(nullptr, nullptr, [] { forked = used.load(); });
  (void)once;
  used = true;
}

std::optional<CUresult> begin_call(const char *function, Needs needs) {
  if (in_forked_child()) return CUDA_ERROR_NOT_INITIALIZED;
  auto &s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  if (s.exiting) return CUDA_ERROR_DEINITIALIZED;
  s.stats[std::string("calls:") + function]++;
  if (in_host_function) {
    s.violation(std::string(function) + " called in a host function");
    return CUDA_ERROR_NOT_PERMITTED;
  }
  Context *context = current_context();
  const Fault *hit = nullptr;
  for (auto [it, end] = faults().equal_range(function); it != end; ++it) {
    if (it->second.hits() && !hit) hit = &it->second;
  }
  if (hit && !hit->failure) {
    s.stats["skipped"]++;
    return CUDA_SUCCESS;
  }
  if (hit) {
    s.stats["failed"]++;
    if (hit->sticky && context) context->broken = *hit->failure;
    return *hit->failure;
  }
  if (needs == Needs::kNothing) return std::nullopt;
  if (!s.initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (needs == Needs::kContext) {
    if (!context || !context->retained) return CUDA_ERROR_INVALID_CONTEXT;
    if (context->broken) return context->broken;
  }
  return std::nullopt;
}

void add_failure(const std::string &function, long nth, CUresult code, bool sticky) {
  faults().insert({function, Fault{nth, 0, code, sticky}});
}

void add_skip(const std::string &function, long nth) { faults().insert({function, Fault{nth, 0, std::nullopt, false}}); }

void clear_faults() { faults().clear(); }

InHostFunction::InHostFunction() { in_host_function = true; }
InHostFunction::~InHostFunction() { in_host_function = false; }

ContextLock::ContextLock(Context &context, const char *function) : lock_(context.api_lock, std::defer_lock) {
  std::chrono::milliseconds limit;
  {
    std::lock_guard<std::mutex> guard(state().mutex);
    if (!state().config.lock_while_sync) return;
    limit = 2 * hang_time();
  }
  if (lock_.try_lock_for(limit)) return;
  held_ = false;
  std::lock_guard<std::mutex> guard(state().mutex);
  state().violation(std::string("hang: ") + function + " waited for a driver lock that an implicit synchronize holds");
  context.broken = CUDA_ERROR_LAUNCH_TIMEOUT;
}

}  // namespace tdsim
