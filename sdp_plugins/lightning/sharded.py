"""The strategies with one copy of the weights per node: mixins as in `strategy`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from sdp_plugins.lightning.namespaces import FABRIC, TRAINER, LightningClass
from sdp_plugins.lightning.strategy import SMDDPFabricStrategy, SMDDPStrategy

if TYPE_CHECKING:
    from sdp_plugins.torch import ShardedOptimizer


class ShardedModule(nn.Module):
    """Calls a module whose optimizers are sharded; stands where DDPStrategy has DDP's wrapper.

    Lightning calls ``training_step`` through a wrapper's ``forward``, and so through the hooks of
    the module.

    Args:
        module: The user's.
        master_weights: For its optimizers.

    Attributes:
        module: The user's.
        optimizers: Of its parameters.
    """

    def __init__(self, module: nn.Module, master_weights: bool = False) -> None:
        super().__init__()
        self.module = module
        self._master_weights = master_weights
        self.optimizers: list[ShardedOptimizer] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; in evaluation, too, all ranks have rank 0's buffers, as under DDP."""
        trains = self.training and torch.is_grad_enabled()
        if trains and not self.optimizers:
            raise RuntimeError(
                "smddp_sharded: the module is trained, but no optimizer of it is sharded, so ranks "
                "would train different weights. Hint: return the optimizer from "
                "configure_optimizers(), or pass it to Fabric's setup() or setup_optimizers()."
            )
        if not trains and self.optimizers:
            self.optimizers[0].synchronize_buffers()
        return self.module(*args, **kwargs)

    def shard(self, optimizer: Optimizer) -> ShardedOptimizer:
        """Take over an optimizer of some of the module's parameters; a collective."""
        from sdp_plugins.torch import ShardedOptimizer

        # Loggers of learning rates name optimizers by their class.
        kind = type(type(optimizer).__name__, (ShardedOptimizer,), {})
        sharded: ShardedOptimizer = kind(
            self.module, optimizer, master_weights=self._master_weights
        )
        self.optimizers.append(sharded)
        return sharded

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication."""
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    def close(self) -> None:
        """Give each rank weights of its own."""
        for optimizer in self.optimizers:
            optimizer.close()


class _Sharded(LightningClass):
    """What both have: `ShardedOptimizer`'s argument, and none of DistributedDataParallel.

    Args:
        master_weights: Whether optimizers update float32 copies of 16-bit weights, as of
            ``precision="bf16-true"``.
        *args: Of Lightning's DDPStrategy.
        **kwargs: Of Lightning's DDPStrategy.
    """

    _ddp_kwargs: dict[str, Any]

    def __init__(self, *args: Any, master_weights: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._master_weights = master_weights

    def _configure_launcher(self) -> None:
        defaults = signature(nn.parallel.DistributedDataParallel).parameters
        given = {
            name: value
            for name, value in self._ddp_kwargs.items()
            if name not in defaults or value != defaults[name].default  # LightningCLI passes all
        }
        for name in ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper"):
            if (value := getattr(self, f"_{name}", None)) is not None:
                given[name] = value
        if given:
            raise TypeError(
                f"{type(self).__name__} does not use DistributedDataParallel and takes none of its "
                f"arguments: {', '.join(given)}. Hint: leave them out; parameters without gradient "
                "need no find_unused_parameters."
            )
        if any(device.type != "cpu" for device in self.parallel_devices or ()):
            raise ValueError(
                "smddp_sharded trains on CPUs. Hint: accelerator='cpu', or strategy='smddp'."
            )
        super()._configure_launcher()


class SMDDPShardedStrategy(_Sharded, SMDDPStrategy):
    """One copy of the weights per node and sharded optimizers, for Lightning's Trainer.

    Each optimizer of ``configure_optimizers`` becomes a `ShardedOptimizer`. Makes an object for the
    Lightning package in use: see `sdp_plugins.lightning`.
    """

    _packages = TRAINER
    _concrete = "SMDDPShardedStrategy"
    model: Any
    lightning_module: Any
    optimizers: Any
    precision_plugin: Any

    def configure_ddp(self) -> None:
        """Wrap the module, in DDP's place."""
        self.model = ShardedModule(self.lightning_module, self._master_weights)
        # torch's functions refuse gradients that only some ranks have.
        self.precision_plugin.clip_grad_by_norm = _clip_norm
        self.precision_plugin.clip_grad_by_value = _clip_value

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the module's optimizers, and shard them."""
        super().setup_optimizers(trainer)
        self.optimizers = [
            self.model.shard(optimizer) if optimizer.param_groups else optimizer  # stands for none
            for optimizer in self.optimizers
        ]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication."""
        with self.model.no_sync():
            yield

    def teardown(self) -> None:
        """Leave the weights to whoever uses the module next."""
        if isinstance(self.model, ShardedModule):
            self.model.close()
            self.model = self.lightning_module
            del self.precision_plugin.clip_grad_by_norm, self.precision_plugin.clip_grad_by_value
        super().teardown()


class SMDDPShardedFabricStrategy(_Sharded, SMDDPFabricStrategy):
    """One copy of the weights per node and sharded optimizers, for Fabric.

    ``Fabric.setup`` and ``Fabric.setup_optimizers`` return each optimizer as a `ShardedOptimizer`.
    """

    _packages = FABRIC
    _concrete = "SMDDPShardedStrategy"

    precision: Any
    _modules: WeakSet[ShardedModule]

    def setup_module(self, module: nn.Module) -> ShardedModule:
        """Wrap a module, in DDP's place."""
        if not hasattr(self, "_modules"):
            self._modules = WeakSet()
            self._backward_sync_control = _BackwardSyncControl()
        wrapped = ShardedModule(module, self._master_weights)
        self._modules.add(wrapped)
        return wrapped

    def setup_optimizer(self, optimizer: Optimizer) -> ShardedOptimizer:
        """Shard an optimizer of a module that is set up."""
        from sdp_plugins.torch.sharding.checks import belongs_to

        for module in getattr(self, "_modules", ()):
            if belongs_to(optimizer, module):
                return module.shard(optimizer)
        raise ValueError(
            "The optimizer's parameters belong to no module that Fabric has set up, or to several. "
            "Hint: fabric.setup(module, optimizer), or fabric.setup_module(module) first; for "
            "several modules, one optimizer each."
        )

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Any:
        """Clip the averages; works where only some ranks have a gradient, too."""
        self.precision.unscale_gradients(optimizer)
        return optimizer.clip_grad_norm_(max_norm, float(norm_type), error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Clip the averages; works where only some ranks have a gradient, too."""
        self.precision.unscale_gradients(optimizer)
        optimizer.clip_grad_value_(clip_val)

    def get_module_state_dict(self, module: nn.Module) -> Any:
        """The state of the user's module."""
        return super().get_module_state_dict(_unwrapped(module))

    def load_module_state_dict(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Load a state of the user's module."""
        super().load_module_state_dict(_unwrapped(module), *args, **kwargs)


class _BackwardSyncControl:
    """What ``Fabric.no_backward_sync`` calls."""

    def no_backward_sync(self, module: Any, enabled: bool = True) -> AbstractContextManager[None]:
        return module.no_sync() if enabled else nullcontext()


def _clip_norm(optimizer: Any, clip_val: float) -> None:
    optimizer.clip_grad_norm_(clip_val)


def _clip_value(optimizer: Any, clip_val: float) -> None:
    optimizer.clip_grad_value_(clip_val)


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, ShardedModule) else module
