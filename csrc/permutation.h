// The rows in random order, without a list of them: a permutation of [0, n) that is computed where it is asked for, in
// O(1) memory, from a key.
//
// Up to kShuffled rows it is a shuffle: Fisher and Yates's, as Durstenfeld wrote it down (1964), with unbiased random
// numbers of the key's, so that every one of the n! orders is as likely as any other.
//
// Beyond, it is a Feistel network of kRounds rounds. It maps numbers of two parts, of which the low one has half the
// bits of n - 1 and the high one as many values as n needs: a round changes one part by what it makes of the other, by
// exclusive or, or by addition modulo the number of values. The few numbers that are mapped to n or more (one in 64 at
// most) are mapped again ("cycle walking"). For small domains that would not do: it knows far fewer orders than there
// are. One trace of that is left at any n: whether an order is even or odd hardly depends on the key. To see that takes
// all n rows.
//
// From the literature: that a network of random functions is a random permutation to who sees few of its values (Luby
// and Rackoff, 1988), and that cycle walking keeps it one on [0, n) (Black and Rogaway, 2002). The round function (two
// multiplications, with the constants of SplitMix64's finaliser as David Stafford tuned it, and a shift) is fast rather
// than cryptographic, so what those theorems say of random functions is no proof here.
//
// Tested: bijections (all n up to 3000 rows, larger n around powers of two); each position's row, the rows of positions
// 1 to n / 2 apart (pairs, differences, correlation), the effect of single bits of the position, and how far orders of
// other seeds and epochs agree, by chi-square and the like (tests/test_orders.py). With two rounds and with four these
// tests fail, with six they pass; two more are for what they do not see.
//
// Where eight bytes a row can be had, a shuffle of any number of rows, made only as far as it is asked for.
//
// Integers only: the orders are the same on every machine.
#pragma once

#include <cstdint>

#include "philox.h"

namespace tdgpu {

class Network {
public:
    // 2 <= n < 2^63.
    Network(uint64_t n, const RandomKey& key);

    // The images of the positions first, first + stride, ..., which are all below n.
    void map(uint64_t first, uint64_t stride, uint64_t count, int64_t* rows) const;

    static constexpr int kRounds = 8;

private:
    uint64_t once(uint64_t x) const;

    uint64_t n_;
    int low_bits_;
    uint64_t highs_;  // values of the high part
    std::array<uint64_t, kRounds> keys_;
};

constexpr uint64_t kShuffled = 4096;

// The rows at the positions first, first + stride, ... of [0, n): `count` of them, to `rows`. A call costs the shuffle
// of all n rows up to kShuffled, so ask for many at a time. Throws Error(invalid): n is 0 or above 2^63 - 1, stride is
// 0, a position is not below n.
void permute(uint64_t n, const RandomKey& key, uint64_t first, uint64_t stride, uint64_t count, int64_t* rows);

// Steps `begin` to `end` of a shuffle of n rows, in whose list rows 0 to n - 1 stand at first: each settles one
// position, and so they may be taken when they are needed, in order. All n! orders are as likely as each other.
void shuffle_steps(int64_t* rows, uint64_t n, const RandomKey& key, uint64_t begin, uint64_t end);

}  // namespace tdgpu
