// Rows come as they are in the file, from whichever source, or with a reason why not; a file that shrinks is never a
// crash; nobody else's SIGBUS is touched; and touched pages do not pile up.
#include "residency.h"
#include "rows.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <thread>

#include "check.h"
#include "threads.h"

using namespace tdgpu;

namespace {

std::vector<int64_t> random_rows(size_t count, uint64_t rows, unsigned seed) {
    std::mt19937_64 random(seed);
    std::vector<int64_t> picked(count);
    for (int64_t& row : picked) row = int64_t(random() % rows);
    return picked;
}

bool are_right(const char* got, const std::vector<int64_t>& picked, const char* first_row, size_t row_bytes) {
    for (size_t i = 0; i < picked.size(); i++)
        if (memcmp(got + i * row_bytes, first_row + size_t(picked[i]) * row_bytes, row_bytes) != 0) return false;
    return true;
}

void expect_right(const RowSource& source, const char* first_row, const std::vector<int64_t>& picked, size_t odd) {
    const size_t row_bytes = source.row_bytes();
    std::vector<char> to(odd + picked.size() * row_bytes + 64, 0x55);
    const Damage damage = source.gather(picked.data(), picked.size(), to.data() + odd);
    assert(!damage.any());
    assert(are_right(to.data() + odd, picked, first_row, row_bytes));
    for (size_t i = 0; i < odd; i++) assert(to[i] == 0x55);  // and not a byte more
    for (size_t i = to.size() - 64; i < to.size(); i++) assert(to[i] == 0x55);
}

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
    std::mt19937_64 random(5);
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

// --- SIGBUS ----------------------------------------------------------------------------------------------------------

volatile char sink;
volatile sig_atomic_t handled = 0;
const char* volatile expected_address = nullptr;
struct sigaction replaced_action;

void count(int) {
    handled = handled + 1;
}

void exit_with_seven(int, siginfo_t* info, void*) {
    _exit(info->si_addr == expected_address ? 7 : 8);
}

// As Python's faulthandler: puts back what was there, and raises the signal again.
void put_back_and_raise(int signal) {
    handled = handled + 1;
    sigaction(signal, &replaced_action, nullptr);
    raise(signal);
}

struct sigaction install(void (*handler)(int), int flags) {
    struct sigaction action = {}, previous;
    action.sa_handler = handler;
    action.sa_flags = flags;
    assert(sigaction(SIGBUS, &action, &previous) == 0);
    return previous;
}

void install_exit_with_seven() {
    struct sigaction action = {};
    action.sa_sigaction = exit_with_seven;
    action.sa_flags = SA_SIGINFO;
    assert(sigaction(SIGBUS, &action, nullptr) == 0);
}

// A gather that meets the end of its file.
void gather_lost_row() {
    const check::RandomFile file(100'000);
    const RowSource source(file.path, 0, 0, 100, 1000);
    assert(truncate(file.path.c_str(), 10'000) == 0);
    const int64_t row = 999;
    char to[100];
    assert(source.gather(&row, 1, to).cause == Cause::truncated);
}

// Somebody else's.
void meet_sigbus() {
    const check::RandomFile file(10'000);
    const int descriptor = open(file.path.c_str(), O_RDWR);
    auto* mapped = static_cast<char*>(mmap(nullptr, 10'000, PROT_READ, MAP_SHARED, descriptor, 0));
    assert(mapped != MAP_FAILED && ftruncate(descriptor, 0) == 0);
    unlink(file.path.c_str());
    expected_address = mapped + 5000;
    sink = mapped[5000];
}

// How a child ends that does this, before anything else of this process made a source.
int status_of(void (*body)()) {
    const pid_t child = fork();
    assert(child >= 0);
    if (child == 0) {
        const struct rlimit no_core = {0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        body();
        _exit(0);
    }
    int status;
    assert(waitpid(child, &status, 0) == child);
    return status;
}

bool is_killed(int status) {
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS;
}
bool has_ended_with(int status, int code) {
    return WIFEXITED(status) && WEXITSTATUS(status) == code;
}

void sigbus_of_others_goes_where_it_went() {
    assert(is_killed(status_of([] {
        install(SIG_DFL, 0);
        gather_lost_row();
        meet_sigbus();
    })));
    assert(is_killed(status_of([] {
        install(SIG_DFL, 0);
        gather_lost_row();
        raise(SIGBUS);
    })));
    // A fault cannot be ignored, but what was sent can.
    assert(is_killed(status_of([] {
        install(SIG_IGN, 0);
        gather_lost_row();
        meet_sigbus();
    })));
    assert(has_ended_with(status_of([] {
                              install(SIG_IGN, 0);
                              gather_lost_row();
                              raise(SIGBUS);
                              gather_lost_row();
                              _exit(5);
                          }),
                          5));
    assert(has_ended_with(status_of([] {
                              install_exit_with_seven();
                              gather_lost_row();
                              meet_sigbus();
                          }),
                          7));
    assert(has_ended_with(status_of([] {
                              install(count, 0);
                              gather_lost_row();
                              assert(handled == 0);
                              raise(SIGBUS);
                              raise(SIGBUS);
                              gather_lost_row();
                              _exit(handled);
                          }),
                          2));
    assert(is_killed(status_of([] {  // the handler wanted to be called once
        install(count, int(SA_RESETHAND));
        gather_lost_row();
        raise(SIGBUS);
        assert(handled == 1);
        raise(SIGBUS);
    })));
}

void handlers_before_and_after_ours_are_called() {
    // Before ours: not for a lost row; and it ends what is not ours.
    assert(is_killed(status_of([] {
        install(SIG_DFL, 0);
        replaced_action = install(put_back_and_raise, SA_NODEFER);
        gather_lost_row();
        if (handled != 0) _exit(1);
        meet_sigbus();
    })));
    // After ours: it hands a lost row on to us, and what is not ours, too.
    assert(has_ended_with(status_of([] {
                              install(SIG_DFL, 0);
                              const check::RandomFile file(100'000);
                              const RowSource source(file.path, 0, 0, 100, 1000);
                              const int64_t row = 999;
                              char to[100];
                              assert(!source.gather(&row, 1, to).any());
                              replaced_action = install(put_back_and_raise, SA_NODEFER);
                              assert(truncate(file.path.c_str(), 10'000) == 0);
                              assert(source.gather(&row, 1, to).cause == Cause::truncated);
                              unlink(file.path.c_str());
                              _exit(10 + handled);
                          }),
                          11));
    assert(is_killed(status_of([] {
        install(SIG_DFL, 0);
        gather_lost_row();
        replaced_action = install(put_back_and_raise, SA_NODEFER);
        meet_sigbus();
    })));
    // After ours, and it never hands anything on, as the one of torch's data loader workers: new sources, new threads
    // and forked children are before it again.
    assert(has_ended_with(status_of([] {
                              install(SIG_DFL, 0);
                              gather_lost_row();
                              install_exit_with_seven();
                              gather_lost_row();
                              meet_sigbus();
                          }),
                          7));
    assert(has_ended_with(status_of([] {
                              install(SIG_DFL, 0);
                              const check::RandomFile file(100'000);
                              const RowSource source(file.path, 0, 0, 100, 1000);
                              const int64_t row = 999;
                              char to[100];
                              assert(!source.gather(&row, 1, to).any());
                              const pid_t child = fork();
                              if (child == 0) {
                                  install_exit_with_seven();
                                  assert(truncate(file.path.c_str(), 10'000) == 0);
                                  assert(source.gather(&row, 1, to).cause == Cause::truncated);
                                  meet_sigbus();
                              }
                              int status;
                              assert(waitpid(child, &status, 0) == child && has_ended_with(status, 7));
                              assert(source.gather(&row, 1, to).cause == Cause::truncated);
                              unlink(file.path.c_str());
                              _exit(6);
                          }),
                          6));
    // Two that hand on to each other end all the same.
    assert(is_killed(status_of([] {
        install(SIG_DFL, 0);
        gather_lost_row();
        replaced_action = install([](int signal) { replaced_action.sa_sigaction(signal, nullptr, nullptr); }, 0);
        static const struct sigaction ours = replaced_action;
        replaced_action = install(
            [](int signal) {
                siginfo_t info = {};
                info.si_code = SI_USER;
                ours.sa_sigaction(signal, &info, nullptr);
            },
            0);
        gather_lost_row();
        raise(SIGBUS);
    })));
}

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
        printf("rows: %lu MiB touched, at most %lu MiB resident\n", 3 * kFile >> 20, most >> 20);
        assert(most < kBudget + (24 << 20));
    }
    resident_budget = kResidentBudget;
    unlink(path.c_str());
}

// The page cache may hold what was written in large pieces so that one fault maps much more than a window.
// A row that is larger than a block is cut, and what is left of it may be narrow: it is none of the narrow rows.
void large_rows_beyond_the_budget_arrive() {
    resident_budget = kWindow;
    for (const uint64_t row_bytes : {(uint64_t(8) << 20) + 16'000, (uint64_t(8) << 20) + 1, uint64_t(9) << 20}) {
        constexpr uint64_t kRows = 4;
        const std::string path = check::new_file();
        std::vector<char> bytes(row_bytes * kRows);
        std::mt19937_64 random(row_bytes);
        for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
            const uint64_t word = random();
            memcpy(&bytes[i], &word, 8);
        }
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
        printf("rows: of %lu MiB in large folios at most %lu MiB resident\n", kFile >> 20, most >> 20);
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
        printf("rows: /tmp keeps its pages in memory, so that nothing shows whether cold rows are hinted\n");
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
        assert(are_right(to.data(), picked, file.bytes.data(), row_bytes));
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
    sigbus_of_others_goes_where_it_went();
    handlers_before_and_after_ours_are_called();
    rows_come_as_they_are();
    several_threads_share_a_source(kResidentBudget);
    several_threads_share_a_source(8 * kWindow);
    nothing_is_not_much();
    rows_of_a_file_that_cannot_be_mapped_are_read();
    what_does_not_fit_is_refused();
    a_truncated_file_stays_an_error();
    a_file_that_lost_its_name_keeps_its_rows();
    a_file_is_truncated_while_threads_gather();
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
    puts("rows: ok");
}
