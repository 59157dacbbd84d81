"""Messages over torch's gloo; see the core's ``Channel``."""

from __future__ import annotations

import ctypes
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch

from sdp_plugins.core.internode.wire import Pending, Way, WireError
from sdp_plugins.torch.gloo_board import Board
from sdp_plugins.torch.gloo_guard import Guard

TAGS = 2**27
"""Of each way; a message's is its number among those of its way to its receiver."""
UNANSWERED = len(Way) * TAGS
GLANCE = timedelta(milliseconds=20)
JOIN_LIMIT_S = 2.0
# Deadlines are the group's own: gloo's end all connections.
NO_LIMIT = timedelta(days=365)


@dataclass(eq=False)
class Message(Pending):
    """One of gloo's sends or receives.

    Attributes:
        work: gloo's, which can be waited for once.
        done: Whether it was, and has ended well.
        error: What gloo has said.
        ended: Of one that the finisher waits for: set when it knows.
    """

    work: Any
    done: bool = False
    error: str = ""
    ended: threading.Event | None = None

    def wait(self) -> None:
        """Block until it has ended; only a broken connection ends it otherwise.

        Raises:
            WireError: That.
        """
        if self.ended is not None:
            self.ended.wait()
        elif not self.done and not self.error:
            self.finish()
        self.raise_if_broken()

    def finish(self) -> None:
        """Wait in gloo."""
        try:
            self.work.wait(NO_LIMIT)
            self.done = True
        except RuntimeError as error:
            self.error = first_line(error) or "gloo failed"
        self.work = None

    def raise_if_broken(self) -> None:
        """Raise WireError if it has failed, as far as is known."""
        if self.error:
            raise WireError(self.error, (self.peer,))


class Connections:
    """What all channels of a group share: gloo's connections, and whoever breaks them off.

    gloo's works can only be waited for, without end or once and for all: a wait that passes its
    time-out closes the connections to all ranks, and every other wait fails.

    Args:
        group: A ProcessGroupGloo that nobody else uses.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.guard = Guard(self.break_off)
        self._lock = threading.Lock()
        self._broken = False

    def break_off(self) -> None:
        """End all waits: by waiting a moment for a message that nobody sends."""
        with self._lock:
            if self._broken:
                return
            self._broken = True
            other = (self.group.rank() + 1) % self.group.size()
            with suppress(RuntimeError):
                self.group.recv([torch.empty(1)], other, UNANSWERED).wait(GLANCE)


class GlooChannel:
    """A group's messages; see the core's ``Channel``."""

    def __init__(self, connections: Connections, board: Board, way: Way | None = None) -> None:
        self._connections = connections
        self._send, self._recv = connections.group.send, connections.group.recv
        self._is_branch = way is not None
        self._first_tag = (way or Way.there) * TAGS
        self._board = board
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._finisher = Finisher()

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
        """See ``Channel``; `watch` is called by another thread, while this one is in gloo."""
        guard = self._connections.guard
        wait = guard.enter(watch)
        try:
            for message in pending:
                message.wait()
        finally:
            guard.leave(wait)

    def done(self, pending: Sequence[Message]) -> bool:
        """See ``Channel``: what somebody asks for is waited for by a thread."""
        for message in pending:
            message.raise_if_broken()
            if not message.done and message.ended is None:
                self._finisher.take(message)
        return all(message.done for message in pending)

    def late(self, pending: Sequence[Message]) -> set[int]:
        """See ``Channel``; ends the connections, so this is the last thing that is asked of them.

        Whoever asks waits for one after the other; behind the first that is late, others may have
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

    def branch(self, way: Way) -> GlooChannel:
        """See ``Channel``."""
        return GlooChannel(self._connections, self._board, way)

    def abandon(self, pending: Sequence[Message]) -> bool:
        """See ``Channel``."""
        if not all(message.done for message in pending):
            self._connections.break_off()
        return False

    def tell(self, notice: bytes) -> None:
        """See ``Channel``."""
        self._board.post(notice)

    def told(self) -> bytes | None:
        """See ``Channel``."""
        return self._board.look()

    def close(self, *, abandon: bool) -> None:
        """See ``Channel``.

        No thread must be left within gloo: Python would end it in the midst of C++ when the
        interpreter ends.
        """
        if self._finisher.stop():
            self._connections.break_off()
            self._finisher.join()
        if not self._is_branch:
            self._connections.guard.stop()


class Finisher:
    """A thread that waits for messages, in the order in which it was given them.

    It knows nothing of the channel, so that that may go.
    """

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def take(self, message: Message) -> None:
        """Wait for one more; nobody else may, but for its `ended`."""
        message.ended = threading.Event()
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, name="sdp-gloo-finisher", daemon=True
                )
                self._thread.start()
            self._messages.append(message)
            self._changed.notify()

    def stop(self) -> bool:
        """Have the thread end; whether it must be freed from a wait for that."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
            return bool(self._messages)

    def join(self) -> None:
        """Wait until it has ended."""
        if self._thread is not None:
            self._thread.join(JOIN_LIMIT_S)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._messages and not self._stopping:
                    self._changed.wait()
                if not self._messages:
                    return
                message = self._messages[0]
            message.finish()
            with self._changed:
                self._messages.popleft()
            assert message.ended is not None
            message.ended.set()


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


@lru_cache(maxsize=1024)
def _tensors(address: int, nbytes: int) -> list[torch.Tensor]:
    """Memory as gloo wants it."""
    memory = (ctypes.c_char * nbytes).from_address(address)
    return [torch.frombuffer(memory, dtype=torch.uint8)]


def first_line(error: BaseException) -> str:
    """What gloo says, without the place in its source and without its advice."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return re.sub(r"\[\S+\.cc:\d+\] ", "", line).partition(". ")[0]
