#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace simgpu {

c10::DeviceAllocator &device_allocator();

}  // namespace simgpu
