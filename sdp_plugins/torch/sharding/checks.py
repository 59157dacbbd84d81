"""What a ShardedOptimizer asks of its arguments, so that mistakes are told at once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.core import Group
from sdp_plugins.torch.groups import smddp_group
from sdp_plugins.torch.sharding.agreement import Settings, difference, text_of
from sdp_plugins.torch.sharding.gradients import is_sharded

BY_ELEMENT = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
"""Optimizers that treat every element alike, whatever tensor it is in."""
BY_PARAMETER = (torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers whose update of a parameter depends on its shape, but on no other parameter."""


def check_model(model: Any) -> None:
    """Refuse what is no model, or not one whose gradients a ShardedOptimizer can reduce."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"ShardedOptimizer takes the model, then the optimizer's class, not "
            f"{type(model).__name__}. Hint: pass the model; if only some of its parameters are "
            "to be updated, these as `params`."
        )
    if isinstance(model, DistributedDataParallel):
        raise TypeError(
            "ShardedOptimizer reduces gradients itself. Hint: pass the model without "
            "DistributedDataParallel, as model.module."
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"ShardedOptimizer: {name} is not initialized. Hint: run the model once before."
            )


def refuse_ddp(error_prefix: str, model: nn.Module, inputs: Any) -> None:
    """A hook before forward passes of a ShardedOptimizer's model: DDP would reduce, too."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is None or not ddp.require_backward_grad_sync:
        return
    reduced = {n: p for n, p in ddp.module.named_parameters() if n not in ddp.parameters_to_ignore}
    if twice := [name for name, parameter in reduced.items() if is_sharded(parameter)]:
        raise RuntimeError(
            f"{error_prefix}DistributedDataParallel would reduce the gradient of {twice[0]}, as "
            "its ShardedOptimizer does. Hint: call the model without DistributedDataParallel."
        )


def check_same_groups(
    loaded: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse the state of an optimizer of other parameters, with a hint."""
    theirs, ours = [[len(group["params"]) for group in each] for each in (loaded, groups)]
    if theirs != ours:
        raise ValueError(
            f"load_state_dict(): the state is of parameter groups of {theirs} parameters, and this "
            f"ShardedOptimizer has groups of {ours}. Hint: pass it the `params` that the optimizer "
            "had that wrote the state, for example without frozen parameters."
        )


def check_optimizer(
    optimizer: Any, params: Any, defaults: Mapping[str, Any], by_parameter: bool
) -> bool:
    """Refuse optimizers whose work cannot be divided, and objects with settings.

    Returns:
        Whether the work is divided by parameters, not by elements.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, torch.optim.Optimizer):
        raise TypeError(
            f"ShardedOptimizer needs an optimizer or its class, and got {optimizer!r}. Hint: "
            "ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)."
        )
    if issubclass(kind, torch.optim.LBFGS):
        raise TypeError(
            "ShardedOptimizer cannot divide the work of LBFGS, which treats all parameters as one "
            "vector. Hint: use it with DistributedDataParallel."
        )
    if not by_parameter and kind not in (*BY_ELEMENT, *BY_PARAMETER):
        supported = ", ".join(each.__name__ for each in (*BY_ELEMENT, *BY_PARAMETER))
        raise TypeError(
            f"ShardedOptimizer does not know how to divide the work of {kind.__name__}. Hint: "
            "pass by_parameter=True if its update of a parameter depends on no other; or use "
            f"one of {supported}."
        )
    if kind is not optimizer and (params is not None or defaults):
        raise TypeError(
            f"ShardedOptimizer takes parameters and settings from the {kind.__name__} that it is "
            "given. Hint: to give others, pass the class."
        )
    return by_parameter or kind in BY_PARAMETER


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def belongs_to(optimizer: torch.optim.Optimizer, module: nn.Module) -> bool:
    """Whether all parameters of an optimizer are a module's."""
    mine = {id(parameter) for parameter in module.parameters()}
    return all(id(parameter) in mine for parameter in parameters_of(optimizer))


def core_groups(group: dist.ProcessGroup | None) -> tuple[Group, Group, Callable[[], object]]:
    """A group of the core with the members of a process group, for one optimizer's operations.

    Returns:
        The process group's own group, the new one, and a function that gives the latter back.
    """
    is_there = group is not None or dist.is_initialized()
    chosen = smddp_group(group) if is_there else None
    if chosen is None:
        found = f", not of {dist.get_backend(group)}" if is_there else ""
        raise ValueError(
            f"ShardedOptimizer needs a group of smddp{found}. "
            'Hint: call init_process_group("smddp") first.'
        )
    chosen.sharded_optimizers += 1  # on all ranks alike
    name = f"sharding {chosen.sharded_optimizers}"
    chosen._group.barrier()  # hears of a rank that fails, which the making of a group does not
    made = chosen._extra_group(name)
    return chosen._group, made, partial(chosen._extra_groups.pop, name, None)


def find_mistake(parameters: Sequence[Tensor], names: Sequence[str]) -> str:
    """Why parameters cannot lie in shared memory, or are another optimizer's; empty if they can."""
    places: dict[int, str] = {}
    for parameter, name in zip(parameters, names, strict=True):
        if not parameter.requires_grad:
            continue
        if parameter.device.type != "cpu" or parameter.layout is not torch.strided:
            return f"{name} is not a dense CPU tensor."
        if not _is_whole(parameter):
            return f"{name} is a part of a tensor, or expanded. Hint: make it contiguous()."
        if is_sharded(parameter):
            return f"{name} has a ShardedOptimizer already. Hint: call its close() first."
        other = places.setdefault(parameter.data_ptr(), name) if parameter.numel() else name
        if other != name:
            return f"{name} has the memory of {other}. Hint: use one parameter."
    if not any(parameter.requires_grad for parameter in parameters):
        return "no parameter requires a gradient."
    return ""


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a stretch of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size if size > 1 else 1
    return True


def form_of(parameter: Tensor) -> str:
    """What of a parameter must be equal on all ranks, for messages, too."""
    what = f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"
    use = "trained" if parameter.requires_grad else "frozen"
    return f"{what}, strides {list(parameter.stride())}, {use}"


def compare_ranks(group: Group, mistake: str, settings: Settings) -> None:
    """Refuse ranks with mistakes, or with other settings than rank 0; a collective."""
    digest = hashlib.sha256(text_of(settings).encode()).hexdigest()
    found = [blob.decode().split(" ", 1) for blob in group.exchange(f"{digest} {mistake}".encode())]
    for rank, (_, theirs) in enumerate(found):
        if theirs:
            whose = "" if rank == group.rank else f"on rank {group.nodes.global_rank(rank)}, "
            raise ValueError(f"{group.error_prefix}ShardedOptimizer: {whose}{theirs}")
    if any(theirs != found[0][0] for theirs, _ in found):
        raise ValueError(
            f"{group.error_prefix}ShardedOptimizer: other parameters, parameter groups or settings "
            f"{difference(group, settings)}. Hint: build the model and the optimizer alike on all "
            "ranks."
        )
