#include "growing.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "threads.h"

namespace tdgpu {
namespace {

template <class Call>
int retried(Call call) {
    int result;
    do result = call();
    while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : errno;
}

int sync_directory_of(const std::string& path) {
    const size_t slash = path.rfind('/');
    const std::string directory = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    const int descriptor = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return errno;
    const int error = retried([&] { return ::fsync(descriptor); });
    ::close(descriptor);
    return error;
}

// Files that a thread opens or closes before it asks for more: fewer of them are not worth a thread.
constexpr uint32_t kShare = 64;

uint64_t rounded_to_block(uint64_t bytes) {
    constexpr uint64_t kBlock = 4096;
    return (bytes + kBlock - 1) / kBlock * kBlock;
}

// Where the space ends that a file of this size has: at the end of its last block, if all blocks are there.
uint64_t end_of_space(const struct stat& status) {
    const uint64_t end = rounded_to_block(uint64_t(status.st_size));
    return uint64_t(status.st_blocks) * 512 >= end ? end : 0;
}

}  // namespace

std::atomic<PwritevFunction> pwritev_function{&::pwritev};

class GrowingFiles::Use {
public:
    Use(GrowingFiles& files, uint32_t file) : error_(files.open(file, descriptor_, is_kept_)) {}
    ~Use() {
        if (error_ == 0 && !is_kept_) ::close(descriptor_);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    int error() const { return error_; }
    int descriptor() const { return descriptor_; }

private:
    int descriptor_ = -1;
    bool is_kept_ = false;
    int error_;
};

GrowingFiles::GrowingFiles(std::vector<Leaf> leaves, uint32_t most_open, unsigned threads)
    : leaves_(std::move(leaves)), most_open_(most_open), threads_(threads), files_(leaves_.size()) {}

void GrowingFiles::close() {
    in_shares(count(), kShare, threads_, [this](uint32_t first, uint32_t last) {
        for (uint32_t i = first; i < last; i++) {
            if (files_[i].descriptor >= 0) ::close(files_[i].descriptor);
            files_[i].descriptor = -1;
        }
    });
    open_count_ = 0;
}

int GrowingFiles::open(uint32_t index, int& descriptor, bool& is_kept) {
    const Leaf& leaf = leaves_[index];
    File& file = files_[index];
    std::lock_guard<std::mutex> lock(lock_of(index));
    is_kept = true;
    if (file.descriptor >= 0) {
        descriptor = file.descriptor;
        return 0;
    }
    // Never through a link, which leads out of the save; and not waiting for a pipe that took the file's place.
    const bool makes = file.may_be_made && !file.was_opened;
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | (makes ? O_CREAT | O_EXCL : 0);
    do descriptor = ::open(leaf.path.c_str(), flags, 0666);
    while (descriptor < 0 && errno == EINTR);
    if (descriptor < 0) return errno;
    if (makes) file.was_made = file.name_is_new = true;
    struct stat status;
    int error = ::fstat(descriptor, &status) != 0 ? errno : 0;
    if (!error && !S_ISREG(status.st_mode)) error = ENOTSUP;
    if (!error && file.was_opened && file.inode != status.st_ino) error = ESTALE;
    if (error) {
        ::close(descriptor);
        return error;
    }
    if (!file.was_opened) {
        file.was_opened = true;
        file.inode = status.st_ino;
        file.found_bytes = uint64_t(status.st_size);
        file.has_other_names = status.st_nlink > 1;
        file.allocated_end = end_of_space(status);
    }
    if (open_count_.fetch_add(1) < most_open_) {
        file.descriptor = descriptor;
    } else {
        open_count_.fetch_sub(1);
        is_kept = false;
    }
    return 0;
}

FileFailure GrowingFiles::open_all(uint64_t rows, uint64_t& found) {
    std::mutex mutex;
    FileFailure failure;
    in_shares(count(), kShare, threads_, [&](uint32_t first, uint32_t last) {
        for (uint32_t i = first; i < last; i++) {
            const int error = open_first(i, rows);
            if (!error) continue;
            std::lock_guard<std::mutex> lock(mutex);
            if (!failure.error || i < failure.file) failure = {i, error};
            return;
        }
    });
    if (failure.error) found = files_[failure.file].found_bytes;
    return failure;
}

int GrowingFiles::open_first(uint32_t index, uint64_t rows) {
    Use use(*this, index);
    File& file = files_[index];
    if (use.error() == ENOENT && rows == 0) {
        file.may_be_made = true;
        return 0;
    }
    if (use.error()) return use.error();
    if (file.found_bytes < rows * leaves_[index].row_bytes) return EINVAL;
    return file.has_other_names ? EMLINK : 0;
}

FileFailure GrowingFiles::reserve(uint64_t first, uint64_t last) {
    for (uint32_t i = 0; i < count(); i++) {
        const off_t begin = off_t(first * leaves_[i].row_bytes), end = off_t(last * leaves_[i].row_bytes);
        // Room in the last block is space already: a thousand small leaves would take longer for being asked for it
        // than for their rows.
        if (begin == end || uint64_t(end) <= files_[i].allocated_end) continue;
        Use use(*this, i);
        if (use.error()) return {i, use.error()};
        // Raw, since posix_fallocate would write every block itself where the file system cannot do this: there a full
        // disk shows when the rows are written.
        const int error = retried([&] { return ::fallocate(use.descriptor(), 0, begin, end - begin); });
        if (error && error != EOPNOTSUPP && error != ENOSYS) return {i, error};
        if (!error) files_[i].allocated_end = rounded_to_block(uint64_t(end));
    }
    return {};
}

WriteResult GrowingFiles::write(uint32_t index, iovec* parts, int count, uint64_t offset) {
    WriteResult result;
    Use use(*this, index);
    if (use.error()) {
        result.error = use.error();
        return result;
    }
    // Only now: a sync that came before has not seen what is written here.
    const auto mark = [&] { files_[index].is_dirty = true; };
    const PwritevFunction pwritev = pwritev_function.load(std::memory_order_relaxed);
    while (count > 0) {
        const ssize_t n = pwritev(use.descriptor(), parts, count, off_t(offset + result.done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            result.error = n < 0 ? errno : EIO;  // a write of nothing would be tried for ever
            mark();
            return result;
        }
        result.done += size_t(n);
        size_t left = size_t(n);
        while (count > 0 && left >= parts->iov_len) {
            left -= parts->iov_len;
            parts++;
            count--;
        }
        if (count > 0) {
            parts->iov_base = static_cast<char*>(parts->iov_base) + left;
            parts->iov_len -= left;
        }
    }
    mark();
    return result;
}

FileFailure GrowingFiles::sync() {
    // First all files are sent on their way, then each is waited for: otherwise every one would be a journey of its
    // own. (sync_file_range by itself promises nothing: that is fdatasync's part.)
    for (uint32_t i = 0; i < count(); i++) {
        if (files_[i].is_dirty && files_[i].descriptor >= 0)
            ::sync_file_range(files_[i].descriptor, 0, 0, SYNC_FILE_RANGE_WRITE);
    }
    std::set<std::string> directories;
    for (uint32_t i = 0; i < count(); i++) {
        if (!files_[i].is_dirty) continue;
        Use use(*this, i);
        if (use.error()) return {i, use.error()};
        files_[i].is_dirty = false;
        const int error = retried([&] { return ::fdatasync(use.descriptor()); });
        // Never tried again: after a failure the system may say that all is well although the bytes are lost.
        if (error) return {i, error};
    }
    for (uint32_t i = 0; i < count(); i++) {
        const std::string& path = leaves_[i].path;
        if (!files_[i].name_is_new || !directories.insert(path.substr(0, path.rfind('/') + 1)).second) continue;
        const int error = sync_directory_of(path);
        if (error) return {i, error};
    }
    for (File& file : files_) file.name_is_new = false;
    return {};
}

FileFailure GrowingFiles::cut_back(uint64_t rows) {
    FileFailure first;
    for (uint32_t i = 0; i < count(); i++) {
        File& file = files_[i];
        const uint64_t wanted = rows * leaves_[i].row_bytes;
        int error = 0;
        if (file.was_made && wanted == 0) {
            if (::unlink(leaves_[i].path.c_str()) != 0 && errno != ENOENT) error = errno;
            if (file.descriptor >= 0) {
                ::close(file.descriptor);
                file.descriptor = -1;
                open_count_.fetch_sub(1);
            }
            file.was_made = file.was_opened = false;  // and may be made again
        } else if (file.was_opened) {
            const uint64_t size = std::max(wanted, file.found_bytes);
            Use use(*this, i);
            error = use.error() ? use.error() : retried([&] { return ::ftruncate(use.descriptor(), off_t(size)); });
            file.allocated_end = std::min(file.allocated_end, size);
        }
        if (error && !first.error) first = {i, error};
    }
    return first;
}

}  // namespace tdgpu
