// The CUDA driver's functions as a table that is filled at run time: nothing of CUDA is needed to build, and a machine
// without a GPU can load this library. The declarations are our own; tests/check_declarations.cpp compares them with
// cuda.h where a toolkit is installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "error.h"

namespace tdgpu {

using CUresult = int;  // an enum in cuda.h, with the same ABI
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;

constexpr CUresult kCudaSuccess = 0;
constexpr CUresult kCudaNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDefault = 0;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostAllocPortable = 1;
constexpr unsigned kHostAllocDeviceMap = 2;
constexpr unsigned kWaitValueGreaterOrEqual = 0;  // cyclic: (int32_t)(*address - value) >= 0
constexpr int kCaptureStatusNone = 0;
constexpr int kCaptureModeRelaxed = 2;
constexpr CUresult kCudaFirstCaptureError = 900;  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
constexpr CUresult kCudaLastCaptureError = 908;   // CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD

// One operation of cuStreamBatchMemOp: a wait and a write have the same layout.
struct MemOp {
    static constexpr unsigned kWaitValue32 = 1;
    static constexpr unsigned kWriteValue32 = 2;

    unsigned operation;
    CUdeviceptr address;
    uint64_t value;  // a union of 32 and 64 bits in cuda.h; all platforms of CUDA are little-endian
    unsigned flags;
    CUdeviceptr alias;
    uint64_t padding;
};
static_assert(sizeof(MemOp) == 6 * sizeof(uint64_t), "the size of CUstreamBatchMemOpParams");

// X(member, name for cuGetProcAddress, version for cuGetProcAddress, name for dlsym, arguments)
#define TDGPU_DRIVER_REQUIRED(X)                                                                                    \
    X(Init, "cuInit", 2000, "cuInit", (unsigned))                                                                   \
    X(DriverGetVersion, "cuDriverGetVersion", 2020, "cuDriverGetVersion", (int*))                                   \
    X(DeviceGetCount, "cuDeviceGetCount", 2000, "cuDeviceGetCount", (int*))                                         \
    X(DeviceGet, "cuDeviceGet", 2000, "cuDeviceGet", (CUdevice*, int))                                              \
    X(DeviceGetName, "cuDeviceGetName", 2000, "cuDeviceGetName", (char*, int, CUdevice))                            \
    X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, "cuDevicePrimaryCtxRetain", (CUcontext*, CUdevice)) \
    X(CtxSetCurrent, "cuCtxSetCurrent", 4000, "cuCtxSetCurrent", (CUcontext))                                       \
    X(CtxGetCurrent, "cuCtxGetCurrent", 4000, "cuCtxGetCurrent", (CUcontext*))                                      \
    X(MemHostAlloc, "cuMemHostAlloc", 2020, "cuMemHostAlloc", (void**, size_t, unsigned))                           \
    X(MemFreeHost, "cuMemFreeHost", 2000, "cuMemFreeHost", (void*))                                                 \
    X(MemHostGetDevicePointer, "cuMemHostGetDevicePointer", 3020, "cuMemHostGetDevicePointer_v2",                   \
      (CUdeviceptr*, void*, unsigned))                                                                              \
    X(MemcpyHtoDAsync, "cuMemcpyHtoDAsync", 3020, "cuMemcpyHtoDAsync_v2",                                           \
      (CUdeviceptr, const void*, size_t, CUstream))                                                                 \
    X(MemcpyDtoHAsync, "cuMemcpyDtoHAsync", 3020, "cuMemcpyDtoHAsync_v2", (void*, CUdeviceptr, size_t, CUstream))   \
    X(StreamCreateWithPriority, "cuStreamCreateWithPriority", 5050, "cuStreamCreateWithPriority",                   \
      (CUstream*, unsigned, int))                                                                                   \
    X(StreamDestroy, "cuStreamDestroy", 4000, "cuStreamDestroy_v2", (CUstream))                                     \
    X(StreamQuery, "cuStreamQuery", 2000, "cuStreamQuery", (CUstream))                                              \
    X(StreamWaitEvent, "cuStreamWaitEvent", 3020, "cuStreamWaitEvent", (CUstream, CUevent, unsigned))               \
    X(StreamIsCapturing, "cuStreamIsCapturing", 10000, "cuStreamIsCapturing", (CUstream, int*))                     \
    X(EventCreate, "cuEventCreate", 2000, "cuEventCreate", (CUevent*, unsigned))                                    \
    X(EventDestroy, "cuEventDestroy", 4000, "cuEventDestroy_v2", (CUevent))                                         \
    X(EventRecord, "cuEventRecord", 2000, "cuEventRecord", (CUevent, CUstream))                                     \
    X(EventQuery, "cuEventQuery", 2000, "cuEventQuery", (CUevent))                                                  \
    X(EventElapsedTime, "cuEventElapsedTime", 2000, "cuEventElapsedTime", (float*, CUevent, CUevent))               \
    X(GetErrorName, "cuGetErrorName", 6000, "cuGetErrorName", (CUresult, const char**))

