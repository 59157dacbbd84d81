"""accelerate's choice of a backend: smddp if the job selects it and trains on CPUs.

accelerate supports smddp on GPUs only. On CPUs (lines of accelerate 1.15.0, transformers 5.23.0):

- with `use_cpu=True`, `_prepare_backend` (state.py:813) returns gloo; state.py:197 refuses smddp;
- without `use_cpu`, or in an initialized process group, it returns NO (state.py:815): every rank
  trains alone, without a message;
- with SageMaker's variables it returns MULTI_GPU, and `set_device` (state.py:843) divides by
  `torch.cuda.device_count()`, which is zero.

The type MULTI_CPU, which accelerate uses for gloo and MPI, makes the rest right: the device, DDP
without device_ids (accelerator.py:2060), gathering, random states, barriers.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from sdp_plugins.core.config import sagemaker_wants_smddp, started_by_smddprun, started_by_us
from sdp_plugins.core.topology import Topology
from sdp_plugins.huggingface.sagemaker_flag import keep_from_transformers
from sdp_plugins.huggingface.upstream import PATCHED, Upstream, mentions
from sdp_plugins.torch.backend_name import BACKEND

log = logging.getLogger(__name__)


def is_unchanged(state: Any) -> bool:
    """Whether `_prepare_backend` has the parameters and the names that the patch expects."""
    choose = state.PartialState._prepare_backend
    parameters = choose.__code__.co_varnames[: choose.__code__.co_argcount]
    return parameters == ("self", "cpu", "sagemaker_dp", "backend") and mentions(
        choose, "MULTI_CPU", "MULTI_GPU", "gloo", BACKEND
    )


CHOICE = Upstream(
    "accelerate", ((1, 3), (1, 16)), "PartialState._prepare_backend (state.py)", is_unchanged
)


def patch(module: ModuleType) -> None:
    """Replace accelerate's choice of a backend, if it is unchanged.

    Args:
        module: `accelerate.state`.
    """
    import accelerate

    partial_state: Any = module.PartialState  # type: ignore[attr-defined]
    choose = partial_state._prepare_backend
    if hasattr(choose, PATCHED):
        return
    if why := CHOICE.why_not(module, accelerate.__version__):
        patched = complaining(choose, why)
    else:
        cpu_type = module.DistributedType.MULTI_CPU  # type: ignore[attr-defined]
        patched = choosing(choose, cpu_type)
    setattr(patched, PATCHED, True)
    partial_state._prepare_backend = patched


def complaining(choose: Callable[..., Any], why: str) -> Callable[..., Any]:
    """Wrap accelerate's function: in jobs over smddp, warn that it was not patched."""

    @functools.wraps(choose)
    def prepare_backend(*given: Any, **named: Any) -> Any:
        wishes = (*given[1:], *named.values())
        if is_meant(False, BACKEND if BACKEND in wishes else None) and is_rank():
            CHOICE.complain(why)
        return choose(*given, **named)

    return prepare_backend


def choosing(choose: Callable[..., Any], cpu_type: Any) -> Callable[..., Any]:
    """Wrap accelerate's function: choose smddp in jobs over smddp on CPUs."""

    @functools.wraps(choose)
    def prepare_backend(
        state: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> Any:
        if not (is_meant(sagemaker_dp, backend) and on_cpu(state, cpu) and is_rank()):
            found = choose(state, cpu, sagemaker_dp, backend)
            warn_if_alone(found[1])
            return found
        if not dist.is_initialized():
            from sdp_plugins.torch.mpi_environment import set_torchs_variables

            set_torchs_variables()
        if state.device is None:  # no index: transformers 4.48 to 4.57 cannot resume on cpu:0
            state.device = torch.device("cpu")
        if sagemaker_wants_smddp():
            keep_from_transformers()
        return BACKEND, cpu_type

    return prepare_backend


def is_meant(sagemaker_dp: bool, backend: str | None) -> bool:
    """Whether the job selects smddp.

    Args:
        sagemaker_dp: Whether transformers or accelerate has found SageMaker's variables.
        backend: The backend that the script names; None if it names none.
    """
    if backend not in (None, BACKEND):
        return False
    if dist.is_initialized():
        return BACKEND in re.split("[:,]", dist.get_backend())  # as in cpu:smddp,cuda:nccl
    return backend == BACKEND or sagemaker_dp or sagemaker_wants_smddp() or started_by_smddprun()


def warn_if_alone(kind: Any) -> None:
    """Warn if accelerate lets each rank of `sdp run` train alone.

    It does that on CPUs if nothing names a backend: N ranks train the same and write into the same
    folder.
    """
    if kind != "NO" or not started_by_us():
        return
    place = Topology.from_env()
    if place.world_size > 1:
        log.warning(
            "accelerate trains rank %d of %d alone, because nothing names a backend. "
            "Hint: TrainingArguments(ddp_backend='smddp'), or init_process_group('smddp') before "
            "Accelerator(), or start the script with smddprun.",
            *(place.rank, place.world_size),
        )


def on_cpu(state: Any, cpu: bool) -> bool:
    """Whether accelerate will put the model on the CPU."""
    device = state.device or state.default_device
    return cpu or device.type == "cpu"


def is_rank() -> bool:
    """Whether a launcher started this process, or the process group exists."""
    return dist.is_initialized() or Topology.from_env().source != "single"
