// Arguments of operators, and kernels that run later.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "ops.h"

namespace simdev {

using OnTensor = std::function<at::Tensor(const at::Tensor&)>;
using Stack = torch::jit::Stack;

// A copy of an argument with each tensor replaced, and each device by `to`; generators become those
// of the CPU that draw for them.
c10::IValue map_value(const c10::IValue& value, const OnTensor& map, c10::Device to, int device);

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);

// An operator and its arguments, to be called on a stream's thread. As a GPU's kernel, it has
// addresses and keeps no memory alive.
class Kernel {
 public:
  Kernel(c10::OperatorHandle op, const Stack& arguments, int device);

  // For each result; undefined where the kernel is to make none.
  void add_output(const at::Tensor& made) {
    outputs_.push_back(made.defined() ? std::optional<View>(made) : std::nullopt);
  }
  void run() const;
  const char* name() const { return op_.operator_name().name.c_str(); }

 private:
  c10::OperatorHandle op_;
  Stack plain_;  // the arguments with undefined tensors
  std::vector<View> views_;
  std::vector<std::vector<size_t>> places_;   // of each argument's tensors in `views_`
  std::vector<std::optional<View>> outputs_;  // new tensors, in the order of the results
};

}  // namespace simdev
