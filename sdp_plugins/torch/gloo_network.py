"""torch's gloo as the network between nodes, where a job has no MPI."""

from __future__ import annotations

import ctypes
import ipaddress
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from sdp_plugins.core import RendezvousError
from sdp_plugins.core.config import environment
from sdp_plugins.core.internode.wire import Pending, Way, WireError
from sdp_plugins.core.nodes import Nodes
from sdp_plugins.core.rendezvous import Exchange

SLICE_S = 0.02
LOOK_EVERY_S = 0.2
ANSWER_S = 0.02
POST_LIMIT_S = 0.5
NOTICE = "notice"
TAGS = 2**27
"""Of each way; a message's is its number among those of its way to its receiver."""
GLANCE = timedelta(milliseconds=20)
JOIN_LIMIT_S = 2.0
ProcessGroupGloo: Any = c10d.ProcessGroupGloo  # torch's stubs know little of it
# Deadlines are the group's own: gloo's end the whole connection.
NO_LIMIT = timedelta(days=365)


@dataclass(eq=False)
class Message(Pending):
    """One of gloo's sends or receives, and the memory that it works on."""

    number: int
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
        limit = timedelta(seconds=timeout_s)
        try:
            address = address_towards_master()
            if address is None:  # torch's own choice: by GLOO_SOCKET_IFNAME or the host's name
                group = ProcessGroupGloo(store, rank, nodes.world_size, limit)
            else:
                options = ProcessGroupGloo._Options()
                options._timeout = limit
                options._devices = [ProcessGroupGloo.create_device(hostname=address)]
                group = ProcessGroupGloo(store, rank, nodes.world_size, options)
        except RuntimeError as error:
            raise RendezvousError(
                f"[rank {rank}/{nodes.world_size}] rendezvous '{name}': gloo cannot connect the "
                f"nodes ({_first_line(error)}). Hint: set GLOO_SOCKET_IFNAME to the network "
                "interface between them."
            ) from error
        return GlooChannel(group, Board(store))


def address_towards_master() -> str | None:
    """This host's address on the way to MASTER_ADDR, where nobody has chosen an interface.

    A host's name often means its loopback, where no other node finds it.
    """
    env = environment()
    master = env.get("MASTER_ADDR", "")
    if not master or env.get("GLOO_SOCKET_IFNAME"):
        return None
    try:
        family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # nothing is sent
            probe.connect(target)
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if ipaddress.ip_address(address).is_loopback else address


