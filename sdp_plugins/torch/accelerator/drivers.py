"""What torch lacks of a device: pinning shared memory, and flags between a stream and the CPU.

A flag is an aligned 32-bit word of pinned memory. A stream can wait until a flag has reached a
value, and can write one after all that was enqueued before.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch


class Driver(Protocol):
    """The functions of one type of device; an error is a RuntimeError."""

    def pin(self, address: int, nbytes: int) -> None:
        """Make mapped memory known to the device, for asynchronous copies."""

    def unpin(self, address: int) -> None:
        """Undo `pin`; no copy may be in flight."""

    def has_flags(self, device: torch.device) -> bool:
        """Return whether the device's streams can wait for and write flags."""

    def handle(self, stream: torch.Stream) -> int:
        """Return what the two functions below call a stream."""

    def wait_flag(self, handle: int, address: int, value: int) -> None:
        """Let a stream wait until ``int32(flag - value) >= 0``."""

    def write_flag(self, handle: int, address: int, value: int) -> None:
        """Let a stream write a flag after everything enqueued before."""


class CudaDriver:
    """CUDA's driver API, of which torch's own bindings have no part.

    Errors of the driver API do not stay latched, as those of the runtime's `cudaHostRegister` do,
    which torch's next kernel launch would report.
    """

    _PORTABLE_AND_MAPPED = 3
    _CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91
    _UNTIL_GREATER_OR_EQUAL = 0

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL("libcuda.so.1")
        address, number = ctypes.c_void_p, ctypes.c_uint
        library.cuMemHostRegister_v2.argtypes = [address, ctypes.c_size_t, number]
        library.cuMemHostUnregister.argtypes = [address]
        for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"):
            if hasattr(library, name):  # CUDA 11.7 and later
                getattr(library, name).argtypes = [address, ctypes.c_uint64, number, number]

    def pin(self, address: int, nbytes: int) -> None:
        """See ``Driver``."""
        register = self._library.cuMemHostRegister_v2
        self._check("cuMemHostRegister", register(address, nbytes, self._PORTABLE_AND_MAPPED))

    def unpin(self, address: int) -> None:
        """See ``Driver``."""
        self._check("cuMemHostUnregister", self._library.cuMemHostUnregister(address))

    def has_flags(self, device: torch.device) -> bool:
        """See ``Driver``; the address of pinned memory must be the same on the device."""
        if not hasattr(self._library, "cuStreamWaitValue32_v2"):
            return False
        value = ctypes.c_int()
        attribute, index = self._CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, device.index
        error = self._library.cuDeviceGetAttribute(ctypes.byref(value), attribute, index)
        return error == 0 and value.value == 1

    def handle(self, stream: torch.Stream) -> int:
        """Return the CUstream."""
        same = torch.cuda.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
        return int(same.cuda_stream)

    def wait_flag(self, handle: int, address: int, value: int) -> None:
        """See ``Driver``."""
        wait, until = self._library.cuStreamWaitValue32_v2, self._UNTIL_GREATER_OR_EQUAL
        self._check("cuStreamWaitValue32", wait(handle, address, value, until))

    def write_flag(self, handle: int, address: int, value: int) -> None:
        """See ``Driver``."""
        write = self._library.cuStreamWriteValue32_v2
        self._check("cuStreamWriteValue32", write(handle, address, value, 0))

    def _check(self, what: str, error: int) -> None:
        if error:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(error, ctypes.byref(text))
            said = text.value.decode() if text.value else "unknown error"
            raise RuntimeError(f"{what} failed with CUDA error {error}: {said}")


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
