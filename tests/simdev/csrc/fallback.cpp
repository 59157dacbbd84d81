// Every other operator: a meta kernel tells the shapes at once, the CPU's kernel runs later, on
// the stream's thread.
#include "fallback.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>
#include <unordered_map>

#include "generator.h"
#include "kernel.h"
#include "ops.h"
#include "torch_device.h"

namespace simdev {
namespace {

using at::Tensor;
using c10::IValue;

std::mutex g_mutex;
std::set<std::string> g_synchronous;  // operators that had to wait for their stream

Tensor to_meta(const Tensor& tensor) {
  // Python's meta kernels get a wrapped number as a number, which must have a value.
  bool is_number = tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
  if (!tensor.defined() || (is_number && tensor.is_cpu())) return tensor;
  Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(),
                                  tensor.options().device(at::kMeta).pinned_memory(false));
  if (is_number) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (tensor.is_conj()) made.unsafeGetTensorImpl()->_set_conj(true);
  if (tensor.is_neg()) made.unsafeGetTensorImpl()->_set_neg(true);
  return made;
}

// One call of an operator.
struct Call {
  Call(c10::OperatorHandle op, Stack* stack);
  void run();

 private:
  void find_device();
  void run_meta();
  void run_later();
  void run_now();
  void draw();
  bool has_tag(at::Tag tag) const;
  bool is_mutated(size_t i) const;
  Tensor memoized(const Tensor& tensor, std::unordered_map<void*, Tensor>& memo,
                  const OnTensor& map);
  void finish(Stack results, const OnTensor& on_new);

  const c10::OperatorHandle op;
  const c10::FunctionSchema& schema;
  Stack* stack;
  Stack arguments;
  int device = -1;
  Stack meta_results;
};

Call::Call(c10::OperatorHandle op, Stack* stack)
    : op(std::move(op)), schema(this->op.schema()), stack(stack) {
  size_t count = schema.arguments().size();
  arguments.assign(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  find_device();
}

void Call::find_device() {
  for (const IValue& value : arguments) {
    each_tensor(value, [&](const Tensor& each) {
      if (!each.defined() || each.device().type() != kType) return;
      TORCH_CHECK(
          device == -1 || device == each.device().index(), op.operator_name(),
          ": expected all tensors to be on the same device, but found at least two devices");
      device = each.device().index();
    });
  }
  for (const IValue& value : arguments) {
    if (device == -1 && value.isDevice() && value.toDevice().has_index()) {
      device = value.toDevice().index();
    }
  }
  if (device == -1) device = current_device();
}

bool Call::has_tag(at::Tag tag) const {
  for (at::Tag each : op.getTags()) {
    if (each == tag) return true;
  }
  return false;
}

bool Call::is_mutated(size_t i) const {
  const c10::AliasInfo* info = schema.arguments()[i].alias_info();
  return info != nullptr && info->isWrite();
}

Tensor Call::memoized(const Tensor& tensor, std::unordered_map<void*, Tensor>& memo,
                      const OnTensor& map) {
  if (!tensor.defined()) return tensor;
  Tensor& made = memo[tensor.unsafeGetTensorImpl()];  // kernels compare identities
  if (!made.defined()) made = map(tensor);
  return made;
}

void Call::run_meta() {
  std::unordered_map<void*, Tensor> memo;
  for (const IValue& value : arguments) {
    meta_results.push_back(map_value(
        value, [&](const Tensor& each) { return memoized(each, memo, to_meta); }, at::kMeta,
        device));
  }
  op.callBoxed(meta_results);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_mutated(i)) continue;
    each_tensor(arguments[i], [&](const Tensor& each) {
      if (!each.defined()) return;
      const Tensor& meta = memo[each.unsafeGetTensorImpl()];
      if (meta.sizes() != each.sizes() || meta.strides() != each.strides()) {
        set_geometry(each, meta.sizes(), meta.strides());
      }
    });
  }
}

// Replaces the arguments by results: those that are arguments, and new ones by `on_new`.
void Call::finish(Stack results, const OnTensor& on_new) {
  Stack returned;
  for (size_t r = 0; r < schema.returns().size(); ++r) {
    const c10::AliasInfo* info = schema.returns()[r].alias_info();
    if (info == nullptr) {
      returned.push_back(map_value(results[r], on_new, device_at(device), device));
      continue;
    }
    TORCH_CHECK(info->isWrite(), "simdev: no kernel for the view ", op.operator_name());
    for (size_t i = 0; i < arguments.size(); ++i) {
      const c10::AliasInfo* other = schema.arguments()[i].alias_info();
      if (other != nullptr && other->beforeSets() == info->beforeSets()) {
        returned.push_back(arguments[i]);
        break;
      }
    }
  }
  torch::jit::drop(*stack, arguments.size());
  for (IValue& value : returned) stack->push_back(std::move(value));
}

void Call::run_later() {
  auto kernel = std::make_shared<Kernel>(op, arguments, device);
  finish(std::move(meta_results), [&](const Tensor& meta) {
    Tensor made;
    if (meta.defined()) {
      made = empty_strided_on(device, meta.sizes(), meta.strides(), meta.scalar_type());
    }
    kernel->add_output(made);
    return made;
  });
  Runtime::get().enqueue(current_stream(device), Kind::kWork, kernel->name(),
                         [kernel] { kernel->run(); });
}

