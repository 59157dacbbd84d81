"""In a rank: the ways to train over a slow network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from benchmarks.slow.names import EVERY, FLOAT32, GLOO, NONE, WARM_UP
from benchmarks.torch_groups import LIMIT
from sdp_plugins.torch import LocalUpdates, Options, OuterStep


@dataclass
class Training:
    """A model in training.

    Attributes:
        model: Called with a batch, it returns the loss.
        optimizer: Of its parameters.
        after: Follows each step of the optimizer.
        finish: Makes the ranks' models equal; a collective.
        close: Leaves the groups of its own.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    after: Callable[[], object] = lambda: None
    finish: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None


Optimizer = Callable[[Any], torch.optim.Optimizer]
Build = Callable[[torch.nn.Module, Optimizer], Training]


def none(model: torch.nn.Module, optimizer: Optimizer) -> Training:
    """Each rank for itself."""
    return Training(model, optimizer(model.parameters()))


def smddp(model: torch.nn.Module, optimizer: Optimizer, wire: str = "none") -> Training:
    """DDP over smddp."""
    group = dist.new_group(backend="smddp", timeout=LIMIT, pg_options=Options(wire))
    ddp = DistributedDataParallel(model, process_group=group)
    close = partial(dist.destroy_process_group, group)
    return Training(ddp, optimizer(model.parameters()), close=close)


def local(model: torch.nn.Module, optimizer: Optimizer, **form: Any) -> Training:
    """`LocalUpdates` of single ranks."""
    made = optimizer(model.parameters())
    updates = LocalUpdates(model, made, every=EVERY, **form)
    return Training(model, made, finish=updates.synchronize, close=updates.close)


def gloo(model: torch.nn.Module, optimizer: Optimizer, hook: str = "") -> Training:
    """DDP over gloo, with one of torch's hooks."""
    ddp = DistributedDataParallel(model)
    training = Training(ddp, optimizer(model.parameters()))
    if hook == "fp16":  # torch refuses its hook for bfloat16 without CUDA
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=WARM_UP
        )
        ddp.register_comm_hook(state, lambda state, bucket: _power_sgd(state, bucket))
    if hook == "local_sgd":
        # Without a group, the hook averages gradients among the ranks of a machine: here, all.
        alone, _ = dist.new_subgroups(1)
        sgd = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=WARM_UP)
        ddp.register_comm_hook(sgd, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=EVERY, warmup_steps=WARM_UP)
        training.after = partial(averager.average_parameters, list(model.parameters()))
        training.close = partial(dist.destroy_process_group, alone)
    return training


def _power_sgd(state: Any, bucket: Any) -> Any:
    """Torch's hook, a bucket at a time: else gloo's threads reduce in other orders on each rank."""
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


STREAMED = OuterStep(lr=1.0, momentum=0.5)
VARIANTS: dict[str, Build] = {
    NONE: none,
    GLOO: gloo,
    "gloo-fp16": partial(gloo, hook="fp16"),
    "gloo-powersgd": partial(gloo, hook="powersgd"),
    "gloo-local-sgd": partial(gloo, hook="local_sgd"),
    FLOAT32: smddp,
    "bf16": partial(smddp, wire="bf16"),
    "int8": partial(smddp, wire="int8"),
    "fp8": partial(smddp, wire="fp8"),
    "int4": partial(smddp, wire="int4 feedback"),
    "local-sgd": partial(local, wire="int8"),
    "diloco": partial(local, outer="nesterov", wire="int8"),
    "streaming": partial(local, outer=STREAMED, wire="int4", fragments=3, delay=6),
}
