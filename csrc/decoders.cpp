#include "decoders.h"

#include <algorithm>
#include <climits>
#include <cstring>

#include "codecs.h"

namespace tdgpu {
namespace {

class StoredDecoder final : public Decoder {
public:
    Step step(const uint8_t* in, size_t in_size, uint8_t* out, size_t out_size) override {
        Step step;
        step.used = step.made = std::min(in_size, out_size);
        memcpy(out, in, step.used);
        return step;
    }
};

void fail(Decoder::Step& step, Cause cause, const char* why) {
    step.cause = cause;
    step.error = why;
}

// The stream interfaces of these libraries count in 32 bits.
unsigned at_most_4g(size_t size) {
    return unsigned(std::min<size_t>(size, UINT_MAX));
}

class DeflateDecoder final : public Decoder {
public:
    ~DeflateDecoder() override {
        if (is_ready_) codecs.zlib.end(&stream_);
    }
    bool init() { return is_ready_ = codecs.zlib.init(&stream_, kRaw) == 0; }

    Step step(const uint8_t* in, size_t in_size, uint8_t* out, size_t out_size) override {
        stream_.next_in = in;
        stream_.avail_in = at_most_4g(in_size);
        stream_.next_out = out;
        stream_.avail_out = at_most_4g(out_size);
        const int result = codecs.zlib.inflate(&stream_, 0);
        Step step{size_t(stream_.next_in - in), size_t(stream_.next_out - out), result == kStreamEnd};
        // "No progress" is for the caller to judge, who knows whether there is more input.
        if (result != 0 && result != kStreamEnd && result != kNoProgress) {
            if (result == kMemoryError)
                fail(step, Cause::memory, kNoMemory);
            else
                fail(step, Cause::damaged, stream_.message ? stream_.message : "invalid deflate data");
        }
        return step;
    }

private:
    static constexpr int kRaw = -15, kStreamEnd = 1, kMemoryError = -4, kNoProgress = -5;
    ZlibStream stream_{};
    bool is_ready_ = false;
};

class Bzip2Decoder final : public Decoder {
public:
    ~Bzip2Decoder() override {
        if (is_ready_) codecs.bzip2.end(&stream_);
    }
    bool init() { return is_ready_ = codecs.bzip2.init(&stream_, 0, 0) == 0; }

    Step step(const uint8_t* in, size_t in_size, uint8_t* out, size_t out_size) override {
        stream_.next_in = reinterpret_cast<const char*>(in);
        stream_.avail_in = at_most_4g(in_size);
        stream_.next_out = reinterpret_cast<char*>(out);
        stream_.avail_out = at_most_4g(out_size);
        const int result = codecs.bzip2.decompress(&stream_);
        Step step;
        step.used = size_t(reinterpret_cast<const uint8_t*>(stream_.next_in) - in);
        step.made = size_t(reinterpret_cast<uint8_t*>(stream_.next_out) - out);
        step.has_ended = result == kStreamEnd;
        if (result == kMemoryError)
            fail(step, Cause::memory, kNoMemory);
        else if (result != 0 && result != kStreamEnd)
            fail(step, Cause::damaged, "invalid bzip2 data");
        return step;
    }

private:
    static constexpr int kStreamEnd = 4, kMemoryError = -3;
    Bzip2Stream stream_{};
    bool is_ready_ = false;
};

// Zip puts a header of its own before LZMA data: the version of the writer (2 bytes), the length of the properties
// (2 bytes, always 5), the properties: one byte and the size of the dictionary (read: APPNOTE.TXT 5.8.8). The library's
// "alone" format begins with the properties and the inflated size, so that header is made here.
class LzmaDecoder final : public Decoder {
public:
    explicit LzmaDecoder(const Run& run) : bytes_(run.bytes), has_marker_(run.flags & Run::kEndMarker) {}
    ~LzmaDecoder() override {
        if (is_ready_) codecs.lzma.end(&stream_);
    }
    bool init() { return is_ready_ = codecs.lzma.init(&stream_, kMostMemory) == 0; }

