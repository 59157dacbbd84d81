"""MPI as the network between nodes.

MPI is used by one thread at a time: MPI_THREAD_SERIALIZED is enough. All messages are non-blocking
and are polled with short pauses, because a library that polls without them takes the core on which
the backward pass runs.
"""

from __future__ import annotations

import atexit
import copy
import functools
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ..errors import RendezvousError, RendezvousTimeoutError
from ..nodes import Nodes
from ..rank_names import RankNames
from ..rendezvous.exchange import Exchange
from . import mpi_library
from .mpi_progress import Progress
from .notice import NOTICE_NBYTES
from .wire import Pending, Way, WireError

FIRST_PAUSE_S, LAST_PAUSE_S = 20e-6, 200e-6
POLLS = 20
"""Before the first pause: a small message of a peer that is there has arrived by then."""
TELL_LIMIT_S = 0.5
ABANDON_LIMIT_S = 0.5
NOTICES = len(Way)
TAGS = NOTICES + 1
"""Of a group: one for each way, and one for notices."""
PRINT_S = 1.0
"""How long a failed rank stays, so that mpirun does not end the others before they can say why."""

_CARD = struct.Struct("<IIII")


@dataclass(eq=False)
class Message(Pending):
    """One MPI request."""

    request: Any
    receives: bool = False


class MpiNetwork:
    """Opens channels over MPI."""

    name = "MPI"

    def open(
        self, rank: int, nodes: Nodes, exchange: Exchange, name: str, timeout_s: float
    ) -> MpiChannel:
        """Agree on numbers, and on a communicator if there is none yet."""
        mpi = runtime()
        end = time.monotonic() + timeout_s
        with mpi.meeting():
            card = _CARD.pack(mpi.rank, mpi.size, mpi.draw_tag(), mpi.has_own_communicator)
            cards = [_CARD.unpack(blob) for blob in exchange(card, timeout_s)]
            ranks = [world_rank for world_rank, *_ in cards]
            head = RankNames(name, nodes.world_size, nodes.job_ranks).head(rank)
            if len(set(ranks)) < len(ranks) or {size for _, size, *_ in cards} != {mpi.size}:
                raise RendezvousError(
                    f"{head}rendezvous: these ranks are not of one MPI job: in MPI's world they "
                    f"are {ranks} of "
                    f"{[size for _, size, *_ in cards]}. Hint: {mpi_library.choose_library()}; in "
                    "PyTorch SDP_INTERNODE=gloo does without MPI."
                )
            tag = cards[0][2]  # drawn by one rank from numbers of its own
            mpi.check_tag(tag)
            have_own = [bool(has_own) for *_, has_own in cards]
            if len(cards) == mpi.size and not any(have_own):
                mpi.duplicate(end)
                have_own = [True]
            # Whoever has none shares the program's, where a receive of any tag could take ours.
            comm = mpi.comm if all(have_own) else mpi.world
            return MpiChannel(mpi, comm, rank, nodes, ranks, tag)


