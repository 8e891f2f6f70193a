// What was compressed arrives whole, in steps, in blocks and in part; what is damaged is found out, whatever is wrong.
//
// The packages that the product inflates with are Python's, so the system's zlib stands in for both of them here: the
// tables are filled with functions that call it.
#include <cstring>
#include <thread>

#include "check.h"
#include "codecs.h"
#include "inflate.h"
#include "stage.h"

using namespace tdgpu;

namespace {

// --- zlib ---

struct SystemStream {  // z_stream on 64-bit Linux
    const uint8_t* next_in;
    unsigned avail_in;
    unsigned long total_in;
    uint8_t* next_out;
    unsigned avail_out;
    unsigned long total_out;
    const char* message;
    void *state, *allocate, *release, *opaque;
    int data_type;
    unsigned long adler, reserved;
};

void* system_zlib;
template <class Function>
Function symbol(const char* name) {
    auto function = reinterpret_cast<Function>(dlsym(system_zlib, name));
    assert(function);
    return function;
}

// The fields that matter lie at the same places.
SystemStream* as_system(ZlibStream* stream) {
    static_assert(offsetof(SystemStream, data_type) == offsetof(ZlibStream, data_type), "as zlib has it");
    return reinterpret_cast<SystemStream*>(stream);
}

struct Roomy {  // zlib writes one word more than zlib-ng's structure has
    ZlibStream stream;
    uint64_t room;
};

int init(ZlibStream* stream, int bits) {
    auto* roomy = new Roomy{};
    stream->opaque = roomy;
    return symbol<int (*)(SystemStream*, int, const char*, int)>("inflateInit2_")(as_system(&roomy->stream), bits, "1",
                                                                                  sizeof(SystemStream));
}

// How often zlib was called; and whether it waits from now on, the third time, for a load to be cancelled.
std::atomic<unsigned> steps{0};
std::atomic<bool> is_held{false};

int step(ZlibStream* stream, int flush) {
    if (++steps >= 3)
        while (is_held) std::this_thread::yield();
    auto* own = as_system(&static_cast<Roomy*>(stream->opaque)->stream);
    own->next_in = stream->next_in;
    own->avail_in = stream->avail_in;
    own->next_out = stream->next_out;
    own->avail_out = stream->avail_out;
    const int result = symbol<int (*)(SystemStream*, int)>("inflate")(own, flush);
    stream->next_in = own->next_in;
    stream->avail_in = own->avail_in;
    stream->next_out = own->next_out;
    stream->avail_out = own->avail_out;
    stream->message = own->message;
    return result;
}
int end(ZlibStream* stream) {
    auto* roomy = static_cast<Roomy*>(stream->opaque);
    const int result = symbol<int (*)(SystemStream*)>("inflateEnd")(as_system(&roomy->stream));
    delete roomy;
    return result;
}
uint32_t crc_of(uint32_t crc, const void* data, size_t size) {
    return uint32_t(symbol<unsigned long (*)(unsigned long, const uint8_t*, size_t)>("crc32_z")(
        crc, static_cast<const uint8_t*>(data), size));
}
int at_once(void*, const void* in, size_t in_size, void* out, size_t out_size, size_t* used, size_t* made) {
    ZlibStream stream{};
    assert(init(&stream, -15) == 0);
    std::vector<uint8_t> more(out_size + 1);
    stream.next_in = static_cast<const uint8_t*>(in);
    stream.avail_in = unsigned(in_size);
    stream.next_out = more.data();
    stream.avail_out = unsigned(out_size + 1);
    const int result = step(&stream, 0);
    *made = size_t(stream.next_out - more.data());
    *used = size_t(stream.next_in - static_cast<const uint8_t*>(in));
    end(&stream);
    if (*made > out_size) return 3;
    memcpy(out, more.data(), *made);
    return result == 1 ? 0 : 1;
}

std::vector<uint8_t> deflated(const char* data, size_t size, bool is_open) {
    SystemStream stream{};
    assert(symbol<int (*)(SystemStream*, int, int, int, int, int, const char*, int)>("deflateInit2_")(
               &stream, 6, 8, -15, 8, 0, "1", sizeof(SystemStream)) == 0);
    std::vector<uint8_t> out(size + size / 100 + 100);
    stream.next_in = reinterpret_cast<const uint8_t*>(data);
    stream.avail_in = unsigned(size);
    stream.next_out = out.data();
    stream.avail_out = unsigned(out.size());
    constexpr int kFullFlush = 3, kFinish = 4;
    symbol<int (*)(SystemStream*, int)>("deflate")(&stream, is_open ? kFullFlush : kFinish);
    out.resize(size_t(stream.next_out - out.data()));
    symbol<int (*)(SystemStream*)>("deflateEnd")(&stream);
    return out;
}

// --- archives of a kind ---

// Text-like bytes, so that there is something to compress.
std::vector<char> contents(size_t size, unsigned seed) {
    std::vector<char> bytes = check::random_bytes(size, seed);
    for (char& byte : bytes) byte = char('a' + (byte & 7) * ((byte >> 3 & 15) % 3));
    return bytes;
}

struct Archive {
    std::string path;
    std::vector<uint8_t> file;
    std::vector<char> bytes;
    std::vector<Run> runs;  // one per block

