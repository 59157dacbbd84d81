"""`torch.simdev`: the functions that torch and its users expect of a device's module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Event as Event
from torch import Stream as Stream

from tests.simdev.device import (  # noqa: F401
    fail_next,
    gate,
    host_register,
    host_unregister,
    index_of,
    is_current_stream_capturing,
    max_memory_allocated,
    memory_allocated,
    native,
    registered,
    reset,
    set_capturing,
    set_deadline,
    set_link,
    set_pin_limit,
    set_poison_late,
    spin,
    stream_wait_value32,
    stream_write_value32,
    synchronous_ops,
)

PRIVATE_USE_1 = 20  # in torch's DeviceType

Device = int | torch.device | str | None


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    torch.ops.simdev.init()


def _lazy_init() -> None:  # torch calls it when the device is first used
    init()


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 2


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Device) -> None:
    torch.accelerator.set_device_index(index_of(device))


@contextmanager
def device(device: Device) -> Iterator[None]:
    with torch.accelerator.device_index(index_of(device)):
        yield


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(index_of(device))


def default_stream(device: Device = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=PRIVATE_USE_1)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
    else:
        with stream:
            yield


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(index_of(device))


def memory_reserved(device: Device = None) -> int:
    return native().call("memory_reserved", index_of(device))


def reset_peak_memory_stats(device: Device = None) -> None:
    native().call("reset_peak", index_of(device))


def empty_cache() -> None:
    native().check("empty_cache")


def default_generator(device: Device = None) -> torch.Generator:
    found: torch.Generator = torch.ops.simdev.default_generator(index_of(device))
    return found


def manual_seed(seed: int) -> None:
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        default_generator(index).manual_seed(seed)


def get_rng_state(device: Device = None) -> torch.Tensor:
    return default_generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    default_generator(device).set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True