class MpiExchange:
    """All-gathers one blob per rank of MPI's world; an ``Exchange``.

    Args:
        rank: This rank of the job.
        world_size: Its number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def __call__(self, blob: bytes, timeout_s: float) -> list[bytes]:
        """Exchange blobs.

        Raises:
            RendezvousTimeoutError: Ranks did not come in time.
        """
        mpi = runtime()
        with mpi.meeting():
            if (mpi.rank, mpi.size) != (self._rank, self._world_size):
                raise RendezvousError(
                    f"this is rank {self._rank} of {self._world_size} by the launcher's variables, "
                    f"but {mpi.rank} of {mpi.size} in MPI's world. Hint: "
                    f"{mpi_library.choose_library()}."
                )
            end = time.monotonic() + timeout_s
            if not mpi.has_own_communicator:
                mpi.duplicate(end)
            lengths = bytearray(4 * mpi.size)
            mpi.all_gather(struct.pack("<I", len(blob)), lengths, end)
            longest = max(struct.unpack(f"<{mpi.size}I", lengths))
            blobs = bytearray(longest * mpi.size)
            mpi.all_gather(blob.ljust(longest, b"\0"), blobs, end)
            sizes = struct.unpack(f"<{mpi.size}I", lengths)
            return [bytes(blobs[i * longest : i * longest + n]) for i, n in enumerate(sizes)]


class Runtime:
    """This process's MPI: there can only be one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.failed = False
        self.ended = False
        """Whether MPI must not be called any more."""
        self.channels: weakref.WeakSet[MpiChannel] = weakref.WeakSet()
        self._ours = False
        self._mpi = mpi = mpi_library.load()
        if mpi.Is_finalized():
            raise RendezvousError("MPI has been finalized already. Hint: make groups before that.")
        if not mpi.Is_initialized():
            with mpi_library.settings(mpi.Get_library_version()):
                mpi.Init_thread(mpi.THREAD_MULTIPLE)  # the program may call MPI too
            self._ours = True
        atexit.register(self._leave)
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            raise RendezvousError(
                "MPI was initialised without support for threads, but a thread sends the messages"
                ". Hint: initialise it with MPI_THREAD_SERIALIZED or more (in mpi4py: "
                "mpi4py.rc.thread_level = 'serialized'), or leave that to this library."
            )
        self.world = self.comm = mpi.COMM_WORLD
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()
        self.has_own_communicator = False
        self._limit = int(self.world.Get_attr(mpi.TAG_UB))
        self._drawn = 0
        lingers = self._ours or mpi.Query_thread() == mpi.THREAD_MULTIPLE
        self.progress = Progress(self.lock, self._poke, lingers=lingers)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """A rendezvous: of one that fails, others may never come to MPI's end."""
        try:
            yield
        except BaseException:
            self.failed = True
            raise

    def draw_tag(self) -> int:
        """A tag, the first of some, that this rank has not drawn before, and no other rank will."""
        with self.lock:
            self._drawn += 1
            return TAGS * ((self._drawn - 1) * int(self.size) + int(self.rank))

    def check_tag(self, tag: int) -> None:
        """Refuse a tag that this MPI does not have."""
        limit = self._limit
        if tag + TAGS > limit:
            raise RendezvousError(
                f"this MPI has {limit} tags, and so many groups have been made. "
                "Hint: make groups once and keep them."
            )

    def duplicate(self, end: float) -> None:
        """Make a communicator that the program does not use; called on all ranks."""
        with self.lock:
            comm, request = self.world.Idup()
        self.finish(request, end)
        self.comm, self.has_own_communicator = comm, True

    def all_gather(self, mine: bytes, all_of_it: bytearray, end: float) -> None:
        """Among all ranks of the world."""
        with self.lock:
            request = self.comm.Iallgather(mine, all_of_it)
        self.finish(request, end)

    def finish(self, request: Any, end: float) -> None:
        """Wait for a request of the rendezvous."""
        while True:
            with self.lock:
                if request.Test():
                    return
            if time.monotonic() > end:
                raise RendezvousTimeoutError(
                    f"[rank {self.rank}/{self.size}] rendezvous: not all ranks of MPI's world came "
                    "in time. Hint: were they all started, and do all make this group?",
                    op="rendezvous",
                )
            time.sleep(LAST_PAUSE_S)

    def buffer(self, address: int, nbytes: int) -> list[Any]:
        """Memory as MPI wants it."""
        return [self._mpi.buffer.fromaddress(address, nbytes), nbytes, self._mpi.BYTE]

    def test_all(self, requests: list[Any]) -> bool:
        """Whether all are done; makes progress."""
        with self.lock:
            self.check()
            return bool(self._mpi.Request.Testall(requests))

    def check(self) -> None:
        """Refuse to call MPI where that is not allowed any more; with the lock."""
        if self.ended or os.getpid() != self.pid:
            raise WireError("MPI has been finalized, or belongs to the parent process")

    def _poke(self) -> None:
        with suppress(self.error):
            self.comm.Iprobe(self.any_source, self._limit)  # a tag that nobody uses

    @property
    def any_source(self) -> int:
        """MPI_ANY_SOURCE."""
        return int(self._mpi.ANY_SOURCE)

    @property
    def error(self) -> type[Exception]:
        """What mpi4py raises."""
        kind: type[Exception] = self._mpi.Exception
        return kind

    def _leave(self) -> None:
        """At the interpreter's end: MPI_Finalize, unless others would be waited for in vain."""
        if os.getpid() != self.pid:
            return  # a forked child's: MPI is its parent's
        for channel in list(self.channels):
            channel.close(abandon=self.failed)
        self.progress.end(ABANDON_LIMIT_S)
        with self.lock:
            self.ended = True  # for threads that still wait
        if self.failed:
            time.sleep(PRINT_S)
        elif self._ours and not self._mpi.Is_finalized():
            self._mpi.Finalize()


@functools.cache
def runtime() -> Runtime:
    """The process's MPI, initialised if it is not."""
    return Runtime()


