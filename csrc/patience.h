// How to poll a word that the device writes: nobody can be notified of that.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace tdgpu {

// Short naps first, since on a fast link a place in the ring is free within microseconds; long ones later, so that a
// load behind a long kernel costs next to nothing.
class Patience {
public:
    void wait() {
        if (turns_++ < 32) {
            std::this_thread::yield();
        } else {
            nap_ = std::min(nap_ + std::chrono::microseconds(5), std::chrono::microseconds(500));
            std::this_thread::sleep_for(nap_);
        }
    }

private:
    int turns_ = 0;
    std::chrono::microseconds nap_{0};
};

}  // namespace tdgpu
