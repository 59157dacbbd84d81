"""Gradients that layers write into buckets: ``ddp_backend="smddp"`` on CPUs.

accelerate's users ask for gradients that are views of buckets, by DistributedDataParallelKwargs.
Trainer has no argument for that; its own loop keeps no gradient beyond a step, so it gets views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from sdp_plugins.huggingface.method_patch import replace
from sdp_plugins.huggingface.sharded import SHARDED
from sdp_plugins.torch.backend_name import BACKEND


def patch() -> None:
    """Patch accelerate and Trainer, as soon as they are imported."""
    wrapt.register_post_import_hook(patch_accelerate, "accelerate.accelerator")
    wrapt.register_post_import_hook(patch_trainer, "transformers.trainer")


def patch_accelerate(module: Any) -> None:
    """Replace what wraps models in DistributedDataParallel."""
    replace(module.Accelerator, "prepare_model", prepare_model, trains_on_cpus)


def patch_trainer(module: Any) -> None:
    """Replace what comes before accelerate wraps the model."""
    replace(module.Trainer, "_wrap_model", wrap_model, trains_on_cpus)


def trains_on_cpus() -> bool:
    """Whether this process trains with DistributedDataParallel over smddp, on a CPU."""
    from accelerate.state import DistributedType, PartialState

    state = PartialState._shared_state
    found = state.get("backend"), state.get("distributed_type")
    return found == (BACKEND, DistributedType.MULTI_CPU) and SHARDED not in state


def wrap_model(theirs: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Let gradients be views of buckets, unless the trainer's class refuses."""
    model = theirs(trainer, *args, **kwargs)
    options = trainer.accelerator.ddp_handler  # older transformers: none before an evaluation
    if options is not None and getattr(trainer, "gradient_as_bucket_view", True):
        options.gradient_as_bucket_view = True
    return model


def prepare_model(
    theirs: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Prepare a model; its large layers write into buckets if gradients are views of them."""
    from torch.nn.parallel import DistributedDataParallel

    prepared = theirs(accelerator, model, *args, **kwargs)
    is_new = isinstance(prepared, DistributedDataParallel) and prepared is not model
    if is_new and prepared.gradient_as_bucket_view:
        # Imported here: jobs without smddp need no backend.
        from sdp_plugins.torch import write_into_buckets

        write_into_buckets(prepared)
    return prepared
