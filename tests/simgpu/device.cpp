#include "device.h"

#include <array>
#include <mutex>

namespace simgpu {
namespace {

constexpr int kMaxDevices = 8;
constexpr int kPool = 32;

struct Pool {
  std::mutex mutex;
  std::array<CUstream, kPool> streams{};  // made when first handed out
  int next = 0;
};

Pool &pool(c10::DeviceIndex device) {
  static auto *const pools = new std::array<Pool, kMaxDevices>;  // tensors may be freed at exit: never destroyed
  return pools->at(size_t(device));
}

CUcontext context_of(c10::DeviceIndex device) {
  static auto *const mutex = new std::mutex;
  static std::array<CUcontext, kMaxDevices> contexts{};
  std::lock_guard<std::mutex> guard(*mutex);
  CUcontext &context = contexts.at(size_t(device));
  if (!context) check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  return context;
}

thread_local c10::DeviceIndex device_now = 0;
thread_local std::array<c10::StreamId, kMaxDevices> stream_now{};

c10::Stream make(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

}  // namespace

void check(CUresult result, const char *what) {
  if (result == CUDA_SUCCESS) return;
  const char *name = nullptr;
  cuGetErrorName(result, &name);
  TORCH_CHECK(false, "simgpu: ", what, ": ", name ? name : "unknown error", " (", result, ")");
}

c10::DeviceIndex device_count() noexcept {
  int count = 0;
  if (cuInit(0) != CUDA_SUCCESS || cuDeviceGetCount(&count) != CUDA_SUCCESS) return 0;
  return c10::DeviceIndex(count);
}

c10::DeviceIndex current_device() { return device_now; }

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "simgpu: there is no device ", int(device));
  device_now = device;
}

c10::DeviceIndex resolve(c10::Device device) { return device.has_index() ? device.index() : device_now; }

bool has_context(c10::DeviceIndex device) {
  unsigned flags = 0;
  int active = 0;
  return cuInit(0) == CUDA_SUCCESS && cuDevicePrimaryCtxGetState(device, &flags, &active) == CUDA_SUCCESS && active;
}

UseContext::UseContext(c10::DeviceIndex device) {
  check(cuInit(0), "cuInit");
  const CUcontext wanted = context_of(device);
  check(cuCtxGetCurrent(&before_), "cuCtxGetCurrent");
  check(cuCtxSetCurrent(wanted), "cuCtxSetCurrent");
}

UseContext::~UseContext() { cuCtxSetCurrent(before_); }

c10::Stream current_stream(c10::DeviceIndex device) { return make(device, stream_now.at(size_t(device))); }

c10::Stream default_stream(c10::DeviceIndex device) { return make(device, 0); }

c10::Stream pool_stream(c10::DeviceIndex device) {
  Pool &streams = pool(device);
  std::lock_guard<std::mutex> guard(streams.mutex);
  const int index = streams.next++ % kPool;
  if (!streams.streams[size_t(index)]) {
    UseContext use(device);
    check(cuStreamCreateWithPriority(&streams.streams[size_t(index)], CU_STREAM_NON_BLOCKING, 0), "cuStreamCreate");
  }
  return make(device, index + 1);
}

c10::Stream exchange_stream(const c10::Stream &stream) {
  c10::StreamId &now = stream_now.at(size_t(stream.device_index()));
  const auto before = make(stream.device_index(), now);
  now = stream.id();
  return before;
}

// Ids: 0 is the default stream, 1 to 32 the pool's, anything else is a handle that somebody else made (an external stream).
CUstream handle_of(const c10::Stream &stream) {
  const c10::StreamId id = stream.id();
  if (id == 0) return nullptr;
  if (id > kPool) return reinterpret_cast<CUstream>(id);
  Pool &streams = pool(stream.device_index());
  std::lock_guard<std::mutex> guard(streams.mutex);
  return streams.streams.at(size_t(id - 1));
}

CUstream current_handle(c10::DeviceIndex device) { return handle_of(current_stream(device)); }

void synchronize_current(c10::DeviceIndex device) {
  UseContext use(device);
  check(cuStreamSynchronize(current_handle(device)), "cuStreamSynchronize");
}

}  // namespace simgpu
