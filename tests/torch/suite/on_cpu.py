"""torch's tests for GPUs on CPUs: every CUDA device is the CPU, and there are enough of them.

Most tests of DistributedDataParallel ask for two GPUs although they test nothing about them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

CPU = torch.device("cpu")
MANY_GPUS = 8


def _ungated(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda function: function


def lift_gates() -> None:
    """Have tests run that ask for GPUs, or for eight ranks; before torch's tests are imported."""
    common_distributed.skip_if_no_gpu = lambda function: function
    common_distributed.skip_if_small_worldsize = lambda function: function
    common_distributed.skip_if_lt_x_gpu = _ungated
    common_distributed.nccl_skip_if_lt_x_gpu = _ungated
    common_distributed.requires_nccl_version = _ungated
    common_distributed.init_multigpu_helper = lambda world_size, backend: {
        rank: [rank] for rank in range(world_size)
    }


def _is_gpu(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return type(value) is int or (isinstance(value, str) and value.startswith("cuda"))


def _on_cpu(value: Any) -> Any:
    return CPU if _is_gpu(value) else value


class _EverythingOnCpu(TorchFunctionMode):
    """Replaces the devices that torch's functions are called with."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.to:
            args = args[0], *map(_on_cpu, args[1:])
        if func is torch._C._nn._parse_to:  # Module.to
            args = tuple(map(_on_cpu, args))
        return func(*args, **kwargs)


def _nothing(name: str, *args: Any, **kwargs: Any) -> None:
    pass


def map_cuda() -> None:
    """Have this process, which is a rank, use the CPU wherever a test says CUDA."""

    cuda = torch.cuda
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(cuda, name, partial(_nothing, name))  # torch.compile wants no two to be the same
    cuda.current_device = torch.accelerator.current_device_index = lambda: 0
    cuda.device_count = lambda: MANY_GPUS
    cuda.device = nullcontext

    parallel = torch.nn.parallel.DistributedDataParallel
    init = parallel.__init__

    def on_cpu(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *a: Any, **k: Any
    ) -> None:
        # The build for CUDA makes a stream of a GPU, and so fails without one.
        with mock.patch.object(torch, "Stream", partial(torch.Stream, CPU)):
            init(self, module, None, None, *a, **k)

    parallel.__init__ = on_cpu
    _EverythingOnCpu().__enter__()
