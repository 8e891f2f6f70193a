// What is done for every batch: only rows that are there are gathered, each chunk where it belongs, past the caches or
// not.
#include "gather.h"

#include <numeric>

#include "check.h"
#include "check_rows.h"
#include "copies.h"
#include "readers.h"

using namespace tdgpu;
using check::are_right;
using check::random_rows;

namespace {

constexpr uint32_t kCount = 100;

// Two leaves of so many rows of random bytes.
struct Leaves {
    std::vector<uint64_t> row_bytes;
    std::vector<std::vector<char>> bytes;
    Plan plan;  // a chunk for each leaf, one behind the other

    explicit Leaves(std::vector<uint64_t> widths, std::vector<uint64_t> rows, uint32_t count) : row_bytes(widths) {
        uint64_t place = 0;
        for (uint32_t i = 0; i < widths.size(); i++) {
            bytes.push_back(check::random_bytes(widths[i] * rows[i], i));
            plan.sources.push_back(std::make_shared<const RowSource>(bytes[i].data(), widths[i], rows[i]));
            Piece piece{};
            piece.bytes = count * widths[i];
            piece.file = i;
            piece.run = Piece::kGathered;
            Chunk chunk{};
            chunk.destination = place;
            chunk.bytes = piece.bytes;
            chunk.first_piece = i;
            chunk.piece_count = 1;
            plan.pieces.push_back(piece);
            plan.chunks.push_back(chunk);
            place += piece.bytes;
        }
    }
};

bool is_refused(const Gather& gather, const std::vector<int64_t>& rows, uint32_t addresses = 1) {
    const std::vector<uint64_t> places(addresses, 4096);
    try {
        gather.plan(rows.data(), places.data(), addresses);
    } catch (const Error& error) {
        return error.cause == Cause::invalid;
    }
    return false;
}

template <class Change>
bool is_no_gather(const Leaves& leaves, Change change) {
    Plan plan = leaves.plan;
    change(plan);
    try {
        Gather gather(plan, kCount);
    } catch (const Error& error) {
        return error.cause == Cause::invalid;
    }
    return false;
}

void test_batches_come_one_after_the_other() {
    const Leaves leaves({24, 1000}, {700, 500}, kCount);
    const Gather gather(leaves.plan, kCount);
    Readers readers(2);
    std::vector<std::vector<int64_t>> rows;
    std::vector<std::vector<char>> places;
    std::vector<std::shared_ptr<Load>> loads;
    for (unsigned batch = 0; batch < 20; batch++) {
        rows.push_back(random_rows(kCount, 500, batch));
        places.emplace_back(kCount * 1024);
        const uint64_t address = reinterpret_cast<uint64_t>(places.back().data());
        loads.push_back(std::make_shared<Load>(gather.plan(rows.back().data(), &address, 1), nullptr));
        readers.post(loads.back());
    }
    for (size_t batch = 0; batch < loads.size(); batch++) {
        assert(loads[batch]->wait_filled(60000));
        assert(loads[batch]->failure().cause == Cause::none);
        const char* to = places[batch].data();
        assert(are_right(to, rows[batch], leaves.bytes[0].data(), 24));
        assert(are_right(to + kCount * 24, rows[batch], leaves.bytes[1].data(), 1000));
    }
}

void test_each_chunk_may_have_a_place_of_its_own() {
    const Leaves leaves({24, 1000}, {700, 500}, kCount);
    const Gather gather(leaves.plan, kCount);
    const auto rows = random_rows(kCount, 500, 1);
    std::vector<char> first(kCount * 24), second(kCount * 1000);
    const uint64_t places[2] = {reinterpret_cast<uint64_t>(first.data()),
                                reinterpret_cast<uint64_t>(second.data()) - kCount * 24};
    Load load(gather.plan(rows.data(), places, 2), nullptr);
    Worker worker;
    const std::atomic<bool> stop{false};
    for (uint32_t chunk = 0; chunk < 2; chunk++) load.fill(chunk, chunk, chunk + 1, worker, stop);
    assert(load.is_filled());
    assert(are_right(first.data(), rows, leaves.bytes[0].data(), 24));
    assert(are_right(second.data(), rows, leaves.bytes[1].data(), 1000));
}

void test_rows_that_are_not_there_are_refused() {
    const Leaves leaves({24, 1000}, {700, 500}, kCount);
    const Gather gather(leaves.plan, kCount);
    std::vector<int64_t> rows(kCount);
    std::iota(rows.begin(), rows.end(), 400);
    assert(!is_refused(gather, rows));
    rows.back() = 500;  // the first leaf has it
    assert(is_refused(gather, rows));
    rows.back() = -1;
    assert(is_refused(gather, rows));
    rows.back() = INT64_MIN;
    assert(is_refused(gather, rows));
    rows.back() = 0;
    assert(!is_refused(gather, rows, 2) && is_refused(gather, rows, 0) && is_refused(gather, rows, 3));
}

void test_what_does_not_fit_together_is_refused() {
    const Leaves leaves({24, 1000}, {700, 500}, kCount);
    assert(!is_no_gather(leaves, [](Plan&) {}));
    assert(is_no_gather(leaves, [](Plan& plan) { plan.pieces[0].run = 0; }));
    assert(is_no_gather(leaves, [](Plan& plan) { plan.pieces[1].file = 2; }));
    assert(is_no_gather(leaves, [](Plan& plan) { plan.pieces[1].offset = 1; }));
    assert(is_no_gather(leaves, [](Plan& plan) { plan.chunks[0].bytes -= 1; }));
    assert(is_no_gather(leaves, [](Plan& plan) { plan.chunks.pop_back(); }));
    assert(is_no_gather(leaves, [](Plan& plan) { plan.chunks.clear(); }));
    bool refused = false;
    try {
        Gather gather(leaves.plan, 0);
    } catch (const Error&) {
        refused = true;
    }
    assert(refused);
}

// Parts of a large batch go past the caches although each of them is small: the bytes are the same.
void test_parts_of_a_large_batch() {
    assert(!streams_pay(4096, 1 << 20) && streams_pay(4096, 8 << 20) && !streams_pay(64, 8 << 20));
    for (const uint64_t row_bytes : {uint64_t(2048), uint64_t(4099), uint64_t(70001)}) {
        const uint64_t rows = (1 << 20) / row_bytes;
        const auto bytes = check::random_bytes(rows * row_bytes, row_bytes);
        const RowSource source(bytes.data(), row_bytes, rows);
        for (const size_t odd : {0, 1, 31}) {
            const auto picked = random_rows(10, rows, unsigned(odd));
            std::vector<char> to(odd + picked.size() * row_bytes + 64, 0x55);
            assert(!source.gather(picked.data(), picked.size(), to.data() + odd, 64 << 20).any());
            assert(are_right(to.data() + odd, picked, bytes.data(), row_bytes));
            for (size_t i = 0; i < odd; i++) assert(to[i] == 0x55);
            for (size_t i = to.size() - 64; i < to.size(); i++) assert(to[i] == 0x55);
        }
    }
}

}  // namespace

int main() {
    test_batches_come_one_after_the_other();
    test_each_chunk_may_have_a_place_of_its_own();
    test_rows_that_are_not_there_are_refused();
    test_what_does_not_fit_together_is_refused();
    test_parts_of_a_large_batch();
    puts("gather: ok");
}
