#include "memops.h"

#include <chrono>

#include "patience.h"

namespace tdgpu {

MemoryOperations try_memory_operations(const Driver& driver, const Ring& ring, CUstream stream) {
    using Clock = std::chrono::steady_clock;
    MemoryOperations found;
    if (!driver.has_memory_operations()) {
        found.why_not = "the driver has no stream memory operations of version 2 (they came with CUDA 11.7)";
        return found;
    }
    if (!ring.is_pinned() || !ring.gates_are_pinned()) {
        found.why_not = "no pinned host memory could be had";
        return found;
    }
    const uint32_t value = 0x7d69;
    CUresult result = driver.StreamWriteValue32(stream, ring.trial_address(), value, 0);
    if (result == kCudaSuccess) {
        result = driver.StreamWaitValue32(stream, ring.trial_address(), value, kWaitValueGreaterOrEqual);
    }
    if (result == kCudaSuccess && driver.StreamBatchMemOp) {
        MemOp none{};
        none.operation = MemOp::kWaitValue32;
        none.address = ring.trial_address();
        none.value = value;
        none.flags = kWaitValueGreaterOrEqual;
        found.has_batches = driver.StreamBatchMemOp(stream, 1, &none, 0) == kCudaSuccess;
    }
    const auto deadline = Clock::now() + std::chrono::milliseconds(2000);
    for (Patience patience; result == kCudaSuccess && ring.trial() != value && Clock::now() < deadline;)
        patience.wait();
    if (result != kCudaSuccess) {
        const char* name = nullptr;
        driver.GetErrorName(result, &name);
        found.why_not = std::string("the driver refuses stream memory operations: ") + (name ? name : "unknown error");
    } else if (ring.trial() != value) {
        found.why_not = "the device did not carry out a stream memory operation within 2 s";
        found.stream_is_stuck = true;
    }
    return found;
}

}  // namespace tdgpu
