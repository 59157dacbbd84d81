"""The C functions of the compiled library."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_int, c_int64, c_uint32, c_uint64
from pathlib import Path

# Names without "simdev_": what each takes, and what it gives.
SIGNATURES: dict[str, tuple[tuple[type, ...], type | None]] = {
    "last_error": ((), c_char_p),
    "current_stream": ((c_int,), c_uint64),
    "stream": ((c_int, c_int64), c_uint64),
    "gate_create": ((), c_int64),
    "gate_open": ((c_int64,), None),
    "gate_block": ((c_int64, c_uint64), c_int),
    "spin": ((c_uint64, c_double), c_int),
    "fail_next": ((c_uint64, c_char_p), c_int),
    "set_capturing": ((c_uint64, c_int), c_int),
    "is_capturing": ((c_uint64,), c_int),
    "set_link": ((c_double,), None),
    "set_deadline": ((c_double,), None),
    "set_poison_late": ((c_int,), None),
    "host_register": ((c_uint64, c_uint64), c_int),
    "host_unregister": ((c_uint64,), c_int),
    "set_pin_limit": ((c_uint64,), None),
    "registered": ((c_char_p, c_int), c_int),
    "synchronous_ops": ((c_char_p, c_int), c_int),
    "copy_down": ((c_uint64, c_uint64, c_uint64, c_uint64), c_int),
    "copy_up": ((c_uint64, c_uint64, c_uint64, c_uint64), c_int),
    "stream_wait_value32": ((c_uint64, c_uint64, c_uint32, c_uint32), c_int),
    "stream_write_value32": ((c_uint64, c_uint64, c_uint32, c_uint32), c_int),
    "memory_allocated": ((c_int,), c_uint64),
    "memory_reserved": ((c_int,), c_uint64),
    "max_memory_allocated": ((c_int,), c_uint64),
    "reset_peak": ((c_int,), None),
    "empty_cache": ((), c_int),
    "reset": ((), None),
    "shut_down": ((), None),
}


class Native:
    """`Native(path).spin(stream, 0.1)`: calls without the GIL; a call that fails raises."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        for name, (arguments, result) in SIGNATURES.items():
            function = getattr(self.library, f"simdev_{name}")
            function.argtypes, function.restype = arguments, result

    def call(self, name: str, *arguments: object) -> int:
        """What the function returns."""
        result = getattr(self.library, f"simdev_{name}")(*arguments)
        return 0 if result is None else int(result)

    def address(self, name: str) -> int:
        """Where the function is."""
        function = getattr(self.library, f"simdev_{name}")
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    def check(self, name: str, *arguments: object) -> None:
        """Call a function that returns whether it failed.

        Raises:
            RuntimeError: if it has.
        """
        if self.call(name, *arguments):
            raise RuntimeError(self.library.simdev_last_error().decode())

    def text(self, name: str) -> list[str]:
        """The lines that a function writes into a buffer."""
        size = 4096
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self.call(name, buffer, size)
            if length < size:
                return buffer.value.decode().splitlines()
            size = 2 * length
