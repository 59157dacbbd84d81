"""The state of MPI in this process.

One thread at a time uses MPI: MPI_THREAD_SERIALIZED is enough. All messages are non-blocking and
are polled with short pauses. A library that polls without pauses would occupy the core on which the
backward pass runs.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import RendezvousError, RendezvousTimeoutError
from . import mpi_library
from .mpi_progress import MpiProgress
from .transport import Channel, Stream, WireError

LAST_PAUSE_S = 200e-6
ABANDON_LIMIT_S = 0.5
FAILURES = len(Stream)
TAGS = FAILURES + 1
"""Number of a group's tags: one for each stream, and one for failures."""
PRINT_S = 1.0
"""How long a failed rank delays its exit, so that the others report before mpirun ends them."""


class Runtime:
    """MPI in this process, which can have only one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.failed = False
        self.ended = False
        """Whether calls of MPI are forbidden from now on."""
        self.channels: weakref.WeakSet[Channel[Any]] = weakref.WeakSet()
        self._ours = False
        self._mpi = mpi = mpi_library.load()
        if mpi.Is_finalized():
            raise RendezvousError("MPI has been finalized already. Hint: make groups before that.")
        if not mpi.Is_initialized():
            with mpi_library.settings(mpi.Get_library_version()):
                mpi.Init_thread(mpi.THREAD_MULTIPLE)  # the program may call MPI too
            self._ours = True
        atexit.register(self._leave)
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            raise RendezvousError(
                "MPI was initialised without support for threads, but a thread sends the messages"
                ". Hint: initialise it with MPI_THREAD_SERIALIZED or more (in mpi4py: "
                "mpi4py.rc.thread_level = 'serialized'), or leave that to this library."
            )
        self.world = self.comm = mpi.COMM_WORLD
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()
        self.has_own_communicator = False
        self._limit = int(self.world.Get_attr(mpi.TAG_UB))
        self._drawn = 0
        lingers = self._ours or mpi.Query_thread() == mpi.THREAD_MULTIPLE
        self.progress = MpiProgress(self.lock, self._poke, lingers=lingers)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Wrap a rendezvous; if it fails, the rank skips MPI_Finalize, which could wait forever."""
        try:
            yield
        except BaseException:
            self.failed = True
            raise

    def draw_tag(self) -> int:
        """Draw the first of ``TAGS`` tags that no rank draws again."""
        with self.lock:
            self._drawn += 1
            return TAGS * ((self._drawn - 1) * int(self.size) + int(self.rank))

    def check_tag(self, tag: int) -> None:
        """Raise if a group's tags exceed the largest tag of this MPI.

        Raises:
            RendezvousError: A tag is too large.
        """
        if tag + TAGS > self._limit:
            raise RendezvousError(
                f"this MPI has {self._limit} tags, and so many groups have been made. "
                "Hint: make groups once and keep them."
            )

    def duplicate(self, end: float) -> None:
        """Duplicate COMM_WORLD, for messages apart from the program's; called on all ranks."""
        with self.lock:
            comm, request = self.world.Idup()
        self.finish(request, end)
        self.comm, self.has_own_communicator = comm, True

    def all_gather(self, mine: bytes, all_of_it: bytearray, end: float) -> None:
        """All-gather bytes among all ranks of MPI's world."""
        with self.lock:
            request = self.comm.Iallgather(mine, all_of_it)
        self.finish(request, end)

    def finish(self, request: Any, end: float) -> None:
        """Wait for a request of the rendezvous until `end`.

        Raises:
            RendezvousTimeoutError: It was not done by then.
        """
        while True:
            with self.lock:
                if request.Test():
                    return
            if time.monotonic() > end:
                raise RendezvousTimeoutError(
                    f"[rank {self.rank}/{self.size}] rendezvous: not all ranks of MPI's world "
                    "arrived in time. Hint: all must be started, and all must make this group.",
                    op="rendezvous",
                )
            time.sleep(LAST_PAUSE_S)

    def buffer(self, address: int, nbytes: int) -> list[Any]:
        """Describe memory as a buffer of mpi4py."""
        return [self._mpi.buffer.fromaddress(address, nbytes), nbytes, self._mpi.BYTE]

    def test_all(self, requests: list[Any]) -> bool:
        """Whether all requests are done; makes progress."""
        with self.lock:
            self.check()
            return bool(self._mpi.Request.Testall(requests))

    def check(self) -> None:
        """Raise if MPI may not be called any more; called with the lock held."""
        if self.ended or os.getpid() != self.pid:
            raise WireError("MPI has been finalized, or belongs to the parent process")

    def _poke(self) -> None:
        with suppress(self.error):
            self.comm.Iprobe(self.any_source, self._limit)  # an unused tag

    @property
    def any_source(self) -> int:
        """MPI_ANY_SOURCE."""
        return int(self._mpi.ANY_SOURCE)

    @property
    def error(self) -> type[Exception]:
        """The exception that mpi4py raises."""
        kind: type[Exception] = self._mpi.Exception
        return kind

    def _leave(self) -> None:
        """Finalize MPI at exit, except after a failure: it could wait for other ranks forever."""
        if os.getpid() != self.pid:
            return  # a forked child: MPI belongs to its parent
        for channel in list(self.channels):
            channel.close(abandon=self.failed)
        self.progress.end(ABANDON_LIMIT_S)
        with self.lock:
            self.ended = True  # for threads that still wait
        if self.failed:
            time.sleep(PRINT_S)
        elif self._ours and not self._mpi.Is_finalized():
            self._mpi.Finalize()


@functools.cache
def runtime() -> Runtime:
    """The process's MPI, initialised by the first call."""
    return Runtime()
