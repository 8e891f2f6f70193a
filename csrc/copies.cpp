#include "copies.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>

namespace tdgpu {
namespace {

// From here on a copy of our own. The C library's takes the processor's string copy for such rows, which is 4 times
// slower on some processors where source and destination are a few bytes apart in their pages.
constexpr uint64_t kWideRow = 2048;
// From here on a batch's bytes go past the caches: they would not stay there until somebody reads them, and to write
// past the caches saves reading the destination first. Below, it costs more than it saves.
constexpr uint64_t kStreamBytes = 4 << 20;

// How a row begins; the processor sees by itself how a longer one goes on.
void prefetch(const char* row, uint64_t row_bytes) {
    const uint64_t bytes = std::min<uint64_t>(row_bytes, 1024);
    for (uint64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

template <class Copy>
void copy_each(const char* base, uint64_t row_bytes, const int64_t* rows, size_t count, char* to, Copy copy) {
    // Several rows are asked of memory while one is copied.
    const size_t ahead = row_bytes <= 256 ? 16 : 4;
    for (size_t i = 0; i < count; i++) {
        if (i + ahead < count) prefetch(base + uint64_t(rows[i + ahead]) * row_bytes, row_bytes);
        copy(to + i * row_bytes, base + uint64_t(rows[i]) * row_bytes);
    }
}

// A size that the compiler knows needs no call.
template <uint64_t kBytes>
void copy_narrow(const char* base, const int64_t* rows, size_t count, char* to) {
    copy_each(base, kBytes, rows, count, to, [](char* d, const char* s) { memcpy(d, s, kBytes); });
}

#ifdef __x86_64__
template <bool kStreams>
__attribute__((target("avx2"))) void copy_avx2(char* to, const char* from, uint64_t bytes) {
    if (bytes < 64) {
        memcpy(to, from, bytes);
        return;
    }
    // What is not aligned at both ends is written over by, or writes over, its neighbours with the same bytes.
    const __m256i head = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i tail = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + bytes - 32));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), head);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + bytes - 32), tail);
    const auto store = [](char* where, __m256i what) __attribute__((target("avx2"))) {
        if (kStreams)
            _mm256_stream_si256(reinterpret_cast<__m256i*>(where), what);
        else
            _mm256_store_si256(reinterpret_cast<__m256i*>(where), what);
    };
    uint64_t at = -uintptr_t(to) & 31;
    for (; at + 128 <= bytes; at += 128) {
        // Prefetching behind the row's end is harmless: such addresses are not accessed.
        _mm_prefetch(from + at + 512, _MM_HINT_T0);
        _mm_prefetch(from + at + 576, _MM_HINT_T0);
        const auto* s = reinterpret_cast<const __m256i*>(from + at);
        const __m256i a = _mm256_loadu_si256(s), b = _mm256_loadu_si256(s + 1);
        const __m256i c = _mm256_loadu_si256(s + 2), d = _mm256_loadu_si256(s + 3);
        store(to + at, a);
        store(to + at + 32, b);
        store(to + at + 64, c);
        store(to + at + 96, d);
    }
    for (; at + 32 <= bytes; at += 32) store(to + at, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at)));
}
#endif

void copy_wide(char* to, const char* from, uint64_t bytes, bool streams) {
#ifdef __x86_64__
    static const bool has_avx2 = __builtin_cpu_supports("avx2");
    if (has_avx2) {
        streams ? copy_avx2<true>(to, from, bytes) : copy_avx2<false>(to, from, bytes);
        return;
    }
#endif
    (void)streams;
    memcpy(to, from, bytes);
}

}  // namespace

bool streams_pay(uint64_t row_bytes, uint64_t together) {
    return row_bytes >= kWideRow && together >= kStreamBytes;
}

void end_streaming() {
#ifdef __x86_64__
    _mm_sfence();
#endif
}

size_t run_length(const int64_t* rows, size_t count) {
    size_t length = 1;
    while (length < count && rows[length] == rows[length - 1] + 1) length++;
    return length;
}

void copy_rows(const char* base, uint64_t row_bytes, const int64_t* rows, size_t count, char* to, bool streams) {
    size_t neighbours = 0;
    for (size_t i = 1; i < count; i++) neighbours += rows[i] == rows[i - 1] + 1;
    // Where rows follow each other, one copy takes all of them. Narrow rows want it only where that is the rule.
    if (row_bytes >= kWideRow || neighbours * 2 > count) {
        for (size_t i = 0; i < count;) {
            const size_t length = run_length(rows + i, count - i);
            if (i + length < count) prefetch(base + uint64_t(rows[i + length]) * row_bytes, row_bytes);
            copy_wide(to + i * row_bytes, base + uint64_t(rows[i]) * row_bytes, length * row_bytes, streams);
            i += length;
        }
        return;
    }
    switch (row_bytes) {
        case 1:
            return copy_narrow<1>(base, rows, count, to);
        case 2:
            return copy_narrow<2>(base, rows, count, to);
        case 4:
            return copy_narrow<4>(base, rows, count, to);
        case 8:
            return copy_narrow<8>(base, rows, count, to);
        case 16:
            return copy_narrow<16>(base, rows, count, to);
        case 32:
            return copy_narrow<32>(base, rows, count, to);
        case 64:
            return copy_narrow<64>(base, rows, count, to);
        default:
            copy_each(base, row_bytes, rows, count, to,
                      [row_bytes](char* d, const char* s) { memcpy(d, s, row_bytes); });
    }
}

}  // namespace tdgpu
