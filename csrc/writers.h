// The writer threads. They write memory to files and give places in rings back; they make no CUDA call, and they know
// nothing of Python.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "store.h"

namespace tdgpu {

class Writers {
public:
    explicit Writers(unsigned threads);
    ~Writers() { stop(); }
    Writers(const Writers&) = delete;
    Writers& operator=(const Writers&) = delete;

    unsigned thread_count() const { return unsigned(threads_.size()); }

    // Queues all parts of the store. Stores are served in the order in which they came, but one whose rows are still
    // being copied from a device does not delay those of other devices: no writer waits for a copy.
    void post(std::shared_ptr<Store> store);

    // What is queued ends unwritten; then the threads end.
    void stop();

private:
    struct Work {
        std::shared_ptr<Store> store;
        Store::Share share;
    };
    void run();
    bool find(Work& work);

    std::mutex mutex_;
    std::condition_variable posted_;
    std::deque<std::shared_ptr<Store>> queue_;
    std::atomic<bool> stop_{false};
    std::vector<std::thread> threads_;
};

}  // namespace tdgpu
