"""Conversion of c10d's reductions to the core's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from sdp_plugins.core import ReduceOp

SUM = dist.ReduceOp.SUM

# Pairs instead of a dictionary: c10d's ReduceOp equals its kind but hashes differently.
_PAIRS = (
    (dist.ReduceOp.AVG, ReduceOp.AVG),
    (dist.ReduceOp.MAX, ReduceOp.MAX),
    (dist.ReduceOp.MIN, ReduceOp.MIN),
    (dist.ReduceOp.PRODUCT, ReduceOp.PRODUCT),
    (dist.ReduceOp.BAND, ReduceOp.BAND),
    (dist.ReduceOp.BOR, ReduceOp.BOR),
    (dist.ReduceOp.BXOR, ReduceOp.BXOR),
)


def core_op(op: Any) -> ReduceOp:
    """Return the core's reduction for one of c10d's.

    Raises:
        ValueError: The core does not support the reduction.
    """
    if op == SUM:  # by far the most common case
        return ReduceOp.SUM
    for theirs, ours in _PAIRS:
        if op == theirs:
            return ours
    if op == dist.ReduceOp.PREMUL_SUM:
        return _premul_sum(op)
    raise ValueError(f"smddp does not know the reduction {op}. Hint: use dist.ReduceOp.SUM.")


def _premul_sum(op: Any) -> ReduceOp:
    factor = getattr(op, "factor", None)
    if isinstance(factor, torch.Tensor) and factor.numel() == 1:
        factor = factor.item()
    if not isinstance(factor, (int, float)):
        raise ValueError(
            "PREMUL_SUM needs a factor that is a number. "
            "Hint: pass dist.ReduceOp.PREMUL_SUM(0.5) instead of dist.ReduceOp.PREMUL_SUM."
        )
    return ReduceOp.premul_sum(factor)
