#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

namespace tdsim {
namespace {

std::map<uintptr_t, Allocation> &allocations() {  // leaked like State, and guarded by its mutex
  static auto *const only = new std::map<uintptr_t, Allocation>;
  return *only;
}

size_t whole_pages(size_t bytes) { return (bytes + 4095) & ~size_t(4095); }

bool over(long limit, long held, size_t bytes) { return limit >= 0 && held + long(bytes) > limit; }

char *map(size_t bytes, int protection, int flags, int fd) {
  void *address = mmap(nullptr, bytes, protection, flags, fd, 0);
  return address == MAP_FAILED ? nullptr : static_cast<char *>(address);
}

}  // namespace

CUresult allocate_device(Context &context, size_t bytes, CUdeviceptr *address) {
  auto &s = state();
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  if (over(s.config.device_limit, context.device_bytes, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  const size_t mapped = whole_pages(bytes);
  const int fd = memfd_create("tdsim-device", MFD_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  char *shadow = nullptr, *visible = nullptr;
  if (!ftruncate(fd, off_t(mapped))) {
    shadow = map(mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
    visible = map(mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  }
  close(fd);
  if (!shadow || !visible) {
    if (shadow) munmap(shadow, mapped);
    if (visible) munmap(visible, mapped);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (s.config.poison) memset(shadow, kDevicePoison, mapped);
  const auto begin = reinterpret_cast<uintptr_t>(visible);
  allocations()[begin] = {begin, bytes, mapped, Kind::kDevice, &context, shadow};
  context.device_bytes += long(bytes);
  *address = begin;
  return CUDA_SUCCESS;
}

CUresult allocate_pinned(Context &context, size_t bytes, void **address) {
  auto &s = state();
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  if (over(s.config.pinned_limit, s.pinned_bytes, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  const size_t mapped = whole_pages(bytes);
  char *memory = map(mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  if (!memory) return CUDA_ERROR_OUT_OF_MEMORY;
  if (s.config.poison) memset(memory, kPinnedPoison, mapped);
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  allocations()[begin] = {begin, bytes, mapped, Kind::kPinned, &context, nullptr};
  s.pinned_bytes += long(bytes);
  *address = memory;
  return CUDA_SUCCESS;
}

CUresult register_pinned(Context &context, void *address, size_t bytes) {
  auto &s = state();
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (!bytes || !address) return CUDA_ERROR_INVALID_VALUE;
  const auto after = allocations().lower_bound(begin);
  const bool taken = find_allocation(begin) || (after != allocations().end() && after->first < begin + bytes);
  if (taken) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  if (over(s.config.pinned_limit, s.pinned_bytes, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  allocations()[begin] = {begin, bytes, bytes, Kind::kRegistered, &context, nullptr};
  s.pinned_bytes += long(bytes);
  return CUDA_SUCCESS;
}

void release(const Allocation &allocation) {
  const Allocation gone = allocation;  // the reference is into the map
  allocations().erase(gone.begin);
  if (gone.kind == Kind::kDevice) {
    munmap(gone.shadow, gone.mapped);
    gone.context->device_bytes -= long(gone.bytes);
  } else {
    state().pinned_bytes -= long(gone.bytes);
  }
  if (gone.kind != Kind::kRegistered) munmap(reinterpret_cast<void *>(gone.begin), gone.mapped);
}

const Allocation *find_allocation(uintptr_t address) {
  auto it = allocations().upper_bound(address);
  if (it == allocations().begin()) return nullptr;
  const Allocation &candidate = (--it)->second;
  return address < candidate.begin + candidate.bytes ? &candidate : nullptr;
}

const Allocation *find_allocation_at(uintptr_t begin, Kind kind) {
  const auto it = allocations().find(begin);
  return it != allocations().end() && it->second.kind == kind ? &it->second : nullptr;
}

const Allocation *find_range(const Range &range, Kind kind) {
  const Allocation *found = find_allocation(range.begin);
  const bool inside = found && found->kind == kind && range.bytes <= found->bytes - (range.begin - found->begin);
  return inside ? found : nullptr;
}

bool is_pinned(const Range &range) { return find_range(range, Kind::kPinned) || find_range(range, Kind::kRegistered); }

char *accessible(uintptr_t address) {
  const Allocation *found = find_allocation(address);
  return found && found->kind == Kind::kDevice ? found->shadow + (address - found->begin)
                                               : reinterpret_cast<char *>(address);
}

}  // namespace tdsim
