// Touched pages do not pile up: beyond the budget rows are read instead, and are as right as those that are mapped; and
// rows that are not in memory are asked for at once.
#include "residency.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>

#include "check_rows.h"

using namespace tdgpu;
using check::expect_right, check::has_ended_with, check::random_rows;

namespace {

// --- memory ----------------------------------------------------------------------------------------------------------

uint64_t resident_file_bytes() {
    FILE* status = fopen("/proc/self/status", "r");
    assert(status);
    char line[256];
    unsigned long kib = 0;
    while (fgets(line, sizeof line, status))
        if (sscanf(line, "RssFile: %lu kB", &kib) == 1) break;
    fclose(status);
    return uint64_t(kib) << 10;
}

void touched_pages_do_not_pile_up() {
    constexpr uint64_t kFile = 96 << 20, kBudget = 8 << 20;
    const std::string path = check::new_file();
    assert(truncate(path.c_str(), kFile) == 0);
    resident_budget = kBudget;
    {
        const RowSource idle(path, 0, 0, 4096, kFile / 4096);
        const uint64_t before = resident_file_bytes();
        uint64_t most = 0;
        std::vector<char> to(kFile);
        const auto look = [&] {
            most = std::max(most, resident_file_bytes() - std::min(before, resident_file_bytes()));
        };
        const auto touch_all = [&](const RowSource& source, size_t calls) {
            std::vector<int64_t> rows(source.rows());
            for (size_t i = 0; i < rows.size(); i++) rows[i] = int64_t(i * 7919 % rows.size());
            for (size_t c = 0; c < calls; c++) {
                const size_t first = rows.size() * c / calls, end = rows.size() * (c + 1) / calls;
                assert(!source.gather(rows.data() + first, end - first, to.data()).any());
                look();
            }
        };
        touch_all(idle, 200);
        touch_all(RowSource(path, 0, 0, 150 << 10, kFile / (150 << 10)), 1);
        touch_all(RowSource(path, 0, 0, kFile, 1), 1);
        // Two blocks of 8 MiB may be under way, and a block of rows that are far apart.
        printf("residency: %lu MiB touched, at most %lu MiB resident\n", 3 * kFile >> 20, most >> 20);
        assert(most < kBudget + (24 << 20));
    }
    resident_budget = kResidentBudget;
    unlink(path.c_str());
}

// A row that is larger than a block is cut, and what is left of it may be narrow: it is none of the narrow rows.
void large_rows_beyond_the_budget_arrive() {
    resident_budget = kWindow;
    for (const uint64_t row_bytes : {(uint64_t(8) << 20) + 16'000, (uint64_t(8) << 20) + 1, uint64_t(9) << 20}) {
        constexpr uint64_t kRows = 4;
        const std::string path = check::new_file();
        const std::vector<char> bytes = check::random_bytes(row_bytes * kRows, row_bytes);
        {
            const int descriptor = open(path.c_str(), O_WRONLY | O_CLOEXEC);
            assert(descriptor >= 0 && write(descriptor, bytes.data(), bytes.size()) == ssize_t(bytes.size()));
            close(descriptor);
        }
        const RowSource source(path, 0, 0, row_bytes, kRows);
        std::vector<char> to(row_bytes + 4096, 'e');
        for (int round = 0; round < 2; round++) {
            for (const int64_t row : {3, 0, 2, 1}) {
                assert(!source.gather(&row, 1, to.data()).any());
                assert(!memcmp(to.data(), &bytes[uint64_t(row) * row_bytes], row_bytes));
                for (size_t i = row_bytes; i < to.size(); i++) assert(to[i] == 'e');
            }
        }
        unlink(path.c_str());
    }
    resident_budget = kResidentBudget;
}

// The page cache may hold what was written in large pieces so that one fault maps much more than a window.
void large_folios_do_not_pile_up_either() {
    constexpr uint64_t kFile = 256 << 20, kBudget = 32 << 20;
    const std::string path = check::new_file();
    {
        const std::vector<char> bytes(kFile, 'x');
        const int descriptor = open(path.c_str(), O_WRONLY | O_CLOEXEC);
        assert(descriptor >= 0 && write(descriptor, bytes.data(), kFile) == ssize_t(kFile));
        close(descriptor);
    }
    resident_budget = kBudget;
    {
        const RowSource source(path, 0, 0, 32 << 10, kFile / (32 << 10));
        const uint64_t before = resident_file_bytes();
        uint64_t most = 0;
        std::vector<int64_t> rows(source.rows());
        for (size_t i = 0; i < rows.size(); i++) rows[i] = int64_t(i * 7919 % rows.size());
        std::vector<char> to(8 * (32 << 10));
        for (size_t first = 0; first < rows.size(); first += 8) {
            assert(!source.gather(&rows[first], 8, to.data()).any());
            most = std::max(most, resident_file_bytes() - std::min(before, resident_file_bytes()));
        }
        printf("residency: of %lu MiB in large folios at most %lu MiB resident\n", kFile >> 20, most >> 20);
        assert(most < kBudget + (52 << 20));  // 16 faults of 2 MiB until somebody looks, and a block of 8
    }
    resident_budget = kResidentBudget;
    unlink(path.c_str());
}

// --- rows that are read, as the budget is used up --------------------------------------------------------------------

std::atomic<size_t> reads{0};

// Counts the reads while it lives, and gives a small budget.
struct SmallBudget {
    explicit SmallBudget(uint64_t windows) {
        reads = 0;
        resident_budget = windows * kWindow;
        pread_function = [](int descriptor, void* to, size_t bytes, off_t offset) {
            reads++;
            return ::pread(descriptor, to, bytes, offset);
        };
    }
    ~SmallBudget() {
        pread_function = &::pread;
        resident_budget = kResidentBudget;
    }
};

// One row of each of the first windows, one call each, until no more may be touched.
void use_up_budget(const RowSource& source, size_t windows) {
    std::vector<char> to(source.row_bytes());
    for (size_t i = 0; i <= windows; i++) {
        const int64_t row = int64_t(i * kWindow / source.row_bytes());
        assert(!source.gather(&row, 1, to.data()).any());
    }
}

int64_t row_of_window(const RowSource& source, size_t window) {
    return int64_t((window * kWindow + kWindow / 2) / source.row_bytes());
}

// Anew, page by page: of what was written in larger parts the system may keep, and then map, larger parts together.
void write_by_pages(const check::RandomFile& file) {
    const int descriptor = open(file.path.c_str(), O_WRONLY | O_TRUNC);
    assert(descriptor >= 0 && file.bytes.size() % 4096 == 0);
    for (size_t at = 0; at < file.bytes.size(); at += 4096)
        assert(pwrite(descriptor, file.bytes.data() + at, 4096, off_t(at)) == 4096);
    close(descriptor);
}

void rows_beyond_the_budget_are_read() {
    const check::RandomFile file(24 << 20);
    write_by_pages(file);
    for (const size_t row_bytes : {1, 1000, 4096, 16 << 10}) {
        const SmallBudget budget(64);
        const RowSource source(file.path, 0, 5, row_bytes, (file.bytes.size() - 5) / row_bytes);
        const uint64_t before = resident_file_bytes();
        uint64_t most = before;
        const size_t calls = 100, count = 20;
        for (unsigned c = 0; c < calls; c++) {
            expect_right(source, file.bytes.data() + 5, random_rows(count, source.rows(), c), c % 3);
            most = std::max(most, resident_file_bytes());
        }
        // Of each call, some came from the mapping, and most did not; and what a call touches beyond is little.
        assert(reads > calls * count / 2 && reads < calls * count * 9 / 10);
        assert(most - before < (64 + 2 * count) * kWindow + (2 << 20));
    }
    // Wide rows are mapped whatever the budget.
    const SmallBudget budget(64);
    const RowSource source(file.path, 0, 0, 70'000, file.bytes.size() / 70'000);
    for (unsigned c = 0; c < 20; c++) expect_right(source, file.bytes.data(), random_rows(20, source.rows(), c), 0);
    assert(reads == 0);
}

void rows_that_lie_together_are_mapped() {
    const check::RandomFile file(8 << 20);
    const SmallBudget budget(16);
    const RowSource source(file.path, 0, 0, 1000, 8000);
    for (int64_t first = 0; first + 500 <= 8000; first += 500) {
        std::vector<int64_t> picked;
        for (int64_t i = 0; i < 500; i += 2) picked.push_back(first + i);
        expect_right(source, file.bytes.data(), picked, 0);
    }
    assert(reads == 0);
}

// Other rows are wanted from now on: they are read for a while, and then they are those that are mapped.
void other_rows_take_the_budget_over() {
    const check::RandomFile file(8 << 20);
    const SmallBudget budget(16);
    const RowSource source(file.path, 0, 0, 256, file.bytes.size() / 256);
    use_up_budget(source, 16);
    assert(reads == 0);
    size_t last_reads = 0;
    for (unsigned c = 0; c < 100; c++) {
        std::vector<int64_t> picked = random_rows(20, 8 * kWindow / 256, c);
        for (int64_t& row : picked) row += 64 * kWindow / 256;
        const size_t before = reads;
        expect_right(source, file.bytes.data(), picked, 0);
        last_reads = reads - before;
        if (c < 10) assert(last_reads > 10);
    }
    assert(last_reads == 0);
}

void a_truncated_file_is_found_by_reads() {
    for (const unsigned round : {0, 1, 2, 3}) {
        const bool is_read = round < 2, has_part = round % 2;
        const check::RandomFile file(4 << 20);
        const SmallBudget budget(8);
        const RowSource source(file.path, 0, 0, 4096, 1024);
        use_up_budget(source, 8);
        const int64_t row = row_of_window(source, is_read ? 50 : 7);
        expect_right(source, file.bytes.data(), {row}, 0);
        assert(reads == size_t(is_read));
        const off_t size = off_t(row) * 4096 + (has_part ? 1000 : -5000);
        assert(truncate(file.path.c_str(), size) == 0);
        char to[2 * 4096];
        const int64_t both[] = {1, row};
        Damage damage = source.gather(both, 2, to);
        assert(damage.cause == Cause::truncated && damage.found == uint64_t(size) && damage.wanted > damage.found);
        if (is_read) {
            assert(reads == (has_part ? 3 : 2));  // what there is, and no more
            assert(damage.wanted == uint64_t(row + 1) * 4096);
        }
        assert(truncate(file.path.c_str(), 4 << 20) == 0);
        damage = source.gather(both, 1, to);
        assert(damage.cause == Cause::truncated && damage.found == uint64_t(size));
    }
    // What the disk does not give.
    const check::RandomFile file(4 << 20);
    const SmallBudget budget(8);
    const RowSource source(file.path, 0, 0, 4096, 1024);
    use_up_budget(source, 8);
    pread_function = [](int, void*, size_t, off_t) -> ssize_t {
        errno = ENXIO;
        return -1;
    };
    const int64_t row = row_of_window(source, 50);
    char to[4096];
    for (unsigned i = 0; i < 2; i++) {
        const Damage damage = source.gather(&row, 1, to);
        assert(damage.cause == Cause::read && damage.error == ENXIO && damage.wanted == uint64_t(row + 1) * 4096);
    }
}

// Its name is another file's, so that nothing can be read; but the mapping has the rows.
void a_replaced_file_is_not_read() {
    const check::RandomFile file(4 << 20), other(4 << 20, 2);
    const SmallBudget budget(8);
    const RowSource source(file.path, 0, 0, 4096, 1024);
    use_up_budget(source, 8);
    const std::vector<int64_t> picked = {row_of_window(source, 50), row_of_window(source, 1)};
    unlink(file.path.c_str());
    expect_right(source, file.bytes.data(), picked, 0);
    assert(link(other.path.c_str(), file.path.c_str()) == 0);
    expect_right(source, file.bytes.data(), random_rows(200, 1024, 1), 0);
    assert(reads == 0);
}

void a_forked_child_reads_too() {
    const check::RandomFile file(4 << 20);
    const SmallBudget budget(8);
    const RowSource source(file.path, 0, 0, 1000, 4000);
    use_up_budget(source, 8);
    const pid_t child = fork();
    assert(child >= 0);
    if (child == 0) {
        expect_right(source, file.bytes.data(), random_rows(30, 4000, 1), 0);
        _exit(reads > 0 ? 5 : 6);
    }
    int status;
    assert(waitpid(child, &status, 0) == child && has_ended_with(status, 5));
    expect_right(source, file.bytes.data(), random_rows(30, 4000, 2), 0);
}

// --- cold rows -------------------------------------------------------------------------------------------------------

// Whether none of the file, or next to nothing, is in memory now.
bool evict(const check::RandomFile& file) {
    const int descriptor = open(file.path.c_str(), O_RDONLY);
    assert(descriptor >= 0 && fsync(descriptor) == 0);
    posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
    void* mapped = mmap(nullptr, file.bytes.size(), PROT_READ, MAP_SHARED, descriptor, 0);
    assert(mapped != MAP_FAILED);
    std::vector<unsigned char> pages(file.bytes.size() / 4096);
    size_t resident = 0;
    if (mincore(mapped, file.bytes.size(), pages.data()) == 0)
        for (const unsigned char page : pages) resident += page & 1;
    munmap(mapped, file.bytes.size());
    close(descriptor);
    if (resident * 10 > pages.size())
        printf("residency: /tmp keeps its pages in memory, so that nothing shows whether cold rows are hinted\n");
    return resident * 10 <= pages.size();
}

void cold_rows_are_asked_for_at_once() {
    const check::RandomFile file(16 << 20);
    for (const size_t row_bytes : {5000, 150 << 10}) {
        const bool is_cold = evict(file);
        const RowSource source(file.path, 0, 0, row_bytes, file.bytes.size() / row_bytes);
        const std::vector<int64_t> picked = random_rows((6 << 20) / row_bytes, source.rows(), 9);
        std::vector<char> to(picked.size() * row_bytes);
        struct rusage before, after;
        getrusage(RUSAGE_THREAD, &before);
        assert(!source.gather(picked.data(), picked.size(), to.data()).any());
        getrusage(RUSAGE_THREAD, &after);
        assert(check::are_right(to.data(), picked, file.bytes.data(), row_bytes));
        const long faults = after.ru_majflt - before.ru_majflt;
        if (is_cold) assert(faults <= long(picked.size() / 10) + 2);
    }
}

// The reads themselves have nothing left to ask of the disk.
void cold_rows_that_are_read_are_asked_for_before() {
    static std::atomic<size_t> asking{0};
    const check::RandomFile file(16 << 20);
    write_by_pages(file);
    const SmallBudget budget(8);
    const RowSource source(file.path, 0, 0, 4096, 4096);
    use_up_budget(source, 8);
    const bool is_cold = evict(file);
    asking = 0;
    pread_function = [](int descriptor, void* to, size_t bytes, off_t offset) {
        struct rusage before, after;
        getrusage(RUSAGE_THREAD, &before);
        const ssize_t got = ::pread(descriptor, to, bytes, offset);
        getrusage(RUSAGE_THREAD, &after);
        asking += after.ru_inblock != before.ru_inblock;
        reads++;
        return got;
    };
    expect_right(source, file.bytes.data(), random_rows(300, 4096, 9), 0);
    assert(reads > 200);
    if (is_cold) assert(asking <= 5);
}

}  // namespace

int main() {
    touched_pages_do_not_pile_up();
    large_rows_beyond_the_budget_arrive();
    large_folios_do_not_pile_up_either();
    rows_beyond_the_budget_are_read();
    rows_that_lie_together_are_mapped();
    other_rows_take_the_budget_over();
    a_truncated_file_is_found_by_reads();
    a_replaced_file_is_not_read();
    a_forked_child_reads_too();
    cold_rows_are_asked_for_at_once();
    cold_rows_that_are_read_are_asked_for_before();
    puts("residency: ok");
}