// Waits for the stream, computes on the host, and enqueues the copies of what it gives.
void Call::run_now() {
  Runtime::get().synchronize(current_stream(device));
  std::unordered_map<void*, Tensor> memo;
  Stack kernel;
  bool random = has_tag(at::Tag::nondeterministic_seeded);
  for (size_t i = 0; i < arguments.size(); ++i) {
    bool mutated = is_mutated(i);
    auto map = [&](const Tensor& each) {
      Tensor seen = View(each).on_cpu();
      return mutated ? seen.clone() : seen;  // a clone can grow
    };
    kernel.push_back(map_value(
        arguments[i], [&](const Tensor& each) { return memoized(each, memo, map); }, at::kCPU,
        device));
    bool takes_one = schema.arguments()[i].name() == "generator";
    if (random && takes_one && kernel.back().isNone()) {
      kernel.back() = cpu_generator(std::nullopt, device);
    }
  }
  op.callBoxed(kernel);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_mutated(i)) continue;
    each_tensor(arguments[i], [&](const Tensor& each) {
      const Tensor& result = memo[each.unsafeGetTensorImpl()];
      if (result.sizes() != each.sizes()) set_geometry(each, result.sizes(), result.strides());
      fill_from(each, result);
    });
  }
  finish(std::move(kernel), [&](const Tensor& result) {
    if (!result.defined()) return result;
    Tensor made = empty_strided_on(device, result.sizes(), result.strides(), result.scalar_type());
    fill_from(made, result);
    return made;
  });
}

// Random numbers are drawn now, in the order of calls, and copied later, in the stream's order.
void Call::draw() {
  Tensor target = arguments[0].toTensor();
  Stack kernel;
  for (size_t i = 0; i < arguments.size(); ++i) {
    kernel.push_back(map_value(
        arguments[i],
        [&](const Tensor& each) {
          return at::empty_strided(each.sizes(), each.strides(), each.options().device(at::kCPU));
        },
        at::kCPU, device));
    if (schema.arguments()[i].name() == "generator" && kernel.back().isNone()) {
      kernel.back() = cpu_generator(std::nullopt, device);
    }
  }
  op.callBoxed(kernel);
  fill_from(target, kernel[0].toTensor());
  finish(std::move(kernel), [](const Tensor& each) { return each; });
}

// In place, and independent of what the tensor holds.
const std::set<std::string> kDraws = {
    "aten::normal_",      "aten::uniform_",         "aten::random_",     "aten::random_.from",
    "aten::random_.to",   "aten::cauchy_",          "aten::log_normal_", "aten::geometric_",
    "aten::exponential_", "aten::bernoulli_.float",
};

void Call::run() {
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                              "simdev: the CPU has no kernel for ", op.operator_name());
  c10::DeviceGuard guard(device_at(device));
  KernelMode mode;
  std::string name = c10::toString(op.operator_name());
  if (kDraws.count(name) != 0) return draw();
  bool now = has_tag(at::Tag::nondeterministic_seeded) || has_tag(at::Tag::dynamic_output_shape) ||
             has_tag(at::Tag::data_dependent_output);
  for (const c10::Argument& each : schema.returns()) {
    auto kind = each.type()->kind();
    now |= kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
  }
  if (!now) {
    try {
      run_meta();
    } catch (const c10::NotImplementedError&) {
      now = true;  // no meta kernel
    } catch (const c10::Error&) {
      throw;
    } catch (const std::exception&) {
      now = true;  // Python's meta kernel does not know, or the CPU's says the same once more
    }
  }
  if (!now) return run_later();
  run_now();
  std::lock_guard<std::mutex> lock(g_mutex);
  g_synchronous.insert(name);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call(op, stack).run();
}

// Whether the CPU has a kernel for it that we do not replace.
bool is_computed(const c10::OperatorHandle& op) {
  if (!op.hasSchema() || !op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) return false;
  if (op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) return false;
  for (const c10::Argument& each : op.schema().returns()) {
    if (each.alias_info() != nullptr && !each.alias_info()->isWrite()) return false;  // a view
  }
  return true;
}

// torch leaves convolutions to the device under names of their own.
c10::OperatorHandle find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle&, Stack* stack) {
  Call(find_op("aten::convolution"), stack).run();
}

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  auto first = stack->end() - 10;
  std::vector<int64_t> bias_sizes = {first->toTensor().size(1)};
  stack->insert(first + 3, IValue(bias_sizes));
  Call(find_op("aten::convolution_backward"), stack).run();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // torch has other implementations for devices without a kernel; these would give other numbers.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) != 0 || !op.has_value() || !is_computed(*op)) continue;
    m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace

std::string synchronous_ops() {
  std::lock_guard<std::mutex> lock(g_mutex);
  std::string all;
  for (const std::string& each : g_synchronous) all += each + "\n";
  return all;
}

}  // namespace simdev
