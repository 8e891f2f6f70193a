#include "rows.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <cerrno>
#include <cstring>
#include <unordered_set>

#include "copies.h"
#include "residency.h"
#include "sigbus.h"

namespace tdgpu {

std::atomic<MmapFunction> mmap_function{&::mmap};

namespace {

// --- the page cache --------------------------------------------------------------------------------------------------

// For one hint the system may read no more than its readahead window, which is 128 KiB where nobody changed it.
constexpr uint64_t kHintBytes = 128 << 10;
// Blocks after which a source looks whether its pages are still in memory, although it saw no sign that they are not;
// and blocks for which it believes that they are not.
constexpr uint32_t kLookEvery = 32;
constexpr int32_t kHintedBlocks = 16;
// Where the budget is used up, rows up to this size are cheaper to read than to map: a fault costs as much as two to
// six reads, depending on how large the parts are that the page cache keeps of the file, and leaves a window behind
// that has to be dropped some time. From 32 KiB on it is either way, as a read does not copy past the caches.
constexpr uint64_t kNarrowRow = 16 << 10;
// Unless that many rows of a block lie together in a window: then one fault for all of them is the cheaper.
constexpr size_t kDenseRows = 4;
// A row from a window that is touched costs far less than a read. So if other rows are wanted now than when the budget
// was used up, all windows should be dropped; if they are just too many for it, none. That many reads for each window
// of the budget cost so much more than touching all of it anew that it hardly matters if this was for nothing.
constexpr uint64_t kReadsPerWindow = 64;

uint64_t page_bytes() {
    static const uint64_t bytes = uint64_t(sysconf(_SC_PAGESIZE));
    return bytes;
}

uintptr_t page_begin(const char* address) {
    return uintptr_t(address) & ~(page_bytes() - 1);
}

// Where the system does not tell, it says yes.
bool is_in_memory(const char* address) {
    unsigned char state = 1;
    mincore(reinterpret_cast<void*>(page_begin(address)), 1, &state);
    return state & 1;
}

// Grows whenever this thread has to wait for a disk, by a fault or in a read.
long disk_waits() {
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_majflt + usage.ru_inblock;
}

void hint(uintptr_t begin, uintptr_t end) {
    for (; begin < end; begin += kHintBytes)
        madvise(reinterpret_cast<void*>(begin), std::min<uint64_t>(end - begin, kHintBytes), MADV_WILLNEED);
}

// Of all sources: the rows that were read because so many windows were touched.
std::atomic<uint64_t> rows_read{0};

}  // namespace

// What is copied between two looks at the page cache, few enough rows and bytes that the budget holds meanwhile, and
// that the next block can be on its way from the disk while this one is copied.
struct RowSource::Block {
    static constexpr size_t kMostRows = 1024;
    static constexpr uint64_t kMostBytes = 8 << 20;

    const char* base;
    uint64_t row_bytes;
    const int64_t* rows;
    size_t count;
    bool reaches_last_page = false;
    bool is_thought_warm = false;
    bool has_reads = false;
    std::bitset<kMostRows> is_read = {};  // the others are copied from the mapping

    const char* row(size_t i) const { return base + uint64_t(rows[i]) * row_bytes; }
};

// Cuts a gather into blocks; a row that is larger than a block, too.
class RowSource::Blocks {
public:
    Blocks(const RowSource& source, const int64_t* rows, size_t count) : source_(source), rows_(rows), count_(count) {}

    bool next(Block& block) {
        static constexpr int64_t kFirst = 0;
        if (done_ == count_) return false;
        const uint64_t row_bytes = source_.row_bytes_;
        if (row_bytes <= Block::kMostBytes) {
            const size_t count = std::min({count_ - done_, Block::kMostRows, size_t(Block::kMostBytes / row_bytes)});
            block = {source_.first_row_, row_bytes, rows_ + done_, count};
            done_ += count;
            return true;
        }
        const uint64_t bytes = std::min(row_bytes - part_, Block::kMostBytes);
        block = {source_.first_row_ + uint64_t(rows_[done_]) * row_bytes + part_, bytes, &kFirst, 1};
        part_ += bytes;
        if (part_ == row_bytes) {
            part_ = 0;
            done_++;
        }
        return true;
    }

private:
    const RowSource& source_;
    const int64_t* const rows_;
    const size_t count_;
    size_t done_ = 0;
    uint64_t part_ = 0;  // bytes of the row under way
};

// The file of a mapped source, opened when the first row of a gather is to be read.
class RowSource::Reader {
public:
    explicit Reader(const RowSource& source) : source_(source) {}

