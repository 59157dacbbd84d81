"""Balanced fusion buffers for any framework."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from . import _native
from .buffers import Buffer, BufferLike, as_buffer
from .config import FUSION_ALIGN, Config
from .dtypes import DType, DTypeLike, ReduceOp
from .group import Group


class FusionBuffer:
    """Reduces many gradients in a few large operations that overlap the backward pass.

    ::

        fusion = FusionBuffer(group, [(count, DType.float32), ...], op="avg")
        fusion.ready(i, gradient)          # as the backward pass yields them, in any order
        fusion.finish()                    # all gradients now hold the ranks' average

    Register tensors in the order in which they usually become ready (last layer first), equally on
    all ranks. Consecutive tensors of one type share a buffer of at most ``threshold_bytes``; a
    larger tensor has its own. A buffer is sent when its last tensor is ready and all earlier
    buffers have been sent. It is cut into ``world_size`` equal shards, each reduced by one rank,
    while later buffers fill. Tensors are not copied together: chunks go from the tensors to the
    peers and back, so a buffer takes no memory.

    A tensor that is not ready at ``finish`` counts as zeros and is not changed.
    """

    def __init__(
        self,
        group: Group,
        tensors: Sequence[tuple[int, DTypeLike]],
        *,
        op: ReduceOp | str = "avg",
        threshold_bytes: int | None = None,
    ) -> None:
        """Plan the buffers.

        Args:
            group: The ranks.
            tensors: Number of elements and type of each tensor: a ``DType``, its name, or NumPy's.
            op: The reduction; not PREMUL_SUM.
            threshold_bytes: A multiple of 128; None: ``SDP_FUSION_MB``, 25 MiB by default.

        Raises:
            ValueError: The threshold is not a multiple of 128, or the reduction is undefined for a
                type.
            TypeError: A tensor is not described by a number and a type.
        """
        reduction = ReduceOp.parse(op)
        if reduction.native is _native.ReduceOp.premul_sum:
            raise ValueError("a fusion buffer has no PREMUL_SUM. Hint: scale the gradients first.")
        self._tensors = [_described(index, tensor) for index, tensor in enumerate(tensors)]
        threshold = Config.from_env().fusion_bytes if threshold_bytes is None else threshold_bytes
        _check_sizes(self._tensors, threshold)
        self._native = _native.NativeFusionBuffer(
            group.issuer.node,
            [(count, dtype.native) for count, dtype in self._tensors],
            threshold,
            reduction.native,
            group.timeout_s,
            group.issuer.submit_across_nodes,
        )
        self._held: list[Buffer] = []
        self._group = group  # which holds what other operations of the engine still write

    def ready(self, tensor: int, gradient: BufferLike) -> None:
        """Pass the gradient of one tensor; do not access it until ``finish`` returns.

        Raises:
            ValueError: The index, size or type is wrong, or the gradient was passed before.
        """
        if not 0 <= tensor < len(self._tensors):
            raise ValueError(f"no tensor {tensor}: {len(self._tensors)} are registered")
        count, dtype = self._tensors[tensor]
        data = as_buffer(gradient)
        if (data.count, data.dtype) != (count, dtype):
            raise ValueError(
                f"tensor {tensor} was registered as {dtype.value}[{count}], but is "
                f"{data.dtype.value}[{data.count}]"
            )
        self._held.append(data)
        self._native.ready(tensor, data.ptr)

    def finish(self) -> None:
        """Wait for all reductions and prepare for the next step.

        Raises:
            SdpError: A reduction failed; see ``Group``.
        """
        try:
            self._native.finish()
        except BaseException:
            # Held here as well: a network may be at it.
            self._group.issuer.release(self._held.copy())
            raise
        self._held.clear()

    @property
    def in_step(self) -> bool:
        """Whether a gradient has been passed since the last `finish` that succeeded."""
        return bool(self._held)

    @property
    def buckets(self) -> list[list[int]]:
        """Indices of the tensors in each buffer, in the order of sending."""
        return self._native.buckets()


def _described(index: int, tensor: tuple[int, DTypeLike]) -> tuple[int, DType]:
    try:
        count, dtype = tensor
    except (TypeError, ValueError):
        raise TypeError(
            f"tensor {index} is {tensor!r}. Hint: describe each by (number of elements, type)."
        ) from None
    return operator.index(count), DType.parse(dtype)


def _check_sizes(tensors: Sequence[tuple[int, DType]], threshold_bytes: int) -> None:
    if threshold_bytes <= 0 or threshold_bytes % FUSION_ALIGN:
        raise ValueError(
            "the threshold of a fusion buffer must be a positive multiple of "
            f"{FUSION_ALIGN} bytes, got {threshold_bytes}"
        )
    for index, (count, _) in enumerate(tensors):
        if count < 0:
            raise ValueError(f"tensor {index} cannot have {count} elements")
