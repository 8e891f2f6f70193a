// Orders are bijections, the same as elsewhere, and their ends hold. Their statistics are in tests/test_orders.py, with
// the independent implementation that the rows below were computed by once.
#include "permutation.h"

#include <algorithm>
#include <numeric>

#include "check.h"

using namespace tdgpu;

namespace {

const RandomKey kKey{0x0123456789abcdef, 0xfedcba9876543210};
constexpr uint64_t kMost = INT64_MAX;

std::vector<int64_t> taken(uint64_t n, uint64_t first, uint64_t stride, uint64_t count) {
    std::vector<int64_t> rows(count);
    permute(n, kKey, first, stride, count, rows.data());
    return rows;
}

void expect_bijection(const std::vector<int64_t>& rows) {
    std::vector<char> seen(rows.size());
    for (int64_t row : rows) {
        assert(row >= 0 && row < int64_t(rows.size()) && !seen[size_t(row)]);
        seen[size_t(row)] = 1;
    }
}

void expect_published() {
    const std::array<uint64_t, 4> words{0x7e71d2cea5290aae, 0x8644e50c74672e75, 0x4d3cbd7232b2f4ef, 0x4c960cbbe35e1141};
    assert(philox(kKey, 5, 7) == words);
    assert((taken(10, 0, 1, 10) == std::vector<int64_t>{4, 6, 5, 2, 8, 3, 9, 0, 7, 1}));
    assert((taken(5000, 0, 1, 2) == std::vector<int64_t>{2494, 3973}) && taken(5000, 4999, 1, 1)[0] == 4708);
    assert((taken(1'000'000'000'000, 0, 999'999'999'999, 2) == std::vector<int64_t>{263698155771, 532612039996}));
    assert((taken(kMost, 0, 1, 2) == std::vector<int64_t>{8640540971053758305, 5038815920137670441}));
    assert((taken(kMost, 0, kMost - 1, 2) == std::vector<int64_t>{8640540971053758305, 7462266968706240786}));
}

// Smaller domains than `permute` uses it for: nothing in it depends on the size.
void expect_bijections_of_the_network() {
    for (uint64_t n = 2; n <= 3000; n += n < 300 ? 1 : 13) {
        std::vector<int64_t> rows(n);
        Network(n, {n, 1}).map(0, 1, n, rows.data());
        expect_bijection(rows);
    }
}

void expect_bijections() {
    for (uint64_t n : {1, 2, 3, 255, 4095, 4096, 4097, 8191, 8192, 8193, 65537}) {
        const auto rows = taken(n, 0, 1, n);
        expect_bijection(rows);
        for (uint64_t stride : {2, 7, 300}) {
            const auto some = taken(n, n / 2, stride, (n - n / 2 + stride - 1) / stride);
            for (size_t i = 0; i < some.size(); i++) assert(some[i] == rows[n / 2 + i * stride]);
        }
    }
}

void expect_a_shuffle_in_steps() {
    for (uint64_t n : {1, 2, 3, 1000, 5001}) {
        std::vector<int64_t> whole(n);
        std::iota(whole.begin(), whole.end(), 0);
        const std::vector<int64_t> unshuffled = whole;
        shuffle_steps(whole.data(), n, kKey, 0, n);
        expect_bijection(whole);
        assert(n < 1000 || whole != unshuffled);
        // However it is cut into calls, and what is settled stays.
        for (uint64_t step : {1, 3, 4, 7, 1000}) {
            std::vector<int64_t> rows = unshuffled;
            for (uint64_t begin = 0; begin < n; begin += step) {
                shuffle_steps(rows.data(), n, kKey, begin, std::min(begin + step, n));
                assert(
                    std::equal(whole.begin(), whole.begin() + std::ptrdiff_t(std::min(begin + step, n)), rows.begin()));
            }
        }
        if (n >= 1000) {
            std::vector<int64_t> other = unshuffled;
            shuffle_steps(other.data(), n, {kKey[0], kKey[1] + 1}, 0, n);
            assert(other != whole);
        }
    }
}

void expect_refusals() {
    int64_t row = 77;
    const auto cause = [&](uint64_t n, uint64_t first, uint64_t stride, uint64_t count) {
        return check::cause_of([&] { permute(n, kKey, first, stride, count, &row); });
    };
    for (uint64_t n : {uint64_t(10), uint64_t(5000), kMost}) {
        assert(cause(n, n, 1, 1) == Cause::invalid && cause(n, UINT64_MAX, 1, 1) == Cause::invalid);
        assert(cause(n, n - 1, 1, 2) == Cause::invalid && cause(n, 0, UINT64_MAX, 3) == Cause::invalid);
        assert(cause(n, 0, 1, UINT64_MAX) == Cause::invalid && cause(n, 0, 0, 1) == Cause::invalid);
        assert(cause(n, 5, 1, 0) == Cause::none);
    }
    assert(cause(0, 0, 1, 0) == Cause::invalid && cause(kMost + 1, 0, 1, 1) == Cause::invalid);
    assert(row == 77);
}

}  // namespace

int main() {
    expect_published();
    expect_bijections_of_the_network();
    expect_bijections();
    expect_a_shuffle_in_steps();
    expect_refusals();
    puts("permutation: ok");
}