    // False: the file cannot be opened, or another one has its name. The mapping still has the rows.
    bool open() {
        struct stat status;
        if (!was_tried_)
            is_open_ = file_.open(source_.path_, source_.inode_, false) == 0 && source_.has_its_name(status);
        was_tried_ = true;
        return is_open_;
    }
    File& file() { return file_; }

private:
    const RowSource& source_;
    File file_;
    bool was_tried_ = false, is_open_ = false;
};

// All mapped sources. Those that are not in use any more hold resident pages, too.
class RowSource::Registry {
public:
    // Never destroyed: sources may go after static objects do.
    static Registry& get() {
        static Registry* const registry = new Registry;
        return *registry;
    }

    void add(const RowSource* source) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (sources_.empty()) residency::begin_anew();
        sources_.insert(source);
    }
    void remove(const RowSource* source) {
        std::lock_guard<std::mutex> lock(mutex_);
        sources_.erase(source);
    }
    void drop_touched() {
        std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        if (!lock) return;  // another thread is at it
        for (const RowSource* source : sources_) source->drop_touched();
        rows_read.store(0, std::memory_order_relaxed);
        residency::begin_anew();
    }

private:
    // A lock that another thread holds at a fork would stay locked in the child.
    Registry() {
        pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); }, [] { get().mutex_.unlock(); });
    }

    std::mutex mutex_;
    std::unordered_set<const RowSource*> sources_;
};

// --- the source ------------------------------------------------------------------------------------------------------

RowSource::RowSource(const std::string& path, uint64_t inode, uint64_t offset, uint64_t row_bytes, uint64_t rows)
    : path_(path), inode_(inode), offset_(offset), row_bytes_(row_bytes), rows_(rows) {
    int descriptor;
    do {
        // Without O_NONBLOCK, the open of a pipe that took the file's place would wait for a writer.
        descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    } while (descriptor < 0 && errno == EINTR);
    if (descriptor < 0) throw Error(Cause::read, errno, path + ": " + strerror(errno));
    struct Closing {
        int descriptor;
        ~Closing() { close(descriptor); }
    } closing{descriptor};

    struct stat status;
    const auto refuse = [&](int error) { throw Error(Cause::read, error, path + ": " + strerror(error)); };
    if (fstat(descriptor, &status) != 0) refuse(errno);
    if (S_ISDIR(status.st_mode)) refuse(EISDIR);
    if (!S_ISREG(status.st_mode)) refuse(ENOTSUP);
    if (inode != 0 && inode != status.st_ino) refuse(ESTALE);
    inode_ = status.st_ino;
    device_ = status.st_dev;
    uint64_t bytes, end;
    if (__builtin_mul_overflow(row_bytes, rows, &bytes) || __builtin_add_overflow(offset, bytes, &end) ||
        end > uint64_t(status.st_size))
        throw Error(Cause::truncated, 0,
                    path + ": " + std::to_string(rows) + " rows of " + std::to_string(row_bytes) + " bytes from " +
                        std::to_string(offset) + " on do not fit its " + std::to_string(status.st_size) + " bytes");
    if (bytes > 0) map(descriptor);
}

RowSource::RowSource(const char* memory, uint64_t row_bytes, uint64_t rows)
    : row_bytes_(row_bytes), rows_(rows), first_row_(memory) {}

RowSource::~RowSource() {
    if (!mapping_) return;
    Registry::get().remove(this);
    drop_touched();
    munmap(mapping_, mapped_bytes_);
}

