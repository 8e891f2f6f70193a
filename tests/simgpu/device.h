// The torch device "simgpu" (PrivateUse1) over the simulated driver: what its files share.
//
// Like torch's CUDA device: streams are asynchronous, the default stream is the driver's legacy stream (handle 0), the
// others are non-blocking and come from a pool of 32 per device; memory comes from a caching allocator.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include "../simcuda/driver.h"

namespace simgpu {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// Raises a torch error with the driver's error name unless `result` is CUDA_SUCCESS.
void check(CUresult result, const char *what);

inline CUdeviceptr address_of(const void *pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

c10::DeviceIndex device_count() noexcept;  // 0 if the driver cannot be initialised
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::DeviceIndex resolve(c10::Device device);  // index -1 is the current device
bool has_context(c10::DeviceIndex device);

// Makes the device's context current on this thread, and the one before it again at the end. The context is retained when a
// device is first used, not before.
class UseContext {
 public:
  explicit UseContext(c10::DeviceIndex device);
  UseContext(const UseContext &) = delete;
  ~UseContext();

 private:
  CUcontext before_ = nullptr;
};

c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream pool_stream(c10::DeviceIndex device);     // the next one of the pool
c10::Stream exchange_stream(const c10::Stream &stream);  // makes it current for its device; the one before
CUstream handle_of(const c10::Stream &stream);
CUstream current_handle(c10::DeviceIndex device);

void synchronize_current(c10::DeviceIndex device);  // waits for the current stream

}  // namespace simgpu
