"""The operators of SyncBatchNorm, which torch has for GPUs only, composed of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_libraries: list[torch.library.Library] = []  # a registration lasts as long as its library


def register() -> None:
    """Register the kernels, once."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for kernel in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        library.impl(kernel.__name__, kernel, "PrivateUse1")


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(_exact(input), _others(input), correction=0)
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    weights, total = counts.to(mean.dtype).unsqueeze(1), counts.sum().to(mean.dtype)
    whole = (mean * weights).sum(0) / total
    squares = ((invstd**-2 - eps + (mean - whole) ** 2) * weights).sum(0)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(momentum * whole)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(momentum * squares / (total - 1))
    return whole, (squares / total + eps).rsqrt()


def batch_norm_elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    result = (_exact(input) - _shaped(mean, input)) * _shaped(invstd, input)
    if weight is not None:
        result = result * _shaped(weight, input)
    if bias is not None:
        result = result + _shaped(bias, input)
    return result.to(input.dtype)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Any, ...]:
    gradient = _exact(grad_out)
    sum_dy = gradient.sum(_others(input))
    sum_dy_xmu = (gradient * (_exact(input) - _shaped(mean, input))).sum(_others(input))
    of_weight = (sum_dy_xmu * invstd).to(weight.dtype) if weight is not None and weight_g else None
    of_bias = sum_dy.to(weight.dtype) if weight is not None and bias_g else None
    return sum_dy, sum_dy_xmu, of_weight, of_bias


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    total = count.sum().to(mean.dtype)
    centered = _exact(input) - _shaped(mean, input)
    slope = _shaped(invstd**2 * sum_dy_xmu / total, input)
    result = _exact(grad_out) - _shaped(sum_dy / total, input) - centered * slope
    factor = invstd if weight is None else invstd * weight
    return (result * _shaped(factor, input)).to(input.dtype)


def _exact(tensor: Tensor) -> Tensor:
    """The tensor in the type in which GPUs compute."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _others(input: Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [dim for dim in range(input.dim()) if dim != 1]


def _shaped(channels: Tensor, input: Tensor) -> Tensor:
    """A value for each channel, to be broadcast."""
    return channels.view(-1, *[1] * (input.dim() - 2))
