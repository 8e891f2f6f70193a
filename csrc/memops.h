// Stream memory operations, which gates are made of: whether they can be had.
#pragma once

#include <string>

#include "driver.h"
#include "ring.h"

namespace tdgpu {

struct MemoryOperations {
    std::string why_not;           // empty: the stream can wait for gates of this ring, and write them
    bool has_batches = false;      // cuStreamBatchMemOp works, too
    bool stream_is_stuck = false;  // what was tried may never end: the stream must not be used any more
};

// Tries them once on `stream`: that the symbols are there does not mean that the device, or a layer between, carries
// them out.
MemoryOperations try_memory_operations(const Driver& driver, const Ring& ring, CUstream stream);

}  // namespace tdgpu
