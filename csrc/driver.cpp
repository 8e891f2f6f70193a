#include "driver.h"

#include <dlfcn.h>

namespace tdgpu {

Driver::Driver(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw Error(Cause::library, 0, dlerror());

    // Drivers from CUDA 12.0 on hand out each function by the version whose behaviour is wanted; older ones by symbol.
    using GetProcAddress = CUresult (*)(const char*, void**, int, uint64_t, int*);
    auto by_version = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
    auto find = [&](const char* name, int version, const char* symbol) -> void* {
        void* function = nullptr;
        int status = 0;
        if (by_version && by_version(name, &function, version, 0, &status) == kCudaSuccess && function) return function;
        return dlsym(library, symbol);
    };

#define TDGPU_FIND(member, name, version, symbol, arguments) \
    member = reinterpret_cast<decltype(member)>(find(name, version, symbol));
    TDGPU_DRIVER_REQUIRED(TDGPU_FIND)
    TDGPU_DRIVER_OPTIONAL(TDGPU_FIND)
#undef TDGPU_FIND

#define TDGPU_INSIST(member, name, version, symbol, arguments) \
    if (!member) throw Error(Cause::library, 0, path + " lacks " + symbol);
    TDGPU_DRIVER_REQUIRED(TDGPU_INSIST)
#undef TDGPU_INSIST

    check(Init(0), "cuInit");
}

void Driver::fail(CUresult result, const char* what) const {
    const char* name = nullptr;
    if (!GetErrorName || GetErrorName(result, &name) != kCudaSuccess || !name) name = "an unknown error";
    throw Error(Cause::driver, result, std::string(what) + " gave " + name + " (" + std::to_string(result) + ")");
}

void Driver::refuse_capture(CUstream stream) const {
    int status = kCaptureStatusNone;
    const CUresult result = StreamIsCapturing(stream, &status);
    // The default stream answers with an error while another stream is capturing.
    const bool implicit = result >= kCudaFirstCaptureError && result <= kCudaLastCaptureError;
    if (implicit || (result == kCudaSuccess && status != kCaptureStatusNone)) {
        throw Error(Cause::capturing, result, "the stream is capturing a graph");
    }
    check(result, "cuStreamIsCapturing");
}

}  // namespace tdgpu