class Board:
    """Where a rank that gives up says why: a key of the store.

    The store may be on a node that cannot be reached any more, and then does not answer at all: so
    threads ask it, for which nobody waits long.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: bytes | None = None
        self._looked_s = 0.0
        self._looking: threading.Thread | None = None

    def post(self, notice: bytes) -> None:
        """Say why, if nobody has said anything yet."""

        def put() -> None:
            with suppress(RuntimeError):  # the process with the store may have ended
                self._store.compare_set(NOTICE, "", notice.decode())

        thread = threading.Thread(target=put, name="sdp-notice", daemon=True)
        thread.start()
        thread.join(POST_LIMIT_S)

    def look(self) -> bytes | None:
        """What has been said, as far as is known; asks now and then."""
        now = time.monotonic()
        asking = self._looking is not None and self._looking.is_alive()
        if self._seen is None and not asking and now - self._looked_s > LOOK_EVERY_S:
            self._looked_s = now
            self._looking = threading.Thread(target=self._ask, name="sdp-notice", daemon=True)
            self._looking.start()
            self._looking.join(ANSWER_S)
        return self._seen

    def _ask(self) -> None:
        with suppress(RuntimeError):
            if self._store.check([NOTICE]):
                self._seen = bytes(self._store.get(NOTICE))


@dataclass
class Queue:
    """What the waiting thread works on; it knows nothing of the channel, so that that may go."""

    messages: deque[Message] = field(default_factory=deque)
    started: threading.Condition = field(default_factory=threading.Condition)
    awaited: Message | None = None
    """The last message that somebody waits for; the others are done before it."""
    seen: threading.Event = field(default_factory=threading.Event)
    stopping: bool = False


class GlooChannel:
    """A group's messages; see the core's ``Channel``.

    gloo's works can only be waited for, without end or once and for all. So a thread does that, in
    the order in which they were started, and whoever waits here looks at what it has seen.
    """

    def __init__(self, group: Any, board: Board, way: Way = Way.there) -> None:
        self._group = group
        self._first_tag = way * TAGS
        self._board = board
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._queue = Queue()
        self._thread: threading.Thread | None = None
        self._number = 0

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
        self._number += 1
        count = counts[peer] = counts.get(peer, 0) + 1
        tag = self._first_tag + count % TAGS
        try:
            message = Message(peer, self._number, start([tensor], peer, tag), tensor)
        except RuntimeError as error:
            raise WireError(_first_line(error), (peer,)) from error
        queue = self._queue
        if self._thread is None:
            self._thread = threading.Thread(
                target=_wait_for_all, args=(queue,), name="sdp-gloo", daemon=True
            )
            self._thread.start()
        with queue.started:
            queue.messages.append(message)
            if len(queue.messages) == 1:
                queue.started.notify()
        return message

    def wait(self, pending: Sequence[Message], watch: Callable[[], None]) -> None:
        """See ``Channel``."""
        queue = self._queue
        queue.awaited = last = max(pending, key=lambda message: message.number)
        while not last.done and not any(message.error for message in pending):
            if queue.seen.wait(SLICE_S):
                queue.seen.clear()
            else:
                watch()
        queue.awaited = None
        _raise_if_broken(pending)

    def done(self, pending: Sequence[Message]) -> bool:
        """See ``Channel``."""
        _raise_if_broken(pending)
        return all(message.done for message in pending)

    def late(self, pending: Sequence[Message]) -> set[int]:
        """See ``Channel``.

        The thread waits for one after the other; behind the first that is late, others may be done.
        A time-out ends gloo's connections, so this is the last thing that is asked of it.
        """
        open_ones = [message for message in pending if not message.done]
        threads = [threading.Thread(target=_look_at, args=(message,)) for message in open_ones[1:]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {message.peer for message in open_ones if not message.done}

    def branch(self, way: Way) -> GlooChannel:
        """See ``Channel``."""
        return GlooChannel(self._group, self._board, way)

    def abandon(self, pending: Sequence[Message]) -> bool:
        """See ``Channel``: a time-out ends gloo's connections."""
        for message in [message for message in pending if not message.done][:1]:
            _look_at(message)
        return False

    def tell(self, notice: bytes) -> None:
        """See ``Channel``."""
        self._board.post(notice)

    def told(self) -> bytes | None:
        """See ``Channel``."""
        return self._board.look()

    def close(self, *, abandon: bool) -> None:
        """See ``Channel``."""
        queue = self._queue
        with queue.started:
            queue.stopping = True
            stuck = queue.messages[0] if queue.messages else None
            queue.started.notify()
        if stuck is not None:
            # A time-out ends gloo's connections, and with them the thread's wait. It must not be
            # left in there: Python would end it in the midst of C++ when the interpreter ends.
            _look_at(stuck)
        if self._thread is not None:
            self._thread.join(JOIN_LIMIT_S)


def _wait_for_all(queue: Queue) -> None:
    while True:
        with queue.started:
            while not queue.messages and not queue.stopping:
                queue.started.wait()
            if not queue.messages:
                return
            message = queue.messages[0]
        error = ""
        try:
            message.work.wait(NO_LIMIT)
        except RuntimeError as failure:
            error = _first_line(failure) or "gloo failed"
        message.work = None
        with queue.started:
            queue.messages.popleft()
        message.error, message.done = error, True
        if message is queue.awaited or (error and queue.awaited is not None):
            queue.seen.set()
        if error and queue.stopping:
            return


def _raise_if_broken(messages: Sequence[Message]) -> None:
    broken = [message for message in messages if message.error]
    if broken:
        raise WireError(broken[0].error, tuple(message.peer for message in broken))


def _look_at(message: Message) -> None:
    with suppress(RuntimeError):
        work = message.work
        if work is not None:
            work.wait(GLANCE)
        message.done = True


def _first_line(error: BaseException) -> str:
    """What gloo says, without the place in its source and without its advice."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return re.sub(r"\[\S+\.cc:\d+\] ", "", line).partition(". ")[0]
