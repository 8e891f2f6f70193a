// Own declarations of the part of the CUDA driver API that is simulated here.
//
// Names, values and layouts were read in <cuda.h> of CUDA 13.0. No CUDA toolkit is needed to build against this header.
// Everything that includes it may link libtdsim_cuda.so directly, or load it with dlopen like the real libcuda.so.1.
#pragma once

#include <cstddef>
#include <cstdint>

#define TDSIM_EXPORT __attribute__((visibility("default")))

extern "C" {

using CUresult = int;  // an enum in cuda.h, with the same ABI
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st *;
using CUstream = struct CUstream_st *;
using CUevent = struct CUevent_st *;
using CUhostFn = void (*)(void *);

enum : CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_DEINITIALIZED = 4,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_ECC_UNCORRECTABLE = 214,
  CUDA_ERROR_OPERATING_SYSTEM = 304,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_LAUNCH_TIMEOUT = 702,
  CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
  CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
  CUDA_ERROR_LAUNCH_FAILED = 719,
  CUDA_ERROR_NOT_PERMITTED = 800,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_UNKNOWN = 999,
};

enum : unsigned {
  CU_STREAM_DEFAULT = 0,
  CU_STREAM_NON_BLOCKING = 1,
  CU_EVENT_DEFAULT = 0,
  CU_EVENT_DISABLE_TIMING = 2,
  CU_STREAM_WAIT_VALUE_GEQ = 0,  // (int32)(*address - value) >= 0: survives the counter's wrap-around
  CU_STREAM_WAIT_VALUE_EQ = 1,
  CU_STREAM_WAIT_VALUE_AND = 2,
  CU_STREAM_WAIT_VALUE_NOR = 3,
  CU_STREAM_WAIT_VALUE_FLUSH = 1u << 30,
};

enum : int {
  CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY = 19,
  CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT = 40,
  CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED = 78,
  CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
  CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1 = 92,
  CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99,
  CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122,
  CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR = 123,
  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
  CU_MEMORYTYPE_HOST = 1,
  CU_MEMORYTYPE_DEVICE = 2,
  CU_STREAM_CAPTURE_STATUS_NONE = 0,
  CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
  CU_GET_PROC_ADDRESS_SUCCESS = 0,
  CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
  CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2,
};

enum CUstreamBatchMemOpType : int {
  CU_STREAM_MEM_OP_WAIT_VALUE_32 = 1,
  CU_STREAM_MEM_OP_WRITE_VALUE_32 = 2,
};

// cuda.h declares a union of structs padded to six 64-bit words; wait and write have the same fields at the same offsets.
struct CUstreamBatchMemOpParams {
  int operation;
  CUdeviceptr address;
  union {
    uint32_t value;
    uint64_t value64;
  };
  unsigned flags;
  CUdeviceptr alias;
  uint64_t padding;
};
static_assert(sizeof(CUstreamBatchMemOpParams) == 6 * sizeof(uint64_t), "cuda.h: cuuint64_t pad[6]");
static_assert(offsetof(CUstreamBatchMemOpParams, address) == 8 && offsetof(CUstreamBatchMemOpParams, value) == 16 &&
                  offsetof(CUstreamBatchMemOpParams, flags) == 24 && offsetof(CUstreamBatchMemOpParams, alias) == 32,
              "cuda.h: CUstreamMemOpWaitValueParams_st");

// Set-up, devices, contexts.
TDSIM_EXPORT CUresult cuInit(unsigned flags);
TDSIM_EXPORT CUresult cuDriverGetVersion(int *version);
TDSIM_EXPORT CUresult cuDeviceGetCount(int *count);
TDSIM_EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal);
TDSIM_EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device);
TDSIM_EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
TDSIM_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
TDSIM_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
TDSIM_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active);
TDSIM_EXPORT CUresult cuCtxSetCurrent(CUcontext context);
TDSIM_EXPORT CUresult cuCtxGetCurrent(CUcontext *context);
TDSIM_EXPORT CUresult cuCtxSynchronize();
TDSIM_EXPORT CUresult cuGetErrorName(CUresult error, const char **text);
TDSIM_EXPORT CUresult cuGetErrorString(CUresult error, const char **text);
TDSIM_EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status);

// Memory.
TDSIM_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes);
TDSIM_EXPORT CUresult cuMemFree_v2(CUdeviceptr address);
TDSIM_EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes);
TDSIM_EXPORT CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags);
TDSIM_EXPORT CUresult cuMemFreeHost(void *address);
TDSIM_EXPORT CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags);
TDSIM_EXPORT CUresult cuMemHostUnregister(void *address);
TDSIM_EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device_address, void *address, unsigned flags);
TDSIM_EXPORT CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address);
TDSIM_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream);
TDSIM_EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
TDSIM_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);

// Streams, events, stream memory operations.
TDSIM_EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags);
TDSIM_EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority);
TDSIM_EXPORT CUresult cuStreamDestroy_v2(CUstream stream);
TDSIM_EXPORT CUresult cuStreamSynchronize(CUstream stream);
TDSIM_EXPORT CUresult cuStreamQuery(CUstream stream);
TDSIM_EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
TDSIM_EXPORT CUresult cuStreamIsCapturing(CUstream stream, int *status);
TDSIM_EXPORT CUresult cuEventCreate(CUevent *event, unsigned flags);
TDSIM_EXPORT CUresult cuEventDestroy_v2(CUevent event);
TDSIM_EXPORT CUresult cuEventRecord(CUevent event, CUstream stream);
TDSIM_EXPORT CUresult cuEventQuery(CUevent event);
TDSIM_EXPORT CUresult cuEventSynchronize(CUevent event);
TDSIM_EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);
TDSIM_EXPORT CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags);
TDSIM_EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags);
TDSIM_EXPORT CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned count, CUstreamBatchMemOpParams *params,
                                            unsigned flags);
TDSIM_EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument);
}
