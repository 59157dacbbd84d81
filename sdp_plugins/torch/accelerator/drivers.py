"""What torch lacks of a device: pinning shared memory, and flags between a stream and the CPU.

A flag is an aligned 32-bit word of pinned memory. A stream can wait until a flag has reached a
value, and can write one after all that was enqueued before.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from sdp_plugins.core._native import DeviceStreams


class Driver(Protocol):
    """The functions of one type of device; an error is a RuntimeError."""

    def pin(self, address: int, nbytes: int) -> None:
        """Make mapped memory known to the device, for asynchronous copies."""

    def unpin(self, address: int) -> None:
        """Undo `pin`; no copy may be in flight."""

    def has_flags(self, device: torch.device) -> bool:
        """Return whether the device's streams can wait for and write flags."""

    def streams(self, down: torch.Stream, up: torch.Stream) -> DeviceStreams:
        """Return what enqueues copies and flags on two streams of a device that has flags."""

    def check(self, code: int) -> None:
        """Raise the error that a code of `streams` stands for; 0 is none."""


class CudaDriver:
    """CUDA's driver API, of which torch's own bindings have no part.

    Errors of the driver API do not stay latched, as those of the runtime's `cudaHostRegister` do,
    which torch's next kernel launch would report.
    """

    _PORTABLE_AND_MAPPED = 3
    _CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91
    # In the order of DeviceStreams' arguments; those of flags are in CUDA 11.7 and later.
    _STREAM_FUNCTIONS = (
        *("cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"),
        *("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"),
    )

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL("libcuda.so.1")
        address, number = ctypes.c_void_p, ctypes.c_uint
        library.cuMemHostRegister_v2.argtypes = [address, ctypes.c_size_t, number]
        library.cuMemHostUnregister.argtypes = [address]

    def pin(self, address: int, nbytes: int) -> None:
        """See ``Driver``."""
        register = self._library.cuMemHostRegister_v2
        self.check(register(address, nbytes, self._PORTABLE_AND_MAPPED))

    def unpin(self, address: int) -> None:
        """See ``Driver``."""
        self.check(self._library.cuMemHostUnregister(address))

    def has_flags(self, device: torch.device) -> bool:
        """See ``Driver``; the address of pinned memory must be the same on the device."""
        if not all(hasattr(self._library, name) for name in self._STREAM_FUNCTIONS):
            return False
        value = ctypes.c_int()
        attribute, index = self._CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, device.index
        error = self._library.cuDeviceGetAttribute(ctypes.byref(value), attribute, index)
        return error == 0 and value.value == 1

    def streams(self, down: torch.Stream, up: torch.Stream) -> DeviceStreams:
        """See ``Driver``."""
        copy_down, copy_up, write, wait = map(self._address, self._STREAM_FUNCTIONS)
        handles = self._handle(down), self._handle(up)
        return DeviceStreams(copy_down, copy_up, write, wait, *handles)

    def _address(self, name: str) -> int:
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0

    @staticmethod
    def _handle(stream: torch.Stream) -> int:
        """Return the CUstream."""
        same = torch.cuda.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
        return int(same.cuda_stream)

    def check(self, code: int) -> None:
        """See ``Driver``."""
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            said = text.value.decode() if text.value else "unknown error"
            raise RuntimeError(f"CUDA error {code} of the driver: {said}")


_drivers: dict[str, Driver | None] = {}


def register_driver(device_type: str, driver: Driver) -> None:
    """Make a device's functions known, for devices other than CUDA's."""
    _drivers[device_type] = driver


def driver_of(device_type: str) -> Driver | None:
    """Return a device's functions; None: only what torch has, which is pinned memory of its own."""
    if device_type not in _drivers:
        is_cuda = device_type == "cuda" and torch.version.hip is None
        try:
            _drivers[device_type] = CudaDriver() if is_cuda else None
        except OSError:
            _drivers[device_type] = None
    return _drivers[device_type]
