"""Operations for frameworks: reduce and copy lists of tensors, and concatenate rows."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from .buffers import Buffer, BufferLike, as_buffer
from .dtypes import DType
from .errors import CollectiveMismatchError
from .fusion import FusionBuffer
from .group import Group
from .rank_names import name_ranks
from .shared_malloc import LARGE_NBYTES

MOST_PLANS = 256
"""Frameworks without fixed shapes have a plan for each length, and could fill the memory."""
_ARRAYS_HINT = (
    "all ranks have to pass arrays of the same types and shapes; only the numbers of rows to "
    "gather may differ."
)


class FusedAllReduce:
    """Reduces lists of tensors in place, each list in one operation per fusion buffer.

    For frameworks that pass all tensors of a step at once. Lists with the same sizes and types, in
    the same order, share a plan, which is made at their first use. The latest `MOST_PLANS` are
    kept.
    """

    def __init__(self, group: Group, in_place: bool = False) -> None:
        """Reduce among the ranks of a group.

        Args:
            group: The ranks.
            in_place: Whether large tensors lie in registered memory, on all ranks; see
                ``shared_malloc``. Then `by_bucket` reduces none of them together with small ones,
                because of which all would be copied.
        """
        self._group = group
        self.world_size = group.world_size
        self._in_place = in_place
        self._fusions: OrderedDict[tuple[str, tuple[tuple[int, DType], ...]], FusionBuffer]
        self._fusions = OrderedDict()  # the latest last

    def __call__(self, tensors: Sequence[BufferLike], op: str = "sum") -> None:
        """Combine all ranks' tensors, in place, on all ranks.

        Args:
            tensors: Writable and contiguous, of equal sizes and types on all ranks.
            op: The reduction, as for ``Group.all_reduce``.

        Raises:
            SdpError: The reduction failed; see ``Group``.
            ValueError: Two tensors share memory; nothing has been sent.
        """
        buffers = [as_buffer(tensor) for tensor in tensors]
        _check_disjoint(buffers)
        fusion = self.plan([(buffer.count, buffer.dtype) for buffer in buffers], op)
        for index, buffer in enumerate(buffers):
            fusion.ready(index, buffer)
        fusion.finish()

    def copies(self, arrays: Sequence[Any], op: str) -> list[np.ndarray[Any, Any]]:
        """Combine all ranks' arrays in copies of them."""
        copies = [np.array(array) for array in arrays]
        self(copies, op)
        return copies

    def by_bucket(
        self,
        tensors: Sequence[Any],
        sizes: Sequence[tuple[int | None, DType]],
        op: str,
        reduce: Callable[[list[Any]], Sequence[Any]],
    ) -> list[Any]:
        """Reduce a framework's tensors by operations of its own, one for each fusion buffer.

        Args:
            tensors: The tensors.
            sizes: Number of elements and type of each. A tensor of unknown size (None) has an
                operation of its own.
            op: The reduction.
            reduce: Returns the results for the tensors of one buffer.

        Returns:
            The results, in the order of the tensors.
        """
        reduced: list[Any] = [None] * len(tensors)
        buckets: list[list[int]] = []
        fused: dict[bool, dict[int, tuple[int, DType]]] = {}  # whether they lie in place, by index
        for index, (n, dtype) in enumerate(sizes):
            if n is None:
                buckets.append([index])
            else:
                in_place = self._in_place and n * dtype.itemsize >= LARGE_NBYTES
                fused.setdefault(in_place, {})[index] = n, dtype
        for described in fused.values():
            indices = list(described)
            plan = self.plan(list(described.values()), op).buckets
            buckets += [[indices[place] for place in members] for members in plan]
        for members in sorted(buckets, key=max):  # in the order in which they can complete
            results = reduce([tensors[index] for index in members])
            for index, result in zip(members, results, strict=True):
                reduced[index] = result
        return reduced

    def plan(self, sizes: Sequence[tuple[int, DType]], op: str = "sum") -> FusionBuffer:
        """The fusion buffers for these lengths and types, made at their first use.

        One whose step an exception has ended is not used again.
        """
        plan = (op, tuple(sizes))
        fusion = self._fusions.pop(plan, None)
        if fusion is None or fusion.in_step:
            fusion = FusionBuffer(self._group, plan[1], op=op)
        self._fusions[plan] = fusion
        if len(self._fusions) > MOST_PLANS:
            self._fusions.popitem(last=False)
        return fusion


