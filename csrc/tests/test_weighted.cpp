// Alias tables have the weights' probabilities, draws stay within the table, and what cannot be drawn is not. That
// probabilities are exact, and draws follow them, is in tests/test_weighted.py.
#include "weighted.h"

#include <cmath>
#include <limits>

#include "check.h"

using namespace tdgpu;

namespace {

const RandomKey kKey{0x0123456789abcdef, 0xfedcba9876543210};

std::vector<double> probabilities(const std::vector<Column>& table) {
    std::vector<double> found(table.size());
    for (size_t i = 0; i < table.size(); i++) {
        const double own = std::ldexp(double(table[i].threshold), -64);
        found[i] += own / double(table.size());
        assert(table[i].alias < table.size());
        found[table[i].alias] += (1 - own) / double(table.size());
    }
    return found;
}

void expect_table(const std::vector<double>& weights) {
    std::vector<Column> table(weights.size());
    make_table(weights.data(), weights.size(), table.data());
    const auto found = probabilities(table);
    long double total = 0;
    for (double weight : weights) total += weight;
    for (size_t i = 0; i < weights.size(); i++) assert(std::abs(found[i] - double(weights[i] / total)) < 1e-12);

    std::vector<int64_t> rows(1000), some(300);
    draw(table.data(), table.size(), kKey, 0, 1, rows.size(), rows.data());
    for (int64_t row : rows) assert(row >= 0 && size_t(row) < weights.size() && weights[size_t(row)] > 0);
    draw(table.data(), table.size(), kKey, 7, 3, some.size(), some.data());
    for (size_t i = 0; i < some.size(); i++) assert(some[i] == rows[7 + 3 * i]);
    draw(table.data(), table.size(), kKey, UINT64_MAX - 299, 1, some.size(), some.data());
}

void expect_tables() {
    const double least = std::numeric_limits<double>::denorm_min(), most = std::numeric_limits<double>::max();
    for (const std::vector<double>& weights : std::vector<std::vector<double>>{{1},
                                                                               {least},
                                                                               {most},
                                                                               {0, 1},
                                                                               {1, 0},
                                                                               {1, 1, 1},
                                                                               {most, least, 0, most},
                                                                               {least, least, 0},
                                                                               {1, 1e-30, 1e30}})
        expect_table(weights);
    check::Random random(1);
    for (size_t n : {2, 3, 64, 65, 1000, 4099}) {
        std::vector<double> weights(n);
        for (double& weight : weights) weight = random() % 4 ? std::exp(double(random() % 40)) : 0;
        weights[n / 2] = 1;
        expect_table(weights);
    }
}

void expect_ranks() {
    const std::vector<double> weights{1, 0, 2, std::numeric_limits<double>::denorm_min(), 0.5};
    std::vector<double> ranks(5), last(2);
    make_ranks(weights.data(), 0, 5, kKey, ranks.data());
    assert(std::isinf(ranks[1]) && ranks[3] == std::numeric_limits<double>::max());
    for (size_t i : {0, 2, 4}) assert(ranks[i] > 0 && ranks[i] < 100);
    make_ranks(weights.data() + 3, 3, 2, kKey, last.data());
    assert(last[0] == ranks[3] && last[1] == ranks[4]);
}

void expect_refusals() {
    const double infinite = std::numeric_limits<double>::infinity();
    for (double bad : {-1.0, -infinite, infinite, std::nan("")}) {
        const std::vector<double> weights{1, 0, bad};
        try {
            check_weights(weights.data(), weights.size());
            assert(false);
        } catch (const Error& error) {
            assert(error.cause == Cause::invalid && std::string(error.what()).find("row 2") != std::string::npos);
        }
    }
    const std::vector<double> weights{0, -0.0, 0, 5};
    assert(check::cause_of([&] { check_weights(weights.data(), 3); }) == Cause::invalid);
    assert(check_weights(weights.data(), 4) == 1);
}

}  // namespace

int main() {
    expect_tables();
    expect_ranks();
    expect_refusals();
    puts("weighted: ok");
}
