// The staging ring: pinned memory that chunks pass through, and the gates between the host and the copy stream.
//
// Chunks are numbered by the order in which the copy stream will copy them. A chunk claims a span of the ring, waits
// until the span's earlier users have been copied, is filled by reader threads, and is then ready. Two kinds of gate:
//
//   ready   one word per chunk (a table of kReadyGates, by sequence number): readers store, the stream waits.
//   freed   one word: the stream stores the number of the last chunk that it copied, readers wait. One is enough, since
//           a stream copies in order.
//
// Both are 32-bit words that only grow and are compared as the driver does, cyclically.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "driver.h"

namespace tdgpu {

using Sequence = uint32_t;

// a has come at or after b, as cuStreamWaitValue32 with GEQ sees it.
inline bool reached(Sequence a, Sequence b) {
    return int32_t(a - b) >= 0;
}

struct Span {
    size_t offset = 0;        // from the start of the ring, in bytes
    Sequence sequence = 0;    // the chunk's number
    Sequence fill_after = 0;  // the chunk that must have been copied before this span may be written
};

class Ring {
public:
    static constexpr size_t kReadyGates = 1024;
    static constexpr size_t kAlignment = 4096;  // of spans: pages, so that O_DIRECT can read into them
    static constexpr size_t kSmallest = 64 << 10;

    // Allocates up to `bytes` of pinned memory: less where the machine allows less, pageable where it allows none.
    Ring(const Driver& driver, size_t bytes);
    // A ring of the caller's own memory, whose copies somebody else enqueues: all gates are the host's.
    Ring(char* memory, size_t bytes);
    // Frees nothing: see release().
    ~Ring() = default;
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // Gives the memory back. Only once no copy can be under way; otherwise it is left to the process's end.
    void release();

    // The next chunk's place. Not thread-safe: the one who enqueues calls it. bytes <= size().
    Span claim(size_t bytes);

    char* at(const Span& span) const { return memory_ + span.offset; }
    size_t size() const { return bytes_; }
    size_t pinned_bytes() const { return is_pinned_ ? bytes_ : 0; }
    bool is_pinned() const { return is_pinned_; }
    bool gates_are_pinned() const { return gates_are_pinned_; }
    Sequence last_claimed() const { return next_ - 1; }

    // Host side of the gates.
    void set_ready(Sequence chunk) { store(ready_gate(chunk), chunk); }
    bool is_ready(Sequence chunk) const { return reached(load(ready_gate(chunk)), chunk); }
    void set_freed(Sequence chunk) { store(freed_, chunk); }
    bool is_freed(Sequence chunk) const { return reached(load(freed_), chunk); }

    // Device side: where the stream waits and writes. Only if gates_are_pinned().
    CUdeviceptr ready_address(Sequence chunk) const {
        return gates_address_ + (chunk % kReadyGates) * sizeof(uint32_t);
    }
    CUdeviceptr freed_address() const { return gates_address_ + kFreedWord * sizeof(uint32_t); }
    // A word that is no gate, to try the driver's operations on.
    CUdeviceptr trial_address() const { return gates_address_ + kTrialWord * sizeof(uint32_t); }
    uint32_t trial() const { return load(gates_ + kTrialWord); }

private:
    static constexpr size_t kFreedWord = kReadyGates;       // a cache line of its own
    static constexpr size_t kTrialWord = kReadyGates + 32;  // likewise
    static constexpr size_t kGateWords = kReadyGates + 64;

    static void store(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
    static uint32_t load(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
    uint32_t* ready_gate(Sequence chunk) const { return gates_ + chunk % kReadyGates; }

    // A part of the ring in use, oldest first.
    struct Use {
        Sequence sequence;
        size_t begin, end;
    };

    const Driver* const driver_;  // null: the memory is the caller's
    char* memory_ = nullptr;
    size_t bytes_ = 0;
    bool is_pinned_ = false;
    uint32_t* gates_ = nullptr;
    uint32_t* freed_ = nullptr;
    bool gates_are_pinned_ = false;
    CUdeviceptr gates_address_ = 0;
    Sequence next_ = 1;
    Sequence fill_after_ = 0;
    size_t head_ = 0;
    std::deque<Use> uses_;
};

}  // namespace tdgpu
