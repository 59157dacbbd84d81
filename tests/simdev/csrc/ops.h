// Parts of the operators that more than one file needs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <optional>

#include "runtime.h"

namespace simdev {

// A tensor as a kernel sees it. It keeps no device memory alive: a kernel of CUDA's does not
// either, and that a caller must is what the tests want to find out.
struct View {
  explicit View(const at::Tensor& tensor);
  View() = default;

  at::Tensor on_cpu() const;  // over the memory that kernels use

  bool defined = false;
  at::Tensor host;  // instead of device memory: a copy made when the operator was called
  void* storage = nullptr;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  bool conj = false, neg = false, wrapped = false;
};

// Kernels of the CPU run without autograd and autocast.
struct KernelMode {
  KernelMode();
  ~KernelMode();
  struct Guards;
  std::unique_ptr<Guards> guards;
};

at::Tensor empty_strided_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides,
                            at::ScalarType dtype);
void resize_storage(c10::StorageImpl* storage, size_t nbytes);  // keeps the contents
void set_geometry(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides);

// Enqueues the copy of a host tensor, which it keeps, into device memory.
void fill_from(const at::Tensor& device, const at::Tensor& host);

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking);

}  // namespace simdev
