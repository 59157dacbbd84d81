// Tensors as kernels see them, and storages that grow.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "memory.h"
#include "ops.h"
#include "torch_device.h"

namespace simdev {

View::View(const at::Tensor& tensor) {
  defined = tensor.defined();
  if (!defined) return;
  wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  if (tensor.device().type() != kType) {
    TORCH_CHECK(tensor.is_cpu(), "simdev: cannot use a tensor on ", tensor.device());
    host = tensor.detach().clone();
    return;
  }
  storage = alias_of(tensor.storage().mutable_data());
  sizes = tensor.sizes().vec();
  strides = tensor.strides().vec();
  offset = tensor.storage_offset();
  dtype = tensor.scalar_type();
  conj = tensor.is_conj();
  neg = tensor.is_neg();
}

at::Tensor View::on_cpu() const {
  if (!defined) return {};
  at::Tensor made = host;
  if (!host.defined()) {
    made = at::for_blob(storage, sizes)
               .strides(strides)
               .storage_offset(offset)
               .options(at::TensorOptions().dtype(dtype).device(at::kCPU))
               .make_tensor();
    if (conj) made.unsafeGetTensorImpl()->_set_conj(true);
    if (neg) made.unsafeGetTensorImpl()->_set_neg(true);
  }
  if (wrapped) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

struct KernelMode::Guards {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

KernelMode::KernelMode() : guards(new Guards) {}
KernelMode::~KernelMode() = default;

at::Tensor empty_strided_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides,
                            at::ScalarType dtype) {
  c10::DeviceGuard guard(device_at(device));
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype);
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  TORCH_CHECK(storage->resizable(), "simdev: this storage cannot be resized");
  c10::DeviceGuard guard(storage->device());
  c10::DataPtr made = storage->allocator()->allocate(nbytes);
  size_t kept = std::min(nbytes, storage->nbytes());
  if (kept > 0) storage->allocator()->copy_data(made.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(made));
  storage->set_nbytes(nbytes);
}

void set_geometry(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  size_t needed = at::detail::computeStorageNbytes(sizes, strides, tensor.element_size(),
                                                   tensor.storage_offset());
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) resize_storage(storage, needed);
  impl->set_sizes_and_strides(sizes, strides);
}

void fill_from(const at::Tensor& device, const at::Tensor& host) {
  Runtime::get().enqueue(current_stream(device.device().index()), Kind::kWork, "fills a tensor",
                         [to = View(device), host] {
                           KernelMode mode;
                           to.on_cpu().copy_(host);
                         });
}

}  // namespace simdev
