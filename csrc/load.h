// One load: what to read, into which chunks, and how far it has come.
//
// Three parties touch a load. The caller's thread makes it and enqueues its chunks (engine.cpp). Reader threads fill
// the chunks (readers.cpp). Anyone may ask how far it is. What readers and askers share is atomic or under `mutex_`.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io.h"
#include "ring.h"

namespace tdgpu {

// A run of bytes of one file, and where in its chunk it goes. Part of the C ABI.
struct Piece {
    uint64_t file_offset;
    uint64_t bytes;
    uint64_t chunk_offset;
    uint32_t file;    // index into the plan's files
    uint32_t direct;  // 1: read past the page cache
};

// What one copy carries. Part of the C ABI.
struct Chunk {
    uint64_t destination;  // device address; for a load without a device, the address in host memory
    uint64_t bytes;
    uint32_t first_piece;
    uint32_t piece_count;
    uint32_t event;  // record event number `event - 1` after this copy; 0: none
    uint32_t reserved;
};

// A file as it was when it was checked. Part of the C ABI.
struct CheckedFile {
    const char* path;
    uint64_t inode;  // 0: any
};

struct Plan {
    struct Source {
        std::string path;
        uint64_t inode;
    };
    std::vector<Source> files;
    std::vector<Piece> pieces;
    std::vector<Chunk> chunks;

    // Throws Error(invalid) unless pieces and chunks fit each other, and the ring: indexes come from outside the core.
    void check(uint32_t events, uint64_t largest_chunk) const;
};

// The first thing that went wrong.
struct Failure {
    Cause cause = Cause::none;
    int code = 0;        // errno, or the driver's
    int64_t piece = -1;  // which piece, where one is to blame
    uint64_t wanted = 0, found = 0;
    std::string message;
};

class Load {
public:
    // A checked plan. Without a ring, chunks are filled where their destination says, in host memory.
    Load(Plan plan, Ring* ring);

    const Plan& plan() const { return plan_; }
    Ring* ring() const { return ring_; }
    uint64_t id() const { return id_; }
    uint32_t chunk_count() const { return uint32_t(plan_.chunks.size()); }
    const Span& span(uint32_t chunk) const { return spans_[chunk]; }

    // --- readers ---
    // Fills pieces [first, last) of `chunk`, waiting for its place first. `file` is the reader's own open file.
    struct OpenFile {
        File file;
        uint64_t load = 0;
        uint32_t index = 0;
    };
    void fill(uint32_t chunk, uint32_t first, uint32_t last, OpenFile& open, const std::atomic<bool>& stop);

    // --- the caller ---
    // Bytes need not arrive any more: what is not read yet is left out, but every gate still opens.
    void cancel() { cancelled_.store(true, std::memory_order_release); }
    bool is_cancelled() const { return cancelled_.load(std::memory_order_acquire); }
    // Chunks from `chunk` on will never be enqueued: readers must not wait for their place, nor fill it.
    void strand(uint32_t chunk) { stranded_from_.store(chunk, std::memory_order_release); }

    bool is_filled() const { return chunks_left_.load(std::memory_order_acquire) == 0; }
    bool wait_filled(int64_t milliseconds);
    uint64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }

    void record(Failure failure);  // the first one is kept
    bool has_failed() const { return failed_.load(std::memory_order_acquire); }
    Failure failure() const;

private:
    bool wait_for_place(uint32_t chunk, const std::atomic<bool>& stop) const;
    void read_piece(uint32_t index, char* to, OpenFile& open);

    const Plan plan_;
    Ring* const ring_;
    const uint64_t id_;
    std::vector<Span> spans_;

    std::unique_ptr<std::atomic<uint32_t>[]> pieces_left_;  // per chunk
    std::atomic<uint32_t> chunks_left_;
    std::atomic<uint64_t> bytes_read_{0};
    std::atomic<bool> cancelled_{false};
    std::atomic<uint32_t> stranded_from_{UINT32_MAX};
    std::atomic<bool> failed_{false};

    mutable std::mutex mutex_;
    std::condition_variable filled_;
    Failure failure_;
};

}  // namespace tdgpu
