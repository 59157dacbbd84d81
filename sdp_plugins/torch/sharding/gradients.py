"""Gradients: put where peers read them as the backward pass yields them, averaged by shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sdp_plugins.core import Buffer, Group, Work, _native
from sdp_plugins.torch import internals
from sdp_plugins.torch.sharding.layout import Bucket, Layout, Piece, Slot
from sdp_plugins.torch.sharding.weights import like
from sdp_plugins.torch.tensors import DTYPES

OWNED = "_sdp_gradients_in_shards"
"""Attribute of parameters whose gradients a ShardedOptimizer takes; copies have another id."""
PROPERTIES = tuple(getattr(Tensor, name).__get__ for name in ("device", "dtype", "is_sparse"))
"""What GradScaler asks of a gradient."""
LARGE_NBYTES = 64 * 1024
"""Size from which gradients are not copied where only this rank reads them."""


class GradientInShards(Tensor):
    """In the place of ``parameter.grad`` after the backward pass: the ranks hold its average.

    Any operation on it would read this rank's own gradient, in the middle of being averaged. Only
    GradScaler's works, on the averages.

    Attributes:
        unscale: Does GradScaler's operation on all gradients: (found_inf, inv_scale).
    """

    unscale: Callable[[Tensor, Tensor], None]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in PROPERTIES:
            return super().__torch_function__(function, types, args, kwargs)
        if function is internals.unscale_gradients:
            (first, *_), found_inf, inv_scale = args
            return first.unscale(found_inf, inv_scale)
        raise RuntimeError(
            f"{getattr(function, '__name__', function)}: gradients of a ShardedOptimizer are "
            "averaged in the ranks' shards and cannot be read. Hint: to clip them, call the "
            "optimizer's clip_grad_norm_() or clip_grad_value_(); zero_grad() before the next "
            "backward pass."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "<gradient in the ranks' shards>"


class GradientBuckets:
    """This rank's gradients in memory that its peers map, and theirs.

    On one node, ranks read each other's gradients where they are: nothing is sent, and large
    gradients that this rank updates are not even copied. Across nodes, a bucket that is full is
    reduced to shards beside the rest of the backward pass.

    Attributes:
        synchronizing: Whether backward passes give their gradients away; otherwise they
            accumulate in ``parameter.grad``.
    """

    def __init__(
        self,
        group: Group,
        layout: Layout,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        unscale: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._group, self._layout, self._parameters = group, layout, parameters
        self._names = names
        self.synchronizing = True
        memories = group.allocate_on_node(layout.nbytes)
        self._everyones = [[bucket.of(each) for each in memories] for bucket in layout.buckets]
        self._buckets = [each[group.local_rank] for each in self._everyones]
        self._reductions: list[Callable[[], Work | None]] = []
        if group.local_size < group.world_size:
            self._reductions = [self._reduction(i) for i in range(len(self._buckets))]
        self._places: dict[int, tuple[int, Bucket, Slot]] = {}
        self._views: dict[int, Tensor] = {}
        placeholders: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}
        for i, bucket in enumerate(layout.buckets):
            for slot in bucket.slots:
                view = like(parameters[slot.parameter], self._buckets[i], slot.start)
                self._places[slot.parameter] = i, bucket, slot
                self._views[slot.parameter] = view
                placeholder = view.as_subclass(GradientInShards)
                placeholder.unscale = unscale
                placeholders[slot.parameter] = placeholder
        for index, view in self._views.items():  # what `_put` never copies needs no memory
            if view.nbytes >= LARGE_NBYTES:
                first, last = self._own_bytes(index)
                _native.give_back_pages(view.data_ptr() + first, last - first)
        self._placeholders = [placeholders[i] for i in range(len(parameters))]
        self.begin()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._ready, index))
            for index, parameter in enumerate(parameters)
        ]
        for parameter in parameters:
            setattr(parameter, OWNED, id(parameter))

    def begin(self) -> None:
        """Expect a gradient of every parameter."""
        self._missing = [
            {slot.parameter for slot in bucket.slots} for bucket in self._layout.buckets
        ]
        self._works: list[Work | None] = []
        self._kept.clear()
        self._kept_storages: set[int] = set()
        self._mistake: RuntimeError | None = None
        self._present = torch.ones(len(self._parameters), dtype=torch.uint8)
        self._unused: frozenset[int] | None = None

    def _reduction(self, index: int) -> Callable[[], Work | None]:
        bucket, elements = self._layout.buckets[index], self._buckets[index]
        start, stop = bucket.shard(self._group.rank, self._group.world_size)
        dtype = DTYPES[bucket.dtype]
        whole = Buffer(elements.data_ptr(), bucket.numel, dtype, elements)
        mine = Buffer(whole.ptr + start * dtype.itemsize, stop - start, dtype, elements)
        return partial(self._group.reduce_scatter, mine, whole, "avg", async_op=True)

    def _ready(self, index: int, parameter: Tensor) -> None:
        """After a parameter's gradient is whole."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient is self._placeholders[index]:  # to which autograd has added the new gradient
            self._mistake = RuntimeError(
                f"A second gradient of {self._names[index]} came before step(). Hint: accumulate "
                "gradients of all but the last backward pass in `with optimizer.no_sync():`; or "
                "drop those of the pass before with zero_grad()."
            )
            raise self._mistake
        if self.synchronizing:
            self._give(index, gradient)
            self._reduce_full()

    def _give(self, index: int, gradient: Tensor) -> None:
        """Take a gradient, also in the place of one that was dropped or replaced."""
        number = self._places[index][0]
        if index not in self._missing[number] and number < len(self._works):
            raise RuntimeError(
                f"The gradient of {self._names[index]} was dropped or replaced after its backward "
                "pass, when other nodes had received it. Hint: call the optimizer's zero_grad()."
            )
        self._put(index, gradient)
        self._missing[number].discard(index)

    def _put(self, index: int, gradient: Tensor) -> None:
        """Copy what other ranks read, and keep what this rank averages, if it is large."""
        view = self._views[index]
        gradient = gradient.detach().to_dense()
        self._kept.pop(index, None)
        alike = gradient.dtype is view.dtype and gradient.stride() == view.stride()
        if gradient.nbytes < LARGE_NBYTES or not alike:
            view.copy_(gradient)
        else:
            first, last = self._own_bytes(index)
            storage = gradient.untyped_storage().data_ptr()
            if storage in self._kept_storages:  # autograd may yield two views of one memory
                first = last = gradient.nbytes
            elif first < last:
                self._kept[index] = gradient
                self._kept_storages.add(storage)
            target, source = view.data_ptr(), gradient.data_ptr()
            _native.streaming_copy(target, source, first)
            _native.streaming_copy(target + last, source + last, gradient.nbytes - last)
        self._parameters[index].grad = self._placeholders[index]

    def _own_bytes(self, index: int) -> tuple[int, int]:
        """The first byte of a gradient that only this rank reads, and the one after the last."""
        if self._reductions:
            return 0, 0
        _, bucket, slot = self._places[index]
        shard = bucket.shard(self._group.rank, self._group.world_size)
        start, stop = (min(max(at, slot.start), slot.stop) - slot.start for at in shard)
        return start * bucket.dtype.itemsize, stop * bucket.dtype.itemsize

    def _reduce_full(self) -> None:
        """Begin to reduce the buckets that are full, in their order, which all ranks have."""
        while len(self._works) < len(self._reductions) and not self._missing[len(self._works)]:
            self._works.append(self._reductions[len(self._works)]())

    def finish(self) -> frozenset[int]:
        """Wait until all ranks have their gradients.

        Returns:
            The parameters of which no rank has a gradient; the same until `begin`.
        """
        if self._mistake is not None:
            raise self._mistake
        if self._unused is not None:
            return self._unused
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None:
                self._present[index] = 0
                self._give(index, parameter.new_zeros(()).expand_as(parameter))
                parameter.grad = None
            elif gradient is not self._placeholders[index]:
                self._give(index, gradient)  # accumulated by earlier backward passes, or the user's
        self._reduce_full()
        self._wait()
        self._group.all_reduce(self._present, "max")
        self._unused = frozenset((self._present == 0).nonzero().flatten().tolist())
        return self._unused

    def _wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()

    def average(self, pieces: Iterable[Piece]) -> list[Tensor]:
        """Average the gradients of some of this rank's pieces over all ranks; after `finish`.

        Returns:
            The elements of each piece, until `begin`.
        """
        found = []
        for piece in pieces:
            mine = self._of(piece)
            if not self._reductions:
                offset = piece.start * mine.itemsize
                sources = [each.data_ptr() + offset for each in self._everyones[piece.bucket]]
                sources[self._group.local_rank] = target = mine.data_ptr()
                dtype = DTYPES[mine.dtype].native
                average = _native.ReduceOp.avg
                _native.combine(dtype, average, sources, target, mine.numel(), 0, False)
            found.append(mine)
        return found

    def _of(self, piece: Piece) -> Tensor:
        """This rank's gradients of a piece, in the bucket or where the backward pass left them."""
        gradient = self._kept.get(piece.slot.parameter)
        if gradient is None:
            return self._buckets[piece.bucket][piece.start : piece.stop]
        first = piece.start - piece.slot.start
        size = (piece.stop - piece.start,)
        return gradient.as_strided(size, (1,), gradient.storage_offset() + first)

    def leave_parameters(self) -> None:
        """Have backward passes leave gradients in ``parameter.grad`` again."""
        self.drop()
        for hook, parameter in zip(self._hooks, self._parameters, strict=True):
            hook.remove()
            delattr(parameter, OWNED)

    def drop(self) -> None:
        """Drop the gradients that were given to the ranks, and expect new ones."""
        self._wait()
        for parameter, placeholder in zip(self._parameters, self._placeholders, strict=True):
            if parameter.grad is placeholder:
                parameter.grad = None
        self.begin()
