"""Why a rendezvous failed, in a form that ranks send each other."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable
from enum import IntEnum

ONE_JOB_HINT = (
    "start all ranks with one launcher; if several jobs share this host, give each its own "
    "SDP_JOB_ID"
)
SAME_ORDER_HINT = (
    "all ranks must make their groups in the same order, and all ranks of the default group must "
    "call torch's new_group, members or not"
)
NODES_HINT = (
    "on several nodes, start them by mpirun, or by srun --mpi=pmix or pmi2, with mpi4py installed "
    "(pip install mpi4py mpich)"
)
LOST_HINT = "read the lost rank's own output and exit status for the cause"

_MAX_RANKS = 1024
_MAX_TEXT = 2000


class Kind(IntEnum):
    """The kind of a failure, which determines the class of the error."""

    REFUSED = 1
    LOST = 2
    MISSING = 3


class RendezvousFailure(Exception):  # noqa: N818
    """Why a rendezvous failed, independent of the rank that reports it.

    `RendezvousContext` tells the other ranks, and raises the error of this one.

    Attributes:
        kind: Kind of the failure.
        what: The cause, a clause of the message.
        hint: The remedy.
        ranks: The ranks that are to blame or missing.
    """

    def __init__(self, kind: Kind, what: str, hint: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(what)
        self.kind, self.what, self.hint, self.ranks = kind, what, hint, tuple(ranks)

    def pack(self) -> bytes:
        """Return the failure as bytes, long ones shortened."""
        what, hint, ranks = self.what[:_MAX_TEXT], self.hint[:_MAX_TEXT], self.ranks[:_MAX_RANKS]
        return json.dumps((self.kind, what, hint, ranks)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> RendezvousFailure:
        """Read what ``pack`` wrote.

        Raises:
            ValueError: The bytes are something else.
        """
        try:
            kind, what, hint, ranks = json.loads(data)
            return cls(Kind(kind), str(what), str(hint), map(int, ranks))
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise ValueError("not a failure") from None

    def told_by(self, rank: int, name: str) -> RendezvousFailure:
        """Return the failure as another rank has told it, which blames that one if nobody else."""
        if self.ranks:
            return self
        return RendezvousFailure(self.kind, f"{name} gave up: {self.what}", self.hint, [rank])

    @classmethod
    def refused(cls, what: str, hint: str, ranks: Iterable[int] = ()) -> RendezvousFailure:
        """The ranks must not or cannot form a group."""
        return cls(Kind.REFUSED, what, hint, ranks)

    @classmethod
    def lost(cls, what: str, ranks: Iterable[int]) -> RendezvousFailure:
        """Processes have ended."""
        return cls(Kind.LOST, what, LOST_HINT, ranks)

    @classmethod
    def missing(cls, what: str, hint: str, ranks: Iterable[int]) -> RendezvousFailure:
        """Ranks did not come in time."""
        return cls(Kind.MISSING, what, hint, ranks)

    @classmethod
    def system(cls, error: OSError) -> RendezvousFailure:
        """This process failed, and no peer is to blame."""
        hint = "see the system's limits for this process"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            hint = "raise the limit of open files (ulimit -n): a group needs about 8 per rank"
        if error.errno == errno.EMSGSIZE:
            hint = "raise net.core.wmem_max (sysctl): packets of a rendezvous have up to 65 KiB"
        return cls.refused(f"a system call failed ({error})", hint)
