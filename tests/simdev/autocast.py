"""Autocast for the device: the operators of CUDA's lists that models and losses use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

LOWER = """
    addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution linear linalg_multi_dot matmul mm mv
    prelu scaled_dot_product_attention
"""
FULL = """
    acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cosine_similarity
    cross_entropy_loss cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div
    l1_loss layer_norm log log10 log1p log2 log_softmax.int logsumexp margin_ranking_loss mse_loss
    nll_loss nll_loss_nd pow.Tensor_Scalar prod reciprocal renorm rsqrt sinh smooth_l1_loss
    softmax.int softplus sum sum.dim_IntList tan triplet_margin_loss
"""

_libraries: list[torch.library.Library] = []  # a registration lasts as long as its library


def register() -> None:
    """Register the kernels, once."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for names, full in ((LOWER, False), (FULL, True)):
        for name in names.split():
            library.impl(name, casting(name, full), "AutocastPrivateUse1")


def casting(name: str, full: bool) -> Callable[..., Any]:
    """An operator on arguments cast to float32, or to what autocast computes in."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if full else torch.get_autocast_dtype("simdev")
        with torch._C._ExcludeDispatchKeyGuard(KEYS):
            return op(
                *(cast(each, dtype) for each in args),
                **{key: cast(each, dtype) for key, each in kwargs.items()},
            )

    return run


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of the device in `dtype`, but float64 as it is."""
    if isinstance(value, (list, tuple)):
        return type(value)(cast(each, dtype) for each in value)
    if not isinstance(value, torch.Tensor) or value.device.type != "simdev":
        return value
    return value.to(dtype) if value.is_floating_point() and value.dtype != torch.double else value
