// What the core's tests share: the simulated driver with its controls, files with known bytes, and a random source.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "engine.h"

namespace check {

// The simulated driver's own functions, beside those of the table.
struct Simulation {
    std::string path;
    int (*set)(const char*, long);
    void (*fail)(const char*, long, int, int);
    void (*skip)(const char*, long);
    long (*stat)(const char*);
    const char* (*violations)();
    int (*alloc)(unsigned long long*, size_t);
    int (*copy_back)(void*, unsigned long long, size_t, tdgpu::CUstream);
    int (*synchronize)(tdgpu::CUstream);

    Simulation() {
        const char* from = getenv("TDSIM_CUDA");
        assert(from && "TDSIM_CUDA names the simulated driver");
        path = from;
        void* library = dlopen(from, RTLD_NOW);
        assert(library);
        find(library, "tdsim_set", set);
        find(library, "tdsim_fail", fail);
        find(library, "tdsim_skip", skip);
        find(library, "tdsim_stat", stat);
        find(library, "tdsim_violations", violations);
        find(library, "tdsim_reset", reset_);
        find(library, "cuMemAlloc_v2", alloc);
        find(library, "cuMemcpyDtoHAsync_v2", copy_back);
        find(library, "cuStreamSynchronize", synchronize);
        reset();
    }

    // Forgets settings, faults and findings. The simulation takes a wait of some seconds for a hang; under a sanitizer
    // on a busy machine honest work can take that long.
    void reset() const {
        reset_();
        set("hang_ms", 20000);
    }

    // Every test ends with this: the simulation saw nothing that a real driver would have punished.
    void expect_clean() const {
        const std::string found = violations();
        if (!found.empty()) fprintf(stderr, "violations: %s\n", found.c_str());
        assert(found.empty());
    }

private:
    void (*reset_)();

    template <class Function>
    static void find(void* library, const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        assert(function);
    }
};

// Random words, as splitmix64 makes them: under a sanitizer those of <random> take most of a test's time.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t operator()() {
        uint64_t word = state_ += 0x9E3779B97F4A7C15;
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9;
        word = (word ^ word >> 27) * 0x94D049BB133111EB;
        return word ^ word >> 31;
    }

private:
    uint64_t state_;
};

inline std::vector<char> random_bytes(size_t size, uint64_t seed) {
    Random random(seed);
    std::vector<char> bytes(size);
    for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
        const uint64_t word = random();
        memcpy(&bytes[at], &word, std::min(size - at, sizeof word));
    }
    return bytes;
}

// Makes an empty file, for the caller to remove.
inline std::string new_file() {
    char name[] = "/tmp/tdgpu-test-XXXXXX";
    const int descriptor = mkstemp(name);
    assert(descriptor >= 0);
    close(descriptor);
    return name;
}

// A temporary file with random bytes, gone at the end.
struct RandomFile {
    std::string path;
    std::vector<char> bytes;

    explicit RandomFile(size_t size, unsigned seed = 1) : bytes(random_bytes(size, seed)) {
        path = new_file();
        const int descriptor = open(path.c_str(), O_WRONLY | O_CLOEXEC);
        assert(descriptor >= 0 && write(descriptor, bytes.data(), size) == ssize_t(size));
        close(descriptor);
    }
    ~RandomFile() { unlink(path.c_str()); }
};

// One file in chunks, each of several pieces.
inline tdgpu::Plan plan_of(const RandomFile& file, uint64_t destination, size_t chunk_bytes, size_t piece_bytes) {
    tdgpu::Plan plan;
    plan.files = {{file.path, 0}};
    for (size_t start = 0; start < file.bytes.size(); start += chunk_bytes) {
        const size_t size = std::min(chunk_bytes, file.bytes.size() - start);
        tdgpu::Chunk chunk{destination + start, size, uint32_t(plan.pieces.size()), 0, 0, 0};
        for (size_t at = 0; at < size; at += piece_bytes) {
            plan.pieces.push_back({start + at, std::min(piece_bytes, size - at), at, 0, 0, 0, 0});
            chunk.piece_count++;
        }
        plan.chunks.push_back(chunk);
    }
    return plan;
}

template <class Function>
tdgpu::Cause cause_of(Function function) {
    try {
        function();
    } catch (const tdgpu::Error& error) {
        return error.cause;
    }
    return tdgpu::Cause::none;
}

}  // namespace check
