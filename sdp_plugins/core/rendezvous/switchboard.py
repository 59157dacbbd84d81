"""Connects the ranks of a group that share a node, pairwise.

Every rank calls every other one, shows the other's secret nonce and hands over its segment in the
same packet. Who has heard all others says so to all (DONE); who has heard that from all is
finished. Of the two connections of a pair the higher rank's call is kept.

The two directions make every death visible: a rank that ends before it calls is seen by the
hang-up of our call to it, which the kernel had queued at its listener. A rank that gives up says
why (ABORT) before it hangs up, so that all name the same culprit.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable, Sequence

from ..process_identity import process_identity, process_state
from .announcement import Announcement
from .failure import ONE_JOB_HINT, Occasion, Reason, ReasonError
from .links import Links
from .messages import Call, MessageKind, Packet, receive_message
from .peer_rank import PeerRank, hang_up
from .process import credentials

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.005
# Who waits for DONE gives those that still wait for a call the time to name the culprit.
_DONE_GRACE_S = 0.5
_STOPPED_HINT = "is it stopped, or starved of CPU time? SDP_TIMEOUT_S is the time-out"


class Switchboard:
    """One rank's side of connecting; ``run`` can be called once."""

    def __init__(
        self,
        listener: socket.socket,
        table: list[Announcement],
        members: Sequence[int],
        segment_fd: int,
        occasion: Occasion,
    ) -> None:
        """Prepare to connect.

        Args:
            listener: Listens, non-blocking, at the address that this rank has announced; stays
                the caller's.
            table: What all ranks of the group have announced.
            members: The ranks to connect, this one among them.
            segment_fd: Handed to all peers; stays the caller's.
            occasion: The group that is brought up.
        """
        self._listener = listener
        self._me = table[occasion.rank]
        self._members = list(members)
        self._segment_fd = segment_fd
        self._occasion = occasion
        self._peers = {rank: PeerRank(table[rank]) for rank in members if rank != occasion.rank}
        self._unknown: set[socket.socket] = set()
        self._uncalled = set(self._peers)
        self._unheard = set(self._peers)
        self._undone = set(self._peers)
        self._suspects: set[int] = set()
        self._said_done = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> Links:
        """Connect with all peers.

        Raises:
            ReasonError: It is not possible; the peers have been told.
        """
        try:
            return self._connect()
        except ReasonError as failed:
            self._tell(failed.reason)
            raise
        except OSError as error:
            self._tell(ReasonError.system(error).reason)
            raise
        finally:
            self._close()

    def _connect(self) -> Links:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._call_all()
        self._wait(lambda: self._unheard or self._unsent(), "connect", grace_s=0.0)
        self._said_done = True
        for peer in self._peers.values():
            peer.say(MessageKind.DONE)
        self._wait(lambda: self._undone or self._unsent(), "finish connecting", _DONE_GRACE_S)
        return self._links()

    def _unsent(self) -> set[int]:
        return {rank for rank, peer in self._peers.items() if not peer.sent}

    # Speaking

    def _call_all(self) -> None:
        """Call every peer that has not been called; the next ranks first, to spread the load."""
        for rank in sorted(self._uncalled, key=lambda r: (r - self._me.rank) % len(self._peers)):
            try:
                if self._peers[rank].call(self._me, self._segment_fd):
                    self._uncalled.discard(rank)
                    self._watch(self._peers[rank])
            except ConnectionRefusedError:
                self._uncalled.discard(rank)
                self._suspects.add(rank)  # its listener is gone, and so is it

    def _watch(self, peer: PeerRank) -> None:
        """Notice when the peer's process or its end of our call goes; it never speaks there."""
        assert peer.voice is not None
        self._selector.register(peer.voice, selectors.EVENT_READ, peer)
        if peer.pidfd >= 0:
            self._selector.register(peer.pidfd, selectors.EVENT_READ, peer)

    def _unwatch(self, peer: PeerRank) -> None:
        for source in (peer.voice, peer.ear, peer.pidfd):
            if source is not None and source != -1:
                self._selector.unregister(source)

    def _tell(self, reason: Reason) -> None:
        # Who has heard our DONE and said DONE may have returned: the link is no longer ours.
        for rank in self._undone if self._said_done else self._peers:
            try:
                self._peers[rank].say(MessageKind.ABORT, reason.pack())
            except OSError as error:
                _LOG.debug("could not tell rank %d: %s", rank, error)

    # Waiting

    def _wait(self, rest: Callable[[], set[int]], what: str, grace_s: float) -> None:
        """Serve everything until nobody is left in ``rest``."""
        end = self._occasion.deadline.extended(grace_s)
        while True:
            self._judge()
            missing = rest()
            if not missing:
                return
            if end.expired:
                allowed = self._occasion.deadline.allowed
                what = f"{self._occasion.names.list(missing)} did not {what} in {allowed}"
                raise ReasonError.missing(what, _STOPPED_HINT, missing)
            retry = self._retry()
            self._serve(min(end.wait_s, _RETRY_S) if retry else end.wait_s)

    def _retry(self) -> bool:
        """Send what could not be sent; returns whether there is more."""
        if self._uncalled:
            self._call_all()
        for peer in self._peers.values():
            if not peer.sent:
                peer.flush()
        return bool(self._uncalled or self._unsent())

    def _serve(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, PeerRank):
                peer = key.data
                if key.fileobj is not peer.ear:
                    self._suspects.add(peer.rank)
                elif not peer.done:
                    self._hear(peer)
            elif key.fileobj in self._unknown:
                self._identify(key.data)

    def _judge(self) -> None:
        """Decide about peers that have hung up, after reading all that was said before."""
        if not self._suspects:
            return
        self._accept()
        for rank in sorted(self._undone):
            self._hear(self._peers[rank])
        lost = self._suspects & self._undone
        if lost:
            raise self._lost(lost | {r for r in self._undone if self._peers[r].has_ended()})
        self._suspects.clear()

    # Hearing

    def _accept(self) -> None:
        for _ in range(2 * len(self._peers) + 16):  # not for ever, whoever else is calling
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            sock.setblocking(False)
            peer = credentials(sock)
            if not peer.is_ours:
                _LOG.warning("refused process %d of user %d", peer.pid, peer.uid)
                sock.close()
                continue
            self._unknown.add(sock)
            self._selector.register(sock, selectors.EVENT_READ, sock)
            self._identify(sock)

    def _identify(self, sock: socket.socket) -> None:
        """Read the first packet of a call."""
        try:
            packet = receive_message(sock)
        except BlockingIOError:
            return
        try:
            caller = self._recognise(packet)
            if caller is not None and not packet.fds:
                raise OSError("no descriptor came with the call: too many open files?")
            self._unknown.discard(sock)
            self._selector.unregister(sock)
            if caller is None:
                sock.close()
                return
            caller.ear, caller.segment_fd = sock, packet.fds.pop(0)
        finally:
            packet.close()
        self._unheard.discard(caller.rank)
        self._selector.register(sock, selectors.EVENT_READ, caller)
        self._hear(caller)

    def _recognise(self, packet: Packet) -> PeerRank | None:
        """Return who calls; None for a stranger."""
        try:
            kind, content = packet.parse()
            if kind is not MessageKind.CALL:
                return None
            call = Call.unpack(content)
        except ValueError:
            return None
        peer = self._peers.get(call.rank)
        if peer is None or peer.ear is not None:
            return None
        genuine = call.peer_nonce == self._me.nonce and call.nonce == peer.announcement.nonce
        return peer if genuine else None

    def _hear(self, peer: PeerRank) -> None:
        """Read what a peer says; nothing after its DONE, which is for whoever uses the link."""
        while peer.ear is not None and not peer.done:
            try:
                packet = receive_message(peer.ear)
            except BlockingIOError:
                return
            packet.close()
            if not packet.data:
                self._suspects.add(peer.rank)
                return
            try:
                self._take(peer, *packet.parse())
            except ValueError as error:
                raise ReasonError.refused(
                    f"{self._occasion.names.list([peer.rank])} sent nonsense ({error})",
                    ONE_JOB_HINT,
                    [peer.rank],
                ) from error

    def _take(self, peer: PeerRank, kind: MessageKind, content: bytes) -> None:
        if kind is MessageKind.ABORT:
            raise ReasonError(Reason.unpack(content))
        if kind is MessageKind.DONE:
            peer.done = True
            self._undone.discard(peer.rank)
            self._unwatch(peer)

    # Finishing

    def _links(self) -> Links:
        me, n = self._me, len(self._members)
        own = self._members.index(me.rank)
        links = Links(own, n, [-1] * n, [-1] * n, [-1] * n, [0] * n)
        links.segment_fds[own], links.pids[own] = self._segment_fd, me.pid
        for rank, peer in self._peers.items():
            at = self._members.index(rank)
            links.sockets[at] = peer.detach_link(me.rank)
            links.segment_fds[at], links.pidfds[at] = peer.detach_fds()
            links.pids[at] = peer.pid
        return links

    def _lost(self, ranks: set[int]) -> ReasonError:
        for rank in sorted(ranks):
            if self._peers[rank].announcement.uid != self._me.uid:
                return self._peers[rank].other_user()  # it refused us for this, most likely
        pids = [self._peers[rank].announcement.pid for rank in sorted(ranks)]
        running = any(process_state(process_identity(pid)) for pid in pids)
        what = "gave up, or ended," if running else "ended"
        shown = ", ".join(map(str, pids))
        return ReasonError.lost(
            f"{self._occasion.names.list(ranks)} (pid {shown}) {what} while the ranks were "
            "connecting",
            ranks,
        )

    def _close(self) -> None:
        self._selector.close()
        for sock in self._unknown:
            hang_up(sock)
        for peer in self._peers.values():
            peer.close()
