"""Messages over torch's gloo; see the core's ``Channel``."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch

from sdp_plugins.core.environment import environment
from sdp_plugins.core.internode.transport import Pending, Stream, WireError
from sdp_plugins.core.nodes import Nodes
from sdp_plugins.torch.gloo_failure_store import FailureStore
from sdp_plugins.torch.gloo_peer_monitor import (
    Goodbye,
    PeerMonitor,
    elsewhere,
    first_line,
    guarded_by,
    say_farewell,
)

TAGS = 2**27
"""Of each stream; a message's is its number among those of its stream to its receiver."""
FAREWELL = len(Stream) * TAGS
UNANSWERED = FAREWELL + 1
GLANCE = timedelta(milliseconds=20)
SLICE_S = 0.05
JOIN_LIMIT_S = 2.0
# Deadlines are the group's own: gloo's end all connections.
NO_LIMIT = timedelta(days=365)


@dataclass(eq=False)
class Message(Pending):
    """One of gloo's sends or receives.

    Attributes:
        work: gloo's, which can be waited for once.
        batch: With what it is waited for.
        done: Whether it was, and has ended well.
        error: What gloo has said.
    """

    work: Any
    batch: Batch | None = None
    done: bool = False
    error: str = ""

    def finish(self) -> bool:
        """Wait in gloo, without end; whether it has ended well."""
        try:
            self.work.wait(NO_LIMIT)
            self.done = True
        except RuntimeError as error:
            self.error = first_line(error) or "gloo failed"
        self.work = None
        return self.done

    def raise_if_broken(self) -> None:
        """Raise WireError if it has failed, as far as is known."""
        if self.error:
            raise WireError(self.error, (self.peer,))


@dataclass(eq=False)
class Batch:
    """Messages that somebody waits for.

    Attributes:
        messages: In the order in which they are waited for.
        ended: Set when all are done, or one has failed.
    """

    messages: Sequence[Message]
    ended: threading.Event = field(default_factory=threading.Event)


class Connections:
    """What all channels of a group share: gloo's connections.

    Args:
        group: A ProcessGroupGloo that nobody else uses.
        nodes: All ranks by node.
    """

    def __init__(self, group: Any, nodes: Nodes) -> None:
        self.group = group
        self._lock = threading.Lock()
        self._broken = False
        self._asked: list[Any] = []  # gloo may not lose them
        rank = group.rank()
        guarded = guarded_by(rank, nodes)
        self._guards = [PeerMonitor(self._farewell(peer), NO_LIMIT, peer) for peer in guarded]
        self._farewells: dict[int, Goodbye] = {guard.peer: guard for guard in self._guards}
        self._elsewhere = elsewhere(rank, nodes)
        for peer in set(self._elsewhere) - set(guarded):
            self._farewells[peer] = Goodbye(self._farewell(peer), peer)

    def _farewell(self, peer: int) -> Any:
        return self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, FAREWELL)

    def check(self) -> None:
        """Raise WireError if a rank is gone that has not left in good order."""
        gone = [guard for guard in self._guards if guard.error]
        if gone and not self._broken:
            first = min(gone, key=lambda guard: guard.broken_s)
            raise WireError(first.error, (first.peer,))

    def has_left(self, peer: int) -> bool:
        """Whether a rank has left in good order; asked when its connection is gone."""
        return self._farewells[peer].has_come()

    def is_closed(self, peer: int) -> bool:
        """Whether others have closed the connection with a rank; it is of no use after that."""
        try:
            self._asked.append(self.group.recv([torch.empty(1)], peer, UNANSWERED + peer))
        except RuntimeError:
            return not self._broken  # else it was this rank
        return False

    def leave(self) -> None:
        """Leave in good order, as far as that is possible."""
        if not self._broken:
            say_farewell(self.group, self._elsewhere, FAREWELL)
        if self._guards:
            self.break_off()
        for guard in self._guards:
            guard.join(JOIN_LIMIT_S)

    def break_off(self) -> None:
        """Close the connections, which ends most waits: by waiting for what nobody sends.

        A wait in gloo that passes its time-out closes them all. Messages of which a part has
        come stay in their waits even then.
        """
        with self._lock:
            if self._broken:
                return
            self._broken = True
            for tag in range(UNANSWERED, UNANSWERED + _interfaces()):
                self._wait_in_vain(tag)

    def _wait_in_vain(self, tag: int) -> None:
        rank, size = self.group.rank(), self.group.size()
        for step in range(1, size):
            with suppress(RuntimeError):  # this one is closed already
                unanswered = self.group.recv([torch.empty(1)], (rank + step) % size, tag)
                with suppress(RuntimeError):
                    unanswered.wait(GLANCE)
                return


