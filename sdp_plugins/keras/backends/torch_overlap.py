"""Gradients on torch, averaged during the backward pass.

As in torch's DDP (Li et al., VLDB 2020), a hook on every parameter passes its gradient to the
fusion buffers as soon as it is complete, and the end of the backward pass waits for the buffers. No
code ever sees a partly reduced gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from sdp_plugins.core import DType
from sdp_plugins.core.tensor_lists import FusedAllReduce

from ..rank_consistency import gradient_on_some_ranks
from .torch_internals import at_end_of_backward, uses_of_storage

_USES_BY_ONE_TENSOR = 2  # the tensor, and the storage object that is queried


class Overlap:
    """The gradients of one step.

    Attributes:
        done: Whether the parameters' gradients are already the averages over ranks.
    """

    def __init__(self, reduce: FusedAllReduce, variables: Sequence[Any]) -> None:
        """Plan by the reducer."""
        self.done = False
        self._variables = variables[::-1]  # the first ones of the model get their gradients last
        self._parameters = [variable.value for variable in self._variables]
        # 1 for each variable with a gradient; the average reveals one that only some ranks have.
        self._present = torch.zeros(len(self._parameters))
        sizes = [(tensor.numel(), _dtype(tensor)) for tensor in (*self._parameters, self._present)]
        self._fusion = reduce.plan(sizes, "avg")
        self._begun = False
        self._less_than_one_rank = 0.5 / reduce.world_size

    @contextmanager
    def averaging(self, factor: float) -> Iterator[None]:
        """Return a context in which a backward pass averages gradients.

        Args:
            factor: Weight of this rank's gradients.
        """
        self._factor = factor
        with ExitStack() as stack:
            for index, parameter in enumerate(self._parameters):
                hook = parameter.register_post_accumulate_grad_hook(partial(self._ready, index))
                stack.callback(hook.remove)
            yield

    @torch.no_grad()
    def _ready(self, index: int, parameter: torch.Tensor) -> None:
        if self.done:
            raise RuntimeError(
                f"'{self._variables[index].path}' got a gradient after the backward pass of its "
                "step. Hint: a train_step of your own may have several."
            )
        if not self._begun:
            self._begun = True
            at_end_of_backward(self._finish)
        gradient = parameter.grad
        assert gradient is not None  # torch calls the hook once the gradient is set
        if (exclusive := in_memory_of_its_own(gradient)) is not gradient:
            gradient = parameter.grad = exclusive
        if self._factor == 0:
            gradient.zero_()
        elif self._factor != 1:
            gradient.mul_(self._factor)
        self._present[index] = 1
        self._fusion.ready(index, gradient)

    @torch.no_grad()
    def _finish(self) -> None:
        self._fusion.ready(len(self._parameters), self._present)
        self._fusion.finish()
        self.done = True
        for variable, present in zip(self._variables, self._present.tolist(), strict=True):
            if self._less_than_one_rank < present < 1 - self._less_than_one_rank:
                raise gradient_on_some_ranks(variable)


def in_memory_of_its_own(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient, contiguous, or a copy if writing to it would change another tensor.

    The gradient of a reshaped tensor is a view of a tensor that autograd may still pass on, or that
    is also another parameter's gradient.
    """
    if not gradient.is_contiguous():
        return gradient.contiguous()
    storage = gradient.untyped_storage()
    return gradient.clone() if uses_of_storage(storage._cdata) > _USES_BY_ONE_TENSOR else gradient


def _dtype(tensor: torch.Tensor) -> DType:
    return DType.parse(str(tensor.dtype).removeprefix("torch."))
