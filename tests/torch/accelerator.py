"""What tests on the simulated accelerator share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sdp_plugins.torch.accelerator.drivers import register_driver
from tests import simdev
from tests.torch.jobs import process_group

TIERS = ("flagged", "threaded")


class SimulatedDriver:
    """The simulated device's part of what CUDA's driver does."""

    def pin(self, address: int, nbytes: int) -> None:
        self._check("host_register", simdev.host_register(address, nbytes))

    def unpin(self, address: int) -> None:
        self._check("host_unregister", simdev.host_unregister(address))

    def has_flags(self, device: torch.device) -> bool:
        return True

    def handle(self, stream: torch.Stream) -> int:
        return int(stream.native_handle)

    def wait_flag(self, handle: int, address: int, value: int) -> None:
        code = simdev.stream_wait_value32(handle, address, value)
        self._check("stream_wait_value32", code)

    def write_flag(self, handle: int, address: int, value: int) -> None:
        code = simdev.stream_write_value32(handle, address, value)
        self._check("stream_write_value32", code)

    def _check(self, what: str, code: int) -> None:
        if code:
            raise RuntimeError(f"{what} failed with error {code}")


def load(tier: str | None = None) -> None:
    """Make the simulated device this process's accelerator, known to torch and to smddp."""
    simdev.load()
    register_driver("simdev", SimulatedDriver())
    if speed := os.environ.get("SIMDEV_BYTES_PER_SECOND"):
        simdev.set_link(float(speed))
    if tier is not None:
        os.environ["SDP_DEVICE_FLAGS"] = str(int(tier == "flagged"))


@contextmanager
def device_group(tier: str, **options: Any) -> Iterator[Any]:
    """The default group, in a process whose accelerator is the simulated device.

    Args:
        tier: One of `TIERS`: how all_reduce orders device and CPU.
        options: Of ``init_process_group``.
    """
    load(tier)
    with process_group(**options) as group:
        yield group
    torch.accelerator.synchronize()
    assert simdev.registered() == {}, "memory stays registered"