// Stream memory operations, version 2, came with CUDA 11.7, the capture mode with 10.1 (read in cuda.h).
#define TDGPU_DRIVER_OPTIONAL(X)                                                                                      \
    X(StreamWaitValue32, "cuStreamWaitValue32", 11070, "cuStreamWaitValue32_v2",                                      \
      (CUstream, CUdeviceptr, uint32_t, unsigned))                                                                    \
    X(StreamWriteValue32, "cuStreamWriteValue32", 11070, "cuStreamWriteValue32_v2",                                   \
      (CUstream, CUdeviceptr, uint32_t, unsigned))                                                                    \
    X(StreamBatchMemOp, "cuStreamBatchMemOp", 11070, "cuStreamBatchMemOp_v2", (CUstream, unsigned, MemOp*, unsigned)) \
    X(ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", 10010,                                    \
      "cuThreadExchangeStreamCaptureMode", (int*))

class Driver {
public:
    // Opens the library at `path` and fills the table; throws Error(library) that names the path and what is missing.
    // The library stays open for the process: a driver cannot be unloaded safely.
    explicit Driver(const std::string& path);

#define TDGPU_MEMBER(member, name, version, symbol, arguments) CUresult(*member) arguments = nullptr;
    TDGPU_DRIVER_REQUIRED(TDGPU_MEMBER)
    TDGPU_DRIVER_OPTIONAL(TDGPU_MEMBER)
#undef TDGPU_MEMBER

    bool has_memory_operations() const { return StreamWaitValue32 && StreamWriteValue32; }

    // Throws Error(driver) with the driver's own name for `result`, unless it is success.
    void check(CUresult result, const char* what) const {
        if (result != kCudaSuccess) fail(result, what);
    }
    [[noreturn]] void fail(CUresult result, const char* what) const;

    // Throws Error(capturing) if the stream is capturing a graph.
    void refuse_capture(CUstream stream) const;
};

// Makes a context current for a scope and puts back the one that was: the caller's thread belongs to its framework.
// Meanwhile the thread is in relaxed capture mode, so that looking at our events does not invalidate a graph that
// another thread is capturing (read: the driver API's manual, cuThreadExchangeStreamCaptureMode).
class CurrentContext {
public:
    CurrentContext(const Driver& driver, CUcontext context) : driver_(driver) {
        if (driver_.ThreadExchangeStreamCaptureMode) driver_.ThreadExchangeStreamCaptureMode(&capture_mode_);
        driver_.check(driver_.CtxGetCurrent(&previous_), "cuCtxGetCurrent");
        if (previous_ != context) {
            driver_.check(driver_.CtxSetCurrent(context), "cuCtxSetCurrent");
            changed_ = true;
        }
    }
    ~CurrentContext() {
        if (changed_) driver_.CtxSetCurrent(previous_);
        if (driver_.ThreadExchangeStreamCaptureMode) driver_.ThreadExchangeStreamCaptureMode(&capture_mode_);
    }
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;

private:
    const Driver& driver_;
    CUcontext previous_ = nullptr;
    int capture_mode_ = kCaptureModeRelaxed;
    bool changed_ = false;
};

}  // namespace tdgpu
