#include "kernel.h"

#include "generator.h"

namespace simdev {

using at::Tensor;
using c10::IValue;

IValue map_value(const IValue& value, const OnTensor& map, c10::Device to, int device) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isDevice()) return to;
  if (value.isGenerator()) return cpu_generator(value.toGenerator(), device);
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& each : value.toTensorVector()) made.push_back(map(each));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector()) {
      made.push_back(each.has_value() ? std::optional<Tensor>(map(*each)) : std::nullopt);
    }
    return made;
  }
  return value;
}

void each_tensor(const IValue& value, const std::function<void(const Tensor&)>& visit) {
  map_value(value, [&](const Tensor& each) { return visit(each), each; }, at::kCPU, 0);
}

Kernel::Kernel(c10::OperatorHandle op, const Stack& arguments, int device) : op_(std::move(op)) {
  std::unordered_map<void*, size_t> known;  // kernels compare identities
  for (const IValue& value : arguments) {
    auto& place = places_.emplace_back();
    each_tensor(value, [&](const Tensor& each) {
      void* key = each.defined() ? each.unsafeGetTensorImpl() : nullptr;
      auto [found, is_new] = known.try_emplace(key, views_.size());
      if (is_new) views_.emplace_back(each);
      place.push_back(found->second);
    });
    plain_.push_back(map_value(value, [](const Tensor&) { return Tensor(); }, at::kCPU, device));
  }
}

void Kernel::run() const {
  KernelMode mode;
  std::vector<Tensor> tensors;
  for (const View& view : views_) tensors.push_back(view.on_cpu());
  Stack stack;
  for (size_t i = 0; i < plain_.size(); ++i) {
    size_t next = 0;
    stack.push_back(map_value(
        plain_[i], [&](const Tensor&) { return tensors[places_[i][next++]]; }, at::kCPU, 0));
  }
  op_.callBoxed(stack);
  size_t next = 0;
  for (size_t r = 0; r < stack.size(); ++r) {
    if (op_.schema().returns()[r].alias_info() != nullptr) continue;
    each_tensor(stack[r], [&](const Tensor& result) {
      const std::optional<View>& made = outputs_.at(next++);
      if (result.defined() && made.has_value()) made->on_cpu().copy_(result);
    });
  }
}

}  // namespace simdev
