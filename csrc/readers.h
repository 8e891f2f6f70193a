// The reader threads. They read files into memory and open gates; they make no CUDA call, so that no lock of the driver
// can stop them, and they know nothing of Python.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "load.h"

namespace tdgpu {

class Readers {
public:
    explicit Readers(unsigned threads);
    ~Readers();  // stop()
    Readers(const Readers&) = delete;
    Readers& operator=(const Readers&) = delete;

    unsigned thread_count() const { return unsigned(threads_.size()); }

    // Queues all of the load's chunks. Throws Error(cancelled) after stop(). Loads are served in the order in which
    // they came, except that a load has at most as many threads as its plan allows.
    void post(std::shared_ptr<Load> load);

    // What is queued or under way need not be read any more. Chunks still wait for their places and open their gates in
    // order.
    void cancel();

    // Opens the gates of every queued chunk at once, then ends and joins the threads.
    void stop();

private:
    // What one thread does at a time: plain pieces of one chunk, or a whole run.
    struct Work {
        std::shared_ptr<Load> load;
        uint32_t chunk = 0, first = 0, last = 0;
        uint32_t run = 0;  // its number + 1; 0: plain pieces
    };
    void run(unsigned number);
    bool take(unsigned number, Work& work, Worker& worker);

    std::mutex mutex_;
    std::condition_variable posted_;
    struct Cursor {
        std::shared_ptr<Load> load;
        uint32_t chunk = 0, piece = 0;
    };
    static bool take_from(Cursor& cursor, Work& work);
    std::deque<Cursor> queue_;
    std::vector<Load*> working_;  // by thread: what it works on, or null
    std::atomic<bool> stop_{false};
    std::vector<std::thread> threads_;
};

}  // namespace tdgpu
