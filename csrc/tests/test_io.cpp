// Reads give all the bytes or a reason.
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "check.h"

using namespace tdgpu;

namespace {

int calls = 0;

ssize_t three_bytes_at_a_time(int fd, void* to, size_t n, off_t at) {
    return ::pread(fd, to, std::min<size_t>(n, 3), at);
}

ssize_t interrupted_every_other_time(int fd, void* to, size_t n, off_t at) {
    if (calls++ % 2 == 0) {
        errno = EINTR;
        return -1;
    }
    return ::pread(fd, to, std::min<size_t>(n, 4096), at);
}

ssize_t broken_after_the_first_page(int fd, void* to, size_t n, off_t at) {
    if (at >= 4096) {
        errno = EIO;
        return -1;
    }
    return ::pread(fd, to, std::min<size_t>(n, 4096), at);
}

// As a file system that takes O_DIRECT at open and refuses it at the first read.
ssize_t refuses_direct(int fd, void* to, size_t n, off_t at) {
    if (fcntl(fd, F_GETFL) & O_DIRECT) {
        calls++;
        errno = EINVAL;
        return -1;
    }
    return ::pread(fd, to, n, at);
}

void read_with(PreadFunction function, bool direct, const check::RandomFile& file, size_t offset, size_t want,
               size_t expect_got, int expect_error) {
    pread_function = function;
    char* to = static_cast<char*>(aligned_alloc(4096, 1 << 20));
    memset(to, 0x55, 1 << 20);
    File opened;
    assert(opened.open(file.path, 0, direct) == 0);
    const ReadResult result = opened.read(to, want, off_t(offset));
    assert(result.got == expect_got && result.error == expect_error);
    assert(memcmp(to, file.bytes.data() + offset, result.got) == 0);
    for (size_t i = want; i < std::min<size_t>(want + 64, 1 << 20); i++) assert(to[i] == 0x55);  // and not a byte more
    free(to);
    pread_function = &::pread;
}

}  // namespace

int main() {
    const check::RandomFile file(100'003);
    for (bool direct : {false, true}) {
        read_with(&::pread, direct, file, 0, 100'003, 100'003, 0);
        read_with(&::pread, direct, file, 4096, 90'000, 90'000, 0);
        read_with(&::pread, direct, file, 17, 50'000, 50'000, 0);
        read_with(&::pread, direct, file, 0, 100'004, 100'003, 0);  // the file ends: no error, but short
        read_with(&::pread, direct, file, 0, 0, 0, 0);
        read_with(three_bytes_at_a_time, direct, file, 5, 1000, 1000, 0);
        read_with(interrupted_every_other_time, direct, file, 0, 100'003, 100'003, 0);
        read_with(broken_after_the_first_page, direct, file, 0, 8192, 4096, EIO);
    }
    calls = 0;
    read_with(refuses_direct, true, file, 0, 100'003, 100'003, 0);

    File missing;
    assert(missing.open(file.path + ".not", 0, false) == ENOENT && missing.open(file.path + ".not", 0, true) == ENOENT);

    // What took a file's place since it was checked must not make a reader wait.
    File other;
    assert(other.open("/tmp", 0, false) == EISDIR && !other.is_open());
    const std::string pipe = file.path + ".pipe";
    assert(mkfifo(pipe.c_str(), 0600) == 0);
    assert(other.open(pipe, 0, false) == ENOTSUP && !other.is_open());
    unlink(pipe.c_str());
    struct stat status;
    assert(stat(file.path.c_str(), &status) == 0);
    assert(other.open(file.path, status.st_ino, false) == 0);
    assert(other.open(file.path, status.st_ino + 1, false) == ESTALE && !other.is_open());
    puts("io: ok");
}
