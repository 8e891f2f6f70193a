#include "ring.h"

#include <cstdlib>
#include <cstring>

namespace tdgpu {
namespace {

size_t rounded(size_t bytes) {
    return (bytes + Ring::kAlignment - 1) / Ring::kAlignment * Ring::kAlignment;
}

void* pageable(size_t bytes) {
    void* memory = nullptr;
    const int error = posix_memalign(&memory, Ring::kAlignment, rounded(bytes));
    if (error) throw Error(Cause::memory, error, "no memory for a staging ring of " + std::to_string(bytes) + " bytes");
    return memory;
}

}  // namespace

Ring::Ring(char* memory, size_t bytes) : driver_(nullptr), memory_(memory), bytes_(bytes / kAlignment * kAlignment) {
    const size_t gate_bytes = kGateWords * sizeof(uint32_t);
    gates_ = static_cast<uint32_t*>(pageable(gate_bytes));
    memset(gates_, 0, gate_bytes);
    freed_ = gates_ + kFreedWord;
}

Ring::Ring(const Driver& driver, size_t bytes) : driver_(&driver), bytes_(rounded(bytes)) {
    // The gates first: without pinned gates there is no gated stream, and they are small.
    void* memory = nullptr;
    const size_t gate_bytes = kGateWords * sizeof(uint32_t);
    if (driver_->MemHostAlloc(&memory, gate_bytes, kHostAllocPortable | kHostAllocDeviceMap) == kCudaSuccess) {
        gates_are_pinned_ = driver_->MemHostGetDevicePointer(&gates_address_, memory, 0) == kCudaSuccess;
        if (!gates_are_pinned_) driver_->MemFreeHost(memory);
    }
    gates_ = static_cast<uint32_t*>(gates_are_pinned_ ? memory : pageable(gate_bytes));
    memset(gates_, 0, gate_bytes);
    freed_ = gates_ + kFreedWord;

    // Limits on pinned memory (a container's, RLIMIT_MEMLOCK, other processes) show only when it is asked for. The
    // driver calls that "out of memory", which sends people to look at the device: the caller words it better.
    for (; bytes_ >= kSmallest; bytes_ = rounded(bytes_ / 2)) {
        memory = nullptr;
        if (driver_->MemHostAlloc(&memory, bytes_, kHostAllocPortable) == kCudaSuccess) {
            memory_ = static_cast<char*>(memory);
            is_pinned_ = true;
            return;
        }
    }
    bytes_ = rounded(bytes);
    memory_ = static_cast<char*>(pageable(bytes_));
}

void Ring::release() {
    if (is_pinned_)
        driver_->MemFreeHost(memory_);
    else if (driver_)
        free(memory_);
    if (gates_are_pinned_)
        driver_->MemFreeHost(gates_);
    else
        free(gates_);
    memory_ = nullptr;
    gates_ = freed_ = nullptr;
}

Span Ring::claim(size_t bytes) {
    const size_t size = rounded(bytes);
    if (bytes == 0 || size > bytes_) {
        throw Error(Cause::invalid, 0,
                    "a chunk of " + std::to_string(bytes) + " bytes does not fit a ring of " + std::to_string(bytes_));
    }
    Span span;
    span.sequence = next_++;
    auto wait_for = [&](Sequence chunk) {
        if (reached(chunk, fill_after_)) fill_after_ = chunk;
    };
    // The ready gate of this chunk was last that of the chunk kReadyGates earlier, which must have passed it.
    wait_for(span.sequence - Sequence(kReadyGates));
    // A use is struck off by the first span that touches it. Those that touch the rest of it come later, and wait as
    // long as any before them: fill_after_ never goes back.
    auto wait_for_users_of = [&](size_t begin, size_t end) {
        while (!uses_.empty() && uses_.front().begin < end && begin < uses_.front().end) {
            wait_for(uses_.front().sequence);
            uses_.pop_front();
        }
    };
    if (head_ + size > bytes_) {
        // The rest of the ring stays empty for this round, but its users are older than those at the start: they go
        // first.
        wait_for_users_of(head_, bytes_);
        head_ = 0;
    }
    span.offset = head_;
    head_ += size;
    wait_for_users_of(span.offset, head_);
    uses_.push_back({span.sequence, span.offset, head_});
    span.fill_after = fill_after_;
    return span;
}

}  // namespace tdgpu
