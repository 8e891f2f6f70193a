// The libraries that inflate, as tables of their functions, found at run time: the core is built without them.
//
// Each declaration is a small part of the library's public header, and the structures have the layout that the library
// documents for 64-bit Linux. A table is filled once and stays for the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tdgpu {

// Part of the C ABI.
enum class Codec : int { libdeflate = 0, zlib = 1, bzip2 = 2, lzma = 3, zstd = 4 };

// libdeflate: a whole deflate stream in one call. The fastest there is, where all of it fits in memory.
struct Libdeflate {
    void* (*alloc_decompressor)();
    void (*free_decompressor)(void*);
    // Gives 0 for success, 1 for bad data, 2 for less output than `out_size`, 3 for more.
    int (*decompress)(void* decompressor, const void* in, size_t in_size, void* out, size_t out_size, size_t* in_used,
                      size_t* out_used);
    uint32_t (*crc32)(uint32_t crc, const void* data, size_t size);
};

// zlib-ng in its native mode: deflate piece by piece.
struct ZlibStream {
    const uint8_t* next_in;
    uint32_t avail_in;
    size_t total_in;
    uint8_t* next_out;
    uint32_t avail_out;
    size_t total_out;
    const char* message;
    void* state;
    void* allocate;
    void* release;
    void* opaque;
    int data_type;
    uint32_t adler;
    unsigned long reserved;
};
static_assert(sizeof(ZlibStream) == 104, "zng_stream on 64-bit Linux");

struct Zlib {
    int (*init)(ZlibStream*, int window_bits);
    int (*inflate)(ZlibStream*, int flush);
    int (*end)(ZlibStream*);
    uint32_t (*crc32_combine)(uint32_t first, uint32_t second, int64_t second_size);
};

struct Bzip2Stream {
    const char* next_in;
    unsigned avail_in, total_in_low, total_in_high;
    char* next_out;
    unsigned avail_out, total_out_low, total_out_high;
    void* state;
    void* allocate;
    void* release;
    void* opaque;
};
static_assert(sizeof(Bzip2Stream) == 80, "bz_stream on 64-bit Linux");

struct Bzip2 {
    int (*init)(Bzip2Stream*, int verbosity, int small);
    int (*decompress)(Bzip2Stream*);
    int (*end)(Bzip2Stream*);
};

struct LzmaStream {
    const uint8_t* next_in;
    size_t avail_in;
    uint64_t total_in;
    uint8_t* next_out;
    size_t avail_out;
    uint64_t total_out;
    const void* allocator;
    void* internal;
    void* reserved_pointers[4];
    uint64_t seek_position, reserved_number;
    size_t reserved_sizes[2];
    int reserved_enums[2];
};
static_assert(sizeof(LzmaStream) == 136, "lzma_stream on 64-bit Linux");

struct Lzma {
    int (*init)(LzmaStream*, uint64_t memory_limit);
    int (*code)(LzmaStream*, int action);
    void (*end)(LzmaStream*);
};

struct ZstdIn {
    const void* data;
    size_t size, position;
};
struct ZstdOut {
    void* data;
    size_t size, position;
};
struct Zstd {
    void* (*create)();
    size_t (*release)(void*);
    size_t (*decompress)(void*, ZstdOut*, ZstdIn*);
    unsigned (*is_error)(size_t);
    const char* (*error_name)(size_t);
};

struct Codecs {
    Libdeflate libdeflate{};
    Zlib zlib{};
    Bzip2 bzip2{};
    Lzma lzma{};
    Zstd zstd{};
};

// Filled by load_codec before a load needs them, and read by its readers only.
extern Codecs codecs;

// Opens a library that has the codec's functions, itself or through a library that it was linked with; the first one
// that was found stays. Throws Error(library), which names what is missing.
void load_codec(Codec codec, const std::string& path);

}  // namespace tdgpu
