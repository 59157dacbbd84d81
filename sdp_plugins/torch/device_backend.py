"""smddp as the backend of one type of device, in a group of torch's that has several.

`init_process_group("cpu:smddp,cuda:nccl")` makes a ProcessGroup of torch's own, in C++, with a
Backend for each type of device. From version 2.14 on, such a Backend may be a Python object.

A group that is smddp's alone stays a ProcessGroup in Python, because a call through torch's C++
takes 6 us longer, and the handle that comes back has no `is_completed()`, `result()` or
source rank: C++ wraps it in a Work that passes only `wait()` and `get_future()` on.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import Store

from sdp_plugins.torch.internals import c10d

CALLS = (
    "abort",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "getBackendName",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
    "set_timeout",
    "shutdown",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
)


class DeviceBackend(c10d.Backend):
    """Passes torch's calls on to a process group.

    torch's C++ looks each method up on the object, so the group's own methods are its attributes:
    no Python frame stands in between, and DDP's reducer is recognised as the caller.

    Attributes:
        group: The process group.

    Args:
        group: Runs the calls.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group
        for name in CALLS:
            setattr(self, name, getattr(group, name))
        group.kept_until_end.append(self)  # torch's wrapper of DETAIL keeps only the C++ half

    def allreduce_sparse(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        """Sum sparse tensors, which `allreduce` takes, too."""
        return self.group.allreduce(tensors, opts)

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; C++ passes options where Python passes a timeout."""
        timeout: timedelta | None = getattr(opts, "timeout", opts)
        self.group.monitored_barrier(timeout, wait_all_ranks)

    def split(self, store: Store, ranks: Sequence[int], opts: Any) -> DeviceBackend:
        """Make the backend of some of the ranks; called on all of them.

        Raises:
            ValueError: This rank is none of them; torch 2.15 would crash at a None.
        """
        assert self.group.make_part is not None
        part = self.group.make_part(ranks, opts.group_name, opts._timeout, store)
        if part is None:
            raise ValueError(
                f"Rank {self.rank()} is in none of split_ranks, which torch does not allow for a "
                "backend in Python. Hint: name every rank in split_ranks, or use new_group()."
            )
        return DeviceBackend(part)

    @property
    def options(self) -> Any:
        """The options that torch queries on a backend."""
        return self.group.options
