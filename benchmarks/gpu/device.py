"""In a rank: one accelerator by torch's generic API; for the CPU, streams do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sdp_plugins.torch.accelerator.drivers import driver_of


class Device:
    """A rank's device.

    Args:
        kind: A device type of torch: "cuda", "cpu" or another.
        rank: Ranks take the devices in turn, so several share one if there are more ranks.

    Attributes:
        torch: torch's name for it.
    """

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.index = kind, 0
        if kind == "cpu":
            self.torch = torch.device("cpu")
            return
        found = torch.accelerator.current_accelerator()
        if found is None or found.type != kind:
            raise RuntimeError(f"there is no device {kind!r}, but {found}")
        self.index = rank % torch.accelerator.device_count()
        self.torch = torch.device(kind, self.index)
        self.enter_thread()

    @property
    def is_cpu(self) -> bool:
        """Whether there is no accelerator."""
        return self.kind == "cpu"

    def enter_thread(self) -> None:
        """Make this the calling thread's device."""
        if not self.is_cpu:
            torch.accelerator.set_device_index(self.index)

    def synchronize(self) -> None:
        """Wait for everything that was enqueued."""
        if not self.is_cpu:
            torch.accelerator.synchronize(self.index)

    def free_cache(self) -> None:
        """Give memory back that no tensor uses: other ranks may share the device."""
        if not self.is_cpu:
            torch.accelerator.empty_cache()

    def stream(self) -> Any:
        """Return a new stream."""
        return None if self.is_cpu else torch.Stream(self.torch)

    def event(self, stream: Any) -> Any:
        """Return an event that is recorded on a stream."""
        if stream is None:
            return None
        event = torch.Event(self.torch)
        event.record(stream)
        return event

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """Make a stream the current one; it goes on after what the former one holds."""
        if stream is None:
            yield
            return
        former = torch.accelerator.current_stream(self.torch)
        stream.wait_stream(former)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(former)

    def pinned(self, nbytes: int) -> Tensor:
        """Return zero-filled host memory that the device copies asynchronously."""
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=not self.is_cpu)

    @contextmanager
    def registered(self, tensor: Tensor) -> Iterator[Tensor]:
        """Pin host memory that exists already; on the CPU, and where nothing can, do nothing.

        Raises:
            RuntimeError: The device refuses.
        """
        driver = driver_of(self.kind)
        if driver is not None:
            driver.pin(tensor.data_ptr(), tensor.nbytes)
        try:
            yield tensor
        finally:
            self.synchronize()
            if driver is not None:
                driver.unpin(tensor.data_ptr())

    def describe(self) -> dict[str, Any]:
        """Return the device's name, and versions."""
        name = torch.cuda.get_device_name(self.index) if self.kind == "cuda" else self.kind
        count = 0 if self.is_cpu else torch.accelerator.device_count()
        facts = {"device": name, "devices": count, "torch": torch.__version__}
        return facts | {"cuda": torch.version.cuda or "none"}
