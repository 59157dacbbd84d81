"""accelerate's choice of a backend: smddp if the job selects it and trains on CPUs.

accelerate supports smddp on GPUs only. On CPUs (lines of accelerate 1.15.0, transformers 5.23.0):

- with `use_cpu=True`, `_prepare_backend` (state.py:813) returns gloo; state.py:197 refuses smddp;
- without `use_cpu`, or in an initialized process group, it returns NO (state.py:815): every rank
  trains alone, without a message;
- with SageMaker's variables it returns MULTI_GPU, and `set_device` (state.py:843) divides by
  `torch.cuda.device_count()`, which is zero. Trainer (trainer.py:2682) looks at a flag in them, and
  would pass device_ids to DDP, which refuses them for models on CPUs. So the flag is removed.

The type MULTI_CPU, which accelerate uses for gloo and MPI, makes the rest right: the device, DDP
without device_ids (accelerator.py:2060), gathering, random states, barriers.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet

from sdp_plugins.core.config import (
    sagemaker_wants_smddp,
    started_by_smddprun,
    started_by_us,
    take_sagemaker_flag,
)
from sdp_plugins.core.topology import Topology
from sdp_plugins.huggingface import direct_gradients, sharded
from sdp_plugins.torch.backend_name import BACKEND

log = logging.getLogger(__name__)
PATCHED = "patched_for_smddp"  # marks our function in place of accelerate's
CHECKED = SpecifierSet(">=1.3,<1.16")
"""The versions of accelerate with which the tests have passed."""
_NAMES = {"MULTI_CPU", "MULTI_GPU", "gloo", BACKEND}


def why_not(choose: Callable[..., Any], version: str) -> str:
    """Why accelerate's function must not be patched; empty if it may be."""
    if not CHECKED.contains(version, prereleases=True):
        return f"{version} is not among the versions {CHECKED}"
    code: CodeType = choose.__code__
    names = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
    parameters = code.co_varnames[: code.co_argcount]
    if parameters != ("self", "cpu", "sagemaker_dp", "backend") or not names >= _NAMES:
        return f"{version} has changed the code that smddp patches"
    return ""


def patch(module: ModuleType) -> None:
    """Replace accelerate's choice of a backend in `accelerate.state`, if it is unchanged."""
    import accelerate

    partial_state: Any = module.PartialState  # type: ignore[attr-defined]
    choose = partial_state._prepare_backend
    if hasattr(choose, PATCHED):
        return
    if why := why_not(choose, accelerate.__version__):
        patched = complaining(choose, why)
    else:
        cpu_type = module.DistributedType.MULTI_CPU  # type: ignore[attr-defined]
        patched = choosing(choose, cpu_type)
        sharded.patch_state(partial_state)
    setattr(patched, PATCHED, True)
    partial_state._prepare_backend = patched


def complaining(choose: Callable[..., Any], why: str) -> Callable[..., Any]:
    """Wrap accelerate's function: in jobs over smddp, warn that it was not patched."""

    @functools.wraps(choose)
    def prepare_backend(*given: Any, **named: Any) -> Any:
        wishes = (*given[1:], *named.values())
        if is_meant(False, BACKEND if BACKEND in wishes else None) and is_rank():
            log.warning(
                "smddp does not patch PartialState._prepare_backend (state.py) of accelerate (%s): "
                "ddp_backend='smddp' may not work on CPUs. Hint: install another version, or set "
                "SDP_HUGGINGFACE=0 to silence this.",
                why,
            )
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
        take_sagemaker_flag()
        direct_gradients.patch()
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
