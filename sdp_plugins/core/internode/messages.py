"""send and recv between nodes."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import _native
from ..errors import CollectiveMismatchError, SdpError
from .call import Call, Here, Request, closed
from .kept import abandon
from .notice import failure_fields
from .traced import record
from .wire import Channel, Way

_ENVELOPE = struct.Struct("<QQII")
"""Number of the message, bytes, element type, tag."""


@dataclass
class Post:
    """A send or a receive that waits for its turn."""

    call: Call
    work: _native.Work
    issued_ns: int = field(default_factory=time.monotonic_ns)
    started_ns: int = 0

    def finish(self, source: int = -1) -> None:
        """It is done."""
        self._record()
        self.work.finish(source)

    def fail(self, failure: SdpError) -> None:
        """It, or one before it, has failed."""
        self._record(failure)
        self.work.fail(*failure_fields(failure))

    def _record(self, failure: SdpError | None = None) -> None:
        call, times = self.call, (self.issued_ns, self.started_ns)
        record(call.here, call.request, call.seq, times, self.work, failure)


@dataclass
class Aside:
    """A message that came before anybody wanted it."""

    dtype: int
    tag: int
    data: np.ndarray


class Stream:
    """A thread that carries out posts, one after the other; starts with the first.

    Args:
        name: Of the thread.
        fail: Told of a failure; returns what it is to the poster, and never raises.
    """

    def __init__(self, name: str, fail: Callable[[Call, BaseException], SdpError]) -> None:
        self._name = name
        self._fail = fail
        self._posts: deque[Post] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.abandoned = False
        """Whether messages were on their way when one failed."""

    def post(self, post: Post) -> None:
        """Queue a post."""
        with self._changed:
            if self._stopping:
                raise closed(post.call.here)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._posts.append(post)
            self._changed.notify()

    def stop(self) -> threading.Thread | None:
        """Have the thread end, once what it waits for has failed; returns it."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
            return self._thread

    def _loop(self) -> None:
        failure: SdpError | None = None
        while (post := self._next()) is not None:
            failure = failure or self._failure_of(post)
            if failure is not None:
                post.fail(failure)

    def _next(self) -> Post | None:
        with self._changed:
            while not self._posts and not self._stopping:
                self._changed.wait()
            return self._posts.popleft() if self._posts else None

    def _failure_of(self, post: Post) -> SdpError | None:
        """Carry out a post; what has failed, if something has."""
        post.started_ns = time.monotonic_ns()
        try:
            self._carry_out(post)
            post.call.end()
        except BaseException as error:
            return self._fail_post(post, error)
        return None

    def _fail_post(self, post: Post, error: BaseException) -> SdpError:
        failure = self._fail(post.call, error)
        # In the error's frames is the memory of envelopes, and of what came before its turn.
        self.abandoned = abandon(post.call, error)
        return failure

    def _carry_out(self, post: Post) -> None:
        raise NotImplementedError


class Sender(Stream):
    """Sends to one rank, in order."""

    _sent = 0

    def _carry_out(self, post: Post) -> None:
        call, ((address, count),) = post.call, post.call.request.sends
        self._sent += 1
        nbytes, request = count * call.itemsize, call.request
        head = bytearray(_ENVELOPE.pack(self._sent, nbytes, int(request.dtype), request.tag))
        call.wait(
            [
                call.send(request.peer, _native.address(head), len(head)),
                call.send(request.peer, address, nbytes),
            ]
        )
        post.finish()


class Receiver(Stream):
    """Receives from one rank; messages match posts by tag, in order.

    Receives are carried out in the order in which they were posted: one whose message comes later
    than another's waits with that other one.
    """

    def __init__(self, name: str, fail: Callable[[Call, BaseException], SdpError]) -> None:
        super().__init__(name, fail)
        self._asides: list[Aside] = []  # came before anybody wanted them

    def _carry_out(self, post: Post) -> None:
        if not self._from_aside(post):
            while not self._next_message(post):
                pass
        post.finish(post.call.request.peer)

    def _from_aside(self, post: Post) -> bool:
        address, nbytes = self._room(post)
        for aside in self._asides:
            if aside.tag == post.call.request.tag:
                self._check(post.call, aside.dtype, aside.data.nbytes, nbytes)
                _copy(address, aside.data)
                self._asides.remove(aside)
                return True
        return False

    def _next_message(self, post: Post) -> bool:
        """Take the peer's next message; whether it was the one."""
        call, peer = post.call, post.call.request.peer
        head = bytearray(_ENVELOPE.size)
        call.wait([call.receive(peer, _native.address(head), len(head))])
        _, nbytes, dtype, tag = _ENVELOPE.unpack(head)
        if tag == call.request.tag:
            address, room = self._room(post)
            self._check(call, dtype, nbytes, room)
            call.wait([call.receive(peer, address, nbytes)])
            return True
        data = np.empty(nbytes, np.uint8)
        call.wait([call.receive(peer, _native.address(data), nbytes)])
        self._asides.append(Aside(dtype, tag, data))
        return False

    @staticmethod
    def _room(post: Post) -> tuple[int, int]:
        ((address, count),) = post.call.request.recvs
        return address, count * post.call.itemsize

    @staticmethod
    def _check(call: Call, dtype: int, nbytes: int, room: int) -> None:
        if nbytes == room and dtype == int(call.request.dtype):
            return
        sent = _native.DType(dtype)
        what = (
            f"{call.here.nodes.name([call.request.peer])} sends "
            f"{sent.name}[{nbytes // _native.itemsize(sent)}]"
        )
        raise call.error(CollectiveMismatchError, what, [call.request.peer])


class Messages:
    """All sends and receives of a group with ranks of other nodes.

    Args:
        here: The group.
        fail: Fails the group; see ``Stream``.
    """

    def __init__(self, here: Here, fail: Callable[[Call, BaseException], SdpError]) -> None:
        self._here = here
        self._fail = fail
        self._seq = 0
        self._lock = threading.RLock()
        self._streams: dict[tuple[str, int], tuple[Stream, Channel[Any]]] = {}

    def post(self, request: Request) -> _native.Work:
        """Queue a send or a receive."""
        work = _native.Work()
        with self._lock:
            self._seq += 1
            stream, channel = self._stream(request.op.name, request.peer)
            call = Call(self._here, request, self._seq, {Way.there: channel})
            stream.post(Post(call, work))
        return work

    @property
    def abandoned(self) -> bool:
        """Whether messages were on their way when one failed."""
        streams = list(self._streams.values())  # without the lock: a forked child may ask, too
        return any(stream.abandoned for stream, _ in streams)

    def close(self, limit_s: float) -> bool:
        """End all threads; whether they have ended, and no message was on its way."""
        with self._lock:
            threads = [stream.stop() for stream, _ in self._streams.values()]
        for thread in threads:
            if thread is not None and thread is not threading.current_thread():
                thread.join(limit_s)
        ended = not any(thread is not None and thread.is_alive() for thread in threads)
        ended = ended and not self.abandoned
        for _, channel in self._streams.values():
            channel.close(abandon=not ended)
        return ended

    def _stream(self, op: str, peer: int) -> tuple[Stream, Channel[Any]]:
        key = op, peer
        if key not in self._streams:
            kind = Sender if op == "send" else Receiver
            stream = kind(f"sdp-{op}-{peer}", self._fail)
            self._streams[key] = stream, self._here.channel.branch(Way.messages)
        return self._streams[key]


def _copy(address: int, data: np.ndarray) -> None:
    ctypes.memmove(address, _native.address(data), data.nbytes)
