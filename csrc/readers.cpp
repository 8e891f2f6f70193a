#include "readers.h"

#include "threads.h"

namespace tdgpu {
namespace {

// What one thread takes at a time: enough that the queue's lock is cheap, little enough that all threads share the work
// on one chunk, so that it is ready (and its copy starts) as early as can be.
constexpr uint64_t kTakeBytes = 256 << 10;
constexpr uint32_t kTakePieces = 32;

}  // namespace

Readers::Readers(unsigned threads) {
    working_.resize(threads);
    threads_ = start_threads(threads, "tdgpu-read", [this](unsigned number) { run(number); });
}

Readers::~Readers() {
    stop();
}

void Readers::post(std::shared_ptr<Load> load) {
    if (load->is_filled()) return;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (stop_) throw Error(Cause::cancelled, 0, "the readers have ended");
        queue_.push_back({std::move(load), 0, 0});
    }
    posted_.notify_all();
}

void Readers::cancel() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Cursor& cursor : queue_) cursor.load->cancel();
    for (Load* load : working_) {
        if (load) load->cancel();
    }
}

void Readers::stop() {
    cancel();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true);
    }
    posted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

void Readers::run(unsigned number) {
    Worker worker;
    Work work;
    while (take(number, work, worker)) {
        if (work.run)
            work.load->inflate(work.run - 1, worker, stop_);
        else
            work.load->fill(work.chunk, work.first, work.last, worker, stop_);
    }
}

bool Readers::take(unsigned number, Work& work, Worker& worker) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::shared_ptr<Load> last = std::move(work.load);
    if (last) {
        working_[number] = nullptr;
        last->workers--;
    }
    auto find = [&] {
        for (size_t i = 0; i < queue_.size();) {
            const bool has_work = take_from(queue_[i], work);
            if (queue_[i].chunk == queue_[i].load->chunk_count()) {
                queue_.erase(queue_.begin() + std::ptrdiff_t(i));
                // Who waited for this load to have room for one more has nothing left to wait for.
                if (stop_) posted_.notify_all();
            } else {
                i++;
            }
            if (has_work) {
                working_[number] = work.load.get();
                return true;
            }
        }
        return false;
    };
    bool has_work = find();
    // Another thread may take this one's place at a load that was full.
    if (last && last != work.load && last->plan().most_threads != UINT32_MAX) posted_.notify_one();
    last.reset();
    if (has_work) return true;
    // Nothing to do: hold no memory meanwhile, and no file, so that the user can unmount or delete.
    lock.unlock();
    worker.rest();
    lock.lock();
    posted_.wait(lock, [&] { return (has_work = find()) || (stop_ && queue_.empty()); });
    return has_work;
}

bool Readers::take_from(Cursor& cursor, Work& work) {
    Load& load = *cursor.load;
    if (load.workers >= load.plan().most_threads) return false;
    const std::vector<Piece>& pieces = load.plan().pieces;
    work = {cursor.load, cursor.chunk, 0, 0, 0};
    while (cursor.chunk < load.chunk_count() && !work.last && !work.run) {
        const Chunk& chunk = load.plan().chunks[cursor.chunk];
        const uint32_t end = chunk.first_piece + chunk.piece_count;
        uint32_t& next = cursor.piece;
        if (pieces[next].is_inflated()) {
            // A run goes to whoever comes to its first piece; the others are that thread's, too.
            if (load.begins_run(next)) work.run = pieces[next].run;
            next++;
        } else {
            work.chunk = cursor.chunk;
            work.first = next;
            uint64_t bytes = 0;
            while (next < end && !pieces[next].is_inflated() && next - work.first < kTakePieces && bytes < kTakeBytes)
                bytes += pieces[next++].bytes;
            work.last = next;
        }
        if (next == end) cursor.chunk++;
    }
    const bool has_work = work.last || work.run;
    if (has_work)
        load.workers++;
    else
        work.load.reset();
    return has_work;
}

}  // namespace tdgpu
