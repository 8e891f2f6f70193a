#pragma once

#include <ATen/core/Tensor.h>

namespace simgpu {

// aten::_copy_from: copies `from` to `to` (one of them, or both, on simgpu), converting and broadcasting as copy_ does, in the
// order of the current stream of the device involved. Returns `to`. With non_blocking, the host does not wait where CUDA's
// copy_ would not.
at::Tensor copy_from(const at::Tensor &from, const at::Tensor &to, bool non_blocking);

// Gives the storage a block of `bytes`, and what fits of the bytes before, in stream order.
void resize_storage(const c10::Storage &storage, size_t bytes);

}  // namespace simgpu
