// One exception for everything that can fail in the core: what kind, the code that the system or driver gave, and
// words.
#pragma once

#include <stdexcept>
#include <string>

namespace tdgpu {

// The numbers are part of the C ABI: tdgpu/transfer/native.py has the same list.
enum class Cause : int {
    none = 0,
    invalid = 1,       // the caller's arguments do not fit together
    library = 2,       // a shared library or a symbol in it is missing
    driver = 3,        // the driver refused a call; code is its CUresult
    read = 4,          // the file could not be opened or read; code is errno
    truncated = 5,     // the file ended before the wanted bytes
    memory = 6,        // no memory; code is errno or the driver's
    cancelled = 7,     // the load was cancelled
    capturing = 8,     // the stream is capturing a graph
    exists_not = 9,    // no such device
    damaged = 10,      // bytes of an archive do not inflate to what it promises
    unsupported = 11,  // they may be sound, but are beyond a limit of this library
};

class Error : public std::runtime_error {
public:
    Error(Cause cause, int code, const std::string& message) : std::runtime_error(message), cause(cause), code(code) {}
    Cause cause;
    int code;
};

}  // namespace tdgpu
