// Driver calls about the driver, devices, contexts, and error names.
#include <cstdio>
#include <cstring>

#include "faults.h"
#include "streams.h"

using namespace tdsim;

namespace {

struct ErrorText {
  CUresult code;
  const char *name;
  const char *text;
};

#define ERROR_TEXT(name, text) {name, #name, text}
const ErrorText kErrors[] = {
    ERROR_TEXT(CUDA_SUCCESS, "no error"),
    ERROR_TEXT(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR_TEXT(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR_TEXT(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR_TEXT(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    ERROR_TEXT(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR_TEXT(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR_TEXT(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR_TEXT(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    ERROR_TEXT(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    ERROR_TEXT(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR_TEXT(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR_TEXT(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR_TEXT(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR_TEXT(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"),
    ERROR_TEXT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    ERROR_TEXT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    ERROR_TEXT(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR_TEXT(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR_TEXT(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR_TEXT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    ERROR_TEXT(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#undef ERROR_TEXT

const ErrorText *find_error(CUresult code) {
  for (const auto &error : kErrors) {
    if (error.code == code) return &error;
  }
  return nullptr;
}

bool device_exists(CUdevice device) { return device >= 0 && device < state().config.devices; }

int attribute_value(int attribute) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR:
      return state().config.memops != 0;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return 3;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return 9;
    default:
      return 0;
  }
}

// What cuGetProcAddress knows: the base name, the CUDA version since which it has this signature, and the function.
struct Symbol {
  const char *name;
  int since;
  void *function;
};

#define SYMBOL(name, since, function) {name, since, reinterpret_cast<void *>(&function)}
const Symbol kSymbols[] = {
    SYMBOL("cuInit", 2000, cuInit),
    SYMBOL("cuDriverGetVersion", 2020, cuDriverGetVersion),
    SYMBOL("cuDeviceGetCount", 2000, cuDeviceGetCount),
    SYMBOL("cuDeviceGet", 2000, cuDeviceGet),
    SYMBOL("cuDeviceGetName", 2000, cuDeviceGetName),
    SYMBOL("cuDeviceGetAttribute", 2000, cuDeviceGetAttribute),
    SYMBOL("cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain),
    SYMBOL("cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease_v2),
    SYMBOL("cuDevicePrimaryCtxGetState", 7000, cuDevicePrimaryCtxGetState),
    SYMBOL("cuCtxSetCurrent", 4000, cuCtxSetCurrent),
    SYMBOL("cuCtxGetCurrent", 4000, cuCtxGetCurrent),
    SYMBOL("cuCtxSynchronize", 2000, cuCtxSynchronize),
    SYMBOL("cuGetErrorName", 6000, cuGetErrorName),
    SYMBOL("cuGetErrorString", 6000, cuGetErrorString),
    SYMBOL("cuGetProcAddress", 12000, cuGetProcAddress_v2),
    SYMBOL("cuMemAlloc", 3020, cuMemAlloc_v2),
    SYMBOL("cuMemFree", 3020, cuMemFree_v2),
    SYMBOL("cuMemGetInfo", 3020, cuMemGetInfo_v2),
    SYMBOL("cuMemHostAlloc", 2020, cuMemHostAlloc),
    SYMBOL("cuMemFreeHost", 2000, cuMemFreeHost),
    SYMBOL("cuMemHostRegister", 6050, cuMemHostRegister_v2),
    SYMBOL("cuMemHostUnregister", 4000, cuMemHostUnregister),
    SYMBOL("cuMemHostGetDevicePointer", 3020, cuMemHostGetDevicePointer_v2),
    SYMBOL("cuPointerGetAttribute", 4000, cuPointerGetAttribute),
    SYMBOL("cuMemcpyHtoDAsync", 3020, cuMemcpyHtoDAsync_v2),
    SYMBOL("cuMemcpyDtoHAsync", 3020, cuMemcpyDtoHAsync_v2),
    SYMBOL("cuMemcpyDtoDAsync", 3020, cuMemcpyDtoDAsync_v2),
    SYMBOL("cuStreamCreate", 2000, cuStreamCreate),
    SYMBOL("cuStreamCreateWithPriority", 5050, cuStreamCreateWithPriority),
    SYMBOL("cuStreamDestroy", 4000, cuStreamDestroy_v2),
    SYMBOL("cuStreamSynchronize", 2000, cuStreamSynchronize),
    SYMBOL("cuStreamQuery", 2000, cuStreamQuery),
    SYMBOL("cuStreamWaitEvent", 3020, cuStreamWaitEvent),
    SYMBOL("cuStreamIsCapturing", 10000, cuStreamIsCapturing),
    SYMBOL("cuEventCreate", 2000, cuEventCreate),
    SYMBOL("cuEventDestroy", 4000, cuEventDestroy_v2),
    SYMBOL("cuEventRecord", 2000, cuEventRecord),
    SYMBOL("cuEventQuery", 2000, cuEventQuery),
    SYMBOL("cuEventSynchronize", 2000, cuEventSynchronize),
    SYMBOL("cuEventElapsedTime", 2000, cuEventElapsedTime),
    SYMBOL("cuStreamWaitValue32", 11070, cuStreamWaitValue32_v2),
    SYMBOL("cuStreamWriteValue32", 11070, cuStreamWriteValue32_v2),
    SYMBOL("cuStreamBatchMemOp", 11070, cuStreamBatchMemOp_v2),
    SYMBOL("cuLaunchHostFunc", 10000, cuLaunchHostFunc),
};
#undef SYMBOL

}  // namespace

CUresult cuInit(unsigned flags) {
  TDSIM_BEGIN(kNothing);
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> guard(state().mutex);
  if (!state().config.devices) return CUDA_ERROR_NO_DEVICE;
  driver_initialized();
  state().initialized = true;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  TDSIM_BEGIN(kNothing);
  std::lock_guard<std::mutex> guard(state().mutex);
  *version = int(state().config.version);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
  TDSIM_BEGIN(kInit);
  std::lock_guard<std::mutex> guard(state().mutex);
  *count = int(state().config.devices);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  TDSIM_BEGIN(kInit);
  std::lock_guard<std::mutex> guard(state().mutex);
  if (!device_exists(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  TDSIM_BEGIN(kInit);
  std::lock_guard<std::mutex> guard(state().mutex);
  if (!device_exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(name, size_t(length), "Simulated GPU %d", device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
  TDSIM_BEGIN(kInit);
  std::lock_guard<std::mutex> guard(state().mutex);
  if (!device_exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute_value(attribute);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  TDSIM_BEGIN(kInit);
  std::lock_guard<std::mutex> guard(state().mutex);
  if (!device_exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  Context &primary = state().contexts[device];
  primary.retained++;
  primary.retained_ever++;
  *context = reinterpret_cast<CUcontext>(&primary);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  TDSIM_BEGIN(kInit);
  std::lock_guard<std::mutex> guard(state().mutex);
  if (!device_exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  Context &primary = state().contexts[device];
  if (!primary.retained) return CUDA_ERROR_INVALID_CONTEXT;
  primary.retained--;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  TDSIM_BEGIN(kInit);
  std::lock_guard<std::mutex> guard(state().mutex);
  if (!device_exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = state().contexts[device].retained > 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  TDSIM_BEGIN(kInit);
  std::lock_guard<std::mutex> guard(state().mutex);
  for (Context &known : state().contexts) {
    if (reinterpret_cast<CUcontext>(&known) != context) continue;
    if (!known.retained) return CUDA_ERROR_INVALID_CONTEXT;
    current_context() = &known;
    return CUDA_SUCCESS;
  }
  if (context) return CUDA_ERROR_INVALID_CONTEXT;
  current_context() = nullptr;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  TDSIM_BEGIN(kInit);
  *context = reinterpret_cast<CUcontext>(current_context());
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
  TDSIM_BEGIN(kContext);
  Context &context = *current_context();
  Lock lock(state().mutex);
  state().stats["host_sync"]++;
  if (!drain(lock, context, __func__)) return context.broken = CUDA_ERROR_LAUNCH_TIMEOUT;
  return context.broken;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
  const ErrorText *found = find_error(error);
  *text = found ? found->name : nullptr;
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  const ErrorText *found = find_error(error);
  *text = found ? found->text : nullptr;
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// As cuda.h documents it: success with a null pointer for what is not there; a version above the driver's is refused.
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t, int *status) {
  TDSIM_BEGIN(kNothing);
  std::lock_guard<std::mutex> guard(state().mutex);
  if (version > state().config.version) return CUDA_ERROR_INVALID_VALUE;
  *function = nullptr;
  int found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  for (const Symbol &known : kSymbols) {
    if (strcmp(known.name, symbol)) continue;
    found = version >= known.since ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    if (found == CU_GET_PROC_ADDRESS_SUCCESS) *function = known.function;
  }
  if (status) *status = found;
  return CUDA_SUCCESS;
}
