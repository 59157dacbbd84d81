"""Gradients that layers write into buckets: ``ddp_backend="smddp"`` on CPUs.

Trainer has no argument for `gradient_as_bucket_view`, and neither it nor accelerate has one for
what `write_into_buckets` does. Both change no bit, so DistributedDataParallel gets both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sdp_plugins.huggingface.method_patch import replace
from sdp_plugins.huggingface.sharded import SHARDED
from sdp_plugins.torch.backend_name import BACKEND


def patch_accelerate(module: Any) -> None:
    """Replace what wraps models in DistributedDataParallel, in `accelerate.accelerator`."""
    replace(module.Accelerator, "prepare_model", prepare_model, trains_on_cpus)


def trains_on_cpus() -> bool:
    """Whether this process trains with DistributedDataParallel over smddp, on a CPU."""
    from accelerate.state import DistributedType, PartialState

    state = PartialState._shared_state
    found = state.get("backend"), state.get("distributed_type")
    return found == (BACKEND, DistributedType.MULTI_CPU) and SHARDED not in state


def prepare_model(
    theirs: Callable[..., Any],
    accelerator: Any,
    model: Any,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> Any:
    """Prepare a model, whose large layers write into buckets if it is wrapped."""
    from accelerate.utils import DistributedDataParallelKwargs
    from torch.nn.parallel import DistributedDataParallel

    # Imported here: jobs without smddp need no backend.
    from sdp_plugins.torch import write_into_buckets

    options = accelerator.ddp_handler or DistributedDataParallelKwargs()
    accelerator.ddp_handler = dataclasses.replace(options, gradient_as_bucket_view=True)
    prepared = theirs(accelerator, model, device_placement, evaluation_mode)
    if isinstance(prepared, DistributedDataParallel) and prepared is not model:
        write_into_buckets(prepared)
    return prepared
