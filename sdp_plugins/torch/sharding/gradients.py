"""Gradients: put where peers read them as the backward pass yields them, averaged by shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sdp_plugins.core import Buffer, Group, SdpError, Work, _native
from sdp_plugins.torch import internals
from sdp_plugins.torch.direct_gradients import DirectGradients
from sdp_plugins.torch.sharding.agreement import (
    Call,
    StepState,
    flags_of,
    meet,
    naming,
)
from sdp_plugins.torch.sharding.layout import Bucket, Layout, Piece, Slot
from sdp_plugins.torch.sharding.placeholder import GradientInShards
from sdp_plugins.torch.sharding.weights import like
from sdp_plugins.torch.tensors import DTYPES

_OWNED = "_sdp_gradients_in_shards"
"""Attribute of parameters whose gradients a ShardedOptimizer takes; copies have another id."""
LARGE_NBYTES = 64 * 1024
"""Size from which gradients are not copied where only this rank reads them."""
UNKNOWN = StepState()
SOLE_USERS = 3
"""Tensors in the memory of a new gradient that shares it with no other: autograd's, and ours."""


def is_sharded(parameter: Tensor) -> bool:
    """Whether a ShardedOptimizer takes a parameter's gradients."""
    return getattr(parameter, _OWNED, None) == id(parameter)


