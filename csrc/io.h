// Exact reads: all the wanted bytes, or a reason.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <string>

namespace tdgpu {

// How much arrived, and why not all: error is errno, or 0 where the file ended.
struct ReadResult {
    size_t got = 0;
    int error = 0;
};

// One open file, for one thread. Reads do not move a file position, so threads that read the same file share nothing.
class File {
public:
    File() = default;
    ~File() { close(); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    // Returns errno, or 0: what is open then is a regular file with that inode (0: any); ESTALE tells that it is
    // another one, as after a save was written anew by renaming. `direct` asks for reads past the page cache; a file
    // system that refuses gets buffered ones.
    int open(const std::string& path, uint64_t inode, bool direct);
    void close();
    bool is_open() const { return descriptor_ >= 0; }

    // Reads `bytes` at `offset`, going on after short reads and EINTR. Direct reads need aligned memory, offset and
    // length: the part that is not aligned, and everything after a refusal, is read buffered.
    ReadResult read(void* to, size_t bytes, off_t offset);

private:
    void set_direct(bool direct);

    int descriptor_ = -1;
    bool wants_direct_ = false;
    bool is_direct_ = false;
};

constexpr size_t kDirectAlignment = 4096;

// pread, or what a test puts in its place to make short reads, delays and errors.
using PreadFunction = ssize_t (*)(int, void*, size_t, off_t);
extern std::atomic<PreadFunction> pread_function;

}  // namespace tdgpu
