// copy_: asynchronous within a device, and to and from host memory that is registered.
#include <ATen/ops/empty_like.h>

#include <cstring>

#include "memory.h"
#include "ops.h"
#include "torch_device.h"

namespace simdev {
namespace {

void on_device(const at::Tensor& from, const at::Tensor& to) {
  Runtime& runtime = Runtime::get();
  Stream* stream = current_stream(from.device().index());
  Stream* other = current_stream(to.device().index());
  bool crosses = stream->device != other->device;
  if (crosses) runtime.wait_mark(stream, runtime.mark(other));
  runtime.enqueue(stream, Kind::kWork, "copies", [from = View(from), to = View(to)] {
    KernelMode mode;
    to.on_cpu().copy_(from.on_cpu());
  });
  if (crosses) runtime.wait_mark(other, runtime.mark(stream));
}

}  // namespace

void copy_over_link(Stream* stream, void* at_device, void* at_host, size_t nbytes,
                    uint64_t registration, Direction direction) {
  Runtime& runtime = Runtime::get();
  bool down = direction == kDown;
  double bytes_per_s = runtime.link();
  runtime.enqueue(stream, Kind::kWork, down ? "copies to the host" : "copies to the device", [=] {
    // What the copy reads it reads late, and what it writes appears late.
    if (!Runtime::get().use_link(stream->device, direction, nbytes, bytes_per_s)) return;
    auto copy = [=] {
      std::memcpy(down ? at_host : at_device, down ? at_device : at_host, nbytes);
    };
    if (registration == 0) {
      copy();
    } else {
      access_host(at_host, nbytes, registration, copy);
    }
  });
  if (registration != 0) pinned_record(at_host, stream);
}

namespace {

// Both are contiguous in the same way and have the same type.
void over_the_link(const at::Tensor& device, const at::Tensor& host, Direction direction,
                   bool non_blocking) {
  size_t nbytes = host.nbytes();
  if (nbytes == 0) return;
  Runtime& runtime = Runtime::get();
  Stream* stream = current_stream(device.device().index());
  void* at_host = host.data_ptr();
  uint64_t registration = registration_of(at_host, nbytes);
  copy_over_link(stream, alias_of(device.data_ptr()), at_host, nbytes, registration, direction);
  if (registration == 0 || !non_blocking) runtime.synchronize(stream);
}

// One memcpy does it: the same type, and both dense with the same strides.
bool is_plain(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_conj() == b.is_conj() &&
         a.is_neg() == b.is_neg() && a.sizes() == b.sizes() &&
         ((a.is_contiguous() && b.is_contiguous()) ||
          (a.strides() == b.strides() && a.is_non_overlapping_and_dense()));
}

at::Tensor dense_like(const at::Tensor& values, const at::Tensor& shape) {
  return values.to(shape.scalar_type()).expand_as(shape).contiguous().resolve_conj().resolve_neg();
}

void down(const at::Tensor& device, const at::Tensor& host, bool non_blocking) {
  if (is_plain(device, host)) return over_the_link(device, host, kDown, non_blocking);
  at::Tensor dense = dense_like(device, host);
  if (is_plain(dense, host)) return over_the_link(dense, host, kDown, non_blocking);
  at::Tensor staging = at::empty_like(host, at::MemoryFormat::Contiguous);
  over_the_link(dense, staging, kDown, false);
  host.copy_(staging);
}

void up(const at::Tensor& host, const at::Tensor& device, bool non_blocking) {
  if (is_plain(device, host)) return over_the_link(device, host, kUp, non_blocking);
  at::Tensor dense = dense_like(host, device);
  if (is_plain(device, dense)) return over_the_link(device, dense, kUp, non_blocking);
  at::Tensor staging = at::empty_like(device, at::MemoryFormat::Contiguous);
  over_the_link(staging, dense, kUp, non_blocking);
  on_device(staging, device);
}

}  // namespace

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  bool from = self.device().type() == kType, to = dst.device().type() == kType;
  TORCH_CHECK((from || self.is_cpu()) && (to || dst.is_cpu()), "simdev: cannot copy from ",
              self.device(), " to ", dst.device());
  KernelMode mode;
  if (dst.numel() == 0) return dst;
  if (from && to) {
    on_device(self.expand_as(dst), dst);
  } else if (from) {
    down(self, dst, non_blocking);
  } else {
    up(self, dst, non_blocking);
  }
  return dst;
}

}  // namespace simdev
