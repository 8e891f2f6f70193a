// One batch of rows on its way to disk: which bytes of memory go where in which files, and how far they have come.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "error.h"
#include "growing.h"
#include "outlet.h"

namespace tdgpu {

// Bytes that lie together, in memory and in a file. Part of the C ABI.
struct Part {
    uint64_t address;
    uint64_t bytes;
    uint64_t offset;  // in the file
    uint32_t file;
    uint32_t chunk;  // they are there once the store's chunk number `chunk - 1` is copied; 0: they are there
};

// A place in an outlet's ring that holds bytes of the store. Part of the C ABI.
struct StoredChunk {
    Outlet* outlet;
    uint32_t chunk;  // its number there
    uint32_t reserved;
};

struct StoreFailure {
    int error = 0;  // errno; ECANCELED: given up
    uint32_t file = 0;
    uint64_t wanted = 0, found = 0;
};

class Store {
public:
    // Parts of one file come by their place in it. Chunks are those that only this store reads, all of them.
    // They must have been claimed so that none of them waits for the place of another: together they take less of the
    // ring than it has left beside the largest chunk. Throws Error(invalid).
    Store(std::shared_ptr<GrowingFiles> files, const std::vector<Part>& parts, std::vector<StoredChunk> chunks);

    // --- writers ---
    enum class Taken { some, none_yet, all };
    struct Share {
        uint32_t first = 0, last = 0;  // parts
        uint32_t run = 0;
    };
    // The next parts to write: of one file, which no other writer is at, and there. `none_yet`: a copy from the device
    // is not over, or all files have their writers. Not thread-safe: under the writers' lock.
    Taken take(Share& share, bool stop);
    void write(const Share& share, bool stop);

    // --- anyone ---
    // What is not written yet need not be any more; places are given back all the same.
    void cancel() { cancelled_.store(true, std::memory_order_release); }
    bool wait(int64_t milliseconds);
    uint64_t bytes_written() const { return bytes_written_.load(std::memory_order_relaxed); }
    StoreFailure failure() const;

private:
    Share take_from(uint32_t run, bool stop);
    bool is_copied(const Part& part) const;
    bool will_never_be(const Part& part) const;
    void record(StoreFailure failure);
    void complete(uint32_t first, uint32_t last);

    const std::shared_ptr<GrowingFiles> files_;
    const std::vector<Part> parts_;
    const std::vector<StoredChunk> chunks_;
    // The parts of one file. One writer at a time: the system lets only one write to a file, whatever part of it.
    struct Run {
        uint32_t next = 0, end = 0;
        std::atomic<bool> has_writer{false};
    };
    std::vector<Run> runs_;
    uint32_t first_run_ = 0;                               // those before it are all taken
    std::unique_ptr<std::atomic<uint32_t>[]> parts_left_;  // per chunk
    std::atomic<uint32_t> left_;
    std::atomic<uint64_t> bytes_written_{0};
    std::atomic<bool> cancelled_{false};

    mutable std::mutex mutex_;
    std::condition_variable written_;
    StoreFailure failure_;
};

}  // namespace tdgpu
