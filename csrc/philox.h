// Random numbers that are a function of a key and a place: no state, so any place can be asked for first.
//
// The generator is Philox4x64-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
// from which its constants are; the authors report that it passes TestU01's BigCrush. Tested here: its words equal
// those of numpy's Philox.
#pragma once

#include <array>
#include <cstdint>

namespace tdgpu {

__extension__ using uint128 = unsigned __int128;

// What orders and draws depend on. Python makes it of a seed and an epoch by a cryptographic hash, so that neighbouring
// seeds have nothing in common.
using RandomKey = std::array<uint64_t, 2>;

// The high half of the product. Of random words it makes numbers below `b`.
inline uint64_t multiply_high(uint64_t a, uint64_t b) {
    return uint64_t((uint128(a) * b) >> 64);
}

// Four words for each of 2^128 places.
inline std::array<uint64_t, 4> philox(const RandomKey& key, uint64_t place, uint64_t subplace) {
    std::array<uint64_t, 4> x{place, subplace, 0, 0};
    RandomKey k = key;
    for (int round = 0; round < 10; round++) {
        const uint128 a = uint128(x[0]) * 0xd2e7470ee14c6c93;
        const uint128 b = uint128(x[2]) * 0xca5a826395121157;
        x = {uint64_t(b >> 64) ^ x[1] ^ k[0], uint64_t(b), uint64_t(a >> 64) ^ x[3] ^ k[1], uint64_t(a)};
        k[0] += 0x9e3779b97f4a7c15;
        k[1] += 0xbb67ae8584caa73b;
    }
    return x;
}

// The words of one place, one after the other.
class Words {
public:
    Words(const RandomKey& key, uint64_t place) : key_(key), place_(place) {}

    uint64_t next() {
        if (at_ == 4) {
            words_ = philox(key_, place_, block_++);
            at_ = 0;
        }
        return words_[at_++];
    }

    // Below `n`, which is not zero, and unbiased (Lemire: "Fast random integer generation in an interval", 2019).
    uint64_t below(uint64_t n) {
        for (;;) {
            const uint128 product = uint128(next()) * n;
            // Of the 2^64 words, the 2^64 mod n that would favour some results are drawn again.
            if (uint64_t(product) >= n || uint64_t(product) >= -n % n) return uint64_t(product >> 64);
        }
    }

private:
    const RandomKey key_;
    const uint64_t place_;
    uint64_t block_ = 0;
    std::array<uint64_t, 4> words_{};
    unsigned at_ = 4;
};

}  // namespace tdgpu
