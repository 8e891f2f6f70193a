// The decompressors, behind one interface.
#pragma once

#include <memory>

#include "inflate.h"

namespace tdgpu {

constexpr const char* kNoMemory = "no memory for inflating";

// A decompressor for the run's method, whose library must have been loaded. Null, with the reason in `damage`, where
// the method is unknown or no memory can be had.
std::unique_ptr<Decoder> make_decoder(const Run& run, Damage& damage);

}  // namespace tdgpu
