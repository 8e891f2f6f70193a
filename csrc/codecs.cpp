#include "codecs.h"

#include <dlfcn.h>

#include <mutex>

#include "error.h"

namespace tdgpu {
namespace {

std::mutex mutex;
bool is_loaded[5];

struct Library {
    const std::string& path;
    void* handle;

    template <class Function>
    void find(const char* symbol, Function& function) const {
        function = reinterpret_cast<Function>(dlsym(handle, symbol));
        if (!function) throw Error(Cause::library, 0, path + " lacks " + symbol);
    }
};

}  // namespace

Codecs codecs;

void load_codec(Codec codec, const std::string& path) {
    std::lock_guard<std::mutex> lock(mutex);
    if (is_loaded[int(codec)]) return;
    const Library library{path, dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)};
    if (!library.handle) throw Error(Cause::library, 0, dlerror());
    Codecs found;
    switch (codec) {
        case Codec::libdeflate:
            library.find("libdeflate_alloc_decompressor", found.libdeflate.alloc_decompressor);
            library.find("libdeflate_free_decompressor", found.libdeflate.free_decompressor);
            library.find("libdeflate_deflate_decompress_ex", found.libdeflate.decompress);
            library.find("libdeflate_crc32", found.libdeflate.crc32);
            codecs.libdeflate = found.libdeflate;
            break;
        case Codec::zlib:
            library.find("zng_inflateInit2", found.zlib.init);
            library.find("zng_inflate", found.zlib.inflate);
            library.find("zng_inflateEnd", found.zlib.end);
            library.find("zng_crc32_combine", found.zlib.crc32_combine);
            codecs.zlib = found.zlib;
            break;
        case Codec::bzip2:
            library.find("BZ2_bzDecompressInit", found.bzip2.init);
            library.find("BZ2_bzDecompress", found.bzip2.decompress);
            library.find("BZ2_bzDecompressEnd", found.bzip2.end);
            codecs.bzip2 = found.bzip2;
            break;
        case Codec::lzma:
            library.find("lzma_alone_decoder", found.lzma.init);
            library.find("lzma_code", found.lzma.code);
            library.find("lzma_end", found.lzma.end);
            codecs.lzma = found.lzma;
            break;
        case Codec::zstd:
            library.find("ZSTD_createDStream", found.zstd.create);
            library.find("ZSTD_freeDStream", found.zstd.release);
            library.find("ZSTD_decompressStream", found.zstd.decompress);
            library.find("ZSTD_isError", found.zstd.is_error);
            library.find("ZSTD_getErrorName", found.zstd.error_name);
            codecs.zstd = found.zstd;
            break;
    }
    is_loaded[int(codec)] = true;
}

}  // namespace tdgpu
