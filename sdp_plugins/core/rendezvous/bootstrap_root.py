"""Rank 0 in an exchange: collects every rank's blob and sends all of them to all ranks."""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from ..errors import name_ranks
from .bootstrap_frames import (
    FrameError,
    FrameKind,
    FrameReader,
    Hello,
    VersionError,
    max_hello_nbytes,
    pack_frame,
    pack_table,
)
from .context import RendezvousContext
from .deadline import Deadline
from .failure import NODES_HINT, ONE_JOB_HINT, Kind, Reason, ReasonError
from .peer_process import Credentials, close_listener, credentials, open_pidfd

_LOG = logging.getLogger(__name__)
_CHUNK = 64 * 1024
_ACCEPTS_AT_ONCE = 128
_TELL_S = 0.2


@dataclass(eq=False)
class _Client:
    """A connection, and the rank that spoke on it."""

    sock: socket.socket
    peer: Credentials
    pidfd: int
    reader: FrameReader = field(default_factory=lambda: FrameReader(max_hello_nbytes()))
    hello: Hello | None = None

    def close(self) -> None:
        self.sock.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


class BootstrapRoot:
    """Serves one exchange; nothing of it is left afterwards."""

    def __init__(self, listener: socket.socket, context: RendezvousContext) -> None:
        """Take over a listening socket.

        Args:
            listener: Non-blocking; closed by ``gather``.
            context: The group that is brought up.
        """
        self._listener = listener
        self._context = context
        self._clients: set[_Client] = set()
        self._by_rank: dict[int, _Client] = {}
        self._selector = selectors.DefaultSelector()

    def gather(self, blob: bytes) -> list[bytes]:
        """Wait for all other ranks and give everyone the table.

        Raises:
            ReasonError: They cannot come together; whoever is there has been told.
        """
        try:
            return self._gather(blob)
        except ReasonError as failed:
            close_listener(self._listener)
            # Whoever is refused has not become a rank here, and has to know too.
            frame = pack_frame(FrameKind.FAILURE, failed.reason.pack())
            self._send(frame, self._clients, _TELL_S)
            raise
        finally:
            self._close()

    def _gather(self, blob: bytes) -> list[bytes]:
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._collect()
        except OSError as error:
            raise ReasonError.system(error) from error
        blobs = [blob, *(hello.blob for hello in self._hellos())]
        # Before any rank goes on, so that none finds this listener in its next exchange.
        close_listener(self._listener)
        self._send(pack_table(blobs), self._by_rank.values(), self._context.deadline.remaining_s)
        return blobs

    def _hellos(self) -> list[Hello]:
        hellos = [self._by_rank[rank].hello for rank in sorted(self._by_rank)]
        return [hello for hello in hellos if hello is not None]

    def _collect(self) -> None:
        deadline = self._context.deadline
        while len(self._by_rank) < self._context.world_size - 1:
            events = self._selector.select(deadline.wait_s)
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._clients:  # else it was dropped in this round
                    self._receive_from(key.data, ended=key.fd == key.data.pidfd)
            if deadline.expired and len(self._by_rank) < self._context.world_size - 1:
                raise ReasonError(self._missing())

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        peer = credentials(sock)
        if not peer.is_ours:
            what = f"process {peer.pid} of user {peer.uid} is not of user {os.geteuid()}"
            _LOG.warning("rendezvous '%s': refused %s", self._context.names.group, what)
            _refuse(sock, ReasonError.refused(what, "run all ranks as one user"))
            return
        client = _Client(sock, peer, open_pidfd(sock))
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, client)
        if client.pidfd >= 0:
            self._selector.register(client.pidfd, selectors.EVENT_READ, client)

    def _receive_from(self, client: _Client, ended: bool) -> None:
        """Read what a client sent; ``ended`` if its process is gone."""
        try:
            data = client.sock.recv(_CHUNK)
        except BlockingIOError:
            if not ended:
                return
            data = b""
        except ConnectionError:
            data = b""
        if not data:
            self._lose(client)
        elif client.hello is None:
            client.reader.feed(data)
            self._read(client)

    def _read(self, client: _Client) -> None:
        try:
            frame = client.reader.next()
            if frame is None:
                return
            kind, content = frame
            if kind is not FrameKind.HELLO:
                raise FrameError(f"{kind.name} in place of a hello")
            self._introduce(client, Hello.unpack(content))
        except VersionError as error:
            raise ReasonError.refused(
                f"process {client.peer.pid} speaks {error}, rank 0 another one",
                "install the same version of sdp_plugins for all ranks",
            ) from error
        except FrameError as error:
            # Whoever this is, it is none of our ranks; the job goes on without it.
            _LOG.warning(
                "rendezvous '%s': dropped %s: %s", self._context.names.group, client.peer, error
            )
            self._drop(client)

    def _introduce(self, client: _Client, hello: Hello) -> None:
        world_size = self._context.world_size
        pid = client.peer.pid
        if hello.world_size != world_size:
            raise ReasonError.refused(
                f"rank {hello.rank} (pid {pid}) was started with world size {hello.world_size}, "
                f"rank 0 with {world_size}",
                ONE_JOB_HINT,
                [hello.rank],
            )
        if not 0 < hello.rank < world_size:
            raise ReasonError.refused(
                f"process {pid} claims rank {hello.rank} of {world_size}", ONE_JOB_HINT
            )
        if hello.rank in self._by_rank:
            other = self._by_rank[hello.rank].peer.pid
            raise ReasonError.refused(
                f"processes {other} and {pid} both claim rank {hello.rank}",
                ONE_JOB_HINT,
                [hello.rank],
            )
        client.hello = hello
        self._by_rank[hello.rank] = client
        self._context.deadline.limit(hello.timeout_s, hello.remaining_s)
        with suppress(OSError):  # a hang-up will be seen as such
            client.sock.send(pack_frame(FrameKind.WELCOME))

    def _lose(self, client: _Client) -> None:
        self._drop(client)
        if client.hello is not None:
            rank = client.hello.rank
            raise ReasonError.lost(
                f"rank {rank} (pid {client.peer.pid}) ended before all ranks had come", [rank]
            )

    def _missing(self) -> Reason:
        world_size = self._context.world_size
        ranks = tuple(sorted(set(range(1, world_size)) - self._by_rank.keys()))
        allowed = self._context.deadline.allowed
        what = f"{name_ranks(ranks)} did not arrive in {allowed}"
        hint = f"were they started, on this node, and of the same job? {ONE_JOB_HINT}; {NODES_HINT}"
        return Reason(Kind.MISSING, ranks, what, hint)

    def _send(self, frame: bytes, clients: Iterable[_Client], timeout_s: float) -> None:
        """Send to all side by side; one that has ended is for the next step to notice."""
        end = Deadline(timeout_s)
        rest = {client: memoryview(frame) for client in clients}
        with selectors.DefaultSelector() as selector:
            for client in rest:
                selector.register(client.sock, selectors.EVENT_WRITE, client)
            while rest and not end.expired:
                for key, _ in selector.select(end.wait_s):
                    rest[key.data] = _send_some(key.data.sock, rest[key.data])
                    if not rest[key.data]:
                        del rest[key.data]
                        selector.unregister(key.fileobj)

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        self._selector.unregister(client.sock)
        if client.pidfd >= 0:
            self._selector.unregister(client.pidfd)
        client.close()

    def _close(self) -> None:
        self._selector.close()
        close_listener(self._listener)
        for client in self._clients:
            client.close()


def _refuse(sock: socket.socket, failed: ReasonError) -> None:
    with sock, suppress(OSError):
        sock.send(pack_frame(FrameKind.FAILURE, failed.reason.pack()))


def _send_some(sock: socket.socket, data: memoryview) -> memoryview:
    """Send what fits and return the rest; nothing is left if the connection is broken."""
    try:
        return data[sock.send(data) :]
    except BlockingIOError:
        return data
    except OSError:
        return data[:0]
