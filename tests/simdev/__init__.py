"""A simulated accelerator, "simdev": two devices whose streams are threads.

It exists to expose missing synchronisation, so it is as asynchronous as a GPU:

    from tests import simdev

    simdev.load()
    x = torch.ones(4, device="simdev")
    gate = simdev.gate()
    gate.block()              # the current stream waits here
    y = x + 1                 # returns at once; computed after...
    gate.open()

The host cannot touch device memory, freed memory is overwritten in the order of its stream, and
copies are asynchronous only from and to registered host memory. `device.py` has all functions;
they are also those of `torch.simdev`.
"""

from __future__ import annotations

from tests.simdev.device import (
    Gate,
    fail_next,
    gate,
    host_register,
    host_unregister,
    is_current_stream_capturing,
    last_error,
    load,
    max_memory_allocated,
    memory_allocated,
    registered,
    reset,
    set_capturing,
    set_deadline,
    set_link,
    set_pin_limit,
    set_poison_late,
    spin,
    stream_functions,
    stream_wait_value32,
    stream_write_value32,
    synchronous_ops,
)

__all__ = [
    "Gate",
    "fail_next",
    "gate",
    "host_register",
    "host_unregister",
    "last_error",
    "is_current_stream_capturing",
    "load",
    "max_memory_allocated",
    "memory_allocated",
    "registered",
    "reset",
    "set_capturing",
    "set_deadline",
    "set_link",
    "set_pin_limit",
    "set_poison_late",
    "spin",
    "stream_functions",
    "stream_wait_value32",
    "stream_write_value32",
    "synchronous_ops",
]
