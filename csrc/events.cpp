#include "events.h"

namespace tdgpu {

CUevent EventPool::take() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!spare_.empty()) {
            CUevent event = spare_.back();
            spare_.pop_back();
            return event;
        }
    }
    CUevent event = nullptr;
    driver_.check(driver_.EventCreate(&event, flags_), "cuEventCreate");
    return event;
}

void EventPool::give_back(CUevent event) {
    std::lock_guard<std::mutex> lock(mutex_);
    spare_.push_back(event);
}

CopyTimes::~CopyTimes() {
    give_back();
}

void CopyTimes::begin(CUstream stream) {
    CUevent event = recorded(stream);
    std::lock_guard<std::mutex> lock(mutex_);
    copies_.push_back({event, nullptr});
}

void CopyTimes::end(CUstream stream) {
    CUevent event = recorded(stream);
    std::lock_guard<std::mutex> lock(mutex_);
    copies_.back().end = event;
}

CUevent CopyTimes::recorded(CUstream stream) {
    CUevent event = events_.take();
    const CUresult result = driver_.EventRecord(event, stream);
    if (result != kCudaSuccess) {
        events_.give_back(event);
        driver_.fail(result, "cuEventRecord");
    }
    return event;
}

void CopyTimes::complete() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_complete_ = true;
}

double CopyTimes::seconds() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_known_) return seconds_;
    if (!is_complete_) return -1;
    CurrentContext current(driver_, context_);
    if (!are_over()) return -1;
    for (const Copy& copy : copies_) {
        float milliseconds = 0;
        const bool is_told = copy.end && driver_.EventElapsedTime(&milliseconds, copy.begin, copy.end) == kCudaSuccess;
        if (is_told) seconds_ += double(milliseconds) / 1000;
    }
    is_known_ = true;
    give_back();
    return seconds_;
}

bool CopyTimes::are_over() const {
    // One stream copies in order, so the last one says it for all. An error is not to be waited for.
    for (auto copy = copies_.rbegin(); copy != copies_.rend(); ++copy) {
        if (copy->end) return driver_.EventQuery(copy->end) != kCudaNotReady;
    }
    return true;
}

void CopyTimes::give_back() {
    for (const Copy& copy : copies_) {
        events_.give_back(copy.begin);
        if (copy.end) events_.give_back(copy.end);
    }
    copies_.clear();
}

}  // namespace tdgpu
