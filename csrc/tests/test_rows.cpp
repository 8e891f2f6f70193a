// Rows come as they are in the file, from whichever source, or with a reason why not: also from a file that shrinks.
#include "rows.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <thread>

#include "check_rows.h"
#include "residency.h"
#include "threads.h"

using namespace tdgpu;
using check::are_right, check::expect_right, check::random_rows;

namespace {

// --- right bytes -----------------------------------------------------------------------------------------------------

void rows_come_as_they_are() {
    const check::RandomFile file((12 << 20) + 17);
    for (const size_t row_bytes : {1, 2, 3, 8, 16, 32, 33, 64, 1000, 2048, 4096, 5000, 70'000, 150 << 10, 9 << 20}) {
        for (const size_t offset : {size_t(0), size_t(13)}) {
            const size_t rows = std::min<size_t>((file.bytes.size() - offset) / row_bytes, 100'000);
            const RowSource source(file.path, 0, offset, row_bytes, rows);
            const RowSource in_memory(file.bytes.data() + offset, row_bytes, rows);
            assert(source.rows() == rows && source.row_bytes() == row_bytes);
            // Random ones with repeats; neighbours; the first and the last; enough for several blocks, and for copies
            // past the caches.
            const size_t count =
                row_bytes > 1 << 20 ? 2 : std::min<size_t>(2500, (offset == 13 ? 5 << 20 : 1 << 20) / row_bytes);
            std::vector<int64_t> picked = random_rows(count, rows, unsigned(row_bytes));
            picked.push_back(int64_t(rows) - 1);
            picked.push_back(0);
            std::vector<int64_t> neighbours;
            for (size_t i = 0; i < std::min<size_t>(rows, count); i++) neighbours.push_back(int64_t(i));
            neighbours.push_back(0);
            expect_right(source, file.bytes.data() + offset, picked, offset % 2);
            expect_right(in_memory, file.bytes.data() + offset, picked, 0);
            expect_right(source, file.bytes.data() + offset, neighbours, 3);
            picked.resize(picked.size() / 16);
            for (const size_t odd : {0, 1, 31, 63}) expect_right(source, file.bytes.data() + offset, picked, odd);
        }
    }
}

void several_threads_share_a_source(uint64_t budget) {
    const check::RandomFile file(3 << 20);
    resident_budget = budget;
    for (const size_t row_bytes : {64, 5000}) {
        const RowSource source(file.path, 0, 3, row_bytes, (file.bytes.size() - 3) / row_bytes);
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < 4; t++)
            threads.emplace_back([&, t] {
                for (unsigned i = 0; i < 10; i++)
                    expect_right(source, file.bytes.data() + 3, random_rows(200, source.rows(), t * 100 + i), t);
            });
        for (std::thread& thread : threads) thread.join();
    }
    resident_budget = kResidentBudget;
}

void nothing_is_not_much() {
    const check::RandomFile file(100), empty(0);
    const int64_t rows[] = {0, 1};
    char to = 0x55;
    assert(!RowSource(file.path, 0, 0, 10, 10).gather(rows, 0, &to).any());
    assert(!RowSource(file.path, 0, 50, 0, 10).gather(rows, 2, &to).any());
    assert(!RowSource(empty.path, 0, 0, 10, 0).gather(rows, 0, &to).any());
    assert(!RowSource(nullptr, 10, 0).gather(rows, 0, &to).any());
    assert(to == 0x55);
}

void rows_of_a_file_that_cannot_be_mapped_are_read() {
    mmap_function = [](void*, size_t, int, int, int, off_t) {
        errno = ENODEV;
        return MAP_FAILED;
    };
    check::RandomFile file(100'000);
    const RowSource source(file.path, 0, 5, 300, 333);
    mmap_function = &::mmap;
    expect_right(source, file.bytes.data() + 5, random_rows(500, 333, 1), 1);
    expect_right(source, file.bytes.data() + 5, {0, 1, 2, 3, 332, 331}, 0);

    std::vector<char> to(600);
    const int64_t rows[] = {1, 300};
    assert(truncate(file.path.c_str(), 1000) == 0);
    Damage damage = source.gather(rows, 2, to.data());
    assert(damage.cause == Cause::truncated && damage.wanted == 5 + 301 * 300 && damage.found < damage.wanted);
    const check::RandomFile other(100'000);
    assert(unlink(file.path.c_str()) == 0);
    damage = source.gather(rows, 2, to.data());
    assert(damage.cause == Cause::read && damage.error == ENOENT);
    assert(link(other.path.c_str(), file.path.c_str()) == 0);
    damage = source.gather(rows, 2, to.data());
    assert(damage.cause == Cause::read && damage.error == ESTALE);
}

// --- files that are not as they were ---------------------------------------------------------------------------------

void expect_refused(const std::string& path, uint64_t inode, uint64_t offset, uint64_t row_bytes, uint64_t rows,
                    Cause cause, int code) {
    try {
        RowSource(path, inode, offset, row_bytes, rows);
    } catch (const Error& error) {
        assert(error.cause == cause && error.code == code && strstr(error.what(), path.c_str()));
        return;
    }
    assert(false);
}

void what_does_not_fit_is_refused() {
    const check::RandomFile file(10'000);
    struct stat status;
    assert(stat(file.path.c_str(), &status) == 0);
    RowSource(file.path, status.st_ino, 1, 99, 101);
    expect_refused(file.path, status.st_ino + 1, 0, 1, 1, Cause::read, ESTALE);
    expect_refused(file.path, 0, 2, 99, 101, Cause::truncated, 0);
    expect_refused(file.path, 0, 10'001, 1, 0, Cause::truncated, 0);
    expect_refused(file.path, 0, 0, uint64_t(1) << 33, uint64_t(1) << 31, Cause::truncated, 0);
    expect_refused(file.path, 0, UINT64_MAX, 1, 1, Cause::truncated, 0);
    expect_refused(file.path + ".not", 0, 0, 1, 1, Cause::read, ENOENT);
    expect_refused("/tmp", 0, 0, 1, 1, Cause::read, EISDIR);
    const std::string pipe = file.path + ".pipe";
    assert(mkfifo(pipe.c_str(), 0600) == 0);
    expect_refused(pipe, 0, 0, 1, 1, Cause::read, ENOTSUP);
    unlink(pipe.c_str());
}

// Once found too short, it stays an error, also for rows that the file still has, and if it grows again.
void a_truncated_file_stays_an_error() {
    // Where it ends: within the last page; within another page, whose other half reads as zeros; before all rows.
    for (const off_t size : {99'999, 50'000, 49'152, 0}) {
        const check::RandomFile file(100'000);
        const RowSource source(file.path, 0, 0, 100, 1000);
        std::vector<char> to(1000 * 100);
        expect_right(source, file.bytes.data(), random_rows(1000, 1000, 1), 0);
        assert(truncate(file.path.c_str(), size) == 0);
        const std::vector<int64_t> last = {5, 999};
        Damage damage = source.gather(last.data(), 2, to.data());
        assert(damage.cause == Cause::truncated && damage.found == uint64_t(size));
        assert(damage.wanted > damage.found && damage.wanted <= 100'000);
        assert(truncate(file.path.c_str(), 100'000) == 0);
        const int64_t first = 0;
        damage = source.gather(&first, 1, to.data());
        assert(damage.cause == Cause::truncated && damage.found == uint64_t(size));
    }
    // A row where the file now ends, and no other.
    const check::RandomFile file(100'000);
    const RowSource source(file.path, 0, 0, 100, 1000);
    assert(truncate(file.path.c_str(), 50'050) == 0);
    const int64_t row = 500;
    char to[100];
    assert(source.gather(&row, 1, to).cause == Cause::truncated);
}

void a_file_that_lost_its_name_keeps_its_rows() {
    check::RandomFile file(50'000);
    const RowSource source(file.path, 0, 0, 50, 1000);
    const check::RandomFile other(10, 2);
    unlink(file.path.c_str());
    expect_right(source, file.bytes.data(), random_rows(100, 1000, 3), 0);
    assert(link(other.path.c_str(), file.path.c_str()) == 0);
    expect_right(source, file.bytes.data(), {999, 0}, 0);
}

// Threads gather while the file is cut: every gather has the right bytes, or says that the file is too short.
void a_file_is_truncated_while_threads_gather() {
    check::Random random(5);
    const check::RandomFile original(1 << 20);
    for (unsigned round = 0; round < 32; round++) {
        const size_t row_bytes = std::vector<size_t>{3, 1000, 5000, 70'000}[round % 4];
        // In every other four, most rows are read.
        resident_budget = round / 4 % 2 ? 4 * kWindow : kResidentBudget;
        const std::string path = check::new_file();
        const int descriptor = open(path.c_str(), O_WRONLY);
        assert(write(descriptor, original.bytes.data(), 1 << 20) == 1 << 20);
        const size_t rows = (1 << 20) / row_bytes;
        const RowSource source(path, 0, 0, row_bytes, rows);
        std::atomic<unsigned> begun{0};
        // As the core's threads: with all signals blocked.
        std::vector<std::thread> threads = start_threads(3, "gather", [&](unsigned number) {
            std::vector<char> to(200 * row_bytes);
            for (unsigned i = 0;; i++) {
                const std::vector<int64_t> picked = random_rows(200, rows, round * 10'000 + number * 1000 + i);
                const Damage damage = source.gather(picked.data(), picked.size(), to.data());
                if (i == 0) begun++;
                if (damage.any()) {
                    assert(damage.cause == Cause::truncated && damage.wanted > damage.found);
                    return;
                }
                assert(are_right(to.data(), picked, original.bytes.data(), row_bytes));
            }
        });
        while (begun < 3) std::this_thread::yield();
        usleep(unsigned(random() % 2000));
        assert(ftruncate(descriptor, off_t(random() % (768 << 10))) == 0);
        for (std::thread& thread : threads) thread.join();  // all of them find out
        close(descriptor);
        unlink(path.c_str());
    }
    resident_budget = kResidentBudget;
}

}  // namespace

int main() {
    rows_come_as_they_are();
    several_threads_share_a_source(kResidentBudget);
    several_threads_share_a_source(8 * kWindow);
    nothing_is_not_much();
    rows_of_a_file_that_cannot_be_mapped_are_read();
    what_does_not_fit_is_refused();
    a_truncated_file_stays_an_error();
    a_file_that_lost_its_name_keeps_its_rows();
    a_file_is_truncated_while_threads_gather();
    puts("rows: ok");
}
