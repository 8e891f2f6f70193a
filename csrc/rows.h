// Rows of a leaf, fetched in any order.
//
// A mapped file costs no system call per row, so rows from the page cache come at the speed of memory. What a mapping
// does badly is seen to here: pages that are not in memory are asked for before they are touched, many at a time;
// pages that were touched stay resident only up to a budget; and a file that shrinks is an error, not a SIGBUS.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "inflate.h"
#include "io.h"

struct stat;

namespace tdgpu {

// The rows of one leaf, of which any may be fetched: in a mapped file, or in memory of the caller's.
class RowSource {
public:
    // `rows` rows that begin `offset` bytes into a file, aligned to nothing. The file must be regular, of that inode
    // (0: any), and long enough. Throws Error(read) with errno (ESTALE: another inode) or Error(truncated), with the
    // path in the words. No descriptor stays open behind it or a gather. A file that cannot be mapped is read instead.
    RowSource(const std::string& path, uint64_t inode, uint64_t offset, uint64_t row_bytes, uint64_t rows);
    // In memory, which outlives the source.
    RowSource(const char* memory, uint64_t row_bytes, uint64_t rows);
    ~RowSource();
    RowSource(const RowSource&) = delete;
    RowSource& operator=(const RowSource&) = delete;

    uint64_t row_bytes() const { return row_bytes_; }
    uint64_t rows() const { return rows_; }

    // Copies rows, one behind the other, to `to`. Every index is below rows() (the caller has checked). Thread-safe.
    // Returns what went wrong; then bytes of `to` may be anything. A mapped file that was once found too short, or
    // that could not be read, stays an error. `together`: bytes of all that is gathered at this time, of which this may
    // be a part.
    Damage gather(const int64_t* rows, size_t count, char* to, uint64_t together = 0) const;

private:
    struct Block;
    class Blocks;
    class Reader;
    class Registry;

    void map(int descriptor);
    Damage gather_mapped(const int64_t* rows, size_t count, char* to, bool streams) const;
    Damage gather_by_reads(const int64_t* rows, size_t count, char* to) const;
    Damage read_rows(File& file, const int64_t* rows, size_t count, char* to) const;
    void prepare(Block& block, Reader& reader) const;
    bool choose_reads(Block& block, Reader& reader) const;
    bool copy(const Block& block, Reader& reader, char* to, bool streams) const;
    bool is_touched(const char* from, uint64_t bytes) const;
    int64_t mark_touched(const char* from, uint64_t bytes) const;
    void drop_touched() const;
    bool has_its_name(struct stat& status) const;
    bool is_cut_short() const;
    void give_up(Damage damage, const char* row) const;
    Damage examine(const char* lost) const;

    const std::string path_;
    uint64_t inode_ = 0, device_ = 0;
    uint64_t offset_ = 0;
    const uint64_t row_bytes_, rows_;
    const char* first_row_ = nullptr;  // nullptr: a file that is not mapped

    // The mapping, from a page's begin to a page's end; nullptr: there is none.
    char* mapping_ = nullptr;
    uint64_t mapped_bytes_ = 0;
    // The first address that could not be had of it; nullptr while it is sound.
    mutable std::atomic<const char*> lost_{nullptr};
    mutable std::once_flag is_examined_;
    mutable Damage damage_;

    // A bit for each window of the mapping that was touched since the mapping was last dropped.
    std::unique_ptr<std::atomic<uint64_t>[]> touched_;
    mutable std::atomic<uint32_t> blocks_{0};     // copied so far
    mutable std::atomic<int32_t> hints_left_{0};  // blocks to hint without asking whether they are in memory
};

// mmap, or what a test puts in its place: file systems that cannot map.
using MmapFunction = void* (*)(void*, size_t, int, int, int, off_t);
extern std::atomic<MmapFunction> mmap_function;

}  // namespace tdgpu
