#include "io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

namespace tdgpu {

std::atomic<PreadFunction> pread_function{&::pread};

int File::open(const std::string& path, uint64_t inode, bool direct) {
    close();
    // Without O_NONBLOCK, the open of a pipe that took the file's place would wait for a writer. It means nothing to a
    // file.
    const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
    if (direct) {
        descriptor_ = ::open(path.c_str(), flags | O_DIRECT);
        wants_direct_ = is_direct_ = descriptor_ >= 0;
    }
    while (descriptor_ < 0) {
        descriptor_ = ::open(path.c_str(), flags);
        if (descriptor_ < 0 && errno != EINTR) return errno;
    }
    struct stat status;
    if (fstat(descriptor_, &status) != 0) return errno;
    const bool is_file = S_ISREG(status.st_mode);
    if (is_file && (inode == 0 || inode == status.st_ino)) return 0;
    close();
    return is_file ? ESTALE : S_ISDIR(status.st_mode) ? EISDIR : ENOTSUP;
}

void File::close() {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
    wants_direct_ = is_direct_ = false;
}

void File::set_direct(bool direct) {
    if (direct == is_direct_) return;
    const int flags = fcntl(descriptor_, F_GETFL);
    fcntl(descriptor_, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT);
    is_direct_ = direct;
}

ReadResult File::read(void* to, size_t bytes, off_t offset) {
    const PreadFunction pread = pread_function.load(std::memory_order_relaxed);
    char* next = static_cast<char*>(to);
    // One call reads at most 2 GiB - 4 KiB on Linux whatever is asked; a round number keeps direct reads aligned.
    constexpr size_t kMost = size_t(1) << 30;
    ReadResult result;
    while (result.got < bytes) {
        size_t want = std::min(bytes - result.got, kMost);
        const bool aligned =
            (reinterpret_cast<uintptr_t>(next + result.got) | size_t(offset) | result.got) % kDirectAlignment == 0;
        if (wants_direct_) {
            if (aligned && want >= kDirectAlignment) want -= want % kDirectAlignment;
            set_direct(aligned && want >= kDirectAlignment);
        }
        const ssize_t n = pread(descriptor_, next + result.got, want, offset + off_t(result.got));
        if (n > 0) {
            result.got += size_t(n);
        } else if (n == 0) {
            return result;  // the end of the file
        } else if (errno == EINVAL && is_direct_) {
            // Some file systems accept O_DIRECT at open and refuse it at the first read.
            set_direct(false);
            wants_direct_ = false;
        } else if (errno != EINTR) {
            result.error = errno;
            return result;
        }
    }
    return result;
}

}  // namespace tdgpu
