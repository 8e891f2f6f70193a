#include "store.h"

#include <climits>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace tdgpu {
namespace {

// What one thread takes at a time: many small parts go out in one call; a large leaf in several, so that giving up is
// heard and other leaves have their turn.
constexpr uint64_t kTakeBytes = 8 << 20;
constexpr uint32_t kTakeParts = IOV_MAX;

// The parts of one file together, in the order in which they came.
std::vector<Part> by_file(const std::vector<Part>& parts, uint32_t files) {
    std::vector<size_t> places(size_t(files) + 1);
    for (const Part& part : parts) {
        if (part.file >= files) throw Error(Cause::invalid, 0, "a part of a file that does not exist");
        places[part.file + 1]++;
    }
    for (uint32_t i = 0; i < files; i++) places[i + 1] += places[i];
    std::vector<Part> sorted(parts.size());
    for (const Part& part : parts) sorted[places[part.file]++] = part;
    return sorted;
}

}  // namespace

Store::Store(std::shared_ptr<GrowingFiles> files, const std::vector<Part>& parts, std::vector<StoredChunk> chunks)
    : files_(std::move(files)),
      parts_(by_file(parts, files_->count())),
      chunks_(std::move(chunks)),
      left_(uint32_t(parts_.size())) {
    parts_left_ = std::make_unique<std::atomic<uint32_t>[]>(chunks_.size());
    for (size_t i = 0; i < chunks_.size(); i++) parts_left_[i] = 0;
    for (const Part& part : parts_) {
        if (part.chunk > chunks_.size()) throw Error(Cause::invalid, 0, "a part of a chunk that does not exist");
        if (part.chunk) parts_left_[part.chunk - 1]++;
    }
    uint32_t files_seen = 0;
    for (size_t i = 0; i < parts_.size(); i++) files_seen += i == 0 || parts_[i].file != parts_[i - 1].file;
    runs_ = std::vector<Run>(files_seen);
    uint32_t run = 0;
    for (uint32_t i = 0; i < parts_.size(); i++) {
        if (i > 0 && parts_[i].file != parts_[i - 1].file) runs_[++run].next = i;
        runs_[run].end = i + 1;
    }
    for (size_t i = 0; i < chunks_.size(); i++) {
        if (parts_left_[i] == 0) throw Error(Cause::invalid, 0, "a chunk that nothing is written from");
    }
}

bool Store::is_copied(const Part& part) const {
    return !part.chunk || chunks_[part.chunk - 1].outlet->is_copied(chunks_[part.chunk - 1].chunk);
}

bool Store::will_never_be(const Part& part) const {
    return part.chunk && chunks_[part.chunk - 1].outlet->is_broken();
}

Store::Taken Store::take(Share& share, bool stop) {
    while (first_run_ < runs_.size() && runs_[first_run_].next == runs_[first_run_].end) first_run_++;
    for (uint32_t i = first_run_; i < runs_.size(); i++) {
        if (runs_[i].next == runs_[i].end || runs_[i].has_writer) continue;
        share = take_from(i, stop);
        if (share.first < share.last) {
            runs_[i].has_writer = true;
            return Taken::some;
        }
    }
    return first_run_ < runs_.size() ? Taken::none_yet : Taken::all;
}

Store::Share Store::take_from(uint32_t run, bool stop) {
    uint32_t& next = runs_[run].next;
    Share share{next, next, run};
    uint64_t bytes = 0;
    while (next < runs_[run].end && next - share.first < kTakeParts && bytes < kTakeBytes) {
        const Part& part = parts_[next];
        if (next > share.first && part.offset != parts_[next - 1].offset + parts_[next - 1].bytes) break;
        // What is given up is taken, too: its places must be given back.
        if (!stop && !cancelled_ && !will_never_be(part) && !is_copied(part)) break;
        bytes += part.bytes;
        next++;
    }
    share.last = next;
    return share;
}

void Store::write(const Share& share, bool stop) {
    const uint32_t first = share.first, last = share.last;
    std::vector<iovec> vectors;
    vectors.reserve(last - first);
    uint64_t wanted = 0;
    bool is_there = !stop && !cancelled_;
    for (uint32_t i = first; i < last; i++) {
        is_there = is_there && is_copied(parts_[i]);
        vectors.push_back({reinterpret_cast<void*>(parts_[i].address), parts_[i].bytes});
        wanted += parts_[i].bytes;
    }
    const uint32_t file = parts_[first].file;
    if (!is_there) {
        record({ECANCELED, file, wanted, 0});
        cancel();
    } else {
        const WriteResult result = files_->write(file, vectors.data(), int(vectors.size()), parts_[first].offset);
        bytes_written_ += result.done;
        if (result.error) {
            record({result.error, file, wanted, result.done});
            cancel();
        }
    }
    runs_[share.run].has_writer = false;
    complete(first, last);
}

void Store::complete(uint32_t first, uint32_t last) {
    for (uint32_t i = first; i < last; i++) {
        const uint32_t number = parts_[i].chunk;
        if (number && parts_left_[number - 1].fetch_sub(1) == 1) {
            chunks_[number - 1].outlet->set_written(chunks_[number - 1].chunk);
        }
    }
    std::lock_guard<std::mutex> lock(mutex_);
    left_ -= last - first;
    if (left_ == 0) written_.notify_all();
}

bool Store::wait(int64_t milliseconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return written_.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] { return left_ == 0; });
}

void Store::record(StoreFailure failure) {
    std::lock_guard<std::mutex> lock(mutex_);
    // What went wrong first, but rather than that something was given up because of it.
    if (failure_.error == 0 || (failure_.error == ECANCELED && failure.error != ECANCELED)) failure_ = failure;
}

StoreFailure Store::failure() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
}

}  // namespace tdgpu
