"""torch's gloo as the network between nodes, where a job has no MPI."""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from sdp_plugins.core import RendezvousError
from sdp_plugins.core.internode.wire import WireError
from sdp_plugins.core.nodes import Nodes
from sdp_plugins.core.rendezvous import Exchange

SLICE_S = 0.02
HEAR_EVERY_S = 0.2
NOTICE = "notice"
# Deadlines are the group's own: gloo's end the whole connection.
NO_LIMIT = timedelta(days=365)


@dataclass(eq=False)
class Message:
    """One of gloo's sends or receives, and the memory that it works on."""

    peer: int
    work: Any
    tensor: torch.Tensor
    done: bool = False
    error: str = ""


class GlooNetwork:
    """Opens channels over gloo.

    Args:
        store: Keys of this group's own.
    """

    name = "gloo"

    def __init__(self, store: Store) -> None:
        self._store = store

    def open(
        self, rank: int, nodes: Nodes, exchange: Exchange, name: str, timeout_s: float
    ) -> GlooChannel:
        """Connect with all ranks."""
        # The keys of groups that are made at the same time must differ.
        key = exchange(secrets.token_bytes(8), timeout_s)[0].hex()
        store = PrefixStore(f"gloo/{key}", self._store)
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [ProcessGroupGloo.create_default_device()]
        try:
            group = ProcessGroupGloo(store, rank, nodes.world_size, options)
        except RuntimeError as error:
            raise RendezvousError(
                f"[rank {rank}/{nodes.world_size}] rendezvous '{name}': gloo cannot connect the "
                f"nodes ({_first_line(error)}). Hint: set GLOO_SOCKET_IFNAME to the network interface "
                "between them."
            ) from error
        return GlooChannel(group, store)


@dataclass
class Queue:
    """What the waiting thread works on; it knows nothing of the channel, so that that may go."""

    messages: deque[Message] = field(default_factory=deque)
    changed: threading.Condition = field(
        default_factory=lambda: threading.Condition(threading.RLock())
    )
    stopping: bool = False


class GlooChannel:
    """A group's messages; see the core's ``Channel``.

    gloo's works can only be waited for, without end or once and for all. So a thread does that, in
    the order in which they were started, and whoever waits here looks at what it has seen.
    """

    def __init__(self, group: ProcessGroupGloo, store: Store) -> None:
        self._group = group
        self._store = store
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._queue = Queue()
        self._thread: threading.Thread | None = None
        self._heard: bytes | None = None
        self._listened_s = 0.0

    def send(self, peer: int, address: int, nbytes: int) -> Message:
        """See ``Channel``."""
        return self._start(self._group.send, self._sent, peer, address, nbytes)

    def receive(self, peer: int, address: int, nbytes: int) -> Message:
        """See ``Channel``."""
        return self._start(self._group.recv, self._received, peer, address, nbytes)

    def _start(
        self,
        start: Callable[..., Any],
        counts: dict[int, int],
        peer: int,
        address: int,
        nbytes: int,
    ) -> Message:
        memory = (ctypes.c_char * nbytes).from_address(address)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        count = counts[peer] = counts.get(peer, 0) + 1
        try:
            message = Message(peer, start([tensor], peer, count % 2**31), tensor)
        except RuntimeError as error:
            raise WireError(_first_line(error), (peer,)) from error
        queue = self._queue
        with queue.changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_wait_for_all, args=(queue,), name="sdp-gloo", daemon=True
                )
                self._thread.start()
            queue.messages.append(message)
            queue.changed.notify_all()
        return message

    def wait(self, pending: Sequence[Message], watch: Callable[[], None]) -> None:
        """See ``Channel``."""
        queue = self._queue
        while True:
            with queue.changed:
                if not all(message.done for message in pending):
                    queue.changed.wait(SLICE_S)
                broken = [message for message in pending if message.error]
                if not broken and all(message.done for message in pending):
                    return
            if broken:
                peers = tuple(message.peer for message in broken)
                raise WireError(broken[0].error, peers)
            watch()

    def done(self, pending: Message) -> bool:
        """See ``Channel``."""
        return pending.done and not pending.error

    def tell(self, notice: bytes) -> None:
        """See ``Channel``."""
        with suppress(RuntimeError):  # the process with the store may have ended
            self._store.compare_set(NOTICE, "", notice.decode())

    def told(self) -> bytes | None:
        """See ``Channel``."""
        now = time.monotonic()
        if self._heard is None and now - self._listened_s > HEAR_EVERY_S:
            self._listened_s = now
            with suppress(RuntimeError):
                if self._store.check([NOTICE]):
                    self._heard = bytes(self._store.get(NOTICE))
        return self._heard

    def close(self, *, abandon: bool) -> None:
        """See ``Channel``."""
        queue = self._queue
        with queue.changed:
            queue.stopping = True
            waits = bool(queue.messages)
            queue.changed.notify_all()
        if waits:
            with suppress(RuntimeError):
                self._group.abort()
        if self._thread is not None:
            self._thread.join(1.0)


def _wait_for_all(queue: Queue) -> None:
    while True:
        with queue.changed:
            while not queue.messages and not queue.stopping:
                queue.changed.wait()
            if not queue.messages:
                return
            message = queue.messages[0]
        error = ""
        try:
            message.work.wait(NO_LIMIT)
        except RuntimeError as failure:
            error = _first_line(failure) or "gloo failed"
        message.work = None
        with queue.changed:
            queue.messages.popleft()
            message.error, message.done = error, True
            queue.changed.notify_all()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
