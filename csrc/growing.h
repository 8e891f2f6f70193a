// The leaf files of a save that grows: opened for writing, given space, written, synced, and cut back.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace tdgpu {

// How much was written, and why not all: error is errno.
struct WriteResult {
    size_t done = 0;
    int error = 0;
};

// Which file could not be handled, and errno; error 0: all went well.
struct FileFailure {
    uint32_t file = 0;
    int error = 0;
};

// May be used from several threads. All descriptors are closed at the end, or by close().
class GrowingFiles {
public:
    struct Leaf {
        std::string path;
        uint64_t row_bytes;  // of one row, more than none
    };

    // Keeps up to `most_open` files open; what is beyond is opened for every use. Many files are opened and closed by
    // up to `threads` threads.
    GrowingFiles(std::vector<Leaf> leaves, uint32_t most_open, unsigned threads);

    // Opens all files and looks at them, before anything is changed: each must be a regular file, not a link, of at
    // least so many rows; without rows, it may be missing. EINVAL: it is too short, `found` bytes. EMLINK: it has
    // another name, in this save or elsewhere. The first file that is at fault is named.
    FileFailure open_all(uint64_t rows, uint64_t& found);
    ~GrowingFiles() { close(); }
    GrowingFiles(const GrowingFiles&) = delete;
    GrowingFiles& operator=(const GrowingFiles&) = delete;

    uint32_t count() const { return uint32_t(leaves_.size()); }
    uint64_t row_bytes(uint32_t file) const { return leaves_[file].row_bytes; }

    // Makes files that are not there, and extends all of them to hold rows [first, last), with space on the disk where
    // the file system can promise it: a full disk shows here, before a byte is written.
    FileFailure reserve(uint64_t first, uint64_t last);

    // Writes all parts at `offset`, going on after short writes and EINTR. Changes the parts.
    WriteResult write(uint32_t file, iovec* parts, int count, uint64_t offset);

    // Brings what was written since the last sync to the disk, and the names of files that were made.
    FileFailure sync();

    // Cuts every file that was opened to `rows` rows, or to the size that it was found with if that is more; removes
    // those that were made, if there are no rows.
    FileFailure cut_back(uint64_t rows);

    void close();

private:
    struct File {
        int descriptor = -1;
        bool was_made = false;
        bool name_is_new = false;  // made, and its directory is not synced
        bool was_opened = false;
        ino_t inode = 0;
        bool has_other_names = false;
        uint64_t found_bytes = 0;    // its size when it was first opened
        uint64_t allocated_end = 0;  // up to here there is space on the disk
        bool may_be_made = false;
        std::atomic<bool> is_dirty{false};
    };

    // An open file for a scope; a descriptor that is kept stays open after it.
    class Use;

    int open(uint32_t file, int& descriptor, bool& is_kept);
    int open_first(uint32_t file, uint64_t rows);
    std::mutex& lock_of(uint32_t file) { return locks_[file % locks_.size()]; }

    const std::vector<Leaf> leaves_;
    const uint32_t most_open_;
    const unsigned threads_;
    std::vector<File> files_;
    std::array<std::mutex, 16> locks_;
    std::atomic<uint32_t> open_count_{0};
};

// pwritev, or what a test puts in its place to make short writes, delays and errors.
using PwritevFunction = ssize_t (*)(int, const iovec*, int, off_t);
extern std::atomic<PwritevFunction> pwritev_function;

}  // namespace tdgpu
