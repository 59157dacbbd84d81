"""Errors that a running group raises.

Faults of the caller (a wrong argument, a closed buffer) are ``ValueError`` or ``TypeError`` and are
raised before anything is sent. What goes wrong while a job runs is a subclass of ``SdpError`` and
says who, in which operation, after how long, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

_REASON_CHARS = 400
NO_SEQ = -1
"""``SdpError.seq`` of an error that belongs to no numbered operation."""


class SdpError(RuntimeError):
    """Raised when a group cannot go on; base of all run-time errors of this package.

    Raised as itself for use of a group after ``close()``. Remedy: create a new group; a group that
    has failed once stays failed, because its ranks no longer agree on what was done.

    Attributes:
        ranks: The ranks that are to blame or missing, ascending; empty if nobody can be named.
        op: The operation, such as ``"all_reduce"`` or ``"rendezvous"``; empty if there was none.
        seq: The operation's sequence number in its group, or ``NO_SEQ``.
        elapsed_s: Seconds from the start of the operation to the error.
    """

    ranks: tuple[int, ...]
    op: str
    seq: int
    elapsed_s: float

    def __init__(
        self,
        text: str = "",
        *,
        ranks: Iterable[int] = (),
        op: str = "",
        seq: int = NO_SEQ,
        elapsed_s: float = 0.0,
    ) -> None:
        # Only the text goes into args: unpickling calls cls(*args) and then restores __dict__,
        # which carries the four fields (and notes) with no code of ours.
        super().__init__(text)
        self.ranks = tuple(sorted(ranks))
        self.op = op
        self.seq = seq
        self.elapsed_s = elapsed_s


class PeerLostError(SdpError):
    """Raised when a peer's process has ended, or has aborted the group, while it was needed.

    ``ranks`` names who was lost. Remedy: read that rank's own output first, it holds the cause (a
    traceback, or the exit status: 137 is SIGKILL, often for lack of memory); then start again from
    a checkpoint.
    """


class CollectiveTimeoutError(SdpError):
    """Raised when ranks did not arrive at an operation within the time-out.

    ``ranks`` names who is missing. Remedy: look for a rank that is stopped, waits for something
    else or has taken another branch; if it is only slow (loading, validating, compiling), raise
    the time-out with ``SDP_TIMEOUT_S`` or ``timeout_s=``.
    """


class CollectiveMismatchError(SdpError):
    """Raised on all ranks when they called different operations, dtypes, sizes or roots.

    The text lists which ranks called what. No output was written, but for one case: across nodes,
    if sizes that may differ from rank to rank do not fit, outputs may have been, and a rank that
    has all it needs raises this from its next call. Remedy: make every rank issue the same
    collectives in the same order; a branch that depends on the rank or on the data is the usual
    cause.
    """


class SharedMemoryError(SdpError):
    """Raised when shared memory cannot be created, mapped or shared with a peer.

    Remedy: free memory or raise the limit that the text names (the container's memory, ``ulimit``),
    or use less with ``SDP_STAGING_BYTES``; ``SDP_REGISTER=0`` keeps buffers out of shared memory.
    """


class RendezvousError(SdpError):
    """Raised when the ranks of a job cannot find or must not accept each other.

    Two processes claim one rank, world sizes differ, the address is held by another job or user, or
    a rank is on another node. Remedy: start all ranks with one launcher; give jobs that share a
    host their own ``SDP_JOB_ID``.
    """


class RendezvousTimeoutError(RendezvousError, CollectiveTimeoutError):
    """Raised when ranks did not come to the rendezvous within the time-out.

    Both a ``RendezvousError`` and a ``CollectiveTimeoutError``. ``ranks`` names who is missing.
    Remedy: check that these ranks were started and with the same ``SDP_JOB_ID`` (or launcher);
    raise ``SDP_TIMEOUT_S`` if they only start late.
    """


_KINDS: dict[str, type[SdpError]] = {
    "peer_lost": PeerLostError,
    "aborted": PeerLostError,
    "timeout": CollectiveTimeoutError,
    "mismatch": CollectiveMismatchError,
    "shared_memory": SharedMemoryError,
    "closed": SdpError,
}


def from_native(
    kind: str,
    text: str,
    ranks: tuple[int, ...],
    op: str,
    seq: int,
    elapsed_s: float,
    group: int = 0,
) -> SdpError:
    """Build the error that the native module is about to raise.

    Args:
        kind: What happened: ``peer_lost``, ``aborted``, ``timeout``, ``mismatch``,
            ``shared_memory`` or ``closed``. An unknown kind gives a plain ``SdpError``: raising
            here would hide the fault that is being reported.
        text: The whole message.
        ranks: The ranks to blame.
        op: Name of the operation.
        seq: Its sequence number.
        elapsed_s: Seconds since it began.
        group: Token of the group that has failed by it; 0: none has.

    Returns:
        The error, not raised.
    """
    error = _KINDS.get(kind, SdpError)(text, ranks=ranks, op=op, seq=seq, elapsed_s=elapsed_s)
    if group:
        with suppress(Exception):  # it must not hide what it explains
            from .flight.failures import explain

            explain(error, group)
    return error


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
        text = str(error)
    except Exception:
        text = "(its text cannot be shown)"
    first = text.strip().splitlines()[0] if text.strip() else ""
    if isinstance(error, SdpError):  # the cause alone
        first = first.partition(" (last completed: ")[0].partition(" Hint: ")[0]
    whole = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return whole if len(whole) <= _REASON_CHARS else f"{whole[: _REASON_CHARS - 3]}..."


def name_ranks(ranks: Iterable[int]) -> str:
    """Write ranks for a message, runs of three and more as a range: ``ranks 1, 4-6``."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(parts) or '(none)'}"
