"""CPU copies of the tensors of one call, in pinned memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdp_plugins.torch.accelerator.pieces import check_device, dense_of
from sdp_plugins.torch.streams import on
from sdp_plugins.torch.tensors import address, copy_values

RECEIVES = frozenset({"recv", "recv_anysource"})
ONE_TENSOR = frozenset({"_sum_sparse", "broadcast", "reduce"})
"""Calls whose only tensors are read and written; others have outputs, then inputs."""


class HostCopies:
    """Copies of a call's arguments, and what is to be copied back.

    Args:
        down: The stream for copies from the device, which is behind the current one.
    """

    def __init__(self, down: torch.Stream) -> None:
        self._down = down
        self._written: list[tuple[Tensor, Tensor]] = []
        self.tensors: list[Tensor] = []

    def of(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """Return a method's arguments with CPU tensors."""
        first, *rest = args
        if method == "send":
            return [self._host(first, reads=True, writes=False), *rest]
        if method in RECEIVES:
            return [self._host(first, reads=False, writes=True), *rest]
        if method in ONE_TENSOR:
            return [self._host(first, reads=True, writes=True), *rest]
        outputs = self._host(first, reads=False, writes=True)
        return [outputs, self._host(rest[0], reads=True, writes=False), *rest[1:]]

    def _host(self, value: Any, reads: bool, writes: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._host(part, reads, writes) for part in value]
        if not isinstance(value, Tensor):
            return value
        check_device(value, self._down.device)
        host = self._copy(value, reads)
        self.tensors.append(value)
        if writes:
            self._written.append((value, host))
        return host

    def _copy(self, tensor: Tensor, reads: bool) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor.detach().cpu()  # its size is only known on the device
        address(tensor)
        try:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        except RuntimeError:  # no memory can be pinned: torch then copies synchronously
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
        if reads:
            source = dense_of(tensor)
            if source is not tensor:  # made on the current stream
                self._down.wait_stream(torch.accelerator.current_stream(tensor.device))
                self.tensors.append(source)
            with on(self._down):
                host.copy_(source.detach(), non_blocking=True)
        return host

    @property
    def written(self) -> list[Tensor]:
        """The tensors that hold results."""
        return [tensor for tensor, _ in self._written]

    def copy_back(self) -> None:
        """Enqueue the copies to the device on the current stream."""
        for tensor, host in self._written:
            copy_values(tensor, host, non_blocking=True)
