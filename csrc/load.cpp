#include "load.h"

#include <cerrno>
#include <cstring>

#include "patience.h"

namespace tdgpu {
namespace {

std::atomic<uint64_t> next_id{1};

// Bytes that could not be read become 0xFF: NaN in every floating dtype, and never what the memory held before.
constexpr int kUnreadable = 0xFF;

}  // namespace

void Plan::check(uint32_t events, uint64_t largest_chunk) const {
    auto insist = [](bool holds, const char* what) {
        if (!holds) throw Error(Cause::invalid, 0, std::string("the plan is inconsistent: ") + what);
    };
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
            insist(piece.file < files.size(), "a piece has a file that is not there");
            insist(piece.bytes <= chunk.bytes && piece.chunk_offset <= chunk.bytes - piece.bytes,
                   "a piece leaves its chunk");
            insist(piece.file_offset <= INT64_MAX - piece.bytes, "a piece leaves its file");
        }
    }
    insist(next == pieces.size(), "pieces without a chunk");
    insist(!chunks.empty(), "nothing to load");
}

Load::Load(Plan plan, Ring* ring)
    : plan_(std::move(plan)),
      ring_(ring),
      id_(next_id++),
      pieces_left_(new std::atomic<uint32_t>[plan_.chunks.size()]),
      chunks_left_(uint32_t(plan_.chunks.size())) {
    for (size_t c = 0; c < plan_.chunks.size(); c++) pieces_left_[c] = plan_.chunks[c].piece_count;
    if (!ring_) return;
    spans_.reserve(plan_.chunks.size());
    for (const Chunk& chunk : plan_.chunks) spans_.push_back(ring_->claim(chunk.bytes));
}

bool Load::wait_for_place(uint32_t chunk, const std::atomic<bool>& stop) const {
    for (Patience patience;; patience.wait()) {
        if (chunk >= stranded_from_.load(std::memory_order_acquire) || stop.load(std::memory_order_relaxed))
            return false;
        if (ring_->is_freed(spans_[chunk].fill_after)) return true;
    }
}

void Load::fill(uint32_t chunk, uint32_t first, uint32_t last, OpenFile& open, const std::atomic<bool>& stop) {
    const bool has_place = !ring_ || wait_for_place(chunk, stop);
    if (has_place && !is_cancelled()) {
        char* base = ring_ ? ring_->at(spans_[chunk]) : reinterpret_cast<char*>(plan_.chunks[chunk].destination);
        for (uint32_t p = first; p < last; p++) read_piece(p, base + plan_.pieces[p].chunk_offset, open);
    }

    const uint32_t done = last - first;
    if (pieces_left_[chunk].fetch_sub(done, std::memory_order_acq_rel) != done) return;
    // A stranded chunk has no copy behind its gate, and its gate may be in use by an earlier chunk: it stays shut.
    if (ring_ && chunk < stranded_from_.load(std::memory_order_acquire)) ring_->set_ready(spans_[chunk].sequence);
    if (chunks_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        std::lock_guard<std::mutex> lock(mutex_);
        filled_.notify_all();
    }
}

void Load::read_piece(uint32_t index, char* to, OpenFile& open) {
    const Piece& piece = plan_.pieces[index];
    int error = 0;
    if (!open.file.is_open() || open.load != id_ || open.index != piece.file) {
        error = open.file.open(plan_.files[piece.file].path, plan_.files[piece.file].inode, piece.direct != 0);
        open.load = id_;
        open.index = piece.file;
    }
    ReadResult result;
    result.error = error;
    if (!error) result = open.file.read(to, piece.bytes, off_t(piece.file_offset));
    bytes_read_.fetch_add(result.got, std::memory_order_relaxed);
    if (result.got == piece.bytes) return;

    memset(to + result.got, kUnreadable, piece.bytes - result.got);
    Failure failure;
    failure.cause = result.error ? Cause::read : Cause::truncated;
    failure.code = result.error;
    failure.piece = index;
    failure.wanted = piece.file_offset + piece.bytes;
    failure.found = piece.file_offset + result.got;
    failure.message = result.error == ESTALE ? "another file took its place while the save was being loaded"
                      : result.error         ? strerror(result.error)
                                             : "the file ended early";
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
    failed_.store(true, std::memory_order_release);
}

Failure Load::failure() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
}

}  // namespace tdgpu
