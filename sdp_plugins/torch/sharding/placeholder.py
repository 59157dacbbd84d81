"""What is in the place of ``parameter.grad`` while the ranks hold its average in shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from sdp_plugins.torch import internals

UNCHANGED = (Tensor.data.__get__, Tensor.detach)  # type: ignore[attr-defined]
NORMS = (torch.linalg.vector_norm, torch.norm, Tensor.norm)
DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
PROPERTIES = tuple(
    getattr(Tensor, name).__get__
    for name in ("device", "is_leaf", "is_sparse", "layout", "ndim", "requires_grad", "shape")
)
WITHOUT_VALUES = (*PROPERTIES, Tensor.dim, Tensor.numel, Tensor.size)
"""What tells nothing of a gradient's values."""


class AverageGradients(Protocol):
    """Operations on the averages; `of` is the index of a parameter. Most are collectives."""

    def drop(self) -> None:
        """Forget the averages; no collective."""

    def norm(self, of: int, norm_type: float) -> Tensor:
        """The norm of a parameter's gradient."""

    def scale(self, factor: Any, of: int | None = None, divide: bool = False) -> None:
        """Multiply or divide a parameter's gradient."""

    def clamp(self, low: Any, high: Any, of: int | None = None) -> None:
        """Limit the elements of a parameter's gradient."""

    def unscale(self, found_inf: Tensor, inv_scale: Tensor) -> None:
        """GradScaler's operation, on all gradients."""


class GradientInShards(Tensor):
    """In the place of ``parameter.grad`` after the backward pass: the ranks hold its average.

    Most operations would read this rank's own gradient, in the middle of being averaged, and are
    refused. Those of torch's clipping functions and of GradScaler work on the averages.

    Attributes:
        averages: Does them.
        parameter: Its index.
        averaged_as: Type of the averages.
    """

    averaged_as: torch.dtype
    averages: AverageGradients
    parameter: int

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in WITHOUT_VALUES:
            return super().__torch_function__(function, types, args, kwargs)
        if function == DTYPE:
            return args[0].averaged_as
        named = {name: v for name, v in (kwargs or {}).items() if v is not None and v is not False}
        if function is internals.unscale_gradients:
            (first, *_), found_inf, inv_scale = args
            return first.averages.unscale(found_inf, inv_scale)
        me = args[0] if args else None
        if isinstance(me, GradientInShards):
            if function in UNCHANGED:
                return me
            if function in NORMS and len(args) <= 2 and named.keys() <= {"p", "ord"}:
                norm_type = [*args[1:], *named.values(), 2.0][0]
                of_elements = 2.0 if norm_type == "fro" else norm_type  # torch.norm's default
                return me.averages.norm(me.parameter, float(of_elements))
            if function in (Tensor.mul_, Tensor.div_) and named.keys() <= {"other"}:
                factors = [*args[1:], *named.values()]
                if len(factors) == 1 and _is_number(factors[0]):
                    me.averages.scale(float(factors[0]), me.parameter, function is Tensor.div_)
                    return me
            if function is Tensor.clamp_ and len(args) == 1 and named.keys() <= {"min", "max"}:
                me.averages.clamp(named.get("min"), named.get("max"), me.parameter)
                return me
        if (name := getattr(function, "__name__", str(function))) == "__get__":
            name = function.__self__.__name__  # type: ignore[attr-defined]
        raise RuntimeError(
            f"{name}: gradients of a ShardedOptimizer are averaged in the ranks' shards and cannot "
            "be read. Hint: call step() of the ShardedOptimizer, not of the optimizer inside; "
            "torch's clip_grad_norm_() and clip_grad_value_() work, as do those of the optimizer; "
            "zero_grad(), without set_to_none=False, before the next backward pass."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "<gradient in the ranks' shards>"


def _is_number(factor: Any) -> bool:
    return not isinstance(factor, Tensor) or (factor.numel() == 1 and not factor.is_complex())
