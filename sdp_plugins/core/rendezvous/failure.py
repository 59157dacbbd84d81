"""Why a rendezvous failed, in a form that ranks send each other."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Reason:
    """Why a rendezvous failed, independent of the rank that reports it.

    Attributes:
        kind: Kind of the failure.
        ranks: The ranks that are to blame or missing.
        what: The cause, a clause of the message.
        hint: The remedy.
    """

    kind: Kind
    ranks: tuple[int, ...]
    what: str
    hint: str

    def pack(self) -> bytes:
        """Return the reason as bytes, long ones shortened."""
        fields = (self.kind, self.ranks[:_MAX_RANKS], self.what[:_MAX_TEXT], self.hint[:_MAX_TEXT])
        return json.dumps(fields).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Reason:
        """Read what ``pack`` wrote.

        Raises:
            ValueError: The bytes are something else.
        """
        try:
            kind, ranks, what, hint = json.loads(data)
            return cls(Kind(kind), tuple(map(int, ranks)), str(what), str(hint))
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise ValueError("not a reason") from None


class ReasonError(Exception):
    """Carries a reason to the code that tells the other ranks and raises the error."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.what)
        self.reason = reason

    @classmethod
    def refused(cls, what: str, hint: str, ranks: Iterable[int] = ()) -> ReasonError:
        """The ranks must not or cannot form a group."""
        return cls(Reason(Kind.REFUSED, tuple(ranks), what, hint))

    @classmethod
    def lost(cls, what: str, ranks: Iterable[int]) -> ReasonError:
        """Processes have ended."""
        return cls(Reason(Kind.LOST, tuple(ranks), what, LOST_HINT))

    @classmethod
    def missing(cls, what: str, hint: str, ranks: Iterable[int]) -> ReasonError:
        """Ranks did not come in time."""
        return cls(Reason(Kind.MISSING, tuple(ranks), what, hint))

    @classmethod
    def system(cls, error: OSError) -> ReasonError:
        """This process failed, and no peer is to blame."""
        hint = "see the system's limits for this process"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            hint = "raise the limit of open files (ulimit -n): a group needs about 8 per rank"
        if error.errno == errno.EMSGSIZE:
            hint = "raise net.core.wmem_max (sysctl): packets of a rendezvous have up to 65 KiB"
        return cls.refused(f"a system call failed ({error})", hint)
