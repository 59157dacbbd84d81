"""What runs the operations of a group on this rank."""

from __future__ import annotations

from typing import Protocol

from . import _native


class Endpoint(Protocol):
    """The native group of one node's ranks, or a group that spans nodes."""

    @property
    def issued(self) -> int:
        """Collectives so far."""

    @property
    def last_path(self) -> str:
        """Path of the last collective."""

    @property
    def failed(self) -> bool:
        """Whether the group is unusable."""

    def run(self, request: _native.Request) -> None:
        """Block until a collective is done."""

    def submit(self, request: _native.Request) -> _native.Work:
        """Queue a collective, or post a send or a receive."""

    def explain(self, op: _native.Op, nbytes: int, registered: bool) -> str:
        """Say which path an operation takes, and why."""

    def failure(self) -> BaseException | None:
        """Why the group is unusable, or None."""

    def raise_if_failed(self) -> None:
        """Raise why the group is unusable."""

    def abort(self, reason: str) -> None:
        """Fail the group on all ranks."""

    def close(self) -> None:
        """Leave the group."""
