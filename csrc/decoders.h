// The decompressors, behind one interface.
#pragma once

#include <memory>

#include "inflate.h"

namespace tdgpu {

// A decompressor for the run's method, whose library must have been loaded. Null, with the reason in `error`, where the
// method is unknown or no memory can be had.
std::unique_ptr<Decoder> make_decoder(const Run& run, std::string& error);

}  // namespace tdgpu
