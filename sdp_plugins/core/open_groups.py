"""The open groups of this process, and their observers.

The flight recorder and traces are observers. They stand above the core, and
`sdp_plugins/__init__.py` installs them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

# Importing any part of sdp_plugins imports this file: it needs neither the native module nor
# dataclasses, which take long to import.
if TYPE_CHECKING:
    from . import _native
    from .config import Config
    from .rank_info import Forming, RankInfo


class OpenGroup:
    """A group that is open in this process; `native` runs the operations of this node's ranks."""

    def __init__(
        self, info: RankInfo, native: _native.NativeGroup, local_size: int, config: Config
    ) -> None:
        self.name = info.name
        self.info = info
        self.native = native
        self.local_size = local_size
        self.config = config
        self._failure: str | None = None  # the native group forgets it when it closes

    @property
    def failure(self) -> str:
        """Why the group has failed, or had failed when it closed; empty if it has not."""
        return self._failure if self._failure is not None else str(self.native.failure() or "")

    def keep_failure(self) -> None:
        """Keep `failure` beyond the group's end."""
        self._failure = self.failure

    def describe(self, text: str) -> None:
        """Add words to the name that messages and the flight recorder show."""
        self.info = self.info._replace(name=f"{self.name} {text}")
        self.native.set_rank_info(self.info.pack())
        self.native.set_error_prefix(self.info.names.error_prefix(self.info.rank))


class GroupObserver:
    """Receives notifications about the groups of this process.

    It may add a note to an error. Exceptions that it raises then are suppressed, because they must
    not replace that error.
    """

    def opened(self, group: OpenGroup) -> None:
        """A group was made, or was open when this observer was added."""

    def closed(self, group: OpenGroup) -> None:
        """A group has closed."""

    def group_failed(self, group: OpenGroup, error: Exception) -> None:
        """An error is about to be raised because a group has failed, now or earlier."""

    def operation_failed(self) -> None:
        """An operation's error is about to reach its caller."""

    def wait_timed_out(self, group: OpenGroup, error: Exception) -> None:
        """A caller stops waiting for an operation that continues."""

    def rendezvous_failed(self, error: Exception) -> None:
        """A group could not be made."""

    def forked(self) -> None:
        """This process is a forked child: groups and threads were its parent's."""


class OpenGroups:
    """The open groups of this process. A forked child begins with none."""

    def __init__(self) -> None:
        self._observers: list[GroupObserver] = []
        self._find_observers: Callable[[Config], Iterable[GroupObserver]] = lambda config: ()
        self._start_anew()
        os.register_at_fork(after_in_child=self._forked)

    def _start_anew(self) -> None:
        self._lock = threading.RLock()  # a signal handler or a finalizer may close a group
        self._groups: list[OpenGroup] = []
        self._forming: list[Forming] = []

    def _forked(self) -> None:
        self._start_anew()
        for observer in self._observers:
            observer.forked()

    def __iter__(self) -> Iterator[OpenGroup]:
        # Without the lock: an observer may hold its own here, for which a thread that holds this
        # lock may wait in a finalizer that closes a group.
        return iter(tuple(self._groups))

    # ---- observers -----------------------------------------------------------------------------

    def install(self, find_observers: Callable[[Config], Iterable[GroupObserver]]) -> None:
        """Set the function that returns the observers for a group's settings."""
        self._find_observers = find_observers

    def observe(self, observer: GroupObserver) -> None:
        """Add an observer and notify it of the open groups; does nothing the second time."""
        with self._lock:
            if observer in self._observers:
                return
            self._observers = [*self._observers, observer]
            groups = tuple(self._groups)
        for group in groups:
            observer.opened(group)

    # ---- notifications by a Group --------------------------------------------------------------

    def add(self, group: OpenGroup) -> None:
        """A group was made."""
        with self._lock:
            self._groups.append(group)
            observers = self._observers
        for observer in observers:  # without the lock: an observer has its own
            observer.opened(group)

    @contextmanager
    def closing(self, group: OpenGroup) -> Iterator[None]:
        """The group closes in this block."""
        if group in self:
            group.keep_failure()
        yield
        with self._lock:
            if group not in self._groups:  # a forked child's parent has it, or it was closed before
                return
            self._groups.remove(group)
        for observer in self._observers:
            observer.closed(group)

    @contextmanager
    def forming(self, forming: Forming, config: Config) -> Iterator[None]:
        """This process makes a group in this block; its open groups' segments show that."""
        for observer in self._find_observers(config):  # it may be imported, which takes time
            self.observe(observer)
        with self._lock:
            self._forming.append(forming)
        self._show_forming()
        try:
            yield
        except Exception as error:
            failure = error
            self._tell(lambda observer: observer.rendezvous_failed(failure))
            raise
        finally:
            with self._lock:
                if forming in self._forming:  # a forked child starts anew
                    self._forming.remove(forming)
            self._show_forming()

    def _show_forming(self) -> None:
        with self._lock:
            first = self._forming[0] if self._forming else None
            text, since_ns = (first.pack(), first.since_ns) if first else (b"", 0)
            for group in self._groups:
                group.native.show_forming(text, since_ns)

    def group_failed(self, token: int, error: Exception) -> None:
        """The error is about to be raised because the group with this token has failed."""
        failed = next((group for group in self if group.info.token == token), None)
        if failed is not None:
            self._tell(lambda observer: observer.group_failed(failed, error))

    def operation_failed(self) -> None:
        """An operation's error is about to reach its caller."""
        self._tell(lambda observer: observer.operation_failed())

    def wait_timed_out(self, group: OpenGroup, error: Exception) -> None:
        """A caller stops waiting for an operation of the group, which continues."""
        self._tell(lambda observer: observer.wait_timed_out(group, error))

    def _tell(self, tell: Callable[[GroupObserver], None]) -> None:
        for observer in self._observers:
            with suppress(Exception):  # must not replace the error that it explains
                tell(observer)


open_groups = OpenGroups()
"""Observers see all groups of the process: a signal or a trace concerns the process."""
