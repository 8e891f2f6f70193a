#include "inflate.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "codecs.h"
#include "decoders.h"

namespace tdgpu {
namespace {

// What ends an open block: an empty, last block of deflate (3 bits, and 7 for its end), so that the block is a stream.
constexpr uint8_t kClosing[2] = {0x03, 0x00};

// A decompressor may now and then neither use nor make a byte, but not for ever.
constexpr int kMostIdleSteps = 16;

Damage failed(Cause cause, std::string message) {
    Damage damage;
    damage.cause = cause;
    damage.message = std::move(message);
    return damage;
}

Damage damaged(std::string message) {
    return failed(Cause::damaged, std::move(message));
}

Damage wrong_size(const Run& run, const char* how) {
    char text[96];
    snprintf(text, sizeof text, "it inflates to %s than the promised %" PRIu64 " bytes", how, run.bytes);
    return damaged(text);
}

Damage wrong_crc(const Run& run, uint32_t crc) {
    char text[96];
    snprintf(text, sizeof text, "its CRC-32 is %08x, where %08x is promised", crc, run.crc);
    return damaged(text);
}

}  // namespace

Inflater::Inflater() = default;

Inflater::~Inflater() {
    rest();
}

void Inflater::rest() {
    if (whole_decompressor_) codecs.libdeflate.free_decompressor(whole_decompressor_);
    whole_decompressor_ = nullptr;
    decoder_.reset();
    std::vector<uint8_t>().swap(in_);
    std::vector<uint8_t>().swap(skipped_);
}

// --- at once ---

bool Inflater::fits(const Run& run) {
    constexpr uint64_t kMost = 16 << 20;
    return Method(run.method) == Method::deflate && run.stored <= kMost && run.bytes <= kMost;
}

Damage Inflater::whole(const Run& run, File& file, void* to) {
    Damage damage = read_whole(run, file);
    if (damage.any()) return damage;
    if (!whole_decompressor_) whole_decompressor_ = codecs.libdeflate.alloc_decompressor();
    if (!whole_decompressor_) return failed(Cause::memory, kNoMemory);
    size_t used = 0, made = 0;
    const size_t size = size_t(run.stored) + (run.flags & Run::kOpenEnd ? sizeof kClosing : 0);
    const int result =
        codecs.libdeflate.decompress(whole_decompressor_, in_.data(), size, to, size_t(run.bytes), &used, &made);
    if (result == 3) return wrong_size(run, "more");
    if (result != 0) return damaged("invalid deflate data");
    if (made != run.bytes) return wrong_size(run, "less");
    if (used != size) return damaged("there are bytes behind the end of its deflate data");
    const uint32_t crc = codecs.libdeflate.crc32(0, to, size_t(run.bytes));
    return crc == run.crc ? Damage() : wrong_crc(run, crc);
}

Damage Inflater::read_whole(const Run& run, File& file) {
    in_.resize(std::max(in_.size(), size_t(run.stored) + sizeof kClosing));
    Damage damage = read(run, file, 0, in_.data(), size_t(run.stored));
    memcpy(in_.data() + run.stored, kClosing, sizeof kClosing);
    return damage;
}

Damage Inflater::read(const Run& run, File& file, uint64_t at, uint8_t* to, size_t bytes) {
    const uint64_t offset = run.file_offset + at;
    const ReadResult result = file.read(to, bytes, off_t(offset));
    Damage damage;
    if (result.got == bytes) return damage;
    damage.cause = result.error ? Cause::read : Cause::truncated;
    damage.error = result.error;
    damage.wanted = offset + bytes;
    damage.found = offset + result.got;
    return damage;
}

// --- in steps ---

Damage Inflater::begin(const Run& run, File& file, const std::atomic<bool>& stop) {
    run_ = &run;
    file_ = &file;
    stop_ = &stop;
    in_begin_ = in_end_ = 0;
    stored_read_ = made_ = 0;
    crc_ = 0;
    has_ended_ = false;
    Damage damage;
    decoder_ = make_decoder(run, damage);
    return damage;
}

Damage Inflater::advance(uint8_t* to, size_t bytes, size_t& made) {
    made = 0;
    int idle_steps = 0;
    while (made < bytes && !has_ended_) {
        if (in_begin_ == in_end_ && stored_read_ < run_->stored) {
            const size_t size = size_t(std::min<uint64_t>(kWindow, run_->stored - stored_read_));
            in_.resize(std::max(in_.size(), kWindow));
            const Damage damage = read(*run_, *file_, stored_read_, in_.data(), size);
            if (damage.any()) return damage;
            stored_read_ += size;
            in_begin_ = 0;
            in_end_ = size;
        }
        const Decoder::Step step = decoder_->step(in_.data() + in_begin_, in_end_ - in_begin_, to + made, bytes - made);
        in_begin_ += step.used;
        made += step.made;
        if (step.cause != Cause::none) return failed(step.cause, step.error);
        has_ended_ = step.has_ended && !(decoder_->goes_on_after_end() && !is_used_up());
        idle_steps = step.used || step.made ? 0 : idle_steps + 1;
        if (idle_steps && is_used_up()) break;
        if (idle_steps > kMostIdleSteps) return damaged("its decompressor stands still");
    }
    return Damage();
}

Damage Inflater::produce(void* to, size_t bytes) {
    // In windows, so that the bytes are in the processor's cache when their CRC is taken, and a stop is noticed.
    uint8_t* next = static_cast<uint8_t*>(to);
    while (bytes) {
        if (stop_->load(std::memory_order_relaxed)) return failed(Cause::cancelled, "the load was cancelled");
        const size_t size = std::min(bytes, kWindow);
        size_t made = 0;
        const Damage damage = advance(next, size, made);
        if (damage.any()) return damage;
        if (made < size) return wrong_size(*run_, "less");
        crc_ = codecs.libdeflate.crc32(crc_, next, made);
        made_ += made;
        next += made;
        bytes -= made;
    }
    return Damage();
}

Damage Inflater::skip_to(uint64_t offset) {
    if (made_ == offset) return Damage();
    skipped_.resize(kWindow);
    while (made_ < offset) {
        const Damage damage = produce(skipped_.data(), size_t(std::min<uint64_t>(offset - made_, kWindow)));
        if (damage.any()) return damage;
    }
    return Damage();
}

Damage Inflater::finish() {
    Damage damage = skip_to(run_->bytes);
    if (damage.any()) return damage;
    // Room for one more byte: what has ended does not use it.
    uint8_t more;
    size_t made = 0;
    damage = advance(&more, 1, made);
    if (damage.any()) return damage;
    if (made) return wrong_size(*run_, "more");
    const Method method = Method(run_->method);
    const bool must_end = method != Method::stored && !(run_->flags & Run::kOpenEnd);
    if (must_end && !has_ended_) return damaged("its compressed data ends early");
    if (has_ended_ && run_->flags & Run::kOpenEnd) return damaged("its deflate stream ends before its last block");
    if (!is_used_up()) return damaged("there are bytes behind the end of its compressed data");
    decoder_.reset();
    return crc_ == run_->crc ? Damage() : wrong_crc(*run_, crc_);
}

}  // namespace tdgpu
