// Inflating the runs of an archive: bytes that were compressed together and can only be inflated from their start. A
// run is a whole entry, or one block of an entry that was packed in blocks.
//
// Nothing in an archive is believed: what a run inflates to must have the size and the CRC-32 that the archive
// promises, it must end where its compressed bytes end, and memory is bounded whatever the archive says.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "error.h"
#include "io.h"

namespace tdgpu {

// Zip's numbers of the methods.
enum class Method : uint32_t { stored = 0, deflate = 8, bzip2 = 12, lzma = 14, zstd = 93 };

// Part of the C ABI.
struct Run {
    uint64_t file_offset;
    uint64_t stored;  // compressed bytes
    uint64_t bytes;   // inflated
    uint32_t file;    // index into the plan's files
    uint32_t method;
    uint32_t crc;    // of the inflated bytes
    uint32_t flags;  // kOpenEnd, kEndMarker

    static constexpr uint32_t kOpenEnd = 1;    // a deflate block that others follow: the stream does not end in it
    static constexpr uint32_t kEndMarker = 2;  // an lzma stream that ends with a marker
};

// Why bytes could not be had. `cause` is none where they could.
struct Damage {
    Cause cause = Cause::none;
    int error = 0;                   // errno, for Cause::read
    uint64_t wanted = 0, found = 0;  // for read and truncated, in bytes of the file
    std::string message;             // for the others

    bool any() const { return cause != Cause::none; }
};

// One library's decompressor, fed step by step.
class Decoder {
public:
    struct Step {
        size_t used = 0, made = 0;
        bool has_ended = false;
        Cause cause = Cause::none;
        const char* error = nullptr;  // unless cause is none
    };
    virtual ~Decoder() = default;
    // Whether what follows an end is another part of the same stream.
    virtual bool goes_on_after_end() const { return false; }
    virtual Step step(const uint8_t* in, size_t in_size, uint8_t* out, size_t out_size) = 0;
};

// Inflates one run after the other, for one thread. It keeps its buffers and decompressors until `rest`.
class Inflater {
public:
    Inflater();
    ~Inflater();

    // Inflates all of a run at once, which is faster than in steps. For runs with fits(run).
    Damage whole(const Run& run, File& file, void* to);
    static bool fits(const Run& run);

    // In steps: begin, then produce and skip_to in order, then finish, which inflates what is left and looks at the
    // end. Once `stop` is set, all of them end soon, and fail.
    Damage begin(const Run& run, File& file, const std::atomic<bool>& stop);
    Damage produce(void* to, size_t bytes);
    Damage skip_to(uint64_t offset);  // in the inflated bytes
    Damage finish();

    // Gives the memory back until the next run.
    void rest();

    static constexpr size_t kWindow = 256 << 10;

private:
    static Damage read(const Run& run, File& file, uint64_t at, uint8_t* to, size_t bytes);
    Damage read_whole(const Run& run, File& file);
    Damage advance(uint8_t* to, size_t bytes, size_t& made);
    bool is_used_up() const { return in_begin_ == in_end_ && stored_read_ == run_->stored; }

    void* whole_decompressor_ = nullptr;
    std::vector<uint8_t> in_;
    std::vector<uint8_t> skipped_;

    const Run* run_ = nullptr;
    File* file_ = nullptr;
    const std::atomic<bool>* stop_ = nullptr;
    std::unique_ptr<Decoder> decoder_;
    size_t in_begin_ = 0, in_end_ = 0;  // what is not used yet of in_
    uint64_t stored_read_ = 0;
    uint64_t made_ = 0;
    uint32_t crc_ = 0;
    bool has_ended_ = false;
};

}  // namespace tdgpu
