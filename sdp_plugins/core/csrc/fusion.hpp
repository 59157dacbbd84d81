// Balanced fusion buffers: gathers gradients as the backward pass yields them and reduces them in a
// few large operations that overlap it.
//
// A buffer is sealed and handed to the engine when its last tensor is ready. It is never copied
// together: the operation cuts the tensors, laid end to end, into one equal shard per rank, and its
// pieces pass through the staging slots straight from the tensors and back into them. Buffers leave
// in the order of the plan on all ranks; any number is in flight while later ones fill.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "engine.hpp"
#include "fusion_plan.hpp"
#include "reduction_tree.hpp"

namespace sdp {

class FusionBuffer {
 public:
  struct Settings {
    std::size_t threshold_bytes = 25 << 20;
    ReduceOp op = ReduceOp::avg;
    double timeout_s = 300.0;
  };
  // Hands an operation to whatever runs those of the group.
  using Submit = std::function<std::shared_ptr<Work>(Request)>;
  static Submit to(std::shared_ptr<Engine> engine) {
    return [engine = std::move(engine)](Request request) {
      return engine->submit(std::move(request));
    };
  }
  FusionBuffer(std::shared_ptr<Communicator> communicator, Submit submit,
               std::vector<TensorSpec> tensors, Settings settings);
  ~FusionBuffer();

  const FusionPlan& plan() const { return plan_; }
  bool ours() const { return communicator_->ours(); }

  // The tensor's gradient lies at `data` and may be read and overwritten until `finish` returns.
  void ready(std::size_t tensor, std::byte* data);
  // Hands over what is left (tensors that were never ready count as zeros and get nothing back),
  // waits for all results and prepares for the next step. Throws the first failure.
  void finish(const std::function<void()>& interrupt);

 private:
  struct TensorState {
    std::byte* data = nullptr;
    bool ready = false;
  };
  struct BucketState {
    std::size_t missing = 0;
    std::shared_ptr<Work> work;
    std::vector<std::byte> zeros;  // stands in for tensors that are never ready
  };
  void launch_complete(bool everything);  // with the lock held
  Request request(std::size_t bucket);
  void take(std::size_t tensor, const std::byte* data);
  void start_over();
  std::size_t nbytes(std::size_t tensor) const;

  std::shared_ptr<Communicator> communicator_;
  const Submit submit_;
  const std::vector<TensorSpec> tensors_;
  const Settings settings_;
  const FusionPlan plan_;
  std::mutex mutex_;
  std::vector<TensorState> states_;
  std::map<const std::byte*, const std::byte*> taken_;  // begin -> end of tensors of this step
  std::vector<BucketState> bucket_states_;
  std::size_t launched_ = 0;  // buckets handed to the engine in this step
};
}  // namespace sdp
