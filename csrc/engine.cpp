#include "engine.h"

#include "memops.h"
#include "patience.h"

namespace tdgpu {
namespace {

using std::chrono::milliseconds;

Failure failure_of(const Error& error) {
    Failure failure;
    failure.cause = error.cause;
    failure.code = error.code;
    failure.message = error.what();
    return failure;
}

}  // namespace

// --- a transfer ---

Transfer::Transfer(Engine& engine, Plan plan, Road road, uint32_t events)
    : engine_(engine), load_(std::make_shared<Load>(std::move(plan), engine.ring_.get())), road_(road) {
    events_.assign(events + 1, nullptr);
}

Transfer::~Transfer() {
    for (CUevent event : events_) {
        if (event) engine_.events_.give_back(event);
    }
}

// --- making an engine ---

Engine::Engine(Driver& driver, int device, size_t ring_bytes, unsigned threads) : driver_(driver) {
    CUdevice handle = 0;
    driver_.check(driver_.DeviceGet(&handle, device), "cuDeviceGet");
    driver_.check(driver_.DevicePrimaryCtxRetain(&context_, handle), "cuDevicePrimaryCtxRetain");
    CurrentContext current(driver_, context_);
    try {
        prepare(ring_bytes, threads);
    } catch (...) {
        if (ring_) ring_->release();
        if (copy_stream_) driver_.StreamDestroy(copy_stream_);
        throw;
    }
}

void Engine::prepare(size_t ring_bytes, unsigned threads) {
    driver_.check(driver_.StreamCreateWithPriority(&copy_stream_, kStreamNonBlocking, 0), "cuStreamCreateWithPriority");
    ring_ = std::make_unique<Ring>(driver_, ring_bytes);
    try_memory_operations();
    readers_ = std::make_unique<Readers>(threads);
}

void Engine::try_memory_operations() {
    const MemoryOperations found = tdgpu::try_memory_operations(driver_, *ring_, copy_stream_);
    why_host_ = found.why_not;
    has_batches_ = found.has_batches;
    if (found.stream_is_stuck) {
        driver_.check(driver_.StreamCreateWithPriority(&copy_stream_, kStreamNonBlocking, 0),
                      "cuStreamCreateWithPriority");
    }
}

// --- enqueuing ---

bool Engine::take_road(Road road, int64_t budget) {
    if (road == Road::gated && !why_host_.empty()) throw Error(Cause::invalid, 0, why_host_);
    if (road == road_) return true;
    CurrentContext current(driver_, context_);
    const auto deadline = Clock::now() + milliseconds(budget);
    for (Patience patience; !is_idle(); patience.wait()) {
        if (Clock::now() >= deadline) return false;
    }
    road_ = road;
    return true;
}

std::unique_ptr<Transfer> Engine::begin(Plan plan, CUstream consumer, uint32_t events) {
    CurrentContext current(driver_, context_);
    plan.check(events, largest_chunk());
    driver_.refuse_capture(consumer);

    auto transfer = std::make_unique<Transfer>(*this, std::move(plan), road_, events);
    try {
        for (CUevent& event : transfer->events_) event = events_.take();

        // The destinations were allocated in `consumer`'s order: what it has queued may still use their memory.
        CUevent allocated = events_.take();
        const CUresult recorded = driver_.EventRecord(allocated, consumer);
        const CUresult waited = recorded ? recorded : driver_.StreamWaitEvent(copy_stream_, allocated, 0);
        events_.give_back(allocated);
        driver_.check(recorded, "cuEventRecord");
        driver_.check(waited, "cuStreamWaitEvent");
    } catch (const Error&) {
        // Its places in the ring are claimed: give them up, or the next load would wait for copies that never come.
        take_back(*transfer);
        for (Patience patience; !drained(*transfer);) patience.wait();
        throw;
    }
    readers_->post(transfer->load_);  // before anything below can block on a full queue
    return transfer;
}

std::shared_ptr<CopyTimes> Engine::time_copies(Transfer& transfer) {
    transfer.times_ = std::make_shared<CopyTimes>(driver_, context_, timed_events_);
    return transfer.times_;
}

bool Engine::pump(Transfer& transfer, int64_t budget) {
    CurrentContext current(driver_, context_);
    const auto deadline = Clock::now() + milliseconds(budget);
    using State = Transfer::State;
    Patience patience;
    try {
        while (transfer.state_ == State::enqueuing) {
            if (transfer.next_ == transfer.load().chunk_count()) {
                finish(transfer);
                transfer.state_ = State::enqueued;
            } else if (transfer.road_ == Road::gated) {
                enqueue_gated(transfer);
            } else if (enqueue_from_host(transfer)) {
                patience = Patience();
            } else {
                patience.wait();
            }
            if (transfer.state_ == State::enqueuing && Clock::now() >= deadline) return false;
        }
    } catch (const Error& error) {
        transfer.load().record(failure_of(error));
        take_back(transfer);
        transfer.state_ = State::draining;
    }
    while (transfer.state_ == State::draining) {
        if (drained(transfer)) {
            transfer.state_ = State::failed;
            transfer.is_done_ = true;
            const Failure failure = transfer.load().failure();
            throw Error(failure.cause, failure.code, failure.message);
        }
        if (Clock::now() >= deadline) return false;
        patience.wait();
    }
    return true;
}

bool Engine::abort(Transfer& transfer, int64_t budget) {
    CurrentContext current(driver_, context_);
    using State = Transfer::State;
    if (transfer.state_ == State::enqueuing) {
        take_back(transfer);
        transfer.state_ = State::draining;
    }
    const auto deadline = Clock::now() + milliseconds(budget);
    for (Patience patience; transfer.state_ == State::draining; patience.wait()) {
        if (drained(transfer)) {
            transfer.state_ = State::failed;
            transfer.is_done_ = true;
        } else if (Clock::now() >= deadline) {
            return false;
        }
    }
    return true;
}

void Engine::enqueue_gated(Transfer& transfer) {
    Load& load = transfer.load();
    const Chunk& chunk = load.plan().chunks[transfer.next_];
    const Span& span = load.span(transfer.next_);

    // A stream's queue holds a limited number of operations, and beyond it the caller blocks: the last chunk's write
    // and this chunk's wait go as one. Operations of a batch keep their order (read: the driver API's manual,
    // cuStreamBatchMemOp).
    if (transfer.write_is_owed_ && has_batches_) {
        MemOp operations[2] = {};
        operations[0].operation = MemOp::kWriteValue32;
        operations[0].address = ring_->freed_address();
        operations[0].value = load.span(transfer.next_ - 1).sequence;
        operations[1].operation = MemOp::kWaitValue32;
        operations[1].address = ring_->ready_address(span.sequence);
        operations[1].value = span.sequence;
        operations[1].flags = kWaitValueGreaterOrEqual;
        driver_.check(driver_.StreamBatchMemOp(copy_stream_, 2, operations, 0), "cuStreamBatchMemOp");
        transfer.write_is_owed_ = false;
    } else {
        write_what_is_owed(transfer);
        driver_.check(driver_.StreamWaitValue32(copy_stream_, ring_->ready_address(span.sequence), span.sequence,
                                                kWaitValueGreaterOrEqual),
                      "cuStreamWaitValue32");
    }
    transfer.waits_++;
    if (transfer.times_) transfer.times_->begin(copy_stream_);
    driver_.check(driver_.MemcpyHtoDAsync(chunk.destination, ring_->at(span), chunk.bytes, copy_stream_),
                  "cuMemcpyHtoDAsync");
    transfer.next_++;
    transfer.write_is_owed_ = true;
    if (transfer.times_) transfer.times_->end(copy_stream_);
    if (chunk.event) record(transfer, chunk.event - 1);
}

void Engine::write_what_is_owed(Transfer& transfer) {
    if (!transfer.write_is_owed_) return;
    const Sequence chunk = transfer.load().span(transfer.next_ - 1).sequence;
    driver_.check(driver_.StreamWriteValue32(copy_stream_, ring_->freed_address(), chunk, 0), "cuStreamWriteValue32");
    transfer.write_is_owed_ = false;
}

bool Engine::enqueue_from_host(Transfer& transfer) {
    retire_copies();
    Load& load = transfer.load();
    const Chunk& chunk = load.plan().chunks[transfer.next_];
    const Span& span = load.span(transfer.next_);
    if (!ring_->is_ready(span.sequence)) return false;

    if (transfer.times_) transfer.times_->begin(copy_stream_);
    CUevent copied = events_.take();
    CUresult result = driver_.MemcpyHtoDAsync(chunk.destination, ring_->at(span), chunk.bytes, copy_stream_);
    if (result != kCudaSuccess) {
        events_.give_back(copied);
        driver_.fail(result, "cuMemcpyHtoDAsync");
    }
    transfer.next_++;
    result = driver_.EventRecord(copied, copy_stream_);
    if (result != kCudaSuccess) {
        events_.give_back(copied);
        driver_.fail(result, "cuEventRecord");
    }
    copies_.push_back({span.sequence, copied});
    if (transfer.times_) transfer.times_->end(copy_stream_);
    if (chunk.event) record(transfer, chunk.event - 1);
    return true;
}

void Engine::finish(Transfer& transfer) {
    write_what_is_owed(transfer);
    record(transfer, uint32_t(transfer.events_.size() - 1));
    if (transfer.times_) transfer.times_->complete();
}

void Engine::retire_copies() {
    while (!copies_.empty()) {
        const CUresult result = driver_.EventQuery(copies_.front().event);
        if (result == kCudaNotReady) return;
        driver_.check(result, "cuEventQuery");
        ring_->set_freed(copies_.front().chunk);
        events_.give_back(copies_.front().event);
        copies_.pop_front();
    }
}

bool Engine::is_broken() {
    // An error that stays is the context's end; the driver reports one-off errors of other calls here, too.
    auto failed = [&] {
        const CUresult result = driver_.StreamQuery(copy_stream_);
        return result != kCudaSuccess && result != kCudaNotReady;
    };
    return failed() && failed();
}

bool Engine::is_idle() {
    if (driver_.StreamQuery(copy_stream_) != kCudaSuccess && !is_broken()) return false;
    for (const Copy& copy : copies_) events_.give_back(copy.event);
    copies_.clear();
    // Idle, or broken for good: in both cases no copy reads the ring any more.
    ring_->set_freed(ring_->last_claimed());
    return true;
}

// --- taking a load back ---

void Engine::take_back(Transfer& transfer) {
    // Gates that the stream waits for must still open, in order, though the bytes no longer matter. Chunks that are not
    // enqueued never will be: their readers must not wait for a place that no copy will free.
    transfer.load().cancel();
    transfer.load().strand(transfer.road_ == Road::gated ? transfer.waits_ : transfer.next_);
    if (transfer.times_) transfer.times_->complete();
}

bool Engine::drained(Transfer& transfer) {
    if (!is_idle()) return false;  // and if idle, every place is free: the stranded chunks' too
    const bool was_posted = transfer.next_ > 0 || transfer.state_ == Transfer::State::draining;
    return !was_posted || transfer.load().is_filled();
}

// --- waiting ---

void Engine::order(Transfer& transfer, uint32_t event, CUstream stream) {
    CurrentContext current(driver_, context_);
    driver_.refuse_capture(stream);
    if (event >= transfer.events_.size()) throw Error(Cause::invalid, 0, "no such event");
    driver_.check(driver_.StreamWaitEvent(stream, transfer.events_[event], 0), "cuStreamWaitEvent");
}

bool Engine::wait(Transfer& transfer, uint32_t event, int64_t budget) {
    if (transfer.is_done_) return true;
    if (event >= transfer.events_.size()) throw Error(Cause::invalid, 0, "no such event");
    CurrentContext current(driver_, context_);
    const auto deadline = Clock::now() + milliseconds(budget);
    for (Patience patience;; patience.wait()) {
        const CUresult result = driver_.EventQuery(transfer.events_[event]);
        if (result == kCudaSuccess) {
            if (event + 1 == transfer.events_.size()) transfer.is_done_ = true;
            return true;
        }
        if (result != kCudaNotReady) {
            if (!is_broken()) driver_.fail(result, "cuEventQuery");
            // Something, here or in the program's own kernels, broke the context: no gate will be written any more, so
            // nobody may wait for one.
            Failure failure;
            failure.cause = Cause::driver;
            failure.code = result;
            failure.message = "the device's context broke while the load was under way";
            transfer.load().record(std::move(failure));
            transfer.load().cancel();
            transfer.load().strand(0);
            transfer.is_done_ = true;
            return true;
        }
        if (Clock::now() >= deadline) return false;
    }
}

// --- the end ---

void Engine::close(int64_t budget) {
    CurrentContext current(driver_, context_);
    readers_->cancel();
    const auto deadline = Clock::now() + milliseconds(budget);
    bool idle = false;
    for (Patience patience; !(idle = is_idle()) && Clock::now() < deadline;) patience.wait();
    readers_->stop();
    if (!idle || is_broken()) return;
    ring_->release();
    driver_.StreamDestroy(copy_stream_);
}

// --- events ---

void Engine::record(Transfer& transfer, uint32_t event) {
    driver_.check(driver_.EventRecord(transfer.events_[event], copy_stream_), "cuEventRecord");
}

}  // namespace tdgpu
