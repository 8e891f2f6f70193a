#include "residency.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace tdgpu {

std::atomic<uint64_t> resident_budget{kResidentBudget};

namespace residency {
namespace {

std::atomic<int64_t> touched{0};  // windows

// Where the page cache holds a file in large folios, one fault maps more than a window: up to 2 MiB (seen on Linux 6.18
// with ext4). So the system is asked now and then how much is resident, and what windows do not explain counts, too.
constexpr int64_t kLookAfterWindows = 16;
constexpr int64_t kOthers = 4 << 20;  // what others in this process may have touched meanwhile
std::atomic<int64_t> touched_at_look{0};
std::atomic<int64_t> resident_at_begin{-1};
std::atomic<int64_t> unexplained{0};  // bytes

// Bytes of files and shared memory that are resident in this process; -1 where the system does not tell.
int64_t resident_bytes() {
    const int descriptor = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return -1;
    char text[128];
    const ssize_t length = read(descriptor, text, sizeof text - 1);
    close(descriptor);
    if (length <= 0) return -1;
    text[length] = 0;
    long long size = 0, resident = 0, shared = 0;
    if (sscanf(text, "%lld %lld %lld", &size, &resident, &shared) != 3) return -1;
    return shared * sysconf(_SC_PAGESIZE);
}

void look() {
    const int64_t windows = touched.load(std::memory_order_relaxed);
    touched_at_look.store(windows, std::memory_order_relaxed);
    const int64_t now = resident_bytes(), before = resident_at_begin.load(std::memory_order_relaxed);
    if (now < 0 || before < 0) return;
    const int64_t explained = before + windows * int64_t(kWindow) + kOthers;
    unexplained.store(std::max<int64_t>(0, now - explained), std::memory_order_relaxed);
}

}  // namespace

void add_touched(int64_t windows) {
    const int64_t now = touched.fetch_add(windows, std::memory_order_relaxed) + windows;
    if (now - touched_at_look.load(std::memory_order_relaxed) >= kLookAfterWindows) look();
}

void remove_touched(int64_t windows) {
    touched.fetch_sub(windows, std::memory_order_relaxed);
}

void begin_anew() {
    touched_at_look.store(0, std::memory_order_relaxed);
    unexplained.store(0, std::memory_order_relaxed);
    resident_at_begin.store(resident_bytes(), std::memory_order_relaxed);
}

bool is_used_up() {
    const int64_t windows = std::max<int64_t>(touched.load(std::memory_order_relaxed), 0);
    const uint64_t bytes = uint64_t(windows) * kWindow + uint64_t(unexplained.load(std::memory_order_relaxed));
    return bytes > resident_budget.load(std::memory_order_relaxed);
}

}  // namespace residency
}  // namespace tdgpu
