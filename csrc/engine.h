// One device's transfers: the ring, the copy stream and the readers.
//
// A gated load is enqueued whole before its first byte is read. Per chunk the copy stream gets
//
//     wait until ready(chunk)  ->  copy the span to the device  ->  write freed = chunk
//
// so the caller is free as soon as the driver has taken the operations, and the consumer's stream waits on an ordinary
// event recorded behind them. Where the driver has no stream memory operations, or the ring is not pinned, the caller's
// thread stands in for the gates: it enqueues each copy when the chunk is ready (host-enqueued). Same order, same
// events.
//
// Calls that enqueue (begin, pump, abort) must come from one thread at a time, a load's pump until it is done; the
// Python engine holds a lock for that. Everything else may be called from any thread.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "driver.h"
#include "events.h"
#include "load.h"
#include "readers.h"
#include "ring.h"

namespace tdgpu {

enum class Road : int { gated = 0, host = 1 };

class Engine;

// A load on its way to a device: the load itself, and how much of it the driver has.
class Transfer {
public:
    Transfer(Engine& engine, Plan plan, Road road, uint32_t events);
    ~Transfer();

    Load& load() const { return *load_; }

private:
    friend class Engine;
    enum class State { enqueuing, draining, enqueued, failed };

    Engine& engine_;
    const std::shared_ptr<Load> load_;
    const Road road_;
    State state_ = State::enqueuing;
    uint32_t next_ = 0;            // the next chunk to enqueue
    uint32_t waits_ = 0;           // chunks whose gate the copy stream waits for: next_, or one more
    bool write_is_owed_ = false;   // the last chunk's `freed` goes out together with the next chunk's wait
    std::vector<CUevent> events_;  // those the plan asks for, then the end
    std::shared_ptr<CopyTimes> times_;
    std::atomic<bool> is_done_{false};
};

class Engine {
public:
    // Retains the device's primary context (the one that CUDA's runtime uses) and creates what the transfers need.
    // Throws Error; `why_host` tells afterwards why loads are host-enqueued, and is empty where they are gated.
    Engine(Driver& driver, int device, size_t ring_bytes, unsigned threads);

    // On the gated road the device writes `freed`, on the other the host does. Two writers of one word could undo each
    // other's, so the road changes only while nothing is under way. True when it is `road`, waiting up to
    // `milliseconds`.
    bool take_road(Road road, int64_t milliseconds);

    // For the road that was taken. Checks the plan, orders the copy stream behind what `consumer` has queued, and lets
    // the readers start.
    std::unique_ptr<Transfer> begin(Plan plan, CUstream consumer, uint32_t events);

    // Has the load's copies timed. Between begin and pump; costs two events a chunk.
    std::shared_ptr<CopyTimes> time_copies(Transfer& transfer);

    // Enqueues for up to `milliseconds`; true when everything is enqueued. Throws the first error, once, after the
    // load has been taken back: no copy of it is under way then, and the engine is good for the next load.
    bool pump(Transfer& transfer, int64_t milliseconds);

    // Takes back a load that is partly enqueued (an interrupt). As pump, returns true when nothing of it is under way.
    bool abort(Transfer& transfer, int64_t milliseconds);

    // Makes `stream` wait for event number `event` of the plan, or for the end (event = the plan's count).
    void order(Transfer& transfer, uint32_t event, CUstream stream);

    // True when event number `event` has passed, waiting up to `milliseconds`. A broken context is recorded as the
    // load's failure and counts as passed: nothing will move any more.
    bool wait(Transfer& transfer, uint32_t event, int64_t milliseconds);

    // Lets what is under way pass without being read, for up to `milliseconds`; then releases every gate and joins the
    // readers. Frees the ring, unless a copy may still be under way: then the memory is left to the process's end.
    // The engine can do nothing afterwards.
    void close(int64_t milliseconds);

    // Half the ring: one chunk can be filled while another is copied.
    size_t largest_chunk() const { return ring_->size() / 2; }
    size_t ring_bytes() const { return ring_->size(); }
    size_t pinned_bytes() const { return ring_->pinned_bytes(); }
    unsigned thread_count() const { return readers_->thread_count(); }
    const std::string& why_host() const { return why_host_; }
    CUstream copy_stream() const { return copy_stream_; }

private:
    friend class Transfer;
    using Clock = std::chrono::steady_clock;

    void prepare(size_t ring_bytes, unsigned threads);
    void try_memory_operations();
    void enqueue_gated(Transfer& transfer);
    bool enqueue_from_host(Transfer& transfer);
    void finish(Transfer& transfer);
    void write_what_is_owed(Transfer& transfer);
    void take_back(Transfer& transfer);
    bool drained(Transfer& transfer);
    void retire_copies();
    bool is_idle();
    bool is_broken();

    void record(Transfer& transfer, uint32_t event);

    Driver& driver_;
    CUcontext context_ = nullptr;
    CUstream copy_stream_ = nullptr;
    std::unique_ptr<Ring> ring_;
    std::unique_ptr<Readers> readers_;
    std::string why_host_;
    bool has_batches_ = false;
    Road road_ = Road::gated;

    // Host-enqueued copies under way, oldest first: their events tell when a span may be filled again.
    struct Copy {
        Sequence chunk;
        CUevent event;
    };
    std::deque<Copy> copies_;

    EventPool events_{driver_, kEventDisableTiming};
    EventPool timed_events_{driver_, kEventDefault};
};

}  // namespace tdgpu
