"""One copy of the weights per node: ``ddp_backend="smddp_sharded"``.

Where accelerate would wrap a model in DistributedDataParallel, it stays as it is, and its optimizer
becomes a `ShardedOptimizer`. Jobs that do not ask for it, or evaluate only, run upstream's code
(accelerate 1.15.0: accelerator.py; transformers 5.23.0: trainer.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import wrapt

from sdp_plugins.huggingface.method_patch import replace
from sdp_plugins.torch.backend_name import BACKEND

SHARDED = "smddp_sharded"
"""In the place of a backend's name; also the attribute of accelerate's state that keeps it."""

ADAFACTOR = "transformers.optimization.Adafactor"
"""Its update of a parameter depends on no other; with ``relative_step`` neither."""


def patch_state(partial_state: Any) -> None:
    """Have accelerate's PartialState take the name in the place of a backend's."""
    init = partial_state.__init__

    @functools.wraps(init)
    def init_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("backend") != SHARDED:
            init(self, *args, **kwargs)
            return
        init(self, *args, **{**kwargs, "backend": BACKEND})
        setattr(self, SHARDED, True)  # until accelerate's state is reset
        wrapt.register_post_import_hook(patch_accelerate, "accelerate.accelerator")
        wrapt.register_post_import_hook(patch_trainer, "transformers.trainer")

    partial_state.__init__ = init_and_note


def patch_accelerate(module: Any) -> None:
    """Replace what wraps models, prepares optimizers and accumulates gradients."""
    for ours in prepare_model, prepare_optimizer, no_sync, clip_grad_norm_, clip_grad_value_:
        replace(module.Accelerator, ours.__name__, ours, is_chosen)


def patch_trainer(module: Any) -> None:
    """Replace what saves the optimizer."""
    replace(module.Trainer, "_save_optimizer_and_scheduler", save_optimizer, is_chosen)


def is_chosen() -> bool:
    """Whether this process shards optimizers."""
    from accelerate.state import PartialState

    return SHARDED in PartialState._shared_state


def prepare_model(
    theirs: Callable[..., Any],
    accelerator: Any,
    model: Any,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> Any:
    """Prepare a model as for evaluation, in which accelerate does not wrap it in DDP."""
    if not evaluation_mode:
        if not hasattr(accelerator, "_smddp_models"):
            accelerator._smddp_models = WeakKeyDictionary()
        stop_refusing(accelerator, model)
        refuse = functools.partial(refuse_plain_optimizers, id(model))  # copies have another id
        accelerator._smddp_models[model] = model.register_forward_pre_hook(refuse)
    return theirs(accelerator, model, device_placement, evaluation_mode=True)


def prepare_optimizer(
    theirs: Callable[..., Any], accelerator: Any, optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Shard an optimizer; a collective."""
    # Imported only here and below: jobs without smddp need no backend.
    from sdp_plugins.torch import ShardedOptimizer
    from sdp_plugins.torch.sharding.checks import belongs_to

    if hasattr(optimizer, "optimizer"):  # prepared before
        return theirs(accelerator, optimizer, *args, **kwargs)
    for model in getattr(accelerator, "_smddp_models", ()):
        if belongs_to(optimizer, model):
            kind = type(optimizer)
            by_parameter = f"{kind.__module__}.{kind.__name__}" == ADAFACTOR
            sharded = ShardedOptimizer(model, optimizer, by_parameter=by_parameter)
            stop_refusing(accelerator, model)
            return theirs(accelerator, sharded, *args, **kwargs)
    raise ValueError(
        f"{SHARDED}: the optimizer's parameters belong to no prepared model, or to several. "
        "Hint: Accelerator.prepare(model, optimizer), the model first; for several models, one "
        "optimizer each."
    )


@contextmanager
def no_sync(theirs: Callable[..., Any], accelerator: Any, model: Any) -> Iterator[None]:
    """Accumulate the gradients of a model."""
    from sdp_plugins.torch.sharding.checks import belongs_to

    with ExitStack() as stack:
        for prepared in accelerator._optimizers:
            if belongs_to(prepared.optimizer, model):
                stack.enter_context(prepared.optimizer.no_sync())
        yield


def save_optimizer(theirs: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Give the state to the ranks that save it; a collective, called on all ranks."""
    to = None if trainer.args.save_on_each_node else 0
    trainer.optimizer.optimizer.consolidate_state_dict(to)
    theirs(trainer, *args, **kwargs)


def clip_grad_norm_(
    theirs: Callable[..., Any],
    accelerator: Any,
    parameters: Any,
    max_norm: float,
    norm_type: float = 2,
) -> Any:
    """Clip the averages; works where only some ranks have a gradient, too."""
    parameters = list(parameters)
    if (optimizer := owner_of(accelerator, parameters)) is None:
        return theirs(accelerator, parameters, max_norm, norm_type)
    accelerator.unscale_gradients()
    return optimizer.clip_grad_norm_(max_norm, norm_type)


def clip_grad_value_(
    theirs: Callable[..., Any], accelerator: Any, parameters: Any, clip_value: float
) -> Any:
    """Clip the averages; works where only some ranks have a gradient, too."""
    parameters = list(parameters)
    if (optimizer := owner_of(accelerator, parameters)) is None:
        return theirs(accelerator, parameters, clip_value)
    accelerator.unscale_gradients()
    return optimizer.clip_grad_value_(clip_value)


def owner_of(accelerator: Any, parameters: list[Any]) -> Any:
    """The sharded optimizer whose trained parameters are exactly these; None if there is none."""
    from sdp_plugins.torch.sharding.checks import parameters_of

    asked = {id(parameter) for parameter in parameters if parameter.requires_grad}
    for prepared in accelerator._optimizers:
        if {id(p) for p in parameters_of(prepared.optimizer) if p.requires_grad} == asked:
            return prepared.optimizer
    return None


def stop_refusing(accelerator: Any, model: Any) -> None:
    """Remove a model's hook, if it has one."""
    if hook := accelerator._smddp_models.get(model):
        hook.remove()


def refuse_plain_optimizers(prepared: int, model: Any, inputs: Any) -> None:
    """Before a forward pass: what is trained of a prepared model has a sharded optimizer."""
    import torch

    from sdp_plugins.torch.sharding.gradients import is_sharded

    if id(model) != prepared or not (model.training and torch.is_grad_enabled()):
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if trained and not any(map(is_sharded, trained)):
        raise RuntimeError(
            f"{SHARDED}: the model is trained, but no optimizer of it is prepared, so ranks would "
            "train different weights. Hint: Accelerator.prepare(model, optimizer)."
        )
