"""Float32 copies of 16-bit weights, for updates that are too small for 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
NAME = "master_param"
"""Of the copy in the state, as in other libraries' optimizers."""


class MasterWeights:
    """What a rank's optimizer updates in the place of its 16-bit weights.

    Needs 4 bytes for each of the rank's elements, and 4 for its gradient in a step.

    Args:
        enabled: Whether 16-bit weights have copies; others never have.
    """

    def __init__(self, enabled: bool) -> None:
        self._dtypes = SIXTEEN_BITS if enabled else ()
        self._weights: dict[Tensor, Tensor] = {}
        self._seen: dict[Tensor, Tensor] = {}
        self._updated: set[Tensor] = set()  # others are equal to the weights

    def dtype_of(self, weights: Tensor) -> torch.dtype:
        """The type in which weights are updated."""
        return torch.float32 if weights.dtype in self._dtypes else weights.dtype

    def add(self, weights: Tensor, seen: Tensor) -> nn.Parameter:
        """Copy weights, or leave them; returns what the optimizer updates.

        Args:
            weights: What is updated.
            seen: The same as the program sees it, and may change it.
        """
        if self.dtype_of(weights) is weights.dtype:
            return nn.Parameter(weights)
        master = nn.Parameter(weights.float())
        self._weights[master], self._seen[master] = weights, seen
        return master

    def follow(self) -> None:
        """Take over weights that were changed since `write`, as by loading a checkpoint."""
        for master, seen in self._seen.items():
            changed = master.to(seen.dtype) != seen
            if changed.any():
                master.copy_(torch.where(changed, seen.float(), master))

    def write(self) -> None:
        """Round the updated copies to the weights."""
        for master, weights in self._weights.items():
            if master.grad is not None:
                weights.copy_(master)
                self._updated.add(master)

    def leave_weights(self) -> set[Tensor]:
        """Keep the copies only; returns them."""
        self.follow()
        copies = set(self._weights)
        self._weights.clear()
        self._seen.clear()
        return copies

    def add_to(self, state: Mapping[Tensor, dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
        """An optimizer's state with the copies that were updated; plain ones expect no other."""
        copies = {master: {NAME: master.detach()} for master in self._updated}
        return {
            tensor: {**state.get(tensor, {}), **copies.get(tensor, {})}
            for tensor in (*state, *copies)
        }

    def take_from(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Move the copies out of an optimizer's state that was loaded, if it has any."""
        for tensor, values in state.items():
            copy = values.pop(NAME, None)
            if copy is not None and tensor in self._weights:
                tensor.detach().copy_(copy)
                self._updated.add(tensor)
