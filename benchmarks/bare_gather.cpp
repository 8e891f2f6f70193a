// The floor that a loader on the CPU is compared with: rows of mapped files, copied by threads into one buffer that is
// used for every batch. No queue, no allocation, no checks, no Python; half of a batch's rows for each of two threads.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

#ifdef __x86_64__
// Past the cache, as rows are copied fastest that would push each other out of it.
__attribute__((target("avx2"))) void stream_row(char* to, const char* from, size_t bytes) {
    size_t done = std::min<size_t>(bytes, size_t(-reinterpret_cast<uintptr_t>(to)) & 31);
    memcpy(to, from, done);
    for (; done + 64 <= bytes; done += 64) {
        _mm_prefetch(from + done + 512, _MM_HINT_T0);
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + done));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + done + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + done), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + done + 32), b);
    }
    memcpy(to + done, from + done, bytes - done);
    _mm_sfence();
}
const bool can_stream = __builtin_cpu_supports("avx2");
#else
void stream_row(char* to, const char* from, size_t bytes) {
    memcpy(to, from, bytes);
}
const bool can_stream = false;
#endif

void copy(char* to, const char* rows, const int64_t* index, size_t count, size_t bytes, bool stream) {
    constexpr size_t kAhead = 8;
    for (size_t i = 0; i < count; i++) {
        const char* row = rows + size_t(index[i]) * bytes;
        if (stream) {
            stream_row(to + i * bytes, row, bytes);
            continue;
        }
        if (i + kAhead < count) __builtin_prefetch(rows + size_t(index[i + kAhead]) * bytes);
        memcpy(to + i * bytes, row, bytes);
    }
}

}  // namespace

// Gathers rows index[0..count) of `leaves` leaves, batch by batch, into `buffer`.
extern "C" void bare_gather(const char* const* leaves, const uint64_t* row_bytes, uint32_t leaf_count,
                            const int64_t* index, uint64_t count, uint64_t batch, uint32_t threads, char* buffer) {
    uint64_t batch_bytes = 0;
    for (uint32_t i = 0; i < leaf_count; i++) batch_bytes += row_bytes[i] * batch;
    const bool stream = can_stream && batch_bytes > (4 << 20);
    auto run = [=](uint32_t thread) {
        for (uint64_t begin = 0; begin < count; begin += batch) {
            const uint64_t rows = std::min(batch, count - begin);
            const uint64_t first = rows * thread / threads, last = rows * (thread + 1) / threads;
            char* to = buffer;
            for (uint32_t i = 0; i < leaf_count; i++) {
                copy(to + first * row_bytes[i], leaves[i], index + begin + first, last - first, row_bytes[i], stream);
                to += rows * row_bytes[i];
            }
        }
    };
    std::vector<std::thread> others;
    for (uint32_t i = 1; i < threads; i++) others.emplace_back(run, i);
    run(0);
    for (std::thread& other : others) other.join();
}