class MpiChannel:
    """A group's messages; see ``Channel``."""

    def __init__(
        self,
        mpi: Runtime,
        comm: Any,
        rank: int,
        nodes: Nodes,
        world_ranks: list[int],
        tag: int,
    ) -> None:
        self._mpi = mpi
        self._comm = comm
        self._ranks = world_ranks
        self._first_tag = tag
        self._tag = tag + Way.there
        own = nodes.members[nodes.node_of(rank)]
        self._remote = [r for r in range(len(world_ranks)) if r not in own]
        self._notice = bytearray(NOTICE_NBYTES)
        self._heard = False
        self._told: list[Any] = []
        self._closed = False
        with mpi.lock:
            self._ear = comm.Irecv(self._notice, mpi.any_source, tag + NOTICES)
        mpi.channels.add(self)

    def send(self, peer: int, address: int, nbytes: int) -> Message:
        """See ``Channel``."""
        with self._mpi.lock:
            buffer = self._mpi.buffer(address, nbytes)
            return self._start(peer, lambda: self._comm.Isend(buffer, self._ranks[peer], self._tag))

    def receive(self, peer: int, address: int, nbytes: int) -> Message:
        """See ``Channel``."""
        with self._mpi.lock:
            buffer = self._mpi.buffer(address, nbytes)
            message = self._start(
                peer, lambda: self._comm.Irecv(buffer, self._ranks[peer], self._tag)
            )
            message.receives = True
            return message

    def _start(self, peer: int, start: Callable[[], Any]) -> Message:
        self._mpi.check()
        try:
            return Message(peer, start())
        except self._mpi.error as error:
            raise WireError(str(error), (peer,)) from error

    def wait(self, pending: Sequence[Message], watch: Callable[[], None]) -> None:
        """See ``Channel``."""
        requests = [message.request for message in pending]
        pause_s, polls = FIRST_PAUSE_S, 0
        try:
            while not self._mpi.test_all(requests):
                watch()
                polls += 1
                if polls > POLLS:
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, LAST_PAUSE_S)
        except self._mpi.error as error:
            raise WireError(str(error)) from error

    def done(self, pending: Sequence[Message]) -> bool:
        """See ``Channel``."""
        try:
            return self._mpi.test_all([message.request for message in pending])
        except self._mpi.error as error:
            raise WireError(str(error)) from error

    def late(self, pending: Sequence[Message]) -> set[int]:
        """See ``Channel``."""
        with self._mpi.lock:
            self._mpi.check()
            return {m.peer for m in pending if not m.request.Get_status()}

    def abandon(self, pending: Sequence[Message]) -> bool:
        """See ``Channel``: receives are cancelled, and what cannot be is given some time."""
        requests = [message.request for message in pending]
        with self._mpi.lock, suppress(WireError, self._mpi.error):
            self._mpi.check()
            for message in pending:
                if message.receives:
                    message.request.Cancel()
        end = time.monotonic() + ABANDON_LIMIT_S
        with suppress(WireError, self._mpi.error):
            while time.monotonic() < end:
                if self._mpi.test_all(requests):
                    return False
                time.sleep(LAST_PAUSE_S)
        return True

    def withdraw(self, pending: Sequence[Message]) -> bool:
        """See ``Channel``."""
        return self.abandon(pending)

    def left(self, peer: int) -> bool:
        """See ``Channel``: MPI does not tell."""
        return False

    def unattended(self) -> AbstractContextManager[None]:
        """See ``Channel``."""
        return self._mpi.progress

    def gone(self, peers: Collection[int]) -> set[int]:
        """See ``Channel``: MPI does not tell."""
        return set()

    def branch(self, way: Way) -> MpiChannel:
        """See ``Channel``."""
        other = copy.copy(self)
        other._tag = self._first_tag + way
        other._ear = None
        return other

    def tell(self, notice: bytes) -> None:
        """See ``Channel``."""
        self._mpi.failed = True
        with self._mpi.lock:
            self._mpi.check()
            for peer in self._remote:
                with suppress(self._mpi.error):  # the others can be told
                    to = self._ranks[peer], self._first_tag + NOTICES
                    self._told.append(self._comm.Isend(notice, *to))
        end = time.monotonic() + TELL_LIMIT_S
        with suppress(self._mpi.error):
            while not self._mpi.test_all(self._told) and time.monotonic() < end:
                time.sleep(LAST_PAUSE_S)

    def told(self) -> bytes | None:
        """See ``Channel``."""
        with self._mpi.lock:
            if not self._heard and not self._closed and not self._mpi.ended:
                self._heard = bool(self._ear.Test())
        if self._heard:
            self._mpi.failed = True
            return bytes(self._notice)
        return None

    def close(self, *, abandon: bool) -> None:
        """See ``Channel``."""
        if os.getpid() != self._mpi.pid:
            return
        with self._mpi.lock:
            if self._closed or self._mpi.ended:
                return
            self._closed = True
            if self._ear is not None and not self._heard:
                self._ear.Cancel()
                self._ear.Wait()
            if abandon:
                self._mpi.failed = True
