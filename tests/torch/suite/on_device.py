"""torch's tests for GPUs on the simulated accelerator: every CUDA device is one of its two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

from sdp_plugins.torch.accelerator.drivers import register_driver
from sdp_plugins.torch.process_group_lifecycle import ProcessGroupBase
from tests import simdev
from tests.torch.accelerator import SimulatedDriver
from tests.torch.suite import on_cpu

DEVICES = 2
TESTS = "distributed_test.py"
POISON_LATE = {"test_ddp_hook_parity_powerSGD"}
"""PowerSGD frees what its callback's stream still reads: right only while nobody reuses it."""


def load() -> None:
    """Load the device, in the process from which ranks are forked, and have its tests run."""
    simdev.load()
    register_driver("simdev", SimulatedDriver())
    on_cpu.lift_gates()
    dist.is_nccl_available = lambda: sys._getframe(1).f_code.co_filename.endswith(TESTS)
    common_distributed.init_multigpu_helper = lambda world_size, backend: {
        rank: [rank % DEVICES] for rank in range(world_size)
    }


def _mapped(value: Any) -> Any:
    """The simulated device for a CUDA device, or for a number; other values as they are."""
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        value = torch.device(value)
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("simdev", None if value.index is None else value.index % DEVICES)
    return torch.device("simdev", value % DEVICES) if type(value) is int else value


class _CudaIsSimulated(TorchFunctionMode):
    """Replaces the devices that torch's functions are called with."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            device = args[1] if len(args) > 1 else kwargs.get("device")
            return args[0].to("simdev" if device is None else _mapped(device))
        if func is torch.Tensor.is_cuda.__get__:
            return args[0].device.type == "simdev"
        if "device" in kwargs:
            kwargs["device"] = _mapped(kwargs["device"])
        if func is torch.Tensor.to:
            args = args[0], *map(_mapped, args[1:])
        if func is torch._C._nn._parse_to:  # Module.to
            args = tuple(map(_mapped, args))
        return func(*args, **kwargs)


def map_cuda(test: str, mark: Path) -> None:
    """Have this process, which is a rank, use the simulated device wherever a test says CUDA.

    Args:
        test: The name of its test.
        mark: A file to make when a collective runs on the device.
    """
    simdev.set_poison_late(test in POISON_LATE)
    cuda, module = torch.cuda, torch.get_device_module("simdev")
    cuda.set_device = lambda device: module.set_device(_mapped(device))
    for name in ("synchronize", "manual_seed", "current_device", "current_stream", "stream"):
        setattr(cuda, name, getattr(module, name))
    cuda.device_count = lambda: on_cpu.MANY_GPUS
    cuda.device = lambda device: module.device(_mapped(device))
    cuda.Stream = lambda device=None, **options: torch.Stream(_mapped(device), **options)

    on_device = ProcessGroupBase._calls_on_device

    def noted(self: ProcessGroupBase) -> Any:
        mark.touch()
        return on_device(self)

    ProcessGroupBase._calls_on_device = noted

    # That there are GPUs is for torch's tests alone: torch itself would look for them.
    cuda.is_available = lambda: sys._getframe(1).f_code.co_filename.endswith(TESTS)
    new_group = dist.new_group
    dist.new_group = lambda *args, backend=None, **options: new_group(
        *args, backend="smddp" if backend == "nccl" else backend, **options
    )
    parallel = torch.nn.parallel.DistributedDataParallel
    init = parallel.__init__

    def on_simdev(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *a: Any, **k: Any
    ) -> None:
        ids = device_ids and [_mapped(device) for device in device_ids]
        init(self, module, ids, _mapped(output_device), *a, **k)

    parallel.__init__ = on_simdev
    _CudaIsSimulated().__enter__()
