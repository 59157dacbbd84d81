"""The tensors of one reduction, cut into pieces of a slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sdp_plugins.core import DType, ReduceOp
from sdp_plugins.torch.accelerator.pinned_ring import SLOT_NBYTES
from sdp_plugins.torch.tensors import DTYPES, address, copy_values

_ALIGN = 128


class Reduction(NamedTuple):
    """What one call reduces.

    Attributes:
        tensors: The caller's, on one device.
        dense: Contiguous tensors of the same elements, in the same order; the tensors themselves
            where these are contiguous.
        dtype: Their element type.
        op: The reduction.
        timeout_s: Seconds, or None for the group's time-out.
    """

    tensors: Sequence[Tensor]
    dense: Sequence[Tensor]
    dtype: DType
    op: ReduceOp
    timeout_s: float | None

    @classmethod
    def of(cls, tensors: Sequence[Tensor], op: ReduceOp, timeout_s: float | None) -> Reduction:
        """Check the tensors, and copy those that are not contiguous, on the current stream.

        Raises:
            TypeError: The core does not reduce the dtype.
            ValueError: A tensor has no memory, or is on another device.
        """
        for tensor in tensors[1:]:
            check_device(tensor, tensors[0].device)
        dtype = DTYPES.get(tensors[0].dtype)
        if dtype is None:
            raise TypeError(
                f"smddp does not reduce {tensors[0].dtype}. Hint: reduce tensor.to(torch.float32)."
            )
        dense = [dense_of(tensor) for tensor in tensors]
        return cls(tensors, dense, dtype, op, timeout_s)

    def pieces(self) -> Iterator[Tensor]:
        """Yield the bytes of each piece."""
        for tensor in self.dense:
            # No view(-1): one element may be contiguous with any stride.
            flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
            yield from flat.split(piece_sizes(flat.numel()))

    def addresses(self) -> Iterator[tuple[int, int]]:
        """Yield the device address and the bytes of each piece."""
        for tensor in self.dense:
            address = tensor.data_ptr()
            for nbytes in piece_sizes(tensor.nbytes):
                yield address, nbytes
                address += nbytes

    def copy_back(self) -> None:
        """Copy the results into tensors that are not contiguous, on the current stream."""
        for tensor, dense in zip(self.tensors, self.dense, strict=True):
            if dense is not tensor:
                copy_values(tensor, dense.view(tensor.shape))


def piece_sizes(nbytes: int) -> list[int]:
    """Return the bytes of a tensor's pieces, which are nearly equal and fit into a slot.

    Each is an operation, of which ranks compare the sizes. So the first one is smaller the more
    there are: no tensor looks like the beginning of a larger one.
    """
    if nbytes <= SLOT_NBYTES:  # none, perhaps: the ranks compare that, too
        return [nbytes]
    count = -(-nbytes // (SLOT_NBYTES - 2 * _ALIGN))
    less = count % 1024 * _ALIGN
    size = -(-(nbytes + less) // (count * _ALIGN)) * _ALIGN
    whole, rest = divmod(nbytes - (size - less), size)
    return [size - less, *[size] * whole, *([rest] if rest else [])]


def check_device(tensor: Tensor, device: torch.device) -> None:
    """Check that a tensor is on the device of the others of its call.

    Raises:
        ValueError: It is not.
    """
    if tensor.device != device:
        raise ValueError(
            f"The tensors of one call are on {device} and on {tensor.device}. Hint: move them to "
            "one device."
        )


def dense_of(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy of it on its device.

    Raises:
        ValueError: It has no memory.
    """
    address(tensor)
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().contiguous().resolve_conj().resolve_neg()
