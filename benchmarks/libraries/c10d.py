"""Any backend of torch.distributed, and gloo."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.libraries.base import Place, UnsupportedError
from benchmarks.values import storage


class TorchBackend:
    """The default process group over one backend; reduces the same tensor every time."""

    reduces = True
    backend = ""

    def __init__(self, place: Place) -> None:
        self.tensor = torch.empty(0)
        self.kind = storage("float32")
        self.version = f"torch {torch.__version__}"
        torch.set_num_threads(place.threads)
        # A file store needs no port, so no race for one.
        dist.init_process_group(
            self.backend,
            init_method=f"file://{place.meeting_file}",
            rank=place.rank,
            world_size=place.ranks,
            timeout=timedelta(seconds=120),
        )

    def allocate(self, count: int, dtype: str) -> None:
        """Allocate a plain tensor, as a user would."""
        self.tensor = torch.empty(0)
        self.tensor = torch.zeros(count, dtype=getattr(torch, dtype))
        self.kind = storage(dtype)

    def view(self) -> NDArray:
        """Return the tensor's memory; Tensor.numpy() would keep its storage from being moved."""
        memory = (ctypes.c_char * self.tensor.nbytes).from_address(self.tensor.data_ptr())
        return np.frombuffer(memoryview(memory), self.kind)

    def operation(self, name: str) -> Callable[[], object]:
        """Return the public function of torch.distributed."""
        if name == "all_reduce":
            return partial(dist.all_reduce, self.tensor)
        if name == "barrier":
            return dist.barrier
        raise UnsupportedError(f"{self.backend}: no {name}")

    def path(self) -> str:
        """Return an empty path: the C++ backends report none."""
        return ""

    def close(self) -> None:
        """Destroy the group."""
        dist.destroy_process_group()


class Gloo(TorchBackend):
    """torch's own CPU backend."""

    backend = "gloo"
