// Events that are used again, and how long copies take by such events.
#pragma once

#include <mutex>
#include <vector>

#include "driver.h"

namespace tdgpu {

// Events of one kind, of one context. An event that is recorded anew does not disturb a wait that was enqueued on it
// before (read: the driver API's manual, cuEventRecord), so events may come back although the device has not come to
// them.
class EventPool {
public:
    EventPool(Driver& driver, unsigned flags) : driver_(driver), flags_(flags) {}

    CUevent take();  // the context is current
    void give_back(CUevent event);

private:
    Driver& driver_;
    const unsigned flags_;
    std::mutex mutex_;
    std::vector<CUevent> spare_;
};

// How long the copies of one load take, by the device's clock: without what the copy stream waits for before each.
// It has nothing else of the load, so whoever is to ask for it later keeps neither memory nor files. Any thread may
// ask.
class CopyTimes {
public:
    // Needs events that are made with kEventDefault.
    CopyTimes(Driver& driver, CUcontext context, EventPool& events)
        : driver_(driver), context_(context), events_(events) {}
    ~CopyTimes();

    // Before and behind each copy; one without an end does not count. Both throw Error.
    void begin(CUstream stream);
    void end(CUstream stream);
    void complete();  // no copy will follow

    // The sum, once all copies are over; negative before. Never waits. What a broken device cannot tell counts nothing.
    double seconds();

private:
    struct Copy {
        CUevent begin, end;  // `end` is null until it is recorded
    };

    CUevent recorded(CUstream stream);
    bool are_over() const;
    void give_back();

    Driver& driver_;
    const CUcontext context_;
    EventPool& events_;
    std::mutex mutex_;
    std::vector<Copy> copies_;
    bool is_complete_ = false, is_known_ = false;
    double seconds_ = 0;
};

}  // namespace tdgpu
