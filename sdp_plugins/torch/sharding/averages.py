"""The averaged gradients, of which each rank holds its shards."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from sdp_plugins.core import Group
from sdp_plugins.torch import internals
from sdp_plugins.torch.sharding.agreement import NO_SETTINGS, Call, Settings, StepState
from sdp_plugins.torch.sharding.gradients import GradientBuckets
from sdp_plugins.torch.sharding.layout import Piece
from sdp_plugins.torch.sharding.weights import like


class Averages:
    """Gives this rank's pieces the averages of the gradients, and clips or scales them.

    All methods but `drop` are collectives.

    Args:
        group: All ranks.
        gradients: Of this rank, and of those that it can read.
        pieces: What this rank updates; their ``grad`` is the average from `compute` until `drop`.

    Attributes:
        computed: Whether the pieces have the averages.
    """

    def __init__(
        self, group: Group, gradients: GradientBuckets, pieces: Sequence[tuple[Piece, Tensor]]
    ) -> None:
        self._group, self._gradients, self._pieces = group, gradients, pieces
        self._count = 1 + max(gradients.placeholders)
        self._tensors: dict[int, list[Tensor]] = {}
        for piece, tensor in pieces:
            self._tensors.setdefault(piece.slot.parameter, []).append(tensor)
        for placeholder in gradients.placeholders.values():
            placeholder.averages = weakref.proxy(self)  # the parameters do not keep this alive
        self.drop()

    def drop(self) -> None:
        """Forget the averages and the gradients."""
        for _, tensor in self._pieces:
            tensor.grad = None
        self.computed = False
        self._norms: dict[float, Tensor] = {}
        self._found_inf: Tensor | None = None
        self._changes = 0
        self._gradients.drop()

    def compute(
        self, new: Mapping[int, int] | None = None, settings: Settings = NO_SETTINGS
    ) -> bool:
        """Average the gradients, once in a step. Pieces whose parameter has none get none.

        Args:
            new: In the step, what of the watched the program has changed, see `NodeWeights`; None:
                this is before the step, which has to be so on all ranks.
            settings: In the step, what else has to be equal on all ranks.

        Returns:
            Whether this call has averaged them; False: an earlier one had.
        """
        if self.computed and self._gradients.are_dropped():
            self.drop()
        if self.computed:
            if new is not None:
                state = StepState(self._changes, settings)
                self._gradients.finish(Call.STEP_AFTER_CHANGES, state, new)
            return False
        call = Call.CHANGE if new is None else Call.STEP
        unused = self._gradients.finish(call, StepState(0, settings), new)
        used = [(p, tensor) for p, tensor in self._pieces if p.slot.parameter not in unused]
        averages = self._gradients.average(piece for piece, _ in used)
        for (_, tensor), average in zip(used, averages, strict=True):
            average = like(tensor, average, 0)
            tensor.grad = average.to(tensor.dtype)  # master weights are float32
        self.computed = True
        return True

    def total_norm(self, norm_type: float) -> Tensor:
        """The norm of all gradients, in their type, at least float32."""
        norm = torch.linalg.vector_norm(self._all_norms(norm_type), norm_type)
        types = {each.averaged_as for each in self._gradients.placeholders.values()}
        return norm.to(reduce(torch.promote_types, types, torch.float32))

    def norm(self, of: int, norm_type: float) -> Tensor:
        """The norm of a parameter's gradient; the first asks for those of all, in one message."""
        norms = self._all_norms(norm_type)
        self._gradients.raise_if_uneven()
        dtype = self._gradients.placeholders[of].averaged_as
        return norms[of].to(torch.promote_types(dtype, torch.float32))

    def scale(self, factor: Any, of: int | None = None, divide: bool = False) -> None:
        """Multiply or divide a parameter's gradient, or all."""
        gradients = self._mine(of)
        self._note(of, factor, divide)
        for gradient in gradients:
            if divide:
                gradient.div_(factor)
            else:
                gradient.mul_(factor)

    def clamp(self, low: Any, high: Any, of: int | None = None) -> None:
        """Limit the elements of a parameter's gradient, or of all."""
        gradients = self._mine(of)
        self._note(of, low, high)
        for gradient in gradients:
            gradient.clamp_(low, high)

    def unscale(self, found_inf: Tensor, inv_scale: Tensor) -> None:
        """GradScaler's operation, on all gradients: all ranks find what one finds."""
        if self._found_inf is None:  # of all types at once: a rank may have gradients of some only
            gradients = self._mine()
            self._note(None, inv_scale)
            self._meet_again()
            found = torch.zeros_like(found_inf)
            for each in {g.dtype for g in gradients}:
                of_type = [g for g in gradients if g.dtype is each]
                internals.unscale_gradients(of_type, found, inv_scale)
            self._group.all_reduce(found, "max")
            self._found_inf = found
        found_inf.add_(self._found_inf)

    def _note(self, of: int | None, *values: Any) -> None:
        """Remember a change, to compare the ranks' later: they must stay alike."""
        known = [None if value is None else float(value) for value in values]
        self._changes = zlib.crc32(repr((of, known)).encode(), self._changes)

    def _mine(self, of: int | None = None) -> list[Tensor]:
        """The averages in this rank's shards of a parameter, or of all, to be changed."""
        self._compute_early()
        self._norms.clear()
        if of is None:
            tensors: Iterable[Tensor] = (tensor for _, tensor in self._pieces)
        else:
            self._gradients.raise_if_uneven()  # torch asks for the gradients that this rank has
            tensors = self._tensors.get(of, ())
        return [tensor.grad for tensor in tensors if tensor.grad is not None]

    def _compute_early(self) -> None:
        """Average before the step: other ranks read this rank's gradients until all have."""
        if self.compute():
            self._group.barrier()

    def _meet_again(self) -> None:
        """Find out, before a collective on averages, whether all ranks call it."""
        self._gradients.finish(Call.CHANGE_AGAIN)

    def _all_norms(self, norm_type: float) -> Tensor:
        """Of the gradients of all parameters, float64."""
        if norm_type <= 0:
            raise ValueError(f"clip_grad_norm_: norm_type {norm_type} is no norm. Hint: 2.0.")
        self._compute_early()
        if norm_type in self._norms:
            return self._norms[norm_type]
        self._meet_again()
        norms = torch.zeros(self._count, dtype=torch.float64)
        for piece, tensor in self._pieces:
            if tensor.grad is None:
                continue
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            norm = torch.linalg.vector_norm(tensor.grad, norm_type, dtype=dtype).double()
            at = piece.slot.parameter
            if math.isinf(norm_type):
                norms[at] = torch.maximum(norms[at], norm)
            else:
                norms[at] += norm.pow(norm_type)
        if math.isinf(norm_type):
            self._group.all_reduce(norms, "max")
        else:
            self._group.all_reduce(norms, "sum")
            norms.pow_(1.0 / norm_type)
        self._norms[norm_type] = norms
        return norms
