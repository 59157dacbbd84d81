"""Keras on torch: gradients are reduced in place, concurrently with Keras' own backward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import torch

from sdp_plugins.core.tensor_lists import FusedAllReduce

from ..batch_shard import BatchShard, factor_of, rows
from ..steps import StatefulStep
from .base import Backend
from .torch_devices import DeviceGradients
from .torch_overlap import Overlap, in_memory_of_its_own
from .torch_shards import ShardedUpdate, can_shard

if TYPE_CHECKING:
    from sdp_plugins.core import Group

log = logging.getLogger("sdp_plugins.keras")
_seeding = Lock()  # the strategies of different threads share torch's generator


class TorchBackend(Backend):
    """The backend for torch."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._reduce = FusedAllReduce(group)
        self._on_devices = DeviceGradients(group)
        self._updates: WeakKeyDictionary[Any, ShardedUpdate] = WeakKeyDictionary()
        self._step: Overlap | ShardedUpdate | None = None  # the one that is running

    step = staticmethod(StatefulStep)

    def close(self) -> None:
        """Leave gradients to whoever trains the models next."""
        while self._updates:
            self._updates.popitem()[1].leave()
        self._on_devices.close()

    @contextmanager
    def training(self, model: Any, shard: BatchShard | None) -> Iterator[None]:
        """Overlap the communication with Keras' own step: one backward pass and one update."""
        if not _has_one_backward(model):
            yield
            return
        variables = model.trainable_weights
        if not all(variable.value.is_cpu for variable in variables):
            yield  # Keras calls average_gradients
            return
        self._step = self._update_of(model, variables) or Overlap(self._reduce, variables)
        try:
            with self._step.averaging(factor_of(shard)):
                yield
        finally:
            self._step = None

    def _update_of(self, model: Any, variables: Sequence[Any]) -> ShardedUpdate | None:
        """Return the update by shards of a model, or None; a collective where it is new."""
        optimizer = model.optimizer
        update = self._updates.get(model)
        if update is not None and update.serves(optimizer, variables):
            return update
        if update is not None:
            self._updates.pop(model).leave()
        if self.is_atomic or not can_shard(self._group, optimizer, variables):
            return None
        update = self._updates[model] = ShardedUpdate(self._group, optimizer, variables)
        if self._group.rank == 0:
            log.info("model '%s': each rank updates a shard of the weights", model.name)
        return update

    def update(
        self, apply: Callable[..., Any], optimizer: Any, grads: Sequence[Any], variables: Any
    ) -> Any:
        """Update by shards in a step that can."""
        if isinstance(self._step, ShardedUpdate):
            return self._step.update(apply, optimizer, grads, variables)
        return apply(grads, variables)

    @torch.compiler.disable
    @torch.no_grad()
    def average_gradients(self, grads: Sequence[Any], shard: BatchShard | None) -> list[Any]:
        """Average gradients, last layers first; in place if the memory has no other user."""
        if self._step is not None and self._step.done:
            return list(grads)
        factor = factor_of(shard)
        averaged = [in_memory_of_its_own(grad) for grad in grads]
        if factor == 0:
            torch._foreach_zero_(averaged)
        elif factor != 1:
            torch._foreach_mul_(averaged, factor)
        if on_device := [grad for grad in averaged if not grad.is_cpu]:
            self._on_devices.average(on_device)
        if on_cpu := [grad for grad in averaged[::-1] if grad.is_cpu]:
            self._reduce(on_cpu, "avg")
        return averaged

    @torch.compiler.disable
    @torch.no_grad()
    def all_reduce(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the sum over ranks of each tensor, computed on copies."""
        totals = [tensor.detach().cpu().clone().contiguous() for tensor in tensors]
        self._reduce(totals, "sum")
        return [_like(tensor, total) for tensor, total in zip(tensors, totals, strict=True)]

    @torch.compiler.disable
    @torch.no_grad()
    def gather_rows(self, tensor: Any, shard: BatchShard) -> Any:
        """Gather all ranks' rows with an uneven all_gather."""
        group = self._group
        lengths = [rows(shard.count, rank, group.world_size)[1] for rank in range(group.world_size)]
        mine = tensor.detach()[: shard.rows].cpu().contiguous()
        whole = mine.new_empty((shard.count, *tensor.shape[1:]))
        group.all_gather_uneven(list(whole.split(lengths)), mine)
        return _like(tensor, whole)

    def global_batches(self, source: Any, seed: int) -> Iterator[Any]:
        """Iterate with a seed for everything that samplers draw from torch's own generator."""
        loader = source.get_torch_dataloader()
        with _seeding, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            batches = iter(loader)
            try:
                first = next(batches)  # samplers draw when the first batch is requested
            except StopIteration:
                return
        yield first
        yield from batches

    def read(self, variable: Any) -> Any:
        """Return a copy of the value."""
        return variable.value.detach().clone()

    def elements(self, variable: Any, part: slice) -> np.ndarray[Any, Any]:
        """Return a copy of elements; Keras' conversion copies all that it gets."""
        return keras.ops.convert_to_numpy(variable.value.detach().reshape(-1)[part])

    def compiled(self, model: Any, step: str) -> Callable[..., Any]:
        """Return the step; one of an evaluation needs no gradients."""
        function: Callable[..., Any] = getattr(model, step)
        if step == "test_step":
            function = torch.no_grad()(function)
        return torch.compile(function) if model.jit_compile else function

    def batches(self, adapter: Any) -> Any:
        """Return tensors of torch."""
        return adapter.get_torch_dataloader()


def _like(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return a result on the device of the tensor that it is of."""
    return result.to(tensor.device)


def _has_one_backward(model: Any) -> bool:
    """Return whether each step is one backward pass and one update, without compilation."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return (
        type(model).train_step is keras.Model.train_step
        and not model.jit_compile
        and optimizer is not None
        and not optimizer.gradient_accumulation_steps
    )
