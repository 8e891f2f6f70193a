// Driver calls about memory and copies.
#include "copies.h"
#include "faults.h"

using namespace tdsim;

namespace {

CUresult give_back_host(void *address, Kind kind, CUresult unknown, const char *function) {
  Lock lock(state().mutex);
  const Allocation *found = find_allocation_at(reinterpret_cast<uintptr_t>(address), kind);
  if (!found) return unknown;
  const Range range{found->begin, found->bytes};
  if (in_flight(range)) {
    state().violation(std::string(function) + " of memory in flight");
    // The finding is recorded; now keep the process alive: an operation would touch unmapped pages.
    drain(lock, *found->context, function);
  }
  found = find_allocation_at(range.begin, kind);
  if (found && !in_flight(range)) release(*found);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
  TDSIM_BEGIN(kContext);
  std::lock_guard<std::mutex> guard(state().mutex);
  return allocate_device(*current_context(), bytes, address);
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  TDSIM_BEGIN(kContext);
  Context &context = *current_context();
  ContextLock context_lock(context, __func__);
  if (!context_lock) return CUDA_ERROR_LAUNCH_TIMEOUT;
  auto &s = state();
  Lock lock(s.mutex);
  const Allocation *found = find_allocation_at(address, Kind::kDevice);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  if (found->context != &context) s.violation("cuMemFree of memory of another context than the current one");
  const Range range{found->begin, found->bytes};
  if (s.config.free_syncs) drain(lock, *found->context, __func__);
  if (in_flight(range)) {
    s.violation("cuMemFree of memory in flight");
    drain(lock, *found->context, __func__);
  }
  found = find_allocation_at(address, Kind::kDevice);
  if (found && !in_flight(range)) release(*found);
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
  TDSIM_BEGIN(kContext);
  std::lock_guard<std::mutex> guard(state().mutex);
  const long limit = state().config.device_limit;
  *total_bytes = limit >= 0 ? size_t(limit) : size_t(64) << 30;
  const auto held = size_t(current_context()->device_bytes);
  *free_bytes = *total_bytes > held ? *total_bytes - held : 0;
  return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned) {
  TDSIM_BEGIN(kContext);
  std::lock_guard<std::mutex> guard(state().mutex);
  return allocate_pinned(*current_context(), bytes, address);
}

CUresult cuMemFreeHost(void *address) {
  TDSIM_BEGIN(kContext);
  return give_back_host(address, Kind::kPinned, CUDA_ERROR_INVALID_VALUE, __func__);
}

CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned) {
  TDSIM_BEGIN(kContext);
  std::lock_guard<std::mutex> guard(state().mutex);
  return register_pinned(*current_context(), address, bytes);
}

CUresult cuMemHostUnregister(void *address) {
  TDSIM_BEGIN(kContext);
  return give_back_host(address, Kind::kRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, __func__);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device_address, void *address, unsigned) {
  TDSIM_BEGIN(kContext);
  std::lock_guard<std::mutex> guard(state().mutex);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (!is_pinned({begin, 1})) return CUDA_ERROR_INVALID_VALUE;
  *device_address = begin;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
  TDSIM_BEGIN(kInit);
  std::lock_guard<std::mutex> guard(state().mutex);
  const Allocation *found = find_allocation(address);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<int *>(value) = found->kind == Kind::kDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int *>(value) = found->context->device;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
  TDSIM_BEGIN(kContext);
  const auto source = reinterpret_cast<uintptr_t>(from);
  return copy(*current_context(), __func__, Direction::kHostToDevice, to, source, bytes, stream);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
  TDSIM_BEGIN(kContext);
  const auto target = reinterpret_cast<uintptr_t>(to);
  return copy(*current_context(), __func__, Direction::kDeviceToHost, target, from, bytes, stream);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  TDSIM_BEGIN(kContext);
  return copy(*current_context(), __func__, Direction::kDeviceToDevice, to, from, bytes, stream);
}
