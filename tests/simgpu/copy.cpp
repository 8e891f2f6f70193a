// Copies of tensors. Contiguous bytes go through the driver's asynchronous copies; everything else takes a way over the host.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include "allocator.h"
#include "device.h"
#include "host_allocator.h"
#include "ops.h"

namespace simgpu {
namespace {

bool on_simgpu(const at::Tensor &tensor) { return tensor.device().type() == kType; }

bool plain(const at::Tensor &tensor) { return !tensor.is_conj() && !tensor.is_neg(); }

// The same elements in the same order in memory: one copy of bytes moves them.
bool same_bytes(const at::Tensor &from, const at::Tensor &to) {
  return from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() && from.strides() == to.strides() &&
         to.is_non_overlapping_and_dense() && plain(from) && plain(to);
}

// A pinned tensor's block must live until the copy is done, even if the tensor does not.
void keep_pinned(const at::Tensor &host, c10::DeviceIndex device) {
  const auto &pointer = host.storage().data_ptr();
  if (host.is_pinned()) host_allocator().record_event(pointer.get(), pointer.get_context(), current_stream(device));
}

void bytes_to_device(const at::Tensor &from, const at::Tensor &to) {
  UseContext use(to.device().index());
  const auto stream = current_handle(to.device().index());
  check(cuMemcpyHtoDAsync_v2(address_of(to.data_ptr()), from.const_data_ptr(), to.nbytes(), stream), "cuMemcpyHtoDAsync");
}

// `from` on the host with the same sizes and strides, read in the order of the current stream.
at::Tensor read_strided(const at::Tensor &from) {
  const auto device = from.device().index();
  const auto bytes =
      at::detail::computeStorageNbytes(from.sizes(), from.strides(), from.element_size(), /*storage_offset=*/0);
  at::Tensor host = at::empty({0}, from.options().device(c10::kCPU));
  auto storage = at::empty({int64_t(bytes)}, at::TensorOptions().dtype(c10::kByte)).storage();
  {
    UseContext use(device);
    const auto stream = current_handle(device);
    check(cuMemcpyDtoHAsync_v2(storage.mutable_data(), address_of(from.const_data_ptr()), bytes, stream),
          "cuMemcpyDtoHAsync");
  }
  synchronize_current(device);
  host.set_(storage, 0, from.sizes(), from.strides());
  if (from.is_conj()) host = host.conj();
  if (from.is_neg()) host = host._neg_view();
  return host;
}

void write(const at::Tensor &from_host, const at::Tensor &to) {
  if (to.is_conj()) return write(from_host.conj().resolve_conj(), to.conj());
  if (to.is_neg()) return write(from_host.neg(), to._neg_view());
  if (to.is_non_overlapping_and_dense()) {
    at::Tensor packed = at::empty_strided(to.sizes(), to.strides(), to.options().device(c10::kCPU));
    packed.copy_(from_host);
    return bytes_to_device(packed, to);
  }
  // With gaps: slice by slice, so that what lies between is not touched.
  const at::Tensor whole = from_host.expand(to.sizes());
  for (int64_t i = 0; i < to.size(0); i++) write(whole.select(0, i), to.select(0, i));
}

}  // namespace

at::Tensor copy_from(const at::Tensor &from, const at::Tensor &to, bool non_blocking) {
  if (!to.numel()) return to;
  const bool same = same_bytes(from, to);
  if (on_simgpu(from) && on_simgpu(to)) {
    if (!same || from.device() != to.device()) {
      write(read_strided(from), to);  // pageable: the bytes are taken at the call
      return to;
    }
    const auto device = to.device().index();
    UseContext use(device);
    check(cuMemcpyDtoDAsync_v2(address_of(to.data_ptr()), address_of(from.const_data_ptr()), to.nbytes(),
                               current_handle(device)),
          "cuMemcpyDtoDAsync");
    return to;
  }
  if (on_simgpu(to)) {
    const auto device = to.device().index();
    if (same) {
      bytes_to_device(from, to);
      if (non_blocking) keep_pinned(from, device);
    } else {
      write(from, to);
    }
    if (!non_blocking) synchronize_current(device);
    return to;
  }
  const auto device = from.device().index();
  if (!same) {
    const_cast<at::Tensor &>(to).copy_(read_strided(from));
    return to;
  }
  UseContext use(device);
  check(cuMemcpyDtoHAsync_v2(to.data_ptr(), address_of(from.const_data_ptr()), to.nbytes(), current_handle(device)),
        "cuMemcpyDtoHAsync");
  if (non_blocking) {
    keep_pinned(to, device);
  } else {
    synchronize_current(device);
  }
  return to;
}

void resize_storage(const c10::Storage &storage, size_t bytes) {
  auto &target = *storage.unsafeGetStorageImpl();
  const auto device = target.device().index();
  c10::DeviceGuard guard(target.device());
  auto block = device_allocator().allocate(bytes);
  const size_t kept = std::min(bytes, target.nbytes());
  if (kept) {
    UseContext use(device);
    check(cuMemcpyDtoDAsync_v2(address_of(block.get()), address_of(target.data()), kept, current_handle(device)),
          "cuMemcpyDtoDAsync");
  }
  target.set_data_ptr_noswap(std::move(block));
  target.set_nbytes(bytes);
}

}  // namespace simgpu
