// What torch's device-independent code asks a device: pinned memory, the device of a pointer, storages that change size.
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "allocator.h"
#include "device.h"
#include "host_allocator.h"
#include "ops.h"

namespace simgpu {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return has_context(device); }

  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    if (device >= 0) set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  bool isPinnedPtr(const void *pointer) const override {
    int type = 0;
    const auto result = cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address_of(pointer));
    return result == CUDA_SUCCESS && type == CU_MEMORYTYPE_HOST;
  }
  at::Allocator *getPinnedMemoryAllocator() const override { return &host_allocator(); }
  at::Device getDeviceFromPtr(void *pointer) const override {
    int device = 0;
    check(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address_of(pointer)), "not a device pointer");
    return at::Device(kType, c10::DeviceIndex(device));
  }
  void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override { resize_storage(storage, bytes); }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace simgpu
