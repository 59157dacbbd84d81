"""send and recv between nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .. import _native
from ..errors import SdpError
from .call import Call, Here, Request, closed
from .matching import Matching
from .posts import ANY, AnyReceive, Aside, Post, Receive
from .receiver import Receiver
from .sender import Sender
from .traced import Track
from .wire import Channel, Way


class Messages:
    """All sends and receives of a group with ranks of other nodes.

    Args:
        here: The group.
        fail: Fails the group; see ``Sender``.
    """

    def __init__(self, here: Here, fail: Callable[[Call, BaseException], SdpError]) -> None:
        self._here = here
        self._fail = fail
        self._seq = 0
        nodes = here.nodes
        remote = [rank for node in here.others for rank in nodes.members[node]]
        self._matching = Matching(here, remote)
        self._remote = remote
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._channels: list[Channel[Any]] = []

    def send(self, request: Request) -> _native.Work:
        """Queue a send."""
        with self._matching.lock:
            call = self._call(request)
            work = _native.Work()
            sender = self._sender(request.peer)
            call.use(sender.channel)
            sender.post(Post(call, work, Track(self._here, request, call.seq)))
        return work

    def receive(self, request: Request) -> _native.Work:
        """Have a receive wait; for one from any rank the ranks of this node are asked as well."""
        with self._matching.lock:
            call = self._call(request)
            post = self._from_any(call) if request.peer == ANY else self._from_one(call)
            aside = self._matching.add(post)
            for peer in self._remote if request.peer == ANY else (request.peer,):
                self._start_receiver(peer)
        if aside is not None:
            self._deliver(aside, post)
        return post.work

    def _deliver(self, aside: Aside, post: Receive) -> None:
        try:
            aside.deliver(post)
        except BaseException as error:
            failure = self._fail(post.call, error)
            post.fail(failure)
            self._matching.fail(failure)

    def _call(self, request: Request) -> Call:
        if self._matching.stopping:
            raise closed(self._here)
        self._seq += 1
        return Call(self._here, request, self._seq)

    def _from_one(self, call: Call) -> Receive:
        return Receive(call, _native.Work(), Track(self._here, call.request, call.seq))

    def _from_any(self, call: Call) -> AnyReceive:
        request = call.request
        ((address, count),) = request.recvs
        place = address, count, request.dtype
        try:
            work = self._here.native.recv_any(*place, request.tag, request.timeout_s, call.seq)
        except SdpError as error:
            self._fail(call, error)  # by a message that does not fit: other nodes are told
            raise
        return AnyReceive(call, work)

    @property
    def abandoned(self) -> bool:
        """Whether messages were on their way when one failed."""
        return any(end.abandoned for end in self._ends())

    def stop(self) -> None:
        """Have all threads end; from now on nothing is posted."""
        with self._matching.lock:
            self._matching.stop()
            for sender in self._senders.values():
                sender.stop()

    def close(self, limit_s: float) -> bool:
        """Wait for all threads; whether they have ended, and no message was on its way."""
        threads = [end.thread for end in self._ends() if end.thread is not None]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(limit_s)
        ended = not any(thread.is_alive() for thread in threads)
        if ended:
            for receiver in self._receivers.values():
                receiver.withdraw()
        ended = ended and not self.abandoned
        for channel in self._channels:
            channel.close(abandon=not ended)
        return ended

    def _ends(self) -> list[Sender | Receiver]:
        """A copy, without the lock: a forked child may ask, too."""
        return [*self._senders.values(), *self._receivers.values()]

    def _branch(self) -> Channel[Any]:
        self._channels.append(self._here.channel.branch(Way.messages))
        return self._channels[-1]

    def _sender(self, peer: int) -> Sender:
        if peer not in self._senders:
            self._senders[peer] = Sender(peer, self._branch(), self._fail)
        return self._senders[peer]

    def _start_receiver(self, peer: int) -> None:
        if peer not in self._receivers:
            self._receivers[peer] = Receiver(peer, self._matching, self._branch(), self._fail)
