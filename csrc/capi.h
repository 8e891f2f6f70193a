// What the files of the C ABI share: how errors leave the core, and the structures that come from outside and go there.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "load.h"

#define TDGPU_API extern "C" __attribute__((visibility("default")))

namespace tdgpu {

// The calling thread's latest error, for tdgpu_last_error.
inline thread_local int last_code = 0;
inline thread_local std::string last_message;

template <class Function>
int guarded(Function function) {
    try {
        function();
        return int(Cause::none);
    } catch (const Error& error) {
        last_code = error.code;
        last_message = error.what();
        return int(error.cause);
    } catch (const std::bad_alloc&) {
        last_code = 0;
        last_message = "out of host memory";
        return int(Cause::memory);
    } catch (const std::exception& error) {
        last_code = 0;
        last_message = error.what();
        return int(Cause::invalid);
    }
}

inline void copy_text(const std::string& text, char* to, size_t size) {
    if (size == 0) return;
    const size_t n = std::min(text.size(), size - 1);
    memcpy(to, text.data(), n);
    to[n] = 0;
}

using SharedLoad = std::shared_ptr<Load>;
using SharedSource = std::shared_ptr<const RowSource>;

// What is to be loaded. Part of the C ABI; the core copies it.
struct PlanView {
    const CheckedFile* files;
    const Piece* pieces;
    const Chunk* chunks;
    const Run* runs;
    const SharedSource* const* sources;
    const int64_t* rows;
    uint32_t file_count, piece_count, chunk_count, run_count, source_count, row_count;
    uint32_t most_threads;  // 0: no limit
    uint32_t reserved;

    Plan plan() const {
        Plan plan;
        plan.files.reserve(file_count);
        for (uint32_t i = 0; i < file_count; i++) plan.files.push_back({files[i].path, files[i].inode});
        plan.pieces.assign(pieces, pieces + piece_count);
        plan.chunks.assign(chunks, chunks + chunk_count);
        plan.runs.assign(runs, runs + run_count);
        plan.sources.reserve(source_count);
        for (uint32_t i = 0; i < source_count; i++) plan.sources.push_back(*sources[i]);
        plan.rows.assign(rows, rows + row_count);
        if (most_threads) plan.most_threads = most_threads;
        return plan;
    }
};

// What a load reports of itself. Part of the C ABI.
struct LoadReport {
    uint64_t bytes_read;
    int64_t failed_piece;
    uint64_t wanted, found;
    int32_t cause, code;
    int32_t is_filled;
    int32_t reserved;
    uint64_t warm_nanoseconds, cold_nanoseconds;  // of gathered rows
};

inline LoadReport report_of(const Load& load) {
    const Failure failure = load.failure();
    return LoadReport{load.bytes_read(),
                      failure.piece,
                      failure.wanted,
                      failure.found,
                      int32_t(failure.cause),
                      failure.code,
                      int32_t(load.is_filled()),
                      0,
                      load.warm_nanoseconds(),
                      load.cold_nanoseconds()};
}

}  // namespace tdgpu
