#include "readers.h"

#include <pthread.h>

#include <csignal>
#include <cstdio>

namespace tdgpu {
namespace {

// What one thread takes at a time: enough that the queue's lock is cheap, little enough that all threads share the work
// on one chunk, so that it is ready (and its copy starts) as early as can be.
constexpr uint64_t kTakeBytes = 256 << 10;
constexpr uint32_t kTakePieces = 32;

}  // namespace

Readers::Readers(unsigned threads) {
    // Signals are for the program's own threads: a reader that caught one would interrupt nothing but itself.
    sigset_t all, previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    try {
        for (unsigned i = 0; i < threads; i++) threads_.emplace_back(&Readers::run, this, i);
    } catch (const std::system_error& error) {
        // Limits on threads: fewer will do, none will not.
        if (threads_.empty()) {
            pthread_sigmask(SIG_SETMASK, &previous, nullptr);
            throw Error(Cause::memory, error.code().value(),
                        std::string("no reader thread could be started: ") + error.what());
        }
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

Readers::~Readers() {
    stop();
}

void Readers::post(std::shared_ptr<Load> load) {
    if (load->is_filled()) return;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        queue_.push_back({std::move(load), 0, 0});
    }
    posted_.notify_all();
}

void Readers::cancel() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Cursor& cursor : queue_) cursor.load->cancel();
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
    char name[16];
    snprintf(name, sizeof name, "tdgpu-read-%u", number);
    pthread_setname_np(pthread_self(), name);
    Load::OpenFile open;
    Work work;
    while (take(work, open)) {
        work.load->fill(work.chunk, work.first, work.last, open, stop_);
        work.load.reset();
    }
}

bool Readers::take(Work& work, Load::OpenFile& open) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (queue_.empty()) {
        // Nothing to do: hold no file open meanwhile, so that the user can unmount or delete.
        lock.unlock();
        open.file.close();
        lock.lock();
    }
    posted_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return false;

    Cursor& cursor = queue_.front();
    const Plan& plan = cursor.load->plan();
    const Chunk& chunk = plan.chunks[cursor.chunk];
    const uint32_t end = chunk.first_piece + chunk.piece_count;
    uint64_t bytes = 0;
    uint32_t last = cursor.piece;
    while (last < end && last - cursor.piece < kTakePieces && bytes < kTakeBytes) bytes += plan.pieces[last++].bytes;

    work = {cursor.load, cursor.chunk, cursor.piece, last};
    cursor.piece = last;
    if (last == end && ++cursor.chunk == plan.chunks.size()) queue_.pop_front();
    return true;
}

}  // namespace tdgpu