class GlooChannel:
    """A group's messages; see the core's ``Channel``."""

    def __init__(
        self, connections: Connections, failures: FailureStore, stream: Stream = Stream.data
    ) -> None:
        self._connections = connections
        self._is_first = stream is Stream.data
        self._send, self._recv = connections.group.send, connections.group.recv
        self._first_tag = stream * TAGS
        self._failures = failures
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._waiter = Waiter()

    def send(self, peer: int, address: int, nbytes: int) -> Message:
        """See ``Channel``."""
        return self._start(self._send, self._sent, peer, address, nbytes)

    def receive(self, peer: int, address: int, nbytes: int) -> Message:
        """See ``Channel``."""
        return self._start(self._recv, self._received, peer, address, nbytes)

    def _start(
        self,
        start: Callable[..., Any],
        counts: dict[int, int],
        peer: int,
        address: int,
        nbytes: int,
    ) -> Message:
        count = counts[peer] = counts.get(peer, 0) + 1
        tag = self._first_tag + count % TAGS
        try:
            return Message(peer, start(_tensors(address, nbytes), peer, tag))
        except RuntimeError as error:
            raise WireError(first_line(error), (peer,)) from error

    def wait(self, pending: Sequence[Message], watch: Callable[[], None]) -> None:
        """See ``Channel``: a thread waits in gloo, and this one looks at what is told meanwhile."""
        batch = pending[0].batch or self._waiter.take(pending)
        while not batch.ended.wait(SLICE_S):
            watch()
            self._connections.check()
        self.done(pending)

    def done(self, pending: Sequence[Message]) -> bool:
        """See ``Channel``: what is asked for is waited for from then on, all of it together."""
        batch = pending[0].batch or self._waiter.take(pending)
        if batch.ended.is_set():
            for message in pending:
                message.raise_if_broken()
        return batch.ended.is_set()

    def unattended(self) -> AbstractContextManager[None]:
        """See ``Channel``: gloo has a thread of its own."""
        return nullcontext()

    def late(self, pending: Sequence[Message]) -> set[int]:
        """See ``Channel``; ends the connections, so this is the last thing that is asked of them.

        The thread waits for one after the other; behind the first that is late, others may have
        come.
        """
        awaited = [message for message in pending if not message.done]
        if not awaited:
            return set()
        first, *others = awaited
        glances = [Glance(message) for message in others]
        for glance in glances:
            glance.join()
        return {first.peer} | {glance.message.peer for glance in glances if glance.late}

    def gone(self, peers: Collection[int]) -> set[int]:
        """See ``Channel``."""
        return {peer for peer in peers if self._connections.is_closed(peer)}

    def branch(self, stream: Stream) -> GlooChannel:
        """See ``Channel``."""
        return GlooChannel(self._connections, self._failures, stream)

    def abandon(self, pending: Sequence[Message]) -> bool:
        """See ``Channel``."""
        if not all(message.done for message in pending):
            self._connections.break_off()
        return False

    def withdraw(self, pending: Sequence[Message]) -> bool:
        """See ``Channel``: connections are closed after a farewell."""
        self._connections.leave()
        self._connections.break_off()
        return False

    def left(self, peer: int) -> bool:
        """See ``Channel``."""
        return self._connections.has_left(peer)

    def send_failure(self, message: bytes) -> None:
        """See ``Channel``."""
        self._failures.post(message)

    def received_failure(self) -> bytes | None:
        """See ``Channel``."""
        return self._failures.look()

    def close(self, *, abandon: bool) -> None:
        """See ``Channel``.

        No thread should be left within gloo: Python would end it in the midst of C++ when the
        interpreter ends.
        """
        if self._waiter.stop() or abandon:
            self._connections.break_off()
        if self._is_first:
            self._connections.leave()
        self._waiter.join()


class Waiter:
    """A thread that waits for messages in gloo; starts with the first.

    It takes what is waited for as a whole: to go from thread to thread costs as much as a small
    message. It knows nothing of the channel, so that that may go.
    """

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def take(self, messages: Sequence[Message]) -> Batch:
        """Wait for some more, after those before them."""
        batch = Batch(messages)
        for message in messages:
            message.batch = batch
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="sdp-gloo", daemon=True)
                self._thread.start()
            self._batches.append(batch)
            self._changed.notify()
        return batch

    def stop(self) -> bool:
        """Have the thread end; whether it must be freed from a wait for that."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
            return bool(self._batches)

    def join(self) -> None:
        """Wait until it has ended."""
        if self._thread is not None:
            self._thread.join(JOIN_LIMIT_S)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._batches and not self._stopping:
                    self._changed.wait()
                if not self._batches:
                    return
                batch = self._batches[0]
            for message in batch.messages:
                if not message.finish():
                    break
            batch.messages = ()  # they know it, too
            with self._changed:
                self._batches.popleft()
            batch.ended.set()


class Glance(threading.Thread):
    """Looks whether a message has come; if not, the connections end."""

    def __init__(self, message: Message) -> None:
        super().__init__(name="sdp-glance", daemon=True)
        self.message = message
        self.late = False
        self.start()

    def run(self) -> None:
        """Look."""
        work = self.message.work
        if work is not None:
            try:
                work.wait(GLANCE)
            except RuntimeError:
                self.late = True


def _interfaces() -> int:
    """How many sets of connections a group has: messages go by all, in turns."""
    return len(environment().get("GLOO_SOCKET_IFNAME", "").split(","))


@lru_cache(maxsize=1024)
def _tensors(address: int, nbytes: int) -> list[torch.Tensor]:
    """Memory as gloo wants it."""
    memory = (ctypes.c_char * nbytes).from_address(address)
    return [torch.frombuffer(memory, dtype=torch.uint8)]