void RowSource::map(int descriptor) {
    const uint64_t page = page_bytes();
    const uint64_t begin = offset_ & ~(page - 1);
    const uint64_t end = (offset_ + row_bytes_ * rows_ + page - 1) & ~(page - 1);
    const uint64_t words = (end - begin) / kWindow / 64 + 2;  // the mapping may begin within a window
    std::unique_ptr<std::atomic<uint64_t>[]> touched(new std::atomic<uint64_t>[words]());
    if (!install_sigbus_handler()) return;
    void* mapping = mmap_function.load()(nullptr, end - begin, PROT_READ, MAP_SHARED, descriptor, off_t(begin));
    if (mapping == MAP_FAILED) return;
    // No readahead on a fault, which would read what nobody asked for; pages in memory are mapped by the window still.
    madvise(mapping, end - begin, MADV_RANDOM);
    mapping_ = static_cast<char*>(mapping);
    mapped_bytes_ = end - begin;
    first_row_ = mapping_ + (offset_ - begin);
    touched_ = std::move(touched);
    Registry::get().add(this);
}

Damage RowSource::gather(const int64_t* rows, size_t count, char* to, uint64_t together) const {
    if (count == 0 || row_bytes_ == 0) return {};
    const bool streams = streams_pay(row_bytes_, std::max(together, row_bytes_ * count));
    if (mapping_) return gather_mapped(rows, count, to, streams);
    if (!first_row_) return gather_by_reads(rows, count, to);
    copy_rows(first_row_, row_bytes_, rows, count, to, streams);
    if (streams) end_streaming();
    return {};
}

Damage RowSource::gather_mapped(const int64_t* rows, size_t count, char* to, bool streams) const {
    SigbusGuard guard(mapping_, mapped_bytes_, lost_);
    if (!guard.holds()) return gather_by_reads(rows, count, to);
    bool reaches_last_page = false;
    Blocks blocks(*this, rows, count);
    Reader reader(*this);
    Block block;
    bool has_block = blocks.next(block);
    prepare(block, reader);
    while (has_block && !lost_.load(std::memory_order_relaxed)) {
        Block next;
        has_block = blocks.next(next);
        if (has_block) prepare(next, reader);
        const long waits = block.is_thought_warm ? disk_waits() : 0;
        if (!copy(block, reader, to, streams)) break;
        if (block.is_thought_warm && disk_waits() != waits) hints_left_.store(kHintedBlocks);
        reaches_last_page |= block.reaches_last_page;
        to += block.count * block.row_bytes;
        block = next;
    }
    if (streams) end_streaming();

    // A file that now ends within a page leaves zeros behind its end, and no SIGBUS tells. But the pages behind that
    // one are gone, and the last one is cheap to try. Only in the last page itself must the size be asked.
    const volatile char* last_page = mapping_ + mapped_bytes_ - page_bytes();
    (void)*last_page;
    if (reaches_last_page && is_cut_short()) {
        const char* nothing = nullptr;
        lost_.compare_exchange_strong(nothing, mapping_ + mapped_bytes_ - 1);
    }
    // What was copied is the file's only if no page of it had been replaced until now, by whichever thread. (The
    // standard's fence would do, but GCC refuses it together with the thread sanitizer.)
    __sync_synchronize();
    const char* lost = lost_.load(std::memory_order_relaxed);
    return lost ? examine(lost) : Damage{};
}

Damage RowSource::gather_by_reads(const int64_t* rows, size_t count, char* to) const {
    File file;
    Damage damage;
    damage.error = file.open(path_, inode_, false);
    if (damage.error == 0) return read_rows(file, rows, count, to);
    damage.cause = Cause::read;
    damage.found = offset_ + uint64_t(rows[0]) * row_bytes_;
    damage.wanted = damage.found + row_bytes_;
    return damage;
}

Damage RowSource::read_rows(File& file, const int64_t* rows, size_t count, char* to) const {
    Damage damage;
    for (size_t i = 0; i < count && !damage.any();) {
        const size_t length = run_length(rows + i, count - i);
        const uint64_t begin = offset_ + uint64_t(rows[i]) * row_bytes_;
        const ReadResult result = file.read(to, length * row_bytes_, off_t(begin));
        if (result.got < length * row_bytes_) {
            damage.error = result.error;
            damage.cause = result.error ? Cause::read : Cause::truncated;
            damage.wanted = begin + length * row_bytes_;
            damage.found = begin + result.got;
        }
        to += length * row_bytes_;
        i += length;
    }
    return damage;
}

