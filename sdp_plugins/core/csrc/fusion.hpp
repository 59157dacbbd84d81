// Balanced fusion buffers: collect gradients as the backward pass produces them and reduce them in
// a few large operations that overlap it.
//
// A buffer is submitted to the engine when its last tensor is ready. Its tensors are never copied
// into one buffer: the operation divides their concatenation into one equal shard per rank. If all
// lie in registered memory, it reduces them in place; else it copies pieces between the tensors and
// the staging slots directly. All ranks submit buffers in the order of the plan. Any number of
// buffers may be in flight while later ones fill.
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
  // Submits an operation to the group.
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

  // Passes the tensor's gradient, which may be read and overwritten until `finish` returns.
  void ready(std::size_t tensor, std::byte* data);
  // Submits the remaining buffers, waits for all results and prepares for the next step. Tensors
  // that were never ready count as zeros and receive no result. Throws the first failure.
  void finish(const std::function<void()>& interrupt);

 private:
  struct TensorState {
    std::byte* data = nullptr;
    bool ready = false;
  };
  struct BucketState {
    std::size_t missing = 0;
    std::shared_ptr<Work> work;
    OpSignature operation;         // that `work` is of
    std::vector<std::byte> zeros;  // for tensors that are never ready
  };
  void launch_complete(bool everything);  // with the lock held
  Request request(std::size_t bucket);
  void wait(const BucketState& bucket, const std::function<void()>& interrupt) const;
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
  std::size_t launched_ = 0;  // buckets submitted in this step
};
}  // namespace sdp
