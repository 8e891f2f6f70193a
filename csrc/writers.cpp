#include "writers.h"

#include <algorithm>
#include <chrono>

#include "threads.h"

namespace tdgpu {

Writers::Writers(unsigned threads) {
    threads_ = start_threads(threads, "tdgpu-write", [this](unsigned) { run(); });
}

void Writers::post(std::shared_ptr<Store> store) {
    if (store->wait(0)) return;  // it has no parts
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (stop_) throw Error(Cause::cancelled, 0, "the writers have ended");
        queue_.push_back(std::move(store));
    }
    posted_.notify_all();
}

void Writers::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true);
    }
    posted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

bool Writers::find(Work& work) {
    for (size_t i = 0; i < queue_.size();) {
        const Store::Taken taken = queue_[i]->take(work.share, stop_);
        if (taken == Store::Taken::some) {
            work.store = queue_[i];
            return true;
        }
        if (taken == Store::Taken::all)
            queue_.erase(queue_.begin() + std::ptrdiff_t(i));
        else
            i++;
    }
    return false;
}

void Writers::run() {
    // Nobody says when a copy is over, so that is looked at again and again while rows are being copied.
    constexpr std::chrono::microseconds kShortest(5), kLongest(500);
    std::chrono::microseconds nap = kShortest;
    for (;;) {
        Work work;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            posted_.wait(lock, [&] { return stop_ || !queue_.empty(); });
            if (!find(work)) {
                if (queue_.empty() && stop_) return;
                if (!queue_.empty()) posted_.wait_for(lock, nap);
                nap = std::min(nap * 2, kLongest);
                continue;
            }
        }
        nap = kShortest;
        work.store->write(work.share, stop_);
    }
}

}  // namespace tdgpu