def _check_disjoint(buffers: Sequence[Buffer]) -> None:
    """Refuse a list before its first tensor is ready: a fusion buffer meets an alias too late."""
    filled = sorted((b.ptr, b.ptr + b.nbytes, index) for index, b in enumerate(buffers) if b.nbytes)
    for (_, end, before), (begin, _, index) in pairwise(filled):
        if begin < end:
            raise ValueError(
                f"tensor {max(before, index)} shares memory with tensor {min(before, index)} of "
                "this list. Hint: pass the memory once, or a copy."
            )


def gather_uneven(group: Group, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Concatenate the ranks' arrays along the first axis, whose lengths may differ, in a new one.

    Two operations: the first one gathers the lengths, and compares types and other dimensions.

    Raises:
        CollectiveMismatchError: The ranks' types or other dimensions differ; no row has moved.
    """
    described = f"rows of {_described(rows.dtype, rows.shape[1:])}"
    lengths = gathered_if_alike(group, "gather", [described], len(rows))
    whole = np.empty((int(lengths.sum()), *rows.shape[1:]), rows.dtype)
    parts = np.split(whole, np.cumsum(lengths)[:-1])
    group.all_gather_uneven([to_move(part) for part in parts], to_move(np.ascontiguousarray(rows)))
    return whole


def broadcast_arrays(group: Group, arrays: Sequence[np.ndarray[Any, Any]], root: int) -> None:
    """Copy one rank's arrays, which are contiguous, into those of all others.

    Raises:
        CollectiveMismatchError: The ranks' types or shapes differ; nothing was copied.
    """
    described = [
        f"array {index} is {_described(array.dtype, array.shape)}"
        for index, array in enumerate(arrays)
    ]
    gathered_if_alike(group, "broadcast", described)
    works = [group.broadcast(to_move(array), root, async_op=True) for array in arrays if array.size]
    for work in works:
        assert work is not None
        work.wait()


def check_same_gradients(group: Group, described: Sequence[str]) -> None:
    """Check that all ranks have gradients of the same variables, before any is reduced.

    Raises:
        CollectiveMismatchError: They have not; the text has the first difference.
    """
    hint = "let all ranks use the same variables; look for a branch that depends on the rank."
    gathered_if_alike(group, "gradients", described, hint=hint)


def to_move(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array to copy: the same memory, as bytes if the core lacks the type.

    Raises:
        ValueError: The array is not contiguous: data received into the bytes would be lost.
    """
    if not array.flags.c_contiguous:
        raise ValueError("to_move: the array is not contiguous. Hint: pass a contiguous copy.")
    known = str(array.dtype) in DType.__members__
    return array if known else array.reshape(-1).view(np.uint8)


def _described(dtype: np.dtype[Any], shape: Sequence[int]) -> str:
    return f"{dtype}{list(shape)}"


def gathered_if_alike(
    group: Group, op: str, described: Sequence[str], number: int = 0, hint: str = _ARRAYS_HINT
) -> np.ndarray[Any, Any]:
    """Return each rank's `number`, after checking that `described` is the same on all ranks.

    One operation, of the numbers and checksums; descriptions are exchanged for an error only.

    Args:
        group: The ranks.
        op: What the ranks are about to do, for the error.
        described: Texts of a line each.
        number: This rank's.
        hint: What to do if the ranks differ.

    Raises:
        CollectiveMismatchError: The ranks differ; the text has their first difference.
    """
    mine = "\n".join([op, *described]).encode()
    everyones = np.zeros((group.world_size, 2), np.int64)
    group.all_gather(everyones, np.array([number, zlib.crc32(mine)], np.int64))
    if (everyones[:, 1] != everyones[0, 1]).any():
        lines = [text.decode().split("\n") for text in group.exchange(mine)]
        raise _mismatch(group, op, lines, hint)
    return everyones[:, 0]


def _mismatch(
    group: Group, op: str, everyones: Sequence[Sequence[str]], hint: str
) -> CollectiveMismatchError:
    columns = zip_longest(*everyones, fillvalue="nothing")
    first = next(column for column in columns if len(set(column)) > 1)
    parties: dict[str, list[int]] = {}
    for rank, text in enumerate(first):
        parties.setdefault(text, []).append(rank)
    words = "; ".join(
        f"{name_ranks(map(group.global_rank, ranks))}: {text}" for text, ranks in parties.items()
    )
    largest = max(parties.values(), key=len)
    return CollectiveMismatchError(
        f"{group.error_prefix}{op}: ranks disagree: {words}. Hint: {hint}",
        ranks=[rank for ranks in parties.values() if ranks is not largest for rank in ranks],
        op=op,
    )
