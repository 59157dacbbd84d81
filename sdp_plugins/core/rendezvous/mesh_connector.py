"""Connects the ranks of a group that share a node, each with each.

Every rank connects to every other rank, presents its secret nonce, and passes its own segment in
the same packet (INTRODUCTION). A rank that has received all introductions sends DONE to all, and is
finished when it has received DONE from all. Of the two connections of a pair, the one that the
higher rank opened is kept.

With both directions every death is detected: if a rank ends before it connects, the kernel hangs up
the connection queued at its listener. A rank that gives up sends the reason (ABORT) before it hangs
up, so that all ranks name the same culprit.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..process_identity import process_identity, process_state
from .announcement import RankAnnouncement
from .context import RendezvousContext
from .failure import ONE_JOB_HINT, RendezvousFailure
from .mesh_peer import Introduction, MeshPeer, hang_up
from .messages import MessageKind, Packet, receive_message
from .peer_process import accepted

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.005
# A rank that waits for DONE lets ranks that wait for an introduction name the culprit first.
_DONE_GRACE_S = 0.5
_STOPPED_HINT = (
    "check whether that rank is stopped or gets no CPU time; SDP_TIMEOUT_S sets the time-out"
)


class Links(NamedTuple):
    """One rank's connections with the others of its node, and their segments.

    All descriptors, the rank's own segment included, are the caller's to close.

    Attributes:
        segment_fds: Every rank's segment; this rank's own at its own index.
        sockets: One ``SOCK_SEQPACKET`` Unix socket per peer, non-blocking and close-on-exec; -1 at
            the own index. Nothing unread is in them but what the peer sent after its ``connect``.
        pidfds: Descriptors that become readable when the peer's process ends; -1 at the own index
            and where the kernel gives none.
    """

    segment_fds: list[int]
    sockets: list[int]
    pidfds: list[int]


class MeshConnector:
    """One rank's side of connecting; ``run`` can be called once."""

    def __init__(
        self,
        listener: socket.socket,
        table: list[RankAnnouncement],
        members: Sequence[int],
        segment_fd: int,
        context: RendezvousContext,
    ) -> None:
        """Prepare to connect the members, this rank among them, by the group's announcements.

        The listener, which does not block and is at the address that this rank has announced, stays
        the caller's, and so does the descriptor, of which all peers get a copy.
        """
        self._listener = listener
        self._me = table[context.rank]
        self._members = list(members)
        self._segment_fd = segment_fd
        self._context = context
        self._peers = {rank: MeshPeer(table[rank]) for rank in members if rank != context.rank}
        self._unknown: set[socket.socket] = set()
        self._unconnected = set(self._peers)
        self._not_introduced = set(self._peers)
        self._not_done = set(self._peers)
        self._suspects: set[int] = set()
        self._sent_done = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> Links:
        """Connect with all peers.

        Raises:
            RendezvousFailure: Connecting failed; the peers know the reason.
        """
        try:
            return self._connect()
        except RendezvousFailure as failed:
            self._abort(failed)
            raise
        except OSError as error:
            self._abort(RendezvousFailure.system(error))
            raise
        finally:
            self._close()

    def _connect(self) -> Links:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connect_all()
        self._wait(lambda: self._not_introduced or self._unsent(), "connect", grace_s=0.0)
        self._sent_done = True
        for peer in self._peers.values():
            peer.send(MessageKind.DONE)
        self._wait(lambda: self._not_done or self._unsent(), "finish connecting", _DONE_GRACE_S)
        return self._links()

    def _unsent(self) -> set[int]:
        return {rank for rank, peer in self._peers.items() if not peer.sent}

    # Sending

    def _connect_all(self) -> None:
        """Connect to every peer, the next ranks first to spread the load."""
        for rank in sorted(self._unconnected, key=lambda r: (r - self._me.rank) % len(self._peers)):
            try:
                if self._peers[rank].connect(self._me, self._segment_fd):
                    self._unconnected.discard(rank)
                    self._watch(self._peers[rank])
            except ConnectionRefusedError:
                self._unconnected.discard(rank)
                self._suspects.add(rank)  # its listener is gone, so its process has ended

    def _watch(self, peer: MeshPeer) -> None:
        """Watch for the end of the peer's process, or of its side of the connection."""
        assert peer.outgoing is not None
        self._selector.register(peer.outgoing, selectors.EVENT_READ, peer)
        if peer.pidfd >= 0:
            self._selector.register(peer.pidfd, selectors.EVENT_READ, peer)

    def _unwatch(self, peer: MeshPeer) -> None:
        for source in (peer.outgoing, peer.incoming, peer.pidfd):
            if source is not None and source != -1:
                self._selector.unregister(source)

    def _abort(self, failure: RendezvousFailure) -> None:
        # A peer that is done on both sides may have returned, and uses the link.
        for rank in self._not_done if self._sent_done else self._peers:
            try:
                self._peers[rank].send(MessageKind.ABORT, failure.pack())
            except OSError as error:
                _LOG.debug("could not tell rank %d: %s", rank, error)

    # Waiting

    def _wait(self, rest: Callable[[], set[int]], what: str, grace_s: float) -> None:
        """Serve all connections until ``rest`` is empty."""
        end = self._context.deadline.extended(grace_s)
        while True:
            self._check_suspects()
            missing = rest()
            if not missing:
                return
            if end.expired:
                allowed = self._context.deadline.allowed
                what = f"{self._context.names.list(missing)} did not {what} in {allowed}"
                raise RendezvousFailure.missing(what, _STOPPED_HINT, missing)
            retry = self._retry()
            self._serve(min(end.wait_s, _RETRY_S) if retry else end.wait_s)

    def _retry(self) -> bool:
        """Send what could not be sent; returns whether there is more."""
        if self._unconnected:
            self._connect_all()
        for peer in self._peers.values():
            if not peer.sent:
                peer.flush()
        return bool(self._unconnected or self._unsent())

    def _serve(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, MeshPeer):
                peer = key.data
                if key.fileobj is not peer.incoming:
                    self._suspects.add(peer.rank)
                elif not peer.done:
                    self._receive_from(peer)
            elif key.fileobj in self._unknown:
                self._identify(key.data)

    def _check_suspects(self) -> None:
        """Decide about peers that have hung up, after reading all earlier messages."""
        if not self._suspects:
            return
        self._accept()
        for rank in sorted(self._not_done):
            self._receive_from(self._peers[rank])
        lost = self._suspects & self._not_done
        if lost:
            raise self._lost(lost | {r for r in self._not_done if self._peers[r].has_ended()})
        self._suspects.clear()

    # Receiving

    def _accept(self) -> None:
        # Not for ever, whoever else is calling.
        for sock, peer in accepted(self._listener, 2 * len(self._peers) + 16):
            if not peer.is_ours:
                _LOG.warning("refused process %d of user %d", peer.pid, peer.uid)
                sock.close()
                continue
            self._unknown.add(sock)
            self._selector.register(sock, selectors.EVENT_READ, sock)
            self._identify(sock)

    def _identify(self, sock: socket.socket) -> None:
        """Read the first packet of a connection."""
        try:
            packet = receive_message(sock)
        except BlockingIOError:
            return
        try:
            peer = self._authenticate(packet)
            if peer is not None and not packet.fds:
                raise OSError("no descriptor came with the introduction: too many open files?")
            self._unknown.discard(sock)
            self._selector.unregister(sock)
            if peer is None:
                sock.close()
                return
            peer.incoming, peer.segment_fd = sock, packet.fds.pop(0)
        finally:
            packet.close()
        self._not_introduced.discard(peer.rank)
        self._selector.register(sock, selectors.EVENT_READ, peer)
        self._receive_from(peer)

    def _authenticate(self, packet: Packet) -> MeshPeer | None:
        """Return the connecting rank; None if it is not of this group."""
        try:
            kind, content = packet.parse()
            if kind is not MessageKind.INTRODUCTION:
                return None
            shown = Introduction.unpack(content)
        except ValueError:
            return None
        peer = self._peers.get(shown.rank)
        if peer is None or peer.incoming is not None:
            return None
        return peer if shown.proves(peer.announcement, self._me) else None

    def _receive_from(self, peer: MeshPeer) -> None:
        """Read a peer's messages up to DONE; later data are for the user of the link."""
        while peer.incoming is not None and not peer.done:
            try:
                packet = receive_message(peer.incoming)
            except BlockingIOError:
                return
            packet.close()
            if not packet.data:
                self._suspects.add(peer.rank)
                return
            try:
                self._take(peer, *packet.parse())
            except ValueError as error:
                raise RendezvousFailure.refused(
                    f"{self._context.names.list([peer.rank])} sent invalid data ({error})",
                    ONE_JOB_HINT,
                    [peer.rank],
                ) from error

    def _take(self, peer: MeshPeer, kind: MessageKind, content: bytes) -> None:
        if kind is MessageKind.ABORT:
            name = self._context.names.list([peer.rank])
            raise RendezvousFailure.unpack(content).told_by(peer.rank, name)
        if kind is MessageKind.DONE:
            peer.done = True
            self._not_done.discard(peer.rank)
            self._unwatch(peer)

    # Finishing

    def _links(self) -> Links:
        me, n = self._me, len(self._members)
        links = Links([-1] * n, [-1] * n, [-1] * n)
        links.segment_fds[self._members.index(me.rank)] = self._segment_fd
        for rank, peer in self._peers.items():
            at = self._members.index(rank)
            links.sockets[at] = peer.detach_link(me.rank)
            links.segment_fds[at], links.pidfds[at] = peer.detach_fds()
        return links

    def _lost(self, ranks: set[int]) -> RendezvousFailure:
        for rank in sorted(ranks):
            if self._peers[rank].announcement.uid != self._me.uid:
                return self._peers[rank].other_user()  # probably why it refused this rank
        pids = [self._peers[rank].announcement.pid for rank in sorted(ranks)]
        running = any(process_state(process_identity(pid)) for pid in pids)
        what = "gave up, or ended," if running else "ended"
        shown = ", ".join(map(str, pids))
        return RendezvousFailure.lost(
            f"{self._context.names.list(ranks)} (pid {shown}) {what} while the ranks were "
            "connecting",
            ranks,
        )

    def _close(self) -> None:
        self._selector.close()
        for sock in self._unknown:
            hang_up(sock)
        for peer in self._peers.values():
            peer.close()