class GradientBuckets:
    """This rank's gradients in memory that its peers map, and theirs.

    On one node, ranks read each other's gradients where they are: nothing is sent, and large
    gradients that this rank updates are not even copied. Across nodes, a bucket that is full is
    reduced to shards beside the rest of the backward pass.

    Args:
        program: The program's group. Ranks meet there: if another rank is elsewhere in the program,
            it sees two operations that differ, not a slow rank.
        group: For everything else.
        layout: Of the parameters.
        parameters: In the order of the optimizer's.
        names: Of the parameters.
        watched: Names of what the program must change alike on all ranks; None: the parameters.
        owner: What the program calls, for messages.

    Attributes:
        synchronizing: Whether backward passes give their gradients away; otherwise they
            accumulate in ``parameter.grad``.
        placeholders: What is in ``parameter.grad`` after them, by parameter.
    """

    def __init__(
        self,
        program: Group,
        group: Group,
        layout: Layout,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        watched: Sequence[str] | None = None,
        owner: str = "ShardedOptimizer",
    ) -> None:
        self._owner = owner
        self._watched = names if watched is None else watched
        self._program, self._group = program, group
        self._layout, self._parameters, self._names = layout, parameters, names
        self.synchronizing = True
        memories = group.allocate_on_node(layout.nbytes)
        self._everyones = [[bucket.of(each) for each in memories] for bucket in layout.buckets]
        self._buckets = [each[group.local_rank] for each in self._everyones]
        self._reductions: list[Callable[[], list[Work | None]]] = []
        if group.local_size < group.world_size:
            self._reductions = [self._reduction(i) for i in range(len(self._buckets))]
        self._places: dict[int, tuple[int, Bucket, Slot]] = {}
        self._views: dict[int, Tensor] = {}
        self.placeholders: dict[int, GradientInShards] = {}
        self._kept: dict[int, Tensor] = {}
        for i, bucket in enumerate(layout.buckets):
            for slot in bucket.slots:
                view = like(parameters[slot.parameter], self._buckets[i], slot.start)
                self._places[slot.parameter] = i, bucket, slot
                self._views[slot.parameter] = view
                placeholder = view.as_subclass(GradientInShards)
                placeholder.parameter, placeholder.averaged_as = slot.parameter, view.dtype
                self.placeholders[slot.parameter] = placeholder
        for index, view in self._views.items():  # what `_put` never copies needs no memory
            if view.nbytes >= LARGE_NBYTES:
                first, last = self._own_bytes(index)
                _native.give_back_pages(view.data_ptr() + first, last - first)
        self.begin()
        self._hooks: list[Any] = []
        self._accumulate: list[torch.autograd.graph.Node] = []
        for index in self.placeholders:
            parameter: Any = parameters[index]
            expect, take = partial(self._expect, index), partial(self._take, index)
            # Not a hook of the parameter, which torch.autograd.grad() calls, too.
            accumulate = torch.autograd.graph.get_gradient_edge(parameter).node
            self._accumulate.append(accumulate)  # torch makes another one if nobody has it
            self._hooks.append(accumulate.register_prehook(expect))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(take))
            setattr(parameter, _OWNED, id(parameter))

    def write_in_layers(self, model: nn.Module) -> DirectGradients:
        """Have layers write large gradients here, so that they need no other memory."""
        find = {self._parameters[index]: partial(self._free, index) for index in self._views}
        direct = DirectGradients(model, find)
        for index in self._views:
            parameter = self._parameters[index]
            if destination := direct.destinations.get(parameter):
                # Autograd tells the parameter's own hooks nothing of what only layers write.
                direct.hooks.append(destination.on_whole(partial(self._take, index, parameter)))
        return direct

    def _free(self, index: int) -> Tensor | None:
        """The place of a gradient, if this backward pass gives it away."""
        is_free = self.synchronizing and index in self._missing[self._places[index][0]]
        return self._views[index] if is_free else None

    def begin(self) -> None:
        """Expect a gradient of every parameter."""
        self._missing = [
            {slot.parameter for slot in bucket.slots} for bucket in self._layout.buckets
        ]
        self._works: list[list[Work | None]] = []
        self._kept.clear()
        self._adding: set[int] = set()  # parameters that get a further gradient
        self._mistake: RuntimeError | None = None
        self._unused: frozenset[int] | None = None
        self._uneven: frozenset[int] = frozenset()
        self._seen: dict[int, Tensor | None] = {}  # in ``parameter.grad`` as they were averaged

    def _reduction(self, index: int) -> Callable[[], list[Work | None]]:
        """What begins to give each rank its shard of a bucket's averages."""
        group, bucket, elements = self._group, self._layout.buckets[index], self._buckets[index]
        dtype = DTYPES[bucket.dtype]
        whole = Buffer(elements.data_ptr(), bucket.numel, dtype, elements)
        shards = whole.split([last - first for first, last in pairwise(bucket.bounds)])
        if bucket.is_even:
            mine = shards[group.rank]
            return lambda: [group.reduce_scatter(mine, whole, "avg", async_op=True)]
        some = [(rank, shard) for rank, shard in enumerate(shards) if shard.count]
        return lambda: [group.reduce(shard, rank, "avg", async_op=True) for rank, shard in some]

    def _expect(self, index: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Before autograd adds a gradient to ``parameter.grad``; None: there is nothing to add."""
        if gradients[0] is None:
            return
        kept = self.placeholders[index] is self._parameters[index].grad
        if self._unused is not None and not self._have_placeholders():
            self.placeholders[index].averages.drop()  # clipped, and dropped without a step
        if (kept and self._reductions) or self._unused is not None:
            self._group.raise_if_failed()  # in step(), which has left the gradients
            self._mistake = RuntimeError(
                f"{self._program.error_prefix}a second gradient of {self._names[index]} came "
                "before step(), when other ranks had the first. Hint: accumulate gradients of all "
                "but the last backward pass in `with optimizer.no_sync():`; or drop those of the "
                "pass before with zero_grad()."
            )
            raise self._mistake
        if kept:
            self._adding.add(index)
            self._parameters[index].grad = None

    def _take(self, index: int, parameter: Tensor) -> None:
        """After a parameter's gradient is whole."""
        gradient = parameter.grad
        if gradient is None or gradient is self.placeholders[index]:
            return  # this backward pass has not changed it
        if gradient is self._views[index]:
            self._give(index, None)
            self._reduce_full()
        elif index in self._adding:
            self._adding.remove(index)
            before = self._kept.get(index, self._views[index])
            self._put(index, _plain(gradient) + before, is_new=True)
        elif self.synchronizing:
            self._give(index, gradient, is_new=True)
            self._reduce_full()

    def _give(self, index: int, gradient: Tensor | None, is_new: bool = False) -> None:
        """Take a gradient, also in the place of one that was dropped; None: it is in its place."""
        number = self._places[index][0]
        if index not in self._missing[number] and number < len(self._works):
            raise RuntimeError(
                f"{self._program.error_prefix}the gradient of {self._names[index]} was dropped or "
                "replaced after its backward pass, when other nodes had received it. Hint: call "
                "the optimizer's zero_grad()."
            )
        if gradient is None:
            self._parameters[index].grad = self.placeholders[index]
        else:
            self._put(index, gradient, is_new)
        self._missing[number].discard(index)

    def _put(self, index: int, gradient: Tensor, is_new: bool) -> None:
        """Copy what other ranks read, and keep what this rank averages, if it is large.

        Args:
            index: Of the parameter.
            gradient: Its gradient.
            is_new: Whether autograd has just made it. Then it may be kept, and its memory gets the
                average, unless another tensor is there, too.
        """
        view = self._views[index]
        if self._parameters[index].dtype is not view.dtype:
            raise RuntimeError(
                f"{self._program.error_prefix}{self._names[index]} has become "
                f"{self._parameters[index].dtype}. Hint: convert the model before the "
                f"{self._owner} is made."
            )
        gradient = _plain(gradient)
        self._kept.pop(index, None)
        alike = gradient.dtype is view.dtype and gradient.stride() == view.stride()
        if gradient.nbytes < LARGE_NBYTES or not alike:
            view.copy_(gradient)
        else:
            users = internals.storage_users(gradient.untyped_storage()._cdata)
            can_keep = is_new and users <= SOLE_USERS
            first, last = self._own_bytes(index) if can_keep else (0, 0)
            if first < last:
                self._kept[index] = gradient
            for start, stop in (0, first), (last, gradient.nbytes):
                _copy(view, gradient, start, stop)
        self._parameters[index].grad = self.placeholders[index]

    def _own_bytes(self, index: int) -> tuple[int, int]:
        """The first byte of a gradient that only this rank reads, and the one after the last."""
        if self._reductions:
            return 0, 0
        _, bucket, slot = self._places[index]
        shard = bucket.shard(self._group.rank)
        start, stop = (min(max(at, slot.start), slot.stop) - slot.start for at in shard)
        return start * bucket.dtype.itemsize, stop * bucket.dtype.itemsize

    def _reduce_full(self) -> None:
        """Begin to reduce the buckets that are full, in their order, which all ranks have."""
        while len(self._works) < len(self._reductions) and not self._missing[len(self._works)]:
            self._works.append(self._reductions[len(self._works)]())

    def are_dropped(self) -> bool:
        """Whether the program has dropped or replaced all gradients since `finish`."""
        seen = self._seen.values()
        return any(gradient is not None for gradient in seen) and not self._have_placeholders()

    def _have_placeholders(self) -> bool:
        return any(self._parameters[i].grad is each for i, each in self.placeholders.items())

    def finish(
        self, call: Call, state: StepState = UNKNOWN, new: Mapping[int, int] | None = None
    ) -> frozenset[int]:
        """Wait until all ranks have their gradients; a collective.

        Args:
            call: What this rank does with them.
            state: What must be equal on all ranks.
            new: Digests of the watched that the program has changed; None: too early to tell.

        Returns:
            The parameters of which no rank has a gradient.

        Raises:
            RuntimeError: Gradients are not whole, or the ranks do different things to them; on
                all ranks.
        """
        if self._mistake is not None:
            raise self._mistake
        replaced, begins = False, call in (Call.CHANGE, Call.STEP)
        if call is Call.STEP_AFTER_CHANGES:
            seen = self._seen
            replaced = any(self._parameters[i].grad is not each for i, each in seen.items())
        flags = flags_of(call, replaced, state)
        with naming(call.value, self._owner):
            known = torch.zeros(2, len(self._parameters), dtype=torch.uint8)
            if begins:
                self._give_all(*known)
            known, mistake = meet(self._program, known, flags, state.settings, self._watched, new)
        if mistake:
            error = RuntimeError(f"{self._program.error_prefix}{mistake}")
            if begins:
                self._mistake = error  # until these gradients are dropped
            raise error
        if begins:
            ranks_have, are_irregular = known
            self._unused = _indices(ranks_have == 0)
            self._uneven = _indices(are_irregular) - self._unused
        assert self._unused is not None
        return self._unused

    def _give_all(self, has: Tensor, is_irregular: Tensor) -> None:
        """Take what the last backward pass has not given, and wait for reductions.

        Args:
            has: Is set for each parameter of which this rank has a gradient.
            is_irregular: Is set where that is not the last pass's.
        """
        has.fill_(1)
        for index, placeholder in self.placeholders.items():
            parameter = self._parameters[index]
            gradient = parameter.grad
            if gradient is None:
                has[index], is_irregular[index] = 0, 1
                self._give(index, parameter.new_zeros(()).expand_as(parameter))
                parameter.grad = None
            elif gradient is not placeholder:
                is_irregular[index] = 1
                self._give(index, gradient)  # accumulated by earlier passes, or the user's
        self._reduce_full()
        self._seen = {index: self._parameters[index].grad for index in self.placeholders}
        _wait(self._works)

    @property
    def unused(self) -> frozenset[int]:
        """The parameters of which, at `finish`, no rank had a gradient."""
        return self._unused or frozenset()

    @property
    def uneven(self) -> frozenset[int]:
        """The parameters of which, at `finish`, only some ranks had the last pass's gradient."""
        return self._uneven

    def raise_if_uneven(self) -> None:
        """Refuse what looks at ``parameter.grad`` if the ranks see different gradients there.

        Raises:
            RuntimeError: Only some ranks used a parameter in the last backward pass; on all ranks.
        """
        if self._uneven:
            names = ", ".join(self._names[index] for index in sorted(self._uneven)[:5])
            raise RuntimeError(
                f"{self._program.error_prefix}gradients of {names} came from some "
                "ranks only, or not from the last backward pass, so that torch's functions would "
                "see other gradients on each rank. Hint: clip by the optimizer's clip_grad_norm_() "
                "or clip_grad_value_()."
            )

    def average(self, pieces: Iterable[Piece]) -> list[Tensor]:
        """Average the gradients of some of this rank's pieces over all ranks; after `finish`.

        Uses as many threads as torch's operations do.

        Returns:
            The elements of each piece, until `begin`.
        """
        if self._reductions:
            return [self._of(piece) for piece in pieces]
        if torch.get_num_threads() == 1:
            return [self._average(piece) for piece in pieces]
        with ThreadPoolExecutor(torch.get_num_threads(), "sdp-average") as threads:
            return list(threads.map(self._average, pieces))

    def _average(self, piece: Piece) -> Tensor:
        mine = self._of(piece)
        offset = piece.start * mine.itemsize
        sources = [each.data_ptr() + offset for each in self._everyones[piece.bucket]]
        sources[self._group.local_rank] = target = mine.data_ptr()
        dtype, average = DTYPES[mine.dtype].native, _native.ReduceOp.avg
        _native.combine(dtype, average, sources, target, mine.numel(), 0, False)
        return mine

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
        for hook in self._hooks:
            hook.remove()
        for index in self.placeholders:
            self._parameters[index].__dict__.pop(_OWNED, None)

    def drop(self) -> None:
        """Drop the gradients that were given to the ranks, and expect new ones."""
        for index, placeholder in self.placeholders.items():
            if self._parameters[index].grad is placeholder:
                self._parameters[index].grad = None
        works = self._works
        self.begin()
        with suppress(SdpError):  # of reductions that have failed: every later step raises it
            _wait(works)


def _copy(target: Tensor, source: Tensor, start: int, stop: int) -> None:
    """Copy a range of bytes, in as many threads as torch's operations have."""
    if torch.get_num_threads() == 1:
        _native.streaming_copy(target.data_ptr() + start, source.data_ptr() + start, stop - start)
        return
    target, source = (
        tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)[start:stop]
        for tensor in (target, source)
    )
    target.copy_(source)


def _plain(gradient: Tensor) -> Tensor:
    """A dense gradient, whose memory has its values: not their conjugates or negatives."""
    return gradient.detach().to_dense().resolve_conj().resolve_neg()


def _wait(works: Iterable[Iterable[Work | None]]) -> None:
    for work in chain.from_iterable(works):
        if work is not None:
            work.wait()


def _indices(flags: Tensor) -> frozenset[int]:
    return frozenset(flags.nonzero().flatten().tolist())
