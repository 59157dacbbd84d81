"""Rank 0 in an exchange: collects every rank's blob and sends all of them to all ranks."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from ..rank_names import name_ranks
from .bootstrap_messages import Hello, pack_table
from .context import RendezvousContext
from .deadline import Deadline
from .failure import NODES_HINT, ONE_JOB_HINT, RendezvousFailure
from .messages import (
    MessageKind,
    Packet,
    VersionError,
    pack_message,
    receive_message,
    send_message,
)
from .peer_process import Credentials, accepted, close_listener, open_pidfd

_LOG = logging.getLogger(__name__)
_ACCEPTS_AT_ONCE = 128
_TELL_S = 0.2
_RETRY_S = 0.002


@dataclass(eq=False)
class _Client:
    """A connection, and the rank that spoke on it."""

    sock: socket.socket
    peer: Credentials
    pidfd: int
    hello: Hello | None = None

    def close(self) -> None:
        self.sock.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


class BootstrapRoot:
    """Serves one exchange; nothing of it is left afterwards."""

    def __init__(self, listener: socket.socket, context: RendezvousContext) -> None:
        """Take over a listening socket that does not block; ``gather`` closes it."""
        self._listener = listener
        self._context = context
        self._clients: set[_Client] = set()
        self._by_rank: dict[int, _Client] = {}
        self._selector = selectors.DefaultSelector()

    def gather(self, blob: bytes) -> list[bytes]:
        """Wait for all other ranks, and send the table to all.

        Raises:
            RendezvousFailure: The exchange failed; the connected ranks know the reason.
        """
        try:
            return self._gather(blob)
        except RendezvousFailure as failed:
            close_listener(self._listener)
            # Whoever is refused has not become a rank here, and has to know too.
            self._send(_abort(failed), self._clients, Deadline(_TELL_S))
            raise
        finally:
            self._close()

    def _gather(self, blob: bytes) -> list[bytes]:
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._collect()
            blobs = [blob, *(hello.blob for hello in self._hellos())]
            # Before any rank continues, so that none finds this listener in its next exchange.
            close_listener(self._listener)
            for part in pack_table(blobs):
                self._send(part, self._by_rank.values(), self._context.deadline)
        except OSError as error:
            raise RendezvousFailure.system(error) from error
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
                raise self._missing()

    def _accept(self) -> None:
        for sock, peer in accepted(self._listener, _ACCEPTS_AT_ONCE):
            if peer.is_ours:
                self._admit(sock, peer)
                continue
            what = f"process {peer.pid} runs as user {peer.uid}, rank 0 as {os.geteuid()}"
            _LOG.warning("rendezvous '%s': refused %s", self._context.names.group, what)
            with sock, suppress(OSError):
                send_message(
                    sock, _abort(RendezvousFailure.refused(what, "run all ranks as one user"))
                )

    def _admit(self, sock: socket.socket, peer: Credentials) -> None:
        client = _Client(sock, peer, open_pidfd(sock))
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, client)
        if client.pidfd >= 0:
            self._selector.register(client.pidfd, selectors.EVENT_READ, client)

    def _receive_from(self, client: _Client, ended: bool) -> None:
        """Read what a client sent; ``ended`` if its process is gone."""
        try:
            packet = receive_message(client.sock)
        except BlockingIOError:
            if ended:
                self._lose(client)
            return
        packet.close()  # no hello comes with descriptors
        if not packet.data:
            self._lose(client)
        elif client.hello is None:
            self._read(client, packet)

    def _read(self, client: _Client, packet: Packet) -> None:
        try:
            kind, content = packet.parse()
            if kind is not MessageKind.HELLO:
                raise ValueError(f"{kind.name} in place of a hello")
            hello = Hello.unpack(content)
        except VersionError as error:
            raise RendezvousFailure.refused(
                f"process {client.peer.pid} uses {error}, rank 0 another one",
                "install the same version of sdp_plugins for all ranks",
            ) from error
        except ValueError as error:
            # Whoever this is, it is none of our ranks; the job goes on without it.
            _LOG.warning(
                "rendezvous '%s': dropped %s: %s", self._context.names.group, client.peer, error
            )
            self._drop(client)
        else:
            self._introduce(client, hello)

    def _introduce(self, client: _Client, hello: Hello) -> None:
        world_size = self._context.world_size
        pid = client.peer.pid
        if hello.world_size != world_size:
            raise RendezvousFailure.refused(
                f"rank {hello.rank} (pid {pid}) was started with world size {hello.world_size}, "
                f"rank 0 with {world_size}",
                ONE_JOB_HINT,
                [hello.rank],
            )
        if not 0 < hello.rank < world_size:
            raise RendezvousFailure.refused(
                f"process {pid} claims rank {hello.rank} of {world_size}", ONE_JOB_HINT
            )
        if hello.rank in self._by_rank:
            other = self._by_rank[hello.rank].peer.pid
            raise RendezvousFailure.refused(
                f"processes {other} and {pid} both claim rank {hello.rank}",
                ONE_JOB_HINT,
                [hello.rank],
            )
        client.hello = hello
        self._by_rank[hello.rank] = client
        self._context.deadline.limit(hello.timeout_s, hello.remaining_s)
        with suppress(OSError):  # a hang-up will be seen as such
            send_message(client.sock, pack_message(MessageKind.WELCOME))

    def _lose(self, client: _Client) -> None:
        self._drop(client)
        if client.hello is not None:
            rank = client.hello.rank
            raise RendezvousFailure.lost(
                f"rank {rank} (pid {client.peer.pid}) ended before all ranks had arrived", [rank]
            )

    def _missing(self) -> RendezvousFailure:
        world_size = self._context.world_size
        ranks = sorted(set(range(1, world_size)) - self._by_rank.keys())
        allowed = self._context.deadline.allowed
        what = f"{name_ranks(ranks)} did not arrive in {allowed}"
        hint = f"check that they were started, on this node; {ONE_JOB_HINT}; {NODES_HINT}"
        return RendezvousFailure.missing(what, hint, ranks)

    def _send(self, message: bytes, clients: Iterable[_Client], end: Deadline) -> None:
        """Send to all side by side; one that has ended is for the next step to notice."""
        rest = [*clients]
        while rest:
            rest = [client for client in rest if not _sent(client.sock, message)]
            if not rest or end.expired:
                return
            time.sleep(_RETRY_S)

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


def _abort(failed: RendezvousFailure) -> bytes:
    return pack_message(MessageKind.ABORT, failed.pack())


def _sent(sock: socket.socket, message: bytes) -> bool:
    """Whether a message is on its way, or its receiver gone."""
    try:
        return send_message(sock, message)
    except ConnectionError:
        return True
