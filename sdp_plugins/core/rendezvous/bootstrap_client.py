"""The ranks above 0 in an exchange: find rank 0, say hello, receive the table."""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import closing, suppress

from .bootstrap_address import find
from .bootstrap_messages import PART_NBYTES, Hello, unpack_table
from .context import RendezvousContext
from .failure import NODES_HINT, ONE_JOB_HINT, RendezvousFailure
from .messages import MessageKind, Packet, VersionError, receive_message, send_message
from .peer_process import has_ended, is_readable, open_pidfd

_FIRST_RETRY_S = 0.002
_LONGEST_RETRY_S = 0.05
# The root ends an exchange when the first rank's time is up, and then names who is missing.
_ANSWER_GRACE_S = 0.5


class _RootLeftError(Exception):
    """Rank 0 left before it accepted this rank: look for its next exchange."""


def join(addresses: list[bytes], blob: bytes, context: RendezvousContext) -> list[bytes]:
    """Send rank 0 this rank's blob; return the blobs of all ranks.

    Raises:
        RendezvousFailure: Rank 0 refuses this rank, or does not answer.
    """
    deadline = context.deadline
    retry_s = _FIRST_RETRY_S
    while True:
        sock, found = find(addresses)
        if sock is not None:
            with sock:
                try:
                    return _Connection(sock, context).run(blob)
                except _RootLeftError:
                    found = "rank 0 went away"
        if deadline.expired:
            raise RendezvousFailure.missing(
                f"rank 0 did not arrive in {deadline.allowed} ({found})",
                f"check that it was started, on this node; {ONE_JOB_HINT}; {NODES_HINT}",
                [0],
            )
        time.sleep(min(retry_s, deadline.remaining_s))
        retry_s = min(2 * retry_s, _LONGEST_RETRY_S)


class _Connection:
    """One connection with rank 0."""

    def __init__(self, sock: socket.socket, context: RendezvousContext) -> None:
        self._sock = sock
        self._context = context
        self._welcome = False
        self._table: list[bytes] = []

    def run(self, blob: bytes) -> list[bytes]:
        pidfd = open_pidfd(self._sock)
        try:
            self._say_hello(blob)
            return self._listen(pidfd)
        finally:
            if pidfd >= 0:
                os.close(pidfd)

    def _say_hello(self, blob: bytes) -> None:
        context, deadline = self._context, self._context.deadline
        hello = Hello(
            context.rank, context.world_size, deadline.timeout_s, deadline.remaining_s, blob
        )
        with suppress(ConnectionError):  # what it said before it went is still to be read
            while not send_message(self._sock, hello.pack()) and not deadline.expired:
                time.sleep(_FIRST_RETRY_S)

    def _listen(self, pidfd: int) -> list[bytes]:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if pidfd >= 0:
            poll.register(pidfd, select.POLLIN)
        end = self._context.deadline.extended(_ANSWER_GRACE_S)
        while not end.expired:
            if poll.poll(end.wait_s * 1000):
                blobs = self._receive(pidfd)
                if blobs is not None:
                    return blobs
        raise self._no_answer()

    def _receive(self, pidfd: int) -> list[bytes] | None:
        """Read a message; returns the blobs of all ranks once they are there."""
        try:
            packet = receive_message(self._sock)
        except BlockingIOError:
            if pidfd >= 0 and is_readable(pidfd):  # it has ended; a forked child holds the socket
                raise self._gone() from None
            return None
        with closing(packet):
            if not packet.data:
                raise self._gone()
            try:
                return self._take(packet)
            except VersionError as error:
                raise RendezvousFailure.refused(
                    f"rank 0 uses {error}, rank {self._context.rank} another one",
                    "install the same version of sdp_plugins for all ranks",
                ) from error
            except ValueError as error:
                raise RendezvousFailure.refused(
                    f"rank 0 sent invalid data ({error})", ONE_JOB_HINT, [0]
                ) from error

    def _take(self, packet: Packet) -> list[bytes] | None:
        kind, content = packet.parse()
        if kind is MessageKind.TABLE:
            self._table.append(content)
            if len(self._table) > self._context.world_size + 1:  # the longest blobs fill one each
                raise ValueError("long table")
            if len(content) == PART_NBYTES:
                return None
            return unpack_table(b"".join(self._table), self._context.world_size)
        if kind is MessageKind.ABORT:
            raise RendezvousFailure.unpack(content)
        if kind is not MessageKind.WELCOME:
            raise ValueError(f"unexpected {kind.name}")
        self._welcome = True
        return None

    def _gone(self) -> Exception:
        if self._welcome or has_ended(self._sock):
            return RendezvousFailure.lost("rank 0 ended before all ranks had arrived", [0])
        return _RootLeftError()

    def _no_answer(self) -> RendezvousFailure:
        allowed = self._context.deadline.allowed
        return RendezvousFailure.missing(
            f"rank 0 did not answer in {allowed}",
            "its process is there but does not run: is it stopped, or starved of CPU time?",
            [0],
        )
