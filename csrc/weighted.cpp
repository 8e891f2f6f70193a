#include "weighted.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <limits>
#include <string>

#include "error.h"

namespace tdgpu {
namespace {

// How many draws are looked up together, so that their waits for memory overlap.
constexpr uint64_t kBlock = 64;

// Weights as integers.
class Masses {
public:
    Masses(const double* weights, uint64_t n) : weights_(weights), n_(n) {
        const double largest = *std::max_element(weights, weights + n);
        int bits_of_n = 0;
        while (bits_of_n < 64 && (uint128(1) << bits_of_n) < n) bits_of_n++;
        int exponent;
        std::frexp(largest, &exponent);
        // largest < 2^exponent becomes less than 2^(127 - bits_of_n), so that n times that fits.
        shift_ = 127 - bits_of_n - exponent;
        for (uint64_t i = 0; i < n; i++) total_ += of(i);
        excess_ = 0;
        for (uint128 top = total_; top >> 96; top >>= 1) excess_++;
    }

    // All rows'. A column of the table holds as much of n times a row's mass.
    uint128 total() const { return total_; }
    uint128 scaled(uint64_t row) const { return of(row) * n_; }

    // mass / total, as a part of 2^64. mass < total.
    uint64_t part(uint128 mass) const {
        // 96 bits of both are enough for 64 of the quotient, which comes in two digits of 32.
        const uint128 divisor = total_ >> excess_;
        uint128 rest = mass >> excess_;
        if (rest >= divisor) return UINT64_MAX;  // they differ in the bits that were shifted out
        rest <<= 32;
        const uint64_t high = uint64_t(rest / divisor);
        rest = (rest % divisor) << 32;
        return high << 32 | uint64_t(rest / divisor);
    }

private:
    uint128 of(uint64_t row) const {
        int exponent;
        const uint64_t mantissa = uint64_t(std::ldexp(std::frexp(weights_[row], &exponent), 53));
        const int shift = exponent - 53 + shift_;
        if (mantissa == 0 || shift <= -64) return 0;
        return shift >= 0 ? uint128(mantissa) << shift : mantissa >> -shift;
    }

    const double* const weights_;
    const uint64_t n_;
    int shift_, excess_;
    uint128 total_ = 0;
};

// From the exponential distribution with mean 1. A run of falling words that begins with x has an odd length with
// probability exp(-x).
double exponential(Words& words) {
    for (double whole = 0;; whole++) {
        const uint64_t first = words.next();
        uint64_t previous = first;
        bool is_odd = true;
        for (;;) {
            const uint64_t word = words.next();
            if (word >= previous) break;
            previous = word;
            is_odd = !is_odd;
        }
        // The smallest numbers decide who is drawn first: 64 bits of the fraction, and never zero.
        if (is_odd) return whole + (double(first) + 0.5) * 0x1p-64;
    }
}

}  // namespace

uint64_t check_weights(const double* weights, uint64_t n) {
    uint64_t positive = 0;
    for (uint64_t row = 0; row < n; row++) {
        const double weight = weights[row];
        positive += weight > 0;
        if (weight >= 0 && weight <= std::numeric_limits<double>::max()) continue;
        const char* what = std::isnan(weight) ? "not a number" : weight < 0 ? "negative" : "infinite";
        throw Error(Cause::invalid, 0, "the weight of row " + std::to_string(row) + " is " + what);
    }
    if (positive == 0) throw Error(Cause::invalid, 0, "no weight is above zero");
    return positive;
}

void make_table(const double* weights, uint64_t n, Column* table) {
    const Masses masses(weights, n);
    const uint128 capacity = masses.total();
    // Rows that fill no column are met in order; each takes what it lacks from the first row that has too much, until
    // that one fills no column itself and is the next to take. What a row has is computed again when it is met, so no
    // list of rows is kept.
    const auto next_large = [&](uint64_t row) {
        while (row < n && masses.scaled(row) < capacity) row++;
        return row;
    };
    for (uint64_t row = 0; row < n; row++) table[row] = {UINT64_MAX, row};  // whole columns, unless changed below
    uint64_t large = next_large(0);
    assert(large < n);  // the largest weight is not below the mean
    uint128 rest = masses.scaled(large);
    for (uint64_t row = 0; row < n; row++) {
        uint128 mass = masses.scaled(row);
        if (mass >= capacity) continue;
        for (uint64_t small = row;;) {
            table[small] = {masses.part(mass), large};
            rest -= capacity - mass;
            if (rest >= capacity) break;
            small = large;
            mass = rest;
            large = next_large(large + 1);
            // The columns that are left hold exactly what the rows that are left have: one lacks, so one has too much.
            assert(large < n);
            rest = masses.scaled(large);
        }
    }
}

void draw(const Column* table, uint64_t n, const RandomKey& key, uint64_t first, uint64_t stride, uint64_t count,
          int64_t* rows) {
    std::array<uint64_t, kBlock> columns, coins;
    const uint64_t biased = -n % n;  // words whose product has a low half below this would favour some columns
    for (uint64_t begin = 0; begin < count; begin += kBlock) {
        const uint64_t size = std::min(kBlock, count - begin);
        for (uint64_t i = 0; i < size; i++) {
            uint64_t attempt = 0;
            std::array<uint64_t, 4> words;
            do words = philox(key, first + (begin + i) * stride, attempt++);
            while (words[0] * n < biased);
            columns[i] = multiply_high(words[0], n);
            coins[i] = words[1];
            __builtin_prefetch(&table[columns[i]]);
        }
        for (uint64_t i = 0; i < size; i++) {
            const Column& column = table[columns[i]];
            rows[begin + i] = int64_t(coins[i] < column.threshold ? columns[i] : column.alias);
        }
    }
}

void make_ranks(const double* weights, uint64_t first, uint64_t count, const RandomKey& key, double* ranks) {
    for (uint64_t i = 0; i < count; i++) {
        Words words(key, first + i);
        ranks[i] = std::numeric_limits<double>::infinity();
        // What can be drawn stays apart from what cannot, however small its weight.
        if (weights[i] > 0) ranks[i] = std::min(exponential(words) / weights[i], std::numeric_limits<double>::max());
    }
}

}  // namespace tdgpu
