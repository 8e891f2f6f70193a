#include "copies.h"

#include <cstring>
#include <string>
#include <thread>

#include "faults.h"

namespace tdsim {
namespace {

uint64_t hash_bytes(const char *bytes, size_t count) {
  uint64_t hash = count;
  size_t i = 0;
  for (uint64_t word; i + sizeof word <= count; i += sizeof word) {
    memcpy(&word, bytes + i, sizeof word);
    hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
    hash ^= hash >> 29;
  }
  for (; i < count; i++) hash = hash * 131 + static_cast<unsigned char>(bytes[i]);
  return hash;
}

struct Transfer {
  char *to;
  const char *from;
  size_t bytes;
  std::chrono::microseconds pause{0};       // between the two halves: a transfer takes time
  std::chrono::nanoseconds duration{0};     // by the link's rate
  std::vector<char> staged;                 // a pageable source, as it was at the call
  std::optional<uint64_t> expected_source;  // hash of a pinned source when the copy became runnable

  void run() const {
    std::this_thread::sleep_for(duration);
    const size_t half = bytes / 2;
    memcpy(to, from, half);
    std::this_thread::sleep_for(pause);
    memcpy(to + half, from + half, bytes - half);
    if (expected_source && hash_bytes(from, bytes) != *expected_source) {
      std::lock_guard<std::mutex> guard(state().mutex);
      state().violation("source of a host-to-device copy changed before the copy was done (reused too early)");
    }
  }
};

const Allocation *device_range(uintptr_t address, size_t bytes, const char *function) {
  const Allocation *found = find_range({address, bytes}, Kind::kDevice);
  if (!found) {
    state().violation(std::string(function) + ": not a range of device memory");
  } else if (found->context != current_context()) {
    state().violation(std::string(function) + ": device memory of another context than the current one");
    found = nullptr;
  }
  return found;
}

}  // namespace

CUresult copy(Context &context, const char *function, Direction direction, uintptr_t to, uintptr_t from, size_t bytes,
              CUstream handle) {
  if (!bytes) return CUDA_SUCCESS;
  ContextLock context_lock(context, function);
  if (!context_lock) return CUDA_ERROR_LAUNCH_TIMEOUT;
  auto &s = state();
  Lock lock(s.mutex);
  const auto stream = find_stream(handle, function);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const bool from_host = direction == Direction::kHostToDevice, to_host = direction == Direction::kDeviceToHost;
  if (!from_host && !device_range(from, bytes, function)) return CUDA_ERROR_INVALID_VALUE;
  if (!to_host && !device_range(to, bytes, function)) return CUDA_ERROR_INVALID_VALUE;
  const bool pageable = (from_host && !is_pinned({from, bytes})) || (to_host && !is_pinned({to, bytes}));

  s.stats["copies"]++;
  if (from_host) s.stats["h2d_bytes"] += long(bytes);
  if (to_host) s.stats["d2h_bytes"] += long(bytes);
  if (pageable) s.stats["pageable_copies"]++;

  auto transfer = std::make_shared<Transfer>();
  transfer->to = accessible(to);
  transfer->from = accessible(from);
  transfer->bytes = bytes;
  transfer->pause = draw_delay(channel_of(*stream));
  if (s.config.gbps_x10 > 0) transfer->duration = std::chrono::nanoseconds(long(bytes) * 10 / s.config.gbps_x10);

  Operation operation{};
  operation.what = function;
  operation.delayed = true;
  operation.touches = {{to, bytes}, {from, bytes}};
  operation.run = [transfer] { transfer->run(); };
  if (pageable && from_host) {
    transfer->staged.assign(transfer->from, transfer->from + bytes);
    transfer->from = transfer->staged.data();
    operation.touches = {{to, bytes}};
  } else if (from_host) {
    operation.arm = [transfer] { transfer->expected_source = hash_bytes(transfer->from, transfer->bytes); };
  } else if (to_host && !pageable && s.config.poison) {
    operation.arm = [transfer] { memset(transfer->to, kInFlightPoison, transfer->bytes); };
  }
  const CUresult result = enqueue(lock, stream, std::move(operation));
  if (result != CUDA_SUCCESS || !(pageable && to_host)) return result;
  const auto sequence = stream->enqueued;
  if (!wait_progress(lock, 2, kNotified, [&] { return stream->done >= sequence; })) {
    s.violation(std::string("hang: ") + function + " to pageable memory");
    return context.broken = CUDA_ERROR_LAUNCH_TIMEOUT;
  }
  return context.broken;
}

CUresult fill(Lock &lock, const std::shared_ptr<Stream> &stream, const Range &range, unsigned char value) {
  Operation operation{};
  operation.what = "fill";
  operation.delayed = true;
  operation.touches = {range};
  operation.run = [to = accessible(range.begin), bytes = range.bytes, value] { memset(to, value, bytes); };
  return enqueue(lock, stream, std::move(operation));
}

}  // namespace tdsim
