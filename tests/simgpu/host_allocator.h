#pragma once

#include <ATen/core/CachingHostAllocator.h>

namespace simgpu {

at::HostAllocator &host_allocator();

}  // namespace simgpu
