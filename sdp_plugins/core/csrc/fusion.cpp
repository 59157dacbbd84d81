#include "fusion.hpp"

#include <unistd.h>

#include <iterator>
#include <stdexcept>
#include <string>

namespace sdp {

FusionBuffer::FusionBuffer(std::shared_ptr<Communicator> communicator, Submit submit,
                           std::vector<TensorSpec> tensors, Settings settings)
    : communicator_(std::move(communicator)),
      submit_(std::move(submit)),
      tensors_(std::move(tensors)),
      settings_(settings),
      plan_(tensors_, settings.threshold_bytes) {
  communicator_->throw_if_failed();
  for (const auto& bucket : plan_.buckets()) {
    checked_kernel(bucket.dtype, settings_.op);
  }
  start_over();
}

FusionBuffer::~FusionBuffer() {
  // The engine may still hold pointers into tensors, so wait for it. A program that fails between
  // `ready` and `finish` must not wait for its peers: abort the group first.
  for (const BucketState& bucket : bucket_states_) {
    if (!bucket.work) continue;
    if (!bucket.work->completed()) {
      Failure failure(FailureKind::aborted,
                      "a fusion buffer was dropped before its finish() was called",
                      {communicator_->id()}, Hint::new_group);
      communicator_->fail(failure.in(bucket.operation, {}, 0));
    }
    try {
      while (!bucket.work->wait(3600)) {
      }
    } catch (const Failure&) {
      // `finish` has reported it, or was not called.
    }
  }
}

void FusionBuffer::start_over() {
  states_.assign(tensors_.size(), TensorState{});
  taken_.clear();
  bucket_states_.clear();
  for (const auto& bucket : plan_.buckets()) {
    bucket_states_.push_back({bucket.tensors.size(), nullptr, {}, {}});
  }
  launched_ = 0;
}

std::size_t FusionBuffer::nbytes(std::size_t tensor) const {
  return tensors_[tensor].count * itemsize(tensors_[tensor].dtype);
}

void FusionBuffer::ready(std::size_t tensor, std::byte* data) {
  if (tensor >= states_.size()) throw std::invalid_argument("no tensor " + std::to_string(tensor));
  communicator_->throw_if_failed();
  const std::lock_guard lock(mutex_);
  TensorState& state = states_[tensor];
  if (state.ready) {
    throw std::invalid_argument("tensor " + std::to_string(tensor) +
                                " is ready a second time before finish()");
  }
  if (data == nullptr && nbytes(tensor) > 0) {
    throw std::invalid_argument("tensor " + std::to_string(tensor) + " has no memory");
  }
  take(tensor, data);
  state = {data, true};
  --bucket_states_[plan_.bucket_of(tensor)].missing;
  launch_complete(false);
}

// Throws if two tensors share memory, which would be reduced twice.
void FusionBuffer::take(std::size_t tensor, const std::byte* data) {
  if (nbytes(tensor) == 0) return;
  const std::byte* end = data + nbytes(tensor);
  const auto next = taken_.lower_bound(data);
  const bool before = next != taken_.begin() && std::prev(next)->second > data;
  if (before || (next != taken_.end() && next->first < end)) {
    throw std::invalid_argument("tensor " + std::to_string(tensor) +
                                " shares memory with another tensor of this step. Hint: "
                                "register the memory once, or pass a copy.");
  }
  taken_.emplace_hint(next, data, end);
}

// Submits in the plan's order. The lock is held during `submit`, so that two threads cannot swap
// two buckets.
void FusionBuffer::launch_complete(bool everything) {
  while (launched_ < bucket_states_.size() &&
         (everything || bucket_states_[launched_].missing == 0)) {
    Request next = request(launched_);
    bucket_states_[launched_].operation = next.signature();
    bucket_states_[launched_].work = submit_(std::move(next));
    ++launched_;
  }
}

Request FusionBuffer::request(std::size_t bucket) {
  const auto& plan = plan_.buckets()[bucket];
  std::size_t absent = 0;
  for (std::size_t tensor : plan.tensors) absent += states_[tensor].ready ? 0 : nbytes(tensor);
  auto& zeros = bucket_states_[bucket].zeros;
  zeros.assign(absent, std::byte{});

  Request request;
  request.op = Op::all_reduce;
  request.dtype = plan.dtype;
  request.reduce_op = settings_.op;
  request.layout = plan.layout;
  request.timeout_s = settings_.timeout_s;
  std::byte* stand_in = zeros.data();
  for (std::size_t tensor : plan.tensors) {
    const TensorState& state = states_[tensor];
    request.recvs.push_back({state.ready ? state.data : stand_in, tensors_[tensor].count});
    if (!state.ready) stand_in += nbytes(tensor);
  }
  return request;
}

void FusionBuffer::finish(const std::function<void()>& interrupt) {
  communicator_->throw_if_failed();
  {
    const std::lock_guard lock(mutex_);
    launch_complete(true);
  }
  for (const BucketState& bucket : bucket_states_) wait(bucket, interrupt);
  const std::lock_guard lock(mutex_);
  start_over();
}

void FusionBuffer::wait(const BucketState& bucket, const std::function<void()>& interrupt) const {
  try {
    while (!bucket.work->wait(settings_.timeout_s, interrupt)) {
    }
  } catch (const Interrupted&) {
    // The other ranks may finish the step, but this rank cannot take part any more.
    communicator_->fail(communicator_->interruption(bucket.operation));
    // The engine must be done with the tensors before the caller continues.
    for (const BucketState& other : bucket_states_) {
      while (!other.work->completed()) usleep(1000);
    }
    throw;
  }
}
}  // namespace sdp
