"""The group: collectives among the ranks of a job, for any framework or none."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np

from . import _native
from .bring_up import Membership, bring_up, n_exchanges
from .buffers import Buffer, BufferLike, as_buffer
from .config import Config
from .dtypes import DType, ReduceOp
from .errors import SdpError, is_news, name_error
from .forming import Forming
from .internode.choice import for_environment, mpi_is_there
from .internode.mpi import MpiNetwork
from .internode.spanning_group import SpanningGroup
from .internode.wire import Network
from .open_groups import OpenGroup, open_groups
from .rank_names import DEFAULT, RankNames
from .rendezvous import Exchange, StoreExchange
from .store import Store
from .topology import Topology
from .work import Work

_NO_REDUCTION = ReduceOp.SUM
_OPERATIONS = tuple(op.name for op in _native.Op)


class Group:
    """A set of ranks that communicate; this process is one of them.

    All ranks issue the same collectives in the same order; ``send`` and ``recv`` are apart from
    that order. A blocking call on an idle group runs in the calling thread; an asynchronous one
    (``async_op=True``) goes to the group's engine thread and returns a ``Work``, and its buffers
    must not be touched until that is done. Results are bitwise equal on all ranks and from run to
    run.

        with Group.from_env() as group:      # an exception in the block reaches the other ranks
            group.all_reduce(array, "avg")

    Attributes:
        rank: This process's rank in the group.
        world_size: Number of ranks.
        nodes: Which ranks share a node, as memory was found to be shared.
        name: For messages.
        job_ranks: What messages call its ranks: their numbers in the job; None: not known.
        timeout_s: Time-out of operations that give none, in seconds; may be changed.

    Buffers are contiguous CPU memory: the buffer protocol, ``__array_interface__``,
    ``__dlpack__``, or a ``Buffer``. What a rank keeps may be in its place in the output from the
    beginning; another input that lies in the output's memory is copied first. Every call takes
    ``timeout_s`` (seconds; None: the group's).

    Raises, from every operation:
        ValueError, TypeError: The call is wrong; nothing was sent.
        CollectiveMismatchError: The ranks called different things; nothing was reduced.
        CollectiveTimeoutError: Ranks did not come in time.
        PeerLostError: A rank's process has ended.
        SdpError: The group is closed, or failed before: the first cause, again.
    """

    def __init__(
        self,
        membership: Membership,
        timeout_s: float,
        config: Config,
        network: Network | None = None,
    ) -> None:
        """Use ``from_env``, ``from_store`` or ``new_group``."""
        self.rank = membership.rank
        self.nodes = membership.nodes
        self.world_size = self.nodes.world_size
        self.name = membership.name
        self.job_ranks = membership.job_ranks
        self.timeout_s = timeout_s
        self._config = config
        self._network = network
        self._closed = False
        # What asynchronous operations may still read or write. The lock is re-entrant: a signal
        # handler or a finalizer may issue operations too.
        self._in_flight: deque[tuple[_native.Work, list[Buffer]]] = deque()
        self._in_flight_lock = threading.RLock()
        self._native = native = membership.native
        # Takes an operation's memory when that has ended: a network may not be done with it.
        self._release: Callable[[list[Buffer]], None] = (
            native.let_go if isinstance(native, SpanningGroup) else list.clear
        )
        here = native.native if isinstance(native, SpanningGroup) else native
        self._open = OpenGroup(self.name, membership.info, here, self.local_size, config)
        self._open_ref = weakref.ref(self._open)
        open_groups.add(self._open)

    @classmethod
    def from_env(
        cls,
        *,
        name: str = DEFAULT,
        timeout_s: float | None = None,
        wire_dtype: DType | str | None = None,
    ) -> Group:
        """Meet the ranks of this job; the launcher's variables say who they are.

        Ranks on several nodes need MPI.

        Args:
            name: Groups that are made at the same time need different names.
            timeout_s: Time-out of the rendezvous and of every operation; None: ``SDP_TIMEOUT_S``,
                300 s by default.
            wire_dtype: ``bfloat16`` or ``float16``: how float32 values, and partial sums of 16-bit
                ones, travel between nodes when they are reduced; None: ``SDP_WIRE_DTYPE``, by
                default as they are.
        """
        topology = Topology.from_env()
        config = Config.from_env().on_the_wire(wire_dtype)
        exchange, network = for_environment(topology, name, config)
        rank, size = topology.rank, topology.world_size
        return cls._meet(rank, size, exchange, name, timeout_s, config, network)

    @classmethod
    def from_store(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        *,
        name: str = DEFAULT,
        timeout_s: float | None = None,
        network: Network | None = None,
        wire_dtype: DType | str | None = None,
        job_ranks: Sequence[int] | None = None,
    ) -> Group:
        """Meet through a framework's key-value store.

        Args:
            store: Shared by all ranks; ``name`` must not have been used on it before.
            rank: This rank.
            world_size: Number of ranks.
            name: Prefix of the keys.
            timeout_s: As for ``from_env``.
            network: Between nodes; None: MPI, if mpirun started the ranks.
            wire_dtype: As for ``from_env``.
            job_ranks: What messages call the ranks; None: as the launcher's variables number all.
        """
        known = None if job_ranks is None else tuple(job_ranks)
        exchange = StoreExchange(store, f"sdp/{name}", rank, RankNames(name, world_size, known))
        config = Config.from_env().on_the_wire(wire_dtype)
        if network is None and mpi_is_there():
            network = MpiNetwork()
        return cls._meet(rank, world_size, exchange, name, timeout_s, config, network, known)

    @classmethod
    def _meet(
        cls,
        rank: int,
        world_size: int,
        exchange: Exchange,
        name: str,
        timeout_s: float | None,
        config: Config,
        network: Network | None,
        job_ranks: tuple[int, ...] | None = None,
    ) -> Group:
        if timeout_s is None:
            timeout_s = config.wait_s
        forming = Forming(name, world_size, time.monotonic_ns(), job_ranks)
        with open_groups.forming(forming, config):
            membership = bring_up(
                rank, world_size, exchange, name, timeout_s, config, network, job_ranks
            )
        return cls(membership, timeout_s, config, network)

    @property
    def local_rank(self) -> int:
        """Rank among the ranks of this node."""
        return self.nodes.index_of(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return len(self.nodes.members[self.node_rank])

    @property
    def node_rank(self) -> int:
        """Index of this node, in the order of the nodes' lowest ranks."""
        return self.nodes.node_of(self.rank)

    # ---- collectives ---------------------------------------------------------------------------

    def all_reduce(
        self,
        buffer: BufferLike,
        op: ReduceOp | str = "sum",
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Combine all ranks' buffers, in place, on all ranks."""
        target = as_buffer(buffer)
        reduction = op if type(op) is ReduceOp else ReduceOp.parse(op)
        if async_op or reduction.factor != 1.0:
            return self._issue(
                _native.Op.all_reduce, (), (target,), reduction, -1, async_op, timeout_s
            )
        if self._in_flight:
            self._let_go()
        try:
            self._native.all_reduce(
                target.ptr,
                target.count,
                target.dtype.native,
                reduction.native,
                self.timeout_s if timeout_s is None else timeout_s,
            )
        except BaseException:
            self._release([target])
            open_groups.operation_failed()
            raise
        return None

    def reduce(
        self,
        buffer: BufferLike,
        root: int,
        op: ReduceOp | str = "sum",
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Combine all ranks' buffers into the root's; the others' stay as they are."""
        target = as_buffer(buffer)
        reduction = ReduceOp.parse(op)
        return self._issue(_native.Op.reduce, (), (target,), reduction, root, async_op, timeout_s)

    def broadcast(
        self,
        buffer: BufferLike,
        root: int,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Copy the root's buffer into all others."""
        target = as_buffer(buffer, writable=self.rank != root)
        return self._issue(
            _native.Op.broadcast, (), (target,), _NO_REDUCTION, root, async_op, timeout_s
        )

    def all_gather(
        self,
        output: BufferLike,
        input: BufferLike,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Collect all ranks' inputs, in rank order, in one output ``world_size`` times as large."""
        source = as_buffer(input, writable=False)
        target = as_buffer(output)
        self._check_size("all_gather: the output", target, self.world_size * source.count)
        parts = target.split([source.count] * self.world_size)
        return self._issue(
            _native.Op.all_gather, (source,), parts, _NO_REDUCTION, -1, async_op, timeout_s
        )

    def all_gather_uneven(
        self,
        outputs: Sequence[BufferLike],
        input: BufferLike,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Collect all ranks' inputs, one output per rank; sizes may differ between ranks."""
        source = as_buffer(input, writable=False)
        targets = [as_buffer(output) for output in outputs]
        return self._issue(
            _native.Op.all_gather, (source,), targets, _NO_REDUCTION, -1, async_op, timeout_s
        )

    def reduce_scatter(
        self,
        output: BufferLike,
        input: BufferLike | Sequence[Buffer],
        op: ReduceOp | str = "sum",
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Combine all ranks' inputs and keep this rank's part.

        Args:
            output: This rank's part of the result.
            input: ``world_size`` times the output's size in rank order, or a list of ``Buffer``,
                one per rank, each of the output's size.
            op: The reduction.
            async_op: See the class.
            timeout_s: See the class.
        """
        target = as_buffer(output)
        if isinstance(input, (list, tuple)):
            sources = [as_buffer(part, writable=False) for part in input]
        else:
            whole = as_buffer(input, writable=False)
            self._check_size("reduce_scatter: the input", whole, self.world_size * target.count)
            sources = whole.split([target.count] * self.world_size)
        reduction = ReduceOp.parse(op)
        return self._issue(
            _native.Op.reduce_scatter, sources, (target,), reduction, -1, async_op, timeout_s
        )

    def gather(
        self,
        outputs: Sequence[BufferLike] | None,
        input: BufferLike,
        root: int,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Collect all ranks' inputs at the root: one output per rank there, None elsewhere."""
        source = as_buffer(input, writable=False)
        targets = [as_buffer(output) for output in outputs or ()]
        return self._issue(
            _native.Op.gather, (source,), targets, _NO_REDUCTION, root, async_op, timeout_s
        )

    def scatter(
        self,
        output: BufferLike,
        inputs: Sequence[BufferLike] | None,
        root: int,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Hand out the root's inputs, one per rank (None elsewhere)."""
        target = as_buffer(output)
        sources = [as_buffer(part, writable=False) for part in inputs or ()]
        return self._issue(
            _native.Op.scatter, sources, (target,), _NO_REDUCTION, root, async_op, timeout_s
        )

    def all_to_all(
        self,
        output: BufferLike,
        input: BufferLike,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Send a part of the input to each rank and receive a part of each.

        Args:
            output: Receives the ranks' parts, in rank order.
            input: Holds the parts for the ranks, in rank order.
            output_splits: Elements from each rank; None: equal parts.
            input_splits: Elements for each rank; None: equal parts.
            async_op: See the class.
            timeout_s: See the class.
        """
        targets = self._parts("all_to_all: the output", as_buffer(output), output_splits)
        whole = as_buffer(input, writable=False)
        sources = self._parts("all_to_all: the input", whole, input_splits)
        return self._issue(
            _native.Op.all_to_all, sources, targets, _NO_REDUCTION, -1, async_op, timeout_s
        )

    def all_to_all_pieces(
        self,
        outputs: Sequence[BufferLike],
        inputs: Sequence[BufferLike],
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """``all_to_all`` with one buffer per rank on each side."""
        targets = [as_buffer(output) for output in outputs]
        sources = [as_buffer(part, writable=False) for part in inputs]
        return self._issue(
            _native.Op.all_to_all, sources, targets, _NO_REDUCTION, -1, async_op, timeout_s
        )

    def barrier(self, *, async_op: bool = False, timeout_s: float | None = None) -> Work | None:
        """Wait until all ranks are here."""
        return self._issue(_native.Op.barrier, (), (), _NO_REDUCTION, -1, async_op, timeout_s)

    # ---- point to point ------------------------------------------------------------------------

    def send(
        self,
        buffer: BufferLike,
        dst: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Send to one rank. Done when the receiver, or the channel to it, has taken the bytes."""
        source = as_buffer(buffer, writable=False)
        _check_tag("send", tag)
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        native = self._native.send(source.ptr, source.count, source.dtype.native, dst, tag, limit_s)
        return self._follow(native, "send", (source,), async_op)

    def recv(
        self,
        buffer: BufferLike,
        src: int | None,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work:
        """Receive from one rank, or from any (``src=None``); ``Work.source_rank`` tells which.

        Messages of one sender match in order, by tag.
        """
        target = as_buffer(buffer)
        _check_tag("recv", tag)
        if src is not None and src < 0:  # to the native core, -1 is any rank
            raise ValueError(
                f"recv: source {src} is not another rank of this group of {self.world_size}"
            )
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        peer = -1 if src is None else src
        native = self._native.recv(
            target.ptr, target.count, target.dtype.native, peer, tag, limit_s
        )
        work = self._track(native, "recv", (target,))
        if not async_op:
            work.wait()
        return work

    # ---- memory --------------------------------------------------------------------------------

    def register(self, ptr: int, nbytes: int, fd: int, offset: int = 0) -> int:
        """Offer memory to the peers, so that ``all_reduce`` on it (or a part) copies nothing.

        Args:
            ptr: Start of a shared mapping (``MAP_SHARED``) of the file.
            nbytes: Its size.
            fd: The file; duplicated.
            offset: Where in the file the mapping starts, a multiple of the page size.

        Returns:
            The id for ``unregister``. Ids are never used twice. Peers keep the memory mapped until
            they hear of ``unregister`` in a later operation.
        """
        return self._native.add_region(ptr, nbytes, fd, offset)

    def unregister(self, region: int) -> None:
        """Take memory back; must come before its address can be used for anything else."""
        self._native.remove_region(region)

    def allocate(self, nbytes: int) -> memoryview:
        """Zero-filled registered memory, given back when nothing refers to it any more."""
        if not 0 < nbytes < 2**63:
            raise ValueError(f"allocate: cannot allocate {nbytes} bytes")
        address, region = self._native.allocate(nbytes)
        array = (ctypes.c_char * nbytes).from_address(address)
        # Holds the group's native object, in which the memory lives; at exit the process frees all.
        weakref.finalize(array, self._native.release, region).atexit = False
        return memoryview(array).cast("B")

    def explain(self, op: str, nbytes: int, registered: bool = False) -> str:
        """Say which path an operation would take, and why.

        Args:
            op: Name of the operation, such as ``"all_reduce"``.
            nbytes: Bytes that each rank shows to the others.
            registered: Whether all ranks' buffers are registered.
        """
        if op not in _OPERATIONS:
            raise ValueError(f"there is no operation {op!r}; there are {', '.join(_OPERATIONS)}")
        if isinstance(self._native, SpanningGroup):
            return self._native.explain(op, nbytes)
        return _native.explain(_native.Op[op], nbytes, registered)

    @property
    def issued(self) -> int:
        """Collectives that this rank has called so far; the next one's number is one more."""
        return self._native.issued

    @property
    def last_path(self) -> str:
        """Path that the last collective took: ``inline``, ``staged``, ``zero-copy`` or ``none``."""
        return self._native.last_path

    # ---- life ----------------------------------------------------------------------------------

    def new_group(
        self, ranks: Sequence[int], *, name: str | None = None, timeout_s: float | None = None
    ) -> Group | None:
        """Make a group of some of this group's ranks; all ranks of this group must call it.

        Args:
            ranks: Members, by their rank here; their order gives the ranks there.
            name: For messages.
            timeout_s: None: this group's.

        Returns:
            The new group; None to ranks that are not members.
        """
        members = list(ranks)
        if len(set(members)) != len(members) or not set(members) <= set(range(self.world_size)):
            raise ValueError(
                f"new_group: {members} are not distinct ranks of a group of {self.world_size}"
            )
        label = name or f"{self.name}/{','.join(map(str, members))}"
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if self.rank not in members or len(members) == 1:  # takes part in what all call
            for _ in range(n_exchanges(len(set(map(self.nodes.node_of, members))))):
                self.exchange(b"", limit_s)
        if self.rank not in members:
            return None

        def exchange(blob: bytes, deadline_s: float) -> list[bytes]:
            blobs = self.exchange(blob, deadline_s)
            return [blobs[member] for member in members]

        known = self.job_ranks and tuple(self.job_ranks[member] for member in members)
        rank, size = members.index(self.rank), len(members)
        return self._meet(rank, size, exchange, label, limit_s, self._config, self._network, known)

    def exchange(self, blob: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Give every rank the bytes of all ranks, of any lengths, in rank order."""
        lengths = np.zeros(self.world_size, np.int64)
        self.all_gather(lengths, np.array([len(blob)], np.int64), timeout_s=timeout_s)
        blobs = [bytearray(length) for length in lengths]
        self.all_gather_uneven(blobs, blob, timeout_s=timeout_s)
        return [bytes(received) for received in blobs]

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called here."""
        return self._closed

    @property
    def failure(self) -> BaseException | None:
        """Why every operation would raise now; None while the group works."""
        return self._native.failure()

    def raise_if_failed(self, cause: BaseException | None = None) -> None:
        """Raise what every operation would raise now.

        Args:
            cause: What a framework has made of that failure; chained to it.
        """
        try:
            self._native.raise_if_failed()
        except SdpError as failure:
            raise failure from cause

    def describe(self, text: str) -> None:
        """Add words to the group's name, as messages and the flight recorder show it."""
        self._open.describe(text)

    @property
    def head(self) -> str:
        """How messages about this rank's operations begin: ``"[rank 3/8] "``."""
        return self._open.native.head

    def number(self, rank: int) -> int:
        """What messages call a rank of the group: its number in the job, if that is known."""
        return self.nodes.number(rank)

    def gone(self) -> list[int]:
        """The ranks of this rank's node that have closed the group, failed in it, or ended."""
        return self._native.gone()

    def ended(self) -> list[int]:
        """The ranks of this rank's node whose processes have ended."""
        return self._native.ended()

    def abort(self, reason: str | BaseException) -> None:
        """Fail the group here and, at once, on all other ranks, which are told why."""
        text = reason if isinstance(reason, str) else name_error(reason)
        self._native.abort(text.encode(errors="backslashreplace").decode())

    def close(self) -> None:
        """Leave the group: pending operations fail, threads end. Safe to call again.

        Memory and descriptors go with the object itself.
        """
        self._closed = True
        self._leave()

    def _leave(self) -> None:
        with open_groups.closing(self._open):
            self._native.close()
            self._let_all_go()

    def __del__(self) -> None:
        # Before anything that operations in flight write can be freed, in whatever order.
        native = getattr(self, "_native", None)
        if native is None:
            return
        try:
            self._leave()
        except Exception:  # at the interpreter's end no module may be left to trace with
            native.close()
            self._let_all_go()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "failed" if self._native.failed else "open"
        return f"<Group {self.name!r}: rank {self.rank}/{self.world_size}, {state}>"

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and is_news(error):
            self.abort(error)  # the other ranks may be waiting for this one
        self.close()

    # ---- issuing -------------------------------------------------------------------------------

    def _issue(
        self,
        op: _native.Op,
        sends: Sequence[Buffer],
        recvs: Sequence[Buffer],
        reduction: ReduceOp,
        root: int,
        async_op: bool,
        timeout_s: float | None,
    ) -> Work | None:
        dtype = _common_dtype(op, sends, recvs)
        inputs, outputs = _pieces(sends), _pieces(recvs)
        if inputs and (wrong := _native.misplaced(inputs, outputs, self.rank, dtype.itemsize)):
            sends = [part.copied() if i in wrong else part for i, part in enumerate(sends)]
            inputs = _pieces(sends)
        arguments = (
            op,
            dtype.native,
            reduction.native,
            reduction.factor,
            root,
            inputs,
            outputs,
            self.timeout_s if timeout_s is None else timeout_s,
        )
        if not async_op:
            if self._in_flight:
                self._let_go()
            try:
                self._native.run(*arguments)
            except BaseException:
                self._release([*sends, *recvs])
                open_groups.operation_failed()
                raise
            return None
        return self._track(self._native.submit(*arguments), op.name, (*sends, *recvs))

    def _track(self, native: _native.Work, what: str, buffers: tuple[Buffer, ...]) -> Work:
        """Hold an operation's memory until it is done, whatever the caller does with the handle."""
        held = list(buffers)
        self._let_go()
        with self._in_flight_lock:
            self._in_flight.append((native, held))
        return Work(native, what, held, self._release, self._open_ref)

    def _let_go(self) -> None:
        """Look at operations in flight, in turns, until two have been met that are not done."""
        done: list[list[Buffer]] = []
        # Another time will do; and in a forked child it may be held for ever.
        if not self._in_flight_lock.acquire(blocking=False):
            return
        try:
            pending: list[tuple[_native.Work, list[Buffer]]] = []
            while self._in_flight and len(pending) < 2:
                native, held = entry = self._in_flight.popleft()
                done.append(held) if native.completed() else pending.append(entry)
            self._in_flight.extend(pending)
        finally:
            self._in_flight_lock.release()
        for held in done:  # outside of the lock: finalizers are not ours
            self._release(held)

    def _let_all_go(self) -> None:
        """Give up the memory of all operations; the group is closed."""
        while self._in_flight:  # perhaps at the interpreter's end, when no module is left
            self._release(self._in_flight.popleft()[1])

    def _follow(
        self, native: _native.Work, what: str, buffers: tuple[Buffer, ...], async_op: bool
    ) -> Work | None:
        work = self._track(native, what, buffers)
        if async_op:
            return work
        work.wait()
        return None

    def _check_size(self, what: str, buffer: Buffer, count: int) -> None:
        if buffer.count != count:
            raise ValueError(
                f"{what} has {buffer.count} elements, but {count} are needed in a group of "
                f"{self.world_size}"
            )

    def _parts(self, what: str, whole: Buffer, splits: Sequence[int] | None) -> list[Buffer]:
        if splits is None:
            if whole.count % self.world_size:
                raise ValueError(
                    f"{what} has {whole.count} elements, which {self.world_size} ranks cannot "
                    "share equally. Hint: give the splits."
                )
            splits = [whole.count // self.world_size] * self.world_size
        if len(splits) != self.world_size or min(splits) < 0 or sum(splits) != whole.count:
            raise ValueError(
                f"{what} has {whole.count} elements, but its splits are {list(splits)} for "
                f"{self.world_size} ranks"
            )
        return whole.split(splits)


def _pieces(buffers: Sequence[Buffer]) -> list[tuple[int, int]]:
    """Addresses and counts, as the native core takes them."""
    return [(buffer.ptr, buffer.count) for buffer in buffers]


def _check_tag(what: str, tag: int) -> None:
    if not 0 <= tag < 2**32:
        raise ValueError(f"{what}: tag {tag} is not between 0 and 2^32 - 1")


def _common_dtype(op: _native.Op, sends: Sequence[Buffer], recvs: Sequence[Buffer]) -> DType:
    found = {part.dtype for part in (*sends, *recvs)}
    if len(found) > 1:
        names = ", ".join(sorted(dtype.value for dtype in found))
        raise TypeError(f"{op.name}: all buffers must have one element type, got {names}")
    return found.pop() if found else DType.uint8