    Step step(const uint8_t* in, size_t in_size, uint8_t* out, size_t out_size) override {
        Step step;
        while (header_used_ < sizeof header_ && step.used < in_size) header_[header_used_++] = in[step.used++];
        if (header_used_ < sizeof header_) return step;
        if (!has_begun_) {
            has_begun_ = true;
            if (header_[2] != 5 || header_[3] != 0) return invalid_properties();
            uint32_t dictionary;
            memcpy(&dictionary, header_ + 5, sizeof dictionary);
            // No match reaches back further than there are bytes: a larger dictionary would only cost memory.
            dictionary = uint32_t(std::min<uint64_t>(dictionary, std::max<uint64_t>(bytes_, 4096)));
            uint8_t alone[13];
            alone[0] = header_[4];
            memcpy(alone + 1, &dictionary, sizeof dictionary);
            // All ones is an unknown size: the data ends with a marker. Older versions of the library refuse both.
            const uint64_t size = has_marker_ ? UINT64_MAX : bytes_;
            memcpy(alone + 5, &size, sizeof size);
            stream_.next_in = alone;
            stream_.avail_in = sizeof alone;
            stream_.next_out = out;
            stream_.avail_out = out_size;  // nothing comes of a header, but without room the library stands still
            const int result = codecs.lzma.code(&stream_, 0);
            if (result != 0 && result != kNoProgress) {
                fail_with(step, result);
                return step;
            }
            if (stream_.avail_in) return invalid_properties();
        }
        stream_.next_in = in + step.used;
        stream_.avail_in = in_size - step.used;
        stream_.next_out = out;
        stream_.avail_out = out_size;
        const int result = codecs.lzma.code(&stream_, 0);
        step.used = size_t(stream_.next_in - in);
        step.made = size_t(stream_.next_out - out);
        step.has_ended = result == kStreamEnd;
        if (result != 0 && result != kStreamEnd && result != kNoProgress) fail_with(step, result);
        return step;
    }

private:
    static constexpr int kStreamEnd = 1, kMemoryError = 5, kMemoryLimit = 6, kNoProgress = 10;
    // The largest preset of xz and 7-Zip has a dictionary of 64 MiB.
    static constexpr uint64_t kMostMemory = uint64_t(288) << 20;

    static Step invalid_properties() {
        Step step;
        fail(step, Cause::damaged, "invalid lzma properties");
        return step;
    }
    static void fail_with(Step& step, int result) {
        if (result == kMemoryError)
            fail(step, Cause::memory, kNoMemory);
        else if (result == kMemoryLimit)
            fail(step, Cause::unsupported, "its lzma dictionary is larger than 256 MiB");
        else
            fail(step, Cause::damaged, "invalid lzma data");
    }

    const uint64_t bytes_;
    const bool has_marker_;
    LzmaStream stream_{};
    bool is_ready_ = false;
    bool has_begun_ = false;
    uint8_t header_[9];
    size_t header_used_ = 0;
};

class ZstdDecoder final : public Decoder {
public:
    ~ZstdDecoder() override {
        if (stream_) codecs.zstd.release(stream_);
    }
    bool init() { return (stream_ = codecs.zstd.create()) != nullptr; }

    Step step(const uint8_t* in, size_t in_size, uint8_t* out, size_t out_size) override {
        ZstdIn from{in, in_size, 0};
        ZstdOut to{out, out_size, 0};
        const size_t result = codecs.zstd.decompress(stream_, &to, &from);
        Step step{from.position, to.position, result == 0};
        if (codecs.zstd.is_error(result)) {
            // The library gives its error codes as negative sizes (read: zstd_errors.h).
            const size_t code = size_t(0) - result;
            const Cause cause = code == kMemoryError      ? Cause::memory
                                : code == kWindowTooLarge ? Cause::unsupported
                                                          : Cause::damaged;
            fail(step, cause, codecs.zstd.error_name(result));
        }
        return step;
    }
    bool goes_on_after_end() const override { return true; }  // a stream is any number of frames

private:
    static constexpr size_t kWindowTooLarge = 16, kMemoryError = 64;
    void* stream_ = nullptr;
};

template <class Kind, class... Arguments>
std::unique_ptr<Decoder> make(Damage& damage, Arguments&&... arguments) {
    auto decoder = std::make_unique<Kind>(std::forward<Arguments>(arguments)...);
    if (decoder->init()) return decoder;
    damage.cause = Cause::memory;
    damage.message = kNoMemory;
    return nullptr;
}

}  // namespace

std::unique_ptr<Decoder> make_decoder(const Run& run, Damage& damage) {
    switch (Method(run.method)) {
        case Method::stored:
            return std::make_unique<StoredDecoder>();
        case Method::deflate:
            return make<DeflateDecoder>(damage);
        case Method::bzip2:
            return make<Bzip2Decoder>(damage);
        case Method::lzma:
            return make<LzmaDecoder>(damage, run);
        case Method::zstd:
            return make<ZstdDecoder>(damage);
    }
    damage.cause = Cause::unsupported;
    damage.message = "an unknown compression method";
    return nullptr;
}

}  // namespace tdgpu