// False: it did not work out, and the source is given up.
bool RowSource::copy(const Block& block, Reader& reader, char* to, bool streams) const {
    if (!block.has_reads) {
        copy_rows(block.base, block.row_bytes, block.rows, block.count, to, streams);
        return true;
    }
    for (size_t i = 0; i < block.count;) {
        size_t end = i + 1;
        while (end < block.count && block.is_read[end] == block.is_read[i]) end++;
        if (block.is_read[i]) {
            const Damage damage = read_rows(reader.file(), block.rows + i, end - i, to);
            if (damage.any()) {
                give_up(damage, block.row(i));
                return false;
            }
        } else {
            copy_rows(block.base, block.row_bytes, block.rows + i, end - i, to, streams);
        }
        to += (end - i) * block.row_bytes;
        i = end;
    }
    return true;
}

// Before a block is copied: keeps the budget, and sees to it that its pages are in memory or on their way.
void RowSource::prepare(Block& block, Reader& reader) const {
    if (residency::is_used_up() && !choose_reads(block, reader)) Registry::get().drop_touched();

    const char* fresh[Block::kMostRows];  // rows of which not all is mapped
    size_t fresh_count = 0;
    int64_t windows = 0;
    int64_t highest = 0;
    for (size_t i = 0; i < block.count; i++) {
        const int64_t marked = block.is_read[i] ? 0 : mark_touched(block.row(i), block.row_bytes);
        if (marked > 0 || block.is_read[i]) fresh[fresh_count++] = block.row(i);
        windows += marked;
        highest = std::max(highest, block.rows[i]);
    }
    if (windows > 0) residency::add_touched(windows);
    const char* end = block.base + (uint64_t(highest) + 1) * block.row_bytes;
    block.reaches_last_page = end > mapping_ + mapped_bytes_ - page_bytes();

    bool is_cold = hints_left_.load(std::memory_order_relaxed) > 0;
    if (is_cold) {
        hints_left_.fetch_sub(1, std::memory_order_relaxed);
    } else {
        // Pages that are mapped are in memory, unless memory got scarce meanwhile.
        const bool is_due = blocks_.fetch_add(1, std::memory_order_relaxed) % kLookEvery == 0;
        if (fresh_count == 0 && !is_due) return;
        // One of the rows tells of all; where pages are mapped for the first time anyway, a few cost little more.
        const size_t samples = fresh_count ? std::min<size_t>(fresh_count, 4) : 1;
        for (size_t i = 0; i < samples && !is_cold; i++)
            is_cold = !is_in_memory(fresh_count ? fresh[fresh_count * i / samples] : block.row(block.count / 2));
        block.is_thought_warm = !is_cold;
        if (!is_cold) return;
        hints_left_.store(kHintedBlocks, std::memory_order_relaxed);
    }
    uintptr_t begin = 0, stop = 0;
    for (size_t i = 0; i < block.count; i++) {
        const uintptr_t first = page_begin(block.row(i));
        const uintptr_t behind = page_begin(block.row(i) + block.row_bytes - 1) + page_bytes();
        if (first < begin || first > stop) {
            hint(begin, stop);
            begin = first;
            stop = behind;
        }
        stop = std::max(stop, behind);
    }
    hint(begin, stop);
}

// Has those rows of a block read of which not all is mapped. False: better to drop what is touched, and map them.
bool RowSource::choose_reads(Block& block, Reader& reader) const {
    if (row_bytes_ > kNarrowRow) return false;  // the last part of a large row may be narrow
    size_t count = 0, windows = 0;
    uintptr_t window = 0;
    for (size_t i = 0; i < block.count; i++) {
        const char* row = block.row(i);
        if (is_touched(row, block.row_bytes)) continue;
        block.is_read.set(i);
        count++;
        if (uintptr_t(row) / kWindow != window) windows++;
        window = uintptr_t(row) / kWindow;
    }
    if (count == 0) return true;
    const uint64_t most = resident_budget.load(std::memory_order_relaxed) / kWindow * kReadsPerWindow;
    block.has_reads = count < kDenseRows * windows &&
                      rows_read.fetch_add(count, std::memory_order_relaxed) + count <= most && reader.open();
    if (!block.has_reads) block.is_read.reset();
    return block.has_reads;
}

