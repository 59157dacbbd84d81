"""The collectives of SMDDP 1.0 to 1.3: torch's on the default group, under SMDDP's names.

Arguments for parity with torch (a backend, an init_method, a rank) are accepted and ignored. The
only group is that of all ranks. Tensors are on the CPU.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from sdp_plugins.core.topology import Topology
from sdp_plugins.torch.backend_name import BACKEND
from sdp_plugins.torch.mpi_environment import set_torchs_variables

IGNORED = frozenset({"backend", "init_method", "rank", "world_size", "store", "group_name"})

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
    "reduce",
]


class ReduceOp(enum.Enum):
    """Reductions; scripts also use `PRODUCT`, which SMDDP does not document."""

    AVERAGE = dist.ReduceOp.AVG
    SUM = dist.ReduceOp.SUM
    PRODUCT = dist.ReduceOp.PRODUCT
    MIN = dist.ReduceOp.MIN
    MAX = dist.ReduceOp.MAX


class group:  # noqa: N801  as torch.distributed calls it
    """The available groups: all ranks."""

    WORLD = "WORLD"


def is_available() -> bool:
    """Return whether a launcher started this process, so that the library can be used."""
    return Topology.from_env().source != "single"


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """Join all ranks; further calls change nothing.

    mpirun's and srun's ranks need MASTER_ADDR on several nodes, as torch does: see
    `set_torchs_variables`. Without a launcher, this process is the only rank.

    Args:
        *args: Ignored.
        **kwargs: `timeout` and `device_id` as in torch; torch's other arguments are ignored.

    Raises:
        TypeError: torch does not accept the argument either.
        RendezvousError: The ranks did not find each other.
    """
    if dist.is_initialized():
        return
    options = {name: value for name, value in kwargs.items() if name not in IGNORED}
    if is_available():
        set_torchs_variables()
    else:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(BACKEND, **options)


def is_initialized() -> bool:
    """Return whether the ranks have joined."""
    return dist.is_initialized()


def get_world_size(group: Any = group.WORLD) -> int:
    """Return the number of ranks."""
    check_group(group)
    return dist.get_world_size() if dist.is_initialized() else Topology.from_env().world_size


def get_rank(group: Any = group.WORLD) -> int:
    """Return this process's rank among all ranks."""
    check_group(group)
    return dist.get_rank() if dist.is_initialized() else Topology.from_env().rank


def get_local_rank() -> int:
    """Return this process's rank on its node; available before `init_process_group`, too."""
    return Topology.from_env().local_rank


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp | None = ReduceOp.SUM,
    group: Any = group.WORLD,
    async_op: bool = False,
) -> Any:
    """Reduce all ranks' tensors in place; the result is bitwise identical on all ranks."""
    check_group(group)
    return dist.all_reduce(tensor, _reduction(op), async_op=async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    op: ReduceOp | None = ReduceOp.SUM,
    group: Any = group.WORLD,
    async_op: bool = False,
) -> Any:
    """Reduce all ranks' tensors in place on rank `dst`."""
    check_group(group)
    return dist.reduce(tensor, dst, _reduction(op), async_op=async_op)


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: Any = group.WORLD, async_op: bool = False
) -> Any:
    """Copy rank `src`'s tensor to all ranks, in place."""
    check_group(group)
    return dist.broadcast(tensor, src, async_op=async_op)


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Any = group.WORLD,
    async_op: bool = False,
) -> Any:
    """Gather every rank's tensor into `tensor_list`, ordered by rank."""
    check_group(group)
    return dist.all_gather(tensor_list, tensor, async_op=async_op)


def all_to_all_single(
    output_t: torch.Tensor,
    input_t: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = group.WORLD,
    async_op: bool = False,
) -> Any:
    """Send a part of `input_t`, along its first axis, to each rank; `output_t` gets their parts."""
    check_group(group)
    outputs, inputs = (
        None if sizes is None else list(sizes) for sizes in (output_split_sizes, input_split_sizes)
    )
    return dist.all_to_all_single(output_t, input_t, outputs, inputs, async_op=async_op)


def barrier(group: Any = group.WORLD, async_op: bool = False) -> Any:
    """Wait until all ranks have called this function."""
    check_group(group)
    return dist.barrier(async_op=async_op)


def _reduction(op: Any) -> Any:
    """Return torch's reduction; accepts torch's own reductions as well."""
    return dist.ReduceOp.SUM if op is None else getattr(op, "value", op)


def check_group(given: Any) -> None:
    """Check that a group is that of all ranks.

    Raises:
        ValueError: It is another group.
    """
    known = given is None or given == group.WORLD
    if not known and not (dist.is_initialized() and given is dist.group.WORLD):
        raise ValueError(
            f"The only group is group.WORLD, but got {given!r}. "
            "Hint: for other groups use torch.distributed with the backend 'smddp'."
        )
