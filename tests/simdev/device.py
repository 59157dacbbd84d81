"""What tests do with the simulated device. The functions need `load()` first."""

from __future__ import annotations

import atexit
import sys

import torch

from tests.simdev.build import library
from tests.simdev.native import Native

_native: list[Native] = []  # one, once loaded


def load() -> None:
    """Compile the device if needed, and register it with torch as "simdev"."""
    if _native:
        return
    path = library()
    torch.ops.load_library(str(path))
    _native.append(Native(path))
    torch.utils.rename_privateuse1_backend("simdev")
    from tests.simdev import autocast, meta, sync_batch_norm, torch_module

    torch._register_device_module("simdev", sys.modules[torch_module.__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    autocast.register()
    sync_batch_norm.register()
    meta.prefer_native()
    # A kernel must not run while the interpreter and torch go away.
    atexit.register(native().call, "shut_down")


def native() -> Native:
    """The library.

    Raises:
        RuntimeError: if nobody has called load().
    """
    if not _native:
        raise RuntimeError("call simdev.load() first")
    return _native[0]


def handle(stream: torch.Stream | None = None) -> int:
    """How C functions name a stream: its address; by default the current stream's."""
    if stream is None:
        return native().call("current_stream", torch.accelerator.current_device_index())
    return native().call("stream", stream.device_index, stream.stream_id)


class Gate:
    """Holds streams until the host opens it."""

    def __init__(self) -> None:
        self._id = native().call("gate_create")

    def block(self, stream: torch.Stream | None = None) -> None:
        """Let the (current) stream wait here until the gate is open."""
        native().check("gate_block", self._id, handle(stream))

    def open(self) -> None:
        """Let streams pass, for ever."""
        native().call("gate_open", self._id)


def gate() -> Gate:
    """A new, closed gate."""
    return Gate()


def spin(seconds: float, stream: torch.Stream | None = None) -> None:
    """Enqueue a kernel that takes a while, without using the CPU."""
    native().check("spin", handle(stream), seconds)


def fail_next(text: str, stream: torch.Stream | None = None) -> None:
    """Let the next kernel or copy of the (current) stream fail, which fails its device.

    As with CUDA, the failure is seen later and stays: kernels no longer run, and every launch,
    copy, record, query and synchronisation raises RuntimeError with this text, until reset().
    """
    native().check("fail_next", handle(stream), text.encode())


def reset() -> None:
    """Discard queued work, failures, gates, users' registrations and all settings."""
    native().call("reset")


def set_link(bytes_per_second: float) -> None:
    """Set the speed of copies to and from the host that are enqueued from now on; 0: no limit.

    All streams of a device share it, but each direction has its own.
    """
    native().call("set_link", bytes_per_second)


def set_deadline(seconds: float) -> None:
    """Set after how long a synchronisation raises, with what the streams are at (60 s)."""
    native().call("set_deadline", seconds)


def set_poison_late(late: bool) -> None:
    """Overwrite freed memory only when it is handed out again.

    For code that has another stream read it until then and orders its stream behind that one, as
    FSDP2 does with gradients. With CUDA's allocator such code is right.
    """
    native().call("set_poison_late", int(late))


def host_register(ptr: int, nbytes: int) -> int:
    """Pin host memory, for asynchronous copies.

    `is_pinned()` of a tensor there is true once torch has used the device, as with CUDA.

    Returns:
        0, or CUDA's code: 1 invalid, 2 out of memory, 712 some of it is registered already.
    """
    return native().call("host_register", ptr, nbytes)


def host_unregister(ptr: int) -> int:
    """Unpin it. Return CUDA's code: 0, or 713 if no registration begins there."""
    return native().call("host_unregister", ptr)


def registered() -> dict[int, int]:
    """What host_register has pinned: address to size. torch's pinned memory is not listed."""
    lines = [line.split() for line in native().text("registered")]
    return {int(ptr): int(nbytes) for ptr, nbytes in lines}


def set_pin_limit(nbytes: int) -> None:
    """Limit the memory that can be pinned; beyond, host_register returns 2 and torch raises."""
    native().call("set_pin_limit", nbytes)


def stream_wait_value32(stream: int, address: int, value: int) -> int:
    """Let a stream wait until (int32)(*address - value) >= 0; cuStreamWaitValue32 with GEQ.

    Args:
        stream: its `stream_id`, or its `native_handle` where torch has that; 0 is the default
            stream of the current device.
        address: in registered host memory, a multiple of 4.
        value: an unsigned number of 32 bits.

    Returns:
        0, or CUDA's code: 1 for the address, 400 for the stream, 700 if the device has failed.
    """
    return native().call("stream_wait_value32", stream, address, value, 0)


def stream_write_value32(stream: int, address: int, value: int) -> int:
    """Let a stream store a value after all that it has before; arguments as for the wait."""
    return native().call("stream_write_value32", stream, address, value, 0)


def last_error() -> str:
    """The text of the last error in this thread; empty if there was none."""
    return native().library.simdev_last_error().decode()


def stream_functions() -> tuple[int, ...]:
    """The addresses of C functions: copies down and up, to write a flag, to wait for one."""
    names = ("copy_down", "copy_up", "stream_write_value32", "stream_wait_value32")
    return tuple(native().address(name) for name in names)


def set_capturing(capturing: bool) -> None:
    """Pretend that the current stream is being captured into a graph, or no longer."""
    native().check("set_capturing", handle(), int(capturing))


def is_current_stream_capturing() -> bool:
    """Whether set_capturing(True) holds for the current stream."""
    return bool(native().call("is_capturing", handle()))


def memory_allocated(device: int | torch.device | str | None = None) -> int:
    """Bytes of the device's memory that tensors hold."""
    return native().call("memory_allocated", index_of(device))


def max_memory_allocated(device: int | torch.device | str | None = None) -> int:
    """The most that `memory_allocated` has been."""
    return native().call("max_memory_allocated", index_of(device))


def synchronous_ops() -> list[str]:
    """The operators that waited for their stream: they read values, or have no meta kernel."""
    return native().text("synchronous_ops")


def index_of(device: int | torch.device | str | None) -> int:
    """A device's number; by default the current device's."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index
