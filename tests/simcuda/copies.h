// Copies, and what makes them unforgiving.
#pragma once

#include "streams.h"

namespace tdsim {

enum class Direction { kHostToDevice, kDeviceToHost, kDeviceToDevice };

// Host-to-device from pinned memory: the source must not change from the moment the copy may start until it is done; a change
// is a violation, and half of the old and half of the new bytes may arrive. From pageable memory: the bytes are taken at the
// call, whatever gates the copy. The documentation allows that ("might be staged first"), and for a caller that fills the
// source later it is the worst case.
//
// Device-to-host to pinned memory: the destination is poisoned until the copy has run. To pageable memory: the call returns
// when the copy is done, as documented.
CUresult copy(Context &context, const char *function, Direction direction, uintptr_t to, uintptr_t from, size_t bytes,
              CUstream stream);

// Enqueues a fill with `value`.
CUresult fill(Lock &lock, const std::shared_ptr<Stream> &stream, const Range &range, unsigned char value);

}  // namespace tdsim
