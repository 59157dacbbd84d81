"""Keras on torch, with variables on an accelerator: gradients are averaged in its memory.

They take the way of torch.distributed's tensors, `sdp_plugins.torch.accelerator`. Everything else
that ranks exchange is small, and goes through copies on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp_plugins.core import Group
from sdp_plugins.torch.process_group import ProcessGroup

_NAME = "device gradients"


class DeviceGradients:
    """Averages gradients that are on an accelerator.

    Args:
        group: The ranks; its first use makes other groups of them.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._process_group: Any = None

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Average all ranks' gradients, in place, in one call for each type."""
        group = self._on_devices()
        limit = timedelta(seconds=2 * self._group.timeout_s)  # the operation's own comes first
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_type.setdefault(gradient.dtype, []).append(gradient)
        flat = [torch.cat([each.reshape(-1) for each in same]) for same in by_type.values()]
        works = [group.allreduce([whole], dist.ReduceOp.AVG) for whole in flat]
        for whole, same, work in zip(flat, by_type.values(), works, strict=True):
            work.wait(limit)
            parts = whole.split([each.numel() for each in same])
            views = [part.view(each.shape) for part, each in zip(parts, same, strict=True)]
            torch._foreach_copy_(same, views)

    def _on_devices(self) -> Any:
        if self._process_group is None:

            def make(name: str, for_devices: bool = False) -> Group:
                made = self._group.new_group(range(self._group.world_size), name=f"{_NAME}, {name}")
                assert made is not None  # every rank is a member
                return made

            self._process_group = ProcessGroup(make("main"), make, False)
        return self._process_group

    def close(self) -> None:
        """Close the groups that were made."""
        if self._process_group is not None:
            self._process_group.shutdown()
            self._process_group = None