    Archive(size_t size, size_t block, unsigned seed, Method method = Method::deflate) : bytes(contents(size, seed)) {
        file.assign(seed % 100, 0xAA);  // something before
        for (size_t at = 0; at < size; at += block) {
            const size_t n = std::min(block, size - at);
            const bool is_open = at + n < size;
            std::vector<uint8_t> packed(bytes.begin() + long(at), bytes.begin() + long(at + n));
            if (method == Method::deflate) packed = deflated(bytes.data() + at, n, is_open);
            const bool is_marked_open = is_open && method == Method::deflate;
            runs.push_back({file.size(), packed.size(), n, 0, uint32_t(method), crc_of(0, bytes.data() + at, n),
                            is_marked_open ? Run::kOpenEnd : 0});
            file.insert(file.end(), packed.begin(), packed.end());
        }
        path = check::new_file();
        write_file();
    }
    void write_file() const {
        FILE* to = fopen(path.c_str(), "wb");
        assert(to && fwrite(file.data(), 1, file.size(), to) == file.size());
        fclose(to);
    }
    ~Archive() { unlink(path.c_str()); }

    // Bytes [first, first + size), in chunks of at most `chunk` bytes, which runs may share.
    Plan plan(uint64_t destination, size_t first, size_t size, size_t chunk) const {
        Plan plan;
        plan.files = {{path, 0}};
        size_t run_start = 0;
        for (const Run& run : runs) {
            const size_t from = std::max(first, run_start), to = std::min(first + size, run_start + size_t(run.bytes));
            if (from < to) {
                plan.runs.push_back(run);
                for (size_t at = from; at < to;) {
                    const size_t n = std::min(chunk - (at - first) % chunk, to - at);
                    if ((at - first) % chunk == 0 || plan.chunks.empty()) {
                        plan.chunks.push_back(
                            {destination ? destination + at - first : 0, 0, uint32_t(plan.pieces.size()), 0, 0, 0});
                    }
                    Chunk& last = plan.chunks.back();
                    plan.pieces.push_back({at - run_start, n, last.bytes, 0, 0, uint32_t(plan.runs.size()), 0});
                    last.bytes += n;
                    last.piece_count++;
                    at += n;
                }
            }
            run_start += run.bytes;
        }
        return plan;
    }
};

Failure read(Plan plan, unsigned threads) {
    plan.check(0, UINT64_MAX);
    Readers readers(threads);
    auto load = std::make_shared<Load>(std::move(plan), nullptr);
    readers.post(load);
    assert(load->wait_filled(60'000));
    return load->failure();
}

void everything_arrives() {
    check::Random random(7);
    for (const Method method : {Method::deflate, Method::stored}) {
        for (const size_t block : {size_t(1 << 30), size_t(100'000), size_t(4096), size_t(1)}) {
            const size_t size = block == 1 ? 50 : 700'000;
            const Archive archive(size, block, unsigned(block % 97) + 1, method);
            for (int turn = 0; turn < 6; turn++) {
                const size_t first = turn < 2 ? 0 : random() % size,
                             wanted = turn < 2 ? size : 1 + random() % (size - first);
                std::vector<char> to(wanted + 64, 0x55);
                const size_t chunk = turn % 2 ? wanted : 1 + random() % std::max<size_t>(wanted / 5, 1);
                const auto address = reinterpret_cast<uint64_t>(to.data());
                const Failure failure = read(archive.plan(address, first, wanted, chunk), 1 + unsigned(turn) % 3);
                assert(failure.cause == Cause::none);
                assert(memcmp(to.data(), archive.bytes.data() + first, wanted) == 0);
                for (size_t i = wanted; i < to.size(); i++) assert(to[i] == 0x55);  // and not a byte more
                // The same without a destination: only looked at.
                assert(read(archive.plan(0, first, wanted, chunk), 2).cause == Cause::none);
            }
        }
    }
}

// Seeds every kind of damage; each must be found, and no byte may be written beside the destination.
void damage_is_found() {
    using Change = void (*)(Archive&);
    const struct {
        Change change;
        Cause cause;
    } kinds[] = {
        {[](Archive& a) { a.runs[1].crc ^= 1; }, Cause::damaged},
        {[](Archive& a) { a.runs[1].bytes -= 1; }, Cause::damaged},
        {[](Archive& a) { a.runs[1].bytes += 1; }, Cause::damaged},
        {[](Archive& a) { a.runs[1].stored -= 7; }, Cause::damaged},
        {[](Archive& a) {
             a.runs.back().stored += 1;
             a.file.push_back(0);
         },
         Cause::damaged},
        {[](Archive& a) { a.runs.back().flags ^= Run::kOpenEnd; }, Cause::damaged},
        {[](Archive& a) { a.runs[1].flags ^= Run::kOpenEnd; }, Cause::damaged},
        {[](Archive& a) { a.runs[1].file_offset += 3; }, Cause::damaged},
        {[](Archive& a) { a.file[a.runs[1].file_offset + 50] ^= 0x10; }, Cause::damaged},
        {[](Archive& a) { a.file[a.runs[1].file_offset] ^= 0x06; }, Cause::damaged},
        {[](Archive& a) { a.file.resize(a.runs[2].file_offset + 10); }, Cause::truncated},
        {[](Archive& a) { a.runs[1].method = 99; }, Cause::unsupported},
    };
    for (const auto& kind : kinds) {
        for (const size_t chunk : {size_t(1 << 20), size_t(3000)}) {
            for (const bool is_stepped : {false, true}) {
                Archive archive(100'000, 30'000, 5);
                kind.change(archive);
                archive.write_file();
                const size_t wanted = is_stepped ? 99'000 : 100'000;
                std::vector<char> to(150'000, 0x55);
                Plan plan = archive.plan(reinterpret_cast<uint64_t>(to.data() + 100), 0, wanted, chunk);
                const Failure failure = read(std::move(plan), 2);
                if (failure.cause != kind.cause)
                    fprintf(stderr, "damage %ld: cause %d, %s\n", long(&kind - kinds), int(failure.cause),
                            failure.message.c_str());
                assert(failure.cause == kind.cause && failure.piece >= 0);
                for (size_t i = 0; i < 100; i++) assert(to[i] == 0x55);
                for (size_t i = 100 + wanted + 1; i < to.size(); i++) assert(to[i] == 0x55);
            }
        }
    }
}

// A run of gigabytes must end soon once nobody wants it: no window of it is inflated but the one that was begun.
void a_long_run_can_be_cancelled() {
    constexpr size_t kWindows = 24, kSize = kWindows * Inflater::kWindow;
    const Archive archive(kSize, 1 << 30, 3);
    std::vector<char> to(kSize);
    for (const bool is_cancelled : {false, true}) {
        steps = 0;
        is_held = is_cancelled;
        Readers readers(2);
        // A byte less than the run has: what is wanted whole is inflated at once.
        Plan plan = archive.plan(reinterpret_cast<uint64_t>(to.data()), 0, kSize - 1, kSize);
        auto load = std::make_shared<Load>(std::move(plan), nullptr);
        readers.post(load);
        if (is_cancelled) {
            while (steps < 3) std::this_thread::yield();
            readers.cancel();
            is_held = false;
        }
        assert(load->wait_filled(60'000) && load->failure().cause == Cause::none);
        assert(is_cancelled ? steps <= 5 : steps >= kWindows);
    }
}

// Loads whose runs need more chunks than the ring holds, several at a time, with fewer threads than runs, and a limit
// on the threads of one of them: all chunks come, in order, and what a consumer takes is right.
void runs_share_a_small_ring() {
    for (const unsigned threads : {1u, 2u, 4u}) {
        std::vector<char> memory(64 << 10);
        Stage stage(memory.data(), memory.size(), threads);
        for (unsigned seed = 1; seed <= 6; seed++) {
            const Archive archive(400'000 + seed * 1000, seed % 2 ? 1 << 30 : 50'000, seed);
            Plan plan = archive.plan(1 << 20, 0, archive.bytes.size(), 8192);
            if (seed % 3 == 0) plan.most_threads = 1;
            const auto load = stage.post(std::move(plan));
            const uint32_t chunks = load->chunk_count();
            const uint32_t end = seed == 5 ? chunks / 2 : chunks;  // one is given up half-way
            for (uint32_t c = 0; c < end; c++) {
                size_t offset = 0;
                while (!stage.wait_ready(*load, c, 5, offset)) assert(load->failure().cause == Cause::none);
                const Chunk& chunk = load->plan().chunks[c];
                assert(memcmp(memory.data() + offset, archive.bytes.data() + (chunk.destination - (1 << 20)),
                              chunk.bytes) == 0);
                memset(memory.data() + offset, 0x77, chunk.bytes);
                stage.set_copied(*load, c);
            }
            if (end < chunks) {
                load->cancel();
                load->strand(end);
                stage.set_copied(*load, chunks - 1);
            }
            assert(load->wait_filled(60'000) && load->failure().cause == Cause::none);
        }
    }
}

}  // namespace

int main() {
    system_zlib = dlopen("libz.so.1", RTLD_NOW);
    assert(system_zlib);
    codecs.zlib = {init, step, end, nullptr};
    codecs.libdeflate = {[]() -> void* { return malloc(1); }, free, at_once, crc_of};
    everything_arrives();
    damage_is_found();
    a_long_run_can_be_cancelled();
    runs_share_a_small_ring();
    puts("inflate: ok");
}
