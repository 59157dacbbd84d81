// Operators that do not compute: allocation, views, storages, and reads by the host.
#include "ops.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "torch_device.h"

namespace simdev {
namespace {

using at::IntArrayRef;
using at::Tensor;

int index_of(std::optional<c10::Device> device) {
  return device.has_value() && device->has_index() ? device->index() : current_device();
}

std::vector<int64_t> dense_strides(IntArrayRef size) {
  std::vector<int64_t> strides(size.size(), 1);
  for (auto i = static_cast<int64_t>(size.size()) - 2; i >= 0; --i) {
    strides[i] = strides[i + 1] * std::max<int64_t>(size[i + 1], 1);
  }
  return strides;
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_at(index_of(device)));
  return at::detail::empty_generic(size, device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device,
                     std::optional<bool>) {
  return empty_strided_on(index_of(device), size, stride, c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  bool kept = self.sizes() == size;
  if (!kept) set_geometry(self, size, dense_strides(size));
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

Tensor& set_storage_offset(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size,
                           IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  bool strided = stride.data() != nullptr && stride.size() == size.size();
  set_geometry(self, size, strided ? stride.vec() : dense_strides(size));
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  auto numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_offset(self, std::move(source), 0, {numel}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(),
                            source.strides());
}

Tensor& set_nothing(Tensor& self) {
  at::Storage storage(at::Storage::use_byte_size_t{}, 0, device_allocator(), true);
  return set_storage_offset(self, std::move(storage), 0, {0}, {});
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar(const Tensor& self) {
  Runtime::get().synchronize(current_stream(self.device().index()));
  KernelMode mode;
  return at::_local_scalar_dense(View(self).on_cpu());
}

void record_stream_op(Tensor& self, c10::Stream stream) {
  c10::impl::getDeviceGuardImpl(kType)->recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  // As dropout on the CPU draws and multiplies, for equal numbers.
  Tensor noise = at::empty_like(input).bernoulli_(1 - p);
  Tensor mask = noise.to(at::kBool);
  return {at::mul(input, noise.div_(1 - p)), mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream_op);
  m.impl("native_dropout", native_dropout);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(at::native::view));
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("is_set_to", at::native::is_set_to);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
}

TORCH_LIBRARY_FRAGMENT(simdev, m) {
  // As any use of CUDA does. Before, torch says of no memory that it is pinned.
  m.def("init() -> ()", [] { at::globalContext().lazyInitDevice(kType); });
}

// Our copy resolves them itself: cloning a conjugate in order to copy it would be such a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace simdev
