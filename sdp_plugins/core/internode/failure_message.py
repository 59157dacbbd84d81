"""The message in which a failed rank tells other nodes of its failure."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from .. import _native
from ..errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    SdpError,
    SharedMemoryError,
    SignatureFields,
)

if TYPE_CHECKING:
    from .group_context import GroupContext

FAILURE_MESSAGE_NBYTES = 1024
_MOST_TEXT = 600
_MOST_RANKS = 8
_KINDS = {
    error.kind: error
    for error in (CollectiveTimeoutError, CollectiveMismatchError, SharedMemoryError, PeerLostError)
}
_NOBODY = -1
_SENDER = re.compile(rb'{"rank": (\d{1,9})\b')  # what `pack` writes first


@dataclass(frozen=True)
class FailureMessage:
    """A failure as it is sent to other nodes.

    Attributes:
        rank: The rank that detected the failure; negative if it cannot be read.
        kind: Native name of the kind of failure.
        ranks: The ranks to blame.
        text: The cause alone.
        operation: Fields of the `OpSignature` of the operation that failed there, with global
            ranks; None: no operation failed.
    """

    rank: int
    kind: str
    ranks: tuple[int, ...]
    text: str
    operation: SignatureFields | None = None

    @classmethod
    def of(cls, error: SdpError, context: GroupContext) -> FailureMessage:
        """Describe a failure that this rank has detected or repeats."""
        rank, operation = context.rank, error.origin_operation
        origin = rank if error.origin_rank is None else error.origin_rank
        if origin == rank and error.operation is not None:
            found = _native.OpSignature.of(error.operation)
            operation = found.with_global_ranks(context.global_ranks).fields
        ranks, text = error.ranks[:_MOST_RANKS] or (rank,), error.cause.rstrip(".")[:_MOST_TEXT]
        kind = error.kind if error.kind in _KINDS else "aborted"
        return cls(origin, kind, ranks, text, operation)

    @property
    def signature(self) -> _native.OpSignature | None:
        """The operation that failed at the origin."""
        return _signature(self.operation)

    @property
    def error_type(self) -> type[SdpError]:
        """The error that repeats this failure."""
        return _KINDS.get(self.kind, PeerLostError)

    def pack(self) -> bytes:
        """Encode as ``FAILURE_MESSAGE_NBYTES`` bytes, with as much of the text as fits."""
        room = FAILURE_MESSAGE_NBYTES - len(replace(self, text="")._as_json())
        fitting = replace(self, text=_beginning(encodable(self.text), room))
        return fitting._as_json().ljust(FAILURE_MESSAGE_NBYTES)

    def _as_json(self) -> bytes:
        return json.dumps(asdict(self), ensure_ascii=False).encode()

    @classmethod
    def unpack(cls, data: bytes) -> FailureMessage:
        """Decode the bytes of ``pack``; never raises: unreadable bytes mean a failure, too."""
        try:
            fields = json.loads(data)
            ranks = tuple(map(int, fields["ranks"]))
            kind, text = (encodable(str(fields[name])) for name in ("kind", "text"))
            operation = fields.get("operation")
            if operation is not None:
                operation = _native.OpSignature.of(tuple(operation)).fields
            return cls(int(fields["rank"]), kind, ranks, text, operation)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            found = _SENDER.match(data)
            rank = int(found[1]) if found else _NOBODY
            return cls(rank, "aborted", (rank,), "what it says cannot be read")


def encodable(text: str) -> str:
    """The text with escapes for characters that UTF-8 cannot encode, as in some file names."""
    return text.encode(errors="backslashreplace").decode()


def _beginning(text: str, room: int) -> str:
    """The longest beginning of a text that takes at most `room` bytes in JSON."""
    sizes = (len(json.dumps(char, ensure_ascii=False).encode()) - len('""') for char in text)
    return text[: sum(end <= room for end in accumulate(sizes))]


def _signature(fields: SignatureFields | None) -> _native.OpSignature | None:
    return None if fields is None else _native.OpSignature.of(fields)


def native_failure(error: SdpError, otherwise: str = "closed", group: int = 0) -> _native.Failure:
    """Convert an error into a native failure with the same text.

    Args:
        error: The error.
        otherwise: The kind of the failure, if the error has none that the native core knows.
        group: Token of the group that the failure concerns; 0: none.
    """
    kind = error.kind if error.kind in (*_KINDS, "aborted") else otherwise
    failure = _native.Failure(kind, encodable(error.cause), list(error.ranks))
    if error.origin_rank is not None:
        failure.origin_rank = error.origin_rank
    failure.is_repeat = error.is_repeat
    failure.op, failure.seq, failure.elapsed_s = error.op, max(error.seq, 0), error.elapsed_s
    failure.operation = _signature(error.operation)
    failure.origin_operation = _signature(error.origin_operation)
    failure.group = group
    failure.set_text(
        encodable(error.summary),
        encodable(str(error)),
        list(error.global_ranks),
        -1 if error.global_origin_rank is None else error.global_origin_rank,
    )
    return failure
