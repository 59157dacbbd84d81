"""What tests on the simulated accelerator share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sdp_plugins.core._native import DeviceStreams
from sdp_plugins.torch.accelerator.drivers import register_driver
from tests import simdev
from tests.torch.jobs import process_group

TIERS = ("flagged", "threaded")


class SimulatedDriver:
    """The simulated device's part of what CUDA's driver does."""

    def pin(self, address: int, nbytes: int) -> None:
        self.check(simdev.host_register(address, nbytes))

    def unpin(self, address: int) -> None:
        self.check(simdev.host_unregister(address))

    def has_flags(self, device: torch.device) -> bool:
        return True

    def streams(self, down: torch.Stream, up: torch.Stream) -> DeviceStreams:
        addresses = simdev.stream_functions()
        return DeviceStreams(*addresses, int(down.native_handle), int(up.native_handle))

    def check(self, code: int) -> None:
        if code:
            raise RuntimeError(simdev.last_error() or f"error {code} of the simulated device")


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
