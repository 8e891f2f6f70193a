#include "outlet.h"

#include <chrono>

#include "memops.h"
#include "patience.h"

namespace tdgpu {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

namespace {

CUcontext context_of(const Driver& driver, int device) {
    CUdevice handle = 0;
    CUcontext context = nullptr;
    driver.check(driver.DeviceGet(&handle, device), "cuDeviceGet");
    driver.check(driver.DevicePrimaryCtxRetain(&context, handle), "cuDevicePrimaryCtxRetain");
    return context;
}

}  // namespace

Outlet::Outlet(char* memory, size_t bytes) : driver_(nullptr), ring_(memory, bytes) {}

// The ring is allocated in the device's context, so the context comes first.
Outlet::Outlet(const Driver& driver, int device, size_t ring_bytes)
    : driver_(&driver), context_(context_of(driver, device)), ring_([&]() -> Ring {
          CurrentContext current(driver, context_);
          return Ring(driver, ring_bytes);
      }()) {
    CurrentContext current(driver, context_);
    try {
        prepare();
    } catch (...) {
        is_closed_ = true;
        if (is_stuck_) throw;  // giving its memory back could wait for it
        ring_.release();
        if (before_) driver.EventDestroy(before_);
        if (after_) driver.EventDestroy(after_);
        if (stream_) driver.StreamDestroy(stream_);
        throw;
    }
}

void Outlet::prepare() {
    if (!ring_.is_pinned()) throw Error(Cause::memory, 0, "no pinned host memory could be had");
    driver_->check(driver_->StreamCreateWithPriority(&stream_, kStreamNonBlocking, 0), "cuStreamCreateWithPriority");
    driver_->check(driver_->EventCreate(&before_, kEventDisableTiming), "cuEventCreate");
    driver_->check(driver_->EventCreate(&after_, kEventDisableTiming), "cuEventCreate");
    const MemoryOperations found = try_memory_operations(*driver_, ring_, stream_);
    is_stuck_ = found.stream_is_stuck;
    if (!found.why_not.empty()) throw Error(Cause::driver, 0, found.why_not);
    has_batches_ = found.has_batches;
}

Outlet::~Outlet() {
    if (!is_closed_ && !driver_) ring_.release();
}

// --- places ---

Outlet::Place Outlet::claim(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Span span = ring_.claim(bytes);
    claimed_.push_back(span);
    open_gates();
    return {span.sequence, ring_.at(span)};
}

void Outlet::open_gates() {
    while (!claimed_.empty() && reached(written_through_, claimed_.front().fill_after)) {
        ring_.set_ready(claimed_.front().sequence);
        claimed_.pop_front();
    }
    opened_.notify_all();
}

void Outlet::set_written(Sequence chunk) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (reached(written_through_, chunk)) return;
    written_beyond_.insert(chunk);
    while (written_beyond_.erase(written_through_ + 1)) written_through_++;
    open_gates();
}

bool Outlet::wait_free(Sequence chunk, int64_t budget) {
    std::unique_lock<std::mutex> lock(mutex_);
    return opened_.wait_for(lock, milliseconds(budget), [&] { return ring_.is_ready(chunk); });
}

// --- copies by the stream ---

void Outlet::follow(CUstream producer) {
    CurrentContext current(*driver_, context_);
    driver_->refuse_capture(producer);
    // An event that is recorded anew does not disturb a wait that was enqueued on it before (read: the driver API's
    // manual, cuEventRecord): one for all times will do.
    driver_->check(driver_->EventRecord(before_, producer), "cuEventRecord");
    driver_->check(driver_->StreamWaitEvent(stream_, before_, 0), "cuStreamWaitEvent");
}

void Outlet::copy(Sequence chunk, char* to, CUdeviceptr source, size_t bytes) {
    CurrentContext current(*driver_, context_);
    if (gated_ != chunk) enqueue_gate(chunk);
    driver_->check(driver_->MemcpyDtoHAsync(to, source, bytes, stream_), "cuMemcpyDtoHAsync");
    write_is_owed_ = true;
}

