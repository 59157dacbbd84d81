"""The supported operations, dtypes and reductions, and the path that each combination takes.

    python -m tests.torch.capability_table

prints tables, which docs/torch.md includes. docs/algorithms.md describes the paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import supports_complex

from sdp_plugins.core import _native
from sdp_plugins.torch.reduce_ops import core_op
from sdp_plugins.torch.sparse import SUMMABLE
from sdp_plugins.torch.tensors import DTYPES

_SPECIAL = re.compile(r"q|bits|u?int[1-7]$")  # quantized dtypes, and dtypes smaller than a byte
SMALL, LARGE = 1, 1 << 20  # bytes, below and above what travels with the announcement

NAMES = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")
REDUCTIONS = {
    **{name: core_op(getattr(dist.ReduceOp, name)).native for name in NAMES},
    "PREMUL_SUM": core_op(dist._make_nccl_premul_sum(1.0)).native,  # type: ignore[attr-defined]
}
"""torch's reductions and the native core's."""

SPARSE = "sparse_all_reduce"  # all_reduce of torch.sparse_coo: an all_gather of the entries

# torch's functions by the core operation that implements them.
CALLS = {
    "all_reduce": ("all_reduce", "all_reduce_coalesced"),
    "reduce": ("reduce",),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    "broadcast": ("broadcast", "broadcast_object_list"),
    "all_gather": (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_gather_coalesced",
        "all_gather_object",
    ),
    "gather": ("gather", "gather_object"),
    "scatter": ("scatter", "scatter_object_list"),
    "all_to_all": ("all_to_all", "all_to_all_single"),
    "barrier": ("barrier",),
    SPARSE: ("all_reduce",),
    "send": ("send", "isend", "batch_isend_irecv"),
    "recv": ("recv", "irecv"),
}
DENSE = ("all_reduce", "reduce", "reduce_scatter")
REDUCING = (*DENSE, SPARSE)
BETWEEN_TWO = ("send", "recv")


@dataclass(frozen=True)
class Capability:
    """A supported combination of operation, dtype and reduction.

    Attributes:
        operation: The core's name, or ``"sparse_all_reduce"``; see ``calls``.
        dtype: The dtype of the elements; None for operations without data.
        reduce_op: A reduction such as ``"SUM"``; None where nothing is computed.
        small: The path of up to 32 KiB for each rank within a node.
        large: The path of larger data.
        registered: The path of data in shared memory, such as DDP's buckets.
    """

    operation: str
    dtype: torch.dtype | None
    reduce_op: str | None
    small: str
    large: str
    registered: str

    @property
    def calls(self) -> tuple[str, ...]:
        """The functions of torch.distributed that run this operation."""
        return CALLS[self.operation]


def capabilities() -> tuple[Capability, ...]:
    """Return all combinations that the "smddp" backend supports, within and between nodes.

    Any other combination raises before it starts.
    """
    return tuple(
        Capability(operation, dtype, reduce_op, *_paths(operation))
        for operation in CALLS
        for dtype in _dtypes(operation)
        for reduce_op in _reductions(operation, dtype)
    )


def _dtypes(operation: str) -> Sequence[torch.dtype | None]:
    if operation == "barrier":
        return [None]
    return computable() if operation in REDUCING else movable()


def computable() -> list[torch.dtype]:
    """Return every dtype that some operation reduces."""
    return [*DTYPES, torch.complex32]


def movable() -> list[torch.dtype]:
    """Return every dtype whose tensors are plain memory of whole bytes."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    names = sorted(str(dtype).removeprefix("torch.") for dtype in found)
    return [getattr(torch, name) for name in names if not _SPECIAL.match(name)]


def _reductions(operation: str, dtype: torch.dtype | None) -> Sequence[str | None]:
    if operation not in REDUCING or dtype is None:
        return [None]
    return [name for name in REDUCTIONS if _computes(operation, dtype, name)]


def _computes(operation: str, dtype: torch.dtype, reduce_op: str) -> bool:
    if operation == SPARSE:
        return reduce_op == "SUM" and dtype.to_real() in SUMMABLE
    if operation == "all_reduce" and dtype.is_complex:  # torch passes real and imaginary parts
        if not supports_complex(getattr(dist.ReduceOp, reduce_op)):
            return False
        dtype = dtype.to_real()
    return dtype in DTYPES and _native.supports(DTYPES[dtype].native, REDUCTIONS[reduce_op])


def _paths(operation: str) -> tuple[str, str, str]:
    if operation in BETWEEN_TWO:
        return "ring", "ring", "ring"
    op = _native.Op["all_gather" if operation == SPARSE else operation]
    cases = (SMALL, False), (LARGE, False), (LARGE, True)
    small, large, registered = (_native.explain(op, *case).partition(":")[0] for case in cases)
    return (small, small, small) if operation == "barrier" else (small, large, registered)


# ---- tables --------------------------------------------------------------------------------------


def tables() -> Iterator[str]:
    """Yield the lines of two Markdown tables: operations and paths, dtypes and reductions."""
    yield "| operation | functions of torch.distributed | dtypes | small, large, registered |"
    yield "|---|---|---|---|"
    for operation, calls in CALLS.items():
        dtypes = "those below" if operation in DENSE else "all"
        dtypes = {"barrier": "", SPARSE: "those below but bool, by SUM"}.get(operation, dtypes)
        yield f"| {operation} | {', '.join(calls)} | {dtypes} | {', '.join(_paths(operation))} |"
    yield ""
    yield f"| dtype | {' | '.join(REDUCTIONS)} |"
    yield "|---" * (1 + len(REDUCTIONS)) + "|"
    for dtype in computable():
        marks = [_mark(dtype, name) for name in REDUCTIONS]
        yield f"| {str(dtype).removeprefix('torch.')} | {' | '.join(marks)} |"


def _mark(dtype: torch.dtype, reduce_op: str) -> str:
    operations = [name for name in DENSE if _computes(name, dtype, reduce_op)]
    return "x" if len(operations) == len(DENSE) else ", ".join(operations)


if __name__ == "__main__":
    print("\n".join(tables()))
