"""Errors that a running group raises.

Faults of the caller (a wrong argument, a closed buffer) are ``ValueError`` or ``TypeError`` and are
raised before anything is sent. What goes wrong while a job runs is a subclass of ``SdpError`` and
says who, in which operation, after how long, and what to do about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import _native

_REASON_CHARS = 400
SignatureFields = tuple[int, int, int, int, int, int, int, int, int]
"""Those of a native ``OpSignature``."""
NO_SEQ = -1
"""``SdpError.seq`` of an error that belongs to no numbered operation."""


_recent: deque[tuple[type[SdpError], str, dict[str, Any]]] = deque(maxlen=128)
"""Class, text and fields of the latest errors. The errors themselves would hold their frames."""


def add_note(error: BaseException, note: str) -> None:
    """Have tracebacks show a note behind the error, with Python 3.11 and later."""
    if note and hasattr(error, "add_note"):
        error.add_note(note)


class SdpError(RuntimeError):
    """Raised when a group cannot go on; base of all run-time errors of this package.

    Raised as itself for use of a group after ``close()``. Remedy: create a new group; a group that
    has failed once stays failed, because its ranks no longer agree on what was done.

    Attributes:
        ranks: The ranks that are to blame or missing, ascending; empty if nobody can be named.
        op: The operation, such as ``"all_reduce"`` or ``"rendezvous"``; empty if there was none.
        seq: The operation's sequence number in its group, or ``NO_SEQ``.
        elapsed_s: Seconds from the start of the operation to the error.
        kind: What happened, as one word: ``peer_lost``, ``aborted``, ``timeout``, ``mismatch``,
            ``shared_memory``, ``rendezvous``, ``interrupted``, ``closed`` or ``other``.
        cause: The bare cause, without the rank and operation before it, and without the last
            completed operation and the hint behind it.
        summary: The text up to the cause: what messages of other groups repeat.
        origin_rank: The rank that met the cause first; None if that is not known.
        is_repeat: Whether another rank, or an earlier call of this one, has met the cause.
        global_ranks: ``ranks`` by their numbers in the job, as messages have them.
        global_origin_rank: ``origin_rank`` by its number in the job.

    ``ranks`` and ``origin_rank`` are numbers in the group.
    """

    # Defaults are for a subclass whose __init__ does not call this one's.
    ranks: tuple[int, ...] = ()
    op: str = ""
    seq: int = NO_SEQ
    elapsed_s: float = 0.0
    kind: str = "other"
    cause: str = ""
    summary: str = ""
    origin_rank: int | None = None
    is_repeat: bool = False
    global_ranks: tuple[int, ...] = ()
    global_origin_rank: int | None = None
    # Fields of native `OpSignature`s: what failed here, and what failed at the origin.
    operation: SignatureFields | None = None
    origin_operation: SignatureFields | None = None

    def __init__(
        self,
        text: str = "",
        *,
        ranks: Iterable[int] = (),
        op: str = "",
        seq: int = NO_SEQ,
        elapsed_s: float = 0.0,
        kind: str = "",
    ) -> None:
        # Only the text goes into args: unpickling calls cls(*args) and then restores __dict__,
        # which carries the fields (and notes) with no code of ours.
        super().__init__(text)
        self.cause = self.summary = text
        self.ranks = self.global_ranks = tuple(sorted(ranks))
        self.op = op
        self.seq = seq
        self.elapsed_s = elapsed_s
        if kind:  # other than that of the class
            self.kind = kind
        _recent.append((type(self), text, vars(self)))


class PeerLostError(SdpError):
    """Raised when a peer's process has ended, or has aborted the group, while it was needed.

    ``ranks`` names who was lost. Remedy: read that rank's own output first, it holds the cause (a
    traceback, or the exit status: 137 is SIGKILL, often for lack of memory); then start again from
    a checkpoint.
    """

    kind = "peer_lost"


class CollectiveTimeoutError(SdpError):
    """Raised when ranks did not arrive at an operation within the time-out.

    ``ranks`` names who is missing. Remedy: look for a rank that is stopped, waits for something
    else or has taken another branch; if it is only slow (loading, validating, compiling), raise
    the time-out with ``SDP_TIMEOUT_S`` or ``timeout_s=``.
    """

    kind = "timeout"


class CollectiveMismatchError(SdpError):
    """Raised on all ranks when they called different operations, dtypes, sizes or roots.

    The text lists which ranks called what. No output was written, but for one case: across nodes,
    if sizes that may differ from rank to rank do not fit, outputs may have been, and a rank that
    has all it needs raises this from its next call. Remedy: make every rank issue the same
    collectives in the same order; a branch that depends on the rank or on the data is the usual
    cause.
    """

    kind = "mismatch"


class SharedMemoryError(SdpError):
    """Raised when shared memory cannot be created, mapped or shared with a peer.

    Remedy: free memory or raise the limit that the text names (the container's memory, ``ulimit``),
    or use less with ``SDP_STAGING_BYTES``; ``SDP_REGISTER=0`` keeps buffers out of shared memory.
    """

    kind = "shared_memory"


class RendezvousError(SdpError):
    """Raised when the ranks of a job cannot find or must not accept each other.

    Two processes claim one rank, world sizes differ, the address is held by another job or user, or
    a rank is on another node. Remedy: start all ranks with one launcher; give jobs that share a
    host their own ``SDP_JOB_ID``.
    """

    kind = "rendezvous"


class RendezvousTimeoutError(RendezvousError, CollectiveTimeoutError):
    """Raised when ranks did not come to the rendezvous within the time-out.

    Both a ``RendezvousError`` and a ``CollectiveTimeoutError``. ``ranks`` names who is missing.
    Remedy: check that these ranks were started and with the same ``SDP_JOB_ID`` (or launcher);
    raise ``SDP_TIMEOUT_S`` if they only start late.
    """

    kind = "timeout"


_KINDS: dict[str, type[SdpError]] = {
    "peer_lost": PeerLostError,
    "aborted": PeerLostError,
    "timeout": CollectiveTimeoutError,
    "mismatch": CollectiveMismatchError,
    "shared_memory": SharedMemoryError,
    "closed": SdpError,
}


def from_native(failure: _native.Failure) -> SdpError:
    """Build the error of a native failure, whose text has been composed.

    A kind of another version gives a plain ``SdpError``: raising here would hide the fault that is
    being reported.

    Returns:
        The error, not raised.
    """
    return fill(_KINDS.get(failure.kind, SdpError), failure)


def fill(cls: type[SdpError], failure: _native.Failure) -> SdpError:
    """Build an error of a class with the fields of a native failure."""
    error = cls(
        failure.text,
        ranks=failure.ranks,
        op=failure.op,
        seq=failure.seq,
        elapsed_s=failure.elapsed_s,
        kind=failure.kind,
    )
    error.cause, error.summary = failure.cause, failure.summary
    error.origin_rank, error.global_origin_rank = (
        None if rank < 0 else rank for rank in (failure.origin_rank, failure.global_origin_rank)
    )
    error.is_repeat = failure.is_repeat
    error.global_ranks = tuple(failure.global_ranks)
    error.operation = _fields(failure.operation)
    error.origin_operation = _fields(failure.origin_operation)
    return error


def quoted(text: str) -> SdpError | None:
    """Return the latest error of this process that another exception's text quotes as a whole.

    C++ code that an exception passes through, such as torch's, keeps only `Class: text` of it.

    Returns:
        An error with the same fields, not raised; None if the text quotes none.
    """
    for cls, whole, fields in reversed(tuple(_recent)):
        if whole and f"{cls.__name__}: {whole}" in text:
            return _again(cls, whole, fields)
    return None


def latest_error() -> SdpError | None:
    """Return an error with the fields of this process's latest one, not raised."""
    return _again(*_recent[-1]) if _recent else None


def _again(cls: type[SdpError], text: str, fields: dict[str, Any]) -> SdpError:
    error: SdpError = cls.__new__(cls, text)  # not listed again
    vars(error).update(fields)
    return error


def _fields(signature: _native.OpSignature | None) -> SignatureFields | None:
    return None if signature is None else signature.fields


def is_news(error: BaseException) -> bool:
    """Whether other ranks have to be told of the exception with which a rank leaves a group.

    Not of what came from the group itself, nor of an exit without failure.
    """
    orderly = isinstance(error, SystemExit) and not error.code
    return not orderly and not isinstance(error, SdpError)


def name_error(error: BaseException) -> str:
    """Write an exception for the other ranks' messages: type and first line, cut to fit.

    Never raises: it is called while that exception is on its way.
    """
    try:
        text = error.summary if isinstance(error, SdpError) else str(error)
    except Exception:
        text = "(its text cannot be shown)"
    first = text.strip().splitlines()[0] if text.strip() else ""
    whole = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return whole if len(whole) <= _REASON_CHARS else f"{whole[: _REASON_CHARS - 3]}..."
