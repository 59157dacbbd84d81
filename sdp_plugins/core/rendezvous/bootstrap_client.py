"""The ranks above 0 in an exchange: find rank 0, say hello, receive the table."""

from __future__ import annotations

import os
import select
import socket
import time

from .bootstrap_address import find
from .bootstrap_frames import (
    FrameError,
    FrameKind,
    FrameReader,
    Hello,
    VersionError,
    max_table_nbytes,
    unpack_table,
)
from .context import RendezvousContext
from .failure import NODES_HINT, ONE_JOB_HINT, Reason, ReasonError
from .peer_process import has_ended, is_readable, open_pidfd

_CHUNK = 256 * 1024
_FIRST_RETRY_S = 0.002
_LONGEST_RETRY_S = 0.05
# The root ends an exchange when the first rank's time is up, and then names who is missing.
_ANSWER_GRACE_S = 0.5


class _RootLeftError(Exception):
    """Rank 0 left before it accepted this rank: look for its next exchange."""


def join(addresses: list[bytes], blob: bytes, context: RendezvousContext) -> list[bytes]:
    """Send rank 0 this rank's blob; return the blobs of all ranks.

    Raises:
        ReasonError: Rank 0 says so, or does not answer.
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
            raise ReasonError.missing(
                f"rank 0 did not arrive in {deadline.allowed} ({found})",
                f"was it started, on this node, and of the same job? {ONE_JOB_HINT}; {NODES_HINT}",
                [0],
            )
        time.sleep(min(retry_s, deadline.remaining_s))
        retry_s = min(2 * retry_s, _LONGEST_RETRY_S)


class _Connection:
    """One connection with rank 0."""

    def __init__(self, sock: socket.socket, context: RendezvousContext) -> None:
        self._sock = sock
        self._context = context
        self._reader = FrameReader(max_table_nbytes(context.world_size))
        self._welcome = False

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
        self._sock.settimeout(deadline.wait_s + _ANSWER_GRACE_S)
        hello = Hello(
            context.rank, context.world_size, deadline.timeout_s, deadline.remaining_s, blob
        )
        try:
            self._sock.sendall(hello.pack())
        except TimeoutError:
            raise self._no_answer() from None
        except ConnectionError:
            pass  # what it said before it went is still to be read
        self._sock.setblocking(False)

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
        """Read what is there; returns the table once it is complete."""
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            if pidfd < 0 or not is_readable(pidfd):
                return None
            data = b""  # its process has ended and a forked child holds the socket
        except ConnectionError:
            data = b""
        if not data:
            raise self._gone()
        self._reader.feed(data)
        try:
            while (frame := self._reader.next()) is not None:
                blobs = self._take(*frame)
                if blobs is not None:
                    return blobs
        except VersionError as error:
            raise ReasonError.refused(
                f"rank 0 speaks {error}, rank {self._context.rank} another one",
                "install the same version of sdp_plugins for all ranks",
            ) from error
        except ValueError as error:
            raise ReasonError.refused(
                f"rank 0 sent nonsense ({error})", ONE_JOB_HINT, [0]
            ) from error
        return None

    def _take(self, kind: FrameKind, content: bytes) -> list[bytes] | None:
        if kind is FrameKind.TABLE:
            return unpack_table(content, self._context.world_size)
        if kind is FrameKind.FAILURE:
            raise ReasonError(Reason.unpack(content))
        if kind is not FrameKind.WELCOME:
            raise FrameError(f"unexpected {kind.name}")
        self._welcome = True
        return None

    def _gone(self) -> Exception:
        if self._welcome or has_ended(self._sock):
            return ReasonError.lost("rank 0 ended before all ranks had come", [0])
        return _RootLeftError()

    def _no_answer(self) -> ReasonError:
        allowed = self._context.deadline.allowed
        return ReasonError.missing(
            f"rank 0 did not answer in {allowed}",
            "its process is there but does not run: is it stopped, or starved of CPU time?",
            [0],
        )