void Outlet::enqueue_gate(Sequence chunk) {
    // The last chunk's write and this chunk's wait go as one: a stream's queue holds a limited number of operations.
    // Operations of a batch keep their order (read: the driver API's manual, cuStreamBatchMemOp).
    if (write_is_owed_ && has_batches_) {
        MemOp operations[2] = {};
        operations[0].operation = MemOp::kWriteValue32;
        operations[0].address = ring_.freed_address();
        operations[0].value = gated_;
        operations[1].operation = MemOp::kWaitValue32;
        operations[1].address = ring_.ready_address(chunk);
        operations[1].value = chunk;
        operations[1].flags = kWaitValueGreaterOrEqual;
        driver_->check(driver_->StreamBatchMemOp(stream_, 2, operations, 0), "cuStreamBatchMemOp");
        write_is_owed_ = false;
    } else {
        write_what_is_owed();
        driver_->check(driver_->StreamWaitValue32(stream_, ring_.ready_address(chunk), chunk, kWaitValueGreaterOrEqual),
                       "cuStreamWaitValue32");
    }
    gated_ = chunk;
}

void Outlet::write_what_is_owed() {
    if (!write_is_owed_) return;
    driver_->check(driver_->StreamWriteValue32(stream_, ring_.freed_address(), gated_, 0), "cuStreamWriteValue32");
    write_is_owed_ = false;
}

void Outlet::order(CUstream consumer) {
    CurrentContext current(*driver_, context_);
    write_what_is_owed();
    driver_->check(driver_->EventRecord(after_, stream_), "cuEventRecord");
    driver_->check(driver_->StreamWaitEvent(consumer, after_, 0), "cuStreamWaitEvent");
}

void Outlet::settle() {
    CurrentContext current(*driver_, context_);
    const Sequence last = last_chunk();
    driver_->check(driver_->StreamWriteValue32(stream_, ring_.freed_address(), last, 0), "cuStreamWriteValue32");
    write_is_owed_ = false;
    gated_ = last;
}

bool Outlet::wait_copied(Sequence chunk, int64_t budget) const {
    const auto deadline = Clock::now() + milliseconds(budget);
    for (Patience patience; !is_copied(chunk); patience.wait()) {
        if (Clock::now() >= deadline) return false;
    }
    return true;
}

void Outlet::check() {
    if (!driver_ || is_copied(last_chunk()) || !stream_is_broken()) return;
    is_broken_.store(true, std::memory_order_release);
    throw Error(Cause::driver, 0, "the device's context broke down while rows were copied from it");
}

bool Outlet::stream_is_broken() {
    CurrentContext current(*driver_, context_);
    // An error that stays is the context's end; the driver reports one-off errors of other calls here, too. While a
    // graph is being captured elsewhere, a query may be refused: that says nothing of this stream.
    auto failed = [&] {
        const CUresult result = driver_->StreamQuery(stream_);
        const bool is_refused = result >= kCudaFirstCaptureError && result <= kCudaLastCaptureError;
        return result != kCudaSuccess && result != kCudaNotReady && !is_refused;
    };
    return failed() && failed();
}

// --- the end ---

bool Outlet::is_idle() {
    CurrentContext current(*driver_, context_);
    return driver_->StreamQuery(stream_) == kCudaSuccess;
}

void Outlet::close(int64_t budget) {
    if (is_closed_) return;
    is_closed_ = true;
    if (!driver_) {
        ring_.release();
        return;
    }
    {
        // Gates that the stream still waits for open, whoever used their places.
        std::lock_guard<std::mutex> lock(mutex_);
        for (const Span& span : claimed_) ring_.set_ready(span.sequence);
        claimed_.clear();
    }
    const auto deadline = Clock::now() + milliseconds(budget);
    bool idle = false;
    for (Patience patience; !(idle = is_idle()) && Clock::now() < deadline; patience.wait()) {
        if (stream_is_broken()) break;
    }
    if (!idle) return;
    CurrentContext current(*driver_, context_);
    ring_.release();
    driver_->EventDestroy(before_);
    driver_->EventDestroy(after_);
    driver_->StreamDestroy(stream_);
}

}  // namespace tdgpu
