#include "control.h"

#include <algorithm>
#include <cstring>

#include "copies.h"
#include "faults.h"

using namespace tdsim;

namespace {

long *setting(const char *name) {
  auto &config = state().config;
#define TDSIM_FIELD(field, value) \
  if (!strcmp(name, #field)) return &config.field;
  TDSIM_CONFIG(TDSIM_FIELD)
#undef TDSIM_FIELD
  return nullptr;
}

void settings_changed() {
  auto &s = state();
  s.config.devices = std::clamp(s.config.devices, 0L, long(kMaxDevices));
  s.config_epoch++;
  s.progress.notify_all();
}

// The device's number after "<prefix>:", or -1.
int device_in(const std::string &name, const std::string &prefix) {
  if (name.rfind(prefix + ":", 0) != 0 || name.size() != prefix.size() + 2) return -1;
  const int device = name.back() - '0';
  return device >= 0 && device < kMaxDevices ? device : -1;
}

}  // namespace

int tdsim_set(const char *name, long value) {
  std::lock_guard<std::mutex> guard(state().mutex);
  long *field = setting(name);
  if (!field) return -1;
  *field = value;
  settings_changed();
  if (!strcmp(name, "seed")) reseed_all();
  return 0;
}

void tdsim_fail(const char *function, long nth, int code, int sticky) {
  std::lock_guard<std::mutex> guard(state().mutex);
  add_failure(function, nth, code, sticky != 0);
}

void tdsim_skip(const char *function, long nth) {
  std::lock_guard<std::mutex> guard(state().mutex);
  add_skip(function, nth);
}

long tdsim_stat(const char *name) {
  auto &s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  const std::string wanted(name);
  if (wanted == "pinned_bytes") return s.pinned_bytes;
  if (wanted == "streams") return long(s.streams.size());
  if (wanted == "events") return long(s.events.size());
  if (wanted == "pending") return pending();
  if (const int device = device_in(wanted, "contexts"); device >= 0) return s.contexts[device].retained_ever;
  if (const int device = device_in(wanted, "device_bytes"); device >= 0) return s.contexts[device].device_bytes;
  long contexts = 0, device_bytes = 0;
  for (const Context &context : s.contexts) {
    contexts += context.retained_ever;
    device_bytes += context.device_bytes;
  }
  if (wanted == "contexts") return contexts;
  if (wanted == "device_bytes") return device_bytes;
  const auto it = s.stats.find(wanted);
  return it == s.stats.end() ? 0 : it->second;
}

const char *tdsim_violations() {
  thread_local std::string text;
  std::lock_guard<std::mutex> guard(state().mutex);
  text.clear();
  for (const auto &violation : state().violations) text += violation + "\n";
  return text.c_str();
}

void tdsim_reset() {
  auto &s = state();
  Lock lock(s.mutex);
  const bool idle = wait_progress(lock, 2, kNotified, [] { return pending() == 0; });
  clear_faults();
  s.violations.clear();
  s.stats.clear();
  s.config = Config();
  for (Context &context : s.contexts) context.broken = CUDA_SUCCESS;
  settings_changed();
  reseed_all();
  if (!idle) s.violation("reset: operations are still queued, and nothing moves");
}

long tdsim_pinned() { return tdsim_stat("pinned_bytes"); }

CUresult tdsim_poison(CUdeviceptr address, size_t bytes, CUstream handle) {
  if (in_forked_child()) return CUDA_ERROR_NOT_INITIALIZED;
  auto &s = state();
  Lock lock(s.mutex);
  if (!s.config.poison || !bytes) return CUDA_SUCCESS;
  if (s.exiting) return CUDA_ERROR_DEINITIALIZED;
  if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
  const auto stream = find_stream(handle, __func__);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (!find_range({uintptr_t(address), bytes}, Kind::kDevice)) return CUDA_ERROR_INVALID_VALUE;
  return fill(lock, stream, {uintptr_t(address), bytes}, kDevicePoison);
}
