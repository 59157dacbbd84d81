"""Gradients, averaged over the ranks just before an optimizer uses them.

Keras clips after accumulating. Averaging just before clipping therefore happens once per update
instead of once per micro-step, and clips the same values as one process would. A loss scale must be
lowered on all ranks or on none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from keras import ops

from . import keras_internals
from .running_step import running_step, shard_of_step

if TYPE_CHECKING:
    from .batch_shard import BatchShard
    from .context import TrainingContext

_PATCHED = "_smddp_context"
_OVERRIDDEN = "_smddp_overridden"
PATCHES = __name__
"""The module of the functions that `patch_optimizer` gives an optimizer."""


def install() -> None:
    """Refuse optimizers in steps that average no gradients for them."""
    keras_internals.wrap_once(keras_internals.BaseOptimizer, "apply", _refusing)


def _refusing(apply: Callable[..., Any]) -> Callable[..., Any]:
    def applied(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if running_step() is not None and _PATCHED not in vars(optimizer):
            raise RuntimeError(
                f"optimizer '{optimizer.name}' is not an attribute of the model whose step it "
                "updates: each rank would use its own gradients. Hint: make it before the first "
                "call, and assign it to an attribute of the model."
            )
        return apply(optimizer, *args, **kwargs)

    return applied


def patch_optimizer(optimizer: Any, context: TrainingContext, outermost: bool = True) -> None:
    """Make an optimizer average gradients over the ranks; a second call changes nothing."""
    if vars(optimizer).get(_PATCHED) is context:
        return
    object.__setattr__(optimizer, _PATCHED, context)
    own = any(inspect.isroutine(value) for value in vars(optimizer).values())
    object.__setattr__(optimizer, _OVERRIDDEN, own)
    if outermost and context.backend.is_stateless:
        _patch_stateless_apply(optimizer, context)
    if hasattr(optimizer, "inner_optimizer"):
        _patch_loss_scale(optimizer, context)
        patch_optimizer(optimizer.inner_optimizer, context, outermost=False)
        return
    clip, apply = optimizer._clip_gradients, optimizer.apply
    accumulates = bool(optimizer.gradient_accumulation_steps)

    def clip_gradients(grads: Any) -> Any:
        if accumulates:
            return clip(context.backend.average_accumulated_gradients(optimizer, grads))
        return clip(context.backend.average_gradients(grads, shard_of_step(context.backend)))

    def apply_compared(grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        if any(grad is None for grad in grads):  # Keras leaves those out before it clips
            context.backend.check_same_gradients(grads, trainable_variables)
        if accumulates:  # micro-batches may differ in size
            grads = _weighted(grads, shard_of_step(context.backend))
        return context.backend.update(apply, optimizer, grads, trainable_variables)

    object.__setattr__(optimizer, "_clip_gradients", clip_gradients)
    object.__setattr__(optimizer, "apply", apply_compared)


def was_overridden(optimizer: Any) -> bool:
    """Return whether a patched optimizer had functions of the program's own before."""
    return bool(vars(optimizer).get(_OVERRIDDEN))


def _weighted(grads: Sequence[Any], shard: BatchShard | None) -> list[Any]:
    """Return gradients with the weights of their shards, for the sum over micro-steps."""
    if shard is None or shard.is_even:
        return list(grads)
    return [None if grad is None else shard.times(grad, shard.factor) for grad in grads]


def _patch_loss_scale(optimizer: Any, context: TrainingContext) -> None:
    check = optimizer.check_finite

    def check_finite(grads: Any) -> Any:
        overflows = ops.cast(ops.logical_not(check(grads)), "int32")
        (ranks,) = context.backend.all_reduce([overflows])
        return ops.equal(ranks, 0)

    object.__setattr__(optimizer, "check_finite", check_finite)


def _patch_stateless_apply(optimizer: Any, context: TrainingContext) -> None:
    apply = optimizer.stateless_apply

    def stateless_apply(*args: Any, **kwargs: Any) -> Any:
        trainable, own = apply(*args, **kwargs)
        context.backend.add_dependency(trainable)
        return trainable, own

    object.__setattr__(optimizer, "stateless_apply", stateless_apply)
