// Rows drawn by weight. What draw `k` gives depends on the key and on k alone, so that draws can begin anywhere.
// Integers, and floating-point operations that IEEE 754 rounds in one way only: the rows are the same on every machine.
#pragma once

#include <cstdint>

#include "philox.h"

namespace tdgpu {

// How many rows can be drawn at all. Throws Error(invalid), naming the row, for a weight that is negative, infinite or
// not a number, and if none is above zero. The other functions take weights that have passed.
uint64_t check_weights(const double* weights, uint64_t n);

// One column of an alias table (Walker 1977; Vose 1991): the row that it is named after if the coin, 64 random bits, is
// below `threshold`, else `alias`. Part of the C ABI.
struct Column {
    uint64_t threshold;
    uint64_t alias;
};

// Fills a table of `n` columns, in O(n) time and no memory beside it. The weights are taken as integers of
// 127 - ceil(log2 n) bits, relative to the largest, and all but the thresholds is exact from there. So, up to 2^31
// rows, each row's probability is within 2^-62 of its weight's part of all weights; a weight of zero has exactly zero.
void make_table(const double* weights, uint64_t n, Column* table);

// The rows that the draws first, first + stride, ... give. Columns are chosen without bias.
void draw(const Column* table, uint64_t n, const RandomKey& key, uint64_t first, uint64_t stride, uint64_t count,
          int64_t* rows);

// For draws without replacement: an exponential random number of each row's, divided by its weight (infinite for a
// weight of zero). The order of the results is that in which rows are drawn (Efraimidis and Spirakis, 2006). The
// numbers come from comparisons of random words (von Neumann, 1951): a library's logarithm differs between machines.
// Exact within the rounding of a double for weights between 1e-306 and 1e287; beyond, results can be equal. For the
// rows from `first` on, whose weights `weights` points to.
void make_ranks(const double* weights, uint64_t first, uint64_t count, const RandomKey& key, double* ranks);

}  // namespace tdgpu
