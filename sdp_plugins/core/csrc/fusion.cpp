#include "fusion.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace sdp {
namespace {
// Tensors without elements may have no address.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t nbytes) {
  if (nbytes > 0) std::memcpy(to, from, nbytes);
}
}  // namespace

FusionBuffer::FusionBuffer(std::shared_ptr<Communicator> communicator,
                           std::shared_ptr<Engine> engine, std::vector<TensorSpec> tensors,
                           Settings settings)
    : communicator_(std::move(communicator)),
      engine_(std::move(engine)),
      tensors_(std::move(tensors)),
      settings_(settings),
      plan_(tensors_, settings.threshold_bytes),
      states_(tensors_.size()),
      bucket_states_(plan_.buckets().size()) {
  communicator_->throw_if_failed();
  std::size_t largest = 0;
  std::size_t n_fused = 0;
  for (const auto& bucket : plan_.buckets()) {
    checked_kernel(communicator_->kernels(), bucket.dtype, settings_.op);
    if (!bucket.fused) continue;
    ++n_fused;
    largest = std::max(largest, bucket.count * itemsize(bucket.dtype));
  }
  for (std::size_t i = 0; i < std::min(kDepth, n_fused) && largest > 0; ++i) {
    memory_.push_back(communicator_->allocate(largest));
  }
  for (std::size_t b = 0; b < bucket_states_.size(); ++b) {
    bucket_states_[b].missing = plan_.buckets()[b].tensors.size();
  }
}

FusionBuffer::~FusionBuffer() {
  // The engine may still hold pointers into this object. It need not come to an end by itself: a
  // program that fails between `ready` and `finish` must not wait here for its peers.
  for (const BucketState& bucket : bucket_states_) {
    if (!bucket.work) continue;
    if (!bucket.work->completed()) {
      communicator_->fail(Failure(FailureKind::aborted,
                                  "a fusion buffer was dropped before its operations were done",
                                  {communicator_->rank()}));
    }
    try {
      while (!bucket.work->wait(3600)) {
      }
    } catch (const Failure&) {
      // It has been reported by `finish`, or nobody asked.
    }
  }
  for (const auto& shared : memory_) communicator_->release(shared.region);
}

std::size_t FusionBuffer::nbytes(std::size_t tensor) const {
  return tensors_[tensor].count * itemsize(tensors_[tensor].dtype);
}

std::byte* FusionBuffer::buffer(std::size_t bucket) const {
  return memory_.empty() ? nullptr : memory_[bucket % memory_.size()].data;
}

std::byte* FusionBuffer::place(std::size_t tensor) const {
  const std::size_t bucket = plan_.bucket_of(tensor);
  const std::size_t offset = plan_.buckets()[bucket].offsets[plan_.place_of(tensor)];
  return buffer(bucket) + offset * itemsize(tensors_[tensor].dtype);
}

void FusionBuffer::ready(std::size_t tensor, std::byte* data) {
  if (tensor >= states_.size()) throw std::invalid_argument("no tensor " + std::to_string(tensor));
  communicator_->throw_if_failed();
  std::unique_lock lock(mutex_);
  TensorState& state = states_[tensor];
  if (state.ready) {
    throw std::invalid_argument("tensor " + std::to_string(tensor) +
                                " is ready a second time before finish()");
  }
  if (data == nullptr && nbytes(tensor) > 0) {
    throw std::invalid_argument("tensor " + std::to_string(tensor) + " has no memory");
  }
  state.ready = true;
  state.data = data;
  const std::size_t bucket = plan_.bucket_of(tensor);
  const bool free = bucket < finished_ + memory_.size();
  if (plan_.buckets()[bucket].fused && free) {
    lock.unlock();  // the buffer stays this bucket's; copying needs no lock
    copy_bytes(place(tensor), data, nbytes(tensor));
    lock.lock();
    state.packed = true;
  }
  --bucket_states_[bucket].missing;
  launch_complete(false);
}

// In the plan's order. The lock is kept over `submit`, so that two threads cannot swap two buckets.
void FusionBuffer::launch_complete(bool everything) {
  while (launched_ < bucket_states_.size() &&
         (everything || bucket_states_[launched_].missing == 0)) {
    bucket_states_[launched_].work = engine_->submit(request(launched_));
    ++launched_;
  }
}

Request FusionBuffer::request(std::size_t bucket) {
  const auto& plan = plan_.buckets()[bucket];
  std::byte* data = buffer(bucket);
  if (!plan.fused) {
    data = states_[plan.tensors[0]].data;
    if (data == nullptr) {
      bucket_states_[bucket].zeros.assign(nbytes(plan.tensors[0]), std::byte{});
      data = bucket_states_[bucket].zeros.data();
    }
  }
  Request request;
  request.op = Op::all_reduce;
  request.dtype = plan.dtype;
  request.reduce_op = settings_.op;
  request.layout = plan.layout;
  request.timeout_s = settings_.timeout_s;
  request.recvs = {{data, plan.count}};
  request.before = [this, bucket] { pack_rest(bucket); };
  request.after = [this, bucket] { unpack(bucket); };
  return request;
}

// In the engine's thread, when all earlier buckets are done: the buffer is free.
void FusionBuffer::pack_rest(std::size_t bucket) {
  const auto& plan = plan_.buckets()[bucket];
  if (!plan.fused) return;
  for (std::size_t tensor : plan.tensors) {
    const TensorState& state = states_[tensor];
    if (nbytes(tensor) == 0) continue;
    if (!state.ready) {
      std::memset(place(tensor), 0, nbytes(tensor));
    } else if (!state.packed) {
      std::memcpy(place(tensor), state.data, nbytes(tensor));
    }
  }
}

void FusionBuffer::unpack(std::size_t bucket) {
  const auto& plan = plan_.buckets()[bucket];
  for (std::size_t tensor : plan.tensors) {
    if (plan.fused && states_[tensor].ready) {
      copy_bytes(states_[tensor].data, place(tensor), nbytes(tensor));
    }
  }
  const std::lock_guard lock(mutex_);
  ++finished_;
}

void FusionBuffer::finish(const std::function<void()>& interrupt) {
  communicator_->throw_if_failed();
  {
    const std::lock_guard lock(mutex_);
    launch_complete(true);
  }
  try {
    for (const BucketState& bucket : bucket_states_) {
      while (!bucket.work->wait(settings_.timeout_s, interrupt)) {
      }
    }
  } catch (const Interrupted&) {
    // The other ranks may finish the step: this one cannot take part any more.
    communicator_->fail(Failure(FailureKind::interrupted, "interrupted in a fusion buffer's finish",
                                {communicator_->rank()}));
    throw;
  }
  const std::lock_guard lock(mutex_);
  states_.assign(states_.size(), TensorState{});
  for (std::size_t b = 0; b < bucket_states_.size(); ++b) {
    bucket_states_[b] = BucketState{plan_.buckets()[b].tensors.size(), nullptr, {}};
  }
  launched_ = finished_ = 0;
}
}  // namespace sdp
