"""`Group`: collectives among the ranks of a job, with or without a framework."""

from __future__ import annotations

import math
import struct
import time
import weakref
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from . import _native
from .config import MAX_TIMEOUT_S, Config
from .counters import Counters
from .dtypes import DType
from .errors import SdpError, is_news, name_error
from .group_creation import Membership, bring_up, n_exchanges
from .in_flight import Issuer
from .internode.mpi import MpiNetwork
from .internode.network_choice import for_environment, mpi_is_there
from .internode.transport import Network
from .open_groups import OpenGroup, open_groups
from .rank_info import Forming
from .rank_names import DEFAULT, RankNames
from .registered_memory import RegisteredMemory
from .rendezvous import Exchange, StoreExchange
from .rendezvous.store_exchange import Store
from .topology import Topology
from .wire_dtype import WireDType

_OPERATIONS = tuple(op.name for op in _native.Op)
_SHORT_NBYTES = 120
_SHORT = struct.Struct(f"<q{_SHORT_NBYTES}s")
"""The length of a blob, and its first bytes."""


class Group(RegisteredMemory):
    """A set of ranks that communicate; this process is one of them.

    All ranks issue the same collectives in the same order; ``send`` and ``recv`` are independent of
    that order. A blocking call on an idle group runs in the calling thread. An asynchronous call
    (``async_op=True``) goes to the group's engine thread and returns a ``Work``; its buffers must
    not be accessed until the ``Work`` is done. Results are bitwise equal on all ranks and from run
    to run.

    ::

        with Group.from_env() as group:      # an exception in the block reaches the other ranks
            group.all_reduce(array, "avg")

    Attributes:
        rank: This process's rank in the group.
        world_size: Number of ranks.
        nodes: Which ranks share a node, as memory was found to be shared.
        name: For messages.
        issuer: Takes the group's operations; for other modules of the core.

    Buffers are contiguous CPU memory: the buffer protocol, ``__array_interface__``,
    ``__dlpack__``, or a ``Buffer``. The part that a rank keeps may already be at its place in the
    output; any other input in the output's memory is copied first. Every call takes ``timeout_s``
    (seconds; None: the group's), and raises the errors below.

    Raises:
        ValueError: The call is invalid; nothing was sent.
        TypeError: The same.
        CollectiveMismatchError: The ranks called different operations; nothing was reduced.
        CollectiveTimeoutError: Ranks did not arrive in time.
        PeerLostError: A rank's process has ended.
        SdpError: The group is closed, or failed before; then it repeats the first cause.
    """

    def __init__(
        self,
        membership: Membership,
        timeout_s: float,
        config: Config,
        network: Network | None = None,
    ) -> None:
        """Use ``from_env``, ``from_store`` or ``new_group``."""
        nodes, info, local = membership.nodes, membership.info, membership.node
        self.name = info.name
        self._config = config
        self._network = network
        self._closed = False
        local_size = len(nodes.members[nodes.node_of(info.rank)])
        self._open = OpenGroup(info, local, local_size, config)
        issuer = Issuer(membership, timeout_s, weakref.ref(self._open))
        super().__init__(issuer, info.rank, nodes)
        open_groups.add(self._open)

    @classmethod
    def from_env(
        cls,
        *,
        name: str = DEFAULT,
        timeout_s: float | None = None,
        wire_dtype: DType | str | None = None,
    ) -> Group:
        """Make the group of all ranks of this job, according to the launcher's variables.

        Ranks on several nodes need MPI.

        Args:
            name: The group's name; groups that are made concurrently need different names.
            timeout_s: Time-out of the rendezvous and of every operation; None: ``SDP_TIMEOUT_S``,
                300 s by default.
            wire_dtype: ``"bf16"``, ``"fp16"``, ``"int8"``, ``"fp8"`` or ``"int4"``: how reductions
                send float32 values between nodes. docs/slow-networks.md has the errors, and the
                options, such as ``"int8 stochastic=7 feedback"``. None: ``SDP_WIRE_DTYPE``, by
                default unchanged.
        """
        topology = Topology.from_env()
        config = Config.from_env().on_the_wire(wire_dtype)
        exchange, network = for_environment(topology, name, config)
        names = RankNames(name, topology.world_size)
        return cls.from_exchange(exchange, topology.rank, names, timeout_s, network, config)

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
    ) -> Group:
        """Make a group through a framework's key-value store.

        Args:
            store: Shared by all ranks; ``name`` must not have been used on it before.
            rank: This rank.
            world_size: Number of ranks.
            name: Prefix of the keys.
            timeout_s: As for ``from_env``.
            network: The network between nodes; None: MPI, if mpirun started the ranks.
            wire_dtype: As for ``from_env``.
        """
        config = Config.from_env().on_the_wire(wire_dtype)
        if network is None and mpi_is_there():
            network = MpiNetwork()
        names = RankNames(name, world_size)
        return cls.from_names(store, rank, names, timeout_s, network, config)

    @classmethod
    def from_names(
        cls,
        store: Store,
        rank: int,
        names: RankNames,
        timeout_s: float | None,
        network: Network | None,
        config: Config,
    ) -> Group:
        """``from_store`` for a framework that numbers the job's ranks itself.

        Without global ranks in the names, the launcher's variables have them. Without a network
        there is one node.
        """
        exchange = StoreExchange(store, f"sdp/{names.group}", rank, names)
        return cls.from_exchange(exchange, rank, names, timeout_s, network, config)

    @classmethod
    def from_exchange(
        cls,
        exchange: Exchange,
        rank: int,
        names: RankNames,
        timeout_s: float | None,
        network: Network | None,
        config: Config,
    ) -> Group:
        """Make a group of ranks that can exchange blobs. Without a network there is one node."""
        if timeout_s is None:
            timeout_s = config.wait_s
        timeout_s = float(timeout_s)
        if not 0 < timeout_s < math.inf:  # nan too
            raise ValueError(
                f"timeout_s must be positive and finite, not {timeout_s}. Hint: pass seconds, such "
                "as 300, or none for SDP_TIMEOUT_S."
            )
        timeout_s = min(timeout_s, MAX_TIMEOUT_S)
        with open_groups.forming(Forming(names, time.monotonic_ns()), config):
            membership = bring_up(rank, names, exchange, timeout_s, config, network)
        return cls(membership, timeout_s, config, network)

    @property
    def global_ranks(self) -> tuple[int, ...] | None:
        """The members' ranks in the job, by which messages call them; None: not known."""
        return self.nodes.global_ranks

    @property
    def wire_dtype(self) -> WireDType | None:
        """How float32 values travel between nodes; None: unchanged, or there is one node."""
        return WireDType.parse(self._config.wire_dtype) if self.nodes.count > 1 else None

    def explain(self, op: str, nbytes: int, registered: bool = False) -> str:
        """Describe the path that an operation would take, and the reason.

        Args:
            op: Name of the operation, such as ``"all_reduce"``.
            nbytes: Bytes that each rank offers to the others.
            registered: Whether all ranks' buffers are registered.
        """
        if op not in _OPERATIONS:
            raise ValueError(f"there is no operation {op!r}; there are {', '.join(_OPERATIONS)}")
        return self.issuer.endpoint.explain(_native.Op[op], nbytes, registered)

    @property
    def issued(self) -> int:
        """Collectives that this rank has called so far; the next one's number is one more."""
        return self.issuer.endpoint.issued

    @property
    def last_path(self) -> str:
        """Path that the last collective took: ``inline``, ``staged``, ``zero-copy`` or ``none``."""
        return self.issuer.endpoint.last_path

    def counters(self) -> dict[int, Counters]:
        """What each rank of this node has done in this group, by its rank; not a collective."""
        node = self.nodes.members[self.nodes.node_of(self.rank)]
        native = self.issuer.node
        return {rank: Counters.unpack(native.counters(i)) for i, rank in enumerate(node)}

    # ---- lifetime ------------------------------------------------------------------------------

    def new_group(
        self, ranks: Sequence[int], *, name: str | None = None, timeout_s: float | None = None
    ) -> Group | None:
        """Make a group of some of this group's ranks; all ranks of this group must call it.

        Args:
            ranks: Members, by their rank here; their order gives the ranks there.
            name: For messages.
            timeout_s: None: this group's.

        Returns:
            The new group; None on ranks that are not members.
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

        known = self.global_ranks and tuple(self.global_ranks[member] for member in members)
        names = RankNames(label, len(members), known)
        rank = members.index(self.rank)
        return self.from_exchange(exchange, rank, names, limit_s, self._network, self._config)

    def exchange(self, blob: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Give every rank the bytes of all ranks, of any lengths, in rank order.

        It takes one all_gather if nobody has more than 120 bytes, else two.

        Raises:
            TypeError: `blob` has no bytes.
        """
        blob = memoryview(blob).tobytes()
        told = np.zeros((self.world_size, _SHORT.size), np.uint8)
        mine = np.frombuffer(_SHORT.pack(len(blob), blob), np.uint8)
        self.all_gather(told, mine, timeout_s=timeout_s)
        begun = list(_SHORT.iter_unpack(told.tobytes()))
        if all(length <= _SHORT_NBYTES for length, _ in begun):
            return [begin[:length] for length, begin in begun]
        blobs = [bytearray(length) for length, _ in begun]
        self.all_gather_uneven(blobs, blob, timeout_s=timeout_s)
        return [bytes(received) for received in blobs]

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called here."""
        return self._closed

    @property
    def failure(self) -> BaseException | None:
        """Why every operation would raise now; None while the group works."""
        return self.issuer.endpoint.failure()

    def raise_if_failed(self, cause: BaseException | None = None) -> None:
        """Raise the error that every operation would raise now.

        Args:
            cause: A framework's error for this failure, to chain.
        """
        try:
            self.issuer.endpoint.raise_if_failed()
        except SdpError as failure:
            raise failure from cause

    def describe(self, text: str) -> None:
        """Add words to the group's name, as messages and the flight recorder show it."""
        self._open.describe(text)

    @property
    def error_prefix(self) -> str:
        """How messages about this rank's operations begin: ``"[rank 3/8] "``."""
        return self._open.native.error_prefix

    def global_rank(self, rank: int) -> int:
        """A rank's number in the job, by which messages call it; its own if that is not known."""
        return self.nodes.global_rank(rank)

    def gone(self) -> list[int]:
        """The ranks of this rank's node that have closed the group, failed in it, or ended."""
        return self.issuer.node.gone()

    def ended(self) -> list[int]:
        """The ranks of this rank's node whose processes have ended."""
        return self.issuer.node.ended()

    def abort(self, reason: str | BaseException) -> None:
        """Fail the group on all ranks at once, with a reason."""
        text = reason if isinstance(reason, str) else name_error(reason)
        self.issuer.endpoint.abort(text.encode(errors="backslashreplace").decode())

    def close(self) -> None:
        """Leave the group: pending operations fail, threads end. May be called again.

        Memory and descriptors are freed with the object.
        """
        self._closed = True
        self._leave()

    def _leave(self) -> None:
        with open_groups.closing(self._open):
            self.issuer.close()

    def __del__(self) -> None:
        # Before anything that operations in flight write can be freed, in whatever order.
        issuer = getattr(self, "issuer", None)
        if issuer is None:
            return
        try:
            self._leave()
        except Exception:  # at the interpreter's end no module may be left to trace with
            issuer.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "failed" if self.issuer.endpoint.failed else "open"
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
            self.abort(error)  # the other ranks may wait for this one
        self.close()
