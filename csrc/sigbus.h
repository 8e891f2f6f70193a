// Reading mapped files that may shrink: where a page of the file is gone, the system sends SIGBUS, which ends the
// process. Inside a guard it becomes something that can be asked about afterwards.
//
// The handler is the process's, so it is a guest there: whatever is not a fault inside a guard goes to the handler that
// was there before, or to the system's default, as if this one did not exist.
#pragma once

#include <atomic>
#include <cstddef>

namespace tdgpu {

// Puts the handler in place, unless it is there. False: the process has no room left for it, and nothing may be
// guarded.
bool install_sigbus_handler();

// While it lives, the thread that made it may read [begin, begin + bytes), a private use of a mapping that nobody else
// unmaps. One at a time per thread.
//
// A page that cannot be had sets `lost` to the address that was wanted (the first one stays), and only then are zeros
// mapped in place of the whole range. So a thread that read such zeros, whether or not the signal was its own, finds
// `lost` set afterwards, if it looks behind a fence. Zeros stay until the range is unmapped.
class SigbusGuard {
public:
    SigbusGuard(char* begin, size_t bytes, std::atomic<const char*>& lost);
    ~SigbusGuard();
    SigbusGuard(const SigbusGuard&) = delete;
    SigbusGuard& operator=(const SigbusGuard&) = delete;

    // False: the system had no memory for it, and the range must not be read.
    bool holds() const { return holds_; }

    // --- the handler ---
    bool covers(const void* address) const;
    bool replace(const void* address);

private:
    char* const begin_;
    const size_t bytes_;
    std::atomic<const char*>& lost_;
    bool holds_;
};

}  // namespace tdgpu
