// What XLA makes of our operations where it compiles them: calls of functions. A library of its
// own, as it needs more of TensorFlow's headers than the operation that is not compiled.
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sdp_all_reduce_ffi.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "xla/hlo/builder/lib/constants.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/shape_util.h"

namespace xla::ffi {
const XLA_FFI_Api* GetXlaFfiApi();  // of ffi_api.h, which needs more headers than there are
}

namespace tf = tensorflow;

namespace {
constexpr char kAllReduce[] = "sdp_all_reduce";
constexpr char kRequire[] = "sdp_require";
const SdpApi* api = nullptr;

using Aliases = std::vector<std::pair<xla::ShapeIndex, std::pair<int64_t, xla::ShapeIndex>>>;

xla::XlaOp Call(const char* target, xla::XlaBuilder* builder, const std::vector<xla::XlaOp>& given,
                const xla::Shape& shape, const std::string& settings, const Aliases& aliases) {
  return xla::CustomCall(builder, target, given, shape, settings, /*has_side_effect=*/true, aliases,
                         /*literal=*/nullptr, xla::CustomCallSchedule::SCHEDULE_NONE,
                         xla::CustomCallApiVersion::API_VERSION_TYPED_FFI);
}

// A rank without rows has zeros, whatever it has computed. Whole numbers are sums, not weighted.
xla::XlaOp Weigh(xla::XlaOp given, xla::XlaOp factor, const xla::Shape& shape) {
  const auto type = shape.element_type();
  const auto zero = xla::Broadcast(xla::Zero(given.builder(), type), shape.dimensions());
  const bool real = xla::primitive_util::IsFloatingPointType(type);
  const auto weighed = real ? given * xla::ConvertElementType(factor, type) : given;
  return xla::Select(xla::Eq(factor, xla::ZerosLike(factor)), zero, weighed);
}

class AllReduceXla : public tf::XlaOpKernel {
 public:
  explicit AllReduceXla(tf::OpKernelConstruction* context) : tf::XlaOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("endpoint", &endpoint_));
    OP_REQUIRES_OK(context, context->GetAttr("op", &op_));
    OP_REQUIRES_OK(context, context->GetAttr("dtype", &dtype_));
    OP_REQUIRES_OK(context, context->GetAttr("reduce_op", &reduce_op_));
    OP_REQUIRES_OK(context, context->GetAttr("timeout_s", &timeout_s_));
  }

  void Compile(tf::XlaOpKernelContext* context) override {
    std::vector<xla::XlaOp> operands;
    std::vector<xla::Shape> shapes;
    Aliases aliases;
    const auto add = [&](xla::XlaOp given, const xla::Shape& shape) {
      const int64_t place = operands.size();
      operands.push_back(given);
      shapes.push_back(shape);
      aliases.push_back({{place}, {place, {}}});
    };
    for (int i = 2; i < context->num_inputs(); ++i) {
      const auto shape = context->InputXlaShape(i);
      OP_REQUIRES_OK(context, shape.status());
      add(Weigh(context->Input(i), context->Input(1), *shape), *shape);
    }
    add(context->Input(0), xla::ShapeUtil::MakeShape(xla::S64, {}));
    const auto results = Call(kAllReduce, context->builder(), operands,
                              xla::ShapeUtil::MakeTupleShape(shapes), Settings(), aliases);
    const int turn = static_cast<int>(operands.size()) - 1;
    context->SetOutput(0, xla::GetTupleElement(results, turn));
    for (int i = 0; i < turn; ++i) context->SetOutput(i + 1, xla::GetTupleElement(results, i));
  }

 private:
  std::string Settings() const {  // as MLIR writes a dictionary
    char text[300];
    std::snprintf(text, sizeof text,
                  "{api = %lld : i64, endpoint = %lld : i64, op = %d : i32, dtype = %d : i32, "
                  "reduce_op = %d : i32, timeout_s = %.6f : f64}",
                  static_cast<long long>(reinterpret_cast<intptr_t>(api)),
                  static_cast<long long>(endpoint_), static_cast<int>(op_),
                  static_cast<int>(dtype_), static_cast<int>(reduce_op_), timeout_s_);
    return text;
  }

  tf::int64 endpoint_ = 0, op_ = 0, dtype_ = 0, reduce_op_ = 0;
  float timeout_s_ = 0;
};

// TensorFlow's own Assert does nothing where XLA compiles it.
class RequireXla : public tf::XlaOpKernel {
 public:
  explicit RequireXla(tf::OpKernelConstruction* context) : tf::XlaOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("text", &text_));
  }

  void Compile(tf::XlaOpKernelContext* context) override {
    std::string settings = "{text = \"";
    for (const char c : text_) {
      char code[4];
      std::snprintf(code, sizeof code, "\\%02X", static_cast<unsigned char>(c));
      settings += code;
    }
    context->SetOutput(
        0, Call(kRequire, context->builder(), {context->Input(1), context->Input(0)},
                xla::ShapeUtil::MakeShape(xla::S64, {}), settings + "\"}", {{{}, {1, {}}}}));
  }

 private:
  std::string text_;
};

xla::ffi::Error Require(std::string_view text, xla::ffi::BufferR0<xla::ffi::PRED> condition,
                        xla::ffi::BufferR0<xla::ffi::S64> turn,
                        xla::ffi::ResultBufferR0<xla::ffi::S64> turn_after) {
  *turn_after->typed_data() = *turn.typed_data();
  if (*condition.typed_data()) return xla::ffi::Error::Success();
  return xla::ffi::Error(xla::ffi::ErrorCode::kInvalidArgument, std::string(text));
}

SDP_DEFINE_ALL_REDUCE(SdpAllReduce);
XLA_FFI_DEFINE_HANDLER_SYMBOL(SdpRequire, Require,
                              xla::ffi::Ffi::Bind()
                                  .Attr<std::string_view>("text")
                                  .Arg<xla::ffi::BufferR0<xla::ffi::PRED>>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S64>>()
                                  .Ret<xla::ffi::BufferR0<xla::ffi::S64>>());
XLA_FFI_REGISTER_HANDLER(xla::ffi::GetXlaFfiApi(), kAllReduce, "Host", SdpAllReduce);
XLA_FFI_REGISTER_HANDLER(xla::ffi::GetXlaFfiApi(), kRequire, "Host", SdpRequire);

REGISTER_OP("SdpRequire")
    .Input("turn: int64")
    .Input("condition: bool")
    .Output("turn_after: int64")
    .Attr("text: string")
    .SetIsStateful()
    .SetShapeFn([](tf::shape_inference::InferenceContext* context) {
      context->set_output(0, context->input(0));
      return absl::OkStatus();
    });

// Not by REGISTER_XLA_OP, which comes too late once a program has compiled something.
REGISTER_KERNEL_BUILDER(Name("SdpAllReduce").Device("XLA_CPU_JIT"), AllReduceXla);
REGISTER_KERNEL_BUILDER(Name("SdpRequire").Device("XLA_CPU_JIT"), RequireXla);
}  // namespace

extern "C" __attribute__((visibility("default"))) void sdp_use_api(const SdpApi* given) {
  api = given;
}
