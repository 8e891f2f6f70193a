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

#include "inflate.h"
#include "io.h"
#include "ring.h"
#include "rows.h"

namespace tdgpu {

// Bytes that go to one place in their chunk. Part of the C ABI.
struct Piece {
    uint64_t offset;  // in the file; of a run, in what it inflates to; of gathered rows, in the plan's list of rows
    uint64_t bytes;
    uint64_t chunk_offset;
    uint32_t file;    // index into the plan's files; of gathered rows, into its sources
    uint32_t direct;  // 1: read past the page cache
    uint32_t run;     // bytes of the run number `run - 1`; 0: plain bytes of the file; kGathered: rows of a source
    uint32_t leaf;    // the caller's own number of what it belongs to

    bool is_inflated() const { return run != 0 && run != kGathered; }
    bool is_gathered() const { return run == kGathered; }
    static constexpr uint32_t kGathered = UINT32_MAX;
};

// What one copy carries. Part of the C ABI.
struct Chunk {
    uint64_t destination;  // device address; without a device, a host address, or 0: bytes are checked and dropped
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
    std::vector<Run> runs;  // each with one piece at least, in order
    std::vector<std::shared_ptr<const RowSource>> sources;
    std::vector<int64_t> rows;           // which rows are gathered; every piece takes consecutive ones of the list
    uint32_t most_threads = UINT32_MAX;  // readers that may work on this load at a time

    // Throws Error(invalid) unless all of it fits together, and the ring: indexes come from outside the core.
    void check(uint32_t events, uint64_t largest_chunk) const;
};

// What one reader thread keeps between its tasks.
struct Worker {
    File file;
    uint64_t load = 0;  // whose file is open, and which
    uint32_t file_index = 0;
    Inflater inflater;
    std::vector<char> scratch;

    // Gives back what is not needed while there is nothing to do.
    void rest() {
        file.close();
        inflater.rest();
        std::vector<char>().swap(scratch);
    }
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
    // Both wait for a chunk's place before they fill it.
    // Reads plain pieces [first, last) of `chunk`.
    void fill(uint32_t chunk, uint32_t first, uint32_t last, Worker& worker, const std::atomic<bool>& stop);
    // Inflates all pieces of a run, in whichever chunks they are.
    void inflate(uint32_t run, Worker& worker, const std::atomic<bool>& stop);
    bool begins_run(uint32_t piece) const;
    uint32_t workers = 0;  // readers at work on this load; the queue's lock guards it

    // --- the caller ---
    // Bytes need not arrive any more: what is not read yet is left out, but every gate still opens.
    void cancel() { cancelled_.store(true, std::memory_order_release); }
    bool is_cancelled() const { return cancelled_.load(std::memory_order_acquire); }
    // Chunks from `chunk` on will never be enqueued: readers must not wait for their place, nor fill it.
    void strand(uint32_t chunk) { stranded_from_.store(chunk, std::memory_order_release); }

    bool is_filled() const { return chunks_left_.load(std::memory_order_acquire) == 0; }
    bool wait_filled(int64_t milliseconds);
    uint64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }
    // What threads spent on gathering rows, together: those that were in memory, and those for which a disk was read.
    uint64_t warm_nanoseconds() const { return warm_nanoseconds_.load(std::memory_order_relaxed); }
    uint64_t cold_nanoseconds() const { return cold_nanoseconds_.load(std::memory_order_relaxed); }

    void record(Failure failure);  // the first one is kept
    Failure failure() const;

private:
    bool wait_for_place(uint32_t chunk, const std::atomic<bool>& stop) const;
    char* place(uint32_t chunk) const;
    Damage open(uint32_t file, bool direct, Worker& worker) const;
    void read_piece(uint32_t index, char* to, Worker& worker);
    void gather_piece(uint32_t index, char* to);
    Damage inflate_piece(const Run& run, const Piece& piece, bool is_first, bool is_last, char* to, Worker& worker);
    void complete(uint32_t chunk, uint32_t pieces);
    void record(const Damage& damage, uint32_t piece);

    const Plan plan_;
    Ring* const ring_;
    const uint64_t id_;
    std::vector<Span> spans_;
    uint64_t gathered_bytes_ = 0;  // of all pieces
    struct RunPiece {
        uint32_t piece, chunk;
    };
    std::vector<RunPiece> run_pieces_;  // by run, in order
    std::vector<uint32_t> run_begins_;  // where in run_pieces_ each run begins, and the end

    std::unique_ptr<std::atomic<uint32_t>[]> pieces_left_;  // per chunk
    std::atomic<uint32_t> chunks_left_;
    std::atomic<uint64_t> bytes_read_{0};
    std::atomic<uint64_t> warm_nanoseconds_{0}, cold_nanoseconds_{0};
    std::atomic<bool> cancelled_{false};
    std::atomic<uint32_t> stranded_from_{UINT32_MAX};

    mutable std::mutex mutex_;
    std::condition_variable filled_;
    Failure failure_;
};

}  // namespace tdgpu
