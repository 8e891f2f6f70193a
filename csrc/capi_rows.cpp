// The C ABI of rows: where they are, what is gathered of them, and in which orders.
#include "capi.h"
#include "gather.h"
#include "permutation.h"
#include "readers.h"
#include "weighted.h"

using namespace tdgpu;

// --- rows that can be gathered ---

TDGPU_API int tdgpu_rows_create(const char* path, uint64_t inode, uint64_t offset, uint64_t row_bytes, uint64_t rows,
                                SharedSource** source) {
    return guarded(
        [&] { *source = new SharedSource(std::make_shared<const RowSource>(path, inode, offset, row_bytes, rows)); });
}

TDGPU_API int tdgpu_rows_create_over(const char* memory, uint64_t row_bytes, uint64_t rows, SharedSource** source) {
    return guarded([&] { *source = new SharedSource(std::make_shared<const RowSource>(memory, row_bytes, rows)); });
}

// Loads that are under way keep it. `source` is null afterwards.
TDGPU_API void tdgpu_rows_release(SharedSource** source) {
    delete *source;
    *source = nullptr;
}

// --- what is gathered of them ---

// A plan for `row_count` rows, to be carried out again and again: its chunks' destinations are counted from 0.
TDGPU_API int tdgpu_gather_create(const PlanView* view, uint32_t row_count, Gather** gather) {
    return guarded([&] { *gather = new Gather(view->plan(), row_count); });
}
// Loads that are under way do not need it. `gather` is null afterwards.
TDGPU_API void tdgpu_gather_destroy(Gather** gather) {
    delete *gather;
    *gather = nullptr;
}

// Gathers rows, as many as the plan is for, to an address for all chunks or for each.
TDGPU_API int tdgpu_gather_post(const Gather* gather, Readers* readers, const int64_t* rows, const uint64_t* addresses,
                                uint32_t count, SharedLoad** read) {
    return guarded([&] {
        auto load = std::make_shared<Load>(gather->plan(rows, addresses, count), nullptr);
        readers->post(load);
        *read = new SharedLoad(std::move(load));
    });
}

// Likewise in the calling thread.
TDGPU_API int tdgpu_gather_now(const Gather* gather, const int64_t* rows, const uint64_t* addresses, uint32_t count,
                               SharedLoad** read) {
    return guarded([&] {
        auto load = std::make_shared<Load>(gather->plan(rows, addresses, count), nullptr);
        Worker worker;
        const std::atomic<bool> stop{false};
        for (uint32_t i = 0; i < load->chunk_count(); i++) {
            const Chunk& chunk = load->plan().chunks[i];
            load->fill(i, chunk.first_piece, chunk.first_piece + chunk.piece_count, worker, stop);
        }
        *read = new SharedLoad(std::move(load));
    });
}

// Whether it is over, waiting for so long; then also how it went.
TDGPU_API int tdgpu_read_outcome(SharedLoad* read, int64_t milliseconds, LoadReport* report) {
    if (!(*read)->wait_filled(milliseconds)) return false;
    *report = report_of(**read);
    return true;
}

// --- orders and draws of rows ---

// Of a random key and a place in it, the words: for tests of everything that is made of them.
TDGPU_API void tdgpu_philox(const RandomKey* key, uint64_t place, uint64_t subplace, std::array<uint64_t, 4>* words) {
    *words = philox(*key, place, subplace);
}

TDGPU_API int tdgpu_permute(uint64_t n, const RandomKey* key, uint64_t first, uint64_t stride, uint64_t count,
                            int64_t* rows) {
    return guarded([&] { permute(n, *key, first, stride, count, rows); });
}

TDGPU_API void tdgpu_shuffle_steps(int64_t* rows, uint64_t n, const RandomKey* key, uint64_t begin, uint64_t end) {
    shuffle_steps(rows, n, *key, begin, end);
}

TDGPU_API int tdgpu_check_weights(const double* weights, uint64_t n, uint64_t* positive) {
    return guarded([&] { *positive = check_weights(weights, n); });
}

TDGPU_API void tdgpu_make_table(const double* weights, uint64_t n, Column* table) {
    make_table(weights, n, table);
}

TDGPU_API void tdgpu_draw(const Column* table, uint64_t n, const RandomKey* key, uint64_t first, uint64_t stride,
                          uint64_t count, int64_t* rows) {
    draw(table, n, *key, first, stride, count, rows);
}

TDGPU_API void tdgpu_make_ranks(const double* weights, uint64_t first, uint64_t count, const RandomKey* key,
                                double* ranks) {
    make_ranks(weights, first, count, *key, ranks);
}
