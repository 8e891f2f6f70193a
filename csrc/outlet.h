// The way out of a device: a ring of pinned memory that chunks are copied to, and from which the writers take them.
//
// The gates of the ring (ring.h) with the parts exchanged. `ready` of a chunk says that its place may be filled:
// whoever used that place before has been written to disk; the copy stream waits for it. `freed` says how far the
// copies are: the stream writes it, the writers wait for it. Per chunk the copy stream gets
//
//     wait until ready(chunk)  ->  copy from the device to the chunk's place  ->  write freed = chunk
//
// so that the caller is free once the driver has taken the operations, and the caller's stream waits on an ordinary
// event behind them before anything may overwrite the rows. An outlet without a driver is a ring of the caller's own
// memory, into which the caller copies: it waits for the place itself, and says when the copy is over.
//
// Calls that claim and enqueue must come from one thread at a time.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "driver.h"
#include "ring.h"

namespace tdgpu {

class Outlet {
public:
    // Retains the device's primary context. Throws Error(driver) where the stream cannot wait for gates, and
    // Error(memory) where no memory can be pinned.
    Outlet(const Driver& driver, int device, size_t ring_bytes);
    // `memory` is the caller's, and outlives the outlet.
    Outlet(char* memory, size_t bytes);
    ~Outlet();
    Outlet(const Outlet&) = delete;
    Outlet& operator=(const Outlet&) = delete;

    size_t ring_bytes() const { return ring_.size(); }
    size_t pinned_bytes() const { return ring_.pinned_bytes(); }

    struct Place {
        Sequence chunk;
        char* memory;
    };
    // A place for a chunk, which may still be in use: a copy must wait for it.
    Place claim(size_t bytes);

    Sequence last_chunk() {
        std::lock_guard<std::mutex> lock(mutex_);
        return ring_.last_claimed();
    }

    // --- copies by the stream ---
    // What is copied from now on is copied behind what `producer` has queued. Throws Error(capturing).
    void follow(CUstream producer);
    // Enqueues a copy to somewhere in the place of the last chunk that was claimed.
    void copy(Sequence chunk, char* to, CUdeviceptr source, size_t bytes);
    // What is enqueued on `consumer` from now on comes behind all copies so far.
    void order(CUstream consumer);
    // All chunks so far count as copied when the copies that are enqueued are over: what was claimed after an error, or
    // not copied because of it, need not be waited for.
    void settle();
    // Whether all copies up to `chunk` are over, waiting up to `milliseconds`.
    bool wait_copied(Sequence chunk, int64_t milliseconds) const;
    // Throws Error(driver) if copies are under way and the device's context has broken down: they will not end. Asks
    // the driver, so it is for those who have waited in vain.
    void check();

    // --- copies by the caller ---
    // Whether the chunk's place may be written, waiting up to `milliseconds`.
    bool wait_free(Sequence chunk, int64_t milliseconds);
    // The caller's copies of all chunks up to `chunk` are over.
    void set_copied(Sequence chunk) { ring_.set_freed(chunk); }

    // --- writers ---
    bool is_copied(Sequence chunk) const { return ring_.is_freed(chunk); }
    bool is_broken() const { return is_broken_.load(std::memory_order_acquire); }
    // The chunk is on disk, or nobody wants it there any more. May be said again.
    void set_written(Sequence chunk);

    // Lets the copies under way end, for up to `milliseconds`, and frees the ring; if they do not end, it is left to
    // the process's end. No store may wait for its chunks any more.
    void close(int64_t milliseconds);

private:
    void prepare();
    void enqueue_gate(Sequence chunk);
    void write_what_is_owed();
    void open_gates();
    bool stream_is_broken();
    bool is_idle();

    const Driver* const driver_;  // null: the caller copies
    CUcontext context_ = nullptr;
    CUstream stream_ = nullptr;
    CUevent before_ = nullptr, after_ = nullptr;
    bool has_batches_ = false;
    Ring ring_;
    bool is_closed_ = false;
    bool is_stuck_ = false;  // the stream may never come to an end

    Sequence gated_ = 0;          // the last chunk whose gate the stream waits for
    bool write_is_owed_ = false;  // its `freed` goes out together with the next chunk's wait

    std::atomic<bool> is_broken_{false};
    std::mutex mutex_;
    std::condition_variable opened_;
    std::deque<Span> claimed_;           // whose gates are closed, oldest first
    Sequence written_through_ = 0;       // all chunks up to it are written
    std::set<Sequence> written_beyond_;  // and those
};

}  // namespace tdgpu
