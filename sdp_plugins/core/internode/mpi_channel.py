"""A group's messages over MPI."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from ..nodes import Nodes
from .failure_message import FAILURE_MESSAGE_NBYTES
from .mpi_runtime import ABANDON_LIMIT_S, FAILURES, LAST_PAUSE_S, Runtime
from .transport import Pending, Stream, WireError

FIRST_PAUSE_S = 20e-6
POLLS = 20
"""Polls before the first pause: time enough for a small message of a peer that has arrived."""
TELL_LIMIT_S = 0.5


@dataclass(eq=False)
class MpiMessage(Pending):
    """One MPI request."""

    request: Any
    receives: bool = False


class MpiChannel:
    """A group's messages over MPI; implements ``Channel``."""

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
        self._tag = tag + Stream.data
        own = nodes.members[nodes.node_of(rank)]
        self._remote = [r for r in range(len(world_ranks)) if r not in own]
        self._received = bytearray(FAILURE_MESSAGE_NBYTES)
        self._has_failure = False
        self._sent_failures: list[Any] = []
        self._closed = False
        with mpi.lock:
            self._failure_request = comm.Irecv(self._received, mpi.any_source, tag + FAILURES)
        mpi.channels.add(self)

    def send(self, peer: int, address: int, nbytes: int) -> MpiMessage:
        """Start sending memory with Isend."""
        with self._mpi.lock:
            buffer = self._mpi.buffer(address, nbytes)
            return self._start(peer, lambda: self._comm.Isend(buffer, self._ranks[peer], self._tag))

    def receive(self, peer: int, address: int, nbytes: int) -> MpiMessage:
        """Start receiving into memory with Irecv."""
        with self._mpi.lock:
            buffer = self._mpi.buffer(address, nbytes)
            message = self._start(
                peer, lambda: self._comm.Irecv(buffer, self._ranks[peer], self._tag)
            )
            message.receives = True
            return message

    def _start(self, peer: int, start: Callable[[], Any]) -> MpiMessage:
        self._mpi.check()
        try:
            return MpiMessage(peer, start())
        except self._mpi.error as error:
            raise WireError(str(error), (peer,)) from error

    def wait(self, pending: Sequence[MpiMessage], watch: Callable[[], None]) -> None:
        """Poll until all messages are done, with pauses that grow."""
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

    def late(self, pending: Sequence[MpiMessage]) -> set[int]:
        """The peers whose messages are not done."""
        with self._mpi.lock:
            self._mpi.check()
            return {m.peer for m in pending if not m.request.Get_status()}

    def abandon(self, pending: Sequence[MpiMessage]) -> bool:
        """Cancel receives, and wait ``ABANDON_LIMIT_S`` for messages that cannot be cancelled."""
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

    def withdraw(self, pending: Sequence[MpiMessage]) -> bool:
        """Cancel receives of messages that were never sent, as ``abandon`` does."""
        return self.abandon(pending)

    def left(self, peer: int) -> bool:
        """Always False: MPI does not report that a rank has left."""
        return False

    def unattended(self) -> AbstractContextManager[None]:
        """The context in which a background thread calls MPI for the waiting thread."""
        return self._mpi.progress

    def gone(self, peers: Collection[int]) -> set[int]:
        """Always empty: MPI does not report which ranks are gone."""
        return set()

    def branch(self, stream: Stream) -> MpiChannel:
        """A copy of the channel with the tag of another stream."""
        other = copy.copy(self)
        other._tag = self._first_tag + stream
        other._failure_request = None
        return other

    def send_failure(self, message: bytes) -> None:
        """Send a message to all ranks of other nodes; waits ``TELL_LIMIT_S`` at most."""
        self._mpi.failed = True
        with self._mpi.lock:
            self._mpi.check()
            for peer in self._remote:
                with suppress(self._mpi.error):  # the other ranks can still be told
                    to = self._ranks[peer], self._first_tag + FAILURES
                    self._sent_failures.append(self._comm.Isend(message, *to))
        end = time.monotonic() + TELL_LIMIT_S
        with suppress(self._mpi.error):
            while not self._mpi.test_all(self._sent_failures) and time.monotonic() < end:
                time.sleep(LAST_PAUSE_S)

    def received_failure(self) -> bytes | None:
        """The message of another rank, if one has arrived."""
        with self._mpi.lock:
            if not self._has_failure and not self._closed and not self._mpi.ended:
                self._has_failure = bool(self._failure_request.Test())
        if self._has_failure:
            self._mpi.failed = True
            return bytes(self._received)
        return None

    def close(self, *, abandon: bool) -> None:
        """Cancel the receive of failures; with `abandon` also keep MPI from being finalized."""
        if os.getpid() != self._mpi.pid:
            return
        with self._mpi.lock:
            if self._closed or self._mpi.ended:
                return
            self._closed = True
            if self._failure_request is not None and not self._has_failure:
                self._failure_request.Cancel()
                self._failure_request.Wait()
            if abandon:
                self._mpi.failed = True
