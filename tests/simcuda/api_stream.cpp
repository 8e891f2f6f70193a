// Driver calls about streams, events, stream memory operations and host functions.
#include "faults.h"
#include "streams.h"

using namespace tdsim;

namespace {

template <class Handle>
Handle new_handle() {  // never reused, so a destroyed handle is always recognised
  state().next_handle += 16;
  return reinterpret_cast<Handle>(state().next_handle);
}

template <class Handle>
uintptr_t key_of(Handle handle) {
  return reinterpret_cast<uintptr_t>(handle);
}

bool satisfied(const uint32_t *address, uint32_t value, unsigned flags) {
  const uint32_t now = __atomic_load_n(address, __ATOMIC_ACQUIRE);
  switch (flags & 3u) {
    case CU_STREAM_WAIT_VALUE_GEQ:
      return int32_t(now - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
      return now == value;
    case CU_STREAM_WAIT_VALUE_AND:
      return (now & value) != 0;
    default:
      return ~(now | value) != 0;
  }
}

void write_value(const CUstreamBatchMemOpParams &op) {
  __atomic_store_n(reinterpret_cast<uint32_t *>(accessible(op.address)), op.value, __ATOMIC_RELEASE);
}

// One queue entry for all of `ops`, which take effect one after the other.
CUresult enqueue_memops(const char *function, CUstream handle, std::vector<CUstreamBatchMemOpParams> ops) {
  ContextLock context_lock(*current_context(), function);
  if (!context_lock) return CUDA_ERROR_LAUNCH_TIMEOUT;
  auto &s = state();
  Lock lock(s.mutex);
  if (!s.config.memops) return CUDA_ERROR_NOT_SUPPORTED;
  const auto stream = find_stream(handle, function);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  Operation operation{};
  operation.what = function;
  operation.polled = true;
  for (const auto &op : ops) {
    const bool known = op.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 || op.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32;
    const Range range{uintptr_t(op.address), sizeof(uint32_t)};
    if (!known || op.address % sizeof(uint32_t)) return CUDA_ERROR_INVALID_VALUE;
    if (!is_pinned(range) && !find_range(range, Kind::kDevice)) {
      s.violation(std::string(function) + ": the address is neither pinned nor device memory");
      return CUDA_ERROR_INVALID_VALUE;
    }
    operation.touches.push_back(range);
    operation.gate |= op.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32;
  }
  if (s.config.early_write) {
    std::vector<CUstreamBatchMemOpParams> waits;
    for (const auto &op : ops) {
      if (op.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
        write_value(op);
      } else {
        waits.push_back(op);
      }
    }
    ops = waits;
  }
  operation.ready = [ops = std::move(ops), next = size_t(0)]() mutable {
    for (; next < ops.size(); next++) {
      const auto &op = ops[next];
      if (op.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
        write_value(op);
      } else if (!satisfied(reinterpret_cast<uint32_t *>(accessible(op.address)), op.value, op.flags)) {
        return false;
      }
    }
    return true;
  };
  return enqueue(lock, stream, std::move(operation));
}

}  // namespace

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  TDSIM_BEGIN(kContext);
  std::lock_guard<std::mutex> guard(state().mutex);
  *stream = new_handle<CUstream>();
  state().streams[key_of(*stream)] = make_stream(*current_context(), flags);
  return CUDA_SUCCESS;
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int) {
  TDSIM_BEGIN(kContext);
  std::lock_guard<std::mutex> guard(state().mutex);
  *stream = new_handle<CUstream>();
  state().streams[key_of(*stream)] = make_stream(*current_context(), flags);
  return CUDA_SUCCESS;
}

