"""all_reduce of sparse tensors: every rank receives all ranks' entries and sums them.

The first step exchanges the numbers of entries, and the caller waits for it. The second step, an
all_gather of indices and values, may be asynchronous.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp_plugins.core import CollectiveMismatchError, Group, SdpError
from sdp_plugins.core.nodes import tree
from sdp_plugins.core.rank_names import name_ranks
from sdp_plugins.torch.tensors import DTYPES, on_cpu, to_move

SUMMABLE = [dtype for dtype in DTYPES if dtype != torch.bool]
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The dtype of the sum where it is not the values' own; the same as in dense reductions."""


class SparseSum:
    """The pending sum of all ranks' entries.

    Each rank receives all entries, sum(nnz) * (sparse_dim * 8 bytes + bytes of a value), and sums
    along the binary tree of dense reductions, which gives bitwise identical results.

    Args:
        tensor: A sparse tensor of the same shape on all ranks; becomes the sum, coalesced.
        group: The ranks. Construction waits for them.
        timeout_s: How long to wait; None means the group's timeout.

    Raises:
        CollectiveMismatchError: The ranks' tensors differ in shape.
    """

    def __init__(self, tensor: Tensor, group: Group, timeout_s: float | None) -> None:
        self.tensor = tensor
        # Only for messages; the group itself is not kept.
        self._error_prefix, self._nodes = group.error_prefix, group.nodes
        part = on_cpu(tensor.detach()).coalesce()
        self._mine = part.indices().contiguous(), part.values().contiguous()
        counts = _exchange_counts(part, group, timeout_s)
        indices, values = self._mine
        self._indices = [indices.new_empty((len(indices), nnz)) for nnz in counts]
        self._values = [values.new_empty((nnz, *values.shape[1:])) for nnz in counts]
        gather = group.all_gather_uneven
        self.launches = [
            partial(gather, list(map(to_move, self._indices)), to_move(indices)),
            partial(gather, list(map(to_move, self._values)), to_move(values)),
        ]

    def copy_back(self) -> None:
        """Sum the gathered entries into the tensor."""
        dtype = self._mine[1].dtype
        # The tensor gets new memory that autograd must be able to use.
        inference = self.tensor.is_inference()
        with torch.inference_mode() if inference else torch.no_grad():
            parts = [self._part(rank) for rank in range(len(self._indices))]
            self.tensor.copy_(_sum(tree(parts)).to(dtype))

    def _part(self, rank: int) -> Tensor:
        values = self._values[rank]
        wide, shape = WIDE.get(values.dtype, values.dtype), self.tensor.shape
        try:
            return torch.sparse_coo_tensor(
                self._indices[rank],
                values.to(wide),
                shape,
                is_coalesced=True,
                check_invariants=True,
            )
        except RuntimeError as error:
            raise SdpError(
                f"{self._error_prefix}all_reduce of a sparse tensor: "
                f"rank {self._nodes.global_rank(rank)} sent invalid entries ({error}). "
                "Hint: check the indices there.",
                ranks=[rank],
                op="all_reduce",
            ) from error


def check(tensor: Tensor, op: Any) -> None:
    """Check that a sparse tensor can be reduced: the core only sums sparse tensors.

    Raises:
        TypeError: The core cannot sum this dtype.
        ValueError: `op` is not a sum.
    """
    if tensor.dtype not in SUMMABLE:
        raise TypeError(
            f"smddp does not reduce sparse tensors of {tensor.dtype}. "
            "Hint: reduce tensor.to(torch.float32)."
        )
    if op != dist.ReduceOp.SUM:
        raise ValueError(
            f"smddp reduces sparse tensors by SUM only, not by {_name(op)}. "
            "Hint: pass tensor.to_dense()."
        )


def _name(op: Any) -> str:
    kinds = dist.ReduceOp.RedOpType.__members__.items()
    return next((name for name, kind in kinds if op == kind), type(op).__name__)


def _exchange_counts(part: Tensor, group: Group, timeout_s: float | None) -> list[int]:
    """Return each rank's number of entries."""
    dtype = SUMMABLE.index(part.dtype)
    mine = torch.tensor([part._nnz(), dtype, part.sparse_dim(), *part.shape])
    everyone = torch.empty((group.world_size, len(mine)), dtype=mine.dtype)
    group.all_gather(to_move(everyone), to_move(mine), timeout_s=timeout_s)
    if others := [r for r, row in enumerate(everyone) if not torch.equal(row[1:], mine[1:])]:
        raise CollectiveMismatchError(
            f"{group.error_prefix}all_reduce of a sparse tensor: here it is "
            f"{part.dtype} of shape {tuple(part.shape)}, {part.sparse_dim()} dimensions of it "
            f"sparse, and another on {name_ranks(map(group.global_rank, others))}. "
            "Hint: all ranks have to pass tensors of one shape and dtype.",
            ranks=others,
            op="all_reduce",
        )
    return everyone[:, 0].tolist()


def _sum(order: Any) -> Tensor:
    """Sum tensors in nested pairs."""
    if isinstance(order, Tensor):
        return order
    one, other = order
    return (_sum(one) + _sum(other)).coalesce()
