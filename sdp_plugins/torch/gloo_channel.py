"""Messages over torch's gloo: implements the core's ``Channel``."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from sdp_plugins.core.environment import environment
from sdp_plugins.core.internode.transport import Pending, Stream, WireError
from sdp_plugins.core.nodes import Nodes
from sdp_plugins.torch.gloo_failure_store import FailureStore
from sdp_plugins.torch.gloo_peer_monitor import (
    Farewell,
    elsewhere,
    first_line,
    monitored_by,
    send_farewells,
)

TAGS = 2**27
"""Tags of each stream; a message's tag is its number within its stream to its receiver."""
FAREWELL = len(Stream) * TAGS
UNANSWERED = FAREWELL + 1
GLANCE = timedelta(milliseconds=20)
SLICE_S = 0.05
JOIN_LIMIT_S = 2.0
# The group enforces deadlines: a timeout of gloo would close all connections.
NO_LIMIT = timedelta(days=365)


@dataclass(eq=False)
class GlooMessage(Pending):
    """A send or receive of gloo.

    Attributes:
        work: gloo's work, which allows one wait.
        batch: The batch of messages whose wait includes this one.
        done: Whether the message was waited for and succeeded.
        error: The error text of gloo.
    """

    work: Any
    batch: Batch | None = None
    done: bool = False
    error: str = ""

    def finish(self) -> bool:
        """Wait in gloo without a deadline; return whether the message succeeded."""
        try:
            self.work.wait(NO_LIMIT)
            self.done = True
        except RuntimeError as error:
            self.error = first_line(error) or "gloo failed"
        self.work = None
        return self.done


@dataclass(eq=False)
class Batch:
    """Messages that a thread waits for together.

    Attributes:
        messages: The messages, in the order of the waits.
        ended: Set when all messages are done or one has failed.
    """

    messages: Sequence[GlooMessage]
    ended: threading.Event = field(default_factory=threading.Event)


