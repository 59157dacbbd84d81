"""Handle of an asynchronous operation."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ReferenceType

from . import _native
from .buffers import Buffer
from .errors import CollectiveTimeoutError
from .open_groups import OpenGroup, open_groups

_FOREVER_S = 1e9


class Work:
    """An operation that was issued with ``async_op=True``.

    Do not access the operation's buffers until it is completed. Dropping the handle does not cancel
    the operation.
    """

    __slots__ = ("_group", "_held", "_native", "_release", "_what")

    def __init__(
        self,
        native: _native.Work,
        what: str,
        held: list[Buffer],
        release: Callable[[list[Buffer]], None],
        group: ReferenceType[OpenGroup],
    ) -> None:
        self._native = native
        self._what = what
        self._held = held  # shared with the group, which holds it for a caller who drops the handle
        self._release = release
        self._group = group  # a kept handle keeps no group

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the operation is done.

        Args:
            timeout_s: Seconds to wait at most; None waits as long as the operation's own time-out
                allows. If this wait ends first, the operation continues.

        Raises:
            CollectiveTimeoutError: This wait timed out.
            SdpError: The operation failed.
        """
        limit_s = _FOREVER_S if timeout_s is None else timeout_s
        try:
            done = self._native.wait(limit_s)
        except BaseException:
            open_groups.operation_failed()
            raise
        finally:
            self.is_completed()
        if not done:
            raise self._too_late(limit_s)

    def _too_late(self, limit_s: float) -> CollectiveTimeoutError:
        group = self._group()
        error = CollectiveTimeoutError(
            f"{group.native.error_prefix if group else ''}{self._what}: not done after a wait of "
            f"{limit_s:.3g} s (timeout of this wait; the operation goes on). Hint: wait longer, or "
            "look at what the other ranks do.",
            op=self._what,
            elapsed_s=limit_s,
        )
        if group:
            open_groups.wait_timed_out(group, error)
        return error

    def is_completed(self) -> bool:
        """Whether the operation is done, successfully or not."""
        completed = self._native.completed()
        if completed:
            self._release(self._held)
        return completed

    def notify(self, signal: _native.CompletionSignal) -> None:
        """Set the signal when the operation is done, which may be now; no thread waits for it."""
        signal.set_after(self._native)

    def exception(self) -> BaseException | None:
        """The operation's failure; None if it succeeded or is not done yet."""
        return self._native.failure()

    @property
    def source_rank(self) -> int:
        """For ``recv``: the rank that sent; -1 before that and for other operations."""
        return self._native.source_rank()