// Work that is queued goes on, as documented.
CUresult cuStreamDestroy_v2(CUstream stream) {
  TDSIM_BEGIN(kContext);
  std::lock_guard<std::mutex> guard(state().mutex);
  if (!find_stream(stream, __func__) || !state().streams.erase(key_of(stream))) return CUDA_ERROR_INVALID_HANDLE;
  return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream handle) {
  TDSIM_BEGIN(kContext);
  std::lock_guard<std::mutex> guard(state().mutex);
  const auto stream = find_stream(handle, __func__);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  return stream->idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamSynchronize(CUstream handle) {
  TDSIM_BEGIN(kContext);
  Context &context = *current_context();
  Lock lock(state().mutex);
  const auto stream = find_stream(handle, __func__);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  state().stats["host_sync"]++;
  const uint64_t sequence = stream->enqueued;
  if (!wait_progress(lock, 2, kNotified, [&] { return stream->done >= sequence; })) {
    state().violation("hang: cuStreamSynchronize of stream " + std::to_string(stream->id));
    return context.broken = CUDA_ERROR_LAUNCH_TIMEOUT;
  }
  return context.broken;
}

CUresult cuStreamIsCapturing(CUstream handle, int *status) {
  TDSIM_BEGIN(kContext);
  std::lock_guard<std::mutex> guard(state().mutex);
  if (!find_stream(handle, __func__)) return CUDA_ERROR_INVALID_HANDLE;
  *status = state().config.capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

// cuda.h: the event "may be from a different context or device" than the stream.
CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent event_handle, unsigned) {
  TDSIM_BEGIN(kContext);
  ContextLock context_lock(*current_context(), __func__);
  if (!context_lock) return CUDA_ERROR_LAUNCH_TIMEOUT;
  Lock lock(state().mutex);
  const auto stream = find_stream(stream_handle, __func__);
  const auto event = find_event(event_handle, __func__, true);
  if (!stream || !event) return CUDA_ERROR_INVALID_HANDLE;
  if (!event->latest) return CUDA_SUCCESS;
  Operation operation{};
  operation.what = "wait for an event";
  operation.gate = true;
  operation.ready = [recording = event->latest] { return recording->done; };
  return enqueue(lock, stream, std::move(operation));
}

CUresult cuEventCreate(CUevent *event, unsigned flags) {
  TDSIM_BEGIN(kContext);
  std::lock_guard<std::mutex> guard(state().mutex);
  *event = new_handle<CUevent>();
  state().events[key_of(*event)] = std::make_shared<Event>(Event{current_context(), flags, nullptr});
  return CUDA_SUCCESS;
}

// Waits that name the event keep their recording of it, as documented.
CUresult cuEventDestroy_v2(CUevent event) {
  TDSIM_BEGIN(kContext);
  std::lock_guard<std::mutex> guard(state().mutex);
  if (!find_event(event, __func__)) return CUDA_ERROR_INVALID_HANDLE;
  state().events.erase(key_of(event));
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event_handle, CUstream stream_handle) {
  TDSIM_BEGIN(kContext);
  ContextLock context_lock(*current_context(), __func__);
  if (!context_lock) return CUDA_ERROR_LAUNCH_TIMEOUT;
  Lock lock(state().mutex);
  const auto stream = find_stream(stream_handle, __func__);
  const auto event = find_event(event_handle, __func__);
  if (!stream || !event) return CUDA_ERROR_INVALID_HANDLE;
  auto recording = std::make_shared<Recording>();
  Operation operation{};
  operation.what = "record an event";
  // A broken context must not hang another context that waits for its event.
  operation.even_if_broken = true;
  operation.run = [recording] {
    std::lock_guard<std::mutex> guard(state().mutex);
    recording->done = true;
    recording->time = Clock::now();
  };
  const CUresult result = enqueue(lock, stream, std::move(operation));
  if (result == CUDA_SUCCESS) event->latest = recording;
  return result;
}

CUresult cuEventQuery(CUevent handle) {
  TDSIM_BEGIN(kContext);
  std::lock_guard<std::mutex> guard(state().mutex);
  const auto event = find_event(handle, __func__);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  return !event->latest || event->latest->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent handle) {
  TDSIM_BEGIN(kContext);
  Context &context = *current_context();
  Lock lock(state().mutex);
  const auto event = find_event(handle, __func__);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  state().stats["host_sync"]++;
  const auto recording = event->latest;
  if (!wait_progress(lock, 2, kNotified, [&] { return !recording || recording->done; })) {
    state().violation("hang: cuEventSynchronize");
    return context.broken = CUDA_ERROR_LAUNCH_TIMEOUT;
  }
  return context.broken;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start_handle, CUevent end_handle) {
  TDSIM_BEGIN(kContext);
  std::lock_guard<std::mutex> guard(state().mutex);
  const auto start = find_event(start_handle, __func__);
  const auto end = find_event(end_handle, __func__);
  if (!start || !end || !start->latest || !end->latest) return CUDA_ERROR_INVALID_HANDLE;
  if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
  if (!start->latest->done || !end->latest->done) return CUDA_ERROR_NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(end->latest->time - start->latest->time).count();
  return CUDA_SUCCESS;
}

CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags) {
  TDSIM_BEGIN(kContext);
  return enqueue_memops(__func__, stream, {{CU_STREAM_MEM_OP_WAIT_VALUE_32, address, {value}, flags, 0, 0}});
}

CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags) {
  TDSIM_BEGIN(kContext);
  return enqueue_memops(__func__, stream, {{CU_STREAM_MEM_OP_WRITE_VALUE_32, address, {value}, flags, 0, 0}});
}

CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned count, CUstreamBatchMemOpParams *params, unsigned flags) {
  TDSIM_BEGIN(kContext);
  if (count >= 256 || flags) return CUDA_ERROR_INVALID_VALUE;  // cuda.h: "must be less than 256", "must be 0"
  return enqueue_memops(__func__, stream, std::vector<CUstreamBatchMemOpParams>(params, params + count));
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *argument) {
  TDSIM_BEGIN(kContext);
  ContextLock context_lock(*current_context(), __func__);
  if (!context_lock) return CUDA_ERROR_LAUNCH_TIMEOUT;
  Lock lock(state().mutex);
  const auto stream = find_stream(handle, __func__);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  Operation operation{};
  operation.what = "host function";
  operation.delayed = true;
  operation.gate = true;  // it may write what later operations read
  operation.run = [function, argument] {
    // Host functions of different streams may be run one at a time: one that waits for another one hangs.
    static auto *const one_at_a_time = new std::mutex;
    std::lock_guard<std::mutex> guard(*one_at_a_time);
    InHostFunction marker;
    function(argument);
  };
  return enqueue(lock, stream, std::move(operation));
}