bool RowSource::is_touched(const char* from, uint64_t bytes) const {
    const uintptr_t base = uintptr_t(mapping_) / kWindow;
    const uint64_t last = (uintptr_t(from) + bytes - 1) / kWindow - base;
    for (uint64_t window = uintptr_t(from) / kWindow - base; window <= last; window++)
        if (!(touched_[window / 64].load(std::memory_order_relaxed) >> window % 64 & 1)) return false;
    return true;
}

int64_t RowSource::mark_touched(const char* from, uint64_t bytes) const {
    const uintptr_t base = uintptr_t(mapping_) / kWindow;
    const uint64_t last = (uintptr_t(from) + bytes - 1) / kWindow - base;
    int64_t marked = 0;
    for (uint64_t window = uintptr_t(from) / kWindow - base; window <= last; window++) {
        std::atomic<uint64_t>& word = touched_[window / 64];
        const uint64_t bit = uint64_t(1) << window % 64;
        if (word.load(std::memory_order_relaxed) & bit) continue;
        if (!(word.fetch_or(bit, std::memory_order_relaxed) & bit)) marked++;
    }
    return marked;
}

// Takes the mapping's pages out of this process's memory. They stay in the page cache, and whoever reads them
// meanwhile maps them anew.
void RowSource::drop_touched() const {
    const uint64_t words = mapped_bytes_ / kWindow / 64 + 2;
    int64_t windows = 0;
    for (uint64_t i = 0; i < words; i++) windows += __builtin_popcountll(touched_[i].exchange(0));
    residency::remove_touched(windows);
    if (windows > 0) madvise(mapping_, mapped_bytes_, MADV_DONTNEED);
}

// By the path, so that thousands of leaves need no descriptors. A file that lost its name keeps its bytes.
bool RowSource::has_its_name(struct stat& status) const {
    return stat(path_.c_str(), &status) == 0 && status.st_ino == inode_ && status.st_dev == device_;
}

bool RowSource::is_cut_short() const {
    struct stat status;
    return has_its_name(status) && uint64_t(status.st_size) < offset_ + row_bytes_ * rows_;
}

// After a read that did not give its bytes; as after a page that could not be had.
void RowSource::give_up(Damage damage, const char* row) const {
    struct stat status;
    if (damage.cause == Cause::truncated && has_its_name(status))
        damage.found = std::min(damage.found, uint64_t(status.st_size));
    std::call_once(is_examined_, [&] { damage_ = damage; });
    const char* nothing = nullptr;
    lost_.compare_exchange_strong(nothing, row);
}

// Why an address could not be had. Once: the file may grow again, but the mapping stays broken.
Damage RowSource::examine(const char* lost) const {
    std::call_once(is_examined_, [&] {
        const uint64_t end = offset_ + row_bytes_ * rows_;
        const uint64_t row = lost < first_row_ ? 0 : std::min(uint64_t(lost - first_row_) / row_bytes_, rows_ - 1);
        damage_.wanted = offset_ + (row + 1) * row_bytes_;
        damage_.found = offset_ + row * row_bytes_;
        damage_.cause = Cause::read;
        struct stat status;
        if (stat(path_.c_str(), &status) != 0) {
            damage_.error = errno;
        } else if (status.st_ino != inode_ || status.st_dev != device_) {
            damage_.error = ESTALE;
        } else if (uint64_t(status.st_size) < end) {
            damage_.cause = Cause::truncated;
            damage_.found = uint64_t(status.st_size);
            if (damage_.wanted <= damage_.found) damage_.wanted = end;
        } else {
            damage_.error = EIO;  // what the disk could not give comes as the same signal
        }
    });
    return damage_;
}

}  // namespace tdgpu
