// Devices, streams and events as torch's generic code sees them.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>
#include <mutex>

#include "allocator.h"
#include "device.h"

namespace simgpu {
namespace {

// torch hands an event around as a bare pointer, here the driver's handle itself; the device is kept aside.
class EventDevices {
 public:
  void add(void *event, c10::DeviceIndex device) {
    std::lock_guard<std::mutex> guard(mutex_);
    devices_[event] = device;
  }
  c10::DeviceIndex of(void *event) {
    std::lock_guard<std::mutex> guard(mutex_);
    return devices_.at(event);
  }
  void remove(void *event) {
    std::lock_guard<std::mutex> guard(mutex_);
    devices_.erase(event);
  }

 private:
  std::mutex mutex_;
  std::map<void *, c10::DeviceIndex> devices_;
};

EventDevices &event_devices() {
  static auto *const only = new EventDevices;  // events may be destroyed at exit: never destroyed itself
  return *only;
}

// True for done, false for still running; an error otherwise.
bool is_done(CUresult result, const char *what) {
  if (result == CUDA_ERROR_NOT_READY) return false;
  check(result, what);
  return true;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  c10::Device getDevice() const override { return c10::Device(kType, current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(resolve(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    try {
      setDevice(device);
    } catch (const std::exception &) {  // called in destructors, for a device that was current before
    }
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override { return current_stream(resolve(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(resolve(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return pool_stream(resolve(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override { return pool_stream(resolve(device)); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void *getStreamNativeHandle(c10::Stream stream) const override { return handle_of(stream); }

  bool queryStream(const c10::Stream &stream) const override {
    UseContext use(stream.device_index());
    return is_done(cuStreamQuery(handle_of(stream)), "cuStreamQuery");
  }
  void synchronizeStream(const c10::Stream &stream) const override {
    UseContext use(stream.device_index());
    check(cuStreamSynchronize(handle_of(stream)), "cuStreamSynchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    UseContext use(device);
    check(cuCtxSynchronize(), "cuCtxSynchronize");
  }
  bool isStreamCapturing(const c10::Stream &stream) const override {
    UseContext use(stream.device_index());
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    check(cuStreamIsCapturing(handle_of(stream), &status), "cuStreamIsCapturing");
    return status != CU_STREAM_CAPTURE_STATUS_NONE;
  }

  void record(void **event, const c10::Stream &stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    UseContext use(stream.device_index());
    if (!*event) {
      CUevent made = nullptr;
      const unsigned flags = flag == c10::EventFlag::BACKEND_DEFAULT ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING;
      check(cuEventCreate(&made, flags), "cuEventCreate");
      event_devices().add(made, stream.device_index());
      *event = made;
    }
    check(cuEventRecord(static_cast<CUevent>(*event), handle_of(stream)), "cuEventRecord");
  }
  void block(void *event, const c10::Stream &stream) const override {
    if (!event) return;
    UseContext use(stream.device_index());
    check(cuStreamWaitEvent(handle_of(stream), static_cast<CUevent>(event), 0), "cuStreamWaitEvent");
  }
  bool queryEvent(void *event) const override {
    if (!event) return true;
    UseContext use(event_devices().of(event));
    return is_done(cuEventQuery(static_cast<CUevent>(event)), "cuEventQuery");
  }
  void synchronizeEvent(void *event) const override {
    if (!event) return;
    UseContext use(event_devices().of(event));
    check(cuEventSynchronize(static_cast<CUevent>(event)), "cuEventSynchronize");
  }
  double elapsedTime(void *start, void *end, const c10::DeviceIndex device) const override {
    UseContext use(device);
    float milliseconds = 0;
    check(cuEventElapsedTime(&milliseconds, static_cast<CUevent>(start), static_cast<CUevent>(end)), "cuEventElapsedTime");
    return milliseconds;
  }
  void destroyEvent(void *event, const c10::DeviceIndex device) const noexcept override {
    if (!event) return;
    try {
      UseContext use(device);
      cuEventDestroy_v2(static_cast<CUevent>(event));
    } catch (const std::exception &) {  // a destructor's call; the driver is broken or shutting down
    }
    event_devices().remove(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr &pointer, const c10::Stream &stream) const override {
    device_allocator().recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace simgpu
