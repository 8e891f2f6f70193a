// Compile-only, where a CUDA toolkit is installed: our declarations of the driver against those of cuda.h.
//     c++ -std=c++17 -fsyntax-only -I /usr/local/cuda/include -I csrc csrc/tests/check_declarations.cpp
#include <cuda.h>

#include <type_traits>

#include "driver.h"

namespace {

// Enums become int and pointers void*: what the ABI sees.
template <class T>
using Plain = std::conditional_t<std::is_enum_v<T>, int, std::conditional_t<std::is_pointer_v<T>, void*, T>>;

template <class Function>
struct Signature;
template <class Result, class... Arguments>
struct Signature<Result (*)(Arguments...)> {
    using type = void (*)(Plain<Result>, Plain<Arguments>...);
};

#define TDGPU_COMPARE(member, name, version, symbol, arguments)                                                   \
    static_assert(                                                                                                \
        std::is_same_v<Signature<decltype(tdgpu::Driver::member)>::type, Signature<decltype(&cu##member)>::type>, \
        symbol);
TDGPU_DRIVER_REQUIRED(TDGPU_COMPARE)
TDGPU_DRIVER_OPTIONAL(TDGPU_COMPARE)

static_assert(sizeof(tdgpu::MemOp) == sizeof(CUstreamBatchMemOpParams));
static_assert(offsetof(tdgpu::MemOp, address) == offsetof(CUstreamBatchMemOpParams, waitValue.address));
static_assert(offsetof(tdgpu::MemOp, value) == offsetof(CUstreamBatchMemOpParams, waitValue.value));
static_assert(offsetof(tdgpu::MemOp, flags) == offsetof(CUstreamBatchMemOpParams, waitValue.flags));
static_assert(offsetof(tdgpu::MemOp, value) == offsetof(CUstreamBatchMemOpParams, writeValue.value));
static_assert(tdgpu::MemOp::kWaitValue32 == CU_STREAM_MEM_OP_WAIT_VALUE_32);
static_assert(tdgpu::MemOp::kWriteValue32 == CU_STREAM_MEM_OP_WRITE_VALUE_32);
static_assert(tdgpu::kCudaNotReady == CUDA_ERROR_NOT_READY);
static_assert(tdgpu::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(tdgpu::kEventDefault == CU_EVENT_DEFAULT);
static_assert(tdgpu::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(tdgpu::kHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(tdgpu::kHostAllocDeviceMap == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(tdgpu::kWaitValueGreaterOrEqual == CU_STREAM_WAIT_VALUE_GEQ);
static_assert(tdgpu::kCaptureStatusNone == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(tdgpu::kCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(tdgpu::kCudaFirstCaptureError == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
static_assert(tdgpu::kCudaLastCaptureError == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);

}  // namespace