class Connections:
    """The gloo connections that all channels of a group share.

    The ProcessGroupGloo has no other users.
    """

    def __init__(self, group: Any, nodes: Nodes) -> None:
        self.group = group
        self._lock = threading.Lock()
        self._broken = False
        self._asked: list[Any] = []  # gloo still refers to these works
        rank = group.rank()
        self._farewells = {
            peer: Farewell(group.recv([torch.empty(1, dtype=torch.uint8)], peer, FAREWELL), peer)
            for peer in elsewhere(rank, nodes)
        }
        self._monitored = [self._farewells[peer] for peer in monitored_by(rank, nodes)]
        for farewell in self._monitored:
            farewell.monitor(NO_LIMIT)

    def check(self) -> None:
        """Raise WireError if a monitored rank ended without leaving in good order."""
        gone = [farewell for farewell in self._monitored if farewell.error]
        if gone and not self._broken:
            first = min(gone, key=lambda farewell: farewell.broken_s)
            raise WireError(first.error, (first.peer,))

    def has_left(self, peer: int) -> bool:
        """Return whether a rank left in good order; valid once its connection is closed."""
        return self._farewells[peer].has_come()

    def is_closed(self, peer: int) -> bool:
        """Return whether a peer closed its connection; the connection is unusable afterwards."""
        try:
            self._asked.append(self.group.recv([torch.empty(1)], peer, UNANSWERED + peer))
        except RuntimeError:
            return not self._broken  # otherwise this rank closed it
        return False

    def leave(self) -> None:
        """Leave the group, with a farewell to the peers if the connections still work."""
        if not self._broken:
            send_farewells(self.group, list(self._farewells), FAREWELL)
        if self._monitored:
            self.break_off()
        for farewell in self._monitored:
            farewell.ended.wait(JOIN_LIMIT_S)

    def break_off(self) -> None:
        """Close all connections, which ends most waits.

        A gloo wait that exceeds its timeout closes all connections, so this method waits for a
        message that no rank sends. Partly received messages remain in their waits even then.
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
            with suppress(RuntimeError):  # this connection is closed already
                unanswered = self.group.recv([torch.empty(1)], (rank + step) % size, tag)
                with suppress(RuntimeError):
                    unanswered.wait(GLANCE)
                return


class GlooChannel:
    """The messages of a group over gloo; implements the core's ``Channel``."""

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
        self._waiter = WaitingThread()

    def send(self, peer: int, address: int, nbytes: int) -> GlooMessage:
        """Start sending memory, which must stay unchanged until the message is done."""
        return self._start(self._send, self._sent, peer, address, nbytes)

    def receive(self, peer: int, address: int, nbytes: int) -> GlooMessage:
        """Start receiving into memory, which must stay valid until the message is done."""
        return self._start(self._recv, self._received, peer, address, nbytes)

    def _start(
        self,
        start: Callable[..., Any],
        counts: dict[int, int],
        peer: int,
        address: int,
        nbytes: int,
    ) -> GlooMessage:
        count = counts[peer] = counts.get(peer, 0) + 1
        tag = self._first_tag + count % TAGS
        try:
            return GlooMessage(peer, start(_tensors(address, nbytes), peer, tag))
        except RuntimeError as error:
            raise WireError(first_line(error), (peer,)) from error

    def wait(self, pending: Sequence[GlooMessage], watch: Callable[[], None]) -> None:
        """Block until all messages are done; a thread waits in gloo, and this one calls `watch`."""
        batch = pending[0].batch or self._waiter.take(pending)
        while not batch.ended.wait(SLICE_S):
            watch()
            self._connections.check()
        for message in pending:
            if message.error:
                raise WireError(message.error, (message.peer,))

    def unattended(self) -> AbstractContextManager[None]:
        """Return an empty context: gloo makes progress in its own thread."""
        return nullcontext()

    def late(self, pending: Sequence[GlooMessage]) -> set[int]:
        """Return the peers whose messages are not done; closes the connections, so call it last.

        The thread waits for one message after the other. Messages behind the first late one may
        have arrived.
        """
        awaited = [message for message in pending if not message.done]
        if not awaited:
            return set()
        first, *others = awaited
        late = {first.peer}

        def glance(message: GlooMessage) -> None:
            work = message.work
            if work is not None:
                try:
                    work.wait(GLANCE)
                except RuntimeError:
                    late.add(message.peer)

        threads = [Thread(target=glance, args=[other], daemon=True) for other in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return late

    def gone(self, peers: Collection[int]) -> set[int]:
        """Return the ranks among `peers` that are known to be unreachable."""
        return {peer for peer in peers if self._connections.is_closed(peer)}

    def branch(self, stream: Stream) -> GlooChannel:
        """Return a channel to the same ranks whose messages are ordered among themselves."""
        return GlooChannel(self._connections, self._failures, stream)

    def abandon(self, pending: Sequence[GlooMessage]) -> bool:
        """Give up messages after a failure; return whether some are still in flight."""
        if not all(message.done for message in pending):
            self._connections.break_off()
        return False

    def withdraw(self, pending: Sequence[GlooMessage]) -> bool:
        """Cancel receives that no rank has sent; connections close after the farewells."""
        self._connections.leave()
        self._connections.break_off()
        return False

    def left(self, peer: int) -> bool:
        """Return whether an unreachable rank is known to have left in good order."""
        return self._connections.has_left(peer)

    def send_failure(self, message: bytes) -> None:
        """Post the reason why this rank gives up; the first message counts."""
        self._failures.post(message)

    def received_failure(self) -> bytes | None:
        """Return another rank's failure message, or None."""
        return self._failures.look()

    def close(self, *, abandon: bool) -> None:
        """Leave; with `abandon`, messages may still be in flight, and their memory is kept.

        No thread should remain within gloo: at exit, the interpreter would end it in the middle of
        C++ code.
        """
        if self._waiter.stop() or abandon:
            self._connections.break_off()
        if self._is_first:
            self._connections.leave()
        self._waiter.join()


class WaitingThread:
    """A thread that waits for messages in gloo; it starts with the first message.

    The thread takes messages in batches: switching threads costs as much as a small message. It
    holds no reference to the channel, so the channel can be collected.
    """

    def __init__(self) -> None:
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._last: Batch | None = None
        self._thread: Thread | None = None

    def take(self, messages: Sequence[GlooMessage]) -> Batch:
        """Wait for more messages, after all earlier ones."""
        batch = self._last = Batch(messages)
        for message in messages:
            message.batch = batch
        self._batches.put(batch)
        if self._thread is None:
            self._thread = Thread(target=self._loop, name="sdp-gloo", daemon=True)
            self._thread.start()
        return batch

    def stop(self) -> bool:
        """Ask the thread to end; return whether it is in a wait that has to be interrupted."""
        self._batches.put(None)
        return self._last is not None and not self._last.ended.is_set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join(JOIN_LIMIT_S)

    def _loop(self) -> None:
        while (batch := self._batches.get()) is not None:
            for message in batch.messages:
                if not message.finish():
                    break
            batch.messages = ()  # the messages refer to the batch, too
            batch.ended.set()


def _interfaces() -> int:
    """Return the number of network interfaces; gloo distributes messages over all of them."""
    return len(environment().get("GLOO_SOCKET_IFNAME", "").split(","))


@lru_cache(maxsize=1024)
def _tensors(address: int, nbytes: int) -> list[torch.Tensor]:
    """Return the memory as gloo expects it: a list with one tensor."""
    memory = (ctypes.c_char * nbytes).from_address(address)
    return [torch.frombuffer(memory, dtype=torch.uint8)]
