#include "permutation.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "error.h"

namespace tdgpu {
namespace {

// How many positions are mapped together: first all, then those that came out too large, so that no branch is guessed.
constexpr uint64_t kBlock = 256;

// Parts of the key's numbers: what one of them draws does not depend on how much the other does.
constexpr uint64_t kRoundKeys = 0, kShuffle = 1;

void shuffle(uint64_t n, const RandomKey& key, std::array<uint16_t, kShuffled>& rows) {
    Words words(key, kShuffle);
    for (uint64_t i = 0; i < n; i++) rows[i] = uint16_t(i);
    for (uint64_t i = n; i > 1; i--) std::swap(rows[i - 1], rows[words.below(i)]);
}

int bits_of(uint64_t x) {
    return x == 0 ? 0 : 64 - __builtin_clzll(x);
}

}  // namespace

Network::Network(uint64_t n, const RandomKey& key) : n_(n) {
    assert(n >= 2 && n <= uint64_t(INT64_MAX));
    low_bits_ = std::max(1, bits_of(n - 1) / 2);
    highs_ = ((n - 1) >> low_bits_) + 1;
    Words words(key, kRoundKeys);
    for (uint64_t& k : keys_) k = words.next();
}

uint64_t Network::once(uint64_t x) const {
    // The highest bits of the second product depend on all bits of `part` and `k`: the shift brings those down that the
    // first product carried up.
    const auto mixed = [](uint64_t part, uint64_t k) {
        const uint64_t t = (part ^ k) * 0xbf58476d1ce4e5b9;
        return (t ^ (t >> 31)) * 0x94d049bb133111eb;
    };
    uint64_t low = x & ((uint64_t(1) << low_bits_) - 1), high = x >> low_bits_;
    for (int round = 0; round < kRounds; round += 2) {
        high += multiply_high(mixed(low, keys_[round]), highs_);
        high = std::min(high, high - highs_);  // modulo highs_: what is below zero is huge
        low ^= mixed(high, keys_[round + 1]) >> (64 - low_bits_);
    }
    return high << low_bits_ | low;
}

void Network::map(uint64_t first, uint64_t stride, uint64_t count, int64_t* rows) const {
    std::array<uint16_t, kBlock> outside;  // those that must be mapped again
    for (uint64_t begin = 0; begin < count; begin += kBlock) {
        const unsigned size = unsigned(std::min(kBlock, count - begin));
        int64_t* const block = rows + begin;
        unsigned left = 0;
        for (unsigned i = 0; i < size; i++) {
            const uint64_t x = once(first + (begin + i) * stride);
            block[i] = int64_t(x);
            outside[left] = uint16_t(i);
            left += x >= n_;
        }
        while (left) {
            unsigned kept = 0;
            for (unsigned j = 0; j < left; j++) {
                const uint16_t i = outside[j];
                const uint64_t x = once(uint64_t(block[i]));
                block[i] = int64_t(x);
                outside[kept] = i;
                kept += x >= n_;
            }
            left = kept;
        }
    }
}

void permute(uint64_t n, const RandomKey& key, uint64_t first, uint64_t stride, uint64_t count, int64_t* rows) {
    if (n == 0 || n > uint64_t(INT64_MAX)) throw Error(Cause::invalid, 0, "the number of rows is not in [1, 2^63)");
    if (stride == 0) throw Error(Cause::invalid, 0, "the stride is 0");
    if (count == 0) return;
    if (first >= n || count - 1 > (n - 1 - first) / stride)
        throw Error(Cause::invalid, 0, "positions are not all below " + std::to_string(n));
    if (n > kShuffled) return Network(n, key).map(first, stride, count, rows);
    std::array<uint16_t, kShuffled> all;
    shuffle(n, key, all);
    for (uint64_t i = 0; i < count; i++) rows[i] = all[first + i * stride];
}

void shuffle_steps(int64_t* rows, uint64_t n, const RandomKey& key, uint64_t begin, uint64_t end) {
    std::array<uint64_t, 4> words{};
    for (uint64_t i = begin; i < end; i++) {
        // Four steps share the words of a place; a word that would favour some rows is drawn again elsewhere.
        if (i == begin || i % 4 == 0) words = philox(key, i / 4, 0);
        const uint64_t left = n - i;
        uint128 product = uint128(words[i % 4]) * left;
        for (uint64_t again = 1; uint64_t(product) < left && uint64_t(product) < -left % left; again++)
            product = uint128(philox(key, i, again)[0]) * left;
        std::swap(rows[i], rows[i + uint64_t(product >> 64)]);
    }
}

}  // namespace tdgpu
