// The core's all_reduce as a TensorFlow operation: reduces one fusion buffer in place, concurrently
// with other operations of the graph. The kernel is asynchronous: no thread of TensorFlow waits.
#include <cstring>
#include <vector>

#include "sdp_api.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf = tensorflow;

namespace {
const SdpApi* api = nullptr;
constexpr int kScalars = 2;  // inputs before the tensors; attributes have no type double

template <typename T>
void scale(tf::Tensor* tensor, double factor) {
  auto values = tensor->flat<T>();
  const T by = static_cast<T>(factor);
  for (tf::int64 i = 0; i < values.size(); ++i) values(i) = values(i) * by;
}

// A rank without rows contributes zeros, even if its values are NaN.
void weigh(tf::Tensor* tensor, double factor) {
  if (factor == 1.0) return;
  if (factor == 0.0) {
    std::memset(tensor->data(), 0, tensor->TotalBytes());
    return;
  }
  switch (tensor->dtype()) {
    case tf::DT_FLOAT:
      return scale<float>(tensor, factor);
    case tf::DT_DOUBLE:
      return scale<double>(tensor, factor);
    case tf::DT_HALF:
      return scale<Eigen::half>(tensor, factor);
    case tf::DT_BFLOAT16:
      return scale<tf::bfloat16>(tensor, factor);
    default:
      return;  // integers are sums without weights
  }
}

class AllReduceOp : public tf::AsyncOpKernel {
 public:
  explicit AllReduceOp(tf::OpKernelConstruction* context) : tf::AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("endpoint", &endpoint_));
    OP_REQUIRES_OK(context, context->GetAttr("dtype", &dtype_));
    OP_REQUIRES_OK(context, context->GetAttr("reduce_op", &reduce_op_));
  }

  void ComputeAsync(tf::OpKernelContext* context, DoneCallback done) override {
    const double factor = context->input(0).scalar<double>()();
    std::vector<SdpPiece> pieces;
    for (int i = 0; i < context->num_outputs(); ++i) {
      const tf::Tensor& given = context->input(kScalars + i);
      tf::Tensor* output = nullptr;
      OP_REQUIRES_OK_ASYNC(
          context,
          context->forward_input_or_allocate_output({kScalars + i}, i, given.shape(), &output),
          done);
      if (output->data() != given.data()) {
        std::memcpy(output->data(), given.data(), given.TotalBytes());
      }
      weigh(output, factor);
      pieces.push_back({output->data(), static_cast<uint64_t>(output->NumElements())});
    }
    const SdpAllReduceCall call{reinterpret_cast<SdpEndpoint*>(endpoint_),
                                static_cast<int32_t>(dtype_),
                                static_cast<int32_t>(reduce_op_),
                                pieces.data(),
                                pieces.size(),
                                context->input(1).scalar<double>()()};
    auto* waiting = new Waiting{context, std::move(done)};
    char error[2048];
    if (api->all_reduce(&call, &AllReduceOp::Finish, waiting, error, sizeof error) != 0) {
      Finish(waiting, error);
    }
  }

 private:
  struct Waiting {
    tf::OpKernelContext* context;
    DoneCallback done;
  };
  static void Finish(void* waiting, const char* error) {
    auto* held = static_cast<Waiting*>(waiting);
    if (error != nullptr) held->context->SetStatus(tf::errors::Aborted(error));
    held->done();
    delete held;
  }

  tf::int64 endpoint_ = 0, dtype_ = 0, reduce_op_ = 0;
};
}  // namespace

extern "C" __attribute__((visibility("default"))) void sdp_use_api(const SdpApi* given) {
  api = given;
}

REGISTER_OP("SdpAllReduce")
    .Input("factor: double")
    .Input("timeout_s: double")
    .Input("tensors: N * T")
    .Output("reduced: N * T")
    .Attr("N: int >= 1")
    .Attr("T: {half, bfloat16, float, double, int8, int16, int32, int64, uint8}")
    .Attr("endpoint: int")
    .Attr("dtype: int")
    .Attr("reduce_op: int")
    .SetIsStateful()
    .SetShapeFn([](tf::shape_inference::InferenceContext* context) {
      for (int i = 0; i < context->num_outputs(); ++i) {
        context->set_output(i, context->input(kScalars + i));
      }
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("SdpAllReduce").Device(tf::DEVICE_CPU), AllReduceOp);
