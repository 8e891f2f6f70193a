// The operators that a device must have of its own. All the others run through the CPU fallback: inputs are read in the order
// of the current stream, the CPU computes, results are written back.
#include "ops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_nested_tensor_size_native.h>
#include <ATen/ops/_nested_tensor_storage_offsets_native.h>
#include <ATen/ops/_nested_tensor_strides_native.h>
#include <ATen/ops/_nested_view_from_buffer_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/is_same_size_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/select_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unbind_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "allocator.h"
#include "device.h"

namespace simgpu {
namespace {

using Layout = std::optional<c10::Layout>;
using OptionalDevice = std::optional<c10::Device>;
using OptionalDtype = std::optional<c10::ScalarType>;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, OptionalDtype dtype, Layout, OptionalDevice device, std::optional<bool> pinned,
                 std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "simgpu: only host memory can be pinned");
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_generic(size, &device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, OptionalDtype dtype, Layout, OptionalDevice device,
                         std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "simgpu: only host memory can be pinned");
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

void grow_storage(const at::Tensor &tensor) {
  const auto needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                                       size_t(tensor.storage_offset()));
  if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
}

const at::Tensor &resize_(const at::Tensor &tensor, at::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  if (tensor.sizes() != size) {
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    grow_storage(tensor);
  }
  if (format && *format != c10::MemoryFormat::Preserve) tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return tensor;
}

at::Tensor &set_storage(at::Tensor &tensor, c10::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  at::native::checkSetStorage(tensor, std::move(storage), offset, size, stride);
  auto *implementation = tensor.unsafeGetTensorImpl();
  implementation->set_storage_offset(offset);
  if (stride.data()) {
    implementation->set_sizes_and_strides(size, stride);
  } else {
    implementation->set_sizes_contiguous(size);
  }
  if (tensor.numel()) grow_storage(tensor);
  return tensor;
}

at::Tensor &set_empty(at::Tensor &tensor) {
  const c10::DeviceGuard guard(tensor.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, &device_allocator(), /*resizable=*/true);
  return set_storage(tensor, storage, 0, {0}, {});
}

at::Tensor copy_from_and_resize(const at::Tensor &from, const at::Tensor &to) {
  if (from.sizes() != to.sizes()) resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, /*non_blocking=*/false);
}

at::Scalar local_scalar_dense(const at::Tensor &tensor) { return tensor.cpu().item(); }

void record_stream(at::Tensor &tensor, c10::Stream stream) {
  device_allocator().recordStream(tensor.storage().data_ptr(), stream);
}

void cpu_fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&cpu_fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("record_stream", record_stream);
  // Views: they touch no memory, so torch's own code serves.
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("is_set_to", at::native::is_set_to);
  library.impl("set_", set_empty);
  library.impl("set_.source_Storage", [](at::Tensor &tensor, c10::Storage storage) -> at::Tensor & {
    const auto elements = int64_t(storage.nbytes() / tensor.element_size());
    return set_storage(tensor, std::move(storage), 0, {elements}, {});
  });
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("_nested_view_from_buffer", at::native::_nested_view_from_buffer);
}

// copy_from looks at the conjugate and negative bits itself. torch's fallback for them would clone, which copies, which comes
// back here, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
  library.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
  library.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

// Strided nested tensors: what a save of one needs (views, sizes, moving between devices). No arithmetic.
TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, library) {
  library.impl("unbind.int", at::native::NestedTensor_unbind);
  library.impl("select.int", at::native::select_nested);
  library.impl("values", at::native::values_nested);
  library.impl("clone", at::native::clone_nested);
  library.impl("copy_", at::native::copy_nested_);
  library.impl("_to_copy", at::native::_to_copy_nested);
  library.impl("empty_like", at::native::empty_like_nested);
  library.impl("is_same_size", at::native::nested_is_same_size);
  library.impl("_nested_tensor_size", at::native::_nested_tensor_size);
  library.impl("_nested_tensor_strides", at::native::_nested_tensor_strides);
  library.impl("_nested_tensor_storage_offsets", at::native::_nested_tensor_storage_offsets);
}

}  // namespace
}  // namespace simgpu
