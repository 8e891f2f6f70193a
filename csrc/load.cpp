#include "load.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "patience.h"

namespace tdgpu {
namespace {

std::atomic<uint64_t> next_id{1};

// What this thread has had a disk read so far.
long blocks_read() {
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_inblock : 0;
}

// Bytes that could not be read become 0xFF: NaN in every floating dtype, and never what the memory held before.
constexpr int kUnreadable = 0xFF;

}  // namespace

void Plan::check(uint32_t events, uint64_t largest_chunk) const {
    auto insist = [](bool holds, const char* what) {
        if (!holds) throw Error(Cause::invalid, 0, std::string("the plan is inconsistent: ") + what);
    };
    for (const Run& run : runs) {
        insist(run.file < files.size(), "a run has a file that is not there");
        insist(run.stored <= INT64_MAX && run.file_offset <= INT64_MAX - run.stored, "a run leaves its file");
    }
    std::vector<uint64_t> inflated(runs.size(), 0);  // where each run's next piece may begin
    std::vector<bool> is_begun(runs.size(), false);
    const auto [lowest, highest] = std::minmax_element(rows.begin(), rows.end());
    insist(rows.empty() || *lowest >= 0, "a row before the first");
    uint64_t next = 0;
    for (const Chunk& chunk : chunks) {
        insist(chunk.bytes > 0 && chunk.piece_count > 0, "an empty chunk");
        insist(chunk.bytes <= largest_chunk, "a chunk is too large for the ring");
        insist(chunk.event <= events, "a chunk has an event that is not there");
        insist(chunk.first_piece == next, "chunks and pieces are out of order");
        next += chunk.piece_count;
        insist(next <= pieces.size(), "a chunk has pieces that are not there");
        for (uint64_t p = chunk.first_piece; p < next; p++) {
            const Piece& piece = pieces[p];
            insist(piece.file < (piece.is_gathered() ? sources.size() : files.size()),
                   "a piece has a file that is not there");
            insist(piece.bytes <= chunk.bytes && piece.chunk_offset <= chunk.bytes - piece.bytes,
                   "a piece leaves its chunk");
            if (piece.is_gathered()) {
                const RowSource& source = *sources[piece.file];
                const uint64_t count = piece.bytes / source.row_bytes();
                insist(piece.bytes % source.row_bytes() == 0, "gathered rows are cut");
                insist(piece.offset <= rows.size() && count <= rows.size() - piece.offset,
                       "a piece has rows that are not in the list");
                insist(rows.empty() || uint64_t(*highest) < source.rows(), "a row behind the last");
                insist(chunk.destination != 0, "gathered rows without a destination");
                continue;
            }
            if (piece.run == 0) {
                insist(chunk.destination != 0, "plain bytes without a destination");
                insist(piece.bytes <= INT64_MAX && piece.offset <= INT64_MAX - piece.bytes, "a piece leaves its file");
                continue;
            }
            const uint64_t r = piece.run - 1;
            insist(r < runs.size(), "a piece has a run that is not there");
            insist(piece.offset <= runs[r].bytes && piece.bytes <= runs[r].bytes - piece.offset,
                   "a piece leaves its run");
            insist(piece.offset >= inflated[r], "the pieces of a run are out of order");
            inflated[r] = piece.offset + piece.bytes;
            is_begun[r] = true;
        }
    }
    insist(next == pieces.size(), "pieces without a chunk");
    for (const bool begun : is_begun) insist(begun, "a run without pieces");
    insist(!chunks.empty(), "nothing to load");
}

Load::Load(Plan plan, Ring* ring)
    : plan_(std::move(plan)),
      ring_(ring),
      id_(next_id++),
      run_begins_(plan_.runs.size() + 1, 0),
      pieces_left_(new std::atomic<uint32_t>[plan_.chunks.size()]),
      chunks_left_(uint32_t(plan_.chunks.size())) {
    for (size_t c = 0; c < plan_.chunks.size(); c++) pieces_left_[c] = plan_.chunks[c].piece_count;

    // The pieces of each run, found by counting them first.
    for (const Piece& piece : plan_.pieces) {
        if (piece.is_inflated()) run_begins_[piece.run]++;
        if (piece.is_gathered()) gathered_bytes_ += piece.bytes;
    }
    for (size_t r = 0; r < plan_.runs.size(); r++) run_begins_[r + 1] += run_begins_[r];
    run_pieces_.resize(run_begins_.back());
    std::vector<uint32_t> next(run_begins_.begin(), run_begins_.end() - 1);
    for (uint32_t c = 0; c < chunk_count(); c++) {
        const Chunk& chunk = plan_.chunks[c];
        for (uint32_t p = chunk.first_piece; p < chunk.first_piece + chunk.piece_count; p++) {
            if (plan_.pieces[p].is_inflated()) run_pieces_[next[plan_.pieces[p].run - 1]++] = {p, c};
        }
    }

    if (!ring_) return;
    spans_.reserve(plan_.chunks.size());
    for (const Chunk& chunk : plan_.chunks) spans_.push_back(ring_->claim(chunk.bytes));
}

bool Load::begins_run(uint32_t piece) const {
    return run_pieces_[run_begins_[plan_.pieces[piece].run - 1]].piece == piece;
}

bool Load::wait_for_place(uint32_t chunk, const std::atomic<bool>& stop) const {
    for (Patience patience;; patience.wait()) {
        if (chunk >= stranded_from_.load(std::memory_order_acquire) || stop.load(std::memory_order_relaxed))
            return false;
        if (ring_->is_freed(spans_[chunk].fill_after)) return true;
    }
}

char* Load::place(uint32_t chunk) const {
    return ring_ ? ring_->at(spans_[chunk]) : reinterpret_cast<char*>(plan_.chunks[chunk].destination);
}

void Load::fill(uint32_t chunk, uint32_t first, uint32_t last, Worker& worker, const std::atomic<bool>& stop) {
    const bool has_place = !ring_ || wait_for_place(chunk, stop);
    if (has_place && !is_cancelled()) {
        for (uint32_t p = first; p < last; p++) {
            char* to = place(chunk) + plan_.pieces[p].chunk_offset;
            if (plan_.pieces[p].is_gathered())
                gather_piece(p, to);
            else
                read_piece(p, to, worker);
        }
    } else if (first < last && plan_.pieces[first].is_gathered()) {
        // Whoever gave it up, nobody is to take what is there for rows.
        Failure failure;
        failure.cause = Cause::cancelled;
        failure.message = "it was given up before all rows were gathered";
        record(std::move(failure));
    }
    complete(chunk, last - first);
}

void Load::inflate(uint32_t index, Worker& worker, const std::atomic<bool>& stop) {
    const Run& run = plan_.runs[index];
    const uint32_t begin = run_begins_[index], end = run_begins_[index + 1];
    // Once a piece is missing, those behind it cannot be had either.
    bool goes_on = true;
    for (uint32_t i = begin; i < end; i++) {
        const auto [p, chunk] = run_pieces_[i];
        const Piece& piece = plan_.pieces[p];
        const bool has_place = !ring_ || wait_for_place(chunk, stop);
        if (has_place && !is_cancelled()) {
            char* base = place(chunk);
            char* to = base ? base + piece.chunk_offset : nullptr;
            if (goes_on) {
                Damage damage;
                try {
                    damage = inflate_piece(run, piece, i == begin, i + 1 == end, to, worker);
                } catch (const std::bad_alloc&) {
                    damage.cause = Cause::memory;
                    damage.message = "no memory for inflating";
                }
                if (damage.any()) {
                    goes_on = false;
                    if (!is_cancelled()) record(damage, p);
                } else {
                    bytes_read_.fetch_add(piece.bytes, std::memory_order_relaxed);
                }
            }
            if (!goes_on && to) memset(to, kUnreadable, piece.bytes);
        } else {
            goes_on = false;
        }
        complete(chunk, 1);
    }
}

Damage Load::inflate_piece(const Run& run, const Piece& piece, bool is_first, bool is_last, char* to, Worker& worker) {
    Inflater& inflater = worker.inflater;
    if (is_first) {
        Damage damage = open(run.file, false, worker);
        damage.wanted = run.file_offset + run.stored;
        damage.found = run.file_offset;
        if (damage.any()) return damage;
        // All at once, if that needs no more memory than a usual block.
        constexpr uint64_t kMostScratch = 4 << 20;
        const bool is_whole = piece.bytes == run.bytes && to;
        if (is_last && Inflater::fits(run) && (is_whole || run.bytes <= kMostScratch)) {
            if (is_whole) return inflater.whole(run, worker.file, to);
            worker.scratch.resize(std::max<size_t>(worker.scratch.size(), run.bytes));
            damage = inflater.whole(run, worker.file, worker.scratch.data());
            if (!damage.any() && to) memcpy(to, worker.scratch.data() + piece.offset, piece.bytes);
            return damage;
        }
        damage = inflater.begin(run, worker.file, cancelled_);
        if (damage.any()) return damage;
    }
    Damage damage = inflater.skip_to(piece.offset);
    if (!damage.any()) damage = to ? inflater.produce(to, piece.bytes) : inflater.skip_to(piece.offset + piece.bytes);
    if (!damage.any() && is_last) damage = inflater.finish();
    return damage;
}

void Load::complete(uint32_t chunk, uint32_t pieces) {
    if (pieces_left_[chunk].fetch_sub(pieces, std::memory_order_acq_rel) != pieces) return;
    // A stranded chunk has no copy behind its gate, and its gate may be in use by an earlier chunk: it stays shut.
    if (ring_ && chunk < stranded_from_.load(std::memory_order_acquire)) ring_->set_ready(spans_[chunk].sequence);
    if (chunks_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        std::lock_guard<std::mutex> lock(mutex_);
        filled_.notify_all();
    }
}

Damage Load::open(uint32_t file, bool direct, Worker& worker) const {
    Damage damage;
    if (worker.file.is_open() && worker.load == id_ && worker.file_index == file) return damage;
    worker.load = id_;
    worker.file_index = file;
    damage.error = worker.file.open(plan_.files[file].path, plan_.files[file].inode, direct);
    if (damage.error) damage.cause = Cause::read;
    return damage;
}

void Load::read_piece(uint32_t index, char* to, Worker& worker) {
    const Piece& piece = plan_.pieces[index];
    Damage damage = open(piece.file, piece.direct != 0, worker);
    ReadResult result;
    if (!damage.any()) {
        result = worker.file.read(to, piece.bytes, off_t(piece.offset));
        bytes_read_.fetch_add(result.got, std::memory_order_relaxed);
        if (result.got == piece.bytes) return;
        damage.cause = result.error ? Cause::read : Cause::truncated;
        damage.error = result.error;
    }
    memset(to + result.got, kUnreadable, piece.bytes - result.got);
    damage.wanted = piece.offset + piece.bytes;
    damage.found = piece.offset + result.got;
    record(damage, index);
}

void Load::gather_piece(uint32_t index, char* to) {
    const Piece& piece = plan_.pieces[index];
    const RowSource& source = *plan_.sources[piece.file];
    const auto begun = std::chrono::steady_clock::now();
    const long blocks = blocks_read();
    const Damage damage =
        source.gather(&plan_.rows[piece.offset], piece.bytes / source.row_bytes(), to, gathered_bytes_);
    const auto taken = std::chrono::steady_clock::now() - begun;
    (blocks_read() == blocks ? warm_nanoseconds_ : cold_nanoseconds_)
        .fetch_add(uint64_t(std::chrono::nanoseconds(taken).count()), std::memory_order_relaxed);
    if (!damage.any()) {
        bytes_read_.fetch_add(piece.bytes, std::memory_order_relaxed);
        return;
    }
    memset(to, kUnreadable, piece.bytes);
    record(damage, index);
}

void Load::record(const Damage& damage, uint32_t piece) {
    Failure failure;
    failure.cause = damage.cause;
    failure.code = damage.error;
    failure.piece = piece;
    failure.wanted = damage.wanted;
    failure.found = damage.found;
    failure.message = damage.error == ESTALE             ? "another file took its place while the save was being loaded"
                      : damage.cause == Cause::read      ? strerror(damage.error)
                      : damage.cause == Cause::truncated ? "the file ended early"
                                                         : damage.message;
    record(std::move(failure));
}

bool Load::wait_filled(int64_t milliseconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return filled_.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] { return is_filled(); });
}

void Load::record(Failure failure) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.cause != Cause::none) return;
    failure_ = std::move(failure);
}

Failure Load::failure() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
}

}  // namespace tdgpu
