"""Conversion of tensors to the core's buffers: checks, dense copies and copies back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sdp_plugins.core import Buffer, DType
from sdp_plugins.torch.torch_dispatch import OnDeviceError, OwnDispatchError, has_own_dispatch

DTYPES: dict[torch.dtype, DType] = {getattr(torch, dtype.name): dtype for dtype in DType}
STRIDED = torch.strided


def to_reduce(tensor: Tensor) -> Buffer:
    """Return the buffer of a dense tensor whose elements are reduced.

    Raises:
        TypeError: The core does not reduce the tensor's dtype.
    """
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TypeError(
            f"smddp does not reduce {tensor.dtype}. Hint: reduce tensor.to(torch.float32)."
        )
    return Buffer(address(tensor), tensor.numel(), dtype, tensor)


def to_move(tensor: Tensor) -> Buffer:
    """Return the buffer of a dense tensor to copy: bytes if the core lacks the dtype."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        return Buffer(address(tensor), tensor.nbytes, DType.uint8, tensor)
    return Buffer(address(tensor), tensor.numel(), dtype, tensor)


def address(tensor: Tensor) -> int:
    """Return the address of the tensor's data.

    Raises:
        ValueError: The tensor has no memory: it is fake, or its storage was resized to zero.
    """
    pointer = tensor.data_ptr()
    if not pointer and tensor.numel():
        raise ValueError(
            f"A {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory. "
            "Hint: pass a tensor that holds data."
        )
    return pointer


def is_dense(tensor: Tensor) -> bool:
    """Return whether a Group can use the tensor's memory as it is."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a dense copy of it.

    Raises:
        TypeError: The value is no tensor.
        ValueError: The tensor is not on the CPU, or it is sparse.
    """
    if tensor_of(tensor).layout is not STRIDED:
        raise ValueError(
            f"smddp takes tensors of layout torch.strided, not of {tensor.layout}; all_reduce also "
            "of torch.sparse_coo. Hint: pass tensor.to_dense()."
        )
    if is_dense(tensor):
        return tensor
    return on_cpu(tensor).detach().contiguous().resolve_conj().resolve_neg()


def on_cpu(tensor: Tensor) -> Tensor:
    """Return the tensor after a check of its device.

    Raises:
        OnDeviceError: The tensor is on an accelerator; ``dispatched`` handles it.
        ValueError: It is nowhere.
    """
    if not tensor.is_cpu:
        hint = "pass tensor.cpu(), or use a group of the device's own backend, such as nccl."
        if tensor.is_meta:
            hint = "a meta tensor has no data; materialize it first, with to_empty(device='cpu')."
        kind = OnDeviceError if is_on_accelerator(tensor) else ValueError
        raise kind(f"smddp does not work on tensors on {tensor.device}. Hint: {hint}")
    return tensor


def is_on_accelerator(tensor: Tensor) -> bool:
    """Return whether the tensor is on this machine's type of accelerator."""
    if tensor.is_cpu:
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and tensor.device.type == accelerator.type


class Outputs:
    """Dense output tensors, and the copies from these to the caller's tensors.

    Args:
        operations: All tensors of each operation of a call with several operations. If tensors
            share memory, no operation may read another's results: all outputs then get temporary
            tensors, which are copied in the order of the calls of `dense`.
    """

    def __init__(self, operations: Sequence[Sequence[Tensor]] = ()) -> None:
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._apart = len(operations) > 1 and share_memory(operations)

    def dense(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, or a dense copy that `copy_back` copies into it."""
        stand_in = readable(tensor)
        if self._apart and stand_in is tensor:
            stand_in = tensor.detach().clone()
        if stand_in is not tensor:
            self.copy_later(tensor, stand_in)
        return stand_in

    def copy_later(self, tensor: Tensor, stand_in: Tensor) -> None:
        """Let `copy_back` copy a dense tensor with the same number of elements into `tensor`."""
        if tensor.numel() != stand_in.numel():
            raise ValueError(
                f"The output has {tensor.numel()} elements, but the result has {stand_in.numel()}."
            )
        shaped = stand_in.view(tensor.shape)
        self._pending.append((_unexpanded(tensor), _unexpanded(shaped, like=tensor)))

    def copy_back(self) -> None:
        """Copy the temporary tensors into the caller's; at most once."""
        pending, self._pending = self._pending, []
        if pending:
            # Allows writing to leaves that require a gradient and to inference tensors.
            with torch.inference_mode():
                for tensor, stand_in in pending:
                    tensor.copy_(stand_in)


def copy_values(target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
    """Copy into a tensor, which may be expanded, one of its shape; autograd records nothing."""
    if target.layout is not torch.strided:  # has no strides, and what detach() returns its own size
        with torch.no_grad():
            target.copy_(source, non_blocking=non_blocking)
        return
    target = target.detach()
    _unexpanded(target).copy_(_unexpanded(source, like=target), non_blocking=non_blocking)


def _unexpanded(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the tensor without the repetitions that `expand()` made in `like`, or in itself."""
    strides = (tensor if like is None else like).stride()
    for dim, (stride, size) in enumerate(zip(strides, tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def share_memory(operations: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether any two of the tensors overlap; interleaved views count as well."""
    return overlap(tensor_of(tensor) for tensors in operations for tensor in tensors)


def overlap(tensors: Iterable[Tensor]) -> bool:
    """As `share_memory`, of tensors that need no check."""
    extents = sorted(map(_extent, tensors))
    return any(start < end for (_, end), (start, _) in pairwise(extents))


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's elements and the address after the last."""
    if not tensor.numel() or tensor.layout is not torch.strided:
        return 0, 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def same_dtype(tensors: Sequence[Tensor]) -> None:
    """Check that the tensors of one operation have the same dtype.

    Raises:
        TypeError: The dtypes differ, or as for `tensor_of`.
    """
    for tensor in tensors:
        if tensor_of(tensor).dtype != tensors[0].dtype:
            names = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
            raise TypeError(f"The tensors of one operation differ in dtype: {names}.")


def only(tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the one tensor of a c10d argument, which is a tensor or a list of one.

    Raises:
        TypeError: The value is no tensor.
        ValueError: There is not exactly one tensor.
    """
    if isinstance(tensors, Tensor):
        return tensor_of(tensors)
    if len(tensors) != 1:
        raise ValueError(
            f"smddp takes one tensor in each call, not {len(tensors)}. "
            "Hint: use the *_coalesced call, or one call for each tensor."
        )
    return tensor_of(tensors[0])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def tensor_of(value: Any) -> Tensor:
    """Return the value if it is a tensor.

    Raises:
        TypeError: The value is no tensor, or OwnDispatchError, which ``dispatched`` handles.
    """
    if type(value) is Tensor:
        return value
    kind = type(value)
    if not isinstance(value, Tensor):
        raise TypeError(f"smddp needs a torch.Tensor, not {kind.__name__}.")
    if has_own_dispatch(kind):
        raise OwnDispatchError(
            f"A {kind.__name__} may hold its elements in other tensors. Hint: pass those."
        )
    return value
