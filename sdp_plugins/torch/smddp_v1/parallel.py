"""DistributedDataParallel of SMDDP 1.0 to 1.3, over torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sdp_plugins.core.config import check_bucket_mb
from sdp_plugins.torch.smddp_v1.distributed import check_group

DEFAULT_BUCKET_MB = 25


class DistributedDataParallel(nn.Module):
    """A module whose gradients are averaged over all ranks in the backward pass.

    The module may be wrapped before it moves to its device. Its parameters are rank 0's from the
    start. torch's DistributedDataParallel does the work; it is created at the first training step.
    A forward pass in evaluation mode or without gradients communicates nothing and may run on one
    rank.

    Args:
        module: The module to train.
        device_ids: The device of a module on one accelerator; without meaning for a module on the
            CPU.
        output_device: As in torch.
        broadcast_buffers: Whether every training step copies rank 0's buffers to all ranks.
        process_group: None or group.WORLD.
        bucket_cap_mb: Size of a bucket in MiB; its bytes are a multiple of 128. None means 25.
        find_unused_parameters: As in torch.
        **ignored: Further arguments of SMDDP's versions: `gradient_accumulation_steps` (sums over
            several backward passes are correct without it).

    Raises:
        RuntimeError: init_process_group() has not been called, or parameters have no shape yet.
        ValueError: The bucket size or the group is not supported.
        TypeError: Another argument is not supported.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int] | None = None,
        output_device: int | None = None,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        **ignored: Any,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError(
                "DistributedDataParallel needs init_process_group() before it. "
                "Hint: call smdistributed.dataparallel.torch.distributed.init_process_group()."
            )
        if unknown := ignored.keys() - {"gradient_accumulation_steps"}:
            raise TypeError(f"DistributedDataParallel() has no argument {sorted(unknown)[0]!r}")
        if any(
            nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())
        ):
            raise RuntimeError(
                "DistributedDataParallel cannot take a module with uninitialized parameters. Hint: "
                "call it once first, so that they get their shapes."
            )
        check_group(process_group)
        bucket_mb = DEFAULT_BUCKET_MB if bucket_cap_mb is None else bucket_cap_mb
        check_bucket_mb(bucket_mb)
        self.module = module
        self._device_ids, self._output_device = device_ids, output_device
        self._options: dict[str, Any] = {
            "forward_sync_buffers": broadcast_buffers,
            "bucket_cap_mb": bucket_mb,
            "find_unused_parameters": find_unused_parameters,
        }
        self._forget()
        self._take_rank_0s_state()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, through torch's DistributedDataParallel in training."""
        if self.training and torch.is_grad_enabled():
            return self._averaging()(*args, **kwargs)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, backward passes only accumulate gradients on this rank."""
        with self._averaging().no_sync():
            yield

    def _averaging(self) -> Any:
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        made: Any = self.__dict__["_made"]
        if made is None or made[0] != device:
            on_device = device.type != "cpu"
            wrapped = nn.parallel.DistributedDataParallel(
                self.module,
                device_ids=(self._device_ids or None) if on_device else None,
                output_device=self._output_device if on_device else None,
                **self._options,
            )
            made = self.__dict__["_made"] = (device, wrapped)
        return made[1]

    def _take_rank_0s_state(self) -> None:
        with torch.no_grad():
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                dist.broadcast(tensor.detach(), 0)

    def _forget(self) -> None:
        # Not a regular attribute of nn.Module: state_dict() would contain the module a second time.
        self.__dict__["_made"] = None

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move parameters, after discarding torch's wrapper, which does not support it."""
        self._forget()
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": None}
